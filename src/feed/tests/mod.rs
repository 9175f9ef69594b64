//! Faults of actors: who hears of them, in which words, and what is left. Actors are killed by a message that only tests
//! can send; each test has a process of its own, since it looks at the process's threads and mappings.

use super::{Feed, FeedBuilder, Pinning};
use crate::actors::supervisor::{CrashActor, INGEST, PINNING, SUPERVISOR};
use crate::cuda::common;
use crate::{
    Closed, CudaSearch, Error, ErrorKind, Leaf, Learner, NextError, PinPhase, Sample, Step, StopReport, Weights, Writer,
};
use common::fake::Fake;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const ACTORS: [&str; 3] = [PINNING, INGEST, SUPERVISOR];
const TEXT: &str = "a wheel came off";

/// Declares a test that runs in a process of its own, under a watchdog.
macro_rules! alone {
    ($(#[$meta:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            let name = concat!(module_path!(), "::", stringify!($name)).trim_start_matches("pinring::");
            if !common::is_child(name) {
                common::alone(name, |_| {});
                return;
            }
            let _watchdog = common::Watchdog::new(name, PATIENCE);
            $body
        }
    };
}

mod between;
mod messages;
mod waits;

fn fake() -> Fake {
    Fake::new(&common::scratch("feed-fault"), "libcudart.so.13")
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE / 2, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Threads that feeds of this process have.
fn feed_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("pr") && name.as_bytes()[2].is_ascii_digit()).collect()
}

fn assert_nothing_is_left(fake: &Fake) {
    assert_eq!(fake.live_registrations(), []);
    assert_eq!(fake.peek_last_error(), 0);
    until("no thread of a feed is left", || feed_threads().is_empty());
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mapped = smaps.lines().filter(|line| line.starts_with("VmFlags:") && line.contains(" wf")).count();
    assert!(mapped <= 1, "a ring is still mapped, beside the page by which forks are noticed");
}

/// Single steps of one number, one to a batch, in a ring of two.
fn steps(fake: &Fake) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.leaf::<f32>("x", &[]);
    (pinned(Sample::step(step), fake), leaf)
}

/// Unrolls of one step with an observation.
fn unrolls(fake: &Fake) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[]);
    (pinned(Sample::unroll(step, 1), fake), leaf)
}

fn pinned(sample: Sample, fake: &Fake) -> FeedBuilder {
    let cuda = CudaSearch::new().library_only(fake.path());
    Feed::builder(sample).batch(1).buffers(2).pinning(Pinning::Required).cuda(cuda)
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

impl Feed {
    fn crash(&self, actor: &'static str) {
        let supervisor = self.supervisor.lock().unwrap();
        supervisor.as_ref().expect("it was not stopped").address.do_send(CrashActor(actor, TEXT.to_owned()));
    }
}

/// The error names the actor, in its type and in its text, and what it said.
fn assert_names(error: &Error, actor: &str) {
    assert_eq!(error.kind(), ErrorKind::Fault, "{error}");
    let text = format!("the {actor} actor failed: it panicked: {TEXT}");
    assert!(error.to_string().contains(&text), "{error}");
    let first: &(dyn std::error::Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    let closed = causes.find_map(|cause| cause.downcast_ref::<Closed>());
    if let Some(Closed::Fault(fault)) = closed {
        assert_eq!((fault.actor(), fault.text()), (actor, format!("it panicked: {TEXT}").as_str()));
    } else {
        assert!(first.source().is_some(), "{error:?} has no cause");
    }
}

/// After a fault: stopping works, twice, and says whose fault it was; nothing is left.
fn assert_stops(feed: &Feed, actor: &str, fake: &Fake) -> StopReport {
    let report = feed.stop(PATIENCE).unwrap();
    assert_eq!(report.fault.as_ref().map(|fault| fault.actor()), Some(actor), "{report}");
    assert_eq!(report.threads_given_up, [""; 0]);
    assert!(report.to_string().contains(TEXT), "{report}");
    assert_eq!(feed.stop(Duration::ZERO).unwrap(), report, "twice is fine");
    if report.still_out == 0 {
        assert_nothing_is_left(fake);
    }
    report
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Long enough for a thread to be where it waits. Should it not be there yet, it meets the fault a little later.
fn let_them_wait() {
    std::thread::sleep(Duration::from_millis(50));
}

alone! {
    fn a_writer_before_a_full_ring_hears_of_each_fault() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = steps(&fake);
            let feed = builder.start().unwrap();
            let writing = [(); 3].map(|()| write_on(feed.writer(1).unwrap(), leaf));
            until("all wait", || feed.gate.parked() == 3);
            feed.crash(actor);
            writing.into_iter().for_each(|thread| assert_names(&thread.join().unwrap(), actor));
            let report = assert_stops(&feed, actor, &fake);
            assert_eq!((report.untaken_rows, report.partial_rows), (2, 0), "two full batches were never taken");
        }
    }
}

alone! {
    fn a_writer_in_step_timeout_hears_of_each_fault() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = steps(&fake);
            let feed = builder.start().unwrap();
            let mut writer = feed.writer(1).unwrap();
            write(&mut writer, leaf).unwrap();
            write(&mut writer, leaf).unwrap();
            let waiting = std::thread::spawn(move || Error::from(writer.step_timeout(Duration::MAX).unwrap_err()));
            until("it waits", || feed.gate.parked() == 1);
            feed.crash(actor);
            assert_names(&waiting.join().unwrap(), actor);
            assert_stops(&feed, actor, &fake);
        }
    }
}

