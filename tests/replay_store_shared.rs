//! A store that two feeds mix in while it is written, cleared, saved and loaded by several threads, and while its handles go in
//! any order: rows stay whole, nobody waits for ever, and nothing is left.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/ids.rs"]
mod ids;
#[path = "common/life.rs"]
mod life;

use common::{SetAtEnd, Watchdog, scratch};
use ids::Ids;
use life::{alone, assert_nothing_is_left};
use pinring::*;
use std::ops::Range;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const ROWS: usize = 8;

impl Ids {
    fn store(&self, sampler: impl Sampler + 'static) -> Store {
        Store::builder(self.sample.clone(), 400, sampler).lanes(2).seed(4).build().unwrap()
    }

    fn feed(&self, store: &Store, fraction: f64, sampler: impl Sampler + 'static) -> Feed {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(2).lanes(1).replay(400, sampler);
        builder.mix(store, fraction).pace(Pace::min_size(0)).gather_threads(2).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, steps: Range<i64>) -> Result<()> {
        let lanes = writer.lanes().len();
        for id in steps {
            let mut s = writer.step()?;
            s.put(self.obs, &vec![id; lanes])?;
            if id % 37 == 36 {
                for lane in 0..lanes {
                    s.end(lane, End::Truncated).put(self.obs, &[id + 1])?;
                }
            }
            s.commit()?;
        }
        Ok(())
    }
}

fn shared(sampler: impl Sampler + Clone + 'static, own: impl Sampler + Clone + 'static, file: &Path) {
    let _watchdog = Watchdog::new("a shared store", Duration::from_secs(100));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let ids = [(); 3].map(|()| Ids::new()); // handles of columns are a sample's own
    let store = ids[0].store(sampler);
    ids[0].write(&mut store.writer(1).unwrap(), 0..200).unwrap();
    store.save(file).unwrap();
    let feeds = [ids[1].feed(&store, 0.5, own.clone()), ids[2].feed(&store, 1.0, own)];
    let over = AtomicBool::new(false);
    let (ids, store, over) = (&ids, &store, &over);
    let go = || !over.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let end = SetAtEnd(over);
        let mut others = Vec::new();
        for (feed, ids) in feeds.iter().zip(&ids[1..]) {
            others.push(scope.spawn(move || {
                let mut writer = feed.writer(1).unwrap();
                let mut blocks = (0..).step_by(50).take_while(|_| go());
                while blocks.next().is_some_and(|id| ids.write(&mut writer, id..id + 50).is_ok()) {}
            }));
            others.push(scope.spawn(move || {
                let learner = feed.learner().unwrap();
                while go() {
                    match learner.next_timeout(Duration::from_millis(5)) {
                        Ok(Some(batch)) => {
                            ids.of(&batch);
                            let keys = batch.keys();
                            let values: Vec<f32> = (0..keys.len()).map(|row| (row % 3) as f32).collect();
                            learner.update_priorities(&keys, &values).unwrap();
                            feed.peek(&keys).unwrap();
                        }
                        Ok(None) | Err(NextError::Pace(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }));
        }
        for lanes in [1, 2] {
            others.push(scope.spawn(move || {
                while go() {
                    match store.writer(lanes) {
                        Ok(mut writer) => ids[0].write(&mut writer, 0..60).unwrap(),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{error}"),
                    }
                    std::thread::yield_now();
                }
            }));
        }
        for name in ["one", "two"] {
            others.push(scope.spawn(move || {
                let path = file.with_extension(name);
                while go() {
                    if let Err(error) = store.save(&path) {
                        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
                    }
                }
            }));
        }
        others.push(scope.spawn(move || {
            while go() {
                store.clear().unwrap();
                std::thread::sleep(Duration::from_micros(300));
            }
        }));
        let (mut loaded, mut turn) = (0, 0);
        while turn < 1000 || loaded == 0 {
            turn += 1;
            match store.load(file) {
                Ok(what) => {
                    assert_eq!(what.records, 200 + 200 / 37);
                    loaded += 1;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Misuse, "{error}"),
            }
            if turn % 16 == 0 {
                std::thread::sleep(Duration::from_micros(500));
            }
        }
        drop(end);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
    // Nothing is out of step afterwards.
    store.clear().unwrap();
    assert_eq!(store.metrics().stored_samples, 0);
    store.load(file).unwrap();
    feeds.iter().for_each(|feed| assert_eq!(feed.closed(), Some(Closed::LearnerGone), "and no fault"));
}

alone! {
    fn two_feeds_mix_in_a_store_that_others_write_clear_save_and_load() {
        let file = scratch("shared").join("store.safetensors");
        shared(Uniform::new(), Uniform::new(), &file);
        shared(Prioritized::new(0.6, 0.4).floor(0.0), Uniform::new(), &file);
        shared(MaxTimes::new(Uniform::new(), 2), Prioritized::new(1.0, 1.0).floor(0.0), &file);
        shared(WithoutReplacement::new(), MaxTimes::new(WithoutReplacement::new(), 3), &file);
        assert_nothing_is_left();
    }
}

alone! {
    /// Store, feeds, learners, writers and keys are dropped in any order, each on a thread of its own, at once.
    fn handles_go_in_any_order_on_any_thread() {
        let _watchdog = Watchdog::new("any order", Duration::from_secs(100));
        for turn in 0..60usize {
            let ids = Ids::new();
            let store = ids.store(Prioritized::new(0.6, 0.4));
            let mut writer = store.writer(2).unwrap();
            ids.write(&mut writer, 0..100).unwrap();
            let feeds = [ids.feed(&store, 1.0, Uniform::new()), ids.feed(&store, 0.5, Uniform::new())];
            let mut handles: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::new();
            for feed in feeds {
                let (learner, own) = (feed.learner().unwrap(), feed.writer(1).unwrap());
                let batch = learner.next_batch().unwrap();
                let keys = batch.keys();
                handles.push(Box::new(move || drop(feed)));
                handles.push(Box::new(move || {
                    let _ = learner.update_priorities(&keys, &[1.0; ROWS]);
                    drop(learner);
                }));
                handles.push(Box::new(move || drop(batch)));
                handles.push(Box::new(move || drop(own)));
            }
            let clone = store.clone();
            handles.push(Box::new(move || drop(clone)));
            handles.push(Box::new(move || drop(store)));
            let obs = ids.obs;
            handles.push(Box::new(move || {
                // With a step open, by a panic.
                let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                    let mut writer = writer;
                    let mut s = writer.step().unwrap();
                    s.put(obs, &[7; 2]).unwrap();
                    std::panic::resume_unwind(Box::new(()));
                }));
                assert!(panicked.is_err());
            }));
            let count = handles.len();
            handles.rotate_left(turn % count);
            if turn % 2 == 0 {
                handles.reverse();
            }
            if turn < 2 * count {
                handles.into_iter().for_each(|handle| handle());
            } else {
                let barrier = Barrier::new(count);
                std::thread::scope(|scope| {
                    for handle in handles {
                        scope.spawn(|| {
                            barrier.wait();
                            handle();
                        });
                    }
                });
            }
        }
        assert_nothing_is_left();
    }
}
