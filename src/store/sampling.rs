//! The sampling's side: waiting for items, selecting, filling rows, and what the learner's end tells.

use super::book::Issued;
use super::gather::{self, Scratch, Target};
use super::plan::Row;
use super::records::Meta;
use super::{State, Store, wait};
use crate::error::Closed;
use crate::memory::Ring;
use crate::select::{PaceWait, Pass, SamplerError, Selected};
use crate::slots::{RowKey, RowRecord};
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Why nothing was selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoItems {
    /// Nobody writes any more, and what there is makes no further batch.
    Ended,
    Closed(Closed),
}

/// The right to read the records of a batch's rows. Its drop says that they were read: so also where a sampler panics, and
/// the store is another feed's.
#[derive(Debug)]
pub(crate) struct OpenGather {
    store: Arc<Store>,
    /// Taken by the end.
    issued: Option<Issued>,
    /// Keeps the mapping (invariant 7).
    ring: Arc<Ring>,
}

impl OpenGather {
    pub(super) fn new(store: Arc<Store>, issued: Issued, ring: Arc<Ring>) -> OpenGather {
        OpenGather { store, issued: Some(issued), ring }
    }

    /// Whether the device still reads is not known: the records are kept for good (invariant 4).
    pub(crate) fn quarantine(self) {
        std::mem::forget(self);
    }
}

impl Drop for OpenGather {
    fn drop(&mut self) {
        if self.ring.stamp().is_inherited() {
            return; // the store is the parent's, and so is whoever held its lock at the fork
        }
        if let Some(issued) = self.issued.take() {
            self.store.end_gather(issued);
        }
    }
}

/// Items that were chosen for a batch, and the right to read them.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) items: Vec<Selected>,
    pub(crate) pass: Pass,
    pub(crate) begun: Instant,
    pub(crate) clears: u64,
    /// Whoever touches records on its behalf does so before it is dropped.
    pub(crate) gather: OpenGather,
}

/// What a batch is to have of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Rows; the batch's others are a second store's.
    pub(crate) rows: usize,
    /// The batch is wanted all the same if this store has too little for one: the second one has rows for it.
    pub(crate) spare: bool,
    /// That may come to be so without a word.
    pub(crate) mixed: bool,
}

/// How often it is looked whether a second store has rows for a batch, while the first has too little.
const LOOK: Duration = Duration::from_millis(5);

impl Store {
    /// Chooses the rows of a batch; waits until the store and the pace allow it, or if it may not, gives `None`. The caller
    /// owns where they go.
    ///
    /// All rows of the batch are reserved of the pace, but for those of the store's share that the sampler did not choose.
    pub(crate) fn select(
        self: &Arc<Store>,
        mut items: Vec<Selected>,
        wanted: impl Fn() -> Wanted,
        wait: bool,
    ) -> Result<Option<(Selection, Wanted)>, NoItems> {
        loop {
            let Some(wanted) = self.wait_for_items(&wanted, wait)? else { return Ok(None) };
            // Priority updates and changes are told first, so that they count for this selection.
            let mut selector = lock(&self.selector);
            let mut state = lock(&self.state);
            let may = self.may_select(&state, wanted.spare);
            let Some(ring) = state.ring.clone().filter(|_| may) else { continue };
            let (issued, clears, ended) = (state.book.issue(), state.clears, state.ended);
            let gather = OpenGather::new(self.clone(), issued, ring);
            let (rows, whole) = (wanted.rows, wanted.rows.min(state.book.items().max(self.sure_items)));
            let nothing = rows == 0 || (wanted.spare && state.book.items() < self.least(&state));
            let changes = state.take_changes();
            state.pacer.reserve(self.layout.rows as u64);
            state.selecting = true;
            drop(state);
            let begun = Instant::now();
            selector.apply(&changes);
            let mut pass = Pass::GoesOn;
            items.clear();
            // A sampler that uses items up waits until it has a whole batch of them, or all that there may ever be at once.
            let uses_up = selector.sampler.most_times().is_some() && !ended;
            if !nothing && (!uses_up || selector.sampler.selectable() >= whole) {
                pass = selector.select(rows, &mut items);
            }
            drop(selector);
            let mut state = lock(&self.state);
            state.refused = !nothing && items.is_empty();
            let others = nothing || (wanted.spare && items.is_empty()); // all rows are the second store's
            let missing = match (others, items.is_empty()) {
                (true, _) => 0,
                (false, true) => self.layout.rows,
                (false, false) => rows - items.len(),
            };
            state.pacer.give_back(missing as u64);
            state.selecting = false;
            let chosen = !state.refused || (others && !ended);
            let writers = state.writers_waiting > 0 && state.pacer.is_strict();
            drop(state);
            if chosen && writers {
                self.for_writers.notify_all(); // in strict order they wait for this, and not for the gather's end
            }
            if chosen {
                return Ok(Some((Selection { items, pass, begun, clears, gather }, wanted)));
            }
            drop(gather);
            // As it was when the sampler was asked: what it kept back for a whole batch it offers once more.
            if ended {
                return Err(NoItems::Ended);
            }
            self.for_writers.notify_all(); // they may be what changes that
        }
    }

