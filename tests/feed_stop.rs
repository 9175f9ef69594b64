//! Stops at every moment: every wait ends with the reason, every row is accounted for, and nothing is left.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/life.rs"]
mod life;

use life::{PATIENCE, Small, alone, assert_nothing_is_left, assert_nothing_is_left_with, feed_threads, until};
use pinring::{
    Closed, CommitError, Error, ErrorKind, Feed, FeedBuilder, Leaf, Learner, NextError, PolicyError, Sample, Step,
    StepError, StopReport, Weights, WhenFull, Writer,
};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

// ---- every row is accounted for ------------------------------------------------------------------------------------

alone! {
    fn a_thousand_committed_rows_are_taken_or_counted() {
        let (small, fake) = (Small::new(), life::fake("thousand"));
        for taken in [0, 1, 7, 62] {
            let feed = small.pinned(&fake).batch(16).buffers(70).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            small.write(&mut writer, (0..1000).map(|i| i as f32)).unwrap();
            for _ in 0..taken {
                assert_eq!(learner.next_batch().unwrap().rows(), 16);
            }
            let report = feed.stop(PATIENCE).unwrap();
            assert_eq!((report.partial_rows, report.untaken_rows), (1000 % 16, (62 - taken) * 16));
            assert_eq!(16 * taken + report.dropped_rows(), 1000);
            assert_eq!((report.still_out, report.kept_bytes, report.fault.is_none()), (0, 0, true));
            assert_eq!(feed.metrics().dropped_rows, report.dropped_rows());
            assert_eq!(fake.calls_of("cudaHostUnregister").len(), fake.calls_of("cudaHostRegister").len());
            assert_nothing_is_left_with(&fake);
            assert_eq!(feed.stop(PATIENCE).unwrap(), report);
            assert_eq!(feed.stop(Duration::ZERO).unwrap(), report);
            assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::Stopped));
            assert_eq!(writer.step().unwrap_err(), StepError::Closed(Closed::Stopped));
        }
    }
}

#[test]
fn unrolls_and_lockstep_rows_are_taken_or_counted_too() {
    for lockstep in [false, true] {
        let (builder, leaf) = unrolls(3);
        let builder = builder.batch(4).buffers(8);
        let feed = if lockstep { builder.lockstep(2) } else { builder }.start().unwrap();
        let (mut writer, learner) = (feed.writer(2).unwrap(), feed.learner().unwrap());
        // 31 steps: 10 whole unrolls of each of two lanes, and the step whose observation completes the last of them.
        for _ in 0..31 {
            write(&mut writer, leaf).unwrap();
        }
        let rows = learner.next_batch().unwrap().rows() + learner.next_batch().unwrap().rows();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.untaken_rows, rows), (12, 8), "lockstep {lockstep}: {report}");
        assert_eq!(report.partial_rows, 0);
    }
}

/// Writers at full speed, a learner that takes, and a stop in the midst of it: (committed, taken, dropped).
fn stop_at_speed(batch: usize, writers: usize, lanes: usize, pause: Duration) -> (u64, u64, u64) {
    let small = Small::new();
    let feed = small.builder().batch(batch).buffers(3).start().unwrap();
    let learner = feed.learner().unwrap();
    let writing: Vec<JoinHandle<u64>> = (0..writers)
        .map(|_| {
            let (mut writer, reward) = (feed.writer(lanes).unwrap(), small.reward);
            std::thread::spawn(move || {
                let (values, mut committed) = (vec![1.0; lanes], 0);
                while let Ok(mut step) = writer.step() {
                    step.put(reward, &values).unwrap();
                    committed += u64::from(step.commit().is_ok());
                }
                committed
            })
        })
        .collect();
    let taking = std::thread::spawn(move || {
        let mut taken = 0;
        while let Ok(batch) = learner.next_batch() {
            taken += batch.rows() as u64;
        }
        taken
    });
    std::thread::sleep(pause);
    let report = feed.stop(PATIENCE).unwrap();
    let committed: u64 = writing.into_iter().map(|thread| thread.join().unwrap()).sum();
    (committed * lanes as u64, taking.join().unwrap(), report.dropped_rows())
}

