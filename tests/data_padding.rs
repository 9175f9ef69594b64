//! What was not written is zero: never the bytes of the lap before.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::Rng;
use pinring::*;
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
enum Way {
    Step,
    StepLockstep,
    Unroll,
    UnrollTimeMajor,
    UnrollLockstep,
}
const WAYS: [Way; 5] = [Way::Step, Way::StepLockstep, Way::Unroll, Way::UnrollTimeMajor, Way::UnrollLockstep];

fn start(way: Way, batch: usize, lanes: usize) -> (Feed, Leaf<u16>, Column<u16>, usize) {
    let mut step = Step::new();
    let leaf = step.leaf::<u16>("units", &[5]);
    let (mut sample, steps) = match way {
        Way::Step | Way::StepLockstep => (Sample::step(step), 1),
        _ => (Sample::unroll(step, 2), 2),
    };
    if let Way::UnrollTimeMajor = way {
        sample.time_major();
    }
    let column = sample.all(leaf);
    let mut builder = Feed::builder(sample).batch(batch).buffers(2);
    if let Way::StepLockstep | Way::UnrollLockstep = way {
        builder = builder.lockstep(lanes);
    }
    (builder.start().unwrap(), leaf, column, steps)
}

/// A list of units of random length, by `put_padded` or a view of which only a part is written, over many laps of a
/// ring of two slots.
#[test]
fn a_short_list_after_a_long_one_leaves_zeros() {
    for way in WAYS {
        let _watchdog = Watchdog::new("padding", Duration::from_secs(180));
        let (feed, leaf, column, steps) = start(way, 3, 3);
        let (mut writer, learner) = (feed.writer(3).unwrap(), feed.learner().unwrap());
        let mut rng = Rng(7);
        let mut written: Vec<[[u16; 5]; 3]> = Vec::new();
        for t in 0..200 {
            let mut step = writer.step().unwrap();
            let lists: Vec<Vec<u16>> =
                (0..3).map(|_| (0..rng.below(6)).map(|_| 1 + rng.below(60_000) as u16).collect()).collect();
            match t % 4 {
                0 => (0..3).for_each(|lane| step.put_padded(leaf, lane, &lists[lane]).unwrap()),
                1 => {
                    let mut view = step.view_mut(leaf);
                    for (lane, list) in lists.iter().enumerate() {
                        list.iter().enumerate().for_each(|(i, &value)| view[[lane, i]] = value);
                    }
                }
                2 => {
                    // One lane put, the others through the view that follows: it keeps what was put.
                    step.put_padded(leaf, 1, &lists[1]).unwrap();
                    let mut view = step.view_mut(leaf);
                    for lane in [0, 2] {
                        lists[lane].iter().enumerate().for_each(|(i, &value)| view[[lane, i]] = value);
                    }
                }
                _ => {
                    // A second put of the same lane replaces the first whole.
                    (0..3).for_each(|lane| step.put_lane(leaf, lane, &[u16::MAX; 5]).unwrap());
                    (0..3).for_each(|lane| step.put_padded(leaf, lane, &lists[lane]).unwrap());
                }
            }
            step.commit().unwrap();
            written.push(std::array::from_fn(|lane| std::array::from_fn(|i| lists[lane].get(i).copied().unwrap_or(0))));
            while let Some(batch) = learner.try_next().unwrap() {
                let view = batch.view(column);
                let first: Vec<u64> = batch.first_steps().collect();
                for (row, lane) in batch.lanes().enumerate() {
                    for step in 0..steps {
                        let got: Vec<u16> = (0..5)
                            .map(|i| match way {
                                Way::Step | Way::StepLockstep => view[[row, i]],
                                Way::UnrollTimeMajor => view[[step, row, i]],
                                _ => view[[row, step, i]],
                            })
                            .collect();
                        assert_eq!(got, written[first[row] as usize + step][lane], "{way:?}");
                    }
                }
            }
        }
        assert!(feed.metrics().batches > 50);
    }
}

