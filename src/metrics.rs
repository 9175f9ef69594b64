//! Counters, always on: what passed, what was dropped, and where time goes.
//!
//! Owns one set of counters per writer (written by its thread alone, so they cost a plain store) and the histograms that
//! take one record a batch. What it does not do: export. [`Metrics`] is a plain struct; hand it to whatever the
//! embedding program uses.

use crate::sync::{Padded, lock};
use hdrhistogram::Histogram;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A snapshot of a feed's counters. Every count starts at 0 with the feed and only grows, except the levels
/// `batches_waiting`, `batches_held`, `free_slots`, `writers`, `stored_records` and `stored_samples`.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// # let feed = Feed::builder(Sample::step(step)).batch(2).start()?;
/// let mut writer = feed.writer(1)?;
/// for _ in 0..4 {
///     let mut step = writer.step()?;
///     step.put(reward, &[1.0])?;
///     step.commit()?;
/// }
/// let metrics = feed.metrics();
/// assert_eq!((metrics.steps, metrics.batches, metrics.batches_waiting), (4, 2, 2));
/// println!("{metrics}"); // all of it, in a few lines
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Metrics {
    /// Lane-steps committed: a writer of 16 lanes counts 16 a commit. One that the end overtook, an error to its writer, is
    /// among them where the feed stores no steps; its rows are among the dropped or the step among the unfinished.
    pub steps: u64,
    /// Rows of sealed batches, taken or not.
    pub rows: u64,
    /// Batches sealed.
    pub batches: u64,
    /// Batches that the learner took.
    pub batches_taken: u64,
    /// Rows that were written in a lane buffer and copied, because they did not fit in one run of their slot; always
    /// every row for unrolls of free-running lanes.
    pub staged_rows: u64,
    /// Whole samples dropped: by `DropNewest` or a timeout on a full ring, or at the end, committed and taken by nobody.
    pub dropped_rows: u64,
    /// Steps that never became part of a row: of unrolls cut by `abandon`, a dropped writer, or the stop.
    pub unfinished_steps: u64,
    /// Commits refused because a leaf with `reject_non_finite` held NaN or an infinity.
    pub rejected_steps: u64,
    /// Episodes that ended.
    pub episodes: u64,
    /// Finished episodes that nobody took from `Feed::episodes` in time.
    pub episodes_dropped: u64,
    /// Time that writers waited for room in the ring, or for the pace of a replay store, summed over writers.
    pub writer_blocked: Duration,
    /// Time that writers waited at the lag gate for newer weights, summed over writers.
    pub policy_blocked: Duration,
    /// Time that the learner waited for a batch.
    pub learner_blocked: Duration,
    /// First row claimed to batch sealed.
    pub fill: Latency,
    /// Batch sealed to batch taken.
    pub wait: Latency,
    /// Batch taken to batch dropped.
    pub hold: Latency,
    /// Versions published between acting and taking, one record a row.
    pub lag: Lag,
    /// Records in a replay store: steps, and final observations of ended episodes.
    pub stored_records: usize,
    /// Samples that can be drawn of them: steps that one begins with, whose windows are whole.
    pub stored_samples: usize,
    /// Priority updates of steps that were overwritten before.
    pub stale_keys: u64,
    /// Writers alive.
    pub writers: usize,
    /// Slots nobody uses.
    pub free_slots: usize,
    /// Sealed batches that wait for the learner.
    pub batches_waiting: usize,
    /// Batches in the learner's hands.
    pub batches_held: usize,
    /// Bytes of this feed's ring that are page-locked: all of it, or 0 with pinning off. What devices download to and
    /// priorities come back in is beside it, in [`Footprint::page_locked_bytes`](crate::Footprint::page_locked_bytes).
    pub page_locked_bytes: usize,
    /// Slots out of use for good, because the end of a copy from them could not be learned. 0 is normal.
    pub quarantined_slots: u64,
    /// One entry per attached device.
    pub devices: Vec<DeviceMetrics>,
    /// Bytes of rings of this process that stay mapped for good, because CUDA would not let go of them. 0 is normal.
    pub stranded_bytes: usize,
}

