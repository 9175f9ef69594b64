//! Batches with rows of a second store: how many, which, in what order, with whose priorities, and what becomes of them
//! when either store is empty, cleared or gone.

mod common;

use common::{SetAtEnd, Watchdog};
use pinring::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const ROWS: usize = 8;

/// Observations that count up: of demonstrations from 1,000,000 on.
struct Kind {
    obs: Leaf<i64>,
    now: Column<i64>,
    next: Column<i64>,
    weight: Column<f32>,
    sample: Sample,
}

/// The first of them: no writer here writes as many.
const DEMOS: i64 = 1 << 40;

impl Kind {
    fn new() -> Kind {
        let mut step = Step::new();
        let obs = step.observation::<i64>("obs", &[]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let (now, next, weight) = (sample.at(obs, 0), sample.next(obs), sample.weight());
        Kind { obs, now, next, weight, sample }
    }

    fn builder(&self) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(1).lanes(1).seed(2);
        builder.replay(100, Prioritized::new(1.0, 1.0))
    }

    fn store(&self) -> Store {
        Store::builder(self.sample.clone(), 100, Prioritized::new(1.0, 1.0)).seed(2).build().unwrap()
    }

    fn write(&self, writer: &mut Writer, ids: std::ops::Range<i64>) {
        for id in ids {
            let mut s = writer.step().unwrap();
            s.put(self.obs, &[id]).unwrap();
            s.commit().unwrap();
        }
    }

    /// Rows of a batch that are demonstrations: the last ones, and whole.
    fn check(&self, batch: &Batch) -> usize {
        assert_eq!(batch.rows(), ROWS);
        let (now, next) = (batch.slice(self.now), batch.slice(self.next));
        let own = ROWS - batch.rows_mixed();
        for row in 0..ROWS {
            assert_eq!(now[row] >= DEMOS, row >= own, "row {row} of {now:?}, {own} of them own");
            assert_eq!(next[row], now[row] + 1);
            assert!(batch.slice(self.weight)[row] > 0.0);
        }
        for (row, step) in batch.first_steps().enumerate() {
            assert_eq!(now[row] % DEMOS, step as i64);
        }
        ROWS - own
    }
}

/// Two kinds that are declared alike, a feed of the first, and a store of the second with 50 demonstrations.
fn feeds(fraction: f64, pace: Option<Pace>) -> (Kind, Feed, Writer, Kind, Store, Writer) {
    let (demo_kind, kind) = (Kind::new(), Kind::new());
    let demos = demo_kind.store();
    let mut demo_writer = demos.writer(1).unwrap();
    demo_kind.write(&mut demo_writer, DEMOS..DEMOS + 51);
    let builder = kind.builder().mix(&demos, fraction);
    let builder = if let Some(pace) = pace { builder.pace(pace) } else { builder };
    let feed = builder.start().unwrap();
    let writer = feed.writer(1).unwrap();
    (kind, feed, writer, demo_kind, demos, demo_writer)
}

#[test]
fn the_last_rows_are_the_second_stores_as_many_as_were_asked_for() {
    let _watchdog = Watchdog::new("mixture", Duration::from_secs(60));
    for (fraction, of_ten) in [(0.5, 40), (0.25, 20), (0.3, 24), (0.0, 0), (1.0, 80)] {
        let (kind, feed, mut writer, _demo_kind, _demos, _demo_writer) = feeds(0.5, None);
        let learner = feed.learner().unwrap();
        kind.write(&mut writer, 0..60);
        feed.set_fraction(fraction).unwrap();
        for _ in 0..3 {
            kind.check(&learner.next_batch().unwrap()); // selected before, or carrying a part
        }
        let taken: usize = (0..10).map(|_| kind.check(&learner.next_batch().unwrap())).sum();
        assert!(taken.abs_diff(of_ten) <= 1, "{taken} of 80 rows at {fraction}");
    }
}

#[test]
fn an_empty_store_leaves_its_rows_to_the_other() {
    let _watchdog = Watchdog::new("empty", Duration::from_secs(60));
    // A pace counts the demonstrations' rows too: so many batches ahead, and no more without a step.
    let pace = Pace::min_size(0).updates_per_step(1.0, 8.0);
    let (kind, feed, _writer, _demo_kind, _demos, _demo_writer) = feeds(0.5, Some(pace));
    let learner = feed.learner().unwrap();
    (0..8).for_each(|_| assert_eq!(kind.check(&learner.next_batch().unwrap()), ROWS));
    let waits = learner.next_timeout(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(waits, NextError::Pace(PaceWait::ForWriters { sampled: 64, .. })), "{waits:?}");
    // Training begins on the demonstrations alone.
    let (kind, feed, mut writer, _demo_kind, demos, _demo_writer) = feeds(0.5, Some(Pace::min_size(0)));
    let learner = feed.learner().unwrap();
    (0..6).for_each(|_| assert_eq!(kind.check(&learner.next_batch().unwrap()), ROWS));
    kind.write(&mut writer, 0..20);
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    (0..6).for_each(|_| assert_eq!(kind.check(&learner.next_batch().unwrap()), ROWS / 2));
    kind.write(&mut writer, 20..40);
    // Without demonstrations batches are whole all the same.
    demos.clear().unwrap();
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    (0..6).for_each(|_| assert_eq!(kind.check(&learner.next_batch().unwrap()), 0));
}

