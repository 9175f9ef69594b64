//! Back from the device: snapshots of device memory, copied out and handed to a function of the user's.
//!
//! A snapshot is a copy on the device, on the learner's own stream, so the next kernel may overwrite the source. It is
//! copied out on a stream of the feed's, into page-locked memory, while the learner goes on. Two stages on the device:
//! at most one is being copied out and one waits; a newer snapshot takes the place of the one that waits.

use super::Desk;
use super::desk::lock_unless_stuck;
use crate::cuda::device::{Device, DeviceMemory, Event, RawStream, Stream};
use crate::cuda::types::CudaError;
use crate::error::Closed;
use crate::learner::DeviceUseError;
use crate::memory::Ring;
use crate::sync::{panic_text, try_lock};
use crossbeam_channel::{Receiver, Sender};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What the user does with the bytes.
pub(crate) type Then = Box<dyn FnOnce(&[u8]) + Send>;

/// Stages and streams of one device's downloads.
pub(crate) struct Downloads {
    max_bytes: usize,
    stream: Stream,
    /// Recorded behind the snapshot on the learner's stream, and behind the copy out on ours.
    snapped: Event,
    done: Event,
    state: Mutex<State>,
    /// Host slots that the function is through with.
    free_host: (Sender<usize>, Receiver<usize>),
    /// `None` ends the thread.
    finished: Sender<Option<Finished>>,
    /// The downloads whose function was called, and those that a newer one replaced.
    delivered: AtomicU64,
    replaced: AtomicU64,
}

struct State {
    /// Freed at the end of feeding, on the feeding thread.
    memory: Option<Memory>,
    /// The snapshot that is being copied out.
    out: Option<Out>,
    /// The stage that waits.
    waiting: Option<(usize, Snapshot)>,
    /// Whether some snapshot was ever taken, so that `snapped` stands for the last use of the stages.
    snapped: bool,
    /// A call failed between a copy and the record behind it: `snapped` and `done` say nothing any more, though they may
    /// read as complete.
    lost: Option<CudaError>,
}

struct Memory {
    stages: [DeviceMemory; 2],
    /// Two slots of host memory, page-locked if the feed's ring is.
    host: Arc<Ring>,
}

struct Out {
    stage: usize,
    host: usize,
    snapshot: Snapshot,
}

struct Snapshot {
    bytes: usize,
    then: Then,
}

/// Bytes in a host slot, on their way to the user's function.
pub(crate) struct Finished {
    ring: Arc<Ring>,
    host: usize,
    snapshot: Snapshot,
}

impl fmt::Debug for Downloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Downloads").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

