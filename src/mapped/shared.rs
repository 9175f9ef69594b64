//! What the handles of one allocator share: the table of what is live and the lists of what was freed, under one lock which
//! is not held while CUDA is called.
//!
//! It does not ask whether this process is a forked child, but for `free` and the end: the methods of `MappedAllocator` do,
//! before they take the lock, which another thread of the parent may have held.

use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::Cuda;
use crate::cuda::device::{Device, RawStream};
use crate::cuda::types::{CudaError, CudaSearch, code};
use crate::memory::{ForkStamp, PinnedBlock, RingError};
use crate::sync::lock;

use super::backing::{Allocation, Backing, Pinned};
use super::error::{FreeError, MappedError};
use super::order::{self, Busy, Ordered, Waiting};
use super::statistics::{Counts, MappedStatistics, MemoryKind, Place};

/// What the cache of freed page-locked blocks holds at most, unless it is told otherwise.
const CACHE_BYTES: usize = 1 << 30;
/// How long an allocation that found no memory waits for freed memory that streams still use.
const SHORTAGE_PATIENCE: Duration = Duration::from_secs(10);
/// Freed allocations that a free or an allocation looks at: with many waiting, neither is to take longer for it.
const GLANCE: usize = 32;
/// The legacy default stream, and the calling thread's own.
const LEGACY: RawStream = RawStream(1);
const PER_THREAD: RawStream = RawStream(2);
/// Page-locked allocations below this are checked against the memory budget, which reads a dozen files, only when
/// [`UNCHECKED_BYTES`] of them have come together.
const BUDGET_BYTES: usize = 2 << 20;
const UNCHECKED_BYTES: usize = 64 << 20;

pub(super) struct Shared {
    search: CudaSearch,
    /// Of the process that first attached a device: only from then on is a forked child without CUDA.
    stamp: OnceLock<ForkStamp>,
    pub(super) pinned_mode: AtomicBool,
    pub(super) ignore_budget: AtomicBool,
    pub(super) cache_limit: AtomicUsize,
    /// Page-locked bytes that were not checked against the memory budget since the last check.
    unchecked: AtomicUsize,
    state: Mutex<State>,
    /// Held by the one thread that looks for what has become free, also while it gives that back.
    collecting: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    devices: Vec<Device>,
    /// By device address.
    live: BTreeMap<u64, Allocation>,
    /// In the order of their frees.
    waiting: VecDeque<Waiting>,
    /// Page-locked and used by nobody, the oldest first.
    cached: VecDeque<Backing>,
    captured: Vec<Waiting>,
    /// Kept for ever (invariant 4).
    quarantined: Vec<Backing>,
    counts: Counts,
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
    pub(super) fn new(search: CudaSearch) -> Shared {
        Shared {
            search,
            stamp: OnceLock::new(),
            pinned_mode: AtomicBool::new(false),
            ignore_budget: AtomicBool::new(false),
            cache_limit: AtomicUsize::new(CACHE_BYTES),
            unchecked: AtomicUsize::new(0),
            state: Mutex::default(),
            collecting: Mutex::new(()),
        }
    }

