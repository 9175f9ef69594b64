//! How rings end, also when CUDA does not cooperate.

use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::{Level, Metadata, span};

use super::super::{pinned_bytes_in_process, stranded_bytes_in_process};
use super::fake::{self, Call};
use super::{MIB, alone, assert_nothing_is_left, baseline, pin, ring_ranges};

/// Counts warnings.
struct Warnings;

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

fn count_warnings() {
    tracing::subscriber::set_global_default(Warnings).unwrap();
}

fn warnings() -> usize {
    WARNINGS.swap(0, Ordering::Relaxed)
}

alone! {
    fn a_ring_is_unregistered_in_reverse_and_then_unmapped() {
        count_warnings();
        let before = baseline();
        let ring = pin(3, 1).unwrap();
        let starts: Vec<_> = (0..3).rev().map(|slot| Call::Unregister { start: ring.slot(slot).addr().get() }).collect();
        fake::take_calls();
        drop(ring); // the fake touches what it unregisters: unmapped memory would fault
        assert_eq!(fake::take_calls(), starts);
        assert_nothing_is_left(&before);
        assert_eq!(warnings(), 0);
    }
}

alone! {
    fn registrations_that_are_gone_already_are_one_warning_and_the_memory_goes_too() {
        count_warnings();
        let before = baseline();
        let ring = pin(3, 1).unwrap();
        fake::with(|state| {
            state.fail_unregister = Some(713);
            state.live.clear(); // the device was reset
        });
        drop(ring);
        assert_eq!(warnings(), 1);
        assert_nothing_is_left(&before);
        // The process goes on and can pin again.
        fake::with(|state| state.fail_unregister = None);
        drop(pin(3, 1).unwrap());
        assert_nothing_is_left(&before);
    }
}

alone! {
    fn whichever_unregistration_fails_that_piece_stays_mapped_and_the_rest_goes() {
        count_warnings();
        let mut standing = baseline();
        let mut stranded = 0;
        for k in 1..=3 {
            let ring = pin(3, 1).unwrap();
            let starts = [2, 1, 0].map(|slot| ring.slot(slot)); // in the order of the calls
            // SAFETY: the ring is only this test's.
            unsafe { starts[k - 1].write(k as u8) };
            fake::take_calls();
            fake::with(|state| state.fail = vec![(k, 999)]);
            drop(ring);
            fake::with(|state| state.fail.clear());
            assert_eq!(fake::take_calls().len(), 3, "the others are unregistered all the same");
            assert_eq!(warnings(), 1);

            let start = starts[k - 1].addr().get();
            let kept = start..start + MIB;
            stranded += MIB;
            assert_eq!(fake::with(|state| std::mem::take(&mut state.live)), std::slice::from_ref(&kept));
            assert_eq!((pinned_bytes_in_process(), stranded_bytes_in_process()), (stranded, stranded));
            // SAFETY: what CUDA holds on to is still mapped.
            assert_eq!(unsafe { starts[k - 1].read() }, k as u8);
            if cfg!(target_os = "linux") {
                standing.push(kept);
                standing.sort_by_key(|range| range.start);
                assert_eq!(ring_ranges(), standing);
            }
            assert_eq!(fake::last_error(), 0);
        }
    }
}

alone! {
    fn a_failed_start_whose_undoing_fails_too_keeps_what_is_still_registered() {
        count_warnings();
        baseline();
        fake::with(|state| {
            state.fail = vec![(3, 1)];
            state.fail_unregister = Some(999);
        });
        pin(4, 1).unwrap_err();
        assert_eq!(warnings(), 1);
        let live = fake::with(|state| state.live.clone());
        assert_eq!(live.len(), 2);
        assert_eq!((pinned_bytes_in_process(), stranded_bytes_in_process()), (2 * MIB, 2 * MIB));
        for range in live {
            // SAFETY: still registered, so still mapped.
            unsafe { std::ptr::with_exposed_provenance::<u8>(range.start).read_volatile() };
        }
    }
}

alone! {
    fn a_runtime_that_is_unloading_is_met_with_silence() {
        count_warnings();
        baseline();
        let ring = pin(3, 1).unwrap();
        let first = ring.slot(0);
        fake::with(|state| state.fail_unregister = Some(4));
        drop(ring);
        assert_eq!(warnings(), 0);
        assert_eq!(stranded_bytes_in_process(), 3 * MIB);
        // SAFETY: nobody can say whether the driver still holds it, so it is still mapped.
        assert_eq!(unsafe { first.read() }, 0);
    }
}

alone! {
    fn the_last_handle_ends_the_ring_on_whatever_thread() {
        let before = baseline();
        let ring = std::sync::Arc::new(pin(2, 1).unwrap());
        let lease = std::sync::Arc::clone(&ring);
        drop(ring);
        assert_eq!(pinned_bytes_in_process(), 2 * MIB);
        std::thread::spawn(move || drop(lease)).join().unwrap();
        assert_nothing_is_left(&before);
    }
}
