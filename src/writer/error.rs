//! Why a step was not begun, written, acted on or committed.

use crate::error::{Closed, Error, ErrorKind};
use crate::select::PaceWait;

/// Why no step was begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// There is no room for a whole sample, and the feed (or the verb) does not wait longer. Nothing was begun.
    #[error(
        "the ring is full: all {buffers} buffers are filled, waiting or held by the learner; wait with `step_timeout`, \
         give the feed more `.buffers`, or let the learner drop its batches sooner"
    )]
    Full {
        /// Buffers of the feed.
        buffers: usize,
    },
    /// The pace of a replay feed holds writers back until the learner has taken more.
    #[error(transparent)]
    Pace(PaceWait),
    /// A replay store's oldest steps are due to be overwritten, and batches that hold them are still being filled.
    #[error("the steps that are to be overwritten are still being gathered: wait with `step_timeout`")]
    Gathering,
    /// Nothing can be written any more.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Why a value was not taken. The step stays open and as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    /// The number of values is wrong.
    #[error("leaf `{leaf}` takes {expected} values here ({lanes} lanes of shape {shape:?}), got {got}")]
    Length {
        /// The leaf.
        leaf: String,
        /// Lanes that the call writes.
        lanes: usize,
        /// One lane's shape.
        shape: Vec<usize>,
        /// Values that it takes; for `put_padded` the most.
        expected: usize,
        /// Values that came.
        got: usize,
    },
    /// The shape of an array is wrong.
    #[error("leaf `{leaf}` takes an array of shape {expected:?} (lanes first), got {got:?}")]
    Shape {
        /// The leaf.
        leaf: String,
        /// The shape that it takes.
        expected: Vec<usize>,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// The writer has no such lane.
    #[error("lane {lane} does not exist: this writer has {lanes} lanes, counted from 0")]
    Lane {
        /// The lane that was named.
        lane: usize,
        /// Lanes of the writer.
        lanes: usize,
    },
    /// The handle belongs to another step.
    #[error("a leaf of another step was passed: use the handles of the step that this feed was built from")]
    Foreign,
    /// This sample keeps no final observation.
    #[error(
        "leaf `{leaf}` keeps no final observation here: only observations of unrolls with `within_episode(true)` and of \
         stored episodes do; elsewhere write the value of the final observation in a leaf such as `bootstrap_value`"
    )]
    NoFinal {
        /// The leaf.
        leaf: String,
    },
    /// The number of values of an episode is wrong.
    #[error(
        "leaf `{leaf}` takes {expected} values here ({steps} of each element, of an observation one more than the episode has steps), got {got}"
    )]
    Episode {
        /// The leaf.
        leaf: String,
        /// Its steps: the episode's, and of an observation one more.
        steps: usize,
        /// Values that it takes.
        expected: usize,
        /// Values that came.
        got: usize,
    },
    /// A priority that is none.
    #[error("a priority of {priority}: it must be finite and at least 0")]
    Priority {
        /// What came.
        priority: String,
    },
    /// Nothing is stored, so nothing has a priority.
    #[error("this feed keeps no steps, so none has a priority: build it with `.replay`")]
    NotStored,
}

