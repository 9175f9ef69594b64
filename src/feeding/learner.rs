//! The learner's end on a device.

use super::Desk;
use super::batch::{Buffer, Counts, DeviceBatch};
use super::desk::Ready;
use crate::cuda::device::RawStream;
use crate::cuda::types::CudaError;
use crate::keys::{Keys, UpdateError, Updated};
use crate::learner::{ALL_HELD_PATIENCE, DeviceUseError, HeldCounts, NextError, Taker};
use crate::metrics::Stage;
use crate::sync::{Patience, lock};
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The per-thread default stream's handle: it names another stream on every thread.
const PER_THREAD: RawStream = RawStream(2);
/// How often a learner that is tied to its thread, and waits, looks for batches that other threads have dropped: only it
/// can release them.
const LOOK: Duration = Duration::from_millis(2);

/// Takes batches on a device. Made by [`Feed::learner_on`](crate::Feed::learner_on), which names the stream that uses
/// them; every wait and every release is ordered on that stream, so none can be forgotten. Dropped, it leaves further
/// batches to the other learners (by [rounds](crate::Deal::Rounds): it ends them all); those that were copied for it and not
/// taken are lost, and counted as dropped.
///
/// ```no_run
/// # use pinring::*;
/// # fn step(_: &DeviceBatch) {}
/// # fn main() -> Result<()> {
/// # let mut declared = Step::new();
/// # declared.observation::<u8>("obs", &[4]);
/// let feed = Feed::builder(Sample::step(declared)).pinning(Pinning::Required).device(0).start()?;
/// // SAFETY: the legacy default stream lives as long as the device.
/// let learner = unsafe { feed.learner_on(0, std::ptr::null_mut())? };
/// loop {
///     match learner.next_batch() {
///         Ok(batch) => step(&batch), // dropped at the end of the arm: released behind the step
///         Err(NextError::Ended) => return Ok(()),
///         Err(error) => return Err(error.into()),
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceLearner {
    side: Arc<LearnerSide>,
    taker: Taker,
}

/// What a learner and its batches share.
#[derive(Debug)]
pub(crate) struct LearnerSide {
    pub(super) desk: Arc<Desk>,
    stream: RawStream,
    /// The thread that a per-thread stream ties the learner to.
    thread: Option<ThreadId>,
    /// Batches dropped where their release could not be recorded: during a capture, or on another thread.
    deferred: Mutex<Vec<Buffer>>,
}

impl DeviceLearner {
    /// # Safety
    /// `stream` is a stream of the desk's device and lives as long as the learner and its batches.
    pub(crate) unsafe fn new(desk: Arc<Desk>, stream: *mut c_void) -> DeviceLearner {
        let stream = RawStream(stream as usize);
        let thread = (stream == PER_THREAD).then(|| std::thread::current().id());
        let side = LearnerSide { desk, stream, thread, deferred: Mutex::default() };
        DeviceLearner { side: Arc::new(side), taker: Taker::default() }
    }

    /// The next batch; waits until one is handed over, which is as soon as its copy is issued. The learner's stream
    /// waits for the copy itself.
    ///
    /// # Errors
    /// As [`Learner::next_batch`](crate::Learner::next_batch); [`NextError::Device`] if the stream is capturing a graph
    /// (checked first: the capture stays whole), or a CUDA call fails.
    pub fn next_batch(&self) -> Result<DeviceBatch, NextError> {
        loop {
            if let Some(batch) = self.take(Patience::Forever)? {
                return Ok(batch);
            }
        }
    }

    /// The next batch, if one was handed over.
    ///
    /// # Errors
    /// As [`next_batch`](DeviceLearner::next_batch); [`NextError::AllHeld`] at once.
    pub fn try_next(&self) -> Result<Option<DeviceBatch>, NextError> {
        self.take(Patience::None)
    }

