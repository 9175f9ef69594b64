//! How fast a store is sampled, against how fast it is filled.
//!
//! Owns three counts (steps inserted, rows handed over, rows selected and not handed over yet) and the questions that
//! they answer: may a writer insert, may a batch be selected. What it does not do: wait, or know who waits.

use super::PaceError;

/// How many rows are sampled for each step inserted, and from how many samples on.
///
/// The pace counts rows of batches as they are handed to the learner, against steps inserted beyond the first
/// `min_size`: *due* are `rate × (inserted − min_size)` rows. Writers wait while the learner is too far behind, the
/// selection of batches while it is too far ahead. A tolerance says how far, as a fraction of the rows that `min_size`
/// steps (or one step, if it is 0) stand for: `tolerance × rate × max(min_size, 1)` rows to either side. What batches
/// selected ahead and a step of all lanes need at least is checked when the feed is built.
///
/// Sampling begins with `min_size` *samples*, which can be fewer than the steps inserted: a transition takes n steps
/// to be whole, and a sequence begins at every `stride`-th step only. Where sampling has to wait for steps and no batch lies
/// ready, writers go on whatever the pace says, since else neither side ever could.
///
/// A tolerance of 0 is the strictest order: no batch is selected before the steps that make it due, and no step is
/// begun while a batch is due and can be selected, but was not. With one writer each batch is then
/// selected from the same steps in every run, however fast the learner is; except where a second store is mixed in and the feed's own
/// sampler uses items up (`MaxTimes`, say): whether that store stood in for a batch depends on when it was asked.
///
/// ```
/// use pinring::Pace;
/// // From 50,000 steps on, 8 rows for each further step; at most 40,000 rows to either side.
/// let pace = Pace::min_size(50_000).samples_per_insert(8.0, 0.1);
/// // The same in batches: 20 of them for each step, in strict order.
/// let strict = Pace::min_size(1_000).updates_per_step(20.0, 0.0);
/// assert_ne!(pace, strict);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    min_size: u64,
    rate: Rate,
    tolerance: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Rate {
    /// Each side as fast as it can.
    #[default]
    Free,
    /// Rows for each step.
    Samples(f64),
    /// Batches for each step.
    Updates(f64),
}

impl Pace {
    /// No batch is selected while the store holds fewer samples; apart from that, each side goes as fast as it can.
    pub fn min_size(samples: u64) -> Pace {
        Pace { min_size: samples, ..Pace::default() }
    }

    /// So many rows are sampled for each step inserted.
    pub fn samples_per_insert(self, rows: f64, tolerance: f64) -> Pace {
        Pace { rate: Rate::Samples(rows), tolerance, ..self }
    }

    /// So many batches are sampled for each step inserted.
    pub fn updates_per_step(self, batches: f64, tolerance: f64) -> Pace {
        Pace { rate: Rate::Updates(batches), tolerance, ..self }
    }

    /// The pace of a feed.
    ///
    /// # Errors
    /// It can never be met there.
    pub(crate) fn pacer(self, setting: Setting) -> Result<Pacer, PaceError> {
        let Setting { capacity, batch, ahead, lanes, times, stride } = setting;
        let Pace { min_size, rate, tolerance } = self;
        if min_size > capacity {
            return Err(PaceError::MinSize { min_size, capacity });
        }
        let (given, rate) = match rate {
            Rate::Free => return Ok(Pacer::new(min_size, Limit::None, 0.0)),
            Rate::Samples(rows) => (rows, rows),
            Rate::Updates(batches) => (batches, batches * batch as f64),
        };
        if !(rate.is_finite() && rate > 0.0) {
            return Err(PaceError::Rate { rate: given });
        }
        if !(tolerance.is_finite() && tolerance >= 0.0) {
            return Err(PaceError::Tolerance { tolerance });
        }
        if let Some(times) = times.filter(|&times| rate * stride as f64 > f64::from(times)) {
            return Err(PaceError::Times { rate, times, stride });
        }
        let of_a_step = rate * lanes as f64;
        if tolerance == 0.0 {
            let most_behind = ((ahead.max(1) + 1) * batch) as f64 + of_a_step;
            return Ok(Pacer::new(min_size, Limit::Strict { batch, most_behind }, rate));
        }
        let one = rate * min_size.max(1) as f64;
        let rows = tolerance * one;
        // Behind by a step of all lanes; and between the ends of the range room for that step and what lies ready.
        let needs = of_a_step.max((of_a_step + (ahead.max(1) * batch) as f64) / 2.0);
        if rows + SLACK < needs {
            return Err(PaceError::TooTight { tolerance, rows, needs, least: needs / one, batch, ahead, lanes });
        }
        Ok(Pacer::new(min_size, Limit::Within { rows, of_a_step }, rate))
    }
}

