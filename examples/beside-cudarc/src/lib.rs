//! A learner that is written with cudarc, beside a feed in one process.
//!
//! cudarc keeps the device's primary context, as every runtime and framework does, and so does the feed: pointers and
//! streams of the one are the other's too. The learner's stream is cudarc's; a kernel that cudarc loaded and launches
//! reads the batches where the feed put them.
#![allow(unsafe_code)] // raw streams, and kernels

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use pinring::*;
use std::error::Error;
use std::time::Duration;

const KERNEL: &str = include_str!("total.ptx");
const ROWS: usize = 64;
const WORDS: usize = 2048;

/// Feeds `batches` batches to device 0, has each totalled by a kernel of cudarc's, and gives the totals on the device and
/// those that the rows had when they were written.
///
/// # Errors
/// Whatever fails, the feed's or cudarc's.
pub fn run(batches: usize) -> std::result::Result<(Vec<u64>, Vec<u64>), Box<dyn Error + Send + Sync>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let kernel = context.load_module(Ptx::from_src(KERNEL))?.load_function("total")?;
    let totals = stream.alloc_zeros::<u64>(batches)?;
    stream.synchronize()?;

    let mut step = Step::new();
    let words = step.observation::<u32>("words", &[WORDS]);
    let mut sample = Sample::step(step);
    let column = sample.all(words);
    let feed = Feed::builder(sample).batch(ROWS).buffers(4).pinning(Pinning::Required).device(0).start()?;
    // SAFETY: cudarc destroys the stream when `stream` is dropped, which is behind the learner: it was declared before.
    let learner = unsafe { feed.learner_on(0, stream.cu_stream().cast())? };
    let mut writer = feed.writer(1)?;
    let writing = std::thread::spawn(move || -> Result<()> {
        for number in 0..(batches * ROWS) as u32 {
            let mut step = writer.step()?;
            step.overwrite(words).fill(number);
            step.commit()?;
        }
        Ok(())
    });

    let mut expected = Vec::with_capacity(batches);
    let config = LaunchConfig { grid_dim: (64, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let first_total = {
        let (address, _ordered) = cudarc::driver::DevicePtr::device_ptr(&totals, &stream);
        address
    };
    for (place, count) in (0..batches as u64).zip(std::iter::repeat((ROWS * WORDS) as u64)) {
        let batch = learner.next_batch()?;
        expected.push(batch.first_steps().map(|number| number * WORDS as u64).sum());
        let (from, to) = (batch.column(column).ptr, first_total + place * 8);
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&from).arg(&count).arg(&to);
        // SAFETY: the kernel takes these three; the batch is released behind it on the same stream, and the totals live
        // until the stream was waited for.
        unsafe { launch.launch(config)? };
        drop(batch);
    }
    let found = stream.clone_dtoh(&totals)?;
    stream.synchronize()?;
    writing.join().map_err(|_| "the writer panicked")??;
    drop(learner);
    match feed.stop(Duration::from_secs(10))?.fault {
        None => Ok((found, expected)),
        Some(fault) => Err(format!("the feed ended by a fault: {fault}").into()),
    }
}
