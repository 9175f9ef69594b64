//! The case of `h2d` that looks for torn batches.

use super::rates::expected;
use crate::common::{Cell, Report, watchdog};
use crate::gpu::Setting;
use crate::gpu::driver::{Cuda, DeviceMemory, Failure, HostMemory, Stream};
use crate::gpu::rows::{Content, Handles, Shape, Writers, stamp};
use crate::gpu::stats::Random;
use pinring::{DeviceBatch, DeviceLearner, Feed, Pinning};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Two feeds at a time: large and small batches.
const ROUNDS: [[Shape; 2]; 2] = [
    [Shape { rows: 512, leaves: 4, words: 4190 }, Shape { rows: 64, leaves: 4, words: 1024 }], // 34.3 and 1 MB
    [Shape { rows: 512, leaves: 4, words: 1764 }, Shape { rows: 128, leaves: 4, words: 1764 }], // 14.5 and 3.6 MB
];
/// One of so many batches is downloaded too; one of so many is held up on the device.
const DOWNLOADED: u64 = 16;
const HELD_UP: usize = 8;
const HELD_UP_US: usize = 500;
/// Copies that keep the link busy: their bytes, and how many are queued at a time.
const NOISE_BYTES: usize = 32 << 20;
const NOISE_QUEUED: usize = 3;
const CONTROLS: u64 = 20;
/// How long batches may stay away, and a stop may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// One feed, and what was found of its batches.
struct Fed {
    cuda: &'static Cuda,
    shape: Shape,
    tag: u64,
    handles: Handles,
    feed: Feed,
    learner: DeviceLearner,
    writers: Writers,
    /// Weights found on the device and weights expected, column by column, batch by batch.
    sums: DeviceMemory,
    expected: Vec<u64>,
    downloads: Arc<Downloads>,
}

#[derive(Default)]
struct Downloads {
    checked: AtomicU64,
    torn: AtomicU64,
}

pub fn run(setting: &Setting, report: &mut Report, batches: usize) -> Result<(), Failure> {
    let found = control(setting)?;
    report.table(
        "torn batches",
        &[("what", 44), ("batches", 8), ("torn", 6), ("downloads", 9), ("torn", 6), ("GB/s", 6)],
    );
    report.row(vec![
        "torn on purpose, to be found".into(),
        (CONTROLS as usize).into(),
        (found as usize).into(),
        0usize.into(),
        0usize.into(),
        Cell::None,
    ]);
    if found == 0 {
        return Err("the check does not see batches that were torn on purpose, so it shows nothing".into());
    }
    let mut torn = 0;
    for shapes in ROUNDS {
        torn += round(setting, report, shapes, batches.div_ceil(ROUNDS.len()))?;
    }
    if torn > 0 { Err(format!("{torn} batches were torn").into()) } else { Ok(()) }
}

/// Memory whose copy is queued is overwritten at once: how many such batches does the check find?
fn control(setting: &Setting) -> Result<u64, Failure> {
    let (cuda, shape) = (setting.cuda, ROUNDS[0][1]);
    let bytes = shape.batch_bytes();
    let stream = cuda.stream()?;
    let mut from = cuda.page_locked(bytes)?;
    let (to, sum) = (cuda.alloc(bytes)?, cuda.alloc(8)?);
    let mut got = cuda.page_locked(8)?;
    let mut found = 0;
    for step in 0..CONTROLS {
        watchdog::alive("torn on purpose");
        shape.fill(&mut from, 0, step);
        // SAFETY: everything lives until the stream was waited for. That the memory changes while its copy is queued is
        // the point: the device may see any mixture.
        unsafe {
            setting.kernels.spin_cycles(setting.kernels.cycles(1000.0), stream.raw())?; // the copy is queued behind this
            cuda.copy_in(to.address, from.as_ptr(), bytes, stream.raw())?;
            shape.fill(&mut from, 0, step + 1);
            cuda.set(sum.address, 0, 2, stream.raw())?;
            setting.kernels.weigh(to.address, shape.column_words(), sum.address, stream.raw())?;
            cuda.copy_out(got.as_mut_ptr(), sum.address, 8, stream.raw())?;
        }
        stream.synchronize()?;
        let lanes = (0..shape.rows as u64).map(|lane| (lane, step));
        found += u64::from(got[..] != shape.column_weight(0, 0, lanes).to_ne_bytes());
    }
    Ok(found)
}

