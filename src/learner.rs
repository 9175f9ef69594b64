//! The learner's end: taking batches.
//!
//! Owns the waits before the batch gate: blocking, with a timeout, as an iterator, as a future under any executor, and
//! over several feeds at once. When the last learner handle is dropped, writers learn that nobody takes batches.

use crate::batch::Batch;
use crate::cuda::types::CudaError;
use crate::error::{Closed, Error, ErrorKind};
use crate::gate::Gate;
use crate::intake::{IntakeGate, Sealed};
use crate::keys::{Keys, UpdateError, Updated};
use crate::select::PaceWait;
use crate::sync::{Patience, Spin, Unpark, try_lock};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// While the learner holds every batch, none can come: this long it may, since a framework's queue gives back late.
pub(crate) const ALL_HELD_PATIENCE: Duration = Duration::from_secs(1);

/// How many batches a learner holds of how many, and how many it has ever taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldCounts {
    pub(crate) held: usize,
    pub(crate) buffers: usize,
    pub(crate) taken: u64,
}

/// Since when the learner holds every batch, as one wait has seen it.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldWatch {
    /// How many batches it had taken by then, so that one taken since shows.
    since: Option<(u64, Instant)>,
}

impl HeldWatch {
    /// Looks again: the error, if the same batches have all been held for `patience`.
    fn look(&mut self, HeldCounts { held, buffers, taken }: HeldCounts, patience: Duration) -> Option<NextError> {
        if held < buffers {
            self.since = None;
            return None;
        }
        let since = match self.since {
            Some((before, since)) if before == taken => since,
            _ => self.since.insert((taken, Instant::now())).1,
        };
        (since.elapsed() >= patience).then_some(NextError::AllHeld { held, buffers })
    }

    /// How long to wait before the next look.
    fn left(&self) -> Duration {
        self.since.map_or(ALL_HELD_PATIENCE, |(_, since)| ALL_HELD_PATIENCE.saturating_sub(since.elapsed()))
    }
}

/// Why there is no batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NextError {
    /// Every writer is gone (in lockstep: one of them, so that no batch can be complete), and every batch was taken.
    /// That a writer was dropped by an error or a panic of its thread is known there alone: join the threads. In
    /// lockstep [`Feed::closed`](crate::Feed::closed) names the lanes.
    #[error(
        "the feed ended: no further batch can come, and every batch was taken; the writers' threads know why they left"
    )]
    Ended,
    /// The learner holds every batch, so none can be filled.
    #[error(
        "all {held} of {buffers} buffers are held by batches that were not dropped, so no further one can come: drop a \
         batch before taking the next, or give the feed more `.buffers`"
    )]
    AllHeld {
        /// Batches held.
        held: usize,
        /// Buffers of the feed.
        buffers: usize,
    },
    /// At the end of a timeout: the store has too few samples, or the learner is ahead of the pace.
    #[error("no batch within the timeout: {0}")]
    Pace(PaceWait),
    /// The feed was stopped, or failed.
    #[error(transparent)]
    Closed(Closed),
    /// The learner's stream or its device said no. Only of device learners.
    #[error(transparent)]
    Device(DeviceUseError),
}

/// Which feed of a [`select`](Learner::select) failed, and why. Counted as in the list that was passed.
///
/// ```
/// # use pinring::*;
/// # fn look(learners: &[&Learner]) {
/// match Learner::select(learners, std::time::Duration::from_secs(1)) {
///     Err(SelectError { feed, error }) => println!("feed {feed}: {error}"),
///     Ok(batch) => println!("a batch came: {}", batch.is_some()),
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("feed {feed} of those selected from: {error}")]
pub struct SelectError {
    /// Its place in the list of learners; where all of them ended, the last one's.
    pub feed: usize,
    /// What it said.
    #[source]
    pub error: NextError,
}

impl From<SelectError> for Error {
    fn from(error: SelectError) -> Error {
        Error::from_source(Error::from(error.error.clone()).kind(), error)
    }
}

impl From<Closed> for NextError {
    fn from(closed: Closed) -> NextError {
        match closed {
            Closed::Ended | Closed::LaneGone { .. } => NextError::Ended,
            other => NextError::Closed(other),
        }
    }
}

impl From<NextError> for Error {
    fn from(error: NextError) -> Error {
        match error {
            NextError::Ended => Error::from_source(ErrorKind::Ended, error),
            NextError::AllHeld { .. } | NextError::Pace(_) => Error::from_source(ErrorKind::Full, error),
            NextError::Closed(closed) => closed.into(),
            NextError::Device(error) => error.into(),
        }
    }
}

