//! Several devices by rounds: every device gets its batch of round k before any gets one of round k + 1, and all learners
//! end at the same round, whatever ends them; against the fake driver with two and three devices.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use feeding::{
    Bytes, DEADLINE, LEGACY, assert_bytes, assert_devices_are_clean, copy_stream, fake, learner_on, search, until,
};
use life::alone;
use pinring::*;
use std::time::{Duration, Instant};

/// Batches of one row for so many devices, by rounds, with room in the ring for all that a test writes.
fn by_rounds(bytes: &Bytes, fake: &Fake, devices: i32) -> FeedBuilder {
    (1..devices).fold(bytes.builder(fake).buffers(16), FeedBuilder::device).deal(Deal::Rounds)
}

fn learners(feed: &Feed, devices: i32) -> Vec<DeviceLearner> {
    (0..devices).map(|device| learner_on(feed, device, LEGACY).unwrap()).collect()
}

/// Takes a batch, which must be of this round and of this device, and drops it.
fn take(learner: &DeviceLearner, device: usize, devices: usize, round: u64) {
    let batch = learner.next_batch().unwrap();
    assert_eq!((batch.round(), batch.device()), (Some(round), device as i32));
    assert_eq!(batch.sequence_number(), round * devices as u64 + device as u64);
}

/// Takes batches from `round` on until the end; how many rounds that learner has had then, and what ended it.
fn to_the_end(learner: &DeviceLearner, mut round: u64) -> (u64, NextError) {
    loop {
        match learner.next_batch() {
            Ok(batch) => assert_eq!(batch.round(), Some(round)),
            Err(error) => return (round, error),
        }
        round += 1;
    }
}

/// Every way of having taken 0, 1 or 2 rounds on each of so many devices.
fn moments(devices: usize) -> Vec<Vec<u64>> {
    (0..3u64.pow(devices as u32)).map(|n| (0..devices as u32).map(|d| n / 3u64.pow(d) % 3).collect()).collect()
}

/// Both rounds lie ready at every learner.
fn until_two_rounds_are_ready(feed: &Feed) {
    until("two rounds are ready", || feed.metrics().devices.iter().all(|device| device.batches_waiting == 2));
}

/// A feed in which two rounds lie ready and each learner has taken as many of them as `taken` says.
fn at_a_moment(bytes: &Bytes, fake: &Fake, taken: &[u64], end: bool) -> (Feed, Vec<DeviceLearner>, Option<Writer>) {
    let devices = taken.len();
    let feed = by_rounds(bytes, fake, devices as i32).start().unwrap();
    let learners = learners(&feed, devices as i32);
    let mut writer = Some(feed.writer(1).unwrap());
    (0..2 * devices as u8).for_each(|value| bytes.write(writer.as_mut().unwrap(), value).unwrap());
    until_two_rounds_are_ready(&feed);
    if end {
        writer = None;
    }
    for (device, (learner, &rounds)) in learners.iter().zip(taken).enumerate() {
        (0..rounds).for_each(|round| take(learner, device, devices, round));
        assert_eq!(feed.metrics().devices[device].batches_taken, rounds);
    }
    (feed, learners, writer)
}

// ---- the order -----------------------------------------------------------------------------------------------------

