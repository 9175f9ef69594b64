//! The feeds of a round: who writes, who learns, who saves; and the account that each must leave.

use crate::account::{Account, Once, lock};
use crate::rows::{self, BYTES, Rng, WORDS};
use pinring::*;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a thread that is to die says.
pub const KILLED: &str = "soak: this environment is to die here";
const DEADLINE: Duration = Duration::from_secs(20);

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
const LANES: usize = 4;

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
        account.check(metrics.steps == committed, || {
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
            account.check(steps == committed, || {
                format!(
                    "{kind:?}: {committed} steps, {taken} rows taken, {} dropped, {} steps unfinished",
                    metrics.dropped_rows, metrics.unfinished_steps
                )
            });
        }
        account.add("steps committed", committed);
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
    fn observations(self) -> usize {
        match self {
            Kind::Unrolls => UNROLL + 1,
            Kind::Sequences => SEQUENCE + 1,
            _ => 1,
        }
    }
}

/// What writes.
#[derive(Clone)]
struct Environment {
    kind: Kind,
    words: Leaf<u64>,
    weights: Weights<u64>,
    account: Arc<Account>,
    leave: Arc<AtomicBool>,
    committed: Arc<AtomicU64>,
}

impl Environment {
    /// Steps until the feed ends, or it is to leave; panics now and then, in the middle of a step.
    fn run(self, mut writer: Writer, mut rng: Rng) {
        let uid = self.account.uids(LANES);
        let mut step = [0u64; LANES];
        let mut values = [0; LANES * WORDS];
        while !self.leave.load(Ordering::Relaxed) {
            self.account.live();
            match self.step(&mut writer, uid, &mut step, &mut values, &mut rng) {
                Ok(true) => drop(self.committed.fetch_add(LANES as u64, Ordering::Relaxed)),
                Ok(false) => {}
                Err(error) => {
                    let over = matches!(error.kind(), ErrorKind::Stopped | ErrorKind::Ended);
                    return self.account.check(over, || format!("{:?}: a writer: {error}", self.kind));
                }
            }
        }
    }

    /// One step of every lane: whether it was committed.
    fn step(
        &self,
        writer: &mut Writer,
        uid: u64,
        step: &mut [u64; LANES],
        values: &mut [u64],
        rng: &mut Rng,
    ) -> Result<bool> {
        let fill = |values: &mut [u64], step: &[u64; LANES]| {
            for (lane, words) in values.chunks_exact_mut(WORDS).enumerate() {
                rows::fill(words, rows::id(uid + lane as u64, step[lane]));
            }
        };
        fill(values, step);
        let mut open = match rng.below(4) {
            0 => match writer.step_timeout(Duration::from_millis(50)) {
                Err(StepError::Full { .. } | StepError::Pace(_)) => return Ok(false),
                open => open?,
            },
            _ => writer.step()?,
        };
        open.put(self.words, values)?;
        if self.kind != Kind::Steps && !self.kind.is_replayed() {
            let (version, policy) = open.policy(&self.weights)?;
            self.account.check(version == *policy, || format!("version {version} came with the weights of {policy}"));
        }
        if self.kind != Kind::Lockstep {
            match rng.below(6_000) {
                0 => panic!("{KILLED}"),
                1..10 => {
                    self.account.add("steps dropped half-written", 1);
                    return Ok(false);
                }
                _ => {}
            }
        }
        let mut ended = [false; LANES];
        for lane in 0..LANES {
            if rng.once_in(50) {
                ended[lane] = true;
                let mut last = open.end(lane, if rng.once_in(2) { End::Terminated } else { End::Truncated });
                if self.kind.is_replayed() {
                    let mut words = [0; WORDS];
                    rows::fill(&mut words, rows::id(uid + lane as u64, step[lane] + 1));
                    last.put(self.words, &words)?;
                }
            }
        }
        open.commit()?;
        for (step, ended) in step.iter_mut().zip(ended) {
            *step += 1 + u64::from(ended && self.kind.is_replayed()); // the final observation has a number of its own
        }
        Ok(true)
    }
}

/// What learns.
struct Learning {
    kind: Kind,
    column: Column<u64>,
    next: Option<Column<u64>>,
    weights: Weights<u64>,
    feed: Arc<Feed>,
    account: Arc<Account>,
    taken: Arc<AtomicU64>,
    batches: Arc<AtomicU64>,
    once: Arc<Mutex<Once>>,
    publishing: Arc<Mutex<()>>,
}

