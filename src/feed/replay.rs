//! Settings of a replay feed, and their checks.

use super::builder::{FeedBuilder, Pinning, config, too_large};
use super::store::Store;
use crate::error::{Closed, Error, ErrorKind, Result};
use crate::intake::WhenFull;
use crate::layout::{Layout, SLOT_ALIGN};
use crate::memory::RingPlan;
use crate::sample::Kind;
use crate::select::pace::Setting;
use crate::select::{Pace, Sampler};
use crate::store::{Mixed, Selector, StoreConfig, StorePlan};
use std::sync::Arc;

/// More threads than this gain nothing: the memory is slower.
pub(super) const MOST_THREADS: usize = 64;

/// Threads that fill a batch unless the user says how many.
pub(super) fn gather_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |threads| (threads.get() / 4).clamp(1, 8))
}

/// A fraction of a batch's rows.
pub(super) fn check_fraction(fraction: f64) -> Result<()> {
    match (0.0..=1.0).contains(&fraction) {
        true => Ok(()),
        false => Err(config(format!("a fraction of {fraction} of the rows: it must be from 0 to 1"))),
    }
}

/// That samples are of stored steps.
pub(super) fn check_kind(kind: Kind) -> Result<()> {
    match kind.is_replayed() {
        true => Ok(()),
        false => Err(config(
            "stored steps are sampled as transitions or sequences: use `Sample::transition` or `Sample::sequence` (of length 1 \
             for single steps)",
        )),
    }
}

/// The size of a store, checked.
pub(super) fn plan(layout: &Layout, capacity: usize, lanes: usize) -> Result<StorePlan> {
    let plan = StorePlan::new(layout, capacity, lanes)?;
    let needs = plan.reach().saturating_mul(lanes);
    if capacity < needs {
        return Err(config(format!(
            "a store of {capacity} steps is too small: a sample's windows reach over {} steps of one lane, and with {lanes} lanes \
             it is overwritten before it is whole; keep at least {needs} steps, or fewer `.lanes`",
            plan.reach()
        )));
    }
    Ok(plan)
}

impl FeedBuilder {
    /// Keeps the last `capacity` steps in a store and fills batches with samples of it, as `sampler` chooses them; the
    /// sample is then a [`Sample::transition`](crate::Sample::transition) or a
    /// [`Sample::sequence`](crate::Sample::sequence). The store lies in the ring, page-locked if the ring
    /// is, and each step is in it once. Within episodes an ended one takes a record more, for its final observation. Without
    /// this a feed delivers each sample once, in the order of writing. [`lanes`](FeedBuilder::lanes) must be given.
    ///
    /// ```
    /// # use pinring::*;
    /// # fn main() -> Result<()> {
    /// let mut step = Step::new();
    /// let obs = step.observation::<f32>("obs", &[4]);
    /// let reward = step.leaf::<f32>("reward", &[]);
    /// let mut sample = Sample::transition(step, 1, 0.99);
    /// let (now, then) = (sample.at(obs, 0), sample.next(obs));
    /// let (ret, discount) = (sample.n_step_return(reward), sample.discount());
    /// let feed = Feed::builder(sample).batch(32).lanes(1).replay(10_000, Uniform::new()).start()?;
    /// let (mut writer, learner) = (feed.writer(1)?, feed.learner()?);
    /// for t in 0..100 {
    ///     let mut s = writer.step()?;
    ///     s.put(obs, &[t as f32; 4])?;
    ///     s.put(reward, &[1.0])?;
    ///     s.commit()?;
    /// }
    /// let batch = learner.next_batch()?;
    /// assert_eq!(batch.view(now).shape(), [32, 4]);
    /// assert_eq!(batch.slice(then)[0], batch.slice(now)[0] + 1.0);
    /// assert_eq!((batch.slice(ret)[0], batch.slice(discount)[0]), (1.0, 0.99));
    /// # Ok(()) }
    /// ```
    pub fn replay(mut self, capacity: usize, sampler: impl Sampler + 'static) -> Self {
        self.replay = Some((capacity, Box::new(sampler)));
        self
    }

