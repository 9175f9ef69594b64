//! Every call of the driver that can fail does, once or from then on: every wait ends and names the feeding actor and the
//! call; no slot comes home under a copy; what is given up is counted; nothing else is left.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::{Call, Fake, Hazards};
use feeding::{Bytes, DEADLINE, LEGACY, assert_bytes, assert_devices_are_clean, copy_stream, fake, learner_on, until};
use life::{alone, feed_threads, rings};
use pinring::*;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const MODE: &str = "cuThreadExchangeStreamCaptureMode";

/// The driver's names as errors have them.
fn operation(function: &str) -> &str {
    function.strip_suffix("_v2").unwrap_or(function)
}

/// The fault of a feed is that of its feeding actor, and has these words.
fn assert_names(error: &dyn std::fmt::Display, words: &[&str]) {
    let text = error.to_string();
    for words in ["the feeding0 actor failed"].iter().chain(words) {
        assert!(text.contains(words), "`{words}` in: {text}");
    }
}

// ---- the start -----------------------------------------------------------------------------------------------------

alone! {
    fn whichever_call_of_an_attachment_fails_nothing_is_left_and_the_next_start_succeeds() {
        let (fake, bytes) = (fake("attach", 1), Bytes::new());
        fake.auto_run(true);
        let builder = || bytes.builder(&fake).downloads(Bytes::LEN);
        // CUDA is found once; a start and its end as they should be.
        drop(builder().start().unwrap());
        let mut refused = BTreeSet::new();
        for code in [1, 2, 700] {
            for k in 1.. {
                let before = fake.calls().len();
                fake.inject("*", k, code);
                let started = builder().start();
                let log = fake.calls().split_off(before);
                fake.clear_faults();
                let Some(failed) = log.get(k as usize - 1).filter(|call| call.code == Some(code)) else {
                    assert!(log.len() < k as usize, "each call of a start has failed once: {k} of {}", log.len());
                    drop(started.unwrap());
                    break;
                };
                let at = format!("{code} at call {k}, {}", failed.function);
                match started {
                    // Without these a call is made all the same, or has been.
                    Ok(feed) => {
                        let harmless = ["cuCtxGetCurrent", "cuCtxPopCurrent_v2", MODE, "cudaThreadExchangeStreamCaptureMode"];
                        let halved = failed.function == "cudaHostRegister" && code == 2;
                        assert!(harmless.contains(&failed.function.as_str()) || halved, "it was passed over: {at}");
                        let learner = learner_on(&feed, 0, LEGACY).unwrap();
                        bytes.write(&mut feed.writer(1).unwrap(), 3).unwrap();
                        let batch = learner.next_batch().unwrap();
                        batch.synchronize().unwrap();
                        assert_bytes(&fake, bytes.address(&batch), 3, &at);
                    }
                    Err(error) => {
                        refused.insert(operation(&failed.function).to_owned());
                        let symbol = ["INVALID_VALUE", "OUT_OF_MEMORY", "ILLEGAL_ADDRESS"][usize::from(code == 2) + 2 * usize::from(code == 700)];
                        let runtimes = failed.function.starts_with("cuda");
                        let words = if runtimes { format!("returned {code} cudaError") } else { format!("returned {code} CUDA_ERROR_{symbol}") };
                        for part in [operation(&failed.function), &words] {
                            assert!(error.to_string().contains(part), "{at}: {part} in: {error}");
                        }
                        assert!(matches!(error.kind(), ErrorKind::Cuda | ErrorKind::Memory), "{at}: {error:?}");
                    }
                }
                assert_devices_are_clean(&fake, 0);
                life::assert_nothing_is_left_with(&fake);
            }
        }
        let expected = [
            "cuCtxPushCurrent", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuDevicePrimaryCtxRetain",
            "cuEventCreate", "cuInit", "cuMemAlloc", "cuStreamCreateWithPriority", MODE,
            "cudaHostGetDevicePointer", "cudaHostGetFlags", "cudaHostRegister",
        ];
        assert_eq!(refused.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}

alone! {
    /// The second device fails: the first is given back too.
    fn when_the_second_device_cannot_be_attached_the_first_is_given_back() {
        let (fake, bytes) = (fake("second", 2), Bytes::new());
        fake.inject("cuMemAlloc_v2", 3, 2);
        let error = bytes.builder(&fake).device(1).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cuda);
        assert!(error.to_string().contains("cuMemAlloc returned 2 CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

// ---- one call --------------------------------------------------------------------------------------------------------

alone! {
    /// The copy is queued, its end cannot be learned: an event that was never recorded reads as complete.
    fn a_slot_whose_event_could_not_be_recorded_is_never_used_again() {
        let (fake, bytes) = (fake("record", 1), Bytes::new());
        let feed = bytes.builder(&fake).prefetch(4).start().unwrap();
        let copies = copy_stream(&fake, 0);
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        fake.inject("cuEventRecord", 1, 1);
        bytes.write(&mut writer, 0).unwrap();
        let words = ["cuEventRecord returned 1 CUDA_ERROR_INVALID_VALUE"];
        assert_names(&learner.next_batch().unwrap_err(), &words);
        let writing = bytes.write_on(writer, [0xEE; 16]);
        assert_names(&writing.join().unwrap().unwrap_err(), &words);
        let metrics = feed.metrics();
        assert_eq!((metrics.quarantined_slots, metrics.devices[0].quarantined_buffers), (1, 1));
        let report = feed.stop(DEADLINE).unwrap();
        assert_eq!((report.quarantined_slots, report.still_out, report.untaken_rows), (1, 0, 1), "{report}");
        assert_eq!(report.threads_given_up, [""; 0]);
        assert_names(&report.fault.unwrap(), &words);
        drop((learner, feed));
        assert_eq!((fake.live_registrations().len(), rings().len()), (1, 1), "page-locked and mapped for good");
        let copy = &fake.calls_of("cuMemcpyHtoDAsync_v2")[0];
        assert_eq!(fake.live_allocations().iter().map(|memory| memory.address).collect::<Vec<_>>(), [copy.args[0]]);
        assert_eq!(copy.args[3], copies as u64);
        fake.run_all();
        assert_bytes(&fake, copy.args[0], 0, "the copy runs after all, from and to where nobody else is");
        assert_eq!(fake.hazards(), Hazards::default());
        assert_eq!(feed_threads(), [""; 0]);
    }
}

/// What a single failed call may do: the waits name it, and what could not be known is kept; all else is given back.
fn one_call_fails(fake: &Fake, function: &str, nth: u64, lost: (u64, u64)) {
    let bytes = Bytes::new();
    let before = (fake.live_registrations().len(), fake.live_allocations().len(), rings().len());
    let feed = bytes.builder(fake).start().unwrap();
    let stream = fake.user_stream(1);
    let learner = learner_on(&feed, 0, stream).unwrap();
    fake.inject(function, nth, 999);
    let writing = bytes.write_on(feed.writer(1).unwrap(), [1; 200]);
    let error = loop {
        match learner.next_batch() {
            Ok(batch) => drop(batch),
            Err(error) => break error,
        }
    };
    let words = [format!("{} returned 999", operation(function))];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    assert_names(&error, &words);
    assert_names(&writing.join().unwrap().unwrap_err(), &words);
    assert_names(&learner.try_next().unwrap_err(), &words);
    let report = feed.stop(DEADLINE).unwrap();
    assert_eq!((report.still_out, report.threads_given_up.len()), (0, 0), "{report}");
    let metrics = feed.metrics();
    let seen = (metrics.quarantined_slots, metrics.devices[0].quarantined_buffers);
    assert_eq!(seen, lost, "{function} number {nth}");
    assert_eq!(report.quarantined_slots as u64, lost.0);
    drop((learner, feed));
    assert_eq!(feed_threads(), [""; 0]);
    let after = (fake.live_registrations().len(), fake.live_allocations().len(), rings().len());
    let rings_lost = usize::from(lost.0 > 0);
    assert_eq!(
        after,
        (before.0 + rings_lost, before.1 + lost.1 as usize, before.2 + rings_lost),
        "{function} number {nth}"
    );
    assert_eq!(fake.hazards(), Hazards::default());
}

alone! {
    fn one_failed_call_loses_only_what_it_was_about() {
        let fake = fake("one", 1);
        fake.auto_run(true);
        // The feeding thread's own calls.
        one_call_fails(&fake, "cuMemcpyHtoDAsync_v2", 3, (1, 1)); // it may have been queued
        one_call_fails(&fake, "cuMemcpyHtoDAsync_v2", 1, (1, 1));
        // A query that fails once: the copy that it was about is asked again at the end, and was over.
        one_call_fails(&fake, "cuEventQuery", 4, (0, 0));
        // The learner's.
        one_call_fails(&fake, "cuStreamIsCapturing", 5, (0, 0));
    }
}

// ---- an error that stays ---------------------------------------------------------------------------------------------

/// What became of each call that gives something back.
fn assert_nothing_was_freed_twice(log: &[Call]) {
    let mut freed = BTreeSet::new();
    let mut live = HashMap::new();
    for call in log {
        match (call.function.as_str(), call.code) {
            ("cuMemFree_v2", Some(0)) => assert_eq!(live.insert(call.args[0], false), None, "{call:?}"),
            ("cuMemcpyHtoDAsync_v2", Some(0)) => drop(live.remove(&call.args[0])),
            ("cuMemFree_v2" | "cuStreamDestroy_v2" | "cuEventDestroy_v2" | "cudaHostUnregister", code) => {
                assert!(matches!(code, Some(0 | 700)), "{call:?}");
                if call.function != "cuMemFree_v2" && code == Some(0) {
                    assert!(freed.insert((call.function.clone(), call.args[0])), "twice: {call:?}");
                }
            }
            _ => {}
        }
    }
}

alone! {
    /// Error 700 from call n on, for every n of a few batches and their downloads.
    fn an_error_that_stays_ends_every_wait_at_whatever_call_it_begins() {
        let (fake, bytes) = (fake("sticky", 1), Bytes::new());
        fake.auto_run(true);
        let (mut faults, mut n, mut lost) = (0, 1, 0);
        loop {
            let before = fake.calls().len();
            let registered = fake.live_registrations().len();
            let feed = bytes.builder(&fake).downloads(Bytes::LEN).start().unwrap();
            let stream = fake.user_stream(1);
            let learner = learner_on(&feed, 0, stream).unwrap();
            fake.poison(n, 700);
            let writing = bytes.write_on(feed.writer(1).unwrap(), [7; 6]);
            let called = Arc::new(AtomicUsize::new(0));
            let error: Error = loop {
                let batch = match learner.next_batch() {
                    Ok(batch) => batch,
                    Err(error) => break error.into(),
                };
                let called = called.clone();
                let then = move |bytes: &[u8]| {
                    assert!(bytes.iter().all(|byte| *byte == 7), "whole");
                    called.fetch_add(1, Ordering::Relaxed);
                };
                // SAFETY: the batch's bytes, which the learner's stream reads before it is released.
                if let Err(error) = unsafe { learner.download(bytes.address(&batch), Bytes::LEN, then) } {
                    assert!(error.to_string().contains("700 CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
                }
            };
            let written = writing.join().unwrap();
            let poisoned = fake.calls()[before..].iter().any(|call| call.code == Some(700));
            let ended = error.kind() == ErrorKind::Ended;
            if !ended {
                assert!(poisoned);
                assert_names(&error, &["700 CUDA_ERROR_ILLEGAL_ADDRESS"]);
                faults += 1;
            }
            if let Err(error) = written {
                assert_names(&error, &["700 CUDA_ERROR_ILLEGAL_ADDRESS"]);
            }
            let report = feed.stop(DEADLINE).unwrap();
            let metrics = feed.metrics();
            assert_eq!((report.still_out, report.threads_given_up.len()), (0, 0), "{report}");
            assert_eq!(report.quarantined_slots as u64, metrics.quarantined_slots);
            if let Some(fault) = &report.fault {
                assert_names(fault, &["700 CUDA_ERROR_ILLEGAL_ADDRESS"]);
            }
            fake.clear_faults(); // what is dropped now can be given back
            drop((learner, feed));
            assert_eq!(feed_threads(), [""; 0]);
            let log = fake.calls().split_off(before);
            assert_nothing_was_freed_twice(&log);
            assert_eq!(fake.hazards(), Hazards::default());
            // What was given up is still there, and what could not be given back while the error stood.
            let refused = |function: &str| log.iter().filter(|call| call.function == function && call.code == Some(700)).count();
            let kept = refused("cuMemFree_v2") + metrics.devices[0].quarantined_buffers as usize;
            // A batch that was dropped behind the feeding thread's end comes to it.
            let live = fake.live_allocations().len();
            assert!((kept..=kept + 1).contains(&live), "{live} of {kept} at call {n}");
            let kept_rings = fake.live_registrations().len() - registered;
            let quarantined = usize::from(metrics.quarantined_slots > 0);
            assert!(kept_rings <= 2 && kept_rings >= quarantined, "{kept_rings} at call {n}");
            lost += metrics.quarantined_slots;
            if !poisoned && ended {
                break;
            }
            fake.device_reset();
            n += 1;
        }
        assert!(faults > 60, "{faults} of {n} ended with the fault");
        assert!(lost > 0, "some of them under copies");
        println!("{faults} faults, {n} calls, {lost} slots given up");
    }
}

// ---- who hears of it -------------------------------------------------------------------------------------------------

alone! {
    /// Nothing is in flight and nothing is written: a learner that finds the device dead says so to everybody.
    fn a_learners_own_call_that_fails_stops_the_feed_by_name() {
        let (fake, bytes) = (fake("learners-call", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let (host, learner) = (feed.learner().unwrap(), learner_on(&feed, 0, stream).unwrap());
        let waiting = std::thread::spawn(move || host.next_batch().unwrap_err());
        fake.inject("cuStreamIsCapturing", 1, 700);
        let words = ["cuStreamIsCapturing returned 700 CUDA_ERROR_ILLEGAL_ADDRESS"];
        assert_names(&learner.next_batch().unwrap_err(), &words);
        assert_names(&waiting.join().unwrap(), &words);
        assert_names(&Error::from(feed.closed().unwrap()), &words);
        until("the feeding thread ends by itself", || feed_threads().iter().all(|name| !name.ends_with("feeding0")));
        let report = feed.stop(Duration::from_secs(20)).unwrap();
        assert_eq!((report.quarantined_slots, report.threads_given_up.len()), (0, 0));
        drop((learner, feed));
        assert_devices_are_clean(&fake, 1);
    }
}

alone! {
    /// What the user's stream is wrong about is the user's error, and no reason to stop.
    fn an_error_on_another_stream_of_the_users_is_the_users_alone() {
        let (fake, bytes) = (fake("users-call", 1), Bytes::new());
        fake.auto_run(true);
        let feed = bytes.builder(&fake).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        bytes.write(&mut feed.writer(1).unwrap(), 1).unwrap();
        let batch = learner.next_batch().unwrap();
        // SAFETY: the fake refuses the handle.
        let error = unsafe { batch.wait_on(0xBAD as *mut _) }.unwrap_err();
        let DeviceUseError::Cuda(error) = error else { panic!("{error}") };
        assert_eq!((error.code(), error.operation()), (400, "cuStreamIsCapturing"));
        assert!(!matches!(feed.closed(), Some(Closed::Fault(_))));
    }
}
