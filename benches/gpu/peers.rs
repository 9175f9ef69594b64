//! The case of `h2d` that says of the crate what `scripts/peers` says of its peers: the same workloads, and a line of JSON
//! for each figure, with the same names.

use super::rates::expected;
use crate::common::watchdog;
use crate::gpu::Setting;
use crate::gpu::driver::{Failure, Stream};
use crate::gpu::rows::{Content, Shape, Writers};
use crate::gpu::stats::{median, quantile};
use pinring::{DeviceLearner, Feed, Pinning};
use std::time::{Duration, Instant};

const WORKLOADS: [(&str, Shape); 2] =
    [("pixels, 28 KB, 4 leaves", Shape::PIXELS), ("structured, 67 KB, 44 leaves", Shape::STRUCTURED)];
const WARM_UP: usize = 8;
const DEADLINE: Duration = Duration::from_secs(10);

/// What one batch came to, in µs.
struct Turn {
    /// How long `next_batch` and the drop kept the learner's thread.
    returns: f64,
    /// From the call to the batch on the device.
    done: f64,
}

pub fn run(setting: &Setting, turns: usize) -> Result<(), Failure> {
    for (workload, shape) in WORKLOADS {
        watchdog::alive(workload);
        let stream = setting.cuda.stream()?;
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).buffers(8).prefetch(3).device(0);
        let feed = feed.pinning(Pinning::Required).start()?;
        // SAFETY: a stream of device 0, which outlives the learner.
        let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
        let writers = Writers::start(&feed, shape, &handles, 1, setting.number("--writers", 8, 8))?;
        writers.order(1, Content::Stamped);
        let batch = learner.next_batch()?;
        let (cuda, sum) = (setting.cuda, setting.cuda.alloc(8)?);
        let mut got = [0; 8];
        // SAFETY: the column is the batch's, which is held; the sum lives until the stream was waited for.
        unsafe {
            cuda.set(sum.address, 0, 2, stream.raw())?;
            let column = batch.column(handles.columns[0]);
            setting.kernels.weigh(column.ptr, shape.column_words(), sum.address, stream.raw())?;
            cuda.copy_out(got.as_mut_ptr(), sum.address, 8, stream.raw())?;
        }
        stream.synchronize()?;
        if u64::from_ne_bytes(got) != expected(shape, 1, &batch)[0] {
            return Err(format!("{workload}: a batch is not what was written").into());
        }
        drop(batch);

        // A rate is not what a batch that lies ready says.
        let say = |way: &str, turns: &[Turn], with_rate: bool| {
            let of = |pick: fn(&Turn) -> f64| turns.iter().map(pick).collect::<Vec<f64>>();
            let (returns, done) = (of(|turn| turn.returns), of(|turn| turn.done));
            println!(
                "{{\"peer\": \"pinring\", \"workload\": \"{workload}\", \"way\": \"{way}\", \"device\": \"cuda\", \"turns\": {}, \
                 \"batch_bytes\": {}, \"returns_us\": {:.1}, \"done_us\": {:.1}, \"done_us_least\": {:.1}, \
                 \"done_us_most\": {:.1}, \"gb_per_s\": {}}}",
                turns.len(),
                shape.batch_bytes(),
                median(&returns),
                median(&done),
                quantile(&done, 0.0),
                quantile(&done, 1.0),
                match with_rate {
                    true => format!("{:.2}", shape.batch_bytes() as f64 / median(&done) / 1e3),
                    false => "null".to_owned(),
                },
            );
        };
        say("FIFO, from batch to batch while rows are written", &in_a_row(&learner, &stream, &writers, turns)?, true);
        let ready = ready(&feed, &learner, &stream, &writers, turns)?;
        say("FIFO, rows written while the learner was busy", &ready, false);
        drop(learner);
        let fault = feed.stop(DEADLINE)?.fault;
        writers.join()?;
        if let Some(fault) = fault {
            return Err(format!("the feed ended by a fault: {fault}").into());
        }
    }
    Ok(())
}

/// As fast as they come.
fn in_a_row(learner: &DeviceLearner, stream: &Stream, writers: &Writers, turns: usize) -> Result<Vec<Turn>, Failure> {
    writers.order((WARM_UP + turns) as u64, Content::Memory);
    let mut all = Vec::with_capacity(turns);
    let mut last = Instant::now();
    for turn in 0..WARM_UP + turns {
        let begun = Instant::now();
        let batch = learner.next_batch()?;
        let took = begun.elapsed();
        batch.synchronize()?;
        let dropping = Instant::now();
        drop(batch);
        let returns = micros(took + dropping.elapsed());
        if turn >= WARM_UP {
            all.push(Turn { returns, done: micros(last.elapsed()) });
        }
        last = Instant::now();
    }
    stream.synchronize()?;
    Ok(all)
}

/// Each is taken when the feed has done its part, as by a learner that was busy meanwhile.
fn ready(
    feed: &Feed,
    learner: &DeviceLearner,
    stream: &Stream,
    writers: &Writers,
    turns: usize,
) -> Result<Vec<Turn>, Failure> {
    let mut all = Vec::with_capacity(turns);
    for turn in 0..WARM_UP + turns {
        writers.order(1, Content::Memory);
        let patience = Instant::now() + DEADLINE;
        let is_ready = || {
            let device = &feed.metrics().devices[0];
            device.batches_waiting == 1 && device.copies_in_flight == 0
        };
        while !is_ready() {
            if Instant::now() > patience {
                return Err(format!("no batch lies ready: {:?}", feed.metrics()).into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let begun = Instant::now();
        drop(learner.next_batch()?);
        let returned = begun.elapsed();
        stream.synchronize()?;
        if turn >= WARM_UP {
            all.push(Turn { returns: micros(returned), done: micros(begun.elapsed()) });
        }
    }
    Ok(all)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
