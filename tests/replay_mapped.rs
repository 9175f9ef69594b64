//! Batches of a store that the device gathers: against the fake driver, whose launches walk the kernel's indices over the
//! mapped store when the stream runs. What arrives is what the CPU gathers, bit by bit; records that a queued gather reads
//! stay; and where the kernel cannot be loaded the CPU gathers, and the feed says so.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use feeding::{DEADLINE, assert_devices_are_clean, fake, learner_on, search, until};
use life::alone;
use pinring::*;
use std::time::Duration;

/// What a case reads of its store.
struct Case {
    sample: Sample,
    frame: Leaf<u8>,
    state: Leaf<f32>,
    action: Leaf<i64>,
    reward: Leaf<f32>,
    /// Names and bytes of the columns, checked in this order.
    columns: Vec<ColumnInfo>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// n-step transitions with two stacks of frames.
    Stacks,
    /// A row that is a few bytes.
    Flat,
    Sequences {
        time_major: bool,
    },
}

const ROWS: usize = 32;
const LANES: usize = 3;
const FRAME: usize = 37;

impl Case {
    fn new(kind: Kind) -> Case {
        let mut step = Step::new();
        let frame = step.observation::<u8>("frame", &[FRAME]);
        let state = step.observation::<f32>("state", &[9]);
        let (action, reward) = (step.leaf::<i64>("action", &[]), step.leaf::<f32>("reward", &[]));
        let mut sample = match kind {
            Kind::Stacks | Kind::Flat => Sample::transition(step, 3, 0.99),
            Kind::Sequences { .. } => Sample::sequence(step, 7, 2),
        };
        match kind {
            Kind::Stacks => {
                sample.discount();
                sample.window(frame, -3..1, Pad::Repeat);
                sample.next_window(frame, -3..1, Pad::Zeros);
                sample.at(action, 0);
                sample.n_step_return(reward);
                sample.weight();
            }
            Kind::Flat => {
                sample.at(state, 0);
                sample.next(state);
                sample.n_step_return(reward);
                sample.terminated();
                sample.policy_version();
            }
            Kind::Sequences { time_major } => {
                if time_major {
                    sample.time_major();
                }
                sample.window(frame, -3..8, Pad::Zeros);
                sample.all(action);
                sample.mask();
                sample.all(state);
                sample.terminated();
            }
        }
        Case { sample, frame, state, action, reward, columns: Vec::new() }
    }

    fn builder(&self, fake: &Fake) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(3).lanes(LANES).seed(11);
        let builder = builder.replay(600, Prioritized::new(0.6, 0.4));
        builder.pinning(Pinning::Required).cuda(search(fake)).device(0)
    }

    /// Columns, and how many samples there are once everything is written.
    fn look(&mut self, fake: &Fake) -> u64 {
        let feed = self.builder(fake).gather(Gather::Cpu).start().unwrap();
        self.columns = feed.columns();
        let _writer = self.write(&feed).unwrap();
        feed.metrics().stored_samples as u64
    }

    /// 200 steps a lane, with episodes that end in each of three ways.
    fn write(&self, feed: &Feed) -> Result<Writer> {
        let mut writer = feed.writer(LANES)?;
        for t in 0..200usize {
            let mut s = writer.step()?;
            let byte = |i: usize| (t * 31 + i * 7 + i / FRAME * 13) as u8;
            s.put(self.frame, &(0..FRAME * LANES).map(byte).collect::<Vec<_>>()).unwrap();
            s.put(self.state, &(0..9 * LANES).map(|i| (t * 100 + i) as f32 / 3.0).collect::<Vec<_>>()).unwrap();
            s.put(self.action, &[t as i64, -(t as i64), 1 << 40]).unwrap();
            s.put(self.reward, &[0.1 * t as f32, 1.0 / (t + 1) as f32, 1e-3]).unwrap();
            for lane in 0..LANES {
                s.priority(lane, 1.0 + (t % 7) as f32).unwrap();
                let last = (vec![200 + lane as u8; FRAME], vec![-1.0f32; 9]);
                if (t + lane * 5) % 23 == 22 {
                    let end = if t % 2 == 0 { End::Terminated } else { End::Truncated };
                    s.end(lane, end).put(self.frame, &last.0).unwrap().put(self.state, &last.1).unwrap();
                }
            }
            s.commit()?;
        }
        Ok(writer)
    }
}

