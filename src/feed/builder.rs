//! Settings of a feed, their checks, and the start.

use super::gathering::GatherSettings;
use super::{Feed, replay};
use crate::actors::feeding::{FEEDING, FeedingPlan};
use crate::actors::host;
use crate::actors::pinning::PinPlan;
use crate::actors::supervisor::{Common, MakeGate, Running, SUPERVISOR, Stop, Supervisor};
use crate::cuda::types::CudaSearch;
use crate::episodes::Episodes;
use crate::error::{Error, ErrorKind, Result};
use crate::feeding::rounds::{Deal, Rounds};
use crate::intake::{IntakeConfig, LagGate, MOST_ROWS, WhenFull};
use crate::layout::{Layout, Place, SLOT_ALIGN};
use crate::memory::{PinProgress, PinWatch, RingPlan, check_memory};
use crate::sample::{Kind, Sample};
use crate::select::{Pace, Sampler};
use crate::slots::Slots;
use crate::store::Store;
use crate::weights::{Versions, Weights};
use crate::writer::{buffer_depth, lane_state_bytes};
use crossbeam_channel::Receiver;
use rand::TryRng;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Whether the ring is page-locked.
///
/// ```
/// # use pinring::*;
/// # let mut step = Step::new();
/// # step.leaf::<f32>("reward", &[]);
/// # let sample = Sample::step(step);
/// match Feed::builder(sample).pinning(Pinning::Required).start() {
///     Ok(feed) => println!("{}", feed.pin_report().unwrap()), // every byte is page-locked and was verified
///     Err(error) => eprintln!("{error}"), // why not, with every library that was tried
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pinning {
    /// Ordinary memory. No CUDA library is looked for or opened. The default.
    #[default]
    Off,
    /// The whole ring page-locked, or the start fails and says why. There is nothing in between.
    Required,
}

/// What a feed takes of memory, known before anything is allocated.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// step.observation::<u8>("obs", &[28_224]);
/// let footprint = Feed::builder(Sample::step(step)).batch(512).buffers(3).footprint()?;
/// assert_eq!(footprint.slot_bytes, 512 * 28_224); // columns are rounded up to 256 bytes, slots to 4,096
/// assert_eq!(footprint.ring_bytes, 3 * footprint.slot_bytes);
/// println!("{footprint}");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// One batch: every column rounded up to [`COLUMN_ALIGN`](crate::COLUMN_ALIGN), their sum to
    /// [`SLOT_ALIGN`](crate::SLOT_ALIGN).
    pub slot_bytes: usize,
    /// The ring: `slot_bytes × buffers`, and with a replay store as many slots more as hold `store_bytes`.
    pub ring_bytes: usize,
    /// A replay store's records, rounded up to [`SLOT_ALIGN`](crate::SLOT_ALIGN): `record_bytes_each × store_records`;
    /// 0 without one.
    pub store_bytes: usize,
    /// Records of a replay store: ⌈capacity / c⌉ + lanes + 2 chunks of c = min(64, capacity / (4 × lanes)), at least 1. Of a
    /// leaf that is kept on every k-th step, a chunk has ⌈c / k⌉ cells more, each as many whole records long as it takes.
    pub store_records: usize,
    /// One record: every leaf that is kept on each step, rounded up to 16 bytes.
    pub record_bytes_each: usize,
    /// What is page-locked: `ring_bytes`; two buffers of the download size for each device; and where a sampler has
    /// priorities, for each device `buffers + prefetch + 1` places of 4 bytes a row, each rounded up to
    /// [`SLOT_ALIGN`](crate::SLOT_ALIGN). 0 with pinning off.
    pub page_locked_bytes: usize,
    /// Ordinary memory for what the host knows of each row, and of each record of a replay store; a sampler's own memory
    /// is not in it.
    pub record_bytes: usize,
    /// Ordinary memory for one lane: its buffer and its accounts. A writer of several lanes takes at most this for each.
    pub lane_bytes: usize,
    /// `record_bytes`, and `lane_bytes` for every lane that the builder allows; 0 lanes if it names none.
    pub ordinary_bytes: usize,
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Footprint { slot_bytes, ring_bytes, page_locked_bytes, ordinary_bytes, lane_bytes, .. } = self;
        write!(f, "a ring of {ring_bytes} bytes in slots of {slot_bytes}")?;
        if self.store_records > 0 {
            write!(f, " (of it {} for {} stored records)", self.store_bytes, self.store_records)?;
        }
        write!(
            f,
            "; {page_locked_bytes} bytes page-locked; {ordinary_bytes} bytes of ordinary memory ({lane_bytes} a lane)"
        )
    }
}

