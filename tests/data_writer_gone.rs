//! A writer that leaves at any point of its step takes nothing with it but that step (and the unrolls it had begun):
//! others that are parked before a full ring go on and deliver everything.

mod common;

use common::Watchdog;
use pinring::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    BeforeAny,
    AfterStep,
    AfterView,
    AfterPolicy,
    AfterEnd,
    MidUnroll,
    Forgotten,
    Panics,
}
use Point::*;
const POINTS: [Point; 8] = [BeforeAny, AfterStep, AfterView, AfterPolicy, AfterEnd, MidUnroll, Forgotten, Panics];

/// Leaves the writer's last step where `point` says, and drops it.
fn leave(mut writer: Writer, obs: Leaf<u64>, weights: &Weights<()>, point: Point) {
    match point {
        BeforeAny => {}
        Panics => {
            let unwound = catch_unwind(AssertUnwindSafe(move || {
                let mut step = writer.step().unwrap();
                step.view_mut(obs).fill(u64::MAX);
                std::panic::resume_unwind(Box::new("an env crashed")); // without the panic hook's noise
            }));
            assert!(unwound.is_err());
            return;
        }
        MidUnroll => {
            let mut step = writer.step().unwrap();
            step.view_mut(obs).fill(1);
            step.policy(weights).unwrap();
            step.commit().unwrap();
        }
        _ => {
            let mut step = writer.step().unwrap();
            if point != AfterStep {
                step.view_mut(obs).fill(u64::MAX);
            }
            if point == AfterPolicy {
                step.policy(weights).unwrap();
            }
            if point == AfterEnd {
                step.end(0, End::Terminated);
            }
            if point == Forgotten {
                std::mem::forget(step);
            }
        }
    }
    drop(writer);
}

/// Two rows a batch, two buffers. The leaver has a step open in the ring; the others fill it up and park; it leaves.
#[test]
fn others_go_on_and_deliver_everything() {
    for steps in [0usize, 3] {
        for point in POINTS {
            let _watchdog = Watchdog::new("a writer that leaves", Duration::from_secs(180));
            let mut step = Step::new();
            let obs = step.observation::<u64>("obs", &[]);
            let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
            let column = sample.all(obs);
            let feed = Feed::builder(sample).batch(2).buffers(2).start().unwrap();
            let (learner, weights) = (feed.learner().unwrap(), Weights::new(()));
            let leaver = feed.writer(2).unwrap();
            let others: Vec<_> = (0..3u64)
                .map(|_| {
                    let mut writer = feed.writer(1).unwrap();
                    thread::spawn(move || {
                        for value in 0..=12 * steps.max(1) as u64 {
                            let mut step = writer.step().unwrap();
                            step.view_mut(obs).fill(value);
                            step.commit().unwrap();
                        }
                    })
                })
                .collect();
            // The ring is full, and all three are parked or soon will be.
            while feed.metrics().batches < 2 {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(5));
            // It needs room itself: single steps wait for a slot, so make some while it comes.
            let leaving = thread::spawn({
                let weights = weights.clone();
                move || leave(leaver, obs, &weights, point)
            });
            let mut rows = [0u64; 5];
            let mut masked = 0;
            for batch in learner.iter() {
                let batch = batch.unwrap();
                let per_row = if steps == 0 { 1 } else { steps + 1 };
                let first: Vec<u64> = batch.first_steps().collect();
                for (row, lane) in batch.lanes().enumerate() {
                    let values = &batch.slice(column)[row * per_row..][..per_row];
                    if lane < 2 {
                        assert_eq!((point, steps, values), (MidUnroll, 0, &[1][..]), "only what it committed");
                        masked += 1;
                    } else {
                        let expected: Vec<u64> = (first[row]..first[row] + per_row as u64).collect();
                        assert_eq!(values, expected);
                    }
                    rows[lane] += 1;
                }
            }
            leaving.join().unwrap();
            others.into_iter().for_each(|other| other.join().unwrap());
            let each = if steps == 0 { 13 } else { 12 };
            assert_eq!(rows[2..], [each; 3], "{point:?}, unrolls of {steps}");
            assert_eq!(masked, if point == MidUnroll && steps == 0 { 2 } else { 0 });
            let metrics = feed.metrics();
            assert_eq!(
                metrics.unfinished_steps,
                if steps == 0 { 0 } else { 3 + if point == MidUnroll { 2 } else { 0 } }
            );
            assert_eq!((metrics.dropped_rows, metrics.free_slots, metrics.writers), (0, 2, 0));
        }
    }
}

