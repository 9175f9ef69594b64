//! How feeding ends: stops with copies under way, learners that go, batches that outlive everything, forks.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use feeding::{
    Bytes, DEADLINE, LEGACY, PER_THREAD, assert_bytes, assert_devices_are_clean, copy_stream, fake, learner_on, until,
};
use life::{alone, feed_threads, rings};
use pinring::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

// ---- stops ---------------------------------------------------------------------------------------------------------

alone! {
    /// The stop waits for them; only then is the ring unregistered.
    fn a_stop_waits_for_queued_copies() {
        let (fake, bytes) = (fake("stop-queued", 1), Bytes::new());
        let feed = bytes.builder(&fake).prefetch(3).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..4).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let batch = learner.next_batch().unwrap();
        until("three copies are queued", || feed.metrics().devices[0].copies_in_flight == 3);
        let report = std::thread::scope(|scope| {
            let stopping = scope.spawn(|| feed.stop(DEADLINE).unwrap());
            until("the gates are closed", || feed.closed().is_some());
            until("so is the desk", || feed.metrics().devices[0].batches_waiting == 0);
            assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::Stopped));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!stopping.is_finished(), "copies are queued");
            assert_eq!(fake.calls_of("cudaHostUnregister"), []);
            assert_eq!(fake.calls_of("cuMemFree_v2"), []);
            fake.run_all();
            stopping.join().unwrap()
        });
        assert_eq!((report.untaken_rows, report.still_out, report.quarantined_slots), (3, 0, 0), "{report}");
        assert_eq!((report.threads_given_up.len(), report.fault), (0, None));
        assert_bytes(&fake, bytes.address(&batch), 0, "the batch that is still held");
        let log = fake.calls();
        let unregistered = log.iter().position(|call| call.function == "cudaHostUnregister").expect("by the stop");
        let complete = |call: &&common::fake::Call| call.function == "cuEventQuery" && call.code == Some(0);
        assert!(log[..unregistered].iter().filter(complete).count() >= 3, "each copy was seen to be over");
        drop((batch, learner, writer, feed));
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// Copies that never end: their slots and buffers are kept for good, and counted; the stop ends in time, and so does
    /// the feeding thread.
    fn a_stop_gives_up_copies_that_never_end() {
        let (fake, bytes) = (fake("stop-stuck", 1), Bytes::new());
        for held in [true, false] {
            let registered = fake.live_registrations().len();
            let (allocated, mapped) = (fake.live_allocations().len(), rings().len());
            let feed = bytes.builder(&fake).prefetch(3).start().unwrap();
            let copies = copy_stream(&fake, 0);
            fake.hold(copies, true);
            let stream = fake.user_stream(1);
            let learner = learner_on(&feed, 0, stream).unwrap();
            let mut writer = feed.writer(1).unwrap();
            (0..3).for_each(|value| bytes.write(&mut writer, value).unwrap());
            let batch = Some(learner.next_batch().unwrap()).filter(|_| held);
            until("three copies are queued", || feed.metrics().devices[0].copies_in_flight == 3);
            let deadline = Duration::from_secs(2);
            let begun = Instant::now();
            let report = feed.stop(deadline).unwrap();
            assert!(begun.elapsed() >= deadline / 2, "it had time");
            assert_eq!(report.threads_given_up, [""; 0], "{report}");
            assert_eq!((report.quarantined_slots, report.still_out, report.untaken_rows), (3, 0, 2), "{report}");
            assert!(report.to_string().contains("3 slots are quarantined"), "{report}");
            let metrics = feed.metrics();
            assert_eq!(metrics.quarantined_slots, 3);
            assert_eq!(metrics.devices[0].quarantined_buffers, if held { 2 } else { 3 });
            until("the threads have ended", || feed_threads().is_empty());
            assert_eq!(fake.live_registrations().len(), registered + 1, "page-locked for good");
            assert_eq!(rings().len(), mapped + 1, "mapped for good");

            // Whatever is dropped now waits for nothing, and frees nothing that is still written.
            drop((batch, learner, writer, feed));
            assert_eq!(fake.live_allocations().len(), allocated + 3);
            assert_eq!(fake.hazards(), common::fake::Hazards::default());
            let copied: Vec<u64> = fake.calls_of("cuMemcpyHtoDAsync_v2").iter().rev().take(3).map(|call| call.args[0]).collect();
            fake.hold(copies, false);
            fake.run_all();
            for (value, address) in [2, 1, 0].into_iter().zip(copied) {
                assert_bytes(&fake, address, value, "late, and from memory that nobody gave away");
            }
        }
    }
}

