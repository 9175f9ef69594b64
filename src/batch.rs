//! Batches in the learner's hands.
//!
//! A [`Batch`] owns the lease of its slot: nobody writes there until it is dropped, wherever and whenever that is, also
//! after its feed. What it does not do: copy. Views borrow it, `share` turns it into parts that own it together.

use crate::element::Element;
use crate::intake::{IntakeGate, Lease, Sealed};
use crate::keys::Keys;
use crate::layout::Layout;
use crate::metrics::Stage;
use crate::sample::Column;
use crate::slots::RowRecord;
use ndarray::{ArrayView, ArrayViewD, Axis, IxDyn, Slice};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// `batch_size` samples, column by column, in one contiguous slot of the ring. Hold as many as the feed has buffers, in
/// any order; each gives its slot back when it is dropped.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// # let mut sample = Sample::step(step);
/// let column = sample.all(reward);
/// # let feed = Feed::builder(sample).batch(2).start()?;
/// # let (mut writer, learner) = (feed.writer(2)?, feed.learner()?);
/// # let mut s = writer.step()?;
/// # s.put(reward, &[1.0, 2.0])?;
/// # s.commit()?;
/// let batch = learner.next_batch()?;
/// assert_eq!(batch.view(column).shape(), [2]);
/// assert_eq!(batch.slice(column), [1.0, 2.0]);
/// assert_eq!(batch.lanes().collect::<Vec<_>>(), [0, 1]);
/// # Ok(()) }
/// ```
///
/// A view does not outlive its batch, since its slot may be written again; `share` is for that:
///
/// ```compile_fail,E0505
/// # use pinring::*;
/// # fn read(batch: Batch, column: Column<f32>) -> f32 {
/// let rewards = batch.slice(column);
/// drop(batch); // `batch` is borrowed by `rewards`
/// rewards[0]
/// # }
/// ```
#[derive(Debug)]
pub struct Batch {
    rows: usize,
    sequence: u64,
    ends_pass: bool,
    taken: Instant,
    /// Out of use for good. Said of a shared batch, whose owners go on reading it.
    quarantined: AtomicBool,
    lease: Lease,
}

impl Batch {
    pub(crate) fn new(sealed: Sealed) -> Batch {
        let now = Instant::now();
        let Sealed { lease, rows, sequence, sealed, ends_pass, gather, credit, .. } = sealed;
        drop(credit); // no buffer of a device is needed
        debug_assert!(gather.is_none(), "a learner of the host was let in where the device gathers");
        let batch = Batch { rows, sequence, ends_pass, taken: now, quarantined: AtomicBool::new(false), lease };
        let gate = batch.gate();
        if let Some(store) = &gate.store {
            store.hand_over(rows);
        }
        gate.counters.taken.fetch_add(1, Ordering::Relaxed);
        gate.counters.held.fetch_add(1, Ordering::Relaxed);
        gate.counters.stage(Stage::Wait, now.saturating_duration_since(sealed));
        if let Some(versions) = gate.seen_versions() {
            let newest = versions.newest();
            gate.counters.lag(batch.records().map(|record| newest.saturating_sub(record.version)));
        }
        batch
    }

    fn gate(&self) -> &IntakeGate {
        self.lease.home()
    }

    fn layout(&self) -> &Layout {
        &self.gate().layout
    }

