//! The learning curve: which episodes finished by when, and the mean of the last hundred.
//!
//! Owns the order of episodes. Environment threads report them as they finish; free-running, they are taken in that
//! order. Where a run is to be reproducible the order in which threads got there must not show, and neither must an episode of an unroll that
//! the learner has not seen yet: episodes are held back until their last step is one that it learns from, and sorted by
//! that step and their lane. What it does not do: draw (see [`crate::plot`]).

use crate::env::SOLVED_RETURN;
use crate::eval::Evaluation;
use pinring::Episode;
use std::collections::VecDeque;

/// Episodes that the running mean is taken over.
pub const WINDOW: usize = 100;

/// A finished episode, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    /// Its lane.
    pub lane: usize,
    /// Its steps.
    pub length: u64,
    /// The sum of its rewards.
    pub ret: f64,
}

impl From<Episode> for Ended {
    fn from(Episode { lane, length, ret, .. }: Episode) -> Ended {
        Ended { lane, length, ret }
    }
}

/// One batch's entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Environment steps learned from so far.
    pub steps: u64,
    /// Mean return of the last [`WINDOW`] episodes, or of all while there are fewer; 0 before the first one.
    pub mean: f64,
    /// A figure of the learner's own: APPO gives the entropy of its policy in nats, a Q-learner its loss.
    pub figure: f32,
}

/// What a run leaves behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// One a batch.
    pub points: Vec<Point>,
    /// Steps learned from when an episode came in, and its return.
    pub episodes: Vec<(u64, f64)>,
    /// Every evaluation.
    pub evaluations: Vec<Evaluation>,
}

/// Puts episodes in order and keeps the curve.
#[derive(Debug)]
pub struct Ledger {
    lane_steps: Vec<u64>,
    held: Vec<(u64, usize, f64)>,
    window: VecDeque<f64>,
    curve: Curve,
}

impl Ledger {
    /// For `lanes` lanes.
    pub fn new(lanes: usize) -> Ledger {
        Ledger {
            lane_steps: vec![0; lanes],
            held: Vec::new(),
            window: VecDeque::with_capacity(WINDOW),
            curve: Curve::default(),
        }
    }

    /// Takes what has finished, with `steps` environment steps learned from. In a reproducible run `seen` says how many
    /// steps of each lane these are, whose ends have all been reported; without it, whatever was reported counts.
    pub fn record(&mut self, seen: Option<u64>, steps: u64, figure: f32, ended: impl Iterator<Item = Ended>) {
        for Ended { lane, length, ret } in ended {
            self.lane_steps[lane] += length;
            self.held.push((self.lane_steps[lane], lane, ret));
        }
        let (mut due, held): (Vec<_>, _) =
            self.held.drain(..).partition(|&(end, ..)| seen.is_none_or(|seen| end <= seen));
        self.held = held;
        if seen.is_some() {
            due.sort_unstable_by_key(|&(end, lane, _)| (end, lane));
        }
        for (.., ret) in due {
            self.curve.episodes.push((steps, ret));
            if self.window.len() == WINDOW {
                self.window.pop_front();
            }
            self.window.push_back(ret);
        }
        self.curve.points.push(Point { steps, mean: self.mean(), figure });
    }

    /// The mean return of the last [`WINDOW`] episodes, or of all while there are fewer.
    pub fn mean(&self) -> f64 {
        self.window.iter().sum::<f64>() / self.window.len().max(1) as f64
    }

    /// Whether the last [`WINDOW`] episodes reached the mean that calls for an evaluation.
    pub fn promising(&self) -> bool {
        self.window.len() == WINDOW && self.mean() >= SOLVED_RETURN
    }

    /// Adds an evaluation.
    pub fn evaluated(&mut self, evaluation: Evaluation) {
        self.curve.evaluations.push(evaluation);
    }

    /// The curve so far.
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    /// The curve, at the end.
    pub fn into_curve(self) -> Curve {
        self.curve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(lane: usize, length: u64, ret: f64) -> Ended {
        Ended { lane, length, ret }
    }

    /// Two lanes, 10 steps of each learned from, then 20: whatever order the threads report in, and however far ahead they are.
    #[test]
    fn in_a_reproducible_run_the_order_of_arrival_does_not_show() {
        let orders = [
            [ended(0, 4, 1.0), ended(0, 9, 2.0), ended(1, 3, 3.0), ended(1, 1, 4.0)],
            [ended(1, 3, 3.0), ended(1, 1, 4.0), ended(0, 4, 1.0), ended(0, 9, 2.0)],
        ];
        for order in orders {
            let mut ledger = Ledger::new(2);
            ledger.record(Some(10), 20, 0.5, order.into_iter());
            assert_eq!(ledger.curve().episodes, [(20, 3.0), (20, 1.0), (20, 4.0)], "steps 3, 4 and 4; 13 is not due");
            ledger.record(Some(20), 40, 0.5, std::iter::empty());
            assert_eq!(ledger.curve().episodes[3], (40, 2.0));
            assert_eq!(ledger.curve().points[1], Point { steps: 40, mean: 2.5, figure: 0.5 });
        }
    }

    #[test]
    fn free_running_episodes_count_as_they_come() {
        let mut ledger = Ledger::new(2);
        ledger.record(None, 20, 0.5, [ended(1, 30, 7.0), ended(0, 2, 1.0)].into_iter());
        assert_eq!(ledger.curve().episodes, [(20, 7.0), (20, 1.0)]);
    }

    #[test]
    fn the_mean_is_over_the_last_hundred_and_promises_nothing_before() {
        let mut ledger = Ledger::new(1);
        ledger.record(None, 10, 0.5, (0..WINDOW - 1).map(|_| ended(0, 1, 500.0)));
        assert!(!ledger.promising(), "99 episodes");
        ledger.record(None, 20, 0.5, std::iter::once(ended(0, 1, 0.0)));
        assert!((ledger.mean() - 495.0).abs() < 1e-9 && ledger.promising());
        ledger.record(None, 30, 0.5, (0..5).map(|_| ended(0, 1, 0.0)));
        assert!(!ledger.promising(), "mean {}", ledger.mean());
        assert_eq!(ledger.curve().points.len(), 3);
    }
}
