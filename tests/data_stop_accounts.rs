//! A stop, or a learner that leaves, at any moment: every committed step is delivered, dropped or unfinished, and each is
//! counted once; what was delivered is right.

mod common;
#[path = "common/data.rs"]
mod data;
#[path = "common/drive.rs"]
mod drive;

use common::Watchdog;
use data::{Rng, Shape, id, obs_of, small_of, write_observation, write_rest};
use drive::cases;
use pinring::*;
use proptest::prelude::*;
use std::thread;
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
struct Setup {
    shape: Shape,
    lockstep: bool,
    batch: usize,
    buffers: usize,
    lag: Option<u64>,
    micros: u64,
    stop: bool,
    seed: u64,
}

fn run(setup: Setup) {
    let _watchdog = Watchdog::new("a stop at any moment", Duration::from_secs(180));
    let Setup { shape, lockstep, batch, buffers, lag, micros, stop, seed } = setup;
    let (sample, leaves, columns) = shape.sample();
    let weights = Weights::new(());
    let mut builder = Feed::builder(sample).batch(if lockstep { batch * 5 } else { batch }).buffers(buffers);
    if lockstep {
        builder = builder.lockstep(5);
    }
    if let Some(lag) = lag {
        builder = builder.max_policy_lag(&weights, lag);
    }
    let feed = builder.start().unwrap();
    let learner = feed.learner().unwrap();
    let writers: Vec<_> = [2, 3]
        .into_iter()
        .enumerate()
        .map(|(index, lanes)| {
            let (mut writer, weights, mut rng) =
                (feed.writer(lanes).unwrap(), weights.clone(), Rng(seed ^ index as u64));
            thread::spawn(move || -> Closed {
                for attempt in 0.. {
                    let ids: Vec<u64> = (0..lanes).map(|lane| id(index as u64, lane, attempt)).collect();
                    let mut step = match writer.step() {
                        Ok(step) => step,
                        Err(StepError::Closed(closed)) => return closed,
                        Err(error) => panic!("{error}"),
                    };
                    write_observation(&mut step, &leaves, &ids, rng.next());
                    if lag.is_some() || rng.percent(50) {
                        match step.policy(&weights) {
                            Ok(_) => {}
                            Err(PolicyError::Closed(closed)) => return closed,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    if rng.percent(10) {
                        continue;
                    }
                    write_rest(&mut step, &leaves, &ids, rng.next());
                    (0..lanes)
                        .filter(|_| rng.percent(10))
                        .for_each(|lane| drop(step.end(lane, End::Truncated).put(leaves.obs, &[0, 0]).err()));
                    match step.commit() {
                        Ok(()) => {}
                        Err(CommitError::Closed(closed)) => return closed,
                        Err(error) => panic!("{error}"),
                    }
                }
                unreachable!("it is stopped")
            })
        })
        .collect();
    let learning = thread::spawn(move || {
        let mut rows = 0;
        let mut held = Vec::new();
        let end = loop {
            match learner.next_timeout(Duration::from_micros(micros)) {
                Ok(Some(batch)) => {
                    rows += batch.rows() as u64;
                    let observations = if shape.steps == 0 { 1 } else { shape.steps + 1 };
                    for row in 0..batch.rows() {
                        let at = if shape.time_major { row } else { row * observations };
                        let obs = &batch.slice(columns.obs)[at * 2..][..2];
                        assert_eq!(
                            (obs_of(obs[0]), &small_of(obs[0])[..]),
                            ([obs[0], obs[1]], &batch.slice(columns.small)[at * 3..][..3])
                        );
                    }
                    weights.publish(());
                    held.push(batch);
                    if held.len() == buffers {
                        held.remove((rows % buffers as u64) as usize);
                    }
                }
                Ok(None) => {}
                Err(error) => break error,
            }
            if !stop && rows > micros {
                break NextError::Closed(Closed::LearnerGone); // leaves, with batches in its hands
            }
        };
        drop(learner);
        (rows, end, held)
    });
    if stop {
        thread::sleep(Duration::from_micros(micros * 4));
        let report = feed.stop(Duration::from_secs(10)).unwrap();
        assert!(report.threads_given_up.is_empty());
    }
    let (rows, end, held) = learning.join().unwrap();
    let closed = if stop { Closed::Stopped } else { Closed::LearnerGone };
    assert_eq!(end, NextError::Closed(closed.clone()));
    writers.into_iter().for_each(|writer| assert_eq!(writer.join().unwrap(), closed));
    let metrics = feed.metrics();
    // Sealed rows that nobody took are among the dropped.
    let untaken = metrics.rows - rows;
    assert!(metrics.dropped_rows >= untaken, "{metrics:?}");
    if !shape.within_episode {
        let accounted = shape.len() as u64 * (metrics.rows + metrics.dropped_rows - untaken) + metrics.unfinished_steps;
        assert_eq!(metrics.steps, accounted, "{setup:?} {metrics:?}");
    }
    assert_eq!((metrics.writers, metrics.batches_held), (0, held.len()));
    let report = feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!((report.untaken_rows, report.fault), (untaken, None));
    drop(held);
    assert_eq!(feed.metrics().free_slots, buffers);
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn every_step_is_accounted_for(
        steps in 0usize..4,
        time_major: bool,
        kind in 0..3,
        batch in 1usize..6,
        buffers in 1usize..4,
        lag in prop::option::of(0u64..2),
        micros in 1u64..800,
        stop: bool,
        seed: u64,
    ) {
        let within_episode = kind == 1 && steps > 0;
        let shape = Shape { steps, time_major: time_major && steps > 0, within_episode };
        run(Setup { shape, lockstep: kind == 2, batch, buffers, lag, micros, stop, seed });
    }
}

/// A step that is open outlives the feed: its bytes can be written and read, and its commit says why it is late.
#[test]
fn an_open_step_outlives_the_feed() {
    for (steps, lockstep) in [(0, false), (0, true), (2, false), (2, true)] {
        let (sample, leaves, _) = Shape::unroll(steps).sample();
        let builder = Feed::builder(sample).batch(2);
        let feed = if lockstep { builder.lockstep(2) } else { builder }.start().unwrap();
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(2).unwrap();
        let ids = [id(0, 0, 0), id(0, 1, 0)];
        let mut step = writer.step().unwrap();
        write_observation(&mut step, &leaves, &ids, 0);
        drop(learner);
        drop(feed);
        for way in 0..4 {
            write_observation(&mut step, &leaves, &ids, way);
            write_rest(&mut step, &leaves, &ids, way);
        }
        step.end(1, End::Terminated);
        let committed = step.commit();
        if (steps, lockstep) == (2, false) {
            committed.unwrap(); // in the lane buffer, and nobody was asked yet
        } else {
            assert_eq!(committed, Err(CommitError::Closed(Closed::LearnerGone)));
        }
        assert!(writer.step().is_err());
        drop(writer);
    }
}
