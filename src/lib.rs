//! Feed a reinforcement-learning learner from a CUDA page-locked ring that environment threads write in place.

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
#[allow(unsafe_code)]
mod cuda;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod slots;
mod gate;
mod intake;
#[allow(unsafe_code)]
mod writer;
#[allow(unsafe_code)]
mod batch;
mod learner;
#[allow(unsafe_code)]
mod feeding;
mod actors;
mod feed;

pub use batch::{Batch, BatchView, ColumnBytes, SharedBatch};
pub use cuda::types::{Candidate, CudaError, CudaFindError, CudaSearch, Outcome, Rung};
pub use cuda::{CudaReport, probe_cuda};
pub use element::{DType, Element};
pub use episodes::{End, Episode, Episodes};
pub use error::{Closed, Error, ErrorKind, Fault, Result};
pub use feeding::batch::{DeviceBatch, DeviceColumn};
pub use feeding::copy::{CopyError, CopyTicket, DeviceCopier};
pub use feeding::learner::DeviceLearner;
pub use feed::{Feed, FeedBuilder, Footprint, Intake, Pinning, StartHandle, StopReport};
pub use intake::WhenFull;
pub use layout::{COLUMN_ALIGN, ColumnInfo, SLOT_ALIGN};
pub use learner::{Batches, DeviceUseError, Learner, NextBatch, NextError};
pub use memory::{
    BudgetRefusal, MapOutcome, MemoryLimit, MemoryLimitKind, PinOutcome, PinPhase, PinProgress, PinReport, PinTimes,
    PinTrial, RegisterRefusal, RingError, SlotEnd,
};
pub use metrics::{DeviceMetrics, Lag, Latency, Metrics};
pub use sample::{Column, Sample};
pub use schema::{Leaf, LeafInfo, SchemaError, Step};
pub use weights::Weights;
pub use writer::{CommitError, FinalMut, PolicyError, PutError, StepError, StepMut, Writer};