/// So many unread episodes can be kept: their room is taken at the start.
const MOST_EPISODES: usize = 1 << 20;

type PinCallback = Box<dyn Fn(&PinProgress) + Send + Sync>;

/// Settings of a feed. Made by [`Feed::builder`].
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # step.leaf::<f32>("reward", &[]);
/// let feed = Feed::builder(Sample::unroll(step, 20))
///     .batch(32) // unrolls a batch
///     .buffers(4) // one filling, one waiting, two in the learner's hands
///     .lanes(64)
///     .start()?;
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `start`"]
pub struct FeedBuilder {
    pub(super) sample: Sample,
    pub(super) batch: usize,
    pub(super) buffers: usize,
    pub(super) when_full: WhenFull,
    pub(super) lanes: Option<usize>,
    pub(super) lockstep: Option<usize>,
    pub(super) lag: Option<(Arc<Versions>, u64)>,
    seed: Option<u64>,
    pub(super) pinning: Pinning,
    pub(super) ignore_budget: bool,
    cuda: CudaSearch,
    on_progress: Option<PinCallback>,
    episodes: usize,
    pub(super) devices: Vec<i32>,
    pub(super) prefetch: usize,
    pub(super) deal: Deal,
    download_bytes: usize,
    pub(super) replay: Option<(usize, Box<dyn Sampler>)>,
    pub(super) pace: Option<Pace>,
    pub(super) gather_threads: Option<usize>,
    pub(super) mix: Option<(Option<Arc<Store>>, f64)>,
    pub(super) gather: GatherSettings,
}

impl fmt::Debug for FeedBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FeedBuilder")
            .field("batch", &self.batch)
            .field("buffers", &self.buffers)
            .field("when_full", &self.when_full)
            .field("lanes", &self.lanes)
            .field("lockstep", &self.lockstep)
            .field("pinning", &self.pinning)
            .field("replay", &self.replay)
            .finish_non_exhaustive()
    }
}

impl Feed {
    /// Settings of a feed of such samples: batches of 32, 3 buffers, pinning off.
    pub fn builder(sample: Sample) -> FeedBuilder {
        FeedBuilder {
            sample,
            batch: 32,
            buffers: 3,
            when_full: WhenFull::Block,
            lanes: None,
            lockstep: None,
            lag: None,
            seed: None,
            pinning: Pinning::Off,
            ignore_budget: false,
            cuda: CudaSearch::new(),
            on_progress: None,
            episodes: 4096,
            devices: Vec::new(),
            prefetch: 2,
            deal: Deal::OnDemand,
            download_bytes: 0,
            replay: None,
            pace: None,
            gather_threads: None,
            mix: None,
            gather: GatherSettings::default(),
        }
    }
}

pub(super) fn config(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, text)
}

/// The seed that was given, or a new one.
pub(super) fn system_seed(given: Option<u64>) -> Result<u64> {
    let no_seed = |error| config(format!("the operating system gave no seed ({error}): give one with `.seed`"));
    given.map_or_else(|| rand::rngs::SysRng.try_next_u64().map_err(no_seed), Ok)
}

pub(super) fn too_large(what: String) -> Error {
    config(format!("{what} are more bytes than can be addressed: ask for less"))
}

/// Ordinary memory for one lane.
pub(super) fn lane_bytes(layout: &Layout, lockstep: bool) -> Result<usize> {
    let depth = buffer_depth(layout, lockstep);
    let (_, buffer) = Place::in_lane_buffer(layout, 1, depth)?;
    let bytes = lane_state_bytes(layout, depth).and_then(|state| state.checked_add(buffer));
    bytes.ok_or_else(|| too_large(format!("the {depth} steps that a lane buffer holds")))
}

impl FeedBuilder {
    /// Samples (rows) a batch. Default 32.
    pub fn batch(mut self, rows: usize) -> Self {
        self.batch = rows;
        self
    }

    /// Batches that the ring holds: those being filled, those waiting, and those in the learner's hands. Default 3.
    pub fn buffers(mut self, buffers: usize) -> Self {
        self.buffers = buffers;
        self
    }

