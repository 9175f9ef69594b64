//! Lockstep gives the same bytes whatever the threads: with one, two and eight of them, 1,000 batches each, with weights
//! that the learner computes from what it got, at lag 0 and 1.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::{Rng, mix};
use pinring::*;
use std::thread;
use std::time::Duration;

const LANES: usize = 8;
const STEPS: usize = 2;
const BATCHES: u64 = 1000;

/// A hash of every byte of 1,000 batches, in order, and the last weights.
fn run(threads: usize, lag: u64, time_major: bool, seed: u64) -> (u64, u64) {
    let _watchdog = Watchdog::new("identical bytes", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[2]);
    let (action, reward) = (step.leaf::<u32>("action", &[]), step.leaf::<f32>("reward", &[]));
    let mut sample = Sample::unroll(step, STEPS);
    if time_major {
        sample.time_major();
    }
    let (obs_c, action_c, reward_c) = (sample.all(obs), sample.all(action), sample.all(reward));
    let (term, trunc, first, version) =
        (sample.terminated(), sample.truncated(), sample.is_first(), sample.policy_version());
    let weights = Weights::new(1u64);
    let feed = Feed::builder(sample)
        .batch(LANES)
        .buffers(2)
        .lockstep(LANES)
        .max_policy_lag(&weights, lag)
        .seed(seed)
        .start()
        .unwrap();
    let learner = feed.learner().unwrap();
    let lanes = LANES / threads;
    let actors: Vec<_> = (0..threads)
        .map(|_| {
            let (mut writer, weights) = (feed.writer(lanes).unwrap(), weights.clone());
            thread::spawn(move || -> Result<()> {
                // A toy environment a lane, seeded by the lane's number alone; the policy decides its state.
                let mut envs: Vec<Rng> = (0..lanes).map(|lane| Rng(writer.seed(lane))).collect();
                let mut state = vec![0u64; lanes];
                for _ in 0..=BATCHES as usize * STEPS {
                    let mut step = writer.step()?;
                    let mut view = step.view_mut(obs);
                    for lane in 0..lanes {
                        (view[[lane, 0]], view[[lane, 1]]) = (state[lane], envs[lane].next());
                    }
                    let (_, policy) = step.policy(&weights)?;
                    let actions: Vec<u32> =
                        step.view(obs).rows().into_iter().map(|row| mix(row[0] ^ row[1] ^ *policy) as u32).collect();
                    step.put(action, &actions)?;
                    step.put(reward, &actions.iter().map(|&a| (a % 7) as f32).collect::<Vec<_>>())?;
                    for lane in 0..lanes {
                        state[lane] = mix(state[lane] ^ u64::from(actions[lane]));
                        match state[lane] % 11 {
                            0 => drop(step.end(lane, End::Terminated).put(obs, &[0, 0]).err()),
                            1 => drop(step.end(lane, End::Truncated).put(obs, &[0, 0]).err()),
                            _ => {}
                        }
                    }
                    step.commit()?;
                }
                Ok(())
            })
        })
        .collect();
    let (mut hash, mut batches) = (0u64, 0);
    for batch in learner.iter() {
        let batch = batch.unwrap();
        assert_eq!(batch.lanes().collect::<Vec<_>>(), (0..LANES).collect::<Vec<_>>());
        let mut add = |bits: u64| hash = mix(hash.wrapping_add(bits));
        batch.slice(obs_c).iter().for_each(|&v| add(v));
        batch.slice(action_c).iter().for_each(|&v| add(v.into()));
        batch.slice(reward_c).iter().for_each(|&v| add(v.to_bits().into()));
        for column in [term, trunc, first] {
            batch.slice(column).iter().for_each(|&v| add(v.into()));
        }
        for &v in batch.slice(version) {
            assert_eq!(v as u64, batch.sequence_number().saturating_sub(lag));
        }
        batches += 1;
        weights.publish(mix(hash));
    }
    // The last commit of a writer may come after another one has left: the source is at its end then.
    for actor in actors {
        if let Err(error) = actor.join().unwrap() {
            assert_eq!(error.kind(), ErrorKind::Ended, "{error}");
        }
    }
    assert_eq!(batches, BATCHES);
    (hash, *weights.latest().1)
}

#[test]
fn one_two_and_eight_threads_give_identical_bytes() {
    for (lag, time_major) in [(0, false), (1, true)] {
        let one = run(1, lag, time_major, 42);
        assert_eq!(run(2, lag, time_major, 42), one, "two threads, lag {lag}");
        assert_eq!(run(8, lag, time_major, 42), one, "eight threads, lag {lag}");
        assert_ne!(run(2, lag, time_major, 43), one, "another seed gives other bytes");
    }
}
