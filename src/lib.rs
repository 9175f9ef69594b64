//! Feed a reinforcement-learning learner from a CUDA page-locked ring that environment threads write in place.
//!
//! ```text
//! env threads ── Writer, StepMut ──► slots of the ring ──► Learner ──► Batch ──► your learner
//!      ▲                 ▲                                               │           │
//!      │                 └───────── a dropped batch frees its slot ──────┘           │
//!      └──────────────────────────────── Weights ◄────────────────── publish ────────┘
//! ```
//!
//! # Quick start
//!
//! Declare what a step is ([`Step`]) and what a row of a batch holds ([`Sample`]); start a [`Feed`]; give each environment
//! thread a [`Writer`] and the learner's thread the [`Learner`].
//!
//! ```
//! use pinring::*;
//! # fn main() -> Result<()> {
//! let mut step = Step::new();
//! let obs = step.observation::<f32>("obs", &[4]);
//! let reward = step.leaf::<f32>("reward", &[]);
//! let mut sample = Sample::step(step);
//! let (obs_column, reward_column) = (sample.all(obs), sample.all(reward));
//!
//! let feed = Feed::builder(sample).batch(6).start()?;
//! let mut writer = feed.writer(2)?; // two environments that step together
//! std::thread::spawn(move || -> Result<()> {
//!     for t in 0..3 {
//!         let mut s = writer.step()?;
//!         s.view_mut(obs).fill(t as f32); // in place: this is the batch's memory
//!         s.put(reward, &[1.0, -1.0])?; // or from a slice
//!         s.commit()?;
//!     }
//!     Ok(()) // the last writer gone is the end of the source
//! });
//! for batch in &feed.learner()? {
//!     let batch = batch?;
//!     assert_eq!(batch.view(obs_column).shape(), [6, 4]);
//!     assert_eq!(batch.slice(reward_column), [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]);
//! } // each batch gives its memory back when it is dropped
//! # Ok(()) }
//! ```
//!
//! [`pinning(Pinning::Required)`](FeedBuilder::pinning) page-locks the ring, or fails and says why; [`probe_cuda`] and
//! [`PinTrial`] tell what a host can do without a feed.
//!
//! # What to read first
//!
//! | to | see |
//! |---|---|
//! | declare | [`Step`], [`Leaf`], [`Sample`], [`Column`] |
//! | start, watch, stop | [`Feed::builder`], [`FeedBuilder`], [`Feed::metrics`], [`Feed::stop`] |
//! | write | [`Intake`], [`Writer`], [`StepMut`] |
//! | learn | [`Learner`], [`Batch`], [`Weights`] |
//! | sample stored steps | [`FeedBuilder::replay`], [`Store`], [`Sample::transition`], [`Sample::sequence`], [`Sampler`], [`Pace`], [`Keys`] |
//! | learn on a GPU | [`FeedBuilder::device`], [`Feed::learner_on`], [`DeviceLearner`], [`DeviceBatch`], [`DeviceCopier`] |
//! | understand a failure | [`Error`], [`ErrorKind`], [`Closed`] |
//!
//! The pages in `docs/` of the repository say more: architecture, safety and guarantees, writing, replay, whole learners by
//! their shape, feeding a GPU, the mapped allocator, errors, memory, how CUDA is found, what is checked and measured, and why.

#![cfg_attr(docsrs, feature(doc_cfg))]
// Elsewhere many of the tests are left out, and what only they use is not.
#![cfg_attr(all(test, not(target_os = "linux")), allow(dead_code, unused_imports))]

#[cfg(not(target_has_atomic = "64"))]
compile_error!("pinring counts in 64-bit atomics, which this target does not have");

/// The examples of the pages, compiled and run.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/writing.md")]
    struct Writing;
    #[doc = include_str!("../docs/cuda-loading.md")]
    struct CudaLoading;
    #[doc = include_str!("../docs/replay.md")]
    struct Replay;
    #[doc = include_str!("../docs/learners.md")]
    struct Learners;
    #[doc = include_str!("../docs/feeding.md")]
    struct Feeding;
    #[cfg(feature = "mapped-allocator")]
    #[doc = include_str!("../docs/mapped-allocator.md")]
    struct MappedAllocator;
}

// The order of these lines is the order of dependence: a module uses only modules above it. `tests/layering.rs` checks
// that, and `rustfmt.toml` keeps rustfmt from sorting them.
mod element;
mod schema;
mod sample;
mod layout;
mod sync;
mod metrics;
mod episodes;
mod error;
mod weights;
mod select;
#[allow(unsafe_code)]
mod cuda;
#[allow(unsafe_code)]
mod memory;
#[cfg(feature = "mapped-allocator")]
#[allow(unsafe_code)]
mod mapped;
#[allow(unsafe_code)]
mod slots;
mod gate;
#[allow(unsafe_code)]
mod store;
mod gather;
mod intake;
mod keys;
#[allow(unsafe_code)]
mod writer;
#[allow(unsafe_code)]
mod batch;
mod learner;
mod sampling;
#[allow(unsafe_code)]
mod feeding;
mod actors;
mod feed;

/// The crate of the views' types: its version is part of this crate's interface.
pub use ndarray;

pub use batch::{Batch, BatchView, ColumnBytes, SharedBatch};
pub use cuda::device::DeviceError;
pub use cuda::types::{Candidate, CudaError, CudaFindError, CudaSearch, Outcome, Rung};
pub use cuda::{CudaReport, probe_cuda};
pub use element::{DType, Element, UnknownDType};
pub use episodes::{End, Episode, Episodes};
pub use error::{Closed, Error, ErrorKind, Fault, Result};
pub use feed::{Feed, FeedBuilder, Footprint, Intake, Pinning, StartHandle, StopReport, Store, StoreBuilder};
pub use feeding::batch::{DeviceBatch, DeviceColumn};
pub use feeding::copy::{CopyError, CopyTicket, DeviceCopier};
pub use feeding::learner::DeviceLearner;
pub use feeding::rounds::Deal;
pub use feeding::updates::DeviceUpdateError;
pub use gather::{Gather, GatherReport};
pub use intake::WhenFull;
pub use keys::{Keys, UpdateError, Updated};
pub use layout::{COLUMN_ALIGN, ColumnInfo, SLOT_ALIGN};
pub use learner::{Batches, DeviceUseError, Learner, NextBatch, NextError, SelectError};
#[cfg(feature = "mapped-allocator")]
pub use mapped::{FreeError, KindStatistics, MappedAllocator, MappedError, MappedMemory, MappedStatistics, MemoryKind};
pub use memory::{
    BudgetRefusal, MapOutcome, MemoryLimit, MemoryLimitKind, NodeBytes, PinOutcome, PinPhase, PinProgress, PinReport,
    PinTimes, PinTrial, RegisterRefusal, RingError, SlotEnd,
};
pub use metrics::{DeviceMetrics, Lag, Latency, Metrics};
pub use sample::{Column, Pad, Sample};
pub use schema::{Leaf, LeafInfo, SchemaError, Step};
pub use select::{
    Draws, Fifo, Lifo, MaxTimes, Normalize, Pace, PaceError, PaceWait, Pass, Prioritized, PriorityError, Sampler,
    SamplerError, Selected, Uniform, WithoutReplacement,
};
pub use store::{CheckpointError, Loaded, Saved};
pub use weights::Weights;
pub use writer::{CommitError, EpisodeMut, FinalMut, PolicyError, PutError, StepError, StepMut, Writer};
