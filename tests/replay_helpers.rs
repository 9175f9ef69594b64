//! Batches that several threads fill, one while the next is selected: the same batches in the same order as by one thread, and
//! an end at any moment.

mod common;

use common::Watchdog;
use pinring::*;
use std::thread;
use std::time::Duration;

/// Rows of 16 KB, 32 a batch: worth helpers.
const ELEMENTS: usize = 4096;
const ROWS: usize = 32;

struct Large {
    x: Leaf<f32>,
    column: Column<f32>,
    sample: Sample,
}

impl Large {
    fn new() -> Large {
        let mut step = Step::new();
        let x = step.observation::<f32>("x", &[ELEMENTS]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let column = sample.at(x, 0);
        Large { x, column, sample }
    }

    fn builder(&self, threads: usize) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(4).lanes(1).seed(3);
        builder.replay(128, Prioritized::new(0.6, 0.4)).gather_threads(threads)
    }

    /// Every value of a step says which it is.
    fn write(&self, writer: &mut Writer, steps: std::ops::Range<u32>) -> Result<()> {
        for number in steps {
            let mut step = writer.step()?;
            step.overwrite_lane(self.x, 0).fill(number as f32);
            step.priority(0, 1.0 + (number % 7) as f32)?;
            step.commit()?;
        }
        Ok(())
    }

    /// Each row is one step, and the step that the batch says. Returns which.
    fn check(&self, batch: &Batch) -> Vec<u64> {
        let steps: Vec<u64> = batch.first_steps().collect();
        for (values, step) in batch.slice(self.column).chunks(ELEMENTS).zip(&steps) {
            assert!(values.iter().all(|value| *value == *step as f32), "a row of step {step} has {:?}…", &values[..4]);
        }
        steps
    }
}

#[test]
fn batches_and_their_order_do_not_depend_on_the_number_of_threads() {
    let _watchdog = Watchdog::new("threads", Duration::from_secs(60));
    let batches = |threads: usize, hold: usize| {
        let large = Large::new();
        let feed = large.builder(threads).pace(Pace::min_size(100)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        large.write(&mut writer, 0..101).unwrap();
        let mut held = std::collections::VecDeque::new();
        let mut seen = Vec::new();
        for sequence in 0..60 {
            let batch = learner.next_batch().unwrap();
            assert_eq!(batch.sequence_number(), sequence);
            seen.push((large.check(&batch), batch.keys().iter().collect::<Vec<_>>()));
            held.push_back(batch);
            if held.len() > hold {
                held.pop_front();
            }
        }
        seen
    };
    let alone = batches(1, 0);
    assert!(alone.iter().any(|(steps, _)| steps != &alone[0].0));
    for (threads, hold) in [(2, 0), (3, 3), (4, 2), (9, 1)] {
        assert_eq!(batches(threads, hold), alone, "{threads} threads, a learner that holds {hold} more batches");
    }
}

/// Whatever is in the making: no row is torn, nobody hangs, and the pace's accounts come out even.
#[test]
fn a_stop_amid_two_batches_leaves_nothing() {
    let _watchdog = Watchdog::new("stops", Duration::from_secs(120));
    for moment in 0..40u64 {
        let large = std::sync::Arc::new(Large::new());
        let feed = large.builder(2 + moment as usize % 3).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let writing = thread::spawn({
            let large = large.clone();
            move || large.write(&mut writer, 0..u32::MAX).unwrap_err().kind()
        });
        let learning = thread::spawn(move || {
            let mut kept = Vec::new();
            loop {
                match learner.next_batch() {
                    Ok(batch) => {
                        large.check(&batch);
                        kept = vec![batch];
                    }
                    Err(error) => return (error, kept),
                }
            }
        });
        while feed.metrics().batches < moment {
            thread::yield_now();
        }
        if moment % 2 == 0 {
            feed.clear().unwrap();
        }
        let report = feed.stop(Duration::from_secs(20)).unwrap();
        assert!(report.threads_given_up.is_empty() && report.fault.is_none(), "{report}");
        assert_eq!(writing.join().unwrap(), ErrorKind::Stopped);
        let (error, kept) = learning.join().unwrap();
        assert_eq!(error, NextError::Closed(Closed::Stopped));
        drop(kept);
    }
}

/// A queue to its end: the batches that are in the making when the writer goes come too, in order.
#[test]
fn at_the_end_every_batch_comes_that_helpers_fill() {
    let _watchdog = Watchdog::new("ends", Duration::from_secs(60));
    for steps in [1, 40, 64, 100, 129] {
        let large = Large::new();
        let builder = large.builder(4).replay(256, MaxTimes::new(Fifo::new(), 1));
        let feed = builder.start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        large.write(&mut writer, 0..steps + 1).unwrap();
        drop(writer);
        let mut seen = Vec::new();
        let end = loop {
            match learner.next_batch() {
                Ok(batch) => seen.extend(large.check(&batch)),
                Err(end) => break end,
            }
        };
        assert_eq!((end, seen), (NextError::Ended, (0..u64::from(steps)).collect()));
    }
}