/// The bytes of every column of so many batches, each in its order.
fn batches(
    fake: &Fake,
    (case, samples): (&Case, u64),
    by: Gather,
    count: usize,
) -> (Vec<Vec<u8>>, Vec<Vec<u64>>, Feed) {
    // No batch is selected before everything is there: then the seed alone decides.
    let feed = case.builder(fake).pace(Pace::min_size(samples)).gather(by).start().unwrap();
    let stream = fake.user_stream(1);
    let learner = learner_on(&feed, 0, stream).unwrap();
    let writer = case.write(&feed).unwrap();
    let (mut bytes, mut steps) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let batch = learner.next_batch().unwrap();
        batch.synchronize().unwrap();
        let mut of_batch = Vec::new();
        // Where the first column is, everything is: the layout is that of a slot.
        for column in case.columns.iter() {
            let (at, length) = place(&batch, case, column);
            of_batch.extend(fake.device_bytes(at, length));
        }
        bytes.push(of_batch);
        steps.push(batch.first_steps().collect());
    }
    drop((learner, writer));
    (bytes, steps, feed)
}

/// The address and bytes of a column, whatever its type.
fn place(batch: &DeviceBatch, case: &Case, info: &ColumnInfo) -> (u64, usize) {
    fn at<T: Element>(batch: &DeviceBatch, case: &Case, name: &str) -> u64 {
        batch.column(case.sample.find::<T>(name).unwrap()).ptr
    }
    let address = match info.dtype {
        DType::U8 => at::<u8>(batch, case, &info.name),
        DType::F32 => at::<f32>(batch, case, &info.name),
        DType::I64 => at::<i64>(batch, case, &info.name),
        DType::Bool => at::<bool>(batch, case, &info.name),
        other => panic!("no column of {other} here"),
    };
    (address, info.shape.iter().product::<usize>() * info.dtype.size())
}

