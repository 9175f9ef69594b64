//! Pinning explained: the ways of copying a batch to a GPU, timed on this machine. What does each keep the calling thread
//! from doing, when is it done, and which common beliefs hold here?
//!
//! Run with `cargo run --release --example pinning_explained`. Without a GPU it says so and ends. For users of PyTorch
//! each way stands beside the call that it is: PyTorch's copies end in the same driver calls, on the current stream.
//! Every way is timed alone and *queued*: behind 5 ms of kernels that the stream already has, as in a training loop.

#[allow(unsafe_code)]
#[path = "../benches/gpu/driver.rs"]
mod driver;
#[allow(unsafe_code)]
#[path = "../benches/gpu/kernels.rs"]
mod kernels;
#[allow(dead_code)]
#[path = "../benches/gpu/rows.rs"]
mod rows;

use driver::{Cuda, DeviceMemory, Failure, HostMemory, Stream};
use kernels::Kernels;
use pinring::*;
use rows::{Content, Shape, Writers};
use std::time::{Duration, Instant};

const SIZES: [(usize, &str); 4] =
    [(64 << 10, "64 KB"), (1 << 20, "1 MB"), (34_332_672, "34 MB"), (256 << 20, "256 MB")];
/// The size that the beliefs are held against: a batch of 512 rows of 67 KB.
const TYPICAL: usize = 2;
const LEAVES: usize = 44;
const QUEUED_US: f64 = 5000.0;
const TURNS: usize = 15;
const DEADLINE: Duration = Duration::from_secs(10);

/// The ways, in the order of the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Pageable,
    PageableWait,
    LockThenCopy,
    StageThenCopy,
    StageThenCopyWait,
    StageByThreadsThenCopyWait,
    PageLockedByLeaf,
    PageLockedWait,
    PageLocked,
    Pinring,
}

use Way::*;
const WAYS: [Way; 10] = [
    Pageable,
    PageableWait,
    LockThenCopy,
    StageThenCopy,
    StageThenCopyWait,
    StageByThreadsThenCopyWait,
    PageLockedByLeaf,
    PageLockedWait,
    PageLocked,
    Pinring,
];

impl Way {
    /// What it does, and how PyTorch spells it.
    fn text(self) -> (&'static str, &'static str) {
        match self {
            Pageable => ("ordinary memory", ".to(\"cuda\", non_blocking=True)"),
            PageableWait => ("ordinary memory, wait", ".to(\"cuda\")"),
            LockThenCopy => ("page-lock it, copy, unlock", "cudaHostRegister for each batch"),
            StageThenCopy => ("copy to a page-locked stage", ".pin_memory().to(…, non_blocking=True)"),
            StageThenCopyWait => ("the same, wait", ".pin_memory().to(\"cuda\")"),
            StageByThreadsThenCopyWait => ("the same by several threads, wait", "as above, large tensors"),
            PageLockedByLeaf => ("page-locked, 44 copies", "44 × pinned.to(…, non_blocking=True)"),
            PageLockedWait => ("page-locked already, wait", "pinned.to(\"cuda\")"),
            PageLocked => ("page-locked already", "pinned.to(\"cuda\", non_blocking=True)"),
            Pinring => ("pinring: fed ahead", "-"),
        }
    }
}

/// Medians in µs: when the call returns, and when the batch is on the device.
#[derive(Clone, Copy, Debug)]
struct Times {
    returns: f64,
    done: f64,
}

/// Alone, and queued.
type Pair = [Times; 2];

fn main() -> std::result::Result<(), Failure> {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) => {
            println!("skipped: no CUDA device: {error}");
            return Ok(());
        }
    };
    let kernels = Kernels::new(cuda)?;
    println!("{}; medians of {TURNS}, in µs: when the call returns / when the batch is there\n", cuda.describe());
    let mut tables = Vec::new();
    for (bytes, size) in SIZES {
        tables.push(table(cuda, &kernels, bytes, size)?);
    }
    beliefs(&tables[TYPICAL]);
    println!("\nWhat to do");
    for ((_, size), table) in SIZES.iter().zip(&tables) {
        println!("  {size}: {}", advice(table));
    }
    Ok(())
}

/// Times every way for one size, and prints the table.
fn table(cuda: &'static Cuda, kernels: &Kernels, bytes: usize, size: &str) -> std::result::Result<Vec<Pair>, Failure> {
    println!("{size:<34}  {:<40} {:>22} {:>24}", "in PyTorch", "alone", "behind 5 ms of kernels");
    let mut bench = Bench::new(cuda, kernels, bytes)?;
    let mut table = Vec::new();
    for way in WAYS {
        let pair = [bench.time(way, false)?, bench.time(way, true)?];
        let (what, torch) = way.text();
        let cell = |times: Times| format!("{:.1} / {:.0}", times.returns, times.done);
        println!("  {what:<32}  {torch:<40} {:>22} {:>24}", cell(pair[0]), cell(pair[1]));
        table.push(pair);
    }
    println!();
    bench.end()?;
    Ok(table)
}

