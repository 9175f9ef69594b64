//! `Learner::select`: whichever feed has a batch, the one that waited longest first, until all have ended.

mod common;

use common::Watchdog;
use pinring::*;
use std::thread;
use std::time::{Duration, Instant};

struct One {
    feed: Feed,
    learner: Learner,
    obs: Leaf<u64>,
    column: Column<u64>,
}

fn start(buffers: usize) -> One {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(1).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    One { feed, learner, obs, column }
}

fn write(writer: &mut Writer, obs: Leaf<u64>, value: u64) {
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(value);
    step.commit().unwrap();
}

#[test]
fn the_batch_that_waited_longest_comes_first() {
    let feeds = [start(8), start(8), start(8)];
    let learners = [&feeds[0].learner, &feeds[1].learner, &feeds[2].learner];
    let mut writers: Vec<Writer> = feeds.iter().map(|one| one.feed.writer(1).unwrap()).collect();
    let order = [2, 0, 0, 1, 2, 1, 0, 2];
    for (value, &index) in order.iter().enumerate() {
        write(&mut writers[index], feeds[index].obs, value as u64);
        thread::sleep(Duration::from_millis(1)); // so that no two are of the same instant
    }
    for (value, &expected) in order.iter().enumerate() {
        let (index, batch) = Learner::select(&learners, Duration::ZERO).unwrap().unwrap();
        assert_eq!((index, batch.slice(feeds[index].column)), (expected, &[value as u64][..]));
    }
    let begun = Instant::now();
    assert!(Learner::select(&learners, Duration::from_millis(30)).unwrap().is_none());
    assert!(begun.elapsed() >= Duration::from_millis(30));
    // The first argument is not preferred, and neither is the last.
    let turned = [&feeds[2].learner, &feeds[0].learner];
    write(&mut writers[0], feeds[0].obs, 7);
    assert_eq!(Learner::select(&turned, Duration::ZERO).unwrap().unwrap().0, 1);
}

/// A fast feed does not starve a slow one, and each batch is had exactly once.
#[test]
fn a_fast_feed_does_not_starve_a_slow_one() {
    let _watchdog = Watchdog::new("select over a fast and a slow feed", Duration::from_secs(180));
    let feeds = [start(4), start(4)];
    let learners = [&feeds[0].learner, &feeds[1].learner];
    let mut fast = feeds[0].feed.writer(1).unwrap();
    let mut slow = feeds[1].feed.writer(1).unwrap();
    let (fast_obs, slow_obs) = (feeds[0].obs, feeds[1].obs);
    thread::scope(|scope| {
        scope.spawn(move || (0..4_000).for_each(|value| write(&mut fast, fast_obs, value)));
        scope.spawn(move || {
            for value in 0..20 {
                thread::sleep(Duration::from_millis(1));
                write(&mut slow, slow_obs, value);
            }
        });
        let (mut next, mut behind) = ([0; 2], 0);
        loop {
            let (index, batch) = match Learner::select(&learners, Duration::MAX) {
                Ok(found) => found.expect("it waits for ever"),
                Err(error) => {
                    assert_eq!(error.error, NextError::Ended);
                    break;
                }
            };
            assert_eq!(batch.slice(feeds[index].column), [next[index]]);
            next[index] += 1;
            // While a batch of the slow feed waits, at most those of the fast one that were there before may pass it.
            let waiting = feeds[1].feed.metrics().batches_waiting > 0;
            behind = if waiting && index == 0 { behind + 1 } else { 0 };
            assert!(behind <= 8, "the slow feed's batch was passed over {behind} times");
        }
        assert_eq!(next, [4_000, 20]);
    });
}

#[test]
fn feeds_that_ended_are_passed_over_until_all_have() {
    let _watchdog = Watchdog::new("select and ends", Duration::from_secs(180));
    let feeds = [start(2), start(2)];
    let learners = [&feeds[0].learner, &feeds[1].learner];
    let mut writers: Vec<Writer> = feeds.iter().map(|one| one.feed.writer(1).unwrap()).collect();
    write(&mut writers[0], feeds[0].obs, 1);
    drop(writers.remove(0)); // ended, with one batch to take
    assert_eq!(Learner::select(&learners, Duration::MAX).unwrap().unwrap().0, 0);
    assert!(Learner::select(&learners, Duration::from_millis(10)).unwrap().is_none(), "the other goes on");
    thread::scope(|scope| {
        let waits = scope.spawn(|| Learner::select(&learners, Duration::MAX).map(|found| found.unwrap().0));
        thread::sleep(Duration::from_millis(10));
        write(&mut writers[0], feeds[1].obs, 2);
        assert_eq!(waits.join().unwrap(), Ok(1), "woken although the other has ended");
        let waits = scope.spawn(|| Learner::select(&learners, Duration::MAX).map(drop));
        thread::sleep(Duration::from_millis(10));
        writers.clear();
        assert_eq!(waits.join().unwrap(), Err(SelectError { feed: 1, error: NextError::Ended }));
    });
    assert_eq!(Learner::select(&[], Duration::MAX).map(drop), Err(SelectError { feed: 0, error: NextError::Ended }));
}

/// A feed that was stopped is an error, and not a reason to wait for the others.
#[test]
fn a_feed_that_failed_is_told() {
    let feeds = [start(2), start(2)];
    let learners = [&feeds[0].learner, &feeds[1].learner];
    let _writers: Vec<Writer> = feeds.iter().map(|one| one.feed.writer(1).unwrap()).collect();
    feeds[1].feed.stop(Duration::from_secs(10)).unwrap();
    let error = Learner::select(&learners, Duration::MAX).map(drop);
    assert_eq!(error, Err(SelectError { feed: 1, error: NextError::Closed(Closed::Stopped) }));
}

/// Where one feed's batches are all held, the others go on.
#[test]
fn a_feed_whose_batches_are_all_held_does_not_stop_the_others() {
    let feeds = [start(1), start(1)];
    let learners = [&feeds[0].learner, &feeds[1].learner];
    let mut writers: Vec<Writer> = feeds.iter().map(|one| one.feed.writer(1).unwrap()).collect();
    write(&mut writers[0], feeds[0].obs, 1);
    let held = Learner::select(&learners, Duration::MAX).unwrap().unwrap();
    assert_eq!(held.0, 0);
    assert!(Learner::select(&learners, Duration::from_millis(10)).unwrap().is_none());
    write(&mut writers[1], feeds[1].obs, 2);
    let other = Learner::select(&learners, Duration::ZERO).unwrap().unwrap();
    assert_eq!(other.0, 1);
    let all = Learner::select(&learners, Duration::ZERO).map(drop);
    assert_eq!(all, Err(SelectError { feed: 0, error: NextError::AllHeld { held: 1, buffers: 1 } }));
}

/// However many batches the others have: a stopped feed is told at the next call.
#[test]
fn a_stopped_feed_is_told_while_another_has_batches() {
    let feeds = [start(4), start(4)];
    let learners = [&feeds[0].learner, &feeds[1].learner];
    let mut writer = feeds[0].feed.writer(1).unwrap();
    (0..3).for_each(|value| write(&mut writer, feeds[0].obs, value));
    feeds[1].feed.stop(Duration::from_secs(10)).unwrap();
    let told = Learner::select(&learners, Duration::from_secs(10));
    assert_eq!(told.map(drop), Err(SelectError { feed: 1, error: NextError::Closed(Closed::Stopped) }));
    assert_eq!(Learner::select(&learners[..1], Duration::ZERO).unwrap().unwrap().0, 0, "nothing of the other was lost");
}