impl fmt::Display for Metrics {
    /// A few lines. What is 0 as a rule and of feeds that have no such thing is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Metrics { steps, rows, batches, batches_taken, batches_waiting, batches_held, .. } = self;
        writeln!(f, "steps: {steps} by {} writers; of them {} staged rows", self.writers, self.staged_rows)?;
        writeln!(
            f,
            "batches: {batches} of {rows} rows together; {batches_taken} taken, {batches_waiting} waiting, {batches_held} held, \
             {} slots free",
            self.free_slots
        )?;
        writeln!(
            f,
            "lost: {} rows dropped, {} steps unfinished, {} steps refused for their values",
            self.dropped_rows, self.unfinished_steps, self.rejected_steps
        )?;
        writeln!(f, "episodes: {} ended, {} of them read by nobody", self.episodes, self.episodes_dropped)?;
        writeln!(
            f,
            "waited: writers {:.3?} for room or the pace and {:.3?} for weights, the learner {:.3?} for batches",
            self.writer_blocked, self.policy_blocked, self.learner_blocked
        )?;
        write!(f, "a batch, median and most: ")?;
        for (stage, latency) in [("filled in", self.fill), (", waited", self.wait), (", held", self.hold)] {
            write!(f, "{stage} {:.1?} and {:.1?}", latency.p50, latency.max)?;
        }
        if self.lag.rows > 0 {
            write!(f, "\npolicy lag: {:.2} versions on average, at most {}", self.lag.mean, self.lag.max)?;
        }
        if self.stored_records > 0 {
            let Metrics { stored_samples, stored_records, stale_keys, .. } = self;
            write!(
                f,
                "\nstore: {stored_samples} samples of {stored_records} records, {stale_keys} updates came too late"
            )?;
        }
        for device in &self.devices {
            let DeviceMetrics { device: number, batches, gathered, bytes, .. } = device;
            write!(
                f,
                "\ndevice {number}: {batches} batches of {bytes} bytes together, {gathered} of them gathered by it; {} taken, {} waiting, \
                 {} held, {} copies under way",
                device.batches_taken, device.batches_waiting, device.batches_held, device.copies_in_flight
            )?;
            if device.downloads + device.updates > 0 {
                write!(
                    f,
                    "; {} downloads, {} replaced; {} updates of priorities, {} refused, {} lost",
                    device.downloads,
                    device.downloads_replaced,
                    device.updates,
                    device.updates_refused,
                    device.updates_lost
                )?;
            }
            if device.quarantined_buffers > 0 {
                write!(f, "; {} buffers quarantined", device.quarantined_buffers)?;
            }
        }
        if self.page_locked_bytes > 0 {
            write!(f, "\npage-locked: {} bytes", self.page_locked_bytes)?;
        }
        if self.quarantined_slots > 0 || self.stranded_bytes > 0 {
            write!(f, "\nout of use: {} slots, {} bytes of rings", self.quarantined_slots, self.stranded_bytes)?;
        }
        Ok(())
    }
}

/// Counters of one attached device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMetrics {
    /// Its ordinal.
    pub device: i32,
    /// Batches whose copy was issued.
    pub batches: u64,
    /// Those of them that the device gathered from the mapped store; the others were copied.
    pub gathered: u64,
    /// The bytes of all of them.
    pub bytes: u64,
    /// Batches that its learner took; by rounds, the number of the next round.
    pub batches_taken: u64,
    /// Device batches that wait for the learner.
    pub batches_waiting: usize,
    /// Device batches in the learner's hands.
    pub batches_held: usize,
    /// Copies whose end was not seen yet: so many slots are not home.
    pub copies_in_flight: usize,
    /// Whether the ring is ordinary memory, so that the driver stages every copy and the feeding thread pays for it.
    pub pageable: bool,
    /// Downloads whose function was called.
    pub downloads: u64,
    /// Downloads that were replaced by a newer one before they were copied out.
    pub downloads_replaced: u64,
    /// Arrays of priorities that came back from it and were told to the store: see
    /// [`DeviceLearner::update_priorities`](crate::DeviceLearner::update_priorities).
    pub updates: u64,
    /// Arrays of priorities that were refused as a whole, since one of them was none; the log names it.
    pub updates_refused: u64,
    /// Arrays of priorities whose copy out had no known end before the feed's: the store never heard of them.
    pub updates_lost: u64,
    /// Arrays of priorities on their way from it.
    pub updates_waiting: usize,
    /// Device buffers, and places for what comes back, out of use for good, because the end of what uses them could not be
    /// learned. 0 is normal.
    pub quarantined_buffers: u64,
}

/// A latency distribution; relative error below 1 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation
pub struct Latency {
    pub count: u64,
    pub p50: Duration,
    pub p90: Duration,
    pub p99: Duration,
    pub max: Duration,
}