impl Downloads {
    /// `host` is a ring of two slots of at least `max_bytes`. What is finished goes to `finished`.
    pub(crate) fn new(
        device: &Device,
        host: Ring,
        max_bytes: usize,
        finished: Sender<Option<Finished>>,
    ) -> Result<Downloads, CudaError> {
        let free_host = crossbeam_channel::bounded(host.slots());
        for slot in 0..host.slots() {
            let _ = free_host.0.send(slot);
        }
        let stages = [device.alloc(max_bytes)?, device.alloc(max_bytes)?];
        let memory = Some(Memory { stages, host: Arc::new(host) });
        Ok(Downloads {
            max_bytes,
            stream: device.stream(false)?,
            snapped: device.event()?,
            done: device.event()?,
            state: Mutex::new(State { memory, out: None, waiting: None, snapped: false, lost: None }),
            free_host,
            finished,
            delivered: AtomicU64::new(0),
            replaced: AtomicU64::new(0),
        })
    }

    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Downloads whose function was called.
    pub(crate) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    /// Downloads that a newer one replaced.
    pub(crate) fn replaced(&self) -> u64 {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Takes a snapshot on the learner's stream.
    ///
    /// # Safety
    /// `ptr` points to `bytes ≤ max_bytes` bytes on the device until `stream` has passed this call. All calls name the
    /// same stream.
    pub(crate) unsafe fn snapshot(
        &self,
        desk: &Desk,
        stream: RawStream,
        ptr: u64,
        bytes: usize,
        then: Then,
    ) -> Result<(), DeviceUseError> {
        let mut state = desk.lock_open(&self.state)?;
        let Some(memory) = state.memory.as_ref().filter(|_| state.lost.is_none()) else {
            desk.check_open()?;
            return Err(state.lost.clone().map_or(Closed::Stopped.into(), DeviceUseError::Cuda)); // just about to close
        };
        // The stage that nobody copies out: the one that waits (then it is replaced), or the other one.
        let free = || usize::from(state.out.as_ref().is_some_and(|out| out.stage == 0));
        let stage = state.waiting.as_ref().map_or_else(free, |(stage, _)| *stage);
        // SAFETY: the caller's duty for the source. The stage is not being copied out: the feeding thread issues that
        // under this lock, and takes a stage out of `out` only when its event has completed.
        unsafe { desk.device.copy_within(memory.stages[stage].address(), ptr, bytes, stream)? };
        state.snapped = true;
        // SAFETY: the caller's duty for the stream.
        let recorded = unsafe { desk.device.record(&self.snapped, stream) };
        // Whatever was in this stage is overwritten.
        let replaced = match &recorded {
            Ok(()) => state.waiting.replace((stage, Snapshot { bytes, then })),
            Err(error) => {
                state.lost = Some(error.clone());
                state.waiting.take()
            }
        };
        drop(state);
        if replaced.is_some() {
            self.replaced.fetch_add(1, Ordering::Relaxed);
        }
        drop(replaced); // the user's function, dropped without the lock
        recorded.map_err(|error| {
            desk.fail(&error);
            error.into()
        })
    }

    /// Ends the downloads' thread behind what it has.
    pub(crate) fn end(&self) {
        let _ = self.finished.send(None);
    }

    /// Behind the end of the downloads' thread: frees the memory, unless something on the device may still use it, or
    /// freeing would wait for what did not end. Left to the desk's drop where a learner is stuck in a snapshot: one that is
    /// only in the midst of it is waited for, so that what is kept is counted while somebody can read it.
    pub(crate) fn free(&self, desk: &Desk) {
        let Some(mut state) = lock_unless_stuck(&self.state) else { return };
        let (memory, out, waiting) = (state.memory.take(), state.out.take(), state.waiting.take());
        let snapped = || !state.snapped || desk.device.query(&self.snapped) == Ok(true);
        let idle = !desk.is_given_up() && state.lost.is_none() && out.is_none() && snapped();
        drop(state);
        drop((out, waiting)); // the user's functions, dropped without the lock
        if !idle && let Some(memory) = memory {
            desk.count_quarantined(memory.stages.len(), self.max_bytes);
            std::mem::forget(memory); // invariant 4
        }
    }

    /// On the feeding thread: hands on what is finished, and issues what waits. True while something is under way.
    pub(crate) fn advance(&self, device: &Device) -> Result<bool, CudaError> {
        // Whoever has it takes a snapshot: this thread has other things to do, also where that never ends.
        let Some(mut guard) = try_lock(&self.state) else { return Ok(true) };
        let state = &mut *guard;
        if state.lost.is_some() {
            return Ok(false);
        }
        let Some(memory) = &state.memory else { return Ok(false) };
        if state.out.is_some() {
            if !device.query(&self.done)? {
                return Ok(true);
            }
            if let Some(Out { host, snapshot, .. }) = state.out.take() {
                let ring = memory.host.clone();
                let _ = self.finished.send(Some(Finished { ring, host, snapshot })); // the thread ends after this one
            }
        }
        if state.waiting.is_none() {
            return Ok(false);
        }
        // Into ordinary memory the call below returns when the copy is over, and this thread has other things to do
        // than to wait for the learner's stream.
        if !memory.host.is_pinned() && !device.query(&self.snapped)? {
            return Ok(true);
        }
        let Ok(host) = self.free_host.1.try_recv() else { return Ok(true) }; // the user's function is slow: wait for it
        let Some((stage, snapshot)) = state.waiting.take() else { return Ok(false) };
        let (to, from, bytes) = (memory.host.slot(host).as_ptr(), memory.stages[stage].address(), snapshot.bytes);
        state.out = Some(Out { stage, host, snapshot });
        let stream = self.stream.raw();
        // SAFETY: the host slot is free (nobody else has its number), the stage was filled before `snapped` was recorded
        // and is not written again while it is in `out`.
        let issued = unsafe {
            let waited = device.wait(stream, &self.snapped);
            waited
                .and_then(|()| device.copy_out(to, from, bytes, stream))
                .and_then(|()| device.record(&self.done, stream))
        };
        state.lost = issued.clone().err();
        issued.map(|()| true)
    }

    /// On the downloads' own thread: calls the user's function.
    pub(crate) fn deliver(&self, Finished { ring, host, snapshot }: Finished, on_panic: impl FnOnce(String)) {
        let Snapshot { bytes, then } = snapshot;
        // SAFETY: the copy into this slot is over and no other is issued before its number is given back below.
        let bytes = unsafe { std::slice::from_raw_parts(ring.slot(host).as_ptr().cast_const(), bytes) };
        self.delivered.fetch_add(1, Ordering::Relaxed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| then(bytes))) {
            on_panic(panic_text(panic));
        }
        let _ = self.free_host.0.send(host);
    }
}
