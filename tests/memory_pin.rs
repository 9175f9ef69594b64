//! Pinning as a user meets it, through a loaded library (the fake CUDA runtime): what reaches CUDA, in which order, and
//! what is left when it fails.
#![cfg(target_os = "linux")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::fake::Fake;
use common::{Watchdog, scratch};
use pinring::{CudaError, CudaFindError, CudaSearch, PinPhase, PinTrial, RingError};

const MIB: usize = 1 << 20;

/// Page-locked bytes are counted for the whole process, so these tests take turns.
fn alone_in_process() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fake, and a trial with a ring of `slots` slots of 1 MiB that uses it and nothing else.
fn fake_and_trial(name: &str, slots: usize) -> (Fake, PinTrial) {
    let fake = Fake::new(&scratch(name), "libcudart.so.13");
    let trial = PinTrial::new(MIB, slots).search(CudaSearch::new().library_only(fake.path()));
    (fake, trial)
}

fn assert_nothing_is_left(fake: &Fake) {
    assert_eq!(fake.live_registrations(), []);
    assert_eq!(fake.peek_last_error(), 0);
}

/// What a refusal says about CUDA's part in it.
fn cuda_error(error: &RingError) -> Option<&CudaError> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
        .find_map(|error| error.downcast_ref::<CudaError>())
}

#[test]
fn a_trial_registers_asks_about_every_slot_and_unregisters() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("trial", 3);
    let outcome = trial.run().unwrap();

    let report = &outcome.report;
    assert_eq!(report.cuda.library(), fake.path());
    assert_eq!((report.page_locked_bytes, report.slots_verified, report.pieces), (3 * MIB, 3, 1));
    assert_eq!(outcome.page_locked_after, 0);
    let text = outcome.to_string();
    for part in ["page-locked 3145728 bytes in 1 registration,", "3 slots verified", "runtime 13.0", "explicit path"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }

    let registered = fake.calls_of("cudaHostRegister");
    assert_eq!(registered.len(), 1);
    let [start, bytes, flags, ..] = registered[0].args;
    assert_eq!((bytes as usize, flags), (3 * MIB, 3), "portable and mapped");
    assert_eq!(start % (2 << 20), 0, "aligned to huge pages");
    // The second argument is the address asked about.
    let asked: Vec<u64> = fake.calls_of("cudaHostGetFlags").iter().map(|call| call.args[1]).collect();
    let mib = MIB as u64;
    let ends = [0, mib - 1, mib, 2 * mib - 1, 2 * mib, 3 * mib - 1].map(|offset| start + offset);
    assert_eq!(asked, ends, "both ends of every slot");
    let unregistered = fake.calls_of("cudaHostUnregister");
    assert_eq!(unregistered.iter().map(|call| call.args[0]).collect::<Vec<_>>(), [start]);
    assert_nothing_is_left(&fake);

    // Again with the same library, which is found once.
    let again = trial.run().unwrap();
    assert_eq!(again.page_locked_after, 0);
    assert_eq!(fake.calls_of("cudaFree").len(), 1);
    assert_nothing_is_left(&fake);
}

#[test]
fn whichever_call_fails_nothing_is_left_and_the_next_start_succeeds() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("every-call", 2);
    trial.run().unwrap(); // CUDA is found; what follows is the ring's alone
    let before = fake.calls().len();
    trial.run().unwrap();
    let calls: Vec<String> = fake.functions().split_off(before);
    // One registration, both ends of two slots, one device address, one unregistration; relaxed mode, twice there and
    // back.
    const MODE: &str = "cudaThreadExchangeStreamCaptureMode";
    assert_eq!(calls.len(), 1 + 4 + 1 + 1 + 4, "{calls:?}");
    let end = calls.len() - 3;
    assert_eq!([0, end - 1, end, end + 2].map(|at| calls[at].as_str()), [MODE; 4], "{calls:?}");

    for code in [1, 3, 700, 712] {
        for k in 1..=end as u64 {
            fake.inject("*", k, code);
            if calls[k as usize - 1] == MODE {
                assert_eq!(trial.run().unwrap().page_locked_after, 0, "nothing was lost by it");
                continue;
            }
            let error = trial.run().expect_err("call k of a start failed");
            let cuda = cuda_error(&error).unwrap_or_else(|| panic!("{error:?}"));
            assert_eq!((cuda.code(), cuda.operation()), (code, calls[k as usize - 1].as_str()));
            assert!(error.to_string().contains(cuda.symbol()), "{error}");
            assert_nothing_is_left(&fake);
            fake.clear_faults();
            assert_eq!(trial.run().unwrap().page_locked_after, 0);
            assert_nothing_is_left(&fake);
        }
    }
}

