//! The job from outside: curves that repeat, the command's exit codes, and a required pin without CUDA.

use actor_learner::appo::Hyper;
use actor_learner::options::Options;
use actor_learner::train::{Run, train};
use std::process::{Command, Output};
use std::time::Duration;

/// Fails the test run instead of letting it hang.
fn watchdog(test: impl FnOnce() + Send + 'static) {
    let (done, finished) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if finished.recv_timeout(Duration::from_secs(300)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("nothing happened for 300 s");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// A few thousand steps of a run small enough for a debug build.
fn run(seed: u64, threads: usize, lockstep: bool) -> Run {
    let options = Options { seed, envs: 8, threads, steps: 4_096, lockstep, progress: false, ..Options::default() };
    let hyper = Hyper { unroll: 32, hidden: 16, passes: 2, minibatches: 2, ..Hyper::default() };
    train(&options, &hyper).unwrap()
}

#[test]
fn in_lockstep_the_same_seed_gives_the_same_curve_step_for_step() {
    watchdog(|| {
        let first = run(3, 2, true);
        assert_eq!(first.totals.steps, 4_096);
        assert_eq!((first.totals.batches, first.totals.rows, first.totals.dropped_rows), (16, 128, 0));
        assert_eq!(first.totals.lags, [8, 120], "the first batch acts with version 0, each later one a version behind");
        assert_eq!(first.curve.points.len(), 16);
        assert!(first.curve.episodes.len() > 50, "{} episodes", first.curve.episodes.len());
        assert_eq!(run(3, 2, true).curve, first.curve, "the same seed");
        assert_eq!(run(3, 4, true).curve, first.curve, "the same seed, its lanes spread over more threads");
        assert_ne!(run(4, 2, true).curve, first.curve, "another seed");
    });
}

#[test]
fn free_running_stages_every_row_and_drops_none() {
    watchdog(|| {
        let run = run(3, 2, false);
        assert_eq!((run.totals.steps, run.totals.dropped_rows), (4_096, 0));
        assert_eq!(run.totals.lags.iter().sum::<u64>(), run.totals.rows);
        assert!(run.totals.staged_rows >= run.totals.rows, "unrolls of free-running lanes are staged");
    });
}

fn command(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_actor-learner"));
    let output = command.args(arguments.split(' ')).output();
    output.expect("the binary of this package runs")
}

#[test]
fn exit_codes_tell_not_solved_from_an_error() {
    watchdog(|| {
        let svg = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("curve.svg");
        let output = command(&format!("--no-progress --steps 1 --envs 2 --svg {}", svg.display()));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("not within 128 steps") && text.contains("bottleneck"), "{text}");
        assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg "));

        let output = command("--no-progress --steps 1 --svg /nowhere/at/all.svg");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_eq!(command("--speed 3").status.code(), Some(2));
        let help = command("--help");
        assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("--lockstep"));
    });
}

#[test]
fn a_required_pin_without_cuda_fails_with_the_search_report() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: there is a CUDA device here");
        return;
    }
    watchdog(|| {
        let svg = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("never.svg");
        let output = command(&format!("--no-progress --pin --svg {}", svg.display()));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("libcudart") && text.contains("libcuda.so.1"), "{text}");
        assert!(output.stdout.is_empty() && !svg.exists(), "nothing ran");
    });
}
