//! The floor: memory like the ring's, and nothing but `memcpy` into it.
//!
//! Slots, columns and rows lie where a feed's would lie. What it does not do: tell anybody that a row is written.

use pinring::{COLUMN_ALIGN, ColumnInfo, Element, SLOT_ALIGN};
use std::alloc::Layout;
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;

/// Where one column lies in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub offset: usize,
    /// Bytes of one step of one row.
    pub item: usize,
    pub steps: usize,
    pub row_stride: usize,
    pub step_stride: usize,
}

/// Slots of ordinary memory: huge pages asked for, every page present.
#[derive(Debug)]
pub struct Floor {
    base: NonNull<u8>,
    layout: Layout,
    pub slots: usize,
    pub rows: usize,
    slot_bytes: usize,
    pub columns: Vec<Column>,
}

// SAFETY: memory, written through `put` alone, whose callers keep to rows of their own.
unsafe impl Send for Floor {}
// SAFETY: as above.
unsafe impl Sync for Floor {}

impl Floor {
    /// As a feed of those columns has it. `time_major`: `None` for single steps.
    pub fn like(columns: &[ColumnInfo], rows: usize, slots: usize, time_major: Option<bool>) -> Floor {
        let mut end = 0;
        let columns = columns.iter().map(|info| {
            let steps = match time_major {
                None => 1,
                Some(true) => info.shape[0],
                Some(false) => info.shape[1],
            };
            let item = info.shape.iter().product::<usize>() / (rows * steps) * info.dtype.size();
            let (row_stride, step_stride) =
                if time_major == Some(true) { (item, item * rows) } else { (item * steps, item) };
            let column = Column { offset: end, item, steps, row_stride, step_stride };
            end = (end + item * steps * rows).next_multiple_of(COLUMN_ALIGN);
            column
        });
        let columns = columns.collect();
        Floor::with(columns, end, rows, slots)
    }

    /// A lane buffer for unrolls of `lanes` lanes: `depth` steps of every leaf, step by step.
    pub fn lane_buffer(of: &Floor, lanes: usize, depth: usize) -> Floor {
        let mut end = 0;
        let columns = of.columns.iter().map(|&Column { item, .. }| {
            let column = Column { offset: end, item, steps: depth, row_stride: item, step_stride: item * lanes };
            end = (end + item * lanes * depth).next_multiple_of(64);
            column
        });
        let columns = columns.collect();
        Floor::with(columns, end, lanes, 1)
    }

    /// So many pieces, one behind the other.
    pub fn pieces(bytes: usize, pieces: usize) -> Floor {
        let row_stride = bytes.next_multiple_of(16);
        let column = Column { offset: 0, item: bytes, steps: 1, row_stride, step_stride: 0 };
        Floor::with(vec![column], row_stride * pieces, pieces, 1)
    }

    fn with(columns: Vec<Column>, end: usize, rows: usize, slots: usize) -> Floor {
        let slot_bytes = end.next_multiple_of(SLOT_ALIGN);
        let bytes = slot_bytes * slots;
        let layout = Layout::from_size_align(bytes, HUGE_PAGE).expect("the ring of the same size could be mapped");
        // SAFETY: the layout has a size above 0: a schema without bytes is refused by the feed that came first.
        let base = NonNull::new(unsafe { std::alloc::alloc(layout) });
        let base = base.unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        #[cfg(target_os = "linux")]
        // SAFETY: whole pages of our own; advice on huge pages changes no content. Without them it is merely slower.
        let _ = unsafe {
            rustix::mm::madvise(
                base.as_ptr().cast(),
                bytes / SLOT_ALIGN * SLOT_ALIGN,
                rustix::mm::Advice::LinuxHugepage,
            )
        };
        // SAFETY: `bytes` bytes of our own. This makes every page present.
        unsafe { base.write_bytes(0, bytes) };
        Floor { base, layout, slots, rows, slot_bytes, columns }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.columns.iter().map(|column| column.item * column.steps).sum()
    }

    fn at(&self, column: usize, slot: usize, row: usize, step: usize) -> *mut u8 {
        let Column { offset, row_stride, step_stride, .. } = self.columns[column];
        self.base.as_ptr().wrapping_add(slot * self.slot_bytes + offset + row * row_stride + step * step_stride)
    }

    /// Writes step `step` of `rows` rows of one column, row after row in `values`.
    ///
    /// # Safety
    /// Nobody else touches these rows of this slot meanwhile.
    #[inline]
    pub unsafe fn put(&self, column: usize, slot: usize, row: usize, step: usize, values: &[u8], rows: usize) {
        let Column { item, row_stride, steps, .. } = self.columns[column];
        assert!(slot < self.slots && row + rows <= self.rows && step < steps && values.len() == rows * item);
        let to = self.at(column, slot, row, step);
        // SAFETY: inside the memory by the assertion, the caller's alone; `values` is a borrow from elsewhere.
        unsafe {
            if row_stride == item {
                std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
                return;
            }
            for row in 0..rows {
                std::ptr::copy_nonoverlapping(values.as_ptr().add(row * item), to.add(row * row_stride), item);
            }
        }
    }

    /// Copies a step of `rows` rows of one column to a step of rows of another floor with the same columns.
    ///
    /// # Safety
    /// Nobody writes the one or touches the other meanwhile.
    pub unsafe fn copy(&self, column: usize, from: (usize, usize), to: (&Floor, usize, usize, usize), rows: usize) {
        let (Column { item, row_stride, .. }, (row, step)) = (self.columns[column], from);
        let (floor, slot, to_row, to_step) = to;
        assert!(row + rows <= self.rows && step < self.columns[column].steps && item == floor.columns[column].item);
        for i in 0..rows {
            let from = self.at(column, 0, row, step).wrapping_add(i * row_stride).cast_const();
            // SAFETY: one item inside our memory by the assertion, which the caller vouches for.
            let value = unsafe { std::slice::from_raw_parts(from, item) };
            // SAFETY: the caller's duty.
            unsafe { floor.put(column, slot, to_row + i, to_step, value, 1) };
        }
    }

    /// The bytes of one step of one row of a column.
    ///
    /// # Safety
    /// Nobody writes there meanwhile.
    pub unsafe fn get(&self, column: usize, slot: usize, row: usize, step: usize) -> &[u8] {
        assert!(slot < self.slots && row < self.rows && step < self.columns[column].steps);
        // SAFETY: inside the memory by the assertion, and initialised by `with`.
        unsafe { std::slice::from_raw_parts(self.at(column, slot, row, step), self.columns[column].item) }
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // SAFETY: allocated in `with` with this layout, and borrowed by nobody any more.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// The bytes of some values.
pub fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding, and the slice is borrowed for as long.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
