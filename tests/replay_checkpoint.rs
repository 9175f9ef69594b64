//! A store on disk: saved while it runs, loaded into the same and into others, cut anywhere, and written by Python.
#![cfg(unix)]

mod common;
#[path = "common/data.rs"]
mod data;

use common::{SetAtEnd, Watchdog, scratch};
use data::{Rng, mix};
use pinring::*;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);

struct Ids {
    obs: Leaf<i64>,
    done: Leaf<bool>,
    column: Column<i64>,
    sample: Sample,
}

impl Ids {
    fn new() -> Ids {
        let mut step = Step::new();
        let obs = step.observation::<i64>("id", &[]);
        let done = step.leaf::<bool>("done", &[2]);
        let mut sample = Sample::sequence(step, 1, 1);
        let column = sample.at(obs, 0);
        Ids { obs, done, column, sample }
    }

    /// Two lanes, so that a chunk is one record and the last `capacity` steps live, exactly.
    fn start(&self, capacity: usize, sampler: impl Sampler + 'static) -> Feed {
        let builder = Feed::builder(self.sample.clone()).batch(20).buffers(1).lanes(2).seed(9);
        builder.replay(capacity, sampler).pace(Pace::min_size(1)).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, ids: std::ops::Range<i64>) {
        for id in ids {
            let mut s = writer.step().unwrap();
            s.put(self.obs, &[id]).unwrap();
            s.put(self.done, &[id % 2 == 0, false]).unwrap();
            s.priority(0, (id + 1) as f32).unwrap();
            s.commit().unwrap();
        }
    }

    fn rows(&self, learner: &Learner) -> Vec<i64> {
        learner.next_batch().unwrap().slice(self.column).to_vec()
    }

