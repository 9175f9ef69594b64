//! The intake gate: where writers meet free slots.
//!
//! Owns the slots between a lease that came home and a batch that was sealed: the free list, the open slots, the claims
//! on their rows, who waits for room, and the reason why the gate closed. Three fillers share it: `stripes` (rows go
//! where there is room), `lockstep` (row i is lane i) and `sampled` (a sampling thread fills whole slots). What it does
//! not do: write rows (see `writer`), or keep the ring alive for anybody but open slots and leases.
//!
//! The life of a slot: free → open (writers claim rows and commit them) → sealed (a [`Lease`] in the batch gate) → held
//! by the learner → the lease drops → free.
//!
//! Order of locks: `state`, then the batch gate, then the store's. A stripe has none: a claim and a commit are an atomic
//! instruction on its word each, and only what concerns other rows than the writer's own asks for `state`. A slot is
//! sealed with `state` held, so that whoever closes the gate finds each committed row either in an open slot or in the
//! batch gate. Wakers are called with no lock held.

mod lag;
mod lanes;
mod lockstep;
mod sampled;
mod stripe;
mod stripes;

pub(crate) use lag::{Begin, LagGate};
pub(crate) use lanes::{LaneTable, NoSeat, Seat};
pub(crate) use lockstep::LockstepCursor;
pub(crate) use sampled::Credit;
pub(crate) use stripe::MOST_ROWS;
pub(crate) use stripes::{Claim, Claimed, StripeCursor};

use crate::error::Closed;
use crate::gate::{Gate, Wakes};
use crate::gather::Gathering;
use crate::layout::Layout;
use crate::memory::{ForkStamp, Ring, stranded_bytes_in_process};
use crate::metrics::{Counters, Metrics, Stage, WriterCounters};
use crate::slots::Slots;
use crate::store::{Mixed, OpenGather, Store, StoreConfig};
use crate::sync::{Padded, Patience, Spin, lock};
use crate::weights::Versions;
use crossbeam_channel as channel;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

/// So long before a stop's deadline, at most, those who wait for queued copies give up.
const MOST_MARGIN: Duration = Duration::from_millis(300);

/// What a writer does when the ring has no room for a whole sample.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// let feed = Feed::builder(Sample::step(step)).batch(1).buffers(1).when_full(WhenFull::Fail).start()?;
/// let mut writer = feed.writer(1)?;
/// let mut first = writer.step()?;
/// first.put(reward, &[1.0])?;
/// first.commit()?;
/// assert!(matches!(writer.step(), Err(StepError::Full { .. })));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// Wait until a batch comes home. The default: nothing is lost, and a learner that is slow slows its actors.
    #[default]
    Block,
    /// Wait at most this long, then fail like `Fail`.
    Timeout(Duration),
    /// Fail at once with an error; nothing of a sample that was not begun is lost.
    Fail,
    /// Drop the newest whole sample, and count it.
    DropNewest,
}

impl WhenFull {
    /// How long a committed sample waits for room.
    #[inline]
    pub(crate) fn patience(self) -> Patience {
        match self {
            WhenFull::Block => Patience::Forever,
            WhenFull::Timeout(timeout) => Patience::timeout(timeout),
            WhenFull::Fail | WhenFull::DropNewest => Patience::None,
        }
    }
}

/// Why no rows were claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    Full,
    Closed(Closed),
}

/// The unique right to a sealed slot. Its drop is the only way a slot comes home (invariant 2).
pub(crate) struct Lease {
    pub(crate) slot: u32,
    /// Keeps the mapping until the slot is home (invariant 7).
    home: Arc<IntakeGate>,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({})", self.slot)
    }
}

impl Lease {
    /// Keeps the slot out of use, mapped and registered for the rest of the process: whether a copy still reads it is
    /// not known (invariant 4).
    pub(crate) fn quarantine(self) {
        self.home.note_quarantine(self.slot);
        // Forgotten: its drop would free what the device may still read.
        std::mem::forget(self);
    }

