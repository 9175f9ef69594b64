//! Slots that a sampling thread fills: it takes a free one, fills all of it, and hands it over.

use super::{IntakeGate, Lease, Sealed};
use crate::error::Closed;
use crate::gather::Gathering;
use crate::metrics::Stage;
use crate::store::OpenGather;
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The right to one free buffer of the device that a batch is to go to. One that a device gathers is selected with it, so
/// that it never waits with its records for a learner: those are in the way of writers and of a load. Of others, which the
/// CPU has filled, it is owed: whatever is selected behind them waits for their buffers too. Its drop gives it back.
#[derive(Debug)]
pub(crate) struct Credit {
    /// Taken where it is spent.
    gate: Option<Arc<IntakeGate>>,
    turn: usize,
}

impl Credit {
    /// The buffer is taken.
    pub(crate) fn spend(mut self) {
        self.gate = None;
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take().filter(|gate| !gate.is_inherited()) {
            gate.grant(self.turn, 1);
        }
    }
}

impl IntakeGate {
    /// A slot that nobody uses, and where a device gathers a buffer there too; waits for both if it may, else `None`: so also
    /// where whose buffer it is shows only when the batch before has its number.
    pub(crate) fn free_slot(self: &Arc<Self>, wait: bool) -> Result<Option<(Lease, Option<Credit>)>, Closed> {
        let mut state = lock(&self.state);
        loop {
            #[cfg(test)]
            crate::sync::points::here("sampling: round");
            if let Some(closed) = &state.closed {
                return Err(closed.clone());
            }
            let on_credit = self.gathering.as_ref().filter(|gathering| gathering.tables().is_some());
            // Nobody else puts batches in, so the next number is this one's.
            let on_credit = on_credit.map(|gathering| (gathering, gathering.turn(self.batches.next_sequence())));
            if !wait && on_credit.is_some() {
                return Ok(None);
            }
            if on_credit.is_none_or(|(gathering, turn)| gathering.has_credit(turn))
                && let Some(slot) = state.free.pop()
            {
                let credit = on_credit.map(|(gathering, turn)| {
                    gathering.lend(turn, -1);
                    Credit { gate: Some(self.clone()), turn }
                });
                return Ok(Some((Lease { slot, home: self.clone() }, credit)));
            }
            if !wait {
                return Ok(None);
            }
            state.parked += 1;
            state = self.room.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            (state.parked, state.waking) = (state.parked - 1, false);
        }
    }

    /// Has the sampling thread look again, wherever it waits.
    #[cfg(test)]
    pub(crate) fn nudge_sampling(&self) {
        drop(lock(&self.state)); // it has looked, or is parked
        self.room.notify_all();
        self.store.iter().for_each(|store| store.nudge_sampling());
    }

    /// So many buffers more are free for batches of that turn.
    pub(crate) fn grant(&self, turn: usize, buffers: usize) {
        if let Some(gathering) = self.gathering.as_ref().filter(|_| buffers > 0) {
            gathering.lend(turn, buffers as isize);
            drop(lock(&self.state)); // whoever waits for it has looked, or is parked
            self.room.notify_all();
        }
    }

    /// So many buffers are free for no batch any more. What was selected for them and waits would wait for another learner: it
    /// reaches nobody.
    pub(crate) fn withdraw(&self, turn: usize, buffers: usize) {
        if let Some(gathering) = &self.gathering {
            gathering.lend(turn, -(buffers as isize));
            if gathering.owes(turn) {
                self.discard_waiting();
            }
        }
    }

    /// Hands a filled slot over, or one for a device to gather, unless the store was cleared since it was selected, or the
    /// device's buffers were withdrawn: that is asked with the batch gate locked. Then, and behind the close, it comes home.
    pub(crate) fn deliver(
        self: &Arc<Self>,
        (lease, credit): (Lease, Option<Credit>),
        gather: Option<OpenGather>,
        rows: usize,
        (begun, ends_pass): (Instant, bool),
        clears: u64,
    ) {
        #[cfg(test)]
        crate::sync::points::here("sampling: delivers");
        let now = Instant::now();
        self.counters.stage(Stage::Fill, now - begun);
        let gathered = gather.is_some();
        let mut parts = Some((lease, gather, credit)); // not dropped with the lock held
        let put = self.batches.put_if(|sequence| {
            let counts = self.store.as_ref().is_none_or(|store| store.counts(clears, rows));
            // Whoever withdrew the buffer discards what waits, which this did not.
            let owes = |gathering: &Gathering| gathering.owes(gathering.turn(sequence));
            if counts && gathered && self.gathering.as_ref().is_some_and(owes) {
                self.store.iter().for_each(|store| store.give_back(rows));
                return None;
            }
            let (lease, gather, credit) = if counts { parts.take()? } else { return None };
            let owed = || {
                let gathering = self.gathering.as_ref().filter(|gathering| gathering.parts().is_some())?;
                let turn = gathering.turn(sequence);
                gathering.lend(turn, -1);
                Some(Credit { gate: Some(self.clone()), turn })
            };
            let credit = credit.or_else(owed);
            self.counters.batches.fetch_add(1, Ordering::Relaxed);
            self.counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
            Some(Sealed { lease, rows, sequence, sealed: now, ends_pass, clears, gather, credit })
        });
        put.into_iter().for_each(|wakes| self.batches.wake(wakes));
    }

    /// Takes back every batch that waits: its rows reach nobody.
    pub(crate) fn discard_waiting(&self) {
        for sealed in self.batches.take_all() {
            self.store.iter().for_each(|store| store.give_back(sealed.rows));
        }
    }

    /// No further batch comes: the learner takes what is there, then sees the end.
    pub(crate) fn end_sampling(&self) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(Closed::Ended);
        let ended = self.batches.end(Closed::Ended);
        let ring = self.release_ring(&mut state);
        self.announce_close(state);
        self.store.iter().for_each(|store| store.close(Closed::Ended));
        drop(ring);
        self.wake_watchers();
        self.batches.wake(ended); // last: a waker may panic, or never return
    }
}
