//! One stretch of the host's memory: reserved, aligned to huge pages, fenced, wiped in forked children, given back
//! once.
//!
//! A mapping is longer than what was asked for only by rounding up to whole pages, and has one page on either side
//! that nobody can touch: a write past the ring faults instead of landing in somebody's heap, and the kernel never
//! merges the ring with a neighbour, so that its figures (`smaps`) are the ring's alone.
//!
//! It knows nothing of CUDA. Whoever cannot unregister a part calls [`Mapping::keep`], and that part is never given
//! back (invariant 5).

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::os;

/// The size of a transparent huge page where there are any.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes that stay mapped for ever because giving them back failed or would have been wrong.
static STRANDED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of dropped rings that stay mapped for the rest of the process, since CUDA did not let go of them.
pub(crate) fn stranded_bytes_in_process() -> usize {
    STRANDED.load(Ordering::Relaxed)
}

/// Asks for huge pages behind ordinary memory that is large enough for one: a wish, which changes no content.
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn ask_huge_pages(start: NonNull<u8>, bytes: usize) {
    let page = os::page_bytes();
    let before = start.addr().get().next_multiple_of(page) - start.addr().get();
    let whole = bytes.saturating_sub(before) / page * page;
    if whole >= HUGE_PAGE_BYTES {
        // SAFETY: whole pages inside the caller's range.
        unsafe { os::ask_huge_pages(start.add(before), whole) };
    }
}

/// A readable and writable stretch of memory that belongs to one ring.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    /// Whole pages.
    bytes: usize,
    /// Bytes before `start` and after its end that belong to the reservation: the fence, and what could not be
    /// trimmed.
    before: usize,
    after: usize,
    /// Parts that must stay mapped, as offsets from `start`, in whole pages.
    kept: Vec<Range<usize>>,
}

// SAFETY: a mapping hands out addresses and never reads or writes through them; what may be done with the bytes is
// decided by the leases (invariant 2).
unsafe impl Send for Mapping {}
// SAFETY: as for Send; `&Mapping` allows no change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` (more than zero) of zeros, no page of it present yet.
    pub(super) fn new(bytes: usize) -> io::Result<Mapping> {
        let page = os::page_bytes();
        let too_long = || io::Error::other("the length does not fit the address space");
        let bytes = bytes.checked_next_multiple_of(page).ok_or_else(too_long)?;
        let reserved = bytes.checked_add(HUGE_PAGE_BYTES + 2 * page).ok_or_else(too_long)?;
        // Offsets into it are made by pointers, which go no further; where addresses have 32 bits the kernel has more.
        isize::try_from(reserved).map_err(|_| too_long())?;
        let outer = os::reserve(reserved)?;

        // One page of fence, then up to the next huge page.
        let before = (outer.addr().get() + page).next_multiple_of(HUGE_PAGE_BYTES) - outer.addr().get();
        // SAFETY: before <= page + HUGE_PAGE_BYTES - 1, which is inside the reservation.
        let start = unsafe { outer.add(before) };
        let mut mapping = Mapping { start, bytes, before, after: reserved - before - bytes, kept: Vec::new() };
        mapping.trim(page);
        // SAFETY: `start..start + bytes` is whole pages of the reservation, which `mapping` owns and nobody else
        // knows.
        unsafe {
            os::open(start, bytes)?;
            // Both are wishes: without huge pages the ring is slower to register, without wipe-on-fork a fork is
            // slow.
            os::ask_huge_pages(start, bytes);
            os::wipe_on_fork(start, bytes);
        }
        Ok(mapping)
    }

    /// Gives back what lies outside the fence. What the kernel does not take stays part of the fence.
    fn trim(&mut self, page: usize) {
        let head = self.before - page;
        // SAFETY: the head lies inside the reservation, outside what is lent.
        if head > 0 && unsafe { os::unmap(self.start.sub(self.before), head) }.is_ok() {
            self.before = page;
        }
        let tail = self.after - page;
        // SAFETY: likewise the tail.
        if tail > 0 && unsafe { os::unmap(self.start.add(self.bytes + page), tail) }.is_ok() {
            self.after = page;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn addresses(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.bytes
    }

    /// The address `offset` bytes in.
    ///
    /// # Panics
    /// If that is not inside: a bug of the caller.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "offset {offset} of a mapping of {} bytes", self.bytes);
        // SAFETY: just checked.
        unsafe { self.start.add(offset) }
    }

    /// Makes the pages of `range` (offsets, whole pages) present and writable. They must not have been lent to
    /// anybody yet.
    pub(super) fn fault_in(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.bytes && range.start < range.end, "{range:?} of {}", self.bytes);
        let (start, bytes) = (self.at(range.start), range.len());
        // SAFETY: the range is inside the mapping, which is open for writing and ours.
        if !unsafe { os::populate(start, bytes) }? {
            self.touch(range);
        }
        Ok(())
    }

    /// The same by writing to each page, for systems without a call for it.
    fn touch(&self, range: Range<usize>) {
        for offset in range.step_by(os::page_bytes()) {
            // SAFETY: `at` checks the offset. The pages are fresh and nobody else knows them: writing the zero that is
            // there changes nothing. Volatile, since the compiler must not find that out.
            unsafe { self.at(offset).write_volatile(0) };
        }
    }

    /// Never gives the pages of `range` (offsets) back, not even on drop.
    pub(super) fn keep(&mut self, range: Range<usize>) {
        let page = os::page_bytes();
        self.kept.push(range.start / page * page..range.end.next_multiple_of(page));
    }

    /// What the kernel has behind the mapping now. `None` where it does not say.
    pub(super) fn pages(&self) -> Option<Pages> {
        let ours = self.addresses();
        let mut inside = false;
        let mut found: Option<Pages> = None;
        for line in BufReader::new(File::open("/proc/self/smaps").ok()?).lines() {
            let line = line.ok()?;
            if let Some(range) = address_range(&line) {
                if range.start >= ours.end {
                    break; // the file is in the order of addresses
                }
                inside = ours.start <= range.start && range.end <= ours.end;
            } else if inside {
                let found = found.get_or_insert_default();
                found.present += kib(&line, "Rss:").unwrap_or(0) * 1024;
                found.huge += kib(&line, "AnonHugePages:").unwrap_or(0) * 1024;
            }
        }
        found
    }
}

