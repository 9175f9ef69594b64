//! A store that is saved while a device has batches ahead: what is loaded from the file goes on where the selection was, the
//! learner is owed what it did not take, and what was on its way is in the file or not as the pages say.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))] // device addresses by way of usize
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;
#[path = "common/priorities.rs"]
mod priorities;

use common::fake::Fake;
use common::scratch;
use feeding::{assert_devices_are_clean, fake, learner_on, search, until};
use life::alone;
use pinring::*;
use priorities::{CAPACITY, Counted, ROWS};
use std::path::Path;
use std::time::Duration;

const STEPS: i64 = 201;
/// No batch comes any more.
const SOON: Duration = Duration::from_millis(300);

/// A feed, its learner on device 0, and its stream.
struct End {
    feed: Feed,
    learner: DeviceLearner,
}

impl End {
    fn start(fake: &Fake, builder: FeedBuilder) -> End {
        let feed = builder.start().unwrap();
        let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
        End { feed, learner }
    }

    /// Waits until nothing more is selected: every slot and every buffer has its batch.
    fn settle(&self) -> u64 {
        let mut last = (0, 0);
        until("the selection rests", || {
            let before = last.0;
            last.0 = self.feed.metrics().batches;
            last.1 = if last.0 == before && last.0 > 0 { last.1 + 1 } else { 0 };
            std::thread::sleep(Duration::from_millis(1));
            last.1 > 50
        });
        last.0
    }

