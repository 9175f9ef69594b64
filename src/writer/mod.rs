//! Writing steps: lanes that step together.
//!
//! A [`Writer`] owns its lanes' state (episode, unroll, lane buffer) and drives the intake gate; a [`StepMut`] is the
//! step that it writes now. Four ways lead into the ring, chosen by the sample: `in_place` (single steps), `lockstep`
//! (rows fixed by lane), `staged` (unrolls of free-running lanes) and `stored` (steps of a store). What it does not do: run environments, or touch a
//! row that it has no claim on.

mod episode;
mod error;
mod in_place;
mod lane;
mod lockstep;
mod staged;
mod step;
mod stored;

pub use episode::EpisodeMut;
pub use error::{CommitError, PolicyError, PutError, StepError};
pub(crate) use lane::lane_state_bytes;
pub use step::{FinalMut, StepMut};

use crate::episodes::End;
use crate::error::{Closed, Error, ErrorKind, Result};
use crate::intake::{Claim, IntakeGate, NoRoom, Seat, StripeCursor, WhenFull};
use crate::layout::{Layout, Place};
use crate::metrics::WriterCounters;
use crate::sample::Kind;
use crate::schema::LeafInfo;
use crate::slots::LaneBuffer;
use crate::sync::{Padded, Patience};
use lane::{History, Lanes, Written};
use ndarray::IxDyn;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Writes the steps of one or more lanes (environments) that step together. `Send`: make it here, move it to its thread.
///
/// ```
/// use pinring::*;
/// # fn main() -> Result<()> {
/// let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[4]);
/// let reward = step.leaf::<f32>("reward", &[]);
/// let feed = Feed::builder(Sample::step(step)).batch(4).start()?;
/// let mut writer = feed.writer(2)?; // two lanes
/// let mut s = writer.step()?;
/// s.view_mut(obs).fill(0.5); // in place: [2, 4]
/// s.put(reward, &[1.0, -1.0])?; // from a slice: one value a lane
/// s.commit()?;
/// # Ok(()) }
/// ```
///
/// A writer writes one step at a time; a second one does not compile while the first is open:
///
/// ```compile_fail,E0499
/// # use pinring::*;
/// # fn write(mut writer: Writer) -> Result<()> {
/// let first = writer.step()?;
/// let second = writer.step()?; // `writer` is borrowed by `first`
/// first.commit()?;
/// # Ok(()) }
/// ```
pub struct Writer {
    gate: Arc<IntakeGate>,
    /// The layout's, which handles of leaves are compared with.
    schema: u64,
    seat: Seat,
    seed: u64,
    counters: Arc<Padded<WriterCounters>>,
    in_slot: Vec<Place>,
    shapes: Vec<ViewShape>,
    buffer: LaneBuffer,
    lanes: Lanes,
    written: Written,
    history: History,
    way: Way,
    /// Whether a commit looks at more than which leaves were written: at values, or for a version.
    checks: bool,
    /// Whether there are derived columns.
    derives: bool,
    /// The step being written. It stays open when its `StepMut` is forgotten, and is undone by the next call.
    open: OpenStep,
    /// Steps that this writer committed.
    tick: u64,
    /// The version that the open step acts with, once `policy` was asked.
    version: Option<u64>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::InPlace(_) => "in place",
            Way::Lockstep(_) => "lockstep",
            Way::Staged(_) => "staged",
            Way::Stored(_) => "stored",
        };
        f.debug_struct("Writer")
            .field("lanes", &self.seat.lanes)
            .field("steps", &self.tick)
            .field("open", &(self.open.target != Target::Nowhere))
            .field("way", &way)
            .finish_non_exhaustive()
    }
}

/// How steps reach the ring.
#[derive(Debug)]
enum Way {
    InPlace(StripeCursor),
    Lockstep(lockstep::State),
    Staged(StripeCursor),
    Stored(stored::State),
}

