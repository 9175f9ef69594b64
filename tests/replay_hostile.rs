//! What a replay feed makes of samplers that panic or lie, of files that are damaged, and of waits that end in nothing.

mod common;

use common::{Watchdog, scratch};
use crossbeam_channel::{Receiver, Sender, unbounded};
use pinring::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);
/// Longer than anything here takes; who waits so long waits for ever.
const LONG: Duration = Duration::from_secs(20);

struct Ids {
    obs: Leaf<i64>,
    now: Column<i64>,
    sample: Sample,
}

impl Ids {
    fn transitions(n: usize) -> Ids {
        let mut step = Step::new();
        let obs = step.observation::<i64>("id", &[]);
        let mut sample = Sample::transition(step, n, 0.9);
        let now = sample.at(obs, 0);
        Ids { obs, now, sample }
    }

    fn builder(&self, capacity: usize, rows: usize, sampler: impl Sampler + 'static) -> FeedBuilder {
        Feed::builder(self.sample.clone()).batch(rows).buffers(1).lanes(1).seed(3).replay(capacity, sampler)
    }

    fn start(&self, capacity: usize, rows: usize, sampler: impl Sampler + 'static) -> Feed {
        self.builder(capacity, rows, sampler).pace(Pace::min_size(1)).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, ids: std::ops::Range<i64>) {
        let lanes = writer.lanes().len();
        for id in ids {
            let mut s = writer.step_timeout(LONG).unwrap();
            s.put(self.obs, &vec![id; lanes]).unwrap();
            s.commit().unwrap();
        }
    }
}

/// The steps that writers are allowed must be enough for what the pace waits for, however far windows reach.
#[test]
fn no_pace_holds_writers_while_there_are_too_few_samples() {
    let _watchdog = Watchdog::new("a pace that both sides wait for", PATIENCE);
    for (n, lanes, pace, rows) in [
        (3, 1, Pace::min_size(100).samples_per_insert(8.0, 0.0), 4),
        (5, 16, Pace::min_size(100).samples_per_insert(8.0, 0.2), 1),
        (3, 64, Pace::min_size(1000).samples_per_insert(1.0, 0.1), 8),
        (3, 1, Pace::min_size(0).samples_per_insert(4.0, 0.0), 4),
    ] {
        let ids = Ids::transitions(n);
        let builder = ids.builder(10_000, rows, Uniform::new()).lanes(lanes).pace(pace);
        let feed = builder.start().unwrap();
        let (mut writer, learner) = (feed.writer(lanes).unwrap(), feed.learner().unwrap());
        let steps = 2000 / lanes as i64;
        let writing = std::thread::spawn(move || {
            for id in 0..steps {
                let Ok(mut s) = writer.step() else { break }; // it was stopped
                s.put(ids.obs, &vec![id; lanes]).unwrap();
                if s.commit().is_err() {
                    break;
                }
            }
            writer
        });
        for _ in 0..20 {
            let batch = learner.next_timeout(LONG);
            assert!(matches!(batch, Ok(Some(_))), "{pace:?}, {lanes} lanes, n = {n}: {batch:?}");
        }
        feed.stop(LONG).unwrap();
        drop(writing.join().unwrap());
    }
}

/// A sampler that panics when it is told to.
#[derive(Debug)]
struct Brittle {
    inner: Uniform,
    insert: Arc<AtomicBool>,
    select: Arc<AtomicBool>,
}

impl Brittle {
    fn new() -> (Brittle, Arc<AtomicBool>, Arc<AtomicBool>) {
        let (insert, select) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        (Brittle { inner: Uniform::new(), insert: insert.clone(), select: select.clone() }, insert, select)
    }
}

impl Sampler for Brittle {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.inner.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        assert!(!self.insert.load(Ordering::Relaxed), "told to panic in insert");
        self.inner.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.inner.remove(item);
    }
    fn selectable(&self) -> usize {
        self.inner.selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        assert!(!self.select.load(Ordering::Relaxed), "told to panic in select");
        self.inner.select(rows, draws, into)
    }
}

