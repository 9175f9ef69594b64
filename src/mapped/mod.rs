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
//! `error` says why not, `memory` is one allocation that frees itself. Here is the allocator: a table of what is live and
//! four lists of what was freed, under one lock which is not held while CUDA is called.
//!
//! Page-locked memory is made as a feed's ring is, by the same code (`memory`). It does not sub-allocate: a framework's
//! caching allocator above it does that better, knowing its streams. It has no threads; what became free is found at the
//! next call. It copies nothing.

mod backing;
mod error;
mod memory;
mod order;
mod statistics;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::Cuda;
use crate::cuda::device::{Device, RawStream};
use crate::cuda::types::{CudaSearch, code};
use crate::memory::{ForkStamp, PinnedBlock, RingError};

use backing::{Allocation, Backing, Pinned};
use order::{Busy, Ordered, Waiting};
use statistics::{Counts, Place};

pub use error::{FreeError, MappedError};
pub use memory::MappedMemory;
pub use statistics::{KindStatistics, MappedStatistics, MemoryKind};

/// What the cache of freed page-locked blocks holds at most, unless it is told otherwise.
const CACHE_BYTES: usize = 1 << 30;
/// How long an allocation that found no memory waits for freed memory that streams still use.
const SHORTAGE_PATIENCE: Duration = Duration::from_secs(10);
/// Page-locked allocations below this are not checked against the memory budget, which reads a dozen files.
const BUDGET_BYTES: usize = 2 << 20;

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

struct Shared {
    search: CudaSearch,
    /// Of the process that first attached a device: only from then on is a forked child without CUDA.
    stamp: OnceLock<ForkStamp>,
    pinned_mode: AtomicBool,
    ignore_budget: AtomicBool,
    cache_limit: AtomicUsize,
    state: Mutex<State>,
    /// Held by the one thread that looks for what has become free, also while it gives memory back.
    collecting: Mutex<()>,
}

#[derive(Default)]
struct State {
    devices: Vec<Device>,
    /// By device address.
    live: BTreeMap<u64, Allocation>,
    /// In the order of their frees.
    waiting: VecDeque<Waiting>,
    /// Page-locked and used by nobody, the oldest first.
    cached: VecDeque<Backing>,
    captured: Vec<Backing>,
    /// Kept for ever (invariant 4).
    quarantined: Vec<Backing>,
    counts: Counts,
}

impl MappedAllocator {
    /// An allocator in the mode of device memory, which looks for CUDA as a feed does. Nothing is opened before the first
    /// allocation.
    pub fn new() -> MappedAllocator {
        MappedAllocator::with_search(CudaSearch::new())
    }

