//! A replay feed's life: what it locks, how it ends, who hears of it, and what reaches a device. Each test has a process of
//! its own.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use life::{PATIENCE, alone, until};
use pinring::*;
use std::thread;
use std::time::Duration;

/// Steps of one number, and samples of a step and the next.
#[derive(Clone)]
struct Pairs {
    obs: Leaf<f32>,
    now: Column<f32>,
    next: Column<f32>,
    sample: Sample,
}

impl Pairs {
    fn new() -> Pairs {
        let mut step = Step::new();
        let obs = step.observation::<f32>("obs", &[2]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let (now, next) = (sample.at(obs, 0), sample.next(obs));
        Pairs { obs, now, next, sample }
    }

    fn builder(&self) -> FeedBuilder {
        Feed::builder(self.sample.clone()).batch(8).buffers(2).lanes(2).seed(1).replay(64, Uniform::new())
    }

    fn write(&self, writer: &mut Writer, values: std::ops::Range<u32>) -> Result<()> {
        for value in values {
            let mut s = writer.step()?;
            let lanes = s.view_mut(self.obs).shape()[0];
            let of_lane = |lane: usize| [value as f32 + 0.25 * lane as f32; 2];
            s.put(self.obs, &(0..lanes).flat_map(of_lane).collect::<Vec<f32>>())?;
            s.commit()?;
        }
        Ok(())
    }

    fn check(&self, batch: &Batch) {
        for (now, next) in batch.slice(self.now).iter().zip(batch.slice(self.next)) {
            assert_eq!(*next, now + 1.0);
        }
    }
}

alone! {
    fn page_locked_bytes_are_those_of_the_formula() {
        let fake = life::fake("replay-formula");
        for (capacity, lanes, batch, buffers) in [(64, 2, 8, 2), (1000, 3, 512, 3), (7, 1, 1, 1), (100_000, 16, 32, 2)] {
            let pairs = Pairs::new();
            let builder = pairs.builder().batch(batch).buffers(buffers).lanes(lanes).replay(capacity, Uniform::new());
            let builder = builder.pinning(Pinning::Required).cuda(life::only(&fake));
            let footprint = builder.footprint().unwrap();
            let chunk = (capacity / (4 * lanes)).clamp(1, 64);
            let records = (capacity.div_ceil(chunk) + lanes + 2) * chunk;
            let store = (records * 16).next_multiple_of(4096); // a record is 8 bytes, rounded up
            let slot = (2 * (batch * 8).next_multiple_of(256)).next_multiple_of(4096);
            let ring = slot * (buffers + store.div_ceil(slot));
            assert_eq!((footprint.store_records, footprint.record_bytes_each), (records, 16));
            assert_eq!((footprint.store_bytes, footprint.slot_bytes, footprint.ring_bytes), (store, slot, ring));
            assert_eq!((footprint.page_locked_bytes, builder.page_locked_bytes().unwrap()), (ring, ring));
            let feed = builder.start().unwrap();
            assert_eq!(feed.metrics().page_locked_bytes, ring);
            assert_eq!(feed.pin_report().unwrap().page_locked_bytes, ring);
            let locked: usize = fake.live_registrations().iter().map(|registration| registration.bytes).sum();
            assert_eq!(locked, ring);
            drop(feed);
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    fn a_stop_at_any_moment_leaves_nothing() {
        for moment in 0..60u32 {
            let pairs = Pairs::new();
            let feed = pairs.builder().gather_threads(1 + moment as usize % 3).start().unwrap();
            assert!(life::feed_threads().iter().any(|name| name.ends_with("-sampling")), "{:?}", life::feed_threads());
            let (mut writer, learner) = (feed.writer(2).unwrap(), feed.learner().unwrap());
            let writing = thread::spawn({
                let pairs = pairs.clone();
                move || pairs.write(&mut writer, 0..u32::MAX).unwrap_err().kind()
            });
            let learning = thread::spawn(move || {
                let mut kept = Vec::new();
                loop {
                    match learner.next_batch() {
                        Ok(batch) => {
                            pairs.check(&batch);
                            kept = vec![batch];
                        }
                        Err(error) => return (error, kept),
                    }
                }
            });
            until("the moment", || feed.metrics().steps >= u64::from(moment) * 7);
            let report = feed.stop(PATIENCE).unwrap();
            assert!(report.threads_given_up.is_empty() && report.fault.is_none(), "{report}");
            assert_eq!(writing.join().unwrap(), ErrorKind::Stopped);
            let (error, kept) = learning.join().unwrap();
            assert_eq!(error, NextError::Closed(Closed::Stopped));
            drop(feed);
            drop(kept);
            life::assert_nothing_is_left();
        }
    }
}

alone! {
    fn batches_and_writers_outlive_their_feed() {
        let pairs = Pairs::new();
        let feed = pairs.builder().start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        pairs.write(&mut writer, 0..20).unwrap();
        let batch = learner.next_batch().unwrap();
        let keys = batch.keys();
        let mut open = writer.step().unwrap();
        open.put(pairs.obs, &[1.0, 1.0]).unwrap();
        drop((feed, learner));
        pairs.check(&batch);
        assert!(matches!(open.commit(), Err(CommitError::Closed(Closed::Stopped))));
        assert_eq!(life::rings().len(), 1, "kept by the batch");
        drop(batch);
        life::assert_nothing_is_left();
        assert!(writer.step().is_err());
        assert_eq!(keys.len(), 8);
    }
}

alone! {
    fn the_end_of_the_source_ends_what_can_never_be_met() {
        let pairs = Pairs::new();
        // Too few for a batch: what is there goes out as long as the learner wants, since nothing else holds it back.
        let feed = pairs.builder().start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        pairs.write(&mut writer, 0..3).unwrap();
        drop(writer);
        (0..5).for_each(|_| pairs.check(&learner.next_batch().unwrap()));
        drop((feed, learner));
        // With a min size or a rate, the end comes when neither can be met any more.
        for (pace, batches) in [
            (Pace::min_size(30), 0),
            (Pace::min_size(4).samples_per_insert(2.0, 4.0), 8),
            (Pace::min_size(4).samples_per_insert(2.0, 0.0), 4),
        ] {
            let feed = pairs.builder().lanes(1).pace(pace).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            let writing = thread::spawn({
                let pairs = pairs.clone();
                move || pairs.write(&mut writer, 0..20)
            });
            let taken = learner.iter().map(|batch| pairs.check(&batch.unwrap())).count();
            writing.join().unwrap().unwrap();
            assert_eq!(taken, batches, "{pace:?}");
            assert_eq!(feed.closed(), Some(Closed::Ended));
            drop((feed, learner));
            life::assert_nothing_is_left();
        }
        // Nothing was ever written.
        let feed = pairs.builder().start().unwrap();
        let learner = feed.learner().unwrap();
        drop(feed.intake().unwrap());
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended);
    }
}

alone! {
    fn writers_hear_that_the_learner_is_gone() {
        let pairs = Pairs::new();
        let pace = Pace::min_size(4).samples_per_insert(1.0, 4.0);
        let feed = pairs.builder().lanes(1).pace(pace).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let writing = thread::spawn(move || pairs.write(&mut writer, 0..1000).unwrap_err());
        thread::sleep(Duration::from_millis(20));
        drop(learner);
        let error = writing.join().unwrap();
        assert!(error.to_string().contains("the learner was dropped"), "{error}");
    }
}

/// What a sampler of a user's own must not do.
#[derive(Debug)]
struct Bad(u32, Option<u32>);

impl Sampler for Bad {
    fn begin(&mut self, _items: u32) -> Result<(), SamplerError> {
        Ok(())
    }
    fn insert(&mut self, item: u32, _priority: Option<f32>) -> Result<(), PriorityError> {
        self.1 = Some(item);
        Ok(())
    }
    fn remove(&mut self, _item: u32) {}
    fn selectable(&self) -> usize {
        100
    }
    fn select(&mut self, _rows: usize, _draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        assert!(self.0 != 7, "a wheel came off");
        let known = self.1.unwrap_or(0);
        into.push(match self.0 {
            3 => Selected { item: known, probability: 1.0, weight: f32::NAN },
            4 => Selected { item: known, probability: 0.0, weight: 1.0 },
            item => Selected { item, probability: 1.0, weight: 1.0 },
        });
        Pass::GoesOn
    }
}

alone! {
    fn a_sampler_that_breaks_its_word_stops_the_feed_by_name() {
        for (item, text) in [
            (60, "selected item 60, which is not among"),
            (u32::MAX, "not among"),
            (7, "a wheel came off"),
            (3, "with probability 1 and weight NaN"),
            (4, "with probability 0 and weight 1"),
        ] {
            let pairs = Pairs::new();
            let feed = pairs.builder().replay(64, Bad(item, None)).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            let _ = pairs.write(&mut writer, 0..10); // the fault may come before the last step
            let NextError::Closed(Closed::Fault(fault)) = learner.next_batch().unwrap_err() else { panic!("no fault") };
            assert!(fault.actor() == "sampling" && fault.text().contains(text), "{fault}");
            assert!(matches!(writer.step(), Err(StepError::Closed(Closed::Fault(_)))));
            assert_eq!(feed.stop(PATIENCE).unwrap().fault.unwrap(), fault);
            drop((feed, learner));
            life::assert_nothing_is_left();
        }
    }
}

alone! {
    /// Tolerance 0: which rows a batch has is a function of the seed, however the threads run.
    fn in_strict_pace_the_same_seed_gives_the_same_batches() {
        let run = |slow: bool| {
            let pairs = Pairs::new();
            let pace = Pace::min_size(10).updates_per_step(2.0, 0.0);
            let feed = pairs.builder().lanes(1).pace(pace).replay(64, Prioritized::new(0.6, 0.4)).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            let writing = thread::spawn(move || pairs.write(&mut writer, 0..200));
            let mut all = Vec::new();
            for batch in learner.iter() {
                all.push(batch.unwrap().first_steps().collect::<Vec<_>>());
                if slow && all.len().is_multiple_of(50) {
                    thread::sleep(Duration::from_millis(3));
                }
            }
            writing.join().unwrap().unwrap();
            all
        };
        let first = run(false);
        assert_eq!(first.len(), 380);
        assert_eq!(run(true), first);
    }
}

alone! {
    /// The last samples of an episode come with its final observation: a strict batch is selected with these or, if it was due
    /// before the step, without that step.
    fn in_strict_pace_a_batch_is_selected_from_whole_steps() {
        const LANES: usize = 48;
        let run = || {
            let mut step = Step::new();
            let obs = step.observation::<f32>("obs", &[]);
            let mut sample = Sample::transition(step, 3, 0.9);
            sample.at(obs, 0);
            let pace = Pace::min_size(200).samples_per_insert(0.5, 0.0);
            let builder = Feed::builder(sample).batch(24).buffers(2).lanes(LANES).seed(1);
            let feed = builder.replay(2_000, Prioritized::new(0.6, 0.4)).pace(pace).start().unwrap();
            let (mut writer, learner) = (feed.writer(LANES).unwrap(), feed.learner().unwrap());
            let writing = thread::spawn(move || {
                for t in 0..400 {
                    let mut s = writer.step().unwrap();
                    s.put(obs, &[t as f32; LANES]).unwrap();
                    for lane in 0..LANES {
                        if (t + lane) % 5 == 0 {
                            s.end(lane, End::Terminated);
                        }
                    }
                    s.commit().unwrap();
                }
            });
            let rows = |batch: Batch| batch.lanes().zip(batch.first_steps()).collect::<Vec<_>>();
            let all: Vec<_> = learner.iter().map(|batch| rows(batch.unwrap())).collect();
            writing.join().unwrap();
            all
        };
        let first = run();
        assert_eq!(first.len(), (400 * LANES - 200) * 24 / 48 / 24);
        assert!((0..3).all(|_| run() == first));
    }
}

alone! {
    fn batches_reach_a_device_as_they_were_gathered() {
        let fake = feeding::fake("replay-device", 1);
        fake.auto_run_after(Some(Duration::from_micros(50)));
        for pinning in [Pinning::Required, Pinning::Off] {
            let pairs = Pairs::new();
            let builder = pairs.builder().replay(64, Prioritized::new(0.6, 0.4));
            let feed = builder.pinning(pinning).device(0).cuda(feeding::search(&fake)).start().unwrap();
            let learner = feeding::learner_on(&feed, 0, feeding::LEGACY).unwrap();
            let mut writer = feed.writer(2).unwrap();
            let writing = thread::spawn({
                let pairs = pairs.clone();
                move || pairs.write(&mut writer, 0..u32::MAX).unwrap_err().kind()
            });
            for _ in 0..50 {
                let batch = learner.next_batch().unwrap();
                batch.synchronize().unwrap();
                let read = |ptr: u64| {
                    let bytes = fake.device_bytes(ptr, 8 * 8);
                    let floats = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
                    floats.collect::<Vec<f32>>()
                };
                let (now, next) = (read(batch.column(pairs.now).ptr), read(batch.column(pairs.next).ptr));
                for (row, (lane, step)) in batch.keys().iter().enumerate() {
                    let value = step as f32 + 0.25 * lane as f32;
                    assert_eq!((now[row * 2], next[row * 2 + 1]), (value, value + 1.0));
                }
                let updated = learner.update_priorities_from_host(&batch.keys(), &[1.0; 8]).unwrap();
                assert_eq!(updated.applied + updated.stale, 8);
            }
            feed.stop(PATIENCE).unwrap();
            assert_eq!(writing.join().unwrap(), ErrorKind::Stopped);
            drop((learner, feed));
        }
        feeding::assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// Everything that was written and sampled before is gone, and lanes go on in their episodes.
    fn clear_forgets_steps_and_batches_that_wait() {
        let pairs = Pairs::new();
        let feed = pairs.builder().pace(Pace::min_size(1)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for round in 0..20u32 {
            pairs.write(&mut writer, round * 100..round * 100 + 10).unwrap();
            until("batches wait", || feed.metrics().batches_waiting == 2);
            let old = learner.next_batch().unwrap().keys();
            feed.clear().unwrap();
            assert_eq!(feed.metrics().stored_samples, 0);
            assert!(learner.try_next().unwrap().is_none());
            assert_eq!(learner.update_priorities(&old, &[1.0; 8]).unwrap().stale, 8);
            pairs.write(&mut writer, round * 100 + 50..round * 100 + 52).unwrap();
            for _ in 0..3 {
                let batch = learner.next_batch().unwrap();
                assert!(batch.slice(pairs.now).iter().all(|&now| now == (round * 100 + 50) as f32), "not older");
            }
        }
    }
}

alone! {
    /// An item that was sampled so often is not sampled again, whatever waits.
    fn items_are_used_up() {
        let pairs = Pairs::new();
        let feed = pairs.builder().replay(1000, MaxTimes::new(Uniform::new(), 2)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        pairs.write(&mut writer, 0..101).unwrap();
        drop(writer);
        let mut times = vec![0; 100];
        for batch in learner.iter() {
            batch.unwrap().first_steps().for_each(|step| times[step as usize] += 1);
        }
        assert_eq!(times, [2; 100]);
    }
}

unsafe extern "C" {
    safe fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    safe fn _exit(status: i32) -> !;
}

/// Runs `body` in a forked child, which must not panic.
fn in_child(body: impl FnOnce()) {
    let child = fork();
    if child == 0 {
        _exit(i32::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err()));
    }
    let mut status = 0;
    // SAFETY: a child of ours, and an integer of ours.
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
}

alone! {
    /// Whoever held a lock at the fork does not exist there: everything is refused before one is taken.
    fn a_forked_child_is_refused_everything() {
        let pairs = Pairs::new();
        let feed = pairs.builder().start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        pairs.write(&mut writer, 0..20).unwrap();
        let keys = learner.next_batch().unwrap().keys();
        let store = Store::builder(pairs.sample.clone(), 100, Uniform::new()).lanes(4).build().unwrap();
        let mut store_writer = store.writer(2).unwrap();
        pairs.write(&mut store_writer, 0..20).unwrap();
        let mut open = Some(writer.step().unwrap());
        open.as_mut().unwrap().put(pairs.obs, &[20.0, 20.0]).unwrap();
        in_child(|| {
            let committed = open.take().unwrap().commit();
            assert!(matches!(committed, Err(CommitError::Closed(Closed::UsedAfterFork))));
        });
        open.take().expect("taken in the child, not here").commit().unwrap();
        drop(open);
        let mut kept = Some((writer, learner, feed, store, store_writer));
        in_child(|| {
            let (mut writer, learner, feed, store, mut store_writer) = kept.take().unwrap();
            assert!(matches!(store_writer.step(), Err(StepError::Closed(Closed::UsedAfterFork))));
            assert!(matches!(writer.step(), Err(StepError::Closed(Closed::UsedAfterFork))));
            assert_eq!(writer.abandon(0).unwrap_err().kind(), ErrorKind::Misuse);
            assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::UsedAfterFork));
            let update = learner.update_priorities(&keys, &[1.0; 8]).unwrap_err();
            assert_eq!(update, UpdateError::Closed(Closed::UsedAfterFork));
            for error in [
                feed.peek(&keys).map(drop).unwrap_err(),
                feed.set_beta(0.5).unwrap_err(),
                feed.clear().unwrap_err(),
                feed.save("nowhere").map(drop).unwrap_err(),
                feed.load("nowhere").map(drop).unwrap_err(),
                store.clone().writer(1).map(drop).unwrap_err(),
                store.set_beta(0.5).unwrap_err(),
                store.clear().unwrap_err(),
                store.save("nowhere").map(drop).unwrap_err(),
                store.load("nowhere").map(drop).unwrap_err(),
                pairs.builder().mix(&store, 0.5).start().map(drop).unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
            }
        });
        let (_writer, learner, _feed, store, mut store_writer) = kept.take().expect("taken in the child, not here");
        pairs.check(&learner.next_batch().unwrap());
        pairs.write(&mut store_writer, 20..30).unwrap();
        assert_eq!((store.metrics().writers, store.writer(2).is_ok()), (1, true));
    }
}