alone! {
    fn the_device_gathers_what_the_cpu_gathers_bit_by_bit() {
        let fake = fake("same", 1);
        fake.auto_run_after(Some(Duration::from_micros(100)));
        let kinds = [
            Kind::Stacks, Kind::Flat, Kind::Sequences { time_major: false }, Kind::Sequences { time_major: true },
        ];
        for kind in kinds {
            let mut case = Case::new(kind);
            let samples = case.look(&fake);
            let (by_cpu, steps, feed) = batches(&fake, (&case, samples), Gather::Cpu, 12);
            assert_eq!(feed.gather(), Some(GatherReport::Cpu { why: "asked for".into() }));
            assert_eq!(feed.metrics().devices[0].gathered, 0);
            drop(feed);
            for by in [Gather::Mapped, Gather::Auto] {
                let (by_device, same_steps, feed) = batches(&fake, (&case, samples), by, 12);
                assert_eq!(feed.gather(), Some(GatherReport::Kernel { blocks: 4 }), "{kind:?}");
                let device = &feed.metrics().devices[0];
                // In `Auto` one may have been begun before the learner was there.
                let by_cpu_at_most = u64::from(by == Gather::Auto);
                assert!(device.gathered + by_cpu_at_most >= device.batches, "{kind:?}, {by:?}: {device:?}");
                assert!(device.gathered >= 11);
                assert_eq!(steps, same_steps, "{kind:?}: the same rows are chosen");
                for (number, (a, b)) in by_cpu.iter().zip(&by_device).enumerate() {
                    let wrong = (0..a.len()).find(|&i| a[i] != b[i]);
                    assert_eq!(wrong, None, "{kind:?}, batch {number}: the first byte that differs");
                }
            }
            assert!(by_cpu.iter().any(|batch| batch != &by_cpu[0]), "batches differ");
        }
        let streams = fake.live_streams().len();
        assert_devices_are_clean(&fake, streams);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// While a gather is queued its records stay, however much is written meanwhile: writers wait, and go on behind it.
    fn records_stay_until_the_gather_has_run() {
        let fake = fake("stay", 1);
        let mut case = Case::new(Kind::Flat);
        let builder = || case.builder(&fake).pace(Pace::min_size(64)).replay(128, Uniform::new()).prefetch(2).buffers(2);
        let feed = builder().gather(Gather::Mapped).start().unwrap();
        case.columns = feed.columns();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let (state, frame, action, reward) = (case.state, case.frame, case.action, case.reward);
        // Every value of a step says which step it is.
        let write = move |writer: &mut Writer, steps: std::ops::Range<usize>| -> Result<()> {
            for t in steps {
                let mut s = writer.step()?;
                s.put(frame, &[t as u8; FRAME * LANES])?;
                s.put(state, &[t as f32; 9 * LANES])?;
                s.put(action, &[t as i64; LANES])?;
                s.put(reward, &[1.0; LANES])?;
                s.commit()?;
            }
            Ok(())
        };
        let mut writer = feed.writer(LANES).unwrap();
        write(&mut writer, 0..30).unwrap();
        // Nothing runs on the device: writers fill what room there is, and then wait.
        until("gathers are queued", || feed.metrics().devices[0].gathered >= 2);
        let writing = std::thread::spawn(move || write(&mut writer, 30..3000));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!writing.is_finished(), "the store is far smaller than what is written");
        for _ in 0..60 {
            let batch = learner.next_batch().unwrap();
            fake.run_all();
            let column = case.sample.find::<f32>("state").unwrap();
            let bytes = fake.device_bytes(batch.column(column).ptr, ROWS * 9 * 4);
            let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect();
            for (row, first) in values.chunks_exact(9).zip(batch.first_steps()) {
                assert!(row.iter().all(|value| *value == first as f32), "step {first}: {row:?}");
            }
        }
        fake.auto_run(true);
        writing.join().unwrap().unwrap();
        drop(learner);
        drop(feed);
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// No gather waits for a buffer that the learner's stream still uses: its records would be in writers' way.
    fn no_gather_is_begun_before_its_buffer_is_released() {
        let fake = fake("released", 1);
        let case = Case::new(Kind::Flat);
        let feed = case.builder(&fake).pace(Pace::min_size(8)).gather(Gather::Mapped).prefetch(2).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        fake.auto_run(true);
        let mut writer = case.write(&feed).unwrap();
        // The learner's stream stands still: it takes two batches, drops them, and there is no third.
        fake.hold(stream, true);
        drop((learner.next_batch().unwrap(), learner.next_batch().unwrap()));
        assert!(learner.next_timeout(Duration::from_millis(100)).unwrap().is_none());
        assert_eq!(feed.metrics().devices[0].gathered, 2);
        // Writers are in nobody's way meanwhile.
        for t in 0..2000 {
            let mut s = writer.step().unwrap();
            s.put(case.frame, &[t as u8; FRAME * LANES]).unwrap();
            s.put(case.state, &[t as f32; 9 * LANES]).unwrap();
            s.put(case.action, &[t; LANES]).unwrap();
            s.put(case.reward, &[1.0; LANES]).unwrap();
            s.commit().unwrap();
        }
        fake.hold(stream, false);
        for _ in 0..10 {
            let batch = learner.next_batch().unwrap();
            // Everything is quiet by then: nobody is called when a buffer comes back.
            std::thread::sleep(Duration::from_millis(20));
            drop(batch);
        }
        drop((learner, writer, feed));
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn a_kernel_that_cannot_be_loaded_leaves_it_to_the_cpu_and_is_reported() {
        let fake = fake("load", 1);
        fake.auto_run(true);
        for (function, code) in [("cuModuleLoadData", 218), ("cuModuleGetFunction", 500), ("cuModuleLoadData", 209)] {
            let case = Case::new(Kind::Flat);
            fake.inject(function, 1, code);
            let feed = case.builder(&fake).start().unwrap();
            let Some(GatherReport::Cpu { why }) = feed.gather() else { panic!("{:?}", feed.gather()) };
            assert!(why.contains("the kernel could not be loaded") && why.contains(&code.to_string()), "{why}");
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            let writer = case.write(&feed).unwrap();
            assert_eq!(learner.next_batch().unwrap().rows(), ROWS);
            assert_eq!(feed.metrics().devices[0].gathered, 0);
            drop((learner, writer, feed));

            fake.inject(function, 1, code);
            let error = case.builder(&fake).gather(Gather::Mapped).start().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cuda);
            assert!(error.to_string().starts_with("the device cannot gather, which `.gather(Gather::Mapped)`"), "{error}");
            assert_eq!(fake.live_registrations(), [], "nothing is left");
        }
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn who_takes_first_decides_and_what_cannot_be_is_refused() {
        let fake = fake("ends", 1);
        fake.auto_run(true);
        let case = Case::new(Kind::Flat);
        // The device first: its batches are out of a host learner's reach.
        let feed = case.builder(&fake).start().unwrap();
        let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
        let error = feed.learner().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains("gathered on its device"), "{error}");
        drop((learner, feed));
        // The host first: the CPU gathers, for both.
        let feed = case.builder(&fake).start().unwrap();
        let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0, fake.user_stream(1)).unwrap());
        assert!(matches!(feed.gather(), Some(GatherReport::Cpu { why }) if why.contains("on the host")));
        let writer = case.write(&feed).unwrap();
        assert_eq!((host.next_batch().unwrap().rows(), device.next_batch().unwrap().rows()), (ROWS, ROWS));
        drop((host, device, writer, feed));

        let refused = |builder: FeedBuilder, says: &str| {
            let error = builder.start().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(case.builder(&fake).gather(Gather::Mapped).pinning(Pinning::Off), "not page-locked");
        let alone = Feed::builder(case.sample.clone()).batch(ROWS).lanes(LANES).replay(600, Uniform::new());
        refused(alone.pinning(Pinning::Required).cuda(search(&fake)).gather(Gather::Mapped), "no device is attached");
        refused(case.builder(&fake).gather_blocks(0), "0 thread blocks cannot gather");
        let mut step = Step::new();
        step.leaf::<f32>("reward", &[]);
        refused(Feed::builder(Sample::step(step)).gather(Gather::Auto), "`.gather` and `.gather_blocks` are of stored");
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// A launch, an upload or a wait that fails ends the feed with the call's name; what it may still read is kept.
    fn a_gather_that_fails_ends_the_feed_and_its_slot_is_quarantined() {
        let fake = fake("fails", 1);
        fake.auto_run(true);
        for function in ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord"] {
            let case = Case::new(Kind::Stacks);
            let feed = case.builder(&fake).gather(Gather::Mapped).start().unwrap();
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            fake.inject(function, 1, 719);
            let writer = case.write(&feed); // perhaps it ends before everything is written
            let error = loop {
                match learner.next_timeout(DEADLINE) {
                    Ok(Some(batch)) => drop(batch),
                    Ok(None) => panic!("{function}: nothing came"),
                    Err(error) => break error,
                }
            };
            let text = error.to_string();
            assert!(text.contains(function.trim_end_matches("_v2")) && text.contains("719"), "{text}");
            drop((learner, writer));
            let report = feed.stop(DEADLINE).unwrap();
            assert_eq!(report.quarantined_slots, 1, "{function}");
        }
    }
}
