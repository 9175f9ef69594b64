//! The threads that fill a batch together.
//!
//! Owns the job at hand and the wait for its end. Rows are given out in blocks by a counter; whoever asks for the batch
//! fills blocks too, so without helpers it does all of it. What it does not do: start threads.

use crate::gather::Tables;
use crate::intake::IntakeGate;
use crate::select::Selected;
use crate::store::{Mixed, Scratch, Store, Target};
use crate::sync::{lock, panic_text};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Below this many bytes a batch is filled sooner by one thread than others are woken.
const WORTH_HELP: usize = 256 << 10;
/// Bytes of a block of rows, about.
const BLOCK: usize = 64 << 10;
/// Rows whose records are asked of memory together, before any of them is looked at.
const TOUCHED: usize = 32;
/// The same for batches that a device gathers, in rows: there only windows are looked up.
const WORTH_HELP_PLANNING: usize = 256;
const BLOCK_OF_PLANNING: usize = 64;

/// Helpers of one sampling thread, and their job.
#[derive(Debug, Default)]
pub(crate) struct Crew {
    helpers: usize,
    state: Mutex<Work>,
    /// Helpers that wait for a job; the sampling thread that waits for its end.
    called: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct Work {
    job: Option<Arc<Job>>,
    /// Jobs so far: a helper looks at each once.
    number: u64,
    dismissed: bool,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("number", &self.number).finish_non_exhaustive()
    }
}

/// A batch to fill.
struct Job {
    /// The store that the items are of, and if it is the second one what its samples are in these batches.
    store: Arc<Store>,
    mixed: Option<Arc<Mixed>>,
    gate: Arc<IntakeGate>,
    items: Vec<Selected>,
    slot: u32,
    /// The first of the rows, which are of the second store's only behind others.
    first_row: usize,
    /// Where the table of records is and how many numbers a row of it has, if a device gathers.
    table: Option<(usize, usize)>,
    block: usize,
    /// The first row that nobody has taken, and rows that are filled.
    next: AtomicUsize,
    filled: AtomicUsize,
    /// What a panic said.
    failed: Mutex<Option<String>>,
}

impl Job {
    /// Fills blocks until none is left; true for whoever filled the last row.
    fn help(&self, scratch: &mut Scratch) -> bool {
        let rows = self.items.len();
        loop {
            let start = self.next.fetch_add(self.block, Ordering::Relaxed);
            if start >= rows {
                return false;
            }
            let end = rows.min(start + self.block);
            // A panic here is a bug of this crate; rows that nobody fills must not be waited for.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.fill(start..end, scratch))) {
                lock(&self.failed).get_or_insert(panic_text(panic));
            }
            // SYNC: the last one's Acquire sees the rows of all, whose Releases these are.
            if self.filled.fetch_add(end - start, Ordering::AcqRel) + end - start == rows {
                return true;
            }
        }
    }

    fn fill(&self, rows: Range<usize>, scratch: &mut Scratch) {
        let target = Target::new(self.gate.slots.slot(self.slot));
        for row in rows.clone() {
            if (row - rows.start).is_multiple_of(TOUCHED) {
                // SAFETY: as below, for the items of the next rows.
                #[allow(unsafe_code)]
                unsafe {
                    self.store.touch(&self.items[row..rows.end.min(row + TOUCHED)], self.table.is_none());
                }
            }
            // SAFETY: the counter gives each row to one thread, of a slot whose lease the sampling thread holds until every
            // row is filled (invariant 2); the items were issued, and their gather ends behind that too (invariant 3).
            #[allow(unsafe_code)]
            unsafe {
                let item = &self.items[row];
                let record = match (self.table, &self.mixed) {
                    (None, None) => self.store.fill_row(item, row, target, scratch),
                    (None, Some(mixed)) => mixed.fill_row(item, self.first_row + row, target, scratch),
                    (Some((at, stride)), _) => {
                        let numbers = target.numbers(at, row, stride);
                        self.store.plan_row(item, row, target, scratch, numbers)
                    }
                };
                self.gate.slots.set_record(self.slot, self.first_row + row, record);
            }
        }
    }
}

