//! The newest whole policy, and its version.
//!
//! Owns the hand-over of weights from learner to env threads, and the wait of the lag gate. A value is published whole
//! behind an `Arc`: the lock is held for the exchange of a pointer, never while weights are built, read or dropped.
//! What it does not do: copy, average or store weights beyond the few versions that a lockstep feed needs.

use crate::error::Closed;
use crate::sync::checked::{AtomicU64, Condvar, Mutex, lock};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The newest policy and its version; clones share it. The learner publishes, env threads read.
///
/// ```
/// use pinring::Weights;
/// let weights = Weights::new(vec![0.0f32; 4]);
/// assert_eq!(weights.latest().0, 0);
/// let version = weights.publish(vec![1.0; 4]);
/// let (newest, policy) = weights.latest();
/// assert_eq!((newest, policy[0]), (version, 1.0));
/// ```
pub struct Weights<W> {
    shared: Arc<Shared<W>>,
}

struct Shared<W> {
    /// Oldest first; never empty.
    kept: Mutex<VecDeque<(u64, Arc<W>)>>,
    versions: Arc<Versions>,
}

impl<W> Clone for Weights<W> {
    fn clone(&self) -> Self {
        Weights { shared: self.shared.clone() }
    }
}

impl<W> fmt::Debug for Weights<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights").field("version", &self.shared.versions.newest()).finish_non_exhaustive()
    }
}

impl<W: Send + Sync + 'static> Weights<W> {
    /// Weights of version 0.
    pub fn new(weights: W) -> Weights<W> {
        Weights::with_version(weights, 0)
    }

    /// Weights of a given version, as after a checkpoint. A feed counts lag from the version that it finds at its start.
    pub fn with_version(weights: W, version: u64) -> Weights<W> {
        let versions = Arc::new(Versions {
            newest: AtomicU64::new(version),
            keep: AtomicU64::new(1),
            waiting: Mutex::new(()),
            changed: Condvar::new(),
        });
        Weights {
            shared: Arc::new(Shared { kept: Mutex::new(VecDeque::from([(version, Arc::new(weights))])), versions }),
        }
    }

    /// Makes `weights` the newest and returns its version, one more than the last. Never waits for readers.
    pub fn publish(&self, weights: W) -> u64 {
        let weights = Arc::new(weights);
        let mut outdated = Vec::new(); // dropped behind the lock: freeing weights can take long
        let mut kept = lock(&self.shared.kept);
        let version = kept.back().map_or(0, |(version, _)| version + 1);
        kept.push_back((version, weights));
        while kept.len() as u64 > self.shared.versions.keep.load(Ordering::Relaxed) {
            outdated.extend(kept.pop_front());
        }
        drop(kept);
        self.shared.versions.publish(version);
        version
    }

    /// The newest version and its weights.
    pub fn latest(&self) -> (u64, Arc<W>) {
        let kept = lock(&self.shared.kept);
        kept.back().cloned().expect("weights are never empty: the constructor puts one in and publish keeps one")
    }

    /// Waits until a version newer than `version` is published, at most for `timeout`; `None` when it was not.
    pub fn wait_newer(&self, version: u64, timeout: Duration) -> Option<(u64, Arc<W>)> {
        let versions = &self.shared.versions;
        let reached = versions.wait(version + 1, Instant::now().checked_add(timeout), || None);
        (reached == Ok(true)).then(|| self.latest())
    }

    /// Exactly this version, if it is still kept.
    pub(crate) fn exactly(&self, version: u64) -> Option<Arc<W>> {
        let kept = lock(&self.shared.kept);
        kept.iter().rev().find(|(v, _)| *v == version).map(|(_, weights)| weights.clone())
    }

    /// The oldest version that is still kept.
    pub(crate) fn oldest(&self) -> u64 {
        lock(&self.shared.kept).front().map_or(0, |(version, _)| *version)
    }

    pub(crate) fn versions(&self) -> &Arc<Versions> {
        &self.shared.versions
    }
}

/// The version counter behind some `Weights<W>`, without its type: what the lag gate waits on.
#[derive(Debug)]
pub(crate) struct Versions {
    newest: AtomicU64,
    /// How many versions are kept: 1, or 1 + the lag of a lockstep feed.
    keep: AtomicU64,
    waiting: Mutex<()>,
    changed: Condvar,
}

