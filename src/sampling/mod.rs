//! From a store to batches: select, gather, deliver.
//!
//! Owns the round that a sampling thread goes: it takes a free slot first, so that nothing is selected that has nowhere to
//! go; then chooses items, fills the slot, alone or with the helpers of a [`Crew`] (or writes there what a device needs
//! to gather them), and hands it over. What it does not
//! do: decide what is chosen (see `store`), or start threads (see `actors`).

mod crew;

pub(crate) use crew::Crew;

use crate::intake::IntakeGate;
use crate::select::{Pass, Selected};
use crate::store::{NoItems, Scratch, Store};
use std::sync::Arc;

/// A stream of batches from one store.
#[derive(Debug)]
pub(crate) struct Stream {
    gate: Arc<IntakeGate>,
    store: Arc<Store>,
    crew: Arc<Crew>,
}

impl Stream {
    pub(crate) fn new(gate: Arc<IntakeGate>, store: Arc<Store>, crew: Arc<Crew>) -> Stream {
        Stream { gate, store, crew }
    }

    /// Delivers batches until the gates close, or until nothing can come any more.
    ///
    /// # Panics
    /// If the sampler breaks its contract.
    pub(crate) fn run(&self) {
        let (mut items, mut scratch) = (Vec::with_capacity(self.gate.layout.rows), Scratch::default());
        loop {
            match self.round(items, &mut scratch) {
                Ok(list) => items = list,
                Err(NoItems::Closed(_)) => return,
                Err(NoItems::Ended) => return self.gate.end_sampling(),
            }
        }
    }

    /// One batch. `items` is a list to use again.
    fn round(&self, items: Vec<Selected>, scratch: &mut Scratch) -> Result<Vec<Selected>, NoItems> {
        let (lease, credit) = self.gate.free_slot().map_err(NoItems::Closed)?;
        let mut selection = self.store.select(items)?;
        let (rows, begun, pass) = (selection.items.len(), selection.begun, selection.pass);
        let chosen = std::mem::take(&mut selection.items);
        // A device gathers full batches alone: the places of others in a column would be those of another layout.
        let tables = self.gate.gathering.as_ref().and_then(|gathering| gathering.tables());
        let tables = tables.filter(|_| rows == self.gate.layout.rows && credit.is_some());
        selection.items = self.crew.fill(&self.store, &self.gate, chosen, (lease.slot, tables), scratch);
        if tables.is_some() {
            let (items, gather) = self.store.hand_to_device(selection, rows);
            if gather.is_some() {
                self.gate.deliver((lease, credit), gather, rows, begun, pass == Pass::Ended);
            }
            return Ok(items);
        }
        // SAFETY: every row is filled and nobody else touches the slot, which is this thread's until it is delivered
        // (invariant 2).
        #[allow(unsafe_code)]
        unsafe {
            self.gate.slots.close_ranks(lease.slot, rows)
        };
        let (items, counts) = self.store.finish(selection, rows);
        if counts {
            self.gate.deliver((lease, credit), None, rows, begun, pass == Pass::Ended);
        }
        Ok(items)
    }
}