#[test]
fn a_learner_that_waits_for_both_gets_what_comes_first() {
    let _watchdog = Watchdog::new("late demonstrations", Duration::from_secs(60));
    let (demo_kind, kind) = (Kind::new(), Kind::new());
    let demos = demo_kind.store();
    let feed = kind.builder().mix(&demos, 0.5).pace(Pace::min_size(0)).start().unwrap();
    let learner = feed.learner().unwrap();
    assert!(learner.next_timeout(Duration::from_millis(20)).is_err());
    let mut writer = demos.writer(1).unwrap();
    demo_kind.write(&mut writer, DEMOS..DEMOS + 5);
    assert_eq!(kind.check(&learner.next_batch().unwrap()), ROWS);
}

#[test]
fn keys_tell_whose_priorities_they_are() {
    let _watchdog = Watchdog::new("keys", Duration::from_secs(60));
    let (kind, feed, mut writer, demo_kind, _demos, mut demo_writer) = feeds(0.5, None);
    let learner = feed.learner().unwrap();
    kind.write(&mut writer, 0..60);
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    let batch = learner.next_batch().unwrap();
    let (keys, now) = (batch.keys(), batch.slice(kind.now).to_vec());
    let priorities: Vec<f32> =
        now.iter().map(|&id| if id >= DEMOS { 7.0 } else { 3.0 } + (id % 50) as f32 / 64.0).collect();
    let updated = learner.update_priorities(&keys, &priorities).unwrap();
    assert_eq!((updated.applied, updated.stale), (ROWS, 0));
    let peeked: Vec<f32> = feed.peek(&keys).unwrap().into_iter().map(Option::unwrap).collect();
    assert_eq!(peeked, priorities);
    drop(batch);
    // The demonstrations are overwritten, the own steps are not.
    demo_kind.write(&mut demo_writer, DEMOS + 51..DEMOS + 300);
    let updated = learner.update_priorities(&keys, &priorities).unwrap();
    assert_eq!((updated.applied, updated.stale), (ROWS / 2, ROWS / 2));
    let peeked = feed.peek(&keys).unwrap();
    assert_eq!(peeked.iter().map(Option::is_some).collect::<Vec<_>>(), [[true; 4], [false; 4]].concat());
}

#[test]
fn both_stores_are_written_meanwhile() {
    let _watchdog = Watchdog::new("both are written", Duration::from_secs(100));
    let (kind, feed, mut writer, demo_kind, _demos, mut demo_writer) = feeds(0.5, None);
    let (learner, over) = (feed.learner().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (kind, end) = (&kind, SetAtEnd(&over));
        let writing = [
            scope.spawn({
                let over = &over;
                move || {
                    (0..)
                        .take_while(|_| !over.load(Ordering::Relaxed))
                        .for_each(|id| kind.write(&mut writer, id..id + 1))
                }
            }),
            scope.spawn({
                let over = &over;
                move || {
                    let ids = (DEMOS + 51..).take_while(|_| !over.load(Ordering::Relaxed));
                    ids.for_each(|id| demo_kind.write(&mut demo_writer, id..id + 1));
                }
            }),
        ];
        for _ in 0..2000 {
            kind.check(&learner.next_batch().unwrap());
        }
        drop(end);
        writing.into_iter().for_each(|writing| writing.join().unwrap());
    });
}

#[test]
fn what_cannot_be_mixed_is_refused() {
    let kind = Kind::new();
    let demos = Kind::new().store();
    let refused = |builder: FeedBuilder, text: &str| {
        let error = builder.start().unwrap_err();
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains(text), "{error}");
    };
    for fraction in [-0.1, 1.1, f64::NAN] {
        refused(kind.builder().mix(&demos, fraction), "it must be from 0 to 1");
    }
    let mut step = Step::new();
    let obs = step.observation::<i64>("obs", &[]);
    let mut other = Sample::transition(step, 2, 0.9);
    other.at(obs, 0);
    let builder = Feed::builder(other).batch(ROWS).lanes(1).replay(100, Uniform::new());
    refused(builder.mix(&demos, 0.5), "are not declared as these are");
    let mut step = Step::new();
    step.leaf::<u8>("x", &[]);
    refused(Feed::builder(Sample::step(step)).mix(&demos, 0.5), "are of stored steps");
    assert_eq!(kind.builder().start().unwrap().set_fraction(0.5).unwrap_err().kind(), ErrorKind::Misuse);
    let feed = kind.builder().mix(&demos, 0.5).start().unwrap();
    assert_eq!(feed.set_fraction(2.0).unwrap_err().kind(), ErrorKind::Config);
}