    /// How many rows are sampled for each step that is written, and from how many samples on. Only with
    /// [`replay`](FeedBuilder::replay). Default: both sides go as fast as they can, the learner from as many samples on as a
    /// batch has rows (or as the store is sure to hold, if that is less). A pace's min size counts samples too, and stands
    /// instead of that: with less than a batch, rows are drawn several times. A sampler that uses samples up waits for a batch
    /// of them all the same.
    pub fn pace(mut self, pace: Pace) -> Self {
        self.pace = Some(pace);
        self
    }

    /// Takes this fraction of each batch's rows, 0 to 1, from a second [`Store`], whose sample is declared alike:
    /// demonstrations, say. They are the last rows of a batch, chosen by that store's sampler; this feed's pace counts all
    /// rows. While this feed's own store is empty, or its sampler has none to offer, all rows are the second one's, if this
    /// feed's pace allows; what the second one has too few for is this one's. Without a pace sampling begins with the first
    /// sample of either; of a sampler that uses samples up, with its part of a batch. A batch is short where both together have too
    /// few for it. A batch with such rows is put together on the host. The feed keeps the store's memory; several feeds
    /// may mix in the same one.
    ///
    /// ```
    /// # use pinring::*;
    /// # fn main() -> Result<()> {
    /// # let declare = || {
    /// #     let mut step = Step::new();
    /// #     let obs = step.observation::<f32>("obs", &[]);
    /// #     let mut sample = Sample::transition(step, 1, 0.99);
    /// #     let column = sample.at(obs, 0);
    /// #     (sample, obs, column)
    /// # };
    /// let (sample, obs, column) = declare();
    /// let demos = Store::builder(sample.clone(), 1000, Uniform::new()).build()?;
    /// let mut writer = demos.writer(1)?;
    /// let mut episode = writer.episode(10)?;
    /// episode.put(obs, &[-1.0; 11])?;
    /// episode.commit(End::Terminated, 0)?;
    ///
    /// let feed = Feed::builder(sample).batch(8).lanes(1).replay(1000, Uniform::new()).mix(&demos, 0.5).start()?;
    /// let learner = feed.learner()?;
    /// let batch = learner.next_batch()?; // nothing of its own yet
    /// assert_eq!((batch.rows_mixed(), batch.slice(column)), (8, &[-1.0; 8][..]));
    /// feed.set_fraction(0.25)?;
    /// # Ok(()) }
    /// ```
    pub fn mix(mut self, store: &Store, fraction: f64) -> Self {
        self.mix = Some((store.shared(), fraction));
        self
    }

    /// Threads that fill a sampled batch, the sampling thread included; batches below 256 KiB are filled by that alone.
    /// Default: a quarter of the machine's, at most 8.
    pub fn gather_threads(mut self, threads: usize) -> Self {
        self.gather_threads = Some(threads);
        self
    }

    pub(super) fn check_replay(&self) -> Result<()> {
        let Some((capacity, _)) = &self.replay else {
            return match (self.sample.kind.is_replayed(), self.pace, self.gather_threads) {
                (true, ..) => Err(config(
                    "transitions and sequences are sampled from stored steps: give `.replay(steps, sampler)`, or use \
                     `Sample::step` or `Sample::unroll` for a feed that keeps none",
                )),
                (_, None, None) if self.mix.is_none() => Ok(()),
                _ => Err(config(
                    "`.pace`, `.mix` and `.gather_threads` are of stored steps: give `.replay(steps, sampler)`",
                )),
            };
        };
        check_kind(self.sample.kind)?;
        if *capacity == 0 || self.gather_threads == Some(0) {
            let (what, verb) = if *capacity == 0 {
                ("a store of 0 steps holds", "replay")
            } else {
                ("0 threads fill", "gather_threads")
            };
            return Err(config(format!("{what} nothing: give `.{verb}` at least 1")));
        }
        if self.lockstep.is_some() || self.lag.is_some() {
            return Err(config(
                "`.lockstep` and `.max_policy_lag` order batches by their writing, but a replay feed samples: use `.pace`",
            ));
        }
        if self.lanes.is_none() {
            return Err(config(
                "a replay feed must know its lanes, each of which has an open chunk: give `.lanes(most)`",
            ));
        }
        if self.when_full == WhenFull::DropNewest {
            return Err(config(
                "a store overwrites its oldest steps and is never full: `DropNewest` has no meaning here",
            ));
        }
        Ok(())
    }