alone! {
    fn batches_are_dealt_in_turn_and_arrive_whole() {
        for devices in [1, 2, 3] {
            let fake = fake(&format!("rounds-whole-{devices}"), devices);
            fake.auto_run_after(Some(Duration::from_micros(200)));
            for pinning in [Pinning::Required, Pinning::Off] {
                feeding::rounds_arrive_whole(&search(&fake), pinning, devices, (16, 8), 60);
            }
            assert_devices_are_clean(&fake, 0);
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// A learner that takes nothing: the others get what it could take too, and not a round more.
    fn a_slow_learner_holds_the_others_back() {
        for devices in [2, 3] {
            let (fake, bytes) = (fake("rounds-slow-learner", devices), Bytes::new());
            fake.auto_run(true);
            let feed = by_rounds(&bytes, &fake, devices).start().unwrap();
            let learners = learners(&feed, devices);
            let writing = bytes.write_on(feed.writer(1).unwrap(), 0..5 * devices as u8);
            let (slow, fast) = learners.split_last().unwrap();
            let take_from = |rounds: std::ops::Range<u64>, learner: &DeviceLearner, device: usize| {
                rounds.for_each(|round| take(learner, device, devices as usize, round));
            };
            for (device, learner) in fast.iter().enumerate() {
                take_from(0..2, learner, device);
                assert!(learner.next_timeout(Duration::from_millis(30)).unwrap().is_none(), "round 2 is not complete");
                assert!(learner.try_next().unwrap().is_none());
            }
            let last = devices as usize - 1;
            take_from(0..1, slow, last);
            fast.iter().enumerate().for_each(|(device, learner)| take_from(2..3, learner, device));
            assert!(fast[0].next_timeout(Duration::from_millis(30)).unwrap().is_none(), "round 3 is not complete");
            take_from(1..5, slow, last);
            fast.iter().enumerate().for_each(|(device, learner)| take_from(3..5, learner, device));
            writing.join().unwrap().unwrap();
        }
    }
}

alone! {
    /// A device whose copies do not move: nobody waits on the host, but nobody gets ahead of its buffers either.
    fn a_slow_device_holds_the_others_back() {
        let (fake, bytes) = (fake("rounds-slow-device", 2), Bytes::new());
        let feed = by_rounds(&bytes, &fake, 2).start().unwrap();
        let held = copy_stream(&fake, 1);
        fake.hold(held, true);
        fake.auto_run(true);
        let learners = learners(&feed, 2);
        let mut writer = feed.writer(1).unwrap();
        (0..10).for_each(|value| bytes.write(&mut writer, value).unwrap());
        // Device 1 has two buffers; a third copy is queued behind the release of the first.
        (0..2).for_each(|round| learners.iter().enumerate().for_each(|(device, learner)| take(learner, device, 2, round)));
        take(&learners[0], 0, 2, 2);
        let batch = learners[1].next_batch().unwrap();
        until("device 0 is through", || feed.metrics().devices[0].copies_in_flight == 0);
        assert!(feed.metrics().devices[1].copies_in_flight >= 3, "{:?}", feed.metrics().devices);
        fake.hold(held, false);
        until("its copies go on", || feed.metrics().devices[1].copies_in_flight == 0);
        assert_bytes(&fake, bytes.address(&batch), 5, "round 2 of device 1");
        drop(batch);
        (3..5).for_each(|round| learners.iter().enumerate().for_each(|(device, learner)| take(learner, device, 2, round)));
    }
}

alone! {
    /// Rounds begin when every device has its learner; until then nothing is lost.
    fn rounds_wait_for_every_learner() {
        let (fake, bytes) = (fake("rounds-learners", 3), Bytes::new());
        fake.auto_run(true);
        let feed = by_rounds(&bytes, &fake, 3).start().unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..6).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let first = learner_on(&feed, 0, LEGACY).unwrap();
        let third = learner_on(&feed, 2, LEGACY).unwrap();
        for learner in [&first, &third] {
            assert!(learner.next_timeout(Duration::from_millis(30)).unwrap().is_none());
        }
        let second = learner_on(&feed, 1, LEGACY).unwrap();
        for round in 0..2 {
            [&first, &second, &third].into_iter().enumerate().for_each(|(device, learner)| take(learner, device, 3, round));
        }
    }
}

// ---- stops ---------------------------------------------------------------------------------------------------------

alone! {
    /// Whatever each learner has taken by then: all end behind the last round that any of them began.
    fn a_stop_ends_all_at_the_same_round() {
        for devices in [2, 3] {
            let (fake, bytes) = (fake("rounds-stop", devices), Bytes::new());
            fake.auto_run(true);
            for taken in moments(devices as usize) {
                let (feed, learners, writer) = at_a_moment(&bytes, &fake, &taken, false);
                let begun = *taken.iter().max().unwrap();
                let report = feed.stop(DEADLINE).unwrap();
                assert_eq!(report.untaken_rows, (2 - begun) * devices as u64, "{taken:?}: {report}");
                assert_eq!((report.still_out, report.quarantined_slots, &report.fault), (0, 0, &None), "{taken:?}");
                for (learner, &rounds) in learners.iter().zip(&taken) {
                    assert_eq!(to_the_end(learner, rounds), (begun, NextError::Closed(Closed::Stopped)), "{taken:?}");
                    assert_eq!(learner.try_next().unwrap_err(), NextError::Closed(Closed::Stopped));
                }
                assert_eq!(feed.metrics().dropped_rows, report.untaken_rows, "{taken:?}");
                drop((writer, learners, feed));
                assert_devices_are_clean(&fake, 0);
            }
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// The stop comes whenever it comes, while everything runs.
    fn a_stop_in_the_middle_of_it_ends_all_at_the_same_round() {
        for devices in [2, 3] {
            let (fake, bytes) = (fake("rounds-stop-running", devices), Bytes::new());
            fake.auto_run_after(Some(Duration::from_micros(50)));
            let mut ends = Vec::new();
            for pause in 0..24u64 {
                let feed = by_rounds(&bytes, &fake, devices).start().unwrap();
                let writing = bytes.write_on(feed.writer(1).unwrap(), std::iter::repeat(7));
                let threads: Vec<_> = learners(&feed, devices).into_iter().map(|learner| {
                    std::thread::spawn(move || to_the_end(&learner, 0))
                }).collect();
                std::thread::sleep(Duration::from_micros(pause * pause * 40));
                let report = feed.stop(DEADLINE).unwrap();
                let rounds: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
                assert!(rounds.iter().all(|end| *end == rounds[0]), "{rounds:?}");
                assert_eq!(rounds[0].1, NextError::Closed(Closed::Stopped));
                assert_eq!((report.still_out, report.quarantined_slots), (0, 0), "{report}");
                let metrics = feed.metrics();
                assert_eq!(metrics.batches_taken, rounds[0].0 * devices as u64);
                assert_eq!(metrics.rows, metrics.batches_taken + report.untaken_rows, "each row was taken or counted");
                assert_eq!(writing.join().unwrap().unwrap_err().kind(), ErrorKind::Stopped);
                ends.push(rounds[0].0);
            }
            assert!(ends.iter().any(|end| *end > 2), "{ends:?}");
            assert_devices_are_clean(&fake, 0);
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// A learner that waits hears of the stop at once.
    fn a_stop_wakes_learners_that_wait_for_a_round() {
        let (fake, bytes) = (fake("rounds-stop-waiting", 2), Bytes::new());
        fake.auto_run(true);
        let feed = by_rounds(&bytes, &fake, 2).start().unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..3).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let threads: Vec<_> =
            learners(&feed, 2).into_iter().map(|learner| std::thread::spawn(move || to_the_end(&learner, 0))).collect();
        until("a round was taken", || feed.metrics().batches_taken == 2);
        until("half of the next was copied", || feed.metrics().devices[0].batches == 2);
        let report = feed.stop(DEADLINE).unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), (1, NextError::Closed(Closed::Stopped)));
        }
        assert_eq!((report.untaken_rows, report.partial_rows, report.still_out), (1, 0, 0), "{report}");
    }
}

// ---- a learner that goes -------------------------------------------------------------------------------------------

alone! {
    fn a_learner_that_goes_ends_all_at_the_same_round() {
        for devices in [2, 3] {
            let (fake, bytes) = (fake("rounds-gone", devices), Bytes::new());
            fake.auto_run(true);
            for taken in moments(devices as usize) {
                for gone in 0..devices as usize {
                    let (feed, mut learners, writer) = at_a_moment(&bytes, &fake, &taken, false);
                    let begun = *taken.iter().max().unwrap();
                    drop(learners.remove(gone));
                    let mut left = taken.clone();
                    let lost = begun - left.remove(gone);
                    for (learner, &rounds) in learners.iter().zip(&left) {
                        let end = to_the_end(learner, rounds);
                        assert_eq!(end, (begun, NextError::Closed(Closed::LearnerGone)), "{taken:?} without {gone}");
                    }
                    let error = bytes.write(&mut writer.unwrap(), 9).unwrap_err();
                    assert!(error.to_string().contains("the learner was dropped: nobody takes batches"), "{error}");
                    let report = feed.stop(DEADLINE).unwrap();
                    let untaken = (2 - begun) * devices as u64 + lost;
                    assert_eq!((report.untaken_rows, report.still_out), (untaken, 0), "{taken:?} without {gone}: {report}");
                    drop((learners, feed));
                    assert_devices_are_clean(&fake, 0);
                }
            }
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// One goes before another was made: there will be no round.
    fn no_learner_is_made_for_rounds_that_are_over() {
        let (fake, bytes) = (fake("rounds-late", 2), Bytes::new());
        let feed = by_rounds(&bytes, &fake, 2).start().unwrap();
        drop(learner_on(&feed, 0, LEGACY).unwrap());
        let error = learner_on(&feed, 1, LEGACY).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stopped);
        assert_eq!(feed.closed(), Some(Closed::LearnerGone));
    }
}

// ---- a device that fails -------------------------------------------------------------------------------------------

alone! {
    /// The next copy fails, on whichever device: a round that has begun is given to the end, and then all hear of it.
    fn a_fault_of_one_device_ends_all_at_the_same_round() {
        let (fake, bytes) = (fake("rounds-fault", 2), Bytes::new());
        fake.auto_run(true);
        let mut faults = 0;
        for failing in [0, 1] {
            for taken in moments(2).into_iter().filter(|taken| taken.iter().any(|rounds| *rounds > 0)) {
                let (feed, learners, writer) = at_a_moment(&bytes, &fake, &taken, false);
                let (mut writer, begun) = (writer.unwrap(), *taken.iter().max().unwrap());
                // Two buffers each are full or released: those of the slower learner decide who copies next.
                if failing == 1 {
                    bytes.write(&mut writer, 8).unwrap();
                    until("device 0 has copied its own", || taken[0] == 0 || feed.metrics().devices[0].batches == 3);
                }
                fake.inject("cuMemcpyHtoDAsync_v2", 1, 2);
                let copied = |device: usize| taken[device] > 0;
                let comes = if failing == 1 { copied(0) && copied(1) } else { copied(0) };
                if !comes {
                    fake.clear_faults();
                    continue; // its next copy waits for a buffer that nobody releases
                }
                bytes.write(&mut writer, 9).unwrap();
                until("the fault is there", || matches!(feed.closed(), Some(Closed::Fault(_))));
                for (learner, &rounds) in learners.iter().zip(&taken) {
                    let (end, error) = to_the_end(learner, rounds);
                    assert_eq!(end, begun, "{taken:?}, device {failing}");
                    let text = error.to_string();
                    let words = [&format!("the feeding{failing} actor failed"), "cuMemcpyHtoDAsync returned 2"];
                    assert!(words.iter().all(|words| text.contains(*words)), "{text}");
                }
                fake.clear_faults();
                let report = feed.stop(DEADLINE).unwrap();
                assert_eq!((report.quarantined_slots, report.threads_given_up.len()), (1, 0), "{report}");
                faults += 1;
            }
        }
        assert_eq!(faults, 6 + 4);
        assert_eq!(fake.hazards(), common::fake::Hazards::default());
    }
}

alone! {
    /// The learner's own stream fails: the round that it began with that is still the others'.
    fn a_failing_wait_of_one_learner_leaves_the_round_to_the_others() {
        let (fake, bytes) = (fake("rounds-wait", 2), Bytes::new());
        fake.auto_run(true);
        let (feed, learners, _writer) = at_a_moment(&bytes, &fake, &[0, 0], false);
        fake.inject("cuStreamWaitEvent", 1, 2);
        let error = learners[0].next_batch().unwrap_err();
        assert!(error.to_string().contains("cuStreamWaitEvent returned 2"), "{error}");
        until("the fault is there", || matches!(feed.closed(), Some(Closed::Fault(_))));
        take(&learners[1], 1, 2, 0);
        assert!(matches!(learners[1].next_batch().unwrap_err(), NextError::Closed(Closed::Fault(_))));
        assert!(matches!(learners[0].next_batch().unwrap_err(), NextError::Closed(Closed::Fault(_))));
    }
}

// ---- the end of the source -----------------------------------------------------------------------------------------

alone! {
    /// Batches of a last round that is not complete go to nobody, and are counted.
    fn the_rest_of_a_source_goes_to_nobody_and_is_counted() {
        for devices in [1, 2, 3] {
            let (fake, bytes) = (fake("rounds-rest", devices), Bytes::new());
            fake.auto_run_after(Some(Duration::from_micros(100)));
            for batches in [0, 1, 2, 3, 6, 7, 8] {
                let feed = by_rounds(&bytes, &fake, devices).start().unwrap();
                let writing = bytes.write_on(feed.writer(1).unwrap(), 0..batches);
                let ends: Vec<_> = learners(&feed, devices).into_iter().map(|learner| {
                    std::thread::spawn(move || to_the_end(&learner, 0))
                }).collect();
                writing.join().unwrap().unwrap();
                let (rounds, rest) = (u64::from(batches) / devices as u64, u64::from(batches) % devices as u64);
                for end in ends {
                    assert_eq!(end.join().unwrap(), (rounds, NextError::Ended), "{batches} on {devices}");
                }
                let report = feed.stop(DEADLINE).unwrap();
                assert_eq!((report.untaken_rows, report.partial_rows, report.still_out), (rest, 0, 0), "{report}");
                assert_eq!(feed.metrics().dropped_rows, rest);
                drop(feed);
                assert_devices_are_clean(&fake, 0);
            }
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// Whatever each has taken by then, and though one of them goes: everybody sees the end behind the last round.
    fn the_end_of_the_source_stays_the_end_for_a_learner_that_is_behind() {
        let (fake, bytes) = (fake("rounds-end-behind", 2), Bytes::new());
        fake.auto_run(true);
        for taken in moments(2) {
            let (feed, mut learners, _) = at_a_moment(&bytes, &fake, &taken, true);
            let first = learners.remove(0);
            assert_eq!(to_the_end(&first, taken[0]), (2, NextError::Ended));
            drop(first);
            assert_eq!(to_the_end(&learners[0], taken[1]), (2, NextError::Ended), "{taken:?}");
            assert_eq!(feed.stop(DEADLINE).unwrap().untaken_rows, 0, "{taken:?}");
        }
        // It goes in the middle: then the end is that.
        let (feed, mut learners, _) = at_a_moment(&bytes, &fake, &[1, 0], true);
        drop(learners.remove(0));
        assert_eq!(to_the_end(&learners[0], 0), (1, NextError::Closed(Closed::LearnerGone)));
        assert_eq!(feed.stop(DEADLINE).unwrap().untaken_rows, 2);
    }
}

// ---- settings ------------------------------------------------------------------------------------------------------

alone! {
    fn what_does_not_go_with_rounds_is_refused() {
        let (fake, bytes) = (fake("rounds-settings", 2), Bytes::new());
        let error = Feed::builder(bytes.sample()).deal(Deal::Rounds).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("the feed has none: attach them with `.device`"), "{error}");
        let feed = by_rounds(&bytes, &fake, 2).start().unwrap();
        let error = feed.learner().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains("by rounds, so that none is left for the host"), "{error}");
        drop(feed);
        let feed = bytes.builder(&fake).start().unwrap();
        fake.auto_run(true);
        let learner = learner_on(&feed, 0, LEGACY).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 1).unwrap();
        assert_eq!(learner.next_batch().unwrap().round(), None, "on demand there are none");
    }
}

alone! {
    /// Between rounds nothing is called and no time is used, also by a device whose turn it is not.
    fn an_idle_feed_by_rounds_calls_nothing() {
        let (fake, bytes) = (fake("rounds-idle", 3), Bytes::new());
        fake.auto_run(true);
        let feed = by_rounds(&bytes, &fake, 3).start().unwrap();
        let learners = learners(&feed, 3);
        let mut writer = feed.writer(1).unwrap();
        (0..9).for_each(|value| bytes.write(&mut writer, value).unwrap());
        (0..3).for_each(|round| learners.iter().enumerate().for_each(|(device, learner)| take(learner, device, 3, round)));
        // One batch of the next round lies ready and is copied; the other two devices wait for theirs.
        bytes.write(&mut writer, 9).unwrap();
        until("it is copied", || feed.metrics().devices[0].batches == 4);
        until("the slots are home", || feed.metrics().free_slots == 16);
        std::thread::sleep(Duration::from_millis(50));
        let (before, begun) = (fake.calls().len(), Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(fake.calls().len(), before, "calls in {:?} of waiting", begun.elapsed());
        (0..2).for_each(|value| bytes.write(&mut writer, value).unwrap());
        learners.iter().enumerate().for_each(|(device, learner)| take(learner, device, 3, 3));
    }
}
