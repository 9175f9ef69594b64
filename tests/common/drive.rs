//! Drives a whole feed at random and compares everything that comes out with the model in `data`.
//!
//! Writer threads follow scripts drawn from a seed: they write, drop, forget and abandon steps, end episodes, ask for
//! policies, and leave. The learner holds batches and drops them in any order, here and on other threads.
#![allow(dead_code)]

use super::data::*;
use pinring::*;
use proptest::test_runner::Config;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// So many cases, or `PROPTEST_CASES`, and no files left behind.
pub fn cases(count: u32) -> Config {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: asked.unwrap_or(count), failure_persistence: None, ..Config::default() }
}

#[derive(Clone, Debug)]
pub struct Setup {
    pub shape: Shape,
    pub batch: usize,
    pub buffers: usize,
    /// Lanes of each writer; each has a thread.
    pub writers: Vec<usize>,
    /// Steps that each writer begins.
    pub attempts: u64,
    pub when_full: WhenFull,
    pub lag: Option<u64>,
    /// All lanes together, in lockstep.
    pub lockstep: bool,
    /// Percent of steps on which an episode ends, per lane.
    pub ends: u64,
    /// Percent of steps with trouble: dropped, forgotten, refused, abandoned.
    pub trouble: u64,
    pub seed: u64,
}

/// What one writer thread did.
#[derive(Debug, Default)]
struct Written {
    models: Vec<WriterModel>,
    /// Rows that errors said were dropped.
    full: u64,
}

/// What a run came to, for tests that ask more.
#[derive(Debug)]
pub struct Outcome {
    pub delivered: Vec<(u64, SeenRow)>,
    pub metrics: Metrics,
    pub dropped: u64,
}

struct Script {
    setup: Setup,
    leaves: Leaves,
    weights: Weights<u64>,
    ids: Arc<AtomicU64>,
}

impl Script {
    fn run(&self, mut writer: Writer, rng: &mut Rng, written: &mut Written) {
        let uid = self.ids.fetch_add(1, Ordering::Relaxed);
        let mut model = WriterModel::new(uid, self.setup.shape, writer.lanes());
        self.write(&mut writer, rng, &mut model, &mut written.full);
        model.gone();
        written.models.push(model);
    }

