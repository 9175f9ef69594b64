//! The job: starts the feed, the environment threads and the evaluation actor, learns until the task is solved.
//!
//! Owns the loop of the learner's thread (take a batch, learn, set priorities, publish, look at the episodes now and then)
//! and the order in which everything ends. What it does not do: the learning itself (see [`crate::learner`]).

use crate::actor::{Exploration, Turns, act};
use crate::learner::{Dqn, Hyper, new_network};
use crate::schema::declare;
use actor_learner::curve::{Curve, Ledger};
use actor_learner::env::SOLVED_RETURN;
use actor_learner::eval::Evaluator;
use actor_learner::net::Mlp;
use actor_learner::options::Options;
use actor_learner::report::{Progress, Totals};
use actor_learner::train::{STOP_DEADLINE, Threads, TrainError, evaluator, join, share, spawn};
use pinring::{Feed, Pace, Pinning, Prioritized, Weights};
use std::time::Instant;

/// How far the learner may be off its pace while threads run freely, as a fraction of the first samples.
const TOLERANCE: f64 = 0.1;
/// Updates from one point of the curve to the next.
pub const UPDATES_A_POINT: u64 = 50;
/// Points from an evaluation that disappointed to the next one.
const PATIENCE: u64 = 10;

/// A finished run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The learning curve.
    pub curve: Curve,
    /// Whether the last evaluation reached the mark.
    pub solved: bool,
    /// Times and counts.
    pub totals: Totals,
    /// Steps that were written.
    pub written: u64,
    /// New priorities of steps that were overwritten meanwhile.
    pub stale: u64,
}

/// Trains until the task is solved or `options.steps` steps are used up.
///
/// # Errors
/// With pinning required: whatever kept the ring from being page-locked, before any environment starts. Later on: the
/// feed's first fault, or a panic.
pub fn train(options: &Options, hyper: &Hyper) -> Result<Run, TrainError> {
    let (sample, leaves, columns) = declare(hyper.n, hyper.gamma);
    let network = new_network(hyper.hidden, options.seed);
    let weights = Weights::new(network.clone());
    // In lockstep a batch is selected when it is due, and the next one when the priorities of this one are set: there is no
    // second buffer that it could lie in meanwhile.
    let (tolerance, buffers) = if options.lockstep { (0.0, 1) } else { (TOLERANCE, 2) };
    let mut builder = Feed::builder(sample)
        .batch(hyper.batch)
        .buffers(buffers)
        .lanes(options.envs)
        .seed(options.seed)
        .replay(hyper.capacity, Prioritized::new(hyper.alpha, hyper.beta))
        .pace(Pace::min_size(hyper.min_size).samples_per_insert(hyper.samples_per_insert, tolerance));
    if options.pin {
        builder = builder.pinning(Pinning::Required);
    }
    let feed = builder.start()?; // with pinning required and no CUDA the run ends here

    let mut dqn = Dqn::new(hyper.clone(), columns, &network, feed.pin_report().is_some());
    let mut evaluator = evaluator(options.seed)?;
    let mut threads = Threads::new();
    let [first, last] = hyper.exploration;
    let exploration = Exploration { first, last, over: hyper.exploration_steps };
    // Which thread's steps come first would show in the store: in lockstep there is one.
    let count = if options.lockstep { 1 } else { options.threads };
    for index in 0..count {
        let own = share(options.envs, count, index);
        let (writer, weights, lanes) = (feed.writer(own)?, weights.clone(), options.envs);
        let turns = options.lockstep.then(|| Turns::new(hyper, own));
        spawn(&mut threads, move || act(writer, &weights, &leaves, exploration, lanes, turns))?;
    }

    let outcome = learn(options, hyper, count, &feed, &weights, &mut dqn, &mut evaluator);
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
    threads: usize,
    feed: &Feed,
    weights: &Weights<Mlp>,
    dqn: &mut Dqn,
    evaluator: &mut Evaluator,
) -> Result<Run, TrainError> {
    let learner = feed.learner()?;
    let episodes = feed.episodes();
    let mut ledger = Ledger::new(options.envs);
    let progress = Progress::new(options.progress, SOLVED_RETURN);
    let (start, mut totals) = (Instant::now(), Totals { threads, ..Totals::default() });
    let mut next_evaluation = 0;
    let mut solved = false;
    while !solved && totals.steps < options.steps {
        let batch = learner.next_batch().map_err(pinring::Error::from)?;
        let begun = Instant::now();
        let (rows, keys) = (batch.rows() as u64, batch.keys());
        let batch = batch.share();
        let learned = dqn.update(&batch);
        // Before the batch is dropped and its slot filled again, so that the next selection knows them.
        learner.update_priorities(&keys, &learned.priorities).map_err(pinring::Error::from)?;
        feed.set_beta(hyper.beta_at(totals.batches))?;
        drop(batch);
        let version = weights.publish(dqn.network());
        totals.training += begun.elapsed();

        totals.batches += 1;
        totals.rows += rows;
        totals.steps = hyper.steps(totals.batches);
        let over = totals.steps >= options.steps;
        if !totals.batches.is_multiple_of(UPDATES_A_POINT) && !over {
            continue;
        }
        // The ends of a writer's step are reported with its commit, and surely when it has begun the next one.
        let seen = options.lockstep.then_some((totals.steps / options.envs as u64).saturating_sub(1));
        ledger.record(seen, totals.steps, learned.loss, episodes.try_iter().map(Into::into));
        let points = ledger.curve().points.len() as u64;
        if ledger.promising() && !evaluator.pending() && points >= next_evaluation {
            evaluator.request(totals.steps, version, dqn.network());
        }
        // In lockstep, and when there is nothing left to learn from, the reply decides; else learning goes on meanwhile.
        if let Some(evaluation) = evaluator.reply(options.lockstep || over)? {
            solved = evaluation.mean() >= SOLVED_RETURN;
            next_evaluation = points + PATIENCE;
            ledger.evaluated(evaluation);
        }
        let metrics = feed.metrics();
        totals.elapsed = start.elapsed();
        totals.learner_blocked = metrics.learner_blocked;
        totals.room_blocked = metrics.writer_blocked;
        progress.show(&totals, ledger.mean());
    }
    progress.finish();
    let metrics = feed.metrics();
    Ok(Run { curve: ledger.into_curve(), solved, totals, written: metrics.steps, stale: metrics.stale_keys })
}