    /// What a writer does when the ring has no room. Default: it waits.
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// The most lanes that all writers together may drive; the footprint counts them. Default: no limit. A replay feed must
    /// be given it, since its store keeps an open chunk for each lane.
    pub fn lanes(mut self, max: usize) -> Self {
        self.lanes = Some(max);
        self
    }

    /// Lockstep over this many lanes: lane i is row i of every batch (of every layer, if a batch is a multiple of the
    /// lanes), whatever the threads. With [`max_policy_lag`](FeedBuilder::max_policy_lag) versions are fixed too, so the
    /// same seed gives the same bytes. A slow lane slows all; dropping a writer ends the source.
    pub fn lockstep(mut self, lanes: usize) -> Self {
        self.lockstep = Some(lanes);
        self
    }

    /// Bounds how far actors run ahead of the learner, which publishes once a batch: what will be part of batch k may
    /// begin when k ≤ versions published + `lag`. 0 is on-policy. Steps must then ask
    /// [`policy`](crate::StepMut::policy). Nothing is ever dropped for being old. In lockstep the lag is exact; lanes that
    /// run free are paced by it, and a slow lane's row can be older by what the others did meanwhile (the batch gives
    /// its rows' versions).
    pub fn max_policy_lag<W: Send + Sync + 'static>(mut self, weights: &Weights<W>, lag: u64) -> Self {
        self.lag = Some((weights.versions().clone(), lag));
        self
    }

    /// The seed behind [`Writer::seed`](crate::Writer::seed), and behind what a replay feed draws. Default: a new one from the operating system.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Whether the ring is page-locked. Default: off.
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = pinning;
        self
    }

    /// Does not refuse a ring that is larger than the memory that seems to be left. For hosts whose memory grows as it is used
    /// (some virtual machines report a fraction of it at first); elsewhere it trades an error for a kill.
    pub fn ignore_memory_budget(mut self) -> Self {
        self.ignore_budget = true;
        self
    }

    /// Where CUDA is looked for, beside the usual places. Only read with pinning on.
    pub fn cuda(mut self, search: CudaSearch) -> Self {
        self.cuda = search;
        self
    }

    /// Called on the pinning thread as a large ring is mapped, pre-faulted and registered. It must not block.
    pub fn on_pin_progress(mut self, callback: impl Fn(&PinProgress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Box::new(callback));
        self
    }

    /// Attaches a CUDA device, by its ordinal among the visible ones; call it once for each. Its learner is
    /// [`Feed::learner_on`]. With pinning off the copies are staged by the driver, and the feeding thread pays for that.
    pub fn device(mut self, ordinal: i32) -> Self {
        self.devices.push(ordinal);
        self
    }

    /// Batches that each device has buffers for: what is copied ahead, and what its learner holds. Default 2.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// In what order batches go to several devices. Default: to whichever has a buffer first.
    pub fn deal(mut self, deal: Deal) -> Self {
        self.deal = deal;
        self
    }

    /// Room for [`DeviceLearner::download`](crate::DeviceLearner::download) of up to `bytes` bytes from each device: two
    /// stages on the device and two buffers on the host, page-locked if the ring is. Default: none.
    pub fn downloads(mut self, bytes: usize) -> Self {
        self.download_bytes = bytes;
        self
    }

    /// Finished episodes kept for [`Feed::episodes`] before new ones are dropped and counted: at most 1,048,576. Default
    /// 4,096.
    pub fn episodes(mut self, kept: usize) -> Self {
        self.episodes = kept;
        self
    }

    /// The memory that these settings take, exact, before anything is allocated.
    ///
    /// # Errors
    /// As [`start`](FeedBuilder::start) for the settings.
    pub fn footprint(&self) -> Result<Footprint> {
        let layout = self.layout()?;
        let (rows, buffers, store) = (self.batch, self.buffers, self.store_plan(&layout)?);
        let store_bytes = store.map_or(Ok(0), |store| store.bytes())?;
        let slots = buffers.checked_add(store_bytes.div_ceil(layout.slot_bytes));
        let ring_bytes = slots.and_then(|slots| layout.slot_bytes.checked_mul(slots));
        let ring_bytes = ring_bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let ring_bytes =
            ring_bytes.ok_or_else(|| too_large(format!("{buffers} buffers of {} bytes", layout.slot_bytes)))?;
        let update_bytes = self.update_room()?.map_or(0, |room| room.slot_bytes * room.slots * self.devices.len());
        let download_bytes = self.download_bytes.checked_next_multiple_of(SLOT_ALIGN);
        let download_bytes = download_bytes.and_then(|slot| slot.checked_mul(2 * self.devices.len()));
        let download_bytes = download_bytes
            .filter(|bytes| bytes.checked_add(ring_bytes).is_some_and(|both| both.checked_add(update_bytes).is_some()));
        let download_bytes = download_bytes
            .ok_or_else(|| too_large(format!("the ring and downloads of {} bytes", self.download_bytes)))?;
        let beside = store.map_or(Some(0), |store| store.bytes_beside());
        let record_bytes = Slots::record_bytes(rows, buffers, layout.kind.is_replayed()).zip(beside);
        let record_bytes = record_bytes.and_then(|(records, beside)| records.checked_add(beside));
        let record_bytes =
            record_bytes.ok_or_else(|| too_large(format!("the records of {buffers} batches of {rows} rows")))?;
        let lane_bytes = lane_bytes(&layout, self.lockstep.is_some())?;
        let lanes = self.lanes.or(self.lockstep).unwrap_or(0);
        let ordinary_bytes = lane_bytes.checked_mul(lanes).and_then(|all| all.checked_add(record_bytes));
        let ordinary_bytes = ordinary_bytes.ok_or_else(|| too_large(format!("{lanes} lanes of {lane_bytes} bytes")))?;
        Ok(Footprint {
            slot_bytes: layout.slot_bytes,
            ring_bytes,
            store_bytes,
            store_records: store.map_or(0, |store| store.records()),
            record_bytes_each: store.map_or(0, |store| store.record_bytes),
            page_locked_bytes: match self.pinning {
                Pinning::Required => ring_bytes + download_bytes + update_bytes,
                Pinning::Off => 0,
            },
            record_bytes,
            lane_bytes,
            ordinary_bytes,
        })
    }

    /// Bytes that will be page-locked: [`Footprint::page_locked_bytes`].
    ///
    /// # Errors
    /// As [`footprint`](FeedBuilder::footprint).
    pub fn page_locked_bytes(&self) -> Result<usize> {
        Ok(self.footprint()?.page_locked_bytes)
    }

    /// Starts the feed: returns when the ring is mapped, page-locked and verified (if asked for) and every actor runs.
    ///
    /// # Errors
    /// The first thing that went wrong, with nothing left registered, mapped or running: a mistake in the sample
    /// ([`ErrorKind::Schema`]) or the settings ([`ErrorKind::Config`]), no CUDA ([`ErrorKind::Cuda`]), no memory
    /// ([`ErrorKind::Memory`]), an actor's fault.
    pub fn start(self) -> Result<Feed> {
        self.start_in_background()?.wait()
    }

    /// As [`start`](FeedBuilder::start), without waiting: for large rings, whose pinning takes seconds.
    ///
    /// # Errors
    /// Mistakes in the sample or the settings, and memory that is not there; everything else comes from [`StartHandle::wait`].
    pub fn start_in_background(mut self) -> Result<StartHandle> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let footprint = self.footprint()?; // overflow is found here, before anything runs
        let layout = Arc::new(self.layout()?);
        let slots = footprint.ring_bytes / layout.slot_bytes;
        let (beside, ignore_budget) = (footprint.ordinary_bytes, self.ignore_budget);
        let plan = RingPlan { slot_bytes: layout.slot_bytes, slots, beside, ignore_budget };
        check_memory(&plan, self.sampler_bytes(&layout)?)?;
        let seed = system_seed(self.seed)?;
        let buffers = self.buffers;
        let gather_threads = self.gather_threads.unwrap_or_else(replay::gather_threads);
        let updates = self.update_room()?;
        let store = self.store_config(&layout, seed)?;
        let mixed = self.mixed(&layout)?;
        let gathering = store.as_ref().map(|store| self.gathering(&layout, store)).transpose()?;
        let lag = self.lag.map(|(versions, lag)| {
            if self.lockstep.is_some() {
                versions.keep_at_least(lag.saturating_add(1));
            }
            LagGate::new(versions, lag)
        });
        let (episode_sender, episode_receiver) = crossbeam_channel::bounded(self.episodes);
        let (when_full, max_lanes, lockstep) = (self.when_full, self.lanes, self.lockstep);
        let make_gate: MakeGate = Box::new(move |ring| IntakeConfig {
            layout,
            gathering: gathering.map(|gathering| gathering(&ring)),
            ring,
            buffers,
            store,
            mixed,
            when_full,
            lag,
            max_lanes,
            lockstep,
            episodes: episode_sender,
        });
        let watch = PinWatch::new(self.on_progress);
        let pinned = self.pinning == Pinning::Required;
        let seats = match self.deal {
            Deal::OnDemand => Vec::new(),
            Deal::Rounds => Rounds::seats(self.devices.len()),
        };
        let plan_of = |(index, &ordinal): (usize, &i32)| FeedingPlan {
            index,
            ordinal,
            prefetch: self.prefetch,
            download_bytes: self.download_bytes,
            updates: updates.clone(),
            ignore_budget,
            search: self.cuda.clone(),
            pinned,
            seat: seats.get(index).cloned(),
        };
        let devices = self.devices.iter().enumerate().map(plan_of).collect();
        let first_device = self.devices.first().copied();
        let cuda = pinned.then_some(self.cuda);
        let pin = PinPlan { ring: plan, cuda, watch: watch.clone(), device: first_device };
        let common = Arc::new(Common::default());
        let (answer, answered) = crossbeam_channel::bounded(1);
        let feed = NEXT.fetch_add(1, Ordering::Relaxed);
        let supervisor = Supervisor::new(feed, common.clone(), pin, make_gate, devices, gather_threads, answer);
        let hosted = host::host(feed, SUPERVISOR, supervisor, {
            let common = common.clone();
            move |exit| {
                if let Err(text) = exit {
                    common.fail(SUPERVISOR, text);
                }
            }
        });
        let hosted = hosted?;
        Ok(StartHandle {
            watch,
            answered,
            parts: Some(Parts { common, supervisor: hosted, episodes: Episodes(episode_receiver), seed }),
        })
    }

    fn layout(&self) -> Result<Layout> {
        self.sample.check()?;
        if self.batch == 0 || self.buffers == 0 {
            let (what, verb) =
                if self.batch == 0 { ("a batch of 0 rows", "batch") } else { ("a ring of 0 buffers", "buffers") };
            return Err(config(format!("{what} holds nothing: give `.{verb}` at least 1")));
        }
        let most = u32::MAX as usize;
        let steps = if let Kind::Unroll { steps } = self.sample.kind { steps } else { 1 };
        let (capacity, threads) = (self.replay.as_ref().map_or(0, |(capacity, _)| *capacity), self.gather_threads);
        let lanes = self.lanes.or(self.lockstep).unwrap_or(0);
        for (count, verb, most) in [
            (self.batch, "batch", MOST_ROWS),
            (self.buffers, "buffers", most),
            (lanes, if self.lanes.is_some() { "lanes" } else { "lockstep" }, most),
            (steps, "unroll", most),
            (self.prefetch, "prefetch", most),
            (self.episodes, "episodes", MOST_EPISODES),
            (capacity, "replay", most),
            (threads.unwrap_or(1), "gather_threads", replay::MOST_THREADS),
        ] {
            if count > most {
                return Err(config(format!("`{verb}({count})` is too large: at most {most}")));
            }
        }
        if self.devices.len() > FEEDING.len() {
            return Err(config(format!("{} devices: a feed takes at most {}", self.devices.len(), FEEDING.len())));
        }
        for (place, device) in self.devices.iter().enumerate() {
            if self.devices[..place].contains(device) {
                return Err(config(format!("device {device} is attached twice: give each `.device` once")));
            }
        }
        if !self.devices.is_empty() && self.prefetch == 0 {
            return Err(config("a device without a buffer can be fed nothing: give `.prefetch` at least 1"));
        }
        if self.deal == Deal::Rounds && self.devices.is_empty() {
            return Err(config("rounds are dealt to devices, and the feed has none: attach them with `.device`"));
        }
        if self.lanes == Some(0) || self.lockstep == Some(0) {
            return Err(config("0 lanes write nothing: give `.lanes` or `.lockstep` at least 1"));
        }
        self.check_replay()?;
        if let Some(lanes) = self.lockstep {
            if let Some(most) = self.lanes.filter(|&most| most != lanes) {
                return Err(config(format!(
                    "`.lockstep({lanes})` says how many lanes there are, and `.lanes({most})` says otherwise: leave `.lanes` \
                     away"
                )));
            }
            if !self.batch.is_multiple_of(lanes) {
                return Err(config(format!(
                    "in lockstep every batch holds every lane equally often, but a batch of {} rows is no multiple of \
                     {lanes} lanes: change `.batch` or `.lockstep`",
                    self.batch
                )));
            }
            if self.when_full != WhenFull::Block {
                return Err(config(
                    "a lockstep feed must wait when the ring is full (every batch needs every lane): leave `.when_full` \
                     at `Block`",
                ));
            }
            if self.sample.within_episode && !self.sample.kind.is_replayed() {
                return Err(config(
                    "lockstep unrolls run through episode ends, so that lanes stay in step: leave `.within_episode` at \
                     false and use `terminated`, `truncated` and `is_first`",
                ));
            }
        }
        self.check_gather()?;
        Ok(Layout::new(&self.sample, self.batch)?)
    }
}

