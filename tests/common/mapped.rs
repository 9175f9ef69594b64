//! What the tests of the mapped allocator share: a fake with an allocator that finds no other, and what must be left.

#![allow(dead_code)]

use super::common::fake::{Fake, Hazards};
use super::common::scratch;
use super::life::rings;
use pinring::{CudaSearch, FreeError, MappedAllocator};
use std::time::Duration;

pub const MIB: usize = 1 << 20;
/// `cudaStreamNonBlocking`.
pub const NON_BLOCKING: u32 = 1;
/// Long enough for what completes at once, and of no consequence otherwise.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A fake that is runtime and driver, with so many devices, and an allocator that finds no other.
pub fn fake_with(name: &str, devices: i32) -> (Fake, MappedAllocator) {
    let fake = Fake::new(&scratch(name), "libcudart.so.13");
    fake.devices(devices);
    let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
    (fake, MappedAllocator::with_search(search))
}

pub fn fake(name: &str) -> (Fake, MappedAllocator) {
    fake_with(name, 1)
}

/// Frees behind a stream that the test keeps alive; nothing else uses the memory.
pub fn free(allocator: &MappedAllocator, address: u64, stream: usize) -> Result<(), FreeError> {
    // SAFETY: the tests' streams are live, and they use nothing that they have freed.
    unsafe { allocator.free(address, stream) }
}

/// Gives everything back, once what is queued has run; what streams still use then.
pub fn release(fake: &Fake, allocator: &MappedAllocator) -> usize {
    fake.run_all();
    allocator.release_cached(PATIENCE)
}

/// Everything was given back: by the allocator's own counts, by CUDA's and by the kernel's.
pub fn assert_nothing_is_left(fake: &Fake, allocator: &MappedAllocator) {
    let statistics = allocator.statistics(None);
    assert_eq!((statistics.page_locked.held_bytes(), statistics.device.held_bytes()), (0, 0), "{statistics:?}");
    assert_eq!((statistics.page_locked.live, statistics.device.live), (0, 0));
    assert_eq!(fake.live_registrations(), []);
    assert_eq!(fake.live_allocations(), []);
    assert_eq!(fake.live_events(), []);
    assert_eq!(rings(), []);
    assert_eq!(fake.hazards(), Hazards::default());
    assert_eq!((fake.contexts(), fake.capture_mode(), fake.peek_last_error()), (0, 0, 0), "this thread is as it was");
}

/// Sequence numbers of a function's calls.
pub fn sequence(fake: &Fake, function: &str) -> Vec<u64> {
    fake.calls_of(function).iter().map(|call| call.sequence).collect()
}
