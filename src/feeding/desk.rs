//! What the feeding thread of a device and its users share.

use super::batch::Buffer;
use super::download::Downloads;
use crate::batch::Batch;
use crate::batch::SharedBatch;
use crate::cuda::device::{Device, Event};
use crate::cuda::types::CudaError;
use crate::error::Closed;
use crate::gate::Gate;
use crate::intake::{IntakeGate, Lease};
use crate::metrics::DeviceMetrics;
use crate::sync::{Unpark, lock};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::thread::Thread;
use std::time::Instant;

/// A device batch whose copy was issued.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) buffer: Buffer,
    pub(crate) ready: Arc<Event>,
    pub(crate) rows: usize,
    pub(crate) sequence: u64,
    pub(crate) sealed: Instant,
}

/// Host memory that a queued copy still reads, and the event that says when it is over.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) source: Source,
    pub(crate) done: Arc<Event>,
}

/// Whatever keeps the slot from coming home. Dropped when the copy is over; quarantined when that is unknown.
#[derive(Debug)]
pub(crate) enum Source {
    Slot(Lease),
    Batch(Batch),
    Shared(SharedBatch),
}

impl Source {
    /// Keeps the slot mapped and registered for good: its copy may still run (invariant 4).
    pub(crate) fn quarantine(self) {
        match self {
            Source::Slot(lease) => lease.quarantine(),
            Source::Batch(batch) => batch.quarantine(),
            // The last owner would give it back: it must never be the last.
            Source::Shared(shared) => shared.quarantine(),
        }
    }
}

/// See the module's text.
pub(crate) struct Desk {
    pub(crate) device: Device,
    pub(crate) gate: Arc<IntakeGate>,
    /// Handed-over device batches.
    pub(crate) ready: Gate<Ready>,
    /// Device buffers.
    pub(crate) buffers: usize,
    /// Whether host memory is page-locked: else copies are staged by the driver, and the feeding thread pays.
    pub(crate) pinned: bool,
    pub(crate) held: AtomicUsize,
    pub(crate) downloads: Option<Downloads>,
    returned: Mutex<Vec<Buffer>>,
    inbox: Mutex<Vec<Flight>>,
    events: Mutex<Vec<Arc<Event>>>,
    feeder: OnceLock<Thread>,
    wanted: AtomicBool,
    pub(crate) copies: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) in_flight: AtomicUsize,
    on_fault: Box<dyn Fn(String) + Send + Sync>,
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk")
            .field("device", &self.device.ordinal())
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}

impl Desk {
    pub(crate) fn new(
        device: Device,
        gate: Arc<IntakeGate>,
        buffers: usize,
        pinned: bool,
        downloads: Option<Downloads>,
        on_fault: Box<dyn Fn(String) + Send + Sync>,
    ) -> Desk {
        Desk {
            device,
            gate,
            ready: Gate::new(),
            buffers,
            pinned,
            held: AtomicUsize::new(0),
            downloads,
            returned: Mutex::default(),
            inbox: Mutex::default(),
            events: Mutex::default(),
            feeder: OnceLock::new(),
            wanted: AtomicBool::new(false),
            copies: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            on_fault,
        }
    }

    /// The calling thread is the feeding thread.
    pub(crate) fn attend(&self) {
        let thread = std::thread::current();
        self.gate.wake_at_close(Waker::from(Arc::new(Unpark(thread.clone()))));
        let _ = self.feeder.set(thread);
    }

    /// Wakes the feeding thread if it is parked.
    pub(crate) fn call(&self) {
        if let Some(feeder) = self.feeder.get() {
            feeder.unpark();
        }
    }

    /// A learner wants batches of this device; false if one did already.
    pub(crate) fn want(&self) -> bool {
        let first = !self.wanted.swap(true, Ordering::AcqRel);
        self.call();
        first
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// The learner's release of this buffer is recorded. No system call: the feeding thread looks on its own.
    pub(crate) fn give_back(&self, buffer: Buffer) {
        lock(&self.returned).push(buffer);
    }

    pub(crate) fn take_returned(&self) -> Vec<Buffer> {
        std::mem::take(&mut *lock(&self.returned))
    }

    /// A copy that a user's thread issued: the feeding thread watches for its end.
    pub(crate) fn watch(&self, flight: Flight) {
        lock(&self.inbox).push(flight);
        self.call();
    }

    pub(crate) fn take_inbox(&self) -> Vec<Flight> {
        std::mem::take(&mut *lock(&self.inbox))
    }

    /// An event that nobody waits on or has still to record.
    pub(crate) fn event(&self) -> Result<Arc<Event>, CudaError> {
        let mut events = lock(&self.events);
        if let Some(place) = events.iter().position(|event| Arc::strong_count(event) == 1) {
            return Ok(events[place].clone());
        }
        let event = Arc::new(self.device.event()?);
        events.push(event.clone());
        Ok(event)
    }

    /// A CUDA call failed: the feed stops, naming it.
    pub(crate) fn fail(&self, error: &CudaError) {
        self.fail_with(error.to_string());
    }

    pub(crate) fn fail_with(&self, text: String) {
        (self.on_fault)(text);
    }

    /// Why the feeding thread has ended or will, if so: a natural end of the source is no reason.
    pub(crate) fn check_open(&self) -> Result<(), Closed> {
        match self.gate.closed() {
            Some(Closed::UsedAfterFork) => Err(Closed::UsedAfterFork),
            _ if !self.gate.is_over() => Ok(()),
            Some(closed @ Closed::Fault(_)) => Err(closed),
            _ => Err(Closed::Stopped),
        }
    }

    pub(crate) fn metrics(&self) -> DeviceMetrics {
        DeviceMetrics {
            device: self.device.ordinal(),
            batches: self.copies.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            batches_waiting: self.ready.len(),
            batches_held: self.held.load(Ordering::Relaxed),
            copies_in_flight: self.in_flight.load(Ordering::Relaxed),
            pageable: !self.pinned,
        }
    }
}
