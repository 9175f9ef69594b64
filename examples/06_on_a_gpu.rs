//! 6. On a GPU: batches that are copied ahead by the feed, used on the learner's stream, and a result on its way back.
//!
//! Run with `cargo run --release --example 06_on_a_gpu [DEVICE]`. It needs a GPU and nothing else: no toolkit, and no
//! kernels of its own. In place of a training step it downloads the rewards from the device and sums them on the host.
//! Without a usable CUDA it prints what was looked for and exits with 1.
#![allow(unsafe_code)] // a raw stream is a promise that only the program can make

use pinring::*;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const BATCH: usize = 512;
const LANES: usize = 64;
const UPDATES: usize = 100;

fn main() -> ExitCode {
    let device = std::env::args().nth(1).map_or(Ok(0), |ordinal| ordinal.parse());
    let Ok(device) = device else {
        eprintln!("the argument is the ordinal of a device: 0, 1, …");
        return ExitCode::from(2);
    };
    match run(device) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(device: i32) -> Result<()> {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[84, 84, 4]);
    let reward = step.leaf::<f32>("reward", &[]);
    let mut sample = Sample::step(step);
    let (obs_column, reward_column) = (sample.all(obs), sample.all(reward));

    let feed = Feed::builder(sample)
        .batch(BATCH)
        .buffers(4)
        .pinning(Pinning::Required)
        .device(device)
        .prefetch(2) // batches in device memory: one in use, one on its way
        .downloads(BATCH * size_of::<f32>())
        .start()?;

    let mut writer = feed.writer(LANES)?;
    let actor = std::thread::spawn(move || -> Result<()> {
        for t in 0.. {
            let mut s = writer.step()?; // ends with the feed
            s.view_mut(obs).fill(t as u8);
            s.put(reward, &[1.0; LANES])?;
            s.commit()?;
        }
        Ok(())
    });

    // SAFETY: handle 0 is the legacy default stream, which lives as long as the device.
    let learner = unsafe { feed.learner_on(device, std::ptr::null_mut())? };
    let (sums, summed) = mpsc::channel();
    let begun = Instant::now();
    let mut blocked = Duration::ZERO;
    for update in 0..UPDATES {
        let asked = Instant::now();
        let batch = learner.next_batch()?; // its copy is issued; the stream waits for it, this thread does not
        blocked += asked.elapsed();
        let (obs, reward) = (batch.column(obs_column), batch.column(reward_column));
        if update == 0 {
            println!("obs    {:?} {} at {:#x}", obs.shape, obs.dtype, obs.ptr);
            println!("reward {:?} {} at {:#x}", reward.shape, reward.dtype, reward.ptr);
        }
        // Here a learner launches its kernels on the stream. This one asks for the rewards back instead.
        let (bytes, sums) = (BATCH * size_of::<f32>(), sums.clone());
        let sum = move |bytes: &[u8]| {
            let floats = bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]));
            let _ = sums.send(floats.sum::<f32>());
        };
        // SAFETY: the column has that many bytes, and is the batch's until the stream has passed this call.
        unsafe { learner.download(reward.ptr, bytes, sum)? };
        drop(batch); // released behind the download
    }
    let seconds = begun.elapsed().as_secs_f64();
    drop(learner);
    println!("{}", feed.stop(Duration::from_secs(10))?);
    let sums: Vec<f32> = summed.try_iter().collect();
    assert!(!sums.is_empty() && sums.iter().all(|&sum| sum == BATCH as f32), "the rewards of a batch are ones");
    println!("{} of {UPDATES} sums came back (newer ones replace those that wait), each {BATCH}", sums.len());

    let metrics = feed.metrics();
    let bytes: u64 = metrics.devices.iter().map(|device| device.bytes).sum();
    println!("{:.2} GB/s into the device; waited {:.0} % of the time", bytes as f64 / seconds / 1e9, {
        100.0 * blocked.as_secs_f64() / seconds
    });
    match actor.join().expect("the environment thread does not panic") {
        Err(error) if error.kind() == ErrorKind::Stopped => Ok(()),
        other => other,
    }
}
