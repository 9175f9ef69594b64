//! One page-locked allocation as a value that frees itself.

use std::ptr::NonNull;

use super::MappedAllocator;

/// Page-locked host memory that devices use too: the same bytes under a host address and a device address.
///
/// Both addresses stay until it is dropped. Dropping it is a free: it waits for nothing, and the memory is used again
/// after the streams named by [`used_on`](Self::used_on) have done with it. It knows of no others: who drops it has seen
/// the work in those complete.
///
/// ```
/// use pinring::MappedAllocator;
/// let allocator = MappedAllocator::new();
/// if let Ok(memory) = allocator.page_locked(1 << 20, 0) {
///     // SAFETY: no device uses it yet, and this is the only handle.
///     unsafe { memory.host_ptr().write_bytes(7, memory.bytes()) };
///     println!("kernels read it at 0x{:x}", memory.device_ptr());
/// } // freed: into the allocator's cache
/// ```
#[derive(Debug)]
pub struct MappedMemory {
    allocator: MappedAllocator,
    address: u64,
    host: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it hands out addresses and reads and writes nothing through them; the allocator is for any thread.
unsafe impl Send for MappedMemory {}
// SAFETY: as for Send; `&MappedMemory` allows no change but that of `used_on`, under the allocator's lock.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    pub(super) fn new(allocator: MappedAllocator, address: u64, host: NonNull<u8>, bytes: usize) -> MappedMemory {
        MappedMemory { allocator, address, host, bytes }
    }

    /// The first byte, as the host counts. Aligned to 2 MiB.
    pub fn host_ptr(&self) -> NonNull<u8> {
        self.host
    }

    /// The first byte, as devices count: a `CUdeviceptr`.
    pub fn device_ptr(&self) -> u64 {
        self.address
    }

    /// Its length, as it was asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Names a stream whose work uses it: the drop is ordered behind what is queued there then.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream (a `CUstream` or `cudaStream_t`), and stays so until this is dropped.
    pub unsafe fn used_on(&self, stream: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.allocator.record_stream(self.address, stream) };
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: the promise of this type's users: the recorded streams are live, and nothing else uses it (invariant
        // 3). The error, that it is kept, was told as an event.
        let _ = unsafe { self.allocator.0.free(self.address, None) };
    }
}