    /// What is mixed in, checked.
    pub(super) fn mixed(&self, layout: &Arc<Layout>) -> Result<Option<Mixed>> {
        let Some((store, fraction)) = self.mix.clone() else { return Ok(None) };
        check_fraction(fraction)?;
        let store = store.ok_or(Closed::UsedAfterFork)?;
        let mixed = Mixed::new(store, layout.clone(), fraction).ok_or_else(|| {
            config("the samples of the second store are not declared as these are: give both the same step and sample")
        });
        mixed.map(Some)
    }

    /// Room on each device's host side for priorities that come back; `None` where none do.
    pub(super) fn update_room(&self) -> Result<Option<RingPlan>> {
        let own = self.replay.as_ref().is_some_and(|(_, sampler)| sampler.has_priorities());
        let mixed = self.mix.as_ref().and_then(|(store, _)| store.as_ref()).is_some_and(|store| store.has_priorities);
        if self.replay.is_none() || !(own || mixed) || self.devices.is_empty() || self.pinning == Pinning::Off {
            return Ok(None);
        }
        let slot_bytes = self.batch.checked_mul(size_of::<f32>()).and_then(|b| b.checked_next_multiple_of(SLOT_ALIGN));
        let slots = self.buffers.checked_add(self.prefetch).and_then(|slots| slots.checked_add(1));
        let room = slot_bytes.zip(slots).map(|(slot_bytes, slots)| RingPlan {
            ignore_budget: self.ignore_budget,
            ..RingPlan::new(slot_bytes, slots)
        });
        let fits = |room: &RingPlan| {
            let all = room.slot_bytes.checked_mul(room.slots).and_then(|bytes| bytes.checked_mul(self.devices.len()));
            all.is_some_and(|bytes| isize::try_from(bytes).is_ok())
        };
        room.filter(fits).map(Some).ok_or_else(|| {
            let (batches, rows) = (self.buffers.saturating_add(self.prefetch), self.batch);
            too_large(format!("the priorities of {batches} batches of {rows} rows"))
        })
    }

    /// The store's size, checked: `None` without one.
    pub(super) fn store_plan(&self, layout: &Layout) -> Result<Option<StorePlan>> {
        let (Some((capacity, _)), Some(lanes)) = (&self.replay, self.lanes) else { return Ok(None) };
        plan(layout, *capacity, lanes).map(Some)
    }

    /// What the sampler takes.
    pub(super) fn sampler_bytes(&self, layout: &Layout) -> Result<usize> {
        let plan = self.store_plan(layout)?;
        Ok(plan.zip(self.replay.as_ref()).map_or(0, |(plan, (_, sampler))| sampler.bytes(plan.steps())))
    }

    /// What the store is built from, and taken from the settings: `None` without one.
    pub(super) fn store_config(&mut self, layout: &Layout, seed: u64) -> Result<Option<StoreConfig>> {
        let plan = self.store_plan(layout)?;
        let Some((size, (_, sampler))) = plan.zip(self.replay.take()) else { return Ok(None) };
        let times = sampler.most_times();
        let selector = Selector::new(sampler, size.steps(), seed);
        let selector = selector.map_err(|error| Error::from_source(ErrorKind::Config, error))?;
        let setting = Setting {
            capacity: size.most_items() as u64,
            batch: self.batch as u64,
            ahead: self.buffers as u64 + self.devices.len() as u64 * self.prefetch as u64,
            lanes: size.lanes as u64,
            times,
            stride: size.stride(),
        };
        let pacer = self.pace.unwrap_or_default().pacer(setting);
        let pacer = pacer.map_err(|error| Error::from_source(ErrorKind::Config, error))?;
        Ok(Some(StoreConfig::new(size, layout, selector, pacer, self.pace.is_some() || self.mix.is_some())?))
    }
}
