//! The running whole: what `start` returns.
//!
//! Owns the supervisor's thread and the handles that the embedding program uses. Dropping it stops everything.

mod builder;
mod gathering;
mod replay;
mod store;
#[cfg(all(test, target_os = "linux"))]
mod tests;

pub use builder::{FeedBuilder, Footprint, Pinning, StartHandle};
pub use store::{Store, StoreBuilder};

use crate::actors::host::{self, Hosted};
use crate::actors::supervisor::{Common, Stop, Supervisor};
use crate::episodes::Episodes;
use crate::error::{Closed, Error, ErrorKind, Fault, Result};
use crate::feeding::Desk;
use crate::feeding::copy::DeviceCopier;
use crate::feeding::learner::DeviceLearner;
use crate::feeding::rounds::Seat;
use crate::gather::Gathering;
use crate::intake::{IntakeGate, NoSeat};
use crate::keys::Keys;
use crate::layout::ColumnInfo;
use crate::learner::Learner;
use crate::memory::{PinReport, memory_limit};
use crate::metrics::Metrics;
use crate::store::{Loaded, Saved, Store as Steps};
use crate::sync::lock;
use crate::writer::Writer;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a dropped feed waits for its threads.
const DROP_DEADLINE: Duration = Duration::from_secs(10);
/// How much longer than its deadline a stop waits for the supervisor's answer.
const ANSWER_GRACE: Duration = Duration::from_secs(1);
/// A stop that may take longer may take for ever.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// A running feed: the ring, its actors, and the handles for writers and learner. Share it behind an `Arc` where several
/// threads need it. Dropped, it stops.
///
/// ```
/// use pinring::*;
/// # fn main() -> Result<()> {
/// let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[4]);
/// let reward = step.leaf::<f32>("reward", &[]);
/// let mut sample = Sample::unroll(step, 2);
/// let (obs_column, reward_column) = (sample.all(obs), sample.all(reward));
///
/// let feed = Feed::builder(sample).batch(1).start()?;
/// let (mut writer, learner) = (feed.writer(1)?, feed.learner()?);
/// for t in 0..3 {
///     let mut s = writer.step()?;
///     s.put(obs, &[t as f32; 4])?;
///     s.put(reward, &[10.0 * t as f32])?;
///     s.commit()?;
/// }
/// let batch = learner.next_batch()?;
/// assert_eq!(batch.view(obs_column).shape(), [1, 3, 4]); // the observation after the last step too
/// assert_eq!(batch.slice(reward_column), [0.0, 10.0]);
/// drop(batch);
/// let report = feed.stop(std::time::Duration::from_secs(5))?;
/// assert_eq!(report.dropped_rows(), 0);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Feed {
    pub(crate) gate: Arc<IntakeGate>,
    common: Arc<Common>,
    supervisor: Mutex<Option<Hosted<Supervisor>>>,
    pin_report: Option<PinReport>,
    kept_bytes: Arc<AtomicUsize>,
    pub(crate) desks: Vec<Arc<Desk>>,
    episodes: Episodes,
    seed: u64,
    learner_taken: AtomicBool,
    stopped: Mutex<Option<StopReport>>,
}

/// What a stop left behind.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # step.leaf::<f32>("reward", &[]);
/// # let feed = Feed::builder(Sample::step(step)).start()?;
/// let report = feed.stop(std::time::Duration::from_secs(5))?;
/// assert!(report.threads_given_up.is_empty());
/// println!("{report}");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopReport {
    /// Committed rows of batches that were not full.
    pub partial_rows: u64,
    /// Rows of sealed batches that the learner did not take. By [rounds](crate::Deal::Rounds) those of a last round for which
    /// there were not enough batches are among them; those of a round that has begun are not, since they are still given.
    pub untaken_rows: u64,
    /// What still keeps the ring: batches in the user's hands, and slots with steps that were open (in lockstep: each such
    /// step). The last of them unmaps the ring, on the thread that drops it.
    pub still_out: usize,
    /// Names of threads that did not end by the deadline and were left to themselves.
    pub threads_given_up: Vec<String>,
    /// Bytes of the ring that CUDA did not let go of: they stay mapped for the rest of the process. The log has CUDA's
    /// answer. 0 while batches are still out or threads were given up, since the ring has not ended then.
    pub kept_bytes: usize,
    /// Slots out of use for good, because the end of a copy from them could not be learned by the deadline: the ring
    /// stays mapped and page-locked for the rest of the process.
    pub quarantined_slots: usize,
    /// The fault that had stopped the feed before, if one had.
    pub fault: Option<Arc<Fault>>,
}