alone! {
    fn a_stop_at_full_speed_loses_no_row_from_the_account() {
        for round in 0..400 {
            let pause = Duration::from_micros(round * 5);
            let (batch, writers, lanes) = [(1, 1, 1), (1, 8, 1), (4, 2, 2), (1, 5, 1)][round as usize % 4];
            let (committed, taken, dropped) = stop_at_speed(batch, writers, lanes, pause);
            assert_eq!(taken + dropped, committed, "round {round}: {taken} taken and {dropped} dropped");
        }
        assert_nothing_is_left();
    }
}

/// To its writer the step was not committed, so the report of the stop does not have it; the counters say what became of it.
#[test]
fn a_commit_that_the_stop_overtakes_counts_as_a_step_whose_row_is_dropped() {
    for lockstep in [false, true] {
        let small = Small::new();
        let builder = if lockstep { small.builder().lockstep(1) } else { small.builder() };
        let feed = builder.start().unwrap();
        let mut writer = feed.writer(1).unwrap();
        let mut step = writer.step().unwrap();
        step.put(small.reward, &[1.0]).unwrap();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.dropped_rows(), report.still_out), (0, 1), "lockstep {lockstep}: {report}");
        assert_eq!(step.commit().unwrap_err(), CommitError::Closed(Closed::Stopped));
        let metrics = feed.metrics();
        assert_eq!((metrics.steps, metrics.dropped_rows), (1, 1), "lockstep {lockstep}");
    }
}

// ---- every wait ends -----------------------------------------------------------------------------------------------

/// Unrolls of `steps` steps with an observation, one to a batch, two buffers.
fn unrolls(steps: usize) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[]);
    (Feed::builder(Sample::unroll(step, steps)).batch(1).buffers(2), leaf)
}

fn write(writer: &mut Writer, leaf: Leaf<f32>) -> Result<(), Error> {
    let values = vec![1.0; writer.lanes().len()];
    let mut step = writer.step()?;
    step.put(leaf, &values)?;
    Ok(step.commit()?)
}

/// Writes until that fails.
fn write_on(mut writer: Writer, leaf: Leaf<f32>) -> JoinHandle<Error> {
    std::thread::spawn(move || {
        loop {
            if let Err(error) = write(&mut writer, leaf) {
                return error;
            }
        }
    })
}

/// Long enough for a thread to be where it waits. Should it not be there yet, it meets the stop a little later.
fn let_them_wait() {
    std::thread::sleep(Duration::from_millis(40));
}

fn assert_stopped(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    assert!(error.to_string().contains("the feed was stopped"), "{error}");
}

alone! {
    fn writers_that_wait_for_room_hear_of_the_stop() {
        let small = Small::new();
        for when_full in [WhenFull::Block, WhenFull::Timeout(Duration::MAX)] {
            let feed = small.builder().when_full(when_full).start().unwrap();
            let writing = [(); 3].map(|()| write_on(feed.writer(1).unwrap(), small.reward));
            until("the ring is full", || feed.metrics().batches_waiting == 2);
            let_them_wait();
            assert!(writing.iter().all(|thread| !thread.is_finished()));
            let report = feed.stop(PATIENCE).unwrap();
            assert_eq!((report.untaken_rows, report.partial_rows), (8, 0));
            writing.into_iter().for_each(|thread| assert_stopped(&thread.join().unwrap()));
        }
        // In lockstep, and in the commit of an unroll.
        for lockstep in [None, Some(2)] {
            let (builder, leaf) = unrolls(2);
            let feed = match lockstep {
                Some(lanes) => builder.batch(lanes).lockstep(lanes),
                None => builder,
            };
            let feed = feed.start().unwrap();
            let writing = [(); 2].map(|()| write_on(feed.writer(1).unwrap(), leaf));
            until("the ring is full", || feed.metrics().batches_waiting == 2);
            let_them_wait();
            assert!(writing.iter().all(|thread| !thread.is_finished()));
            feed.stop(PATIENCE).unwrap();
            writing.into_iter().for_each(|thread| assert_stopped(&thread.join().unwrap()));
        }
        assert_nothing_is_left();
    }
}

