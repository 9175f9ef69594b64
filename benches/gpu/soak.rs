//! The case of `h2d` that watches memory.

use crate::common::{Cell, Report, watchdog};
use crate::gpu::Setting;
use crate::gpu::driver::{Failure, Stream};
use crate::gpu::rows::{Content, Shape, Writers};
use pinring::{Feed, Pinning};
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape::PIXELS;
const DOWNLOAD_BYTES: usize = 1 << 20;
/// Feeds that are started and stopped, and those after which memory is looked at first.
const CYCLES: usize = 20;
const WARM_CYCLES: usize = 5;
/// What may come and go: the driver's pools, other processes on the device.
const HOST_SLACK: usize = 32 << 20;
const DEVICE_SLACK: usize = 64 << 20;
const DEADLINE: Duration = Duration::from_secs(10);

/// Bytes in use.
#[derive(Clone, Copy, Debug)]
struct Memory {
    host: usize,
    device: usize,
}

impl Memory {
    fn now(setting: &Setting) -> Result<Memory, Failure> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
        let kib: usize = kib.ok_or("/proc/self/status has no VmRSS")?;
        let (free, all) = setting.cuda.memory()?;
        Ok(Memory { host: kib << 10, device: all - free })
    }
}

pub fn run(setting: &Setting, report: &mut Report, seconds: usize) -> Result<(), Failure> {
    report.table(
        "memory in use, MB",
        &[("what", 44), ("host begin", 8), ("end", 8), ("most", 8), ("device begin", 8), ("end", 8), ("most", 8)],
    );
    let total = Duration::from_secs(seconds as u64);
    let stream = setting.cuda.stream()?;
    let name = "a feed that runs: batches and downloads";
    let mut looks = Vec::new();
    let batches = feed(setting, &stream, total, || {
        looks.push(Memory::now(setting)?);
        Ok(())
    })?;
    looks.drain(..looks.len() / 5); // warming up
    let steady = row(report, &format!("{name}, {batches} batches"), &looks);

    let mut looks = Vec::new();
    for cycle in 0..CYCLES {
        watchdog::alive("feeds that start and stop");
        feed(setting, &stream, Duration::ZERO, || Ok(()))?;
        if cycle >= WARM_CYCLES {
            looks.push(Memory::now(setting)?);
        }
    }
    let cycles = row(report, &format!("after each of {CYCLES} feeds that came and went"), &looks);
    steady.and(cycles)
}

/// Runs a feed for `total` and for a few batches at least; looks ten times a second.
fn feed(
    setting: &Setting,
    stream: &Stream,
    total: Duration,
    mut look: impl FnMut() -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let (sample, handles) = SHAPE.declare();
    let feed = Feed::builder(sample).batch(SHAPE.rows).downloads(DOWNLOAD_BYTES).device(0);
    let feed = feed.pinning(Pinning::Required).start()?;
    // SAFETY: a stream of device 0, which the caller keeps longer than the learner.
    let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
    let writers = Writers::start(&feed, SHAPE, &handles, 1, setting.number("--writers", 4, 4))?;
    writers.order(u64::MAX, Content::Cached);
    let begun = Instant::now();
    let (mut batches, mut next_look) = (0, begun);
    while batches < 10 || begun.elapsed() < total {
        watchdog::alive("the soak");
        let batch = learner.next_batch()?;
        let column = batch.column(handles.columns[0]);
        // SAFETY: the column has more bytes than that; the batch is released on the same stream behind the snapshot.
        unsafe { learner.download(column.ptr, DOWNLOAD_BYTES, |bytes| assert_eq!(bytes.len(), DOWNLOAD_BYTES))? };
        drop(batch);
        batches += 1;
        if Instant::now() >= next_look {
            look()?;
            next_look += Duration::from_millis(100);
        }
    }
    stream.synchronize()?;
    drop(learner);
    let fault = feed.stop(DEADLINE)?.fault;
    writers.join()?;
    fault.map_or(Ok(batches), |fault| Err(format!("the feed ended by a fault: {fault}").into()))
}

/// Prints a row; an error if memory grew.
fn row(report: &mut Report, what: &str, looks: &[Memory]) -> Result<(), Failure> {
    let (Some(first), Some(last)) = (looks.first(), looks.last()) else { return Err("nothing was looked at".into()) };
    let most = |of: fn(&Memory) -> usize| looks.iter().map(of).max().unwrap_or_default();
    let most = Memory { host: most(|m| m.host), device: most(|m| m.device) };
    let mb = |bytes: usize| Cell::Figure(bytes as f64 / 1e6, 1);
    report.row(vec![
        what.into(),
        mb(first.host),
        mb(last.host),
        mb(most.host),
        mb(first.device),
        mb(last.device),
        mb(most.device),
    ]);
    if last.host > first.host + HOST_SLACK || last.device > first.device + DEVICE_SLACK {
        return Err(format!("{what}: memory grew from {first:?} to {last:?}").into());
    }
    Ok(())
}
