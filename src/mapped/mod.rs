//! The mapped allocator: memory that a device uses under a device address, and that lies in the device or, page-locked,
//! in the host.
//!
//! ```text
//! allocate ──► live ──► free(stream) ──► waiting ──► cached ──► given back
//!                            │             │ (behind an event)     (by size, by call, or when memory is short)
//!                            ▼             ▼
//!                         captured     quarantined
//! ```
//!
//! `backing` is what is behind an allocation, `order` says when a freed one may be used again, `statistics` counts,
//! `error` says why not, `shared` has the lists of what is live and what was freed, `memory` is one allocation that frees
//! itself. Here is what users call.
//!
//! Page-locked memory is made as a feed's ring is, by the same code (`memory`). It does not sub-allocate: a framework's
//! caching allocator above it does that better, knowing its streams. It has no threads; what became free is found at the
//! next call. It copies nothing.

mod backing;
mod error;
mod memory;
mod order;
mod shared;
mod statistics;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::cuda::device::RawStream;
use crate::cuda::types::CudaSearch;

use shared::Shared;

pub use error::{FreeError, MappedError};
pub use memory::MappedMemory;
pub use statistics::{KindStatistics, MappedStatistics, MemoryKind};

/// Allocates memory that a device uses: in its own memory, or page-locked in the host's and mapped for it.
///
/// Which of the two is the allocator's *mode*, or the caller's choice for one allocation; each allocation remembers what
/// it is and is freed accordingly, whatever the mode is then. Memory is freed *in a stream*: it is used again, or given
/// back, only after what is queued in that stream has completed. A freed page-locked block goes to a cache, since making
/// one costs much (page-locking) and ending one more (CUDA waits for all queued copies of the process): the next
/// allocation that needs as many pages takes it, and [`release_cached`](Self::release_cached) gives all of them back.
///
/// Cheap to clone; clones are the same allocator. Every method may be called from any thread, also while a thread
/// captures a CUDA graph. In a forked child nothing is allocated, freeing does nothing, and CUDA is not called.
///
/// The package `examples/mapped-allocator` of the repository has it as a C library, with PyTorch's signatures, and as
/// Python modules.
///
/// ```
/// use pinring::{MappedAllocator, MemoryKind};
///
/// let allocator = MappedAllocator::new(); // opens nothing yet
/// match allocator.page_locked(64 << 20, 0) {
///     Ok(weights) => {
///         // A kernel reads it at `device_ptr`, the host writes it at `host_ptr`.
///         assert_eq!(allocator.host_ptr_of(weights.device_ptr() + 100).unwrap(), unsafe { weights.host_ptr().add(100) });
///         assert_eq!(allocator.statistics(None).page_locked.live_bytes, 64 << 20);
///     }
///     Err(error) => println!("{error}"), // no GPU here, for example
/// }
/// ```
#[derive(Clone)]
pub struct MappedAllocator(Arc<Shared>);

impl MappedAllocator {
    /// An allocator in the mode of device memory, which looks for CUDA as a feed does. Nothing is opened before the first
    /// allocation.
    pub fn new() -> MappedAllocator {
        MappedAllocator::with_search(CudaSearch::new())
    }

    /// The same, with settings of the caller's for where CUDA is looked for.
    pub fn with_search(search: CudaSearch) -> MappedAllocator {
        MappedAllocator(Arc::new(Shared::new(search)))
    }

    // ---- settings ----

    /// Sets the mode for allocations from now on: page-locked host memory, or the device's. What is allocated stays as it
    /// is.
    pub fn use_pinned(&self, pinned: bool) {
        // Relaxed, here and below: the flag publishes nothing but itself.
        self.0.pinned_mode.store(pinned, Ordering::Relaxed);
    }

    /// Whether the mode is page-locked memory.
    pub fn is_pinned_mode(&self) -> bool {
        self.0.pinned_mode.load(Ordering::Relaxed)
    }

    /// The mode, as the kind of memory that it stands for.
    pub fn mode(&self) -> MemoryKind {
        if self.is_pinned_mode() { MemoryKind::PageLocked } else { MemoryKind::Device }
    }

    /// How many bytes of freed page-locked memory the cache may hold: 1 GiB at first. What is above is given back, the
    /// oldest first, at the next call that frees; 0 is no cache.
    pub fn set_cache_limit(&self, bytes: usize) {
        self.0.cache_limit.store(bytes, Ordering::Relaxed);
    }

    /// Whether page-locked memory beyond what seems to be left is tried all the same. For hosts whose memory grows as it
    /// is used (some virtual machines); elsewhere it trades an error for a kill. Off at first.
    pub fn ignore_memory_budget(&self, ignore: bool) {
        self.0.ignore_budget.store(ignore, Ordering::Relaxed);
    }

    // ---- allocating ----

