//! The mapped allocator: freed memory is nobody's before every stream that uses it has done with it, and is missed by
//! nobody while it is given back.
#![cfg(all(feature = "mapped-allocator", target_os = "linux"))]
#![allow(unsafe_code)]

mod common;
#[path = "common/life.rs"]
mod life;
#[path = "common/mapped.rs"]
mod mapped;

use common::fake::Hazards;
use life::{alone, until};
use mapped::{MIB, NON_BLOCKING, PATIENCE, assert_nothing_is_left, fake, fake_with, free, release};
use pinring::FreeError;
use pinring::MemoryKind::{Device, PageLocked};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A thread's own default stream.
const PER_THREAD: usize = 2;

alone! {
    fn a_threads_own_default_stream_is_waited_for_wherever_the_memory_is_freed() {
        let (fake, allocator) = fake_with("per-thread", 2);
        let target = fake.user_memory(64);
        let memory = allocator.page_locked(4096, 0).unwrap();
        assert_eq!(fake.user_copy_in(target, memory.host_ptr().as_ptr(), 64, PER_THREAD), 0);
        // SAFETY: this thread's default stream lives as long as the thread.
        unsafe { memory.used_on(PER_THREAD) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(memory); // on a thread where the name is another stream's
                fake.run(1);
                fake.run(PER_THREAD);
                assert_eq!(allocator.release_cached(Duration::ZERO), 4096, "the copy has not run");
            });
        });
        fake.run(PER_THREAD);
        fake.run(1);
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        assert_eq!(fake.hazards(), Hazards::default());
        fake.free_user_memory(target);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    /// However many wait for a busy stream, what others have done with is found after a few frees.
    fn frees_behind_a_busy_stream_hide_none_of_another() {
        const MANY: usize = 200;
        let (fake, allocator) = fake("many-waiting");
        let [busy, quick] = [0, 1].map(|_| fake.user_stream(NON_BLOCKING));
        let target = fake.user_memory(64);
        let waits = |stream: usize| {
            let block = allocator.allocate(PageLocked, 4096, 0).unwrap();
            let host = allocator.host_ptr_of(block).unwrap();
            assert_eq!(fake.user_copy_in(target, host.as_ptr(), 64, stream), 0);
            free(&allocator, block, stream).unwrap();
        };
        (0..MANY).for_each(|_| waits(busy));
        (0..5).for_each(|_| waits(quick));
        (0..MANY).for_each(|_| waits(busy));
        fake.run(quick);
        let counted = |allocator: &pinring::MappedAllocator| {
            let held = allocator.statistics(None).page_locked;
            (held.waiting_bytes / 4096, held.cached_bytes / 4096)
        };
        assert_eq!(counted(&allocator), (2 * MANY + 5, 0));
        // None of these finds a block in the cache, whose blocks are smaller, but each looks at all that wait.
        free(&allocator, allocator.allocate(PageLocked, 2 * MIB, 0).unwrap(), busy).unwrap();
        let (waiting, cached) = counted(&allocator);
        assert_eq!(cached, 5, "what the quick stream has done with");
        // Nothing is allocated here, so only the frees' glances remain: they come round.
        let live: Vec<u64> = (0..MANY).map(|_| allocator.allocate(Device, 4096, 0).unwrap()).collect();
        (0..5).for_each(|_| waits(quick));
        fake.run(quick);
        live.into_iter().for_each(|block| free(&allocator, block, busy).unwrap());
        assert_eq!(allocator.statistics(None).page_locked.cached_bytes / 4096, 5);
        assert!(waiting > 2 * MANY);
        assert_eq!(release(&fake, &allocator), 0);
        fake.free_user_memory(target);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn what_a_graph_gives_back_waits_for_the_other_streams_that_use_it() {
        let (fake, allocator) = fake("captured-and-used");
        let (captured, other) = (fake.user_stream(NON_BLOCKING), fake.user_stream(NON_BLOCKING));
        let target = fake.user_memory(64);
        for kind in [PageLocked, Device] {
            let block = allocator.allocate(kind, 4096, 0).unwrap();
            // SAFETY: the streams live as long as the test.
            unsafe { allocator.record_stream(block, other) };
            match allocator.host_ptr_of(block) {
                Some(host) => assert_eq!(fake.user_copy_in(target, host.as_ptr(), 64, other), 0),
                None => assert_eq!(fake.user_copy_in(block, [1_u8; 64].as_ptr(), 64, other), 0),
            }
            fake.begin_capture(captured, 0);
            free(&allocator, block, captured).unwrap();
            assert!(fake.end_capture(captured));
            // SAFETY: the fake keeps no graphs.
            assert_eq!(unsafe { allocator.release_captured() }, 4096);
            assert_eq!(allocator.release_cached(Duration::ZERO), 4096, "{kind:?}: the copy has not run");
            fake.run(other);
            assert_eq!(allocator.release_cached(PATIENCE), 0);
        }
        assert_eq!(fake.hazards(), Hazards::default());
        fake.free_user_memory(target);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    /// The allocator can ask the devices that it uses, and no other one.
    fn a_stream_of_another_device_is_waited_for_once_something_was_allocated_there() {
        let (fake, allocator) = fake_with("other-device", 2);
        fake.set_device(1);
        let stream = fake.user_stream(NON_BLOCKING);
        fake.set_device(0);
        let blocks = [(); 2].map(|()| allocator.allocate(PageLocked, 4096, 0).unwrap());
        let error = free(&allocator, blocks[0], stream).unwrap_err();
        assert!(matches!(error, FreeError::Unordered { bytes: 4096, .. }), "{error}");
        assert_eq!(allocator.statistics(None).page_locked.quarantined_bytes, 4096);
        let there = allocator.allocate(Device, 4096, 1).unwrap();
        free(&allocator, blocks[1], stream).unwrap();
        free(&allocator, there, stream).unwrap();
        assert_eq!(release(&fake, &allocator), 0);
        let statistics = allocator.statistics(None);
        assert_eq!((statistics.page_locked.held_bytes(), statistics.device.held_bytes()), (4096, 0));
        assert_eq!(fake.hazards(), Hazards::default());
    }
}

alone! {
    /// Another thread's capture of the stream begins and ends while the event of a free is recorded there: the event is the
    /// graph's, which neither look at the stream has shown. The memory is the graph's too, and not lost.
    fn a_capture_that_begins_and_ends_within_a_free_takes_the_memory_for_its_graph() {
        let (fake, allocator) = fake("captured-between");
        let stream = fake.user_stream(NON_BLOCKING);
        for kind in [PageLocked, Device] {
            let block = allocator.allocate(kind, 4096, 0).unwrap();
            let before = fake.call_count();
            let recording = || fake.calls_from(before).into_iter().find(|call| call.function == "cuEventRecord");
            // Each call takes effect at its end.
            fake.sleep("cuEventRecord", 300);
            fake.sleep("cuStreamIsCapturing", 300);
            std::thread::scope(|scope| {
                scope.spawn(|| free(&allocator, block, stream).unwrap());
                until("the event is being recorded", || recording().is_some());
                fake.begin_capture(stream, 1);
                until("it is recorded", || recording().is_some_and(|call| call.code.is_some()));
                assert!(fake.end_capture(stream));
            });
            fake.clear_faults();
            allocator.release_cached(PATIENCE);
            let statistics = allocator.statistics(None);
            assert_eq!(statistics.page_locked.quarantined_bytes + statistics.device.quarantined_bytes, 0, "{kind:?}");
            // SAFETY: the fake keeps no graphs.
            unsafe { allocator.release_captured() };
        }
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    /// A thread is giving memory back, which takes a while; another finds none meanwhile, and has it a moment later.
    fn an_allocation_waits_for_memory_that_another_thread_is_giving_back() {
        let (fake, allocator) = fake("on-its-way");
        let stream = fake.user_stream(NON_BLOCKING);
        fake.auto_run(true);
        fake.cap(u64::MAX, 8 * MIB as u64);
        // By a call, by the limit of the cache, and by a free that no stream holds up.
        for way in 0..3 {
            allocator.set_cache_limit(if way == 0 { 1 << 30 } else { 0 });
            let memory = allocator.page_locked(6 * MIB, 0).unwrap();
            let before = fake.calls_of("cudaHostUnregister").len();
            fake.sleep("cudaHostUnregister", 300);
            let taken = std::thread::scope(|scope| {
                scope.spawn(|| {
                    if way == 1 {
                        // SAFETY: the stream lives, and nothing uses the memory.
                        unsafe { memory.used_on(stream) }
                    }
                    drop(memory);
                    allocator.release_cached(PATIENCE);
                });
                while fake.calls_of("cudaHostUnregister").len() == before {
                    std::thread::yield_now();
                }
                let held = allocator.statistics(None).page_locked.held_bytes();
                let given_back = fake.live_registrations().is_empty();
                assert!(given_back || held == 6 * MIB, "way {way}: held until it is given back, not {held}");
                allocator.allocate(PageLocked, 7 * MIB, 0)
            });
            fake.sleep("cudaHostUnregister", 0);
            free(&allocator, taken.unwrap(), stream).unwrap();
            assert_eq!(release(&fake, &allocator), 0);
        }
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    /// What has no patience returns, whoever else waits for streams.
    fn a_release_without_patience_waits_for_no_other_thread() {
        let (fake, allocator) = fake("impatient");
        let stream = fake.user_stream(NON_BLOCKING);
        let block = allocator.allocate(PageLocked, 4096, 0).unwrap();
        free(&allocator, block, stream).unwrap();
        let waits = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                waits.store(true, Ordering::SeqCst);
                assert_eq!(allocator.release_cached(Duration::from_secs(3600)), 0);
            });
            while !waits.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            // Before the stream has run: the watchdog would say so if this waited for the other thread.
            assert_eq!(allocator.release_cached(Duration::ZERO), 4096);
            fake.run(stream);
        });
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    /// After a device reset no address of before is given out again, and nothing of a newer context is taken for done.
    fn memory_that_a_device_reset_took_is_not_given_out_again() {
        let (fake, allocator) = fake("reset-cache");
        let stream = fake.user_stream(NON_BLOCKING);
        let [cached, waiting] = [1, 2].map(|blocks| allocator.allocate(PageLocked, blocks * MIB, 0).unwrap());
        free(&allocator, cached, stream).unwrap();
        fake.run(stream);
        assert_eq!(allocator.host_ptr_of(cached), None);
        free(&allocator, waiting, stream).unwrap(); // and the first goes to the cache
        assert_eq!(allocator.statistics(None).page_locked.cached_bytes, MIB);
        fake.device_reset();
        for blocks in [1, 2] {
            let Ok(block) = allocator.allocate(PageLocked, blocks * MIB, 0) else { continue };
            let host = allocator.host_ptr_of(block).unwrap().addr().get();
            let is_registered = fake.live_registrations().iter().any(|registration| registration.start == host);
            assert!(is_registered, "{blocks} MiB at 0x{host:x}: {:?}", fake.live_registrations());
            // Its streams cannot be asked in the context that is gone: so it is not used again.
            let refused = free(&allocator, block, 0);
            assert!(matches!(refused, Err(FreeError::Unordered { .. })) || refused.is_ok(), "{refused:?}");
            let waits = allocator.statistics(None).page_locked;
            assert_eq!(waits.cached_bytes, 0, "{waits:?}");
        }
    }
}

alone! {
    /// Memory that somebody else freed: the driver gives the address out again, and that is a new allocation.
    fn an_address_that_comes_again_is_the_new_allocations() {
        let (fake, allocator) = fake("came-again");
        let stream = fake.user_stream(NON_BLOCKING);
        for _ in 0..100 {
            let old = allocator.allocate(Device, 4096, 0).unwrap();
            fake.free_user_memory(old);
            let new = allocator.allocate(Device, 4096, 0).unwrap();
            let live = fake.live_allocations();
            assert!(live.iter().any(|allocation| allocation.address == new), "0x{new:x} in {live:?}");
            free(&allocator, new, stream).unwrap();
            fake.run(stream);
            allocator.release_cached(PATIENCE);
            if old == new {
                let counts = allocator.statistics(None).device;
                assert_eq!(counts.held_bytes() - counts.live_bytes, 4096, "kept: {counts:?}");
                return;
            }
        }
        panic!("no address came again");
    }
}
