//! Starts in the background: what they show, how they are cancelled, and who may wait for them.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use life::{Small, alone, assert_nothing_is_left, assert_nothing_is_left_with, feed_threads, until};
use pinring::{Error, ErrorKind, Feed, FeedBuilder, PinPhase, PinProgress, RingError, StartHandle};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Whether a call of `function` has begun and not returned.
fn in_call(fake: &Fake, function: &str) -> bool {
    fake.calls_of(function).iter().any(|call| call.code.is_none())
}

alone! {
    fn a_slow_registration_holds_up_nobody_and_can_be_watched() {
        let (small, fake, other) = (Small::new(), life::fake("slow"), life::fake("quick"));
        fake.sleep("cudaHostRegister", 2000);
        let start = small.pinned(&fake).start_in_background().unwrap();
        until("it registers", || in_call(&fake, "cudaHostRegister"));
        let first = start.progress();
        assert_eq!((first.phase, first.bytes_done, first.bytes_total), (PinPhase::Registering, 0, 8192));
        assert!(!start.is_finished());
        until("time is told while CUDA is in its call", || start.progress().elapsed > first.elapsed);

        // Two other feeds live through all of their lives meanwhile.
        small.ten_batches(&small.builder().start().unwrap());
        small.ten_batches(&small.pinned(&other).start().unwrap());
        let still = in_call(&fake, "cudaHostRegister");
        assert!(still || start.progress().elapsed >= Duration::from_secs(2), "{}", start.progress());

        until("it is finished", || start.is_finished());
        let done = start.progress();
        assert_eq!((done.phase, done.bytes_done, done.bytes_total), (PinPhase::Done, 8192, 8192));
        assert!(done.elapsed >= Duration::from_secs(2), "{done}");
        let feed = start.wait().unwrap();
        assert!(feed.pin_report().unwrap().times.register >= Duration::from_secs(2));
        small.ten_batches(&feed);
        drop(feed);
        assert_nothing_is_left_with(&fake);
    }
}

fn assert_cancelled(error: &Error, phase: PinPhase) {
    assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    assert!(matches!(cause, Some(RingError::Cancelled { phase: at, .. }) if *at == phase), "{error:?}");
    assert!(error.to_string().contains(&format!("cancelled while {phase}")), "{error}");
}

alone! {
    fn cancelling_during_a_call_of_cuda_ends_the_start_after_it_and_leaves_nothing() {
        let (small, fake) = (Small::new(), life::fake("cancel"));
        fake.sleep("cudaHostRegister", 300);
        let start = small.pinned(&fake).start_in_background().unwrap();
        until("it registers", || in_call(&fake, "cudaHostRegister"));
        start.cancel();
        start.cancel();
        assert!(in_call(&fake, "cudaHostRegister"), "cancelling does not wait");
        assert_cancelled(&start.wait().unwrap_err(), PinPhase::Registering);
        assert_nothing_is_left_with(&fake);
        fake.clear_faults();
        drop(small.pinned(&fake).start().unwrap());
    }
}

