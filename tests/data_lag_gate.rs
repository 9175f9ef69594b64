//! The lag gate: what it promises with lag 0, and that nobody waits there for what only it could bring about.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::Rng;
use pinring::*;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

struct Setup {
    feed: Feed,
    learner: Learner,
    weights: Weights<u64>,
    obs: Leaf<u64>,
    column: Column<u64>,
    mask: Column<bool>,
    version: Column<i64>,
}

fn start(steps: usize, within_episode: bool, batch: usize, buffers: usize, lag: u64) -> Setup {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
    sample.within_episode(within_episode);
    let (column, mask, version) = (sample.all(obs), sample.mask(), sample.policy_version());
    let weights = Weights::new(0u64);
    let feed = Feed::builder(sample).batch(batch).buffers(buffers).max_policy_lag(&weights, lag).start().unwrap();
    let learner = feed.learner().unwrap();
    Setup { feed, learner, weights, obs, column, mask, version }
}

/// One step of every lane through the gate; its version.
fn act(writer: &mut Writer, obs: Leaf<u64>, weights: &Weights<u64>, value: u64) -> Result<u64> {
    let mut step = writer.step()?;
    step.view_mut(obs).fill(value);
    let (version, policy) = step.policy(weights)?;
    assert_eq!(version, *policy);
    step.commit()?;
    Ok(version)
}