/// The distribution of the policy lag, in versions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)] // the names are the documentation
pub struct Lag {
    pub rows: u64,
    pub mean: f64,
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
}

/// One writer's counters: written by its thread only, read by anyone.
#[derive(Debug, Default)]
pub(crate) struct WriterCounters {
    steps: AtomicU64,
    staged_rows: AtomicU64,
    dropped_rows: AtomicU64,
    unfinished_steps: AtomicU64,
    rejected_steps: AtomicU64,
    blocked_ns: AtomicU64,
    policy_blocked_ns: AtomicU64,
}

macro_rules! bump {
    ($($name:ident: $field:ident),*) => {$(
        #[inline]
        pub(crate) fn $name(&self, by: u64) {
            // One writing thread: a load and a store, no locked instruction.
            self.$field.store(self.$field.load(Ordering::Relaxed) + by, Ordering::Relaxed);
        }
    )*};
}

impl WriterCounters {
    bump!(step: steps, stage: staged_rows, drop_rows: dropped_rows, leave_unfinished: unfinished_steps,
          reject: rejected_steps, block: blocked_ns, block_on_policy: policy_blocked_ns);

    fn add_to(&self, total: &mut Metrics) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        total.steps += get(&self.steps);
        total.staged_rows += get(&self.staged_rows);
        total.dropped_rows += get(&self.dropped_rows);
        total.unfinished_steps += get(&self.unfinished_steps);
        total.rejected_steps += get(&self.rejected_steps);
        total.writer_blocked += Duration::from_nanos(get(&self.blocked_ns));
        total.policy_blocked += Duration::from_nanos(get(&self.policy_blocked_ns));
    }
}

/// The feed's counters behind [`Metrics`].
#[derive(Debug)]
pub(crate) struct Counters {
    writers: Mutex<Writers>,
    /// What writers count, once a batch, apart from what learners count: the two would wait for each other's cache lines.
    pub(crate) rows: Padded<AtomicU64>,
    pub(crate) batches: Padded<AtomicU64>,
    fill: Padded<Mutex<Histogram<u64>>>,
    pub(crate) taken: Padded<AtomicU64>,
    /// Rows dropped by the feed itself: unsealed or untaken at the stop.
    pub(crate) dropped_rows: AtomicU64,
    pub(crate) episodes: AtomicU64,
    pub(crate) episodes_dropped: AtomicU64,
    pub(crate) learner_blocked_ns: AtomicU64,
    /// Batches in the learner's hands.
    pub(crate) held: Padded<AtomicUsize>,
    pub(crate) quarantined: AtomicU64,
    stages: Padded<Mutex<Stages>>,
}

#[derive(Debug, Default)]
struct Writers {
    alive: Vec<Arc<Padded<WriterCounters>>>,
    /// The sum over writers that are gone.
    gone: Metrics,
}

#[derive(Debug)]
struct Stages {
    wait: Histogram<u64>,
    hold: Histogram<u64>,
    lag: Histogram<u64>,
}

/// The stages that a batch passes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    Fill,
    Wait,
    Hold,
}

impl Counters {
    pub(crate) fn new() -> Counters {
        // An hour in nanoseconds, or 3.6e12 versions; more is counted as that.
        let histogram =
            || Histogram::new_with_bounds(1, 3_600_000_000_000, 2).expect("bounds that hdrhistogram allows");
        Counters {
            writers: Mutex::default(),
            rows: Padded::default(),
            batches: Padded::default(),
            fill: Padded(Mutex::new(histogram())),
            taken: Padded::default(),
            dropped_rows: AtomicU64::new(0),
            episodes: AtomicU64::new(0),
            episodes_dropped: AtomicU64::new(0),
            learner_blocked_ns: AtomicU64::new(0),
            held: Padded::default(),
            quarantined: AtomicU64::new(0),
            stages: Padded(Mutex::new(Stages { wait: histogram(), hold: histogram(), lag: histogram() })),
        }
    }

    pub(crate) fn writer(&self) -> Arc<Padded<WriterCounters>> {
        let counters = Arc::new(Padded::default());
        lock(&self.writers).alive.push(Arc::clone(&counters));
        counters
    }

    pub(crate) fn writer_gone(&self, counters: &Arc<Padded<WriterCounters>>) {
        let mut writers = lock(&self.writers);
        writers.alive.retain(|other| !Arc::ptr_eq(other, counters));
        counters.add_to(&mut writers.gone);
    }

