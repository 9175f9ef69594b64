//! Transitions from a step store: what each column holds, at episode ends and at the write head.

mod common;

use common::Watchdog;
use pinring::*;
use std::collections::BTreeMap;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// One lane, observations that count steps, and the columns of an n-step transition.
struct Chain {
    obs: Leaf<f32>,
    reward: Leaf<f32>,
    now: Column<f32>,
    next: Column<f32>,
    ret: Column<f32>,
    discount: Column<f32>,
    terminated: Column<bool>,
    truncated: Column<bool>,
    sample: Sample,
}

/// One row: observation now and next, return, discount, terminated, truncated.
type Row = (f32, f32, f32, f32, bool, bool);

impl Chain {
    fn new(n: usize, gamma: f64) -> Chain {
        let mut step = Step::new();
        let obs = step.observation::<f32>("obs", &[]);
        let reward = step.leaf::<f32>("reward", &[]);
        let mut sample = Sample::transition(step, n, gamma);
        let (now, next, ret) = (sample.at(obs, 0), sample.next(obs), sample.n_step_return(reward));
        let (discount, terminated, truncated) = (sample.discount(), sample.terminated(), sample.truncated());
        Chain { obs, reward, now, next, ret, discount, terminated, truncated, sample }
    }

    fn start(&self, capacity: usize, sampler: impl Sampler + 'static) -> Feed {
        let builder = Feed::builder(self.sample.clone()).batch(64).buffers(1).lanes(1).seed(5);
        builder.replay(capacity, sampler).pace(Pace::min_size(1)).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, id: f32, reward: f32, end: Option<(End, f32)>) {
        let mut s = writer.step().unwrap();
        s.put(self.obs, &[id]).unwrap();
        s.put(self.reward, &[reward]).unwrap();
        if let Some((end, last)) = end {
            s.end(0, end).put(self.obs, &[last]).unwrap();
        }
        s.commit().unwrap();
    }

    /// Every different row of `batches` batches, by the step it begins with.
    fn rows(&self, learner: &Learner, batches: usize) -> BTreeMap<u64, Row> {
        let mut seen = BTreeMap::new();
        for _ in 0..batches {
            let b = learner.next_batch().unwrap();
            for (i, first) in b.first_steps().enumerate() {
                let row = (
                    b.slice(self.now)[i],
                    b.slice(self.next)[i],
                    b.slice(self.ret)[i],
                    b.slice(self.discount)[i],
                    b.slice(self.terminated)[i],
                    b.slice(self.truncated)[i],
                );
                assert_eq!(*seen.entry(first).or_insert(row), row, "the same step twice");
            }
        }
        seen
    }
}

/// γ = 0.9, n = 3, rewards 1, 2, 3 | 4, 5, 6: the sum stops at the end, termination is not bootstrapped from, truncation is
/// from its final observation, and a sample is there only when its bootstrap step is.
#[test]
fn returns_and_discounts_stop_where_the_episode_does() {
    let _watchdog = Watchdog::new("n-step", PATIENCE);
    for end in [End::Terminated, End::Truncated] {
        for prioritized in [false, true] {
            let chain = Chain::new(3, 0.9);
            let feed = match prioritized {
                true => chain.start(100, Prioritized::new(0.6, 0.4)),
                false => chain.start(100, Uniform::new()),
            };
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            for (t, reward) in [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].into_iter().enumerate() {
                chain.write(&mut writer, t as f32, reward, (t == 2).then_some((end, 99.0)));
            }
            assert_eq!(feed.metrics().stored_samples, 3, "the fourth waits for its bootstrap step");
            let terminated = end == End::Terminated;
            let discount = |d: f32| if terminated { 0.0 } else { d };
            let (a, b) = (terminated, !terminated);
            let power = |k: i32| 0.9f64.powi(k) as f32;
            let expect = |t: u64| match t {
                0 => (0.0, 99.0, 1.0 + power(1) * 2.0 + power(2) * 3.0, discount(power(3)), a, b),
                1 => (1.0, 99.0, 2.0 + power(1) * 3.0, discount(power(2)), a, b),
                2 => (2.0, 99.0, 3.0, discount(power(1)), a, b),
                _ => (3.0, 6.0, 4.0 + power(1) * 5.0 + power(2) * 6.0, power(3), false, false),
            };
            assert!((expect(0).2 - 5.23).abs() < 1e-6 && (expect(3).2 - 13.36).abs() < 1e-5);
            let rows = chain.rows(&learner, 20);
            assert_eq!(rows, (0..3).map(|t| (t, expect(t))).collect());
            chain.write(&mut writer, 6.0, 7.0, None);
            chain.rows(&learner, 2); // what was selected before
            let rows = chain.rows(&learner, 20);
            assert_eq!(rows, (0..4).map(|t| (t, expect(t))).collect());
        }
    }
}
