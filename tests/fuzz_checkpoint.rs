//! Random files, from fixed seeds: the stable form of the fuzz target `checkpoint` (`tests/fuzz`).
#![cfg(unix)]
#![allow(unsafe_code)]

#[path = "fuzz/harness/bytes.rs"]
mod bytes;
#[path = "fuzz/harness/checkpoint.rs"]
mod checkpoint;
mod common;
#[path = "fuzz/harness/seeds.rs"]
mod seeds;

use common::Watchdog;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

/// The system's allocator, which notes the largest piece that a thread asked for.
struct Noting;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is the system's.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(size));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static NOTING: Noting = Noting;

/// The files have a few kilobytes. Whatever they claim, a load asks for no more than some multiple of that.
const MOST: usize = 1 << 20;

#[test]
fn any_file_is_refused_without_a_trace_or_taken_whole() {
    let _watchdog = Watchdog::new("random files", Duration::from_secs(500));
    let (taken, refused) = (Cell::new(0), Cell::new(0));
    seeds::each(300, 60, |data| {
        let was_taken = checkpoint::run_watched(data, &mut |load| {
            LARGEST.set(0);
            load();
            assert!(LARGEST.get() < MOST, "a load asked for {} bytes", LARGEST.get());
        });
        let count = if was_taken { &taken } else { &refused };
        count.set(count.get() + 1);
    });
    let (taken, refused) = (taken.get(), refused.get());
    println!("{taken} files were taken, {refused} refused");
    assert!(taken.min(refused) >= (taken + refused) / 20, "{taken} files were taken, {refused} refused");
}
