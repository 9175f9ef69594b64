//! The arguments that every bench takes.
//!
//! ```text
//! cargo bench --bench NAME -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]
//! ```
//!
//! Words choose cases: those whose name holds all of them. Without cargo's own `--bench`, as under `cargo test
//! --benches`, only the check runs, which is what `--test` asks for.

use super::Failure;
use std::path::PathBuf;
use std::time::Duration;

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The checks, nothing timed.
    Check,
    /// The checks, and few short slices: shows that the bench works, not what the library does.
    Quick,
    /// Everything.
    Full,
}

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Args {
    pub mode: Mode,
    pub json: Option<PathBuf>,
    words: Vec<String>,
    pairs: Option<usize>,
    slice: Option<Duration>,
}

impl Args {
    pub fn from_arguments(arguments: impl Iterator<Item = String>) -> Result<Args, Failure> {
        let mut args = Args { mode: Mode::Full, json: None, words: Vec::new(), pairs: None, slice: None };
        let (mut bench, mut quick, mut test) = (false, false, false);
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--bench" => bench = true, // cargo's own
                "--quick" => quick = true,
                "--test" => test = true,
                "--json" => args.json = Some(PathBuf::from(value()?)),
                "--pairs" => args.pairs = Some(positive(&value()?)?),
                "--slice-ms" => args.slice = Some(Duration::from_millis(positive(&value()?)? as u64)),
                word if !word.starts_with('-') => args.words.push(word.to_owned()),
                _ => {
                    let known = "[WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]";
                    return Err(format!("{argument} is not known; known are {known}").into());
                }
            }
        }
        args.mode = match (test || !bench, quick) {
            (true, _) => Mode::Check,
            (false, true) => Mode::Quick,
            (false, false) => Mode::Full,
        };
        Ok(args)
    }

    /// Whether the case of that name was asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.words.iter().all(|word| name.contains(word.as_str()))
    }

    /// Pairs of slices (floor and ours).
    pub fn pairs(&self) -> usize {
        self.pairs.unwrap_or(if self.mode == Mode::Quick { 3 } else { 9 })
    }

    /// The length of a slice, where it is a time; `full` unless something else was asked for.
    pub fn slice(&self, full: Duration) -> Duration {
        self.slice.unwrap_or(if self.mode == Mode::Quick { full / 4 } else { full })
    }
}

fn positive(text: &str) -> Result<usize, Failure> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("{text:?} is not a number above 0").into()),
    }
}
