//! 3. When pinning fails: `Pinning::Required` gives a page-locked ring or an error that says everything.
//!
//! Run with `cargo run --example 03_when_pinning_fails`. Without a usable CUDA it prints every library that was looked
//! at, and exits with 1 (no CUDA) or 2 (anything else: too little memory, say). With one it prints the pin report and
//! exits with 0. An argument names the CUDA runtime to use instead of the one that the search finds.

use pinring::*;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let search = match std::env::args_os().nth(1) {
        Some(path) => CudaSearch::new().library_only(path), // this one or none
        None => CudaSearch::new(),
    };
    match run(search) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The text is complete: causes, every candidate, and what to do. `kind` is for code that has to decide.
            eprintln!("{error}");
            ExitCode::from(if error.kind() == ErrorKind::Cuda { 1 } else { 2 })
        }
    }
}

fn run(search: CudaSearch) -> Result<()> {
    let mut step = Step::new();
    let frame = step.observation::<u8>("frame", &[84, 84, 4]);
    let mut sample = Sample::step(step);
    let column = sample.all(frame);

    let builder = Feed::builder(sample).batch(512).buffers(4).pinning(Pinning::Required).cuda(search);
    println!("asking for {} bytes of page-locked memory", builder.page_locked_bytes()?);

    // In the background, so that a large ring can show how far it is, and could be cancelled.
    let start = builder.start_in_background()?;
    while !start.is_finished() {
        std::thread::sleep(Duration::from_millis(50));
        println!("  {}", start.progress());
    }
    let feed = start.wait()?;

    // Here every byte is page-locked: there is no feed that asked for it and silently went without.
    if let Some(report) = feed.pin_report() {
        println!("{report}");
    }
    let mut writer = feed.writer(1)?;
    for _ in 0..512 {
        let mut s = writer.step()?;
        s.view_mut(frame).fill(9);
        s.commit()?;
    }
    let batch = feed.learner()?.next_batch()?;
    println!("a batch at {:p}, ready for one asynchronous copy", batch.slice(column));

    // A batch outlives its feed: the ring stays locked until the last one is dropped.
    let report = feed.stop(Duration::from_secs(5))?;
    println!("stopped: {report}");
    assert_eq!(batch.slice(column)[0], 9);
    drop(batch); // unregisters and unmaps, here
    Ok(())
}
