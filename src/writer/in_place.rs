//! Single steps, written in the slot: the slot that writers filled is the batch.

use super::{PolicyError, Slot, StepError, Target, Way, Writer};
use crate::intake::{Claim, Claimed, NoRoom, StripeCursor, WhenFull};
use crate::slots::copy_lanes;
use crate::sync::Patience;
use crate::weights::Weights;
use crate::writer::CommitError;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

impl Writer {
    /// The short way of a single step: the next rows of the stripe that this writer claimed in last.
    #[inline]
    pub(super) fn begin_in_own_stripe(&mut self) -> bool {
        let Way::InPlace(cursor) = &self.way else { return false };
        let Some(claim) = self.gate.claim_own(self.lanes.len(), cursor) else { return false };
        self.open_rows(claim);
        true
    }

    pub(super) fn begin_in_place(&mut self, patience: Patience, explicit: bool) -> Result<(), StepError> {
        let Way::InPlace(cursor) = &mut self.way else { unreachable!("`begin_elsewhere` matched the way") };
        let (gate, lanes) = (&self.gate, self.lanes.len());
        let drops = gate.when_full == WhenFull::DropNewest && !explicit;
        let claimed = match gate.claim(lanes, cursor, patience, &self.counters) {
            // There is some room. Whoever does not wait for more later is told now if it is not for every lane.
            Ok(Claimed::Staged) if !drops && !matches!(patience, Patience::Forever) => {
                gate.wait_for_room(lanes, cursor, patience, &self.counters).map(|()| Claimed::Staged)
            }
            claimed => claimed,
        };
        match claimed {
            Ok(Claimed::Rows(claim)) => self.open_rows(claim),
            // Written aside; the commit finds rows for it, or drops it and counts.
            Ok(Claimed::Staged) => self.open.in_buffer(0),
            Err(NoRoom::Full) if drops => self.open.in_buffer(0),
            Err(no_room) => return Err(self.step_error(no_room)),
        }
        Ok(())
    }

    #[inline]
    fn open_rows(&mut self, claim: Claim) {
        self.open.row = claim.start as usize;
        self.open.slot = Slot(self.gate.slots.slot(claim.slot));
        self.open.step = 0;
        self.open.claim = claim;
        self.open.target = Target::Rows;
    }

