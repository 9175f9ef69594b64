//! The learner: double DQN on prioritized n-step transitions, in burn.
//!
//! Targets are R + γᵏ Q̄(s', argmax Q(s', ·)): the newest network Q chooses, an older copy Q̄ values (van Hasselt, Guez and
//! Silver, "Deep Reinforcement Learning with Double Q-learning", 2016, equation 4). The loss of a row is Huber's of its TD
//! error δ times its importance weight, and its new priority is |δ| + ε (Schaul, Quan, Antonoglou and Silver, "Prioritized
//! Experience Replay", 2016, algorithm 1 and section 3.3); the sampler applies the exponents.
//!
//! Owns both networks and the optimizer. burn takes the columns where they lie in the slot. What it does not do: fetch
//! batches, set priorities or publish weights.

use crate::schema::Columns;
use actor_learner::env::ACTIONS;
use actor_learner::net::Mlp;
use actor_learner::networks::{Tower, clip, floats, import};
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{AllocationProperty, DType, Device, Int, Tensor, TensorData};
use pinring::SharedBatch;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// What there is to tune.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyper {
    /// Steps up to the bootstrap step.
    pub n: usize,
    /// γ.
    pub gamma: f64,
    /// Units of each hidden layer.
    pub hidden: usize,
    /// Steps that the store keeps.
    pub capacity: usize,
    /// Samples with which learning begins.
    pub min_size: u64,
    /// Rows of a batch.
    pub batch: usize,
    /// Rows sampled for each environment step.
    pub samples_per_insert: f64,
    /// α of the priorities.
    pub alpha: f64,
    /// β of the importance weights, at the first update; it rises to 1.
    pub beta: f64,
    /// Updates that β takes to 1.
    pub beta_updates: u64,
    /// What is added to |δ|, so that no transition is forgotten.
    pub least_priority: f32,
    /// Rewards are multiplied by this, so that values stay near 1 (an upright pole is worth 1 / (1 - γ) rewards).
    pub reward_scale: f32,
    /// Adam's step size.
    pub learning_rate: f64,
    /// Gradients longer than this, all parameters taken together, are shortened to it.
    pub max_gradient: f32,
    /// Updates from one copy of the newest network to the next.
    pub target_updates: u64,
    /// ε of the actors, at the first step and from `exploration_steps` on.
    pub exploration: [f64; 2],
    /// Environment steps that ε takes to fall.
    pub exploration_steps: u64,
}

impl Default for Hyper {
    fn default() -> Hyper {
        Hyper {
            n: 3,
            gamma: 0.99,
            hidden: 64,
            capacity: 50_000,
            min_size: 1_000,
            batch: 64,
            samples_per_insert: 8.0,
            alpha: 0.6,
            beta: 0.4,
            beta_updates: 10_000,
            least_priority: 1e-3,
            reward_scale: 0.02,
            learning_rate: 1e-3,
            max_gradient: 0.5,
            target_updates: 200,
            exploration: [1.0, 0.02],
            exploration_steps: 10_000,
        }
    }
}

impl Hyper {
    /// Environment steps that make one batch due.
    pub fn steps_a_batch(&self) -> f64 {
        self.batch as f64 / self.samples_per_insert
    }

    /// Environment steps that make `updates` batches due.
    pub fn steps(&self, updates: u64) -> u64 {
        self.min_size + (updates as f64 * self.steps_a_batch()) as u64
    }

    /// β after `updates` updates.
    pub fn beta_at(&self, updates: u64) -> f64 {
        self.beta + (1.0 - self.beta) * (updates as f64 / self.beta_updates.max(1) as f64).min(1.0)
    }
}

/// What came of one update.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    /// Mean weighted loss.
    pub loss: f32,
    /// The new priority of each row.
    pub priorities: Vec<f32>,
}

/// The networks in training.
pub struct Dqn {
    hyper: Hyper,
    columns: Columns,
    property: AllocationProperty,
    device: Device,
    newest: Tower,
    /// As the newest one was some updates ago; without gradients.
    lagging: Tower,
    optimizer: ModuleOptimizer,
    updates: u64,
}

impl std::fmt::Debug for Dqn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dqn").field("hyper", &self.hyper).field("updates", &self.updates).finish_non_exhaustive()
    }
}

/// Action values of a network that was never trained, from a seed.
pub fn new_network(hidden: usize, seed: u64) -> Mlp {
    Mlp::new(hidden, ACTIONS, 0.1, &mut StdRng::seed_from_u64(seed))
}

