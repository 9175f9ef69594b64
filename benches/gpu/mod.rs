//! What the GPU benches share: the driver, two kernels, rows whose content can be weighed, and statistics.
//!
//! A bench checks on the device what it is about to time. Without a device it prints `skipped: no CUDA device` and why,
//! and ends with 0; with `PINRING_GPU_REQUIRED` set that is an error. Beside the arguments of every bench
//! (`benches/common/args.rs`) each has some of its own, named in its head.
#![allow(dead_code)] // each bench uses a part

#[allow(unsafe_code)]
pub mod driver;
#[allow(unsafe_code)]
pub mod kernels;
pub mod rows;
pub mod stats;

pub use driver::{Cuda, Failure};
pub use kernels::Kernels;

use crate::common::{Args, Cell, Mode, Report, Spread, watchdog};
use std::process::ExitCode;

/// The bench's own arguments that have a number.
#[derive(Clone, Debug)]
pub struct Flags {
    values: Vec<(String, usize)>,
}

impl Flags {
    /// Takes `known` flags and their numbers out of the arguments, and leaves the rest.
    pub fn take(arguments: impl Iterator<Item = String>, known: &[&str]) -> Result<(Flags, Vec<String>), Failure> {
        let (mut values, mut rest) = (Vec::new(), Vec::new());
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            if !known.contains(&argument.as_str()) {
                rest.push(argument);
                continue;
            }
            let value = arguments.next().ok_or(format!("{argument} needs a number"))?;
            match value.parse() {
                Ok(number) if number > 0 => values.push((argument, number)),
                _ => return Err(format!("{argument} {value}: not a number above 0").into()),
            }
        }
        Ok((Flags { values }, rest))
    }

    /// The last value that was given.
    pub fn get(&self, flag: &str) -> Option<usize> {
        self.values.iter().rev().find(|(name, _)| name == flag).map(|(_, value)| *value)
    }
}

/// What a bench is given.
#[derive(Debug)]
pub struct Setting {
    pub args: Args,
    pub flags: Flags,
    pub cuda: &'static Cuda,
    pub kernels: Kernels,
}

impl Setting {
    /// A number that a flag gives, else one by the mode.
    pub fn number(&self, flag: &str, full: usize, quick: usize) -> usize {
        self.flags.get(flag).unwrap_or(if self.args.mode == Mode::Quick { quick } else { full })
    }

    /// Whether anything is timed.
    pub fn is_timing(&self) -> bool {
        self.args.mode != Mode::Check
    }
}

/// Runs a bench with its `known` flags.
pub fn main(
    bench: &'static str,
    known: &[&str],
    run: impl FnOnce(&Setting, &mut Report) -> Result<(), Failure>,
) -> ExitCode {
    let parsed = Flags::take(std::env::args().skip(1), known).and_then(|(flags, rest)| {
        let args = Args::from_arguments(rest.into_iter());
        Ok((flags, args.map_err(|error| format!("{error} {}", known.join(" N, ")))?))
    });
    let (flags, args) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("{bench}: {error}");
            return ExitCode::from(2);
        }
    };
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) if std::env::var_os("PINRING_GPU_REQUIRED").is_some() => {
            eprintln!("{bench}: PINRING_GPU_REQUIRED is set, and there is no CUDA device: {error}");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            println!("skipped: no CUDA device: {error}");
            return ExitCode::SUCCESS;
        }
    };
    watchdog::start(bench);
    let mut report = Report::new(bench, &args);
    println!("{}", cuda.describe());
    let result = Kernels::new(cuda).and_then(|kernels| {
        let setting = Setting { args, flags, cuda, kernels };
        run(&setting, &mut report)?;
        report.finish(&setting.args)
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{bench}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A difference, with its interval, as a place of a table.
pub fn difference_cell(difference: stats::Difference, digits: usize) -> Cell {
    let stats::Difference { median, low, high } = difference;
    Cell::Spread(Spread { median, least: low, most: high }, digits)
}
