//! The lag gate: how far actors may run ahead of the learner.
//!
//! Owns the count of rows that free-running lanes have begun, and the rule by which the next may begin. What it does
//! not do: know versions (see `weights`) or rows (see `stripes`).
//!
//! The rule: row u, counted in the order in which rows begin, is of batch u / rows, and a row of batch k may begin when
//! k ≤ versions published + lag. With one exception, since nothing that a lane waits for may be needed to finish what it
//! has begun (invariant 10): lanes of one writer step together, so while a writer waits here, the unrolls that its other
//! lanes are in the middle of stand still. Where the batches that a wait is for cannot be filled without those, it ends.

use crate::error::Closed;
use crate::sync::lock;
use crate::weights::Versions;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(crate) struct LagGate {
    pub(crate) versions: Arc<Versions>,
    /// The newest version when the feed began: what was published before is no answer to its batches.
    first: u64,
    lag: u64,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Rows begun by free-running lanes and not given up.
    begun: u64,
    /// Those of them that stand still, because their writer waits here.
    stalled: u64,
}

/// What one writer wants to begin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begin {
    /// Rows that begin with this step, together.
    pub(crate) rows: usize,
    /// Rows that the writer has begun and not completed.
    pub(crate) unfinished: usize,
    /// Rows a batch.
    pub(crate) batch_rows: usize,
}

impl LagGate {
    pub(crate) fn new(versions: Arc<Versions>, lag: u64) -> LagGate {
        LagGate { first: versions.newest(), versions, lag, counts: Mutex::default() }
    }

    /// The version that must be published before a row of batch `batch` may begin.
    pub(crate) fn needed(&self, batch: u64) -> u64 {
        self.first + batch.saturating_sub(self.lag)
    }

    /// Begins the rows if they may begin now.
    pub(crate) fn try_begin(&self, begin: Begin) -> bool {
        self.admit(&mut lock(&self.counts), begin, begin.unfinished as u64)
    }

    /// Begins the rows when they may; waits for that.
    pub(crate) fn begin(&self, begin: Begin, closed: impl Fn() -> Option<Closed>) -> Result<(), Closed> {
        lock(&self.counts).stalled += begin.unfinished as u64;
        if begin.unfinished > 0 {
            self.versions.wake(); // others that wait may have waited for these
        }
        let result =
            self.versions.wait_until(None, |_| self.admit(&mut lock(&self.counts), begin, 0), closed).map(drop);
        lock(&self.counts).stalled -= begin.unfinished as u64;
        result
    }

    fn admit(&self, counts: &mut Counts, begin: Begin, also_stalled: u64) -> bool {
        let batch_rows = begin.batch_rows as u64;
        let needed = self.needed(counts.begun / batch_rows);
        // Rows that are delivered, or will be whoever waits here.
        let coming = counts.begun.saturating_sub(counts.stalled + also_stalled);
        let may = self.versions.newest() >= needed || coming < (needed - self.first) * batch_rows;
        if may {
            counts.begun += begin.rows as u64;
        }
        may
    }

    /// Takes back rows that were begun and will not be delivered: others may begin in their place.
    pub(crate) fn give_up(&self, rows: usize) {
        if rows > 0 {
            lock(&self.counts).begun -= rows as u64;
            self.versions.wake();
        }
    }
}
