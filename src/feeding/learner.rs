//! The learner's end on a device.

use super::Desk;
use super::batch::{Buffer, Counts, DeviceBatch};
use super::desk::Ready;
use super::updates::{DeviceUpdateError, NotQueued};
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

    /// Tells the sampler what the rows of a batch are worth from now on, by `n` priorities, one `f32` a key, at the device
    /// address `ptr`. Returns at once: behind what the learner's stream has been given so far they are copied to a
    /// page-locked place of the feed's, so the next kernel may overwrite them. The feeding thread looks for its end and tells
    /// the store, as [`Learner::update_priorities`](crate::Learner::update_priorities) does: what was overwritten by then is
    /// passed over and counted, and where one value is no priority (negative, NaN or infinite) the whole array is refused.
    /// Nobody is there to be told of that: `updates_refused` of [`DeviceMetrics`](crate::DeviceMetrics) counts it, and the log names
    /// the first such value.
    ///
    /// There are `buffers + prefetch + 1` places: enough for one update a batch, however far this thread is ahead of its
    /// stream, if batches are dropped in order. A sampler without priorities is told nothing, and nothing is copied for it.
    ///
    /// ```no_run
    /// # use pinring::*;
    /// # fn train(learner: &DeviceLearner, errors: u64, train: impl Fn(&DeviceBatch)) -> Result<()> {
    /// let batch = learner.next_batch()?;
    /// train(&batch); // kernels on the learner's stream, which leave |TD errors| at `errors`
    /// let (keys, n) = (batch.keys(), batch.rows());
    /// drop(batch);
    /// // SAFETY: `errors` points to that many `f32` on the learner's device, and stays allocated.
    /// unsafe { learner.update_priorities(&keys, errors, n)? };
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`DeviceUpdateError`]: keys that do not fit, every place in use, a feed that is not page-locked, a stream that is
    /// capturing a graph (checked before anything is queued), or a CUDA call that failed. Then nothing is updated.
    ///
    /// # Safety
    /// `ptr` points to `n` values of `f32` in memory of the learner's device that stays allocated until the learner's stream
    /// has passed this call.
    pub unsafe fn update_priorities(&self, keys: &Keys, ptr: u64, n: usize) -> Result<(), DeviceUpdateError> {
        let side = &self.side;
        let gate = &side.desk.gate;
        side.check_thread()?;
        side.desk.check_open().map_err(DeviceUseError::from)?;
        keys.check(gate, n)?;
        let wanted = gate.has_priorities();
        let Some(updates) = side.desk.updates.as_ref().filter(|_| wanted && n > 0) else {
            if wanted && n > 0 {
                return Err(DeviceUpdateError::NotPinned);
            }
            return Ok(keys.update(gate, &vec![0.0; n]).map(drop)?); // whatever they are, only stale keys are counted
        };
        side.check_capture()?;
        // SAFETY: the caller's duty for `ptr` and `n`; a feed's keys are of one batch at the most, and the learner's stream
        // lives.
        match unsafe { updates.queue(&side.desk, side.stream, keys, ptr) } {
            Ok(()) => side.desk.call(),
            Err(NotQueued::Full { pending, places }) => return Err(DeviceUpdateError::Full { pending, places }),
            Err(NotQueued::Over(closed)) => return Err(DeviceUseError::Closed(closed).into()),
            Err(NotQueued::Refused(error)) => return Err(DeviceUseError::Cuda(error).into()),
            Err(NotQueued::Failed(error)) => return Err(side.fail(error).into()),
        }
        Ok(())
    }

    /// As [`Learner::update_priorities`](crate::Learner::update_priorities), with priorities that are on the host.
    ///
    /// # Errors
    /// As there.
    pub fn update_priorities_from_host(&self, keys: &Keys, priorities: &[f32]) -> Result<Updated, UpdateError> {
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
        let taken = loop {
            let Some(taken) = self.await_batch(patience)? else { return Ok(None) };
            // By rounds each batch is somebody's.
            let store = desk.gate.store.as_ref().filter(|_| desk.seat.is_none());
            if store.is_none_or(|store| store.counts(taken.clears, taken.rows())) {
                break taken;
            }
            desk.give_back(taken.buffer); // its store was cleared or loaded since; its last use is the copy itself
        };
        let round = desk.seat.as_ref().map(|seat| (seat, seat.round(taken.sequence)));
        if let Some((seat, round)) = round
            && let Err(reason) = seat.begin(round)
        {
            desk.take_back(taken);
            return Err(reason.into());
        }
        let round = round.map(|(_, round)| round);
        let rows = taken.rows();
        let Ready { buffer, ready, sequence, sealed, .. } = taken;
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
