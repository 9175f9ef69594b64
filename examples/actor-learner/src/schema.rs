//! What a step of CartPole is, and what a batch of unrolls holds: the one declaration that actors and learner share.
//!
//! Owns the names and shapes, and hands out the handles. What it does not do: start a feed (see [`crate::train`]).

use crate::env::OBSERVATION;
use pinring::{Column, Leaf, Sample, Step};

/// What an actor writes.
#[derive(Clone, Copy, Debug)]
pub struct Leaves {
    /// What the policy saw; T + 1 of them an unroll.
    pub observation: Leaf<f32>,
    /// What it did.
    pub action: Leaf<i64>,
    /// The log-probability with which it did that: the μ of V-trace and PPO.
    pub log_prob: Leaf<f32>,
    /// 1 a step.
    pub reward: Leaf<f32>,
    /// The value of the final observation where the time limit cut an episode, else 0.
    pub bootstrap: Leaf<f32>,
}

/// What the learner reads: `[B, T + 1, 4]` observations, `[B, T]` of everything else.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the leaves' names
pub struct Columns {
    pub observation: Column<f32>,
    pub action: Column<i64>,
    pub log_prob: Column<f32>,
    pub reward: Column<f32>,
    pub bootstrap: Column<f32>,
    pub terminated: Column<bool>,
    pub truncated: Column<bool>,
}

/// Unrolls of `steps` steps that run through the ends of episodes.
pub fn declare(steps: usize) -> (Sample, Leaves, Columns) {
    let mut step = Step::new();
    let leaves = Leaves {
        observation: step.observation("observation", &[OBSERVATION]),
        action: step.leaf("action", &[]),
        log_prob: step.leaf("log_prob", &[]),
        reward: step.leaf("reward", &[]),
        bootstrap: step.leaf("bootstrap_value", &[]),
    };
    step.reward(leaves.reward);
    let mut sample = Sample::unroll(step, steps);
    let columns = Columns {
        observation: sample.all(leaves.observation),
        action: sample.all(leaves.action),
        log_prob: sample.all(leaves.log_prob),
        reward: sample.all(leaves.reward),
        bootstrap: sample.all(leaves.bootstrap),
        terminated: sample.terminated(),
        truncated: sample.truncated(),
    };
    (sample, leaves, columns)
}