impl From<DeviceUseError> for NextError {
    fn from(error: DeviceUseError) -> NextError {
        match error {
            DeviceUseError::Closed(closed) => closed.into(),
            other => NextError::Device(other),
        }
    }
}

/// Why a call on a device batch, a copy or a download failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceUseError {
    /// The stream is capturing a graph; an outside event would break the capture.
    #[error("the stream is capturing a CUDA graph: take, wait for and download batches outside of the capture")]
    Capturing,
    /// The learner's stream is the per-thread one (handle 2), and this is another thread.
    #[error("this learner was made for its thread's own stream (handle 2): use it on the thread that made it")]
    OtherThread,
    /// More bytes than the feed was built for.
    #[error("a download of {bytes} bytes, but the feed was built for {max}: give `.downloads` at least that many")]
    TooLarge {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that the feed was built for.
        max: usize,
    },
    /// The feed was stopped or failed.
    #[error(transparent)]
    Closed(#[from] crate::error::Closed),
    /// A CUDA call failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl From<DeviceUseError> for crate::error::Error {
    fn from(error: DeviceUseError) -> Self {
        use crate::error::ErrorKind;
        let kind = match error {
            DeviceUseError::Closed(closed) => return closed.into(),
            DeviceUseError::Cuda(_) => ErrorKind::Cuda,
            DeviceUseError::TooLarge { .. } => ErrorKind::Input,
            _ => ErrorKind::Misuse,
        };
        Self::from_source(kind, error)
    }
}

/// Takes batches on the host, in the order in which they filled. Dropping it tells the writers that nobody takes
/// batches any more.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// # let mut sample = Sample::step(step);
/// # let column = sample.all(reward);
/// # let feed = Feed::builder(sample).batch(2).start()?;
/// let learner = feed.learner()?;
/// let mut writer = feed.writer(1)?;
/// std::thread::spawn(move || -> Result<()> {
///     for i in 0..5 {
///         let mut step = writer.step()?;
///         step.put(reward, &[i as f32])?;
///         step.commit()?;
///     }
///     Ok(()) // the writer is dropped: the source ends
/// });
/// let rows: Vec<usize> = learner.iter().map(|batch| Ok(batch?.rows())).collect::<Result<_>>()?;
/// assert_eq!(rows, [2, 2, 1]); // the last batch is partial
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Learner {
    gate: Arc<IntakeGate>,
    taker: Taker,
}

impl Learner {
    pub(crate) fn new(gate: Arc<IntakeGate>) -> Learner {
        Learner { gate, taker: Taker::default() }
    }

    /// The next batch; waits for it.
    ///
    /// # Errors
    /// [`NextError::Ended`] when every writer is gone and everything was taken; [`NextError::AllHeld`] after one second
    /// in which the learner held every batch; [`NextError::Closed`] says who stopped the feed.
    pub fn next_batch(&self) -> Result<Batch, NextError> {
        loop {
            if let Some(batch) = self.take(Patience::Forever)? {
                return Ok(batch);
            }
        }
    }

    /// The next batch, if one is there.
    ///
    /// # Errors
    /// As [`next_batch`](Learner::next_batch); [`NextError::AllHeld`] at once.
    pub fn try_next(&self) -> Result<Option<Batch>, NextError> {
        self.take(Patience::None)
    }

    /// The next batch, if it comes within `timeout`.
    ///
    /// # Errors
    /// As [`next_batch`](Learner::next_batch); [`NextError::AllHeld`] at the timeout if that is shorter than a second;
    /// [`NextError::Pace`] if by then a replay store has too few samples, or its pace waits for writers.
    pub fn next_timeout(&self, timeout: Duration) -> Result<Option<Batch>, NextError> {
        match self.take(Patience::timeout(timeout))? {
            None => self.gate.store.as_ref().and_then(|store| store.learner_waits_for()).map_or(Ok(None), pace),
            batch => Ok(batch),
        }
    }