alone! {
    /// The source ended long ago; the copies of its last batches are still queued.
    fn a_stop_behind_a_natural_end_waits_for_copies_too() {
        let (fake, bytes) = (fake("stop-ended", 1), Bytes::new());
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..2).for_each(|value| bytes.write(&mut writer, value).unwrap());
        drop(writer);
        drop((learner.next_batch().unwrap(), learner.next_batch().unwrap()));
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended);
        let report = std::thread::scope(|scope| {
            let stopping = scope.spawn(|| feed.stop(DEADLINE).unwrap());
            std::thread::sleep(Duration::from_millis(100));
            assert!(!stopping.is_finished());
            fake.run_all();
            stopping.join().unwrap()
        });
        assert_eq!((report.dropped_rows(), report.still_out, report.quarantined_slots), (0, 0, 0));
        drop((learner, feed));
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// A feeding thread that is stuck in a call of CUDA is given up by name, and still every wait ends at once.
    fn a_stop_ends_every_wait_also_when_the_feeding_thread_is_stuck() {
        let (fake, bytes) = (fake("stop-hung", 1), Bytes::new());
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let writer = feed.writer(1).unwrap();
        fake.sleep("cuMemcpyHtoDAsync_v2", 3_000);
        let writing = bytes.write_on(writer, [1; 100]);
        let waiting = std::thread::spawn(move || (learner.next_batch(), learner));
        until("it is stuck", || fake.calls_of("cuMemcpyHtoDAsync_v2").len() == 1);
        let begun = Instant::now();
        let report = feed.stop(Duration::from_millis(200)).unwrap();
        let (next, learner) = waiting.join().unwrap();
        assert_eq!(next.unwrap_err(), NextError::Closed(Closed::Stopped));
        assert_eq!(writing.join().unwrap().unwrap_err().kind(), ErrorKind::Stopped);
        if begun.elapsed() < Duration::from_secs(2) {
            assert_eq!(report.threads_given_up, ["pr0-feeding0"], "{report}");
            assert_eq!(report.still_out, 1, "the slot that it copies");
        }
        // When the call returns after all, the thread ends by itself. Its batch was lost in between.
        fake.auto_run(true);
        until("the thread has ended", || feed_threads().is_empty());
        drop((feed, learner));
        assert_devices_are_clean(&fake, 1);
    }
}

// ---- learners that go ----------------------------------------------------------------------------------------------