    fn records(&self) -> impl ExactSizeIterator<Item = RowRecord> + '_ {
        // SAFETY: the slot is sealed and its lease is this batch's: no writer (invariant 2).
        (0..self.rows).map(|row| unsafe { self.gate().slots.record(self.lease.slot, row) })
    }

    /// Rows: the feed's batch size, or fewer in the last batch of a source that ended.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Counts batches in the order of delivery, from 0.
    pub fn sequence_number(&self) -> u64 {
        self.sequence
    }

    /// Whether a pass over the store's samples ended with this batch, as sampling without replacement does; it may have
    /// fewer rows then.
    pub fn ends_pass(&self) -> bool {
        self.ends_pass
    }

    /// How many rows, the last ones, are of the second store that the feed [mixes](crate::FeedBuilder::mix) in. Their lanes and
    /// steps are that store's.
    pub fn rows_mixed(&self) -> usize {
        self.records().filter(|record| record.key.mixed).count()
    }

    /// Where the rows came from, for [`Learner::update_priorities`](crate::Learner::update_priorities) and
    /// [`Feed::peek`](crate::Feed::peek). Cheap, and not bound to the batch.
    pub fn keys(&self) -> Keys {
        Keys::new(self.gate(), self.records())
    }

    /// The lane of each row.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.records().map(|record| record.lane as usize)
    }

    /// The step of its lane that each row begins with, counted from 0.
    pub fn first_steps(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.records().map(|record| record.first_step)
    }

    /// Real steps of each row: T, or fewer where an unroll or a sequence was padded; 1 for single steps and transitions.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.records().map(|record| record.length as usize)
    }

    /// The version of the weights that the first step of each row was acted with. Versions of all steps are the column
    /// [`policy_version`](crate::Sample::policy_version).
    pub fn policy_versions(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.records().map(|record| record.version)
    }

    /// A column: see the table at [`Sample`](crate::Sample) for its shape. Contiguous, in standard order.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn view<T: Element>(&self, column: Column<T>) -> ArrayViewD<'_, T> {
        let shape = self.layout().shape(self.own(column), self.rows);
        ArrayView::from_shape(IxDyn(&shape), self.slice(column)).expect("the slice has exactly the shape's elements")
    }

    /// A column as one slice, in the order of [`view`](Batch::view).
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn slice<T: Element>(&self, column: Column<T>) -> &[T] {
        let bytes = self.bytes(self.own(column));
        // SAFETY: columns are aligned for their element type and hold valid elements of it (the ring starts zeroed, and
        // only values of the column's type are written there); the slot is sealed while this batch lives (invariant 2).
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
    }

    /// Rows `range` of every column, without a copy.
    ///
    /// # Panics
    /// If the range reaches beyond the batch.
    #[track_caller]
    pub fn minibatch(&self, range: Range<usize>) -> BatchView<'_> {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} are not all in a batch of {} rows",
            self.rows
        );
        BatchView { batch: self, range }
    }

    /// Bytes of the whole batch as it lies in the ring, columns at [`byte_offset`](Batch::byte_offset): what one copy of
    /// it takes.
    pub fn byte_len(&self) -> usize {
        self.layout().slot_bytes
    }

    /// Where a column begins within the batch's bytes.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn byte_offset<T: Element>(&self, column: Column<T>) -> usize {
        self.layout().columns[self.own(column)].offset
    }

    /// Turns the batch into one that several owners share, column by column: for frameworks that take shared bytes.
    pub fn share(self) -> SharedBatch {
        SharedBatch(Arc::new(self))
    }

    /// The whole slot.
    pub(crate) fn slot_bytes(&self) -> &[u8] {
        // SAFETY: the slot is mapped and sealed while this batch lives (invariants 2 and 7).
        unsafe { std::slice::from_raw_parts(self.gate().slots.slot(self.lease.slot), self.layout().slot_bytes) }
    }

    /// The slot without the batch, which is no longer in the learner's hands.
    pub(crate) fn into_lease(self) -> Lease {
        self.put_down();
        let batch = ManuallyDrop::new(self);
        // SAFETY: `batch` is never dropped and not used again, so the lease is read out once; its other fields own
        // nothing.
        unsafe { std::ptr::read(&batch.lease) }
    }

    /// The learner does not hold it any more.
    fn put_down(&self) {
        let counters = &self.gate().counters;
        counters.stage(Stage::Hold, self.taken.elapsed());
        counters.held.fetch_sub(1, Ordering::Relaxed);
    }

    #[track_caller]
    fn own<T: Element>(&self, column: Column<T>) -> usize {
        self.layout().own(column)
    }

    fn bytes(&self, index: usize) -> &[u8] {
        let column = &self.layout().columns[index];
        let at = self.gate().slots.slot(self.lease.slot).wrapping_add(column.offset);
        // SAFETY: inside the slot by the layout; sealed while this batch lives (invariants 2 and 7).
        unsafe { std::slice::from_raw_parts(at, self.rows * column.steps * column.item_bytes) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.gate().is_inherited() {
            return;
        }
        self.put_down();
        // The lease, dropped next, takes the slot home.
    }
}

