//! What a start shows while it runs, and how it is told to give up: phase, bytes, time, cancel.
//!
//! One [`PinWatch`] is shared by the thread that pins and by whoever looks on. It holds no ring and calls no CUDA; it
//! only carries numbers one way and one flag the other way. The flag is looked at between pieces: a call to the
//! system or to CUDA that has begun is waited for.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::RingError;

/// What the thread that makes the ring is doing.
///
/// The phases come in the order of the variants. Without pinning, [`FindingCuda`](PinPhase::FindingCuda),
/// [`Registering`](PinPhase::Registering) and [`Verifying`](PinPhase::Verifying) do not occur.
///
/// ```
/// use pinring::PinPhase;
/// assert!(PinPhase::Prefaulting < PinPhase::Registering);
/// assert_eq!(PinPhase::Registering.to_string(), "registering");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PinPhase {
    /// Checking the memory budget, then loading a CUDA library and initialising it.
    FindingCuda,
    /// Reserving the address range of the ring.
    Mapping,
    /// Having the kernel back the range with pages, by several threads.
    Prefaulting,
    /// Page-locking the range, piece by piece.
    Registering,
    /// Asking CUDA about the first and the last byte of every slot.
    Verifying,
    /// The ring stands.
    Done,
}

impl fmt::Display for PinPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PinPhase::FindingCuda => "finding CUDA",
            PinPhase::Mapping => "mapping",
            PinPhase::Prefaulting => "pre-faulting",
            PinPhase::Registering => "registering",
            PinPhase::Verifying => "verifying",
            PinPhase::Done => "done",
        })
    }
}

/// How far the making of the ring has come: a snapshot.
///
/// ```
/// # use pinring::{PinTrial, PinPhase};
/// // Print what a start of 64 MiB goes through.
/// let trial = PinTrial::new(1 << 20, 64).on_progress(|progress| println!("{progress}"));
/// trial.map_only()?;
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinProgress {
    /// What is being done.
    pub phase: PinPhase,
    /// Bytes of the ring for which this phase is over.
    pub bytes_done: usize,
    /// Bytes of the ring; 0 before the start.
    pub bytes_total: usize,
    /// Time since the start began; stands still once it is over, well or badly.
    pub elapsed: Duration,
}

impl fmt::Display for PinProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PinProgress { phase, bytes_done, bytes_total, elapsed } = self;
        write!(f, "{phase}: {bytes_done} of {bytes_total} bytes after {:.3} s", elapsed.as_secs_f64())
    }
}

/// The observer of one start. Clones watch the same start.
#[derive(Clone)]
pub(crate) struct PinWatch(Arc<Shared>);

/// What is called on the pinning thread at each step.
type Callback = Box<dyn Fn(&PinProgress) + Send + Sync>;

struct Shared {
    callback: Option<Callback>,
    cancelled: AtomicBool,
    state: Mutex<State>,
}

struct State {
    phase: PinPhase,
    bytes_done: usize,
    bytes_total: usize,
    began: Option<Instant>,
    took: Option<Duration>,
}

impl PinWatch {
    /// A watch whose `callback` runs on the thread that pins, at each change of phase and after each piece. It must
    /// not block: the start waits for it. No lock is held while it runs.
    pub(crate) fn new(callback: Option<Callback>) -> PinWatch {
        PinWatch(Arc::new(Shared {
            callback,
            cancelled: AtomicBool::new(false),
            state: Mutex::new(State {
                phase: PinPhase::FindingCuda,
                bytes_done: 0,
                bytes_total: 0,
                began: None,
                took: None,
            }),
        }))
    }

    /// Where the start is. From any thread, at any time, also while a call to CUDA runs.
    pub(crate) fn progress(&self) -> PinProgress {
        let state = self.state();
        let running = || state.began.map_or(Duration::ZERO, |began| began.elapsed());
        PinProgress {
            phase: state.phase,
            bytes_done: state.bytes_done,
            bytes_total: state.bytes_total,
            elapsed: state.took.unwrap_or_else(running),
        }
    }