/// In lockstep a writer that leaves ends the source for all, wherever it stands, and parked ones hear of it by name.
#[test]
fn in_lockstep_everybody_hears_of_it() {
    for steps in [0usize, 2] {
        for point in POINTS {
            let _watchdog = Watchdog::new("a lockstep writer that leaves", Duration::from_secs(180));
            let mut step = Step::new();
            let obs = step.observation::<u64>("obs", &[]);
            let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
            let column = sample.all(obs);
            let feed = Feed::builder(sample).batch(4).buffers(1).lockstep(4).start().unwrap();
            let (learner, weights) = (feed.learner().unwrap(), Weights::new(()));
            let mut leaver = feed.writer(2).unwrap();
            let write = move |writer: &mut Writer, value| -> Result<()> {
                let mut step = writer.step()?;
                step.view_mut(obs).fill(value);
                Ok(step.commit()?)
            };
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let mut writer = feed.writer(1).unwrap();
                    thread::spawn(move || (0..100).find_map(|value| write(&mut writer, value).err()).expect("it ends"))
                })
                .collect();
            // Two whole batches, of which the learner takes the first, and then it stands in the third.
            let taken = thread::spawn(move || {
                let batches: Vec<(usize, Vec<u64>)> = learner
                    .iter()
                    .map(|batch| batch.map(|batch| (batch.rows(), batch.slice(column).to_vec())).unwrap())
                    .collect();
                batches
            });
            (0..2 * steps.max(1) as u64).for_each(|value| write(&mut leaver, value).unwrap());
            leave(leaver, obs, &weights, point);
            for other in others {
                let error = other.join().unwrap();
                assert_eq!(error.kind(), ErrorKind::Ended);
                assert!(error.to_string().contains("the writer of lanes 0..2 was dropped"), "{error}");
            }
            let batches = taken.join().unwrap();
            // The observation behind the second unroll is handed in by `policy` or a commit.
            let whole = match (steps, point) {
                (0, MidUnroll) => 3,
                (0, _) | (_, MidUnroll | AfterPolicy) => 2,
                _ => 1,
            };
            assert_eq!(batches.len(), whole, "{point:?}, unrolls of {steps}");
            assert!(batches.iter().all(|(rows, _)| *rows == 4));
            if steps == 0 {
                let values: Vec<_> = batches.iter().take(2).map(|(_, values)| values.clone()).collect();
                assert_eq!(values, [vec![0; 4], vec![1; 4]]);
            } else {
                assert_eq!(batches[0].1, [0, 1, 2].repeat(4));
            }
        }
    }
}

/// Rows that a leaver held in a slot are the room that parked writers wait for: they hear of it, without the learner.
#[test]
fn rows_that_a_leaver_held_wake_who_waits_for_room() {
    for forget in [false, true] {
        for leaves in [false, true] {
            let _watchdog = Watchdog::new("rows that come free", Duration::from_secs(180));
            let mut step = Step::new();
            let obs = step.observation::<u64>("obs", &[]);
            let mut sample = Sample::step(step);
            let column = sample.all(obs);
            let feed = Feed::builder(sample).batch(4).buffers(2).start().unwrap();
            let learner = feed.learner().unwrap();
            let mut leaver = feed.writer(2).unwrap();
            let mut open = leaver.step().unwrap();
            open.view_mut(obs).fill(u64::MAX);
            let intake = feed.intake().unwrap();
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let mut writer = intake.writer(1).unwrap();
                    thread::spawn(move || {
                        for value in 0..4 {
                            let mut step = writer.step().unwrap();
                            step.view_mut(obs).fill(value);
                            step.commit().unwrap();
                        }
                    })
                })
                .collect();
            drop(intake);
            // Six rows fit beside the open step; the last two do not.
            while feed.metrics().steps < 6 {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(10));
            assert_eq!(feed.metrics().batches, 1);
            if forget {
                std::mem::forget(open);
            } else {
                drop(open);
            }
            if leaves {
                drop(leaver);
            } else if forget {
                // Found and undone by the next call, here the one that gives the episode up.
                leaver.abandon(0).unwrap();
                std::mem::forget(leaver); // and it is never heard of again
            } else {
                std::mem::forget(leaver);
            }
            others.into_iter().for_each(|other| other.join().unwrap());
            let mut values: Vec<u64> =
                (0..2).flat_map(|_| learner.next_batch().unwrap().slice(column).to_vec()).collect();
            values.sort_unstable();
            assert_eq!(values, [0, 0, 1, 1, 2, 2, 3, 3]);
        }
    }
}
