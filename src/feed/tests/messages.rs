//! Each actor, killed at each message that it handles and at each turn of its own loop: the feed's fault is that text, or
//! the start's error; whoever waits hears it, the stop comes back, and nothing is left.

use super::*;
use crate::sync::points;
use crate::{Column, DeviceLearner, DeviceUseError, Gather, Uniform};

/// Where a feed is killed, and what brings its thread there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Comes {
    /// The start.
    Start,
    /// The run, sooner or later.
    Run,
    /// The fault of another: the first one is told.
    Fault,
    Stop,
}

const POINTS: [(&str, Comes); 15] = [
    ("pinning: Pin", Comes::Start),
    ("pinning: StopPinning", Comes::Stop),
    ("feeding0: Feed", Comes::Start),
    ("feeding0: attached", Comes::Start),
    ("feeding0: fed", Comes::Stop),
    ("sampling: Sample", Comes::Run),
    ("sampling: round", Comes::Run),
    ("sampling: StopSampling", Comes::Stop),
    ("ingest: look", Comes::Run),
    ("ingest: StopIngest", Comes::Stop),
    ("supervisor: Pinned", Comes::Start),
    ("supervisor: FeedingUp", Comes::Start),
    ("supervisor: Failed", Comes::Fault),
    ("supervisor: Exited", Comes::Stop),
    ("supervisor: Stop", Comes::Stop),
];

/// Which feed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// Steps in the order of writing, to the host and to a device.
    Fifo,
    /// Stored steps that a device gathers.
    Replay,
}

struct Whole {
    builder: FeedBuilder,
    leaf: Leaf<f32>,
    column: Column<f32>,
}

fn whole(shape: Shape, fake: &Fake) -> Whole {
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[16]);
    let mut sample = if shape == Shape::Fifo { Sample::step(step) } else { Sample::transition(step, 1, 0.9) };
    let column = if shape == Shape::Fifo { sample.all(leaf) } else { sample.at(leaf, 0) };
    let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
    let builder = pinned(sample, fake).cuda(search).device(0).downloads(64).batch(64).buffers(4);
    let builder = match shape {
        Shape::Fifo => builder,
        Shape::Replay => builder.lanes(1).replay(256, Uniform::new()).gather(Gather::Mapped).gather_threads(2),
    };
    Whole { builder, leaf, column }
}

fn write_on(mut writer: Writer, leaf: Leaf<f32>) -> JoinHandle<Error> {
    let mut write = move || -> Result<(), Error> {
        let mut step = writer.step()?;
        step.put(leaf, &[1.0; 16])?;
        Ok(step.commit()?)
    };
    std::thread::spawn(move || {
        loop {
            if let Err(error) = write() {
                return error;
            }
        }
    })
}

/// Takes batches on the device, each of them downloaded, until there are no more.
fn learn_on(learner: DeviceLearner, column: Column<f32>) -> JoinHandle<Error> {
    std::thread::spawn(move || {
        loop {
            let batch = match learner.next_batch() {
                Ok(batch) => batch,
                Err(error) => return error.into(),
            };
            let then = |bytes: &[u8]| assert!(bytes.chunks(4).all(|value| value == 1.0f32.to_ne_bytes()));
            // SAFETY: a row of the batch, which is dropped behind the snapshot on the same stream.
            #[allow(unsafe_code)]
            let downloaded = unsafe { learner.download(batch.column(column).ptr, 64, then) };
            match downloaded {
                Ok(()) | Err(DeviceUseError::Closed(_)) => {}
                Err(error) => return error.into(),
            }
        }
    })
}

fn kill_at(point: &'static str, comes: Comes, shape: Shape, fake: &Fake) {
    let (actor, at) = (point.split(':').next().unwrap(), format!("{point}, {shape:?}"));
    let Whole { builder, leaf, column } = whole(shape, fake);
    points::crash(point, TEXT);
    let feed = match builder.start() {
        Ok(feed) => feed,
        Err(error) => {
            assert_eq!(comes, Comes::Start, "{at}: {error}");
            assert_names(&error, actor);
            return;
        }
    };
    assert_ne!(comes, Comes::Start, "{at}: the start has succeeded");
    // Whoever dies early may do so before there is a handle.
    let handles = || -> Result<_, Error> {
        // SAFETY: the legacy default stream lives as long as the device.
        #[allow(unsafe_code)]
        let device = unsafe { feed.learner_on(0, std::ptr::null_mut()) }?;
        let host = if shape == Shape::Fifo { Some(feed.learner()?) } else { None };
        Ok((feed.writer(1)?, device, host))
    };
    let mut threads = Vec::new();
    match handles() {
        Ok((writer, device, host)) => {
            threads.push(write_on(writer, leaf));
            threads.push(learn_on(device, column));
            threads.extend(host.map(|host| {
                std::thread::spawn(move || {
                    loop {
                        if let Err(error) = host.next_batch() {
                            return error.into();
                        }
                    }
                })
            }));
        }
        Err(error) => assert_names(&error, actor),
    }
    match comes {
        Comes::Start | Comes::Run => until("it dies", || feed.closed().is_some()),
        Comes::Fault => feed.desks[0].fail_with(TEXT.to_owned()),
        Comes::Stop => {
            until("the device is fed", || feed.metrics().devices[0].batches_taken > 3 || feed.closed().is_some())
        }
    }
    let report = feed.stop(PATIENCE).unwrap();
    assert!(!points::disarm(), "{at}: nobody came there");
    assert_eq!(report.threads_given_up, [""; 0], "{at}");
    let fault = report.fault.unwrap_or_else(|| panic!("{at}: the death is not told"));
    match comes {
        Comes::Fault => assert_eq!((fault.actor, &*fault.text), ("feeding0", TEXT), "{at}: the first one"),
        _ => assert_eq!((fault.actor, fault.text.clone()), (actor, format!("it panicked: {TEXT}")), "{at}"),
    }
    for thread in threads {
        let error = thread.join().unwrap_or_else(|_| panic!("{at}: a thread of the program's panicked"));
        let stopped = comes == Comes::Stop && error.kind() == ErrorKind::Stopped;
        assert!(stopped || error.kind() == ErrorKind::Fault && error.to_string().contains(TEXT), "{at}: {error}");
    }
    assert_eq!((report.quarantined_slots, report.kept_bytes), (0, 0), "{at}: every copy ended");
}

alone! {
    fn whoever_dies_at_whichever_message_is_named_and_nothing_is_left() {
        let fake = fake();
        fake.auto_run(true);
        let mut killed = 0;
        for shape in [Shape::Fifo, Shape::Replay] {
            for (point, comes) in POINTS {
                if shape == Shape::Fifo && point.starts_with("sampling") {
                    continue;
                }
                kill_at(point, comes, shape, &fake);
                assert_nothing_is_left(&fake);
                let left = (fake.live_allocations(), fake.live_events(), fake.live_streams());
                assert_eq!(left, (vec![], vec![], vec![]), "{point}, {shape:?}");
                assert_eq!((fake.retained(0), fake.hazards()), (0, Default::default()), "{point}, {shape:?}");
                killed += 1;
            }
        }
        assert_eq!(killed, 2 * POINTS.len() - 3);
    }
}
