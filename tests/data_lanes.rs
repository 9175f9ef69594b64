//! Which lanes a writer gets, how many there may be, and feeds with more writers than a slot has parts.

mod common;

use common::Watchdog;
use pinring::*;
use std::thread;
use std::time::Duration;

fn sample() -> (Sample, Leaf<u64>, Column<u64>) {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    (sample, obs, column)
}

#[test]
fn lanes_are_given_out_lowest_first_and_bounded() {
    let (sample, ..) = sample();
    let feed = Feed::builder(sample).lanes(10).start().unwrap();
    let intake = feed.intake().unwrap();
    let (a, b) = (intake.writer(4).unwrap(), feed.writer(4).unwrap());
    assert_eq!((a.lanes(), b.lanes()), (0..4, 4..8));
    let error = intake.clone().writer(3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("a writer of 3 lanes") && error.to_string().contains("10 lanes, of which 8"));
    drop(a);
    assert_eq!(intake.writer(5).unwrap_err().kind(), ErrorKind::Config, "six are free, but not in one run");
    let c = intake.writer(3).unwrap();
    assert_eq!(c.lanes(), 0..3);
    assert_eq!((intake.writer(1).unwrap().lanes(), intake.writer(2).unwrap().lanes()), (3..4, 8..10));
    assert_eq!(intake.writer(0).unwrap_err().kind(), ErrorKind::Config);
}

/// A refused writer leaves the feed as it was.
#[test]
fn numbers_that_make_no_sense_are_refused() {
    let (sample, obs, column) = sample();
    let feed = Feed::builder(sample).batch(1).start().unwrap();
    for lanes in [usize::MAX, usize::MAX / 2, (u32::MAX as usize).saturating_add(1)] {
        let error = feed.writer(lanes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(&format!("a writer of {lanes} lanes")), "{error}");
    }
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    assert_eq!(writer.lanes(), 0..1);
    let mut step = writer.step().unwrap();
    step.put(obs, &[5]).unwrap();
    step.commit().unwrap();
    assert_eq!(learner.next_batch().unwrap().slice(column), [5]);
}

/// 150 writers of one lane: more than a slot is ever cut into, and more than some batches have rows.
#[test]
fn more_writers_than_parts_of_a_slot() {
    for (batch, buffers) in [(512, 2), (100, 3), (3, 2)] {
        let _watchdog = Watchdog::new("150 writers", Duration::from_secs(180));
        let (sample, obs, column) = sample();
        let feed = Feed::builder(sample).batch(batch).buffers(buffers).start().unwrap();
        let learner = feed.learner().unwrap();
        let mut writers: Vec<Writer> = (0..150).map(|_| feed.writer(1).unwrap()).collect();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let mut some: Vec<Writer> = writers.drain(..50).collect();
                thread::spawn(move || {
                    for t in 0..40u64 {
                        for writer in &mut some {
                            let lane = writer.lanes().start as u64;
                            let mut step = writer.step().unwrap();
                            step.put(obs, &[lane << 32 | t]).unwrap();
                            step.commit().unwrap();
                        }
                    }
                })
            })
            .collect();
        let mut seen = vec![false; 150 * 40];
        for batch in learner.iter() {
            let batch = batch.unwrap();
            for (&value, (lane, t)) in batch.slice(column).iter().zip(batch.lanes().zip(batch.first_steps())) {
                assert_eq!(value, (lane as u64) << 32 | t);
                assert!(!std::mem::replace(&mut seen[lane * 40 + t as usize], true));
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(seen.iter().all(|&seen| seen));
    }
}
