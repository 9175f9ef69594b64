//! The mapped allocator when something fails: devices, memory, each call of CUDA, forks, many threads, a wrong order of drops.
#![cfg(all(feature = "mapped-allocator", target_os = "linux"))]
#![allow(unsafe_code)]

mod common;
#[path = "common/life.rs"]
mod life;
#[path = "common/mapped.rs"]
mod mapped;

use common::fake::{Fake, Hazards};
use common::{SetAtEnd, scratch};
use life::{alone, rings};
use mapped::{MIB, NON_BLOCKING, PATIENCE, assert_nothing_is_left, fake, fake_with, free, release};
use pinring::MemoryKind::{Device, PageLocked};
use pinring::{CudaSearch, FreeError, MappedAllocator, MappedError, RingError};
use std::time::Duration;

alone! {
    fn a_device_that_is_not_there_is_named_and_the_callers_device_stays() {
        let (fake, allocator) = fake_with("devices", 2);
        fake.set_device(0);
        for kind in [Device, PageLocked] {
            let error = allocator.allocate(kind, 1024, 2).unwrap_err();
            assert!(matches!(error, MappedError::Device(_)), "{error:?}");
            assert!(error.to_string().starts_with("there is no device 2: 2 devices are visible"), "{error}");
            fake.inject("cuDevicePrimaryCtxRetain", 1, 101);
            let error = allocator.allocate(kind, 1024, 1).unwrap_err().to_string();
            assert!(error.contains("device 1") && error.contains("101 CUDA_ERROR_INVALID_DEVICE"), "{error}");
        }
        assert_eq!((fake.calls_of("cuMemAlloc_v2"), fake.calls_of("cudaHostRegister")), (vec![], vec![]));

        for kind in [Device, PageLocked] {
            let block = allocator.allocate(kind, 1024, 1).unwrap();
            free(&allocator, block, 0).unwrap();
        }
        assert!(fake.calls_of("cuMemAlloc_v2").iter().all(|call| call.device == Some(1)));
        let first = &fake.calls_of("cudaHostRegister")[0];
        assert_eq!(first.device, Some(1), "registered in the device's own context");
        assert!(fake.calls_of("cuEventRecord").iter().all(|call| call.device == Some(1)), "the default stream of device 1");
        assert_eq!((fake.current_device(), fake.contexts()), (Some(0), 0));
        fake.run_all();
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        assert_eq!(fake.calls_of("cudaHostUnregister")[0].device, Some(1));
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn a_thread_without_a_device_gets_none() {
        let (fake, allocator) = fake_with("no-context", 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(allocator.page_locked(1024, 1).unwrap());
                allocator.release_cached(PATIENCE);
                assert_eq!((fake.current_device(), fake.contexts()), (None, 0));
            });
        });
        assert!(fake.calls().iter().all(|call| call.device != Some(0)), "no context on device 0");
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn a_shortage_gives_back_what_was_freed_and_tries_again() {
        let (fake, allocator) = fake("shortage");
        let stream = fake.user_stream(NON_BLOCKING);
        fake.auto_run(true);
        fake.cap(u64::MAX, 8 * MIB as u64);
        let a = allocator.allocate(PageLocked, 6 * MIB, 0).unwrap();
        free(&allocator, a, stream).unwrap();
        let b = allocator.allocate(PageLocked, 7 * MIB, 0).unwrap();
        // Nothing left that could be given back: the error has the figures.
        let error = allocator.allocate(PageLocked, 2 * MIB, 0).unwrap_err();
        let MappedError::PageLocked { bytes, device: 0, live, waiting: 0, source } = &error else { panic!("{error:?}") };
        assert_eq!((*bytes, *live), (2 * MIB, 7 * MIB));
        let RingError::Register(refusal) = &**source else { panic!("{error:?}") };
        assert_eq!((refusal.source.code(), refusal.pinned_by_process), (2, 7 * MIB));
        let text = error.to_string();
        for part in
            ["could not allocate 2097152 bytes of page-locked", "7340032 bytes of it are allocated here", "ulimit -l", "MemAvailable"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(fake.peek_last_error(), 0, "drained");

        // Device memory alike, and what was freed may be in use for a while.
        fake.auto_run_after(Some(Duration::from_millis(30)));
        let q = allocator.allocate(Device, MIB, 0).unwrap();
        free(&allocator, q, stream).unwrap();
        fake.inject("cuMemAlloc_v2", 1, 2);
        let q = allocator.allocate(Device, 2 * MIB, 0).unwrap();
        fake.inject("cuMemAlloc_v2", 1, 2);
        let error = allocator.allocate(Device, 3 * MIB, 0).unwrap_err();
        assert!(matches!(error, MappedError::DeviceMemory { bytes, live, waiting: 0, .. } if (bytes, live) == (3 * MIB, 2 * MIB)));
        [q, b].into_iter().for_each(|block| free(&allocator, block, stream).unwrap());
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

#[cfg(target_pointer_width = "64")] // with fewer bits the host may have all that can be asked for
alone! {
    fn more_than_the_host_has_is_refused_before_it_is_mapped() {
        let (fake, allocator) = fake("budget");
        let error = allocator.allocate(PageLocked, 1 << 46, 0).unwrap_err();
        let MappedError::PageLocked { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(**source, RingError::Budget(_)), "{error:?}");
        assert_eq!(fake.calls_of("cudaHostRegister"), []);
        for bytes in [0, usize::MAX, 1 << 63] {
            assert!(matches!(allocator.allocate(PageLocked, bytes, 0), Err(MappedError::Size { .. })));
            assert!(matches!(allocator.allocate(Device, bytes, 0), Err(MappedError::Size { .. })));
        }
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn without_cuda_the_error_says_so() {
        let missing = scratch("no-cuda").join("libcuda.so.1");
        let allocator = MappedAllocator::with_search(CudaSearch::new().driver(&missing));
        let error = allocator.allocate(PageLocked, 1024, 0).unwrap_err().to_string();
        assert!(error.contains("needs the CUDA driver") && error.contains("cannot open shared object file"), "{error}");
    }
}

alone! {
    fn whichever_call_fails_nothing_is_lost_and_the_next_turn_succeeds() {
        let (fake, allocator) = fake("every-call");
        let stream = fake.user_stream(NON_BLOCKING);
        allocator.set_cache_limit(0);
        fake.auto_run(true);
        let turn = || -> Result<Vec<FreeError>, MappedError> {
            let p = allocator.allocate(PageLocked, 2 * MIB, 0)?;
            let mut refused = Vec::new();
            match allocator.allocate(Device, 4096, 0) {
                Ok(q) => refused.extend(free(&allocator, q, stream).err()),
                Err(error) => {
                    refused.extend(free(&allocator, p, stream).err());
                    return Err(error);
                }
            }
            refused.extend(free(&allocator, p, stream).err());
            allocator.release_cached(PATIENCE);
            Ok(refused)
        };
        let _ = turn().unwrap(); // attached, found
        let before = fake.calls().len();
        assert_eq!(turn().unwrap(), []);
        let calls = fake.functions().split_off(before);
        let mut kept = 0;
        for code in [1, 2, 3, 700] {
            for k in 1..=calls.len() as u64 {
                // On a thread of its own: a refused pop leaves its context behind. Which call is the k-th may vary.
                let before = fake.calls().len();
                fake.inject("*", k, code);
                let (failures, pushed, last) = std::thread::scope(|scope| {
                    let faulted = || match turn() {
                        Ok(refused) => (refused.len(), fake.contexts(), fake.peek_last_error()),
                        Err(error) => {
                            assert!(error.to_string().contains(&format!("returned {code} ")), "{error}");
                            (1, fake.contexts(), fake.peek_last_error())
                        }
                    };
                    scope.spawn(faulted).join().unwrap()
                });
                let hit = fake.functions().into_iter().nth(before + k as usize - 1).unwrap_or_default();
                let what = format!("call {k}, {hit}, answered {code}");
                assert_eq!((pushed > 0, last), (hit == "cuCtxPopCurrent_v2", 0), "{what}");
                fake.clear_faults();
                assert!(failures <= 1, "{what}: one fault, one failure");
                assert_eq!(release(&fake, &allocator), 0, "{what}");
                let statistics = allocator.statistics(None);
                assert_eq!((statistics.page_locked.live, statistics.device.live), (0, 0), "{what}");
                // What could not be ordered is kept and counted, and nothing else is held. By 1 an event is said to be a graph's.
                let captured = statistics.page_locked.captured_bytes + statistics.device.captured_bytes;
                assert!(captured == 0 || (code, hit.as_str()) == (1, "cuEventQuery"), "{what}");
                // SAFETY: there was no capture.
                assert_eq!(unsafe { allocator.release_captured() }, captured, "{what}");
                // Of an event that answers otherwise when it is asked again, the memory waits behind that.
                assert_eq!(release(&fake, &allocator), 0, "{what}");
                let statistics = allocator.statistics(None);
                let held = statistics.page_locked.held_bytes() + statistics.device.held_bytes();
                let quarantined = statistics.page_locked.quarantined_bytes + statistics.device.quarantined_bytes;
                assert_eq!(held, quarantined, "{what}");
                assert!(quarantined >= kept, "{what}: it is never used again");
                kept = quarantined;
                assert_eq!(turn().unwrap(), [], "after {what}");
            }
        }
        assert!(kept > 0, "some calls say when a stream has done with memory");
        assert_eq!(fake.hazards(), Hazards::default());
    }
}

alone! {
    fn whichever_call_of_the_first_allocation_fails_nothing_is_left_and_the_next_succeeds() {
        let fake = Fake::new(&scratch("first-calls"), "libcudart.so.13");
        let first = |kind| {
            let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
            let allocator = MappedAllocator::with_search(search);
            let made = allocator.allocate(kind, 4096, 0).map(|block| free(&allocator, block, 0).unwrap());
            let left = release(&fake, &allocator);
            assert_eq!((left, allocator.statistics(None).page_locked.held_bytes()), (0, 0));
            made
        };
        for kind in [Device, PageLocked] {
            first(kind).unwrap();
            let before = fake.calls().len();
            first(kind).unwrap();
            // Up to the free, whose failures are another test's.
            let calls = fake.functions().split_off(before);
            let made = calls.iter().position(|call| call == "cuStreamIsCapturing").unwrap();
            for k in 1..made as u64 {
                fake.inject("*", k, 3);
                let begun = fake.calls().len();
                let made = std::thread::scope(|scope| scope.spawn(|| first(kind)).join().unwrap());
                fake.clear_faults();
                let hit = fake.functions().into_iter().nth(begun + k as usize - 1).unwrap();
                let harmless = ["cuThreadExchangeStreamCaptureMode", "cudaThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxPopCurrent_v2"];
                // Where a context cannot be pushed, a runtime's call makes one.
                let harmless = harmless.contains(&hit.as_str()) || (kind == PageLocked && hit == "cuCtxPushCurrent_v2");
                assert_eq!(made.is_ok(), harmless, "call {k}, {hit}: {made:?}");
                if let Err(error) = made {
                    assert!(error.to_string().contains("returned 3 "), "call {k}, {hit}: {error}");
                }
                assert_eq!(fake.retained(0), 0, "call {k}, {hit}: no context is kept");
                assert_eq!((fake.live_registrations(), fake.live_allocations(), rings()), (vec![], vec![], vec![]));
            }
        }
    }
}

alone! {
    fn after_a_device_reset_nothing_is_waited_for() {
        let (fake, allocator) = fake("reset");
        let stream = fake.user_stream(NON_BLOCKING);
        let p = allocator.allocate(PageLocked, MIB, 0).unwrap();
        let q = allocator.allocate(PageLocked, 2 * MIB, 0).unwrap();
        free(&allocator, p, stream).unwrap();
        fake.device_reset();
        free(&allocator, q, stream).unwrap(); // the stream is gone too
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        assert_eq!(allocator.statistics(None).page_locked.held_bytes(), 0);
        assert_eq!(rings(), []);
    }
}

alone! {
    fn a_forked_child_calls_no_cuda_and_frees_nothing() {
        use std::process::Command;
        let (fake, allocator) = fake("fork");
        let (p, q) = (allocator.allocate(PageLocked, MIB, 0).unwrap(), allocator.allocate(Device, 4096, 0).unwrap());
        let memory = allocator.page_locked(MIB, 0).unwrap();
        let (calls, mut memory) = (fake.calls().len(), Some(memory));
        // Another thread is inside the allocator when the process forks, as a DataLoader's may be.
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = SetAtEnd(&stop);
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    allocator.host_ptr_of(p);
                }
            });
            for _ in 0..50 {
                let ok = in_child(|| {
                    free(&allocator, p, 0) == Ok(())
                        && free(&allocator, q, 0) == Ok(())
                        && { memory.take(); true }
                        && matches!(allocator.allocate(PageLocked, 4096, 0), Err(MappedError::UsedAfterFork))
                        && allocator.host_ptr_of(p).is_none()
                        && allocator.statistics(None).page_locked.live == 0
                        && allocator.release_cached(PATIENCE) == 0
                });
                assert!(ok, "in the child");
            }
            drop(end);
        });
        assert!(fake.calls().iter().all(|call| call.pid == std::process::id()));
        assert_eq!(fake.calls().len(), calls, "and none in the parent");
        assert_eq!(allocator.statistics(None).page_locked.live, 2);
        // A child that starts a program is no child of this kind.
        assert!(Command::new("true").status().unwrap().success());
        drop(memory);
        [p, q].into_iter().for_each(|block| free(&allocator, block, 0).unwrap());
        fake.run_all();
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