alone! {
    fn dropping_the_handle_takes_the_start_back() {
        let (small, fake) = (Small::new(), life::fake("drop"));
        fake.sleep("cudaHostRegister", 300);
        let start = small.pinned(&fake).start_in_background().unwrap();
        until("it registers", || in_call(&fake, "cudaHostRegister"));
        drop(start);
        assert_nothing_is_left_with(&fake);
        // At any other time too, down to the moment after the start.
        fake.clear_faults();
        for round in 0..60 {
            let start = small.pinned(&fake).start_in_background().unwrap();
            std::thread::sleep(Duration::from_micros(50 * round));
            if round % 10 == 0 {
                until("it is finished", || start.is_finished());
            }
            drop(start);
            assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    fn a_dropped_start_that_is_stuck_in_cuda_is_left_and_takes_itself_back_later() {
        let (small, fake) = (Small::new(), life::fake("stuck"));
        fake.sleep("cudaHostRegister", 6500);
        let start = small.pinned(&fake).start_in_background().unwrap();
        until("it registers", || in_call(&fake, "cudaHostRegister"));
        drop(start);
        assert!(in_call(&fake, "cudaHostRegister"), "the drop came back before the call did");
        until("the call has returned", || !in_call(&fake, "cudaHostRegister"));
        until("it is undone", || fake.live_registrations().is_empty() && life::rings().is_empty());
        assert_nothing_is_left_with(&fake);
    }
}

/// A start whose callback gets its own handle, `k` calls into the start.
fn at_call(
    builder: FeedBuilder,
    k: usize,
    act: impl Fn(&PinProgress, StartHandle) -> Option<StartHandle> + Send + Sync + 'static,
) -> Arc<Mutex<Option<StartHandle>>> {
    let handle = Arc::new(Mutex::new(None::<StartHandle>));
    let (calls, ready, own) = (AtomicUsize::new(0), Arc::new(OnceLock::<()>::new()), handle.clone());
    let set = ready.clone();
    let builder = builder.on_pin_progress(move |progress| {
        ready.wait();
        if calls.fetch_add(1, Ordering::Relaxed) + 1 == k {
            let start = own.lock().unwrap().take().expect("nobody else took it");
            *own.lock().unwrap() = act(progress, start);
        }
    });
    *handle.lock().unwrap() = Some(builder.start_in_background().unwrap());
    set.set(()).unwrap();
    handle
}

alone! {
    fn a_start_can_be_cancelled_at_every_point_and_leaves_nothing() {
        let (small, fake) = (Small::new(), life::fake("each-point"));
        let mut phases = Vec::new();
        for k in 1.. {
            let phase = Arc::new(Mutex::new(None));
            let seen = phase.clone();
            let handle = at_call(small.pinned(&fake), k, move |progress, start| {
                *seen.lock().unwrap() = Some(progress.phase);
                start.cancel();
                Some(start)
            });
            until("it is finished", || handle.lock().unwrap().as_ref().is_some_and(StartHandle::is_finished));
            let ended = handle.lock().unwrap().take().unwrap().wait();
            let phase = *phase.lock().unwrap();
            match ended {
                Err(error) => assert_cancelled(&error, phase.expect("it was called")),
                // Too late: all was done, or there was no such call any more.
                Ok(feed) => {
                    assert!(matches!(phase, None | Some(PinPhase::Done)), "{phase:?}");
                    small.ten_batches(&feed);
                }
            }
            assert_nothing_is_left_with(&fake);
            match phase {
                Some(phase) => phases.push(phase),
                None => break,
            }
        }
        phases.dedup();
        use PinPhase::*;
        assert_eq!(phases, [FindingCuda, Mapping, Prefaulting, Registering, Verifying, Done]);
    }
}

alone! {
    fn on_a_thread_of_a_feed_a_start_is_not_waited_for() {
        let (small, fake) = (Small::new(), life::fake("own-thread"));
        let errors = Arc::new(Mutex::new(Vec::new()));
        // Its own start, waited for and dropped in its own callback.
        let keep = errors.clone();
        at_call(small.pinned(&fake), 3, move |_, start| {
            keep.lock().unwrap().extend(start.wait().err());
            None
        });
        until("it was refused", || errors.lock().unwrap().len() == 1);
        until("it has taken itself back", || life::rings().is_empty() && fake.live_registrations().is_empty());
        assert_nothing_is_left_with(&fake);
        let dropped = Arc::new(OnceLock::new());
        let set = dropped.clone();
        at_call(small.pinned(&fake), 3, move |_, start| {
            drop(start);
            set.set(()).unwrap();
            None
        });
        until("it was dropped", || dropped.get().is_some());
        until("it has taken itself back", || life::rings().is_empty() && fake.live_registrations().is_empty());
        assert_nothing_is_left_with(&fake);

        // Another feed's start.
        let keep = errors.clone();
        let inner = small.clone();
        let feed = small.pinned(&fake).on_pin_progress(move |_| {
            keep.lock().unwrap().extend(inner.builder().start().err());
        });
        drop(feed.start().unwrap());
        until("those within have taken themselves back", || life::rings().is_empty() && feed_threads().is_empty());
        assert_nothing_is_left_with(&fake);

        let errors = errors.lock().unwrap();
        assert!(errors.len() > 5, "{errors:?}");
        for error in errors.iter() {
            assert_eq!(error.kind(), ErrorKind::Misuse);
            assert!(error.to_string().contains("a start cannot be waited for on a thread of a feed"), "{error}");
        }
    }
}

alone! {
    fn progress_is_told_on_the_pinning_thread_in_order_and_comes_to_its_end() {
        let small = Small::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let keep = seen.clone();
        let start = small.builder().buffers(100).on_pin_progress(move |progress| {
            let thread = std::thread::current().name().map(str::to_owned);
            keep.lock().unwrap().push((*progress, thread));
        });
        let start = start.start_in_background().unwrap();
        until("it is finished", || start.is_finished());
        let end = start.progress();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(start.progress(), end, "the clock stands still");
        assert_eq!((end.phase, end.bytes_done, end.bytes_total), (PinPhase::Done, 409_600, 409_600));
        let seen = seen.lock().unwrap();
        assert!(seen.iter().all(|(_, thread)| thread.as_deref() == Some("pr0-pinning")), "{seen:?}");
        assert!(seen.windows(2).all(|two| two[0].0.phase <= two[1].0.phase && two[0].0.elapsed <= two[1].0.elapsed));
        let phases: Vec<_> = seen.iter().map(|(progress, _)| progress.phase).collect();
        assert!(!phases.contains(&PinPhase::Registering) && phases.contains(&PinPhase::Prefaulting), "{phases:?}");
        drop(start.wait().unwrap());
        assert_nothing_is_left();
    }
}

alone! {
    fn starts_that_run_at_once_do_not_disturb_each_other() {
        let (small, fake) = (Small::new(), life::fake("at-once"));
        fake.inject("cudaHostRegister", 2, 999);
        fake.sleep("cudaHostRegister", 50);
        let starts: Vec<StartHandle> = (0..4).map(|_| small.pinned(&fake).start_in_background().unwrap()).collect();
        let ended: Vec<Result<Feed, Error>> = starts.into_iter().map(StartHandle::wait).collect();
        assert_eq!(ended.iter().filter(|one| one.is_err()).count(), 1);
        for feed in ended.iter().flatten() {
            small.ten_batches(feed);
        }
        drop(ended);
        assert_nothing_is_left_with(&fake);
        assert!(feed_threads().is_empty());
    }
}

#[test]
fn a_start_says_that_it_is_finished_when_it_has_failed() {
    let (small, fake) = (Small::new(), life::fake("failed"));
    fake.inject("cudaFree", 0, 100);
    let start = small.pinned(&fake).start_in_background().unwrap();
    until("it is finished", || start.is_finished());
    assert_eq!(start.wait().unwrap_err().kind(), ErrorKind::Cuda);
}
