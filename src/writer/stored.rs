//! Steps on their way into a step store: written in the lane buffer, copied into their lanes' records at commit.
//!
//! Lanes fill chunks of their own, so the lanes of one step lie apart in the store, and views of all of them do not: hence
//! the buffer. The records are opened when the step begins, so a commit waits for nothing but, where an episode's final
//! observation needs a further chunk, for gathers that end by themselves.

use super::{CommitError, StepError, Way, Writer};
use crate::episodes::End;
use crate::error::Closed;
use crate::store::{Flags, NoChunk, Opened, Store};
use crate::sync::Patience;
use crate::writer::lane;
use std::sync::Arc;

/// A writer's way into the store.
#[derive(Debug)]
pub(super) struct State {
    pub(super) store: Arc<Store>,
    /// Of each lane, the record of the open step.
    opened: Vec<Opened>,
    /// Of each lane, what its writer says that the sample which the open step completes is worth.
    priorities: Vec<Option<f32>>,
    /// Observation leaves that samples read behind an episode's last step.
    reads_final: Vec<usize>,
    /// Of each leaf and lane, whether its final observation was put in the open step.
    finals: Vec<bool>,
    /// The flags of the open step.
    flags: Vec<Option<Flags>>,
}

impl State {
    pub(super) fn new(store: Arc<Store>, lanes: usize) -> State {
        State {
            opened: vec![Opened::default(); lanes],
            priorities: vec![None; lanes],
            reads_final: store.reads_final(),
            finals: vec![false; lanes * store.layout.leaves.len()],
            flags: vec![None; lanes],
            store,
        }
    }

    /// Ordinary memory for one lane.
    pub(super) fn lane_bytes(leaves: usize) -> usize {
        size_of::<Opened>() + size_of::<Option<f32>>() + size_of::<Option<Flags>>() + leaves
    }

    pub(super) fn set_priority(&mut self, lane: usize, priority: f32) {
        self.priorities[lane] = Some(priority);
    }

    pub(super) fn note_final(&mut self, leaf: usize, lane: usize) {
        let lanes = self.opened.len();
        self.finals[leaf * lanes + lane] = true;
    }

    fn has_final(&self, leaf: usize, lane: usize) -> bool {
        self.finals[leaf * self.opened.len() + lane]
    }

    /// Forgets what was said of the open step.
    pub(super) fn clear(&mut self) {
        self.priorities.fill(None);
        self.finals.fill(false);
    }
}

impl Writer {
    fn stored(&mut self) -> &mut State {
        match &mut self.way {
            Way::Stored(state) => state,
            _ => unreachable!("only called for a writer into a store"),
        }
    }

    pub(super) fn begin_stored(&mut self, patience: Patience) -> Result<(), StepError> {
        let first = self.seat.lanes.start as u32;
        let Way::Stored(state) = &mut self.way else { unreachable!("`begin` matched the way") };
        state.clear();
        match state.store.begin(first, &mut state.opened, patience, &self.counters) {
            Ok(()) => {
                self.open.in_buffer(0);
                Ok(())
            }
            Err(NoChunk::Closed(closed)) => Err(StepError::Closed(closed)),
            Err(NoChunk::Pace(pace)) => Err(StepError::Pace(pace)),
            Err(NoChunk::Gathering) => Err(StepError::Gathering),
        }
    }

    pub(super) fn commit_stored(&mut self) -> Result<(), CommitError> {
        if self.gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        self.check_finals()?;
        let (tick, lanes, version) = (self.tick, self.lanes.len(), self.version.unwrap_or(0));
        let within = self.gate.layout.within_episode;
        for lane in 0..lanes {
            let lane::Flags { end, masked, first } = self.lanes.flags(lane, tick);
            // A reset step in front of an episode is no part of it: no window within episodes ever reads it.
            let outside = within && masked && self.lanes.get(lane).episode_start == tick;
            let flags = Flags {
                terminated: end == Some(End::Terminated),
                truncated: end == Some(End::Truncated),
                masked,
                first,
                last: false,
            };
            self.stored().flags[lane] = (!outside).then_some(flags);
        }
        self.copy_steps()?;
        let first = self.seat.lanes.start as u32;
        let Way::Stored(state) = &self.way else { unreachable!("`commit` matched the way") };
        let of = |lane: usize| state.flags[lane].map(|flags| (flags, state.priorities[lane]));
        state.store.publish_steps(first, &state.opened, version, &of).map_err(|closed| self.closed(closed))?;
        if within {
            let ended = |lane: &usize| state.flags[*lane].is_some_and(Flags::ends);
            for lane in (0..lanes).filter(ended) {
                self.store_final(state, lane)?;
            }
        }
        self.account(version);
        Ok(())
    }

    fn closed(&self, closed: Closed) -> CommitError {
        self.counters.drop_rows(self.lanes.len() as u64);
        CommitError::Closed(closed)
    }

    /// A truncated episode is bootstrapped from its final observation, so that must be there.
    fn check_finals(&self) -> Result<(), CommitError> {
        let Way::Stored(state) = &self.way else { unreachable!("`commit` matched the way") };
        if !self.lanes.any_marks() {
            return Ok(());
        }
        for lane in 0..self.lanes.len() {
            if self.lanes.flags(lane, self.tick).end != Some(End::Truncated) {
                continue;
            }
            if let Some(&leaf) = state.reads_final.iter().find(|&&leaf| !state.has_final(leaf, lane)) {
                let leaf = self.gate.layout.leaves[leaf].name.clone();
                return Err(CommitError::FinalUnwritten { leaf, lane });
            }
        }
        Ok(())
    }

    /// Copies the open step into the records that were opened for it.
    fn copy_steps(&mut self) -> Result<(), CommitError> {
        let first = self.seat.lanes.start as u32;
        let Way::Stored(state) = &mut self.way else { unreachable!("`commit` matched the way") };
        // They were opened when the step began, so this waits for nobody.
        let ring = match state.store.open(first, &mut state.opened, &self.counters) {
            Ok(ring) => ring,
            Err(closed) => return Err(self.closed(closed)),
        };
        for (lane, opened) in state.opened.iter().enumerate() {
            for (leaf, place) in self.buffer.places.iter().enumerate() {
                let from = self.buffer.base().wrapping_add(place.at(lane, 0)).cast_const();
                // SAFETY: the lane's value in this writer's own buffer, written in this step; the record is this lane's,
                // opened and not published, and `ring` keeps it mapped (invariants 2 and 7).
                unsafe { state.store.put(*opened, leaf, Some(from)) };
            }
        }
        drop(ring);
        Ok(())
    }

    /// Stores what the lane's environment showed last, and ends the run.
    fn store_final(&self, state: &State, lane: usize) -> Result<(), CommitError> {
        let (mut opened, lane_id) = ([Opened::default()], (self.seat.lanes.start + lane) as u32);
        let ring = state.store.open(lane_id, &mut opened, &self.counters).map_err(|closed| self.closed(closed))?;
        for (leaf, _) in
            self.gate.layout.leaves.iter().enumerate().filter(|(_, info)| info.observation && info.every == 1)
        {
            let from = state.has_final(leaf, lane).then(|| self.final_place(leaf, lane).cast_const());
            // SAFETY: the final observations' place in this writer's own buffer, put in this step; the record as above.
            unsafe { state.store.put(opened[0], leaf, from) };
        }
        let published = state.store.publish_final(lane_id, opened[0], state.priorities[lane]);
        drop(ring);
        published.map_err(|closed| self.closed(closed))
    }
}
