//! Every wait notices that the other side is gone, and says who.

mod common;

use common::Watchdog;
use pinring::*;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Step,
    Unroll,
    StepLockstep,
    UnrollLockstep,
}
const KINDS: [Kind; 4] = [Kind::Step, Kind::Unroll, Kind::StepLockstep, Kind::UnrollLockstep];

fn start(kind: Kind, lag: Option<(&Weights<()>, u64)>) -> (Feed, Leaf<u8>) {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let sample = match kind {
        Kind::Step | Kind::StepLockstep => Sample::step(step),
        _ => Sample::unroll(step, 2),
    };
    let mut builder = Feed::builder(sample).batch(2).buffers(2);
    if let Kind::StepLockstep | Kind::UnrollLockstep = kind {
        builder = builder.lockstep(2);
    }
    if let Some((weights, lag)) = lag {
        builder = builder.max_policy_lag(weights, lag);
    }
    (builder.start().unwrap(), obs)
}

fn write(writer: &mut Writer, obs: Leaf<u8>, weights: &Weights<()>) -> Result<()> {
    let mut step = writer.step()?;
    step.view_mut(obs).fill(1);
    step.policy(weights)?;
    Ok(step.commit()?)
}

/// Writers that are parked before a full ring, in `step` or in `commit`, or at the lag gate.
#[test]
fn writers_notice_that_the_learner_is_gone() {
    for kind in KINDS {
        for lag in [None, Some(0)] {
            for stop in [false, true] {
                let _watchdog = Watchdog::new("writers without a learner", Duration::from_secs(180));
                let weights = Weights::new(());
                let (feed, obs) = start(kind, lag.map(|lag| (&weights, lag)));
                let learner = feed.learner().unwrap();
                let threads: Vec<_> = (0..2)
                    .map(|_| {
                        let (mut writer, weights) = (feed.writer(1).unwrap(), weights.clone());
                        thread::spawn(move || {
                            loop {
                                if let Err(error) = write(&mut writer, obs, &weights) {
                                    return error;
                                }
                            }
                        })
                    })
                    .collect();
                // They are parked once nothing moves.
                let mut steps = u64::MAX;
                while feed.metrics().steps != steps {
                    steps = feed.metrics().steps;
                    thread::sleep(Duration::from_millis(10));
                }
                let closed = if stop {
                    feed.stop(Duration::from_secs(10)).unwrap();
                    Closed::Stopped
                } else {
                    drop(learner);
                    Closed::LearnerGone
                };
                for thread in threads {
                    let error = thread.join().unwrap();
                    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Stopped, closed.to_string()));
                }
                assert_eq!(feed.closed(), Some(closed));
                assert_eq!(feed.writer(1).unwrap_err().kind(), ErrorKind::Stopped);
                assert_eq!(feed.intake().unwrap_err().kind(), ErrorKind::Stopped);
            }
        }
    }
}

/// A writer with a step open when the learner goes: each of its verbs says so, and nothing breaks.
#[test]
fn an_open_step_notices_too() {
    for kind in KINDS {
        let weights = Weights::new(());
        let (feed, obs) = start(kind, None);
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(2).unwrap();
        // One batch of single steps; of unrolls, the next step completes one.
        for _ in 0..if matches!(kind, Kind::Step | Kind::StepLockstep) { 1 } else { 2 } {
            write(&mut writer, obs, &weights).unwrap();
        }
        let mut step = writer.step().unwrap();
        step.view_mut(obs).fill(7);
        drop(learner);
        assert_eq!(step.view(obs).sum(), 14, "its bytes are still there");
        if kind == Kind::Unroll || kind == Kind::UnrollLockstep {
            assert_eq!(step.policy(&weights).map(|_| ()), Err(PolicyError::Closed(Closed::LearnerGone)));
        }
        let committed = step.commit();
        if kind == Kind::Unroll {
            // Its unroll went with `policy`; the step itself begins one in the lane buffer, which asks nobody yet.
            committed.unwrap();
        } else {
            assert_eq!(committed, Err(CommitError::Closed(Closed::LearnerGone)), "{kind:?}");
        }
        assert_eq!(writer.step().map(drop), Err(StepError::Closed(Closed::LearnerGone)));
        assert_eq!(writer.try_step().map(drop), Err(StepError::Closed(Closed::LearnerGone)));
        assert_eq!(writer.step_timeout(Duration::MAX).map(drop), Err(StepError::Closed(Closed::LearnerGone)));
        drop(writer);
        let metrics = feed.metrics();
        let of_rows = metrics.dropped_rows * if matches!(kind, Kind::Unroll | Kind::UnrollLockstep) { 2 } else { 1 };
        assert_eq!(metrics.steps, of_rows + metrics.unfinished_steps, "{kind:?} {metrics:?}");
        let report = feed.stop(Duration::from_secs(10)).unwrap();
        assert_eq!(report.still_out, 0);
    }
}

