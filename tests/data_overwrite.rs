//! Writing in place without zeros first: what the writer wrote is what arrives, and a debug build shows what it left out.

mod common;

use common::Watchdog;
#[cfg(debug_assertions)]
use pinring::ndarray::Axis;
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

/// A sample of one such step, and a feed of it: batches of 3 rows, 2 buffers, 3 lanes in lockstep.
fn sample(way: Way, step: Step) -> (Sample, usize) {
    let (mut sample, steps) = match way {
        Way::Step | Way::StepLockstep => (Sample::step(step), 1),
        _ => (Sample::unroll(step, 2), 2),
    };
    if let Way::UnrollTimeMajor = way {
        sample.time_major();
    }
    (sample, steps)
}

fn start(way: Way, sample: Sample) -> Feed {
    let mut builder = Feed::builder(sample).batch(3).buffers(2);
    if let Way::StepLockstep | Way::UnrollLockstep = way {
        builder = builder.lockstep(3);
    }
    builder.start().unwrap()
}

/// All lanes at once, lane by lane, and mixed with `put_lane`: over many laps of a ring of two slots.
#[test]
fn every_value_that_was_written_arrives() {
    for way in WAYS {
        let _watchdog = Watchdog::new("overwrite", Duration::from_secs(180));
        let mut step = Step::new();
        let leaf = step.leaf::<u16>("units", &[2, 2]);
        let (mut sample, steps) = sample(way, step);
        let column = sample.all(leaf);
        let feed = start(way, sample);
        let (mut writer, learner) = (feed.writer(3).unwrap(), feed.learner().unwrap());
        let value = |t: usize, lane: usize, at: usize| (t * 100 + lane * 10 + at) as u16;
        let (mut taken, mut batches) = (0, 0);
        for t in 0..200 {
            let mut step = writer.step().unwrap();
            match t % 3 {
                0 => {
                    let mut view = step.overwrite(leaf);
                    assert_eq!(view.shape(), [3, 2, 2]);
                    for (lane, mut values) in view.outer_iter_mut().enumerate() {
                        values.iter_mut().enumerate().for_each(|(at, v)| *v = value(t, lane, at));
                    }
                }
                1 => {
                    for lane in [2, 0, 1] {
                        let values = step.overwrite_lane(leaf, lane);
                        assert_eq!(values.len(), 4);
                        values.iter_mut().enumerate().for_each(|(at, v)| *v = value(t, lane, at));
                    }
                }
                _ => {
                    step.put_lane(leaf, 1, &[0, 1, 2, 3].map(|at| value(t, 1, at))).unwrap();
                    let mut view = step.overwrite(leaf);
                    for lane in [0, 2] {
                        (0..4).for_each(|at| view[[lane, at / 2, at % 2]] = value(t, lane, at));
                    }
                    let again = step.overwrite_lane(leaf, 1).to_vec();
                    assert_eq!(again, [0, 1, 2, 3].map(|at| value(t, 1, at)), "{way:?}: what was written stays");
                }
            }
            step.commit().unwrap();
            while let Some(batch) = learner.try_next().unwrap() {
                let view = batch.view(column);
                for (row, (lane, first)) in batch.lanes().zip(batch.first_steps()).enumerate() {
                    for step in 0..steps {
                        let t = first as usize + step;
                        let got: Vec<u16> = (0..4)
                            .map(|at| match way {
                                Way::Step | Way::StepLockstep => view[[row, at / 2, at % 2]],
                                Way::UnrollTimeMajor => view[[step, row, at / 2, at % 2]],
                                _ => view[[row, step, at / 2, at % 2]],
                            })
                            .collect();
                        assert_eq!(got, [0, 1, 2, 3].map(|at| value(t, lane, at)), "{way:?}, step {t} of lane {lane}");
                        taken += 1;
                    }
                }
                batches += 1;
            }
        }
        // An unroll goes out with the observation behind it, so the last one is still here.
        let expected = 200 / steps - usize::from(steps > 1);
        assert_eq!((taken, batches), (expected * steps * 3, expected), "{way:?}");
    }
}

/// A lane that nobody wrote is still missing at the commit.
#[test]
fn one_lane_is_not_the_whole_leaf() {
    let mut step = Step::new();
    let leaf = step.leaf::<f32>("x", &[]);
    let feed = start(Way::Step, Sample::step(step));
    let mut writer = feed.writer(2).unwrap();
    let mut step = writer.step().unwrap();
    step.overwrite_lane(leaf, 1)[0] = 1.0;
    assert_eq!(step.commit(), Err(CommitError::Unwritten { leaf: "x".into(), lane: 0 }));
}

/// A debug build marks what it lends, so that a value left out shows: as NaN, which a leaf may also reject.
#[test]
#[cfg(debug_assertions)]
fn a_debug_build_shows_a_hole() {
    for way in [Way::Step, Way::Unroll] {
        let mut step = Step::new();
        let (x, n, b) = (step.leaf::<f32>("x", &[2]), step.leaf::<u8>("n", &[2]), step.leaf::<bool>("b", &[2]));
        let (mut sample, steps) = sample(way, step);
        let (cx, cn, cb) = (sample.all(x), sample.all(n), sample.all(b));
        let feed = start(way, sample);
        let (mut writer, learner) = (feed.writer(3).unwrap(), feed.learner().unwrap());
        for _ in 0..8 * steps {
            let mut step = writer.step().unwrap();
            (0..3).for_each(|lane| step.overwrite_lane(x, lane)[0] = 1.0);
            step.overwrite(n).index_axis_mut(Axis(1), 0).fill(0);
            step.overwrite(b);
            step.commit().unwrap();
            while let Some(batch) = learner.try_next().unwrap() {
                let xs = batch.slice(cx);
                assert!(xs.chunks(2).all(|pair| pair[0] == 1.0 && pair[1].is_nan()), "{xs:?}");
                assert!(batch.slice(cn).chunks(2).all(|pair| pair == [0, 255]));
                assert!(batch.slice(cb).iter().all(|&b| b));
            }
        }
    }
}