    /// Whether this process is a forked child of the one that uses the allocator.
    pub(super) fn is_inherited(&self) -> bool {
        self.stamp.get().is_some_and(|stamp| stamp.is_inherited())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn statistics(&self, device: Option<i32>) -> MappedStatistics {
        self.state().counts.statistics(device)
    }

    pub(super) fn reset_peaks(&self, device: Option<i32>) {
        self.state().counts.reset_peaks(device);
    }

    /// As [`MappedAllocator::host_ptr_of`](super::MappedAllocator::host_ptr_of).
    pub(super) fn host_ptr_of(&self, device_ptr: u64) -> Option<NonNull<u8>> {
        let state = self.state();
        let (start, allocation) = state.live.range(..=device_ptr).next_back()?;
        let offset = usize::try_from(device_ptr - start).ok().filter(|offset| *offset < allocation.bytes)?;
        // SAFETY: the offset is below the length that was asked for, which is within the block.
        allocation.backing.host().map(|host| unsafe { host.add(offset) })
    }

    /// Notes a stream for the free of the allocation that the address lies in; false where there is none. A thread's own
    /// default stream has its name on that thread only, so its part is the legacy default stream's, which is ordered behind
    /// those of all threads.
    pub(super) fn record_stream(&self, address: u64, stream: RawStream) -> bool {
        let stream = if stream == PER_THREAD { LEGACY } else { stream };
        let mut state = self.state();
        let Some((start, allocation)) = state.live.range_mut(..=address).next_back() else { return false };
        let inside = address - start < allocation.bytes as u64;
        if inside && !allocation.streams.contains(&stream) {
            allocation.streams.push(stream);
        }
        inside
    }

    /// As [`MappedAllocator::allocate`](super::MappedAllocator::allocate), of a size that was checked.
    pub(super) fn allocate(&self, kind: MemoryKind, bytes: usize, device: i32) -> Result<u64, MappedError> {
        let device = self.device(device)?;
        device.relaxed(|| {
            self.collect(GLANCE);
            match self.make(kind, bytes, &device) {
                Err(error) if is_shortage(&error) && self.holds_freed() => {
                    self.release(SHORTAGE_PATIENCE);
                    self.make(kind, bytes, &device)
                }
                made => made,
            }
        })
    }

    /// As [`MappedAllocator::release_captured`](super::MappedAllocator::release_captured), with its promise.
    pub(super) fn release_captured(&self) -> usize {
        let waiting_bytes: usize;
        let captured = {
            let mut state = self.state();
            let captured = std::mem::take(&mut state.captured);
            let (done, waiting): (Vec<_>, Vec<_>) = captured.into_iter().partition(Waiting::is_only_captured);
            waiting.iter().for_each(|waiting| state.shift(Place::Captured, Place::Waiting, &waiting.backing));
            waiting_bytes = waiting.iter().map(|waiting| waiting.backing.bytes()).sum();
            state.waiting.extend(waiting);
            done
        };
        let bytes = captured.iter().map(|waiting| waiting.backing.bytes()).sum::<usize>();
        self.give_back(Place::Captured, captured.into_iter().map(|waiting| waiting.backing));
        bytes + waiting_bytes
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
                let mut cached = self.take_cached(bytes, device);
                if cached.is_none() {
                    self.collect(usize::MAX); // all of it costs less than page-locking
                    cached = self.take_cached(bytes, device);
                }
                match cached {
                    Some(cached) => cached,
                    None => self.make_page_locked(bytes, device)?,
                }
            }
        };
        let address = backing.address();
        let mut state = self.state();
        state.counts.made(device.ordinal(), kind, bytes);
        if let Some(stale) = state.live.insert(address, Allocation { backing, bytes, streams: Vec::new() }) {
            // Somebody else freed it, or reset the device: its drop would free what was just made.
            state.counts.freed(device.ordinal(), stale.backing.kind(), stale.bytes);
            state.enter(Place::Quarantined, &stale.backing);
            state.quarantined.push(stale.backing);
        }
        Ok(address)
    }

    /// A block of the cache that is still page-locked.
    fn take_cached(&self, bytes: usize, device: &Device) -> Option<Backing> {
        loop {
            let cached = self.state().take_cached(bytes, device)?; // and the lock is free again
            if cached.is_page_locked() {
                return Some(cached);
            }
        }
    }

    fn make_device(&self, bytes: usize, device: &Device) -> Result<Backing, MappedError> {
        device.alloc(bytes).map(Backing::Device).map_err(|source| {
            let held = self.state().counts.statistics(Some(device.ordinal())).device;
            let (device, live, waiting) = (device.ordinal(), held.live_bytes, held.waiting_bytes);
            MappedError::DeviceMemory { bytes, device, live, waiting, source }
        })
    }

    fn make_page_locked(&self, bytes: usize, device: &Device) -> Result<Backing, MappedError> {
        let checked = self.is_checked(bytes);
        let ignore_budget = self.ignore_budget.load(Ordering::Relaxed) || !checked;
        let block = device.within(|| PinnedBlock::new(bytes, ignore_budget, || Cuda::find(&self.search)));
        match block {
            Ok(block) => {
                if checked {
                    self.unchecked.store(0, Ordering::Relaxed);
                }
                Ok(Backing::PageLocked(Pinned::new(device.clone(), block)))
            }
            Err(source) => {
                let held = self.state().counts.statistics(None).page_locked;
                let (device, live, waiting) = (device.ordinal(), held.live_bytes, held.waiting_bytes);
                Err(MappedError::PageLocked { bytes, device, live, waiting, source: Box::new(source) })
            }
        }
    }

    /// Whether an allocation is one to check against the memory budget. A refused one leaves the next to be checked too.
    fn is_checked(&self, bytes: usize) -> bool {
        if bytes >= BUDGET_BYTES {
            return true;
        }
        // Relaxed: a count. Another thread's check serves too.
        let unchecked = self.unchecked.fetch_add(bytes, Ordering::Relaxed) + bytes;
        unchecked >= UNCHECKED_BYTES
    }

    /// # Safety
    /// As for [`MappedAllocator::free`](super::MappedAllocator::free); without a stream, nothing but the recorded streams uses the memory.
    pub(super) unsafe fn free(&self, address: u64, stream: Option<RawStream>) -> Result<(), FreeError> {
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
            state.enter(Place::Waiting, &allocation.backing);
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
            self.collect(GLANCE);
            lost.map_or(Ok(()), Err)
        })
    }

    /// Puts a freed allocation, which counts as waiting, where it belongs. An error is why it was quarantined.
    fn settle(&self, ordered: Ordered) -> Option<CudaError> {
        let mut state = self.state();
        match ordered {
            Ordered::Waiting(waiting) => state.waiting.push_back(waiting),
            Ordered::Captured(waiting) => {
                state.shift(Place::Waiting, Place::Captured, &waiting.backing);
                state.captured.push(waiting);
            }
            Ordered::Done(backing) => {
                let (place, over) = state.done(backing, self.cache_limit.load(Ordering::Relaxed));
                drop(state);
                self.give_back(place, over); // with CUDA calls: not under the lock
            }
            Ordered::Gone(backing) => {
                drop(state);
                self.give_back(Place::Waiting, [backing]);
            }
            Ordered::Lost(backing, error) => {
                let bytes = backing.bytes();
                state.shift(Place::Waiting, Place::Quarantined, &backing);
                state.quarantined.push(backing);
                drop(state); // a subscriber is the user's code, which may ask the allocator
                tracing::warn!(
                    bytes,
                    %error,
                    "freed memory is kept for the rest of the process: it cannot be known when its streams have done with it"
                );
                return Some(error);
            }
        }
        None
    }

    /// Gives memory back to the system or the device. It counts where it was until that is done, which may take seconds: an
    /// allocation that finds no memory meanwhile waits for it.
    fn give_back(&self, place: Place, over: impl IntoIterator<Item = Backing>) {
        for backing in over {
            let (ordinal, kind, bytes) = (backing.device().ordinal(), backing.kind(), backing.bytes());
            drop(backing);
            self.state().counts.leave(place, ordinal, kind, bytes);
        }
    }

    /// Looks for what streams have done with, unless another thread does: at most at so many freed allocations, those that
    /// were not looked at for the longest.
    fn collect(&self, most: usize) {
        match self.collecting.try_lock() {
            Ok(_turn) => self.collect_now(most),
            Err(TryLockError::Poisoned(poisoned)) => {
                let _turn = poisoned.into_inner();
                self.collect_now(most);
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// The same for the thread that holds `collecting`: only such a one takes from the list.
    fn collect_now(&self, most: usize) {
        let left = {
            let mut state = self.state();
            let most = most.min(state.waiting.len());
            state.waiting.drain(..most).collect()
        };
        let mut round = Round { shared: self, left, still: VecDeque::new() };
        let Some(first) = round.left.front() else { return };
        let device = first.backing.device().clone();
        device.relaxed(|| {
            let mut busy = Busy::new();
            while let Some(waiting) = round.left.pop_front() {
                match waiting.poll(&mut busy) {
                    Ordered::Waiting(waiting) => round.still.push_back(waiting),
                    settled => drop(self.settle(settled)),
                }
            }
        });
    }

    /// Whether there is freed memory that could be given back. By the counts: another thread may be looking through the list.
    fn holds_freed(&self) -> bool {
        let held = self.statistics(None);
        [held.page_locked, held.device].iter().any(|held| held.waiting_bytes + held.cached_bytes > 0)
    }

    /// As [`MappedAllocator::release_cached`](super::MappedAllocator::release_cached).
    pub(super) fn release(&self, patience: Duration) -> usize {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(100);
        loop {
            self.collect(usize::MAX);
            let cached = std::mem::take(&mut self.state().cached);
            self.give_back(Place::Cached, cached);
            let held = self.statistics(None);
            let waiting = held.page_locked.waiting_bytes + held.device.waiting_bytes;
            let left = patience.saturating_sub(begun.elapsed());
            // What is cached still, another thread is giving back now.
            if waiting + held.page_locked.cached_bytes == 0 || left.is_zero() {
                return waiting;
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(Duration::from_millis(2));
        }
    }
}

/// One look at some of the list. What it has not come to goes back, also if it ends by a panic (invariant 3).
struct Round<'s> {
    shared: &'s Shared,
    left: VecDeque<Waiting>,
    still: VecDeque<Waiting>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.waiting.append(&mut self.still);
        state.waiting.append(&mut self.left);
    }
}

impl State {
    fn enter(&mut self, place: Place, backing: &Backing) {
        self.counts.enter(place, backing.device().ordinal(), backing.kind(), backing.bytes());
    }

    fn leave(&mut self, place: Place, backing: &Backing) {
        self.counts.leave(place, backing.device().ordinal(), backing.kind(), backing.bytes());
    }

    fn shift(&mut self, from: Place, to: Place, backing: &Backing) {
        self.leave(from, backing);
        self.enter(to, backing);
    }

    /// Waiting memory that nobody uses any more: into the cache if it is page-locked. Returns what is to be given back,
    /// and where it counts.
    fn done(&mut self, backing: Backing, limit: usize) -> (Place, Vec<Backing>) {
        if backing.kind() == MemoryKind::Device || backing.bytes() > limit {
            return (Place::Waiting, vec![backing]);
        }
        self.shift(Place::Waiting, Place::Cached, &backing);
        self.cached.push_back(backing);
        let mut over = Vec::new();
        let mut held: usize = self.cached.iter().map(Backing::bytes).sum();
        while held > limit {
            let Some(oldest) = self.cached.pop_front() else { break };
            held -= oldest.bytes();
            over.push(oldest);
        }
        (Place::Cached, over)
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
            // At the fork another thread of the parent may have been at work in it: it is left as it lies.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(state));
            return;
        }
        self.collect(usize::MAX);
        let mut state = self.state();
        let live = std::mem::take(&mut state.live);
        let (waiting, captured) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.captured));
        let quarantined = std::mem::take(&mut state.quarantined);
        let held = state.counts.statistics(None);
        drop(state);
        let bytes = held.page_locked.held_bytes() - held.page_locked.cached_bytes + held.device.held_bytes();
        if bytes > 0 {
            tracing::warn!(bytes, "a mapped allocator was dropped before what it had allocated, which is kept");
        }
        // One by one: the lists themselves are nobody's.
        live.into_values().for_each(std::mem::forget);
        waiting.into_iter().chain(captured).for_each(std::mem::forget);
        quarantined.into_iter().for_each(std::mem::forget);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_allocations_are_checked_against_the_budget_as_a_large_one_is() {
        let shared = Shared::new(CudaSearch::new());
        assert!(shared.is_checked(BUDGET_BYTES));
        let small = BUDGET_BYTES / 2;
        let unchecked = (0..).take_while(|_| !shared.is_checked(small)).count();
        assert_eq!((unchecked + 1) * small, UNCHECKED_BYTES);
        assert!(shared.is_checked(1), "until one has passed");
    }
}
