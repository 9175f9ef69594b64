//! Batches gathered by a device from the mapped store, beside those that the CPU gathers and a copy moves, and the link's
//! own rate; and what a gather costs a learner that keeps the device busy.

use super::host::{builder, capacity};
use super::work::{Declared, Kind, Work};
use crate::common::{Args, Cell, Failure, Mode, Report, Spread};
use crate::gpu::Kernels;
use crate::gpu::driver::{Cuda, DeviceMemory, HostMemory, Stream};
use pinring::*;
use std::time::{Duration, Instant};

const SLICE: Duration = Duration::from_millis(300);
const CHECKED: usize = 3;
/// Batches in the ring, and on the device.
const AHEAD: (usize, usize) = (6, 6);
const DEADLINE: Duration = Duration::from_secs(10);
/// Launches of the work that keeps a device busy, and how long each takes about.
const BUSY: (usize, f64) = (20, 500.0);

pub fn table(report: &mut Report) {
    report.table(
        "onto the device, sustained, GB/s: medians [least, most]",
        &[
            ("case", 34),
            ("bytes a batch", 12),
            ("as delivered", 20),
            ("as crossed", 20),
            ("µs a batch", 18),
            ("one copy of it by hand", 20),
            ("of by hand", 18),
            ("busy device slowed by, %", 20),
        ],
    );
}

/// One case: gathered by so many blocks, or, for `None`, by the CPU and then copied.
pub struct Case<'a> {
    pub name: String,
    pub work: &'a Work,
    pub blocks: Option<u32>,
    pub store_bytes: usize,
}

