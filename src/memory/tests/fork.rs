//! A forked child sees zeros, knows that it is one, and leaves the parent's registrations alone.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::super::in_forked_child;
use super::super::progress::PinWatch;
use super::super::ring::Ring;
use super::fake;
use super::{MIB, alone, assert_nothing_is_left, baseline, conditions, pin, plan, ring_ranges};

unsafe extern "C" {
    safe fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    safe fn _exit(status: i32) -> !;
}

/// Runs `body` in a forked child and returns whether it went well.
fn in_child(body: impl FnOnce()) -> bool {
    match fork() {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            let went_well = catch_unwind(AssertUnwindSafe(body)).is_ok();
            _exit(i32::from(!went_well))
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of ours, and an integer of ours.
            let ended = unsafe { waitpid(child, &mut status, 0) };
            assert_eq!(ended, child);
            status == 0
        }
    }
}

alone! {
    #[cfg(target_os = "linux")]
    fn the_child_sees_zeros_and_never_touches_the_parents_registrations() {
        assert!(!in_forked_child(), "before any ring");
        let before = baseline();
        let ring = pin(2, 1).unwrap();
        // SAFETY: the ring is only this test's, and lives on.
        let read = |slot: usize| unsafe { ring.slot(slot).read() };
        // SAFETY: as above.
        let write = |slot: usize, value: u8| unsafe { ring.slot(slot).write(value) };
        write(0, 7);
        write(1, 7);
        fake::take_calls();

        let inherited = &ring;
        let went_well = in_child(move || {
            assert!(in_forked_child() && inherited.stamp().is_inherited());
            assert_eq!([read(0), read(1)], [0, 0]);
            // SAFETY: this process ends without returning from here, so the ring is dropped once in it.
            drop(unsafe { std::ptr::read(inherited) });
            assert_eq!(fake::take_calls(), [], "no call to CUDA");
            assert_eq!(ring_ranges().len(), 1, "the child gave its copy of the addresses back");

            // A ring of the child's own is at home there, and its parent's still is not.
            let own = Ring::unpinned_under(&conditions(MIB), &plan(4096, 2), &PinWatch::new(None)).unwrap();
            assert!(!in_forked_child() && !own.stamp().is_inherited());
        });
        assert!(went_well);

        assert!(!in_forked_child() && !ring.stamp().is_inherited());
        assert_eq!([read(0), read(1)], [7, 7]);
        assert_eq!(fake::with(|state| state.live.len()), 2);
        drop(ring);
        assert_eq!(fake::take_calls().len(), 2);
        assert_nothing_is_left(&before);
    }
}

alone! {
    #[cfg(target_os = "linux")]
    fn a_grandchild_knows_its_parents_ring_from_its_grandparents() {
        let ring = pin(1, 1).unwrap();
        let went_well = in_child(|| {
            let own = Ring::unpinned_under(&conditions(MIB), &plan(4096, 1), &PinWatch::new(None)).unwrap();
            assert!(!own.stamp().is_inherited() && ring.stamp().is_inherited());
            assert!(in_child(|| assert!(in_forked_child() && own.stamp().is_inherited() && ring.stamp().is_inherited())));
        });
        assert!(went_well);
    }
}
