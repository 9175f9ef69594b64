//! Raw access to the ring's slots, and what the host knows of each row.
//!
//! Owns the arithmetic from slot, row and step to an address, the copies between lane buffers and slots, and the row
//! records. It does not own the ring: whoever calls holds a claim or a lease, and the ring outlives both (invariants
//! 2 and 7). What it does not do: decide who may touch which row.

use crate::layout::{Layout, Place};
use crate::memory::ask_huge_pages;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// What the host knows of one row of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowRecord {
    pub lane: u32,
    /// Real steps in the row: below T only where an unroll was padded.
    pub length: u32,
    /// The lane's step that the row begins with, counted from 0.
    pub first_step: u64,
    /// The version of the weights that the row's first step was acted with.
    pub version: u64,
    pub key: RowKey,
}

/// Where a replayed row came from: a record of the store, and how often its chunk had been begun. Zeros elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowKey {
    pub record: u32,
    pub generation: u32,
    /// Of the second store that a feed mixes in.
    pub mixed: bool,
}

/// Every slot of the ring, as addresses.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) layout: Arc<Layout>,
    base: NonNull<u8>,
    /// Two of the layout's numbers, asked for each row.
    slot_bytes: usize,
    rows: usize,
    /// Apart from their keys, which only replayed rows have: a record is written with every step.
    records: Box<[UnsafeCell<Head>]>,
    keys: Box<[UnsafeCell<RowKey>]>,
}

/// A [`RowRecord`] without its key.
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    lane: u32,
    length: u32,
    first_step: u64,
    version: u64,
}

// SAFETY: `base` is only followed, and a record only touched, by the holder of a claim or a lease on that row, and those
// are unique (invariant 2: stripes hand out each row once per lap, a lease is not cloned).
unsafe impl Send for Slots {}
// SAFETY: as above; a shared `Slots` gives no access by itself, each access is an `unsafe fn` with that duty.
unsafe impl Sync for Slots {}

impl Slots {
    /// `base` is the ring's first slot; slots lie `layout.slot_bytes` apart.
    pub(crate) fn new(layout: Arc<Layout>, base: NonNull<u8>, slots: usize) -> Slots {
        let rows = slots * layout.rows;
        let keys = if layout.kind.is_replayed() { rows } else { 0 };
        let records = (0..rows).map(|_| UnsafeCell::default()).collect();
        let keys = (0..keys).map(|_| UnsafeCell::default()).collect();
        Slots { slot_bytes: layout.slot_bytes, rows: layout.rows, layout, base, records, keys }
    }

    /// Bytes of row records for a ring of that many slots.
    pub(crate) fn record_bytes(rows: usize, slots: usize, replayed: bool) -> Option<usize> {
        let key = if replayed { size_of::<RowKey>() } else { 0 };
        rows.checked_mul(slots)?.checked_mul(size_of::<Head>() + key)
    }

    /// The first byte of a slot. Following it is up to the caller's claim or lease.
    #[inline]
    pub(crate) fn slot(&self, slot: u32) -> *mut u8 {
        self.base.as_ptr().wrapping_add(slot as usize * self.slot_bytes)
    }

    /// # Safety
    /// The caller holds a claim on that row, or the slot's lease.
    #[inline]
    pub(crate) unsafe fn set_record(&self, slot: u32, row: usize, record: RowRecord) {
        let (at, RowRecord { lane, length, first_step, version, key }) = (slot as usize * self.rows + row, record);
        // SAFETY: nobody else touches this row's record while the caller holds its claim (invariant 2).
        unsafe { *self.records[at].get() = Head { lane, length, first_step, version } }
        if !self.keys.is_empty() {
            // SAFETY: as above.
            unsafe { *self.keys[at].get() = key }
        }
    }

    /// The records of rows that hold one step each, of so many lanes that stepped together, from `row` on.
    ///
    /// # Safety
    /// The caller holds a claim on those rows, of a feed that replays nothing.
    #[inline]
    pub(crate) unsafe fn set_step_records(
        &self,
        slot: u32,
        row: usize,
        lanes: Range<u32>,
        first_step: u64,
        version: u64,
    ) {
        let at = slot as usize * self.rows + row;
        for (at, lane) in (at..).zip(lanes) {
            // SAFETY: as in `set_record`.
            unsafe { *self.records[at].get() = Head { lane, length: 1, first_step, version } }
        }
    }

    /// # Safety
    /// The caller holds the slot's lease (or a claim on that row) and no `set_record` runs beside it.
    #[inline]
    pub(crate) unsafe fn record(&self, slot: u32, row: usize) -> RowRecord {
        let at = slot as usize * self.rows + row;
        // SAFETY: as for `set_record`: a sealed slot has no writer (invariant 2).
        let Head { lane, length, first_step, version } = unsafe { *self.records[at].get() };
        // SAFETY: as above.
        let key = self.keys.get(at).map_or_else(RowKey::default, |key| unsafe { *key.get() });
        RowRecord { lane, length, first_step, version, key }
    }

    /// Writes `value` at (row, step) of a derived column.
    ///
    /// # Safety
    /// The caller holds a claim on that row; `T` is the column's type; `step` is below the column's steps.
    #[inline]
    pub(crate) unsafe fn set_derived<T: Copy>(&self, slot: u32, column: usize, row: usize, step: usize, value: T) {
        let layout = &self.layout.columns[column];
        let at = layout.offset + row * layout.row_stride + step * layout.step_stride;
        // SAFETY: `at` lies inside the slot by the layout (its tests place every value), and the row is the caller's.
        unsafe { self.slot(slot).add(at).cast::<T>().write(value) }
    }

