//! The learner: APPO, asynchronous PPO on V-trace targets, in burn.
//!
//! A batch is held while it is learned from: values of all T + 1 observations, V-trace targets and advantages
//! ([`crate::returns`]), then a few passes of clipped PPO (Schulman et al., "Proximal Policy Optimization Algorithms",
//! 2017) over shuffled minibatches, with Adam and gradients clipped by their global norm. The ratio that PPO clips is
//! the learner's to the *acting* policy's probability, so it also corrects for the policy lag.
//!
//! Owns the networks, the optimizer and the order of minibatches. burn takes the columns where they lie in the slot
//! ([`import`]); rewards and flags are read there by plain code. What it does not do: fetch batches or publish weights.

use crate::env::OBSERVATION;
use crate::net::Policy;
use crate::networks::{Networks, clip, floats, import};
use crate::returns::{Unroll, VTrace, normalise};
use crate::schema::Columns;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{AllocationProperty, DType, Device, Int, Tensor, TensorData};
use pinring::{Batch, SharedBatch};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// What there is to tune.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyper {
    /// Steps of an unroll, T.
    pub unroll: usize,
    /// Units of each hidden layer.
    pub hidden: usize,
    /// γ, λ and the clipping of ratios.
    pub vtrace: VTrace,
    /// Rewards are multiplied by this, so that values stay near 1 (an upright pole is worth 1 / (1 - γ) rewards).
    pub reward_scale: f32,
    /// Adam's step size.
    pub learning_rate: f64,
    /// Passes over a batch.
    pub passes: usize,
    /// Minibatches of a pass.
    pub minibatches: usize,
    /// PPO's ε: ratios are clipped to 1 ± ε.
    pub clip: f32,
    /// Weight of the value loss.
    pub value_weight: f32,
    /// Weight of the entropy bonus.
    pub entropy_weight: f32,
    /// Gradients longer than this, all parameters taken together, are shortened to it.
    pub max_gradient: f32,
}

impl Default for Hyper {
    fn default() -> Hyper {
        Hyper {
            unroll: 64,
            hidden: 64,
            vtrace: VTrace { discount: 0.99, decay: 0.95, rho_max: 1.0, c_max: 1.0 },
            reward_scale: 0.02,
            learning_rate: 1e-3,
            passes: 4,
            minibatches: 4,
            clip: 0.2,
            value_weight: 0.5,
            entropy_weight: 0.01,
            max_gradient: 0.5,
        }
    }
}

/// The losses of a batch's last minibatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    /// Of the clipped surrogate.
    pub policy: f32,
    /// Mean squared distance of values and targets.
    pub value: f32,
    /// Mean entropy of the policy, in nats; ln 2 at most.
    pub entropy: f32,
}

/// The networks in training.
pub struct Appo {
    hyper: Hyper,
    columns: Columns,
    property: AllocationProperty,
    device: Device,
    networks: Networks,
    optimizer: ModuleOptimizer,
    rng: StdRng,
}

