//! The stream of finished episodes: exact lengths and returns, whatever became of the rows, and bounded.

mod common;
#[path = "common/data.rs"]
mod data;

use data::Rng;
use pinring::*;

fn start<T: Element>(unroll: usize, within: bool, kept: Option<usize>, reward: bool) -> (Feed, Leaf<T>) {
    let mut step = Step::new();
    let leaf = step.leaf::<T>("reward", &[]);
    if reward {
        step.reward(leaf);
    }
    let mut sample = if unroll == 0 { Sample::step(step) } else { Sample::unroll(step, unroll) };
    sample.within_episode(within);
    let builder = Feed::builder(sample).batch(4).when_full(WhenFull::DropNewest);
    let builder = if let Some(kept) = kept { builder.episodes(kept) } else { builder };
    (builder.start().unwrap(), leaf)
}

/// Returns are sums in `f64` of what was committed, in every element type, with a ring that drops most of the rows.
#[test]
fn lengths_and_returns_are_exact() {
    fn check<T: Element>(unroll: usize, within: bool, make: impl Fn(u64) -> T) {
        let (feed, leaf) = start::<T>(unroll, within, None, true);
        let _learner = feed.learner().unwrap();
        let mut writer = feed.writer(3).unwrap();
        let mut rng = Rng(11);
        let (mut lengths, mut returns) = ([0u64; 3], [0.0f64; 3]);
        let mut expected = Vec::new();
        for t in 0..300 {
            let mut step = writer.step().unwrap();
            let rewards: Vec<T> = (0..3).map(|_| make(rng.next())).collect();
            step.put(leaf, &rewards).unwrap();
            let ends: Vec<Option<End>> = (0..3)
                .map(|_| match rng.below(12) {
                    0 => Some(End::Terminated),
                    1 => Some(End::Truncated),
                    _ => None,
                })
                .collect();
            for (lane, end) in ends.iter().enumerate() {
                if let Some(end) = *end {
                    step.end(lane, end);
                }
            }
            step.set_policy_version(t);
            if rng.percent(20) {
                drop(step); // neither its rewards nor its ends count
                continue;
            }
            step.commit().unwrap();
            for lane in 0..3 {
                lengths[lane] += 1;
                returns[lane] += rewards[lane].to_f64();
                if let Some(end) = ends[lane] {
                    expected.push((lane, lengths[lane], returns[lane].to_bits(), end, t));
                    (lengths[lane], returns[lane]) = (0, 0.0);
                }
            }
        }
        let got: Vec<_> =
            feed.episodes().try_iter().map(|e| (e.lane, e.length, e.ret.to_bits(), e.end, e.version)).collect();
        assert_eq!(got, expected);
        assert!(feed.metrics().dropped_rows > 0, "the ring was full most of the time");
    }
    for (unroll, within) in [(0, false), (4, false), (4, true)] {
        check::<f32>(unroll, within, |bits| (bits % 1000) as f32 * 0.1 - 50.0);
        check::<f64>(unroll, within, |bits| (bits % 1000) as f64 * 0.1 - 50.0);
        check::<i64>(unroll, within, |bits| bits as i64 % 1_000_000);
        check::<u8>(unroll, within, |bits| bits as u8);
        check::<bool>(unroll, within, |bits| !bits.is_multiple_of(2));
    }
}