/// The shape of a leaf's view, made once: building a dynamic shape takes longer than writing a small step.
#[derive(Debug)]
struct ViewShape {
    dims: IxDyn,
    /// In elements.
    in_slot: IxDyn,
    in_buffer: IxDyn,
}

impl ViewShape {
    fn new(leaf: &LeafInfo, lanes: usize, place: &Place) -> ViewShape {
        let mut dims = vec![lanes];
        dims.extend_from_slice(&leaf.shape);
        let mut strides = vec![leaf.elements(); dims.len()];
        for axis in 1..dims.len() {
            strides[axis] = dims[axis + 1..].iter().product();
        }
        let in_buffer = IxDyn(&strides);
        strides[0] = place.row_stride / leaf.dtype.size();
        ViewShape { dims: IxDyn(&dims), in_slot: IxDyn(&strides), in_buffer }
    }
}

/// Where the open step is written. Plain fields, read one by one: a step of a few bytes is about as long as a copy of
/// this.
#[derive(Debug, Default)]
struct OpenStep {
    target: Target,
    /// Rows and slot of `Target::Rows`; of `Target::Lockstep` the slot alone.
    claim: Claim,
    /// Of `Target::Rows`, the slot that the claim names, so that each value need not look for it.
    slot: Slot,
    row: usize,
    step: usize,
}

/// The address of a slot's first byte.
#[derive(Debug)]
struct Slot(*mut u8);

// SAFETY: an address, followed only by the writer that holds it, in rows that it has a claim on (invariant 2), which
// keeps them mapped (invariant 7).
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

impl Default for Slot {
    fn default() -> Slot {
        Slot(std::ptr::null_mut())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Target {
    /// No step is open.
    #[default]
    Nowhere,
    /// Rows claimed in an open slot.
    Rows,
    /// The lanes' own rows of a lockstep slot, with a claim open.
    Lockstep,
    /// The lane buffer.
    Buffer,
}

impl OpenStep {
    /// Opens a step in the lane buffer.
    fn in_buffer(&mut self, step: usize) {
        (self.target, self.row, self.step) = (Target::Buffer, 0, step);
    }
}

/// Steps that a writer's lane buffer holds.
pub(crate) fn buffer_depth(layout: &Layout, lockstep: bool) -> usize {
    match layout.kind {
        Kind::Unroll { steps } if !lockstep => steps + 1 + usize::from(layout.within_episode),
        Kind::Transition { .. } | Kind::Sequence { .. } => 2, // the open step, and its final observation
        _ => 1,
    }
}

impl Writer {
    pub(crate) fn new(gate: Arc<IntakeGate>, seat: Seat, seed: u64) -> Result<Writer> {
        if let Some(closed) = gate.lockstep_lane_gone() {
            return Err(closed.into());
        }
        let layout = gate.layout.clone();
        let lanes = seat.lanes.len();
        let depth = buffer_depth(&layout, gate.lockstep.is_some());
        let (places, bytes) = Place::in_lane_buffer(&layout, lanes, depth)?;
        let way = match (&gate.store, gate.lockstep, layout.kind) {
            (Some(store), ..) => {
                store.cut(seat.lanes.clone()); // whoever drove these lanes before has left its episodes unfinished
                Way::Stored(stored::State::new(store.clone(), lanes))
            }
            (None, Some(_), _) => Way::Lockstep(lockstep::State::default()),
            (None, None, Kind::Unroll { .. }) => Way::Staged(StripeCursor::new(seat.index)),
            (None, None, _) => Way::InPlace(StripeCursor::new(seat.index)),
        };
        let (in_slot, counters) = (Place::in_slot(&layout, &places), gate.counters.writer());
        Ok(Writer {
            shapes: layout
                .leaves
                .iter()
                .zip(&in_slot)
                .map(|(leaf, place)| ViewShape::new(leaf, lanes, place))
                .collect(),
            in_slot,
            buffer: LaneBuffer::new(places, bytes),
            checks: gate.lag.is_some() || layout.leaves.iter().any(|leaf| leaf.reject_non_finite),
            derives: layout.derived.any,
            lanes: Lanes::new(&layout, lanes),
            written: Written::new(layout.leaves.len(), lanes),
            history: History::new(depth, lanes),
            way,
            open: OpenStep::default(),
            tick: 0,
            version: None,
            schema: layout.schema,
            gate,
            seat,
            seed,
            counters,
        })
    }

    /// The lanes that this writer drives, as numbered in batches and episodes.
    pub fn lanes(&self) -> Range<usize> {
        self.seat.lanes.clone()
    }

    /// A seed for the `lane`-th of this writer's lanes: a function of the feed's seed and the lane's number alone, so
    /// that environments get the same one whatever the threads. A writer that takes such a lane later, or a second run with the
    /// same seed, gets the same again: mix in a count of your own where an environment must not repeat its episodes.
    ///
    /// # Panics
    /// If the writer has no such lane.
    #[track_caller]
    pub fn seed(&self, lane: usize) -> u64 {
        assert!(
            lane < self.seat.lanes.len(),
            "there is no lane {lane} in a writer of {} lanes: they are counted from 0",
            self.seat.lanes.len()
        );
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&((self.seat.lanes.start + lane) as u64).to_le_bytes());
        StdRng::from_seed(seed).next_u64()
    }

    /// Begins the next step of every lane; waits for room as [`WhenFull`] says.
    ///
    /// # Errors
    /// [`StepError::Full`] if the ring is full and the feed does not block; [`StepError::Closed`] says why nothing can
    /// be written any more.
    #[inline]
    pub fn step(&mut self) -> Result<StepMut<'_>, StepError> {
        self.begin(None)
    }

