//! V-trace: value targets and advantages from steps that an older policy took.
//!
//! Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures" (2018),
//! section 4.1, with the λ of its Remark 2. For a step t of an unroll, with the ratio π/μ of the learner's to the acting
//! policy's probability, ρ = min(ρ̄, π/μ) and c = λ · min(c̄, π/μ):
//!
//! ```text
//! δ_t = ρ_t (r_t + γ V_{t+1} - V_t)
//! v_t = V_t + δ_t + γ c_t (v_{t+1} - V_{t+1})          the target
//! A_t = r_t + γ v_{t+1} - V_t                          the advantage
//! ```
//!
//! Unrolls run through the ends of episodes. Behind a termination there is nothing: V_{t+1} = v_{t+1} = 0. Behind a
//! truncation the episode would have gone on: both are the value of its final observation, which the unroll does not
//! hold (the next observation is the next episode's first) and which the actor therefore wrote down.
//!
//! The paper's gradient weighs A_t by ρ_t. Here the clipped ratio of PPO (see [`crate::appo`]) stands in its place.
//!
//! Owns arithmetic on slices. What it does not do: compute values or ratios, or know about batches.

/// The settings of V-trace.
///
/// ```
/// use actor_learner::returns::{Unroll, VTrace};
///
/// let vtrace = VTrace { discount: 0.5, decay: 1.0, rho_max: 1.0, c_max: 1.0 };
/// let unroll = Unroll {
///     rewards: &[1.0, 1.0],
///     terminated: &[false, true],
///     truncated: &[false, false],
///     bootstrap: &[0.0, 0.0],
///     values: &[0.0, 0.0, 9.0], // the last one belongs to the next episode
///     log_ratios: &[0.0, 0.0],
/// };
/// let (mut targets, mut advantages) = ([0.0; 2], [0.0; 2]);
/// vtrace.targets(&unroll, &mut targets, &mut advantages);
/// assert_eq!(targets, [1.5, 1.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VTrace {
    /// γ.
    pub discount: f32,
    /// λ: 1 looks to the end of the unroll, 0 one step ahead.
    pub decay: f32,
    /// ρ̄: which policy's value the targets converge to.
    pub rho_max: f32,
    /// c̄: how far a surprise travels back.
    pub c_max: f32,
}

/// T steps of one lane.
#[derive(Clone, Copy, Debug)]
pub struct Unroll<'a> {
    /// Rewards, T.
    pub rewards: &'a [f32],
    /// Whether the step ended its episode for good, T.
    pub terminated: &'a [bool],
    /// Whether the step was the last before the time limit, T.
    pub truncated: &'a [bool],
    /// Values of final observations, T; read at truncated steps only.
    pub bootstrap: &'a [f32],
    /// The learner's values of the observations, T + 1.
    pub values: &'a [f32],
    /// ln(π/μ) of the actions, T.
    pub log_ratios: &'a [f32],
}

impl VTrace {
    /// Writes the targets and advantages of one unroll, T of each.
    ///
    /// # Panics
    /// If lengths differ from T and, for the values, T + 1.
    pub fn targets(&self, unroll: &Unroll<'_>, targets: &mut [f32], advantages: &mut [f32]) {
        let steps = unroll.rewards.len();
        assert_eq!(unroll.values.len(), steps + 1, "an unroll of {steps} steps has one value more");
        let mut surprise = 0.0; // v_{t+1} - V_{t+1}
        for t in (0..steps).rev() {
            let (value, reward) = (unroll.values[t], unroll.rewards[t]);
            let next = match (unroll.terminated[t], unroll.truncated[t]) {
                (true, _) => 0.0,
                (false, true) => unroll.bootstrap[t],
                (false, false) => unroll.values[t + 1],
            };
            if unroll.terminated[t] || unroll.truncated[t] {
                surprise = 0.0;
            }
            let ratio = unroll.log_ratios[t].exp();
            let (rho, c) = (ratio.min(self.rho_max), self.decay * ratio.min(self.c_max));
            advantages[t] = reward + self.discount * (next + surprise) - value;
            surprise = rho * (reward + self.discount * next - value) + self.discount * c * surprise;
            targets[t] = value + surprise;
        }
    }
}

