//! Writers, the sampling thread, its helpers and a learner that updates priorities, all at once over a store so small that
//! it wraps all the time: every window is one lane's, in order, and whole. `PINRING_REPLAY_OPERATIONS` says how many
//! steps and rows there are in all; 10,000,000 is the full size.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::{Rng, mix};
use pinring::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

fn operations(default: u64) -> u64 {
    std::env::var("PINRING_REPLAY_OPERATIONS").map_or(default, |n| n.parse().expect("a number"))
}

const BACK: i64 = 3;
const N: usize = 4;

/// Tells lane, episode and step; never 0.
fn id(lane: usize, episode: u64, t: u64) -> u64 {
    (lane as u64 + 1) << 48 | episode << 16 | t
}

struct Setting {
    obs: Leaf<u64>,
    frame: Leaf<u8>,
    reward: Leaf<f32>,
    window: Column<u64>,
    frames: Column<u8>,
    next: Column<u64>,
    ret: Column<f32>,
    discount: Column<f32>,
    sample: Sample,
    frame_bytes: usize,
}

impl Setting {
    /// `frame_bytes`: large ones make batches that helpers are called for.
    fn new(frame_bytes: usize) -> Setting {
        let mut step = Step::new();
        let obs = step.observation::<u64>("obs", &[2]);
        let frame = step.observation::<u8>("frame", &[frame_bytes]);
        let reward = step.leaf::<f32>("reward", &[]);
        let mut sample = Sample::transition(step, N, 0.5);
        let window = sample.window(obs, -BACK as i32..1, Pad::Repeat);
        let frames = sample.window(frame, -1..2, Pad::Zeros);
        let next = sample.next(obs);
        let (ret, discount) = (sample.n_step_return(reward), sample.discount());
        Setting { obs, frame, reward, window, frames, next, ret, discount, sample, frame_bytes }
    }

    /// Steps of episodes of random lengths, until the feed is over.
    fn write(&self, mut writer: Writer, mut rng: Rng, done: &AtomicU64) {
        let lanes = writer.lanes();
        let mut at: Vec<(u64, u64, u64)> = lanes.clone().map(|_| (0, 0, 1 + rng.below(20))).collect();
        loop {
            let Ok(mut s) = writer.step() else { return };
            let ids: Vec<u64> = lanes.clone().zip(&at).map(|(lane, &(e, t, _))| id(lane, e, t)).collect();
            let obs: Vec<u64> = ids.iter().flat_map(|&id| [id, mix(id)]).collect();
            s.put(self.obs, &obs).unwrap();
            let frames: Vec<u8> = ids.iter().flat_map(|&id| vec![mix(id) as u8; self.frame_bytes]).collect();
            s.put(self.frame, &frames).unwrap();
            let rewards: Vec<f32> = ids.iter().map(|&id| (mix(id) % 256) as f32).collect();
            s.put(self.reward, &rewards).unwrap();
            for (index, (_, t, length)) in at.iter().enumerate() {
                if rng.percent(50) {
                    s.priority(index, (rng.below(100)) as f32).unwrap();
                }
                if t + 1 == *length {
                    let end = if ids[index].is_multiple_of(2) { End::Truncated } else { End::Terminated };
                    let last = ids[index] + 1;
                    let mut last_mut = s.end(index, end);
                    last_mut.put(self.obs, &[last, mix(last)]).unwrap();
                    last_mut.put(self.frame, &vec![mix(last) as u8; self.frame_bytes]).unwrap();
                }
            }
            if s.commit().is_err() {
                return;
            }
            for (episode, t, length) in &mut at {
                *t += 1;
                if t == length {
                    (*episode, *t, *length) = (*episode + 1, 0, 1 + rng.below(20));
                }
            }
            done.fetch_add(lanes.len() as u64, Ordering::Relaxed);
        }
    }

