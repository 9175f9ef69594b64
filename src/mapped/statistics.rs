//! What the allocator has given out, and what it still holds of what was freed: plain counts.

/// Where the bytes of an allocation lie.
///
/// ```
/// use pinring::{MappedAllocator, MemoryKind};
/// let allocator = MappedAllocator::new();
/// assert_eq!(allocator.mode(), MemoryKind::Device);
/// allocator.use_pinned(true);
/// assert_eq!(allocator.mode(), MemoryKind::PageLocked);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// In the host's memory, page-locked and mapped: kernels read and write it over the bus, and it takes nothing of the
    /// device's memory.
    PageLocked,
    /// In the device's own memory.
    Device,
}

/// The counts of one kind of memory.
///
/// ```
/// use pinring::{KindStatistics, MappedAllocator};
/// assert_eq!(MappedAllocator::new().statistics(None).page_locked, KindStatistics::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KindStatistics {
    /// Bytes of allocations that are in use, as they were asked for.
    pub live_bytes: usize,
    /// How many allocations are in use.
    pub live: usize,
    /// The most that `live_bytes` has been, since the start or the last
    /// [`reset_peaks`](super::MappedAllocator::reset_peaks).
    pub peak_bytes: usize,
    /// The most that `live` has been.
    pub peak: usize,
    /// Allocations made so far.
    pub allocations: u64,
    /// Allocations freed so far.
    pub frees: u64,
    /// Bytes asked for so far.
    pub allocated_bytes: u64,
    /// Freed bytes that streams may still use.
    pub waiting_bytes: usize,
    /// Freed page-locked bytes in the cache, ready for the next allocation of their size.
    pub cached_bytes: usize,
    /// Bytes that were freed in a stream while it was being captured: the graph may use them at each launch. Until
    /// [`release_captured`](super::MappedAllocator::release_captured).
    pub captured_bytes: usize,
    /// Bytes that nobody may use any more, since the end of the work on them cannot be known.
    pub quarantined_bytes: usize,
}

impl KindStatistics {
    /// All bytes that the allocator holds of this kind, in use or not.
    pub fn held_bytes(&self) -> usize {
        self.live_bytes + self.waiting_bytes + self.cached_bytes + self.captured_bytes + self.quarantined_bytes
    }
}

/// What a [`MappedAllocator`](super::MappedAllocator) has given out and holds, of each kind.
///
/// ```
/// let statistics = pinring::MappedAllocator::new().statistics(None);
/// assert_eq!((statistics.page_locked.live_bytes, statistics.device.live_bytes), (0, 0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedStatistics {
    /// Of page-locked host memory.
    pub page_locked: KindStatistics,
    /// Of the devices' memory.
    pub device: KindStatistics,
}

/// Where freed bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Waiting,
    Cached,
    Captured,
    Quarantined,
}

/// The counts of each device and kind.
#[derive(Debug, Default)]
pub(super) struct Counts(Vec<(i32, MemoryKind, KindStatistics)>);

impl Counts {
    fn of(&mut self, device: i32, kind: MemoryKind) -> &mut KindStatistics {
        let at = self.0.iter().position(|(d, k, _)| (*d, *k) == (device, kind)).unwrap_or_else(|| {
            self.0.push((device, kind, KindStatistics::default()));
            self.0.len() - 1
        });
        &mut self.0[at].2
    }

    pub(super) fn made(&mut self, device: i32, kind: MemoryKind, bytes: usize) {
        let counts = self.of(device, kind);
        counts.live += 1;
        counts.live_bytes += bytes;
        counts.peak = counts.peak.max(counts.live);
        counts.peak_bytes = counts.peak_bytes.max(counts.live_bytes);
        counts.allocations += 1;
        counts.allocated_bytes += bytes as u64;
    }

    pub(super) fn freed(&mut self, device: i32, kind: MemoryKind, bytes: usize) {
        let counts = self.of(device, kind);
        counts.live -= 1;
        counts.live_bytes -= bytes;
        counts.frees += 1;
    }

    /// Freed bytes come to a place, or leave it.
    pub(super) fn enter(&mut self, place: Place, device: i32, kind: MemoryKind, bytes: usize) {
        *self.at(place, device, kind) += bytes;
    }

    pub(super) fn leave(&mut self, place: Place, device: i32, kind: MemoryKind, bytes: usize) {
        *self.at(place, device, kind) -= bytes;
    }

    fn at(&mut self, place: Place, device: i32, kind: MemoryKind) -> &mut usize {
        let counts = self.of(device, kind);
        match place {
            Place::Waiting => &mut counts.waiting_bytes,
            Place::Cached => &mut counts.cached_bytes,
            Place::Captured => &mut counts.captured_bytes,
            Place::Quarantined => &mut counts.quarantined_bytes,
        }
    }

    pub(super) fn reset_peaks(&mut self, device: Option<i32>) {
        for (_, _, counts) in self.0.iter_mut().filter(|(d, _, _)| device.is_none_or(|device| device == *d)) {
            (counts.peak_bytes, counts.peak) = (counts.live_bytes, counts.live);
        }
    }

    /// The sum over the devices, or the counts of one. The peak of a sum is the sum of the peaks: an upper bound.
    pub(super) fn statistics(&self, device: Option<i32>) -> MappedStatistics {
        let mut sum = MappedStatistics::default();
        for (_, kind, counts) in self.0.iter().filter(|(d, _, _)| device.is_none_or(|device| device == *d)) {
            let sum = match kind {
                MemoryKind::PageLocked => &mut sum.page_locked,
                MemoryKind::Device => &mut sum.device,
            };
            sum.live_bytes += counts.live_bytes;
            sum.live += counts.live;
            sum.peak_bytes += counts.peak_bytes;
            sum.peak += counts.peak;
            sum.allocations += counts.allocations;
            sum.frees += counts.frees;
            sum.allocated_bytes += counts.allocated_bytes;
            sum.waiting_bytes += counts.waiting_bytes;
            sum.cached_bytes += counts.cached_bytes;
            sum.captured_bytes += counts.captured_bytes;
            sum.quarantined_bytes += counts.quarantined_bytes;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_peaks_are_kept_for_each_device_and_kind() {
        let mut counts = Counts::default();
        counts.made(0, MemoryKind::PageLocked, 4096);
        counts.made(0, MemoryKind::PageLocked, 8192);
        counts.made(1, MemoryKind::Device, 100);
        counts.freed(0, MemoryKind::PageLocked, 4096);
        counts.enter(Place::Waiting, 0, MemoryKind::PageLocked, 4096);
        let statistics = counts.statistics(Some(0));
        let pinned = statistics.page_locked;
        assert_eq!((pinned.live_bytes, pinned.peak_bytes, pinned.allocations, pinned.live), (8192, 12288, 2, 1));
        assert_eq!((pinned.waiting_bytes, pinned.held_bytes()), (4096, 12288));
        assert_eq!(statistics.device, KindStatistics::default());
        assert_eq!(counts.statistics(None).device.live_bytes, 100);
        counts.reset_peaks(Some(0));
        assert_eq!(counts.statistics(Some(0)).page_locked.peak_bytes, 8192);
    }
}
