//! A feeding thread that panics: every wait hears of it by name, no slot comes home under its copy, nothing is left. Each
//! test has a process of its own, since it looks at the process's threads.

use crate::cuda::common;
use crate::{
    Closed, CudaSearch, DeviceUseError, Error, Feed, FeedBuilder, Leaf, NextError, Pinning, Sample, Step, Writer,
};
use common::fake::{Fake, Hazards};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const TEXT: &str = "a wheel came off";

/// Declares a test that runs in a process of its own, under a watchdog.
macro_rules! alone {
    ($(#[$meta:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            let name = concat!("feeding::tests::", stringify!($name));
            if !common::is_child(name) {
                common::alone(name, |_| {});
                return;
            }
            let _watchdog = common::Watchdog::new(name, PATIENCE);
            $body
        }
    };
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

fn fake() -> Fake {
    Fake::new(&common::scratch("feeding-fault"), "libcudart.so.13")
}

/// Steps of one number, one to a batch, two slots, one device.
fn builder(fake: &Fake) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.leaf::<f32>("x", &[]);
    let cuda = CudaSearch::new().library_only(fake.path()).driver(fake.path());
    let builder = Feed::builder(Sample::step(step)).batch(1).buffers(2).pinning(Pinning::Required);
    (builder.device(0).downloads(4096).cuda(cuda), leaf)
}

fn write(writer: &mut Writer, leaf: Leaf<f32>) -> Result<(), Error> {
    let mut step = writer.step()?;
    step.put(leaf, &[1.0])?;
    Ok(step.commit()?)
}

fn assert_names(error: &Error) {
    let text = format!("the feeding0 actor failed: it panicked: {TEXT}");
    assert!(error.to_string().contains(&text), "{error}");
}

alone! {
    fn every_wait_hears_of_a_feeding_thread_that_panicked() {
        let fake = fake();
        let (builder, leaf) = builder(&fake);
        let feed = builder.start().unwrap();
        let stream = fake.user_stream(1);
        // SAFETY: the stream lives as long as the test.
        let learner = unsafe { feed.learner_on(0, stream as *mut _) }.unwrap();
        let host = feed.learner().unwrap();
        let mut writer = feed.writer(1).unwrap();
        // Both slots are under way, so the writer waits for room; both learners wait for batches.
        (0..2).for_each(|_| write(&mut writer, leaf).unwrap());
        drop((learner.next_batch().unwrap(), learner.next_batch().unwrap()));
        let waits = [
            std::thread::spawn(move || loop {
                if let Err(error) = write(&mut writer, leaf) {
                    return error;
                }
            }),
            std::thread::spawn(move || host.next_batch().unwrap_err().into()),
        ];
        let waiting = std::thread::spawn(move || (learner.next_batch().unwrap_err(), learner));
        until("the writer waits", || feed.gate.parked() == 1);
        std::thread::sleep(Duration::from_millis(20));
        feed.desks[0].crash(TEXT);
        waits.into_iter().for_each(|wait| assert_names(&wait.join().unwrap()));
        let (error, learner) = waiting.join().unwrap();
        assert!(matches!(error, NextError::Closed(Closed::Fault(_))), "{error:?}");
        assert_names(&error.into());
        // And whoever comes later.
        assert_names(&learner.try_next().unwrap_err().into());
        // SAFETY: refused before anything is done.
        let refused = unsafe { learner.download(0, 0, |_| unreachable!()) }.unwrap_err();
        assert!(matches!(refused, DeviceUseError::Closed(Closed::Fault(_))), "{refused:?}");
        assert_names(&refused.into());

        // The copies are still queued: no slot comes home before they have run.
        assert_eq!(feed.gate.metrics().free_slots, 0);
        fake.run_all();
        until("the slots are home", || feed.gate.metrics().free_slots == 2);
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.quarantined_slots, report.threads_given_up.len()), (0, 0), "{report}");
        assert_eq!(report.fault.map(|fault| fault.actor().to_owned()), Some("feeding0".to_owned()));
        drop((learner, feed));
        until("no thread of a feed is left", || feed_threads().is_empty());
        assert_eq!((fake.live_registrations(), fake.live_allocations(), fake.retained(0)), (vec![], vec![], 0));
        assert_eq!(fake.hazards(), Hazards::default());
    }
}

alone! {
    /// The panic comes while copies are queued that never end: they are given up, and the slots never used again.
    fn slots_under_the_copies_of_a_thread_that_panicked_are_never_used_again() {
        let fake = fake();
        let (builder, leaf) = builder(&fake);
        let feed = builder.start().unwrap();
        let copies = fake.live_streams().last().unwrap().handle;
        fake.hold(copies, true);
        let stream = fake.user_stream(1);
        // SAFETY: the stream lives as long as the test.
        let learner = unsafe { feed.learner_on(0, stream as *mut _) }.unwrap();
        let mut writer = feed.writer(1).unwrap();
        (0..2).for_each(|_| write(&mut writer, leaf).unwrap());
        drop((learner.next_batch().unwrap(), learner.next_batch().unwrap()));
        feed.desks[0].crash(TEXT);
        assert_names(&write(&mut writer, leaf).unwrap_err());
        let report = feed.stop(Duration::from_secs(2)).unwrap();
        assert_eq!((report.quarantined_slots, report.still_out), (2, 0), "{report}");
        assert_eq!(report.threads_given_up, [""; 0]);
        drop((learner, feed));
        // The ring and the downloads' host memory; the buffers and the stages, since freeing would wait for the copies.
        assert_eq!((fake.live_registrations().len(), fake.live_allocations().len()), (2, 4));
        assert_eq!(fake.hazards(), Hazards::default());
    }
}
