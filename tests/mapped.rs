//! The mapped allocator against the fake CUDA: what it hands out, and when freed memory is used again.
#![cfg(all(feature = "mapped-allocator", target_os = "linux"))]
#![allow(unsafe_code)]

mod common;
#[path = "common/life.rs"]
mod life;
#[path = "common/mapped.rs"]
mod mapped;

use life::alone;
use mapped::{MIB, NON_BLOCKING, PATIENCE, assert_nothing_is_left, fake, fake_with, free, release, sequence};
use pinring::FreeError;
use pinring::MemoryKind::{Device, PageLocked};
use std::time::Duration;

alone! {
    fn page_locked_memory_is_one_registration_with_two_addresses() {
        let (fake, allocator) = fake("two-addresses");
        let bytes = 3 * MIB + 100; // no whole pages
        let memory = allocator.page_locked(bytes, 0).unwrap();
        let registered = fake.live_registrations();
        assert_eq!(registered.len(), 1);
        assert_eq!((registered[0].bytes, registered[0].flags), (3 * MIB + 4096, 3), "whole pages, portable and mapped");
        assert_eq!(memory.host_ptr().addr().get(), registered[0].start);
        assert_ne!(memory.device_ptr(), registered[0].start as u64, "asked, not assumed");
        assert_eq!((memory.bytes(), memory.host_ptr().addr().get() % (2 * MIB)), (bytes, 0));

        // The same bytes under both.
        // SAFETY: the memory is this test's alone, and as long as that.
        unsafe { memory.host_ptr().add(bytes - 3).copy_from_nonoverlapping(std::ptr::NonNull::from(b"abc").cast(), 3) };
        assert_eq!(fake.device_bytes(memory.device_ptr() + bytes as u64 - 3, 3), b"abc");

        // Any byte within, none past the end.
        let host = |offset: u64| allocator.host_ptr_of(memory.device_ptr() + offset).map(|host| host.addr().get());
        let start = memory.host_ptr().addr().get();
        for offset in [0, 1, 4096, bytes - 1] {
            assert_eq!(host(offset as u64), Some(start + offset));
        }
        assert_eq!(host(bytes as u64), None, "one past the end");
        assert_eq!(allocator.host_ptr_of(memory.device_ptr() - 1), None);
        let on_device = allocator.allocate(Device, 512, 0).unwrap();
        assert_eq!(allocator.host_ptr_of(on_device), None, "no host address");

        let statistics = allocator.statistics(Some(0));
        assert_eq!((statistics.page_locked.live_bytes, statistics.device.live_bytes), (bytes, 512));
        drop(memory);
        free(&allocator, on_device, 0).unwrap();
        assert_eq!(allocator.host_ptr_of(start as u64), None);
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn the_mode_is_for_later_allocations_and_each_is_freed_as_what_it_is() {
        let (fake, allocator) = fake("modes");
        allocator.set_cache_limit(0);
        let stream = fake.user_stream(NON_BLOCKING);
        let turn = || {
            allocator.use_pinned(true);
            let p = allocator.allocate(allocator.mode(), 10_000, 0).unwrap();
            allocator.use_pinned(false);
            let q = allocator.allocate(allocator.mode(), 10_000, 0).unwrap();
            (p, q)
        };
        let (p, q) = turn();
        assert_eq!(fake.live_registrations()[0].bytes, 12_288);
        assert_eq!(fake.live_allocations()[0].bytes, 10_000);
        free(&allocator, p, stream).unwrap();
        free(&allocator, q, stream).unwrap();
        release(&fake, &allocator);
        assert_nothing_is_left(&fake, &allocator);

        for i in 0..1000 {
            allocator.use_pinned(i % 2 == 0);
            let (p, q) = turn();
            allocator.use_pinned(i % 3 == 0);
            let order = if i % 2 == 0 { [p, q] } else { [q, p] };
            order.into_iter().for_each(|address| free(&allocator, address, stream).unwrap());
            fake.run(stream);
        }
        release(&fake, &allocator);
        // Never the one's call for the other.
        let freed: Vec<u64> = fake.calls_of("cuMemFree_v2").iter().map(|call| call.args[0]).collect();
        let registered: Vec<u64> = fake.calls_of("cudaHostRegister").iter().map(|call| call.args[0]).collect();
        let unregistered = fake.calls_of("cudaHostUnregister");
        assert_eq!((freed.len(), registered.len(), unregistered.len()), (1001, 1001, 1001));
        assert!(unregistered.iter().all(|call| registered.contains(&call.args[0]) && call.code == Some(0)));
        assert!(fake.calls_of("cuMemFree_v2").iter().all(|call| call.code == Some(0)));
        assert_eq!(fake.calls_of("cudaFree").len(), 1, "cudaFree(0), at the start");
        let statistics = allocator.statistics(None);
        assert_eq!((statistics.page_locked.frees, statistics.device.frees), (1001, 1001));
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn what_is_no_allocation_is_not_freed() {
        let (fake, allocator) = fake("foreign");
        let p = allocator.allocate(PageLocked, 8192, 0).unwrap();
        assert_eq!(free(&allocator, p + 4096, 0), Err(FreeError::Unknown { address: p + 4096, inside: Some(p) }));
        assert_eq!(free(&allocator, p + 8192, 0), Err(FreeError::Unknown { address: p + 8192, inside: None }));
        let error = free(&allocator, 0xdead_0000, 0).unwrap_err();
        assert!(error.to_string().starts_with("0xdead0000 was not freed: it is no allocation"), "{error}");
        assert_eq!(allocator.statistics(None).page_locked.live, 1);
        free(&allocator, p, 0).unwrap();
        assert_eq!(free(&allocator, p, 0), Err(FreeError::Unknown { address: p, inside: None }), "freed before");
        release(&fake, &allocator);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn a_free_waits_for_its_stream_and_the_copy_sees_the_bytes() {
        let (fake, allocator) = fake("ordered");
        allocator.set_cache_limit(0);
        for stream in [fake.user_stream(NON_BLOCKING), 0] {
            let memory = allocator.allocate(PageLocked, 4096, 0).unwrap();
            let host = allocator.host_ptr_of(memory).unwrap();
            // SAFETY: this test's memory.
            unsafe { host.write_bytes(0x5A, 4096) };
            let target = fake.user_memory(4096);
            let code = fake.user_copy_in(target, host.as_ptr(), 4096, stream);
            assert_eq!(code, 0);
            let (registered, queries) = (fake.live_registrations().len(), sequence(&fake, "cuEventQuery").len());
            free(&allocator, memory, stream).unwrap();

            // The stream has not run: nothing may have happened to the memory.
            assert_eq!(fake.live_registrations().len(), registered);
            let statistics = allocator.statistics(None).page_locked;
            assert_eq!((statistics.live_bytes, statistics.waiting_bytes, statistics.frees > 0), (0, 4096, true));
            assert_eq!(allocator.release_cached(Duration::ZERO), 4096, "still in use");

            fake.run(stream);
            assert_eq!(fake.device_bytes(target, 4096), [0x5A; 4096]);
            assert_eq!(allocator.release_cached(PATIENCE), 0);
            let done = fake.calls_of("cuEventQuery")[queries..].iter().filter(|c| c.code == Some(0)).map(|c| c.sequence).next();
            let gone = sequence(&fake, "cudaHostUnregister").last().copied();
            assert!(done < gone && done.is_some(), "first the event, then the end: {done:?} {gone:?}");
            fake.free_user_memory(target);
        }
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn device_memory_waits_for_its_stream_too() {
        let (fake, allocator) = fake("ordered-device");
        let stream = fake.user_stream(NON_BLOCKING);
        let source = allocator.page_locked(4096, 0).unwrap();
        let memory = allocator.allocate(Device, 4096, 0).unwrap();
        assert_eq!(fake.user_copy_in(memory, source.host_ptr().as_ptr(), 4096, stream), 0);
        free(&allocator, memory, stream).unwrap();
        assert_eq!(fake.live_allocations().len(), 1);
        assert_eq!(allocator.statistics(None).device.waiting_bytes, 4096);
        fake.run(stream);
        drop(source);
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn recorded_streams_are_waited_for_as_well() {
        let (fake, allocator) = fake_with("recorded", 2);
        fake.set_device(1);
        let elsewhere = fake.user_stream(NON_BLOCKING); // of device 1
        fake.set_device(0);
        let (own, other) = (fake.user_stream(NON_BLOCKING), fake.user_stream(NON_BLOCKING));
        let on_1 = allocator.allocate(Device, 256, 1).unwrap();
        let memory = allocator.allocate(PageLocked, 4096, 0).unwrap();
        for stream in [own, other, elsewhere] {
            // SAFETY: the streams live as long as the test.
            assert!(unsafe { allocator.record_stream(memory + 5, stream) });
        }
        // SAFETY: as above.
        assert!(!unsafe { allocator.record_stream(memory + 4096, own) });
        let target = fake.user_memory(64);
        let host = allocator.host_ptr_of(memory).unwrap();
        assert_eq!(fake.user_copy_in(target, host.as_ptr(), 64, other), 0);
        free(&allocator, memory, own).unwrap();
        assert_eq!(fake.calls_of("cuEventRecord").iter().filter(|call| call.code == Some(0)).count(), 3);
        fake.hold(elsewhere, true);
        for stream in [own, other] {
            fake.run(stream);
            assert_eq!(allocator.release_cached(Duration::ZERO), 4096, "not all have done with it");
        }
        fake.hold(elsewhere, false);
        fake.run(elsewhere);
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        free(&allocator, on_1, 0).unwrap();
        fake.run_all();
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        fake.free_user_memory(target);
        fake.set_device(0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn freed_blocks_are_cached_by_size_and_the_cache_is_bounded() {
        let (fake, allocator) = fake("cache");
        let stream = fake.user_stream(NON_BLOCKING);
        let make = |bytes| allocator.allocate(PageLocked, bytes, 0).unwrap();
        let free = |block| {
            free(&allocator, block, stream).unwrap();
            fake.run(stream);
        };
        let cached = || allocator.statistics(None).page_locked.cached_bytes;
        let a = make(2 * MIB);
        free(a);
        assert_eq!(cached(), 0, "it is found at the next call");
        assert_eq!(make(2 * MIB - 5), a, "as many pages: the same block");
        assert_eq!(fake.calls_of("cudaHostRegister").len(), 1);
        let b = make(MIB);
        assert_ne!(b, a);

        allocator.set_cache_limit(3 * MIB);
        let (c, large) = (make(MIB), make(4 * MIB));
        for block in [a, b, c] {
            free(block);
        }
        free(large);
        let d = make(4096); // a call that looks
        assert_eq!(cached(), 2 * MIB, "b and c: a was the oldest of 4 MiB, and the large one is above the limit");
        assert_eq!(allocator.statistics(None).page_locked.held_bytes(), 2 * MIB + 4096);
        assert_eq!(fake.live_registrations().len(), 3);
        assert_eq!(make(MIB), c, "the one freed last");
        allocator.set_cache_limit(0);
        free(c);
        free(d);
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn a_thousand_frees_on_an_idle_stream_wait_for_no_device() {
        let (fake, allocator) = fake("thousand");
        let stream = fake.user_stream(NON_BLOCKING);
        fake.auto_run(true);
        let first = allocator.allocate(PageLocked, 4096, 0).unwrap();
        free(&allocator, first, stream).unwrap();
        let before = fake.calls().len();
        for _ in 0..1000 {
            let block = allocator.allocate(PageLocked, 4096, 0).unwrap();
            free(&allocator, block, stream).unwrap();
        }
        let calls = &fake.functions()[before..];
        for waits in ["cudaDeviceSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cudaHostUnregister"] {
            assert!(!calls.iter().any(|call| call == waits), "{waits}");
        }
        assert!(calls.len() < 60 * 1000, "{} calls", calls.len());
        assert_eq!(release(&fake, &allocator), 0);
        assert_nothing_is_left(&fake, &allocator);
    }
}

alone! {
    fn calls_while_a_graph_is_captured_leave_it_intact() {
        let (fake, allocator) = fake("captures");
        let (captured, other) = (fake.user_stream(NON_BLOCKING), fake.user_stream(NON_BLOCKING));
        let make = |kind| allocator.allocate(kind, MIB, 0).unwrap();
        let (p, q, r) = (make(PageLocked), make(Device), make(PageLocked));
        free(&allocator, r, other).unwrap();
        fake.begin_capture(captured, 0); // global mode: other threads' calls count too
        let work = || {
            let blocks = [make(PageLocked), make(Device)];
            blocks.into_iter().for_each(|block| free(&allocator, block, other).unwrap());
            fake.run(other);
            allocator.release_cached(Duration::ZERO);
        };
        work(); // on the thread that captures
        std::thread::scope(|scope| scope.spawn(work).join().unwrap()); // and on another
        // What is freed in the captured stream is the graph's.
        free(&allocator, p, captured).unwrap();
        free(&allocator, q, captured).unwrap();
        assert!(fake.end_capture(captured), "the capture is intact");

        let statistics = allocator.statistics(None);
        assert_eq!((statistics.page_locked.captured_bytes, statistics.device.captured_bytes), (MIB, MIB));
        fake.run_all();
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        assert_eq!(fake.live_registrations().len() + fake.live_allocations().len(), 2, "not given back");
        assert_ne!(make(PageLocked), p, "nor used again");
        // SAFETY: the fake keeps no graphs.
        assert_eq!(unsafe { allocator.release_captured() }, 2 * MIB);
        let live = allocator.statistics(None).page_locked;
        assert_eq!((live.live, live.captured_bytes), (1, 0));
    }
}

alone! {
    fn a_free_in_the_legacy_stream_during_a_capture_is_ordered_afterwards() {
        let (fake, allocator) = fake("legacy");
        let blocking = fake.user_stream(0);
        let block = allocator.allocate(PageLocked, MIB, 0).unwrap();
        let target = fake.user_memory(64);
        assert_eq!(fake.user_copy_in(target, allocator.host_ptr_of(block).unwrap().as_ptr(), 64, 0), 0);
        fake.begin_capture(blocking, 0);
        free(&allocator, block, 0).unwrap(); // an event recorded there now would break the capture
        assert_eq!(allocator.release_cached(Duration::ZERO), MIB);
        assert!(fake.end_capture(blocking), "the capture is intact");
        assert_eq!(allocator.release_cached(Duration::ZERO), MIB, "the copy has not run");
        fake.run(0);
        assert_eq!(allocator.release_cached(PATIENCE), 0);
        fake.free_user_memory(target);
        assert_nothing_is_left(&fake, &allocator);
    }
}