alone! {
    fn a_writer_at_the_lag_gate_hears_of_the_stop() {
        for lockstep in [false, true] {
            let weights = Weights::new(0u8);
            let (builder, leaf) = unrolls(1);
            let builder = builder.max_policy_lag(&weights, 1);
            let feed = if lockstep { builder.lockstep(1) } else { builder }.start().unwrap();
            let mut writer = feed.writer(1).unwrap();
            let acting = std::thread::spawn(move || {
                loop {
                    let mut step = writer.step().unwrap();
                    step.put(leaf, &[1.0]).unwrap();
                    match step.policy(&weights) {
                        Ok(_) => step.commit().unwrap(),
                        Err(error) => return error,
                    }
                }
            });
            until("it is as far ahead as it may", || feed.metrics().batches == 2);
            let_them_wait();
            assert!(!acting.is_finished());
            feed.stop(PATIENCE).unwrap();
            assert_eq!(acting.join().unwrap(), PolicyError::Closed(Closed::Stopped));
        }
        assert_nothing_is_left();
    }
}

alone! {
    fn a_learner_hears_of_the_stop_whichever_way_it_waits() {
        let small = Small::new();
        let (feed, other) = (small.builder().start().unwrap(), small.builder().start().unwrap());
        let learners = Arc::new((feed.learner().unwrap(), other.learner().unwrap()));
        let wait = |wait: fn(&Learner, &Learner) -> NextError| {
            let learners = learners.clone();
            std::thread::spawn(move || wait(&learners.0, &learners.1))
        };
        let waiting = [
            wait(|learner, _| learner.next_batch().unwrap_err()),
            wait(|learner, _| learner.next_timeout(Duration::MAX).unwrap_err()),
            wait(|learner, _| learner.iter().next().unwrap().unwrap_err()),
            wait(|learner, _| block_on(learner.next_async()).unwrap_err()),
            wait(|learner, other| Learner::select(&[other, learner], Duration::MAX).unwrap_err().error),
        ];
        let_them_wait();
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        feed.stop(PATIENCE).unwrap();
        for thread in waiting {
            assert_eq!(thread.join().unwrap(), NextError::Closed(Closed::Stopped));
        }
        assert_eq!(learners.1.try_next().map(|batch| batch.is_none()), Ok(true), "the other feed runs on");
        drop(other);
        assert_nothing_is_left();
    }
}

alone! {
    fn a_step_in_the_making_and_a_batch_in_hand_are_no_hindrance() {
        let small = Small::new();
        let feed = small.builder().start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        small.write(&mut writer, [1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let batch = learner.next_batch().unwrap();
        let mut step = writer.step().unwrap();
        step.put(small.reward, &[6.0]).unwrap();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.partial_rows, report.untaken_rows, report.still_out), (1, 0, 2));
        until("the feed's threads have ended", || feed_threads().is_empty());
        drop((feed, learner));
        assert_eq!(step.view(small.reward).as_slice(), Some(&[6.0][..]), "the memory is there");
        assert_eq!(step.commit().unwrap_err(), CommitError::Closed(Closed::Stopped));
        assert_eq!(life::rings().len(), 1);
        assert_eq!(small.values(&batch), [1.0, 2.0, 3.0, 4.0]);
        let shared = batch.share();
        let (bytes, _) = shared.column(small.column);
        drop(shared);
        assert_eq!(bytes.as_ref().len(), 16);
        drop(bytes);
        assert_nothing_is_left();
    }
}

