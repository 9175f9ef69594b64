//! Copies into memory that the learner's framework owns.
//!
//! The copy runs on the framework's own stream, from the slot, without a stage in between; the feeding thread watches
//! its event, and the slot comes home when that completes.

use super::Desk;
use super::desk::{Flight, Source};
use crate::batch::{Batch, SharedBatch};
use crate::cuda::device::{Event, RawStream};
use crate::element::Element;
use crate::learner::DeviceUseError;
use crate::sample::Column;
use std::ffi::c_void;
use std::sync::Arc;

/// Copies host batches to one device, into memory of the caller's. `Send`, cheap to clone; made by
/// [`Feed::copier`](crate::Feed::copier).
///
/// ```no_run
/// # use pinring::*;
/// # fn copy(feed: &Feed, learner: &Learner, dst: u64, stream: *mut std::ffi::c_void) -> Result<()> {
/// let copier = feed.copier(0)?;
/// let batch = learner.next_batch()?;
/// // SAFETY: `dst` has `batch.byte_len()` bytes on device 0, `stream` is one of its streams.
/// let ticket = unsafe { copier.copy_to_device(batch, dst, stream)? };
/// // kernels launched on `stream` from here on see the batch; the slot comes home by itself
/// # let _ = ticket;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceCopier {
    desk: Arc<Desk>,
}

/// A copy that was issued. Dropping it changes nothing: the slot comes home when the copy is over.
///
/// ```no_run
/// # use pinring::*;
/// # fn order(ticket: &CopyTicket, other_stream: *mut std::ffi::c_void) -> Result<()> {
/// // SAFETY: a live stream of the same device.
/// unsafe { ticket.wait_on(other_stream)? };
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct CopyTicket {
    desk: Arc<Desk>,
    done: Arc<Event>,
}

impl DeviceCopier {
    pub(crate) fn new(desk: Arc<Desk>) -> DeviceCopier {
        DeviceCopier { desk }
    }

    /// Issues one copy of the whole batch on `stream`: [`Batch::byte_len`] bytes, columns at [`Batch::byte_offset`].
    ///
    /// # Errors
    /// [`CopyError`] gives the reason and, unless the copy may be under way, the batch back.
    ///
    /// # Safety
    /// `dst` is a device address with `batch.byte_len()` writable bytes that stay allocated until the copy is over;
    /// `stream` is a live stream of this copier's device.
    #[allow(clippy::result_large_err)] // the batch comes back by value
    pub unsafe fn copy_to_device(&self, batch: Batch, dst: u64, stream: *mut c_void) -> Result<CopyTicket, CopyError> {
        // SAFETY: the caller's duty for `dst` and `stream`; the batch keeps its slot until the flight drops it.
        match unsafe { self.issue(batch.slot_bytes(), dst, RawStream(stream as usize)) } {
            Ok(done) => Ok(self.watch(Source::Slot(batch.into_lease()), done)),
            Err(Failed { error, queued: false }) => Err(CopyError { error, batch: Some(batch) }),
            Err(Failed { error, queued: true }) => {
                batch.into_lease().quarantine();
                Err(CopyError { error, batch: None })
            }
        }
    }

    /// Issues a copy of one column of a shared batch on `stream`: as many bytes as [`SharedBatch::column`] gives. The
    /// slot comes home when this copy is over and the last owner is gone.
    ///
    /// # Errors
    /// What failed.
    ///
    /// # Panics
    /// If the column belongs to another sample.
    ///
    /// # Safety
    /// As [`copy_to_device`](DeviceCopier::copy_to_device), for the column's bytes.
    pub unsafe fn copy_column_to_device<T: Element>(
        &self,
        batch: &SharedBatch,
        column: Column<T>,
        dst: u64,
        stream: *mut c_void,
    ) -> Result<CopyTicket, DeviceUseError> {
        let (bytes, _) = batch.column(column);
        // SAFETY: the caller's duty for `dst` and `stream`; the shared batch keeps its slot until the flight drops it.
        match unsafe { self.issue(bytes.as_ref(), dst, RawStream(stream as usize)) } {
            Ok(done) => Ok(self.watch(Source::Shared(batch.clone()), done)),
            Err(Failed { error, queued }) => {
                if queued {
                    batch.clone().quarantine();
                }
                Err(error)
            }
        }
    }

