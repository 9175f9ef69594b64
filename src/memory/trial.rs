//! Pinning on its own, without a feed: does it work here, with which library, how long will a start take?
//!
//! A trial makes a ring exactly as a feed does, and drops it. It hands out no memory.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cuda::Cuda;
use crate::cuda::types::CudaSearch;

use super::error::RingError;
use super::progress::{PinProgress, PinWatch};
use super::registration::pinned_bytes_in_process;
use super::report::{PinReport, PinTimes};
use super::ring::{Conditions, Ring, RingPlan};

/// Page-locks memory as a feed's start does, takes the time, and gives it all back.
///
/// For a check at installation ("can this host pin 40 GiB, and how long does it take?") and for benchmarks. Nothing
/// is left of it, except that the CUDA library stays loaded and initialised, as it does after a feed.
///
/// ```
/// // Without CUDA: what does the memory alone cost?
/// let outcome = pinring::PinTrial::new(1 << 20, 16).map_only()?;
/// println!("{outcome}");
///
/// // With CUDA: on a host without a GPU this is an error that lists every library that was tried.
/// match pinring::PinTrial::new(1 << 20, 16).run() {
///     Ok(outcome) => println!("{outcome}"),
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Clone)]
#[must_use = "a trial does nothing before `run` or `map_only`"]
pub struct PinTrial {
    plan: RingPlan,
    search: CudaSearch,
    prefault_threads: Option<NonZeroUsize>,
    callback: Option<Callback>,
}

/// Shared, so that a trial can be run again.
type Callback = Arc<dyn Fn(&PinProgress) + Send + Sync>;

impl PinTrial {
    /// A trial with a ring of `slots` slots of `slot_bytes` bytes, a multiple of 4,096.
    pub fn new(slot_bytes: usize, slots: usize) -> PinTrial {
        PinTrial {
            plan: RingPlan::new(slot_bytes, slots),
            search: CudaSearch::new(),
            prefault_threads: None,
            callback: None,
        }
    }

    /// How many threads have the pages faulted in. Default: one a core, at most 8.
    pub fn prefault_threads(mut self, threads: NonZeroUsize) -> PinTrial {
        self.prefault_threads = Some(threads);
        self
    }

    /// Where to look for CUDA. Default: the environment alone.
    pub fn search(mut self, search: CudaSearch) -> PinTrial {
        self.search = search;
        self
    }

    /// Does not refuse a ring that is larger than the memory that seems to be left. For hosts whose memory grows as
    /// it is used (some virtual machines report a fraction of it at first); elsewhere it trades an error for a kill.
    pub fn ignore_memory_budget(mut self) -> PinTrial {
        self.plan.ignore_budget = true;
        self
    }

    /// Calls `callback` on this thread at each step.
    pub fn on_progress(mut self, callback: impl Fn(&PinProgress) + Send + Sync + 'static) -> PinTrial {
        self.callback = Some(Arc::new(callback));
        self
    }

    /// Makes a page-locked ring, verifies it, and drops it.
    ///
    /// # Errors
    /// Whatever keeps a feed with the same ring from starting.
    pub fn run(&self) -> Result<PinOutcome, RingError> {
        let find = || Cuda::find(&self.search);
        let ring = Ring::pinned_under(&self.conditions(), &self.plan, find, &self.watch())?;
        let report = ring.report().expect("a pinned ring has a report").clone();
        let began = Instant::now();
        drop(ring);
        let release = began.elapsed();
        Ok(PinOutcome { report, release, page_locked_after: pinned_bytes_in_process() })
    }

    /// Makes a ring in ordinary memory, and drops it. Opens no CUDA.
    ///
    /// # Errors
    /// Whatever keeps a feed without pinning from starting.
    pub fn map_only(&self) -> Result<MapOutcome, RingError> {
        let ring = Ring::unpinned_under(&self.conditions(), &self.plan, &self.watch())?;
        let pages = ring.pages();
        Ok(MapOutcome {
            bytes: ring.bytes(),
            times: *ring.times(),
            present_bytes: pages.map(|pages| pages.present),
            huge_page_bytes: pages.map(|pages| pages.huge),
        })
    }

    fn conditions(&self) -> Conditions {
        let mut conditions = Conditions::here();
        if let Some(threads) = self.prefault_threads {
            conditions.prefault_threads = threads.get();
        }
        conditions
    }

    fn watch(&self) -> PinWatch {
        let callback = self.callback.clone();
        PinWatch::new(callback.map(|callback| {
            let callback: Box<dyn Fn(&PinProgress) + Send + Sync> = Box::new(move |progress| callback(progress));
            callback
        }))
    }
}

impl fmt::Debug for PinTrial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinTrial")
            .field("plan", &self.plan)
            .field("search", &self.search)
            .field("prefault_threads", &self.prefault_threads)
            .finish_non_exhaustive()
    }
}

/// What [`PinTrial::run`] found.
///
/// ```no_run
/// let outcome = pinring::PinTrial::new(1 << 20, 1024).run()?;
/// let seconds_per_gib = outcome.report.times.register.as_secs_f64();
/// assert_eq!(outcome.page_locked_after, 0);
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PinOutcome {
    /// How it was pinned.
    pub report: PinReport,
    /// How long giving it back took. CUDA waits for all queued copies of the process first.
    pub release: Duration,
    /// Bytes that rings of this process hold page-locked now: 0, unless feeds run besides.
    pub page_locked_after: usize,
}

impl fmt::Display for PinOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PinOutcome { report, release, page_locked_after } = self;
        write!(
            f,
            "{report}\n  released in {:.3} s; {page_locked_after} bytes are page-locked now",
            release.as_secs_f64()
        )
    }
}

/// What [`PinTrial::map_only`] found.
///
/// ```
/// let outcome = pinring::PinTrial::new(4096, 3).map_only()?;
/// assert_eq!(outcome.bytes, 12_288);
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MapOutcome {
    /// Bytes of the ring.
    pub bytes: usize,
    /// How long it took.
    pub times: PinTimes,
    /// Bytes of the ring that were in memory: all of them; `None` where the kernel does not say.
    pub present_bytes: Option<usize>,
    /// Bytes of these that were in transparent huge pages.
    pub huge_page_bytes: Option<usize>,
}

impl fmt::Display for MapOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mapped {} bytes in {}", self.bytes, self.times)?;
        match self.huge_page_bytes {
            Some(bytes) => write!(f, "; {bytes} bytes in huge pages"),
            None => Ok(()),
        }
    }
}