alone! {
    /// A slot with several open steps and the gap of one that was dropped comes home with the last of them, and not before.
    fn the_last_of_a_slots_open_steps_gives_up_the_ring() {
        for commits in [true, false] {
            let small = Small::new();
            let feed = small.builder().batch(4).buffers(2).start().unwrap();
            let mut writers = [0; 3].map(|_| None);
            let mut steps = Vec::new();
            for (writer, lanes) in writers.iter_mut().zip([2, 1, 1]) {
                // The second and the third come when the slot is open: their rows lie behind the first one's.
                let mut step = writer.insert(feed.writer(lanes).unwrap()).step().unwrap();
                step.put(small.reward, &vec![1.0; lanes]).unwrap();
                steps.push(step);
            }
            drop(steps.remove(0));
            let report = feed.stop(PATIENCE).unwrap();
            assert_eq!((report.partial_rows, report.still_out, feed.metrics().free_slots), (0, 1, 1));
            for left in [1, 0] {
                let step = steps.remove(0);
                if commits {
                    assert_eq!(step.commit().unwrap_err(), CommitError::Closed(Closed::Stopped));
                } else {
                    drop(step);
                }
                assert_eq!((feed.metrics().free_slots, life::rings().len()), (2 - left, left), "{left} open");
            }
            drop(steps);
            assert_eq!(feed.metrics().dropped_rows, if commits { 2 } else { 0 });
        }
        assert_nothing_is_left();
    }
}

#[test]
fn the_rows_of_a_wide_step_that_was_dropped_are_no_rows_at_the_end() {
    let small = Small::new();
    let feed = small.builder().batch(8).start().unwrap();
    let (mut wide, learner) = (feed.writer(3).unwrap(), feed.learner().unwrap());
    let mut step = wide.step().unwrap();
    step.put(small.reward, &[9.0; 3]).unwrap();
    small.write(&mut feed.writer(1).unwrap(), [1.0, 2.0]).unwrap(); // behind it
    drop(step);
    drop(wide);
    assert_eq!(small.values(&learner.next_batch().unwrap()), [1.0, 2.0]);
    assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended);
}

alone! {
    fn a_feed_that_nobody_used_stops_and_one_that_ended_stops_too() {
        let small = Small::new();
        let feed = small.builder().start().unwrap();
        assert_eq!(feed.stop(PATIENCE).unwrap(), StopReport::default());
        assert_stopped(&feed.intake().unwrap_err());
        assert_stopped(&feed.writer(1).unwrap_err());
        assert_stopped(&feed.learner().unwrap_err());

        // Its source ended, with a partial batch that was not taken.
        let feed = small.builder().start().unwrap();
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(1).unwrap();
        small.write(&mut writer, [1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        drop(writer);
        assert_eq!(learner.next_batch().unwrap().rows(), 4);
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!(report.dropped_rows(), 1, "{report}");
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::Stopped));

        // Its learner went first.
        let feed = small.builder().start().unwrap();
        let writing = write_on(feed.writer(1).unwrap(), small.reward);
        drop(feed.learner().unwrap());
        let error = writing.join().unwrap();
        assert!(error.to_string().contains("the learner was dropped"), "{error}");
        assert_eq!(feed.stop(PATIENCE).unwrap().fault, None);
        drop(feed);
        assert_nothing_is_left();
    }
}

alone! {
    fn many_threads_may_stop_at_once_and_read_the_same_report() {
        let small = Small::new();
        for _ in 0..20 {
            let feed = Arc::new(small.builder().start().unwrap());
            small.write(&mut feed.writer(1).unwrap(), [1.0; 5]).unwrap();
            let stopping: Vec<_> = (0..4)
                .map(|_| {
                    let feed = feed.clone();
                    std::thread::spawn(move || feed.stop(PATIENCE).unwrap())
                })
                .collect();
            let reports: Vec<_> = stopping.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
            assert_eq!(reports[0].dropped_rows(), 5);
        }
        assert_nothing_is_left();
    }
}