/// What the sampler was not told it would select although it is overwritten: so nothing is selected any more.
#[test]
fn a_sampler_that_panicked_is_never_asked_again() {
    let _watchdog = Watchdog::new("a broken sampler", PATIENCE);
    let ids = Ids::transitions(1);
    let (sampler, insert, _) = Brittle::new();
    let feed = ids.start(8, 2, sampler);
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    ids.write(&mut writer, 0..6);
    let keys = learner.next_timeout(LONG).unwrap().unwrap().keys();
    let held = learner.next_timeout(LONG).unwrap().unwrap(); // the only slot: nothing is selected
    ids.write(&mut writer, 6..60); // all of the first are overwritten
    insert.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| feed.peek(&keys))).is_err());
    insert.store(false, Ordering::Relaxed);
    drop(held);
    let error = learner.next_timeout(LONG).unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
}

/// The second store's sampler is asked by the first feed's thread. What that dies of is not the second feed's, nor a writer's.
#[test]
fn a_second_store_is_written_on_when_the_feed_that_mixes_it_in_dies() {
    let _watchdog = Watchdog::new("a mixture that dies", PATIENCE);
    for verb in ["select", "insert"] {
        let (own, other) = (Ids::transitions(1), Ids::transitions(1));
        let (sampler, insert, select) = Brittle::new();
        let told = if verb == "select" { select } else { insert };
        let demos = Store::builder(other.sample.clone(), 8, sampler).build().unwrap();
        let mut demo_writer = demos.writer(1).unwrap();
        other.write(&mut demo_writer, 0..6);
        let builder = || own.builder(8, 2, Uniform::new()).pace(Pace::min_size(0));
        let feed = builder().mix(&demos, 0.5).start().unwrap();
        let learner = feed.learner().unwrap();
        drop(learner.next_timeout(LONG).unwrap().unwrap());
        let held = learner.next_timeout(LONG).unwrap().unwrap();
        told.store(true, Ordering::Relaxed);
        other.write(&mut demo_writer, 6..7);
        drop(held);
        let error = learner.next_timeout(LONG).unwrap_err();
        assert!(error.to_string().contains(&format!("told to panic in {verb}")), "{error}");
        told.store(false, Ordering::Relaxed);
        // So long that writers would tell the sampler themselves of what has changed.
        other.write(&mut demo_writer, 7..70_000);
        demos.clear().unwrap();
        other.write(&mut demo_writer, 70_000..70_006);
        let feed = builder().mix(&demos, 0.5).start().unwrap();
        assert_eq!(feed.learner().unwrap().next_timeout(LONG).unwrap().unwrap().rows_mixed(), 2, "it begins again");
    }
}

#[test]
fn a_load_that_panics_leaves_an_empty_store_that_goes_on() {
    let _watchdog = Watchdog::new("a load that panics", PATIENCE);
    let (ids, path) = (Ids::transitions(1), scratch("panics").join("store.safetensors"));
    let feed = ids.start(8, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..6);
    feed.save(&path).unwrap();
    let (sampler, insert, _) = Brittle::new();
    let feed = ids.start(8, 2, sampler);
    insert.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| feed.load(&path))).is_err());
    insert.store(false, Ordering::Relaxed);
    assert_eq!(feed.load(&path).unwrap().live, 6, "it is no longer being loaded");
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    assert_eq!(learner.next_timeout(LONG).unwrap().unwrap().rows(), 2);
    ids.write(&mut writer, 6..60);
}