impl Case<'_> {
    pub fn run(
        &self,
        (cuda, kernels): (&'static Cuda, &Kernels),
        args: &Args,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let declared = self.work.declare();
        let capacity = capacity(self.work, self.store_bytes);
        let stream = cuda.stream()?;
        let builder = builder(self.work, &declared, capacity).pinning(Pinning::Required).device(0);
        let builder = builder.buffers(AHEAD.0).prefetch(AHEAD.1);
        let feed = match self.blocks {
            Some(blocks) => builder.gather(Gather::Mapped).gather_blocks(blocks).start()?,
            None => builder.gather(Gather::Cpu).start()?,
        };
        // SAFETY: a stream of device 0, which outlives the learner.
        let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
        let writers = declared.fill(&feed, capacity)?;
        self.check(&declared, &learner, cuda, &stream)?;
        report.checked();
        if args.mode != Mode::Check {
            self.time(&declared, &learner, (cuda, kernels), args, report)?;
        }
        let gathered = feed.metrics().devices[0].gathered;
        drop(learner);
        let stopped = feed.stop(DEADLINE)?;
        drop((writers, stream));
        match (stopped.fault, self.blocks.is_some() == (gathered > 0)) {
            (Some(fault), _) => Err(format!("{}: {fault}", self.name).into()),
            (None, false) => Err(format!("{}: the device gathered {gathered} batches", self.name).into()),
            (None, true) => Ok(()),
        }
    }

    /// Every column of some batches, byte by byte.
    fn check(
        &self,
        declared: &Declared,
        learner: &DeviceLearner,
        cuda: &'static Cuda,
        stream: &Stream,
    ) -> Result<(), Failure> {
        for _ in 0..CHECKED {
            let batch = learner.next_batch()?;
            let of: Vec<(u64, u64)> = batch.lanes().map(|lane| lane as u64).zip(batch.first_steps()).collect();
            for content in &declared.contents {
                let column = batch.column(content.column);
                let bytes = column.shape.iter().product();
                let mut got: HostMemory = cuda.page_locked(bytes)?;
                // SAFETY: the column is the batch's, which is held; the target lives until the stream was waited for.
                unsafe { cuda.copy_out(got.as_mut_ptr(), column.ptr, bytes, stream.raw())? };
                stream.synchronize()?;
                let checked = declared.check(content, &got, &of, self.work.kind == Kind::Sequences);
                checked.map_err(|error| format!("{}: {error}", self.name))?;
            }
        }
        Ok(())
    }

    fn time(
        &self,
        declared: &Declared,
        learner: &DeviceLearner,
        (cuda, kernels): (&'static Cuda, &Kernels),
        args: &Args,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let (delivered, crossed) = declared.bytes(self.work.rows);
        let by_hand = ByHand::new(cuda, delivered)?;
        let busy = Busy::new(cuda, kernels)?;
        let (mut ours, mut floors, mut slowed) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..=args.pairs() {
            let rate = batches(learner, args.slice(SLICE))?;
            let floor = by_hand.rate(args.slice(SLICE))?;
            // Nobody takes batches: the link is quiet once the buffers are full.
            std::thread::sleep(Duration::from_millis(20));
            let alone = busy.micros()?;
            let beside = busy.beside(learner)?;
            if pair > 0 {
                ours.push(rate);
                floors.push(floor);
                slowed.push((beside / alone - 1.0) * 100.0);
            }
        }
        let rates = |bytes: usize| Spread::of(ours.iter().map(|rate| rate * bytes as f64 / 1e9));
        let (as_delivered, as_crossed) = (rates(delivered), rates(crossed));
        let of = Spread::of(ours.iter().zip(&floors).map(|(ours, floor)| ours / floor));
        report.row(vec![
            Cell::Text(self.name.clone()),
            delivered.into(),
            Cell::Spread(as_delivered, 1),
            Cell::Spread(as_crossed, 1),
            Cell::Spread(Spread::of(ours.iter().map(|rate| 1e6 / rate)), 1),
            Cell::Spread(Spread::of(floors.iter().map(|rate| rate * delivered as f64 / 1e9)), 1),
            Cell::Spread(of, 2),
            Cell::Spread(Spread::of(slowed), 1),
        ]);
        if self.blocks.is_some_and(|blocks| blocks <= 8) {
            let (what, crossed_of) = (format!("{}, GB/s as delivered", self.name), as_crossed.median);
            match self.work.name {
                "28KB/4-leaves" | "67KB/44-leaves" => report.at_least(what, as_delivered.median, 44.0),
                "4KB/4-leaves" => report.at_least(what, as_delivered.median, 30.0),
                "stacks-of-4/n-3" => {
                    let floor = Spread::of(floors.iter().map(|rate| rate * delivered as f64 / 1e9)).median;
                    report.at_least(format!("{}, as crossed, of raw DMA", self.name), crossed_of / floor, 0.75);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Batches a second, taken and dropped at once; until the last one is there.
fn batches(learner: &DeviceLearner, length: Duration) -> Result<f64, Failure> {
    let (begun, mut count) = (Instant::now(), 0);
    let last = loop {
        let batch = learner.next_batch()?;
        count += 1;
        if begun.elapsed() >= length {
            break batch;
        }
    };
    last.synchronize()?;
    Ok(f64::from(count) / begun.elapsed().as_secs_f64())
}

/// One copy a batch from page-locked memory, three of them queued at a time.
struct ByHand {
    cuda: &'static Cuda,
    stream: Stream,
    from: HostMemory,
    to: Vec<DeviceMemory>,
    bytes: usize,
}

impl ByHand {
    fn new(cuda: &'static Cuda, bytes: usize) -> Result<ByHand, Failure> {
        let to = (0..3).map(|_| cuda.alloc(bytes)).collect::<Result<_, _>>()?;
        Ok(ByHand { cuda, stream: cuda.stream()?, from: cuda.page_locked(bytes)?, to, bytes })
    }

    fn rate(&self, length: Duration) -> Result<f64, Failure> {
        let (begun, mut count) = (Instant::now(), 0);
        while begun.elapsed() < length {
            for to in &self.to {
                // SAFETY: both live until the stream was waited for.
                unsafe { self.cuda.copy_in(to.address, self.from.as_ptr(), self.bytes, self.stream.raw())? };
                count += 1;
            }
            self.stream.synchronize()?;
        }
        Ok(f64::from(count) / begun.elapsed().as_secs_f64())
    }
}

/// Work that fills every multiprocessor.
struct Busy<'a> {
    kernels: &'a Kernels,
    stream: Stream,
    cuda: &'static Cuda,
    turns: u64,
}

impl<'a> Busy<'a> {
    fn new(cuda: &'static Cuda, kernels: &'a Kernels) -> Result<Busy<'a>, Failure> {
        let mut busy = Busy { kernels, stream: cuda.stream()?, cuda, turns: 10_000 };
        for _ in 0..3 {
            busy.turns = (busy.turns as f64 * BUSY.1 / busy.micros()?).max(1.0) as u64;
        }
        Ok(busy)
    }

    /// Microseconds of one launch, on average.
    fn micros(&self) -> Result<f64, Failure> {
        let (begin, end) = self.launch()?;
        end.synchronize()?;
        Ok(begin.micros_until(&end)? / BUSY.0 as f64)
    }

    fn launch(&self) -> Result<(crate::gpu::driver::Event, crate::gpu::driver::Event), Failure> {
        let (begin, end) = (self.cuda.timed_event()?, self.cuda.timed_event()?);
        begin.record(self.stream.raw())?;
        for _ in 0..BUSY.0 {
            self.kernels.work(self.turns, self.stream.raw())?;
        }
        end.record(self.stream.raw())?;
        Ok((begin, end))
    }

    /// The same while batches are taken as fast as they come.
    fn beside(&self, learner: &DeviceLearner) -> Result<f64, Failure> {
        drop(learner.next_batch()?);
        let (begin, end) = self.launch()?;
        while !end.is_done()? {
            drop(learner.next_batch()?);
        }
        Ok(begin.micros_until(&end)? / BUSY.0 as f64)
    }
}
