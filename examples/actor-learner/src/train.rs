//! The job: starts the feed, the environment threads and the evaluation actor, learns until the task is solved.
//!
//! Owns the loop of the learner's thread (take a batch, learn, publish once, look at the episodes) and the order in
//! which everything ends. What it does not do: the learning itself (see [`crate::appo`]) or any output but the bar.

use crate::actor::act;
use crate::appo::{Appo, Hyper};
use crate::curve::{Curve, Ledger};
use crate::env::SOLVED_RETURN;
use crate::eval::{Evaluator, Gone};
use crate::net::Policy;
use crate::options::Options;
use crate::report::{Progress, Totals};
use crate::schema::declare;
use pinring::{ErrorKind, Feed, Pinning, Weights};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How many versions behind the learner an acting policy may be: with one, the environment threads fill the next batch
/// while the learner learns from this one.
const LOOK_AHEAD: u64 = 1;
/// Batches from an evaluation that disappointed to the next one.
const PATIENCE: u64 = 10;
/// How long the feed may take to stop.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// What ends a run early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The feed did not start, or failed.
    #[error(transparent)]
    Feed(#[from] pinring::Error),
    /// The system gave no thread.
    #[error("cannot start the {name} thread: {source}")]
    Thread {
        /// Its name.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// The evaluation actor panicked.
    #[error(transparent)]
    Evaluation(#[from] Gone),
    /// An environment thread panicked; its message is on stderr.
    #[error("the {0} thread panicked")]
    Panicked(String),
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The learning curve.
    pub curve: Curve,
    /// Whether the last evaluation reached the mark.
    pub solved: bool,
    /// Times and counts.
    pub totals: Totals,
}

/// Environment threads, by name.
pub type Threads = Vec<(String, JoinHandle<Result<(), pinring::Error>>)>;

/// Starts environment thread number `threads.len()`.
///
/// # Errors
/// If the system has no thread left.
pub fn spawn<F>(threads: &mut Threads, act: F) -> Result<(), TrainError>
where
    F: FnOnce() -> Result<(), pinring::Error> + Send + 'static,
{
    let name = format!("env-{}", threads.len());
    let thread = std::thread::Builder::new().name(name.clone()).spawn(act);
    threads.push((name.clone(), thread.map_err(|source| TrainError::Thread { name, source })?));
    Ok(())
}

/// Starts the evaluation actor.
///
/// # Errors
/// If the system has no thread left.
pub fn evaluator(seed: u64) -> Result<Evaluator, TrainError> {
    Evaluator::start(seed).map_err(|source| TrainError::Thread { name: "evaluation".into(), source })
}

/// How many of `lanes` lanes thread `index` of `threads` drives.
pub fn share(lanes: usize, threads: usize, index: usize) -> usize {
    lanes / threads + usize::from(index < lanes % threads)
}

/// Trains until the task is solved or `options.steps` steps are used up.
///
/// # Errors
/// With pinning required: whatever kept the ring from being page-locked, before any environment starts. Later on:
/// the feed's first fault, or a panic.
pub fn train(options: &Options, hyper: &Hyper) -> Result<Run, TrainError> {
    let (sample, leaves, columns) = declare(hyper.unroll);
    let policy = Policy::new(hyper.hidden, options.seed);
    let weights = Weights::new(policy.clone());
    let mut builder = Feed::builder(sample)
        .batch(options.envs)
        .lanes(options.envs)
        .seed(options.seed)
        .max_policy_lag(&weights, LOOK_AHEAD);
    if options.lockstep {
        builder = builder.lockstep(options.envs);
    }
    if options.pin {
        builder = builder.pinning(Pinning::Required);
    }
    let feed = builder.start()?; // with pinning required and no CUDA the run ends here

    let mut appo = Appo::new(hyper.clone(), columns, &policy, feed.pin_report().is_some(), options.seed);
    let mut evaluator = evaluator(options.seed)?;
    let mut threads = Threads::new();
    for index in 0..options.threads {
        let writer = feed.writer(share(options.envs, options.threads, index))?;
        let weights = weights.clone();
        spawn(&mut threads, move || act(writer, &weights, &leaves))?;
    }

    let outcome = learn(options, hyper, &feed, &weights, &mut appo, &mut evaluator);
    let stopped = feed.stop(STOP_DEADLINE);
    join(threads)?; // what broke an environment thread is the cause of whatever the learner saw
    let run = outcome?;
    stopped?;
    Ok(run)
}

/// The learner's loop.
fn learn(
    options: &Options,
    hyper: &Hyper,
    feed: &Feed,
    weights: &Weights<Policy>,
    appo: &mut Appo,
    evaluator: &mut Evaluator,
) -> Result<Run, TrainError> {
    let learner = feed.learner()?;
    let episodes = feed.episodes();
    let mut ledger = Ledger::new(options.envs);
    let progress = Progress::new(options.progress, SOLVED_RETURN);
    let (start, mut totals) = (Instant::now(), Totals { threads: options.threads, ..Totals::default() });
    let mut next_evaluation = 0;
    let mut solved = false;
    while !solved && totals.steps < options.steps {
        let batch = learner.next_batch().map_err(pinring::Error::from)?;
        let begun = Instant::now();
        let (version, _) = weights.latest();
        count_lags(&mut totals.lags, version, batch.policy_versions());
        let rows = batch.rows() as u64;
        let batch = batch.share();
        let losses = appo.update(&batch);
        drop(batch);
        let version = weights.publish(appo.policy());
        totals.training += begun.elapsed();

        totals.batches += 1;
        totals.rows += rows;
        totals.steps += rows * hyper.unroll as u64;
        let seen = options.lockstep.then_some(totals.batches * hyper.unroll as u64);
        ledger.record(seen, totals.steps, losses.entropy, episodes.try_iter().map(Into::into));
        if ledger.promising() && !evaluator.pending() && totals.batches >= next_evaluation {
            evaluator.request(totals.steps, version, weights.latest().1.actor.clone());
        }
        // In lockstep, and when there is nothing left to learn from, the reply decides; else learning goes on meanwhile.
        if let Some(evaluation) = evaluator.reply(options.lockstep || totals.steps >= options.steps)? {
            solved = evaluation.mean() >= SOLVED_RETURN;
            next_evaluation = totals.batches + PATIENCE;
            ledger.evaluated(evaluation);
        }
        measure(&mut totals, feed, start);
        progress.show(&totals, ledger.mean());
    }
    progress.finish();
    Ok(Run { curve: ledger.into_curve(), solved, totals })
}

/// Takes over what the feed counts.
fn measure(totals: &mut Totals, feed: &Feed, start: Instant) {
    let metrics = feed.metrics();
    totals.elapsed = start.elapsed();
    totals.learner_blocked = metrics.learner_blocked;
    totals.gate_blocked = metrics.policy_blocked;
    totals.room_blocked = metrics.writer_blocked;
    totals.staged_rows = metrics.staged_rows;
    totals.dropped_rows = metrics.dropped_rows;
}

fn count_lags(lags: &mut Vec<u64>, version: u64, acted: impl Iterator<Item = u64>) {
    for acted in acted {
        let lag = version.saturating_sub(acted) as usize;
        if lags.len() <= lag {
            lags.resize(lag + 1, 0);
        }
        lags[lag] += 1;
    }
}

/// Waits for the environment threads. One that ended because the feed did is fine; any other end is the error, and the
/// cause of the ends of the others.
///
/// # Errors
/// What broke the first thread that broke.
pub fn join(threads: Threads) -> Result<(), TrainError> {
    let ends: Vec<_> = threads.into_iter().map(|(name, thread)| (name, thread.join())).collect();
    for (name, end) in ends {
        match end {
            Err(_) => return Err(TrainError::Panicked(name)),
            Ok(Err(error)) if !matches!(error.kind(), ErrorKind::Stopped | ErrorKind::Ended) => {
                return Err(TrainError::Feed(error));
            }
            Ok(_) => {}
        }
    }
    Ok(())
}