// ---- deadlines -----------------------------------------------------------------------------------------------------

/// The longest time from now that a clock can show.
fn longest() -> Duration {
    let (mut low, mut high) = (Duration::ZERO, Duration::MAX);
    while high - low > Duration::from_nanos(1) {
        let middle = low + (high - low) / 2;
        match Instant::now().checked_add(middle) {
            Some(_) => low = middle,
            None => high = middle,
        }
    }
    low
}

alone! {
    fn any_deadline_is_fine() {
        let small = Small::new();
        for deadline in [Duration::MAX, longest(), longest() - Duration::from_millis(500), Duration::from_nanos(1)] {
            let feed = small.builder().start().unwrap();
            let report = feed.stop(deadline).unwrap();
            assert!(report.threads_given_up.is_empty() || deadline < Duration::from_secs(1), "{report}");
        }
        // Without any time threads may be given up. They end all the same.
        let feed = small.builder().start().unwrap();
        let report = feed.stop(Duration::ZERO).unwrap();
        assert_eq!(feed.stop(PATIENCE).unwrap(), report);
        until("what was given up has ended", || life::rings().is_empty());
        assert_nothing_is_left();
    }
}

alone! {
    fn a_thread_that_is_stuck_in_cuda_past_the_deadline_is_named_and_left() {
        let (small, fake) = (Small::new(), life::fake("stuck"));
        let feed = small.pinned(&fake).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        small.write(&mut writer, [1.0; 4]).unwrap();
        fake.sleep("cudaHostUnregister", 1500);
        let report = feed.stop(Duration::from_millis(200)).unwrap();
        assert_eq!(report.threads_given_up, ["pr0-pinning"]);
        assert!(report.to_string().contains("threads given up: pr0-pinning"), "{report}");
        assert_eq!((report.untaken_rows, report.still_out, report.kept_bytes), (4, 0, 0));
        assert!(fake.calls_of("cudaHostUnregister")[0].code.is_none(), "the stop came back before the call did");
        assert_eq!(life::rings().len(), 1, "what CUDA is busy with stays mapped");
        assert_eq!(feed.stop(PATIENCE).unwrap(), report);
        drop((feed, writer, learner));
        until("the call has returned", || life::rings().is_empty());
        assert_nothing_is_left_with(&fake);
    }
}

/// Runs `act` each time it is woken.
struct OnWake<F>(F);

impl<F: Fn() + Send + Sync> Wake for OnWake<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// Polls a future of the learner's once, so that `act` runs when a batch comes, the feed closes or the ingest actor
/// looks.
fn register(learner: &Learner, act: impl Fn() + Send + Sync + 'static) {
    let waker = Waker::from(Arc::new(OnWake(act)));
    let mut next = Box::pin(learner.next_async());
    assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    std::mem::forget(next); // its drop would take the waker back
}

alone! {
    fn a_supervisor_that_hangs_in_a_users_waker_is_named_and_the_others_end_without_it() {
        let (small, fake) = (Small::new(), life::fake("hangs"));
        let feed = small.pinned(&fake).start().unwrap();
        let learner = feed.learner().unwrap();
        let entered = Arc::new(AtomicBool::new(false));
        let set = entered.clone();
        register(&learner, move || {
            // Only at the stop: the ingest actor's look wakes too.
            if thread_name().ends_with("supervisor") {
                set.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_secs(4));
            }
        });
        let report = feed.stop(Duration::from_millis(100)).unwrap();
        assert!(entered.load(Ordering::Relaxed), "the stop came before the look");
        assert_eq!(report.threads_given_up, ["pr0-supervisor"]);
        assert_eq!(feed_threads(), ["pr0-supervisor"], "the others ended in order");
        assert_eq!((fake.live_registrations(), life::rings()), (vec![], vec![]), "and nothing is held");
        drop(feed);
        until("the waker has returned", || feed_threads().is_empty());
        assert_nothing_is_left_with(&fake);
    }
}