/// What of a feed a pace depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Steps that the store holds.
    pub(crate) capacity: u64,
    /// Rows of a batch.
    pub(crate) batch: u64,
    /// Batches that may be selected and not handed over.
    pub(crate) ahead: u64,
    /// Lanes, all of which may pass the gate at once.
    pub(crate) lanes: u64,
    /// How many times an item is selected at most.
    pub(crate) times: Option<u32>,
    /// Steps from one item to the next.
    pub(crate) stride: u64,
}

/// Products of fractions like 0.1 are a little off: so much of a row is forgiven.
const SLACK: f64 = 1e-6;
/// No count that is restored is larger: 2⁶².
const MOST: f64 = (1u64 << 62) as f64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    None,
    /// A batch is selected when it is due, and before the next step; so the learner is never further behind.
    Strict {
        batch: u64,
        most_behind: f64,
    },
    /// At most so many rows to either side; a step of all lanes makes so many due.
    Within {
        rows: f64,
        of_a_step: f64,
    },
}

/// A pace at work: counts, and answers. O(1) throughout.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pacer {
    min_size: u64,
    limit: Limit,
    rate: f64,
    inserted: u64,
    sampled: u64,
    reserved: u64,
}

impl Pacer {
    fn new(min_size: u64, limit: Limit, rate: f64) -> Pacer {
        Pacer { min_size, limit, rate, inserted: 0, sampled: 0, reserved: 0 }
    }

    /// Rows due by the steps so far.
    fn due(&self) -> f64 {
        self.rate * self.inserted.saturating_sub(self.min_size) as f64
    }

    /// Whether rows are reserved: a batch lies ready, or is under way.
    pub(crate) fn has_ready(&self) -> bool {
        self.reserved > 0
    }

    /// Whether the tolerance is 0.
    pub(crate) fn is_strict(&self) -> bool {
        matches!(self.limit, Limit::Strict { .. })
    }

    /// Why no step may be begun now; `None` if it may.
    pub(crate) fn insert_waits(&self) -> Option<PaceWait> {
        let (due, taken) = (self.due(), self.sampled as f64);
        let waits = match self.limit {
            _ if self.inserted < self.min_size => false,
            Limit::None => false,
            Limit::Strict { batch, .. } => taken + (self.reserved + batch) as f64 <= due + SLACK,
            Limit::Within { rows, of_a_step } => due + of_a_step > taken + rows + SLACK,
        };
        waits.then(|| self.for_learner())
    }

    /// Why no step may be begun while a batch is being selected: in strict order one that turns out to be short leaves more due.
    pub(crate) fn waits_for_selection(&self) -> Option<PaceWait> {
        self.is_strict().then(|| self.for_learner())
    }

    fn for_learner(&self) -> PaceWait {
        let (inserted, due) = (self.inserted, self.due() as u64);
        PaceWait::ForLearner { inserted, due, sampled: self.sampled, ready: self.reserved }
    }