alone! {
    /// Batches that it had not taken are lost and counted; what comes later is the host's.
    fn when_the_device_learner_goes_first_the_host_learner_goes_on() {
        let (fake, bytes) = (fake("first", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0, stream).unwrap());
        let mut writer = feed.writer(1).unwrap();
        (0..2).for_each(|value| bytes.write(&mut writer, value).unwrap());
        until("both wait on the device", || feed.metrics().devices[0].batches_waiting == 2);
        drop(device);
        assert_eq!(feed.metrics().devices[0].batches_waiting, 0);
        assert_eq!(feed.metrics().dropped_rows, 2);
        let writing = bytes.write_on(writer, 2..50);
        for expected in 2..50 {
            assert_eq!(host.next_batch().unwrap().sequence_number(), expected);
        }
        assert_eq!(host.next_batch().unwrap_err(), NextError::Ended);
        writing.join().unwrap().unwrap();
        let report = feed.stop(DEADLINE).unwrap();
        assert_eq!((report.untaken_rows, report.still_out), (2, 0), "{report}");
        drop((host, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    fn when_the_last_learner_goes_writers_hear_of_it() {
        let (fake, bytes) = (fake("last", 1), Bytes::new());
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0, stream).unwrap());
        let writing = bytes.write_on(feed.writer(1).unwrap(), [1; 100]);
        until("copies are queued", || feed.metrics().devices[0].copies_in_flight == 2);
        drop(host);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!writing.is_finished());
        let batch = device.next_batch().unwrap();
        drop(device); // during the copies
        let error = writing.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("the learner was dropped"), "{error}");
        fake.run_all();
        assert_bytes(&fake, bytes.address(&batch), 1, "a batch outlives its learner");
        until("the slots are home", || feed.metrics().free_slots == 4);
        let report = feed.stop(DEADLINE).unwrap();
        assert_eq!((report.still_out, report.quarantined_slots, report.fault.is_some()), (0, 0, false), "{report}");
        assert_eq!(report.untaken_rows + 1, feed.metrics().rows, "all but the one that was taken");
        drop((batch, feed));
        fake.auto_run(true);
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    /// The bytes stay, and the last of all to go gives everything back, on whatever thread.
    fn a_batch_outlives_learner_and_feed() {
        let (fake, bytes) = (fake("outlives", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 5).unwrap();
        let batch = learner.next_batch().unwrap();
        drop(learner);
        drop(feed);
        until("the threads have ended", || feed_threads().is_empty());
        assert_eq!(fake.live_registrations(), [], "ring and downloads are no longer needed");
        assert_eq!(rings(), []);
        assert_eq!(fake.live_allocations().len(), 1);
        batch.synchronize().unwrap();
        assert_bytes(&fake, bytes.address(&batch), 5, "on the device");
        // SAFETY: a stream of the test's.
        unsafe { batch.wait_on(LEGACY as *mut _) }.unwrap();
        std::thread::spawn(move || drop(batch)).join().unwrap();
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    /// The per-thread stream is another one on every thread, so only the learner's own thread can order a release.
    fn a_learner_on_its_threads_own_stream_stays_there() {
        let (fake, bytes) = (fake("per-thread", 1), Bytes::new());
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let learner = learner_on(&feed, 0, PER_THREAD).unwrap();
        let writing = bytes.write_on(feed.writer(1).unwrap(), 0..8);
        let (first, second) = (learner.next_batch().unwrap(), learner.next_batch().unwrap());
        let address = bytes.address(&first);
        let records = || fake.calls_of("cuEventRecord").len();
        let recorded = records();
        std::thread::scope(|scope| {
            let elsewhere = || {
                for error in [learner.next_batch().unwrap_err(), learner.try_next().unwrap_err()] {
                    assert_eq!(error, NextError::Device(DeviceUseError::OtherThread));
                }
                // SAFETY: nothing is read, since it is refused.
                let refused = unsafe { learner.download(address, 1, |_| unreachable!()) };
                assert_eq!(refused, Err(DeviceUseError::OtherThread));
                drop(first);
            };
            scope.spawn(elsewhere).join().unwrap();
        });
        assert_eq!(records(), recorded, "its release could not be recorded there");
        fake.run_all();
        assert_bytes(&fake, address, 0, "so nothing was copied over it");
        let third = learner.next_batch().unwrap();
        assert_eq!(bytes.address(&third), address, "released on the right thread, and used again");
        let me = fake.thread();
        let log = fake.calls();
        assert!(log.iter().any(|call| call.function == "cuEventRecord" && call.args[1] == 2 && call.thread == me));
        assert!(log.iter().all(|call| call.function != "cuEventRecord" || call.args[1] != 2 || call.thread == me));
        drop((second, third));

        // Also while it waits: nobody but itself can release what other threads drop.
        fake.auto_run(true);
        let held = [learner.next_batch().unwrap(), learner.next_batch().unwrap()];
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(held);
        });
        assert_eq!(learner.next_batch().unwrap().sequence_number(), 5);
        writing.join().unwrap().unwrap();
        drop((learner, feed));
        assert_devices_are_clean(&fake, 0);
    }
}