fn thread_name() -> String {
    std::thread::current().name().unwrap_or("").to_owned()
}

// ---- from threads of the feed --------------------------------------------------------------------------------------

alone! {
    fn on_threads_of_a_feed_a_stop_is_an_error_and_no_dead_lock() {
        let (small, fake) = (Small::new(), life::fake("own-thread"));
        let feed = Arc::new(small.pinned(&fake).start().unwrap());
        let learner = feed.learner().unwrap();
        let results = Arc::new(Mutex::new(Vec::new()));
        // Woken once by the ingest actor's look, which finds the feed running.
        let (weak, keep) = (Arc::downgrade(&feed), results.clone());
        register(&learner, move || {
            let feed: Arc<Feed> = weak.upgrade().unwrap();
            let stopped = feed.stop(PATIENCE);
            keep.lock().unwrap().push((thread_name(), stopped));
        });
        until("the ingest actor has looked", || !results.lock().unwrap().is_empty());
        assert_eq!(feed.closed(), Some(Closed::Stopped), "the gates are closed all the same");
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.threads_given_up.len(), report.fault), (0, None));
        assert_nothing_is_left_with(&fake);

        // Woken by the close itself, on the supervisor's thread.
        let feed = Arc::new(small.pinned(&fake).start().unwrap());
        let learner = feed.learner().unwrap();
        let (weak, keep) = (Arc::downgrade(&feed), results.clone());
        register(&learner, move || keep.lock().unwrap().push((thread_name(), weak.upgrade().unwrap().stop(PATIENCE))));
        feed.stop(PATIENCE).unwrap();
        assert_nothing_is_left_with(&fake);

        // In a callback of another feed's start.
        let feed = Arc::new(small.builder().start().unwrap());
        let (stopping, keep) = (feed.clone(), results.clone());
        let other = small.pinned(&fake).on_pin_progress(move |_| {
            let mut results = keep.lock().unwrap();
            if results.len() == 2 {
                results.push((thread_name(), stopping.stop(PATIENCE)));
            }
        });
        drop(other.start().unwrap());
        assert_eq!(feed.stop(PATIENCE).unwrap().fault, None);

        let results = results.lock().unwrap();
        let threads: Vec<_> = results.iter().map(|(thread, _)| thread.as_str()).collect();
        assert_eq!(threads, ["pr0-ingest", "pr1-supervisor", "pr3-pinning"]);
        for (_, stopped) in results.iter() {
            let error = stopped.as_ref().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            assert!(error.to_string().contains("from one of its own threads"), "{error}");
        }
    }
}

alone! {
    fn the_last_handle_may_be_dropped_on_a_thread_of_the_feed() {
        let (small, fake) = (Small::new(), life::fake("last-handle"));
        for on in ["ingest", "writer"] {
            let feed = Arc::new(Mutex::new(Some(small.pinned(&fake).start().unwrap())));
            let (learner, mut writer) = {
                let feed = feed.lock().unwrap();
                let feed = feed.as_ref().unwrap();
                (feed.learner().unwrap(), feed.writer(1).unwrap())
            };
            let (own, dropped) = (feed.clone(), Arc::new(Mutex::new(None)));
            let set = dropped.clone();
            register(&learner, move || {
                drop(own.lock().unwrap().take());
                set.lock().unwrap().get_or_insert_with(thread_name);
            });
            if on == "writer" {
                // A waker that a commit calls is on the writer's thread, which may stop the feed.
                small.write(&mut writer, [1.0; 4]).unwrap();
                assert_eq!(writer.step().unwrap_err(), StepError::Closed(Closed::Stopped));
            }
            until("it was dropped", || dropped.lock().unwrap().is_some());
            let thread = dropped.lock().unwrap().take().unwrap();
            assert_eq!(thread.ends_with("-ingest"), on == "ingest", "on {thread}");
            assert!(feed.lock().unwrap().is_none());
            until("it has ended", || life::rings().is_empty());
            assert_nothing_is_left_with(&fake);
            assert_eq!(learner.try_next().unwrap_err(), NextError::Closed(Closed::Stopped));
        }
    }
}