    pub(crate) fn home(&self) -> &Arc<IntakeGate> {
        &self.home
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.home.is_inherited() {
            return; // the slot is the parent's, and so is whoever held a lock at the fork
        }
        self.home.come_home(self.slot);
    }
}

/// A full (or the last, partial) slot on its way to the learner.
#[derive(Debug)]
pub(crate) struct Sealed {
    pub(crate) lease: Lease,
    pub(crate) rows: usize,
    pub(crate) sequence: u64,
    pub(crate) sealed: Instant,
    /// Whether a sampler's pass over its items ended with it.
    pub(crate) ends_pass: bool,
    /// How often its store had been cleared when it was selected.
    pub(crate) clears: u64,
    /// For a device to gather: the slot holds what it needs for that, see `gather`.
    pub(crate) gather: Option<OpenGather>,
    /// The device buffer that it was selected for.
    pub(crate) credit: Option<Credit>,
}

/// What stops with the feed, for the stop's report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Committed rows of batches that were not full.
    pub(crate) partial_rows: u64,
    /// Rows of sealed batches that nobody took.
    pub(crate) untaken_rows: u64,
}

/// See the module's text.
pub(crate) struct IntakeGate {
    /// No other gate of the process has or had it.
    pub(crate) id: u64,
    pub(crate) layout: Arc<Layout>,
    pub(crate) slots: Slots,
    pub(crate) batches: Gate<Sealed>,
    pub(crate) counters: Counters,
    pub(crate) when_full: WhenFull,
    pub(crate) lag: Option<LagGate>,
    pub(crate) lanes: LaneTable,
    /// Where steps are kept, of a feed whose batches are sampled; then slots are filled by its sampling thread.
    pub(crate) store: Option<Arc<Store>>,
    /// The second store, of which batches have some rows.
    pub(crate) mixed: Option<Arc<Mixed>>,
    /// Who gathers its batches.
    pub(crate) gathering: Option<Gathering>,
    /// Lanes of a lockstep feed.
    pub(crate) lockstep: Option<usize>,
    pub(crate) buffers: usize,
    pub(crate) episodes: channel::Sender<crate::episodes::Episode>,
    page_locked_bytes: usize,
    /// The process that started the feed.
    stamp: ForkStamp,
    /// The versions that writers act with, once one of them asked: the lag histogram is counted against them.
    seen_versions: OnceLock<Arc<Versions>>,
    stripes: stripes::Stripes,
    /// Whether a claim should look for gaps first; a hint, the truth is in `state`.
    gaps_hint: Padded<AtomicBool>,
    /// Counts events that may have made room; spinning writers watch it.
    events: Padded<AtomicU64>,
    /// The stop or the fault that came, also behind a natural end: feeding ends too.
    over: OnceLock<Closed>,
    /// Writers that wait at the lag gate.
    waiting_for_weights: AtomicUsize,
    /// Learners alive, of the host and of devices.
    learners: AtomicUsize,
    /// Woken when the gate closes, for threads that wait elsewhere.
    at_close: Mutex<Vec<Waker>>,
    /// By when a stop wants the queued copies to be over.
    stop_deadline: OnceLock<Instant>,
    /// Copies of `state.closed.is_some()`, for waits on other locks.
    closed_hint: AtomicBool,
    state: Padded<Mutex<State>>,
    /// Any room is of use to who waits here.
    room: Condvar,
    /// For writers that need many rows at once. A wake that is meant for one writer never goes to them.
    much_room: Condvar,
}

#[derive(Debug)]
struct State {
    /// Keeps the mapping; given up when the gate is closed, the last claim has ended and the last slot is home.
    ring: Option<Arc<Ring>>,
    free: Vec<u32>,
    /// Writers parked on `room`, which any room is of use to.
    parked: usize,
    /// Whether one of them was woken and has not looked yet: it wakes the next one when it leaves room behind.
    waking: bool,
    /// Writers parked on `much_room`: all of them look at each wake, which may be of no use to them.
    choosy: usize,
    closed: Option<Closed>,
    /// Slots ever opened.
    opened: u64,
    striped: stripes::Fill,
    lockstep: lockstep::Fill,
    left: Left,
}