    /// Asks the start to give up before its next piece. For good: a cancelled watch refuses every later start too.
    pub(crate) fn cancel(&self) {
        // Relaxed: the flag is all that is said; what the start undoes is its own.
        self.0.cancelled.store(true, Ordering::Relaxed);
    }

    /// The start of `bytes_total` bytes begins. The returned guard ends it, whichever way it ends.
    pub(super) fn begin(&self, bytes_total: usize) -> Running<'_> {
        *self.state() =
            State { phase: PinPhase::FindingCuda, bytes_done: 0, bytes_total, began: Some(Instant::now()), took: None };
        Running(self)
    }

    /// Enters `phase`, unless the start was cancelled.
    pub(super) fn enter(&self, phase: PinPhase) -> Result<(), RingError> {
        self.check()?;
        {
            let mut state = self.state();
            state.phase = phase;
            state.bytes_done = if phase == PinPhase::Done { state.bytes_total } else { 0 };
        }
        self.tell();
        Ok(())
    }

    /// Counts `bytes` as done in this phase. From any thread; tells nobody.
    pub(super) fn add(&self, bytes: usize) {
        self.state().bytes_done += bytes;
    }

    /// Calls the callback with the state of now. On the pinning thread only.
    pub(super) fn tell(&self) {
        if let Some(callback) = &self.0.callback {
            callback(&self.progress());
        }
    }

    /// The error of a cancelled start, if it was cancelled.
    pub(super) fn check(&self) -> Result<(), RingError> {
        if !self.is_cancelled() {
            return Ok(());
        }
        let PinProgress { phase, bytes_done, bytes_total, .. } = self.progress();
        Err(RingError::Cancelled { phase, bytes_done, bytes_total })
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing can panic while the lock is held, and plain numbers cannot be left half-written.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PinWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinWatch").field("progress", &self.progress()).field("cancelled", &self.is_cancelled()).finish()
    }
}

/// A start under way; its end stops the clock.
pub(super) struct Running<'a>(&'a PinWatch);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.took = state.began.map(|began| began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_counts_up_and_stops_its_clock_at_the_end() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        let watch = PinWatch::new(Some(Box::new(move |progress: &PinProgress| {
            record.lock().unwrap().push((progress.phase, progress.bytes_done));
        })));
        assert_eq!(watch.progress().elapsed, Duration::ZERO);

        let running = watch.begin(10);
        watch.enter(PinPhase::Mapping).unwrap();
        watch.add(4);
        watch.tell();
        watch.enter(PinPhase::Done).unwrap();
        drop(running);

        let stopped = watch.progress();
        assert_eq!((stopped.bytes_done, stopped.bytes_total), (10, 10));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(watch.progress(), stopped);
        assert_eq!(*seen.lock().unwrap(), [(PinPhase::Mapping, 0), (PinPhase::Mapping, 4), (PinPhase::Done, 10)]);
    }

    #[test]
    fn a_cancelled_watch_says_where_it_was() {
        let watch = PinWatch::new(None);
        let _running = watch.begin(10);
        watch.enter(PinPhase::Registering).unwrap();
        watch.add(3);
        watch.clone().cancel();
        let error = watch.enter(PinPhase::Verifying).unwrap_err();
        assert!(
            matches!(error, RingError::Cancelled { phase: PinPhase::Registering, bytes_done: 3, bytes_total: 10 }),
            "{error:?}"
        );
    }

    #[test]
    fn the_callback_may_ask_for_the_progress_and_cancel() {
        let slot = Arc::new(Mutex::new(None::<PinWatch>));
        let inner = Arc::clone(&slot);
        let watch = PinWatch::new(Some(Box::new(move |_: &PinProgress| {
            let watch = inner.lock().unwrap().clone().unwrap();
            assert_eq!(watch.progress().phase, PinPhase::Mapping);
            watch.cancel();
        })));
        *slot.lock().unwrap() = Some(watch.clone());
        watch.enter(PinPhase::Mapping).unwrap();
        assert!(watch.is_cancelled());
        *slot.lock().unwrap() = None;
    }
}
