//! Batches gathered by the CPU, beside `memcpy` of the same pieces by as many threads.

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
    let floor = Copies::new(capacity * work.record_bytes(), work.piece, bytes);
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

/// Memory as large as the store, from which pieces are copied by nothing but `memcpy`.
struct Copies {
    source: Floor,
    /// Of all batches that are in use at a time.
    target: Floor,
}

impl Copies {
    fn new(store_bytes: usize, piece: usize, batch: usize) -> Copies {
        let source = Floor::pieces(piece, store_bytes.div_ceil(piece));
        Copies { source, target: Floor::pieces(piece, (batch * BUFFERS).div_ceil(piece).max(16)) }
    }

    /// Bytes a second that so many threads copy from random places.
    fn rate(&self, threads: usize, length: Duration) -> f64 {
        let (copied, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let (begun, piece) = (Instant::now(), self.source.row_bytes());
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (copied, over) = (&copied, &over);
                scope.spawn(move || {
                    let mut draws = Draws::new(2, thread as u64);
                    let (mut pieces, share) = (0u64, self.target.rows / threads);
                    while !over.load(Ordering::Relaxed) {
                        for to in thread * share..(thread + 1) * share {
                            let from = draws.below(self.source.rows as u64) as usize;
                            // SAFETY: nobody writes the source; rows of the target are each one thread's.
                            unsafe { self.target.put(0, 0, to, 0, self.source.get(0, 0, from, 0), 1) };
                            pieces += 1;
                        }
                    }
                    copied.fetch_add(pieces * piece as u64, Ordering::Relaxed);
                });
            }
            std::thread::sleep(length);
            over.store(true, Ordering::Relaxed);
        });
        copied.into_inner() as f64 / begun.elapsed().as_secs_f64()
    }
}