/// A start that goes on in the background. Dropped, it cancels the start.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # step.leaf::<f32>("reward", &[]);
/// let start = Feed::builder(Sample::step(step)).start_in_background()?;
/// println!("{}", start.progress()); // bytes, phase, elapsed: from any thread, at any time
/// let feed = start.wait()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct StartHandle {
    watch: PinWatch,
    answered: Receiver<Result<Running>>,
    pub(super) parts: Option<Parts>,
}

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) common: Arc<Common>,
    pub(super) supervisor: host::Hosted<Supervisor>,
    episodes: Episodes,
    seed: u64,
}

impl Parts {
    fn into_feed(self, running: Running) -> Feed {
        Feed {
            gate: running.gate,
            common: self.common,
            supervisor: Mutex::new(Some(self.supervisor)),
            pin_report: running.pin_report,
            kept_bytes: running.kept_bytes,
            desks: running.desks,
            episodes: self.episodes,
            seed: self.seed,
            learner_taken: AtomicBool::new(false),
            stopped: Mutex::new(None),
        }
    }
}

/// How long a dropped start waits for its roll-back.
const ROLL_BACK: Duration = Duration::from_secs(5);

impl StartHandle {
    /// How far the start is.
    pub fn progress(&self) -> PinProgress {
        self.watch.progress()
    }