    /// Why a batch of `rows` may not be selected now, from a store of `steps` steps; `None` if it may.
    pub(crate) fn select_waits(&self, rows: u64, steps: u64) -> Option<PaceWait> {
        if steps < self.min_size {
            return Some(PaceWait::ForMinSize { have: steps, need: self.min_size });
        }
        let room = match self.limit {
            Limit::None => return None,
            Limit::Strict { .. } => 0.0,
            Limit::Within { rows, .. } => rows,
        };
        let missing = (self.sampled + self.reserved + rows) as f64 - room - self.due() - SLACK;
        (missing > 0.0).then(|| PaceWait::ForWriters {
            inserted: self.inserted,
            sampled: self.sampled,
            ready: self.reserved,
            steps: (missing / self.rate).ceil() as u64 + self.min_size.saturating_sub(self.inserted),
        })
    }

    /// Counts committed steps.
    pub(crate) fn insert(&mut self, steps: u64) {
        self.inserted += steps;
    }

    /// Counts rows that were selected.
    pub(crate) fn reserve(&mut self, rows: u64) {
        self.reserved += rows;
    }

    /// Counts reserved rows that the learner got.
    pub(crate) fn hand_over(&mut self, rows: u64) {
        self.give_back(rows);
        self.sampled += rows;
    }

    /// Frees reserved rows that the learner will never get.
    pub(crate) fn give_back(&mut self, rows: u64) {
        debug_assert!(rows <= self.reserved, "{rows} rows of {} reserved", self.reserved);
        self.reserved = self.reserved.saturating_sub(rows);
    }

    /// The store is empty again. Rows that lie ready stay reserved.
    pub(crate) fn clear(&mut self) {
        (self.inserted, self.sampled) = (0, 0);
    }

    /// What to save: steps inserted, and how many rows the learner is behind.
    pub(crate) fn saved(&self) -> (u64, f64) {
        (self.inserted, self.due() - self.sampled as f64)
    }

    /// Goes on from what was saved, perhaps by another pace: the limits are those of now, and a learner that is further
    /// off than they allow is taken to be where they allow it, so that neither side waits for the other's past.
    pub(crate) fn restore(&mut self, inserted: u64, behind: f64) {
        self.inserted = inserted;
        let due = self.due();
        let (least, most) = match self.limit {
            Limit::None => (f64::MIN, f64::MAX),
            Limit::Strict { most_behind, .. } => (0.0, most_behind),
            Limit::Within { rows, .. } => (-rows, rows),
        };
        let behind = if behind.is_finite() { behind.clamp(least, most) } else { 0.0 };
        self.sampled = (due - behind).round().clamp(0.0, MOST) as u64; // room for what comes
    }
}

/// Who waits for what, where a [`Pace`] holds one side back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PaceWait {
    /// Sampling has not begun.
    #[error("the store has {have} samples, and sampling begins with {need}")]
    ForMinSize {
        /// Samples in the store.
        have: u64,
        /// Samples with which sampling begins.
        need: u64,
    },
    /// The learner is ahead: it waits for writers.
    #[error(
        "the pace waits for writers: the learner took {sampled} rows and {ready} lie ready, for {inserted} steps inserted; \
         {steps} more are needed for a batch"
    )]
    ForWriters {
        /// Steps inserted so far.
        inserted: u64,
        /// Rows handed over so far.
        sampled: u64,
        /// Rows selected and not handed over yet.
        ready: u64,
        /// Steps that have to be inserted.
        steps: u64,
    },
    /// The learner is behind: writers wait for it.
    #[error(
        "the pace waits for the learner: by {inserted} steps inserted {due} rows are due; it took {sampled}, and {ready} lie \
         ready"
    )]
    ForLearner {
        /// Steps inserted so far.
        inserted: u64,
        /// Rows due by these.
        due: u64,
        /// Rows handed over so far.
        sampled: u64,
        /// Rows selected and not handed over yet.
        ready: u64,
    },
}

#[cfg(test)]
mod tests;
