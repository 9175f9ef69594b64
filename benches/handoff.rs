//! How long from the last commit of a batch to a learner that runs with it, and what does waiting cost?
//!
//! ```text
//! cargo bench --bench handoff -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]
//! ```
//!
//! - `latency`: a writer fills batches of 32 small rows with a pause in front of each last row, in which it computes or
//!   sleeps; the last row carries the time just before its commit, and the learner, which has parked meanwhile, looks at
//!   the clock when it has the batch. On a machine with nothing else to do, and with as many busy threads as cores. The
//!   floor: a value behind a mutex, and a condvar.
//! - `one-row`: batches of one row, as fast as they go, through 3 buffers. The yardstick: the standard library's
//!   channel with 3 places.
//! - `waiting`: time on a processor, of the whole process, with a feed that nobody uses, with 8 writers before a full
//!   ring, and with 8 writers behind a learner that holds each batch for 2 ms.

mod common;

use common::crew::{Length, Part};
use common::stats::quantile;
use common::{Args, Cell, Crew, Failure, Mode, Report, Spread, cpu, drain, watchdog};
use pinring::{Column, Feed, Leaf, Learner, NextError, Sample, Step, Writer};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const BATCH: usize = 32;
const BUFFERS: usize = 3;
/// What a writer pauses in front of a batch's last row.
const PAUSE: Duration = Duration::from_micros(500);
/// Batches in one slice of the latencies.
const BATCHES: usize = 150;
/// What the learner that is slow holds each batch for.
const HOLD: Duration = Duration::from_millis(2);

fn main() -> ExitCode {
    common::main("handoff", |args, report| {
        if args.wants("latency") {
            latency(args, report)?;
        }
        if args.wants("one-row") {
            one_row(args, report)?;
        }
        if args.wants("waiting") {
            waiting(args, report)?;
        }
        Ok(())
    })
}

/// A feed of steps of one number.
struct Numbers {
    feed: Feed,
    leaf: Leaf<u64>,
    column: Column<u64>,
}

impl Numbers {
    fn start(batch: usize) -> Result<Numbers, Failure> {
        let mut step = Step::new();
        let leaf = step.leaf("number", &[]);
        let mut sample = Sample::step(step);
        let column = sample.all(leaf);
        Ok(Numbers { feed: Feed::builder(sample).batch(batch).buffers(BUFFERS).start()?, leaf, column })
    }
}

fn write(writer: &mut Writer, leaf: Leaf<u64>, number: u64) -> Option<()> {
    let mut step = writer.step().ok()?;
    step.put(leaf, &[number]).expect("a number fits");
    step.commit().ok()
}

// Latency.

#[derive(Clone, Copy, Debug, PartialEq)]
enum Pause {
    Computes,
    Sleeps,
}

impl Pause {
    fn take(self) {
        match self {
            Pause::Sleeps => std::thread::sleep(PAUSE),
            Pause::Computes => {
                let begun = Instant::now();
                while begun.elapsed() < PAUSE {
                    std::hint::spin_loop();
                }
            }
        }
    }
}

fn latency(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let columns =
        [("case", 30), ("p50, us", 18), ("p90, us", 20), ("p99, us", 22), ("floor, p50, us", 18), ("p99, us", 22)];
    report.table("last commit to learner running, batches of 32: medians over slices [least, most]", &columns);
    check_order(BATCH, 20 * BATCH as u64 + 7)?;
    report.checked();
    if args.mode == Mode::Check {
        return Ok(());
    }
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    for pause in [Pause::Computes, Pause::Sleeps] {
        let mut slices = [(0, Vec::new(), Vec::new()), (cores, Vec::new(), Vec::new())];
        for _ in 0..args.pairs() {
            for (busy, floor, ours) in &mut slices {
                watchdog::alive("a slice");
                let _busy = Busy::start(*busy);
                floor.push(condvar_latencies(pause));
                ours.push(latencies(pause)?);
            }
        }
        for (busy, floor, ours) in slices {
            let does = if pause == Pause::Computes { "computes" } else { "sleeps" };
            let machine = if busy == 0 { "idle".to_owned() } else { format!("{busy} busy threads") };
            let at = |slices: &[Vec<f64>], q| Spread::of(slices.iter().map(|slice| quantile(slice, q)));
            let case = format!("writer {does}, {machine}");
            let most = if busy == 0 { 25.0 } else { 50.0 };
            report.at_most(format!("{case}: last commit to learner, p50, us"), at(&ours, 0.5).median, most);
            report.row(vec![
                Cell::Text(case),
                Cell::Spread(at(&ours, 0.5), 1),
                Cell::Spread(at(&ours, 0.9), 1),
                Cell::Spread(at(&ours, 0.99), 1),
                Cell::Spread(at(&floor, 0.5), 1),
                Cell::Spread(at(&floor, 0.99), 1),
            ]);
        }
    }
    Ok(())
}