/// With the first sample of its own a feed goes on: there is no number of samples at which a mixture stands still.
#[test]
fn a_mixture_without_a_pace_waits_for_no_number_of_samples() {
    let _watchdog = Watchdog::new("a mixture without a pace", Duration::from_secs(60));
    let (kind, feed, mut writer, _demos, _store, _demo_writer) = feeds(0.5, None);
    let learner = feed.learner().unwrap();
    for step in 0..2 * ROWS as i64 {
        kind.write(&mut writer, step..step + 1);
        for _ in 0..3 {
            let batch = learner.next_batch().unwrap();
            kind.check(&batch);
        }
    }
    assert_eq!(learner.next_batch().unwrap().rows_mixed(), ROWS / 2);
}

/// Takes a batch of whole rows within a few seconds.
fn next(kind: &Kind, learner: &Learner) -> usize {
    let batch = learner.next_timeout(Duration::from_secs(10)).unwrap().expect("a batch comes");
    kind.check(&batch)
}

/// An own store whose sampler has used up what there is, or that has no priority above 0, leaves its rows to the other.
#[test]
fn an_own_store_that_is_used_up_leaves_its_rows_to_the_other() {
    let _watchdog = Watchdog::new("used up", Duration::from_secs(60));
    for fraction in [0.5, 1.0] {
        let (demo_kind, kind) = (Kind::new(), Kind::new());
        let demos = demo_kind.store();
        let builder =
            kind.builder().replay(100, MaxTimes::new(Uniform::new(), 1)).mix(&demos, fraction).pace(Pace::min_size(16));
        let feed = builder.start().unwrap();
        let (learner, mut writer) = (feed.learner().unwrap(), feed.writer(1).unwrap());
        kind.write(&mut writer, 0..17);
        assert_eq!((next(&kind, &learner), next(&kind, &learner)), (0, 0), "nothing is mixed in yet");
        assert!(!matches!(learner.next_timeout(Duration::from_millis(50)), Ok(Some(_))), "and then there is nothing");
        // Nobody calls the feed when the other store is written.
        let mut demo_writer = demos.writer(1).unwrap();
        demo_kind.write(&mut demo_writer, DEMOS..DEMOS + 51);
        (0..5).for_each(|_| assert_eq!(next(&kind, &learner), ROWS, "{fraction}"));
        // What comes is taken again, as much of it as there should be.
        kind.write(&mut writer, 17..17 + 40);
        let own: usize = (0..40).map(|_| ROWS - next(&kind, &learner)).sum();
        assert_eq!(own, if fraction == 0.5 { 40 } else { 0 });
        if fraction == 0.5 {
            drop(writer);
            let end = (0..20).find_map(|_| learner.next_batch().err());
            assert!(matches!(end, Some(NextError::Ended)), "nobody writes any more: {end:?}");
        }
    }
}

#[test]
fn own_steps_without_a_priority_above_0_leave_their_rows_to_the_other() {
    let _watchdog = Watchdog::new("zero", Duration::from_secs(60));
    let (demo_kind, kind) = (Kind::new(), Kind::new());
    let demos = demo_kind.store();
    let builder = kind.builder().replay(100, Prioritized::new(1.0, 1.0).floor(0.0)).mix(&demos, 0.5);
    let feed = builder.start().unwrap();
    let (learner, mut writer) = (feed.learner().unwrap(), feed.writer(1).unwrap());
    kind.write(&mut writer, 0..9);
    let mut zeroed = 0;
    while let Ok(Some(batch)) = learner.next_timeout(Duration::from_secs(1)) {
        learner.update_priorities(&batch.keys(), &[0.0; ROWS]).unwrap();
        zeroed += 1;
    }
    assert!(zeroed > 0);
    let mut demo_writer = demos.writer(1).unwrap();
    demo_kind.write(&mut demo_writer, DEMOS..DEMOS + 51);
    (0..5).for_each(|_| assert_eq!(next(&kind, &learner), ROWS));
    // A step of one's own that is worth something is back.
    kind.write(&mut writer, 9..20);
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    (0..5).for_each(|_| assert_eq!(next(&kind, &learner), ROWS / 2));
}