    fn live(&self, learner: &Learner) -> Vec<i64> {
        drop(learner.next_batch().unwrap());
        let mut ids: Vec<i64> = (0..30).flat_map(|_| self.rows(learner)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

fn each(test: impl Fn(&Ids, &dyn Fn(usize) -> Feed)) {
    let _watchdog = Watchdog::new("checkpoint", PATIENCE);
    let ids = Ids::new();
    test(&ids, &|capacity| ids.start(capacity, Uniform::new()));
    test(&ids, &|capacity| ids.start(capacity, WithoutReplacement::new()));
    test(&ids, &|capacity| ids.start(capacity, Prioritized::new(1.0, 0.5)));
}

/// Saved at 10 of 8, loaded twice: 8 live, the next step overwrites the oldest, and draws are those of the saved feed.
#[test]
fn a_loaded_store_goes_on_where_the_saved_one_was() {
    each(|ids, start| {
        let path = scratch("resume").join("store.safetensors");
        let feed = start(8);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.write(&mut writer, 0..10);
        (0..5).for_each(|_| drop(learner.next_batch().unwrap()));
        let held = learner.next_batch().unwrap(); // the only slot: nothing is selected ahead
        let saved = feed.save(&path).unwrap();
        assert_eq!((saved.records, saved.bytes), (8, std::fs::metadata(&path).unwrap().len()));
        drop(held);
        let expected: Vec<Vec<i64>> = (0..10).map(|_| ids.rows(&learner)).collect();

        let again = start(8);
        for _ in 0..2 {
            let loaded = again.load(&path).unwrap();
            assert_eq!((loaded.records, loaded.live, loaded.resumed), (8, 8, true));
        }
        let metrics = again.metrics();
        assert_eq!((metrics.stored_samples, metrics.stored_records), (8, 8), "replaced, not appended");
        let (mut writer, learner) = (again.writer(1).unwrap(), again.learner().unwrap());
        let drawn: Vec<Vec<i64>> = (0..10).map(|_| ids.rows(&learner)).collect();
        assert_eq!(drawn, expected);
        assert_eq!(ids.live(&learner), (2..10).collect::<Vec<_>>());
        ids.write(&mut writer, 10..11);
        assert_eq!(ids.live(&learner), (3..11).collect::<Vec<_>>());
    });
}

#[test]
fn priorities_come_back_in_a_store_of_another_size_too() {
    let _watchdog = Watchdog::new("priorities", PATIENCE);
    let (ids, path) = (Ids::new(), scratch("priorities").join("store.safetensors"));
    let feed = ids.start(8, Prioritized::new(1.0, 0.5));
    ids.write(&mut feed.writer(1).unwrap(), 0..10);
    feed.save(&path).unwrap();
    for (capacity, oldest) in [(8, 2), (5, 5), (100, 2)] {
        let feed = ids.start(capacity, Prioritized::new(1.0, 0.5));
        let loaded = feed.load(&path).unwrap();
        assert_eq!((loaded.live, loaded.resumed), (10 - oldest as usize, capacity == 8), "the current limits count");
        let learner = feed.learner().unwrap();
        drop(learner.next_batch().unwrap());
        let batch = learner.next_batch().unwrap();
        let priorities = feed.peek(&batch.keys()).unwrap();
        for (&id, priority) in batch.slice(ids.column).iter().zip(priorities) {
            assert_eq!(priority, Some((id + 1) as f32));
        }
        drop(batch);
        assert_eq!(ids.live(&learner), (oldest..10).collect::<Vec<_>>());
    }
    // A sampler of another kind takes the steps alone.
    let feed = ids.start(8, Fifo::new());
    assert!(!feed.load(&path).unwrap().resumed);
    assert_eq!(feed.metrics().stored_samples, 8);
}

/// Cut at any length, or not of these steps: an error, and everything is as it was.
#[test]
fn a_file_that_does_not_fit_changes_nothing() {
    each(|ids, start| {
        let folder = scratch("foreign");
        let (path, broken) = (folder.join("store.safetensors"), folder.join("broken"));
        let feed = start(8);
        ids.write(&mut feed.writer(1).unwrap(), 0..10);
        feed.save(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();

        let other = start(8);
        ids.write(&mut other.writer(1).unwrap(), 50..55);
        let refused = |bytes: &[u8], what: &str| {
            std::fs::write(&broken, bytes).unwrap();
            let error = other.load(&broken).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::File, "{what}: {error}");
            assert!(error.to_string().contains("broken"), "{error}");
            assert_eq!(other.metrics().stored_samples, 5, "{what}");
        };
        for end in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
            refused(&whole[..end], &format!("cut at {end}"));
        }
        let replaced = |from: &str, to: &str| {
            let at =
                whole.windows(from.len()).position(|w| w == from.as_bytes()).unwrap_or_else(|| panic!("no {from}"));
            [&whole[..at], to.as_bytes(), &whole[at + from.len()..]].concat()
        };
        refused(&replaced("\"id\"", "\"di\""), "another leaf");
        refused(&replaced("store 1", "store 2"), "another version");
        refused(&replaced("I64", "U64"), "another element type");
        refused(b"hello", "a text");
        let data = whole.len() - (whole.len() - 8 - u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize);
        let mut lied = whole.clone();
        lied[data + 8 * 8] = 7; // the first bool
        refused(&lied, "a bool that is none");
        assert_eq!(other.load(folder.join("missing")).unwrap_err().kind(), ErrorKind::File);

        let learner = other.learner().unwrap();
        assert_eq!(ids.live(&learner), (50..55).collect::<Vec<_>>(), "still there");
        assert_eq!(other.load(&path).unwrap().live, 8, "and a file that fits is taken");
        assert_eq!(ids.live(&learner), (2..10).collect::<Vec<_>>());
    });
}

/// Samples never bootstrap from a final observation that nobody gave: not through a file either.
#[test]
fn final_observations_that_may_be_missing_are_not_loaded_where_they_are_read() {
    let _watchdog = Watchdog::new("finals in a file", PATIENCE);
    let path = scratch("finals").join("store.safetensors");
    let start = |reads: bool| {
        let mut step = Step::new();
        let obs = step.observation::<f32>("obs", &[]);
        let mut sample = Sample::transition(step, 1, 0.9);
        sample.at(obs, 0);
        if reads {
            sample.next(obs);
        }
        let feed = Feed::builder(sample).batch(1).lanes(1).replay(20, Uniform::new()).start().unwrap();
        (feed, obs)
    };
    let write = |feed: &Feed, obs, end: Option<End>, given: bool| {
        let mut writer = feed.writer(1).unwrap();
        for value in [1.0, 2.0] {
            let mut s = writer.step().unwrap();
            s.put(obs, &[value]).unwrap();
            if let Some(end) = end.filter(|_| value == 2.0) {
                let mut last = s.end(0, end);
                if given {
                    last.put(obs, &[3.0]).unwrap();
                }
            }
            s.commit().unwrap();
        }
    };
    for (reads, end, given, fits) in [
        (false, Some(End::Truncated), false, false),
        (false, Some(End::Truncated), true, false), // whether every writer gave them is not known
        (false, Some(End::Terminated), false, true),
        (false, None, false, true),
        (true, Some(End::Truncated), true, true),
    ] {
        let (feed, obs) = start(reads);
        write(&feed, obs, end, given);
        feed.save(&path).unwrap();
        assert!(start(false).0.load(&path).is_ok(), "nothing reads them there");
        match start(true).0.load(&path) {
            Ok(_) => assert!(fits, "{end:?}, given: {given}"),
            Err(error) => assert!(!fits && error.to_string().contains("final observations of leaf `obs`"), "{error}"),
        }
    }
}

#[test]
fn what_cannot_be_saved_or_loaded_now_says_so() {
    let _watchdog = Watchdog::new("misuse", PATIENCE);
    let (ids, folder) = (Ids::new(), scratch("misuse"));
    let path = folder.join("store.safetensors");
    let feed = ids.start(8, Uniform::new());
    let mut writer = feed.writer(1).unwrap();
    ids.write(&mut writer, 0..3);
    feed.save(&path).unwrap();
    let error = feed.load(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("1 lanes have one"), "{error}");
    assert_eq!(feed.save(folder.join("no such folder/x")).unwrap_err().kind(), ErrorKind::File);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no draft is left");
    feed.save(&path).unwrap(); // over the old one
    feed.stop(PATIENCE).unwrap();
    assert_eq!(feed.save(&path).unwrap_err().kind(), ErrorKind::Stopped);
    drop(writer);
    assert_eq!(feed.load(&path).unwrap_err().kind(), ErrorKind::Stopped);
    let mut step = Step::new();
    step.leaf::<u8>("x", &[]);
    let fifo = Feed::builder(Sample::step(step)).start().unwrap();
    assert_eq!(fifo.save(&path).unwrap_err().kind(), ErrorKind::Misuse);
}

/// Fails when it is told to, in the middle of a selection.
#[derive(Debug)]
struct Failing(Prioritized, Arc<AtomicBool>);

impl Sampler for Failing {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.0.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        self.0.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.0.remove(item);
    }
    fn priority(&self, item: u32) -> Option<f32> {
        self.0.priority(item)
    }
    fn selectable(&self) -> usize {
        self.0.selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        assert!(!self.1.load(Ordering::Relaxed), "a wheel came off");
        self.0.select(rows, draws, into)
    }
}

/// What was stored is not lost with the source, the learner, or an actor: it can be saved until the feed is stopped.
#[test]
fn a_store_is_saved_behind_every_end_but_the_stop() {
    let _watchdog = Watchdog::new("saved behind the end", PATIENCE);
    let (ids, folder) = (Ids::new(), scratch("behind-the-end"));
    for (end, kind) in [("source", ErrorKind::Ended), ("learner", ErrorKind::Stopped), ("fault", ErrorKind::Fault)] {
        let path = folder.join(end);
        let fails = Arc::new(AtomicBool::new(false));
        let sampler = Failing(Prioritized::new(1.0, 0.5), fails.clone());
        let builder = Feed::builder(ids.sample.clone()).batch(20).buffers(1).lanes(2).replay(8, sampler);
        let feed = builder.pace(Pace::min_size(1).samples_per_insert(20.0, 400.0)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.write(&mut writer, 0..10);
        drop(learner.next_batch().unwrap());
        match end {
            "source" => {
                drop(writer);
                while let Ok(batch) = learner.next_batch() {
                    drop(batch);
                }
            }
            "learner" => drop((learner, writer)),
            _ => {
                fails.store(true, Ordering::Relaxed);
                while learner.next_batch().is_ok() {}
                drop(writer);
            }
        }
        assert_eq!(Error::from(feed.closed().unwrap()).kind(), kind);
        let saved = feed.save(&path).unwrap();
        assert_eq!((saved.records, feed.save(&path).unwrap().records), (8, 8));
        // A load comes too late, and takes nothing from what can still be saved.
        assert_eq!(feed.load(&path).unwrap_err().kind(), kind, "{end}");
        assert_eq!(feed.save(&path).unwrap().records, 8, "{end}");
        // The record numbers and the priorities are those of the feed that ended.
        let other = ids.start(8, Prioritized::new(1.0, 0.5));
        assert_eq!(other.load(&path).unwrap().live, 8);
        let other_learner = other.learner().unwrap();
        assert_eq!(ids.live(&other_learner), (2..10).collect::<Vec<_>>());
        let batch = other_learner.next_batch().unwrap();
        let items = other.peek(&batch.keys()).unwrap();
        let of: Vec<_> = batch.slice(ids.column).iter().map(|&id| Some((id + 1) as f32)).collect();
        assert_eq!(items, of);
        feed.stop(PATIENCE).unwrap();
        assert_eq!(feed.save(&path).unwrap_err().kind(), kind, "{end}");
    }
}

/// Writers and a learner go on while the store is saved, over and over; each file is a whole store.
#[test]
fn a_store_is_saved_while_it_is_written_and_sampled() {
    let _watchdog = Watchdog::new("saving while serving", PATIENCE);
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[16]);
    let mut sample = Sample::transition(step, 2, 0.9);
    let (window, next) = (sample.window(obs, -2..1, Pad::Repeat), sample.next(obs));
    let builder = || Feed::builder(sample.clone()).batch(16).buffers(2).lanes(3).replay(600, Uniform::new());
    let check = |batch: &Batch| {
        for (window, next) in batch.slice(window).chunks(48).zip(batch.slice(next).chunks(16)) {
            let (now, t) = (window[32], window[32] & 0xFF);
            for (place, values) in window.chunks(16).enumerate() {
                let id = now - t.min(2 - place as u64);
                assert!(values.iter().enumerate().all(|(i, &value)| value == if i == 0 { id } else { mix(id) }));
            }
            assert!((1..=2).contains(&(next[0] - now)) && next[1..].iter().all(|&value| value == mix(next[0])));
        }
    };
    let (feed, path) = (builder().start().unwrap(), scratch("serving").join("store.safetensors"));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = SetAtEnd(&over);
        let writing = [1usize, 2].map(|lanes| {
            let (mut writer, over) = (feed.writer(lanes).unwrap(), &over);
            scope.spawn(move || {
                let mut at = vec![(0u64, 0u64); lanes];
                let mut rng = Rng(lanes as u64);
                while !over.load(Ordering::Relaxed) {
                    let mut s = writer.step().unwrap();
                    for (lane, (episode, t)) in at.iter_mut().enumerate() {
                        let id = (writer_id(lanes, lane)) << 40 | *episode << 8 | *t;
                        let values = |id| std::array::from_fn::<u64, 16, _>(|i| if i == 0 { id } else { mix(id) });
                        s.put_lane(obs, lane, &values(id)).unwrap();
                        *t += 1;
                        if rng.percent(10) || *t == 200 {
                            s.end(lane, End::Truncated).put(obs, &values(id + 1)).unwrap();
                            (*episode, *t) = (*episode + 1, 0);
                        }
                    }
                    s.commit().unwrap();
                }
            })
        });
        let (learner, feed, over_ref) = (feed.learner().unwrap(), &feed, &over);
        let learning = scope.spawn(move || {
            while !over_ref.load(Ordering::Relaxed) {
                check(&learner.next_batch().unwrap());
            }
            learner
        });
        while feed.metrics().stored_records < 600 {
            std::thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..25 {
            let saved = feed.save(&path).unwrap();
            assert!(saved.records >= 600 - 64, "{saved:?}");
            let other = builder().start().unwrap();
            let loaded = other.load(&path).unwrap();
            assert_eq!((loaded.records, loaded.live), (saved.records, saved.records));
            let learner = other.learner().unwrap();
            (0..20).for_each(|_| check(&learner.next_batch().unwrap()));
        }
        drop(end);
        let learner = learning.join().unwrap();
        writing.into_iter().for_each(|writing| writing.join().unwrap());
        drop(learner);
    });
}

