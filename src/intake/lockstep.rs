//! Row i is lane i: every batch holds the same lanes in the same order.
//!
//! A batch of `m × lanes` rows holds `m` *layers*: lane l's unroll u (or step u) is row `(u mod m) × lanes + l` of batch
//! `u / m`. Batches are opened in order and each is complete when every lane has completed its rows, so rows and order
//! are functions of what the lanes write alone. Finishing one slot never needs the next: the step that ends one unroll
//! and begins the following one is written in the lane buffer and copied to both places.

use super::{IntakeGate, NoRoom, State, Wait};
use crate::error::Closed;
use crate::metrics::WriterCounters;
use crate::sync::{Padded, Spin, lock};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

#[derive(Debug, Default)]
pub(super) struct Fill {
    /// Open batches, consecutive from `sealed`.
    batches: VecDeque<Open>,
    sealed: u64,
    /// The first unroll that some lane will never write, and its writer's lanes.
    gone: Option<(u64, Range<usize>)>,
    ending: Option<Ending>,
    /// Claims that are open, also behind the close.
    pub(super) claims: usize,
}

/// The source ended; this goes out when the last claim has ended.
#[derive(Debug)]
struct Ending {
    /// Slot, rows and opening time of the partial batch, if there is one.
    last: Option<(u32, usize, Instant)>,
}

#[derive(Debug)]
struct Open {
    slot: u32,
    /// Lanes that have not completed their row, by layer.
    left: Vec<usize>,
    opened: Instant,
}

/// What a writer's waits share.
#[derive(Debug, Default)]
pub(crate) struct LockstepCursor {
    spin: Spin,
}

impl Fill {
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// At the close: returns the completed rows that are lost, and the slots.
    pub(super) fn abandon(&mut self, lanes: usize, rows: usize) -> (u64, Vec<u32>) {
        let open = std::mem::take(&mut self.batches);
        let lost = |open: &Open| rows - open.left.iter().map(|&left| left.min(lanes)).sum::<usize>();
        (open.iter().map(|open| lost(open) as u64).sum(), open.iter().map(|open| open.slot).collect())
    }
}

impl IntakeGate {
    /// Lanes in step; only asked of lockstep feeds.
    fn lanes_in_step(&self) -> usize {
        self.lockstep.unwrap_or(self.layout.rows)
    }

    fn layers(&self) -> u64 {
        (self.layout.rows / self.lanes_in_step()) as u64
    }

    /// The batch that a lane's unroll is part of.
    pub(crate) fn lockstep_batch(&self, unroll: u64) -> u64 {
        unroll / self.layers()
    }

    /// The row of lane 0's unroll within its batch.
    pub(crate) fn lockstep_row(&self, unroll: u64) -> usize {
        (unroll % self.layers()) as usize * self.lanes_in_step()
    }

    /// The slot of the batch that holds `unroll`, opened if it is the next; waits for a free slot. A claim on the
    /// caller's rows is open from here to `end_step`.
    pub(crate) fn lockstep_enter(
        &self,
        unroll: u64,
        cursor: &mut LockstepCursor,
        counters: &Padded<WriterCounters>,
        patience: crate::sync::Patience,
    ) -> Result<u32, NoRoom> {
        let batch = self.lockstep_batch(unroll);
        let mut wait = Wait::new(&mut cursor.spin, counters);
        let mut state = lock(&self.state);
        loop {
            if let Some(closed) = &state.closed {
                return Err(NoRoom::Closed(closed.clone()));
            }
            if let Some((_, lanes)) = state.lockstep.gone.as_ref().filter(|(gone, _)| *gone <= unroll) {
                return Err(NoRoom::Closed(Closed::LaneGone { first: lanes.start, end: lanes.end }));
            }
            let place = (batch - state.lockstep.sealed) as usize;
            if let Some(open) = state.lockstep.batches.get(place) {
                let slot = open.slot;
                state.lockstep.claims += 1;
                return Ok(slot);
            }
            // Lanes reach batches in order, so the first to miss one misses the next.
            if place == state.lockstep.batches.len()
                && let Some((slot, _)) = self.open_slot(&mut state)
            {
                let left = vec![self.lanes_in_step(); self.layers() as usize];
                state.lockstep.batches.push_back(Open { slot, left, opened: Instant::now() });
                // Everyone who waits for this batch can go on.
                self.note_event();
                if state.parked > 0 {
                    self.room.notify_all();
                }
                continue;
            }
            let (again, waited) = self.wait(state, patience, &mut wait);
            state = again;
            if !waited {
                return Err(NoRoom::Full);
            }
        }
    }

    /// Opens a claim on rows of a slot that was entered before.
    pub(crate) fn lockstep_claim(&self) -> Result<(), Closed> {
        let mut state = lock(&self.state);
        match &state.closed {
            Some(closed) => Err(closed.clone()),
            None => {
                state.lockstep.claims += 1;
                Ok(())
            }
        }
    }

