//! Lockstep: rows fixed by lane, written in place.
//!
//! The step that ends one unroll and begins the next is written in the lane buffer and copied to both: its observation
//! to the old slot, which is then complete, and all of it to the new one.

use super::{CommitError, PolicyError, StepError, Target, Way, Writer};
use crate::intake::{LockstepCursor, NoRoom};
use crate::slots::{RowRecord, copy_lanes};
use crate::sync::Patience;
use crate::weights::Weights;
use std::any::Any;
use std::sync::Arc;

#[derive(Default)]
pub(super) struct State {
    cursor: LockstepCursor,
    /// The slot of the unroll being written.
    slot: u32,
    /// Unrolls whose rows this writer completed.
    completed: u64,
    /// The weights that the current unroll acts with: unroll, version, weights.
    acting: Option<(u64, u64, Arc<dyn Any + Send + Sync>)>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("slot", &self.slot).field("completed", &self.completed).finish_non_exhaustive()
    }
}

impl Writer {
    fn lockstep_state(&mut self) -> &mut State {
        match &mut self.way {
            Way::Lockstep(state) => state,
            _ => unreachable!("only called for a writer in lockstep"),
        }
    }

    /// The unroll (or single step) that the open step belongs to, and its place in it.
    fn unroll(&self) -> (u64, usize) {
        let steps = self.gate.layout.steps as u64;
        (self.tick / steps, (self.tick % steps) as usize)
    }

    fn first_row(&self, unroll: u64) -> usize {
        self.gate.lockstep_row(unroll) + self.seat.lanes.start
    }

    pub(super) fn begin_lockstep(&mut self, patience: Patience) -> Result<(), StepError> {
        let (unroll, step) = self.unroll();
        if step == 0 && self.gate.layout.is_unroll() {
            // Must not wait for the new slot before the old one is complete (invariant 10).
            return match self.gate.closed() {
                Some(closed) => Err(closed.into()),
                None => {
                    self.open.in_buffer(0);
                    Ok(())
                }
            };
        }
        if step == 0 {
            let slot = self.enter(unroll, patience).map_err(|no_room| self.step_error(no_room))?;
            self.lockstep_state().slot = slot;
        } else {
            self.gate.lockstep_claim()?;
        }
        (self.open.target, self.open.claim.slot) = (Target::Lockstep, self.lockstep_state().slot);
        (self.open.row, self.open.step) = (self.first_row(unroll), step);
        Ok(())
    }

    fn enter(&mut self, unroll: u64, patience: Patience) -> Result<u32, NoRoom> {
        let (gate, counters) = (self.gate.clone(), self.counters.clone());
        gate.lockstep_enter(unroll, &mut self.lockstep_state().cursor, &counters, patience)
    }

