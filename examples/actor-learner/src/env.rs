//! CartPole-v1: a pole on a cart, kept upright by pushing the cart left or right.
//!
//! The equations are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult
//! learning control problems" (IEEE Transactions on Systems, Man, and Cybernetics, 1983), as Florian corrected them in
//! "Correct equations for the dynamics of the cart-pole system" (2007, without friction). Constants, the Euler step, the
//! limits and the distribution of first states are those of Gymnasium's `CartPole-v1`
//! (`gymnasium/envs/classic_control/cartpole.py` and its registration: 500 steps, solved at 475), in `f64` as there.
//!
//! Owns one cart ([`CartPole`]), and the carts of one environment thread with a random generator each ([`Carts`]).
//! What it does not do: write to the feed (see [`crate::actor`]) or choose actions.

use pinring::End;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Numbers in an observation: cart position (m) and velocity, pole angle (rad) and velocity.
pub const OBSERVATION: usize = 4;
/// Actions: 0 pushes the cart to the left, 1 to the right.
pub const ACTIONS: usize = 2;
/// Steps after which an episode is truncated.
pub const MAX_STEPS: u32 = 500;
/// The mean return from which Gymnasium calls the task solved.
pub const SOLVED_RETURN: f64 = 475.0;

const GRAVITY: f64 = 9.8;
const MASS_POLE: f64 = 0.1;
const TOTAL_MASS: f64 = 1.0 + MASS_POLE;
const HALF_LENGTH: f64 = 0.5;
const POLE_MASS_LENGTH: f64 = MASS_POLE * HALF_LENGTH;
const FORCE: f64 = 10.0;
const TAU: f64 = 0.02;
const X_LIMIT: f64 = 2.4;
const THETA_LIMIT: f64 = 12.0 * 2.0 * std::f64::consts::PI / 360.0;
const FIRST_STATE: f64 = 0.05;

/// One cart and its pole.
///
/// ```
/// use actor_learner::env::CartPole;
///
/// let mut cart = CartPole::at([0.0; 4]);
/// assert_eq!(cart.step(1), None); // neither terminated nor truncated
/// assert!(cart.observation()[1] > 0.0, "pushed to the right");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CartPole {
    state: [f64; 4],
    steps: u32,
}

impl CartPole {
    /// A new episode, in a state drawn uniformly from ±0.05.
    pub fn new(rng: &mut StdRng) -> CartPole {
        CartPole::at(std::array::from_fn(|_| rng.random_range(-FIRST_STATE..FIRST_STATE)))
    }

    /// A new episode in a given state.
    pub fn at(state: [f64; 4]) -> CartPole {
        CartPole { state, steps: 0 }
    }

    /// What the policy sees.
    pub fn observation(&self) -> [f32; OBSERVATION] {
        self.state.map(|x| x as f32)
    }

    /// Pushes for 20 ms; the reward of every step is 1. Says whether the step ended the episode, and how: outside the
    /// limits it is terminated, even on the 500th step; on the 500th step it is truncated.
    pub fn step(&mut self, action: usize) -> Option<End> {
        let [x, x_dot, theta, theta_dot] = self.state;
        let force = if action == 1 { FORCE } else { -FORCE };
        let (sin, cos) = theta.sin_cos();
        let temp = (force + POLE_MASS_LENGTH * (theta_dot * theta_dot) * sin) / TOTAL_MASS;
        let theta_acc =
            (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * (cos * cos) / TOTAL_MASS));
        let x_acc = temp - POLE_MASS_LENGTH * theta_acc * cos / TOTAL_MASS;
        let [x, theta] = [x + TAU * x_dot, theta + TAU * theta_dot];
        self.state = [x, x_dot + TAU * x_acc, theta, theta_dot + TAU * theta_acc];
        self.steps += 1;
        if x.abs() > X_LIMIT || theta.abs() > THETA_LIMIT {
            Some(End::Terminated)
        } else if self.steps >= MAX_STEPS {
            Some(End::Truncated)
        } else {
            None
        }
    }
}

/// How an episode ended, and the observation after its last step, which is no step's first one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    /// Terminated or truncated.
    pub end: End,
    /// The observation that the reset replaced.
    pub observation: [f32; OBSERVATION],
}

/// The carts of one environment thread, which step together; each with a random generator of its own, so that what a
/// lane sees depends on its seed alone and not on how lanes were spread over threads.
///
/// A cart whose episode ends begins the next one in the same step.
#[derive(Debug)]
pub struct Carts {
    carts: Vec<(CartPole, StdRng)>,
}