impl StopReport {
    /// Committed rows that no learner saw: [`partial_rows`](StopReport::partial_rows) and
    /// [`untaken_rows`](StopReport::untaken_rows). They are among [`Metrics::dropped_rows`](crate::Metrics::dropped_rows), with those
    /// that writers dropped before. Of a replay feed they are samples that were selected: the steps are in the store.
    pub fn dropped_rows(&self) -> u64 {
        self.partial_rows + self.untaken_rows
    }
}

impl std::fmt::Display for StopReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let StopReport {
            partial_rows,
            untaken_rows,
            still_out,
            threads_given_up,
            kept_bytes,
            quarantined_slots,
            fault,
        } = self;
        write!(f, "rows dropped: {partial_rows} of partial batches, {untaken_rows} untaken; still out: {still_out}")?;
        if !threads_given_up.is_empty() {
            write!(f, "; threads given up: {}", threads_given_up.join(", "))?;
        }
        if *kept_bytes > 0 {
            write!(f, "; {kept_bytes} bytes stay mapped, since CUDA did not unregister them")?;
        }
        if *quarantined_slots > 0 {
            write!(f, "; {quarantined_slots} slots are quarantined: copies from them did not end in time, or failed")?;
        }
        fault.as_ref().map_or(Ok(()), |fault| write!(f, "; {fault}"))
    }
}

impl Feed {
    /// Where the batches' columns lie in time, and what they hold, as data.
    pub fn columns(&self) -> Vec<ColumnInfo> {
        self.gate.layout.infos()
    }

    /// A handle that makes writers; clone it into the threads that need one. When the last writer and the last intake
    /// handle are gone, the learner takes what is there and then sees the end.
    ///
    /// # Errors
    /// Why nothing can be written any more.
    pub fn intake(&self) -> Result<Intake> {
        match self.gate.closed() {
            Some(closed) => Err(closed.into()),
            None => Ok(Intake::new(self.gate.clone(), self.seed)),
        }
    }

    /// A writer for the next `lanes` free lanes. See [`Intake::writer`].
    ///
    /// # Errors
    /// As [`Intake::writer`].
    pub fn writer(&self, lanes: usize) -> Result<Writer> {
        seat_writer(&self.gate, self.seed, lanes)
    }

