//! What the feeding thread of a device and its users share.

use super::batch::Buffer;
use super::download::Downloads;
use super::rounds::Seat;
use super::updates::Updates;
use crate::batch::SharedBatch;
use crate::cuda::device::{Device, Event};
use crate::cuda::types::CudaError;
use crate::error::Closed;
use crate::gate::Gate;
use crate::intake::{IntakeGate, Lease};
use crate::metrics::DeviceMetrics;
use crate::store::OpenGather;
use crate::sync::{Spin, lock, try_lock};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How often it is looked whether another thread's calls are over.
const BUSY: Duration = Duration::from_micros(50);
/// A call to CUDA that takes longer, of those that are short, does not end.
const STUCK: Duration = Duration::from_millis(100);

/// A lock that is held during short calls to CUDA, unless one of them does not end.
pub(super) fn lock_unless_stuck<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let stuck = Instant::now() + STUCK;
    loop {
        match try_lock(mutex) {
            Some(state) => return Some(state),
            None if Instant::now() >= stuck => return None,
            None => std::thread::sleep(BUSY),
        }
    }
}

/// A device batch whose copy was issued.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) buffer: Buffer,
    /// Recorded behind the copy. The buffer has it too, until it is filled again.
    pub(crate) ready: Arc<Event>,
    pub(crate) sequence: u64,
    pub(crate) sealed: Instant,
    /// As of the sealed batch.
    pub(crate) clears: u64,
}

impl Ready {
    pub(crate) fn rows(&self) -> usize {
        self.buffer.records.len()
    }
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
    /// What a kernel reads: the slot, and records of the store.
    Gather(Lease, OpenGather),
    Shared(SharedBatch),
}

impl Source {
    /// Keeps the slot mapped and registered for good: its copy may still run (invariant 4).
    pub(crate) fn quarantine(self) {
        match self {
            Source::Slot(lease) => lease.quarantine(),
            Source::Gather(lease, gather) => {
                lease.quarantine();
                gather.quarantine();
            }
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
    /// Batches that the learner ever took.
    pub(crate) batches_taken: AtomicU64,
    pub(crate) downloads: Option<Downloads>,
    /// Where priorities come back, of a page-locked feed whose sampler has some.
    pub(crate) updates: Option<Updates>,
    /// Where batches are dealt by rounds.
    pub(crate) seat: Option<Seat>,
    returned: Mutex<Vec<Buffer>>,
    inbox: Mutex<Vec<Flight>>,
    events: Mutex<Vec<Arc<Event>>>,
    feeder: OnceLock<Thread>,
    /// A learner was made, and one is alive.
    taken: AtomicBool,
    wanted: AtomicBool,
    /// It is not any more.
    learner_gone: AtomicBool,
    /// Something on the device did not end while it was waited for, or nobody knows: nobody waits for it any more.
    stuck: AtomicBool,
    quarantined_buffers: AtomicU64,
    pub(crate) copies: AtomicU64,
    pub(crate) gathers: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) in_flight: AtomicUsize,
    on_fault: Box<dyn Fn(String) + Send + Sync>,
    #[cfg(test)]
    crash: Mutex<Option<String>>,
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
        (downloads, updates): (Option<Downloads>, Option<Updates>),
        seat: Option<Seat>,
        on_fault: Box<dyn Fn(String) + Send + Sync>,
    ) -> Desk {
        Desk {
            device,
            gate,
            ready: Gate::new(),
            buffers,
            pinned,
            held: AtomicUsize::new(0),
            batches_taken: AtomicU64::new(0),
            downloads,
            updates,
            seat,
            returned: Mutex::default(),
            inbox: Mutex::default(),
            events: Mutex::default(),
            feeder: OnceLock::new(),
            taken: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            learner_gone: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            quarantined_buffers: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            gathers: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            on_fault,
            #[cfg(test)]
            crash: Mutex::default(),
        }
    }

    /// The calling thread is the feeding thread.
    pub(crate) fn attend(self: &Arc<Self>) {
        let _ = self.feeder.set(std::thread::current());
        self.seat.iter().for_each(|seat| seat.take(self));
        self.gate.wake_at_close(Waker::from(Arc::new(AtClose(Arc::downgrade(self)))));
    }