alone! {
    fn a_commit_that_waits_for_room_hears_of_each_fault() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = unrolls(&fake);
            let feed = builder.start().unwrap();
            let writing = write_on(feed.writer(2).unwrap(), leaf);
            until("it waits", || feed.gate.parked() == 1);
            feed.crash(actor);
            assert_names(&writing.join().unwrap(), actor);
            assert_stops(&feed, actor, &fake);
        }
    }
}

alone! {
    fn a_writer_at_the_lag_gate_hears_of_each_fault() {
        let fake = fake();
        for (actor, lockstep, unroll) in ACTORS.iter().flat_map(|actor| {
            [(*actor, false, false), (*actor, false, true), (*actor, true, true), (*actor, true, false)]
        }) {
            let weights = Weights::new(());
            let (builder, leaf) = if unroll { unrolls(&fake) } else { steps(&fake) };
            let builder = builder.max_policy_lag(&weights, 0);
            let feed = if lockstep { builder.lockstep(1) } else { builder }.start().unwrap();
            let mut writer = feed.writer(1).unwrap();
            let acting = std::thread::spawn(move || -> Error {
                let mut act = || -> Result<(), Error> {
                    let mut step = writer.step()?;
                    step.put(leaf, &[1.0])?;
                    step.policy(&weights)?;
                    Ok(step.commit()?)
                };
                loop {
                    if let Err(error) = act() {
                        return error;
                    }
                }
            });
            let_them_wait();
            assert!(!acting.is_finished(), "nothing was published, so it waits for version 1");
            feed.crash(actor);
            assert_names(&acting.join().unwrap(), actor);
            assert_stops(&feed, actor, &fake);
        }
    }
}

alone! {
    fn a_lockstep_writer_before_a_full_ring_hears_of_each_fault() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = unrolls(&fake);
            let feed = builder.batch(2).lockstep(2).start().unwrap();
            let writing = [(); 2].map(|()| write_on(feed.writer(1).unwrap(), leaf));
            until("both wait", || feed.gate.parked() == 2);
            feed.crash(actor);
            writing.into_iter().for_each(|thread| assert_names(&thread.join().unwrap(), actor));
            assert_stops(&feed, actor, &fake);
        }
    }
}

alone! {
    fn a_step_in_the_making_hears_of_each_fault_at_its_commit() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = steps(&fake);
            let feed = builder.start().unwrap();
            let mut writer = feed.writer(1).unwrap();
            let mut step = writer.step().unwrap();
            feed.crash(actor);
            until("the gate is closed", || feed.closed().is_some());
            step.put(leaf, &[1.0]).unwrap(); // the ring is there as long as the step is
            assert_names(&step.commit().unwrap_err().into(), actor);
            let report = assert_stops(&feed, actor, &fake);
            assert_eq!((report.dropped_rows(), report.still_out), (0, 0));
        }
    }
}

