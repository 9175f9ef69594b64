//! 2. Many writers: environment threads with several lanes each, unrolls, weights with a bounded lag, episodes.
//!
//! Run with `cargo run --release --example 02_many_writers`. The task is to walk to +8 in steps of ±1; the policy is
//! one number, the probability of a step to the right, which the learner nudges by the return of what it sees. What
//! matters is the shape of the program: threads that only act, a learner that only learns, and a feed in between.

use pinring::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::thread;
use std::time::Duration;

const THREADS: usize = 4;
const LANES: usize = 8; // a thread
const T: usize = 16; // steps an unroll
const BATCH: usize = 32; // unrolls a batch
const UPDATES: u64 = 150;
const GOAL: i32 = 8;
const LIMIT: u32 = 100;

/// Handles are plain numbers: each thread gets a copy.
#[derive(Clone, Copy)]
struct Leaves {
    position: Leaf<f32>,
    right: Leaf<bool>,
    reward: Leaf<f32>,
}

fn main() -> Result<()> {
    let mut step = Step::new();
    let leaves = Leaves {
        position: step.observation("position", &[]),
        right: step.leaf("right", &[]),
        reward: step.leaf("reward", &[]),
    };
    step.reward(leaves.reward);
    let mut sample = Sample::unroll(step, T);
    let (right, reward) = (sample.all(leaves.right), sample.all(leaves.reward)); // [B, T]

    // No unroll that will be part of batch k begins before k - 1 versions are published: actors run one batch ahead.
    let weights = Weights::new(0.5f64);
    let feed = Feed::builder(sample).batch(BATCH).lanes(THREADS * LANES).max_policy_lag(&weights, 1).seed(7).start()?;

    // Hold an intake handle while making writers: the last writer to go ends the source.
    let intake = feed.intake()?;
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (intake, weights) = (intake.clone(), weights.clone());
            thread::spawn(move || walk(intake.writer(LANES)?, &weights, leaves))
        })
        .collect();
    drop(intake);

    let (learner, episodes) = (feed.learner()?, feed.episodes());
    let mut p = 0.5;
    for update in 1..=UPDATES {
        let batch = learner.next_batch()?;
        // Step right more often if the steps right were worth more. A real learner computes gradients here.
        let (mut gain, mut n) = (0.0, 0);
        for (&right, &reward) in batch.slice(right).iter().zip(batch.slice(reward)) {
            gain += if right { f64::from(reward) } else { -f64::from(reward) };
            n += 1;
        }
        drop(batch); // before the update, if nothing in it is needed any more
        p = (p + 0.02 * gain / f64::from(n)).clamp(0.05, 0.95);
        weights.publish(p); // once a batch: the lag gate counts versions
        if update % 30 == 0 {
            let ended: Vec<Episode> = episodes.try_iter().collect();
            let mean = ended.iter().map(|e| e.length as f64).sum::<f64>() / ended.len().max(1) as f64;
            println!("update {update:>3}: p = {p:.2}, {:>4} episodes of {mean:>5.1} steps", ended.len());
        }
    }
    let metrics = feed.metrics();
    println!("{} steps in {} batches, {} dropped", metrics.steps, metrics.batches_taken, metrics.dropped_rows);
    println!("lag: mean {:.2}, at most {} versions", metrics.lag.mean, metrics.lag.max);

    println!("{}", feed.stop(Duration::from_secs(5))?); // writers that wait get an error that says so
    for thread in threads {
        match thread.join().expect("no environment thread panics") {
            Err(error) if error.kind() == ErrorKind::Stopped => {}
            other => println!("unexpected: {other:?}"),
        }
    }
    Ok(())
}

/// An environment thread: ends when the feed does, with the reason.
fn walk(mut writer: Writer, weights: &Weights<f64>, leaves: Leaves) -> Result<()> {
    let mut rngs: Vec<StdRng> = (0..LANES).map(|lane| StdRng::seed_from_u64(writer.seed(lane))).collect();
    let (mut at, mut age) = ([0i32; LANES], [0u32; LANES]);
    loop {
        let mut s = writer.step()?;
        s.put(leaves.position, &at.map(|x| x as f32))?;
        let (_version, p) = s.policy(weights)?; // between observation and action: here the lag gate stands
        let right: [bool; LANES] = std::array::from_fn(|lane| rngs[lane].random_bool(*p));
        for lane in 0..LANES {
            at[lane] += if right[lane] { 1 } else { -1 };
            age[lane] += 1;
            let end = match (at[lane] >= GOAL, age[lane] >= LIMIT) {
                (true, _) => End::Terminated,
                (_, true) => End::Truncated,
                _ => continue,
            };
            s.end(lane, end);
            (at[lane], age[lane]) = (0, 0); // autoreset within the step
        }
        s.put(leaves.right, &right)?;
        s.put(leaves.reward, &right.map(|right| if right { 1.0 } else { -1.0 }))?;
        s.commit()?;
    }
}