#[test]
fn without_a_usable_cuda_nothing_is_registered() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("no-device", 2);
    fake.inject("cudaFree", 0, 100);
    let error = trial.run().unwrap_err();
    let RingError::Find(reason) = &error else { panic!("{error:?}") };
    let CudaFindError::Init { error: cuda, .. } = &**reason else { panic!("{error:?}") };
    assert_eq!(cuda.code(), 100);
    assert!(error.to_string().contains(&fake.path().display().to_string()), "{error}");
    assert_eq!(fake.calls_of("cudaHostRegister"), []);
    assert_nothing_is_left(&fake);

    fake.clear_faults();
    assert_eq!(trial.run().unwrap().page_locked_after, 0);
}

#[test]
fn a_ring_that_holds_nothing_reaches_no_cuda() {
    let _turn = alone_in_process();
    let fake = Fake::new(&scratch("zero"), "libcudart.so.13");
    for (slot_bytes, slots) in [(0, 4), (4096, 0), (0, 0)] {
        let trial = PinTrial::new(slot_bytes, slots).search(CudaSearch::new().library_only(fake.path()));
        assert!(matches!(trial.run(), Err(RingError::ZeroBytes { .. })));
        assert!(matches!(trial.map_only(), Err(RingError::ZeroBytes { .. })));
    }
    assert_eq!(fake.calls(), []);
}

#[test]
fn without_pinning_no_cuda_is_called_and_every_page_is_there() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("map-only", 8);
    let outcome = trial.map_only().unwrap();
    assert_eq!(outcome.bytes, 8 * MIB);
    if cfg!(target_os = "linux") {
        assert_eq!(outcome.present_bytes, Some(8 * MIB));
    }
    assert_eq!(fake.calls(), []);
}

#[test]
fn a_cap_on_one_call_is_met_with_smaller_pieces_or_refused_with_the_size() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("caps", 4);
    fake.cap(MIB as u64, u64::MAX);
    let outcome = trial.run().unwrap();
    assert_eq!((outcome.report.pieces, outcome.report.slots_verified), (4, 4));
    assert_nothing_is_left(&fake);

    fake.cap(MIB as u64 / 2, u64::MAX);
    let error = trial.run().unwrap_err();
    let RingError::Register(refusal) = &error else { panic!("{error:?}") };
    assert_eq!((refusal.source.code(), refusal.asked, refusal.addresses.len()), (2, 4 * MIB, MIB));
    assert_nothing_is_left(&fake);

    // A cap on all registrations together: the half that went through is undone.
    fake.cap(u64::MAX, 2 * MIB as u64);
    let error = trial.run().unwrap_err();
    let RingError::Register(refusal) = &error else { panic!("{error:?}") };
    assert_eq!((refusal.source.code(), refusal.registered, refusal.pinned_by_process), (2, 2 * MIB, 0));
    assert_nothing_is_left(&fake);
}

#[test]
fn a_hundred_starts_one_after_the_other_leave_nothing() {
    let _turn = alone_in_process();
    let (fake, trial) = fake_and_trial("hundred", 2);
    for _ in 0..100 {
        assert_eq!(trial.run().expect("never 712").page_locked_after, 0);
    }
    assert_eq!(fake.calls_of("cudaHostRegister").len(), 100);
    assert_nothing_is_left(&fake);
}

#[test]
fn a_slow_registration_shows_the_time_it_takes() {
    let _turn = alone_in_process();
    let _watchdog = Watchdog::new("slow registration", Duration::from_secs(60));
    let (fake, trial) = fake_and_trial("slow", 2);
    fake.sleep("cudaHostRegister", 50);
    let steps = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&steps);
    let outcome = trial
        .on_progress(move |progress| {
            count.fetch_add(1, Ordering::Relaxed);
            if progress.phase >= PinPhase::Verifying {
                assert!(progress.elapsed >= Duration::from_millis(50), "{progress}");
            }
        })
        .run()
        .unwrap();
    assert!(outcome.report.times.register >= Duration::from_millis(50), "{outcome}");
    assert!(steps.load(Ordering::Relaxed) >= 6, "every phase was told");
}
