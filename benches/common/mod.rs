//! What the benches share: arguments, threads that take turns, the memcpy floor, and tables.
//!
//! Each bench checks its results before it times anything, times floor and ours in alternating slices of one run, and
//! prints medians with the least and the most. The floor writes to memory of the same kind as the ring, in the same
//! order, from the same sources, so a ratio says what the library costs and not what the machine is.
#![allow(dead_code, unused_imports)] // every bench uses a part

pub mod args;
pub mod cpu;
pub mod crew;
#[allow(unsafe_code)]
pub mod floor;
pub mod report;
pub mod stats;
pub mod watchdog;
pub mod work;

pub use args::{Args, Mode};
pub use crew::{Crew, Until};
pub use floor::{Floor, as_bytes};
pub use report::{Cell, Report};
pub use stats::Spread;
pub use work::drain;

/// What goes wrong in a bench.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Runs a bench: reads the arguments, starts the watchdog, and turns a failure into an exit code.
pub fn main(
    bench: &'static str,
    run: impl FnOnce(&Args, &mut Report) -> Result<(), Failure>,
) -> std::process::ExitCode {
    let args = match Args::from_arguments(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{bench}: {error}");
            return std::process::ExitCode::from(2);
        }
    };
    watchdog::start(bench);
    let mut report = Report::new(bench, &args);
    match run(&args, &mut report).and_then(|()| report.finish(&args)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{bench}: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
