//! The job from outside: curves that repeat, a pace that is kept, the command's exit codes, and a required pin without
//! CUDA.

use actor_learner::options::Options;
use dqn::learner::Hyper;
use dqn::train::{Run, UPDATES_A_POINT, train};
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

/// A run small enough for a debug build: 250 updates.
fn run(seed: u64, lockstep: bool) -> Run {
    let options = Options { seed, envs: 8, steps: 1_200, lockstep, progress: false, ..Options::default() };
    let hyper =
        Hyper { hidden: 16, batch: 32, min_size: 200, exploration_steps: 600, target_updates: 50, ..Hyper::default() };
    train(&options, &hyper).unwrap()
}

#[test]
fn in_lockstep_the_same_seed_gives_the_same_curve_step_for_step() {
    watchdog(|| {
        let first = run(3, true);
        assert_eq!((first.totals.steps, first.totals.batches, first.totals.rows), (1_200, 250, 8_000));
        assert_eq!(first.curve.points.len() as u64, 250 / UPDATES_A_POINT);
        assert!(first.curve.points.iter().all(|point| point.figure > 0.0));
        assert!(first.curve.episodes.len() > 20, "{} episodes", first.curve.episodes.len());
        assert_eq!(run(3, true).curve, first.curve, "the same seed");
        assert_ne!(run(4, true).curve, first.curve, "another seed");
    });
}

#[test]
fn free_running_keeps_its_pace() {
    watchdog(|| {
        let run = run(3, false);
        assert_eq!(run.totals.rows, 8_000);
        // 8 rows for each step beyond 200, and at most 0.1 × 8 × 200 rows to either side, when a step begins.
        let due = 8 * (run.written - 200);
        assert!(due.abs_diff(run.totals.rows) <= 160 + 64, "{due} rows were due, {} taken", run.totals.rows);
    });
}

fn command(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dqn"));
    let output = command.args(arguments.split(' ')).output();
    output.expect("the binary of this package runs")
}

#[test]
fn exit_codes_tell_not_solved_from_an_error() {
    watchdog(|| {
        let svg = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("curve.svg");
        let output = command(&format!("--no-progress --steps 1 --svg {}", svg.display()));
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("not within 1008 steps") && text.contains("rows sampled for each"), "{text}");
        assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg "));

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
