//! Batches in device memory.

use super::Desk;
use super::learner::LearnerSide;
use crate::cuda::device::{Device, DeviceMemory, Event, RawStream};
use crate::cuda::types::CudaError;
use crate::element::{DType, Element};
use crate::keys::Keys;
use crate::learner::DeviceUseError;
use crate::sample::Column;
use crate::slots::RowRecord;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// One device buffer, at a stable address, with the event behind which it may be overwritten.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// The batch; where this device gathers, behind it the table of a gather's records.
    pub(crate) memory: DeviceMemory,
    pub(crate) released: Event,
    /// Whether `released` stands for the buffer's last use. Our own state: an event never recorded reads as complete.
    pub(crate) recorded: bool,
    /// Recorded behind the last copy into the buffer.
    pub(crate) filled: Option<Arc<Event>>,
    pub(crate) records: Vec<RowRecord>,
    /// Whether a sampler's pass ended with the batch in it.
    pub(crate) ends_pass: bool,
}

impl Buffer {
    /// Whether nothing on the device uses it any more.
    pub(crate) fn is_idle(&self, device: &Device) -> Result<bool, CudaError> {
        let last_use = if self.recorded { Some(&self.released) } else { self.filled.as_deref() };
        last_use.map_or(Ok(true), |event| device.query(event))
    }
}

/// A batch in device memory, laid out as on the host. The learner's stream waits for its copy; the learner's thread does
/// not. Its drop records the release behind that stream and returns at once; the buffer is overwritten after that.
///
/// ```no_run
/// # use pinring::*;
/// # fn launch(_: u64, _: u64) {}
/// # fn train(feed: &Feed, obs: Column<u8>, reward: Column<f32>, stream: *mut std::ffi::c_void) -> Result<()> {
/// // SAFETY: the stream is one of device 0 and outlives the learner.
/// let learner = unsafe { feed.learner_on(0, stream)? };
/// let batch = learner.next_batch()?;
/// launch(batch.column(obs).ptr, batch.column(reward).ptr); // kernels on `stream`
/// drop(batch); // released behind them
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct DeviceBatch {
    side: Arc<LearnerSide>,
    /// Taken by the drop.
    buffer: Option<Buffer>,
    ready: Arc<Event>,
    counts: Counts,
    taken: Instant,
}

/// What the host knows of a device batch as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) rows: usize,
    pub(super) sequence: u64,
    pub(super) round: Option<u64>,
}

/// Where a column of a device batch lies.
///
/// ```no_run
/// # use pinring::*;
/// # fn show(batch: &DeviceBatch, obs: Column<u8>) {
/// let column = batch.column(obs);
/// println!("{} of shape {:?} at {:#x}", column.dtype, column.shape, column.ptr);
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceColumn<T> {
    /// The device address (a `CUdeviceptr`) of the first element.
    pub ptr: u64,
    /// The shape: see the table at [`Sample`](crate::Sample).
    pub shape: Vec<usize>,
    /// Elements, not bytes, from one index to the next along each axis.
    pub strides: Vec<usize>,
    /// The element type, as data.
    pub dtype: DType,
    element: PhantomData<fn() -> T>,
}

impl DeviceBatch {
    pub(super) fn new(side: Arc<LearnerSide>, buffer: Buffer, ready: Arc<Event>, counts: Counts) -> DeviceBatch {
        DeviceBatch { side, buffer: Some(buffer), ready, counts, taken: Instant::now() }
    }