    /// The learner's end, once.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] the second time, and of a feed [by rounds](crate::Deal::Rounds); or why the feed is closed.
    pub fn learner(&self) -> Result<Learner> {
        if let Some(closed @ (Closed::Stopped | Closed::Fault(_))) = self.gate.closed() {
            return Err(closed.into());
        }
        if self.desks.iter().any(|desk| desk.seat.is_some()) {
            return Err(Error::new(
                ErrorKind::Misuse,
                "this feed deals its batches to its devices by rounds, so that none is left for the host: use `learner_on`,                  or deal on demand",
            ));
        }
        self.gather_for_host()?;
        if self.learner_taken.swap(true, Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Misuse,
                "the learner was taken already: a feed has one learner, and when that is dropped the feed ends; share it, or \
                 start another feed",
            ));
        }
        self.gate.learner_taken();
        Ok(Learner::new(self.gate.clone()))
    }

    /// The learner's end on a device that the feed was built with, once for each: `stream` is the one that will use its
    /// batches (a `CUstream` or `cudaStream_t`; 0, 1 and 2 are the default streams, as in CUDA). Every wait for a batch
    /// and every release is ordered on it. Where several devices have a learner, each batch goes to the first that has
    /// a free buffer, or they are dealt [by rounds](crate::Deal::Rounds).
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] for a device that the feed was not built with, and the second time; or why the feed is
    /// closed.
    ///
    /// # Safety
    /// `stream` is a stream of that device, and is destroyed after the learner and its batches.
    #[allow(unsafe_code)] // only the caller can know what a raw stream is
    pub unsafe fn learner_on(&self, device: i32, stream: *mut c_void) -> Result<DeviceLearner> {
        if let Some(over) = self.gate.over() {
            return Err(over.clone().into());
        }
        let desk = self.desk(device)?;
        if let Some(closed) = desk.seat.as_ref().and_then(Seat::closed) {
            return Err(closed.into());
        }
        if !desk.want() {
            return Err(Error::new(ErrorKind::Misuse, format!("the learner on device {device} was taken already")));
        }
        self.gate.grant(desk.turn(), desk.buffers);
        self.gate.gathering.iter().for_each(Gathering::take_device);
        self.gate.learner_taken();
        // SAFETY: the caller's duty.
        Ok(unsafe { DeviceLearner::new(desk.clone(), stream) })
    }

    /// Copies host batches into memory of the caller's on a device that the feed was built with.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] for a device that the feed was not built with.
    pub fn copier(&self, device: i32) -> Result<DeviceCopier> {
        Ok(DeviceCopier::new(self.desk(device)?.clone()))
    }

    fn desk(&self, device: i32) -> Result<&Arc<Desk>> {
        self.desks.iter().find(|desk| desk.device.ordinal() == device).ok_or_else(|| {
            let known: Vec<_> = self.desks.iter().map(|desk| desk.device.ordinal()).collect();
            let text =
                format!("the feed was built with the devices {known:?}, not with {device}: add `.device({device})`");
            Error::new(ErrorKind::Misuse, text)
        })
    }

    /// Sets the exponent of a prioritized sampler's importance weights, from the next selection on.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] without a replay store; [`ErrorKind::Config`] if the sampler has none, or it cannot be that.
    pub fn set_beta(&self, beta: f64) -> Result<()> {
        self.store("set_beta")?.set_beta(beta).map_err(|error| Error::from_source(ErrorKind::Config, error))
    }

    /// Sets how much of each batch comes from the second store that was [mixed](FeedBuilder::mix) in, from the next batch on.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if none was, [`ErrorKind::Config`] outside of 0 to 1.
    pub fn set_fraction(&self, fraction: f64) -> Result<()> {
        replay::check_fraction(fraction)?;
        let none = "nothing is mixed in: build the feed with `.mix(&store, fraction)`";
        let mixed = self.gate.mixed.as_ref().ok_or_else(|| Error::new(ErrorKind::Misuse, none))?;
        mixed.set_fraction(fraction);
        Ok(())
    }

    /// The priority that each row's step has now: `None` for steps that were overwritten or cleared since, and with a
    /// sampler that has no priorities. Counts as no sampling.
    ///
    /// # Errors
    /// [`UpdateError::Foreign`](crate::UpdateError::Foreign) if the keys are another feed's.
    pub fn peek(&self, keys: &Keys) -> Result<Vec<Option<f32>>> {
        Ok(keys.peek(&self.gate)?)
    }

    /// Forgets every stored step and every batch that was sampled and not taken; the pace begins anew. Lanes go on where
    /// they are, in their episodes; no later sample reaches back behind this. Where devices have their
    /// [rounds](crate::Deal::Rounds), the batches that wait for them stay: each is somebody's.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] without a replay store.
    pub fn clear(&self) -> Result<()> {
        self.store("clear")?.clear();
        self.discard_waiting();
        Ok(())
    }

    /// Where devices have their turns, every batch that has a number is somebody's.
    fn discard_waiting(&self) {
        if self.desks.iter().all(|desk| desk.seat.is_none()) {
            self.gate.discard_waiting();
        }
    }

    /// Saves the replay store in a file, while it is written and sampled: what is live now, the priorities, the sampler's
    /// state and draws, and how far the pace is. The form is [safetensors](https://github.com/huggingface/safetensors), which
    /// Python opens: a leaf is an array under its own name, a record (a step, or the final observation of an episode) a row. The
    /// file takes its name when it is whole. A writer that catches up waits for a chunk at a time. Batches that were
    /// selected and not taken are not saved, nor are priorities that are still on their way from a device.
    ///
    /// What is stored can be saved as long as the feed was neither stopped nor dropped: also behind the end of its source, behind
    /// the last learner, and behind a fault.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError), as the kind [`ErrorKind::File`] or [`ErrorKind::Misuse`]; [`Closed`] behind a
    /// stop.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<Saved> {
        Ok(self.store("save")?.save(path.as_ref())?)
    }

    /// Replaces what the replay store holds by a file that [`save`](Feed::save) wrote, or another program in that form. Before
    /// writers are made. The settings of this feed stand: what is more than its capacity is left out, the oldest first. If
    /// store and sampler are of the same settings, selections go on exactly where they were. What was selected before and not
    /// taken reaches nobody, but for batches that devices have by [rounds](crate::Deal::Rounds).
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError). A file that does not fit leaves everything as it was.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        let writers = || self.gate.lanes.taken();
        Ok(self.store("load")?.load(path.as_ref(), &writers, &|| self.discard_waiting())?)
    }

    /// What the supervisor does at a stop, without it: on a thread of its own, since CUDA takes as long as it takes.
    fn give_up_store(&self, by: Instant) -> std::result::Result<(), String> {
        let (gate, (done, ended)) = (self.gate.clone(), crossbeam_channel::bounded::<()>(0));
        let release = move || {
            gate.stop();
            drop(done);
        };
        match std::thread::Builder::new().name("pr-release".to_owned()).spawn(release) {
            Ok(_) if ended.recv_deadline(by).is_err_and(|error| error.is_timeout()) => Err("pr-release".to_owned()),
            _ => Ok(()), // without a thread it goes with the last handle
        }
    }

    fn store(&self, verb: &str) -> Result<&Steps> {
        if self.gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        self.gate.store.as_deref().ok_or_else(|| {
            Error::new(ErrorKind::Misuse, format!("`{verb}` is of stored steps: build the feed with `.replay`"))
        })
    }

    /// The stream of finished episodes.
    pub fn episodes(&self) -> Episodes {
        self.episodes.clone()
    }

    /// A snapshot of the counters.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = self.gate.metrics();
        metrics.devices = self.desks.iter().map(|desk| desk.metrics()).collect();
        metrics
    }

    /// How the ring was page-locked; `None` with pinning off.
    pub fn pin_report(&self) -> Option<&PinReport> {
        self.pin_report.as_ref()
    }

    /// Why nothing passes any more, if so: the end of the source, a stop, or a fault.
    pub fn closed(&self) -> Option<Closed> {
        self.gate.closed()
    }

    /// Stops: closes the gates, ends the actors, joins their threads, and says what was left. Waiting writers and the
    /// learner get an error at once. It never waits for a batch in the user's hands: the last one gives the ring back.
    /// Called again, it returns the same report.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] on a thread of the feed itself (a callback, a waker), which cannot wait for itself; the
    /// gates are closed all the same.
    pub fn stop(&self, deadline: Duration) -> Result<StopReport> {
        if host::on_own_thread() {
            self.gate.close(Closed::Stopped);
            return Err(Error::new(
                ErrorKind::Misuse,
                "a feed cannot be stopped and joined from one of its own threads: its gates are closed now; call `stop` \
                 from a thread of yours",
            ));
        }
        if self.gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        let mut stopped = lock(&self.stopped);
        if let Some(report) = &*stopped {
            return Ok(report.clone());
        }
        let mut threads_given_up = Vec::new();
        if let Some(Hosted { address, thread }) = lock(&self.supervisor).take() {
            let (answer, answered) = crossbeam_channel::bounded(1);
            let now = Instant::now();
            let by = now.checked_add(deadline).filter(|by| *by < now + FAR).unwrap_or(now + FAR);
            address.do_send(Stop { deadline: by, answer });
            threads_given_up = answered.recv_deadline(by + ANSWER_GRACE).unwrap_or_else(|_| {
                // It has failed (its fault is kept) or hangs: what it started is ended without it, in the time that is left.
                self.gate.set_stop_deadline(by);
                self.gate.close(Closed::Stopped);
                let by = by.max(Instant::now() + ANSWER_GRACE);
                let mut given_up = self.common.crew.end(Some(by));
                given_up.extend(self.give_up_store(by).err());
                given_up
            });
            threads_given_up.extend(thread.join_by(Some(by + ANSWER_GRACE)).err());
        }
        let left = self.gate.left();
        let report = StopReport {
            partial_rows: left.partial_rows,
            untaken_rows: left.untaken_rows,
            still_out: self.gate.out(),
            threads_given_up,
            kept_bytes: self.kept_bytes.load(Ordering::Relaxed),
            quarantined_slots: self.gate.quarantined(),
            fault: self.common.fault.get().cloned(),
        };
        *stopped = Some(report.clone());
        Ok(report)
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if self.gate.is_inherited() {
            return; // the parent's threads are the parent's to join
        }
        if host::on_own_thread() {
            // Cannot join itself: closes the gates, and leaves the actors to end on their own.
            self.gate.stop();
            if let Some(supervisor) = lock(&self.supervisor).take() {
                let (answer, _) = crossbeam_channel::bounded(1);
                supervisor.address.do_send(Stop { deadline: Instant::now() + DROP_DEADLINE, answer });
            }
            return;
        }
        match self.stop(DROP_DEADLINE) {
            Ok(report) if !report.threads_given_up.is_empty() => {
                tracing::error!(target: "pinring", %report, "a dropped feed left threads behind");
            }
            _ => {}
        }
    }
}