/// Why a policy was not given. The step stays open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// Of an unroll `policy` hands the observation in, which must be written before.
    #[error("write every observation before asking for the policy: leaf `{leaf}` was not written")]
    Observation {
        /// The first observation leaf that was not written.
        leaf: String,
    },
    /// An observation that rejects them holds NaN or an infinity. It was not handed in; write it again.
    #[error("leaf `{leaf}` of lane {lane} holds {value} at index {index}, and it rejects non-finite values")]
    NonFinite {
        /// The leaf.
        leaf: String,
        /// The lane, counted within the writer.
        lane: usize,
        /// The flat index within the lane's value.
        index: usize,
        /// The value, as text.
        value: String,
    },
    /// The exact version that lockstep calls for is no longer kept.
    #[error(
        "lockstep acts with version {needed} now, but only {oldest} to {newest} are kept: publish once for each batch"
    )]
    VersionGone {
        /// The version that this unroll must act with.
        needed: u64,
        /// The oldest version kept.
        oldest: u64,
        /// The newest version.
        newest: u64,
    },
    /// The lag gate watches other weights.
    #[error("these are not the weights that `max_policy_lag` was given: pass the same `Weights` (or a clone) here")]
    OtherWeights,
    /// The unroll that this observation completes found no room and was dropped, as `WhenFull` says.
    #[error(
        "the ring is full: {dropped_rows} completed unrolls were dropped; give the feed more `.buffers`, wait longer by \
         `.when_full`, or let the learner drop its batches sooner"
    )]
    Full {
        /// Unrolls that were dropped.
        dropped_rows: usize,
    },
    /// Nothing can be written any more.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Why a step was not committed. Unless the variant says otherwise it is as if the step had never begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// A leaf was not written.
    #[error("leaf `{leaf}` was not written for lane {lane}: every leaf must be written before each commit")]
    Unwritten {
        /// The leaf.
        leaf: String,
        /// The first lane without it, counted within the writer.
        lane: usize,
    },
    /// A leaf that rejects them holds NaN or an infinity.
    #[error("leaf `{leaf}` of lane {lane} holds {value} at index {index}, and it rejects non-finite values")]
    NonFinite {
        /// The leaf.
        leaf: String,
        /// The lane, counted within the writer.
        lane: usize,
        /// The flat index within the lane's value.
        index: usize,
        /// The value, as text.
        value: String,
    },
    /// A truncated episode is bootstrapped from its final observation, which was not put.
    #[error(
        "the final observation of leaf `{leaf}` was not put for lane {lane}: samples bootstrap from it where an episode is \
         truncated, so give it with `end(lane, End::Truncated).put(leaf, values)`"
    )]
    FinalUnwritten {
        /// The leaf.
        leaf: String,
        /// The first lane without it, counted within the writer.
        lane: usize,
    },
    /// The feed bounds the policy lag, and this step did not ask for its policy.
    #[error("the feed has a `max_policy_lag`: every step must ask `policy` between its observation and its action")]
    PolicyNotAsked,
    /// There was no room within the feed's patience. The step itself counts; these whole samples were dropped.
    #[error(
        "the ring is full: {dropped_rows} whole samples were dropped; give the feed more `.buffers`, wait longer by \
         `.when_full`, or let the learner drop its batches sooner"
    )]
    Full {
        /// Samples that were dropped.
        dropped_rows: usize,
    },
    /// Handing in the last unroll failed.
    #[error(transparent)]
    Policy(PolicyError),
    /// Nothing can be written any more.
    #[error(transparent)]
    Closed(#[from] Closed),
}

macro_rules! into_error {
    ($($type:ty { $($pattern:pat => $kind:ident),* })*) => {$(
        impl From<$type> for Error {
            fn from(error: $type) -> Error {
                #[allow(unreachable_patterns)]
                let kind = match &error {
                    $($pattern => ErrorKind::$kind,)*
                    _ => ErrorKind::Input,
                };
                if let Some(closed) = closed_of(&error) {
                    return Error::from_source(Error::from(closed).kind(), error);
                }
                Error::from_source(kind, error)
            }
        }
    )*};
}
into_error! {
    StepError { StepError::Full { .. } | StepError::Pace(_) | StepError::Gathering => Full }
    PutError { PutError::NotStored => Misuse }
    PolicyError { PolicyError::Full { .. } => Full, PolicyError::OtherWeights | PolicyError::VersionGone { .. } => Misuse }
    CommitError { CommitError::Full { .. } | CommitError::Policy(PolicyError::Full { .. }) => Full }
}

fn closed_of(error: &(dyn std::error::Error + 'static)) -> Option<Closed> {
    if let Some(StepError::Closed(closed)) = error.downcast_ref() {
        return Some(closed.clone());
    }
    if let Some(PolicyError::Closed(closed)) = error.downcast_ref() {
        return Some(closed.clone());
    }
    match error.downcast_ref() {
        Some(CommitError::Closed(closed) | CommitError::Policy(PolicyError::Closed(closed))) => Some(closed.clone()),
        _ => None,
    }
}
