//! 5. Lockstep: the same seed gives the same bytes, whatever the threads.
//!
//! Run with `cargo run --release --example 05_lockstep`. Row i of every batch is lane i, and unroll k acts with version
//! max(0, k - lag) exactly. The program runs with 1, 2 and 4 threads and prints a hash of everything the learner saw.

use pinring::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::hash::{DefaultHasher, Hasher};
use std::thread;
use std::time::Duration;

const LANES: usize = 8;
const T: usize = 10;
const BATCHES: usize = 40;
const LAG: u64 = 1;

fn main() -> Result<()> {
    for (threads, seed) in [(1, 3), (2, 3), (4, 3), (4, 4)] {
        println!("{threads} threads, seed {seed}: {:016x}", run(threads, seed)?);
    }
    Ok(())
}

/// The hash of every byte of every column of every batch.
fn run(threads: usize, seed: u64) -> Result<u64> {
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[2]);
    let action = step.leaf::<f32>("action", &[]);
    let mut sample = Sample::unroll(step, T);
    let (obs_column, action_column) = (sample.all(obs), sample.all(action));
    let (first, versions) = (sample.is_first(), sample.policy_version());

    let weights = Weights::new(1.0f32);
    let feed = Feed::builder(sample).batch(LANES).lockstep(LANES).max_policy_lag(&weights, LAG).seed(seed).start()?;
    let handles: Vec<_> = (0..threads)
        .map(|_| {
            // Lanes are given out in order, so all writers are made here; each then runs at its own speed.
            let (writer, weights) = (feed.writer(LANES / threads)?, weights.clone());
            Ok(thread::spawn(move || act(writer, &weights, obs, action)))
        })
        .collect::<Result<_>>()?;

    let learner = feed.learner()?;
    let mut hash = DefaultHasher::new();
    for k in 0..BATCHES as u64 {
        let batch = learner.next_batch()?;
        assert!(batch.lanes().eq(0..LANES), "row i is lane i");
        assert!(batch.policy_versions().all(|version| version == k.saturating_sub(LAG)), "and the version is fixed");
        let actions = batch.slice(action_column);
        let mean = actions.iter().sum::<f32>() / actions.len() as f32;
        batch.slice(obs_column).iter().for_each(|x| hash.write_u32(x.to_bits()));
        actions.iter().for_each(|x| hash.write_u32(x.to_bits()));
        batch.slice(first).iter().for_each(|&x| hash.write_u8(x.into()));
        batch.slice(versions).iter().for_each(|&x| hash.write_i64(x));
        drop(batch);
        weights.publish(1.0 + mean / 10.0); // once a batch
    }
    feed.stop(Duration::from_secs(5))?;
    for handle in handles {
        let _: Result<()> = handle.join().expect("no environment thread panics"); // each ends with the stop's error
    }
    Ok(hash.finish())
}

/// Walks at random, by steps as long as the policy says; an episode is 25 to 35 steps.
fn act(mut writer: Writer, weights: &Weights<f32>, obs: Leaf<f32>, action: Leaf<f32>) -> Result<()> {
    let lanes = writer.lanes().len();
    let mut rngs: Vec<StdRng> = (0..lanes).map(|lane| StdRng::seed_from_u64(writer.seed(lane))).collect();
    let mut state = vec![[0.0f32, 30.0]; lanes]; // position and steps left
    loop {
        let mut s = writer.step()?;
        s.put(obs, state.as_flattened())?;
        let (_, length) = s.policy(weights)?;
        for lane in 0..lanes {
            let moved = *length * rngs[lane].random_range(-1.0..1.0f32);
            s.put_lane(action, lane, &[moved])?;
            state[lane] = [state[lane][0] + moved, state[lane][1] - 1.0];
            if state[lane][1] <= 0.0 {
                s.end(lane, End::Truncated);
                state[lane] = [0.0, rngs[lane].random_range(25..=35) as f32];
            }
        }
        s.commit()?;
    }
}