/// What the gate is built from.
pub(crate) struct IntakeConfig {
    pub(crate) layout: Arc<Layout>,
    pub(crate) ring: Arc<Ring>,
    /// The ring's first so many slots are batches.
    pub(crate) buffers: usize,
    /// What is kept in the slots behind them.
    pub(crate) store: Option<StoreConfig>,
    pub(crate) mixed: Option<Mixed>,
    pub(crate) gathering: Option<Gathering>,
    pub(crate) when_full: WhenFull,
    pub(crate) lag: Option<LagGate>,
    pub(crate) max_lanes: Option<usize>,
    pub(crate) lockstep: Option<usize>,
    pub(crate) episodes: channel::Sender<crate::episodes::Episode>,
}

impl fmt::Debug for IntakeGate {
    /// A line, without locks: every handle of a feed holds the gate, and the gate holds sealed batches that hold it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntakeGate")
            .field("rows", &self.layout.rows)
            .field("buffers", &self.buffers)
            .field("lockstep", &self.lockstep)
            .finish_non_exhaustive()
    }
}

impl IntakeGate {
    pub(crate) fn new(config: IntakeConfig) -> IntakeGate {
        let IntakeConfig {
            layout,
            ring,
            buffers,
            store,
            mixed,
            gathering,
            when_full,
            lag,
            max_lanes,
            lockstep,
            episodes,
        } = config;
        let store = store.map(|store| Arc::new(Store::new(store, layout.clone(), ring.clone(), buffers)));
        let slots = Slots::new(layout.clone(), ring.slot(0), buffers);
        let seen_versions = OnceLock::new();
        if let Some(lag) = &lag {
            let _ = seen_versions.set(lag.versions.clone());
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        IntakeGate {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            slots,
            batches: Gate::new(),
            counters: Counters::new(),
            when_full,
            lag,
            lanes: LaneTable::new(max_lanes.or(lockstep)),
            store,
            mixed: mixed.map(Arc::new),
            gathering,
            lockstep,
            buffers,
            episodes,
            stamp: ring.stamp(),
            page_locked_bytes: if ring.is_pinned() { ring.bytes() } else { 0 },
            seen_versions,
            stripes: stripes::Stripes::new(buffers, layout.rows),
            gaps_hint: Padded(AtomicBool::new(false)),
            events: Padded(AtomicU64::new(0)),
            over: OnceLock::new(),
            waiting_for_weights: AtomicUsize::new(0),
            learners: AtomicUsize::new(0),
            at_close: Mutex::default(),
            stop_deadline: OnceLock::new(),
            closed_hint: AtomicBool::new(false),
            state: Padded(Mutex::new(State {
                ring: Some(ring),
                free: (0..buffers as u32).rev().collect(),
                parked: 0,
                waking: false,
                choosy: 0,
                closed: None,
                opened: 0,
                striped: stripes::Fill::default(),
                lockstep: lockstep::Fill::default(),
                left: Left::default(),
            })),
            room: Condvar::new(),
            much_room: Condvar::new(),
            layout,
        }
    }

    /// Whether a sampler has any use for new priorities.
    pub(crate) fn has_priorities(&self) -> bool {
        let mixed = self.mixed.as_ref().map(|mixed| &mixed.store);
        self.store.iter().chain(mixed).any(|store| store.has_priorities)
    }

    /// The reason why nothing can be written any more.
    pub(crate) fn closed(&self) -> Option<Closed> {
        if self.is_inherited() {
            return Some(Closed::UsedAfterFork);
        }
        // SYNC: pairs with the Release in `shut`; the lock below gives the reason itself.
        if !self.closed_hint.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.state).closed.clone()
    }

