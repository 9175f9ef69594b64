//! A store that stands alone: steps that are written and loaded, and sampled by the feeds that mix them in.
//!
//! Owns the settings of such a store, its memory and its handles. It has no thread and no batches: whoever mixes it in
//! selects from it, and copies its rows, with threads of its own. So its memory is ordinary: no device reads it. What it
//! does not do: pace its writers, or end.

use super::builder::{config, lane_bytes, system_seed, too_large};
use super::replay::{check_kind, plan};
use super::seat_writer;
use crate::episodes::Episodes;
use crate::error::{Closed, Error, ErrorKind, Result};
use crate::intake::{IntakeConfig, IntakeGate, WhenFull};
use crate::layout::Layout;
use crate::memory::{PinWatch, Ring, RingPlan, check_memory};
use crate::metrics::Metrics;
use crate::sample::Sample;
use crate::select::pace::Setting;
use crate::select::{Pace, Sampler};
use crate::store::{Loaded, Saved, Selector, Store as Steps, StoreConfig, StorePlan};
use crate::writer::Writer;
use std::path::Path;
use std::sync::Arc;

/// Unread episodes that are kept.
const EPISODES: usize = 4096;

/// Steps that are kept in ordinary memory, for feeds to [mix](crate::FeedBuilder::mix) in: demonstrations, or a data set. It is
/// declared, written, saved and loaded as the store of a [replay](crate::FeedBuilder::replay) feed, but has no learner, no
/// batches and no thread of its own, and nobody waits for its pace. Clones are handles of the same store: each thread that
/// makes writers may have one. Its memory lives as long as a handle, a writer or a feed that mixes it in.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[4]);
/// let mut sample = Sample::transition(step, 1, 0.99);
/// sample.at(obs, 0);
/// let demos = Store::builder(sample, 10_000, Uniform::new()).build()?;
/// let mut writer = demos.writer(1)?;
/// let mut episode = writer.episode(100)?;
/// episode.put(obs, &[1.0; 4 * 101])?;
/// episode.commit(End::Truncated, 0)?;
/// assert_eq!(demos.metrics().stored_samples, 100);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Store {
    gate: Arc<IntakeGate>,
    episodes: Episodes,
    seed: u64,
}

/// Settings of a [`Store`]. Made by [`Store::builder`].
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let obs = step.observation::<f32>("obs", &[4]);
/// # let mut sample = Sample::transition(step, 1, 0.99);
/// # sample.at(obs, 0);
/// let builder = Store::builder(sample, 10_000, Prioritized::new(0.6, 0.4)).lanes(4).seed(1);
/// println!("{} bytes", builder.bytes()?);
/// let demos = builder.build()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct StoreBuilder {
    sample: Sample,
    capacity: usize,
    sampler: Box<dyn Sampler>,
    lanes: usize,
    seed: Option<u64>,
    ignore_budget: bool,
}

impl StoreBuilder {
    /// The most lanes that all writers together may drive, each of which has an open chunk. Default 1.
    pub fn lanes(mut self, max: usize) -> Self {
        self.lanes = max;
        self
    }

    /// The seed behind what is drawn, and behind [`Writer::seed`]. Default: a new one from the operating system.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// As [`FeedBuilder::ignore_memory_budget`](crate::FeedBuilder::ignore_memory_budget).
    pub fn ignore_memory_budget(mut self) -> Self {
        self.ignore_budget = true;
        self
    }

    /// The ordinary memory that these settings take, before anything is allocated: records, what is known of each, and a buffer
    /// for each lane. A sampler's own memory is not in it.
    ///
    /// # Errors
    /// As [`build`](StoreBuilder::build) for the settings.
    pub fn bytes(&self) -> Result<usize> {
        let (layout, plan) = self.plan()?;
        let beside = self.bytes_beside(&layout, &plan)?;
        plan.bytes()?.checked_add(beside).ok_or_else(|| self.beyond_addresses())
    }

    /// Allocates the store.
    ///
    /// # Errors
    /// A mistake in the sample ([`ErrorKind::Schema`]) or the settings ([`ErrorKind::Config`]), or no memory
    /// ([`ErrorKind::Memory`]).
    pub fn build(self) -> Result<Store> {
        let (layout, size) = self.plan()?;
        let (beside, ignore_budget) = (self.bytes_beside(&layout, &size)?, self.ignore_budget);
        let ring = RingPlan { slot_bytes: size.bytes()?, slots: 1, beside, ignore_budget };
        check_memory(&ring, self.sampler.bytes(size.steps()))?;
        let seed = system_seed(self.seed)?;
        let from = |error| Error::from_source(ErrorKind::Config, error);
        let times = self.sampler.most_times();
        let selector = Selector::new(self.sampler, size.steps(), seed).map_err(from)?;
        let setting = Setting {
            capacity: size.most_items() as u64,
            batch: 1,
            ahead: 1,
            lanes: size.lanes as u64,
            times,
            stride: size.stride(),
        };
        let pacer = Pace::default().pacer(setting).map_err(|error| Error::from_source(ErrorKind::Config, error))?;
        let store = StoreConfig::new(size, &layout, selector, pacer, false)?;
        let ring = Arc::new(Ring::unpinned(&ring, &PinWatch::new(None))?);
        let (sender, receiver) = crossbeam_channel::bounded(EPISODES);
        let gate = IntakeGate::new(IntakeConfig {
            layout: Arc::new(layout),
            ring,
            buffers: 0,
            store: Some(store),
            mixed: None,
            gathering: None,
            when_full: WhenFull::Block,
            lag: None,
            max_lanes: Some(self.lanes),
            lockstep: None,
            episodes: sender,
        });
        gate.lanes.add_handle();
        Ok(Store { gate: Arc::new(gate), episodes: Episodes(receiver), seed })
    }