fn writer_id(lanes: usize, lane: usize) -> u64 {
    (lanes * 2 + lane) as u64
}

/// A leaf that is kept on some steps, and sequences that begin there.
#[test]
fn leaves_of_some_steps_are_saved_where_they_are_kept() {
    let _watchdog = Watchdog::new("sparse checkpoint", PATIENCE);
    let mut step = Step::new();
    let obs = step.observation::<u32>("obs", &[]);
    let state = step.leaf::<f32>("state", &[3]);
    step.every(state, 4);
    let mut sample = Sample::sequence(step, 5, 4);
    let (all, first) = (sample.all(obs), sample.at(state, 0));
    let builder = |capacity| {
        let builder = Feed::builder(sample.clone()).batch(4).buffers(1).lanes(1).replay(capacity, Uniform::new());
        builder.pace(Pace::min_size(1))
    };
    let feed = builder(50).start().unwrap();
    let mut writer = feed.writer(1).unwrap();
    for t in 0..130u32 {
        let mut s = writer.step().unwrap();
        s.put(obs, &[t]).unwrap();
        s.put(state, &[t as f32; 3]).unwrap();
        if t % 17 == 16 {
            s.end(0, End::Truncated).put(obs, &[t + 1]).unwrap();
        }
        s.commit().unwrap();
    }
    let path = scratch("sparse").join("store.safetensors");
    feed.save(&path).unwrap();
    for capacity in [50, 33, 300] {
        let other = builder(capacity).start().unwrap();
        other.load(&path).unwrap();
        let (learner, mut seen) = (other.learner().unwrap(), 0);
        for _ in 0..50 {
            let batch = learner.next_batch().unwrap();
            for (row, t) in batch.first_steps().enumerate() {
                assert_eq!(batch.slice(first)[row * 3..][..3], [t as f32; 3]);
                assert!(batch.slice(all)[row * 6..][..6].iter().zip(t as u32..).all(|(&value, t)| value == t));
                seen += 1;
            }
        }
        assert_eq!((seen, other.metrics().stored_samples > 2), (200, true));
    }
}