impl Carts {
    /// One cart a seed.
    pub fn new(seeds: impl IntoIterator<Item = u64>) -> Carts {
        let carts = seeds.into_iter().map(|seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            (CartPole::new(&mut rng), rng)
        });
        Carts { carts: carts.collect() }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.carts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.carts.is_empty()
    }

    /// What the policy sees of one cart.
    pub fn observation(&self, lane: usize) -> [f32; OBSERVATION] {
        self.carts[lane].0.observation()
    }

    /// The random generator of one cart, for the sampling of its actions.
    pub fn rng(&mut self, lane: usize) -> &mut StdRng {
        &mut self.carts[lane].1
    }

    /// Steps one cart, and resets it if that ended its episode.
    pub fn step(&mut self, lane: usize, action: usize) -> Option<Finished> {
        let (cart, rng) = &mut self.carts[lane];
        let end = cart.step(action)?;
        let finished = Finished { end, observation: cart.observation() };
        *cart = CartPole::new(rng);
        Some(finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: [f64; 4], want: [f64; 4]) {
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() <= 1e-15, "{got:?} is not {want:?}");
        }
    }

    /// Upright and at rest everything but the force drops out: temp = 10 / 1.1, the pole's acceleration is
    /// -temp / (0.5 (4/3 - 0.1/1.1)) = -600/41, the cart's temp + 0.05 · 600/41 / 1.1 = 400/41.
    #[test]
    fn one_push_at_rest_by_hand() {
        let mut cart = CartPole::at([0.0; 4]);
        assert_eq!(cart.step(1), None);
        close(cart.state, [0.0, 0.02 * 400.0 / 41.0, 0.0, -0.02 * 600.0 / 41.0]);
        let mut mirrored = CartPole::at([0.0; 4]);
        assert_eq!(mirrored.step(0), None);
        assert_eq!(mirrored.state, cart.state.map(|x| if x == 0.0 { 0.0 } else { -x }));
    }

    /// The states that Gymnasium 1.4.0 went through from the same state under the same actions.
    #[test]
    fn four_steps_of_gymnasium() {
        let mut cart = CartPole::at([0.01, -0.02, 0.03, 0.04]);
        let want = [
            (1, [0.009600000000000001, 0.17467919574755525, 0.030799999999999998, -0.2430687179600081]),
            (0, [0.013093583914951107, -0.020868848948191993, 0.025938625640799837, 0.0591679999394166]),
            (0, [0.012676206935987267, -0.21635292104612766, 0.02712198563958817, 0.3599205713784138]),
            (1, [0.008349148515064714, -0.021626799199488206, 0.03432039706715644, 0.0759116989474441]),
        ];
        for (action, state) in want {
            assert_eq!(cart.step(action), None);
            close(cart.state, state);
        }
    }

    #[test]
    fn limits_terminate_strictly_beyond() {
        for (state, action, end) in [
            ([2.39, 1.0, 0.0, 0.0], 1, Some(End::Terminated)), // x = 2.41, v = 1.195… in Gymnasium
            ([-2.39, -1.0, 0.0, 0.0], 0, Some(End::Terminated)),
            ([2.4, 0.0, 0.0, 0.0], 1, None),                  // exactly at the limit
            ([0.0, 0.0, 0.2, 0.5], 0, Some(End::Terminated)), // 0.21 rad
            ([0.0, 0.0, -0.2, -0.5], 1, Some(End::Terminated)),
            ([0.0, 0.0, 0.2, 0.4], 0, None), // 0.208 rad
        ] {
            assert_eq!(CartPole::at(state).step(action), end, "{state:?}");
        }
        let mut falling = CartPole::at([0.0, 0.0, 0.2, 0.5]);
        falling.step(0);
        close(falling.state, [0.0, -0.19729611610711978, 0.21000000000000002, 0.8484537772554577]);
    }

    #[test]
    fn truncated_at_500_unless_terminated_there() {
        let mut cart = CartPole { state: [0.0; 4], steps: 498 };
        assert_eq!(cart.step(1), None);
        assert_eq!(cart.step(0), Some(End::Truncated));
        let mut cart = CartPole { state: [0.0, 0.0, 0.2, 0.5], steps: 499 };
        assert_eq!(cart.step(0), Some(End::Terminated));
    }

    #[test]
    fn a_finished_cart_starts_again_and_hands_its_last_observation_out() {
        let mut carts = Carts::new([7, 8]);
        assert_ne!(carts.observation(0), carts.observation(1));
        let mut finished = None;
        for _ in 0..MAX_STEPS {
            finished = finished.or(carts.step(0, 1));
        }
        let finished = finished.expect("always pushed to the right, a pole falls");
        assert_eq!(finished.end, End::Terminated);
        assert!(finished.observation[2].abs() > 0.2);
        let again = carts.step(0, 1).map_or(carts.observation(0), |f| f.observation);
        assert!(again[0].abs() < 2.4);
    }

    #[test]
    fn first_states_are_within_a_twentieth_and_depend_on_the_seed_alone() {
        let carts = Carts::new(0..200);
        let all: Vec<f32> = (0..carts.len()).flat_map(|lane| carts.observation(lane)).collect();
        assert!(all.iter().all(|x| x.abs() <= 0.05));
        assert!(all.iter().any(|&x| x > 0.04) && all.iter().any(|&x| x < -0.04));
        assert_eq!(Carts::new([11]).observation(0), carts.observation(11));
    }
}