impl std::fmt::Debug for Appo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Appo").field("hyper", &self.hyper).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Appo {
    /// Starts from `policy`. `pinned` says whether batches lie in page-locked memory, which a GPU backend copies from
    /// without staging.
    pub fn new(hyper: Hyper, columns: Columns, policy: &Policy, pinned: bool, seed: u64) -> Appo {
        let device = Device::flex().autodiff();
        Appo {
            hyper,
            columns,
            property: if pinned { AllocationProperty::Pinned } else { AllocationProperty::Other },
            networks: Networks::new(policy, &device),
            device,
            optimizer: AdamConfig::new().init(),
            rng: StdRng::seed_from_u64(seed),
        }
    }

    /// The networks as numbers, to publish.
    pub fn policy(&self) -> Policy {
        self.networks.policy()
    }

    /// Learns from one batch.
    pub fn update(&mut self, batch: &SharedBatch) -> Losses {
        let observations: Tensor<3> = import(batch, self.columns.observation, DType::F32, self.property, &self.device);
        let actions: Tensor<2, Int> = import(batch, self.columns.action, DType::I64, self.property, &self.device);
        let acting: Tensor<2> = import(batch, self.columns.log_prob, DType::F32, self.property, &self.device);
        let [rows, steps] = acting.dims();
        let count = rows * steps;

        let values = floats(self.networks.critic.forward(observations.clone()));
        let observations = observations.slice([0..rows, 0..steps, 0..OBSERVATION]).reshape([count, OBSERVATION]);
        let (actions, acting) = (actions.reshape([count, 1]), acting.reshape([count]));
        let log_probs = self.log_probs(observations.clone()).gather(1, actions.clone()).reshape([count]);
        let log_ratios = floats(log_probs - acting.clone());
        let (targets, mut advantages) = self.targets(batch, rows, steps, &values, &log_ratios);
        normalise(&mut advantages);

        let [targets, advantages] =
            [targets, advantages].map(|x| Tensor::<1>::from_data(TensorData::new(x, [count]), &self.device));
        let mut order: Vec<i64> = (0..count as i64).collect();
        let mut losses = Losses::default();
        for _ in 0..self.hyper.passes {
            order.shuffle(&mut self.rng);
            for chunk in order.chunks(count.div_ceil(self.hyper.minibatches)) {
                let index = Tensor::<1, Int>::from_data(TensorData::new(chunk.to_vec(), [chunk.len()]), &self.device);
                losses = self.descend(
                    observations.clone().select(0, index.clone()),
                    actions.clone().select(0, index.clone()),
                    acting.clone().select(0, index.clone()),
                    targets.clone().select(0, index.clone()),
                    advantages.clone().select(0, index),
                );
            }
        }
        losses
    }

    /// V-trace, row by row, on the columns where they lie.
    fn targets(
        &self,
        batch: &Batch,
        rows: usize,
        steps: usize,
        values: &[f32],
        log_ratios: &[f32],
    ) -> (Vec<f32>, Vec<f32>) {
        let columns = &self.columns;
        let rewards: Vec<f32> = batch.slice(columns.reward).iter().map(|r| r * self.hyper.reward_scale).collect();
        let (mut targets, mut advantages) = (vec![0.0; rows * steps], vec![0.0; rows * steps]);
        for row in 0..rows {
            let span = row * steps..(row + 1) * steps;
            let unroll = Unroll {
                rewards: &rewards[span.clone()],
                terminated: &batch.slice(columns.terminated)[span.clone()],
                truncated: &batch.slice(columns.truncated)[span.clone()],
                bootstrap: &batch.slice(columns.bootstrap)[span.clone()],
                values: &values[row * (steps + 1)..(row + 1) * (steps + 1)],
                log_ratios: &log_ratios[span.clone()],
            };
            self.hyper.vtrace.targets(&unroll, &mut targets[span.clone()], &mut advantages[span]);
        }
        (targets, advantages)
    }

    fn log_probs(&self, observations: Tensor<2>) -> Tensor<2> {
        log_softmax(self.networks.actor.forward(observations), 1)
    }

    /// One step down the gradient of one minibatch.
    fn descend(
        &mut self,
        observations: Tensor<2>,
        actions: Tensor<2, Int>,
        acting: Tensor<1>,
        targets: Tensor<1>,
        advantages: Tensor<1>,
    ) -> Losses {
        let hyper = &self.hyper;
        let [count] = acting.dims();
        let all = self.log_probs(observations.clone());
        let ratio = (all.clone().gather(1, actions).reshape([count]) - acting).exp();
        let clipped = ratio.clone().clamp(1.0 - hyper.clip, 1.0 + hyper.clip) * advantages.clone();
        let policy = -(ratio * advantages).min_pair(clipped).mean();
        let entropy = -(all.clone().exp() * all).sum_dim(1).mean();
        let value = (self.networks.critic.forward(observations).reshape([count]) - targets).powi_scalar(2).mean();
        let loss = policy.clone() + value.clone() * hyper.value_weight - entropy.clone() * hyper.entropy_weight;

        let mut gradients = GradientsParams::from_grads(loss.backward(), &self.networks);
        clip(&mut gradients, &self.networks.towers(), hyper.max_gradient);
        self.networks = self.optimizer.step(hyper.learning_rate, self.networks.clone(), gradients);
        Losses { policy: policy.into_scalar(), value: value.into_scalar(), entropy: entropy.into_scalar() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Scratch;
    use crate::schema::{Leaves, declare};
    use pinring::{End, Feed, Learner, Sample, Weights, Writer};

    /// One batch of 8 rows, written by `policy` in a task of one step: pushing right is rewarded, pushing left is not.
    fn play(writer: &mut Writer, weights: &Weights<Policy>, leaves: &Leaves, rng: &mut StdRng, unroll: usize) {
        for _ in 0..unroll {
            let mut step = writer.step().unwrap();
            step.view_mut(leaves.observation).fill(0.1);
            let (_, policy) = step.policy(weights).unwrap();
            let acted: Vec<(usize, f32)> =
                (0..8).map(|_| policy.sample(&[0.1; OBSERVATION], rng, &mut Scratch::default())).collect();
            step.put(leaves.action, &acted.iter().map(|a| a.0 as i64).collect::<Vec<_>>()).unwrap();
            step.put(leaves.log_prob, &acted.iter().map(|a| a.1).collect::<Vec<_>>()).unwrap();
            step.put(leaves.reward, &acted.iter().map(|a| a.0 as f32).collect::<Vec<_>>()).unwrap();
            step.put(leaves.bootstrap, &[0.0; 8]).unwrap();
            for lane in 0..8 {
                step.end(lane, End::Terminated);
            }
            step.commit().unwrap();
        }
    }

    fn feed(sample: Sample) -> (Feed, Writer, Learner) {
        let feed = Feed::builder(sample).batch(8).lanes(8).start().unwrap();
        let (writer, learner) = (feed.writer(8).unwrap(), feed.learner().unwrap());
        (feed, writer, learner)
    }

    #[test]
    fn learns_which_action_is_rewarded() {
        let (sample, leaves, columns) = declare(4);
        let (_feed, mut writer, learner) = feed(sample);
        let hyper =
            Hyper { hidden: 8, reward_scale: 1.0, learning_rate: 1e-2, entropy_weight: 0.0, ..Hyper::default() };
        let policy = Policy::new(hyper.hidden, 1);
        let mut appo = Appo::new(hyper, columns, &policy, false, 1);
        let weights = Weights::new(policy);
        let mut rng = StdRng::seed_from_u64(1);
        play(&mut writer, &weights, &leaves, &mut rng, 1); // an unroll is handed in with the observation behind it
        for _ in 0..30 {
            play(&mut writer, &weights, &leaves, &mut rng, 4);
            let losses = appo.update(&learner.next_batch().unwrap().share());
            assert!(losses.policy.is_finite() && losses.value.is_finite());
            assert!((0.0..=2f32.ln() + 1e-5).contains(&losses.entropy), "{losses:?}");
            weights.publish(appo.policy());
        }
        let right = appo.policy().log_probs(&[0.1; OBSERVATION], &mut Scratch::default())[1].exp();
        assert!(right > 0.9, "probability of the rewarded action: {right}");
    }

    #[test]
    fn burn_reads_the_slot_itself_and_the_slot_comes_home_with_the_last_tensor() {
        let (sample, leaves, columns) = declare(4);
        let (feed, mut writer, learner) = feed(sample);
        let weights = Weights::new(Policy::new(8, 1));
        play(&mut writer, &weights, &leaves, &mut StdRng::seed_from_u64(1), 5);
        let batch = learner.next_batch().unwrap().share();
        let place = batch.slice(columns.observation).as_ptr();
        let device = Device::flex().autodiff();
        let observation = columns.observation;
        let tensor: Tensor<3> = import(&batch, observation, DType::F32, AllocationProperty::Other, &device);
        drop(batch);
        assert_eq!(tensor.dims(), [8, 5, OBSERVATION]);
        assert_eq!(feed.metrics().batches_held, 1, "the tensor reads the slot");
        let data = tensor.into_data(); // the tensor's only owner, so these are its very bytes
        assert_eq!(data.as_slice::<f32>().unwrap().as_ptr(), place, "no copy was made");
        drop(data);
        assert_eq!(feed.metrics().batches_held, 0);
    }
}
