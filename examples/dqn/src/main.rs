//! The command: trains, draws the curve, says where the time went.

use actor_learner::options::{Command, Options, parse};
use actor_learner::plot;
use dqn::learner::Hyper;
use dqn::train::{Run, train};
use std::io::Write;
use std::process::ExitCode;

const NOT_SOLVED: u8 = 1;
const ERROR: u8 = 2;

/// The text of `--help`.
const HELP: &str = "\
Double DQN on CartPole-v1: environment threads write steps into a pinring store, a burn learner samples them by priority.

Usage: cargo run --release -p dqn -- [OPTIONS]

Options:
  --seed N         seed of everything                              [default: 1]
  --envs N         environments, one lane of the feed each         [default: 16]
  --threads N      environment threads that share them             [default: 2]
  --steps MAX      give up after this many environment steps       [default: 500000]
  --lockstep       the same seed gives the same curve, step for step: one environment thread, which waits for each update
  --pin            the store must lie in page-locked memory: without CUDA, fail and say where it was looked for
  --svg PATH       where the learning curve is drawn               [default: learning-curve-dqn.svg]
  --no-progress    no progress bar
  -h, --help       this text

The task is solved when the last 100 training episodes return 475 on average and then 20 greedy episodes of an
evaluation actor do so too.

Exit codes: 0 solved, 1 not solved within the steps given, 2 an error.
";

fn defaults() -> Options {
    Options { steps: 500_000, svg: "learning-curve-dqn.svg".into(), ..Options::default() }
}

fn main() -> ExitCode {
    let options = match parse(std::env::args_os().skip(1), defaults()) {
        Ok(Command::Train(options)) => options,
        Ok(Command::Help) => {
            let _ = write!(std::io::stdout(), "{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}\n\nTry --help.");
            return ExitCode::from(ERROR);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(NOT_SOLVED),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(ERROR)
        }
    }
}

/// Whether the task was solved.
fn run(options: &Options) -> Result<bool, Box<dyn std::error::Error>> {
    let run = train(options, &Hyper::default())?;
    let mode = if options.lockstep { "lockstep" } else { "free-running" };
    let title = format!("Double DQN on CartPole-v1, {} environments, {mode}, seed {}", options.envs, options.seed);
    std::fs::write(&options.svg, plot::svg(&run.curve, &title))
        .map_err(|error| format!("cannot write the learning curve to {}: {error}", options.svg.display()))?;
    // Not `println!`: whoever closed the pipe early has read what they wanted, and the exit code still counts.
    let _ = writeln!(std::io::stdout(), "{}\nlearning curve     {}", summary(&run), options.svg.display());
    Ok(run.solved)
}

fn summary(run: &Run) -> String {
    let Run { curve, solved, totals, written, stale } = run;
    let seconds = totals.elapsed.as_secs_f64();
    let outcome = match curve.evaluations.last() {
        Some(evaluation) if *solved => format!(
            "in {seconds:.1} s, after {} steps: {} greedy episodes returned {:.1} on average",
            evaluation.steps,
            evaluation.returns.len(),
            evaluation.mean()
        ),
        _ => format!("no, not within {} steps", totals.steps),
    };
    let shares = totals.shares();
    let [training, learner, writers] =
        [shares.training, shares.learner_blocked, shares.writer_blocked()].map(|share| share * 100.0);
    format!(
        "solved             {outcome}\n\
         time               {seconds:.1} s, {:.0} environment steps/s, {:.0} updates/s\n\
         written            {written} steps; {:.2} rows sampled for each\n\
         learned from       {} batches, {} rows in all; {stale} new priorities came too late\n\
         learner            {training:.1} % training, {learner:.1} % waiting for a batch\n\
         environments       {writers:.1} % waiting for the learner ({} threads)",
        *written as f64 / seconds.max(1e-9),
        totals.batches as f64 / seconds.max(1e-9),
        totals.rows as f64 / (*written).max(1) as f64,
        totals.batches,
        totals.rows,
        totals.threads,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_in_the_help_are_the_defaults() {
        let Options { seed, envs, threads, steps, svg, .. } = defaults();
        for value in [seed.to_string(), envs.to_string(), threads.to_string(), steps.to_string()] {
            assert!(HELP.contains(&format!("[default: {value}]")), "{value}");
        }
        assert!(HELP.contains(&format!("[default: {}]", svg.display())));
    }

    #[test]
    fn an_empty_run_divides_by_nothing() {
        let run = Run { curve: Default::default(), solved: false, totals: Default::default(), written: 0, stale: 0 };
        let text = summary(&run);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
