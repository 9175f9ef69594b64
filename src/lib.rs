//! Feed a reinforcement-learning learner from a CUDA page-locked ring that environment threads write in place.

mod element;
mod error;
mod schema;
mod sample;
mod layout;
mod sync;
mod weights;
mod episodes;
mod metrics;
mod gate;
#[allow(unsafe_code)]
mod slots;
mod memory;
mod intake;
#[allow(unsafe_code)]
mod writer;

pub use element::{DType, Element};
pub use episodes::{End, Episode, Episodes};
pub use error::{Closed, Error, ErrorKind, Fault, Result};
pub use intake::WhenFull;
pub use layout::{COLUMN_ALIGN, ColumnInfo, SLOT_ALIGN};
pub use metrics::{Lag, Latency, Metrics};
pub use sample::{Column, Sample};
pub use schema::{Leaf, LeafInfo, SchemaError, Step};
pub use weights::Weights;
pub use writer::{CommitError, FinalMut, PolicyError, PutError, StepError, StepMut, Writer};