alone! {
    fn a_waiting_learner_hears_of_each_fault_whichever_way_it_waits() {
        let fake = fake();
        for actor in ACTORS {
            let feed = steps(&fake).0.start().unwrap();
            let other = steps(&fake).0.start().unwrap();
            let learner = Arc::new(feed.learner().unwrap());
            let other_learner = Arc::new(other.learner().unwrap());
            let wait = |wait: fn(&Learner, &Learner) -> NextError| {
                let (learner, other) = (learner.clone(), other_learner.clone());
                std::thread::spawn(move || Error::from(wait(&learner, &other)))
            };
            let waiting = [
                wait(|learner, _| learner.next_batch().unwrap_err()),
                wait(|learner, _| learner.next_timeout(Duration::MAX).unwrap_err()),
                wait(|learner, _| learner.iter().next().unwrap().unwrap_err()),
                wait(|learner, _| block_on(learner.next_async()).unwrap_err()),
                wait(|learner, other| Learner::select(&[other, learner], Duration::MAX).unwrap_err().error),
                wait(|learner, _| Learner::select(&[learner], Duration::MAX).unwrap_err().error),
            ];
            let_them_wait();
            assert!(waiting.iter().all(|thread| !thread.is_finished()));
            feed.crash(actor);
            waiting.into_iter().for_each(|thread| assert_names(&thread.join().unwrap(), actor));
            assert_names(&learner.try_next().unwrap_err().into(), actor);

            // The other feed has nothing to do with it.
            assert_eq!(other.closed(), None);
            assert_eq!(other.stop(PATIENCE).unwrap(), StopReport::default());
            assert_stops(&feed, actor, &fake);
        }
    }
}

alone! {
    fn after_a_fault_there_are_no_new_handles_and_the_old_ones_can_be_dropped_in_any_order() {
        let fake = fake();
        for actor in ACTORS {
            for order in 0..3 {
                let (builder, leaf) = steps(&fake);
                let feed = builder.start().unwrap();
                let (intake, learner) = (feed.intake().unwrap(), feed.learner().unwrap());
                let mut writer = intake.writer(1).unwrap();
                write(&mut writer, leaf).unwrap();
                let batch = learner.next_batch().unwrap();
                feed.crash(actor);
                until("the gate is closed", || feed.closed().is_some());
                assert_names(&feed.intake().unwrap_err(), actor);
                assert_names(&feed.writer(1).unwrap_err(), actor);
                assert_names(&intake.writer(1).unwrap_err(), actor);
                assert_names(&feed.learner().unwrap_err(), actor);
                assert_names(&writer.step().unwrap_err().into(), actor);
                match order {
                    0 => {
                        let report = assert_stops(&feed, actor, &fake);
                        assert_eq!((report.still_out, report.dropped_rows()), (1, 0), "the batch is the learner's");
                        assert_eq!(fake.live_registrations().len(), 1, "and keeps the ring");
                        drop((batch, feed, learner, writer, intake));
                    }
                    1 => drop((writer, intake, learner, batch, feed)),
                    _ => drop((feed, writer, learner, intake, batch)),
                }
                assert_nothing_is_left(&fake);
            }
        }
    }
}

alone! {
    fn every_row_is_accounted_for_after_a_fault() {
        let fake = fake();
        for actor in ACTORS {
            let (builder, leaf) = steps(&fake);
            let feed = builder.batch(3).buffers(4).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            (0..11).for_each(|_| write(&mut writer, leaf).unwrap());
            assert_eq!(learner.next_batch().unwrap().rows(), 3);
            feed.crash(actor);
            let report = {
                until("the gate is closed", || feed.closed().is_some());
                assert_stops(&feed, actor, &fake)
            };
            assert_eq!((report.untaken_rows, report.partial_rows), (6, 2));
            assert_eq!(feed.metrics().dropped_rows, 8);
        }
    }
}

alone! {
    fn the_first_fault_is_the_one_that_is_told() {
        let fake = fake();
        let feed = steps(&fake).0.start().unwrap();
        feed.crash(INGEST);
        until("the gate is closed", || feed.closed().is_some());
        feed.crash(PINNING);
        feed.crash(SUPERVISOR);
        let_them_wait();
        assert_stops(&feed, INGEST, &fake);
    }
}

alone! {
    fn a_stop_and_a_fault_at_the_same_time_leave_nothing() {
        let fake = fake();
        for round in 0..60 {
            let actor = ACTORS[round % 3];
            let (builder, leaf) = steps(&fake);
            let feed = builder.start().unwrap();
            let writing = write_on(feed.writer(1).unwrap(), leaf);
            feed.crash(actor);
            if round % 2 == 0 {
                let report = feed.stop(PATIENCE).unwrap();
                assert_eq!(report.threads_given_up, [""; 0]);
            }
            drop(feed);
            let error = writing.join().unwrap();
            assert!(matches!(error.kind(), ErrorKind::Stopped | ErrorKind::Fault), "{error}");
            assert_nothing_is_left(&fake);
        }
    }
}