    /// The same, with settings of the caller's for where CUDA is looked for.
    pub fn with_search(search: CudaSearch) -> MappedAllocator {
        MappedAllocator(Arc::new(Shared {
            search,
            stamp: OnceLock::new(),
            pinned_mode: AtomicBool::new(false),
            ignore_budget: AtomicBool::new(false),
            cache_limit: AtomicUsize::new(CACHE_BYTES),
            state: Mutex::default(),
            collecting: Mutex::new(()),
        }))
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
        let device = self.0.device(device)?;
        device.relaxed(|| {
            self.0.collect();
            match self.0.make(kind, bytes, &device) {
                Err(error) if is_shortage(&error) && self.0.holds_freed() => {
                    self.0.release(SHORTAGE_PATIENCE);
                    self.0.make(kind, bytes, &device)
                }
                made => made,
            }
        })
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
    /// [`FreeError::Unordered`]: the driver refused to say when the stream has done with it, and it is kept.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream (a `CUstream` or `cudaStream_t`; 0, 1 and 2 are default streams of the allocation's
    /// device), and nothing uses the memory from now on but what is queued in those streams.
    #[doc(alias = "cuMemFree")]
    #[doc(alias = "cudaHostUnregister")]
    pub unsafe fn free(&self, address: u64, stream: usize) -> Result<(), FreeError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.free(address, Some(RawStream(stream))) }
    }

    /// Notes that `stream` uses the allocation which `address` lies in, besides the one that it will be freed in. False
    /// where there is no such allocation.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream, and stays so until the allocation is freed.
    pub unsafe fn record_stream(&self, address: u64, stream: usize) -> bool {
        if self.0.is_inherited() {
            return false;
        }
        let mut state = self.0.state();
        let Some((_, allocation)) = state.live.range_mut(..=address).next_back() else { return false };
        let inside = address - allocation.backing.address() < allocation.bytes as u64;
        if inside && !allocation.streams.contains(&RawStream(stream)) {
            allocation.streams.push(RawStream(stream));
        }
        inside
    }

    // ---- asking ----

    /// The host address of a byte of a page-locked allocation, by the device address of that byte: of its first one or of
    /// any within. `None` for device memory, for one past the end, and for what is not allocated here.
    pub fn host_ptr_of(&self, device_ptr: u64) -> Option<NonNull<u8>> {
        if self.0.is_inherited() {
            return None;
        }
        let state = self.0.state();
        let (start, allocation) = state.live.range(..=device_ptr).next_back()?;
        let offset = usize::try_from(device_ptr - start).ok().filter(|offset| *offset < allocation.bytes)?;
        // SAFETY: the offset is below the length that was asked for, which is within the block.
        allocation.backing.host().map(|host| unsafe { host.add(offset) })
    }

    /// The counts of one device, or of all. Page-locked memory counts for the device that it was asked for. Zeros in a
    /// forked child.
    pub fn statistics(&self, device: Option<i32>) -> MappedStatistics {
        if self.0.is_inherited() {
            return MappedStatistics::default();
        }
        self.0.state().counts.statistics(device)
    }

    /// Sets the peaks of one device, or of all, to what is live now.
    pub fn reset_peaks(&self, device: Option<i32>) {
        if !self.0.is_inherited() {
            self.0.state().counts.reset_peaks(device);
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

    /// Gives back what was freed in streams while they were captured. Returns its bytes.
    ///
    /// # Safety
    ///
    /// The graphs that were captured meanwhile are destroyed, and no launch of them is running or queued.
    pub unsafe fn release_captured(&self) -> usize {
        if self.0.is_inherited() {
            return 0;
        }
        let captured = {
            let mut state = self.0.state();
            let captured = std::mem::take(&mut state.captured);
            captured.iter().for_each(|backing| state.leave(Place::Captured, backing));
            captured
        };
        captured.iter().map(Backing::bytes).sum() // and they are dropped
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

/// Whether more free memory might have helped.
fn is_shortage(error: &MappedError) -> bool {
    match error {
        MappedError::DeviceMemory { source, .. } => source.code() == code::MEMORY_ALLOCATION,
        MappedError::PageLocked { source, .. } => match &**source {
            RingError::Budget(_) | RingError::Map { .. } => true,
            RingError::Register(refusal) => refusal.source.code() == code::MEMORY_ALLOCATION,
            _ => false,
        },
        _ => false,
    }
}

impl Shared {
    /// Whether this process is a forked child of the one that uses the allocator.
    fn is_inherited(&self) -> bool {
        self.stamp.get().is_some_and(|stamp| stamp.is_inherited())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic leaves the lists and counts half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device, attached once. CUDA is not called under the lock: the first call takes as long as it takes.
    fn device(&self, ordinal: i32) -> Result<Device, MappedError> {
        let known = |state: &State| state.devices.iter().find(|device| device.ordinal() == ordinal).cloned();
        if let Some(device) = known(&self.state()) {
            return Ok(device);
        }
        let device = Device::attach(&self.search, ordinal)?;
        self.stamp.get_or_init(ForkStamp::now);
        let mut state = self.state();
        // Another thread may have attached it meanwhile: then that one is used.
        Ok(known(&state).unwrap_or_else(|| {
            state.devices.push(device.clone());
            device
        }))
    }

    /// Makes an allocation, or takes one from the cache.
    fn make(&self, kind: MemoryKind, bytes: usize, device: &Device) -> Result<u64, MappedError> {
        let backing = match kind {
            MemoryKind::Device => self.make_device(bytes, device)?,
            MemoryKind::PageLocked => {
                let cached = self.state().take_cached(bytes, device); // and the lock is free again
                cached.map_or_else(|| self.make_page_locked(bytes, device), Ok)?
            }
        };
        let address = backing.address();
        let mut state = self.state();
        state.counts.made(device.ordinal(), kind, bytes);
        state.live.insert(address, Allocation { backing, bytes, streams: Vec::new() });
        Ok(address)
    }

    fn make_device(&self, bytes: usize, device: &Device) -> Result<Backing, MappedError> {
        device.alloc(bytes).map(Backing::Device).map_err(|source| {
            let held = self.state().counts.statistics(Some(device.ordinal())).device;
            let (device, live, waiting) = (device.ordinal(), held.live_bytes, held.waiting_bytes);
            MappedError::DeviceMemory { bytes, device, live, waiting, source }
        })
    }

    fn make_page_locked(&self, bytes: usize, device: &Device) -> Result<Backing, MappedError> {
        let ignore_budget = self.ignore_budget.load(Ordering::Relaxed) || bytes < BUDGET_BYTES;
        let block = device.within(|| PinnedBlock::new(bytes, ignore_budget, || Cuda::find(&self.search)));
        match block {
            Ok(block) => Ok(Backing::PageLocked(Pinned::new(device.clone(), block))),
            Err(source) => {
                let held = self.state().counts.statistics(None).page_locked;
                let (device, live, waiting) = (device.ordinal(), held.live_bytes, held.waiting_bytes);
                Err(MappedError::PageLocked { bytes, device, live, waiting, source: Box::new(source) })
            }
        }
    }

    /// # Safety
    /// As for [`MappedAllocator::free`]; without a stream, nothing but the recorded streams uses the memory.
    unsafe fn free(&self, address: u64, stream: Option<RawStream>) -> Result<(), FreeError> {
        if self.is_inherited() {
            return Ok(()); // the parent's; this process has a wiped copy of the addresses
        }
        let (allocation, devices) = {
            let mut state = self.state();
            let Some(allocation) = state.live.remove(&address) else {
                return Err(FreeError::Unknown { address, inside: state.inside(address) });
            };
            let (ordinal, kind) = (allocation.backing.device().ordinal(), allocation.backing.kind());
            state.counts.freed(ordinal, kind, allocation.bytes);
            (allocation, state.devices.clone())
        };
        let Allocation { backing, bytes, mut streams } = allocation;
        if let Some(stream) = stream.filter(|stream| !streams.contains(stream)) {
            streams.push(stream);
        }
        let device = backing.device().clone();
        device.relaxed(|| {
            // SAFETY: the caller's promise for `stream`, that of `record_stream` for the others.
            let ordered = unsafe { order::order(backing, &streams, &devices) };
            let lost = self.settle(ordered).map(|source| FreeError::Unordered { address, bytes, source });
            self.collect();
            lost.map_or(Ok(()), Err)
        })
    }

    /// Puts a freed allocation where it belongs. An error is why it was quarantined.
    fn settle(&self, ordered: Ordered) -> Option<crate::cuda::types::CudaError> {
        let mut state = self.state();
        match ordered {
            Ordered::Waiting(waiting) => {
                state.enter(Place::Waiting, &waiting.backing);
                state.waiting.push_back(waiting);
            }
            Ordered::Captured(backing) => {
                state.enter(Place::Captured, &backing);
                state.captured.push(backing);
            }
            Ordered::Done(backing) => {
                let over = state.done(backing, self.cache_limit.load(Ordering::Relaxed));
                drop(state);
                drop(over); // with CUDA calls: not under the lock
            }
            Ordered::Lost(backing, error) => {
                tracing::warn!(
                    bytes = backing.bytes(),
                    %error,
                    "freed memory is kept for the rest of the process: it cannot be known when its streams have done with it"
                );
                state.enter(Place::Quarantined, &backing);
                state.quarantined.push(backing);
                return Some(error);
            }
        }
        None
    }

    /// Looks for what streams have done with, unless another thread does.
    fn collect(&self) {
        match self.collecting.try_lock() {
            Ok(_turn) => self.collect_now(),
            Err(TryLockError::Poisoned(poisoned)) => {
                let _turn = poisoned.into_inner();
                self.collect_now();
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// The same for the thread that holds `collecting`: only such a one takes from the list.
    fn collect_now(&self) {
        let waiting = std::mem::take(&mut self.state().waiting);
        let Some(first) = waiting.front() else { return };
        let device = first.backing.device().clone();
        device.relaxed(|| {
            let (mut still, mut busy) = (VecDeque::new(), Busy::new());
            for waiting in waiting {
                let (ordinal, kind) = (waiting.backing.device().ordinal(), waiting.backing.kind());
                let bytes = waiting.backing.bytes();
                match waiting.poll(&mut busy) {
                    Ordered::Waiting(waiting) => still.push_back(waiting),
                    settled => {
                        self.state().counts.leave(Place::Waiting, ordinal, kind, bytes);
                        self.settle(settled);
                    }
                }
            }
            let mut state = self.state();
            still.append(&mut state.waiting); // freed meanwhile
            state.waiting = still;
        });
    }

    /// Whether there is freed memory that could be given back.
    fn holds_freed(&self) -> bool {
        let state = self.state();
        !state.waiting.is_empty() || !state.cached.is_empty()
    }

    /// As [`MappedAllocator::release_cached`].
    fn release(&self, patience: Duration) -> usize {
        let _turn = self.collecting.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let mut pause = Duration::from_micros(100);
        loop {
            self.collect_now();
            let cached = {
                let mut state = self.state();
                let cached = std::mem::take(&mut state.cached);
                cached.iter().for_each(|backing| state.leave(Place::Cached, backing));
                cached
            };
            drop(cached);
            let still = self.state().counts.statistics(None);
            let still = still.page_locked.waiting_bytes + still.device.waiting_bytes;
            let left = patience.saturating_sub(begun.elapsed());
            if still == 0 || left.is_zero() {
                return still;
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(Duration::from_millis(2));
        }
    }
}

impl State {
    fn enter(&mut self, place: Place, backing: &Backing) {
        self.counts.enter(place, backing.device().ordinal(), backing.kind(), backing.bytes());
    }

    fn leave(&mut self, place: Place, backing: &Backing) {
        self.counts.leave(place, backing.device().ordinal(), backing.kind(), backing.bytes());
    }

    /// Memory that nobody uses any more: into the cache if it is page-locked. Returns what is to be given back.
    fn done(&mut self, backing: Backing, limit: usize) -> Vec<Backing> {
        if backing.kind() == MemoryKind::Device || backing.bytes() > limit {
            return vec![backing];
        }
        self.enter(Place::Cached, &backing);
        self.cached.push_back(backing);
        let mut over = Vec::new();
        let mut held: usize = self.cached.iter().map(Backing::bytes).sum();
        while held > limit {
            let Some(oldest) = self.cached.pop_front() else { break };
            held -= oldest.bytes();
            self.leave(Place::Cached, &oldest);
            over.push(oldest);
        }
        over
    }

    /// The block in the cache that has just the pages for `bytes`, the one freed last.
    fn take_cached(&mut self, bytes: usize, device: &Device) -> Option<Backing> {
        let bytes = PinnedBlock::rounded(bytes)?;
        let at = self.cached.iter().rposition(|backing| backing.bytes() == bytes && backing.device().is(device))?;
        let backing = self.cached.remove(at)?;
        self.leave(Place::Cached, &backing);
        Some(backing)
    }

    /// The start of the live allocation that an address lies in, but not at its start.
    fn inside(&self, address: u64) -> Option<u64> {
        let (start, allocation) = self.live.range(..address).next_back()?;
        (address - start < allocation.bytes as u64).then_some(*start)
    }
}

impl Drop for Shared {
    /// The last handle is gone. What is live is in somebody's use, and what waits or was captured may be in a stream's:
    /// that stays for the rest of the process (invariant 3).
    fn drop(&mut self) {
        if self.is_inherited() {
            return; // the memory's own drops call no CUDA here
        }
        self.collect();
        let mut state = self.state();
        let live = std::mem::take(&mut state.live);
        let (waiting, captured) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.captured));
        let quarantined = std::mem::take(&mut state.quarantined);
        let held = state.counts.statistics(None);
        let bytes = held.page_locked.held_bytes() - held.page_locked.cached_bytes + held.device.held_bytes();
        if bytes > 0 {
            tracing::warn!(bytes, "a mapped allocator was dropped before what it had allocated, which is kept");
        }
        std::mem::forget((live, waiting, captured, quarantined));
    }
}
