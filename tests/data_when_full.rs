//! A full ring, by every `WhenFull`, for single steps and for unrolls: what is begun, what is lost, and the exact count.

mod common;

use common::Watchdog;
use pinring::*;
use std::thread;
use std::time::{Duration, Instant};

struct Setup {
    feed: Feed,
    learner: Learner,
    obs: Leaf<u64>,
    column: Column<u64>,
    steps: usize,
}

fn start(steps: usize, within: bool, batch: usize, buffers: usize, when_full: WhenFull) -> Setup {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
    sample.within_episode(within);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(batch).buffers(buffers).when_full(when_full).start().unwrap();
    let learner = feed.learner().unwrap();
    Setup { feed, learner, obs, column, steps }
}

impl Setup {
    fn write(&self, writer: &mut Writer, value: u64) -> Result<()> {
        let lanes = writer.lanes().len() as u64;
        let mut step = writer.step()?;
        step.put(self.obs, &(0..lanes).map(|lane| value * lanes + lane).collect::<Vec<_>>())?;
        Ok(step.commit()?)
    }

    /// The first observation of each row of the batch that waits, if one does.
    fn take(&self) -> Option<Vec<u64>> {
        let batch = self.learner.try_next().unwrap()?;
        let per_row = if self.steps == 0 { 1 } else { self.steps + 1 };
        Some(batch.slice(self.column).iter().step_by(per_row).copied().collect())
    }

    fn drain(&self) -> Vec<u64> {
        std::iter::from_fn(|| self.take()).flatten().collect()
    }

    fn counts(&self) -> (u64, u64, u64) {
        let metrics = self.feed.metrics();
        (metrics.steps, metrics.rows, metrics.dropped_rows)
    }
}

fn is_full(result: Result<()>) -> bool {
    match result {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            assert!(error.to_string().starts_with("the ring is full"), "{error}");
            true
        }
    }
}

#[test]
fn single_steps_fail_before_anything_is_begun() {
    for timeout in [None, Some(Duration::from_millis(30))] {
        let setup = start(0, false, 2, 2, timeout.map_or(WhenFull::Fail, WhenFull::Timeout));
        let mut writer = setup.feed.writer(1).unwrap();
        (0..4).for_each(|value| setup.write(&mut writer, value).unwrap());
        for _ in 0..3 {
            let begun = Instant::now();
            assert_eq!(writer.step().map(drop), Err(StepError::Full { buffers: 2 }));
            assert!(begun.elapsed() >= timeout.unwrap_or_default());
        }
        let held = setup.learner.next_batch().unwrap();
        assert!(is_full(setup.write(&mut writer, 99)), "a held batch is no room");
        drop(held);
        setup.write(&mut writer, 4).unwrap();
        setup.write(&mut writer, 5).unwrap();
        assert!(is_full(setup.write(&mut writer, 99)));
        assert_eq!(setup.drain(), [2, 3, 4, 5]);
        assert_eq!(setup.counts(), (6, 6, 0));
    }
}

#[test]
fn single_steps_drop_the_newest() {
    let setup = start(0, false, 2, 2, WhenFull::DropNewest);
    let mut writer = setup.feed.writer(1).unwrap();
    (0..7).for_each(|value| setup.write(&mut writer, value).unwrap());
    assert_eq!(setup.counts(), (7, 4, 3));
    assert_eq!(setup.drain(), [0, 1, 2, 3]);
    // A step that found no room when it began, but does when it is committed, is kept.
    (7..11).for_each(|value| setup.write(&mut writer, value).unwrap());
    let mut step = writer.step().unwrap();
    step.put(setup.obs, &[11]).unwrap();
    assert_eq!(setup.take().unwrap(), [7, 8]);
    step.commit().unwrap();
    setup.write(&mut writer, 12).unwrap();
    setup.write(&mut writer, 13).unwrap();
    assert_eq!(setup.drain(), [9, 10, 11, 12]);
    assert_eq!(setup.counts(), (14, 10, 4));
}

