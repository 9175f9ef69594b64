//! Items that leave after so many selections.
//!
//! Owns the counts. What it does not do: choose; it wraps a sampler that does.

use super::state::{Reader, Saved};
use super::{Draws, Pass, PriorityError, Sampler, SamplerError, Selected};

/// A sampler whose items leave selection after so many times: once is a queue or a stack, more bounds how often a step
/// is learned from.
///
/// The wrapped sampler chooses a batch; rows beyond an item's last time are refused and chosen anew without that item.
/// Where rows are independent of each other this is the same as choosing one row after the other; the probabilities are
/// those at the beginning of the (re-)choice.
///
/// Costs are the wrapped sampler's and O(1) a row; memory: 4 bytes an item more.
///
/// ```
/// use pinring::{Draws, MaxTimes, Sampler, Uniform};
/// let mut twice = MaxTimes::new(Uniform::new(), 2);
/// twice.begin(3).unwrap();
/// (0..3).for_each(|item| twice.insert(item, None).unwrap());
/// let mut rows = Vec::new();
/// twice.select(100, &mut Draws::new(1, 0), &mut rows);
/// assert_eq!(rows.len(), 6, "each of the three twice");
/// assert_eq!(twice.selectable(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct MaxTimes<S> {
    sampler: S,
    times: u32,
    /// How often each item was selected since it was inserted; [`GONE`] if it is not there, or had its times.
    counts: Vec<u32>,
}

const GONE: u32 = u32::MAX;

impl<S: Sampler> MaxTimes<S> {
    /// Each item is selected at most `times` times.
    pub fn new(sampler: S, times: u32) -> MaxTimes<S> {
        MaxTimes { sampler, times, counts: Vec::new() }
    }
}

impl<S: Sampler> Sampler for MaxTimes<S> {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        if self.times == 0 {
            return Err(SamplerError::NoTimes);
        }
        self.sampler.begin(items)?;
        self.counts.clear();
        self.counts.resize(items as usize, GONE);
        Ok(())
    }

    /// An item that had its times is new again.
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        self.sampler.insert(item, priority)?;
        let count = &mut self.counts[item as usize];
        if *count == GONE {
            *count = 0;
        }
        Ok(())
    }

    fn remove(&mut self, item: u32) {
        self.counts[item as usize] = GONE;
        self.sampler.remove(item);
    }

    fn update(&mut self, priorities: &[(u32, f32)]) -> Result<(), PriorityError> {
        self.sampler.update(priorities)
    }

    fn priority(&self, item: u32) -> Option<f32> {
        self.sampler.priority(item)
    }

    fn has_priorities(&self) -> bool {
        self.sampler.has_priorities()
    }

    fn selectable(&self) -> usize {
        self.sampler.selectable()
    }

    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        let whole = into.len() + rows;
        loop {
            let (first, missing) = (into.len(), whole - into.len());
            let pass = self.sampler.select(missing, draws, into);
            let chosen = into.len() - first;
            assert!(chosen <= missing, "the sampler selected {chosen} items, but was asked for {missing}");
            let mut kept = first;
            for row in first..into.len() {
                let item = into[row].item;
                let count = &mut self.counts[item as usize];
                if *count == GONE {
                    continue;
                }
                *count += 1;
                if *count == self.times {
                    *count = GONE;
                    self.sampler.remove(item);
                }
                into[kept] = into[row];
                kept += 1;
            }
            assert!(kept > first || chosen == 0, "the sampler selected nothing but items that had been removed");
            into.truncate(kept);
            // A pass that ended keeps its short batch; a sampler that chose too few has no more.
            if kept == whole || chosen < missing || pass == Pass::Ended {
                return pass;
            }
        }
    }

    fn bytes(&self, items: u32) -> usize {
        self.sampler.bytes(items).saturating_add((items as usize).saturating_mul(size_of::<u32>()))
    }

    fn most_times(&self) -> Option<u32> {
        Some(self.sampler.most_times().map_or(self.times, |inner| inner.min(self.times)))
    }

    fn set_beta(&mut self, beta: f64) -> Result<(), SamplerError> {
        self.sampler.set_beta(beta)
    }

    fn save(&self) -> Vec<u8> {
        let inner = self.sampler.save();
        if inner.is_empty() { inner } else { Saved::new(TIMES).items(&self.counts).inner(&inner).bytes() }
    }

    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        let mut reader = Reader::new(TIMES, saved)?;
        let (counts, inner) = (reader.numbers()?, reader.inner()?);
        reader.end()?;
        if counts.len() != self.counts.len() {
            return Err(SamplerError::Saved { why: "the store had another size" });
        }
        self.sampler.restore(inner)?;
        self.counts = counts;
        // A lower limit than that of the saved sampler counts from now on.
        for item in 0..self.counts.len() {
            if self.counts[item] != GONE && self.counts[item] >= self.times {
                self.counts[item] = GONE;
                self.sampler.remove(item as u32);
            }
        }
        Ok(())
    }
}

const TIMES: &[u8; 4] = b"time";
