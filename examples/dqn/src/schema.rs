//! What a step of CartPole is, and what a row of a sampled batch holds: the one declaration that actors and learner share.
//!
//! Owns the names and shapes, and hands out the handles. What it does not do: start a feed (see [`crate::train`]).

use actor_learner::env::OBSERVATION;
use pinring::{Column, Leaf, Sample, Step};

/// What an actor writes.
#[derive(Clone, Copy, Debug)]
pub struct Leaves {
    /// What the policy saw; of a truncated episode also what it would have seen next.
    pub observation: Leaf<f32>,
    /// What it did.
    pub action: Leaf<i64>,
    /// 1 a step.
    pub reward: Leaf<f32>,
}

/// What the learner reads: `[B, 4]` observations, `[B]` of everything else.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// s(t).
    pub now: Column<f32>,
    /// a(t).
    pub action: Column<i64>,
    /// Σ γᵏ r(t + k), up to the bootstrap step.
    pub ret: Column<f32>,
    /// What the value of `then` counts: γᵏ for k steps, or 0 behind a terminal state.
    pub discount: Column<f32>,
    /// The observation to bootstrap from: n steps later, or the episode's final one.
    pub then: Column<f32>,
    /// The importance weight.
    pub weight: Column<f32>,
}

/// Transitions of `n` steps, discounted by `gamma`.
pub fn declare(n: usize, gamma: f64) -> (Sample, Leaves, Columns) {
    let mut step = Step::new();
    let leaves = Leaves {
        observation: step.observation("observation", &[OBSERVATION]),
        action: step.leaf("action", &[]),
        reward: step.leaf("reward", &[]),
    };
    step.reward(leaves.reward);
    let mut sample = Sample::transition(step, n, gamma);
    let columns = Columns {
        now: sample.at(leaves.observation, 0),
        action: sample.at(leaves.action, 0),
        ret: sample.n_step_return(leaves.reward),
        discount: sample.discount(),
        then: sample.next(leaves.observation),
        weight: sample.weight(),
    };
    (sample, leaves, columns)
}
