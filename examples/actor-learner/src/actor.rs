//! An environment thread: carts, the current policy, and a writer.
//!
//! Owns its carts and their random generators, and waits where the writer makes it wait: for the learner, at the lag
//! gate. It ends when the feed does. What it does not do: learn, count, or keep a copy of anything that it wrote; the
//! policy reads its observation where the environment put it.

use crate::env::Carts;
use crate::net::{Policy, Scratch};
use crate::schema::Leaves;
use pinring::{End, Weights, Writer};

/// Steps all lanes of `writer` until the feed ends; returns why it ended.
///
/// # Errors
/// Whatever the writer says; at the end of a run that is the stop which the learner asked for.
pub fn act(mut writer: Writer, weights: &Weights<Policy>, leaves: &Leaves) -> Result<(), pinring::Error> {
    let lanes = writer.lanes().len();
    let mut carts = Carts::new((0..lanes).map(|lane| writer.seed(lane)));
    let mut scratch = Scratch::default();
    let (mut actions, mut log_probs, mut bootstraps) = (vec![0; lanes], vec![0.0; lanes], vec![0.0; lanes]);
    let rewards = vec![1.0; lanes];
    loop {
        let mut step = writer.step()?;
        for (lane, mut row) in step.view_mut(leaves.observation).outer_iter_mut().enumerate() {
            row.iter_mut().zip(carts.observation(lane)).for_each(|(to, x)| *to = x);
        }
        // Hands the observation in, so that the last unroll is complete, and waits until the next one may begin.
        let (_, policy) = step.policy(weights)?;
        for (lane, row) in step.view(leaves.observation).outer_iter().enumerate() {
            let observation: [f32; 4] = std::array::from_fn(|i| row[i]);
            let (action, log_prob) = policy.sample(&observation, carts.rng(lane), &mut scratch);
            (actions[lane], log_probs[lane]) = (action as i64, log_prob);
        }
        bootstraps.fill(0.0);
        for lane in 0..lanes {
            let Some(finished) = carts.step(lane, actions[lane] as usize) else { continue };
            if finished.end == End::Truncated {
                bootstraps[lane] = policy.value(&finished.observation, &mut scratch);
            }
            step.end(lane, finished.end);
        }
        step.put(leaves.action, &actions)?;
        step.put(leaves.log_prob, &log_probs)?;
        step.put(leaves.reward, &rewards)?;
        step.put(leaves.bootstrap, &bootstraps)?;
        step.commit()?;
    }
}