    /// Ends a claim.
    pub(crate) fn lockstep_end_claim(self: &Arc<Self>) -> Result<(), Closed> {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            drop(state);
            return Err(self.lockstep_end_claim_after_close());
        }
        state.lockstep.claims -= 1;
        Ok(())
    }

    /// Ends a claim that outlived the close; the last one gives the ring up.
    fn lockstep_end_claim_after_close(self: &Arc<Self>) -> Closed {
        let mut state = lock(&self.state);
        state.lockstep.claims -= 1;
        let reason = state.closed.clone().unwrap_or(Closed::Stopped);
        if state.lockstep.is_ending() {
            self.settle_ending(state);
            return reason;
        }
        let ring = self.release_ring(&mut state);
        drop(state);
        drop(ring);
        reason
    }

    /// `lanes` lanes have completed `unroll`, and their claim ends: at once, since a waker that panics must leave none behind,
    /// for which an end would wait. After the close their rows are lost, and counted here.
    pub(crate) fn lockstep_complete(self: &Arc<Self>, unroll: u64, lanes: usize) -> Result<(), Closed> {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            self.counters.dropped_rows.fetch_add(lanes as u64, Ordering::Relaxed);
            drop(state);
            return Err(self.lockstep_end_claim_after_close());
        }
        state.lockstep.claims -= 1;
        let place = (self.lockstep_batch(unroll) - state.lockstep.sealed) as usize;
        let layer = (unroll % self.layers()) as usize;
        let Some(open) = state.lockstep.batches.get_mut(place) else { return Ok(()) };
        open.left[layer] -= lanes;
        if open.left.iter().all(|&left| left == 0)
            && let Some(open) = state.lockstep.batches.pop_front()
        {
            // The first open batch: a lane completes its rows in order, so none behind it can be complete before it.
            state.lockstep.sealed += 1;
            let wakes = self.seal(&state, open.slot, self.layout.rows, open.opened);
            drop(state);
            self.batches.wake(wakes);
            state = lock(&self.state);
        }
        self.end_if_a_lane_is_gone(state);
        Ok(())
    }

    /// A writer is gone; `unroll` is the first that its lanes did not complete.
    pub(crate) fn lockstep_gone(self: &Arc<Self>, unroll: u64, lanes: Range<usize>) {
        let mut state = lock(&self.state);
        if state.lockstep.gone.as_ref().is_none_or(|(gone, _)| unroll < *gone) {
            state.lockstep.gone = Some((unroll, lanes));
        }
        self.note_event();
        self.room.notify_all(); // whoever waits for a batch that will not come
        self.end_if_a_lane_is_gone(state);
    }

    /// Why no lane can be taken: a writer is gone, and its lanes' rows cannot be gone on with.
    pub(crate) fn lockstep_lane_gone(&self) -> Option<Closed> {
        let state = lock(&self.state);
        state.lockstep.gone.as_ref().map(|(_, lanes)| Closed::LaneGone { first: lanes.start, end: lanes.end })
    }

    /// When a lane is gone and everything before it is complete, nothing further can be.
    fn end_if_a_lane_is_gone(self: &Arc<Self>, state: MutexGuard<'_, State>) {
        let Some((gone, lanes)) = state.lockstep.gone.clone() else { return };
        let layers = (gone % self.layers()) as usize;
        let complete = |open: &Open| open.left[..layers].iter().all(|&left| left == 0);
        if state.lockstep.sealed >= gone / self.layers()
            && (layers == 0 || state.lockstep.batches.front().is_some_and(complete))
        {
            drop(state);
            self.finish_lockstep(Closed::LaneGone { first: lanes.start, end: lanes.end });
        }
    }

    /// The source ended: the whole layers of the last batch go out, then the learner sees the end.
    pub(super) fn finish_lockstep(self: &Arc<Self>, reason: Closed) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(reason);
        let lanes = self.lanes_in_step();
        // Only what every lane completed: some may be gone, and some were perhaps never taken.
        let complete = |open: &Open| open.left.iter().take_while(|&&left| left == 0).count();
        let whole = state.lockstep.batches.front().map_or(0, complete) * lanes;
        let last = if whole > 0 { state.lockstep.batches.pop_front() } else { None };
        let (mut lost, slots) = state.lockstep.abandon(lanes, self.layout.rows);
        state.free.extend(slots);
        if let Some(last) = &last {
            lost += last.left[whole / lanes..].iter().map(|&left| (lanes - left) as u64).sum::<u64>();
        }
        state.left.partial_rows += lost;
        self.counters.dropped_rows.fetch_add(lost, Ordering::Relaxed);
        state.lockstep.ending = Some(Ending { last: last.map(|open| (open.slot, whole, open.opened)) });
        self.announce_close(state);
        self.settle_ending(lock(&self.state));
    }

    /// Seals the last, partial batch and ends the batch gate, once no claim is open any more: the claims of writers
    /// that were ahead lie in the same slot.
    pub(super) fn settle_ending(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.lockstep.claims > 0 {
            return;
        }
        let Some(ending) = state.lockstep.ending.take() else { return };
        let sealed = ending.last.map(|(slot, rows, opened)| {
            // SAFETY: no claim is open and the gate gives no more, so the slot is this thread's alone (invariant 2).
            #[allow(unsafe_code)]
            unsafe {
                self.slots.close_ranks(slot, rows)
            };
            self.seal(&state, slot, rows, opened)
        });
        let ended = self.batches.end(Closed::Ended);
        let ring = self.release_ring(&mut state);
        drop(state);
        drop(ring);
        self.wake_watchers();
        self.batches.wake(sealed.unwrap_or_default().and(ended)); // last: a waker may panic, or never return
    }

    /// A stop that comes before the ending was settled: what it would have sealed is lost, and counted.
    pub(super) fn abandon_ending(&self, state: &mut State) {
        if let Some((slot, rows, _)) = state.lockstep.ending.take().and_then(|ending| ending.last) {
            state.free.push(slot);
            state.left.partial_rows += rows as u64;
            self.counters.dropped_rows.fetch_add(rows as u64, Ordering::Relaxed);
        }
    }
}