/// Sorted microseconds of one slice.
fn latencies(pause: Pause) -> Result<Vec<f64>, Failure> {
    let Numbers { feed, leaf, column } = Numbers::start(BATCH)?;
    let (mut writer, learner) = (feed.writer(1)?, feed.learner()?);
    let epoch = Instant::now();
    let writing = std::thread::spawn(move || {
        for _ in 0..BATCHES {
            (1..BATCH).for_each(|_| write(&mut writer, leaf, 0).expect("the feed runs"));
            pause.take();
            write(&mut writer, leaf, epoch.elapsed().as_nanos() as u64).expect("the feed runs");
        }
    });
    let mut waits = Vec::with_capacity(BATCHES);
    for batch in learner.iter() {
        let batch = batch?;
        let now = epoch.elapsed().as_nanos() as u64;
        waits.push((now - batch.slice(column)[BATCH - 1]) as f64 / 1e3);
    }
    writing.join().expect("a panic ends the process");
    waits.sort_by(f64::total_cmp);
    Ok(waits)
}

/// The same for the simplest hand-over there is: a value, and whether it was the last one.
fn condvar_latencies(pause: Pause) -> Vec<f64> {
    let shared = Arc::new((Mutex::new((None, false)), Condvar::new()));
    let epoch = Instant::now();
    let writing = std::thread::spawn({
        let shared = shared.clone();
        move || {
            for batch in 1..=BATCHES {
                pause.take();
                let now = epoch.elapsed().as_nanos() as u64;
                *shared.0.lock().unwrap_or_else(PoisonError::into_inner) = (Some(now), batch == BATCHES);
                shared.1.notify_one();
            }
        }
    });
    let mut waits: Vec<f64> = Vec::with_capacity(BATCHES);
    let mut last = false;
    while !last {
        let state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = shared.1.wait_while(state, |state| state.0.is_none()).unwrap_or_else(PoisonError::into_inner);
        last = state.1;
        let sent = state.0.take().unwrap_or_default();
        drop(state);
        waits.push((epoch.elapsed().as_nanos() as u64 - sent) as f64 / 1e3);
    }
    writing.join().expect("a panic ends the process");
    waits.sort_by(f64::total_cmp);
    waits
}

/// Threads that compute until this is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Busy {
    fn start(threads: usize) -> Busy {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..threads).map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        });
        Busy { threads: threads.collect(), stop }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

// One-row batches.

#[derive(Clone, Copy, Debug)]
enum Turn {
    Channel,
    Ours,
}

fn one_row(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let columns = [("case", 30), ("M batches/s", 20), ("std channel, M/s", 20), ("CPU ns, writer", 16)];
    report.table("batches of one row, 3 buffers: medians [least, most]", &columns);
    check_order(1, 20_000)?;
    report.checked();
    if args.mode == Mode::Check {
        return Ok(());
    }
    let Numbers { feed, leaf, .. } = Numbers::start(1)?;
    let (mut writer, learner) = (feed.writer(1)?, feed.learner()?);
    let learner = std::thread::spawn(move || drain(&learner));
    let (sender, receiver) = sync_channel::<u64>(BUFFERS);
    let receiver = std::thread::spawn(move || receiver.iter().for_each(drop));
    let part: Part<Turn> = Box::new(move |turn, until| {
        let mut done = 0;
        while !until.over(done) {
            match turn {
                Turn::Channel => sender.send(done).expect("the receiver runs"),
                Turn::Ours => write(&mut writer, leaf, done).expect("the feed runs"),
            }
            done += 1;
        }
        Some(done)
    });
    let crew = Crew::new(vec![part]);
    let slice = Length::Time(args.slice(Duration::from_millis(100)));
    crew.slice(Turn::Channel, slice);
    crew.slice(Turn::Ours, slice);
    let pairs = (0..args.pairs()).map(|_| (crew.slice(Turn::Channel, slice), crew.slice(Turn::Ours, slice)));
    let pairs: Vec<_> = pairs.collect();
    drop(crew);
    learner.join().expect("a panic ends the process")?;
    receiver.join().expect("a panic ends the process");

    let ours = Spread::of(pairs.iter().map(|pair| pair.1.rate() / 1e6));
    report.at_least("one-row batches, M/s", ours.median, 1.0);
    report.row(vec![
        "one-row".into(),
        Cell::Spread(ours, 2),
        Cell::Spread(Spread::of(pairs.iter().map(|pair| pair.0.rate() / 1e6)), 2),
        Cell::Spread(Spread::of(pairs.iter().map(|pair| pair.1.cpu_ns())), 0),
    ]);
    Ok(())
}

/// One writer's numbers come out in their order, none missing, and so do the batches.
fn check_order(batch: usize, numbers: u64) -> Result<(), Failure> {
    let Numbers { feed, leaf, column } = Numbers::start(batch)?;
    let (mut writer, learner) = (feed.writer(1)?, feed.learner()?);
    let writing = std::thread::spawn(move || (0..numbers).all(|number| write(&mut writer, leaf, number).is_some()));
    let mut expected = 0..numbers;
    for (sequence, taken) in learner.iter().enumerate() {
        let taken = taken?;
        let right = taken.slice(column).iter().all(|&number| expected.next() == Some(number));
        if !right || taken.sequence_number() != sequence as u64 {
            return Err(format!("batch {sequence} of {batch} rows is out of order: {:?}", taken.slice(column)).into());
        }
    }
    match (writing.join().expect("a panic ends the process"), expected.count()) {
        (true, 0) => Ok(()),
        (_, missing) => Err(format!("{missing} numbers did not arrive in batches of {batch}").into()),
    }
}

