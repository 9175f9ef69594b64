//! While a learner captures a graph: its own calls are refused and its capture stays whole; what it drops is released
//! later; and no thread of a feed spoils a capture of anybody's.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use feeding::{Bytes, DEADLINE, LEGACY, assert_bytes, assert_devices_are_clean, fake, learner_on, search, until};
use life::alone;
use pinring::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The capture mode of `torch.cuda.graph`: calls that could change its meaning fail on every thread.
const GLOBAL: u32 = 0;

alone! {
    fn calls_on_a_stream_that_captures_are_refused_and_the_capture_is_whole() {
        let (fake, bytes) = (fake("own-capture", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let (stream, other) = (fake.user_stream(1), fake.user_stream(1));
        let memory = fake.user_memory(Bytes::LEN);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let (host, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
        let mut writer = feed.writer(1).unwrap();
        (0..2).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let (first, second) = (learner.next_batch().unwrap(), learner.next_batch().unwrap());
        (2..6).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let on_host = host.next_batch().unwrap();
        let shared = host.next_batch().unwrap().share();
        // SAFETY: the test's own memory and stream.
        let ticket = unsafe { copier.copy_column_to_device(&shared, bytes.column, memory, other as *mut _) }.unwrap();

        let capturing = NextError::Device(DeviceUseError::Capturing);
        for mode in [GLOBAL, 1, 2] {
            fake.begin_capture(stream, mode);
            assert_eq!(learner.next_batch().unwrap_err(), capturing);
            assert_eq!(learner.try_next().unwrap_err(), capturing);
            assert_eq!(learner.next_timeout(Duration::from_secs(5)).unwrap_err(), capturing);
            // SAFETY: all refused.
            unsafe {
                let refused = learner.download(bytes.address(&first), Bytes::LEN, |_| unreachable!());
                assert_eq!(refused, Err(DeviceUseError::Capturing));
                assert_eq!(first.wait_on(stream as *mut _), Err(DeviceUseError::Capturing));
                assert_eq!(ticket.wait_on(stream as *mut _), Err(DeviceUseError::Capturing));
                let refused = copier.copy_column_to_device(&shared, bytes.column, memory, stream as *mut _).unwrap_err();
                assert_eq!(refused, DeviceUseError::Capturing);
            }
            assert!(fake.end_capture(stream), "mode {mode}");
        }
        assert_eq!(Error::from(DeviceUseError::Capturing).kind(), ErrorKind::Misuse);

        // A whole batch comes back.
        fake.begin_capture(stream, GLOBAL);
        // SAFETY: refused.
        let refused = unsafe { copier.copy_to_device(on_host, memory, stream as *mut _) }.unwrap_err();
        assert_eq!(refused.error, DeviceUseError::Capturing);
        let on_host = refused.batch.expect("handed back");
        assert_eq!(on_host.slice(bytes.column), [2; Bytes::LEN]);
        // Another stream may wait, also now.
        // SAFETY: a stream of the device.
        unsafe { first.wait_on(other as *mut _) }.unwrap();

        // What is dropped in a capture is released behind it.
        let records = || fake.calls_of("cuEventRecord").len();
        let (address, before) = (bytes.address(&first), records());
        drop(first);
        assert_eq!(records(), before, "a record would have gone into the graph");
        assert_eq!(feed.metrics().devices[0].batches_held, 1);
        drop((on_host, shared));
        std::thread::sleep(Duration::from_millis(30));
        assert_bytes(&fake, address, 0, "nothing was copied over it meanwhile");
        assert!(fake.end_capture(stream), "whole");
        let next = learner.next_batch().unwrap();
        assert_eq!((bytes.address(&next), next.sequence_number()), (address, 4));
        next.synchronize().unwrap();
        assert_bytes(&fake, address, 4, "used again");
        drop((second, next, learner, host, copier, ticket, writer, feed));
        assert_eq!((fake.live_allocations().len(), fake.live_events().len()), (1, 0));
        assert_eq!(fake.hazards(), common::fake::Hazards::default());
    }
}

alone! {
    /// The legacy default stream is ordered with streams that capture: work in it would break theirs.
    fn a_learner_on_the_legacy_stream_waits_out_others_captures() {
        let (fake, bytes) = (fake("legacy", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let blocking = fake.user_stream(0);
        let learner = learner_on(&feed, 0, LEGACY).unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..3).for_each(|value| bytes.write(&mut writer, value).unwrap());
        let (first, second) = (learner.next_batch().unwrap(), learner.next_batch().unwrap());
        fake.begin_capture(blocking, GLOBAL);
        assert_eq!(learner.try_next().unwrap_err(), NextError::Device(DeviceUseError::Capturing));
        drop(first);
        assert!(fake.end_capture(blocking), "whole");
        assert_eq!(learner.next_batch().unwrap().sequence_number(), 2);
        drop((second, learner, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    /// One thread captures again and again while feeds start, feed, download, stop and are dropped on others.
    fn no_thread_of_a_feed_spoils_the_capture_of_another() {
        let (fake, bytes) = (fake("others-capture", 2), Bytes::new());
        fake.auto_run_after(Some(Duration::from_micros(100)));
        let captures = [0, 1].map(|device| {
            fake.set_device(device);
            fake.user_stream(1)
        });
        fake.set_device(0);
        let memory = fake.user_memory(Bytes::LEN);
        let (done, mut whole, mut lost) = (AtomicBool::new(false), 0, 0);
        std::thread::scope(|scope| {
            let feeding = scope.spawn(|| {
                for round in 0..6 {
                    let pinning = if round % 3 == 2 { Pinning::Off } else { Pinning::Required };
                    // Another search each time, so that CUDA is initialised each time.
                    let search = search(&fake).wheel_root(format!("/no/such/folder/{round}"));
                    let feed = bytes.builder_on(search).device(1).pinning(pinning).downloads(Bytes::LEN).start().unwrap();
                    let streams = [0, 1].map(|device| {
                        fake.set_device(device);
                        (device, fake.user_stream(1))
                    });
                    let learners = streams.map(|(device, stream)| learner_on(&feed, device, stream).unwrap());
                    let (host, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
                    let writing = bytes.write_on(feed.writer(1).unwrap(), 0..100);
                    let outlive = std::sync::Mutex::new(Vec::new());
                    std::thread::scope(|scope| {
                        for learner in learners {
                            let (bytes, outlive) = (&bytes, &outlive);
                            scope.spawn(move || {
                                let mut last = None;
                                while let Ok(batch) = learner.next_batch() {
                                    let value = batch.sequence_number() as u8;
                                    let then = move |bytes: &[u8]| assert!(bytes.iter().all(|byte| *byte == value));
                                    // SAFETY: the batch's own bytes.
                                    unsafe { learner.download(bytes.address(&batch), Bytes::LEN, then) }.unwrap();
                                    last = Some(batch);
                                }
                                last.iter().for_each(|batch| batch.synchronize().unwrap());
                                outlive.lock().unwrap().push(last);
                            });
                        }
                        fake.set_device(0);
                        while let Ok(batch) = host.next_batch() {
                            // SAFETY: the test's own memory and stream.
                            let ticket = unsafe { copier.copy_to_device(batch, memory, streams[0].1 as *mut _) }.unwrap();
                            while !ticket.is_done().unwrap() {
                                std::thread::yield_now();
                            }
                        }
                    });
                    writing.join().unwrap().unwrap();
                    let report = feed.stop(DEADLINE).unwrap();
                    assert_eq!((report.fault.is_some(), report.quarantined_slots), (false, 0), "{report}");
                    drop((host, copier, feed));
                    drop(outlive); // the last of all, with the device's memory, on this thread
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) && !feeding.is_finished() {
                for stream in captures {
                    fake.begin_capture(stream, GLOBAL);
                }
                std::thread::sleep(Duration::from_micros(500));
                for stream in captures {
                    let counter = if fake.end_capture(stream) { &mut whole } else { &mut lost };
                    *counter += 1;
                }
            }
        });
        assert_eq!(lost, 0, "of {whole}");
        assert!(whole > 50, "{whole}");
        assert_eq!(fake.capture_mode(), GLOBAL);
        until("nothing is left", || [0, 1].iter().all(|device| fake.retained(*device) == 0));
        assert_eq!((fake.live_registrations().len(), fake.live_events().len()), (0, 0));
        assert_eq!(fake.hazards(), common::fake::Hazards::default());
    }
}

alone! {
    /// Every call of a feed's own threads is made in relaxed mode, from the first that could matter.
    fn threads_of_a_feed_relax_their_capture_mode_first() {
        let (fake, bytes) = (fake("relaxed", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 1).unwrap();
        drop(learner.next_batch().unwrap());
        feed.stop(DEADLINE).unwrap();
        drop((learner, feed));
        // What the driver forbids on other threads while somebody captures in global mode.
        const UNSAFE: [&str; 8] = [
            "cudaHostRegister",
            "cudaHostUnregister",
            "cuMemAlloc_v2",
            "cuMemFree_v2",
            "cuEventQuery",
            "cuEventSynchronize",
            "cuStreamSynchronize",
            "cudaFree",
        ];
        let me = fake.thread();
        let mut relaxed = std::collections::HashMap::<u64, i32>::new();
        let mut checked = 0;
        for call in fake.calls() {
            let mode = relaxed.entry(call.thread).or_default();
            if call.function.ends_with("ThreadExchangeStreamCaptureMode") {
                *mode += 1;
            }
            if UNSAFE.contains(&call.function.as_str()) && call.thread != me {
                assert!(*mode > 0, "{call:?}");
                checked += 1;
            }
        }
        assert!(checked > 8, "{checked}");
    }
}