    /// Asks the start to give up before its next piece; [`wait`](StartHandle::wait) then returns the error.
    pub fn cancel(&self) {
        self.watch.cancel();
    }

    /// Whether the start has succeeded or failed, so that [`wait`](StartHandle::wait) returns at once.
    pub fn is_finished(&self) -> bool {
        !self.answered.is_empty() || self.parts.as_ref().is_none_or(|parts| parts.supervisor.thread.is_finished())
    }

    /// Waits for the end of the start.
    ///
    /// # Errors
    /// As [`FeedBuilder::start`]; [`ErrorKind::Stopped`] if it was cancelled; [`ErrorKind::Misuse`] on a thread of a
    /// feed (a callback, a waker), which may be the one that is waited for: the start is then cancelled.
    pub fn wait(mut self) -> Result<Feed> {
        if host::on_own_thread() {
            return Err(Error::new(
                ErrorKind::Misuse,
                "a start cannot be waited for on a thread of a feed: it is cancelled now; call `start` or `wait` from a \
                 thread of yours",
            ));
        }
        let Some(parts) = self.parts.take() else {
            return Err(Error::new(ErrorKind::Misuse, "this start was waited for already"));
        };
        match self.answered.recv() {
            Ok(Ok(running)) => Ok(parts.into_feed(running)),
            answer => {
                let common = parts.common.clone();
                parts.end(None); // after this a supervisor that failed has left its report
                Err(match answer {
                    Ok(Err(error)) => error,
                    _ => common.error(),
                })
            }
        }
    }
}

impl Parts {
    /// Joins the threads of a start that ends, until `deadline`; false if one is still at it.
    fn end(self, deadline: Option<Instant>) -> bool {
        // A supervisor that failed itself has left its actors behind.
        let ended = self.supervisor.thread.join_by(deadline).is_ok();
        self.common.crew.end(deadline).is_empty() && ended
    }
}

impl Drop for StartHandle {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        self.watch.cancel();
        let deadline = Instant::now() + ROLL_BACK;
        // The start may have been quicker than the cancel: then it is a feed that nobody wants.
        let (answer, _) = crossbeam_channel::bounded(1);
        parts.supervisor.address.do_send(Stop { deadline, answer });
        if host::on_own_thread() {
            return; // it may be the one that is to end
        }
        if !parts.end(Some(deadline)) {
            tracing::error!(target: "pinring", "a cancelled start is stuck in a call to CUDA; its threads are left");
        }
    }
}
