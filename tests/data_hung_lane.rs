//! One environment of 64 hangs: the others deliver everything they write.

mod common;

use common::Watchdog;
use pinring::*;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const LANES: usize = 64;
const HUNG: usize = 17;

fn write(writer: &mut Writer, obs: Leaf<u64>, weights: Option<&Weights<()>>, value: u64) {
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(value);
    if let Some(weights) = weights {
        step.policy(weights).unwrap();
    }
    step.commit().unwrap();
}

/// 64 lanes of unrolls on eight threads, batch 32, three buffers. Lane 17 stops in the middle of its first unroll and
/// is neither dropped nor gone on with. Counted in rows, the others lose nothing, also behind a lag gate.
#[test]
fn a_hung_lane_costs_the_others_nothing() {
    const STEPS: u64 = 4;
    const UNROLLS: u64 = 64;
    for lag in [None, Some(2)] {
        let _watchdog = Watchdog::new("a hung lane of unrolls", Duration::from_secs(180));
        let mut step = Step::new();
        let obs = step.observation::<u64>("obs", &[]);
        let sample = Sample::unroll(step, STEPS as usize);
        let weights = Weights::new(());
        let mut builder = Feed::builder(sample).batch(32).buffers(3);
        if let Some(lag) = lag {
            builder = builder.max_policy_lag(&weights, lag);
        }
        let feed = builder.start().unwrap();
        let learner = feed.learner().unwrap();
        let ask = lag.map(|_| weights.clone());
        let mut writers: Vec<Writer> = (0..LANES).map(|_| feed.writer(1).unwrap()).collect();
        let mut hung = writers.remove(HUNG);
        (0..2).for_each(|value| write(&mut hung, obs, ask.as_ref(), value));
        let mut threads = Vec::new();
        while !writers.is_empty() {
            let mut some: Vec<Writer> = writers.drain(..writers.len().min(8)).collect();
            let ask = ask.clone();
            threads.push(thread::spawn(move || {
                for value in 0..=UNROLLS * STEPS {
                    some.iter_mut().for_each(|writer| write(writer, obs, ask.as_ref(), value));
                }
            }));
        }
        // All that 63 lanes complete comes in full batches, while the hung lane is still there.
        let mut rows = [0; LANES];
        for _ in 0..63 * UNROLLS / 32 {
            let batch = learner.next_batch().unwrap();
            batch.lanes().for_each(|lane| rows[lane] += 1);
            weights.publish(());
        }
        for (lane, &rows) in rows.iter().enumerate() {
            assert_eq!(rows, if lane == HUNG { 0 } else { UNROLLS }, "rows of lane {lane}");
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // It recovers, and its unroll is none the worse for it.
        (2..=STEPS).for_each(|value| write(&mut hung, obs, ask.as_ref(), value));
        drop(hung);
        let last = learner.next_batch().unwrap();
        assert_eq!(last.lanes().collect::<Vec<_>>(), [HUNG]);
        assert_eq!(learner.next_batch().err(), Some(NextError::Ended));
    }
}

/// Single steps are written in place, so a lane that hangs with a step open holds one slot, and no more than that.
#[test]
fn a_hung_step_holds_one_slot_and_no_more() {
    let _watchdog = Watchdog::new("a hung single step", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(128).buffers(3).start().unwrap();
    let learner = feed.learner().unwrap();
    let mut writers: Vec<Writer> = (0..LANES).map(|_| feed.writer(1).unwrap()).collect();
    let mut hung = writers.remove(HUNG);
    let (release, released) = mpsc::channel::<()>();
    let (told, open) = mpsc::channel();
    let hanging = thread::spawn(move || {
        let mut step = hung.step().unwrap();
        step.view_mut(obs).fill(u64::MAX);
        told.send(()).unwrap();
        released.recv().unwrap();
        step.commit().unwrap();
    });
    open.recv().unwrap();
    const VALUES: u64 = 500;
    let threads: Vec<_> = (0..7)
        .map(|_| {
            let mut some: Vec<Writer> = writers.drain(..9).collect();
            thread::spawn(move || {
                for value in 0..VALUES {
                    some.iter_mut().for_each(|writer| write(writer, obs, None, value));
                }
            })
        })
        .collect();
    // Everything but what shares the slot with the open step, and the beginning of the next batch.
    let total = 63 * VALUES as usize;
    let mut rows = 0;
    while rows + 2 * 127 < total {
        let batch = learner.next_batch().unwrap();
        assert!(batch.slice(column).iter().all(|&value| value != u64::MAX));
        rows += batch.rows();
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(rows < total);
    release.send(()).unwrap();
    hanging.join().unwrap();
    let rest: Vec<u64> = learner.iter().flat_map(|batch| batch.unwrap().slice(column).to_vec()).collect();
    assert_eq!(rest.len(), total - rows + 1);
    assert_eq!(rest.iter().filter(|&&value| value == u64::MAX).count(), 1);
}