    /// Allocates `bytes` for `device`, of the kind that is asked for, and returns the device address. Page-locked memory
    /// is aligned to 2 MiB and takes whole pages; device memory is aligned to 256 bytes. Fresh page-locked memory is
    /// zero, from the cache it holds what was there; device memory holds anything.
    ///
    /// Where memory is short, what was freed is waited for (10 s at most) and given back, and it is tried once more.
    ///
    /// # Errors
    ///
    /// [`MappedError`]: no CUDA, no such device, or no memory, with what is held and what the limits are.
    #[doc(alias = "cuMemAlloc")]
    #[doc(alias = "cudaHostRegister")]
    pub fn allocate(&self, kind: MemoryKind, bytes: usize, device: i32) -> Result<u64, MappedError> {
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(MappedError::Size { bytes });
        }
        if self.0.is_inherited() {
            return Err(MappedError::UsedAfterFork);
        }
        self.0.allocate(kind, bytes, device)
    }

    /// Allocates page-locked memory whatever the mode, as a value that frees itself.
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate).
    pub fn page_locked(&self, bytes: usize, device: i32) -> Result<MappedMemory, MappedError> {
        let address = self.allocate(MemoryKind::PageLocked, bytes, device)?;
        let host = self.host_ptr_of(address).expect("a page-locked allocation that was just made");
        Ok(MappedMemory::new(self.clone(), address, host, bytes))
    }

    /// Frees the allocation that begins at `address`, after what is queued in `stream` (and in the streams of
    /// [`record_stream`](Self::record_stream)) has completed. Returns at once. In a stream that is being captured it is
    /// kept for the graph: see [`release_captured`](Self::release_captured).
    ///
    /// # Errors
    ///
    /// [`FreeError::Unknown`], and nothing is freed: the address is no allocation's first byte.
    /// [`FreeError::Unordered`]: the driver refused to say when the stream has done with it, and it is kept. So it is for a stream
    /// of a device that nothing was allocated for.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream (a `CUstream` or `cudaStream_t`; 0, 1 and 2 are default streams of the allocation's
    /// device, 2 the calling thread's), and nothing uses the memory from now on but what is queued in those streams.
    #[doc(alias = "cuMemFree")]
    #[doc(alias = "cudaHostUnregister")]
    pub unsafe fn free(&self, address: u64, stream: usize) -> Result<(), FreeError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.free(address, Some(RawStream(stream))) }
    }

    /// Notes that `stream` uses the allocation which `address` lies in, besides the one that it will be freed in. False
    /// where there is no such allocation. For 2, the calling thread's own default stream, the free is ordered behind those of
    /// all threads.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream, and stays so until the allocation is freed.
    pub unsafe fn record_stream(&self, address: u64, stream: usize) -> bool {
        if self.0.is_inherited() {
            return false;
        }
        self.0.record_stream(address, RawStream(stream))
    }

    // ---- asking ----

    /// The host address of a byte of a page-locked allocation, by the device address of that byte: of its first one or of
    /// any within. `None` for device memory, for one past the end, and for what is not allocated here.
    pub fn host_ptr_of(&self, device_ptr: u64) -> Option<NonNull<u8>> {
        if self.0.is_inherited() {
            return None;
        }
        self.0.host_ptr_of(device_ptr)
    }

    /// The counts of one device, or of all. Page-locked memory counts for the device that it was asked for. Zeros in a
    /// forked child.
    pub fn statistics(&self, device: Option<i32>) -> MappedStatistics {
        if self.0.is_inherited() {
            return MappedStatistics::default();
        }
        self.0.statistics(device)
    }

    /// Sets the peaks of one device, or of all, to what is live now.
    pub fn reset_peaks(&self, device: Option<i32>) {
        if !self.0.is_inherited() {
            self.0.reset_peaks(device);
        }
    }

    // ---- giving back ----

    /// Gives back the cache, and what streams have done with within `patience`. Returns the freed bytes that streams
    /// still use after that.
    ///
    /// CUDA waits for every queued copy of the process while it unregisters: not for a thread that must not wait.
    pub fn release_cached(&self, patience: Duration) -> usize {
        if self.0.is_inherited() {
            return 0;
        }
        self.0.release(patience)
    }

    /// Gives back what was freed in streams while they were captured; what other streams use too, once those have done with
    /// it. Returns its bytes.
    ///
    /// # Safety
    ///
    /// The graphs that were captured meanwhile are destroyed, no launch of them is running or queued, and what was queued
    /// in the captured streams before the capture has completed.
    pub unsafe fn release_captured(&self) -> usize {
        if self.0.is_inherited() {
            return 0;
        }
        self.0.release_captured()
    }
}

impl Default for MappedAllocator {
    fn default() -> MappedAllocator {
        MappedAllocator::new()
    }
}

impl fmt::Debug for MappedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let statistics = self.statistics(None);
        f.debug_struct("MappedAllocator").field("mode", &self.mode()).field("statistics", &statistics).finish()
    }
}
