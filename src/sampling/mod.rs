//! From a store to batches: select, gather, deliver.
//!
//! Owns the round that a sampling thread goes: it takes a free slot first, so that nothing is selected that has nowhere to
//! go; then chooses items, fills the slot, alone or with the helpers of a [`Crew`] (or writes there what a device needs
//! to gather them), and hands it over. What it does not do: decide what is chosen (see `store`), or start threads (see
//! `actors`).

mod crew;

pub(crate) use crew::Crew;

use crate::gather::Tables;
use crate::intake::{Credit, IntakeGate, Lease};
use crate::select::{Pass, Selected};
use crate::store::{Mixed, NoItems, OpenGather, Scratch, Selection, Store, Wanted};
use crew::Filling;
use std::sync::Arc;
use std::time::Instant;

/// A stream of batches from one store.
#[derive(Debug)]
pub(crate) struct Stream {
    gate: Arc<IntakeGate>,
    store: Arc<Store>,
    crew: Arc<Crew>,
}

/// A batch on its way: selected, and being filled. What is dropped before it is delivered is dropped in this order: nobody
/// fills the slot any more when the records and the slot are given up (invariants 2 and 3).
struct Batch<'s> {
    filling: Filling<'s>,
    gather: OpenGather,
    lease: Lease,
    credit: Option<Credit>,
    /// If a device gathers it.
    tables: Option<&'s Tables>,
    rows: usize,
    begun: Instant,
    ends_pass: bool,
    clears: u64,
}

impl Stream {
    pub(crate) fn new(gate: Arc<IntakeGate>, store: Arc<Store>, crew: Arc<Crew>) -> Stream {
        Stream { gate, store, crew }
    }

    /// Delivers batches until the gates close, or until nothing can come any more.
    ///
    /// While helpers fill a batch, the next is selected and given to them, if that needs no waiting: they never wait for
    /// each other, nor for this thread. Batches are delivered in the order in which they were selected.
    ///
    /// # Panics
    /// If the sampler breaks its contract.
    pub(crate) fn run(&self) {
        let (mut lists, mut scratch) = (Vec::new(), Scratch::default());
        let (mut carried, mut ahead) = (0.0, None);
        loop {
            let mut items = || lists.pop().unwrap_or_else(|| Vec::with_capacity(self.gate.layout.rows));
            let next = match self.gate.mixed.clone() {
                Some(mixed) => self.mixed_round(items(), &mixed, &mut carried, &mut scratch).map(|list| {
                    lists.push(list);
                    None
                }),
                None => self.begin(&mut items, ahead.is_none()),
            };
            if let Some(previous) = ahead.take() {
                lists.push(self.finish(previous, &mut scratch));
            }
            match next {
                Ok(Some(batch)) if batch.filling.is_shared() && batch.tables.is_none() => ahead = Some(batch),
                Ok(batch) => lists.extend(batch.map(|batch| self.finish(batch, &mut scratch))),
                Err(NoItems::Closed(_)) => return,
                Err(NoItems::Ended) => return self.gate.end_sampling(),
            }
        }
    }

    /// Selects a batch and has it filled. Where that would have to wait: `None`, unless told to.
    fn begin(&self, items: &mut dyn FnMut() -> Vec<Selected>, wait: bool) -> Result<Option<Batch<'_>>, NoItems> {
        let Some((lease, credit)) = self.gate.free_slot(wait).map_err(NoItems::Closed)? else { return Ok(None) };
        let all = Wanted { rows: self.gate.layout.rows, spare: false, mixed: false };
        let Some((selection, _)) = self.store.select(items(), || all, wait)? else { return Ok(None) };
        let Selection { items, pass, begun, clears, gather } = selection;
        let rows = items.len();
        // A device gathers full batches alone: the places of others in a column would be those of another layout.
        let tables = self.gate.gathering.as_ref().and_then(|gathering| gathering.tables());
        let tables = tables.filter(|_| rows == self.gate.layout.rows && credit.is_some());
        let filling = self.crew.begin(&self.store, &self.gate, items, (lease.slot, tables));
        Ok(Some(Batch { filling, gather, lease, credit, tables, rows, begun, ends_pass: pass == Pass::Ended, clears }))
    }

    /// Fills what is left of a batch, and delivers it. Returns its list, to be used again.
    fn finish(&self, batch: Batch<'_>, scratch: &mut Scratch) -> Vec<Selected> {
        let Batch { filling, gather, lease, credit, tables, rows, begun, ends_pass, clears } = batch;
        let items = filling.finish(scratch);
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
        self.gate.deliver((lease, credit), gather, rows, (begun, ends_pass), clears);
        items
    }

    /// One batch with rows of a second store behind its own.
    fn mixed_round(
        &self,
        items: Vec<Selected>,
        mixed: &Arc<Mixed>,
        carried: &mut f64,
        scratch: &mut Scratch,
    ) -> Result<Vec<Selected>, NoItems> {
        let Some((lease, credit)) = self.gate.free_slot(true).map_err(NoItems::Closed)? else { return Ok(items) };
        let rows = self.gate.layout.rows;
        let share = mixed.share(carried);
        let wanted = || {
            let spare = mixed.has_items();
            Wanted { rows: if spare { rows - share } else { rows }, spare, mixed: true }
        };
        let Some((mut selection, wanted)) = self.store.select(items, wanted, true)? else { return Ok(Vec::new()) };
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
        selection.items = self.crew.begin(&self.store, &self.gate, chosen, (lease.slot, None)).finish(scratch);
        let mut total = own;
        if let Some(mut other) = other {
            let chosen = std::mem::take(&mut other.items);
            total += chosen.len();
            self.crew.begin_mixed(mixed, &self.gate, chosen, (lease.slot, own)).finish(scratch);
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