impl Dqn {
    /// Starts from `network`. `pinned` says whether batches lie in page-locked memory, which a GPU backend copies from
    /// without staging.
    pub fn new(hyper: Hyper, columns: Columns, network: &Mlp, pinned: bool) -> Dqn {
        let device = Device::flex().autodiff();
        Dqn {
            hyper,
            columns,
            property: if pinned { AllocationProperty::Pinned } else { AllocationProperty::Other },
            newest: Tower::new(network, &device),
            lagging: Tower::new(network, &device).valid(),
            device,
            optimizer: AdamConfig::new().init(),
            updates: 0,
        }
    }

    /// The newest network as numbers, to publish.
    pub fn network(&self) -> Mlp {
        self.newest.numbers()
    }

    /// Learns from one batch.
    pub fn update(&mut self, batch: &SharedBatch) -> Learned {
        let (columns, device, property) = (self.columns, &self.device, self.property);
        let now: Tensor<2> = import(batch, columns.now, DType::F32, property, device);
        let actions: Tensor<1, Int> = import(batch, columns.action, DType::I64, property, device);
        let weights: Tensor<1> = import(batch, columns.weight, DType::F32, property, device);
        let rows = batch.rows();

        let targets = self.targets(batch);
        let chosen = self.newest.forward(now).gather(1, actions.reshape([rows, 1])).reshape([rows]);
        let values = floats(chosen.clone());
        let priorities = values.iter().zip(&targets).map(|(q, y)| (y - q).abs() + self.hyper.least_priority).collect();
        let targets = Tensor::<1>::from_data(TensorData::new(targets, [rows]), device);
        let loss = loss(chosen, targets, weights);

        let mut gradients = GradientsParams::from_grads(loss.backward(), &self.newest);
        clip(&mut gradients, &[&self.newest], self.hyper.max_gradient);
        self.newest = self.optimizer.step(self.hyper.learning_rate, self.newest.clone(), gradients);
        self.updates += 1;
        if self.updates.is_multiple_of(self.hyper.target_updates) {
            self.lagging = self.newest.valid();
        }
        Learned { loss: loss.into_scalar(), priorities }
    }

    /// The target of each row.
    fn targets(&self, batch: &SharedBatch) -> Vec<f32> {
        let Columns { ret, discount, then, .. } = self.columns;
        // Without gradients: a graph that nobody goes back through would keep the batch's slot.
        let device = self.device.clone().without_autodiff();
        let then: Tensor<2> = import(batch, then, DType::F32, self.property, &device);
        let newest = floats(self.newest.valid().forward(then.clone()));
        let lagging = floats(self.lagging.forward(then));
        let (returns, discounts) = (batch.slice(ret), batch.slice(discount));
        let values = newest.chunks(ACTIONS).zip(lagging.chunks(ACTIONS)).enumerate();
        let target =
            |(row, (newest, lagging))| target(returns[row] * self.hyper.reward_scale, discounts[row], newest, lagging);
        values.map(target).collect()
    }
}

/// The target of a row: what was earned, and what counts of the value behind it.
fn target(ret: f32, discount: f32, newest: &[f32], lagging: &[f32]) -> f32 {
    let best = (1..newest.len()).fold(0, |best, action| if newest[action] > newest[best] { action } else { best });
    ret + discount * lagging[best]
}

