//! A learner that holds every batch is told so, with both numbers: `try_next` at once, the others after a second in
//! which nothing came home.

mod common;

use common::Watchdog;
use pinring::*;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

fn start(buffers: usize) -> (Feed, Learner, Leaf<u8>) {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let feed = Feed::builder(Sample::step(step)).batch(1).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    (feed, learner, obs)
}

fn write(writer: &mut Writer, obs: Leaf<u8>) {
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(1);
    step.commit().unwrap();
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

#[test]
fn every_verb_says_so_with_both_numbers() {
    let _watchdog = Watchdog::new("all batches held", Duration::from_secs(180));
    let (feed, learner, obs) = start(3);
    let mut writer = feed.writer(1).unwrap();
    (0..3).for_each(|_| write(&mut writer, obs));
    let mut held: Vec<Batch> = (0..3).map(|_| learner.next_batch().unwrap()).collect();
    let expected = NextError::AllHeld { held: 3, buffers: 3 };
    let at_once =
        [learner.try_next().err(), Learner::select(&[&learner], Duration::ZERO).err().map(|failed| failed.error)];
    assert_eq!(at_once, [Some(expected.clone()), Some(expected.clone())]);
    let text = expected.to_string();
    assert!(text.contains("all 3 of 3 buffers are held") && text.contains("drop a batch before"), "{text}");
    assert_eq!(Error::from(expected.clone()).kind(), ErrorKind::Full);
    thread::scope(|scope| {
        type Wait<'a> = (&'a str, Duration, Box<dyn FnOnce() -> Option<NextError> + Send + 'a>);
        let waits: [Wait; 6] = [
            ("next_batch", SECOND, Box::new(|| learner.next_batch().err())),
            ("next_timeout", SECOND, Box::new(|| learner.next_timeout(Duration::MAX).err())),
            ("short next_timeout", SECOND / 20, Box::new(|| learner.next_timeout(SECOND / 20).err())),
            ("next_async", SECOND, Box::new(|| block_on(learner.next_async()).err())),
            (
                "select",
                SECOND,
                Box::new(|| Learner::select(&[&learner], Duration::MAX).err().map(|failed| failed.error)),
            ),
            (
                "short select",
                SECOND / 20,
                Box::new(|| Learner::select(&[&learner], SECOND / 20).err().map(|failed| failed.error)),
            ),
        ];
        for (verb, least, wait) in waits {
            let expected = expected.clone();
            scope.spawn(move || {
                let begun = Instant::now();
                assert_eq!(wait(), Some(expected), "{verb}");
                assert!(begun.elapsed() >= least, "{verb} was too quick: {:?}", begun.elapsed());
            });
        }
    });
    // One comes home, and all goes on.
    drop(held.remove(1));
    assert_eq!(learner.try_next().map(|batch| batch.map(drop)), Ok(None));
    write(&mut writer, obs);
    assert_eq!(learner.next_batch().unwrap().sequence_number(), 3);
    // Held batches do not hide the end.
    let held = [held.pop(), held.pop()];
    drop(writer);
    assert_eq!(learner.next_batch().err(), Some(NextError::Ended));
    drop(held);
}

/// A batch that comes home within the second is enough, by whatever verb one waits.
#[test]
fn a_late_drop_is_in_time() {
    let _watchdog = Watchdog::new("a late drop", Duration::from_secs(180));
    thread::scope(|scope| {
        for verb in 0..3 {
            scope.spawn(move || {
                let (feed, learner, obs) = start(1);
                let mut writer = feed.writer(1).unwrap();
                write(&mut writer, obs);
                let held = learner.next_batch().unwrap();
                thread::scope(|scope| {
                    scope.spawn(move || {
                        thread::sleep(SECOND / 2);
                        drop(held); // a framework's queue gives back late
                        write(&mut writer, obs);
                    });
                    let batch = match verb {
                        0 => learner.next_batch(),
                        1 => block_on(learner.next_async()),
                        _ => Learner::select(&[&learner], Duration::MAX)
                            .map(|found| found.unwrap().1)
                            .map_err(|failed| failed.error),
                    };
                    assert_eq!(batch.unwrap().sequence_number(), 1, "verb {verb}");
                });
            });
        }
    });
}

/// Two threads share the learner of a ring of one buffer. While one has the batch, all are held; but the other, who
/// waits longer than a second in all, waits for a batch that is on its way, and gets it.
#[test]
fn a_second_is_counted_from_when_all_were_held() {
    let _watchdog = Watchdog::new("a shared learner", Duration::from_secs(180));
    thread::scope(|scope| {
        for verb in 0..3 {
            scope.spawn(move || {
                let (feed, learner, obs) = start(1);
                let mut writer = feed.writer(1).unwrap();
                thread::scope(|scope| {
                    let learner = &learner;
                    let second = scope.spawn(move || {
                        // The batch is there after 0.7 s, and is taken away before this thread's eyes.
                        let begun = Instant::now();
                        let batch = match verb {
                            0 => learner.next_batch(),
                            1 => block_on(learner.next_async()),
                            _ => Learner::select(&[learner], Duration::MAX)
                                .map(|found| found.unwrap().1)
                                .map_err(|failed| failed.error),
                        };
                        (batch.map(|batch| batch.sequence_number()), begun.elapsed())
                    });
                    thread::sleep(SECOND * 7 / 10);
                    // Taken by whoever is quicker; if that was the waiting thread, it was never a question of `AllHeld`.
                    write(&mut writer, obs);
                    let first = learner.try_next();
                    if let Ok(Some(batch)) = first {
                        thread::sleep(SECOND * 6 / 10);
                        drop(batch);
                        write(&mut writer, obs);
                    }
                    let (got, waited) = second.join().unwrap();
                    assert!(got.is_ok(), "verb {verb}: {got:?} after {waited:?}");
                });
            });
        }
    });
}