/// Two feeds side by side; returns the torn batches.
fn round(setting: &Setting, report: &mut Report, shapes: [Shape; 2], batches: usize) -> Result<u64, Failure> {
    let stream = setting.cuda.stream()?;
    let threads = setting.number("--writers", 6, 6);
    let fed = |tag: usize| Fed::start(setting.cuda, shapes[tag], tag as u64 + 1, &stream, batches, threads);
    let mut feeds = [fed(0)?, fed(1)?];
    let noise = Noise::start(setting.cuda)?;
    let mut random = Random(batches as u64);
    let begun = Instant::now();
    let (mut taken, mut last) = (0, begun);
    while taken < batches {
        watchdog::alive("looking for torn batches");
        let before = taken;
        for fed in &mut feeds {
            if let Some(batch) = fed.learner.try_next()? {
                if random.below(HELD_UP) == 0 {
                    let cycles = setting.kernels.cycles(random.below(HELD_UP_US) as f64);
                    setting.kernels.spin_cycles(cycles, stream.raw())?;
                }
                fed.weigh(setting, &stream, batch)?;
                taken += 1;
            }
        }
        if taken > before {
            last = Instant::now();
        } else if last.elapsed() > DEADLINE {
            let feeds = feeds.map(|fed| fed.feed.metrics().devices);
            return Err(format!("{taken} of {batches} batches came, then none for {DEADLINE:?}: {feeds:?}").into());
        }
    }
    stream.synchronize()?;
    let seconds = begun.elapsed().as_secs_f64();
    let copies = noise.end()?;
    let mut torn = 0;
    for fed in feeds {
        torn += fed.end(report, &stream, seconds)?;
    }
    report.row(vec![
        format!("beside them, copies of {:.1} MB by hand", NOISE_BYTES as f64 / 1e6).as_str().into(),
        copies.into(),
        Cell::None,
        Cell::None,
        Cell::None,
        Cell::Figure((copies * NOISE_BYTES) as f64 / seconds / 1e9, 2),
    ]);
    Ok(torn)
}