/// Huber's loss of each row, δ² / 2 up to |δ| = 1 and |δ| - 1/2 beyond, times the row's weight; the mean of these.
fn loss(values: Tensor<1>, targets: Tensor<1>, weights: Tensor<1>) -> Tensor<1> {
    let error = (targets - values).abs();
    let within = error.clone().clamp_max(1.0);
    (within.clone() * (error - within * 0.5) * weights).mean()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::declare;
    use actor_learner::net::{Dense, Scratch};
    use pinring::{Batch, End, Feed, Lifo, Pace};

    #[test]
    fn the_newest_network_chooses_and_the_older_one_values() {
        let (newest, lagging) = ([1.0, 2.0], [10.0, 20.0]);
        assert_eq!(target(1.5, 0.5, &newest, &lagging), 1.5 + 0.5 * 20.0);
        assert_eq!(target(1.5, 0.5, &[2.0, 1.0], &[10.0, 20.0]), 1.5 + 0.5 * 10.0, "not the older one's best");
        assert_eq!(target(1.5, 0.0, &newest, &lagging), 1.5, "nothing is bootstrapped behind a terminal state");
    }

    /// δ = 0.5, -2 and 1 with weights 1, 0.5 and 0: (0.125 + 0.75 + 0) / 3; the slope by a value is -w clamp(δ) / 3.
    #[test]
    fn the_loss_and_its_slope_by_hand() {
        let device = Device::flex().autodiff();
        let tensor = |x: [f32; 3]| Tensor::<1>::from_data(TensorData::new(x.to_vec(), [3]), &device);
        let values = tensor([1.0, 3.0, 0.0]).require_grad();
        let loss = loss(values.clone(), tensor([1.5, 1.0, 1.0]), tensor([1.0, 0.5, 0.0]));
        let slope = floats(values.grad(&loss.backward()).expect("a gradient was asked for"));
        let close = |got: f32, want: f32| assert!((got - want).abs() < 1e-6, "{got} is not {want}");
        close(loss.into_scalar(), 0.875 / 3.0);
        slope.into_iter().zip([-0.5 / 3.0, 0.5 / 3.0, 0.0]).for_each(|(got, want)| close(got, want));
    }

    /// A lane's episode of four steps, observations (t, 0, 0, 0) and rewards 1, ended that way; the batch of its samples.
    fn episode(end: End) -> (Batch, Columns) {
        let (sample, leaves, columns) = declare(3, 0.5);
        let builder = Feed::builder(sample).batch(4).buffers(1).lanes(1).replay(16, Lifo::new());
        let feed = builder.pace(Pace::min_size(4)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for t in 0..4 {
            let mut step = writer.step().unwrap();
            step.put(leaves.observation, &[t as f32, 0.0, 0.0, 0.0]).unwrap();
            step.put(leaves.action, &[t % 2]).unwrap();
            step.put(leaves.reward, &[1.0]).unwrap();
            if t == 3 {
                step.end(0, end).put(leaves.observation, &[100.0, 0.0, 0.0, 0.0]).unwrap();
            }
            step.commit().unwrap();
        }
        (learner.next_batch().unwrap(), columns)
    }

    /// Values that are easy to follow: of the first number x of an observation, x and 2 x.
    fn doubling() -> Mlp {
        let weight = vec![1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        Mlp { layers: vec![Dense { weight, bias: vec![0.0; ACTIONS] }] }
    }

    #[test]
    fn targets_stop_at_a_terminal_state_and_go_on_from_a_truncated_one() {
        let hyper = Hyper { n: 3, gamma: 0.5, reward_scale: 1.0, least_priority: 0.0, ..Hyper::default() };
        // Step 0 is bootstrapped from step 3, whose best value is 6. The others reach the end: step 1 after three rewards,
        // step 2 after two, step 3 after one.
        for (end, expected) in [
            (End::Terminated, [1.75 + 0.125 * 6.0, 1.75, 1.5, 1.0]),
            (End::Truncated, [1.75 + 0.125 * 6.0, 1.75 + 0.125 * 200.0, 1.5 + 0.25 * 200.0, 1.0 + 0.5 * 200.0]),
        ] {
            let (batch, columns) = episode(end);
            let first_steps: Vec<usize> = batch.first_steps().map(|step| step as usize).collect();
            let mut dqn = Dqn::new(hyper.clone(), columns, &doubling(), false);
            let batch = batch.share();
            let targets = dqn.targets(&batch);
            let learned = dqn.update(&batch);
            let mut seen = first_steps.clone();
            seen.sort_unstable();
            assert_eq!(seen, [0, 1, 2, 3], "{end:?}: every step is a sample");
            for (row, &t) in first_steps.iter().enumerate() {
                assert!((targets[row] - expected[t]).abs() < 1e-5, "{end:?}, step {t}: {targets:?}");
                let value = [0.0, 2.0, 2.0, 6.0][t]; // actions 0, 1, 0, 1
                assert!((learned.priorities[row] - (expected[t] - value).abs()).abs() < 1e-4, "{learned:?}");
            }
        }
    }

    #[test]
    fn values_move_to_their_targets() {
        let (batch, columns) = episode(End::Terminated);
        let hyper = Hyper { hidden: 16, gamma: 0.5, reward_scale: 1.0, learning_rate: 1e-2, ..Hyper::default() };
        let network = new_network(hyper.hidden, 1);
        let mut dqn = Dqn::new(hyper, columns, &network, false);
        let batch = batch.share();
        let first = dqn.update(&batch).loss;
        let last = (0..200).map(|_| dqn.update(&batch).loss).last().expect("there were updates");
        assert!(last < 0.01 * first, "{first} fell to {last}");
        let value = dqn.network().forward(&[3.0, 0.0, 0.0, 0.0], &mut Scratch::default())[1];
        assert!((value - 1.0).abs() < 0.1, "the last step is worth its reward: {value}");
    }
}