alone! {
    fn a_feed_in_its_own_callback_is_dropped_with_it() {
        let (small, fake) = (Small::new(), life::fake("circle"));
        let own: Arc<Mutex<Option<Feed>>> = Arc::default();
        let inside = own.clone();
        let feed = small.pinned(&fake).on_pin_progress(move |_| drop(inside.lock().unwrap().as_ref().map(Feed::closed)));
        *own.lock().unwrap() = Some(feed.start().unwrap());
        let weak: Weak<_> = Arc::downgrade(&own);
        own.lock().unwrap().as_ref().unwrap().stop(PATIENCE).unwrap();
        drop(own);
        until("the circle is broken by the stop", || weak.upgrade().is_none());
        assert_nothing_is_left_with(&fake);
    }
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    let thread = std::thread::current();
    let waker = Waker::from(Arc::new(OnWake(move || thread.unpark())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

// ---- panics and races ----------------------------------------------------------------------------------------------

alone! {
    fn a_writer_that_panics_takes_nobody_along() {
        let small = Small::new();
        let feed = small.builder().start().unwrap();
        let (mut good, mut bad, learner) = (feed.writer(1).unwrap(), feed.writer(1).unwrap(), feed.learner().unwrap());
        let reward = small.reward;
        let panicked = std::thread::spawn(move || {
            let mut step = bad.step().unwrap();
            step.put(reward, &[99.0]).unwrap();
            panic!("an environment");
        });
        assert!(panicked.join().is_err());
        small.write(&mut good, (0..8).map(|i| i as f32)).unwrap();
        let mut values = small.values(&learner.next_batch().unwrap());
        values.extend(small.values(&learner.next_batch().unwrap()));
        values.sort_by(f32::total_cmp);
        assert_eq!(values, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(feed.stop(PATIENCE).unwrap(), StopReport::default());
    }
}

alone! {
    fn a_waker_that_panics_is_a_fault_that_is_named_and_the_other_waits_hear_of_the_end() {
        let (small, fake) = (Small::new(), life::fake("waker"));
        let feed = small.pinned(&fake).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        small.write(&mut writer, [1.0; 3]).unwrap();
        let woken = Arc::new(AtomicU64::new(0));
        for bad in [true, false, true, false] {
            let woken = woken.clone();
            register(&learner, move || {
                woken.fetch_add(1, Ordering::Relaxed);
                assert!(!bad, "a task without a home");
            });
        }
        // The ingest actor's look comes first, or the stop does: either way it is the fault of whoever woke.
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!(woken.load(Ordering::Relaxed), 4);
        assert_eq!((report.partial_rows, report.threads_given_up.len()), (3, 0));
        let fault = report.fault.expect("a panic is not swallowed");
        assert!(["supervisor", "ingest"].contains(&fault.actor()));
        assert!(fault.text().contains("it panicked: a task without a home"), "{fault}");
        assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn handles_may_come_and_go_while_the_feed_stops() {
        let small = Small::new();
        let made = AtomicU64::new(0);
        for round in 0..60 {
            let feed = small.builder().buffers(3).start().unwrap();
            let _learner = feed.learner().unwrap();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while let Ok(intake) = feed.intake() {
                            let Ok(mut writer) = intake.writer(1) else { continue };
                            drop(intake);
                            made.fetch_add(1, Ordering::Relaxed);
                            if small.write(&mut writer, [1.0; 1]).is_err() {
                                break;
                            }
                        }
                    });
                }
                std::thread::sleep(Duration::from_micros(20 * round));
                let report = feed.stop(PATIENCE).unwrap();
                assert_eq!(report.threads_given_up, [""; 0]);
            });
            drop(feed);
        }
        assert!(made.load(Ordering::Relaxed) > 0);
        assert_nothing_is_left();
    }
}
