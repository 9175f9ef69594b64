//! From a store to batches: select, gather, deliver.
//!
//! Owns the round that a sampling thread goes: it takes a free slot first, so that nothing is selected that has nowhere to
//! go; then chooses items, fills the slot, alone or with the helpers of a [`Crew`] (or writes there what a device needs
//! to gather them), and hands it over. What it does not
//! do: decide what is chosen (see `store`), or start threads (see `actors`).

mod crew;

pub(crate) use crew::Crew;

use crate::intake::{Credit, IntakeGate, Lease};
use crate::select::{Pass, Selected};
use crate::store::{Mixed, NoItems, Scratch, Selection, Store, Wanted};
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
        let mut carried = 0.0;
        loop {
            match self.round(items, &mut carried, &mut scratch) {
                Ok(list) => items = list,
                Err(NoItems::Closed(_)) => return,
                Err(NoItems::Ended) => return self.gate.end_sampling(),
            }
        }
    }

    /// One batch. `items` is a list to use again.
    fn round(&self, items: Vec<Selected>, carried: &mut f64, scratch: &mut Scratch) -> Result<Vec<Selected>, NoItems> {
        let (lease, credit) = self.gate.free_slot().map_err(NoItems::Closed)?;
        if let Some(mixed) = self.gate.mixed.clone() {
            return self.mixed_round(items, (lease, credit), &mixed, carried, scratch);
        }
        let all = Wanted { rows: self.gate.layout.rows, spare: false, mixed: false };
        let (mut selection, _) = self.store.select(items, || all)?;
        let (rows, begun, pass) = (selection.items.len(), selection.begun, selection.pass);
        let chosen = std::mem::take(&mut selection.items);
        // A device gathers full batches alone: the places of others in a column would be those of another layout.
        let tables = self.gate.gathering.as_ref().and_then(|gathering| gathering.tables());
        let tables = tables.filter(|_| rows == self.gate.layout.rows && credit.is_some());
        selection.items = self.crew.fill(&self.store, &self.gate, chosen, (lease.slot, tables), scratch);
        let Selection { items, clears, gather, .. } = selection;
        let gather = if tables.is_some() {
            Some(gather) // it ends on the device
        } else {
            // SAFETY: every row is filled and nobody else touches the slot, which is this thread's until it is delivered
            // (invariant 2).
            #[allow(unsafe_code)]
            unsafe {
                self.gate.slots.close_ranks(lease.slot, rows)
            };
            drop(gather);
            None
        };
        self.gate.deliver((lease, credit), gather, rows, (begun, pass == Pass::Ended), clears);
        Ok(items)
    }

    /// One batch with rows of a second store behind its own.
    fn mixed_round(
        &self,
        items: Vec<Selected>,
        (lease, credit): (Lease, Option<Credit>),
        mixed: &Arc<Mixed>,
        carried: &mut f64,
        scratch: &mut Scratch,
    ) -> Result<Vec<Selected>, NoItems> {
        let rows = self.gate.layout.rows;
        let share = mixed.share(carried);
        let wanted = || {
            let spare = mixed.has_items();
            Wanted { rows: if spare { rows - share } else { rows }, spare, mixed: true }
        };
        let (mut selection, wanted) = self.store.select(items, wanted)?;
        let mut pass = selection.pass;
        // What was reserved beside the own rows, which are all of them where the own store has too little.
        let reserved = if selection.items.is_empty() { rows } else { rows - wanted.rows };
        let other = mixed.select(reserved);
        // A second sampler that uses items up may have fewer than its part.
        let lack = reserved - other.as_ref().map_or(0, |other| other.items.len());
        let own = selection.items.len();
        let more = if lack > 0 && own > 0 { self.store.select_more(lack, &mut selection.items) } else { None };
        if let Some((_, Pass::Ended)) = more {
            pass = Pass::Ended;
        }
        let reserved = own + reserved; // of all rows
        let (own, begun) = (selection.items.len(), selection.begun);
        let chosen = std::mem::take(&mut selection.items);
        selection.items = self.crew.fill(&self.store, &self.gate, chosen, (lease.slot, None), scratch);
        let mut total = own;
        if let Some(mut other) = other {
            let chosen = std::mem::take(&mut other.items);
            total += chosen.len();
            self.crew.fill_mixed(mixed, &self.gate, chosen, (lease.slot, own), scratch);
            drop(other); // its gather has ended
        }
        self.store.give_back(reserved - total);
        // SAFETY: as in `round`.
        #[allow(unsafe_code)]
        unsafe {
            self.gate.slots.close_ranks(lease.slot, total)
        };
        let Selection { items, clears, gather, .. } = selection;
        drop((gather, more));
        if total == 0 {
            // The second sampler had nothing after all, and will not say when it has: it is asked again in a while.
            self.store.rest();
        } else {
            self.gate.deliver((lease, credit), None, total, (begun, pass == Pass::Ended), clears);
        }
        Ok(items)
    }
}