impl Crew {
    /// A crew of the sampling thread and `helpers` others, each of which must call [`work`](Crew::work).
    pub(crate) fn new(helpers: usize) -> Crew {
        Crew { helpers, ..Crew::default() }
    }

    /// Fills a slot, which the caller has to itself, with the samples of `items`, which it has issued; or, by `tables`, with
    /// what a device needs to gather them. Gives the list back
    /// when every row is filled and nobody touches the slot any more.
    pub(crate) fn fill(
        &self,
        store: &Arc<Store>,
        gate: &Arc<IntakeGate>,
        items: Vec<Selected>,
        (slot, tables): (u32, Option<&Tables>),
        scratch: &mut Scratch,
    ) -> Vec<Selected> {
        let (rows, bytes) = (items.len(), gate.layout.slot_bytes);
        let (worth_help, block) = match tables {
            None => (bytes >= WORTH_HELP, (rows * BLOCK / bytes).max(1)),
            Some(_) => (rows >= WORTH_HELP_PLANNING, BLOCK_OF_PLANNING),
        };
        let alone = self.helpers == 0 || !worth_help;
        let block = if alone { rows } else { block };
        self.fill_with(
            Job {
                store: store.clone(),
                mixed: None,
                gate: gate.clone(),
                items,
                slot,
                first_row: 0,
                table: tables.map(|tables| (tables.at, tables.stride)),
                block,
                next: AtomicUsize::new(0),
                filled: AtomicUsize::new(0),
                failed: Mutex::default(),
            },
            alone,
            scratch,
        )
    }

    /// As [`fill`](Crew::fill), for rows of a second store behind the first `first_row`.
    pub(crate) fn fill_mixed(
        &self,
        mixed: &Arc<Mixed>,
        gate: &Arc<IntakeGate>,
        items: Vec<Selected>,
        (slot, first_row): (u32, usize),
        scratch: &mut Scratch,
    ) {
        let (rows, bytes) = (items.len(), gate.layout.slot_bytes / gate.layout.rows * items.len());
        let alone = self.helpers == 0 || bytes < WORTH_HELP;
        let job = Job {
            store: mixed.store.clone(),
            mixed: Some(mixed.clone()),
            gate: gate.clone(),
            items,
            slot,
            first_row,
            table: None,
            block: if alone { rows } else { (rows * BLOCK / bytes).max(1) },
            next: AtomicUsize::new(0),
            filled: AtomicUsize::new(0),
            failed: Mutex::default(),
        };
        self.fill_with(job, alone, scratch);
    }

    fn fill_with(&self, job: Job, alone: bool, scratch: &mut Scratch) -> Vec<Selected> {
        let rows = job.items.len();
        let job = Arc::new(job);
        if !alone {
            let mut work = lock(&self.state);
            work.job = Some(job.clone());
            work.number += 1;
            drop(work);
            self.called.notify_all();
        }
        if !job.help(scratch) && rows > 0 {
            let mut work = lock(&self.state);
            // SYNC: pairs with the AcqRel in `help`; the last helper notifies with the lock taken in between.
            while job.filled.load(Ordering::Acquire) < rows {
                work = self.done.wait(work).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
        if !alone {
            lock(&self.state).job = None;
        }
        let failed = lock(&job.failed).take(); // not held while it panics
        if let Some(text) = failed {
            panic!("a row could not be filled: {text}");
        }
        // A helper may still hold the job, but takes no row of it.
        Arc::try_unwrap(job).map_or_else(|_| Vec::with_capacity(rows), |job| job.items)
    }

    /// A helper's life: until the crew is dismissed.
    pub(crate) fn work(&self) {
        let (mut scratch, mut seen) = (Scratch::default(), 0);
        loop {
            let mut work = lock(&self.state);
            while work.number == seen && !work.dismissed {
                work = self.called.wait(work).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            if work.dismissed {
                return;
            }
            seen = work.number;
            let job = work.job.clone();
            drop(work);
            if job.is_some_and(|job| job.help(&mut scratch)) {
                drop(lock(&self.state)); // whoever waits for it has looked, or is parked
                self.done.notify_one();
            }
        }
    }

    /// Ends the helpers.
    pub(crate) fn dismiss(&self) {
        lock(&self.state).dismissed = true;
        self.called.notify_all();
    }
}