    /// Begins the next step if that needs no waiting.
    ///
    /// # Errors
    /// As [`step`](Writer::step), whatever `WhenFull` says.
    pub fn try_step(&mut self) -> Result<StepMut<'_>, StepError> {
        self.begin(Some(Patience::None))
    }

    /// Begins the next step, waiting for room at most for `timeout`.
    ///
    /// # Errors
    /// As [`step`](Writer::step), whatever `WhenFull` says.
    pub fn step_timeout(&mut self, timeout: Duration) -> Result<StepMut<'_>, StepError> {
        self.begin(Some(Patience::timeout(timeout)))
    }

    /// Gives up the episode that `lane` is in, as after its environment crashed: its unfinished unroll is dropped and
    /// counted, and its next step is the first of a new episode. What a store holds of it stays, without an end.
    ///
    /// # Errors
    /// In lockstep every batch needs every lane, so there it is refused ([`ErrorKind::Misuse`]).
    ///
    /// # Panics
    /// If the writer has no such lane.
    #[track_caller]
    pub fn abandon(&mut self, lane: usize) -> Result<()> {
        assert!(
            lane < self.lanes.len(),
            "there is no lane {lane} in a writer of {} lanes: they are counted from 0",
            self.lanes.len()
        );
        if self.gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        if let Way::Lockstep(_) = self.way {
            return Err(Error::new(
                ErrorKind::Misuse,
                "a lane of a lockstep feed cannot be abandoned: every batch needs every lane; end its episode instead",
            ));
        }
        self.undo();
        match &self.way {
            Way::Staged(_) => self.give_up_unroll(lane),
            Way::Stored(state) => {
                let lane = self.seat.lanes.start + lane;
                state.store.cut(lane..lane + 1);
            }
            Way::InPlace(_) | Way::Lockstep(_) => {}
        }
        self.lanes.begin_episode(lane, self.tick);
        Ok(())
    }

    /// `patience`: the caller's, which holds for samples that are only completed by this step too; `None` is the feed's.
    #[inline]
    fn begin(&mut self, patience: Option<Patience>) -> Result<StepMut<'_>, StepError> {
        if self.gate.is_inherited() {
            return Err(StepError::Closed(Closed::UsedAfterFork));
        }
        self.undo();
        self.written.clear();
        self.version = None;
        if !self.begin_in_own_stripe() {
            self.begin_elsewhere(patience)?;
        }
        Ok(StepMut { writer: self })
    }

    /// Every other way of beginning a step.
    #[inline(never)]
    fn begin_elsewhere(&mut self, patience: Option<Patience>) -> Result<(), StepError> {
        let explicit = patience.is_some();
        let patience = patience.unwrap_or_else(|| self.gate.when_full.patience());
        match self.way {
            Way::InPlace(_) => self.begin_in_place(patience, explicit),
            Way::Lockstep(_) => self.begin_lockstep(patience),
            Way::Staged(_) => self.begin_staged(patience, explicit),
            Way::Stored(_) => self.begin_stored(patience),
        }
    }

    /// Ends the open step, if any, as if it had never begun.
    #[inline]
    fn undo(&mut self) {
        if self.open.target != Target::Nowhere {
            self.undo_open();
        }
    }

    #[cold]
    fn undo_open(&mut self) {
        self.lanes.clear_marks();
        match std::mem::take(&mut self.open.target) {
            Target::Rows => self.gate.unclaim(&self.open.claim),
            Target::Lockstep => drop(self.gate.lockstep_end_claim()),
            Target::Buffer | Target::Nowhere => {}
        }
    }

    fn step_error(&self, no_room: NoRoom) -> StepError {
        match no_room {
            NoRoom::Full => StepError::Full { buffers: self.gate.buffers },
            NoRoom::Closed(closed) => StepError::Closed(closed),
        }
    }

    /// Whether a full ring means a dropped sample instead of an error.
    fn drops_newest(&self) -> bool {
        self.gate.when_full == WhenFull::DropNewest
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.gate.is_inherited() {
            return;
        }
        if std::thread::panicking() {
            let (first, end) = (self.seat.lanes.start, self.seat.lanes.end);
            tracing::warn!(target: "pinring", first, end, "a writer was dropped by a panic of its thread");
        }
        self.undo();
        let gone = match self.way {
            Way::InPlace(_) | Way::Stored(_) => None,
            Way::Lockstep(_) => Some(self.first_incomplete_unroll()),
            Way::Staged(_) => {
                (0..self.lanes.len()).for_each(|lane| self.give_up_unroll(lane));
                None
            }
        };
        self.gate.counters.writer_gone(&self.counters);
        if let Some(unroll) = gone {
            self.gate.lockstep_gone(unroll, self.seat.lanes.clone());
        }
        if self.gate.lanes.leave(&self.seat) {
            self.gate.finish();
        }
    }
}

