//! `next_async` under an executor written here: futures that are polled for nothing, moved between wakers, dropped in the
//! middle of their wait, and several at once.

mod common;

use common::Watchdog;
use pinring::*;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

struct Unpark {
    thread: Thread,
    wakes: AtomicUsize,
}

impl Unpark {
    fn here() -> Arc<Unpark> {
        Arc::new(Unpark { thread: thread::current(), wakes: AtomicUsize::new(0) })
    }
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

/// Polls all of them when any was woken, until each is ready.
fn run_all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let waker = Waker::from(Unpark::here());
    let mut context = Context::from_waker(&waker);
    let mut done = Vec::new();
    while !futures.is_empty() {
        let mut index = 0;
        let before = futures.len();
        while index < futures.len() {
            match Pin::new(&mut futures[index]).poll(&mut context) {
                Poll::Ready(output) => {
                    done.push(output);
                    drop(futures.swap_remove(index));
                }
                Poll::Pending => index += 1,
            }
        }
        if futures.len() == before {
            thread::park();
        }
    }
    done
}

fn block_on<F: Future>(future: F) -> F::Output {
    let future = pin!(future);
    run_all(vec![future]).pop().expect("one future, one output")
}

fn start(buffers: usize) -> (Feed, Learner, Leaf<u64>, Column<u64>) {
    let mut step = Step::new();
    let obs = step.observation::<u64>("obs", &[]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(2).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    (feed, learner, obs, column)
}

fn write(writer: &mut Writer, obs: Leaf<u64>, value: u64) {
    let mut step = writer.step().unwrap();
    step.view_mut(obs).fill(value);
    step.commit().unwrap();
}

#[test]
fn every_batch_in_order_until_the_end() {
    let _watchdog = Watchdog::new("an async learner", Duration::from_secs(180));
    let (feed, learner, obs, column) = start(2);
    let mut writer = feed.writer(2).unwrap();
    let writing = thread::spawn(move || (0..500).for_each(|value| write(&mut writer, obs, value)));
    let seen = block_on(async {
        let mut seen = Vec::new();
        loop {
            match learner.next_async().await {
                Ok(batch) => seen.extend_from_slice(batch.slice(column)),
                Err(error) => {
                    assert_eq!(error, NextError::Ended);
                    return seen;
                }
            }
        }
    });
    writing.join().unwrap();
    assert!(seen.into_iter().eq((0..500).flat_map(|value| [value; 2])));
}

/// Futures that are dropped in the middle of their wait lose no batch, and leave no waker behind.
#[test]
fn a_future_dropped_while_it_waits_loses_nothing() {
    let _watchdog = Watchdog::new("dropped futures", Duration::from_secs(180));
    let (feed, learner, obs, column) = start(3);
    let mut writer = feed.writer(2).unwrap();
    let unpark = Unpark::here();
    let waker = Waker::from(unpark.clone());
    let mut context = Context::from_waker(&waker);
    for value in 0..50 {
        let before = unpark.wakes.load(Ordering::SeqCst);
        {
            // Waits, and is dropped before the batch comes.
            let mut first = pin!(learner.next_async());
            assert!(first.as_mut().poll(&mut context).is_pending());
        }
        write(&mut writer, obs, value);
        assert_eq!(unpark.wakes.load(Ordering::SeqCst), before, "a future that is gone is not woken");
        drop(learner.try_next().unwrap().unwrap());
        {
            // Is woken for a batch, and dropped before it takes it.
            let mut second = pin!(learner.next_async());
            assert!(second.as_mut().poll(&mut context).is_pending());
            write(&mut writer, obs, value + 1000);
            assert_eq!(unpark.wakes.load(Ordering::SeqCst), before + 1);
        }
        let mut third = pin!(learner.next_async());
        let Poll::Ready(Ok(batch)) = third.as_mut().poll(&mut context) else { panic!("the batch is still there") };
        assert_eq!(batch.slice(column), [value + 1000; 2]);
    }
    // One that was never polled owns nothing.
    drop(learner.next_async());
    assert_eq!(feed.metrics().batches_waiting, 0);
}

/// Several futures of one learner, in one task and beside a blocking thread: each batch goes to exactly one of them.
#[test]
fn several_waits_at_once() {
    let _watchdog = Watchdog::new("several waits", Duration::from_secs(180));
    let (feed, learner, obs, column) = start(8);
    let mut writer = feed.writer(2).unwrap();
    thread::scope(|scope| {
        let learner = &learner;
        let threads: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || learner.iter().map(|batch| batch.unwrap().slice(column)[0]).collect::<Vec<_>>())
            })
            .collect();
        let tasks: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    let mut seen = Vec::new();
                    loop {
                        let some = run_all((0..3).map(|_| learner.next_async()).collect());
                        let ended = some.iter().any(Result::is_err);
                        seen.extend(some.into_iter().flatten().map(|batch| batch.slice(column)[0]));
                        if ended {
                            return seen;
                        }
                    }
                })
            })
            .collect();
        (0..300).for_each(|value| write(&mut writer, obs, value));
        drop(writer);
        let mut seen: Vec<u64> = threads.into_iter().chain(tasks).flat_map(|thread| thread.join().unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..300).collect::<Vec<_>>());
    });
}

/// A task may be polled with another waker each time; the last one is woken.
#[test]
fn the_last_waker_is_woken() {
    let (feed, learner, obs, _) = start(2);
    let mut writer = feed.writer(2).unwrap();
    let (first, second) = (Unpark::here(), Unpark::here());
    let mut future = pin!(learner.next_async());
    for unpark in [&first, &second] {
        let waker = Waker::from(unpark.clone());
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    write(&mut writer, obs, 1);
    assert_eq!((first.wakes.load(Ordering::SeqCst), second.wakes.load(Ordering::SeqCst)), (0, 1));
}

/// A learner that ends with a future outstanding: the stop wakes it with the reason.
#[test]
fn a_stop_wakes_a_future() {
    let _watchdog = Watchdog::new("a future at the stop", Duration::from_secs(180));
    let (feed, learner, _, _) = start(2);
    let waits = thread::spawn(move || block_on(learner.next_async()).err());
    thread::sleep(Duration::from_millis(10));
    feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!(waits.join().unwrap(), Some(NextError::Closed(Closed::Stopped)));
}

/// A waker is the user's code: it may take batches, write steps or stop the feed, whatever thread it is called on.
#[test]
fn a_waker_may_do_anything() {
    struct Stops(Feed);
    impl Wake for Stops {
        fn wake(self: Arc<Self>) {
            let _ = self.0.metrics();
            self.0.stop(Duration::from_secs(10)).unwrap();
        }
    }
    let _watchdog = Watchdog::new("a waker that stops the feed", Duration::from_secs(180));
    let (feed, learner, obs, _) = start(2);
    let mut writer = feed.writer(2).unwrap();
    let waker = Waker::from(Arc::new(Stops(feed)));
    let mut future = pin!(learner.next_async());
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    write(&mut writer, obs, 1); // wakes, on this thread, while it commits
    let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(matches!(poll, Poll::Ready(Err(NextError::Closed(Closed::Stopped)))), "{poll:?}");
}
