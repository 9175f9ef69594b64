//! The sampler and what it was told.
//!
//! Owns the strategy, its numbers, and which items it knows. One thread at a time uses it, behind a lock of its own:
//! writers never wait for a selection. What it does not do: know what lies in a record, or wait.

use super::book::Change;
use crate::select::{Draws, Pass, Sampler, SamplerError, Selected};

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Selector {
    pub(crate) sampler: Box<dyn Sampler>,
    pub(super) draws: Draws,
    records: u32,
    /// One bit a record: the items that the sampler may select. It can be the user's, and what it selects is read.
    present: Vec<u64>,
    /// The sampler panicked: what it was not told, it would still select.
    broken: bool,
    /// Consecutive updates on their way to the sampler.
    updates: Vec<(u32, f32)>,
}

/// The stream of a feed's seed that selections draw from.
const STREAM: u64 = 0x7361_6d70_6c69_6e67;

impl Selector {
    /// # Errors
    /// The sampler's settings cannot work.
    pub(crate) fn new(mut sampler: Box<dyn Sampler>, records: u32, seed: u64) -> Result<Selector, SamplerError> {
        sampler.begin(records)?;
        let present = vec![0; (records as usize).div_ceil(64)];
        Ok(Selector { sampler, draws: Draws::new(seed, STREAM), records, present, broken: false, updates: Vec::new() })
    }

    /// Tells the sampler what has changed, in order.
    ///
    /// # Panics
    /// If the sampler refuses what others would not (a priority that was checked before, or to begin again), or panicked
    /// before.
    pub(crate) fn apply(&mut self, changes: &[Change]) {
        // Whoever wakes it again clears the store first.
        self.broken &= changes.first() != Some(&Change::Clear);
        assert!(!self.broken, "the sampler panicked before: it does not know any more what may be selected");
        self.broken = true;
        self.tell(changes);
        self.broken = false;
    }

    /// As [`apply`](Selector::apply), on a thread that only writes: it need not hear that the sampler panicked before. What is
    /// not told then does not matter, since a clear comes first.
    pub(crate) fn apply_if_whole(&mut self, changes: &[Change]) {
        if !self.broken || changes.first() == Some(&Change::Clear) {
            self.apply(changes);
        }
    }

    /// The sampler, unless it panicked.
    pub(super) fn whole(&self) -> Option<&dyn Sampler> {
        (!self.broken).then_some(&*self.sampler)
    }

    fn tell(&mut self, changes: &[Change]) {
        for change in changes {
            if let Change::Update { record, priority } = *change {
                self.updates.push((record, priority));
                continue;
            }
            self.flush();
            match *change {
                Change::Insert { record, priority } => {
                    self.present[record as usize / 64] |= 1 << (record % 64);
                    if let Err(error) = self.sampler.insert(record, priority) {
                        panic!("the sampler refused a priority that is one: {error}");
                    }
                }
                Change::Remove { record } => {
                    self.present[record as usize / 64] &= !(1 << (record % 64));
                    self.sampler.remove(record);
                }
                Change::Clear => {
                    self.present.fill(0);
                    self.updates.clear();
                    if let Err(error) = self.sampler.begin(self.records) {
                        panic!("the sampler would not begin again: {error}");
                    }
                }
                Change::Update { .. } => {}
            }
        }
        self.flush();
    }

    /// Becomes the sampler that was saved, if it takes that; what is no item now leaves it again.
    pub(super) fn restore(&mut self, saved: &[u8]) -> bool {
        if self.sampler.restore(saved).is_err() {
            return false;
        }
        for record in 0..self.records {
            if self.present[record as usize / 64] >> (record % 64) & 1 == 0 {
                self.sampler.remove(record);
            }
        }
        true
    }

    fn flush(&mut self) {
        if !self.updates.is_empty() {
            if let Err(error) = self.sampler.update(&self.updates) {
                panic!("the sampler refused a priority that is one: {error}");
            }
            self.updates.clear();
        }
    }

    /// Chooses up to `rows` items.
    ///
    /// # Panics
    /// If the sampler chooses more, or what is no item now, or with a probability or a weight that is none, or panicked before.
    pub(crate) fn select(&mut self, rows: usize, chosen: &mut Vec<Selected>) -> Pass {
        assert!(!self.broken, "the sampler panicked before: it does not know any more what may be selected");
        chosen.clear();
        let pass = self.sampler.select(rows, &mut self.draws, chosen);
        assert!(chosen.len() <= rows, "the sampler selected {} items, but was asked for {rows}", chosen.len());
        for Selected { item, probability, weight } in chosen.iter() {
            let known = self.present.get(*item as usize / 64).is_some_and(|bits| bits >> (item % 64) & 1 == 1);
            assert!(known, "the sampler selected item {item}, which is not among those that may be selected now");
            let right = probability.is_finite() && *probability > 0.0 && weight.is_finite() && *weight >= 0.0;
            assert!(right, "the sampler selected item {item} with probability {probability} and weight {weight}");
        }
        pass
    }
}