    /// Wakes the feeding thread if it is parked.
    pub(crate) fn call(&self) {
        if let Some(feeder) = self.feeder.get() {
            feeder.unpark();
        }
    }

    /// A learner wants batches of this device; false if one did already.
    pub(crate) fn want(&self) -> bool {
        let first = !self.taken.swap(true, Ordering::Relaxed);
        if first {
            self.wanted.store(true, Ordering::Release); // SYNC: pairs with the Acquire in `is_wanted`
            self.call();
        }
        first
    }

    /// The learner is gone: other learners get the batches that were not copied to this device yet. By rounds there are no
    /// further ones.
    pub(crate) fn learner_gone(&self) {
        self.learner_gone.store(true, Ordering::Release); // SYNC: pairs with the Acquire in `is_learner_gone`
        self.wanted.store(false, Ordering::Release); // SYNC: pairs with the Acquire in `is_wanted`
        if let Some(seat) = &self.seat {
            seat.close(Closed::LearnerGone);
            self.gate.close(Closed::LearnerGone);
        }
        self.withdraw(Closed::LearnerGone);
        self.gate.learner_gone();
        self.call();
    }

    /// Nobody takes a device batch any more, and whoever waits for one hears why. On any thread: the feeding thread may
    /// be stuck in a call.
    fn withdraw(&self, reason: Closed) {
        let (untaken, wakes) = self.ready.close(reason);
        untaken.into_iter().for_each(|ready| self.take_back(ready));
        self.ready.wake(wakes); // last: a waker may panic, or never return
    }

    /// Hands a copied batch over. Given back if nobody takes any more.
    pub(crate) fn put(&self, ready: Ready) -> Result<(), Ready> {
        let mut ready = Some(ready);
        match self.ready.put(|_| ready.take().expect("made once")) {
            Some(wakes) => self.ready.wake(wakes),
            None => return ready.map_or(Ok(()), Err),
        }
        Ok(())
    }

    /// A copied batch that no learner gets: its rows do not count for the pace.
    pub(crate) fn take_back(&self, ready: Ready) {
        self.gate.count_untaken(ready.rows() as u64);
        self.gate.store.iter().for_each(|store| store.give_back(ready.rows()));
        self.give_back(ready.buffer);
    }

    /// Whether this device may take the batch of that number.
    pub(crate) fn is_mine(&self, sequence: u64) -> bool {
        self.seat.as_ref().is_none_or(|seat| seat.is_mine(sequence))
    }

    pub(crate) fn is_learner_gone(&self) -> bool {
        self.learner_gone.load(Ordering::Acquire)
    }

