//! Learners that lag behind while devices gather: no gather is begun that only they could let end, so neither writers nor a
//! load, on a learner's own thread too, wait for one.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;
#[path = "common/priorities.rs"]
mod priorities;

use common::fake::Fake;
use common::{Watchdog, scratch};
use feeding::{DEADLINE, assert_devices_are_clean, fake, learner_on, search, until};
use life::alone;
use pinring::*;
use priorities::{CAPACITY, Counted, ROWS};
use std::time::Duration;

/// Waits until nothing more is selected.
fn settle(feed: &Feed) {
    let mut last = (0, 0);
    until("the selection rests", || {
        let before = last.0;
        last.0 = feed.metrics().batches;
        last.1 = if last.0 == before && last.0 > 0 { last.1 + 1 } else { 0 };
        std::thread::sleep(Duration::from_millis(1));
        last.1 > 50
    });
}

fn stream_on(fake: &Fake, device: i32) -> usize {
    fake.set_device(device);
    fake.user_stream(1)
}

/// More steps than the store holds: every chunk is used again.
fn overwrite(kind: &Counted, feed: &Feed) {
    kind.write(&mut feed.writer(1).unwrap(), 1000..1000 + 3 * CAPACITY as i64).unwrap();
}

alone! {
    /// One of two learners has taken nothing; the other's buffers are free. What is selected next is the first one's.
    fn by_rounds_a_lagging_learner_keeps_nobody_from_writing_or_loading() {
        let _watchdog = Watchdog::new("rounds", Duration::from_secs(30));
        let (fake, kind) = (fake("rounds", 2), Counted::new());
        fake.auto_run(true);
        let builder = kind.builder(&search(&fake)).device(1).deal(Deal::Rounds).gather(Gather::Mapped).buffers(6);
        let feed = builder.start().unwrap();
        let _intake = feed.intake().unwrap();
        let [lagging, other] = [0, 1].map(|device| learner_on(&feed, device, stream_on(&fake, device)).unwrap());
        kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
        let path = scratch("rounds-load").join("store.safetensors");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        feed.save(&path).unwrap();
        for round in 0..2 {
            assert_eq!(other.next_batch().unwrap().round(), Some(round));
        }
        settle(&feed);
        overwrite(&kind, &feed);
        assert_eq!(feed.load(&path).unwrap().records, 200);
        // Rounds go on where they were.
        for round in 0..20 {
            assert_eq!(lagging.next_batch().unwrap().round(), Some(round));
            if round >= 2 {
                let batch = other.next_batch().unwrap();
                assert_eq!((batch.round(), batch.rows()), (Some(round), ROWS));
            }
        }
        assert!(feed.metrics().devices.iter().all(|device| device.gathered > 0));
        feed.stop(DEADLINE).unwrap();
        drop((lagging, other, feed));
        assert_devices_are_clean(&fake, 2);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// In `Auto` the CPU has filled slots before there was a learner: their batches take buffers too.
    fn batches_of_the_cpu_in_front_of_those_of_the_device_keep_nobody_from_writing_or_loading() {
        let _watchdog = Watchdog::new("auto", Duration::from_secs(30));
        for deal in [Deal::OnDemand, Deal::Rounds] {
            let (fake, kind) = (fake(&format!("auto-{deal:?}"), 1), Counted::new());
            fake.auto_run(true);
            let feed = kind.builder(&search(&fake)).gather(Gather::Auto).buffers(4).deal(deal).start().unwrap();
            let _intake = feed.intake().unwrap();
            kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
            let path = scratch("auto-load").join("store.safetensors");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            feed.save(&path).unwrap();
            settle(&feed);
            assert_eq!(feed.metrics().batches_waiting, 4, "all of them the CPU's");
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            settle(&feed);
            overwrite(&kind, &feed);
            assert_eq!(feed.load(&path).unwrap().records, 200);
            (0..20).for_each(|_| assert_eq!(learner.next_batch().unwrap().rows(), ROWS));
            assert!(feed.metrics().devices[0].gathered > 10, "the device gathers all the same");
            feed.stop(DEADLINE).unwrap();
            drop((learner, feed));
            assert_devices_are_clean(&fake, 1);
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// Of two learners one is gone; its buffers were free, and are nobody's now.
    fn what_was_selected_for_a_learner_that_is_gone_keeps_nobody_from_writing_or_loading() {
        let _watchdog = Watchdog::new("gone", Duration::from_secs(30));
        let (fake, kind) = (fake("gone", 2), Counted::new());
        fake.auto_run(true);
        let feed = kind.builder(&search(&fake)).device(1).gather(Gather::Mapped).buffers(8).start().unwrap();
        let _intake = feed.intake().unwrap();
        let [gone, other] = [0, 1].map(|device| learner_on(&feed, device, stream_on(&fake, device)).unwrap());
        drop(gone);
        kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
        let path = scratch("gone-load").join("store.safetensors");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        feed.save(&path).unwrap();
        settle(&feed);
        overwrite(&kind, &feed);
        assert_eq!(feed.load(&path).unwrap().records, 200);
        (0..20).for_each(|_| assert_eq!(other.next_batch().unwrap().rows(), ROWS));
        feed.stop(DEADLINE).unwrap();
        drop((other, feed));
        assert_devices_are_clean(&fake, 2);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// It goes while batches wait that were selected for its buffers.
    fn what_waits_for_a_learner_that_goes_keeps_nobody_from_writing_or_loading() {
        let _watchdog = Watchdog::new("goes", Duration::from_secs(30));
        let (fake, kind) = (fake("goes", 2), Counted::new());
        fake.auto_run(true);
        let feed = kind.builder(&search(&fake)).device(1).gather(Gather::Mapped).buffers(8).start().unwrap();
        let _intake = feed.intake().unwrap();
        let [going, other] = [0, 1].map(|device| learner_on(&feed, device, stream_on(&fake, device)).unwrap());
        fake.sleep("cuLaunchKernel", 300);
        kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
        let path = scratch("goes-load").join("store.safetensors");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        feed.save(&path).unwrap();
        until("one is gathered for each, and one more waits for each", || feed.metrics().batches == 4);
        drop(going);
        settle(&feed);
        fake.sleep("cuLaunchKernel", 0);
        until("the other's buffers are full", || feed.metrics().devices[1].batches_waiting == 2);
        overwrite(&kind, &feed);
        assert_eq!(feed.load(&path).unwrap().records, 200);
        (0..20).for_each(|_| assert_eq!(other.next_batch().unwrap().rows(), ROWS));
        feed.stop(DEADLINE).unwrap();
        drop((other, feed));
        assert_devices_are_clean(&fake, 2);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// Every pass ends with a short batch, which the CPU and its helpers fill: the next is begun for the buffers of the device
    /// whose turn it will be.
    fn short_batches_that_helpers_fill_do_not_mix_up_whose_buffers_are_free() {
        const ELEMENTS: usize = 4096;
        let _watchdog = Watchdog::new("short batches", Duration::from_secs(30));
        let fake = fake("short", 2);
        fake.auto_run(true);
        let mut step = Step::new();
        let obs = step.observation::<i64>("obs", &[ELEMENTS]);
        let mut sample = Sample::transition(step, 1, 0.9);
        sample.at(obs, 0);
        let builder = Feed::builder(sample).batch(16).buffers(6).prefetch(2).lanes(1).gather_threads(3).deal(Deal::Rounds);
        let builder = builder.replay(64, WithoutReplacement::new()).pace(Pace::min_size(24)).gather(Gather::Mapped);
        let feed = builder.pinning(Pinning::Required).cuda(search(&fake)).device(0).device(1).start().unwrap();
        let [lagging, other] = [0, 1].map(|device| learner_on(&feed, device, stream_on(&fake, device)).unwrap());
        let mut writer = feed.writer(1).unwrap();
        let mut write = |steps| {
            for _ in 0..steps {
                let mut step = writer.step().unwrap();
                step.overwrite_lane(obs, 0).fill(1);
                step.commit().unwrap();
            }
        };
        write(25);
        for round in 0..20 {
            for (learner, rows) in [(&lagging, 16), (&other, 8)] {
                let batch = learner.next_batch().unwrap();
                assert_eq!((batch.round(), batch.rows(), batch.ends_pass()), (Some(round), rows, rows == 8));
            }
        }
        (0..2).for_each(|_| assert_eq!(other.next_batch().unwrap().rows(), 8));
        settle(&feed);
        write(200); // nothing is read for a buffer that is not free
        feed.stop(DEADLINE).unwrap();
        drop((lagging, other, writer, feed));
        assert_devices_are_clean(&fake, 2);
        life::assert_nothing_is_left_with(&fake);
    }
}