    /// Whether this process is a forked child of the feed's. Asked before any lock: in a child a lock may be held by a
    /// thread that does not exist here.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.stamp.is_inherited()
    }

    /// Notes the weights that writers act with; the first ones count.
    pub(crate) fn see_versions(&self, versions: &Arc<Versions>) {
        if self.seen_versions.get().is_none() {
            let _ = self.seen_versions.set(versions.clone());
        }
    }

    /// The versions that lag is counted against.
    pub(crate) fn seen_versions(&self) -> Option<&Arc<Versions>> {
        self.seen_versions.get()
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let mut metrics = self.counters.snapshot();
        metrics.free_slots = lock(&self.state).free.len();
        if let Some(store) = &self.store {
            (metrics.stored_samples, metrics.stored_records, metrics.stale_keys) = store.levels();
        }
        metrics.batches_waiting = self.batches.len();
        metrics.page_locked_bytes = self.page_locked_bytes;
        metrics.stranded_bytes = stranded_bytes_in_process();
        metrics
    }

    /// Closes the gate for writers and, except at a natural end, for the learner; the first reason stays. Waits for
    /// nobody: open claims end on their own and find the gate closed.
    pub(crate) fn close(&self, reason: Closed) {
        if self.is_inherited() {
            return;
        }
        // A learner that goes because it has just heard of a fault or a stop does not hide that from others.
        let reason = match reason {
            Closed::LearnerGone => self.over.get().cloned().unwrap_or(Closed::LearnerGone),
            reason => self.over.get_or_init(|| reason).clone(),
        };
        #[cfg(test)]
        crate::sync::points::here("intake: over");
        if let Some(store) = &self.store {
            store.close(reason.clone());
        }
        let mut state = lock(&self.state);
        let ring = self.shut(&mut state, reason.clone());
        let (untaken, wakes) = self.batches.close(reason);
        let rows: u64 = untaken.iter().map(|sealed| sealed.rows as u64).sum();
        self.counters.dropped_rows.fetch_add(rows, Ordering::Relaxed);
        state.left.untaken_rows += rows;
        self.announce_close(state);
        drop(untaken); // leases come home
        drop(ring);
        self.wake_watchers();
        self.batches.wake(wakes); // last: a waker may panic, or never return
    }

    /// Closes for good: what is stored is given up too. On a thread of the feed's: behind a fault it may be the last share of the
    /// ring that goes here, and CUDA lets go of that when the device's work is done.
    pub(crate) fn stop(&self) {
        self.close(Closed::Stopped);
        if !self.is_inherited() {
            self.store.iter().for_each(|store| store.let_go());
        }
    }

    /// Counts a slot that is never used again.
    pub(crate) fn note_quarantine(&self, slot: u32) {
        self.counters.quarantined.fetch_add(1, Ordering::Relaxed);
        tracing::error!(target: "pinring", slot, "a slot is quarantined: the end of a copy from it is unknown");
    }

    /// The stop or the fault that came, if one did; a natural end may lie before it.
    pub(crate) fn over(&self) -> Option<&Closed> {
        self.over.get()
    }

    /// Wakes this waker at every close: when the last learner is gone, at a stop, at a fault.
    pub(crate) fn wake_at_close(&self, waker: Waker) {
        lock(&self.at_close).push(waker);
        if self.closed().is_some() {
            self.wake_watchers();
        }
    }

    fn wake_watchers(&self) {
        let watchers = lock(&self.at_close).clone(); // woken without the lock
        watchers.iter().for_each(Waker::wake_by_ref);
    }

    /// Counts one more learner.
    pub(crate) fn learner_taken(&self) {
        self.learners.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one learner less; when the last is gone, writers learn that nobody takes batches.
    pub(crate) fn learner_gone(&self) {
        if self.learners.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.close(Closed::LearnerGone);
        }
    }

    /// Sealed rows that reached a device and no learner.
    pub(crate) fn count_untaken(&self, rows: u64) {
        self.counters.dropped_rows.fetch_add(rows, Ordering::Relaxed);
        lock(&self.state).left.untaken_rows += rows;
    }

    /// Sets by when a stop wants every thread to have ended; the first one counts. Queued copies are waited for until a
    /// little before, so that whoever waits for them gives them up and still ends in time.
    pub(crate) fn set_stop_deadline(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let _ = self.stop_deadline.set(deadline - (left / 4).min(MOST_MARGIN));
    }

    /// By when queued copies must be over.
    pub(crate) fn stop_deadline(&self) -> Option<Instant> {
        self.stop_deadline.get().copied()
    }

    /// Writers that wait at the lag gate.
    pub(crate) fn at_lag_gate(&self) -> usize {
        self.waiting_for_weights.load(Ordering::Relaxed)
    }

    /// Counts a writer in or out of the lag gate's wait.
    pub(crate) fn note_lag_wait<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.waiting_for_weights.fetch_add(1, Ordering::Relaxed);
        let result = wait();
        self.waiting_for_weights.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// In lockstep: lanes that nobody drives, so that no batch can be complete.
    pub(crate) fn lanes_without_writer(&self) -> usize {
        self.lockstep.map_or(0, |lanes| lanes.saturating_sub(self.lanes.taken()))
    }

    /// Writers that wait for room.
    pub(crate) fn parked(&self) -> usize {
        let of_gate = || {
            let state = lock(&self.state);
            state.parked + state.choosy
        };
        self.store.as_ref().map_or_else(of_gate, |store| store.writers_waiting())
    }

    /// Counts a finished episode and puts it into the stream, if somebody keeps reading that.
    pub(crate) fn finished(&self, episode: crate::episodes::Episode) {
        self.counters.episodes.fetch_add(1, Ordering::Relaxed);
        if self.episodes.try_send(episode).is_err() {
            self.counters.episodes_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What was left at the close.
    pub(crate) fn left(&self) -> Left {
        lock(&self.state).left
    }

    /// After the close: leases and open steps that still keep the ring, without those that are quarantined.
    pub(crate) fn out(&self) -> usize {
        let state = lock(&self.state);
        let out = self.buffers - state.free.len() + state.lockstep.claims;
        out.saturating_sub(self.quarantined())
    }

    /// Slots that are never used again.
    pub(crate) fn quarantined(&self) -> usize {
        self.counters.quarantined.load(Ordering::Relaxed) as usize
    }

    /// Shuts the writers' side and returns the ring if no claim needs it any more, to be dropped without the lock.
    fn shut(&self, state: &mut State, reason: Closed) -> Option<Arc<Ring>> {
        if state.closed.is_none() {
            state.closed = Some(reason);
            let partial = self.abandon_open_slots(state);
            state.left.partial_rows += partial;
            self.counters.dropped_rows.fetch_add(partial, Ordering::Relaxed);
        }
        self.abandon_ending(state);
        self.release_ring(state)
    }

    /// The ring, to be dropped without the lock, once the gate is closed and nobody needs it any more: no claim is open,
    /// and every slot is home (invariant 7).
    fn release_ring(&self, state: &mut State) -> Option<Arc<Ring>> {
        let needed = state.closed.is_none() || state.lockstep.claims > 0 || state.free.len() < self.buffers;
        if needed { None } else { state.ring.take() }
    }

    /// Tells every waiting writer that `state.closed` has a reason.
    fn announce_close(&self, state: MutexGuard<'_, State>) {
        self.closed_hint.store(true, Ordering::Release); // SYNC: pairs with the Acquire in `closed`
        self.note_event();
        drop(state);
        self.room.notify_all();
        self.much_room.notify_all();
        if let Some(versions) = self.lag.as_ref().map(|lag| &lag.versions) {
            versions.wake();
        }
    }

    /// Takes every open slot back at the close; returns the committed rows that are lost by it.
    fn abandon_open_slots(&self, state: &mut State) -> u64 {
        let (rows, slots) = match self.lockstep {
            Some(lanes) => state.lockstep.abandon(lanes, self.layout.rows),
            None => self.abandon_stripes(state),
        };
        state.free.extend(slots);
        rows
    }

    /// A lease dropped: the slot is free, and one writer learns of it.
    fn come_home(&self, slot: u32) {
        let mut state = lock(&self.state);
        state.free.push(slot);
        let ring = self.release_ring(&mut state);
        self.wake_one(state);
        drop(ring);
    }

    /// Something may have made room: wakes one parked writer that can use it, which wakes the next when it leaves room
    /// behind.
    fn wake_one(&self, mut state: MutexGuard<'_, State>) {
        self.note_event();
        let (parked, choosy) = (state.parked > 0 && !state.waking, state.choosy > 0);
        state.waking |= parked;
        drop(state);
        if parked {
            self.room.notify_one();
        }
        if choosy {
            self.much_room.notify_all();
        }
    }

    fn note_event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until something may have made room; false when patience is at its end.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        patience: Patience,
        wait: &mut Wait<'_>,
    ) -> (MutexGuard<'a, State>, bool) {
        let left = patience.left();
        if left.is_some_and(|left| left.is_zero()) {
            return (state, false);
        }
        let begun = *wait.begun.get_or_insert_with(Instant::now);
        if !wait.spun {
            wait.spun = true;
            let seen = self.events.load(Ordering::Relaxed);
            drop(state);
            wait.spin.until(|| self.events.load(Ordering::Relaxed) != seen);
            wait.counters.block(begun.elapsed().as_nanos() as u64);
            wait.begun = None;
            return (lock(&self.state), true);
        }
        let (room, parked): (_, fn(&mut State) -> &mut usize) = match wait.choosy {
            false => (&self.room, |state| &mut state.parked),
            true => (&self.much_room, |state| &mut state.choosy),
        };
        *parked(&mut state) += 1;
        state = match left {
            None => room.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
            Some(left) => room.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0,
        };
        *parked(&mut state) -= 1;
        state.waking &= wait.choosy; // one of those that `waking` speaks of looks now
        wait.counters.block(begun.elapsed().as_nanos() as u64);
        wait.begun = None;
        (state, true)
    }

    /// Opens a free slot, if there is one.
    fn open_slot(&self, state: &mut State) -> Option<(u32, u64)> {
        let slot = state.free.pop()?;
        state.opened += 1;
        Some((slot, state.opened))
    }

    /// Seals an open slot, which `state` must no longer name. What it returns is for `batches.wake`, when `state` is no
    /// longer held.
    fn seal(self: &Arc<Self>, _held: &State, slot: u32, rows: usize, opened: Instant) -> Wakes {
        let now = Instant::now();
        self.counters.stage(Stage::Fill, now - opened);
        let put = self.batches.put(|sequence| {
            // Counted inside the gate: whoever takes the batch finds it counted.
            self.counters.batches.fetch_add(1, Ordering::Relaxed);
            self.counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
            let lease = Lease { slot, home: self.clone() };
            Sealed { lease, rows, sequence, sealed: now, ends_pass: false, clears: 0, gather: None, credit: None }
        });
        // It closes behind `state`, and then nothing is sealed any more.
        debug_assert!(put.is_some(), "a slot was sealed behind the close");
        put.unwrap_or_default()
    }

    /// The last writer and intake handle are gone: what is complete goes out, then the learner sees the end.
    pub(crate) fn finish(self: &Arc<Self>) {
        match (&self.store, self.lockstep) {
            (Some(store), _) => store.end(), // the sampling goes on with what is there
            (None, None) => self.finish_stripes(),
            (None, Some(_)) => self.finish_lockstep(Closed::Ended),
        }
    }
}

/// One verb's wait: spins once, then parks.
pub(crate) struct Wait<'a> {
    spin: &'a mut Spin,
    spun: bool,
    /// Needs many rows at once.
    choosy: bool,
    begun: Option<Instant>,
    counters: &'a Padded<WriterCounters>,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(spin: &'a mut Spin, counters: &'a Padded<WriterCounters>) -> Wait<'a> {
        Wait { spin, spun: false, choosy: false, begun: None, counters }
    }
    fn waited(&self) -> bool {
        self.spun
    }
}
