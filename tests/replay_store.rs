//! A store that stands alone: written, saved and loaded without a feed, mixed in by several, with a life that depends on
//! nobody's order of ends.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/ids.rs"]
mod ids;
#[path = "common/life.rs"]
mod life;

use common::{SetAtEnd, scratch};
use ids::Ids;
use life::{alone, assert_nothing_is_left, feed_threads, rings};
use pinring::*;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const ROWS: usize = 8;

impl Ids {
    fn store(&self, capacity: usize) -> StoreBuilder {
        Store::builder(self.sample.clone(), capacity, Uniform::new()).seed(4)
    }

    /// One that takes every row from the store.
    fn feed(&self, store: &Store) -> Feed {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(1).lanes(1).replay(4096, Uniform::new());
        builder.mix(store, 1.0).pace(Pace::min_size(0)).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, ids: Range<i64>) {
        let lanes = writer.lanes().len();
        for id in ids {
            let mut s = writer.step().unwrap();
            s.put(self.obs, &vec![id; lanes]).unwrap();
            s.commit().unwrap();
        }
    }

    /// The ids of a batch, all of which are the store's, each with its successor.
    fn ids(&self, learner: &Learner) -> Vec<i64> {
        let batch = learner.next_batch().unwrap();
        assert_eq!((batch.rows(), batch.rows_mixed()), (ROWS, ROWS));
        self.of(&batch)
    }
}

alone! {
    fn a_store_has_no_thread_and_its_writers_come_and_go() {
        let ids = Ids::new();
        let store = ids.store(1000).lanes(4).build().unwrap();
        assert_eq!((feed_threads(), rings().len()), (vec![], 1));
        for round in 0..3 {
            let (mut one, mut three) = (store.writer(1).unwrap(), store.clone().writer(3).unwrap());
            let refused = store.writer(1).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Config);
            assert!(refused.to_string().contains("there is room for 4 lanes, of which 4 are taken"), "{refused}");
            ids.write(&mut one, 0..11);
            ids.write(&mut three, 0..11);
            assert_eq!(store.metrics().stored_samples, 40 * (round + 1), "what writers have begun ends with them");
        }
        let mut writer = store.writer(1).unwrap();
        let (values, mut episode) = (Vec::from_iter(0..101), writer.episode(100).unwrap());
        episode.put(ids.obs, &values).unwrap();
        episode.commit(End::Terminated, 0).unwrap();
        let metrics = store.metrics();
        assert_eq!((metrics.stored_samples, metrics.episodes, metrics.writers), (220, 1, 1));
        let episodes = store.episodes();
        assert_eq!(episodes.try_iter().map(|episode| episode.length).collect::<Vec<_>>(), [100]);
        store.clear().unwrap();
        assert_eq!(store.metrics().stored_samples, 0);
        assert_eq!(store.set_beta(0.5).unwrap_err().kind(), ErrorKind::Config);
        drop(store);
        ids.write(&mut writer, 0..10); // its memory is there as long as the writer
        drop(writer);
        assert_nothing_is_left();
    }
}

alone! {
    fn what_a_store_takes_is_known_before_it_is_built() {
        let ids = Ids::new();
        for (capacity, lanes) in [(1000, 1), (1000, 7), (100_000, 16)] {
            let builder = ids.store(capacity).lanes(lanes);
            let bytes = builder.bytes().unwrap();
            let feed = Feed::builder(ids.sample.clone()).batch(1).buffers(1).lanes(lanes).replay(capacity, Uniform::new());
            let footprint = feed.footprint().unwrap();
            let store = builder.build().unwrap();
            let mapped: usize = rings().iter().map(ExactSizeIterator::len).sum();
            assert_eq!(mapped, footprint.store_bytes);
            let one_row = footprint.ordinary_bytes - (bytes - mapped); // a feed's batches have rows
            assert!((1..100).contains(&one_row), "{bytes} of {footprint:?}");
            drop(store);
        }
        let refused = |builder: StoreBuilder, text: &str| {
            let errors = [builder.bytes().unwrap_err(), builder.build().unwrap_err()];
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Config);
                assert!(error.to_string().contains(text), "{error}");
            }
        };
        refused(ids.store(0), "a store of 0 steps cannot be: give it 1 to");
        refused(ids.store(10).lanes(0), "a store of 0 lanes cannot be: give it 1 to");
        #[cfg(target_pointer_width = "64")] // with fewer bits it is a count, and too many bytes
        refused(ids.store(usize::MAX), "steps cannot be");
        refused(ids.store(10).lanes(9), "is too small");
        let error = Store::builder(ids.sample.clone(), 10, Prioritized::new(9.0, 0.0)).build().unwrap_err();
        assert!(error.to_string().contains("alpha is 9"), "{error}");
        let mut step = Step::new();
        step.leaf::<u8>("x", &[]);
        refused(Store::builder(Sample::step(step), 10, Uniform::new()), "sampled as transitions or sequences");
        let empty = Sample::transition(Step::new(), 1, 0.9);
        assert_eq!(Store::builder(empty, 10, Uniform::new()).build().unwrap_err().kind(), ErrorKind::Schema);
        assert_eq!(rings(), []);
    }
}