    /// Copies the whole of row `from.1` of slot `from.0` to row `to.1` of slot `to.0`.
    ///
    /// # Safety
    /// The caller holds both rows exclusively, and they are different rows.
    pub(crate) unsafe fn move_row(&self, from: (u32, usize), to: (u32, usize)) {
        for column in &self.layout.columns {
            for step in 0..column.steps {
                let at = |row: usize| column.offset + row * column.row_stride + step * column.step_stride;
                // SAFETY: both ends lie inside their slots by the layout; different rows never overlap.
                unsafe {
                    let source = self.slot(from.0).add(at(from.1));
                    let target = self.slot(to.0).add(at(to.1));
                    std::ptr::copy_nonoverlapping(source, target, column.item_bytes);
                }
            }
        }
        // SAFETY: the caller holds both rows.
        unsafe { self.set_record(to.0, to.1, self.record(from.0, from.1)) }
    }

    /// Closes the gaps that a time-major slot of only `rows` rows has between its steps, so that each column is one
    /// contiguous `[T, rows, …]` array.
    ///
    /// # Safety
    /// The caller holds the whole slot exclusively.
    pub(crate) unsafe fn close_ranks(&self, slot: u32, rows: usize) {
        if !self.layout.time_major {
            return;
        }
        for column in &self.layout.columns {
            for step in 1..column.steps {
                let bytes = rows * column.item_bytes;
                // SAFETY: both ends lie inside the column; the target never lies behind the source, and `copy` allows
                // them to overlap.
                unsafe {
                    let start = self.slot(slot).add(column.offset);
                    std::ptr::copy(start.add(step * column.step_stride), start.add(step * bytes), bytes);
                }
            }
        }
    }
}

/// Copies `lanes` values of one leaf, lane by lane, from one pair of (address of lane 0, bytes between lanes) to another.
///
/// # Safety
/// All values of `bytes` bytes at both ends are the caller's to read and write, and the ends do not overlap.
#[inline]
pub(crate) unsafe fn copy_lanes(from: (*const u8, usize), to: (*mut u8, usize), bytes: usize, lanes: usize) {
    if from.1 == bytes && to.1 == bytes {
        // SAFETY: contiguous at both ends, so this is exactly the values that the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(from.0, to.0, bytes * lanes) }
        return;
    }
    // SAFETY: the caller's duty.
    unsafe { copy_strided(from, to, bytes, lanes) }
}

/// The part of `copy_lanes` that is not worth inlining.
///
/// # Safety
/// As there.
#[inline(never)]
unsafe fn copy_strided(from: (*const u8, usize), to: (*mut u8, usize), bytes: usize, lanes: usize) {
    for lane in 0..lanes {
        // SAFETY: one value of the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from.0.add(lane * from.1), to.0.add(lane * to.1), bytes) }
    }
}

/// Zeroes `lanes` values of one leaf.
///
/// # Safety
/// All of them are the caller's to write.
#[inline]
pub(crate) unsafe fn zero_lanes(to: (*mut u8, usize), bytes: usize, lanes: usize) {
    if to.1 == bytes {
        // SAFETY: contiguous, so this is exactly the values that the caller vouches for.
        unsafe { std::ptr::write_bytes(to.0, 0, bytes * lanes) }
        return;
    }
    for lane in 0..lanes {
        // SAFETY: one value of the caller's.
        unsafe { std::ptr::write_bytes(to.0.add(lane * to.1), 0, bytes) }
    }
}

/// A writer's own steps in ordinary memory: what cannot be written in place.
#[derive(Debug)]
pub(crate) struct LaneBuffer {
    pub(crate) places: Vec<Place>,
    /// Zeroed at the start, so every value in it is a valid element from the beginning.
    bytes: Box<[UnsafeCell<Line>]>,
}

#[derive(Debug)]
#[repr(C, align(64))]
#[allow(dead_code)] // only its bytes matter
struct Line([u8; 64]);

impl LaneBuffer {
    pub(crate) fn new(places: Vec<Place>, bytes: usize) -> LaneBuffer {
        let lines = bytes.div_ceil(size_of::<Line>());
        let mut buffer: Vec<UnsafeCell<Line>> = Vec::with_capacity(lines);
        let start = NonNull::from(buffer.spare_capacity_mut()).cast::<u8>();
        // Unrolls of pixels take tens of megabytes, written and read once each: in 4 KiB pages, a third of the time goes
        // into finding them. Asked before the first touch, which is here.
        // SAFETY: the vector's own memory, of at least so many bytes.
        unsafe { ask_huge_pages(start, lines * size_of::<Line>()) };
        buffer.extend((0..lines).map(|_| UnsafeCell::new(Line([0; 64]))));
        LaneBuffer { places, bytes: buffer.into_boxed_slice() }
    }

    /// The first byte. Everything in the buffer is its writer's alone, and a writer is not shared.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.bytes.as_ptr().cast_mut().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On machines with 32-bit addresses counts far below their limits reach this.
    #[test]
    fn records_that_cannot_be_addressed_are_none() {
        assert_eq!(Slots::record_bytes(3, 5, false), Some(15 * 24));
        assert_eq!(Slots::record_bytes(3, 5, true), Some(15 * 36));
        assert_eq!(Slots::record_bytes(usize::MAX / 2, 3, false), None);
        assert_eq!(Slots::record_bytes(usize::MAX / 24 + 1, 1, false), None);
        assert_eq!(Slots::record_bytes(usize::MAX / 24 - 1, 1, true), None);
    }
}