    fn check(&self, batch: &Batch) {
        let back = BACK as usize;
        let rows = batch.lanes().zip(batch.slice(self.window).chunks((back + 1) * 2));
        for (row, (lane, window)) in rows.enumerate() {
            let now = window[back * 2];
            assert_eq!((now >> 48) as usize, lane + 1, "the lane");
            let t = now & 0xFFFF;
            for (place, value) in window.chunks(2).enumerate() {
                let expected = now - t.min((back - place) as u64);
                assert_eq!(value, [expected, mix(expected)], "offset {place} of {now:#x}");
            }
            let next = &batch.slice(self.next)[row * 2..][..2];
            let span = next[0] - now;
            assert!((1..=N as u64).contains(&span), "from {now:#x} to {:#x}", next[0]);
            assert_eq!(next[1], mix(next[0]));
            let (mut sum, mut power) = (0.0, 1.0f32);
            for step in 0..span {
                (sum, power) = (sum + power * (mix(now + step) % 256) as f32, power * 0.5);
            }
            assert_eq!(batch.slice(self.ret)[row], sum);
            let discount = batch.slice(self.discount)[row];
            assert!(discount == power || discount == 0.0, "{discount} behind {span} steps");
            let frames = &batch.slice(self.frames)[row * 3 * self.frame_bytes..][..3 * self.frame_bytes];
            for (place, frame) in frames.chunks(self.frame_bytes).enumerate() {
                let expected = match place {
                    0 if t == 0 => 0,
                    _ => mix(now + place as u64 - 1) as u8,
                };
                assert!(frame.iter().all(|&byte| byte == expected), "frame {place} of {now:#x} is torn");
            }
        }
    }

    fn run(self, seed: u64, operations: u64, build: impl FnOnce(FeedBuilder) -> FeedBuilder) {
        let _watchdog = Watchdog::new("concurrent replay", Duration::from_secs(900));
        let builder = Feed::builder(self.sample.clone()).batch(32).buffers(3).lanes(7).seed(seed);
        let feed = build(builder).start().unwrap();
        let (learner, this) = (feed.learner().unwrap(), Arc::new(self));
        let (done, mut rng) = (Arc::new(AtomicU64::new(0)), Rng(seed));
        let writing: Vec<_> = [1, 2, 4]
            .into_iter()
            .map(|lanes| {
                let (writer, this, rng) = (feed.writer(lanes).unwrap(), this.clone(), rng.fork());
                let done = done.clone();
                thread::spawn(move || this.write(writer, rng, &done))
            })
            .collect();
        let (mut held, mut batches) = (Vec::new(), 0);
        while done.load(Ordering::Relaxed) < operations {
            let batch = learner.next_batch().unwrap();
            this.check(&batch);
            done.fetch_add(batch.rows() as u64, Ordering::Relaxed);
            let priorities: Vec<f32> = (0..batch.rows()).map(|_| rng.below(1000) as f32 / 16.0).collect();
            let updated = learner.update_priorities(&batch.keys(), &priorities).unwrap();
            assert_eq!(updated.applied + updated.stale, batch.rows());
            held.push(batch);
            if held.len() > 1 {
                this.check(&held.remove(0)); // still whole, whatever was overwritten meanwhile
            }
            batches += 1;
            if batches % 500 == 0 {
                feed.clear().unwrap();
            }
        }
        drop(held);
        assert_eq!(feed.stop(Duration::from_secs(60)).unwrap().threads_given_up, [""; 0]);
        writing.into_iter().for_each(|writing| writing.join().unwrap());
        let metrics = feed.metrics();
        println!("{} steps written, {batches} batches of 32 checked", metrics.steps);
        assert!(metrics.steps > 0 && batches > 10, "{} steps, {batches} batches", metrics.steps);
    }
}

#[test]
fn every_window_is_whole_uniform() {
    Setting::new(1).run(1, operations(300_000), |b| b.replay(100, Uniform::new()));
}

#[test]
fn every_window_is_whole_prioritized() {
    Setting::new(1).run(2, operations(300_000), |b| b.replay(150, Prioritized::new(0.6, 0.4).stratified(true)));
}

#[test]
fn every_window_is_whole_without_replacement() {
    Setting::new(3).run(3, operations(200_000), |b| b.replay(70, WithoutReplacement::new()));
}

/// Batches of 400 KB, filled by three threads.
#[test]
fn every_window_is_whole_with_helpers() {
    Setting::new(4096).run(4, operations(20_000), |b| b.replay(120, Uniform::new()).gather_threads(3));
}

/// Paced to a row a step, with little play.
#[test]
fn every_window_is_whole_in_pace() {
    let pace = Pace::min_size(40).samples_per_insert(1.0, 3.0);
    Setting::new(1).run(5, operations(100_000), |b| b.replay(100, Prioritized::new(1.0, 1.0)).pace(pace));
}