/// A damaged byte is refused, or does no harm: what was loaded is drawn, and written on.
#[test]
fn no_damaged_byte_of_a_file_does_harm() {
    let _watchdog = Watchdog::new("damaged files", PATIENCE);
    let ids = Ids::transitions(1);
    let folder = scratch("damaged");
    let (path, broken) = (folder.join("store.safetensors"), folder.join("broken"));
    for prioritized in [false, true] {
        let start = || match prioritized {
            true => ids.start(8, 2, Prioritized::new(1.0, 0.5)),
            false => ids.start(8, 2, Uniform::new()),
        };
        let feed = start();
        ids.write(&mut feed.writer(1).unwrap(), 0..10);
        feed.save(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let mut taken = 0;
        let values: &[u8] = if prioritized { &[0xff] } else { &[0x80, 0x01] };
        for at in data + 8 * 8..whole.len() {
            for value in values {
                let mut bytes = whole.clone();
                bytes[at] ^= value;
                std::fs::write(&broken, bytes).unwrap();
                let feed = start();
                let Ok(loaded) = feed.load(&broken) else { continue };
                taken += 1;
                assert!(loaded.records >= 8);
                let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
                for round in 0..6 {
                    let batch = learner.next_timeout(LONG);
                    assert!(
                        matches!(batch, Ok(Some(_))),
                        "byte {at} ^ {value:#x} of {data}..{}: {batch:?}",
                        whole.len()
                    );
                    drop(batch);
                    ids.write(&mut writer, 100 + 3 * round..103 + 3 * round);
                }
            }
        }
        assert!(taken > 0);
    }
}

/// The header alone: any byte changed to one that matters to its form.
#[test]
fn no_damaged_header_does_harm() {
    let _watchdog = Watchdog::new("damaged headers", PATIENCE);
    let ids = Ids::transitions(1);
    let folder = scratch("headers");
    let (path, broken) = (folder.join("store.safetensors"), folder.join("broken"));
    let feed = ids.start(8, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..10);
    feed.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let other = ids.start(8, 2, Uniform::new());
    for at in 0..data {
        for value in *b"\"9{\xff" {
            let mut bytes = whole.clone();
            bytes[at] = value;
            std::fs::write(&broken, bytes).unwrap();
            match other.load(&broken) {
                Ok(loaded) => assert!(loaded.live <= 10),
                Err(error) => assert_eq!(error.kind(), ErrorKind::File, "{error}"),
            }
        }
    }
    assert_eq!(other.load(&path).unwrap().records, feed.metrics().stored_records);
}

/// Demonstrations that had all their times are like none.
#[test]
fn a_second_store_that_is_used_up_leaves_its_rows_to_the_first() {
    let _watchdog = Watchdog::new("used-up demonstrations", PATIENCE);
    let (own, other) = (Ids::transitions(1), Ids::transitions(1));
    let demos = Store::builder(other.sample.clone(), 100, MaxTimes::new(Uniform::new(), 1)).build().unwrap();
    let mut demo_writer = demos.writer(1).unwrap();
    other.write(&mut demo_writer, 1000..1010);
    let feed = own.builder(100, 4, Uniform::new()).mix(&demos, 1.0).pace(Pace::min_size(0)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    own.write(&mut writer, 0..20);
    let mut of_own = 0;
    for _ in 0..10 {
        let batch = learner.next_timeout(LONG).unwrap().unwrap();
        of_own += batch.slice(own.now).iter().filter(|&&id| id < 1000).count();
    }
    assert!(of_own >= 28, "{of_own}");
}

/// A mixture is of both stores from the first one's first samples on, and of demonstrations again when that is emptied.
#[test]
fn a_clear_lets_a_mixture_go_on_with_the_other_store() {
    let _watchdog = Watchdog::new("cleared in a mixture", PATIENCE);
    let (own, other) = (Ids::transitions(1), Ids::transitions(1));
    let demos = Store::builder(other.sample.clone(), 100, Uniform::new()).build().unwrap();
    other.write(&mut demos.writer(1).unwrap(), 1000..1010);
    let feed = own.builder(100, 4, Uniform::new()).mix(&demos, 0.5).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    (0..3).for_each(|_| drop(learner.next_timeout(LONG).unwrap().unwrap()));
    let held = learner.next_timeout(LONG).unwrap().unwrap(); // the only slot
    own.write(&mut writer, 0..3); // two samples, and a batch has four rows
    drop(held);
    assert_eq!(learner.next_timeout(LONG).unwrap().unwrap().rows_mixed(), 2);
    feed.clear().unwrap();
    assert_eq!(learner.next_timeout(LONG).unwrap().unwrap().rows_mixed(), 4);
}

/// Selects what it was told to forget, or more than it was asked for.
#[derive(Debug)]
struct Liar {
    rows: usize,
}

impl Sampler for Liar {
    fn begin(&mut self, _: u32) -> Result<(), SamplerError> {
        Ok(())
    }
    fn insert(&mut self, _: u32, _: Option<f32>) -> Result<(), PriorityError> {
        Ok(())
    }
    fn remove(&mut self, _: u32) {}
    fn selectable(&self) -> usize {
        1
    }
    fn select(&mut self, rows: usize, _: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        into.extend((0..rows + self.rows).map(|_| Selected { item: 0, probability: 1.0, weight: 1.0 }));
        Pass::GoesOn
    }
}

#[test]
fn a_sampler_that_lies_within_max_times_is_told_so() {
    let _watchdog = Watchdog::new("a lying sampler", PATIENCE);
    for rows in [0, 1] {
        let ids = Ids::transitions(1);
        let feed = ids.start(8, 2, MaxTimes::new(Liar { rows }, 1));
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let _ = catch_unwind(AssertUnwindSafe(|| ids.write(&mut writer, 0..8))); // the feed may have ended meanwhile
        drop(writer);
        let error = loop {
            if let Err(error) = learner.next_timeout(LONG) {
                break error;
            }
        };
        assert!(error.to_string().contains("sampler"), "{error}");
    }
}

/// A queue that says when it is asked how much it holds with one item left, and answers after it was told to.
#[derive(Debug)]
struct AskedFor {
    queue: Fifo,
    asked: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Sampler for AskedFor {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.queue.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        self.queue.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.queue.remove(item);
    }
    fn selectable(&self) -> usize {
        let held = self.queue.selectable();
        if held == 1
            && let Some((asked, answer)) = self.asked.lock().unwrap().take()
        {
            asked.send(()).unwrap();
            answer.recv().unwrap();
        }
        held
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        self.queue.select(rows, draws, into)
    }
}

/// Whoever ends the source while the sampler is asked loses none of what it holds.
#[test]
fn a_source_that_ends_during_a_selection_loses_nothing() {
    let _watchdog = Watchdog::new("an end within a selection", PATIENCE);
    let (ids, (asked, was_asked), (answer, answered)) = (Ids::transitions(1), unbounded(), unbounded());
    let queue = AskedFor { queue: Fifo::new(), asked: Mutex::new(Some((asked, answered))) };
    let feed = ids.builder(8, 4, MaxTimes::new(queue, 1)).pace(Pace::min_size(5)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    let next = || {
        let batch = learner.next_timeout(LONG).unwrap().unwrap();
        batch.view(ids.now).iter().copied().collect::<Vec<i64>>()
    };
    ids.write(&mut writer, 0..6); // five transitions: a batch, and one left over
    assert_eq!(next(), [0, 1, 2, 3]);
    was_asked.recv().unwrap();
    drop(writer);
    answer.send(()).unwrap();
    assert_eq!(next(), [4]);
    assert_eq!(learner.next_timeout(LONG).unwrap_err(), NextError::Ended);
}

/// Says that it takes more memory than there is, and must not be begun then.
#[derive(Debug)]
struct Huge;

impl Sampler for Huge {
    fn begin(&mut self, _: u32) -> Result<(), SamplerError> {
        unreachable!("it was begun before the budget was looked at")
    }
    fn insert(&mut self, _: u32, _: Option<f32>) -> Result<(), PriorityError> {
        Ok(())
    }
    fn remove(&mut self, _: u32) {}
    fn selectable(&self) -> usize {
        0
    }
    fn bytes(&self, items: u32) -> usize {
        assert!(items >= 8);
        usize::MAX / 2
    }
    fn select(&mut self, _: usize, _: &mut Draws, _: &mut Vec<Selected>) -> Pass {
        Pass::GoesOn
    }
}

/// A mistyped capacity is an error before any memory is touched, also where it is the sampler's that is not there.
#[test]
fn a_sampler_that_needs_too_much_memory_is_never_begun() {
    let ids = Ids::transitions(1);
    let refused = |error: Error| assert_eq!(error.kind(), ErrorKind::Memory, "{error}");
    refused(ids.builder(8, 2, Huge).start().unwrap_err());
    refused(ids.builder(8, 2, MaxTimes::new(Huge, 2)).start().unwrap_err());
    refused(Store::builder(ids.sample.clone(), 8, Huge).build().unwrap_err());
    // These would take 100 GB and more, of which the records are a part.
    for sampler in
        [Box::new(Uniform::new()) as Box<dyn Sampler>, Box::new(Prioritized::new(0.6, 0.4)), Box::new(Fifo::new())]
    {
        assert!(sampler.bytes(1 << 31) >= (1_usize << 31).saturating_mul(8));
        let builder = ids.builder(1 << 31, 2, sampler);
        if let (Ok(footprint), Some(available)) = (builder.footprint(), common::available())
            && available >= footprint.ring_bytes + footprint.record_bytes
        {
            println!("skipped: this host has memory for that");
            continue;
        }
        let error = builder.start().unwrap_err();
        // Where addresses have 32 bits, the records alone are more than can be.
        let kind = if cfg!(target_pointer_width = "64") { ErrorKind::Memory } else { ErrorKind::Schema };
        assert_eq!(error.kind(), kind, "{error}");
    }
}

/// Lengths that no slice can have are refused before the values are asked for.
#[test]
fn an_episode_that_cannot_be_is_refused() {
    let ids = Ids::transitions(1);
    let feed = ids.start(8, 2, Uniform::new());
    let mut writer = feed.writer(1).unwrap();
    for len in [0, usize::MAX, (u32::MAX as usize).saturating_add(7), u32::MAX as usize] {
        let error = writer.episode(len).unwrap_err();
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains(&len.to_string()), "{error}");
    }
    let mut episode = writer.episode(u32::MAX as usize - 1).unwrap();
    assert!(episode.put(ids.obs, &[]).is_err());
}

/// Two saves to one path at once: either file, whole.
#[test]
fn two_saves_to_one_path_leave_a_whole_file() {
    let _watchdog = Watchdog::new("two saves", PATIENCE);
    let (ids, path) = (Ids::transitions(1), scratch("two-saves").join("store.safetensors"));
    let feeds = [6, 7].map(|steps| {
        let feed = ids.start(8, 2, Uniform::new());
        ids.write(&mut feed.writer(1).unwrap(), 0..steps);
        feed
    });
    std::thread::scope(|scope| {
        for feed in &feeds {
            scope.spawn(|| (0..20).for_each(|_| assert!(feed.save(&path).unwrap().records > 0)));
        }
    });
    assert!([6, 7].contains(&ids.start(8, 2, Uniform::new()).load(&path).unwrap().records));
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
}

/// Keys outlive their feed, whose memory the next one may get.
#[test]
fn keys_of_a_feed_that_is_gone_are_foreign_to_every_other() {
    let _watchdog = Watchdog::new("keys of feeds that are gone", PATIENCE);
    let ids = Ids::transitions(1);
    let mut kept: Vec<Keys> = Vec::new();
    for _ in 0..30 {
        let feed = ids.start(8, 2, Prioritized::new(1.0, 0.5));
        ids.write(&mut feed.writer(1).unwrap(), 0..6);
        let learner = feed.learner().unwrap();
        for keys in &kept {
            assert_eq!(learner.update_priorities(keys, &[1.0; 2]), Err(UpdateError::Foreign));
        }
        kept.push(learner.next_timeout(LONG).unwrap().unwrap().keys());
        feed.stop(LONG).unwrap();
    }
}

/// Steps that keep a leaf would lie on each other, and writers go on with the last number.
#[test]
fn a_file_whose_steps_are_not_counted_one_by_one_is_refused() {
    let _watchdog = Watchdog::new("steps of a file", PATIENCE);
    let (ids, path) = (Ids::transitions(1), scratch("steps").join("store.safetensors"));
    let feed = ids.start(8, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..8);
    feed.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(whole[8..data].to_vec()).unwrap();
    let (_, rest) = header.split_once("\"pinring/step\"").unwrap();
    let (_, rest) = rest.split_once("\"data_offsets\":[").unwrap();
    let steps = data + rest.split_once(',').unwrap().0.parse::<usize>().unwrap();
    let other = ids.start(8, 2, Uniform::new());
    for (row, number) in [(0, 1), (3, 2), (3, 4), (7, 8), (7, u64::MAX), (0, u64::MAX)] {
        let mut bytes = whole.clone();
        bytes[steps + 8 * row..][..8].copy_from_slice(&u64::to_le_bytes(number));
        std::fs::write(&path, bytes).unwrap();
        let error = other.load(&path).unwrap_err();
        assert!(
            error.to_string().contains("does not follow") || error.to_string().contains("record numbers"),
            "{error}"
        );
        assert_eq!(other.metrics().stored_samples, 0);
    }
}

/// Tells when a load has come to it, and goes on when it is told.
#[derive(Debug)]
struct Halting {
    inner: Uniform,
    reached: std::sync::mpsc::SyncSender<()>,
    go_on: std::sync::mpsc::Receiver<()>,
    halted: bool,
}

impl Sampler for Halting {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.inner.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        if !std::mem::replace(&mut self.halted, true) {
            self.reached.send(()).unwrap();
            self.go_on.recv().unwrap();
        }
        self.inner.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.inner.remove(item);
    }
    fn selectable(&self) -> usize {
        self.inner.selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        self.inner.select(rows, draws, into)
    }
}

#[test]
fn a_writer_made_in_the_middle_of_a_load_takes_nothing_from_it() {
    let _watchdog = Watchdog::new("a writer during a load", PATIENCE);
    let (ids, path) = (Ids::transitions(3), scratch("meanwhile").join("store.safetensors"));
    let feed = ids.start(1000, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..700);
    feed.save(&path).unwrap();
    assert_eq!(feed.metrics().stored_samples, 697);
    let (reached, halts) = std::sync::mpsc::sync_channel(0);
    let (resume, go_on) = std::sync::mpsc::sync_channel(0);
    let again = ids.start(1000, 2, Halting { inner: Uniform::new(), reached, go_on, halted: false });
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| again.load(&path).unwrap());
        halts.recv().unwrap();
        let mut writer = again.writer(1).unwrap();
        assert_eq!(writer.try_step().map(drop).unwrap_err(), StepError::Gathering);
        resume.send(()).unwrap();
        assert_eq!(loading.join().unwrap().live, 700);
        assert_eq!(again.metrics().stored_samples, 697);
        ids.write(&mut writer, 700..710);
        assert_eq!(again.metrics().stored_samples, 697 + 7);
    });
}