/// Lanes of one step are samples of their own: whole rows go in or are dropped.
#[test]
fn wide_single_steps() {
    let setup = start(0, false, 3, 2, WhenFull::Fail);
    let mut writer = setup.feed.writer(4).unwrap();
    setup.write(&mut writer, 0).unwrap(); // one batch, and one row of the next
    for _ in 0..3 {
        assert_eq!(writer.step().map(drop), Err(StepError::Full { buffers: 2 }), "two rows are not four");
    }
    assert_eq!(setup.take().unwrap(), [0, 1, 2]);
    setup.write(&mut writer, 1).unwrap();
    assert_eq!(setup.drain(), [3, 4, 5]);
    assert_eq!(setup.counts(), (8, 6, 0));
    let setup = start(0, false, 3, 2, WhenFull::DropNewest);
    let mut writer = setup.feed.writer(4).unwrap();
    (0..3).for_each(|value| setup.write(&mut writer, value).unwrap());
    assert_eq!(setup.drain(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(setup.counts(), (12, 6, 6));
    // Wider than the whole ring: what fits goes in, and the error counts the rest.
    for when_full in [WhenFull::Fail, WhenFull::Timeout(Duration::from_millis(5))] {
        let setup = start(0, false, 2, 2, when_full);
        let mut writer = setup.feed.writer(7).unwrap();
        let error = setup.write(&mut writer, 0).unwrap_err();
        assert!(error.to_string().starts_with("the ring is full: 3 whole samples were dropped"), "{error}");
        assert!(is_full(setup.write(&mut writer, 1)));
        assert_eq!(setup.counts(), (7, 4, 3));
        assert_eq!(setup.drain(), [0, 1, 2, 3]);
    }
}

#[test]
fn unrolls_fail_before_anything_is_begun() {
    for timeout in [None, Some(Duration::from_millis(20))] {
        let setup = start(2, false, 2, 1, timeout.map_or(WhenFull::Fail, WhenFull::Timeout));
        let mut writer = setup.feed.writer(1).unwrap();
        // Two unrolls fill the ring with the fifth step; the third is complete but for its last observation.
        (0..6).for_each(|value| setup.write(&mut writer, value).unwrap());
        for _ in 0..3 {
            let begun = Instant::now();
            assert_eq!(writer.step().map(drop), Err(StepError::Full { buffers: 1 }));
            assert!(begun.elapsed() >= timeout.unwrap_or_default());
        }
        assert_eq!(setup.take().unwrap(), [0, 2]);
        (6..10).for_each(|value| setup.write(&mut writer, value).unwrap());
        assert!(is_full(setup.write(&mut writer, 99)));
        assert_eq!(setup.drain(), [4, 6]);
        assert_eq!(setup.counts(), (10, 4, 0));
    }
}

#[test]
fn unrolls_drop_the_newest_whole() {
    let setup = start(2, false, 2, 1, WhenFull::DropNewest);
    let mut writer = setup.feed.writer(1).unwrap();
    (0..11).for_each(|value| setup.write(&mut writer, value).unwrap());
    // Five are complete, two fit.
    assert_eq!(setup.counts(), (11, 2, 3));
    assert_eq!(setup.drain(), [0, 2]);
    (11..15).for_each(|value| setup.write(&mut writer, value).unwrap());
    assert_eq!(setup.drain(), [10, 12]);
    assert_eq!(setup.counts(), (15, 4, 3));
    drop(writer);
    assert_eq!(setup.feed.metrics().unfinished_steps, 1);
    assert_eq!(15, 2 * (4 + 3) + 1);
}

/// Several lanes are due at once: those that fit go in, lowest first, and the error names how many did not.
#[test]
fn wide_unrolls() {
    let setup = start(1, false, 2, 2, WhenFull::Fail);
    let mut writer = setup.feed.writer(7).unwrap();
    setup.write(&mut writer, 0).unwrap();
    let error = setup.write(&mut writer, 1).unwrap_err();
    assert!(error.to_string().contains("3 whole samples were dropped"), "{error}");
    assert_eq!(writer.step().map(drop), Err(StepError::Full { buffers: 2 }));
    assert_eq!(setup.drain(), [0, 1, 2, 3]);
    // Asked by `policy` it is its error, the step stays open, and goes on.
    let weights = Weights::new(());
    let mut step = writer.step().unwrap();
    step.put(setup.obs, &[14, 15, 16, 17, 18, 19, 20]).unwrap();
    assert_eq!(step.policy(&weights).map(|_| ()), Err(PolicyError::Full { dropped_rows: 3 }));
    step.policy(&weights).unwrap();
    step.commit().unwrap();
    assert_eq!(setup.drain(), [7, 8, 9, 10]);
    assert_eq!(setup.counts(), (21, 8, 6));
}

/// An episode's end hands its unroll over with the same commit; the step counts, whatever becomes of the unroll.
#[test]
fn unrolls_that_an_end_completes() {
    for when_full in [WhenFull::Fail, WhenFull::Timeout(Duration::from_millis(5)), WhenFull::DropNewest] {
        let setup = start(4, true, 1, 1, when_full);
        let mut writer = setup.feed.writer(2).unwrap();
        for value in 0..3 {
            let mut step = writer.step().unwrap();
            step.put(setup.obs, &[2 * value, 2 * value + 1]).unwrap();
            step.end(0, End::Terminated);
            step.end(1, End::Truncated);
            let result = step.commit();
            let dropped_rows = if value == 0 { 1 } else { 2 };
            match when_full {
                WhenFull::DropNewest => result.unwrap(),
                _ => assert_eq!(result, Err(CommitError::Full { dropped_rows })),
            }
        }
        assert_eq!(setup.counts(), (6, 1, 5));
        assert_eq!(setup.feed.metrics().episodes, 6, "episodes are counted all the same");
        assert_eq!(setup.drain(), [0]);
    }
}

/// `try_step` and `step_timeout` hold whatever the feed does otherwise.
#[test]
fn the_verb_decides_over_the_feed() {
    let _watchdog = Watchdog::new("try_step and step_timeout", Duration::from_secs(180));
    for when_full in [WhenFull::Block, WhenFull::DropNewest, WhenFull::Fail, WhenFull::Timeout(Duration::MAX)] {
        for steps in [0, 2] {
            let setup = start(steps, false, 1, 1, when_full);
            let mut writer = setup.feed.writer(1).unwrap();
            // Fills the ring; an unroll is due with the next step.
            (0..if steps == 0 { 1 } else { 4 }).for_each(|value| setup.write(&mut writer, value).unwrap());
            assert_eq!(writer.try_step().map(drop), Err(StepError::Full { buffers: 1 }), "{when_full:?}");
            let begun = Instant::now();
            let patience = Duration::from_millis(20);
            assert_eq!(writer.step_timeout(patience).map(drop), Err(StepError::Full { buffers: 1 }));
            assert!(begun.elapsed() >= patience);
            thread::scope(|scope| {
                let waits = scope.spawn(|| writer.step_timeout(Duration::MAX).map(drop));
                thread::sleep(Duration::from_millis(20));
                assert_eq!(setup.drain().len(), 1);
                waits.join().unwrap().unwrap();
            });
            drop(writer.try_step().unwrap());
            assert_eq!(setup.counts().2, 0, "nothing was dropped");
        }
    }
}

/// In lockstep `try_step` fails where a single step has no row yet.
#[test]
fn try_step_in_lockstep() {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let feed = Feed::builder(Sample::step(step)).batch(1).buffers(1).lockstep(1).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    let mut step = writer.try_step().unwrap();
    step.view_mut(obs).fill(1);
    step.commit().unwrap();
    assert_eq!(writer.try_step().map(drop), Err(StepError::Full { buffers: 1 }));
    assert_eq!(writer.step_timeout(Duration::from_millis(5)).map(drop), Err(StepError::Full { buffers: 1 }));
    drop(learner.next_batch().unwrap());
    drop(writer.try_step().unwrap());
}

/// `Block` is what it says: the writer waits, and goes on when a batch comes home.
#[test]
fn a_full_ring_blocks_by_default() {
    let _watchdog = Watchdog::new("a writer that blocks", Duration::from_secs(180));
    let setup = start(0, false, 1, 2, WhenFull::default());
    let mut writer = setup.feed.writer(1).unwrap();
    thread::scope(|scope| {
        let (setup, writer) = (&setup, &mut writer);
        scope.spawn(move || (0..50).for_each(|value| setup.write(writer, value).unwrap()));
        let mut seen = Vec::new();
        while seen.len() < 50 {
            thread::sleep(Duration::from_micros(300));
            seen.extend(setup.take().into_iter().flatten());
        }
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
    });
    assert!(setup.feed.metrics().writer_blocked > Duration::ZERO);
}
