//! T + 1 observations with the fewest buffers: nothing that a lane must wait for is needed to finish what it has begun,
//! so a ring full of half-written unrolls does not dead-lock.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use pinring::*;
use std::collections::{HashMap, HashSet};
use std::thread;
use std::time::Duration;

const STEPS: usize = 5;

/// Runs `writers` of `lanes` lanes for `unrolls` unrolls each, and one step more; returns rows by lane.
fn run(
    batch: usize,
    buffers: usize,
    writers: usize,
    lanes: usize,
    unrolls: usize,
    lockstep: bool,
) -> HashMap<usize, u64> {
    let _watchdog = Watchdog::new("the fewest buffers", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[3]);
    let act = step.leaf::<u64>("act", &[]);
    let mut sample = Sample::unroll(step, STEPS);
    let (obs_column, act_column) = (sample.all(obs), sample.all(act));
    let builder = Feed::builder(sample).batch(batch).buffers(buffers);
    let feed = if lockstep { builder.lockstep(writers * lanes) } else { builder }.start().unwrap();
    let learner = feed.learner().unwrap();
    let mut all: Vec<Writer> = (0..writers).map(|_| feed.writer(lanes).unwrap()).collect();
    let write = move |writer: &mut Writer, t: usize| {
        let first = writer.lanes().start as u64;
        let mut step = writer.step()?;
        let mut view = step.view_mut(obs);
        for lane in 0..lanes {
            (0..3).for_each(|i| view[[lane, i]] = (first + lane as u64) << 32 | t as u64);
        }
        step.view_mut(act).fill(t as u64);
        Ok::<_, Error>(step.commit()?)
    };
    // Every lane is open, in the middle of its unroll, before anybody completes one.
    (0..STEPS).for_each(|t| all.iter_mut().for_each(|writer| write(writer, t).unwrap()));
    let threads: Vec<_> = all
        .into_iter()
        .map(|mut writer| thread::spawn(move || (STEPS..=unrolls * STEPS).try_for_each(|t| write(&mut writer, t))))
        .collect();
    let mut rows: HashMap<usize, HashSet<u64>> = HashMap::new();
    for batch in learner.iter() {
        let batch = batch.unwrap();
        let first: Vec<u64> = batch.first_steps().collect();
        for (row, lane) in batch.lanes().enumerate() {
            assert!(rows.entry(lane).or_default().insert(first[row]), "delivered twice");
            for t in 0..=STEPS {
                let value = (lane as u64) << 32 | (first[row] + t as u64);
                assert_eq!(batch.slice(obs_column)[(row * (STEPS + 1) + t) * 3..][..3], [value; 3]);
            }
            (0..STEPS).for_each(|t| assert_eq!(batch.slice(act_column)[row * STEPS + t], first[row] + t as u64));
        }
    }
    for thread in threads {
        // In lockstep the step behind the last unroll only gives its observation once another writer has left.
        if let Err(error) = thread.join().unwrap() {
            assert!(lockstep && error.kind() == ErrorKind::Ended, "{error}");
        }
    }
    rows.into_iter().map(|(lane, firsts)| (lane, firsts.len() as u64)).collect()
}

#[test]
fn free_running_lanes() {
    // Batches larger and smaller than the lanes, a single row, and lanes wider than the whole ring.
    for (batch, buffers, writers, lanes) in
        [(8, 1, 4, 2), (8, 2, 4, 2), (3, 1, 4, 2), (3, 2, 4, 2), (1, 1, 6, 1), (2, 1, 2, 9)]
    {
        let rows = run(batch, buffers, writers, lanes, 12, false);
        assert_eq!(rows.len(), writers * lanes);
        assert!(rows.values().all(|&rows| rows == 12), "{rows:?}");
    }
}

#[test]
fn lockstep() {
    for (layers, buffers, writers, lanes) in [(1, 1, 4, 2), (1, 2, 4, 2), (3, 1, 2, 4), (1, 1, 8, 1), (2, 1, 1, 6)] {
        let rows = run(layers * writers * lanes, buffers, writers, lanes, 12, true);
        assert_eq!(rows.len(), writers * lanes);
        assert!(rows.values().all(|&rows| rows == 12), "{rows:?}");
    }
}