    fn plan(&self) -> Result<(Layout, StorePlan)> {
        self.sample.check()?;
        check_kind(self.sample.kind)?;
        for (count, what) in [(self.capacity, "steps"), (self.lanes, "lanes")] {
            if count == 0 || u32::try_from(count).is_err() {
                let most = u32::MAX;
                return Err(config(format!("a store of {count} {what} cannot be: give it 1 to {most}")));
            }
        }
        let layout = Layout::new(&self.sample, 1)?;
        let plan = plan(&layout, self.capacity, self.lanes)?;
        Ok((layout, plan))
    }

    fn bytes_beside(&self, layout: &Layout, plan: &StorePlan) -> Result<usize> {
        let lanes = lane_bytes(layout, false)?.checked_mul(self.lanes);
        lanes
            .zip(plan.bytes_beside())
            .and_then(|(lanes, plan)| lanes.checked_add(plan))
            .ok_or_else(|| self.beyond_addresses())
    }

    fn beyond_addresses(&self) -> Error {
        let StoreBuilder { capacity, lanes, .. } = self;
        too_large(format!("a store of {capacity} steps and {lanes} lanes"))
    }
}

impl Store {
    /// Settings of a store of the last `capacity` steps, of which `sampler` chooses what a feed mixes in. The sample is one
    /// that a replay feed has: [`Sample::transition`] or [`Sample::sequence`], declared as that of the feed.
    pub fn builder(sample: Sample, capacity: usize, sampler: impl Sampler + 'static) -> StoreBuilder {
        StoreBuilder { sample, capacity, sampler: Box::new(sampler), lanes: 1, seed: None, ignore_budget: false }
    }

    /// A writer for the next `lanes` free lanes; lanes of writers that are gone are given out again, lowest first. It waits
    /// for nobody but a batch that is just being filled from the chunk that it needs.
    ///
    /// # Errors
    /// As [`Intake::writer`](crate::Intake::writer).
    pub fn writer(&self, lanes: usize) -> Result<Writer> {
        seat_writer(&self.gate, self.seed, lanes)
    }

    /// Saves the store in a file, as [`Feed::save`](crate::Feed::save).
    ///
    /// # Errors
    /// As there.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<Saved> {
        Ok(self.steps()?.save(path.as_ref())?)
    }

    /// Replaces what the store holds by a file, as [`Feed::load`](crate::Feed::load): before writers are made. Rows that feeds
    /// have selected before stay in their batches.
    ///
    /// # Errors
    /// As there.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        Ok(self.steps()?.load(path.as_ref(), &|| self.gate.lanes.taken(), &|| {})?)
    }

    /// Forgets every step. Lanes go on where they are; rows that feeds have selected before stay in their batches.
    ///
    /// # Errors
    /// [`Closed::UsedAfterFork`] in a forked child.
    pub fn clear(&self) -> Result<()> {
        self.steps()?.clear();
        Ok(())
    }

    /// Sets the exponent of a prioritized sampler's importance weights, as [`Feed::set_beta`](crate::Feed::set_beta).
    ///
    /// # Errors
    /// As there.
    pub fn set_beta(&self, beta: f64) -> Result<()> {
        self.steps()?.set_beta(beta).map_err(|error| Error::from_source(ErrorKind::Config, error))
    }

    /// The stream of finished episodes, of which 4,096 are kept.
    pub fn episodes(&self) -> Episodes {
        self.episodes.clone()
    }

    /// A snapshot of the counters: steps, episodes, stored records and samples, writers. Those of batches stay 0.
    pub fn metrics(&self) -> Metrics {
        self.gate.metrics()
    }

    fn steps(&self) -> Result<&Steps> {
        self.gate.store.as_deref().filter(|_| !self.gate.is_inherited()).ok_or_else(|| Closed::UsedAfterFork.into())
    }

    /// For whoever mixes it in.
    pub(super) fn shared(&self) -> Option<Arc<Steps>> {
        self.gate.store.clone().filter(|_| !self.gate.is_inherited())
    }
}

impl Clone for Store {
    fn clone(&self) -> Store {
        self.gate.lanes.add_handle();
        Store { gate: self.gate.clone(), episodes: self.episodes.clone(), seed: self.seed }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if !self.gate.is_inherited() && self.gate.lanes.drop_handle() {
            self.gate.finish();
        }
    }
}