/// The script that writes such files from plain arrays, on its own example.
#[test]
fn a_file_that_python_wrote_is_loaded() {
    let _watchdog = Watchdog::new("python", PATIENCE);
    let (script, path) = (
        Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/replay_file.py"),
        scratch("python").join("data.safetensors"),
    );
    let ran = std::process::Command::new("python3").arg(&script).arg(&path).output();
    let Ok(ran) = ran else { return eprintln!("skipped: there is no python3") };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[2]);
    let action = step.leaf::<i64>("action", &[]);
    let reward = step.leaf::<f32>("reward", &[]);
    let mut sample = Sample::transition(step, 1, 0.5);
    let (now, next, did) = (sample.at(obs, 0), sample.next(obs), sample.at(action, 0));
    let (ret, discount) = (sample.n_step_return(reward), sample.discount());
    let builder = Feed::builder(sample).batch(64).buffers(1).lanes(1).replay(1000, WithoutReplacement::new());
    let feed = builder.pace(Pace::min_size(1)).start().unwrap();
    // The example: an episode of three steps that terminates, and one of two that is truncated. The k-th observation of
    // episode e is [e, k], its actions are 10 e + k, its rewards k + 1.
    let loaded = feed.load(&path).unwrap();
    assert_eq!((loaded.records, loaded.live, loaded.resumed), (7, 7, false));
    let learner = feed.learner().unwrap();
    let batch = learner.next_batch().unwrap();
    assert!(batch.ends_pass());
    let mut rows: Vec<_> = (0..batch.rows())
        .map(|row| {
            let pair = |column| <[f32; 2]>::try_from(&batch.slice(column)[row * 2..][..2]).unwrap();
            (batch.slice(did)[row], pair(now), pair(next), batch.slice(ret)[row], batch.slice(discount)[row])
        })
        .collect();
    rows.sort_by_key(|row| row.0);
    assert_eq!(
        rows,
        [
            (0, [0.0, 0.0], [0.0, 1.0], 1.0, 0.5),
            (1, [0.0, 1.0], [0.0, 2.0], 2.0, 0.5),
            (2, [0.0, 2.0], [0.0, 3.0], 3.0, 0.0),
            (10, [1.0, 0.0], [1.0, 1.0], 1.0, 0.5),
            (11, [1.0, 1.0], [1.0, 2.0], 2.0, 0.5),
        ]
    );
}

