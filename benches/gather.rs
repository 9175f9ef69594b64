//! How fast do stored steps become batches: gathered by the CPU, and by a device from the page-locked store?
//!
//! ```text
//! cargo bench --bench gather -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N] [--store-mb N]
//!     [--threads N] [--blocks N]
//! ```
//!
//! 512 rows of 148 bytes to 67 KB in 4 and 44 leaves; two stacks of 4 frames with n = 3, from single frames that 16 lanes
//! have written by turns; 64 sequences of 124 frames; 20 × 256 rows of 168 bytes. Stores of 2 GB (`--store-mb`), far
//! more than the caches, uniform samples, nothing written meanwhile.
//!
//! *By the CPU*: 1 to all threads (`--threads` for one number), beside `memcpy` by as many threads, of the same leaves of random
//! records to the same places of a slot (of stacks and sequences: of random pieces as long).
//! *By a device*: 4 to 132 blocks (`--blocks` for one number), beside batches that the CPU gathers and a copy moves, and
//! the link's rate for a copy of such a batch; as delivered, and as crossed: 16 bytes at a time. In the last column
//! stands what it costs a learner whose kernels fill the device. Without a device that half says so and is skipped.
//! `index_select` from the device's own memory is in `scripts/peers/run.py gather`. Cases are named like
//! `28KB/4-leaves/cpu/2-threads` and `28KB/4-leaves/device/4-blocks`.

mod common;
mod gpu;
#[path = "replay/device.rs"]
#[allow(unsafe_code)]
mod device;
#[path = "replay/host.rs"]
#[allow(unsafe_code)]
mod host;
#[path = "replay/work.rs"]
mod work;

use common::{Args, Failure, Mode, Report, watchdog};
use gpu::{Cuda, Flags, Kernels};
use std::process::ExitCode;

const FLAGS: [&str; 3] = ["--store-mb", "--threads", "--blocks"];
const BLOCKS: [Option<u32>; 6] = [Some(4), Some(8), Some(16), Some(32), Some(132), None];

fn main() -> ExitCode {
    let parsed = Flags::take(std::env::args().skip(1), &FLAGS).and_then(|(flags, rest)| {
        let args = Args::from_arguments(rest.into_iter());
        Ok((flags, args.map_err(|error| format!("{error} {}", FLAGS.join(" N, ")))?))
    });
    let (flags, args) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("gather: {error}");
            return ExitCode::from(2);
        }
    };
    watchdog::start("gather");
    let mut report = Report::new("gather", &args);
    let result = by_the_cpu(&flags, &args, &mut report)
        .and_then(|()| by_a_device(&flags, &args, &mut report))
        .and_then(|()| report.finish(&args));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gather: {error}");
            ExitCode::FAILURE
        }
    }
}

fn store_bytes(flags: &Flags, args: &Args) -> usize {
    let by_mode = match args.mode {
        Mode::Check => 16,
        Mode::Quick => 256,
        Mode::Full => 2048,
    };
    flags.get("--store-mb").unwrap_or(by_mode) << 20
}

fn wanted(name: &str, work: &work::Work, args: &Args) -> bool {
    args.wants(name) && (args.mode == Mode::Full || work::IN_QUICK.contains(&work.name))
}

fn by_the_cpu(flags: &Flags, args: &Args, report: &mut Report) -> Result<(), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let mut numbers: Vec<usize> = [1, 2, 4, 8, 16].into_iter().filter(|threads| *threads <= cores).collect();
    if args.mode != Mode::Full {
        numbers = vec![1, cores.min(4)];
        numbers.dedup();
    }
    if let Some(threads) = flags.get("--threads") {
        numbers = vec![threads];
    }
    host::table(report);
    for work in &work::ALL {
        for &threads in &numbers {
            let name = format!("{}/cpu/{threads}-threads", work.name);
            if wanted(&name, work, args) {
                watchdog::alive(&name);
                host::run(&name, work, threads, store_bytes(flags, args), args, report)?;
            }
        }
    }
    Ok(())
}

fn by_a_device(flags: &Flags, args: &Args, report: &mut Report) -> Result<(), Failure> {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) if std::env::var_os("PINRING_GPU_REQUIRED").is_some() => {
            return Err(format!("PINRING_GPU_REQUIRED is set, and there is no CUDA device: {error}").into());
        }
        Err(error) => {
            println!("\nby a device: skipped: no CUDA device: {error}");
            return Ok(());
        }
    };
    println!("\n{}", cuda.describe());
    let kernels = Kernels::new(cuda)?;
    device::table(report);
    for work in &work::ALL {
        let numbers = match flags.get("--blocks") {
            Some(blocks) => vec![Some(blocks as u32)],
            None if args.mode == Mode::Full => BLOCKS.to_vec(),
            None => vec![Some(4), Some(8), None],
        };
        for blocks in numbers {
            let by = blocks.map_or("cpu-then-copy".to_owned(), |blocks| format!("{blocks}-blocks"));
            let name = format!("{}/device/{by}", work.name);
            if wanted(&name, work, args) {
                watchdog::alive(&name);
                let case = device::Case { name, work, blocks, store_bytes: store_bytes(flags, args) };
                case.run((cuda, &kernels), args, report)?;
            }
        }
    }
    Ok(())
}
