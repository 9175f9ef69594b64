//! 4. Where time goes: the same program with slow environments and with a slow learner, told apart by its metrics.
//!
//! Run with `cargo run --release --example 04_where_time_goes`. The counters are always on. Three questions to ask:
//! does the learner wait for batches, do writers wait for room, do writers wait for weights?

use pinring::*;
use std::thread;
use std::time::{Duration, Instant};

const BATCH: usize = 64;
const LANES: usize = 4;
const THREADS: usize = 2;

fn main() -> Result<()> {
    run("slow environments", Duration::from_millis(2), Duration::from_micros(200))?;
    run("a slow learner", Duration::from_micros(20), Duration::from_millis(20))?;
    Ok(())
}

/// Takes batches for a second from environments and with a learner of the given speed.
fn run(what: &str, env: Duration, learn: Duration) -> Result<()> {
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[64]);
    let feed = Feed::builder(Sample::step(step)).batch(BATCH).buffers(3).start()?;

    let intake = feed.intake()?;
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let intake = intake.clone();
            thread::spawn(move || -> Result<()> {
                let mut writer = intake.writer(LANES)?;
                loop {
                    thread::sleep(env); // the simulation
                    let mut s = writer.step()?;
                    s.view_mut(obs).fill(0.0);
                    s.commit()?;
                }
            })
        })
        .collect();
    drop(intake);

    let learner = feed.learner()?;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        let batch = learner.next_batch()?;
        thread::sleep(learn); // the update
        drop(batch);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let metrics = feed.metrics();
    println!("{what}: {:.0} rows/s", metrics.rows as f64 / seconds);
    show("filling a batch", metrics.fill);
    show("waiting for the learner", metrics.wait);
    show("in the learner's hands", metrics.hold);
    let share = |time: Duration, threads: usize| 100.0 * time.as_secs_f64() / seconds / threads as f64;
    let (starved, full) = (share(metrics.learner_blocked, 1), share(metrics.writer_blocked, THREADS));
    println!("  the learner waited for batches {starved:.0} % of the time, each writer for room {full:.0} %");
    println!("  {} of 3 slots are free, {} batches wait", metrics.free_slots, metrics.batches_waiting);
    println!("  so the bottleneck is {}\n", if starved > full { "the environments" } else { "the learner" });

    feed.stop(Duration::from_secs(5))?;
    for thread in threads {
        let _ = thread.join().expect("no environment thread panics"); // each ends with the stop's error
    }
    Ok(())
}

fn show(what: &str, latency: Latency) {
    println!("  {what:<24} p50 {:>9.1?}  p99 {:>9.1?}  ({} batches)", latency.p50, latency.p99, latency.count);
}