/// Arrays of another type or length are refused by the name of their leaf, and no file is written.
#[test]
fn the_script_refuses_what_does_not_fit() {
    let _watchdog = Watchdog::new("python, refused", PATIENCE);
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let path = scratch("python-refused").join("data.safetensors");
    for (change, text) in [
        ("action=[0, 1.5]", "leaf 'action' cannot be of int64"),
        ("action=[0]", "leaf 'action' has 1 steps, and leaf 'obs' has 2"),
        ("obs=array.array('d', [0] * 6)", "leaf 'obs' is an array of 'd', and should be of float32"),
        ("obs=[[0.0, 0.0]]", "leaf 'obs' has 8 bytes, not values of 8 for each step and one behind the last"),
        ("end='over'", "its end is 'over', not 'terminated' or 'truncated'"),
        ("types=dict(obs=('F33', [2], True))", "'F33' is no element type"),
        ("types=dict(more=('U8', [], False))", "there is no leaf 'more'"),
    ] {
        let program = format!(
            "import array, sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1]); import replay_file\n\
             def write(types={{}}, **other):\n\
             \x20   leaves = {{'obs': ('F32', [2], True), 'action': ('I64', [], False)}} | types\n\
             \x20   episode = {{'obs': [[0.0, 0.0]] * 3, 'action': [0, 1], 'end': 'truncated'}} | other\n\
             \x20   replay_file.write(sys.argv[2], leaves, [episode])\n\
             write()\nimport os; os.remove(sys.argv[2])\nwrite({change})"
        );
        let ran = std::process::Command::new("python3").args(["-c", &program]).arg(&scripts).arg(&path).output();
        let Ok(ran) = ran else { return eprintln!("skipped: there is no python3") };
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(!ran.status.success() && said.contains("ValueError: ") && said.contains(text), "{change}: {said}");
        assert!(!path.exists(), "{change}");
    }
}
