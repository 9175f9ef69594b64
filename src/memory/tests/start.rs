//! How rings start, and what is left when they do not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::super::budget::{HostFiles, MemoryLimitKind};
use super::super::error::{RingError, SlotEnd};
use super::super::progress::{PinPhase, PinWatch};
use super::super::ring::Ring;
use super::super::{pinned_bytes_in_process, stranded_bytes_in_process};
use super::fake::{self, Call};
use super::{
    MIB, alone, assert_nothing_is_left, baseline, code, conditions, pin, pin_watched, plan, resident_ring_bytes,
    ring_ranges, watch,
};
use crate::memory::ring::RingPlan;

#[cfg(target_os = "linux")]
alone! {
    fn a_ring_near_a_device_says_where_it_lies_and_its_thread_goes_on_as_before() {
        use super::super::numa::Node;
        use super::super::ring::Conditions;
        use rustix::thread::{CpuSet, sched_getaffinity};
        let before = baseline();
        let allowed = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).unwrap();
        let node = Some(Node { number: 77, processors: vec![last] });
        let here = Conditions { host: HostFiles::system(), node, ..conditions(2 * MIB) };
        let during = Arc::new(OnceLock::new());
        let set = Arc::clone(&during);
        let watch = watch(move |progress| {
            if progress.phase == PinPhase::Prefaulting && progress.bytes_done > 0 {
                set.get_or_init(|| sched_getaffinity(None).unwrap());
            }
        });
        let ring = Ring::pinned_under(&here, &plan(MIB, 5), || Ok(fake::cuda()), &watch).unwrap();
        let during = during.get().unwrap();
        assert!(during.count() == 1 && during.is_set(last), "pages are faulted in by the node's processors");
        assert_eq!(sched_getaffinity(None).unwrap(), allowed);
        let report = ring.report().unwrap();
        assert_eq!(report.device_node, Some(77));
        if let Some(nodes) = &report.nodes {
            assert_eq!(nodes.iter().map(|on| on.bytes).sum::<usize>(), 5 * MIB, "{nodes:?}");
            assert!(report.to_string().contains("; the first device is at node 77"), "{report}");
        }
        drop(ring);
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn every_slot_is_registered_verified_and_reachable_by_devices() {
        let before = baseline();
        let first_touched = Arc::new(OnceLock::new());
        let set = Arc::clone(&first_touched);
        let watch = watch(move |progress| {
            if progress.phase == PinPhase::Registering {
                set.get_or_init(resident_ring_bytes);
            }
        });
        let ring = pin_watched(5, 2, &watch).unwrap();
        if cfg!(target_os = "linux") {
            let mark = super::super::os::page_bytes();
            assert_eq!(*first_touched.get().unwrap(), 5 * MIB + mark, "pages are present before registration");
        }

        let base = ring.slot(0).addr().get();
        let calls = fake::take_calls();
        let registered: Vec<_> = calls.iter().filter_map(|call| match call {
            Call::Register { start, bytes, flags } => Some((start - base, *bytes, *flags)),
            _ => None,
        }).collect();
        // Whole slots, portable and mapped.
        assert_eq!(registered, [(0, 2 * MIB, 3), (2 * MIB, 2 * MIB, 3), (4 * MIB, MIB, 3)]);
        for slot in 0..5 {
            let start = ring.slot(slot).addr().get();
            assert_eq!(start, base + slot * MIB);
            for byte in [start, start + MIB - 1] {
                assert!(calls.contains(&Call::HostFlags { byte }), "slot {slot}");
            }
            assert_eq!(ring.device_address(slot), Some(start as u64 + fake::DEVICE_OFFSET));
        }

        let report = ring.report().unwrap();
        assert_eq!((report.page_locked_bytes, report.pieces, report.slots_verified), (5 * MIB, 3, 5));
        assert!(report.to_string().contains("5242880 bytes in 3 registrations, 5 slots verified"), "{report}");
        assert!(ring.is_pinned());
        assert_eq!((ring.slots(), ring.bytes()), (5, 5 * MIB));
        assert_eq!(pinned_bytes_in_process(), 5 * MIB);
        drop(ring);
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn an_unpinned_ring_is_memory_and_nothing_else() {
        let before = baseline();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        let watch = watch(move |progress| record.lock().unwrap().push(progress.phase));
        let ring = Ring::unpinned_under(&conditions(MIB), &plan(8192, 3), &watch).unwrap();
        assert!(!ring.is_pinned() && ring.report().is_none() && ring.device_address(2).is_none());
        for slot in 0..3 {
            for offset in 0..8192 {
                // SAFETY: inside the slot of a ring that only this test knows.
                unsafe {
                    assert_eq!(ring.slot(slot).add(offset).read(), 0);
                    ring.slot(slot).add(offset).write(slot as u8 + 1);
                }
            }
        }
        // SAFETY: as above.
        assert_eq!([0, 1, 2].map(|slot| unsafe { ring.slot(slot).add(8191).read() }), [1, 2, 3]);
        seen.lock().unwrap().dedup();
        assert_eq!(*seen.lock().unwrap(), [PinPhase::Mapping, PinPhase::Prefaulting, PinPhase::Done]);
        drop(ring);
        assert_eq!(fake::take_calls(), []);
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_ring_that_holds_nothing_or_cannot_exist_is_refused_without_cuda() {
        let before = baseline();
        let refused = |slot_bytes, slots| {
            let find = || panic!("CUDA was looked for");
            Ring::pinned_under(&conditions(MIB), &plan(slot_bytes, slots), find, &PinWatch::new(None)).unwrap_err()
        };
        assert!(matches!(refused(0, 4), RingError::ZeroBytes { slots: 4, slot_bytes: 0 }));
        assert!(matches!(refused(4096, 0), RingError::ZeroBytes { slots: 0, slot_bytes: 4096 }));
        assert!(matches!(refused(5000, 1), RingError::Misaligned { slot_bytes: 5000 }));
        assert!(refused(5000, 1).to_string().contains("8192"));
        assert!(matches!(refused(1 << (usize::BITS / 2), 1 << (usize::BITS / 2)), RingError::Overflow { .. }));
        assert!(matches!(refused(1 << (usize::BITS - 2), 3), RingError::Overflow { .. }));
        assert!(matches!(refused(usize::MAX, 1), RingError::Overflow { .. }));
        assert_eq!(fake::take_calls(), []);
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_ring_beyond_the_budget_is_refused_before_anything_is_allocated() {
        use super::super::budget::tests::{Fixture, MEMINFO_76_GIB};
        let before = baseline();
        let fixture = Fixture::new("ring", &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "0::/\n"),
            ("cgroup/memory.max", "67108864\n"),
            ("cgroup/memory.current", "0\n"),
        ]);
        let mut conditions = conditions(MIB);
        conditions.host = fixture.host();
        let seen = watch(|progress| panic!("began: {progress}"));
        let find = || panic!("CUDA was looked for");
        for error in [
            Ring::pinned_under(&conditions, &plan(MIB, 128), find, &seen).unwrap_err(),
            Ring::unpinned_under(&conditions, &plan(MIB, 128), &seen).unwrap_err(),
        ] {
            let RingError::Budget(refusal) = &error else { panic!("{error:?}") };
            assert_eq!((refusal.asked, refusal.budget()), (128 << 20, 64 << 20));
            assert_eq!(refusal.tightest.kind, MemoryLimitKind::CgroupV2);
            assert_eq!(refusal.limits.len(), 2);
            let text = error.to_string();
            for part in ["134217728", "67108864", "memory.max"] {
                assert!(text.contains(part), "{part} in {text}");
            }
        }
        assert_nothing_is_left(&before);

        // At the limit it fits, and a user who knows better may say so.
        drop(Ring::unpinned_under(&conditions, &plan(MIB, 64), &PinWatch::new(None)).unwrap());
        let plan = RingPlan { ignore_budget: true, ..plan(MIB, 65) };
        drop(Ring::unpinned_under(&conditions, &plan, &PinWatch::new(None)).unwrap());
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn whichever_call_fails_a_start_leaves_nothing() {
        let before = baseline();
        drop(pin(4, 2).unwrap());
        let calls = fake::take_calls();
        let in_start = calls.iter().filter(|call| !matches!(call, Call::Unregister { .. })).count();
        assert_eq!((in_start, calls.len()), (2 + 8 + 2, 2 + 8 + 2 + 2));

        for failing in [1, 3, 700, 712, 999] {
            for k in 1..=in_start {
                fake::with(|state| state.fail = vec![(k, failing)]);
                let error = pin(4, 2).expect_err("a call of the start failed");
                assert_eq!(code(&error), Some(failing), "call {k}: {error:?}");
                assert!(error.to_string().contains(&failing.to_string()), "{error}");
                assert_nothing_is_left(&before);
                // N failed starts in a row leave nothing, and the next good one succeeds.
                fake::with(|state| state.fail.clear());
                drop(pin(4, 2).unwrap());
                assert_nothing_is_left(&before);
                fake::take_calls();
            }
        }
    }
}

alone! {
    fn a_failed_start_unregisters_in_reverse() {
        baseline();
        fake::with(|state| state.fail = vec![(4, 1)]);
        pin(4, 1).unwrap_err();
        let calls = fake::take_calls();
        let starts: Vec<_> = calls.iter().filter_map(|call| match call {
            Call::Register { start, .. } => Some(*start),
            _ => None,
        }).collect();
        let ends: Vec<_> = calls.iter().filter_map(|call| match call {
            Call::Unregister { start } => Some(*start),
            _ => None,
        }).collect();
        assert_eq!(starts.len(), 4);
        assert_eq!(ends, [starts[2], starts[1], starts[0]]);
    }
}

alone! {
    fn verification_names_the_slot_and_its_end() {
        let before = baseline();
        // Calls 1 and 2 register, then two questions a slot.
        fake::with(|state| state.fail = vec![(2 + 4, 1)]);
        let error = pin(4, 2).unwrap_err();
        assert!(matches!(error, RingError::Verify { slot: 1, end: SlotEnd::Last, .. }), "{error:?}");
        assert!(error.to_string().starts_with("slot 1 is not page-locked at its last byte"), "{error}");
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_refusal_for_size_names_code_and_bytes() {
        let before = baseline();
        // One slot: nothing to halve.
        fake::with(|state| state.fail = vec![(1, 2)]);
        let error = pin(1, 1).unwrap_err();
        assert_eq!(code(&error), Some(2));
        let RingError::Register(refusal) = &error else { panic!("{error:?}") };
        assert_eq!((refusal.asked, refusal.addresses.len(), refusal.registered), (MIB, MIB, 0));
        let text = error.to_string();
        for part in ["1048576 bytes", "returned 2", "not the GPU's memory", "ulimit -l"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_nothing_is_left(&before);

        // Four slots, refused every time: down to one slot, then the error.
        fake::take_calls();
        fake::with(|state| (state.fail, state.fail_register) = (Vec::new(), Some(2)));
        let error = pin(4, 4).unwrap_err();
        let RingError::Register(refusal) = &error else { panic!("{error:?}") };
        assert_eq!((refusal.asked, refusal.slots.clone(), refusal.registered), (4 * MIB, 0..1, 0));
        assert_eq!(fake::take_calls().len(), 3, "4, 2 and 1 slots were asked for");
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_cap_a_call_is_met_with_smaller_pieces() {
        let before = baseline();
        fake::with(|state| state.cap_per_call = Some(MIB));
        let ring = pin(4, 4).unwrap();
        assert_eq!(ring.report().unwrap().pieces, 4);
        assert_eq!(fake::with(|state| state.live.iter().map(std::ops::Range::len).collect::<Vec<_>>()), [MIB; 4]);
        for slot in 0..4 {
            assert_eq!(ring.device_address(slot), Some(ring.slot(slot).addr().get() as u64 + fake::DEVICE_OFFSET));
        }
        drop(ring);
        assert_nothing_is_left(&before);

        // The cap is 2 slots of 5: pieces of 3 are refused, pieces of 2 are not, and the last is what remains.
        fake::with(|state| state.cap_per_call = Some(2 * MIB));
        let ring = pin(5, 5).unwrap();
        let lengths = fake::with(|state| state.live.iter().map(std::ops::Range::len).collect::<Vec<_>>());
        assert_eq!(lengths, [2 * MIB, 2 * MIB, MIB]);
        drop(ring);
        assert_nothing_is_left(&before);

        // A slot above the cap cannot be helped: never "pinned" with an unpinned part.
        fake::with(|state| state.cap_per_call = Some(MIB / 2));
        let error = pin(4, 4).unwrap_err();
        assert_eq!(code(&error), Some(2));
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn the_third_ring_beyond_a_total_cap_says_what_is_pinned_already() {
        let before = baseline();
        fake::with(|state| state.cap_total = Some(8 * MIB));
        let (first, second) = (pin(4, 4).unwrap(), pin(4, 4).unwrap());
        let standing = ring_ranges();
        let error = pin(4, 4).unwrap_err();
        let RingError::Register(refusal) = &error else { panic!("{error:?}") };
        assert_eq!((refusal.asked, refusal.pinned_by_process, refusal.registered), (4 * MIB, 8 * MIB, 0));
        assert!(error.to_string().contains("8388608 bytes of other rings"), "{error}");
        assert_eq!(fake::with(|state| state.live.len()), 2);
        assert_eq!(pinned_bytes_in_process(), 8 * MIB);
        assert_eq!(ring_ranges(), standing);
        assert_eq!(fake::last_error(), 0);

        // With room for half a ring, the half is given back.
        drop(second);
        fake::with(|state| state.cap_total = Some(6 * MIB));
        let error = pin(4, 4).unwrap_err();
        let RingError::Register(refusal) = &error else { panic!("{error:?}") };
        assert_eq!((refusal.pinned_by_process, refusal.registered, refusal.slots.clone()), (4 * MIB, 2 * MIB, 2..3));
        assert_eq!(pinned_bytes_in_process(), 4 * MIB);
        drop(first);
        assert_nothing_is_left(&before);
    }
}

alone! {
    #[cfg(target_os = "linux")]
    fn a_range_that_another_owner_registered_is_named_and_left_alone() {
        let before = baseline();
        let page = super::super::os::page_bytes();
        let foreign = Arc::new(OnceLock::new());
        let (set, known) = (Arc::clone(&foreign), before.clone());
        // When registration begins, page 3 of the 8 pages is somebody else's.
        let watch = watch(move |progress| {
            if progress.phase == PinPhase::Registering {
                let ring = ring_ranges().into_iter().find(|range| !known.contains(range)).unwrap();
                let range = ring.start + 3 * page..ring.start + 4 * page;
                set.get_or_init(|| {
                    fake::with(|state| state.live.push(range.clone()));
                    range
                });
            }
        });
        let error = Ring::pinned_under(&conditions(MIB), &plan(8 * page, 1), || Ok(fake::cuda()), &watch).unwrap_err();
        let foreign = foreign.get().unwrap();

        assert_eq!(code(&error), Some(712));
        let RingError::Register(refusal) = &error else { panic!("{error:?}") };
        assert_eq!(refusal.other_owner.as_ref(), Some(foreign));
        assert_eq!(refusal.addresses, foreign.start - 3 * page..foreign.start + 5 * page);
        let text = error.to_string();
        let range = format!("pinned by another owner from 0x{:x} to 0x{:x}", foreign.start, foreign.end);
        assert!(text.contains(&range), "{text}");

        // Theirs is theirs.
        assert_eq!(fake::with(|state| state.live.clone()), std::slice::from_ref(foreign));
        assert!(!fake::take_calls().iter().any(|call| matches!(call, Call::Unregister { .. })));
        assert_eq!(fake::last_error(), 0);
        assert_eq!(ring_ranges(), before);
        assert_eq!((pinned_bytes_in_process(), stranded_bytes_in_process()), (0, 0));
    }
}

alone! {
    fn cancel_takes_effect_between_pieces_and_undoes_them() {
        let before = baseline();
        let slot = Arc::new(OnceLock::<PinWatch>::new());
        let inner = Arc::downgrade(&slot);
        let watch = watch(move |progress| {
            if progress.phase == PinPhase::Registering && progress.bytes_done == 2 * MIB {
                inner.upgrade().unwrap().get().unwrap().cancel();
            }
        });
        slot.set(watch.clone()).unwrap();
        let error = pin_watched(4, 1, &watch).unwrap_err();
        assert!(
            matches!(error, RingError::Cancelled {
                phase: PinPhase::Registering, bytes_done: 2_097_152, bytes_total: 4_194_304
            }),
            "{error:?}"
        );
        let calls = fake::take_calls();
        assert_eq!(calls.iter().filter(|call| matches!(call, Call::Register { .. })).count(), 2);
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_start_cancelled_at_any_phase_leaves_nothing() {
        let before = baseline();
        let phases =
            [PinPhase::FindingCuda, PinPhase::Mapping, PinPhase::Prefaulting, PinPhase::Registering, PinPhase::Verifying];
        for phase in phases {
            let slot = Arc::new(OnceLock::<PinWatch>::new());
            let inner = Arc::downgrade(&slot);
            let watch = watch(move |progress| {
                if progress.phase == phase {
                    inner.upgrade().unwrap().get().unwrap().cancel();
                }
            });
            slot.set(watch.clone()).unwrap();
            let error = pin_watched(4, 2, &watch).unwrap_err();
            assert!(matches!(error, RingError::Cancelled { phase: at, .. } if at == phase), "{error:?}");
            assert_nothing_is_left(&before);
        }
    }
}

alone! {
    fn progress_and_cancel_work_while_a_registration_takes_its_time() {
        let before = baseline();
        fake::with(|state| state.hold_register = true);
        let watch = PinWatch::new(None);
        let pinning = std::thread::spawn({
            let watch = watch.clone();
            move || pin_watched(4, 1, &watch)
        });
        while watch.progress().phase != PinPhase::Registering {
            std::thread::yield_now();
        }
        let first = watch.progress();
        assert_eq!((first.bytes_done, first.bytes_total), (0, 4 * MIB));
        std::thread::sleep(Duration::from_millis(5));
        let second = watch.progress();
        assert_eq!(second.phase, PinPhase::Registering);
        assert!(second.elapsed >= first.elapsed + Duration::from_millis(5), "{first} {second}");

        watch.cancel();
        fake::with(|state| state.hold_register = false);
        let error = pinning.join().unwrap().unwrap_err();
        // The piece that was under way when the cancel came is the last, unless the cancel came before it.
        let RingError::Cancelled { phase: PinPhase::Registering, bytes_done, .. } = error else { panic!("{error:?}") };
        assert!(bytes_done <= MIB, "{bytes_done}");
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn a_panic_in_the_callback_leaves_nothing() {
        let before = baseline();
        for phase in [PinPhase::FindingCuda, PinPhase::Prefaulting, PinPhase::Registering, PinPhase::Verifying, PinPhase::Done] {
            let watch = watch(move |progress| assert_ne!(progress.phase, phase));
            let caught = catch_unwind(AssertUnwindSafe(|| pin_watched(4, 2, &watch)));
            assert!(caught.is_err(), "{phase}");
            assert_nothing_is_left(&before);
        }
    }
}

alone! {
    #[cfg(target_os = "linux")]
    fn a_hundred_rings_one_after_the_other_leave_the_process_as_it_was() {
        let before = baseline();
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let at_first = lines();
        for _ in 0..100 {
            let ring = pin(3, 2).expect("never 712");
            assert_eq!(fake::with(|state| state.live.len()), 2);
            drop(ring);
            assert_nothing_is_left(&before);
        }
        // A ring that left anything, its fence included, would show a hundred times.
        assert!(lines() < at_first + 50, "{at_first} mappings at first, {} now", lines());
    }
}
