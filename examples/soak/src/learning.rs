//! What learns: takes batches on the host or on a device, checks every row, publishes weights, and rests now and then.

use crate::account::{Account, Once, lock};
use crate::feeds::{DEADLINE, Kind};
use crate::rows::{self, BYTES, Rng, WORDS};
use pinring::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// What learns.
pub struct Learning {
    pub kind: Kind,
    pub column: Column<u64>,
    pub next: Option<Column<u64>>,
    pub weights: Weights<u64>,
    pub feed: Arc<Feed>,
    pub account: Arc<Account>,
    pub taken: Arc<AtomicU64>,
    pub batches: Arc<AtomicU64>,
    pub once: Arc<Mutex<Once>>,
    pub publishing: Arc<Mutex<()>>,
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

    pub fn on_host(self, learner: &Learner, mut rng: Rng) {
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
    pub fn on_device(self, learner: &DeviceLearner, mut rng: Rng) {
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
                self.update(
                    learner.update_priorities_from_host(&batch.keys(), &vec![rng.below(100) as f32; rows]),
                    rows,
                );
            }
            drop(batch);
            self.rest(&mut rng);
        }
    }
}
