//! The case of `dispatch_stall` that asks what `next_batch` and drop cost the learner's thread.
//!
//! Batches lie ready, and are taken and dropped in bursts; between two of ours the calls that cannot be avoided are
//! made by hand: a wait of the stream, a record of an event, and two questions whether the stream is capturing. Neither
//! sleeps: voluntary switches of the thread inside the bursts are counted.

use crate::common::{Cell, Report, watchdog};
use crate::gpu::Setting;
use crate::gpu::driver::Failure;
use crate::gpu::rows::{Content, Shape, Writers};
use crate::gpu::stats::{median, quantile};
use pinring::{Feed, Pinning};
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape { rows: 64, leaves: 4, words: 64 };
const BURST: usize = 4;
const DEADLINE: Duration = Duration::from_secs(10);

pub fn run(setting: &Setting, report: &mut Report) -> Result<(), Failure> {
    let name = "overhead: next_batch and drop";
    if !setting.args.wants(name) {
        return Ok(());
    }
    let rounds = match setting.is_timing() {
        true => setting.number("--steps", 400, 40) * 10,
        false => 4,
    };
    let cuda = setting.cuda;
    let compute = cuda.stream()?;
    let (sample, handles) = SHAPE.declare();
    let feed = Feed::builder(sample).batch(SHAPE.rows).buffers(BURST + 2).prefetch(BURST + 2).device(0);
    let feed = feed.pinning(Pinning::Required).start()?;
    // SAFETY: a stream of device 0, which outlives the learner.
    let learner = unsafe { feed.learner_on(0, compute.raw().as_pointer())? };
    let writers = Writers::start(&feed, SHAPE, &handles, 1, 1)?;
    let event = cuda.event()?;
    event.record(compute.raw())?;

    let mut times: [Vec<f64>; 6] = Default::default();
    let mut timed = |which: usize, since: Instant| times[which].push(since.elapsed().as_nanos() as f64);
    let mut sleeps = 0;
    for round in 0..rounds {
        watchdog::alive(name);
        writers.order(BURST as u64, Content::Cached);
        let patience = Instant::now() + DEADLINE;
        while feed.metrics().devices[0].batches_waiting < BURST {
            if Instant::now() > patience {
                return Err(format!("{BURST} batches do not lie ready in round {round}: {:?}", feed.metrics()).into());
            }
            std::thread::yield_now();
        }
        let before = voluntary_switches();
        for _ in 0..BURST {
            let begun = Instant::now();
            let batch = learner.next_batch()?;
            timed(0, begun);
            let begun = Instant::now();
            drop(batch);
            timed(1, begun);
            let begun = Instant::now();
            compute.wait(&event)?;
            timed(2, begun);
            let begun = Instant::now();
            event.record(compute.raw())?;
            timed(3, begun);
            let begun = Instant::now();
            compute.is_capturing()?;
            timed(4, begun);
            timed(5, Instant::now());
        }
        sleeps += voluntary_switches().zip(before).map_or(0, |(now, before)| now - before);
    }
    drop(learner);
    feed.stop(DEADLINE)?;
    writers.join()?;
    println!("checked: {} batches taken and dropped; the thread slept {sleeps} times meanwhile", rounds * BURST);
    if !setting.is_timing() {
        return Ok(());
    }

    report.table(
        &format!("{name}, {} each; ns", rounds * BURST),
        &[("call", 56), ("p50", 8), ("p90", 8), ("p99", 8), ("p99.9", 8), ("most", 8)],
    );
    let row = |name: &str, figures: &[f64]| {
        let mut row = vec![Cell::from(name)];
        row.extend([0.5, 0.9, 0.99, 0.999, 1.0].map(|q| Cell::Figure(quantile(figures, q), 0)));
        row
    };
    let names = [
        "next_batch (a batch lies ready)",
        "drop",
        "by hand: cuStreamWaitEvent",
        "by hand: cuEventRecord",
        "by hand: cuStreamIsCapturing",
        "by hand: nothing, which is the clock",
    ];
    for (name, figures) in names.iter().zip(&times) {
        report.row(row(name, figures));
    }
    let [next, drop, wait, record, capturing, clock] = times.each_ref().map(|figures| median(figures));
    let clock = clock.max(0.0);
    report.table("overhead beyond the calls it is made of; ns", &[("call", 56), ("p50", 8)]);
    report.row(vec!["next_batch - wait - is capturing".into(), Cell::Figure(next - wait - capturing + clock, 0)]);
    report.row(vec!["drop - record - is capturing".into(), Cell::Figure(drop - record - capturing + clock, 0)]);
    report.row(vec!["times that the thread slept in them".into(), Cell::Count(sleeps)]);
    Ok(())
}

/// How often this thread has slept, if the system says so.
fn voluntary_switches() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
}