/// A step that was dropped, or refused, leaves none of its bytes in the rows that are written next.
#[test]
fn a_dropped_step_leaves_nothing_behind() {
    for way in WAYS {
        let _watchdog = Watchdog::new("a dropped step", Duration::from_secs(180));
        let (feed, leaf, column, steps) = start(way, 2, 2);
        let (mut writer, learner) = (feed.writer(2).unwrap(), feed.learner().unwrap());
        for t in 0..4 * steps + 1 {
            for kind in 0..3 {
                let mut step = writer.step().unwrap();
                match kind {
                    0 => step.put(leaf, &[u16::MAX; 10]).unwrap(),
                    1 => step.view_mut(leaf).fill(u16::MAX),
                    _ => step.put_lane(leaf, 0, &[u16::MAX; 5]).unwrap(),
                }
                if kind == 2 {
                    assert!(step.commit().is_err(), "lane 1 is missing");
                } else if t % 2 == 0 {
                    std::mem::forget(step);
                }
            }
            let mut step = writer.step().unwrap();
            step.view_mut(leaf)[[1, 4]] = 3; // all but this one value is left out
            step.commit().unwrap();
            while let Some(batch) = learner.try_next().unwrap() {
                let rows = batch.slice(column).len() / 10;
                let ones = batch.slice(column).iter().filter(|&&value| value == 3).count();
                assert_eq!((ones, batch.slice(column).iter().filter(|&&value| value == 0).count()), (rows, rows * 9));
            }
        }
        assert_eq!(feed.metrics().batches, if steps == 1 { 5 } else { 4 });
        assert_eq!(feed.metrics().steps, 2 * (4 * steps as u64 + 1));
    }
}

/// An episode that is cut short is padded with zeros in every column, over unrolls of the lap before that filled it.
#[test]
fn an_unroll_cut_short_is_zero_behind_its_end() {
    for time_major in [false, true] {
        let mut step = Step::new();
        let (obs, act) = (step.observation::<u16>("obs", &[]), step.leaf::<u16>("act", &[]));
        let mut sample = Sample::unroll(step, 4);
        sample.within_episode(true);
        if time_major {
            sample.time_major();
        }
        let (obs_column, act_column, mask) = (sample.all(obs), sample.all(act), sample.mask());
        let (first, version) = (sample.is_first(), sample.policy_version());
        let feed = Feed::builder(sample).batch(1).buffers(2).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let mut write = |value: u16, end: Option<Option<u16>>| {
            let mut step = writer.step().unwrap();
            step.put(obs, &[value]).unwrap();
            step.put(act, &[value + 100]).unwrap();
            step.set_policy_version(u64::from(value));
            if let Some(last) = end {
                let mut place = step.end(0, End::Truncated);
                if let Some(last) = last {
                    place.put(obs, &[last]).unwrap();
                }
            }
            step.commit().unwrap();
        };
        let expect = |obs: [u16; 5], act: [u16; 4], real: usize, begins: bool, versions: [i64; 4]| {
            let batch = learner.try_next().unwrap().expect("a row is complete");
            assert_eq!((batch.slice(obs_column), batch.slice(act_column)), (&obs[..], &act[..]));
            assert_eq!(batch.slice(mask), [0, 1, 2, 3].map(|t| t < real));
            assert_eq!(batch.slice(first), [begins, false, false, false, false]);
            assert_eq!(batch.slice(version), versions);
            assert_eq!(batch.lengths().collect::<Vec<_>>(), [real]);
        };
        for lap in 0..4 {
            // Full, and going on: the episode's first four steps.
            (1..=4).for_each(|value| write(value, None));
            write(5, Some(Some(50)));
            expect([1, 2, 3, 4, 5], [101, 102, 103, 104], 4, true, [1, 2, 3, 4]);
            // Cut short behind one step, with its final observation.
            expect([5, 50, 0, 0, 0], [105, 0, 0, 0], 1, false, [5, 0, 0, 0]);
            // Cut short without one.
            write(6, None);
            write(7, Some(None));
            expect([6, 7, 0, 0, 0], [106, 107, 0, 0], 2, true, [6, 7, 0, 0]);
            // An end that needs no padding, with a final observation and without.
            (8..=10).for_each(|value| write(value, None));
            write(11, if lap % 2 == 0 { Some(Some(60)) } else { Some(None) });
            let last = if lap % 2 == 0 { 60 } else { 0 };
            expect([8, 9, 10, 11, last], [108, 109, 110, 111], 4, true, [8, 9, 10, 11]);
        }
    }
}