    /// # Safety
    /// `dst` has room for `bytes`, `stream` is live, and `bytes` stay where they are until the returned event completes.
    unsafe fn issue(&self, bytes: &[u8], dst: u64, stream: RawStream) -> Result<Arc<Event>, Failed> {
        let device = &self.desk.device;
        let before = |error: DeviceUseError| Failed { error, queued: false };
        self.desk.check_open().map_err(|closed| before(closed.into()))?; // else nobody would watch for its end
        // SAFETY: the caller's duty.
        unsafe {
            if device.is_capturing(stream).map_err(|error| before(error.into()))? {
                return Err(before(DeviceUseError::Capturing));
            }
            let done = self.desk.event().map_err(|error| before(error.into()))?;
            device.copy_in(dst, bytes.as_ptr(), bytes.len(), stream).map_err(|error| before(error.into()))?;
            if let Err(error) = device.record(&done, stream) {
                self.desk.fail(&error);
                return Err(Failed { error: error.into(), queued: true });
            }
            Ok(done)
        }
    }

    fn watch(&self, source: Source, done: Arc<Event>) -> CopyTicket {
        self.desk.watch(Flight { source, done: done.clone() });
        CopyTicket { desk: self.desk.clone(), done }
    }
}

struct Failed {
    error: DeviceUseError,
    /// The copy was queued, so the slot may still be read.
    queued: bool,
}

/// Why a batch was not copied.
///
/// ```
/// # fn keep(error: pinring::CopyError) {
/// eprintln!("{error}");
/// let batch = error.batch; // still the caller's, unless the copy may be under way
/// # let _ = batch;
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CopyError {
    /// What failed.
    pub error: DeviceUseError,
    /// The batch. `None` if its copy was issued but its end cannot be learned: its slot is then out of use for good.
    pub batch: Option<Batch>,
}

impl From<CopyError> for crate::error::Error {
    fn from(error: CopyError) -> Self {
        error.error.into()
    }
}

impl CopyTicket {
    /// Makes a stream wait for the copy.
    ///
    /// # Errors
    /// [`DeviceUseError::Capturing`] if that stream is capturing a graph; or a CUDA error.
    ///
    /// # Safety
    /// `stream` is a live stream of the copy's device.
    pub unsafe fn wait_on(&self, stream: *mut c_void) -> Result<(), DeviceUseError> {
        self.desk.check_process()?;
        let (device, stream) = (&self.desk.device, RawStream(stream as usize));
        // SAFETY: the caller's duty.
        unsafe {
            if device.is_capturing(stream)? {
                return Err(DeviceUseError::Capturing);
            }
            Ok(device.wait(stream, &self.done)?)
        }
    }

    /// Whether the copy is over.
    ///
    /// # Errors
    /// What it ended with.
    pub fn is_done(&self) -> Result<bool, DeviceUseError> {
        self.desk.check_process()?;
        Ok(self.desk.device.relaxed(|| self.desk.device.query(&self.done))?)
    }

    /// Blocks this thread until the copy is over.
    ///
    /// # Errors
    /// What it ended with.
    pub fn synchronize(&self) -> Result<(), DeviceUseError> {
        self.desk.check_process()?;
        Ok(self.desk.device.relaxed(|| self.desk.device.synchronize_event(&self.done))?)
    }

    /// The event (a `CUevent`) that completes when the copy has. It is used again when the ticket and its clones are gone.
    pub fn event(&self) -> *mut c_void {
        self.done.raw() as *mut c_void
    }
}