impl Fed {
    fn start(
        cuda: &'static Cuda,
        shape: Shape,
        tag: u64,
        stream: &Stream,
        most: usize,
        threads: usize,
    ) -> Result<Fed, Failure> {
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).buffers(3).prefetch(2).device(0);
        let feed = feed.downloads(shape.column_words() * 4).pinning(Pinning::Required).start()?;
        // SAFETY: a stream of device 0, which the caller keeps longer than the learner.
        let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
        let writers = Writers::start(&feed, shape, &handles, tag, threads)?;
        // Up to two batches a turn, the last turn included.
        let sums = cuda.alloc((most + 2) * shape.leaves * 8)?;
        // SAFETY: memory just allocated, which outlives the stream's work.
        unsafe { cuda.set(sums.address, 0, sums.bytes / 4, stream.raw())? };
        writers.order(u64::MAX, Content::Stamped);
        Ok(Fed {
            cuda,
            shape,
            tag,
            handles,
            feed,
            learner,
            writers,
            sums,
            expected: Vec::new(),
            downloads: Arc::default(),
        })
    }

    /// Weighs a batch behind what is in the stream, and drops it at once.
    fn weigh(&mut self, setting: &Setting, stream: &Stream, batch: DeviceBatch) -> Result<(), Failure> {
        let first = self.expected.len();
        self.expected.extend(expected(self.shape, self.tag, &batch));
        for (index, &column) in self.handles.columns.iter().enumerate() {
            let sum = self.sums.address + (first + index) as u64 * 8;
            // SAFETY: a column of the batch, which is released behind this; the sums outlive the stream's work.
            unsafe { setting.kernels.weigh(batch.column(column).ptr, self.shape.column_words(), sum, stream.raw())? };
        }
        if batch.sequence_number().is_multiple_of(DOWNLOADED) {
            let column = batch.column(self.handles.columns[0]);
            let rows: Vec<u32> = batch
                .lanes()
                .zip(batch.first_steps())
                .map(|(lane, step)| stamp(self.tag, 0, lane as u64, step))
                .collect();
            let (words, downloads) = (self.shape.words, self.downloads.clone());
            let then = move |bytes: &[u8]| {
                let mut expected = rows.iter().flat_map(|row| std::iter::repeat_n(row, words));
                let whole = bytes.chunks_exact(4).all(|word| expected.next().is_some_and(|e| e.to_ne_bytes() == word));
                downloads.checked.fetch_add(1, Ordering::Relaxed);
                downloads.torn.fetch_add(u64::from(!whole || expected.next().is_some()), Ordering::Relaxed);
            };
            // SAFETY: a column of the batch, which is released on the same stream behind the snapshot.
            unsafe { self.learner.download(column.ptr, self.shape.column_words() * 4, then)? };
        }
        drop(batch);
        Ok(())
    }

    /// Compares what was weighed with what was written.
    fn end(self, report: &mut Report, stream: &Stream, seconds: f64) -> Result<u64, Failure> {
        let Fed { cuda, shape, feed, learner, writers, sums, expected, downloads, .. } = self;
        let mut got = vec![0u8; expected.len() * 8];
        // SAFETY: as many sums were weighed; both memories live until the stream was waited for.
        unsafe { cuda.copy_out(got.as_mut_ptr(), sums.address, got.len(), stream.raw())? };
        stream.synchronize()?;
        drop(learner);
        let fault = feed.stop(DEADLINE)?.fault;
        writers.join()?;
        if let Some(fault) = fault {
            return Err(format!("the feed ended by a fault: {fault}").into());
        }
        let right: Vec<bool> =
            got.chunks_exact(8).zip(&expected).map(|(got, expected)| got == expected.to_ne_bytes()).collect();
        let batches = right.len() / shape.leaves;
        let torn = right.chunks_exact(shape.leaves).filter(|columns| columns.contains(&false)).count();
        let (checked, torn_downloads) =
            (downloads.checked.load(Ordering::Relaxed) as usize, downloads.torn.load(Ordering::Relaxed) as usize);
        report.row(vec![
            format!("{:.1} MB, dropped at once, link busy", shape.batch_bytes() as f64 / 1e6).as_str().into(),
            batches.into(),
            torn.into(),
            checked.into(),
            torn_downloads.into(),
            Cell::Figure((batches * shape.batch_bytes()) as f64 / seconds / 1e9, 2),
        ]);
        Ok((torn + torn_downloads) as u64)
    }
}

/// A thread whose copies keep the link busy. A few are queued, then waited for: a stream that has a copy queued at every
/// moment keeps the copy engine for itself, and what other streams copy waits until that one happens to run empty (seen on
/// an H200: a copy of 1 MB waited from 70 ms to more than 1.5 s, whatever the streams' priorities).
pub struct Noise {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<usize, Failure>>,
}

impl Noise {
    pub fn start(cuda: &'static Cuda) -> Result<Noise, Failure> {
        let over = Arc::new(AtomicBool::new(false));
        let (stream, from, to) = (cuda.stream()?, cuda.page_locked(NOISE_BYTES)?, cuda.alloc(NOISE_BYTES)?);
        let theirs = over.clone();
        let thread = std::thread::spawn(move || {
            cuda.make_current()?;
            let result = keep_busy(cuda, &theirs, &stream, &from, &to);
            stream.synchronize()?; // also behind an error: the memory goes now
            result
        });
        Ok(Noise { over, thread })
    }

    /// Ends it, and says how many copies there were.
    pub fn end(self) -> Result<usize, Failure> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| "the thread that keeps the link busy panicked")?
    }
}

fn keep_busy(
    cuda: &Cuda,
    over: &AtomicBool,
    stream: &Stream,
    from: &HostMemory,
    to: &DeviceMemory,
) -> Result<usize, Failure> {
    let mut copies = 0;
    while !over.load(Ordering::Relaxed) {
        for _ in 0..NOISE_QUEUED {
            // SAFETY: both memories have as many bytes, and live until the stream was waited for.
            unsafe { cuda.copy_in(to.address, from.as_ptr(), NOISE_BYTES, stream.raw())? };
            copies += 1;
        }
        stream.synchronize()?;
    }
    Ok(copies)
}
