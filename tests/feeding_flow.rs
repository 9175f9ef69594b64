//! What reaches a device, when slots come home, and in which order everything is queued: against the fake driver, whose
//! copies read their source when they run, so that a slot which is reused too early shows up as wrong bytes.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::{Call, Fake};
use feeding::{
    Bytes, DEADLINE, LEGACY, assert_bytes, assert_devices_are_clean, copy_stream, fake, learner_on, search, until,
};
use life::alone;
use pinring::*;
use std::collections::HashMap;
use std::time::{Duration, Instant};

// ---- whole batches -------------------------------------------------------------------------------------------------

alone! {
    fn every_batch_arrives_whole() {
        let fake = fake("whole", 1);
        for delay in [0, 300] {
            fake.auto_run_after(Some(Duration::from_micros(delay)));
            feeding::batches_arrive_whole(&search(&fake), Pinning::Required, 1, (16, 8), 60);
            feeding::batches_arrive_whole(&search(&fake), Pinning::Required, 1, (5, 300), 30);
        }
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn with_two_devices_every_batch_reaches_one_of_them() {
        let fake = fake("two", 2);
        fake.auto_run_after(Some(Duration::from_micros(200)));
        feeding::batches_arrive_whole(&search(&fake), Pinning::Required, 2, (16, 8), 200);
        for device in [0, 1] {
            let copies = |call: &&Call| call.function == "cuMemcpyHtoDAsync_v2" && call.device == Some(device);
            assert!(fake.calls().iter().filter(copies).count() > 10, "device {device} had its share");
        }
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// No page is locked, the driver stages every copy, and the metrics say so.
    fn an_unpinned_feed_feeds_too() {
        let fake = fake("pageable", 1);
        fake.auto_run_after(Some(Duration::from_micros(100)));
        feeding::batches_arrive_whole(&search(&fake), Pinning::Off, 1, (16, 8), 60);
        assert_eq!(fake.calls_of("cudaHostRegister"), []);
        assert!(fake.functions().iter().all(|function| !function.starts_with("cuda")), "no runtime was asked");
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// A copy from ordinary memory may wait on the host for what its stream waits for: then no buffer is used before its
    /// release has happened.
    fn from_ordinary_memory_no_copy_is_issued_behind_a_release_that_is_pending() {
        let (fake, bytes) = (fake("pageable-order", 1), Bytes::new());
        let feed = bytes.builder(&fake).pinning(Pinning::Off).prefetch(1).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let writing = bytes.write_on(feed.writer(1).unwrap(), [0, 1]);
        drop(learner.next_batch().unwrap());
        assert!(learner.next_timeout(Duration::from_millis(50)).unwrap().is_none());
        fake.run_all();
        let batch = learner.next_batch().unwrap();
        fake.run_all();
        assert_bytes(&fake, bytes.address(&batch), 1, "the second batch");
        drop(batch);
        fake.run_all();
        writing.join().unwrap().unwrap();
    }
}

alone! {
    /// Two learners, one of the host and one of a device: each batch goes to one of them.
    fn a_host_learner_and_a_device_learner_share_a_feed() {
        let (fake, bytes) = (fake("shared", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0, stream).unwrap());
        let writing = bytes.write_on(feed.writer(1).unwrap(), 0..200);
        let (mut on_host, mut on_device) = (Vec::new(), Vec::new());
        let of_host = |batch: Batch| {
            assert!(batch.slice(bytes.column).iter().all(|byte| u64::from(*byte) == batch.sequence_number()));
            batch.sequence_number()
        };
        let of_device = |batch: DeviceBatch| {
            batch.synchronize().unwrap();
            assert_bytes(&fake, bytes.address(&batch), batch.sequence_number() as u8, "on the device");
            batch.sequence_number()
        };
        // One each in turn; then whoever comes first.
        on_host.push(of_host(host.next_batch().unwrap()));
        on_device.push(of_device(device.next_batch().unwrap()));
        std::thread::scope(|scope| {
            scope.spawn(|| on_host.extend(host.iter().map(|batch| of_host(batch.unwrap()))));
            loop {
                match device.next_batch() {
                    Ok(batch) => on_device.push(of_device(batch)),
                    Err(NextError::Ended) => break,
                    Err(error) => panic!("{error}"),
                }
            }
        });
        writing.join().unwrap().unwrap();
        let mut all = [on_host, on_device].concat();
        all.sort();
        assert!(all.into_iter().eq(0..200));
        let metrics = feed.metrics();
        assert_eq!((metrics.batches_taken, metrics.batches_held, metrics.devices[0].batches_held), (200, 0, 0));
        drop((host, device, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

// ---- slots come home by event only ---------------------------------------------------------------------------------

alone! {
    /// Copies of all four slots are queued, their handles dropped at once; sixteen more rows are written meanwhile.
    fn no_slot_is_reused_before_its_copy_has_run() {
        let (fake, bytes) = (fake("reuse", 1), Bytes::new());
        let feed = bytes.builder(&fake).prefetch(4).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..4).for_each(|slot| bytes.write(&mut writer, slot).unwrap());
        let addresses = [(); 4].map(|()| bytes.address(&learner.next_batch().unwrap()));
        let writing = bytes.write_on(writer, [0xEE; 16]);
        until("all slots are out", || feed.metrics().devices[0].copies_in_flight == 4);
        std::thread::sleep(Duration::from_millis(50));
        let metrics = feed.metrics();
        assert_eq!((metrics.steps, metrics.free_slots, metrics.batches), (4, 0, 4), "the writer waits");
        assert!(!writing.is_finished());

        assert!(fake.run_all() >= 8);
        for (slot, address) in addresses.into_iter().enumerate() {
            assert_bytes(&fake, address, slot as u8, "as it was when the copy was issued");
        }
        let mut ee = 0;
        while ee < 16 {
            fake.run_all();
            let Some(batch) = learner.next_timeout(Duration::from_millis(1)).unwrap() else { continue };
            fake.run_all();
            assert_bytes(&fake, bytes.address(&batch), 0xEE, "a later row");
            ee += 1;
        }
        writing.join().unwrap().unwrap();
        fake.auto_run(true);
        drop((learner, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    /// The next copy into a buffer waits for what the learner's stream had been given when the batch was dropped.
    fn a_release_is_ordered_behind_the_learners_stream() {
        let (fake, bytes) = (fake("release", 1), Bytes::new());
        let feed = bytes.builder(&fake).prefetch(1).start().unwrap();
        let copies = copy_stream(&fake, 0);
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        bytes.write(&mut writer, 7).unwrap();
        let batch = learner.next_batch().unwrap();
        let address = bytes.address(&batch);
        fake.run_all();
        fake.hold(stream, true); // a kernel that reads the batch, and takes its time
        drop(batch);
        bytes.write(&mut writer, 8).unwrap();
        let next = learner.next_batch().unwrap(); // handed over: the host waits for nothing
        assert_eq!(bytes.address(&next), address);
        fake.run_all();
        assert_bytes(&fake, address, 7, "while the kernel runs");
        let queued = fake.live_streams().into_iter().find(|stream| stream.handle == copies).unwrap().queued;
        assert_eq!(queued, 3, "the wait, the copy and its record");
        fake.hold(stream, false);
        fake.run_all();
        assert_bytes(&fake, address, 8, "behind the kernel");
        drop(next);
        fake.auto_run(true);
        drop((learner, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

// ---- order in the log ----------------------------------------------------------------------------------------------

/// Checks the order of one device's calls, batch by batch, and returns how many there were: the copy and its record in
/// the copy stream; then the learner's stream waits; then the release is recorded there; then the copy stream waits for
/// that, and the next copy goes to this buffer.
fn check_order(calls: &[Call], copies: usize, learner: usize) -> usize {
    /// What was seen of a buffer last.
    #[derive(PartialEq, Debug)]
    enum Seen {
        Copied,
        Ready(u64),
        Waited(u64),
    }
    let (mut buffers, mut released, mut last, mut batches) = (HashMap::new(), Vec::new(), None, 0);
    for call in calls.iter().filter(|call| call.code == Some(0)) {
        let [a, b, _, d, _] = call.args;
        match call.function.as_str() {
            "cuMemcpyHtoDAsync_v2" => {
                assert_eq!(d, copies as u64);
                match buffers.insert(a, Seen::Copied) {
                    None => {}
                    Some(Seen::Waited(_)) => {
                        assert!(!released.is_empty(), "the copy stream waited for a release: {call:?}");
                        released.clear();
                    }
                    Some(other) => panic!("{a:#x} is overwritten while {other:?}"),
                }
                (last, batches) = (Some(a), batches + 1);
            }
            "cuEventRecord" if b == copies as u64 => {
                let buffer = last.take().expect("a copy before its record");
                assert_eq!(buffers.insert(buffer, Seen::Ready(a)), Some(Seen::Copied));
            }
            "cuStreamWaitEvent" if a == learner as u64 => {
                let buffer = buffers.values_mut().find(|seen| **seen == Seen::Ready(b)).expect("an event of a copy");
                *buffer = Seen::Waited(b);
            }
            "cuStreamWaitEvent" if a == copies as u64 => released.push(b),
            _ => {}
        }
    }
    batches
}

alone! {
    fn the_learners_stream_waits_for_each_copy_and_the_copy_stream_for_each_release() {
        let (fake, bytes) = (fake("order", 2), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).device(1).start().unwrap();
        let streams = [0, 1].map(|device| {
            let copies = copy_stream(&fake, device);
            fake.set_device(device);
            (device, copies, fake.user_stream(1))
        });
        let learners = streams.map(|(device, _, stream)| (device, learner_on(&feed, device, stream).unwrap()));
        let writing = bytes.write_on(feed.writer(1).unwrap(), (0..240).collect::<Vec<u8>>());
        std::thread::scope(|scope| {
            for (_, learner) in learners {
                scope.spawn(move || while let Ok(batch) = learner.next_batch() { drop(batch) });
            }
        });
        writing.join().unwrap().unwrap();
        let log = fake.calls();
        let mut batches = 0;
        for (device, copies, stream) in streams {
            let calls: Vec<Call> = log.iter().filter(|call| call.device == Some(device)).cloned().collect();
            let seen = check_order(&calls, copies, stream);
            assert!(seen > 2, "device {device} had its share");
            batches += seen;
        }
        assert_eq!(batches, 240);

        // No event of one device was ever recorded, waited for or asked about on the other.
        let owners: HashMap<u64, i32> = fake.live_events().iter().map(|event| (event.handle as u64, event.device)).collect();
        assert!(owners.len() >= 2 * 4);
        for call in &log {
            let event = match call.function.as_str() {
                "cuEventRecord" | "cuEventQuery" => call.args[0],
                "cuStreamWaitEvent" => call.args[1],
                _ => continue,
            };
            assert_eq!(owners.get(&event).copied(), call.device, "{call:?}");
            assert!(matches!(call.code, Some(0 | 600)), "{call:?}");
        }
        drop(feed);
        assert_devices_are_clean(&fake, 2);
    }
}

alone! {
    /// Two consumers on two streams: each stream has a wait of its own behind the copy, and reads nothing before it.
    fn a_second_stream_waits_for_the_copy_too() {
        let (fake, bytes) = (fake("second-stream", 1), Bytes::new());
        let feed = bytes.builder(&fake).start().unwrap();
        let copies = copy_stream(&fake, 0);
        let (stream, second) = (fake.user_stream(1), fake.user_stream(1));
        let learner = learner_on(&feed, 0, stream).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 7).unwrap();
        let batch = learner.next_batch().unwrap();
        // SAFETY: a stream of the device.
        unsafe { batch.wait_on(second as *mut _) }.unwrap();
        let ready = batch.ready_event() as u64;
        let log: Vec<Call> = fake.calls();
        let place = |function: &str, args: &[(usize, u64)]| {
            let found = |call: &Call| call.function == function && args.iter().all(|&(i, arg)| call.args[i] == arg);
            log.iter().position(found).unwrap_or_else(|| panic!("{function} with {args:?}"))
        };
        let copied = place("cuMemcpyHtoDAsync_v2", &[(3, copies as u64)]);
        let recorded = place("cuEventRecord", &[(0, ready), (1, copies as u64)]);
        let waits = [stream, second].map(|stream| place("cuStreamWaitEvent", &[(0, stream as u64), (1, ready)]));
        assert!(copied < recorded && waits.iter().all(|wait| recorded < *wait), "{copied} {recorded} {waits:?}");
        let queued = || fake.live_streams().into_iter().find(|info| info.handle == second).unwrap().queued;
        fake.run(second);
        assert_eq!(queued(), 1, "it waits");
        fake.run_all();
        assert_eq!(queued(), 0);
        assert_bytes(&fake, bytes.address(&batch), 7, "what it reads then");
    }
}

// ---- what the learner may hold -------------------------------------------------------------------------------------

alone! {
    fn holding_every_buffer_is_an_error_at_once_for_try_next_and_after_a_second_otherwise() {
        let (fake, bytes) = (fake("all-held", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        let none = learner.try_next().unwrap();
        assert!(none.is_none(), "nothing was written");
        (0..4).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let held = [learner.next_batch().unwrap(), learner.next_batch().unwrap()];
        let all_held = NextError::AllHeld { held: 2, buffers: 2 };
        assert_eq!(learner.try_next().unwrap_err(), all_held);
        assert_eq!(learner.next_timeout(Duration::from_millis(5)).unwrap_err(), all_held);
        let begun = Instant::now();
        assert_eq!(learner.next_batch().unwrap_err(), all_held);
        assert!(begun.elapsed() >= Duration::from_secs(1), "a framework's queue may give back late");
        drop(held);
        assert_eq!(learner.next_batch().unwrap().sequence_number(), 2);
    }
}

alone! {
    /// The buffers come back while nothing else happens that could wake the feeding thread.
    fn the_end_is_heard_also_by_a_learner_that_held_every_buffer() {
        let (fake, bytes) = (fake("end-held", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..2).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let held = [learner.next_batch().unwrap(), learner.next_batch().unwrap()];
        drop(writer);
        until("the slots are home", || feed.metrics().free_slots == 4);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended, "no further one can come");
        drop(held);
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended);
        assert_eq!(learner.try_next().unwrap_err(), NextError::Ended);
    }
}

// ---- the thread that takes -----------------------------------------------------------------------------------------

alone! {
    /// Whatever device the caller's thread has selected, or none: it stays.
    fn no_call_changes_the_callers_context() {
        let (fake, bytes) = (fake("context", 2), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).device(1).downloads(Bytes::LEN).start().unwrap();
        fake.set_device(1);
        let (stream, other) = (fake.user_stream(1), fake.user_stream(1));
        let memory = fake.user_memory(Bytes::LEN);
        let mut writer = feed.writer(1).unwrap();
        fake.set_device(0);
        let mut learner = Some(learner_on(&feed, 1, stream).unwrap());
        assert_eq!(fake.current_device(), Some(0));
        fake.set_device(1);
        let mut all = |selected: Option<i32>| {
            let stays = |call: &str| {
                assert_eq!((fake.current_device(), fake.contexts()), (selected, 0), "behind {call}");
            };
            stays("nothing");
            let here = learner.take().unwrap();
            bytes.write(&mut writer, 1).unwrap();
            let batch = here.next_batch().unwrap();
            stays("next_batch");
            here.try_next().unwrap();
            stays("try_next");
            // SAFETY: a stream of the device.
            unsafe { batch.wait_on(other as *mut _) }.unwrap();
            stays("wait_on");
            batch.synchronize().unwrap();
            stays("synchronize");
            // SAFETY: the batch's own bytes.
            unsafe { here.download(bytes.address(&batch), Bytes::LEN, |_| {}) }.unwrap();
            stays("download");
            drop(batch);
            stays("a drop");
            feed.metrics();
            learner = Some(here);
        };
        all(Some(1));
        fake.set_device(0);
        all(Some(0));
        let all = std::sync::Mutex::new(all);
        std::thread::scope(|scope| {
            scope.spawn(|| all.lock().unwrap()(None));
        });
        let host = feed.learner().unwrap();
        drop(learner);
        assert_eq!(fake.current_device(), Some(0));

        // The copier's calls.
        bytes.write(&mut writer, 2).unwrap();
        bytes.write(&mut writer, 3).unwrap();
        let copier = feed.copier(1).unwrap();
        // SAFETY: the test's own memory and stream.
        let ticket = unsafe { copier.copy_to_device(host.next_batch().unwrap(), memory, stream as *mut _) }.unwrap();
        let shared = host.next_batch().unwrap().share();
        // SAFETY: as above.
        unsafe { copier.copy_column_to_device(&shared, bytes.column, memory, stream as *mut _) }.unwrap();
        // SAFETY: a stream of the device.
        unsafe { ticket.wait_on(other as *mut _) }.unwrap();
        ticket.synchronize().unwrap();
        assert!(ticket.is_done().unwrap());
        drop((shared, host, writer, feed, copier, ticket));
        assert_eq!((fake.current_device(), fake.contexts()), (Some(0), 0));
        assert_eq!([0, 1].map(|device| fake.retained(device)), [0, 0]);
    }
}

alone! {
    /// A feed of the second device alone: whatever is asked of a runtime is asked with that device's context current, since
    /// elsewhere it would make one on the first.
    fn no_context_is_made_on_a_device_that_is_not_fed() {
        let (fake, bytes) = (fake("stray", 2), Bytes::new());
        fake.auto_run(true);
        let builder = Feed::builder(bytes.sample()).batch(1).pinning(Pinning::Required).cuda(search(&fake));
        let feed = builder.device(1).downloads(Bytes::LEN).start().unwrap();
        let learner = learner_on(&feed, 1, LEGACY).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 1).unwrap();
        drop(learner.next_batch().unwrap());
        feed.stop(DEADLINE).unwrap();
        drop((learner, feed));
        let log = fake.calls();
        let (mut runtimes, mut retained) = (0, 0);
        for call in log {
            if call.function.starts_with("cudaHost") || call.function == "cudaFree" {
                assert_eq!(call.device, Some(1), "{call:?}");
                runtimes += 1;
            }
            if call.function == "cuDevicePrimaryCtxRetain" {
                assert_eq!(call.args[1], 1, "{call:?}");
                retained += 1;
            }
        }
        assert!(runtimes > 4 && retained > 0, "{runtimes} {retained}");
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// Nothing is out and nothing comes: the feeding thread sleeps.
    fn an_idle_feed_calls_nothing_and_takes_no_time() {
        let (fake, bytes) = (fake("idle", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        for value in 0..8 {
            bytes.write(&mut writer, value).unwrap();
            drop(learner.next_batch().unwrap());
        }
        until("the slots are home", || feed.metrics().free_slots == 4);
        let feeding = life::threads().into_iter().find(|(_, name)| name == "pr0-feeding0").unwrap().0;
        std::thread::sleep(Duration::from_millis(100));
        let before = (fake.calls().len(), cpu_ticks(feeding));
        std::thread::sleep(Duration::from_millis(1500));
        let after = (fake.calls().len(), cpu_ticks(feeding));
        assert_eq!(after.0, before.0, "calls of an idle feed");
        assert!(after.1 - before.1 <= 1, "{before:?} {after:?} in hundredths of a second");
        // It is not dead.
        bytes.write(&mut writer, 9).unwrap();
        assert_eq!(learner.next_batch().unwrap().sequence_number(), 8);
    }
}

/// The time that a thread has run, in the kernel's ticks of 10 ms.
fn cpu_ticks(thread: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

// ---- settings ------------------------------------------------------------------------------------------------------

fn error_text(builder: FeedBuilder) -> (ErrorKind, String) {
    let error = builder.start().unwrap_err();
    (error.kind(), error.to_string())
}

alone! {
    fn settings_that_cannot_be_met_are_refused() {
        let (fake, bytes) = (fake("settings", 1), Bytes::new());
        let (kind, text) = error_text(bytes.builder(&fake).device(0));
        assert_eq!(kind, ErrorKind::Config);
        assert!(text.contains("device 0 is attached twice"), "{text}");
        let (kind, text) = error_text(bytes.builder(&fake).prefetch(0));
        assert_eq!(kind, ErrorKind::Config);
        assert!(text.contains("give `.prefetch` at least 1"), "{text}");
        let (kind, text) = error_text((1..17).fold(bytes.builder(&fake), FeedBuilder::device));
        assert_eq!(kind, ErrorKind::Config);
        assert!(text.contains("17 devices: a feed takes at most 16"), "{text}");
        assert_eq!(fake.calls(), [], "all that is known without CUDA");

        for ordinal in [1, 7, -1] {
            let (kind, text) = error_text(bytes.builder(&fake).device(ordinal));
            assert_eq!(kind, ErrorKind::Cuda);
            assert!(text.contains(&format!("there is no device {ordinal}: 1 device is visible")), "{text}");
            assert_devices_are_clean(&fake, 0);
            life::assert_nothing_is_left_with(&fake);
        }

        let feed = bytes.builder(&fake).start().unwrap();
        let learner = learner_on(&feed, 0, LEGACY).unwrap();
        let taken = learner_on(&feed, 0, LEGACY).unwrap_err();
        assert_eq!((taken.kind(), taken.to_string().contains("device 0 was taken already")), (ErrorKind::Misuse, true), "{taken}");
        drop(learner);
        for error in [learner_on(&feed, 1, LEGACY).unwrap_err(), feed.copier(1).unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Misuse);
            assert!(error.to_string().contains("with the devices [0], not with 1: add `.device(1)`"), "{error}");
        }
        feed.stop(DEADLINE).unwrap();
        assert_eq!(learner_on(&feed, 0, LEGACY).unwrap_err().kind(), ErrorKind::Stopped);
    }
}

alone! {
    fn without_a_driver_the_start_says_what_is_missing() {
        let bytes = Bytes::new();
        let search = CudaSearch::new().library_only("/no/such/libcudart.so.13").driver("/no/such/libcuda.so.1");
        let fake: Fake = fake("none", 1);
        let (kind, text) = error_text(bytes.builder(&fake).pinning(Pinning::Off).cuda(search));
        assert_eq!(kind, ErrorKind::Cuda);
        for part in ["device 0 needs the CUDA driver", "/no/such/libcuda.so.1", "cannot open shared object file", "--gpus all"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(fake.calls(), []);
        life::assert_nothing_is_left();

        // A driver without devices.
        fake.devices(0);
        let (kind, text) = error_text(bytes.builder(&fake).pinning(Pinning::Off));
        assert_eq!(kind, ErrorKind::Cuda);
        assert!(text.contains("cuInit returned 100 CUDA_ERROR_NO_DEVICE"), "{text}");
    }
}