    /// The next batch, if one is handed over within `timeout`.
    ///
    /// # Errors
    /// As [`next_batch`](DeviceLearner::next_batch); [`NextError::Pace`] as for
    /// [`Learner::next_timeout`](crate::Learner::next_timeout).
    pub fn next_timeout(&self, timeout: Duration) -> Result<Option<DeviceBatch>, NextError> {
        match self.take(Patience::timeout(timeout))? {
            None => {
                let waits = self.side.desk.gate.store.as_ref().and_then(|store| store.learner_waits_for());
                waits.map_or(Ok(None), |wait| Err(NextError::Pace(wait)))
            }
            batch => Ok(batch),
        }
    }

    /// Snapshots `bytes` bytes at the device address `ptr` behind what the learner's stream has been given so far, copies
    /// them to the host, and calls `then` with them on a thread of the feed's own. Returns at once: the next kernel may
    /// overwrite the source. If the last download is still under way, this one waits its turn, and replaces another that
    /// waits (whose `then` is dropped uncalled): the newest wins.
    ///
    /// ```no_run
    /// # use pinring::*;
    /// # fn publish(learner: &DeviceLearner, parameters: u64, bytes: usize, weights: Weights<Vec<u8>>) -> Result<()> {
    /// // SAFETY: `parameters` points to that many bytes on the learner's device.
    /// unsafe { learner.download(parameters, bytes, move |bytes| { weights.publish(bytes.to_vec()); })? };
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`DeviceUseError::TooLarge`] beyond what the builder's `downloads` allows, [`DeviceUseError::Capturing`], or a
    /// CUDA error.
    ///
    /// # Safety
    /// `ptr` points to `bytes` bytes of memory on the learner's device that stay allocated until the learner's stream
    /// has passed this call.
    pub unsafe fn download(
        &self,
        ptr: u64,
        bytes: usize,
        then: impl FnOnce(&[u8]) + Send + 'static,
    ) -> Result<(), DeviceUseError> {
        let side = &self.side;
        side.check_thread()?;
        let max = side.desk.downloads.as_ref().map_or(0, |downloads| downloads.max_bytes());
        let Some(downloads) = side.desk.downloads.as_ref().filter(|_| bytes <= max) else {
            return Err(DeviceUseError::TooLarge { bytes, max });
        };
        side.desk.check_open()?;
        side.check_capture()?;
        // SAFETY: the caller's duty for `ptr` and `bytes`.
        unsafe { downloads.snapshot(&side.desk, side.stream, ptr, bytes, Box::new(then))? };
        side.desk.call();
        Ok(())
    }

    /// As [`Learner::update_priorities`](crate::Learner::update_priorities), with priorities on the host.
    ///
    /// # Errors
    /// As there.
    pub fn update_priorities(&self, keys: &Keys, priorities: &[f32]) -> Result<Updated, UpdateError> {
        keys.update(&self.side.desk.gate, priorities)
    }

    fn take(&self, patience: Patience) -> Result<Option<DeviceBatch>, NextError> {
        let (side, desk) = (&self.side, &self.side.desk);
        match &desk.seat {
            None => desk.check_open()?,
            Some(_) => desk.check_process()?, // a round that has begun is given behind the close too
        }
        side.check_thread()?;
        side.check_capture()?;
        let Some(taken) = self.await_batch(patience)? else { return Ok(None) };
        let round = desk.seat.as_ref().map(|seat| (seat, seat.round(taken.sequence)));
        if let Some((seat, round)) = round
            && let Err(reason) = seat.begin(round)
        {
            desk.take_back(taken);
            return Err(reason.into());
        }
        let round = round.map(|(_, round)| round);
        let Ready { buffer, ready, rows, sequence, sealed } = taken;
        // SAFETY: the learner's stream lives; the event is recorded, since the batch was handed over after that.
        if let Err(error) = unsafe { desk.device.wait(side.stream, &ready) } {
            desk.gate.count_untaken(rows as u64);
            desk.give_back(buffer); // never handed to the learner's stream: its last use is the copy itself
            return Err(side.fail(error).into());
        }
        let counters = &desk.gate.counters;
        counters.taken.fetch_add(1, Ordering::Relaxed);
        counters.stage(Stage::Wait, Instant::now().saturating_duration_since(sealed));
        if let Some(versions) = desk.gate.seen_versions() {
            let newest = versions.newest();
            counters.lag(buffer.records.iter().map(|record| newest.saturating_sub(record.version)));
        }
        if let Some(store) = &desk.gate.store {
            store.hand_over(rows);
        }
        desk.batches_taken.fetch_add(1, Ordering::Relaxed);
        desk.held.fetch_add(1, Ordering::Relaxed);
        let counts = Counts { rows, sequence, round };
        Ok(Some(DeviceBatch::new(self.side.clone(), buffer, ready, counts)))
    }

    /// Waits before the desk. While it waits it releases what other threads have dropped.
    fn await_batch(&self, patience: Patience) -> Result<Option<Ready>, NextError> {
        let (side, desk) = (&self.side, &self.side.desk);
        let counts = || {
            side.release_deferred();
            let (held, taken) = (desk.held.load(Ordering::Relaxed), desk.batches_taken.load(Ordering::Relaxed));
            HeldCounts { held, buffers: desk.buffers, taken }
        };
        let blocked = |time: Duration| {
            desk.gate.counters.learner_blocked_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        };
        side.release_deferred();
        let look = if side.thread.is_some() { LOOK } else { ALL_HELD_PATIENCE };
        self.taker.take(&desk.ready, patience, look, counts, blocked)
    }
}

