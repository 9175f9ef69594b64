//! Lockstep needs every lane: who may sit where, and what goes out when lanes are missing or leave.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use pinring::*;
use std::time::Duration;

struct Setup {
    feed: Feed,
    learner: Learner,
    obs: Leaf<u8>,
    column: Column<u8>,
}

fn start(steps: usize, time_major: bool, batch: usize, buffers: usize, lanes: usize) -> Result<Setup> {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
    if time_major {
        sample.time_major();
    }
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(batch).buffers(buffers).lockstep(lanes).start()?;
    let learner = feed.learner()?;
    Ok(Setup { feed, learner, obs, column })
}

fn write(writer: &mut Writer, obs: Leaf<u8>, value: u8) -> Result<()> {
    let mut step = writer.step()?;
    step.view_mut(obs).fill(value);
    Ok(step.commit()?)
}

#[test]
fn lanes_that_do_not_divide_the_batch_are_refused_with_both_numbers() {
    for (batch, lanes) in [(512, 48), (4, 8), (7, 2)] {
        let error = start(1, false, batch, 2, lanes).err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(text.contains(&batch.to_string()) && text.contains(&lanes.to_string()), "{text}");
    }
}

#[test]
fn what_lockstep_cannot_do_is_refused_at_the_start() {
    let sample = || {
        let mut step = Step::new();
        step.observation::<u8>("obs", &[]);
        Sample::unroll(step, 2)
    };
    let error = |builder: FeedBuilder| builder.start().expect_err("refused").to_string();
    for when_full in [WhenFull::Fail, WhenFull::DropNewest, WhenFull::Timeout(Duration::from_millis(1))] {
        let text = error(Feed::builder(sample()).batch(2).lockstep(2).when_full(when_full));
        assert!(text.contains("must wait when the ring is full"), "{text}");
    }
    let mut within = sample();
    within.within_episode(true);
    assert!(error(Feed::builder(within).batch(2).lockstep(2)).contains("run through episode ends"));
    assert!(error(Feed::builder(sample()).batch(2).lockstep(0)).contains("0 lanes"));
}

#[test]
fn more_lanes_than_seats_are_refused_and_a_lane_cannot_be_abandoned() {
    let Setup { feed, learner: _learner, .. } = start(1, false, 3, 2, 3).unwrap();
    let mut writer = feed.writer(2).unwrap();
    let text = feed.writer(2).unwrap_err().to_string();
    assert!(text.contains("there is room for 3 lanes, of which 2 are taken"), "{text}");
    let error = writer.abandon(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert_eq!(feed.writer(1).unwrap().lanes(), 2..3);
}

/// A batch that lacks lanes is no batch: at the end nothing of it goes out, and the rows that were complete count as
/// dropped.
#[test]
fn rows_of_lanes_that_nobody_took_are_never_delivered() {
    for steps in [0, 1, 2] {
        let _watchdog = Watchdog::new("lanes that nobody took", Duration::from_secs(180));
        let Setup { feed, learner, obs, .. } = start(steps, false, 8, 3, 4).unwrap();
        let mut writer = feed.writer(2).unwrap();
        for value in 0..5 * steps.max(1) as u8 + 1 {
            write(&mut writer, obs, value).unwrap();
        }
        drop(writer);
        assert_eq!(learner.next_batch().map(|batch| batch.rows()), Err(NextError::Ended));
        let metrics = feed.metrics();
        assert_eq!(metrics.rows, 0);
        let row_steps = steps.max(1) as u64 * metrics.dropped_rows + metrics.unfinished_steps;
        assert_eq!(metrics.steps, row_steps, "{metrics:?}");
        assert_eq!(metrics.free_slots, 3);
    }
}

/// The rows of a lane that is gone cannot be taken up again by a new writer, which would begin at its step 0.
#[test]
fn a_lane_that_is_gone_stays_gone() {
    for steps in [0, 2] {
        let _watchdog = Watchdog::new("a lane that is gone", Duration::from_secs(180));
        let Setup { feed, learner, obs, .. } = start(steps, false, 2, 4, 2).unwrap();
        let (mut stays, mut leaves) = (feed.writer(1).unwrap(), feed.writer(1).unwrap());
        for value in 0..5 {
            write(&mut stays, obs, value).unwrap();
            write(&mut leaves, obs, value).unwrap();
            if steps == 0 && value > 0 {
                drop(learner.next_batch().unwrap());
            }
        }
        (0..steps.max(1)).for_each(|_| write(&mut leaves, obs, 9).unwrap());
        drop(leaves); // ahead of the other lane: the batch that it completed can still be full
        let error = feed.writer(1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Ended, "{error}");
        assert!(error.to_string().contains("lanes 1..2"), "{error}");
        drop(feed.intake().map(|intake| intake.writer(1).unwrap_err()));
        // Completes its last row. As the first step of an unroll that cannot be, only its observation counts.
        let last = (0..steps.max(1)).map(|_| write(&mut stays, obs, 5)).last().unwrap();
        assert_eq!(last.is_ok(), steps == 0, "{last:?}");
        assert_eq!(stays.step().err(), Some(StepError::Closed(Closed::LaneGone { first: 1, end: 2 })));
        let rows: usize = learner.iter().map(|batch| batch.unwrap().rows()).sum();
        assert_eq!(rows, if steps == 0 { 4 } else { 6 });
    }
}

/// At the end the layers that every lane completed go out as a partial batch, without gaps between its steps.
#[test]
fn whole_layers_of_the_last_batch_go_out() {
    for time_major in [false, true] {
        let _watchdog = Watchdog::new("the last batch in lockstep", Duration::from_secs(180));
        let Setup { feed, learner, obs, column } = start(2, time_major, 6, 2, 2).unwrap(); // three layers
        let (mut ahead, mut behind) = (feed.writer(1).unwrap(), feed.writer(1).unwrap());
        for step in 0..7 {
            write(&mut ahead, obs, 10 + step).unwrap(); // three unrolls, complete
        }
        for step in 0..5 {
            write(&mut behind, obs, 20 + step).unwrap(); // two unrolls, and the beginning of the third
        }
        let mut open = ahead.step().unwrap(); // in the slot that is about to be closed
        open.view_mut(obs).fill(99);
        drop(behind);
        let deadline = learner.next_timeout(Duration::from_millis(50)).unwrap();
        assert!(deadline.is_none(), "the slot is not sealed while a step is written there");
        assert!(matches!(open.commit(), Err(CommitError::Closed(Closed::LaneGone { first: 1, end: 2 }))));
        let batch = learner.next_batch().unwrap();
        assert_eq!(batch.rows(), 4);
        assert_eq!(batch.lanes().collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(batch.first_steps().collect::<Vec<_>>(), [0, 0, 2, 2]);
        let view = batch.view(column);
        assert_eq!(view.shape(), if time_major { [3, 4] } else { [4, 3] });
        let rows = if time_major { view.reversed_axes() } else { view };
        let expected = [[10, 11, 12], [20, 21, 22], [12, 13, 14], [22, 23, 24]];
        assert_eq!(rows, ndarray::arr2(&expected).into_dyn());
        assert_eq!(learner.next_batch().err(), Some(NextError::Ended));
        drop(ahead);
        let metrics = feed.metrics();
        assert_eq!((metrics.rows, metrics.dropped_rows), (4, 1), "the third unroll of the lane that was ahead");
        assert_eq!(metrics.steps, 2 * (4 + 1) + metrics.unfinished_steps);
    }
}
