//! Batches gathered by the CPU, beside `memcpy` by as many threads: of the same leaves from random records to the same places of a
//! slot, or where rows are stacks and sequences, of pieces as long.

use super::work::{Declared, LANES, Work};
use crate::common::{Args, Cell, Failure, Floor, Mode, Report, Spread};
use pinring::*;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BUFFERS: usize = 3;
const SLICE: Duration = Duration::from_millis(300);
const CHECKED: usize = 3;

pub fn table(report: &mut Report) {
    report.table(
        "gathered by the CPU, GB/s as delivered: medians [least, most]",
        &[
            ("case", 34),
            ("bytes a batch", 12),
            ("pinring", 20),
            ("µs a batch", 20),
            ("memcpy, as many threads", 22),
            ("of memcpy", 18),
        ],
    );
}

/// As many steps as so many bytes hold.
pub fn capacity(work: &Work, store_bytes: usize) -> usize {
    // At least what windows reach over in every lane, and some batches.
    (store_bytes / work.record_bytes()).max(LANES * 512)
}

pub fn builder(work: &Work, declared: &Declared, capacity: usize) -> FeedBuilder {
    let builder = Feed::builder(declared.sample.clone()).batch(work.rows).lanes(LANES).seed(1);
    builder.replay(capacity, Uniform::new()).pace(Pace::min_size(capacity as u64 / 200))
}

/// One number of threads.
pub fn run(
    name: &str,
    work: &Work,
    threads: usize,
    store_bytes: usize,
    args: &Args,
    report: &mut Report,
) -> Result<(), Failure> {
    let declared = work.declare();
    let capacity = capacity(work, store_bytes);
    let feed =
        builder(work, &declared, capacity).gather(Gather::Cpu).buffers(BUFFERS).gather_threads(threads).start()?;
    let writers = declared.fill(&feed, capacity)?;
    let learner = feed.learner()?;
    check(work, &declared, &learner)?;
    report.checked();
    if args.mode == Mode::Check {
        return Ok(());
    }
    let (bytes, _) = declared.bytes(work.rows);
    let floor = Copies::new(&feed, work, capacity, bytes);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for pair in 0..=args.pairs() {
        let (rate, of_floor) = (batches(&learner, args.slice(SLICE))?, floor.rate(threads, args.slice(SLICE)));
        if pair > 0 {
            ours.push(rate * bytes as f64 / 1e9);
            floors.push(of_floor / 1e9);
        }
    }
    drop((learner, writers));
    let of = Spread::of(ours.iter().zip(&floors).map(|(ours, floor)| ours / floor));
    report.row(vec![
        Cell::Text(name.to_owned()),
        bytes.into(),
        Cell::Spread(Spread::of(ours.iter().copied()), 2),
        Cell::Spread(Spread::of(ours.iter().map(|rate| bytes as f64 / rate / 1e3)), 1),
        Cell::Spread(Spread::of(floors.iter().copied()), 2),
        Cell::Spread(of, 2),
    ]);
    if work.piece >= 4096 {
        report.at_least(format!("{name}, of memcpy by as many threads"), of.median, 0.8);
    }
    Ok(())
}

fn check(work: &Work, declared: &Declared, learner: &Learner) -> Result<(), Failure> {
    for _ in 0..CHECKED {
        let batch = learner.next_batch()?;
        let of: Vec<(u64, u64)> = batch.lanes().map(|lane| lane as u64).zip(batch.first_steps()).collect();
        if of.len() != work.rows {
            return Err(format!("{}: {} rows", work.name, of.len()).into());
        }
        for content in &declared.contents {
            let got = batch.slice(content.column);
            let time_major = work.kind == super::work::Kind::Sequences;
            declared.check(content, got, &of, time_major).map_err(|error| format!("{}: {error}", work.name))?;
        }
    }
    Ok(())
}

/// Batches a second, taken and dropped at once.
fn batches(learner: &Learner, length: Duration) -> Result<f64, Failure> {
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < length {
        black_box(learner.next_batch()?);
        count += 1;
    }
    Ok(f64::from(count) / begun.elapsed().as_secs_f64())
}

/// Memory as large as the store, from which values are copied by nothing but `memcpy`.
struct Copies {
    source: Floor,
    /// Of all batches that are in use at a time.
    target: Floor,
    /// Where each column of the target lies in a record of the source.
    offsets: Vec<usize>,
}

impl Copies {
    fn new(feed: &Feed, work: &Work, capacity: usize, batch: usize) -> Copies {
        let store_bytes = capacity * work.record_bytes();
        if !work.is_steps() {
            let source = Floor::pieces(work.piece, store_bytes.div_ceil(work.piece));
            let target = Floor::pieces(work.piece, (batch * BUFFERS).div_ceil(work.piece).max(16));
            return Copies { source, target, offsets: vec![0] };
        }
        let target = Floor::like(&feed.columns(), work.rows, BUFFERS, None);
        let mut record = 0;
        let offsets = target.columns.iter().map(|column| {
            let offset = record;
            record += column.item.next_multiple_of(16);
            offset
        });
        Copies { offsets: offsets.collect(), source: Floor::pieces(record, capacity), target }
    }

    /// Bytes a second that so many threads copy from random places, each to rows of its own.
    fn rate(&self, threads: usize, length: Duration) -> f64 {
        let (copied, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let (begun, row_bytes) = (Instant::now(), self.target.row_bytes());
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (copied, over) = (&copied, &over);
                scope.spawn(move || {
                    let mut draws = Draws::new(2, thread as u64);
                    let mut rows = 0u64;
                    let share = self.target.rows * thread / threads..self.target.rows * (thread + 1) / threads;
                    while !over.load(Ordering::Relaxed) {
                        for (slot, to) in
                            (0..self.target.slots).flat_map(|slot| share.clone().map(move |to| (slot, to)))
                        {
                            let from = draws.below(self.source.rows as u64) as usize;
                            // SAFETY: nobody writes the source; rows of the target are each one thread's.
                            unsafe {
                                let record = self.source.get(0, 0, from, 0);
                                for (column, (&offset, at)) in self.offsets.iter().zip(&self.target.columns).enumerate()
                                {
                                    self.target.put(column, slot, to, 0, &record[offset..offset + at.item], 1);
                                }
                            }
                            rows += 1;
                        }
                    }
                    copied.fetch_add(rows * row_bytes as u64, Ordering::Relaxed);
                });
            }
            std::thread::sleep(length);
            over.store(true, Ordering::Relaxed);
        });
        copied.into_inner() as f64 / begun.elapsed().as_secs_f64()
    }
}
