//! Back from the device: snapshots of device memory, copied out and handed to a function of the user's.
//!
//! A snapshot is a copy on the device, on the learner's own stream, so the next kernel may overwrite the source. It is
//! copied out on a stream of the feed's, into page-locked memory, while the learner goes on. Two stages on the device:
//! at most one is being copied out and one waits; a newer snapshot takes the place of the one that waits.

use super::Desk;
use crate::cuda::device::{Device, DeviceMemory, Event, RawStream, Stream};
use crate::cuda::types::CudaError;
use crate::memory::Ring;
use crate::sync::{lock, panic_text};
use crossbeam_channel::{Receiver, Sender};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the user does with the bytes.
pub(crate) type Then = Box<dyn FnOnce(&[u8]) + Send>;

/// Stages and streams of one device's downloads.
pub(crate) struct Downloads {
    max_bytes: usize,
    stream: Stream,
    stages: [DeviceMemory; 2],
    /// Recorded behind the snapshot on the learner's stream, and behind the copy out on ours.
    snapped: Event,
    done: Event,
    /// Two slots of host memory, page-locked if the feed's ring is.
    host: Ring,
    state: Mutex<State>,
    /// Host slots that the function is through with.
    free_host: (Sender<usize>, Receiver<usize>),
    /// `None` ends the thread.
    finished: Sender<Option<Finished>>,
    /// The downloads whose function was called, and those that a newer one replaced.
    pub(crate) delivered: AtomicU64,
    pub(crate) replaced: AtomicU64,
}

#[derive(Default)]
struct State {
    /// The stage that is being copied out, to which host slot.
    out: Option<(usize, usize, Snapshot)>,
    /// The stage that waits.
    waiting: Option<(usize, Snapshot)>,
}

struct Snapshot {
    bytes: usize,
    then: Then,
}

/// Bytes in a host slot, on their way to the user's function.
pub(crate) struct Finished {
    host: usize,
    bytes: usize,
    then: Then,
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
        Ok(Downloads {
            max_bytes,
            stream: device.stream(false)?,
            stages: [device.alloc(max_bytes)?, device.alloc(max_bytes)?],
            snapped: device.event()?,
            done: device.event()?,
            host,
            state: Mutex::default(),
            free_host,
            finished,
            delivered: AtomicU64::new(0),
            replaced: AtomicU64::new(0),
        })
    }

    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Takes a snapshot on the learner's stream.
    ///
    /// # Safety
    /// `ptr` points to `bytes ≤ max_bytes` bytes on the device until `stream` has passed this call.
    pub(crate) unsafe fn snapshot(
        &self,
        desk: &Desk,
        stream: RawStream,
        ptr: u64,
        bytes: usize,
        then: Then,
    ) -> Result<(), CudaError> {
        let mut state = lock(&self.state);
        // The stage that nobody copies out: the one that waits (then it is replaced), or the other one.
        let busy = state.out.as_ref().map(|(stage, ..)| *stage);
        let stage = state.waiting.as_ref().map_or_else(|| usize::from(busy == Some(0)), |(stage, _)| *stage);
        // SAFETY: the caller's duty for the source. The stage is not being copied out: the feeding thread issues that
        // under this lock, and takes a stage out of `out` only when its event has completed.
        unsafe {
            desk.device.copy_within(self.stages[stage].address(), ptr, bytes, stream)?;
            desk.device.record(&self.snapped, stream)?;
        }
        let replaced = state.waiting.replace((stage, Snapshot { bytes, then }));
        drop(state);
        if replaced.is_some() {
            self.replaced.fetch_add(1, Ordering::Relaxed);
        }
        drop(replaced); // the user's function, dropped without the lock
        Ok(())
    }

    /// Ends the downloads' thread behind what it has.
    pub(crate) fn end(&self) {
        let _ = self.finished.send(None);
    }

    /// On the feeding thread: hands on what is finished, and issues what waits. True while something is under way.
    pub(crate) fn advance(&self, device: &Device) -> Result<bool, CudaError> {
        let mut state = lock(&self.state);
        if state.out.is_some() {
            if !device.query(&self.done)? {
                return Ok(true);
            }
            if let Some((_, host, Snapshot { bytes, then })) = state.out.take() {
                self.delivered.fetch_add(1, Ordering::Relaxed);
                let _ = self.finished.send(Some(Finished { host, bytes, then })); // its thread is gone only at the stop
            }
        }
        if state.waiting.is_none() {
            return Ok(false);
        }
        let Ok(host) = self.free_host.1.try_recv() else { return Ok(true) }; // the user's function is slow: wait for it
        let Some((stage, snapshot)) = state.waiting.take() else { return Ok(false) };
        let to = self.host.slot(host).as_ptr();
        // SAFETY: the host slot is free (nobody else has its number), the stage was filled before `snapped` was recorded
        // and is not written again while it is in `out`.
        unsafe {
            device.wait(self.stream.raw(), &self.snapped)?;
            device.copy_out(to, self.stages[stage].address(), snapshot.bytes, self.stream.raw())?;
            device.record(&self.done, self.stream.raw())?;
        }
        state.out = Some((stage, host, snapshot));
        Ok(true)
    }

    /// On the downloads' own thread: calls the user's function.
    pub(crate) fn deliver(&self, Finished { host, bytes, then }: Finished, on_panic: impl FnOnce(String)) {
        // SAFETY: the copy into this slot is over and no other is issued before its number is given back below.
        let bytes = unsafe { std::slice::from_raw_parts(self.host.slot(host).as_ptr().cast_const(), bytes) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| then(bytes))) {
            on_panic(panic_text(panic));
        }
        let _ = self.free_host.0.send(host);
    }
}