/// A sampler that uses items up gives its whole part of a batch or none, from the first step on: each step once, no batch short.
#[test]
fn an_own_sampler_that_uses_items_up_waits_for_its_part() {
    let _watchdog = Watchdog::new("whole parts", Duration::from_secs(60));
    for (pace, part, demonstrations) in [(None, 4, 51), (None, 8, 0), (Some(Pace::min_size(1)), 4, 51)] {
        let (demo_kind, kind) = (Kind::new(), Kind::new());
        let demos = demo_kind.store();
        let mut demo_writer = demos.writer(1).unwrap();
        demo_kind.write(&mut demo_writer, DEMOS..DEMOS + demonstrations);
        let builder = kind.builder().replay(100, MaxTimes::new(Fifo::new(), 1)).mix(&demos, 0.5);
        let feed = if let Some(pace) = pace { builder.pace(pace) } else { builder }.start().unwrap();
        let (learner, mut writer) = (feed.learner().unwrap(), feed.writer(1).unwrap());
        let (mut own, mut written) = (Vec::new(), 0);
        while own.len() < 40 {
            if written < 41 {
                kind.write(&mut writer, written..written + 1);
                written += 1;
            }
            // Some were selected before the step.
            for _ in 0..4 {
                let Ok(Some(batch)) = learner.next_timeout(Duration::from_millis(10)) else { break };
                let of_batch = ROWS - kind.check(&batch);
                assert!([0, part].contains(&of_batch), "{of_batch} own rows of {written} steps, {pace:?}");
                own.extend_from_slice(&batch.slice(kind.now)[..of_batch]);
            }
        }
        assert!(own.into_iter().eq(0..40), "{pace:?}");
    }
}

/// What a second sampler that uses items up has left is less than its part: the feed's own rows make the batch whole.
#[test]
fn a_batch_is_whole_where_the_second_store_runs_out() {
    let _watchdog = Watchdog::new("runs out", Duration::from_secs(60));
    let (demo_kind, kind) = (Kind::new(), Kind::new());
    let sampler = MaxTimes::new(Uniform::new(), 1);
    let demos = Store::builder(demo_kind.sample.clone(), 100, sampler).seed(2).build().unwrap();
    let mut demo_writer = demos.writer(1).unwrap();
    demo_kind.write(&mut demo_writer, DEMOS..DEMOS + 11);
    let feed = kind.builder().mix(&demos, 0.5).pace(Pace::min_size(40)).start().unwrap();
    let learner = feed.learner().unwrap();
    kind.write(&mut feed.writer(1).unwrap(), 0..60);
    let mixed: Vec<usize> = (0..6).map(|_| next(&kind, &learner)).collect();
    assert_eq!(mixed, [4, 4, 2, 0, 0, 0]);
}

/// Claims that there is something, and then has nothing.
#[derive(Debug)]
struct Empty(Arc<AtomicUsize>);

impl Sampler for Empty {
    fn begin(&mut self, _items: u32) -> std::result::Result<(), SamplerError> {
        Ok(())
    }
    fn insert(&mut self, _item: u32, _priority: Option<f32>) -> std::result::Result<(), PriorityError> {
        Ok(())
    }
    fn remove(&mut self, _item: u32) {}
    fn selectable(&self) -> usize {
        1
    }
    fn select(&mut self, _rows: usize, _draws: &mut Draws, _into: &mut Vec<Selected>) -> Pass {
        self.0.fetch_add(1, Ordering::Relaxed);
        Pass::GoesOn
    }
}

/// A sampler of the second store's that has nothing, whatever it claims, is asked now and then and not without a pause; and
/// what the first store gets is delivered all the same.
#[test]
fn a_second_sampler_that_has_nothing_is_asked_now_and_then() {
    let _watchdog = Watchdog::new("nothing mixed in", Duration::from_secs(60));
    let (kind, demos) = (Kind::new(), Kind::new());
    let asked = Arc::new(AtomicUsize::new(0));
    let second = Store::builder(demos.sample.clone(), 100, Empty(asked.clone())).build().unwrap();
    let mut writer = second.writer(1).unwrap();
    demos.write(&mut writer, DEMOS..DEMOS + 10);
    let begun = Instant::now();
    let feed = kind.builder().mix(&second, 0.5).start().unwrap();
    let learner = feed.learner().unwrap();
    assert!(!matches!(learner.next_timeout(Duration::from_millis(200)), Ok(Some(_))));
    let (times, most) = (asked.load(Ordering::Relaxed), begun.elapsed().as_millis() as usize);
    assert!((1..=most).contains(&times), "asked {times} times in {most} ms");
    kind.write(&mut feed.writer(1).unwrap(), 0..20);
    let batch = learner.next_batch().unwrap();
    assert!(batch.rows() > 0 && batch.rows_mixed() == 0);
    feed.stop(Duration::from_secs(20)).unwrap();
}
