//! A page-locked feed as a whole: what is opened, what reaches CUDA, who gives it back, when and in which order.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/life.rs"]
mod life;

use common::fake::{self, Fake};
use common::scratch;
use life::{PATIENCE, Small, alone, assert_nothing_is_left_with, feed_threads, only, rings, threads, until};
use pinring::{CudaSearch, Feed, Outcome, Pinning, Rung};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Names under which CUDA could be found.
const NAMES: [&str; 4] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so", "libcuda.so.1"];

/// Puts a fake under every name where the loader looks.
fn with_cuda_in_sight(command: &mut std::process::Command) {
    let dir = scratch("in-sight");
    NAMES.iter().for_each(|name| drop(fake::place(&dir, name)));
    command.env("LD_LIBRARY_PATH", &dir);
}

alone! {
    fn with_pinning_off_no_cuda_library_is_opened(with_cuda_in_sight) {
        let small = Small::new();
        let feed = small.builder().cuda(CudaSearch::new().library("/no/such/libcudart.so.13")).start().unwrap();
        assert!(feed.pin_report().is_none());
        assert_eq!(feed.metrics().page_locked_bytes, 0);
        small.ten_batches(&feed);
        drop(feed);
        let cuda: Vec<_> = life::mapped_files().into_iter().filter(|file| file.to_string_lossy().contains("libcu")).collect();
        assert_eq!(cuda, [""; 0].map(std::path::PathBuf::from));

        let dir = std::env::var("LD_LIBRARY_PATH").unwrap();
        let fakes = NAMES.map(|name| Fake::open(&std::path::Path::new(&dir).join(name)));
        assert!(fakes.iter().all(|fake| fake.calls().is_empty()));

        // The same search with pinning on does find one of them: it was in sight all the time.
        let feed = small.builder().pinning(Pinning::Required).start().unwrap();
        assert!(feed.pin_report().unwrap().cuda.library().starts_with(&dir));
        assert!(fakes.iter().any(|fake| !fake.calls().is_empty()));
    }
}

alone! {
    fn with_pinning_required_every_slot_is_registered_verified_and_reported() {
        let (small, fake) = (Small::new(), life::fake("every-slot"));
        let builder = small.pinned(&fake).buffers(5);
        let bytes = builder.page_locked_bytes().unwrap();
        assert_eq!(bytes, 5 * 4096);
        let feed = builder.start().unwrap();

        let [ring] = rings().try_into().unwrap();
        let live = fake.live_registrations();
        assert_eq!(live.len(), 1, "one set of registrations: {live:?}");
        assert_eq!((live[0].start, live[0].bytes, live[0].flags), (ring.start, bytes, 3), "portable and mapped");
        let asked: Vec<_> = fake.calls_of("cudaHostGetFlags").iter().map(|call| call.args[1] as usize).collect();
        for slot in 0..5 {
            for byte in [ring.start + slot * 4096, ring.start + slot * 4096 + 4095] {
                assert!(asked.contains(&byte), "slot {slot} was verified");
            }
        }

        let report = feed.pin_report().unwrap();
        assert_eq!((report.page_locked_bytes, report.slots_verified, report.pieces), (bytes, 5, 1));
        assert!(report.prefault_threads >= 1 && report.times.total() > Duration::ZERO);
        let cuda = &report.cuda;
        assert_eq!((cuda.library(), cuda.rung()), (fake.path(), Rung::ExplicitPath));
        assert_eq!((cuda.runtime_version(), cuda.driver_version()), (13000, 13000));
        assert_eq!(cuda.candidates().iter().map(|one| one.outcome()).collect::<Vec<_>>(), [&Outcome::Chosen]);
        assert_eq!(feed.metrics().page_locked_bytes, bytes);

        small.ten_batches(&feed);
        assert_nothing_is_left_with(&fake);
        assert_eq!(fake.calls_of("cudaHostUnregister").len(), 1, "unregistered once");
        drop(feed);
        assert_eq!(fake.calls_of("cudaHostUnregister").len(), 1);
    }
}