    /// The next batch, as a future: works under any executor, needs none of its own, and may be dropped at any time.
    ///
    /// # Errors
    /// As [`next_batch`](Learner::next_batch).
    pub fn next_async(&self) -> NextBatch<'_> {
        NextBatch { learner: self, waker: None, begun: None, held: HeldWatch::default() }
    }

    /// Tells the sampler what the rows of a batch are worth from now on, for the next selection: |TD errors| say, as they
    /// are, since the sampler applies its exponent. Never waits for a batch that is being filled. Rows whose step was
    /// overwritten since are passed over and counted. Of the same step twice in a batch, the last one counts.
    ///
    /// # Errors
    /// [`UpdateError`] names the first index that holds no priority: negative, NaN or infinite. Then none was updated.
    pub fn update_priorities(&self, keys: &Keys, priorities: &[f32]) -> Result<Updated, UpdateError> {
        keys.update(&self.gate, priorities)
    }

    /// Batches until the source ends. An error is the last item.
    pub fn iter(&self) -> Batches<'_> {
        Batches { learner: self, over: false }
    }

    /// The next batch of whichever feed has one: its index among `learners`, and the batch. Of several the one that has
    /// waited longest comes first. `None` after `timeout`. Feeds that ended are passed over; when all have, that is the
    /// error.
    ///
    /// # Errors
    /// As [`next_batch`](Learner::next_batch), for the first feed that fails. [`NextError::AllHeld`] only when no feed can
    /// go on: after a second, or at the timeout if that is shorter.
    pub fn select(learners: &[&Learner], timeout: Duration) -> Result<Option<(usize, Batch)>, SelectError> {
        let patience = Patience::timeout(timeout);
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut watches = vec![HeldWatch::default(); learners.len()];
        if let Some(feed) = learners.iter().position(|learner| learner.gate.is_inherited()) {
            return Err(SelectError { feed, error: NextError::Closed(Closed::UsedAfterFork) });
        }
        loop {
            // A feed that was stopped or failed is an error at once, whatever the others have.
            if let Some(feed) = learners.iter().position(|learner| learner.gate.over().is_some()) {
                match learners[feed].take(Patience::None) {
                    Ok(Some(batch)) => return Ok(Some((feed, batch))), // the close was not there yet
                    Err(NextError::Ended) | Ok(None) => {}
                    Err(error) => return Err(SelectError { feed, error }),
                }
            }
            let waiting = |(index, learner): (usize, &&Learner)| {
                learner.gate.batches.peek(|sealed: &Sealed| sealed.sealed).map(|since| (since, index))
            };
            if let Some((_, index)) = learners.iter().enumerate().filter_map(waiting).min()
                // If somebody else was quicker, the look at all of them below says what is left.
                && let Ok(Some(batch)) = learners[index].try_next()
            {
                return Ok(Some((index, batch)));
            }
            let left = patience.left().unwrap_or(ALL_HELD_PATIENCE);
            let long = if left.is_zero() { Duration::ZERO } else { ALL_HELD_PATIENCE };
            let (mut ended, mut held) = (0, Vec::new());
            for (index, (learner, watch)) in learners.iter().zip(&mut watches).enumerate() {
                match learner.take(Patience::None) {
                    Ok(Some(batch)) => return Ok(Some((index, batch))),
                    Ok(None) => {}
                    Err(NextError::Ended) => ended += 1,
                    Err(NextError::AllHeld { .. }) => {
                        held.extend(watch.look(learner.counts(), long).map(|error| SelectError { feed: index, error }));
                    }
                    Err(error) => return Err(SelectError { feed: index, error }),
                }
            }
            if ended == learners.len() {
                return Err(SelectError { feed: learners.len().saturating_sub(1), error: NextError::Ended });
            }
            // While one feed can go on, it does not matter that others cannot.
            if ended + held.len() == learners.len()
                && let Some(error) = held.into_iter().next()
            {
                return Err(error);
            }
            if left.is_zero() {
                return Ok(None);
            }
            let ids: Vec<_> = learners.iter().map(|learner| learner.gate.batches.register(&waker)).collect();
            let open = learners.len() - ended;
            // A feed that ended or has a batch does not register; with a batch there, look again at once.
            if ids.iter().flatten().count() >= open {
                let begun = Instant::now();
                std::thread::park_timeout(left.min(ALL_HELD_PATIENCE));
                let blocked = begun.elapsed();
                learners.iter().for_each(|learner| learner.blocked(blocked));
            }
            for (learner, id) in learners.iter().zip(ids) {
                id.into_iter().for_each(|id| learner.gate.batches.forget(id));
            }
        }
    }

    fn take(&self, patience: Patience) -> Result<Option<Batch>, NextError> {
        if self.gate.is_inherited() {
            return Err(NextError::Closed(Closed::UsedAfterFork));
        }
        let (counts, blocked) = (|| self.counts(), |time| self.blocked(time));
        let taken = self.taker.take(&self.gate.batches, patience, ALL_HELD_PATIENCE, counts, blocked)?;
        Ok(taken.map(Batch::new))
    }

    fn counts(&self) -> HeldCounts {
        let counters = &self.gate.counters;
        let (held, taken) = (counters.held.load(Ordering::Relaxed), counters.taken.load(Ordering::Relaxed));
        HeldCounts { held, buffers: self.gate.buffers, taken }
    }

    fn blocked(&self, time: Duration) {
        self.gate.counters.learner_blocked_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

fn pace<T>(wait: PaceWait) -> Result<T, NextError> {
    Err(NextError::Pace(wait))
}

impl Drop for Learner {
    fn drop(&mut self) {
        if !self.gate.is_inherited() {
            self.gate.learner_gone();
        }
    }
}

/// The wait before a gate that host and device learners share.
#[derive(Debug, Default)]
pub(crate) struct Taker {
    spin: Mutex<Spin>,
}

impl Taker {
    /// Takes a token. That none can come, because the caller holds what `counts` says, is an error at once for a `try_`,
    /// at the end of a timeout, and otherwise after a second. `counts` is asked at least every `look`.
    pub(crate) fn take<T>(
        &self,
        gate: &Gate<T>,
        patience: Patience,
        look: Duration,
        counts: impl Fn() -> HeldCounts,
        blocked: impl Fn(Duration),
    ) -> Result<Option<T>, NextError> {
        if let Some(token) = gate.take(Patience::None, &mut Spin::default())? {
            return Ok(Some(token));
        }
        let mut watch = HeldWatch::default();
        if matches!(patience, Patience::None) {
            return watch.look(counts(), Duration::ZERO).map_or(Ok(None), Err);
        }
        let begun = Instant::now();
        let mut fresh = Spin::default();
        let mut kept = try_lock(&self.spin);
        let spin = kept.as_deref_mut().unwrap_or(&mut fresh);
        let _ = watch.look(counts(), ALL_HELD_PATIENCE);
        loop {
            let slice = patience.left().map_or(look, |left| left.min(look)).min(watch.left());
            let taken = gate.take(Patience::timeout(slice), spin);
            let over = patience.left().is_some_and(|left| left.is_zero());
            let result = match taken {
                Ok(Some(token)) => Ok(Some(token)),
                Ok(None) => {
                    let long = if over { Duration::ZERO } else { ALL_HELD_PATIENCE };
                    match watch.look(counts(), long) {
                        Some(error) => Err(error),
                        None if over => Ok(None),
                        None => continue,
                    }
                }
                Err(closed) => Err(closed.into()),
            };
            blocked(begun.elapsed());
            return result;
        }
    }
}

/// The iterator of [`Learner::iter`].
///
/// ```
/// # use pinring::*;
/// # fn train(learner: &Learner) -> Result<()> {
/// for batch in learner.iter() {
///     let batch = batch?;
/// #   let _ = batch;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Batches<'l> {
    learner: &'l Learner,
    over: bool,
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, NextError>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.learner.next_batch();
        self.over = next.is_err();
        if matches!(next, Err(NextError::Ended)) { None } else { Some(next) }
    }
}

