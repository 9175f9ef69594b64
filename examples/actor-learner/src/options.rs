//! The command line.
//!
//! Owns the options, their defaults and the text of `--help`. What it does not do: act on them.

use std::path::PathBuf;

/// How to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Seed of everything: first states, actions, weights, minibatches.
    pub seed: u64,
    /// Environments, each a lane of the feed.
    pub envs: usize,
    /// Environment threads that share them.
    pub threads: usize,
    /// Environment steps to learn from at most.
    pub steps: u64,
    /// Whether the curve is to be a function of the seed alone.
    pub lockstep: bool,
    /// Whether batches must lie in page-locked memory.
    pub pin: bool,
    /// Where the learning curve is drawn.
    pub svg: PathBuf,
    /// Whether a progress bar is shown.
    pub progress: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: 1,
            envs: 16,
            threads: 2,
            steps: 2_000_000,
            lockstep: false,
            pin: false,
            svg: "learning-curve.svg".into(),
            progress: true,
        }
    }
}

/// What the command line asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// To train.
    Train(Options),
    /// To print [`HELP`].
    Help,
}

/// The text of `--help`.
pub const HELP: &str = "\
APPO on CartPole-v1: environment threads write steps into a pinring feed, a burn learner takes batches out of it.

Usage: cargo run --release -p actor-learner -- [OPTIONS]

Options:
  --seed N         seed of everything                              [default: 1]
  --envs N         environments, one lane of the feed each         [default: 16]
  --threads N      environment threads that share them             [default: 2]
  --steps MAX      give up after this many environment steps       [default: 2000000]
  --lockstep       the same seed gives the same curve, step for step; each batch waits for its slowest lane
  --pin            batches must lie in page-locked memory: without CUDA, fail and say where it was looked for
  --svg PATH       where the learning curve is drawn               [default: learning-curve.svg]
  --no-progress    no progress bar
  -h, --help       this text

The task is solved when the last 100 training episodes return 475 on average and then 20 greedy episodes of an
evaluation actor do so too.

Exit codes: 0 solved, 1 not solved within the steps given, 2 an error.
";

/// A number, or an error that names its option.
fn number<T: std::str::FromStr<Err: std::fmt::Display>>(
    option: &str,
    value: &std::ffi::OsStr,
) -> Result<T, lexopt::Error> {
    let text = value.to_string_lossy();
    text.parse().map_err(|error| format!("{option} {text}: {error}; it takes a whole number").into())
}

/// Reads the command line; `arguments` starts behind the program's name, and `defaults` stand for what is not given.
///
/// # Errors
/// An unknown option, a missing or malformed value, or a combination that cannot run; the text says which.
pub fn parse<I>(arguments: I, defaults: Options) -> Result<Command, lexopt::Error>
where
    I: IntoIterator,
    I::Item: Into<std::ffi::OsString>,
{
    use lexopt::prelude::*;
    let mut options = defaults;
    let mut threads_given = None;
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("seed") => options.seed = number("--seed", &parser.value()?)?,
            Long("envs") => options.envs = number("--envs", &parser.value()?)?,
            Long("threads") => threads_given = Some(number("--threads", &parser.value()?)?),
            Long("steps") => options.steps = number("--steps", &parser.value()?)?,
            Long("lockstep") => options.lockstep = true,
            Long("pin") => options.pin = true,
            Long("svg") => options.svg = parser.value()?.into(),
            Long("no-progress") => options.progress = false,
            Long("help") | Short('h') => return Ok(Command::Help),
            other => return Err(other.unexpected()),
        }
    }
    if options.envs == 0 {
        return Err("--envs 0 leaves nobody to act: at least 1".into());
    }
    options.threads = threads_given.unwrap_or(options.threads.min(options.envs));
    let Options { envs, threads, steps, .. } = options;
    if threads == 0 || envs < threads {
        return Err(format!(
            "--envs {envs} cannot be shared by --threads {threads}: one environment a thread at least"
        )
        .into());
    }
    if steps == 0 {
        return Err("--steps 0 leaves nothing to learn from: at least 1".into());
    }
    // Now, and not when all is learned.
    if let Some(folder) = options.svg.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(format!("--svg {}: there is no folder {}", options.svg.display(), folder.display()).into());
    }
    Ok(Command::Train(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: impl IntoIterator<Item = &'static str>) -> Result<Command, lexopt::Error> {
        super::parse(line, Options::default())
    }

    #[test]
    fn every_option_is_read_and_named_in_the_help() {
        let line = "--seed 7 --envs 8 --threads 4 --steps 5000 --lockstep --pin --svg src/c.svg --no-progress";
        let expected = Options {
            seed: 7,
            envs: 8,
            threads: 4,
            steps: 5_000,
            lockstep: true,
            pin: true,
            svg: "src/c.svg".into(),
            progress: false,
        };
        assert_eq!(parse(line.split(' ')).unwrap(), Command::Train(expected));
        assert_eq!(parse([""; 0]).unwrap(), Command::Train(Options::default()));
        assert_eq!(parse(["-h"]).unwrap(), Command::Help);
        for option in line.split(' ').filter(|word| word.starts_with("--")) {
            assert!(HELP.contains(option), "{option} is not in the help");
        }
    }

    #[test]
    fn one_environment_needs_no_word_about_threads() {
        assert_eq!(
            parse(["--envs", "1"]).unwrap(),
            Command::Train(Options { envs: 1, threads: 1, ..Options::default() })
        );
        assert!(parse(["--envs", "0"]).is_err());
    }

    #[test]
    fn defaults_in_the_help_are_the_defaults() {
        let Options { seed, envs, threads, steps, svg, .. } = Options::default();
        for value in [seed.to_string(), envs.to_string(), threads.to_string(), steps.to_string()] {
            assert!(HELP.contains(&format!("[default: {value}]")), "{value}");
        }
        assert!(HELP.contains(&format!("[default: {}]", svg.display())));
    }

    #[test]
    fn mistakes_are_named() {
        for (line, word) in [
            ("--speed 3", "--speed"),
            ("--seed", "--seed"),
            ("--seed x", "--seed x"),
            ("--envs -1", "--envs -1"),
            ("--envs 0", "--envs 0 leaves"),
            ("--envs 1 --threads 2", "--threads 2"),
            ("--threads 0", "--threads 0"),
            ("--steps 0", "--steps 0"),
            ("extra", "extra"),
            ("--svg no/such/folder/c.svg", "no folder no/such/folder"),
        ] {
            let text = parse(line.split(' ')).unwrap_err().to_string();
            assert!(text.contains(word), "`{line}` gave: {text}");
        }
    }
}