alone! {
    /// Files of stores and of feeds are the same, and a loaded store is mixed in as a written one.
    fn a_store_is_saved_and_loaded_as_a_feeds_is() {
        let ids = Ids::new();
        let path = scratch("store").join("demos.safetensors");
        let written = ids.store(1000).build().unwrap();
        ids.write(&mut written.writer(1).unwrap(), 0..101);
        let saved = written.save(&path).unwrap();
        assert_eq!(saved.records, 101);
        let store = ids.store(1000).build().unwrap();
        let writer = store.writer(1).unwrap();
        let refused = store.load(&path).unwrap_err();
        assert!(refused.to_string().contains("a store is loaded before its writers are made"), "{refused}");
        drop(writer);
        let loaded = store.load(&path).unwrap();
        assert_eq!((loaded.live, loaded.resumed), (101, true));
        assert_eq!(store.metrics().stored_samples, 100);
        // Both go on drawing alike.
        let draw = |store: &Store| {
            let feed = ids.feed(store);
            let learner = feed.learner().unwrap();
            (0..5).map(|_| ids.ids(&learner)).collect::<Vec<_>>()
        };
        assert_eq!(draw(&written), draw(&store));
        // A feed's file in a store, of which fewer fit.
        let feed = Feed::builder(ids.sample.clone()).batch(1).lanes(1).replay(500, Uniform::new()).start().unwrap();
        ids.write(&mut feed.writer(1).unwrap(), 0..301);
        feed.save(&path).unwrap();
        let small = ids.store(50).build().unwrap();
        let loaded = small.load(&path).unwrap();
        assert!(loaded.records == 301 && (50..66).contains(&loaded.live) && !loaded.resumed, "{loaded:?}");
        assert!(draw(&small).iter().flatten().all(|id| *id >= 301 - 66));
        assert_eq!(feed.load(&path).unwrap().live, 301);
    }
}

alone! {
    /// Rows come as long as somebody mixes the store in, whatever was dropped; and then its memory goes.
    fn a_feed_mixes_in_a_store_whose_handles_are_gone() {
        let ids = Ids::new();
        let store = ids.store(100).build().unwrap();
        let mut writer = store.writer(1).unwrap();
        ids.write(&mut writer, 0..50);
        let feed = ids.feed(&store);
        let learner = feed.learner().unwrap();
        drop(store);
        ids.ids(&learner);
        ids.write(&mut writer, 50..500);
        drop(writer);
        (0..3).for_each(|_| drop(ids.ids(&learner)));
        assert!(ids.ids(&learner).iter().all(|id| *id >= 300));
        drop(feed);
        assert_nothing_is_left();
        // And the other way round: a feed that dies leaves the store as it is.
        let store = ids.store(100).build().unwrap();
        drop(ids.feed(&store));
        ids.write(&mut store.writer(1).unwrap(), 0..500);
        let (one, two) = (ids.feed(&store), ids.feed(&store));
        let (first, second) = (one.learner().unwrap(), two.learner().unwrap());
        ids.ids(&first);
        one.stop(Duration::from_secs(10)).unwrap();
        (0..10).for_each(|_| drop(ids.ids(&second)));
        drop((one, two, store));
        assert_nothing_is_left();
    }
}

alone! {
    /// Written, cleared, saved and mixed in by two feeds at once: rows are whole and of one lane.
    fn several_feeds_mix_in_a_store_that_is_written_meanwhile() {
        let ids = Ids::new();
        let store = ids.store(200).lanes(3).build().unwrap();
        ids.write(&mut store.writer(1).unwrap(), 0..100);
        let (over, path) = (AtomicBool::new(false), scratch("shared").join("store.safetensors"));
        std::thread::scope(|scope| {
            let (ids, over, end) = (&ids, &over, SetAtEnd(&over));
            let writing: Vec<_> = [1, 2]
                .into_iter()
                .map(|lanes| {
                    let store = store.clone();
                    scope.spawn(move || {
                        let mut from = 0;
                        while !over.load(Ordering::Relaxed) {
                            let mut writer = store.writer(lanes).unwrap();
                            ids.write(&mut writer, from..from + 500);
                            from += 500;
                        }
                    })
                })
                .collect();
            let learning: Vec<_> = [(); 2]
                .into_iter()
                .map(|()| {
                    let feed = ids.feed(&store);
                    scope.spawn(move || {
                        let learner = feed.learner().unwrap();
                        (0..2000).for_each(|_| drop(ids.ids(&learner)));
                    })
                })
                .collect();
            while !learning.iter().all(|thread| thread.is_finished()) {
                store.save(&path).unwrap();
                store.clear().unwrap();
            }
            learning.into_iter().for_each(|thread| thread.join().unwrap());
            drop(end);
            writing.into_iter().for_each(|thread| thread.join().unwrap());
        });
        assert_eq!((store.metrics().writers, store.metrics().batches), (0, 0));
        drop(store);
        assert_nothing_is_left();
    }
}
