//! Lanes that do not divide the batch, or exceed it: every row is delivered, and what was copied is counted.

mod common;

use common::Watchdog;
use pinring::*;
use std::thread;
use std::time::Duration;

fn start(batch: usize, buffers: usize) -> (Feed, Learner, Leaf<u64>, Column<u64>) {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[3]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(batch).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    (feed, learner, obs, column)
}

fn value(lane: usize, t: u64) -> u64 {
    (lane as u64) << 32 | t
}

fn write(writer: &mut Writer, obs: Leaf<u64>, t: u64) {
    let lanes = writer.lanes();
    let mut step = writer.step().unwrap();
    let mut view = step.view_mut(obs);
    for (local, lane) in lanes.enumerate() {
        (0..3).for_each(|i| view[[local, i]] = value(lane, t));
    }
    step.commit().unwrap();
}

/// 48 lanes into batches of 512: ten steps are written in place, the eleventh lies across two batches and is copied.
#[test]
fn forty_eight_lanes_into_batches_of_512() {
    const STEPS: u64 = 300;
    let _watchdog = Watchdog::new("48 lanes into 512", Duration::from_secs(180));
    let (feed, learner, obs, column) = start(512, 2);
    let mut writer = feed.writer(48).unwrap();
    let writing = thread::spawn(move || (0..STEPS).for_each(|t| write(&mut writer, obs, t)));
    let mut seen = Vec::new();
    for batch in learner.iter() {
        let batch = batch.unwrap();
        let (lanes, steps): (Vec<_>, Vec<_>) = (batch.lanes().collect(), batch.first_steps().collect());
        for row in 0..batch.rows() {
            assert_eq!(batch.slice(column)[row * 3..][..3], [value(lanes[row], steps[row]); 3]);
            seen.push((steps[row], lanes[row]));
        }
    }
    writing.join().unwrap();
    // One writer: rows come in the order in which they were written.
    assert!(seen.iter().copied().eq((0..STEPS).flat_map(|t| (0..48).map(move |lane| (t, lane)))));
    let staged: u64 = (0..STEPS).filter(|t| 512 - t * 48 % 512 < 48).count() as u64 * 48;
    let metrics = feed.metrics();
    assert_eq!((metrics.rows, metrics.staged_rows), (STEPS * 48, staged));
    assert_eq!(metrics.batches, (STEPS * 48).div_ceil(512));
}

/// Several such writers at once; nothing is lost and nothing comes twice.
#[test]
fn writers_of_odd_widths_together() {
    const STEPS: u64 = 120;
    let _watchdog = Watchdog::new("odd widths", Duration::from_secs(180));
    for (batch, buffers) in [(512, 2), (64, 3), (7, 1), (1, 1), (1, 2)] {
        let (feed, learner, obs, column) = start(batch, buffers);
        let widths = [48, 16, 5, 1];
        let intake = feed.intake().unwrap();
        let threads = widths.map(|width| {
            let mut writer = intake.writer(width).unwrap();
            thread::spawn(move || (0..STEPS).for_each(|t| write(&mut writer, obs, t)))
        });
        drop(intake);
        let total: usize = widths.iter().sum();
        let mut seen = vec![false; total * STEPS as usize];
        for batch in learner.iter() {
            let batch = batch.unwrap();
            let steps: Vec<_> = batch.first_steps().collect();
            for (row, lane) in batch.lanes().enumerate() {
                assert_eq!(batch.slice(column)[row * 3..][..3], [value(lane, steps[row]); 3]);
                assert!(!std::mem::replace(&mut seen[steps[row] as usize * total + lane], true), "delivered twice");
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(seen.iter().all(|&seen| seen), "batch {batch}, {buffers} buffers");
        assert_eq!(feed.metrics().rows, total as u64 * STEPS);
    }
}

/// A dropped step of one lane leaves a gap of one row between writers of 16. It is filled first, so its batch goes out.
#[test]
fn a_gap_of_one_row_is_filled_first() {
    for forget in [false, true] {
        let (feed, learner, obs, column) = start(64, 3);
        let (mut a, mut b, mut one) = (feed.writer(16).unwrap(), feed.writer(16).unwrap(), feed.writer(1).unwrap());
        let mut open = one.step().unwrap(); // a row in the middle of the first batch
        open.view_mut(obs).fill(u64::MAX);
        (0..2).for_each(|t| write(&mut a, obs, t));
        (0..2).for_each(|t| write(&mut b, obs, t));
        assert!(learner.try_next().unwrap().is_none(), "one row is open");
        let before = feed.metrics().staged_rows;
        if forget {
            std::mem::forget(open);
            drop(one.try_step().unwrap()); // finds the forgotten one, undoes it, and is dropped itself
        } else {
            drop(open);
        }
        assert!(learner.try_next().unwrap().is_none(), "one row is free");
        write(&mut a, obs, 2);
        let batch = learner.try_next().unwrap().expect("the gap was filled first");
        assert_eq!(batch.rows(), 64);
        let mut seen: Vec<(usize, u64)> = batch.lanes().zip(batch.first_steps()).collect();
        for (row, &(lane, t)) in seen.iter().enumerate() {
            assert_eq!(batch.slice(column)[row * 3..][..3], [value(lane, t); 3]);
        }
        seen.sort_unstable();
        // Two whole steps of each, but for what lay across the batch's end, and the row that filled the gap.
        assert_eq!(seen.iter().filter(|row| row.1 == 2).count(), 1);
        assert!(feed.metrics().staged_rows >= before + 16, "the step with the gap was copied");
        // And all the rest comes at the end.
        drop((a, b, one));
        let rest: usize = learner.iter().map(|batch| batch.unwrap().rows()).sum();
        assert_eq!(rest, 5 * 16 - 64);
    }
}

/// With one row a batch and one buffer, lanes take turns; unrolls too.
#[test]
fn one_row_and_one_buffer() {
    let _watchdog = Watchdog::new("one row and one buffer", Duration::from_secs(180));
    for steps in [1, 3] {
        let mut step = Step::new();
        let obs = step.observation::<u64>("obs", &[]);
        let mut sample = Sample::unroll(step, steps);
        let column = sample.all(obs);
        let feed = Feed::builder(sample).batch(1).buffers(1).start().unwrap();
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(9).unwrap();
        let writing = thread::spawn(move || {
            for t in 0..=20 * steps as u64 {
                let mut step = writer.step().unwrap();
                step.put(obs, &std::array::from_fn::<u64, 9, _>(|lane| value(lane, t))).unwrap();
                step.commit().unwrap();
            }
        });
        for unroll in 0..20 {
            for lane in 0..9 {
                let batch = learner.next_batch().unwrap();
                let expected: Vec<u64> = (0..=steps).map(|t| value(lane, (unroll * steps + t) as u64)).collect();
                assert_eq!(batch.slice(column), expected);
            }
        }
        assert_eq!(learner.next_batch().err(), Some(NextError::Ended));
        writing.join().unwrap();
    }
}