/// A handle that makes writers, from any thread.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// # let feed = Feed::builder(Sample::step(step)).batch(8).start()?;
/// # let learner = feed.learner()?;
/// let intake = feed.intake()?;
/// let threads: Vec<_> = (0..4)
///     .map(|_| {
///         let intake = intake.clone();
///         std::thread::spawn(move || -> Result<()> {
///             let mut writer = intake.writer(2)?;
///             let mut s = writer.step()?;
///             s.put(reward, &[1.0, 1.0])?;
///             Ok(s.commit()?)
///         })
///     })
///     .collect();
/// drop(intake); // the last writer to go ends the source
/// # for thread in threads { thread.join().unwrap()?; }
/// assert_eq!(learner.iter().count(), 1);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Intake {
    gate: Arc<IntakeGate>,
    seed: u64,
}

impl Intake {
    fn new(gate: Arc<IntakeGate>, seed: u64) -> Intake {
        gate.lanes.add_handle();
        Intake { gate, seed }
    }

    /// A writer for the next `lanes` free lanes; lanes of writers that are gone are given out again, lowest first.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for 0 lanes, or more than the builder's `lanes` or `lockstep` allows; [`ErrorKind::Memory`]
    /// for more than there is memory for; or why nothing can be written any more.
    pub fn writer(&self, lanes: usize) -> Result<Writer> {
        seat_writer(&self.gate, self.seed, lanes)
    }
}