    fn desk(&self) -> &Desk {
        &self.side.desk
    }

    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("a device batch has its buffer until it is dropped")
    }

    /// Rows: the feed's batch size, or fewer in the last batch of a source that ended.
    pub fn rows(&self) -> usize {
        self.counts.rows
    }

    /// Counts batches in the order in which they filled, from 0, over all devices.
    pub fn sequence_number(&self) -> u64 {
        self.counts.sequence
    }

    /// Whether a pass over the store's samples ended with this batch: as [`Batch::ends_pass`](crate::Batch::ends_pass).
    pub fn ends_pass(&self) -> bool {
        self.buffer().ends_pass
    }

    /// Where the rows came from: as [`Batch::keys`](crate::Batch::keys).
    pub fn keys(&self) -> Keys {
        Keys::new(&self.desk().gate, self.buffer().records.iter().copied())
    }

    /// The round that it is of, from 0, the same on every device; `None` where batches are dealt on demand.
    pub fn round(&self) -> Option<u64> {
        self.counts.round
    }

    /// The ordinal of the device.
    pub fn device(&self) -> i32 {
        self.desk().device.ordinal()
    }

    /// The lane of each row; on the host.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.buffer().records.iter().map(|record| record.lane as usize)
    }

    /// The step of its lane that each row begins with; on the host.
    pub fn first_steps(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.buffer().records.iter().map(|record| record.first_step)
    }

    /// Real steps of each row; on the host.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.buffer().records.iter().map(|record| record.length as usize)
    }

    /// The version that each row's first step was acted with; on the host.
    pub fn policy_versions(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.buffer().records.iter().map(|record| record.version)
    }

    /// A column of all rows.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    #[track_caller]
    pub fn column<T: Element>(&self, column: Column<T>) -> DeviceColumn<T> {
        self.minibatch(column, 0..self.counts.rows)
    }

    /// Rows `range` of a column, without a copy: strided where time comes first.
    ///
    /// # Panics
    /// If the range reaches beyond the batch, or the column belongs to another sample.
    #[track_caller]
    pub fn minibatch<T: Element>(&self, column: Column<T>, range: Range<usize>) -> DeviceColumn<T> {
        let layout = &self.desk().gate.layout;
        let index = layout.own(column);
        assert!(
            range.start <= range.end && range.end <= self.counts.rows,
            "rows {range:?} are not all in a batch of {} rows",
            self.counts.rows
        );
        let mut shape = layout.shape(index, self.counts.rows);
        let mut strides = vec![1; shape.len()];
        for axis in (0..shape.len().saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * shape[axis + 1];
        }
        let axis = layout.row_axis(index);
        shape[axis] = range.len();
        let column = &layout.columns[index];
        let offset = column.offset + range.start * strides[axis] * column.dtype.size();
        DeviceColumn {
            ptr: self.buffer().memory.address() + offset as u64,
            shape,
            strides,
            dtype: T::DTYPE,
            element: PhantomData,
        }
    }

    /// The event (a `CUevent`) that completes when the copy has. It is used again some time after the batch was dropped.
    pub fn ready_event(&self) -> *mut c_void {
        self.ready.raw() as *mut c_void
    }

    /// Makes a second stream wait for the copy too. The batch's release is ordered behind the learner's own stream only:
    /// make that one wait for the second before dropping the batch.
    ///
    /// # Errors
    /// [`DeviceUseError::Capturing`] if that stream is capturing a graph.
    ///
    /// # Safety
    /// `stream` is a live stream of this batch's device.
    pub unsafe fn wait_on(&self, stream: *mut c_void) -> Result<(), DeviceUseError> {
        self.desk().check_process()?;
        let (device, stream) = (&self.desk().device, RawStream(stream as usize));
        // SAFETY: the caller's duty.
        unsafe {
            if device.is_capturing(stream)? {
                return Err(DeviceUseError::Capturing);
            }
            Ok(device.wait(stream, &self.ready)?)
        }
    }

    /// Blocks this thread until the copy has completed, for those who want that.
    ///
    /// # Errors
    /// What the copy or the device ended with.
    pub fn synchronize(&self) -> Result<(), DeviceUseError> {
        self.desk().check_process()?;
        let device = &self.desk().device;
        Ok(device.relaxed(|| device.synchronize_event(&self.ready))?)
    }
}

impl Drop for DeviceBatch {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.desk().gate.is_inherited() {
            std::mem::forget(buffer); // the parent's: no CUDA call from here
            return;
        }
        self.desk().held.fetch_sub(1, Ordering::Relaxed);
        self.desk().gate.counters.stage(crate::metrics::Stage::Hold, self.taken.elapsed());
        self.side.release(buffer);
    }
}