/// What the ways of one size need.
struct Bench<'a> {
    cuda: &'static Cuda,
    kernels: &'a Kernels,
    stream: Stream,
    shape: Shape,
    pageable: Vec<u8>,
    page_locked: HostMemory,
    to: DeviceMemory,
    threads: usize,
    feed: Feed,
    learner: DeviceLearner,
    writers: Writers,
}

impl<'a> Bench<'a> {
    fn new(cuda: &'static Cuda, kernels: &'a Kernels, bytes: usize) -> std::result::Result<Bench<'a>, Failure> {
        let shape = Shape::of_bytes(bytes, LEAVES, if bytes < 1 << 20 { 64 } else { 512 });
        let bytes = shape.batch_bytes();
        let stream = cuda.stream()?;
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).device(0).pinning(Pinning::Required).start()?;
        // SAFETY: a stream of device 0; `end` drops the learner first.
        #[allow(unsafe_code)]
        let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
        let writers = Writers::start(&feed, shape, &handles, 1, 4)?;
        let (page_locked, to) = (cuda.page_locked(bytes)?, cuda.alloc(bytes)?);
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2).min(8));
        let pageable = vec![1; bytes];
        Ok(Bench { cuda, kernels, stream, shape, pageable, page_locked, to, threads, feed, learner, writers })
    }

    fn end(self) -> std::result::Result<(), Failure> {
        let Bench { feed, learner, writers, stream, .. } = self;
        drop(learner);
        feed.stop(DEADLINE)?;
        drop(stream);
        writers.join()
    }

    fn time(&mut self, way: Way, queued: bool) -> std::result::Result<Times, Failure> {
        let (mut returns, mut done) = (Vec::new(), Vec::new());
        for turn in 0..=TURNS {
            if way == Pinring {
                self.let_a_batch_lie_ready()?;
            }
            if queued {
                self.kernels.spin_cycles(self.kernels.cycles(QUEUED_US), self.stream.raw())?;
            }
            let begun = Instant::now();
            self.copy(way)?;
            let returned = begun.elapsed();
            self.stream.synchronize()?;
            let ended = begun.elapsed();
            if way == LockThenCopy {
                self.cuda.unregister(&self.pageable)?; // not timed: it must wait for the copy
            }
            if turn > 0 {
                returns.push(returned.as_secs_f64() * 1e6);
                done.push(ended.as_secs_f64() * 1e6);
            }
        }
        Ok(Times { returns: median(returns), done: median(done) })
    }

    /// The call that is timed.
    fn copy(&mut self, way: Way) -> std::result::Result<(), Failure> {
        match way {
            Pageable => self.queue(false),
            PageableWait => self.queue(false).and_then(|()| self.stream.synchronize()),
            LockThenCopy => {
                // SAFETY: the memory lives as long as the bench, and `time` ends its registration.
                #[allow(unsafe_code)]
                unsafe {
                    self.cuda.register(&self.pageable)?
                };
                self.queue(false)
            }
            StageThenCopy => {
                self.page_locked.copy_from_slice(&self.pageable);
                self.queue(true)
            }
            StageThenCopyWait => {
                self.page_locked.copy_from_slice(&self.pageable);
                self.queue(true).and_then(|()| self.stream.synchronize())
            }
            StageByThreadsThenCopyWait => {
                let part = self.pageable.len().div_ceil(self.threads);
                std::thread::scope(|scope| {
                    for (to, from) in self.page_locked.chunks_mut(part).zip(self.pageable.chunks(part)) {
                        scope.spawn(|| to.copy_from_slice(from));
                    }
                });
                self.queue(true).and_then(|()| self.stream.synchronize())
            }
            PageLockedByLeaf => {
                let leaf_bytes = self.shape.column_words() * 4;
                (0..LEAVES).try_for_each(|leaf| self.queue_part(true, self.shape.column_offset(leaf), leaf_bytes))
            }
            PageLocked => self.queue(true),
            PageLockedWait => self.queue(true).and_then(|()| self.stream.synchronize()),
            Pinring => {
                drop(self.learner.next_batch()?); // kernels would be launched in between
                Ok(())
            }
        }
    }

    fn queue(&self, page_locked: bool) -> std::result::Result<(), Failure> {
        self.queue_part(page_locked, 0, self.shape.batch_bytes())
    }

    fn queue_part(&self, page_locked: bool, offset: usize, bytes: usize) -> std::result::Result<(), Failure> {
        let from: &[u8] = if page_locked { &self.page_locked } else { &self.pageable };
        let from = from[offset..][..bytes].as_ptr();
        // SAFETY: both memories have the batch's bytes and live as long as the bench; the stream is waited for before
        // the bytes change.
        #[allow(unsafe_code)]
        unsafe {
            self.cuda.copy_in(self.to.address + offset as u64, from, bytes, self.stream.raw())
        }
    }

    /// Writers fill a batch and the feed copies it, as they would while the step before runs.
    fn let_a_batch_lie_ready(&self) -> std::result::Result<(), Failure> {
        self.writers.order(1, Content::Cached);
        let patience = Instant::now() + DEADLINE;
        let lies_ready =
            |metrics: Metrics| metrics.devices[0].batches_waiting > 0 && metrics.devices[0].copies_in_flight == 0;
        while !lies_ready(self.feed.metrics()) {
            if Instant::now() > patience {
                return Err(format!("no batch lies ready: {:?}", self.feed.metrics()).into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// A way's figures.
fn of(table: &[Pair], way: Way) -> Pair {
    table[WAYS.iter().position(|w| *w == way).expect("every way is in the table")]
}

/// Says of common beliefs whether they hold here.
fn beliefs(table: &[Pair]) {
    println!("What people say, held against the figures for {}", SIZES[TYPICAL].1);
    let say = |belief: &str, holds: bool, because: String| {
        println!("  \"{belief}\"\n    {} here: {because}", if holds { "holds" } else { "does not hold" });
    };
    let [pageable, pageable_queued] = of(table, Pageable);
    say(
        "non_blocking=True makes a copy asynchronous",
        pageable.returns < pageable.done / 2.0,
        format!(
            "from ordinary memory the call returned after {:.0} of {:.0} µs; only page-locked memory returns at once ({:.0} µs)",
            pageable.returns,
            pageable.done,
            of(table, PageLocked)[0].returns
        ),
    );
    say(
        "a copy that is queued behind kernels does not wait for them",
        pageable_queued.returns < QUEUED_US / 2.0,
        format!(
            "from ordinary memory the call returned after {:.0} µs behind 5,000 µs of kernels, from page-locked after {:.0}",
            pageable_queued.returns,
            of(table, PageLocked)[1].returns
        ),
    );
    let (plain, staged) = (of(table, PageableWait)[0].done, of(table, StageThenCopyWait)[0].done);
    let by_threads = of(table, StageByThreadsThenCopyWait)[0].done;
    let best = staged.min(by_threads);
    say(
        "pin_memory().to() and to() are equally fast, since the driver pins anyway",
        (0.9..1.1).contains(&(best / plain)),
        format!("{plain:.0} µs plain; through a warm stage {staged:.0} µs by one thread, {by_threads:.0} by several"),
    );
    let locked = of(table, LockThenCopy)[0];
    say(
        "pinning always pays",
        locked.done < plain,
        format!(
            "page-locking the batch for one copy: {:.0} µs until it is there, {plain:.0} without (unlocking comes on top)",
            locked.done
        ),
    );
    let (one, many) = (of(table, PageLocked)[0], of(table, PageLockedByLeaf)[0]);
    say(
        "one copy for each tensor costs nothing",
        many.returns < one.returns * 2.0 && many.done < one.done * 1.05,
        format!(
            "44 copies keep the thread {:.0} µs and are there after {:.0}; one copy {:.0} and {:.0}",
            many.returns, many.done, one.returns, one.done
        ),
    );
    let [alone, queued] = of(table, Pinring);
    println!(
        "  pinring's learner was kept {:.1} µs ({:.1} behind kernels): the copy ran while the step before did.",
        alone.returns, queued.returns
    );
}

/// One sentence.
fn advice(table: &[Pair]) -> String {
    let (pageable, locked) = (of(table, Pageable), of(table, PageLocked));
    let kept = (pageable[0].returns - locked[0].returns).max(0.0);
    let queued = (pageable[1].returns - locked[1].returns).max(0.0);
    if kept < 50.0 && queued < 50.0 {
        format!(
            "any way will do; ordinary memory keeps the thread {kept:.0} µs longer, also behind kernels ({queued:.0} µs)"
        )
    } else if kept < 50.0 {
        format!(
            "alone any way will do ({kept:.0} µs), but behind queued kernels ordinary memory makes the thread wait for them: \
             write into page-locked memory, or copy on a thread of its own"
        )
    } else {
        format!(
            "never copy from ordinary memory on the learner's thread ({kept:.0} µs alone, {queued:.0} behind kernels); do not \
             pin for each batch either, but write into memory that is page-locked once"
        )
    }
}