/// Lag 0 is on-policy to the row: batch k acts with version k, with the fewest buffers that let the learner hold one
/// batch, whatever is dropped at the gate, and in whatever order batches are dropped.
#[test]
fn lag_zero_is_on_policy_to_the_row() {
    for (steps, order) in [(0, 0), (0, 1), (0, 2), (1, 0), (3, 1), (3, 2)] {
        let _watchdog = Watchdog::new("lag 0", Duration::from_secs(180));
        let Setup { feed, learner, weights, obs, version, .. } = start(steps, false, 6, 2, 0);
        let intake = feed.intake().unwrap();
        let writers: Vec<_> = (0..4u64)
            .map(|index| {
                let (mut writer, weights) = (intake.writer(1).unwrap(), weights.clone());
                thread::spawn(move || {
                    let mut rng = Rng(index);
                    for value in 0..150 {
                        let mut step = writer.step().unwrap();
                        step.view_mut(obs).fill(value);
                        if rng.percent(10) {
                            continue; // dropped before the gate
                        }
                        step.policy(&weights).unwrap();
                        match rng.below(10) {
                            0 => drop(step), // dropped behind it
                            1 => std::mem::forget(step),
                            _ => step.commit().unwrap(),
                        }
                    }
                })
            })
            .collect();
        drop(intake);
        let mut held: Vec<Batch> = Vec::new();
        for batch in learner.iter() {
            let batch = batch.unwrap();
            let k = batch.sequence_number();
            assert!(batch.policy_versions().all(|v| v == k), "batch {k}: {:?}", batch.view(version));
            assert!(batch.slice(version).iter().all(|&v| v as u64 == k), "batch {k}: {:?}", batch.view(version));
            match order {
                // Published before the drop, behind it, and with the batch before still held.
                0 => drop((weights.publish(k + 1), batch)),
                1 => {
                    drop(batch);
                    weights.publish(k + 1);
                }
                _ => {
                    held.push(batch);
                    weights.publish(k + 1);
                    if held.len() == 2 {
                        drop(held.remove((k % 2) as usize));
                    }
                }
            }
            // The other one is held until now, where the order says so.
            if held.len() == 1 && k % 3 == 0 {
                held.clear();
            }
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert!(feed.metrics().batches > 10, "{:?}", feed.metrics());
    }
}

/// An unroll that was begun and given up is no longer waited for: by a writer that leaves, and by `abandon`.
#[test]
fn what_was_given_up_is_not_waited_for() {
    for leaves in [true, false] {
        let _watchdog = Watchdog::new("a begun unroll that is given up", Duration::from_secs(180));
        let Setup { feed, learner, weights, obs, column, .. } = start(2, false, 2, 2, 0);
        let (mut first, mut second) = (feed.writer(1).unwrap(), feed.writer(1).unwrap());
        act(&mut first, obs, &weights, 100).unwrap(); // one of the two unrolls that version 0 may begin
        act(&mut second, obs, &weights, 0).unwrap(); // the other one
        act(&mut second, obs, &weights, 1).unwrap();
        let (told, waiting) = mpsc::channel();
        let other = thread::spawn({
            let weights = weights.clone();
            move || {
                told.send(()).unwrap();
                // Begins the third: it waits for version 1, so for batch 0, so for the first writer.
                let version = act(&mut second, obs, &weights, 2).unwrap();
                (2..5).for_each(|value| drop(act(&mut second, obs, &weights, value + 1)));
                version
            }
        });
        waiting.recv().unwrap();
        thread::sleep(Duration::from_millis(50));
        let first = if leaves {
            drop(first);
            None
        } else {
            first.abandon(0).unwrap();
            Some(first)
        };
        let batch = learner.next_batch().unwrap();
        let mut rows: Vec<&[u64]> = batch.slice(column).chunks(3).collect();
        rows.sort(); // each writer's rows begin in its own part of the batch
        assert_eq!(rows, [[0, 1, 2], [2, 3, 4]]);
        assert_eq!(batch.lanes().collect::<Vec<_>>(), [1, 1]);
        weights.publish(1);
        assert_eq!(other.join().unwrap(), 0, "the third is part of batch 0 now");
        drop(first);
    }
}

/// Lanes of one writer step together, so one whose episode ended must not wait for a batch that needs the others.
#[test]
fn lanes_that_step_together_do_not_wait_for_each_other() {
    let _watchdog = Watchdog::new("staggered lanes of one writer", Duration::from_secs(180));
    let Setup { feed, learner, weights, obs, mask, .. } = start(4, true, 2, 2, 0);
    let intake = feed.intake().unwrap();
    let threads: Vec<_> = (0..2)
        .map(|index| {
            let (mut writer, weights) = (intake.writer(2).unwrap(), weights.clone());
            thread::spawn(move || {
                for t in 0..40u64 {
                    let mut step = writer.step().unwrap();
                    step.view_mut(obs).fill(t + 1);
                    step.policy(&weights).unwrap();
                    if t % 3 == index as u64 {
                        step.end(0, End::Terminated); // lane 0 begins again while lane 1 is in the middle
                    }
                    step.commit().unwrap();
                }
            })
        })
        .collect();
    drop(intake);
    let mut steps = 0;
    for batch in learner.iter() {
        let batch = batch.unwrap();
        steps += batch.slice(mask).iter().filter(|&&real| real).count() as u64;
        weights.publish(batch.sequence_number() + 1);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(steps + feed.metrics().unfinished_steps, 2 * 2 * 40);
}

/// Single steps are written in place: a writer that waits at the gate holds rows of a later batch. If rows of an earlier
/// one become free again and nobody else comes for them, it must take those.
#[test]
fn whoever_waits_with_later_rows_goes_back_for_earlier_ones() {
    for (lanes, forget) in [(1, false), (1, true), (2, false)] {
        let _watchdog = Watchdog::new("rows of an earlier batch", Duration::from_secs(180));
        let Setup { feed, learner, weights, obs, column, version, .. } = start(0, false, 4, 2, 0);
        let (mut first, mut second) = (feed.writer(1).unwrap(), feed.writer(lanes).unwrap());
        let mut values = 0..;
        for _ in 0..3 {
            act(&mut first, obs, &weights, values.next().unwrap()).unwrap();
        }
        let mut open = first.step().unwrap(); // the last row of batch 0
        open.view_mut(obs).fill(99);
        let (told, waiting) = mpsc::channel();
        let other = thread::spawn({
            let weights = weights.clone();
            move || {
                let mut step = second.step().unwrap(); // rows of batch 1, or a lane buffer
                step.view_mut(obs).fill(7);
                told.send(()).unwrap();
                let (acted, _) = step.policy(&weights).unwrap(); // waits for version 1, so for batch 0
                assert!(step.view(obs).iter().all(|&value| value == 7), "the observation came along");
                step.commit().unwrap();
                acted
            }
        });
        waiting.recv().unwrap();
        thread::sleep(Duration::from_millis(50));
        if forget {
            std::mem::forget(open);
        } else {
            drop(open);
        }
        drop(first); // and with it the row
        let batch = learner.next_batch().unwrap();
        assert_eq!(batch.slice(column), [0, 1, 2, 7]);
        assert_eq!(batch.slice(version), [0; 4]);
        assert_eq!(other.join().unwrap(), 0);
        weights.publish(1);
        let rest: usize = learner.iter().map(|batch| batch.unwrap().rows()).sum();
        assert_eq!(rest, lanes - 1);
    }
}

/// A stop, a fault of the learner and the end of the feed all reach who waits at the gate.
#[test]
fn the_gate_is_left_when_the_feed_closes() {
    for (steps, stop) in [(0, true), (0, false), (2, true), (2, false)] {
        let _watchdog = Watchdog::new("waiting at the gate", Duration::from_secs(180));
        let Setup { feed, learner, weights, obs, .. } = start(steps, false, 1, 2, 0);
        let mut writer = feed.writer(1).unwrap();
        let waits = thread::spawn({
            let weights = weights.clone();
            move || (0..10).find_map(|value| act(&mut writer, obs, &weights, value).err()).unwrap()
        });
        thread::sleep(Duration::from_millis(30));
        if stop {
            feed.stop(Duration::from_secs(10)).unwrap();
        } else {
            drop(learner);
        }
        let error = waits.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    }
}

#[test]
fn the_gate_must_be_asked_and_with_its_own_weights() {
    let Setup { feed, learner: _learner, weights, obs, .. } = start(0, false, 4, 2, 0);
    let mut writer = feed.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(1);
    assert_eq!(step.commit(), Err(CommitError::PolicyNotAsked));
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(1);
    assert_eq!(step.policy(&Weights::new(0u64)).unwrap_err(), PolicyError::OtherWeights);
    assert_eq!(step.policy(&weights.clone()).unwrap().0, 0);
    step.commit().unwrap();
    assert_eq!(feed.metrics().steps, 1);
}

/// A second feed with weights that were published before counts from the version that it finds: it is as strict as the
/// first, and in lockstep it acts with versions that are still kept.
#[test]
fn lag_is_counted_from_the_version_at_the_start() {
    for (lockstep, steps) in [(false, 0), (false, 2), (true, 0), (true, 2)] {
        for lag in [0, 2] {
            let _watchdog = Watchdog::new("weights with a past", Duration::from_secs(180));
            let weights = Weights::with_version(1000u64, 1000);
            (1001..1050).for_each(|version| assert_eq!(weights.publish(version), version));
            for feed in 0..2u64 {
                let begun = weights.latest().0;
                assert_eq!(begun, 1049 + 20 * feed);
                let mut step = Step::new();
                let obs = step.observation::<u64>("obs", &[]);
                let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
                let version = sample.policy_version();
                let builder = Feed::builder(sample).batch(2).buffers(2).max_policy_lag(&weights, lag);
                let feed = if lockstep { builder.lockstep(2) } else { builder }.start().unwrap();
                let learner = feed.learner().unwrap();
                let mut writer = feed.writer(2).unwrap();
                let acting = thread::spawn({
                    let weights = weights.clone();
                    move || (0..).find_map(|value| act(&mut writer, obs, &weights, value).err()).expect("it ends")
                });
                for k in 0..20u64 {
                    let batch = learner.next_batch().unwrap();
                    for &acted in batch.slice(version) {
                        let acted = acted as u64 - begun;
                        let least = k.saturating_sub(lag);
                        assert!(
                            if lockstep { acted == least } else { (least..=k).contains(&acted) },
                            "batch {k}: {acted}"
                        );
                    }
                    weights.publish(begun + k + 1);
                }
                drop(learner);
                assert_eq!(acting.join().unwrap().kind(), ErrorKind::Stopped);
            }
        }
    }
}

/// A learner that publishes more often than it takes batches leaves lockstep without the version that it calls for.
#[test]
fn lockstep_says_when_its_version_is_gone() {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let weights = Weights::new(0u64);
    let builder = Feed::builder(Sample::unroll(step, 1)).batch(1).lockstep(1).max_policy_lag(&weights, 1);
    let feed = builder.start().unwrap();
    let (mut writer, _learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    act(&mut writer, obs, &weights, 0).unwrap();
    (1..=3).for_each(|version| assert_eq!(weights.publish(version), version));
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(1);
    let gone = PolicyError::VersionGone { needed: 0, oldest: 2, newest: 3 };
    assert_eq!(step.policy(&weights).map(|_| ()), Err(gone.clone()));
    assert_eq!(Error::from(gone).kind(), ErrorKind::Misuse);
}
