//! The policy as environment threads use it: two small multi-layer perceptrons, evaluated by hand.
//!
//! Owns plain numbers ([`Policy`], which is what the learner publishes), their initial values, and the forward pass of
//! one observation. A framework's forward pass costs tens of microseconds whatever its size; for four numbers and 64
//! hidden units a loop needs a few. What it does not do: gradients (see [`crate::appo`]).

use crate::env::{ACTIONS, OBSERVATION};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// One layer: `output = input · weight + bias`, then `tanh` unless it is the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// Row-major, `[inputs, outputs]`.
    pub weight: Vec<f32>,
    /// `[outputs]`.
    pub bias: Vec<f32>,
}

impl Dense {
    /// Uniform weights of variance `gain² / inputs`, no bias.
    fn new(inputs: usize, outputs: usize, gain: f32, rng: &mut StdRng) -> Dense {
        let limit = gain * (3.0 / inputs as f32).sqrt();
        let weight = (0..inputs * outputs).map(|_| rng.random_range(-limit..limit)).collect();
        Dense { weight, bias: vec![0.0; outputs] }
    }

    /// Numbers that come in.
    pub fn inputs(&self) -> usize {
        self.weight.len() / self.outputs()
    }

    /// Numbers that go out.
    pub fn outputs(&self) -> usize {
        self.bias.len()
    }
}

/// A perceptron with two hidden layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// In the order of evaluation.
    pub layers: Vec<Dense>,
}

/// Where a forward pass keeps its layers, so that it allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Scratch([Vec<f32>; 2]);

impl Mlp {
    /// From an observation to `outputs` numbers; `last_gain` scales the last layer's first weights.
    pub fn new(hidden: usize, outputs: usize, last_gain: f32, rng: &mut StdRng) -> Mlp {
        let gain = 5.0 / 3.0; // tanh's
        let layers = vec![
            Dense::new(OBSERVATION, hidden, gain, rng),
            Dense::new(hidden, hidden, gain, rng),
            Dense::new(hidden, outputs, last_gain, rng),
        ];
        Mlp { layers }
    }

    /// The outputs for one input.
    pub fn forward<'s>(&self, input: &[f32], scratch: &'s mut Scratch) -> &'s [f32] {
        let Scratch([from, to]) = scratch;
        from.clear();
        from.extend_from_slice(input);
        for (index, layer) in self.layers.iter().enumerate() {
            to.clear();
            to.extend_from_slice(&layer.bias);
            for (x, row) in from.iter().zip(layer.weight.chunks_exact(layer.outputs())) {
                to.iter_mut().zip(row).for_each(|(sum, w)| *sum += x * w);
            }
            if index + 1 < self.layers.len() {
                to.iter_mut().for_each(|x| *x = x.tanh());
            }
            std::mem::swap(from, to);
        }
        from
    }

    /// The action that is preferred, of equals the first: the likeliest by logits, the best by action values.
    pub fn greedy(&self, observation: &[f32], scratch: &mut Scratch) -> usize {
        let preferences = self.forward(observation, scratch);
        (1..preferences.len())
            .fold(0, |best, action| if preferences[action] > preferences[best] { action } else { best })
    }
}

/// What acts: logits of the actions, and the value of an observation. The two share no layer.
///
/// ```
/// use actor_learner::net::{Policy, Scratch};
///
/// let policy = Policy::new(64, 7);
/// let log_probs = policy.log_probs(&[0.0; 4], &mut Scratch::default());
/// assert!((log_probs.iter().map(|p| p.exp()).sum::<f32>() - 1.0).abs() < 1e-6);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Observation to logits.
    pub actor: Mlp,
    /// Observation to value, in units of the learner's scaled reward.
    pub critic: Mlp,
}

impl Policy {
    /// A policy that prefers nothing yet, from a seed.
    pub fn new(hidden: usize, seed: u64) -> Policy {
        let rng = &mut StdRng::seed_from_u64(seed);
        Policy { actor: Mlp::new(hidden, ACTIONS, 0.01, rng), critic: Mlp::new(hidden, 1, 1.0, rng) }
    }

    /// Log-probabilities of the actions.
    pub fn log_probs(&self, observation: &[f32], scratch: &mut Scratch) -> [f32; ACTIONS] {
        let logits = self.actor.forward(observation, scratch);
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let normaliser = largest + logits.iter().map(|l| (l - largest).exp()).sum::<f32>().ln();
        std::array::from_fn(|action| logits[action] - normaliser)
    }

    /// Draws an action; returns it with its log-probability.
    pub fn sample(&self, observation: &[f32], rng: &mut StdRng, scratch: &mut Scratch) -> (usize, f32) {
        let log_probs = self.log_probs(observation, scratch);
        let mut left: f32 = rng.random();
        for (action, log_prob) in log_probs[..ACTIONS - 1].iter().enumerate() {
            left -= log_prob.exp();
            if left < 0.0 {
                return (action, *log_prob);
            }
        }
        (ACTIONS - 1, log_probs[ACTIONS - 1])
    }

    /// The value of an observation.
    pub fn value(&self, observation: &[f32], scratch: &mut Scratch) -> f32 {
        self.critic.forward(observation, scratch)[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_by_hand() {
        let hidden = Dense { weight: vec![1.0, 2.0, 3.0, 4.0], bias: vec![0.5, -0.5] };
        let last = Dense { weight: vec![2.0, -1.0], bias: vec![0.25] };
        assert_eq!((hidden.inputs(), hidden.outputs(), last.inputs(), last.outputs()), (2, 2, 2, 1));
        let mlp = Mlp { layers: vec![hidden, last] };
        let (a, b) = ((0.1 - 0.6 + 0.5f32).tanh(), (0.2 - 0.8 - 0.5f32).tanh());
        let mut scratch = Scratch::default();
        let got = mlp.forward(&[0.1, -0.2], &mut scratch)[0];
        assert!((got - (2.0 * a - b + 0.25)).abs() < 1e-6, "{got}");
        assert_eq!(mlp.forward(&[0.1, -0.2], &mut scratch)[0], got, "the scratch carries nothing over");
    }

    #[test]
    fn samples_follow_the_probabilities() {
        let mut policy = Policy::new(8, 3);
        policy.actor.layers[2] = Dense { weight: vec![0.0; 8 * ACTIONS], bias: vec![0.0, 3.0f32.ln()] };
        let (mut rng, mut scratch, mut rights) = (StdRng::seed_from_u64(5), Scratch::default(), 0);
        for _ in 0..4_000 {
            let (action, log_prob) = policy.sample(&[0.0; 4], &mut rng, &mut scratch);
            assert!((log_prob - [0.25f32.ln(), 0.75f32.ln()][action]).abs() < 1e-6);
            rights += action;
        }
        assert!((2_880..3_120).contains(&rights), "{rights} of 4000 at p = 3/4"); // 4.4 deviations
        assert_eq!(policy.actor.greedy(&[0.0; 4], &mut scratch), 1);
    }

    #[test]
    fn a_new_policy_prefers_nothing_and_is_a_function_of_its_seed() {
        let policy = Policy::new(64, 1);
        let [left, right] = policy.log_probs(&[0.05, -0.5, 0.05, 0.5], &mut Scratch::default());
        assert!((left - right).abs() < 0.1);
        assert_eq!(policy, Policy::new(64, 1));
        assert_ne!(policy, Policy::new(64, 2));
    }
}