    fn write(&self, writer: &mut Writer, rng: &mut Rng, model: &mut WriterModel, full: &mut u64) {
        let Setup { shape, trouble, ends, lockstep, lag, attempts, .. } = self.setup;
        let lanes = writer.lanes().len();
        let mut last_version = 0;
        for attempt in 0..attempts {
            let ids: Vec<u64> = (0..lanes).map(|lane| id(model.writer, lane, attempt)).collect();
            if !lockstep && rng.percent(trouble / 2) {
                let lane = rng.below(lanes as u64) as usize;
                writer.abandon(lane).unwrap();
                model.abandon(lane);
            }
            let begun = match rng.below(8) {
                0 => writer.try_step(),
                1 => writer.step_timeout(Duration::from_millis(2)),
                _ => writer.step(),
            };
            let mut step = match begun {
                Ok(step) => step,
                Err(StepError::Full { buffers }) => {
                    assert_eq!(buffers, self.setup.buffers);
                    std::thread::yield_now();
                    continue;
                }
                Err(StepError::Closed(closed)) => return self.closed(closed),
                Err(error) => panic!("{error}"),
            };
            if rng.percent(trouble) {
                if rng.percent(50) {
                    write_observation(&mut step, &self.leaves, &ids, rng.next());
                }
                if rng.percent(50) {
                    drop(step)
                } else {
                    std::mem::forget(step)
                }
                continue;
            }
            write_observation(&mut step, &self.leaves, &ids, rng.next());
            let masked: Vec<bool> = (0..lanes).map(|_| rng.percent(5)).collect();
            (0..lanes).filter(|&lane| masked[lane]).for_each(|lane| step.mask_out(lane));
            let mut version = 0;
            if lag.is_some() || rng.percent(60) {
                loop {
                    match step.policy(&self.weights) {
                        Ok((newest, policy)) => {
                            assert_eq!(newest, *policy, "a version and its own weights");
                            assert!(newest >= last_version, "versions never go back");
                            (version, last_version) = (newest, newest);
                            model.hand_in(&ids, &masked);
                            break;
                        }
                        Err(PolicyError::Full { dropped_rows }) => {
                            *full += dropped_rows as u64;
                            model.hand_in(&ids, &masked);
                        }
                        Err(PolicyError::Closed(closed)) => {
                            model.hand_in(&ids, &masked);
                            return self.closed(closed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            } else if rng.percent(30) {
                version = rng.below(100);
                step.set_policy_version(version);
            }
            if rng.percent(trouble) {
                drop(step); // its observations may be handed in; nothing else is
                continue;
            }
            if rng.percent(trouble) {
                assert!(matches!(step.commit(), Err(CommitError::Unwritten { lane: 0, .. })));
                continue;
            }
            write_rest(&mut step, &self.leaves, &ids, rng.next());
            let (mut records, mut finals) = (Vec::new(), vec![false; lanes]);
            for lane in 0..lanes {
                let end = if rng.percent(50) { End::Terminated } else { End::Truncated };
                let end = rng.percent(ends).then_some(end);
                if let Some(end) = end {
                    let mut last = step.end(lane, end);
                    if shape.within_episode && rng.percent(60) {
                        last.put(self.leaves.obs, &obs_of(final_of(ids[lane]))).unwrap();
                        last.put(self.leaves.small, &small_of(final_of(ids[lane]))).unwrap();
                        finals[lane] = true;
                    }
                }
                records.push((ids[lane], end, masked[lane]));
            }
            match step.commit() {
                Ok(()) => model.commit(&records, &finals, version),
                Err(CommitError::Full { dropped_rows }) => {
                    *full += dropped_rows as u64;
                    model.commit(&records, &finals, version);
                }
                Err(CommitError::Closed(closed)) => {
                    model.hand_in(&ids, &masked);
                    return self.closed(closed);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Only a lockstep feed closes before its writers want to leave.
    fn closed(&self, closed: Closed) {
        assert!(self.setup.lockstep && matches!(closed, Closed::LaneGone { .. } | Closed::Ended), "{closed}");
    }
}

/// Runs the setup to its natural end and checks that every row is delivered as the model has it, exactly once.
pub fn run(setup: Setup) -> Outcome {
    let (sample, leaves, columns) = setup.shape.sample();
    let weights = Weights::new(0u64);
    let total: usize = setup.writers.iter().sum();
    let mut builder =
        Feed::builder(sample).batch(setup.batch).buffers(setup.buffers).when_full(setup.when_full).episodes(1 << 18);
    if setup.lockstep {
        builder = builder.lockstep(total);
    }
    if let Some(lag) = setup.lag {
        builder = builder.max_policy_lag(&weights, lag);
    }
    let feed = builder.start().unwrap();
    let (learner, episodes, intake) = (feed.learner().unwrap(), feed.episodes(), feed.intake().unwrap());
    let mut rng = Rng(setup.seed);
    let script =
        Arc::new(Script { setup: setup.clone(), leaves, weights: weights.clone(), ids: Arc::new(AtomicU64::new(0)) });
    // Writers first, so that lanes of a lockstep feed are all taken before one of them leaves.
    let writers: Vec<Writer> = setup.writers.iter().map(|&lanes| intake.writer(lanes).unwrap()).collect();
    let threads: Vec<_> = writers
        .into_iter()
        .map(|writer| {
            let (script, intake, mut rng) = (script.clone(), intake.clone(), rng.fork());
            std::thread::spawn(move || {
                let mut written = Written::default();
                let lanes = writer.lanes().len();
                script.run(writer, &mut rng, &mut written);
                if !script.setup.lockstep && rng.percent(50) {
                    script.run(intake.writer(lanes).unwrap(), &mut rng, &mut written); // lanes are used again
                }
                written
            })
        })
        .collect();
    drop(intake);
    let delivered = learn(&learner, &columns, &setup, &weights, &mut rng);
    let written: Vec<Written> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    check(&setup, &feed, delivered, written, &episodes)
}

fn learn(
    learner: &Learner,
    columns: &Columns,
    setup: &Setup,
    weights: &Weights<u64>,
    rng: &mut Rng,
) -> Vec<(u64, SeenRow)> {
    let mut delivered = Vec::new();
    let mut held: Vec<(Batch, Vec<SeenRow>)> = Vec::new();
    let (mut batches, mut partial) = (0, false);
    loop {
        let next = match rng.below(4) {
            0 => learner.try_next(),
            1 => learner.next_timeout(Duration::from_millis(rng.below(20))),
            2 => Learner::select(&[learner], Duration::from_millis(20))
                .map(|found| found.map(|(_, batch)| batch))
                .map_err(|failed| failed.error),
            _ => learner.next_batch().map(Some),
        };
        let batch = match next {
            Ok(Some(batch)) => batch,
            Ok(None) => {
                std::thread::yield_now();
                continue;
            }
            // A batch is on its way home on another thread.
            Err(NextError::AllHeld { .. }) => continue,
            Err(NextError::Ended) => break,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(batch.sequence_number(), batches, "in the order of delivery");
        assert!(!partial, "only the last batch is partial");
        batches += 1;
        partial = batch.rows() < setup.batch;
        assert!((1..=setup.batch).contains(&batch.rows()));
        let rows = read(&batch, columns, setup.shape);
        delivered.extend(rows.iter().map(|row| (batch.sequence_number(), row.clone())));
        if setup.lag.is_some() || rng.percent(50) {
            let version = weights.latest().0 + 1;
            assert_eq!(weights.publish(version), version);
        }
        held.push((batch, rows));
        while held.len() >= setup.buffers || (!held.is_empty() && rng.percent(50)) {
            let (batch, rows) = held.swap_remove(rng.below(held.len() as u64) as usize);
            assert_eq!(read(&batch, columns, setup.shape), rows, "a held batch does not change");
            if rng.percent(25) {
                std::thread::spawn(move || drop(batch));
            } else {
                drop(batch);
            }
        }
    }
    delivered
}

fn check(
    setup: &Setup,
    feed: &Feed,
    delivered: Vec<(u64, SeenRow)>,
    written: Vec<Written>,
    episodes: &Episodes,
) -> Outcome {
    let mut expected = Expected::default();
    let models: Vec<&WriterModel> = written.iter().flat_map(|written| &written.models).collect();
    models.iter().for_each(|model| expected.add(model));
    delivered.iter().for_each(|(_, row)| expected.take(row));
    let dropped = expected.0.len() as u64;
    let full: u64 = written.iter().map(|written| written.full).sum();
    if setup.lockstep {
        check_lockstep(setup, &delivered, &models, &expected);
    } else {
        match setup.when_full {
            WhenFull::Block => assert_eq!((dropped, full), (0, 0), "every row is delivered: {:?}", expected.0),
            WhenFull::DropNewest => assert_eq!(full, 0, "dropping is no error"),
            _ => assert_eq!(full, dropped, "errors name every dropped row"),
        }
    }
    // Batches that other threads drop may be on their way.
    for _ in 0..1000 {
        if feed.metrics().batches_held == 0 && feed.metrics().free_slots == setup.buffers {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let metrics = feed.metrics();
    assert_eq!(metrics.rows, delivered.len() as u64);
    assert_eq!((metrics.batches, metrics.batches_taken), (metrics.batches_taken, metrics.batches));
    assert_eq!((metrics.batches_held, metrics.batches_waiting, metrics.writers), (0, 0, 0));
    assert_eq!(metrics.free_slots, setup.buffers, "every slot came home");
    if setup.lockstep {
        let row_steps = setup.shape.len() as u64 * (metrics.rows + metrics.dropped_rows);
        assert_eq!(metrics.steps, row_steps + metrics.unfinished_steps, "every step is accounted for: {metrics:?}");
    } else {
        assert_eq!(metrics.dropped_rows, dropped);
        assert_eq!(metrics.steps, models.iter().map(|model| model.committed).sum::<u64>());
        if setup.shape.steps > 0 {
            assert_eq!(metrics.unfinished_steps, models.iter().map(|model| model.unfinished).sum::<u64>());
            assert_eq!(metrics.staged_rows, metrics.rows);
        }
        let mut known: Vec<Episode3> = models.iter().flat_map(|model| model.episodes.clone()).collect();
        sort_episodes(&mut known);
        assert_eq!(metrics.episodes, known.len() as u64);
        assert_eq!(metrics.episodes_dropped, 0);
        assert_eq!(episodes_of(episodes), known);
    }
    let report = feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!((report.dropped_rows(), report.still_out), (if setup.lockstep { report.partial_rows } else { 0 }, 0));
    assert!(report.threads_given_up.is_empty(), "{report}");
    Outcome { delivered, metrics, dropped }
}

/// Row i of batch k is lane i mod L, and its unroll is k × layers + i / L.
fn check_lockstep(setup: &Setup, delivered: &[(u64, SeenRow)], models: &[&WriterModel], left: &Expected) {
    let (lanes, steps): (usize, u64) = (setup.writers.iter().sum(), setup.shape.len() as u64);
    let layers = (setup.batch / lanes) as u64;
    let mut rows: HashMap<usize, u64> = HashMap::new();
    models.iter().flat_map(|model| &model.rows).for_each(|row| *rows.entry(row.lane).or_default() += 1);
    let complete = (0..lanes).map(|lane| rows.get(&lane).copied().unwrap_or(0)).min().unwrap();
    assert_eq!(delivered.len() as u64, complete * lanes as u64, "what every lane completed, and nothing else");
    for (index, (batch, row)) in delivered.iter().enumerate() {
        let unroll = (index / lanes) as u64;
        assert_eq!(*batch, unroll / layers);
        assert_eq!((row.lane, row.first_step), (index % lanes, unroll * steps));
        if let Some(lag) = setup.lag {
            let version = batch.saturating_sub(lag);
            assert!(row.version.iter().all(|&v| v as u64 == version), "batch {batch} acts with version {version}");
        }
    }
    assert!(left.0.values().all(|row| row.first_step / steps >= complete));
}
