//! Unrolls of free-running lanes: gathered in the lane buffer, copied once when complete.
//!
//! The buffer is a ring of T + 1 steps, so an unroll of T steps and the observation after it lie in it together, and
//! the first step of the next unroll takes no place that the last one still needs. A slow, hung or dead environment
//! holds no slot, and drop policies act on whole unrolls.

use super::{CommitError, PolicyError, StepError, Way, Writer};
use crate::intake::{Begin, NoRoom};
use crate::slots::{RowRecord, copy_lanes, zero_lanes};
use crate::sync::Patience;
use crate::weights::Weights;
use crate::writer::lane::Flags;
use std::sync::Arc;
use std::time::Instant;

/// One or more lanes' unrolls that go out together.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    /// The first lane, and how many.
    lane: usize,
    lanes: usize,
    /// The tick that the unrolls began at, and their real steps.
    start: u64,
    length: usize,
    /// The episode ended with the last step, and the sample stays within episodes.
    ended: bool,
}

impl Writer {
    pub(super) fn begin_staged(&mut self, patience: Patience, explicit: bool) -> Result<(), StepError> {
        // With a feed that fails, look for room before anything is begun, so that nothing is lost by the error.
        let asks = explicit || !(self.drops_newest() || matches!(patience, Patience::Forever));
        let due = (0..self.lanes.len()).filter(|&lane| self.is_due(lane)).count();
        if asks && due > 0 {
            let Way::Staged(cursor) = &mut self.way else { unreachable!("`begin` matched the way") };
            let room = self.gate.wait_for_room(due, cursor, patience, &self.counters);
            room.map_err(|no_room| self.step_error(no_room))?;
        } else if let Some(closed) = self.gate.closed() {
            return Err(StepError::Closed(closed));
        }
        let step = (self.tick % (self.steps() as u64 + 1)) as usize;
        self.open.in_buffer(step);
        Ok(())
    }