    pub(crate) fn stage(&self, stage: Stage, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        match stage {
            Stage::Fill => lock(&self.fill).saturating_record(nanos),
            Stage::Wait => lock(&self.stages).wait.saturating_record(nanos),
            Stage::Hold => lock(&self.stages).hold.saturating_record(nanos),
        }
    }

    /// Records the lag of every row of a batch.
    pub(crate) fn lag(&self, lags: impl Iterator<Item = u64>) {
        let mut stages = lock(&self.stages);
        lags.for_each(|lag| stages.lag.saturating_record(lag));
    }

    /// Everything but the levels, which the gates know.
    pub(crate) fn snapshot(&self) -> Metrics {
        let writers = lock(&self.writers);
        let mut metrics = writers.gone.clone();
        writers.alive.iter().for_each(|writer| writer.add_to(&mut metrics));
        metrics.writers = writers.alive.len();
        drop(writers);
        metrics.rows = self.rows.load(Ordering::Relaxed);
        metrics.batches = self.batches.load(Ordering::Relaxed);
        metrics.batches_taken = self.taken.load(Ordering::Relaxed);
        metrics.dropped_rows += self.dropped_rows.load(Ordering::Relaxed);
        metrics.episodes = self.episodes.load(Ordering::Relaxed);
        metrics.episodes_dropped = self.episodes_dropped.load(Ordering::Relaxed);
        metrics.learner_blocked = Duration::from_nanos(self.learner_blocked_ns.load(Ordering::Relaxed));
        metrics.quarantined_slots = self.quarantined.load(Ordering::Relaxed);
        metrics.batches_held = self.held.load(Ordering::Relaxed);
        metrics.fill = latency(&lock(&self.fill));
        let stages = lock(&self.stages);
        metrics.wait = latency(&stages.wait);
        metrics.hold = latency(&stages.hold);
        metrics.lag = Lag {
            rows: stages.lag.len(),
            mean: stages.lag.mean(),
            p50: stages.lag.value_at_quantile(0.5),
            p99: stages.lag.value_at_quantile(0.99),
            max: stages.lag.max(),
        };
        metrics
    }
}

fn latency(histogram: &Histogram<u64>) -> Latency {
    let at = |quantile| Duration::from_nanos(histogram.value_at_quantile(quantile));
    Latency {
        count: histogram.len(),
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        max: Duration::from_nanos(histogram.max()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_shown_with_what_is_there_and_without_what_is_not() {
        let plain = Metrics { steps: 12, batches: 3, rows: 9, writers: 2, ..Metrics::default() }.to_string();
        assert!(plain.starts_with("steps: 12 by 2 writers"), "{plain}");
        assert!(plain.contains("batches: 3 of 9 rows together; 0 taken"), "{plain}");
        for absent in ["store:", "device", "page-locked", "policy lag", "out of use"] {
            assert!(!plain.contains(absent), "{absent} in {plain}");
        }
        let all = Metrics {
            stored_records: 7,
            lag: Lag { rows: 1, max: 5, ..Lag::default() },
            page_locked_bytes: 4096,
            quarantined_slots: 1,
            devices: vec![DeviceMetrics { device: 3, updates_lost: 2, updates: 4, ..DeviceMetrics::default() }],
            ..Metrics::default()
        };
        for part in [
            "of 7 records",
            "at most 5",
            "page-locked: 4096 bytes",
            "out of use: 1 slots",
            "device 3: 0 batches",
            "2 lost",
        ] {
            assert!(all.to_string().contains(part), "{part} in {all}");
        }
    }

    #[test]
    fn counts_of_a_writer_that_is_gone_stay() {
        let counters = Counters::new();
        let (first, second) = (counters.writer(), counters.writer());
        first.step(3);
        second.step(4);
        counters.writer_gone(&first);
        let metrics = counters.snapshot();
        assert_eq!((metrics.steps, metrics.writers), (7, 1));
    }

    #[test]
    fn latencies_are_within_one_percent() {
        let counters = Counters::new();
        for micros in 1..=1000 {
            counters.stage(Stage::Fill, Duration::from_micros(micros));
        }
        let fill = counters.snapshot().fill;
        assert_eq!(fill.count, 1000);
        for (got, expected) in [(fill.p50, 500.0), (fill.p90, 900.0), (fill.p99, 990.0), (fill.max, 1000.0)] {
            assert!((got.as_secs_f64() * 1e6 / expected - 1.0).abs() < 0.01, "{got:?} for {expected} µs");
        }
    }
}