    /// The steps that the rows of the next batch begin with.
    fn rows(&self) -> Option<(Vec<u64>, bool)> {
        match self.learner.next_timeout(SOON) {
            Ok(batch) => batch.map(|batch| (batch.first_steps().collect(), batch.ends_pass())),
            Err(NextError::Pace(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn load(&self, path: &Path) {
        let loaded = self.feed.load(path).unwrap();
        assert_eq!((loaded.live, loaded.resumed), (STEPS as usize, true));
    }
}

/// Who gathers, and how many batches the learner takes before the save.
const WAYS: [(Gather, usize); 4] = [(Gather::Cpu, 0), (Gather::Cpu, 5), (Gather::Mapped, 0), (Gather::Mapped, 5)];

fn each(name: &str, test: impl Fn(&Fake, &Counted, Gather, usize)) {
    let (fake, kind) = (fake(name, 1), Counted::new());
    fake.auto_run_after(Some(Duration::from_micros(50)));
    for (by, taken) in WAYS {
        test(&fake, &kind, by, taken);
    }
    assert_devices_are_clean(&fake, fake.live_streams().len());
    life::assert_nothing_is_left_with(&fake);
}

alone! {
    fn what_was_saved_goes_on_behind_the_batches_that_were_ahead() {
        each("goes-on", |fake, kind, by, taken| {
            let path = scratch("goes-on").join("store.safetensors");
            let builder = || {
                let builder = kind.builder(&search(fake)).gather(by);
                builder.pace(Pace::min_size(STEPS as u64 - 1))
            };
            let one = End::start(fake, builder());
            let mut writer = one.feed.writer(1).unwrap();
            kind.write(&mut writer, 0..STEPS).unwrap();
            (0..taken).for_each(|_| drop(one.rows().unwrap()));
            let ahead = one.settle() as usize - taken;
            assert!(ahead >= 2, "{by:?}: {ahead}");
            assert_eq!(one.feed.save(&path).unwrap().records, STEPS as usize);
            // They are still this learner's, and nobody else's.
            (0..ahead).for_each(|_| drop(one.rows().unwrap()));
            let two = End::start(fake, builder());
            two.load(&path);
            let behind = [(); 40].map(|()| two.rows().unwrap());
            for (number, rows) in behind.iter().enumerate() {
                assert_eq!(Some(rows), one.rows().as_ref(), "{by:?}: batch {number} behind the save");
            }
            // In the same feed too: what lies ahead of the learner, on the device as well, is of before and reaches nobody.
            drop(writer);
            one.settle();
            one.load(&path);
            for (number, rows) in behind.iter().enumerate() {
                assert_eq!(Some(rows), one.rows().as_ref(), "{by:?}: batch {number} behind the load");
            }
        });
    }
}

alone! {
    /// By passes: every sample once, in the batches that were taken or ahead, or behind the load.
    fn a_pass_is_neither_broken_nor_repeated_by_a_save() {
        each("pass", |fake, kind, by, taken| {
            let path = scratch("pass").join("store.safetensors");
            let builder = || {
                let builder = kind.builder(&search(fake)).gather(by).replay(CAPACITY, WithoutReplacement::new());
                builder.pace(Pace::min_size(STEPS as u64 - 1))
            };
            let one = End::start(fake, builder());
            let mut writer = one.feed.writer(1).unwrap();
            kind.write(&mut writer, 0..STEPS).unwrap();
            let mut seen = Vec::new();
            (0..taken).for_each(|_| seen.extend(one.rows().unwrap().0));
            let ahead = one.settle() as usize - taken;
            one.feed.save(&path).unwrap();
            (0..ahead).for_each(|_| seen.extend(one.rows().unwrap().0));
            let two = End::start(fake, builder());
            two.load(&path);
            loop {
                let (rows, ends) = two.rows().unwrap();
                seen.extend(rows);
                if ends {
                    break;
                }
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..STEPS as u64 - 1), "{by:?}: each sample once");
        });
    }
}

alone! {
    /// What the learner did not take it is owed: the pace gives as many rows behind the load as it would have.
    fn the_pace_owes_what_was_ahead() {
        each("pace", |fake, kind, by, taken| {
            let path = scratch("pace").join("store.safetensors");
            let builder = || {
                let builder = kind.builder(&search(fake)).gather(by);
                builder.pace(Pace::min_size(100).samples_per_insert(1.0, 1.2))
            };
            let one = End::start(fake, builder());
            let mut writer = one.feed.writer(1).unwrap();
            kind.write(&mut writer, 0..STEPS - 40).unwrap();
            (0..taken).for_each(|_| drop(one.rows().unwrap()));
            kind.write(&mut writer, STEPS - 40..STEPS).unwrap();
            one.settle();
            one.feed.save(&path).unwrap();
            let two = End::start(fake, builder());
            two.load(&path);
            let left = |end: &End| std::iter::from_fn(|| end.rows()).count();
            let of_one = left(&one);
            assert_eq!(of_one, (101 + 120) / ROWS - taken, "{by:?}");
            assert_eq!(left(&two), of_one, "{by:?}, {taken} taken");
        });
    }
}

alone! {
    /// A file has the priorities that the store was told: those still on their way come behind it.
    fn priorities_on_their_way_are_not_part_of_a_file() {
        let (fake, kind) = (fake("on-the-way", 1), Counted::new());
        fake.auto_run(true);
        let path = scratch("on-the-way").join("store.safetensors");
        let one = kind.builder(&search(&fake)).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&one, 0, stream).unwrap();
        let mut writer = one.writer(1).unwrap();
        kind.write(&mut writer, 0..STEPS).unwrap();
        let keys = [(); 2].map(|()| learner.next_batch().unwrap().keys());
        let memory = fake.user_memory(ROWS * 4);
        let update = |keys: &Keys, value: f32| {
            assert_eq!(fake.user_copy_in(memory, [value; ROWS].as_ptr().cast(), ROWS * 4, stream), 0);
            // SAFETY: as many values were put there.
            unsafe { learner.update_priorities(keys, memory, ROWS) }.unwrap();
        };
        update(&keys[0], 5.0);
        until("the first has come", || one.metrics().devices[0].updates == 1);
        fake.hold(stream, true);
        update(&keys[1], 7.0);
        one.save(&path).unwrap();
        fake.hold(stream, false);
        until("the second has come", || one.metrics().devices[0].updates == 2);
        let steps = keys.each_ref().map(|keys| keys.iter().map(|(_, step)| step).collect::<Vec<_>>());
        let of = |feed: &Feed, learner: &DeviceLearner| {
            let mut priorities = vec![None; STEPS as usize];
            for _ in 0..400 {
                let keys = learner.next_batch().unwrap().keys();
                let found = feed.peek(&keys).unwrap();
                keys.iter().zip(found).for_each(|((_, step), found)| priorities[step as usize] = found);
            }
            priorities
        };
        let two = kind.builder(&search(&fake)).start().unwrap();
        let second = learner_on(&two, 0, fake.user_stream(1)).unwrap();
        two.load(&path).unwrap();
        let (first, second) = (of(&one, &learner), of(&two, &second));
        for step in 0..STEPS as u64 - 1 {
            let (told, on_its_way) = (steps[0].contains(&step), steps[1].contains(&step));
            let saved = if told { 5.0 } else { 1.0 };
            assert_eq!(second[step as usize], Some(saved), "step {step}");
            assert_eq!(first[step as usize], Some(if on_its_way { 7.0 } else { saved }), "step {step}");
        }
    }
}