// What waiting costs.

/// What the learner does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waiting {
    /// It waits for batches; writers are there and write nothing.
    Idle,
    /// It holds every batch; writers wait for room.
    Full,
    /// It holds each batch for a while.
    Slow,
}

fn waiting(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let columns = [("case", 44), ("cores", 8), ("rows/s", 10)];
    report.table("time on a processor, of the whole process, while it waits", &columns);
    let time = match args.mode {
        Mode::Check => Duration::from_millis(50),
        Mode::Quick => Duration::from_secs(3),
        Mode::Full => Duration::from_secs(10),
    };
    for waiting in [Waiting::Idle, Waiting::Full, Waiting::Slow] {
        watchdog::alive(format!("{waiting:?}"));
        let (cores, rows) = wait(waiting, args.slice(time).max(Duration::from_millis(50)))?;
        report.checked();
        if args.mode == Mode::Check {
            continue;
        }
        let (case, most) = match waiting {
            Waiting::Idle => ("waiting: a learner, and 8 writers elsewhere", 0.01),
            Waiting::Full => ("waiting: 8 writers before a full ring", 0.01),
            Waiting::Slow => ("waiting: 8 writers, each batch held 2 ms", 0.1),
        };
        match cores {
            Some(cores) => report.at_most(format!("{case}, cores"), cores, most),
            None => println!("  {case}: this system does not say what a process takes of its processors"),
        }
        let cores = cores.map_or(Cell::None, |cores| Cell::Figure(cores, 4));
        report.row(vec![case.into(), cores, Cell::Figure(rows, 0)]);
    }
    Ok(())
}

/// Cores used, and rows delivered a second, over `time`. Checks that every writer ends with the feed, and that rows are
/// neither lost nor invented.
fn wait(waiting: Waiting, time: Duration) -> Result<(Option<f64>, f64), Failure> {
    const WRITERS: usize = 8;
    const ROWS: usize = 512;
    let Numbers { feed, leaf, .. } = Numbers::start(ROWS)?;
    let learner = feed.learner()?;
    let stop = Arc::new(AtomicBool::new(false));
    let writers = (0..WRITERS).map(|_| {
        let (mut writer, stop) = (feed.writer(1)?, stop.clone());
        Ok(std::thread::spawn(move || {
            let mut written = 0u64;
            match waiting {
                Waiting::Idle => {
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::park();
                    }
                }
                Waiting::Full | Waiting::Slow => {
                    while write(&mut writer, leaf, written).is_some() {
                        written += 1;
                    }
                }
            }
            written
        }))
    });
    let writers = writers.collect::<Result<Vec<_>, Failure>>()?;
    let learning = std::thread::spawn({
        let stop = stop.clone();
        move || learn(&learner, waiting, &stop)
    });
    std::thread::sleep(time / 5); // until the ring is full, and everybody waits
    let (begun, cpu, before) = (Instant::now(), cpu::of_process(), feed.metrics());
    std::thread::sleep(time);
    let (elapsed, used, after) = (begun.elapsed(), cpu::of_process(), feed.metrics());

    stop.store(true, Ordering::Relaxed);
    let left = feed.stop(Duration::from_secs(30))?;
    learning.thread().unpark();
    let taken = learning.join().expect("a panic ends the process")?;
    let mut written = 0;
    for writer in writers {
        writer.thread().unpark();
        written += writer.join().expect("a panic ends the process");
    }
    if written != taken + left.dropped_rows() {
        return Err(format!("{waiting:?}: {written} rows were committed, {taken} were taken, {left}").into());
    }
    let full = (ROWS * BUFFERS) as u64;
    if waiting == Waiting::Full && written != full {
        return Err(format!("{waiting:?}: {written} rows were committed to a ring of {full}").into());
    }
    let cores = used.zip(cpu).map(|(used, cpu)| (used - cpu).as_secs_f64() / elapsed.as_secs_f64());
    Ok((cores, (after.rows - before.rows) as f64 / elapsed.as_secs_f64()))
}

/// Takes batches until the feed is stopped; returns rows.
fn learn(learner: &Learner, waiting: Waiting, stop: &AtomicBool) -> Result<u64, Failure> {
    let (mut held, mut rows) = (Vec::new(), 0);
    loop {
        let batch = match learner.next_batch() {
            Ok(batch) => batch,
            Err(NextError::Closed(_)) => return Ok(rows),
            Err(error) => return Err(error.into()),
        };
        rows += batch.rows() as u64;
        match waiting {
            Waiting::Slow => std::thread::sleep(HOLD),
            _ => held.push(batch),
        }
        if held.len() == BUFFERS {
            while !stop.load(Ordering::Relaxed) {
                std::thread::park();
            }
            return Ok(rows);
        }
    }
}