impl Writer {
    /// Writes the derived columns of one step of one row, but for the observation after the last step.
    #[inline]
    fn set_flags(&self, slot: u32, row: usize, step: usize, flags: lane::Flags, version: u64) {
        let (slots, derived) = (&self.gate.slots, &self.gate.layout.derived);
        // SAFETY: for all five, the caller has a claim on the row (invariant 2); types and steps are the columns' own.
        unsafe {
            if let Some(column) = derived.terminated {
                slots.set_derived(slot, column, row, step, flags.end == Some(End::Terminated));
            }
            if let Some(column) = derived.truncated {
                slots.set_derived(slot, column, row, step, flags.end == Some(End::Truncated));
            }
            if let Some(column) = derived.mask {
                slots.set_derived(slot, column, row, step, !flags.masked);
            }
            if let Some(column) = derived.policy_version {
                slots.set_derived(slot, column, row, step, version as i64);
            }
            if let Some(column) = derived.is_first {
                slots.set_derived(slot, column, row, step, flags.first);
            }
        }
    }

    /// Writes `is_first` of one observation.
    fn set_is_first(&self, slot: u32, row: usize, step: usize, first: bool) {
        if let Some(column) = self.gate.layout.derived.is_first {
            // SAFETY: the caller has a claim on the row (invariant 2).
            unsafe { self.gate.slots.set_derived(slot, column, row, step, first) };
        }
    }
}