    pub(super) fn policy_lockstep<W: Send + Sync + 'static>(
        &mut self,
        weights: &Weights<W>,
    ) -> Result<(u64, Arc<W>), PolicyError> {
        self.hand_over_lockstep()?;
        let (unroll, _) = self.unroll();
        if let Some((of, version, acting)) = &self.lockstep_state().acting
            && *of == unroll
            && let Ok(acting) = acting.clone().downcast::<W>()
        {
            return Ok((*version, acting));
        }
        let Some(lag) = &self.gate.lag else { return Ok(weights.latest()) };
        let needed = lag.needed(self.gate.lockstep_batch(unroll));
        self.wait_for_version(needed)?;
        let Some(policy) = weights.exactly(needed) else {
            let newest = weights.latest().0;
            return Err(PolicyError::VersionGone { needed, oldest: weights.oldest(), newest });
        };
        self.lockstep_state().acting = Some((unroll, needed, policy.clone()));
        Ok((needed, policy))
    }

    pub(super) fn commit_lockstep(&mut self) -> Result<(), CommitError> {
        let (unroll, step) = self.unroll();
        let version = self.version.unwrap_or(0);
        let slot = match self.open.target {
            Target::Lockstep => self.open.claim.slot,
            _ => {
                self.hand_over_lockstep().map_err(|error| match error {
                    PolicyError::Closed(closed) => CommitError::Closed(closed),
                    other => CommitError::Policy(other),
                })?;
                let slot = match self.enter(unroll, Patience::Forever) {
                    Ok(slot) => slot,
                    Err(NoRoom::Closed(closed)) => return Err(closed.into()),
                    Err(NoRoom::Full) => unreachable!("lockstep feeds block: the builder refuses anything else"),
                };
                self.lockstep_state().slot = slot;
                self.copy_boundary(slot, self.first_row(unroll), 0, |_| true);
                slot
            }
        };
        let row = self.first_row(unroll);
        for lane in 0..self.lanes.len() {
            let flags = self.lanes.flags(lane, self.tick);
            self.set_flags(slot, row + lane, step, flags, version);
            if step == 0 {
                let record = RowRecord {
                    lane: (self.seat.lanes.start + lane) as u32,
                    length: self.gate.layout.steps as u32,
                    first_step: self.tick,
                    version,
                    ..RowRecord::default()
                };
                // SAFETY: the lane's own row, with a claim open (invariant 2).
                unsafe { self.gate.slots.set_record(slot, row + lane, record) };
            }
        }
        self.account(version);
        if self.gate.layout.is_unroll() {
            return Ok(self.gate.lockstep_end_claim()?);
        }
        self.lockstep_state().completed = unroll + 1;
        Ok(self.gate.lockstep_complete(unroll, self.lanes.len())?)
    }

    /// Gives the open step's observation to the unroll that it completes, once.
    fn hand_over_lockstep(&mut self) -> Result<(), PolicyError> {
        let (unroll, step) = self.unroll();
        if step != 0 || !self.gate.layout.is_unroll() || self.lockstep_state().completed == unroll {
            return Ok(());
        }
        self.gate.lockstep_claim()?;
        let (slot, row) = (self.lockstep_state().slot, self.first_row(unroll - 1));
        let (gate, steps) = (self.gate.clone(), self.gate.layout.steps);
        self.copy_boundary(slot, row, steps, |leaf| gate.layout.leaves[leaf].observation);
        for lane in 0..self.lanes.len() {
            let first = self.lanes.flags(lane, self.tick).first;
            self.set_is_first(slot, row + lane, steps, first);
        }
        self.lockstep_state().completed = unroll;
        gate.lockstep_complete(unroll - 1, self.lanes.len())?;
        // These rows are in their batch, even if they were the last that can be; then nothing can be begun.
        gate.closed().map_or(Ok(()), |closed| Err(closed.into()))
    }

    /// Copies leaves of the open step from the lane buffer to `step` of the lanes' rows.
    fn copy_boundary(&self, slot: u32, row: usize, step: usize, wanted: impl Fn(usize) -> bool) {
        let base = self.gate.slots.slot(slot);
        for (index, (to, from)) in self.in_slot.iter().zip(&self.buffer.places).enumerate() {
            if !wanted(index) {
                continue;
            }
            let source = (self.buffer.base().wrapping_add(from.at(0, 0)).cast_const(), from.row_stride);
            let target = (base.wrapping_add(to.at(row, step)), to.row_stride);
            // SAFETY: the lanes' own rows, with a claim open (invariant 2); ring and buffer never overlap.
            unsafe { copy_lanes(source, target, to.bytes, self.lanes.len()) };
        }
    }

    /// The first unroll whose rows this writer did not complete.
    pub(super) fn first_incomplete_unroll(&mut self) -> u64 {
        let (unroll, step) = self.unroll();
        let completed = self.lockstep_state().completed;
        if self.gate.layout.is_unroll() {
            let pending = (unroll - completed) * self.gate.layout.steps as u64 + step as u64;
            self.counters.leave_unfinished(pending * self.lanes.len() as u64);
        }
        completed
    }
}