/// Shifts and scales advantages to mean 0 and deviation 1.
///
/// ```
/// let mut advantages = [1.0, 3.0];
/// actor_learner::returns::normalise(&mut advantages);
/// assert!((advantages[1] - 1.0).abs() < 1e-6);
/// ```
pub fn normalise(advantages: &mut [f32]) {
    let count = advantages.len() as f64;
    let mean = advantages.iter().map(|&a| f64::from(a)).sum::<f64>() / count;
    let variance = advantages.iter().map(|&a| (f64::from(a) - mean).powi(2)).sum::<f64>() / count;
    let scale = 1.0 / (variance.sqrt() + 1e-8);
    advantages.iter_mut().for_each(|a| *a = ((f64::from(*a) - mean) * scale) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_CLIP: VTrace = VTrace { discount: 0.9, decay: 1.0, rho_max: f32::INFINITY, c_max: f32::INFINITY };
    const NO_END: [bool; 3] = [false; 3];

    fn run(vtrace: VTrace, unroll: &Unroll<'_>) -> (Vec<f32>, Vec<f32>) {
        let mut out = (vec![f32::NAN; unroll.rewards.len()], vec![f32::NAN; unroll.rewards.len()]);
        vtrace.targets(unroll, &mut out.0, &mut out.1);
        out
    }

    fn close(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-5), "{got:?} is not {want:?}");
    }

    fn on_policy<'a>(terminated: &'a [bool; 3], truncated: &'a [bool; 3]) -> Unroll<'a> {
        Unroll {
            rewards: &[1.0, 2.0, 3.0],
            terminated,
            truncated,
            bootstrap: &[100.0, 7.0, 100.0],
            values: &[0.5, 4.0, -1.0, 10.0],
            log_ratios: &[0.0; 3],
        }
    }

    /// On-policy and without clipping the target is the n-step Bellman target, whatever the values in between.
    #[test]
    fn on_policy_targets_are_n_step_returns() {
        let (targets, advantages) = run(NO_CLIP, &on_policy(&NO_END, &NO_END));
        // 3 + 0.9 · 10 = 12;  2 + 0.9 · 12 = 12.8;  1 + 0.9 · 12.8 = 12.52
        close(&targets, &[12.52, 12.8, 12.0]);
        close(&advantages, &[12.52 - 0.5, 12.8 - 4.0, 12.0 + 1.0]);
    }

    #[test]
    fn nothing_lies_behind_a_termination() {
        let (targets, advantages) = run(NO_CLIP, &on_policy(&[false, true, false], &NO_END));
        close(&targets, &[1.0 + 0.9 * 2.0, 2.0, 12.0]);
        close(&advantages, &[2.8 - 0.5, 2.0 - 4.0, 13.0]);
        // On the time limit's very step a termination still is one.
        let both = run(NO_CLIP, &on_policy(&[false, true, false], &[false, true, false]));
        close(&both.0, &targets);
    }

    #[test]
    fn behind_a_truncation_lies_the_value_of_the_final_observation() {
        let (targets, advantages) = run(NO_CLIP, &on_policy(&NO_END, &[false, true, false]));
        // 2 + 0.9 · 7 = 8.3;  1 + 0.9 · 8.3 = 8.47; not the next episode's value (-1) or target (12)
        close(&targets, &[8.47, 8.3, 12.0]);
        close(&advantages, &[8.47 - 0.5, 8.3 - 4.0, 13.0]);
    }

    /// On-policy with λ < 1: v - V is the generalised advantage estimate (Schulman et al. 2016).
    #[test]
    fn on_policy_with_a_decay_is_gae() {
        let (targets, _) = run(VTrace { decay: 0.5, ..NO_CLIP }, &on_policy(&NO_END, &NO_END));
        // δ = [1 + 3.6 - 0.5, 2 - 0.9 - 4, 3 + 9 + 1] = [4.1, -2.9, 13]; GAE: 13; -2.9 + 0.45 · 13; 4.1 + 0.45 · 2.95
        close(&targets, &[0.5 + 5.4275, 4.0 + 2.95, -1.0 + 13.0]);
    }

    /// Off-policy, by hand: ratios 2, 1/2 and 4, clipped at ρ̄ = 1.5 and c̄ = 1.
    #[test]
    fn ratios_are_clipped() {
        let ratios = [2.0f32.ln(), 0.5f32.ln(), 4.0f32.ln()];
        let unroll = Unroll { log_ratios: &ratios, ..on_policy(&NO_END, &NO_END) };
        let (targets, advantages) = run(VTrace { rho_max: 1.5, c_max: 1.0, ..NO_CLIP }, &unroll);
        // v2 - V2 = 1.5 · 13 = 19.5;  v1 - V1 = 0.5 · -2.9 + 0.9 · 0.5 · 19.5 = 7.325
        // v0 - V0 = 1.5 · 4.1 + 0.9 · 1 · 7.325 = 12.7425
        close(&targets, &[13.2425, 11.325, 18.5]);
        close(&advantages, &[1.0 + 0.9 * 11.325 - 0.5, 2.0 + 0.9 * 18.5 - 4.0, 13.0]);
    }

    #[test]
    fn normalised_advantages_have_mean_0_and_deviation_1() {
        let mut a = [1.0, 2.0, 3.0, 10.0];
        normalise(&mut a);
        let mean = a.iter().sum::<f32>() / 4.0;
        let variance = a.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 4.0;
        assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-5);
        let mut equal = [5.0; 3];
        normalise(&mut equal);
        assert_eq!(equal, [0.0; 3]);
    }
}