/// What is behind a mapping, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pages {
    /// In memory.
    pub(super) present: usize,
    /// Of these, in transparent huge pages.
    pub(super) huge: usize,
}

/// The number of a line `name:   1234 kB`.
fn kib(line: &str, name: &str) -> Option<usize> {
    line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()
}

impl Mapping {
    /// Unmaps a part of the reservation; offsets from its beginning. Only `drop` does this.
    fn give_back(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        // SAFETY: the range is part of the reservation and was kept by nobody; the ring is gone, so there is no lease
        // on it (invariant 7), and its registrations are gone too (invariant 5: `Held` in `registration.rs` names
        // what is left).
        let unmapped = unsafe { os::unmap(self.start.sub(self.before).add(range.start), range.len()) };
        if let Err(error) = unmapped {
            STRANDED.fetch_add(range.len(), Ordering::Relaxed);
            tracing::warn!(bytes = range.len(), %error, "a ring could not be unmapped");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort_by_key(|range| range.start);
        // From the first page of the fence to the last, without what must stay.
        let mut from = 0;
        for range in kept {
            self.give_back(from..self.before + range.start);
            STRANDED.fetch_add(range.len(), Ordering::Relaxed);
            from = self.before + range.end;
        }
        self.give_back(from..self.before + self.bytes + self.after);
    }
}

/// The addresses of a line `7f0000000000-7f0000200000 rw-p …`, which begins a mapping in the kernel's listing.
pub(super) fn address_range(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Whether the kernel has anything mapped at this address.
    #[cfg(target_os = "linux")]
    fn is_mapped(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter_map(address_range).any(|range| range.contains(&address))
    }

    #[test]
    fn a_mapping_is_aligned_whole_zero_and_writable_to_its_last_byte() {
        for bytes in [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1] {
            let mapping = Mapping::new(bytes).unwrap();
            assert_eq!(mapping.at(0).addr().get() % HUGE_PAGE_BYTES, 0);
            assert_eq!(mapping.bytes(), bytes.next_multiple_of(os::page_bytes()));
            mapping.fault_in(0..mapping.bytes()).unwrap();
            for offset in [0, bytes - 1, mapping.bytes() - 1] {
                // SAFETY: inside the mapping, which only this test knows.
                unsafe {
                    assert_eq!(mapping.at(offset).read(), 0);
                    mapping.at(offset).write(7);
                    mapping.at(offset).write(0);
                }
            }
        }
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        for bytes in [usize::MAX, usize::MAX - (4 << 20), usize::MAX / 2, usize::MAX / 2 - HUGE_PAGE_BYTES] {
            let error = Mapping::new(bytes).unwrap_err();
            assert!(error.to_string().contains("does not fit the address space"), "{bytes}: {error}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_kept_stays_and_the_rest_goes() {
        let page = os::page_bytes();
        let before = stranded_bytes_in_process();
        let mut mapping = Mapping::new(8 * page).unwrap();
        mapping.fault_in(0..8 * page).unwrap();
        let start = mapping.at(0).addr().get();
        mapping.keep(5 * page..6 * page);
        mapping.keep(2 * page + 1..3 * page - 1); // rounded to the page
        drop(mapping);
        // The addresses of the kept pages cannot be mapped by anybody else; that the rest is gone is checked where
        // nothing else runs (ring tests, in a process of their own).
        assert!(is_mapped(start + 2 * page));
        assert!(is_mapped(start + 5 * page));
        assert!(stranded_bytes_in_process() >= before + 2 * page);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn touching_makes_pages_present_too() {
        let mapping = Mapping::new(2 * HUGE_PAGE_BYTES).unwrap();
        mapping.touch(0..HUGE_PAGE_BYTES);
        assert_eq!(mapping.pages().unwrap().present, HUGE_PAGE_BYTES);
        mapping.touch(HUGE_PAGE_BYTES..2 * HUGE_PAGE_BYTES);
        assert_eq!(mapping.pages().unwrap().present, mapping.bytes());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_figures_are_those_of_this_mapping_alone() {
        let mapping = Mapping::new(2 * HUGE_PAGE_BYTES + 4096).unwrap();
        assert_eq!(mapping.pages(), Some(Pages { present: 0, huge: 0 }));
        mapping.fault_in(0..mapping.bytes()).unwrap();
        let pages = mapping.pages().unwrap();
        assert_eq!(pages.present, mapping.bytes());
        // Whether the kernel grants any is its own affair.
        assert_eq!(pages.huge % HUGE_PAGE_BYTES, 0);
        assert!(pages.huge <= pages.present, "{pages:?}");
    }
}