impl<'l> IntoIterator for &'l Learner {
    type Item = Result<Batch, NextError>;
    type IntoIter = Batches<'l>;
    fn into_iter(self) -> Batches<'l> {
        self.iter()
    }
}

/// The future of [`Learner::next_async`].
///
/// ```
/// # use pinring::*;
/// # async fn train(learner: &Learner) -> Result<()> {
/// let batch = learner.next_async().await?;
/// # let _ = batch;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a future does nothing until it is awaited"]
pub struct NextBatch<'l> {
    learner: &'l Learner,
    waker: Option<u64>,
    begun: Option<Instant>,
    held: HeldWatch,
}

impl NextBatch<'_> {
    fn look(&mut self) -> Option<NextError> {
        let counts = self.learner.counts();
        self.held.look(counts, ALL_HELD_PATIENCE)
    }

    fn forget(&mut self) {
        if let Some(id) = self.waker.take()
            && !self.learner.gate.is_inherited()
        {
            self.learner.gate.batches.forget(id);
        }
    }
}

impl Future for NextBatch<'_> {
    type Output = Result<Batch, NextError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.learner.gate.is_inherited() {
            return Poll::Ready(Err(NextError::Closed(Closed::UsedAfterFork)));
        }
        self.forget();
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let gate = self.learner.gate.clone();
        loop {
            let ready = match gate.batches.take(Patience::None, &mut Spin::default()) {
                Ok(Some(sealed)) => Some(Ok(Batch::new(sealed))),
                // While every batch is held nothing wakes this task but the ingest actor's watch, once a second.
                Ok(None) => self.look().map(Err),
                Err(closed) => Some(Err(closed.into())),
            };
            if let Some(ready) = ready {
                self.learner.blocked(begun.elapsed());
                self.begun = None;
                return Poll::Ready(ready);
            }
            self.waker = gate.batches.register(context.waker());
            if self.waker.is_some() {
                return Poll::Pending;
            }
        }
    }
}

impl Drop for NextBatch<'_> {
    fn drop(&mut self) {
        self.forget();
    }
}