alone! {
    fn a_feed_that_is_dropped_after_a_fault_leaves_nothing() {
        let fake = fake();
        for actor in ACTORS {
            let feed = steps(&fake).0.start().unwrap();
            feed.crash(actor);
            until("the gate is closed", || feed.closed().is_some());
            drop(feed);
            assert_nothing_is_left(&fake);
        }
    }
}

alone! {
    fn a_supervisor_that_dies_during_the_start_is_the_starts_error_and_leaves_nothing() {
        let fake = fake();
        for dropped in [false, true] {
            fake.sleep("cudaHostRegister", 100);
            let start = steps(&fake).0.start_in_background().unwrap();
            until("it registers", || fake.calls_of("cudaHostRegister").iter().any(|call| call.code.is_none()));
            let parts = start.parts.as_ref().unwrap();
            parts.supervisor.address.do_send(CrashActor(SUPERVISOR, TEXT.to_owned()));
            if dropped {
                drop(start);
            } else {
                assert_names(&start.wait().unwrap_err(), SUPERVISOR);
            }
            assert_nothing_is_left(&fake);
        }
        fake.clear_faults();
        drop(steps(&fake).0.start().unwrap());
    }
}

alone! {
    fn a_progress_callback_that_panics_is_the_starts_error_at_whichever_call_and_leaves_nothing() {
        let fake = fake();
        let calls = Arc::new(AtomicUsize::new(0));
        let counting = calls.clone();
        let builder = steps(&fake).0.on_pin_progress(move |_| {
            counting.fetch_add(1, Ordering::Relaxed);
        });
        drop(builder.start().unwrap());
        let calls = calls.load(Ordering::Relaxed);
        assert!(calls > 6, "{calls}");
        for k in 1..=calls {
            let count = AtomicUsize::new(0);
            let builder = steps(&fake).0.on_pin_progress(move |_| {
                if count.fetch_add(1, Ordering::Relaxed) + 1 == k {
                    panic!("{TEXT}");
                }
            });
            assert_names(&builder.start().unwrap_err(), PINNING);
            assert_nothing_is_left(&fake);
        }
    }
}

alone! {
    fn whatever_a_panic_carries_it_is_told() {
        /// Panics once more when it is dropped.
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("and another one");
            }
        }
        let fake = fake();
        let start = |panic: fn()| {
            let builder = steps(&fake).0.on_pin_progress(move |progress| {
                if progress.phase == PinPhase::Verifying {
                    panic();
                }
            });
            let text = builder.start().unwrap_err().to_string();
            assert_nothing_is_left(&fake);
            text
        };
        assert!(start(|| panic!("a literal")).contains("the pinning actor failed: it panicked: a literal;"));
        assert!(start(|| panic!("made at {}", 7)).contains("the pinning actor failed: it panicked: made at 7;"));
        let silent = "the pinning actor failed: it panicked without a text;";
        assert!(start(|| std::panic::panic_any(42)).contains(silent));
        assert!(start(|| std::panic::panic_any(Bomb)).contains(silent));
    }
}

alone! {
    fn a_writer_and_a_device_learner_hear_of_a_feeding_thread_that_dies() {
        let fake = fake();
        fake.auto_run(true);
        let (builder, leaf) = steps(&fake);
        let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
        let feed = builder.cuda(search).device(0).start().unwrap();
        // SAFETY: the legacy default stream lives as long as the device.
        #[allow(unsafe_code)]
        let learner = unsafe { feed.learner_on(0, std::ptr::null_mut()) }.unwrap();
        let mut writer = feed.writer(1).unwrap();
        write(&mut writer, leaf).unwrap();
        let held = learner.next_batch().unwrap();
        let waiting = std::thread::spawn(move || Error::from(learner.next_batch().unwrap_err()));
        let_them_wait();
        feed.desk(0).unwrap().crash(TEXT);
        assert_names(&waiting.join().unwrap(), "feeding0");
        assert_names(&write(&mut writer, leaf).unwrap_err(), "feeding0");
        drop(held); // its release can still be recorded
        assert_stops(&feed, "feeding0", &fake);
    }
}