impl Clone for Intake {
    fn clone(&self) -> Intake {
        Intake::new(self.gate.clone(), self.seed)
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        if self.gate.is_inherited() {
            return;
        }
        if self.gate.lanes.drop_handle() {
            self.gate.finish();
        }
    }
}

fn seat_writer(gate: &Arc<IntakeGate>, seed: u64, lanes: usize) -> Result<Writer> {
    if let Some(closed) = gate.closed() {
        return Err(closed.into());
    }
    if lanes == 0 {
        return Err(Error::new(ErrorKind::Config, "a writer of 0 lanes writes nothing: ask for at least 1"));
    }
    check_room(gate, lanes)?;
    let seat = gate.lanes.seat(lanes).map_err(|none| match none {
        NoSeat::Ended => Closed::Ended.into(),
        NoSeat::Lanes { max, taken } => Error::new(
            ErrorKind::Config,
            format!(
                "a writer of {lanes} lanes does not fit: there is room for {max} lanes, of which {taken} are \
                 taken; raise `.lanes(…)` or `.lockstep(…)`, or drop a writer"
            ),
        ),
    })?;
    Writer::new(gate.clone(), seat.clone(), seed).inspect_err(|_| {
        if gate.lanes.leave(&seat) {
            gate.finish();
        }
    })
}

/// Refuses a writer whose lanes cannot be had: before it takes a seat, since a seat that is given up may end the source.
fn check_room(gate: &IntakeGate, lanes: usize) -> Result<()> {
    /// Below this the memory is there, or its absence shows anyway.
    const WORTH_ASKING: usize = 1 << 30;
    let one = builder::lane_bytes(&gate.layout, gate.lockstep.is_some())?;
    let bytes = one.checked_mul(lanes).filter(|_| u32::try_from(lanes).is_ok());
    let Some(bytes) = bytes.filter(|bytes| isize::try_from(*bytes).is_ok()) else {
        let text = format!("a writer of {lanes} lanes of {one} bytes each cannot be: ask for fewer lanes");
        return Err(Error::new(ErrorKind::Config, text));
    };
    let limit = if bytes < WORTH_ASKING { None } else { memory_limit() };
    match limit.filter(|limit| limit.headroom < bytes as u64) {
        None => Ok(()),
        Some(limit) => {
            let text = format!(
                "a writer of {lanes} lanes takes {bytes} bytes of ordinary memory, and {limit}: ask for fewer lanes, or for \
                 more memory for this process"
            );
            Err(Error::new(ErrorKind::Memory, text))
        }
    }
}
