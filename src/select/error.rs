//! Errors of samplers and of the pace.
//!
//! Owns their types and texts, and the rule what a priority is.

/// A priority that is none. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("priority {priority} at index {index} is none: priorities are finite and at least 0; nothing was changed")]
pub struct PriorityError {
    /// Where it was in what was passed.
    pub index: usize,
    /// What it was.
    pub priority: f32,
}

/// Refuses what is no priority: NaN, infinite, or below 0. Minus zero is zero.
pub(crate) fn check_priority(index: usize, priority: f32) -> Result<f32, PriorityError> {
    if priority.is_finite() && priority >= 0.0 { Ok(priority) } else { Err(PriorityError { index, priority }) }
}

/// Settings of a sampler that cannot work, or a saved state that is not its own.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// The exponent of the priorities.
    #[error("alpha is {got}, and must be from 0 (uniform) to 4; 0.6 is usual")]
    Alpha {
        /// What was given.
        got: f64,
    },
    /// The exponent of the importance weights.
    #[error("beta is {got}, and must be from 0 (no correction) to 1 (full correction)")]
    Beta {
        /// What was given.
        got: f64,
    },
    /// The least priority.
    #[error("the floor of the priorities is {got}, and must be finite and at least 0")]
    Floor {
        /// What was given.
        got: f32,
    },
    /// Items that may be selected 0 times.
    #[error("max-times-sampled is 0, so nothing could ever be selected: give at least 1")]
    NoTimes,
    /// The sampler has no importance weights.
    #[error("the sampler has no beta: only a prioritized one has importance weights")]
    NoBeta,
    /// Not what this sampler saved.
    #[error("the saved state does not fit the sampler: {why}")]
    Saved {
        /// What does not fit.
        why: &'static str,
    },
}

/// A [`Pace`](crate::Pace) that can never be met.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PaceError {
    /// Sampling would never begin.
    #[error(
        "sampling begins with {min_size} samples, but the store holds {capacity} at most: lower the min size, or store more"
    )]
    MinSize {
        /// The steps asked for.
        min_size: u64,
        /// The steps that the store holds.
        capacity: u64,
    },
    /// The rate is no rate.
    #[error("{rate} samples or updates a step are no pace: give a finite number above 0")]
    Rate {
        /// What was given.
        rate: f64,
    },
    /// The tolerance is none.
    #[error("a tolerance of {tolerance} is none: give a finite number of at least 0")]
    Tolerance {
        /// What was given.
        tolerance: f64,
    },
    /// The sides may not run apart as far as one batch and one step of all lanes take them.
    #[error(
        "with a tolerance of {tolerance}, rows sampled may be {rows} away from their pace; {ahead} batches of {batch} rows \
         selected ahead of the learner and one step of {lanes} lanes need {needs}: give a tolerance of at least {least}, \
         or 0 for the strictest order"
    )]
    TooTight {
        /// What was given.
        tolerance: f64,
        /// How far that is, in rows.
        rows: f64,
        /// How far it has to be, in rows.
        needs: f64,
        /// The least tolerance that works.
        least: f64,
        /// Rows of a batch.
        batch: u64,
        /// Batches that may be selected ahead of the learner.
        ahead: u64,
        /// Lanes.
        lanes: u64,
    },
    /// Items leave before they could be sampled as often.
    #[error(
        "{rate} samples a step are asked for, but a sample begins at every {stride}. step and leaves after {times} times: \
         raise the times, or lower the rate or the stride"
    )]
    Times {
        /// The samples a step asked for.
        rate: f64,
        /// How many times an item is selected at most.
        times: u32,
        /// Steps from one item to the next.
        stride: u64,
    },
}
