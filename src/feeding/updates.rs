//! Priorities on their way from a device to the store.
//!
//! Owns a few page-locked places, an event for each, and what is under way. The copy out is queued on the learner's own
//! stream: behind the kernels that compute the priorities, and before those that overwrite them, so the device needs no
//! room of ours. On the feeding stream it would hold up the copies of batches until the learner has computed. The feeding thread
//! looks for the ends, in the order of the stream, and tells the store, with the keys as they are by then. What it does not
//! do: wait, or say what a priority is worth. Calls to CUDA, each of which may hang, are made with the lock held: so whoever
//! else wants it waits no longer than the feed is open, and the feeding thread not at all.
//!
//! How many places: `buffers + prefetch + 1`. A batch can be taken when its copy was issued, so the batch `buffers` before it
//! has left its slot of the ring, into a device buffer that the batch `prefetch` before that was released from on the
//! learner's stream. Updates in front of that release are over, and were looked for before the copy was issued.

use super::Desk;
use super::desk::lock_unless_stuck;
use crate::cuda::device::{Device, Event, RawStream};
use crate::cuda::types::{CudaError, code};
use crate::error::{Closed, Error, ErrorKind};
use crate::keys::{Keys, UpdateError};
use crate::learner::DeviceUseError;
use crate::memory::Ring;
use crate::metrics::DeviceMetrics;
use crate::sync::try_lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Why no priorities were taken from a device. None was updated.
///
/// ```
/// # use pinring::*;
/// # fn look(error: DeviceUpdateError) {
/// match error {
///     DeviceUpdateError::Full { pending, .. } => println!("{pending} updates are still on their way: skip this one"),
///     error => eprintln!("{error}"),
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceUpdateError {
    /// The keys do not fit.
    #[error(transparent)]
    Update(#[from] UpdateError),
    /// Every place is in use: the learner's stream has not come to the updates before this one.
    #[error(
        "{pending} of {places} places for priorities are in use by updates that the learner's stream has not come to: give \
         one update a batch and drop batches in order, skip this one, or give more `.buffers` or `.prefetch`"
    )]
    Full {
        /// Updates on their way.
        pending: usize,
        /// Places of this device.
        places: usize,
    },
    /// The feed's host memory is not page-locked, so a copy to it would hold the learner's thread until its stream is there.
    #[error(
        "priorities come back through page-locked memory, and this feed has none: give `.pinning(Pinning::Required)`, or copy \
         them to the host and use `update_priorities_from_host`"
    )]
    NotPinned,
    /// The stream or the device said no, or the feed is over.
    #[error(transparent)]
    Device(#[from] DeviceUseError),
}

impl From<DeviceUpdateError> for Error {
    fn from(error: DeviceUpdateError) -> Error {
        let kind = match error {
            DeviceUpdateError::Update(error) => return error.into(),
            DeviceUpdateError::Device(error) => return error.into(),
            DeviceUpdateError::Full { .. } => ErrorKind::Full,
            DeviceUpdateError::NotPinned => ErrorKind::Misuse,
        };
        Error::from_source(kind, error)
    }
}

/// Why an update was not queued.
pub(super) enum NotQueued {
    Full {
        pending: usize,
        places: usize,
    },
    /// Nobody looks for its end any more.
    Over(Closed),
    /// The device does not know the address: the caller's mistake, and nothing was queued.
    Refused(CudaError),
    /// What became of the copy is not known.
    Failed(CudaError),
}

/// How far the feeding thread has looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advanced {
    /// Nothing is on its way.
    All,
    /// Something is.
    UpTo,
    /// The learner is queueing an update.
    NotLooked,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Updates {
    places: usize,
    state: Mutex<State>,
    /// Nothing is queued any more. Set without the lock, before the feeding thread looks for what is on its way.
    closed: AtomicBool,
    /// How many are pending, for who counts.
    waiting: AtomicUsize,
    applied: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// Freed at the end of feeding, on the feeding thread.
    host: Option<Ring>,
    /// One a place, recorded behind its copy.
    events: Vec<Event>,
    free: Vec<usize>,
    /// In the order of the learner's stream.
    pending: VecDeque<Pending>,
    /// Places that are kept for good, since a copy's end cannot be learned (invariant 4).
    kept: usize,
}

#[derive(Debug)]
struct Pending {
    place: usize,
    keys: Keys,
}

impl Updates {
    /// Every slot of `host` is a place for the priorities of one batch.
    pub(crate) fn new(device: &Device, host: Ring) -> Result<Updates, CudaError> {
        let places = host.slots();
        let events = (0..places).map(|_| device.event()).collect::<Result<_, _>>()?;
        let state = State {
            host: Some(host),
            events,
            free: (0..places).rev().collect(),
            pending: VecDeque::with_capacity(places),
            kept: 0,
        };
        let [applied, refused, lost] = [(); 3].map(|()| AtomicU64::new(0));
        let (state, closed, waiting) = (Mutex::new(state), AtomicBool::new(false), AtomicUsize::new(0));
        Ok(Updates { places, state, closed, waiting, applied, refused, lost })
    }