/// Consecutive rows of a batch.
///
/// ```
/// # use pinring::*;
/// # fn rows(batch: &Batch, obs: Column<f32>) {
/// for start in (0..batch.rows()).step_by(64) {
///     let minibatch = batch.minibatch(start..(start + 64).min(batch.rows()));
///     let observations = minibatch.view(obs); // [64, …], borrowed from the ring
/// #   let _ = observations;
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BatchView<'b> {
    batch: &'b Batch,
    range: Range<usize>,
}

impl<'b> BatchView<'b> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.range.len()
    }

    /// These rows of a column; strided where time comes first.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn view<T: Element>(&self, column: Column<T>) -> ArrayViewD<'b, T> {
        let mut view = self.batch.view(column);
        let axis = Axis(self.batch.layout().row_axis(self.batch.own(column)));
        view.slice_axis_inplace(axis, Slice::from(self.range.start..self.range.end));
        view
    }

    /// These rows of a column as one slice; `None` where time comes first and they are not contiguous.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn slice<T: Element>(&self, column: Column<T>) -> Option<&'b [T]> {
        self.view(column).to_slice()
    }
}

/// A batch with several owners; the last one gives its slot back.
///
/// ```
/// # use pinring::*;
/// # fn hand_over(batch: Batch, obs: Column<u8>) -> (ColumnBytes, Vec<usize>) {
/// let shared = batch.share();
/// let (bytes, shape) = shared.column(obs); // e.g. bytes::Bytes::from_owner(bytes)
/// # (bytes, shape)
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SharedBatch(Arc<Batch>);

impl SharedBatch {
    /// A column's bytes, in native byte order, and its shape.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn column<T: Element>(&self, column: Column<T>) -> (ColumnBytes, Vec<usize>) {
        let index = self.0.own(column);
        let shape = self.0.layout().shape(index, self.0.rows);
        (ColumnBytes { batch: self.0.clone(), index }, shape)
    }
}

impl SharedBatch {
    /// Keeps the slot out of use for good (invariant 4), whatever the other owners do. Once, however many copies of it
    /// were under way.
    pub(crate) fn quarantine(self) {
        if !self.0.quarantined.swap(true, Ordering::Relaxed) {
            self.0.put_down();
            self.0.gate().note_quarantine(self.0.lease.slot);
            std::mem::forget(self); // so the last owner, whose drop would give the slot back, is never gone
        }
    }
}

impl std::ops::Deref for SharedBatch {
    type Target = Batch;
    fn deref(&self) -> &Batch {
        &self.0
    }
}

/// One column of a [`SharedBatch`] as owned bytes: `AsRef<[u8]> + Send + Sync + 'static`, aligned to
/// [`COLUMN_ALIGN`](crate::COLUMN_ALIGN). The slot comes home when the last owner is dropped.
#[derive(Clone)]
pub struct ColumnBytes {
    batch: Arc<Batch>,
    index: usize,
}

impl AsRef<[u8]> for ColumnBytes {
    fn as_ref(&self) -> &[u8] {
        self.batch.bytes(self.index)
    }
}

impl fmt::Debug for ColumnBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let column = &self.batch.layout().columns[self.index];
        write!(f, "ColumnBytes({}: {} bytes of {})", column.name, self.as_ref().len(), column.dtype)
    }
}