/// Not of what had come by then alone: nothing is left of the file.
#[test]
fn a_clear_in_the_middle_of_a_load_is_one_of_all_of_it() {
    let _watchdog = Watchdog::new("a clear during a load", PATIENCE);
    let (ids, path) = (Ids::transitions(3), scratch("cleared").join("store.safetensors"));
    let feed = ids.start(1000, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..700);
    feed.save(&path).unwrap();
    let (reached, halts) = std::sync::mpsc::sync_channel(0);
    let (resume, go_on) = std::sync::mpsc::sync_channel(0);
    let again = ids.start(1000, 2, Halting { inner: Uniform::new(), reached, go_on, halted: false });
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| again.load(&path).unwrap());
        halts.recv().unwrap();
        again.clear().unwrap();
        resume.send(()).unwrap();
        assert_eq!(loading.join().unwrap().records, 700);
    });
    assert_eq!(again.metrics().stored_samples, 0);
    ids.write(&mut again.writer(1).unwrap(), 700..710);
    assert_eq!(again.metrics().stored_samples, 7);
}

/// Of a file of another setting, the pace does not owe all the rows that its steps stand for.
#[test]
fn a_loaded_data_set_holds_no_writer_until_all_of_it_was_sampled() {
    let _watchdog = Watchdog::new("the pace of a data set", PATIENCE);
    let (ids, path) = (Ids::transitions(1), scratch("data-set").join("store.safetensors"));
    let feed = ids.start(1000, 2, Uniform::new());
    ids.write(&mut feed.writer(1).unwrap(), 0..700);
    feed.save(&path).unwrap();
    for tolerance in [0.0, 0.5] {
        let pace = Pace::min_size(10).samples_per_insert(8.0, tolerance);
        let other = ids.builder(800, 2, Uniform::new()).pace(pace).start().unwrap();
        assert!(!other.load(&path).unwrap().resumed);
        let (mut writer, learner) = (other.writer(1).unwrap(), other.learner().unwrap());
        let mut taken = 0;
        for id in 700..720 {
            // A step makes four batches due; at first it owes 40 rows at the most.
            let mut step = loop {
                match writer.try_step() {
                    Ok(step) => break step,
                    Err(_) => assert!(matches!(learner.next_timeout(LONG), Ok(Some(_)))),
                }
                taken += 1;
            };
            step.put(ids.obs, &[id]).unwrap();
            step.commit().unwrap();
        }
        assert!(taken <= 4 * 20 + 20 + 1, "{taken} batches");
    }
}