    pub(super) fn policy_in_place<W: Send + Sync + 'static>(
        &mut self,
        weights: &Weights<W>,
    ) -> Result<(u64, Arc<W>), PolicyError> {
        while let Some(lag) = &self.gate.lag {
            // The batch that these rows lie in: a row that holds a slot open must never wait for a later batch.
            let (batch, holds_rows) = match self.open.target {
                Target::Rows => (self.open.claim.batch(), true),
                _ => (self.gate.filling(), false),
            };
            // Nor may it wait for an earlier batch that has room again, which perhaps nobody else comes to fill.
            let needed = lag.needed(batch);
            if self.wait_for_version_unless(needed, || holds_rows && self.gate.has_room_before(batch))? {
                break;
            }
            self.go_back(batch);
        }
        Ok(weights.latest())
    }

    #[inline]
    pub(super) fn commit_in_place(&mut self) -> Result<(), CommitError> {
        let version = self.version.unwrap_or(0);
        let (slot, first) = (self.open.claim.slot, self.open.row);
        self.finish_step_rows(slot, first, 0..self.lanes.len(), version);
        self.account(version); // reads the reward, so before the rows are given away
        let committed = self.gate.commit(&self.open.claim);
        committed.map_err(|closed| {
            self.counters.drop_rows(self.lanes.len() as u64);
            CommitError::Closed(closed)
        })
    }

    /// Copies a step from the lane buffer into whatever rows there are: gaps first, then the open slots, then the next.
    #[cold]
    pub(super) fn commit_staged_step(&mut self, version: u64) -> Result<(), CommitError> {
        let (patience, lanes) = (self.gate.when_full.patience(), self.lanes.len());
        let mut done = 0;
        let stopped = loop {
            if done == lanes {
                break None;
            }
            let claim = self.claim_some(lanes - done, patience);
            let claim = match claim {
                Ok(claim) => claim,
                Err(no_room) => break Some(no_room),
            };
            let (row, rows) = (claim.start as usize, claim.rows as usize);
            for (slot, buffer) in self.in_slot.iter().zip(&self.buffer.places) {
                let from = (self.buffer.base().wrapping_add(buffer.at(done, 0)).cast_const(), buffer.row_stride);
                let to = (self.gate.slots.slot(claim.slot).wrapping_add(slot.at(row, 0)), slot.row_stride);
                // SAFETY: rows `done..` of the lane buffer are this writer's; `claim` makes the slot's rows its own
                // (invariant 2); ring and lane buffer never overlap.
                unsafe { copy_lanes(from, to, slot.bytes, rows) };
            }
            self.finish_step_rows(claim.slot, row, done..done + rows, version);
            if let Err(closed) = self.gate.commit(&claim) {
                break Some(NoRoom::Closed(closed));
            }
            self.counters.stage(rows as u64);
            done += rows;
        };
        self.account(version);
        self.settle_drop(lanes - done, stopped)
    }

    /// Writes the derived columns and the records of rows that hold one step each, from `row` on.
    #[inline]
    fn finish_step_rows(&mut self, slot: u32, row: usize, lanes: Range<usize>, version: u64) {
        if self.derives {
            self.set_step_flags(slot, row, lanes.clone(), version);
        }
        let first = self.seat.lanes.start as u32;
        let lanes = first + lanes.start as u32..first + lanes.end as u32;
        // SAFETY: the rows are claimed by this writer (invariant 2), and nothing is replayed by a writer in place.
        unsafe { self.gate.slots.set_step_records(slot, row, lanes, self.tick, version) };
    }

    #[inline(never)] // most steps have none
    fn set_step_flags(&self, slot: u32, row: usize, lanes: Range<usize>, version: u64) {
        for lane in lanes.clone() {
            let flags = self.lanes.flags(lane, self.tick);
            self.set_flags(slot, row + lane - lanes.start, 0, flags, version);
        }
    }

    pub(super) fn claim_some(&mut self, rows: usize, patience: Patience) -> Result<Claim, NoRoom> {
        let cursor: &mut StripeCursor = match &mut self.way {
            Way::InPlace(cursor) | Way::Staged(cursor) => cursor,
            Way::Lockstep(_) | Way::Stored(_) => unreachable!("rows are claimed for free-running lanes of a FIFO feed"),
        };
        self.gate.claim_some(rows, cursor, patience, &self.counters)
    }

    /// What a commit answers when `rows` whole samples found no place.
    pub(super) fn settle_drop(&mut self, rows: usize, stopped: Option<NoRoom>) -> Result<(), CommitError> {
        self.counters.drop_rows(rows as u64);
        match stopped {
            None => Ok(()),
            Some(NoRoom::Closed(closed)) => Err(closed.into()),
            Some(NoRoom::Full) if self.drops_newest() => Ok(()),
            Some(NoRoom::Full) => Err(CommitError::Full { dropped_rows: rows }),
        }
    }

    /// Moves the open step to rows of a batch before `batch`: its own are given back.
    fn go_back(&mut self, batch: u64) {
        let Way::InPlace(cursor) = &mut self.way else { return };
        // Somebody else may have come for it.
        let Some(claimed) = self.gate.claim_before(batch, self.lanes.len(), cursor) else { return };
        let old = self.open.claim;
        let sources: Vec<_> = (0..self.in_slot.len()).map(|leaf| self.place(leaf)).collect();
        match claimed {
            Claimed::Rows(claim) => self.open_rows(claim),
            Claimed::Staged => self.open.in_buffer(0),
        }
        for (leaf, (from, stride)) in sources.into_iter().enumerate() {
            let (to, bytes) = (self.place(leaf), self.in_slot[leaf].bytes);
            // SAFETY: both claims are this writer's, and so is its lane buffer (invariant 2); none of them overlap.
            unsafe { copy_lanes((from.cast_const(), stride), to, bytes, self.lanes.len()) };
        }
        self.gate.unclaim(&old);
    }

    /// Waits at the lag gate.
    pub(super) fn wait_for_version(&self, version: u64) -> Result<(), PolicyError> {
        self.wait_for_version_unless(version, || false).map(drop)
    }

    /// Waits at the lag gate: false if `unless` became true before the version was published.
    fn wait_for_version_unless(&self, version: u64, unless: impl Fn() -> bool) -> Result<bool, PolicyError> {
        let Some(lag) = &self.gate.lag else { return Ok(true) };
        if lag.versions.newest() >= version {
            return Ok(true);
        }
        let begun = Instant::now();
        let reached = |newest| newest >= version || unless();
        let over = self.gate.note_lag_wait(|| lag.versions.wait_until(None, reached, || self.gate.closed()));
        self.counters.block_on_policy(begun.elapsed().as_nanos() as u64);
        over.map_err(PolicyError::Closed)?;
        Ok(lag.versions.newest() >= version)
    }
}