// ---- forks ---------------------------------------------------------------------------------------------------------

unsafe extern "C" {
    safe fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    safe fn _exit(status: i32) -> !;
}

/// Runs `body` in a forked child and returns whether it went well.
fn in_child(body: impl FnOnce()) -> bool {
    match fork() {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            let went_well = catch_unwind(AssertUnwindSafe(body)).is_ok();
            _exit(i32::from(!went_well))
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of ours, and an integer of ours.
            assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

alone! {
    fn a_forked_child_is_refused_everything_and_calls_nothing() {
        let (fake, bytes) = (fake("fork", 1), Bytes::new());
        let log = common::scratch("fork-log").join("log");
        fake.auto_run(true);
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let stream = fake.user_stream(1);
        let memory = fake.user_memory(Bytes::LEN);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let (host, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
        let mut writer = feed.writer(1).unwrap();
        bytes.write(&mut writer, 1).unwrap();
        let batch = learner.next_batch().unwrap();
        let metrics = feed.metrics();
        assert_eq!(metrics.batches_taken, 1);
        // A batch for the host: taken while the device has both of its buffers in use.
        bytes.write(&mut writer, 2).unwrap();
        let second = learner.next_batch().unwrap();
        bytes.write(&mut writer, 3).unwrap();
        let on_host = host.next_batch().unwrap();
        bytes.write(&mut writer, 4).unwrap();
        // SAFETY: the test's own memory and stream.
        let ticket = unsafe { copier.copy_to_device(host.next_batch().unwrap(), memory, stream as *mut _) }.unwrap();
        until("nothing is under way", || feed.metrics().devices[0].copies_in_flight == 0);
        fake.log_file(&log);
        let used = |error: DeviceUseError| assert_eq!(error, DeviceUseError::Closed(Closed::UsedAfterFork));
        let parts = std::sync::Mutex::new(Some((learner, batch, second, host, on_host, copier, ticket, writer, feed)));
        let went_well = in_child(|| {
            let parts = parts.lock().unwrap().take().unwrap();
            let (learner, batch, second, host, on_host, copier, ticket, writer, feed) = parts;
            let closed = NextError::Closed(Closed::UsedAfterFork);
            assert_eq!(learner.next_batch().unwrap_err(), closed);
            assert_eq!(learner.try_next().unwrap_err(), closed);
            assert_eq!(learner.next_timeout(Duration::from_secs(1)).unwrap_err(), closed);
            // SAFETY: refused before anything is done with these.
            unsafe {
                used(learner.download(memory, 1, |_| unreachable!()).unwrap_err());
                used(batch.wait_on(stream as *mut _).unwrap_err());
                used(ticket.wait_on(stream as *mut _).unwrap_err());
                let error = copier.copy_to_device(on_host, memory, stream as *mut _).unwrap_err();
                used(error.error);
                drop(error.batch.expect("handed back"));
            }
            used(batch.synchronize().unwrap_err());
            used(ticket.is_done().unwrap_err());
            used(ticket.synchronize().unwrap_err());
            drop((learner, batch, second, host, copier, ticket, writer, feed));
        });
        assert!(went_well);
        let child_called = |line: &&str| line.contains("pid=") && !line.contains(&format!("pid={} ", std::process::id()));
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        assert_eq!(text.lines().filter(child_called).collect::<Vec<_>>(), [""; 0]);

        // The parent goes on.
        let (learner, batch, second, host, on_host, copier, ticket, writer, feed) = parts.into_inner().unwrap().unwrap();
        assert_bytes(&fake, bytes.address(&batch), 1, "the parent's batch");
        drop((batch, second));
        assert!(ticket.is_done().unwrap());
        drop((learner, host, on_host, copier, ticket, writer, feed));
        assert_eq!(fake.live_allocations().len(), 1, "the test's own");
        life::assert_nothing_is_left_with(&fake);
    }
}