alone! {
    fn the_pinning_thread_initialises_registers_and_unregisters_and_nobody_else_calls_cuda() {
        let (small, fake) = (Small::new(), life::fake("whose-thread"));
        let feed = small.pinned(&fake).start().unwrap();
        let pinning: Vec<u64> =
            threads().into_iter().filter(|(_, name)| name == "pr0-pinning").map(|(id, _)| id).collect();
        assert_eq!(pinning.len(), 1, "{:?}", threads());
        small.ten_batches(&feed);
        let calls = fake.calls();
        assert!(calls.iter().any(|call| call.function == "cudaHostUnregister"));
        assert!(calls.iter().all(|call| call.thread == pinning[0]), "{calls:?}");
    }
}

alone! {
    fn with_a_batch_out_the_thread_that_drops_it_unregisters_and_only_then_is_the_ring_unmapped() {
        let (small, fake) = (Small::new(), life::fake("batch-out"));
        let feed = small.pinned(&fake).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        small.write(&mut writer, [1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let batch = learner.next_batch().unwrap();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.still_out, report.partial_rows), (1, 1));
        drop((feed, writer, learner));
        until("the feed's threads have ended", || feed_threads().is_empty());

        // The batch outlives everything; so does the ring.
        assert_eq!(rings().len(), 1);
        assert_eq!(fake.live_registrations().len(), 1);
        assert_eq!(small.values(&batch), [1.0, 2.0, 3.0, 4.0]);
        assert!(fake.calls_of("cudaHostUnregister").is_empty());

        fake.sleep("cudaHostUnregister", 300);
        let dropping = std::thread::spawn({
            let fake = Fake::open(fake.path());
            move || {
                let thread = fake.thread();
                drop(batch);
                (thread, fake.peek_last_error())
            }
        });
        until("unregistering has begun", || !fake.calls_of("cudaHostUnregister").is_empty());
        let mapped = rings().len();
        let over = fake.calls_of("cudaHostUnregister")[0].code;
        assert!(over.is_some() || mapped == 1, "unmapped while it was being unregistered");
        let (thread, last_error) = dropping.join().unwrap();
        let calls = fake.calls_of("cudaHostUnregister");
        assert_eq!((calls.len(), calls[0].thread, last_error), (1, thread, 0));
        assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn an_open_step_keeps_the_ring_too_and_its_thread_ends_it() {
        let (small, fake) = (Small::new(), life::fake("step-out"));
        let feed = small.pinned(&fake).start().unwrap();
        let mut writer = feed.writer(1).unwrap();
        let mut step = writer.step().unwrap();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.still_out, report.dropped_rows()), (1, 0));
        drop(feed);
        assert_eq!(rings().len(), 1);
        step.put(small.reward, &[1.0]).unwrap(); // memory that is still there
        assert!(step.commit().unwrap_err().to_string().contains("the feed was stopped"));
        assert_nothing_is_left_with(&fake);
        assert_eq!(fake.calls_of("cudaHostUnregister")[0].thread, fake.thread());
    }
}

alone! {
    fn starting_and_stopping_a_hundred_times_never_meets_an_old_registration() {
        let (small, fake) = (Small::new(), life::fake("hundred"));
        for round in 0..100 {
            let feed = small.pinned(&fake).start().unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert_eq!(fake.live_registrations().len(), 1);
            if round % 2 == 0 {
                assert_eq!(feed.stop(PATIENCE).unwrap().threads_given_up, [""; 0]);
            }
            drop(feed);
            assert_eq!(fake.live_registrations(), []);
        }
        assert_nothing_is_left_with(&fake);
        assert_eq!(fake.calls_of("cudaHostRegister").len(), 100);
        assert!(fake.calls().iter().all(|call| call.code == Some(0)), "no call ever failed");
        assert_eq!(fake.calls_of("cudaFree").len(), 1, "CUDA is found once for the process");
    }
}

