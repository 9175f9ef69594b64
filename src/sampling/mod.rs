//! From a store to batches: select, gather, deliver.
//!
//! Owns the round that a sampling thread goes: it takes a free slot first, so that nothing is selected that has nowhere to
//! go; then chooses items, fills the slot, alone or with the helpers of a [`Crew`], and hands it over. What it does not
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
        let lease = self.gate.free_slot().map_err(NoItems::Closed)?;
        let mut selection = self.store.select(items)?;
        let (rows, begun, pass) = (selection.items.len(), selection.begun, selection.pass);
        let chosen = std::mem::take(&mut selection.items);
        selection.items = self.crew.fill(&self.store, &self.gate, chosen, lease.slot, scratch);
        // SAFETY: every row is filled and nobody else touches the slot, which is this thread's until it is delivered
        // (invariant 2).
        #[allow(unsafe_code)]
        unsafe {
            self.gate.slots.close_ranks(lease.slot, rows)
        };
        let (items, counts) = self.store.finish(selection, rows);
        if counts {
            self.gate.deliver(lease, rows, begun, pass == Pass::Ended);
        }
        Ok(items)
    }
}