    /// Whose turn a batch for this device has.
    pub(crate) fn turn(&self) -> usize {
        self.seat.as_ref().map_or(0, Seat::index)
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// The learner's release of this buffer is recorded. No system call: the feeding thread looks on its own.
    pub(crate) fn give_back(&self, buffer: Buffer) {
        lock(&self.returned).push(buffer);
    }

    /// Keeps a buffer out of use for good, and its memory allocated: what may still use it is not known (invariant 4).
    pub(crate) fn quarantine(&self, buffer: Buffer) {
        self.count_quarantined(1, buffer.memory.bytes());
        std::mem::forget(buffer);
    }

    pub(crate) fn count_quarantined(&self, buffers: usize, bytes: usize) {
        let device = self.device.ordinal();
        self.quarantined_buffers.fetch_add(buffers as u64, Ordering::Relaxed);
        tracing::error!(
            target: "pinring", device, buffers, bytes,
            "device buffers are quarantined: the end of their use is unknown"
        );
    }

    /// Nobody waits for this device any more, at whatever end.
    pub(crate) fn give_up(&self) {
        self.stuck.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Frees a buffer that nobody will fill again. Freeing waits for all work of the device, the learner's kernels too:
    /// so not where waiting was in vain.
    pub(crate) fn discard(&self, buffer: Buffer) {
        if self.is_given_up() {
            self.quarantine(buffer);
        }
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
        let idle = || lock(&self.events).iter().find(|event| Arc::strong_count(event) == 1).cloned();
        if let Some(event) = idle() {
            return Ok(event);
        }
        let event = Arc::new(self.device.event()?); // without the lock: should it hang, nobody else waits for that
        lock(&self.events).push(event.clone());
        Ok(event)
    }

    /// A CUDA call failed: the feed stops, naming it.
    pub(crate) fn fail(&self, error: &CudaError) {
        self.fail_with(error.to_string());
    }

    pub(crate) fn fail_with(&self, text: String) {
        (self.on_fault)(text);
    }

    /// Has the feeding thread panic with this text, which is how tests kill it.
    #[cfg(test)]
    pub(crate) fn crash(&self, text: &str) {
        *lock(&self.crash) = Some(text.to_owned());
        self.call();
    }

    #[cfg(test)]
    pub(crate) fn crash_if_told(&self) {
        let told = lock(&self.crash).take(); // not held while it panics
        if let Some(text) = told {
            panic!("{text}");
        }
    }

    /// Whether this process is the one that attached the device.
    pub(crate) fn check_process(&self) -> Result<(), Closed> {
        if self.gate.is_inherited() { Err(Closed::UsedAfterFork) } else { Ok(()) }
    }

    /// Why the feeding thread has ended or will, if so: a natural end of the source is no reason.
    pub(crate) fn check_open(&self) -> Result<(), Closed> {
        self.check_process()?;
        self.gate.over().map_or(Ok(()), |reason| Err(reason.clone()))
    }

    /// A lock that is held during short calls to CUDA. Who waits for one that never returns hears when the feed is over.
    pub(super) fn lock_open<'m, T>(&self, mutex: &'m Mutex<T>) -> Result<MutexGuard<'m, T>, Closed> {
        let mut spin = Spin::default();
        loop {
            let mut free = None;
            spin.until(|| {
                free = try_lock(mutex);
                free.is_some()
            });
            match free {
                Some(state) => return Ok(state),
                None => self.check_open()?,
            }
            std::thread::sleep(BUSY);
        }
    }

    pub(crate) fn metrics(&self) -> DeviceMetrics {
        DeviceMetrics {
            device: self.device.ordinal(),
            batches: self.copies.load(Ordering::Relaxed),
            gathered: self.gathers.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            batches_taken: self.batches_taken.load(Ordering::Relaxed),
            batches_waiting: self.ready.len(),
            batches_held: self.held.load(Ordering::Relaxed),
            copies_in_flight: self.in_flight.load(Ordering::Relaxed),
            pageable: !self.pinned,
            downloads: self.downloads.as_ref().map_or(0, Downloads::delivered),
            downloads_replaced: self.downloads.as_ref().map_or(0, Downloads::replaced),
            quarantined_buffers: self.quarantined_buffers.load(Ordering::Relaxed),
            ..self.updates.as_ref().map(Updates::metrics).unwrap_or_default()
        }
    }
}

/// What the last owner finds behind the feeding thread's end: copies that users issued too late for it, and buffers of
/// batches that outlived it.
impl Drop for Desk {
    fn drop(&mut self) {
        if self.gate.is_inherited() {
            return; // leases and handles know that too
        }
        let late = std::mem::take(self.inbox.get_mut().unwrap_or_else(PoisonError::into_inner));
        let returned = std::mem::take(self.returned.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.device.relaxed(|| {
            for flight in late {
                if !matches!(self.device.query(&flight.done), Ok(true)) {
                    flight.source.quarantine();
                }
            }
            returned.into_iter().for_each(|buffer| self.discard(buffer));
            // If that has still to be done.
            self.updates.iter().for_each(|updates| updates.free(self));
            self.downloads.iter().for_each(|downloads| downloads.free(self));
        });
    }
}

/// Tells a desk and its feeding thread that the gate closed.
struct AtClose(Weak<Desk>);

impl Wake for AtClose {
    fn wake(self: Arc<Self>) {
        let Some(desk) = self.0.upgrade() else { return };
        match (desk.check_open(), &desk.seat) {
            (Ok(()), _) => {}
            (Err(reason), None) => desk.withdraw(reason),
            (Err(reason), Some(seat)) => seat.close(reason),
        }
        desk.call();
    }
}