impl Versions {
    pub(crate) fn newest(&self) -> u64 {
        // SYNC: pairs with the Release in `publish`; whoever sees a version finds its weights in `kept`.
        self.newest.load(Ordering::Acquire)
    }

    pub(crate) fn keep_at_least(&self, versions: u64) {
        self.keep.fetch_max(versions, Ordering::Relaxed);
    }

    fn publish(&self, version: u64) {
        let _waiting = lock(&self.waiting); // a waiter that just found the old version is parked before this notifies
        // Two publishers may arrive here in either order; the newest version must win.
        self.newest.fetch_max(version, Ordering::Release);
        self.changed.notify_all();
    }

    /// Wakes every waiter so that it looks at its `closed` again.
    pub(crate) fn wake(&self) {
        let _waiting = lock(&self.waiting);
        self.changed.notify_all();
    }

    /// Waits until `version` is published (true), the deadline has passed (false), or `closed` has a reason.
    pub(crate) fn wait(
        &self,
        version: u64,
        deadline: Option<Instant>,
        closed: impl Fn() -> Option<Closed>,
    ) -> Result<bool, Closed> {
        if self.newest() >= version {
            return Ok(true);
        }
        self.wait_until(deadline, |newest| newest >= version, closed)
    }

    /// Waits until `ready` says so of the newest version (true), the deadline has passed (false), or `closed` has a
    /// reason. Both are asked again at each [`wake`](Versions::wake).
    pub(crate) fn wait_until(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut(u64) -> bool,
        closed: impl Fn() -> Option<Closed>,
    ) -> Result<bool, Closed> {
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some(reason) = closed() {
                return Err(reason);
            }
            if ready(self.newest()) {
                return Ok(true);
            }
            waiting = match deadline {
                None => self.changed.wait(waiting).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    self.changed.wait_timeout(waiting, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn keeps_as_many_versions_as_asked() {
        let weights = Weights::with_version(0u32, 10);
        weights.versions().keep_at_least(3);
        for i in 1..=5 {
            assert_eq!(weights.publish(i), 10 + u64::from(i));
        }
        assert_eq!(weights.exactly(12), None);
        assert_eq!(weights.exactly(13).as_deref(), Some(&3));
        assert_eq!(weights.exactly(15).as_deref(), Some(&5));
        assert_eq!(weights.exactly(16), None);
    }

    #[test]
    fn waits_for_a_newer_version() {
        let weights = Weights::new(0u32);
        assert!(weights.wait_newer(0, Duration::from_millis(5)).is_none());
        let publisher = thread::spawn({
            let weights = weights.clone();
            move || weights.publish(7)
        });
        let (version, value) = weights.wait_newer(0, Duration::from_secs(60)).expect("published within a minute");
        assert_eq!((version, *value), (1, 7));
        publisher.join().unwrap();
    }
}

/// Every order in which a few threads may meet here. See `.ci/run` for how it is run.
#[cfg(all(test, pinring_loom))]
mod orders {
    use super::*;
    use loom::thread;

    /// Who sees a version finds its weights, and who waits for one is woken.
    #[test]
    fn a_version_that_is_waited_for_comes_with_its_weights() {
        loom::model(|| {
            let weights = Weights::new(0u64);
            let publishers: Vec<_> = (0..2)
                .map(|_| {
                    let weights = weights.clone();
                    thread::spawn(move || weights.publish(7))
                })
                .collect();
            assert_eq!(weights.versions().wait(2, None, || None), Ok(true));
            assert_eq!((weights.latest().0, *weights.latest().1, weights.versions().newest()), (2, 7, 2));
            let mut versions: Vec<_> = publishers.into_iter().map(|publisher| publisher.join().unwrap()).collect();
            versions.sort_unstable();
            assert_eq!(versions, [1, 2]);
        });
    }

    /// A wait that a close is to end hears of it.
    #[test]
    fn a_wait_ends_by_a_wake() {
        loom::model(|| {
            let weights = Weights::new(0u64);
            let closed = std::sync::Arc::new(loom::sync::atomic::AtomicBool::new(false));
            let closer = thread::spawn({
                let (versions, closed) = (weights.versions().clone(), closed.clone());
                move || {
                    closed.store(true, Ordering::Release);
                    versions.wake();
                }
            });
            let reason = || closed.load(Ordering::Acquire).then_some(Closed::Stopped);
            assert_eq!(weights.versions().wait(1, None, reason), Err(Closed::Stopped));
            closer.join().unwrap();
        });
    }
}
