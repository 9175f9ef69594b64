//! Feed a reinforcement-learning learner from a CUDA page-locked ring that environment threads write in place.

#[allow(unsafe_code)]
mod cuda;
#[allow(unsafe_code)]
mod memory;

pub use cuda::types::{Candidate, CudaError, CudaFindError, CudaSearch, Outcome, Rung};
pub use cuda::{CudaReport, probe_cuda};
pub use memory::{
    BudgetRefusal, MapOutcome, MemoryLimit, MemoryLimitKind, PinOutcome, PinPhase, PinProgress, PinReport, PinTimes,
    PinTrial, RegisterRefusal, RingError, SlotEnd,
};
