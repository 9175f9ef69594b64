//! The command: trains, draws the curve, says where the time went.

use actor_learner::appo::Hyper;
use actor_learner::options::{Command, HELP, Options, parse};
use actor_learner::{plot, train};
use std::io::Write;
use std::process::ExitCode;

const NOT_SOLVED: u8 = 1;
const ERROR: u8 = 2;

fn main() -> ExitCode {
    let options = match parse(std::env::args_os().skip(1), Options::default()) {
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
    let run = train::train(options, &Hyper::default())?;
    let mode = if options.lockstep { "lockstep" } else { "free-running" };
    let title = format!("APPO on CartPole-v1, {} environments, {mode}, seed {}", options.envs, options.seed);
    std::fs::write(&options.svg, plot::svg(&run.curve, &title))
        .map_err(|error| format!("cannot write the learning curve to {}: {error}", options.svg.display()))?;

    let seconds = run.totals.elapsed.as_secs_f64();
    let outcome = match run.curve.evaluations.last() {
        Some(evaluation) if run.solved => format!(
            "in {seconds:.1} s, after {} steps: {} greedy episodes returned {:.1} on average",
            evaluation.steps,
            evaluation.returns.len(),
            evaluation.mean()
        ),
        _ => format!("no, not within {} steps", run.totals.steps),
    };
    // Not `println!`: whoever closed the pipe early has read what they wanted, and the exit code still counts.
    let _ = writeln!(
        std::io::stdout(),
        "solved             {outcome}\n{}\nlearning curve     {}",
        run.totals,
        options.svg.display()
    );
    Ok(run.solved)
}