/// Runs `body` in a forked child; whether it returned true. The child ends at once, without the destructors of the test.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    // SAFETY: the child runs `body`, which takes no lock that another thread may hold (that is what is tested), and ends.
    unsafe {
        let pid = fork();
        assert!(pid >= 0, "fork");
        if pid == 0 {
            _exit(i32::from(!body()));
        }
        let mut status = 0;
        assert_eq!(waitpid(pid, &mut status, 0), pid);
        status == 0
    }
}

alone! {
    fn eight_threads_and_four_streams_leave_nothing() {
        let (fake, allocator) = fake_with("threads", 2);
        let streams: Vec<usize> = (0..4).map(|_| fake.user_stream(NON_BLOCKING)).collect();
        fake.auto_run_after(Some(Duration::from_micros(200)));
        allocator.set_cache_limit(MIB);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (allocator, streams) = (allocator.clone(), &streams);
                scope.spawn(move || {
                    let mut state = thread + 1;
                    let mut next = move |below: u64| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        (state >> 33) % below
                    };
                    let mut held = Vec::new();
                    for _ in 0..150 {
                        if held.len() < 6 && next(3) > 0 {
                            allocator.use_pinned(next(2) == 0);
                            let bytes = 1 + next(96 << 10) as usize;
                            held.push((allocator.allocate(allocator.mode(), bytes, 0).unwrap(), bytes as u64));
                        } else if !held.is_empty() {
                            let (block, bytes) = held.swap_remove(next(held.len() as u64) as usize);
                            if let Some(host) = allocator.host_ptr_of(block + bytes - 1) {
                                // SAFETY: the last byte of this thread's own block.
                                unsafe { host.write(7) };
                            }
                            free(&allocator, block, streams[next(4) as usize]).unwrap();
                        }
                    }
                    held.into_iter().for_each(|(block, _)| free(&allocator, block, streams[0]).unwrap());
                });
            }
        });
        let statistics = allocator.statistics(None);
        assert!(statistics.page_locked.frees > 100 && statistics.device.frees > 100, "{statistics:?}");
        assert_eq!(statistics.page_locked.frees, statistics.page_locked.allocations);
        assert!(statistics.page_locked.peak >= 1 && statistics.page_locked.cached_bytes <= MIB);
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn an_allocator_that_is_dropped_first_takes_no_memory_away() {
        let (fake, allocator) = fake("dropped-first");
        let p = allocator.allocate(PageLocked, MIB, 0).unwrap();
        let host = allocator.host_ptr_of(p).unwrap();
        let memory = allocator.page_locked(2 * MIB, 0).unwrap();
        drop(allocator);
        let host_of_memory = memory.host_ptr();
        // SAFETY: both are still allocated: that is what is tested.
        unsafe {
            host.write(1);
            host_of_memory.write(2);
        }
        assert_eq!(fake.live_registrations().len(), 2, "the value holds the allocator");
        drop(memory); // and now it is gone
        let left = fake.live_registrations();
        assert_eq!((left.len(), left[0].start), (1, host.addr().get()), "what was freed is given back, what is live stays");
        // SAFETY: as above.
        assert_eq!(unsafe { host.read() }, 1);
    }
}