    /// What it counts.
    pub(super) fn metrics(&self) -> DeviceMetrics {
        DeviceMetrics {
            updates: self.applied.load(Ordering::Relaxed),
            updates_refused: self.refused.load(Ordering::Relaxed),
            updates_lost: self.lost.load(Ordering::Relaxed),
            updates_waiting: self.waiting.load(Ordering::Relaxed),
            ..DeviceMetrics::default()
        }
    }

    /// Queues the copy of as many priorities as there are keys, behind what the stream was given.
    ///
    /// # Safety
    /// `ptr` points to that many `f32` on the device until `stream`, which lives, has passed this call. There are no more
    /// keys than a batch has rows. All calls name the same stream.
    pub(super) unsafe fn queue(&self, desk: &Desk, stream: RawStream, keys: &Keys, ptr: u64) -> Result<(), NotQueued> {
        let mut guard = desk.lock_open(&self.state).map_err(NotQueued::Over)?;
        let state = &mut *guard;
        let Some(host) = state.host.as_ref().filter(|_| !self.closed.load(Ordering::Relaxed)) else {
            drop(guard);
            return Err(NotQueued::Over(desk.check_open().err().unwrap_or(Closed::Stopped))); // just about to close
        };
        let Some(place) = state.free.pop() else {
            return Err(NotQueued::Full { pending: state.pending.len(), places: self.places });
        };
        let (to, bytes) = (host.slot(place).as_ptr(), keys.len() * size_of::<f32>());
        // SAFETY: the caller's duty for the source and the stream. The place is free: nobody else has its number, and the
        // copy before into it is over.
        let copied = unsafe { desk.device.copy_out(to, ptr, bytes, stream) };
        if let Err(error) = copied.as_ref()
            && error.code() == code::INVALID_VALUE
        {
            state.free.push(place);
            return Err(NotQueued::Refused(error.clone()));
        }
        // SAFETY: the caller's duty for the stream.
        let queued = copied.and_then(|()| unsafe { desk.device.record(&state.events[place], stream) });
        if let Err(error) = queued {
            state.kept += 1; // an event that was not recorded reads as complete
            drop(guard);
            desk.count_quarantined(1, bytes);
            return Err(NotQueued::Failed(error));
        }
        state.pending.push_back(Pending { place, keys: keys.clone() });
        self.waiting.store(state.pending.len(), Ordering::Relaxed);
        Ok(())
    }

    /// On the feeding thread: tells the store of what has come back. `priorities` is a list to use again.
    pub(super) fn advance(&self, desk: &Desk, priorities: &mut Vec<f32>) -> Result<Advanced, CudaError> {
        loop {
            let Some(mut state) = try_lock(&self.state) else { return Ok(Advanced::NotLooked) };
            let (Some(host), Some(Pending { place, keys })) = (&state.host, state.pending.front()) else {
                return Ok(Advanced::All);
            };
            if !desk.device.query(&state.events[*place])? {
                return Ok(Advanced::UpTo);
            }
            priorities.clear();
            // SAFETY: the copy of so many values into this place is over, and no other is queued before its number is given
            // back below; the mapping is the ring's, and any bits are an `f32`.
            priorities.extend_from_slice(unsafe {
                std::slice::from_raw_parts(host.slot(*place).as_ptr().cast_const().cast(), keys.len())
            });
            if let Some(Pending { place, keys }) = state.pending.pop_front() {
                state.free.push(place);
                self.waiting.store(state.pending.len(), Ordering::Relaxed);
                drop(state);
                self.apply(desk, &keys, priorities); // without the lock: it may have to wait for a selection
            }
        }
    }

    fn apply(&self, desk: &Desk, keys: &Keys, priorities: &[f32]) {
        match keys.update(&desk.gate, priorities) {
            Ok(_) => {
                self.applied.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
                // A network that diverged gives such arrays without end.
                if refused.is_power_of_two() {
                    let device = desk.device.ordinal();
                    tracing::warn!(target: "pinring", device, %error, refused, "priorities from a device were refused");
                }
            }
        }
    }

    /// Nothing is queued any more; what is on its way is still waited for.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Behind the end of feeding: frees the places, unless a copy may still write to one, or freeing would wait for what did
    /// not end. Left to the desk's drop where a learner is stuck in an update: one that is only in the midst of it is waited
    /// for, so that what is kept is counted while somebody can read it.
    pub(crate) fn free(&self, desk: &Desk) {
        self.close();
        let Some(mut state) = lock_unless_stuck(&self.state) else { return };
        let (host, pending) = (state.host.take(), std::mem::take(&mut state.pending));
        let (kept, given_up) = (state.kept, desk.is_given_up());
        self.waiting.store(0, Ordering::Relaxed);
        drop(state);
        self.lost.fetch_add(pending.len() as u64, Ordering::Relaxed);
        let more = if given_up { self.places - kept } else { pending.len() };
        let Some(host) = host.filter(|_| kept + more > 0) else { return };
        if more > 0 {
            desk.count_quarantined(more, host.bytes() / self.places);
        }
        std::mem::forget(host); // invariant 4
    }
}
