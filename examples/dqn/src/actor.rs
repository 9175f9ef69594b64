//! An environment thread: carts, the newest action values, and a writer.
//!
//! Owns its carts and their random generators, and waits where the writer makes it wait, for the pace. In lockstep it also
//! waits until the learner has learned from every batch that its steps made due ([`Turns`]). It ends when the feed does.
//! What it does not do: learn, count, or keep a copy of anything that it wrote.

use crate::learner::Hyper;
use crate::schema::Leaves;
use actor_learner::env::{ACTIONS, Carts};
use actor_learner::net::{Mlp, Scratch};
use pinring::{Weights, Writer};
use rand::RngExt;
use std::time::Duration;

/// How long a thread waits for the learner before it looks whether the feed has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// With what probability an action is drawn at random: falls linearly, then stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exploration {
    /// At the first step.
    pub first: f64,
    /// From step `over` on.
    pub last: f64,
    /// Environment steps that the fall takes.
    pub over: u64,
}

impl Exploration {
    /// ε at environment step `step`, counted over all lanes.
    pub fn at(&self, step: u64) -> f64 {
        let gone = step as f64 / self.over.max(1) as f64;
        self.first + (self.last - self.first) * gone.min(1.0)
    }
}

/// Whose turn it is, where environments and learner alternate: how many batches are due by the steps of one writer. That
/// is what the pace of the feed says, counted from the writer's side.
#[derive(Clone, Debug)]
pub struct Turns {
    min_size: u64,
    n: u64,
    steps_a_batch: f64,
    /// Steps of each lane's unfinished episode.
    unfinished: Vec<u64>,
    steps: u64,
}

impl Turns {
    /// Before the first step of `lanes` lanes.
    pub fn new(hyper: &Hyper, lanes: usize) -> Turns {
        let Hyper { min_size, n, .. } = *hyper;
        let steps_a_batch = hyper.steps_a_batch();
        Turns { min_size, n: n as u64, steps_a_batch, unfinished: vec![0; lanes], steps: 0 }
    }

    /// Counts a step of every lane; `ended` says whose episode it ended.
    pub fn count(&mut self, ended: &[bool]) {
        for (steps, &ended) in self.unfinished.iter_mut().zip(ended) {
            *steps = if ended { 0 } else { *steps + 1 };
            self.steps += 1;
        }
    }

    /// Batches that are due. The last n steps of an unfinished episode are no samples yet, and the first batch is selected
    /// when there are `min_size` samples.
    pub fn due(&self) -> u64 {
        let unready: u64 = self.unfinished.iter().map(|&steps| steps.min(self.n)).sum();
        if self.steps - unready < self.min_size {
            return 0;
        }
        ((self.steps - self.min_size) as f64 / self.steps_a_batch) as u64
    }

    /// Waits until the learner has published a version for each batch that is due.
    fn wait(&self, weights: &Weights<Mlp>, writer: &mut Writer) -> Result<(), pinring::Error> {
        let due = self.due();
        while due > 0 && weights.wait_newer(due - 1, LOOK_AGAIN).is_none() {
            drop(writer.step()?); // a step that is not committed never began; at the end of the feed there is none
        }
        Ok(())
    }
}

/// Steps all lanes of `writer`, which are among `lanes` lanes in all, until the feed ends; returns why it ended.
///
/// # Errors
/// Whatever the writer says; at the end of a run that is the stop which the learner asked for.
pub fn act(
    mut writer: Writer,
    weights: &Weights<Mlp>,
    leaves: &Leaves,
    exploration: Exploration,
    lanes: usize,
    mut turns: Option<Turns>,
) -> Result<(), pinring::Error> {
    let own = writer.lanes().len();
    let mut carts = Carts::new((0..own).map(|lane| writer.seed(lane)));
    let mut scratch = Scratch::default();
    let (mut actions, mut ended, rewards) = (vec![0; own], vec![false; own], vec![1.0; own]);
    let mut tick = 0;
    loop {
        if let Some(turns) = &turns {
            turns.wait(weights, &mut writer)?;
        }
        let mut step = writer.step()?; // waits while the learner is too far behind
        for (lane, mut row) in step.view_mut(leaves.observation).outer_iter_mut().enumerate() {
            row.iter_mut().zip(carts.observation(lane)).for_each(|(to, x)| *to = x);
        }
        let (_, network) = step.policy(weights)?;
        let epsilon = exploration.at(tick * lanes as u64);
        for (lane, action) in actions.iter_mut().enumerate() {
            let observation = carts.observation(lane);
            let rng = carts.rng(lane);
            *action = match rng.random::<f64>() < epsilon {
                true => rng.random_range(0..ACTIONS as i64),
                false => network.greedy(&observation, &mut scratch) as i64,
            };
        }
        for lane in 0..own {
            let finished = carts.step(lane, actions[lane] as usize);
            ended[lane] = finished.is_some();
            if let Some(finished) = finished {
                // Where the time limit cut the episode, the value is bootstrapped from this observation.
                step.end(lane, finished.end).put(leaves.observation, &finished.observation)?;
            }
        }
        step.put(leaves.action, &actions)?;
        step.put(leaves.reward, &rewards)?;
        step.commit()?;
        if let Some(turns) = &mut turns {
            turns.count(&ended);
        }
        tick += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exploration_falls_and_stays() {
        let exploration = Exploration { first: 1.0, last: 0.1, over: 1_000 };
        for (step, epsilon) in [(0, 1.0), (500, 0.55), (1_000, 0.1), (1_000_000, 0.1)] {
            assert!((exploration.at(step) - epsilon).abs() < 1e-12, "{step}");
        }
    }

    /// Two lanes, n = 3, 10 samples to begin with, a batch of 8 rows for each 4 steps.
    #[test]
    fn batches_are_due_as_soon_as_samples_and_steps_make_them() {
        let hyper = Hyper { n: 3, min_size: 10, batch: 8, samples_per_insert: 2.0, ..Hyper::default() };
        let mut turns = Turns::new(&hyper, 2);
        let mut due = Vec::new();
        for step in 1..=12 {
            turns.count(&[step == 6, false]);
            due.push(turns.due());
        }
        // Of 12 steps 9 are samples (6 of the lane whose episode ended, 3 of the other); of 14 there are 10, and a batch is due.
        assert_eq!(due, [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3]);
    }
}
