//! On a host with a GPU: feeding it. Without one each test prints `skipped: no CUDA device` and why.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/feeding.rs"]
mod feeding;

use pinring::*;
use std::time::Instant;

fn search() -> Option<CudaSearch> {
    match probe_cuda(&CudaSearch::new()) {
        Ok(_) => Some(CudaSearch::new()),
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {}", error.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

#[test]
fn batches_arrive_whole() {
    let Some(search) = search() else { return };
    for (rows, words) in [(16, 8), (64, 2048), (512, 8376)] {
        feeding::batches_arrive_whole(&search, Pinning::Required, 1, (rows, words), 60);
    }
    feeding::batches_arrive_whole(&search, Pinning::Off, 1, (64, 2048), 40);
}

/// Not a bench: a first look at the rate, printed.
#[test]
fn rate() {
    let Some(search) = search() else { return };
    let mut step = Step::new();
    let leaves: Vec<_> = (0..44).map(|i| step.leaf::<u8>(&format!("l{i}"), &[1522])).collect();
    let rows = 512;
    let feed =
        Feed::builder(Sample::step(step)).batch(rows).buffers(6).pinning(Pinning::Required).device(0).cuda(search);
    let feed = feed.start().unwrap();
    println!("{}", feed.pin_report().unwrap());
    // SAFETY: the legacy default stream lives as long as the device.
    #[allow(unsafe_code)]
    let learner = unsafe { feed.learner_on(0, std::ptr::null_mut()) }.unwrap();
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let (mut writer, leaves) = (feed.writer(16).unwrap(), leaves.clone());
            std::thread::spawn(move || {
                let row = vec![7u8; 16 * 1522];
                while let Ok(mut step) = writer.step() {
                    leaves.iter().for_each(|leaf| step.put(*leaf, &row).unwrap());
                    if step.commit().is_err() {
                        break;
                    }
                }
            })
        })
        .collect();
    for _ in 0..20 {
        drop(learner.next_batch().unwrap());
    }
    let (begun, batches) = (Instant::now(), 400);
    let (mut next, mut dropped) = (vec![], vec![]);
    let mut bytes = 0;
    for _ in 0..batches {
        let a = Instant::now();
        let batch = learner.next_batch().unwrap();
        let b = Instant::now();
        bytes += 44 * 1522 * rows;
        let c = Instant::now();
        drop(batch);
        next.push((b - a).as_nanos());
        dropped.push(c.elapsed().as_nanos());
    }
    let seconds = begun.elapsed().as_secs_f64();
    next.sort();
    dropped.sort();
    println!(
        "{batches} batches of {} MB: {:.2} GB/s; next p50 {} ns (waits for the link), drop p50 {} ns p99 {} ns",
        bytes / batches / 1_000_000,
        bytes as f64 / seconds / 1e9,
        next[next.len() / 2],
        dropped[dropped.len() / 2],
        dropped[dropped.len() * 99 / 100]
    );
    println!("{:#?}", feed.metrics());
    println!("{}", feed.stop(std::time::Duration::from_secs(10)).unwrap());
    writers.into_iter().for_each(|w| w.join().unwrap());
}
