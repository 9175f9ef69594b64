//! Names of sampled rows, which outlive their batch.
//!
//! Owns what a key is, and the checks before priorities reach a store. What it does not do: hold steps, or wait.

use crate::error::{Closed, Error, ErrorKind};
use crate::intake::IntakeGate;
use crate::select::PriorityError;
use crate::slots::{RowKey, RowRecord};
use crate::store::Store;
use std::sync::Arc;

/// Where the rows of a batch came from: lane and step of each, and how often the memory that it lies in had been used, so
/// that a step which was overwritten since is noticed. Clones share it; it borrows neither batch nor feed.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let obs = step.observation::<f32>("obs", &[]);
/// # let mut sample = Sample::transition(step, 1, 0.99);
/// # sample.at(obs, 0);
/// let feed = Feed::builder(sample).batch(4).lanes(1).replay(100, Prioritized::new(0.6, 0.4)).start()?;
/// # let mut writer = feed.writer(1)?;
/// # for t in 0..5 { let mut s = writer.step()?; s.put(obs, &[t as f32])?; s.commit()?; }
/// let learner = feed.learner()?;
/// let keys = learner.next_batch()?.keys(); // the batch is gone, its keys are not
/// let updated = learner.update_priorities(&keys, &[0.5, 1.0, 0.25, 2.0])?;
/// assert_eq!((updated.applied, updated.stale), (4, 0));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Keys {
    /// Which feed's store they name rows of.
    home: u64,
    keys: Arc<[Key]>,
}

#[derive(Clone, Copy, Debug)]
struct Key {
    lane: u32,
    step: u64,
    key: RowKey,
}

/// What became of an update.
///
/// ```
/// # use pinring::*;
/// # fn log(updated: Updated) {
/// println!("{} applied, {} were of steps that are gone", updated.applied, updated.stale);
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Updated {
    /// Priorities that count from the next selection on.
    pub applied: usize,
    /// Keys of steps that were overwritten or cleared since: they were dropped, and counted in the metrics.
    pub stale: usize,
}

/// Why no priority was updated. None was: it is all or nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// As many priorities as keys are needed.
    #[error("{keys} keys, but {priorities} priorities: give one for each row of the batch")]
    Length {
        /// Keys.
        keys: usize,
        /// Priorities.
        priorities: usize,
    },
    /// A priority that is none.
    #[error(transparent)]
    Priority(#[from] PriorityError),
    /// The keys are another feed's, or of a feed that keeps no steps.
    #[error(
        "these keys are not of this feed's store: they are another feed's, of batches from before a load, or of a feed without `.replay`"
    )]
    Foreign,
    /// This process was forked from the one that started the feed.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl From<UpdateError> for Error {
    fn from(error: UpdateError) -> Error {
        let kind = match error {
            UpdateError::Closed(closed) => return closed.into(),
            UpdateError::Foreign => ErrorKind::Misuse,
            UpdateError::Length { .. } | UpdateError::Priority(_) => ErrorKind::Input,
        };
        Error::from_source(kind, error)
    }
}

impl Keys {
    pub(crate) fn new(gate: &IntakeGate, records: impl Iterator<Item = RowRecord>) -> Keys {
        let key = |record: RowRecord| Key { lane: record.lane, step: record.first_step, key: record.key };
        Keys { home: gate.id, keys: records.map(key).collect() }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The lane of each row, and the step of it that the row begins with, counted from 0.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (usize, u64)> + '_ {
        self.keys.iter().map(|key| (key.lane as usize, key.step))
    }

    /// That they are the feed's, and as many as there are priorities for.
    pub(crate) fn check<'g>(&self, gate: &'g IntakeGate, priorities: usize) -> Result<&'g Store, UpdateError> {
        let (store, keys) = (self.store(gate)?, self.keys.len());
        if keys == priorities { Ok(store) } else { Err(UpdateError::Length { keys, priorities }) }
    }

    pub(crate) fn update(&self, gate: &IntakeGate, priorities: &[f32]) -> Result<Updated, UpdateError> {
        let (store, keys) = (self.check(gate, priorities.len())?, self.keys.len());
        for (index, &priority) in priorities.iter().enumerate() {
            crate::select::error::check_priority(index, priority)?;
        }
        let of = |mixed: bool| {
            let rows = self.keys.iter().map(|key| key.key).zip(priorities.iter().copied());
            rows.filter(move |(key, _)| key.mixed == mixed)
        };
        let stale = store.update(of(false)) + gate.mixed.as_ref().map_or(0, |mixed| mixed.store.update(of(true)));
        Ok(Updated { applied: keys - stale, stale })
    }

    pub(crate) fn peek(&self, gate: &IntakeGate) -> Result<Vec<Option<f32>>, UpdateError> {
        let (own, mixed) = (self.store(gate)?, gate.mixed.as_ref());
        let of = |mixed: bool| self.keys.iter().map(|key| key.key).filter(move |key| key.mixed == mixed);
        let mut own = own.peek(of(false)).into_iter();
        let mut other = mixed.map(|mixed| mixed.store.peek(of(true))).unwrap_or_default().into_iter();
        let each = |key: &Key| if key.key.mixed { other.next() } else { own.next() }.flatten();
        Ok(self.keys.iter().map(each).collect())
    }

    /// The store that these are keys of, if it is the gate's.
    fn store<'g>(&self, gate: &'g IntakeGate) -> Result<&'g Store, UpdateError> {
        if gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        gate.store.as_deref().filter(|_| self.home == gate.id).ok_or(UpdateError::Foreign)
    }
}
