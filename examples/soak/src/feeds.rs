//! The feeds of a round: who writes, who learns, who saves; and the account that each must leave.

use crate::account::{Account, Once, lock};
use crate::environment::Environment;
use crate::learning::Learning;
use crate::rows::{BYTES, Rng, WORDS};
use pinring::*;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Until a stop, or what else must come, is given up.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// How steps become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Single steps, in the order of writing.
    Steps,
    /// Unrolls of free-running lanes, behind a lag gate.
    Unrolls,
    /// Single steps in lockstep, behind a lag gate. Its writers do not die, since that ends it.
    Lockstep,
    /// Stored steps, sampled by priorities.
    Prioritized,
    /// Stored sequences, sampled evenly.
    Sequences,
}

/// The kinds that a first and a second feed have, round by round.
pub const FIFO: [Kind; 3] = [Kind::Steps, Kind::Unrolls, Kind::Lockstep];
/// See there.
pub const REPLAY: [Kind; 2] = [Kind::Prioritized, Kind::Sequences];

/// Steps of a row.
const UNROLL: usize = 5;
const SEQUENCE: usize = 4;
const CAPACITY: usize = 4096;
/// Writers and the lanes of each.
const WRITERS: usize = 3;
/// See there.
pub const LANES: usize = 4;

/// How the feeds of a round come to their device.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// CUDA, with device 0; none if there is none.
    pub cuda: Option<CudaSearch>,
}

impl Place {
    fn set(&self, builder: FeedBuilder, bytes: usize) -> FeedBuilder {
        match &self.cuda {
            None => builder,
            Some(search) => builder.pinning(Pinning::Required).cuda(search.clone()).device(0).downloads(bytes),
        }
    }
}

/// One feed of a round, started.
pub struct Soaked {
    kind: Kind,
    feed: Arc<Feed>,
    words: Leaf<u64>,
    column: Column<u64>,
    next: Option<Column<u64>>,
    weights: Weights<u64>,
    on_device: bool,
    account: Arc<Account>,
    /// Writers are to leave.
    leave: Arc<AtomicBool>,
    /// Lane-steps that were committed.
    committed: Arc<AtomicU64>,
    /// Rows that learners took, and batches.
    taken: Arc<AtomicU64>,
    batches: Arc<AtomicU64>,
    once: Arc<Mutex<Once>>,
    publishing: Arc<Mutex<()>>,
    threads: Vec<JoinHandle<()>>,
    loaded: Option<PathBuf>,
}