    pub(super) fn policy_staged<W: Send + Sync + 'static>(
        &mut self,
        weights: &Weights<W>,
    ) -> Result<(u64, Arc<W>), PolicyError> {
        self.hand_over_due()?;
        if let Some(lag) = &self.gate.lag {
            let begins = |lane: &usize| self.lanes.get(*lane).unroll_start == self.tick && !self.lanes.get(*lane).begun;
            let rows = (0..self.lanes.len()).filter(begins).count();
            let unfinished = (0..self.lanes.len()).filter(|&lane| self.lanes.get(lane).begun).count();
            let begin = Begin { rows, unfinished, batch_rows: self.gate.layout.rows };
            if rows > 0 && !lag.try_begin(begin) {
                let since = Instant::now();
                let begun = self.gate.note_lag_wait(|| lag.begin(begin, || self.gate.closed()));
                self.counters.block_on_policy(since.elapsed().as_nanos() as u64);
                begun?;
            }
            let tick = self.tick;
            for lane in 0..self.lanes.len() {
                let state = self.lanes.state(lane);
                state.begun |= state.unroll_start == tick;
            }
        }
        Ok(weights.latest())
    }

    pub(super) fn commit_staged(&mut self) -> Result<(), CommitError> {
        let dropped = match self.hand_over_due() {
            Ok(()) => Ok(()),
            Err(PolicyError::Full { dropped_rows }) => Err(CommitError::Full { dropped_rows }),
            Err(PolicyError::Closed(closed)) => return Err(CommitError::Closed(closed)),
            Err(other) => return Err(CommitError::Policy(other)),
        };
        let version = self.version.unwrap_or(0);
        let place = self.buffer_step(self.tick);
        for lane in 0..self.lanes.len() {
            self.history.set(place, lane, self.lanes.flags(lane, self.tick), version);
        }
        let ended: Vec<usize> = match self.gate.layout.within_episode {
            true => (0..self.lanes.len()).filter(|&lane| self.lanes.flags(lane, self.tick).end.is_some()).collect(),
            false => Vec::new(),
        };
        let finals: Vec<bool> = ended.iter().map(|&lane| self.lanes.finals[lane]).collect();
        self.account(version);
        let mut result = dropped;
        for (lane, has_final) in ended.into_iter().zip(finals) {
            let start = self.lanes.get(lane).unroll_start;
            if !has_final {
                self.zero_final(lane);
            }
            let length = (self.tick - start) as usize;
            let out = self.hand_over(Outgoing { lane, lanes: 1, start, length, ended: true });
            self.begin_unroll(lane, self.tick);
            result = both(result, out);
        }
        result
    }

    /// Steps of an unroll.
    fn steps(&self) -> usize {
        self.gate.layout.steps
    }

    fn buffer_step(&self, tick: u64) -> usize {
        (tick % (self.steps() as u64 + 1)) as usize
    }

    /// Whether the lane has all T steps and only waits for the observation after them.
    fn is_due(&self, lane: usize) -> bool {
        self.tick - self.lanes.get(lane).unroll_start == self.steps() as u64
    }

    /// Hands over the unrolls that the open step's observation completes.
    fn hand_over_due(&mut self) -> Result<(), PolicyError> {
        let lanes = self.lanes.len();
        let (mut lane, mut result) = (0, Ok(()));
        while lane < lanes {
            if !self.is_due(lane) {
                lane += 1;
                continue;
            }
            let run = (lane..lanes).take_while(|&other| self.is_due(other)).count();
            let start = self.lanes.get(lane).unroll_start;
            let out = self.hand_over(Outgoing { lane, lanes: run, start, length: self.steps(), ended: false });
            (lane..lane + run).for_each(|lane| self.begin_unroll(lane, self.tick));
            lane += run;
            result = both(result, out);
        }
        result.map_err(|error| match error {
            CommitError::Full { dropped_rows } => PolicyError::Full { dropped_rows },
            CommitError::Closed(closed) => PolicyError::Closed(closed),
            CommitError::Policy(error) => error,
            _ => unreachable!("`hand_over` fails for want of room or because the gate closed"),
        })
    }

    /// Copies unrolls into rows, waiting for room as `WhenFull` says.
    fn hand_over(&mut self, out: Outgoing) -> Result<(), CommitError> {
        let patience = self.gate.when_full.patience();
        let mut done = 0;
        let stopped = loop {
            if done == out.lanes {
                break None;
            }
            let claim = match self.claim_some(out.lanes - done, patience) {
                Ok(claim) => claim,
                Err(no_room) => break Some(no_room),
            };
            let rows = claim.rows as usize;
            let part = Outgoing { lane: out.lane + done, lanes: rows, ..out };
            self.copy_unrolls(part, claim.slot, claim.start as usize);
            if let Err(closed) = self.gate.commit(&claim) {
                break Some(NoRoom::Closed(closed));
            }
            self.counters.stage(rows as u64);
            done += rows;
        };
        let lost = out.lanes - done;
        if let Some(lag) = self.gate.lag.as_ref().filter(|_| lost > 0) {
            let begun = (out.lane + done..out.lane + out.lanes).filter(|&lane| self.lanes.get(lane).begun).count();
            lag.give_up(begun);
        }
        self.settle_drop(lost, stopped)
    }

    fn copy_unrolls(&mut self, out: Outgoing, slot: u32, row: usize) {
        let layout = self.gate.layout.clone();
        let base = self.gate.slots.slot(slot);
        for (index, (to, from)) in self.in_slot.iter().zip(&self.buffer.places).enumerate() {
            let at = |step: usize| (base.wrapping_add(to.at(row, step)), to.row_stride);
            let observation = layout.leaves[index].observation;
            // The observation after the last step: the open step's, or the final one.
            let real = out.length + usize::from(observation);
            for step in 0..real {
                let place = match step == out.length && out.ended {
                    true => self.steps() + 1, // the final observations' place
                    false => self.buffer_step(out.start + step as u64),
                };
                let source = (self.buffer.base().wrapping_add(from.at(out.lane, place)).cast_const(), from.row_stride);
                // SAFETY: the lanes' values in the buffer are this writer's, the rows are its claim's (invariant 2),
                // and ring and buffer never overlap.
                unsafe { copy_lanes(source, at(step), to.bytes, out.lanes) };
            }
            for step in real..layout.columns[index].steps {
                // SAFETY: rows of the claim; padding is zero, not the last lap's bytes (invariant 6).
                unsafe { zero_lanes(at(step), to.bytes, out.lanes) };
            }
        }
        for lane in 0..out.lanes {
            self.finish_unroll_row(Outgoing { lane: out.lane + lane, lanes: 1, ..out }, slot, row + lane);
        }
    }

    /// Writes the derived columns and the record of one unroll.
    fn finish_unroll_row(&mut self, out: Outgoing, slot: u32, row: usize) {
        let steps = self.steps();
        let mut version = 0;
        for step in 0..steps {
            let padding = step >= out.length;
            let (flags, acted) = match padding {
                true => (Flags { end: None, masked: true, first: false }, 0),
                false => self.history.get(self.buffer_step(out.start + step as u64), out.lane),
            };
            if step == 0 {
                version = acted;
            }
            self.set_flags(slot, row, step, flags, acted);
        }
        let next_first = !out.ended && self.lanes.flags(out.lane, self.tick).first;
        self.set_is_first(slot, row, steps, next_first);
        let record = RowRecord {
            lane: (self.seat.lanes.start + out.lane) as u32,
            length: out.length as u32,
            first_step: out.start,
            version,
            ..RowRecord::default()
        };
        // SAFETY: the row is claimed by this writer (invariant 2).
        unsafe { self.gate.slots.set_record(slot, row, record) };
    }

    fn begin_unroll(&mut self, lane: usize, tick: u64) {
        let state = self.lanes.state(lane);
        (state.unroll_start, state.begun) = (tick, false);
    }

    /// Drops a lane's unfinished unroll, and counts its steps.
    pub(super) fn give_up_unroll(&mut self, lane: usize) {
        let state = self.lanes.get(lane);
        self.counters.leave_unfinished(self.tick - state.unroll_start);
        if let Some(lag) = self.gate.lag.as_ref().filter(|_| state.begun) {
            lag.give_up(1);
        }
        self.begin_unroll(lane, self.tick);
    }

    pub(super) fn put_final<T: crate::Element>(&mut self, index: usize, lane: usize, values: &[T]) {
        if !self.lanes.finals[lane] {
            self.zero_final(lane);
            self.lanes.finals[lane] = true;
        }
        let (to, bytes) = (self.final_place(index, lane), self.buffer.places[index].bytes);
        // SAFETY: the final observations' place in this writer's own buffer; `values` has the leaf's length.
        unsafe { copy_lanes((values.as_ptr().cast(), bytes), (to, bytes), bytes, 1) };
    }

    /// Where a lane's final observation lies.
    pub(super) fn final_place(&self, index: usize, lane: usize) -> *mut u8 {
        let step = if let Way::Stored(_) = self.way { 1 } else { self.steps() + 1 };
        self.buffer.base().wrapping_add(self.buffer.places[index].at(lane, step))
    }

    /// Zeroes the final observations of a lane.
    fn zero_final(&self, lane: usize) {
        for (index, place) in self.buffer.places.iter().enumerate() {
            // SAFETY: the final observations' place in this writer's own buffer.
            unsafe { zero_lanes((self.final_place(index, lane), 0), place.bytes, 1) };
        }
    }
}

/// What two hand-overs of one step came to: the rows that found no room are told together, and a close before all.
fn both(first: Result<(), CommitError>, second: Result<(), CommitError>) -> Result<(), CommitError> {
    match (first, second) {
        (Err(CommitError::Full { dropped_rows: a }), Err(CommitError::Full { dropped_rows: b })) => {
            Err(CommitError::Full { dropped_rows: a + b })
        }
        (Err(CommitError::Full { .. }), Err(other)) => Err(other),
        (first, second) => first.and(second),
    }
}