    /// Chooses `rows` more rows of a batch, behind those of `items`, without waiting: what a second store had none for. They are
    /// reserved of the pace already, and may be read as long as what this returns.
    pub(crate) fn select_more(self: &Arc<Store>, rows: usize, items: &mut Vec<Selected>) -> Option<(OpenGather, Pass)> {
        let mut selector = lock(&self.selector);
        let mut state = lock(&self.state);
        let ring = state.ring.clone().filter(|_| !state.loading && state.book.items() > 0)?;
        let gather = OpenGather::new(self.clone(), state.book.issue(), ring);
        let changes = state.take_changes();
        drop(state);
        selector.apply(&changes);
        let mut more = Vec::with_capacity(rows);
        let pass = selector.select(rows, &mut more);
        items.append(&mut more);
        Some((gather, pass))
    }

    /// So many items there must be before any of them is in a batch.
    fn least(&self, state: &State) -> usize {
        if state.ended { 1 } else { self.least_items }
    }

    /// Who waits for what, if no batch may be selected now.
    fn waits_for(&self, state: &State, spare: bool) -> Option<PaceWait> {
        let items = state.book.items();
        let least = self.least(state);
        let pace = state.pacer.select_waits(self.layout.rows as u64, items as u64);
        if state.loading {
            return Some(PaceWait::ForMinSize { have: 0, need: least as u64 });
        }
        let few = PaceWait::ForMinSize { have: items as u64, need: least as u64 };
        pace.or((items < least && !spare).then_some(few))
    }

    /// In strict order a batch is selected from whole steps: those that end an episode are samples with its final
    /// observation, which the same commit brings.
    fn may_select(&self, state: &State, spare: bool) -> bool {
        self.waits_for(state, spare).is_none() && (state.finals_due == 0 || !state.pacer.is_strict())
    }

    /// Whether steps are the only thing that brings a further batch: the sampling waits for them, and no batch lies ready
    /// that the learner could take. Then no writer waits for the learner, or neither would ever go on.
    pub(super) fn needs_steps(&self, state: &State) -> bool {
        let refused = state.refused && state.book.changes.is_empty();
        !state.pacer.has_ready() && (refused || self.waits_for(state, false).is_some())
    }

    /// Why the learner has no batch, if it is the store that holds it up.
    pub(crate) fn learner_waits_for(&self) -> Option<PaceWait> {
        self.waits_for(&lock(&self.state), false)
    }

    /// Waits until a batch may be selected: where the sampler had nothing to offer, until something changes.
    fn wait_for_items(&self, wanted: &dyn Fn() -> Wanted, may_wait: bool) -> Result<Option<Wanted>, NoItems> {
        loop {
            #[cfg(test)]
            crate::sync::points::here("sampling: round");
            let wanted = wanted(); // asked without the lock: it may look at another store
            let mut state = lock(&self.state);
            if let Some(closed) = &state.closed {
                return Err(NoItems::Closed(closed.clone()));
            }
            let nothing_new = state.refused && state.book.changes.is_empty() && !state.ended;
            if (!nothing_new || wanted.spare) && self.may_select(&state, wanted.spare) {
                return Ok(Some(wanted));
            }
            if state.ended && !state.loading {
                return Err(NoItems::Ended);
            }
            if !may_wait {
                return Ok(None);
            }
            state.sampling_waits = true;
            let few = state.refused || state.book.items() < self.least(&state);
            let look = (wanted.mixed && few).then_some(LOOK);
            state = wait(&self.for_sampling, state, look);
            state.sampling_waits = false;
        }
    }

    #[cfg(test)]
    pub(crate) fn nudge_sampling(&self) {
        drop(lock(&self.state));
        self.for_sampling.notify_all();
    }

    /// Waits for the next look at a second store, or the close.
    pub(crate) fn rest(&self) {
        let state = lock(&self.state);
        if state.closed.is_none() {
            drop(wait(&self.for_sampling, state, Some(LOOK)));
        }
    }