impl std::fmt::Debug for Soaked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Soaked").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Soaked {
    /// Starts a feed, loads its store if there is a file, and starts its threads.
    pub fn start(kind: Kind, place: &Place, file: &Path, account: &Arc<Account>, rng: &mut Rng) -> Result<Soaked> {
        let mut step = Step::new();
        let words = step.observation::<u64>("words", &[WORDS]);
        let mut sample = match kind {
            Kind::Steps | Kind::Lockstep => Sample::step(step),
            Kind::Unrolls => Sample::unroll(step, UNROLL),
            Kind::Prioritized => Sample::transition(step, 1, 0.99),
            Kind::Sequences => Sample::sequence(step, SEQUENCE, 1),
        };
        let mut next = None;
        let column = match kind {
            Kind::Prioritized => {
                next = Some(sample.next(words));
                sample.at(words, 0)
            }
            _ => sample.all(words),
        };
        let weights = Weights::new(0);
        let rows = 24;
        let builder = Feed::builder(sample).batch(rows).buffers(4).seed(rng.draw());
        let builder = match kind {
            Kind::Steps => builder,
            Kind::Unrolls => builder.max_policy_lag(&weights, 2),
            Kind::Lockstep => builder.lockstep(WRITERS * LANES).max_policy_lag(&weights, 1),
            Kind::Prioritized => {
                let pace = Pace::min_size(500).samples_per_insert(4.0, 1.0);
                builder.lanes(WRITERS * LANES).replay(CAPACITY, Prioritized::new(0.6, 0.4)).pace(pace)
            }
            Kind::Sequences => builder.lanes(WRITERS * LANES).replay(CAPACITY, Uniform::new()),
        };
        let feed = Arc::new(place.set(builder, BYTES).start()?);
        let on_device = place.cuda.is_some();
        account.add("feeds started", 1);
        let mut soaked = Soaked {
            kind,
            feed,
            words,
            column,
            next,
            weights,
            on_device,
            account: account.clone(),
            leave: Arc::default(),
            committed: Arc::default(),
            taken: Arc::default(),
            batches: Arc::default(),
            once: Arc::default(),
            publishing: Arc::default(),
            threads: Vec::new(),
            loaded: None,
        };
        if kind.is_replayed() {
            soaked.load(&file.with_extension(format!("{kind:?}")));
        }
        soaked.learn(rng)?;
        soaked.write(rng)?;
        Ok(soaked)
    }

    /// Takes over what the last feed of the kind has saved.
    fn load(&mut self, file: &Path) {
        if file.exists() {
            match self.feed.load(file) {
                Ok(loaded) => {
                    self.account.add("checkpoints loaded", 1);
                    self.account.check(loaded.live > 0 && loaded.resumed, || format!("a load brought {loaded:?}"));
                }
                Err(error) => self.account.wrong(format!("load: {error}")),
            }
        }
        self.loaded = Some(file.to_owned());
    }

    // ---- writers -----------------------------------------------------------------------------------------------------

    fn write(&mut self, rng: &mut Rng) -> Result<()> {
        let intake = Arc::new(Mutex::new(Some(self.feed.intake()?)));
        let mut keepers = Vec::new();
        // All have their seat before one leaves, which would end a feed in lockstep.
        let writers: Vec<Writer> = (0..WRITERS).map(|_| self.feed.writer(LANES)).collect::<Result<_>>()?;
        for writer in writers {
            let (intake, mut rng) = (intake.clone(), Rng(rng.draw()));
            let environment = Environment {
                kind: self.kind,
                words: self.words,
                weights: self.weights.clone(),
                account: self.account.clone(),
                leave: self.leave.clone(),
                committed: self.committed.clone(),
            };
            // Keeps one environment running: when its thread dies, a new one takes its lanes.
            keepers.push(thread::spawn(move || {
                let mut writer = Some(writer);
                loop {
                    let Some(seat) =
                        writer.take().map_or_else(|| lock(&intake).as_ref().map(|i| i.writer(LANES)), |w| Some(Ok(w)))
                    else {
                        return;
                    };
                    let Ok(seat) = seat else { return }; // the feed is over
                    let (environment, rng) = (environment.clone(), Rng(rng.draw()));
                    let account = environment.account.clone();
                    if thread::spawn(move || environment.run(seat, rng)).join().is_ok() {
                        return;
                    }
                    account.add("writers killed in a step", 1);
                }
            }));
        }
        // The last writer ends the source where nobody keeps an intake.
        self.threads.push(thread::spawn(move || {
            keepers.into_iter().for_each(|keeper| drop(keeper.join()));
            drop(lock(&intake).take());
        }));
        Ok(())
    }

    // ---- learners ----------------------------------------------------------------------------------------------------

    fn learner(&self) -> Learning {
        Learning {
            kind: self.kind,
            column: self.column,
            next: self.next,
            weights: self.weights.clone(),
            feed: self.feed.clone(),
            account: self.account.clone(),
            taken: self.taken.clone(),
            batches: self.batches.clone(),
            once: self.once.clone(),
            publishing: self.publishing.clone(),
        }
    }

    #[allow(unsafe_code)] // a raw stream
    fn learn(&mut self, rng: &mut Rng) -> Result<()> {
        if self.on_device {
            // SAFETY: the legacy default stream lives as long as the device.
            let device = unsafe { self.feed.learner_on(0, std::ptr::null_mut()) }?;
            let (learning, rng) = (self.learner(), Rng(rng.draw()));
            self.threads.push(thread::spawn(move || learning.on_device(&device, rng)));
        }
        // Stored steps go where they are gathered; of others each learner gets what it asks for.
        if !self.on_device || !self.kind.is_replayed() {
            let (learning, rng, learner) = (self.learner(), Rng(rng.draw()), self.feed.learner()?);
            self.threads.push(thread::spawn(move || learning.on_host(&learner, rng)));
        }
        Ok(())
    }

    /// Something from outside: a checkpoint, a look at the counters, a clear.
    pub fn disturb(&self, rng: &mut Rng) {
        let metrics = self.feed.metrics();
        self.account.check(metrics.batches_taken <= metrics.batches, || format!("{metrics:?}"));
        let Some(file) = &self.loaded else { return };
        if rng.once_in(8) {
            match self.feed.clear() {
                Ok(()) => self.account.add("stores cleared", 1),
                Err(error) => self.account.wrong(format!("clear: {error}")),
            }
            return;
        }
        match self.feed.save(file) {
            Ok(saved) => {
                self.account.add("checkpoints saved", 1);
                self.account.add("records saved", saved.records as u64);
            }
            Err(error) => self.account.wrong(format!("save: {error}")),
        }
    }

    /// Ends it, by a stop in the midst of things or by the end of its source, and checks the account.
    pub fn end(self, stop: bool) {
        let Soaked { kind, feed, account, leave, threads, committed, taken, batches, .. } = self;
        // A source ends by itself where the learner keeps up; the pace of a store may hold writers up, so those are stopped.
        let stop = stop || kind.is_replayed();
        if !stop {
            leave.store(true, Ordering::Relaxed);
        } else if let Err(error) = feed.stop(DEADLINE) {
            account.wrong(format!("{kind:?}: stop: {error}"));
        }
        for thread in threads {
            if let Err(panic) = thread.join() {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                account.wrong(format!("{kind:?}: a thread of the program's panicked: {text}"));
            }
        }
        let report = match feed.stop(DEADLINE) {
            Ok(report) => report,
            Err(error) => return account.wrong(format!("{kind:?}: stop: {error}")),
        };
        let (committed, taken, batches) =
            [&committed, &taken, &batches].map(|count| count.load(Ordering::Relaxed)).into();
        let metrics = feed.metrics();
        // Behind a stop in the midst of things learners may still have held batches.
        let whole = report.fault.is_none() && report.threads_given_up.is_empty() && (stop || report.still_out == 0);
        let whole = whole && (report.kept_bytes, report.quarantined_slots) == (0, 0);
        account.check(whole, || format!("{kind:?}: {report}"));
        // In lockstep one writer leaves first, and layers that cannot be complete are lost.
        let may_lose = stop || kind == Kind::Lockstep;
        account.check(may_lose || report.dropped_rows() == 0, || {
            format!("{kind:?}: the end of a source lost rows: {report}")
        });
        // A commit that the end overtakes is an error to its writer and counts as a step whose rows are dropped: of each
        // writer one.
        let overtaken = metrics.steps.wrapping_sub(committed);
        account.check(overtaken <= (WRITERS * LANES) as u64, || {
            format!("{kind:?}: {} steps counted, {committed} committed", metrics.steps)
        });
        account.check(metrics.batches_taken == batches, || {
            format!("{kind:?}: {} batches counted, {batches} taken", metrics.batches_taken)
        });
        account.check(metrics.writers == 0 && metrics.batches_held == 0, || format!("{kind:?}: {metrics:?}"));
        account
            .check(metrics.stranded_bytes == 0, || format!("{kind:?}: {} bytes are stranded", metrics.stranded_bytes));
        if !kind.is_replayed() {
            let steps = kind.steps() as u64 * (taken + metrics.dropped_rows) + metrics.unfinished_steps;
            account.check(steps == metrics.steps, || {
                format!(
                    "{kind:?}: {committed} steps, {taken} rows taken, {} dropped, {} steps unfinished",
                    metrics.dropped_rows, metrics.unfinished_steps
                )
            });
        }
        account.add("steps committed", committed);
        account.add("commits overtaken by an end, in lane-steps", overtaken);
        account.add("rows taken and checked", taken);
        account.add("batches taken", batches);
        account.add("rows dropped at ends, counted", metrics.dropped_rows);
        account.add("steps unfinished, counted", metrics.unfinished_steps);
        account.add(if stop { "feeds stopped" } else { "sources ended" }, 1);
    }
}

impl Kind {
    /// Whether its batches are sampled.
    pub fn is_replayed(self) -> bool {
        REPLAY.contains(&self)
    }
    fn steps(self) -> usize {
        if self == Kind::Unrolls { UNROLL } else { 1 }
    }
    /// Observations of a row.
    pub fn observations(self) -> usize {
        match self {
            Kind::Unrolls => UNROLL + 1,
            Kind::Sequences => SEQUENCE + 1,
            _ => 1,
        }
    }
}