struct Unpark(Thread);
impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

type Take = fn(&Learner) -> Option<NextError>;
const TAKES: [(&str, Take); 5] = [
    ("next_batch", |learner| learner.next_batch().err()),
    ("next_timeout", |learner| learner.next_timeout(Duration::MAX).err()),
    ("next_async", |learner| block_on(learner.next_async()).err()),
    ("select", |learner| Learner::select(&[learner], Duration::MAX).err().map(|failed| failed.error)),
    ("iter", |learner| match learner.iter().next() {
        None => Some(NextError::Ended),
        Some(result) => result.err(),
    }),
];

/// A learner that waits, by every verb, when the last writer goes, when the last intake handle goes, and when the feed is
/// stopped or dropped.
#[test]
fn the_learner_notices_that_the_writers_are_gone() {
    for (verb, take) in TAKES {
        for ending in 0..4 {
            let _watchdog = Watchdog::new("a learner without writers", Duration::from_secs(180));
            let (feed, _) = start(Kind::Step, None);
            let (learner, writer, intake) = (feed.learner().unwrap(), feed.writer(1).unwrap(), feed.intake().unwrap());
            let waits = thread::spawn(move || take(&learner));
            thread::sleep(Duration::from_millis(10));
            let expected = match ending {
                0 => {
                    drop(intake);
                    drop(writer);
                    NextError::Ended
                }
                1 => {
                    drop(writer);
                    drop(intake.clone());
                    thread::sleep(Duration::from_millis(5));
                    assert!(!waits.is_finished(), "an intake handle can still make writers");
                    drop(intake);
                    NextError::Ended
                }
                2 => {
                    feed.stop(Duration::from_secs(10)).unwrap();
                    NextError::Closed(Closed::Stopped)
                }
                _ => {
                    drop(feed);
                    NextError::Closed(Closed::Stopped)
                }
            };
            assert_eq!(waits.join().unwrap(), Some(expected), "{verb}, ending {ending}");
        }
    }
}

/// What was committed before the end is delivered first; then the end is said, as often as it is asked.
#[test]
fn the_end_comes_behind_the_last_row() {
    for (verb, take) in TAKES {
        let (feed, obs) = start(Kind::Step, None);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for _ in 0..3 {
            write(&mut writer, obs, &Weights::new(())).unwrap();
        }
        drop(writer);
        assert_eq!(learner.next_batch().map(|batch| batch.rows()), Ok(2));
        assert_eq!(learner.try_next().map(|batch| batch.map(|batch| batch.rows())), Ok(Some(1)));
        for _ in 0..3 {
            assert_eq!(take(&learner), Some(NextError::Ended), "{verb}");
        }
        assert_eq!(feed.closed(), Some(Closed::Ended));
    }
}

/// A learner that is taken late finds what is there, also when the writers are gone already.
#[test]
fn a_learner_taken_behind_the_end() {
    let (feed, obs) = start(Kind::Step, None);
    let mut writer = feed.writer(1).unwrap();
    (0..2).for_each(|_| write(&mut writer, obs, &Weights::new(())).unwrap());
    drop(writer);
    let learner = feed.learner().unwrap();
    assert_eq!(learner.iter().count(), 1);
    let error = feed.learner().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert_eq!(feed.writer(1).unwrap_err().kind(), ErrorKind::Ended);
}

/// A stop while a batch is held returns at once; the handle stays readable, and its later drop is safe.
#[test]
fn a_stop_does_not_wait_for_a_held_batch() {
    let _watchdog = Watchdog::new("a stop with a batch out", Duration::from_secs(180));
    let (feed, obs) = start(Kind::Step, None);
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    (0..2).for_each(|_| write(&mut writer, obs, &Weights::new(())).unwrap());
    let batch = learner.next_batch().unwrap();
    let report = feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!((report.still_out, report.dropped_rows()), (1, 0));
    assert_eq!(batch.lanes().collect::<Vec<_>>(), [0, 0]);
    drop((feed, learner));
    assert_eq!(batch.rows(), 2);
    drop(batch);
    assert_eq!(writer.step().map(drop), Err(StepError::Closed(Closed::Stopped)));
}