/// Beyond what is kept the newest are dropped and counted; the rows are none the worse.
#[test]
fn the_stream_is_bounded() {
    for (kept, episodes) in [(4usize, 10usize), (1, 1), (0, 3), (4096, 5000)] {
        let (feed, leaf) = start::<f32>(0, false, Some(kept), true);
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(1).unwrap();
        for value in 0..episodes {
            let mut step = writer.step().unwrap();
            step.put(leaf, &[value as f32]).unwrap();
            step.end(0, End::Terminated);
            step.commit().unwrap();
            drop(learner.try_next().unwrap());
        }
        let metrics = feed.metrics();
        let dropped = episodes.saturating_sub(kept) as u64;
        assert_eq!((metrics.episodes, metrics.episodes_dropped), (episodes as u64, dropped));
        assert_eq!((metrics.steps, metrics.dropped_rows), (episodes as u64, 0));
        let returns: Vec<f64> = feed.episodes().try_iter().map(|episode| episode.ret).collect();
        assert!(returns.into_iter().eq((0..episodes.min(kept)).map(|value| value as f64)), "the oldest are kept");
        // There is room again.
        let mut step = writer.step().unwrap();
        step.put(leaf, &[7.0]).unwrap();
        step.end(0, End::Truncated);
        step.commit().unwrap();
        assert_eq!(feed.episodes().try_iter().count(), usize::from(kept > 0));
    }
}

/// Without a reward leaf lengths are still right; clones of the stream share it, and it outlives the feed.
#[test]
fn without_a_reward_and_behind_the_feed() {
    let (feed, leaf) = start::<f32>(0, false, None, false);
    let mut writer = feed.writer(2).unwrap();
    let (first, second) = (feed.episodes(), feed.episodes().clone());
    for t in 0..6 {
        let mut step = writer.step().unwrap();
        step.put(leaf, &[1.0, f32::NAN]).unwrap();
        if t == 2 {
            step.end(0, End::Terminated);
        }
        if t == 5 {
            step.end(0, End::Truncated);
            step.end(1, End::Truncated);
        }
        step.commit().unwrap();
    }
    let one = first.try_iter().next().unwrap();
    assert_eq!((one.lane, one.length, one.ret, one.end), (0, 3, 0.0, End::Terminated));
    drop((writer, feed));
    let rest: Vec<_> = second.try_iter().map(|e| (e.lane, e.length, e.ret)).collect();
    assert_eq!(rest, [(0, 3, 0.0), (1, 6, 0.0)]);
    assert_eq!(first.try_iter().count(), 0);
}

/// `abandon` gives an episode up: it is not told, and the next step is the first of a new one. A lane that is used again
/// by another writer begins anew too.
#[test]
fn an_abandoned_episode_is_not_told() {
    for unroll in [0, 2] {
        let (feed, leaf) = start::<i32>(unroll, false, None, true);
        let intake = feed.intake().unwrap();
        let mut writer = intake.writer(2).unwrap();
        let write = |writer: &mut Writer, value: i32, end: bool| {
            let mut step = writer.step().unwrap();
            step.put(leaf, &[value, 10 * value]).unwrap();
            if end {
                step.end(0, End::Terminated);
                step.end(1, End::Terminated);
            }
            step.commit().unwrap();
        };
        write(&mut writer, 1, false);
        write(&mut writer, 2, false);
        writer.abandon(1).unwrap();
        write(&mut writer, 3, true);
        let told: Vec<_> = feed.episodes().try_iter().map(|e| (e.lane, e.length, e.ret)).collect();
        assert_eq!(told, [(0, 3, 6.0), (1, 1, 30.0)]);
        write(&mut writer, 4, false);
        drop(writer);
        let mut writer = intake.writer(2).unwrap();
        assert_eq!(writer.lanes(), 0..2);
        write(&mut writer, 5, true);
        let told: Vec<_> = feed.episodes().try_iter().map(|e| (e.lane, e.length, e.ret)).collect();
        assert_eq!(told, [(0, 1, 5.0), (1, 1, 50.0)]);
    }
}

/// A step that is ended twice ends once, the last word counts.
#[test]
fn the_last_end_counts() {
    let (feed, leaf) = start::<f32>(0, false, None, true);
    let mut writer = feed.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    step.put(leaf, &[1.0]).unwrap();
    step.end(0, End::Terminated);
    step.end(0, End::Truncated);
    step.commit().unwrap();
    let told: Vec<End> = feed.episodes().try_iter().map(|e| e.end).collect();
    assert_eq!(told, [End::Truncated]);
}