alone! {
    fn a_page_that_somebody_else_registered_is_named_and_left_to_them() {
        let (small, fake) = (Small::new(), Arc::new(life::fake("other-owner")));
        let page = Arc::new(Mutex::new(None));
        // Once the ring is mapped, register its page 3 as some other library of the process would.
        let meddle = {
            let (fake, page) = (fake.clone(), page.clone());
            move |progress: &pinring::PinProgress| {
                if progress.phase == pinring::PinPhase::Registering && page.lock().unwrap().is_none() {
                    let start = rings()[0].start + 3 * 4096;
                    let code = fake.foreign_register(std::ptr::with_exposed_provenance_mut(start), 4096);
                    *page.lock().unwrap() = Some((start, code));
                }
            }
        };
        let error = small.pinned(&fake).buffers(8).on_pin_progress(meddle).start().unwrap_err();
        let (start, code) = page.lock().unwrap().unwrap();
        assert_eq!(code, 0);
        let refusal = match std::error::Error::source(&error).and_then(|source| source.downcast_ref()) {
            Some(pinring::RingError::Register(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        assert_eq!((refusal.source.code(), refusal.source.operation()), (712, "cudaHostRegister"));
        assert_eq!(refusal.addresses, start - 3 * 4096..start + 5 * 4096);
        assert_eq!(refusal.other_owner, Some(start..start + 4096));
        let text = error.to_string();
        let owner = format!("0x{start:x} to 0x{:x}", start + 4096);
        for part in ["712", "cudaErrorHostMemoryAlreadyRegistered", "another owner", owner.as_str()] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(error.kind(), pinring::ErrorKind::Memory);

        let theirs: Vec<_> = fake.live_registrations().iter().map(|one| (one.start, one.bytes)).collect();
        assert_eq!(theirs, [(start, 4096)], "theirs is still there, and nothing of ours is");
        assert!(fake.calls_of("cudaHostUnregister").is_empty());
        life::assert_nothing_is_left();
        assert_eq!(fake.peek_last_error(), 0);
    }
}

alone! {
    fn several_pinned_feeds_live_side_by_side_and_count_apart() {
        let (small, fake) = (Small::new(), life::fake("several"));
        let feeds: Vec<Feed> = (1..=4).map(|n| small.pinned(&fake).buffers(2 * n).start().unwrap()).collect();
        assert_eq!(fake.live_registrations().iter().map(|one| one.bytes).sum::<usize>(), 20 * 4096);
        assert_eq!(feed_threads().len(), 12, "{:?}", feed_threads());
        for (n, feed) in feeds.iter().enumerate() {
            assert_eq!(feed.metrics().page_locked_bytes, 2 * (n + 1) * 4096);
        }
        feeds.iter().for_each(|feed| small.ten_batches(feed));
        drop(feeds);
        assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn a_feed_that_lives_until_the_process_ends_lets_it_end_quietly() {
        const AGAIN: &str = "PINRING_TEST_EXIT";
        // One process more: what is looked at is how it ends.
        if std::env::var_os(AGAIN).is_none() {
            let test = "a_feed_that_lives_until_the_process_ends_lets_it_end_quietly";
            let log = scratch("exit").join("calls");
            let output = common::alone_output(test, |command| {
                command.env(AGAIN, &log);
            });
            assert!(output.status.success(), "{}", output.status);
            assert_eq!(String::from_utf8_lossy(&output.stderr), "");
            let log = std::fs::read_to_string(log).unwrap();
            assert!(log.contains("exit-hook"), "{log}");
            return;
        }
        static FEED: Mutex<Option<Feed>> = Mutex::new(None);
        let (small, fake) = (Small::new(), life::fake("exit"));
        fake.log_file(std::path::Path::new(&std::env::var_os(AGAIN).unwrap()));
        *FEED.lock().unwrap() = Some(small.pinned(&fake).start().unwrap());
    }
}

#[test]
fn a_search_that_is_given_nothing_but_the_fake_is_kept_for_equal_searches_only() {
    let (small, one, two) = (Small::new(), life::fake("kept-one"), life::fake("kept-two"));
    for fake in [&one, &two, &one] {
        let feed = small.builder().pinning(Pinning::Required).cuda(only(fake)).start().unwrap();
        assert_eq!(feed.pin_report().unwrap().cuda.library(), fake.path());
    }
    assert_eq!((one.calls_of("cudaFree").len(), two.calls_of("cudaFree").len()), (1, 1));
    assert_eq!((one.calls_of("cudaHostRegister").len(), two.calls_of("cudaHostRegister").len()), (2, 1));
}