    /// Asks memory for what rows of these items begin with, all at once: what the host knows of their first records and,
    /// `with_bytes`, the first bytes of these. Looked at one after the other they would be waited for one by one.
    ///
    /// # Safety
    /// The items are of a selection that was not finished.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn touch(&self, items: &[Selected], with_bytes: bool) {
        let touched = items.iter().fold(0, |touched, Selected { item, .. }| {
            // SAFETY: items of a gather that was issued and has not ended.
            touched ^ unsafe { self.records.touch(*item, with_bytes) }
        });
        std::hint::black_box(touched);
    }

    /// Fills row `row` of a batch with the sample of a selected item. Rows may be filled by several threads.
    ///
    /// # Safety
    /// `target` is a slot of the store's layout, of which the caller has that row to itself; the item is of a selection
    /// that was not finished.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn fill_row(
        &self,
        selected: &Selected,
        row: usize,
        target: Target,
        scratch: &mut Scratch,
    ) -> RowRecord {
        let (parts, record) = ((&*self.layout, &self.plan, &self.records), selected.item);
        // SAFETY: an item when the selection's gather was issued; the row is the caller's.
        let known = unsafe { gather::fill_row(parts, record, selected.weight, target, row, scratch) };
        self.record_of(record, &known)
    }

    /// As [`fill_row`](Store::fill_row), for a device that gathers: fills the row's `numbers` and the host's columns.
    ///
    /// # Safety
    /// As [`fill_row`](Store::fill_row).
    #[allow(unsafe_code)]
    pub(crate) unsafe fn plan_row(
        &self,
        selected: &Selected,
        row: usize,
        target: Target,
        scratch: &mut Scratch,
        numbers: &mut [u32],
    ) -> RowRecord {
        let (parts, record) = ((&*self.layout, &self.plan, &self.records), selected.item);
        // SAFETY: as above.
        let known = unsafe { gather::plan_row(parts, record, selected.weight, target, row, scratch, numbers) };
        self.record_of(record, &known)
    }

    pub(super) fn record_of(&self, record: u32, known: &Row) -> RowRecord {
        let Meta { lane, step: first_step, version, .. } = known.first;
        let key = RowKey { record, generation: self.records.generation(record), mixed: false };
        RowRecord { lane, length: known.length, first_step, version, key }
    }

    /// Whether rows that were selected after so many clears still count; if not, they reach nobody.
    pub(crate) fn counts(&self, clears: u64, rows: usize) -> bool {
        let mut state = lock(&self.state);
        let counts = state.clears == clears;
        if !counts {
            state.pacer.give_back(rows as u64);
            self.for_writers.notify_all();
        }
        counts
    }

    fn end_gather(&self, issued: Issued) {
        let mut state = lock(&self.state);
        state.book.finish(issued);
        let waiting = state.writers_waiting > 0;
        drop(state);
        if waiting {
            self.for_writers.notify_all();
        }
    }

    /// The learner got rows.
    pub(crate) fn hand_over(&self, rows: usize) {
        let mut state = lock(&self.state);
        state.pacer.hand_over(rows as u64);
        let (writers, sampling) = (state.writers_waiting > 0, state.sampling_waits);
        drop(state);
        if writers {
            self.for_writers.notify_all();
        }
        if sampling {
            self.for_sampling.notify_one();
        }
    }

    /// Rows that were selected reach nobody.
    pub(crate) fn give_back(&self, rows: usize) {
        lock(&self.state).pacer.give_back(rows as u64);
        self.for_sampling.notify_one();
        self.for_writers.notify_all();
    }

    /// Queues new priorities for the next selection; returns how many keys name steps that are gone.
    pub(crate) fn update(&self, keys: impl Iterator<Item = (RowKey, f32)>) -> usize {
        let (mut state, mut stale) = (lock(&self.state), 0);
        for (key, priority) in keys {
            if !self.is_live(&state, key) {
                stale += 1;
                continue;
            }
            state.book.update(key.record, priority);
        }
        self.stale_keys.fetch_add(stale as u64, Ordering::Relaxed);
        self.published(state);
        stale
    }

    /// The priority that each key has now: `None` for a step that is gone, and where the sampler has no priorities.
    pub(crate) fn peek(&self, keys: impl Iterator<Item = RowKey>) -> Vec<Option<f32>> {
        let selector = self.settle();
        let state = lock(&self.state);
        let live = |key: RowKey| self.is_live(&state, key).then(|| selector.sampler.priority(key.record)).flatten();
        keys.map(live).collect()
    }

    fn is_live(&self, state: &State, RowKey { record, generation, .. }: RowKey) -> bool {
        // A key of another feed may name a record that this store does not have.
        state.book.has(record) && state.book.is_item(record) && self.records.generation(record) == generation
    }

    pub(crate) fn set_beta(&self, beta: f64) -> Result<(), SamplerError> {
        lock(&self.selector).sampler.set_beta(beta)
    }

    /// Forgets every step. Batches that were selected before are not delivered any more.
    pub(crate) fn clear(&self) {
        let mut state = lock(&self.state);
        state.book.clear();
        state.pacer.clear();
        state.clears += 1;
        drop(state);
        self.for_writers.notify_all();
        self.for_sampling.notify_one(); // where a second store has rows for a store that is empty
    }

    /// Items that can be sampled, records in the store, and keys that were stale.
    pub(crate) fn levels(&self) -> (usize, usize, u64) {
        let state = lock(&self.state);
        (state.book.items(), state.book.held(), self.stale_keys.load(Ordering::Relaxed))
    }
}
