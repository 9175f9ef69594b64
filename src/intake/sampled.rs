//! Slots that a sampling thread fills: it takes a free one, fills all of it, and hands it over.

use super::{IntakeGate, Lease, Sealed};
use crate::error::Closed;
use crate::metrics::Stage;
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl IntakeGate {
    /// A slot that nobody uses; waits for one.
    pub(crate) fn free_slot(self: &Arc<Self>) -> Result<Lease, Closed> {
        let mut state = lock(&self.state);
        loop {
            if let Some(closed) = &state.closed {
                return Err(closed.clone());
            }
            if let Some(slot) = state.free.pop() {
                return Ok(Lease { slot, home: self.clone() });
            }
            state.parked += 1;
            state = self.room.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            (state.parked, state.waking) = (state.parked - 1, false);
        }
    }

    /// Hands a filled slot over. Behind the close it comes home.
    pub(crate) fn deliver(self: &Arc<Self>, lease: Lease, rows: usize, begun: Instant, ends_pass: bool) {
        let now = Instant::now();
        self.counters.stage(Stage::Fill, now - begun);
        let put = self.batches.put(|sequence| {
            self.counters.batches.fetch_add(1, Ordering::Relaxed);
            self.counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
            Sealed { lease, rows, sequence, sealed: now, ends_pass }
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
        self.batches.wake(ended);
        self.wake_watchers();
        drop(ring);
    }
}