impl Learning {
    /// The words of a row: whole, in order, and none of them before.
    fn check(&self, row: &[u64], next: Option<&[u64]>) {
        let mut first = None;
        for (i, words) in row.chunks_exact(WORDS).chain(next).enumerate() {
            let Some(id) = self.account.whole(words, &format!("{:?}", self.kind)) else { return };
            let first = *first.get_or_insert(id);
            self.account
                .check(id == first + i as u64, || format!("{:?}: step {id:x} behind {first:x}, at {i}", self.kind));
        }
        if let (false, Some(first)) = (self.kind.is_replayed(), first) {
            let fresh = lock(&self.once).note(first);
            self.account.check(fresh, || format!("{:?}: row {first:x} came twice", self.kind));
        }
    }

    fn count(&self, rows: usize) {
        self.taken.fetch_add(rows as u64, Ordering::Relaxed);
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.account.live();
        // Of two learners one publishes at a time, so that weights are their own version.
        let _publishing = lock(&self.publishing);
        let version = self.weights.latest().0 + 1;
        self.weights.publish(version);
    }

    fn rest(&self, rng: &mut Rng) {
        if rng.once_in(400) {
            self.account.add("learners paused", 1);
            thread::sleep(Duration::from_millis(20 + rng.below(100)));
        }
    }

    fn over(&self, error: &NextError) {
        let over = matches!(error, NextError::Ended | NextError::Closed(Closed::Stopped));
        self.account.check(over, || format!("{:?}: a learner: {error}", self.kind));
    }

    fn on_host(self, learner: &Learner, mut rng: Rng) {
        let mut held = Vec::new();
        loop {
            let batch = match rng.below(3) {
                0 => learner.next_timeout(Duration::from_millis(100)),
                _ => learner.next_batch().map(Some),
            };
            let batch = match batch {
                Ok(Some(batch)) => batch,
                Ok(None) | Err(NextError::Pace(_)) => continue,
                Err(error) => return self.over(&error),
            };
            let (rows, len) = (batch.rows(), self.kind.observations() * WORDS);
            for row in 0..rows {
                let next = self.next.map(|next| &batch.slice(next)[row * WORDS..][..WORDS]);
                self.check(&batch.slice(self.column)[row * len..][..len], next);
            }
            self.count(rows);
            if self.kind == Kind::Prioritized {
                self.update(learner.update_priorities(&batch.keys(), &vec![rng.below(100) as f32; rows]), rows);
            }
            // Held over a few others.
            held.push(batch);
            if held.len() > 1 + rng.below(2) as usize {
                held.swap_remove(rng.below(held.len() as u64) as usize);
            }
            self.rest(&mut rng);
        }
    }

    fn update(&self, updated: Result<Updated, UpdateError>, rows: usize) {
        match updated {
            Ok(Updated { applied, stale, .. }) => {
                self.account
                    .check(applied + stale == rows, || format!("{applied} applied and {stale} stale of {rows}"));
            }
            Err(error) => self.account.wrong(format!("priorities: {error}")),
        }
    }

    #[allow(unsafe_code)] // raw addresses
    fn on_device(self, learner: &DeviceLearner, mut rng: Rng) {
        let (sender, arrived) = mpsc::channel();
        loop {
            let batch = match rng.below(3) {
                0 => learner.next_timeout(Duration::from_millis(100)),
                _ => learner.next_batch().map(Some),
            };
            let batch = match batch {
                Ok(Some(batch)) => batch,
                Ok(None) | Err(NextError::Pace(_)) => continue,
                Err(error) => return self.over(&error),
            };
            let rows = batch.rows();
            // One row of it comes back to the host.
            let row = rng.below(rows as u64) as usize;
            let ptr = batch.column(self.column).ptr + (row * self.kind.observations() * BYTES) as u64;
            let sender = sender.clone();
            let then = move |bytes: &[u8]| {
                let _ = sender.send(rows::check_bytes(bytes)); // whoever learns may be gone
            };
            // SAFETY: a step of the batch's on the learner's device; the batch is released behind the snapshot.
            match unsafe { learner.download(ptr, BYTES, then) } {
                Ok(()) if rng.once_in(4) => {
                    let begun = Instant::now();
                    while let Err(mpsc::RecvTimeoutError::Timeout) = arrived.recv_timeout(Duration::from_millis(50)) {
                        if self.feed.closed().is_some_and(|closed| closed == Closed::Stopped) {
                            break;
                        }
                        self.account.check(begun.elapsed() < DEADLINE, || "a download does not arrive".to_owned());
                        self.account.live();
                    }
                }
                Ok(()) | Err(DeviceUseError::Closed(_)) => {}
                Err(error) => self.account.wrong(format!("{:?}: a download: {error}", self.kind)),
            }
            for id in arrived.try_iter() {
                self.account.add("rows back from the device", 1);
                self.account.check(id.is_some(), || format!("{:?}: a torn row on the device", self.kind));
            }
            self.count(rows);
            if self.kind == Kind::Prioritized {
                self.update(learner.update_priorities(&batch.keys(), &vec![rng.below(100) as f32; rows]), rows);
            }
            drop(batch);
            self.rest(&mut rng);
        }
    }
}
