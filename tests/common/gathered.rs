//! Stores whose batches a device gathers: what the tests of it share, against the fake library and on a real GPU alike.
#![allow(dead_code)] // each test uses a part

use crate::feeding::{DEADLINE, LEGACY, learner_on};
use pinring::*;
use std::sync::mpsc;

/// What a case reads of its store.
pub struct Case {
    pub sample: Sample,
    pub frame: Leaf<u8>,
    pub state: Leaf<f32>,
    pub action: Leaf<i64>,
    pub reward: Leaf<f32>,
    /// Names and bytes of the columns, checked in this order.
    pub columns: Vec<ColumnInfo>,
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// n-step transitions with two stacks of frames.
    Stacks,
    /// A row that is a few bytes.
    Flat,
    Sequences {
        time_major: bool,
    },
}

pub const ROWS: usize = 32;
pub const LANES: usize = 3;
pub const FRAME: usize = 37;

impl Case {
    pub fn new(kind: Kind) -> Case {
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

    pub fn builder(&self, search: &CudaSearch) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(3).lanes(LANES).seed(11);
        let builder = builder.replay(600, Prioritized::new(0.6, 0.4));
        builder.pinning(Pinning::Required).cuda(search.clone()).device(0)
    }

    /// Columns, and how many samples there are once everything is written.
    pub fn look(&mut self, search: &CudaSearch) -> u64 {
        let feed = self.builder(search).gather(Gather::Cpu).start().unwrap();
        self.columns = feed.columns();
        let _writer = self.write(&feed).unwrap();
        feed.metrics().stored_samples as u64
    }

    /// 200 steps a lane, with episodes that end in each of three ways.
    pub fn write(&self, feed: &Feed) -> Result<Writer> {
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

/// The columns of so many batches, and the steps that their rows begin with.
type Gathered = (Vec<Vec<Vec<u8>>>, Vec<Vec<u64>>);

/// Gathers so many batches. None is selected before everything is there: then the seed alone decides.
fn gather(search: &CudaSearch, (case, samples): (&Case, u64), by: Gather, count: usize) -> (Gathered, Feed) {
    let builder = case.builder(search).pace(Pace::min_size(samples)).prefetch(3).gather(by);
    let feed = builder.downloads(1 << 20).start().unwrap();
    let learner = learner_on(&feed, 0, LEGACY).unwrap();
    let writer = case.write(&feed).unwrap();
    let (sender, receiver) = mpsc::channel();
    let (mut columns, mut steps) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let batch = learner.next_batch().unwrap();
        let of_batch = case.columns.iter().map(|column| {
            let ((at, bytes), sender) = (place(&batch, case, column), sender.clone());
            let then = move |bytes: &[u8]| sender.send(bytes.to_vec()).unwrap();
            // SAFETY: the column's bytes on the learner's device; the batch is dropped behind the snapshot.
            unsafe { learner.download(at, bytes, then) }.unwrap();
            receiver.recv_timeout(DEADLINE).expect("the download arrives")
        });
        columns.push(of_batch.collect());
        steps.push(batch.first_steps().collect());
    }
    drop((learner, writer));
    ((columns, steps), feed)
}

/// What the device gathers is what the CPU gathers, bit by bit.
pub fn same_bit_by_bit(search: &CudaSearch, count: usize) {
    let kinds = [Kind::Stacks, Kind::Flat, Kind::Sequences { time_major: false }, Kind::Sequences { time_major: true }];
    for kind in kinds {
        let mut case = Case::new(kind);
        let samples = case.look(search);
        let (by_cpu, feed) = gather(search, (&case, samples), Gather::Cpu, count);
        assert_eq!(feed.gather(), Some(GatherReport::Cpu { why: "asked for".into() }));
        assert_eq!(feed.metrics().devices[0].gathered, 0);
        drop(feed);
        for by in [Gather::Mapped, Gather::Auto] {
            let (by_device, feed) = gather(search, (&case, samples), by, count);
            assert_eq!(feed.gather(), Some(GatherReport::Kernel { blocks: 4 }), "{kind:?}");
            let device = &feed.metrics().devices[0];
            // In `Auto` one may have been begun before the learner was there.
            let by_cpu_at_most = u64::from(by == Gather::Auto);
            assert!(device.gathered + by_cpu_at_most >= device.batches, "{kind:?}, {by:?}: {device:?}");
            assert!(device.gathered + 1 >= count as u64);
            assert_eq!(by_cpu.1, by_device.1, "{kind:?}: the same rows are chosen");
            for (number, (a, b)) in by_cpu.0.iter().zip(&by_device.0).enumerate() {
                for (info, (a, b)) in case.columns.iter().zip(a.iter().zip(b)) {
                    let wrong = (0..a.len()).find(|&i| a[i] != b[i]);
                    assert_eq!(wrong, None, "{kind:?}, batch {number}, {}: the first byte that differs", info.name);
                }
            }
        }
        assert!(by_cpu.0.iter().any(|batch| batch != &by_cpu.0[0]), "batches differ");
    }
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
