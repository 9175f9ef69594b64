//! Rows of a second store in the batches of a feed.
//!
//! Owns what of the second store's samples goes where in the first one's batches, and how many rows those are. It is asked
//! for them without waiting: where it has none, rows are the feed's own. What it does not do: pace, or write; the second
//! store's memory stays as long as this does.

use super::gather::{self, Scratch, Target};
use super::plan::Plan;
use super::sampling::{OpenGather, Selection};
use super::{Layout, Store};
use crate::select::{Pass, Selected};
use crate::slots::RowRecord;
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Mixed {
    pub(crate) store: Arc<Store>,
    /// The batches' layout, and what they hold of the second store's records.
    layout: Arc<Layout>,
    plan: Plan,
    /// The bits of an `f64`.
    fraction: AtomicU64,
}

impl Mixed {
    /// `None` if the samples of the second store are declared otherwise.
    pub(crate) fn new(store: Arc<Store>, layout: Arc<Layout>, fraction: f64) -> Option<Mixed> {
        let (a, b) = (&*store.layout, &*layout);
        let same = (a.kind, a.time_major, a.within_episode, a.pad_short, a.gamma.to_bits())
            == (b.kind, b.time_major, b.within_episode, b.pad_short, b.gamma.to_bits());
        if !same || a.declared != b.declared || a.leaves != b.leaves {
            return None;
        }
        let plan = Plan::new(&layout, &store.records.layout);
        Some(Mixed { store, layout, plan, fraction: AtomicU64::new(fraction.to_bits()) })
    }

    pub(crate) fn set_fraction(&self, fraction: f64) {
        self.fraction.store(fraction.to_bits(), Ordering::Relaxed);
    }

    /// How many of a batch's rows are to be the second store's, where it has any. What a batch's share has behind the point
    /// is carried to the next one.
    pub(crate) fn share(&self, carried: &mut f64) -> usize {
        let exact = f64::from_bits(self.fraction.load(Ordering::Relaxed)) * self.layout.rows as f64 + *carried;
        let rows = (exact.max(0.0) + 1e-9).floor().min(self.layout.rows as f64);
        *carried = exact - rows;
        rows as usize
    }

    /// Whether there is something to select: also to the sampler, which may have used up what there is.
    pub(crate) fn has_items(&self) -> bool {
        let has = {
            let state = lock(&self.store.state);
            state.closed.is_none() && !state.loading && state.book.items() > 0
        };
        has && self.store.settle().sampler.selectable() > 0
    }

    /// Chooses up to `rows` rows, without waiting: `None` if there is none now.
    pub(crate) fn select(&self, rows: usize) -> Option<Selection> {
        let store = &self.store;
        let mut selector = lock(&store.selector);
        let mut state = lock(&store.state);
        let ring = state.ring.clone().filter(|_| !state.loading && state.book.items() > 0 && rows > 0)?;
        let (issued, clears) = (state.book.issue(), state.clears);
        let changes = state.take_changes();
        drop(state);
        let gather = OpenGather::new(store.clone(), issued, ring);
        let (begun, mut items) = (Instant::now(), Vec::with_capacity(rows));
        selector.apply(&changes);
        selector.select(rows, &mut items);
        Some(Selection { items, pass: Pass::GoesOn, begun, clears, gather })
    }

    /// As [`Store::fill_row`], for a row of the feed's batch.
    ///
    /// # Safety
    /// As there, with an item of [`select`](Mixed::select) and a slot of the feed's layout.
    pub(crate) unsafe fn fill_row(
        &self,
        selected: &Selected,
        row: usize,
        target: Target,
        scratch: &mut Scratch,
    ) -> RowRecord {
        let (parts, record) = ((&*self.layout, &self.plan, &self.store.records), selected.item);
        // SAFETY: an item when the selection's gather was issued; the row is the caller's.
        let known = unsafe { gather::fill_row(parts, record, selected.weight, target, row, scratch) };
        let mut record = self.store.record_of(record, &known);
        record.key.mixed = true;
        record
    }
}