impl Drop for DeviceLearner {
    fn drop(&mut self) {
        let desk = &self.side.desk;
        if !desk.gate.is_inherited() {
            desk.learner_gone();
        }
    }
}

/// Batches that nobody could release any more: nothing says when the learner's kernels are done with them.
impl Drop for LearnerSide {
    fn drop(&mut self) {
        let deferred = std::mem::take(self.deferred.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !self.desk.gate.is_inherited() {
            deferred.into_iter().for_each(|buffer| self.desk.discard(buffer));
        }
    }
}

impl LearnerSide {
    fn check_thread(&self) -> Result<(), DeviceUseError> {
        let here = self.thread.is_none_or(|thread| thread == std::thread::current().id());
        if here { Ok(()) } else { Err(DeviceUseError::OtherThread) }
    }

    fn check_capture(&self) -> Result<(), DeviceUseError> {
        // SAFETY: the learner's stream lives (its constructor's duty).
        match unsafe { self.desk.device.is_capturing(self.stream) } {
            Ok(false) => Ok(()),
            Ok(true) => Err(DeviceUseError::Capturing),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// A call on the learner's stream failed: the feed ends with that, if it has not ended before.
    fn fail(&self, error: CudaError) -> DeviceUseError {
        self.desk.fail(&error);
        self.desk.check_open().map_or_else(DeviceUseError::Closed, |()| DeviceUseError::Cuda(error))
    }

    /// Records the release of a buffer behind the learner's stream and gives it back, or keeps it until that can be done.
    pub(super) fn release(&self, mut buffer: Buffer) {
        let device = &self.desk.device;
        // SAFETY: the learner's stream lives as long as its batches (the constructor's duty).
        let capturing = || matches!(unsafe { device.is_capturing(self.stream) }, Ok(true));
        if self.check_thread().is_err() || capturing() {
            lock(&self.deferred).push(buffer);
            return;
        }
        // SAFETY: as above.
        match unsafe { device.record(&buffer.released, self.stream) } {
            Ok(()) => {
                buffer.recorded = true;
                self.desk.give_back(buffer);
            }
            Err(error) => {
                self.desk.quarantine(buffer); // nobody can know when the learner's kernels are done with it
                self.fail(error);
            }
        }
    }

    fn release_deferred(&self) {
        let deferred = std::mem::take(&mut *lock(&self.deferred));
        deferred.into_iter().for_each(|buffer| self.release(buffer));
    }
}
