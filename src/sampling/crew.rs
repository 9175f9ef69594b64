//! The threads that fill a batch together.
//!
//! Owns the jobs at hand, two at the most, and the wait for their end. Each thread has a share of the rows, the same ones of
//! every batch, and takes blocks of it; whoever is done with its own helps with the others', and then goes on to the next
//! batch, so that nobody waits for the slowest. Whoever asks for the batch fills rows too, so without helpers it does all of
//! it. What it does not do: start threads.

use crate::gather::Tables;
use crate::intake::IntakeGate;
use crate::select::Selected;
use crate::store::{Mixed, Scratch, Store, Target};
use crate::sync::{Padded, Spin, lock, panic_text};
use parking_lot::RwLock;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

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
#[derive(Default)]
pub(crate) struct Crew {
    helpers: usize,
    /// What is to be filled now: a job's place is its number's last bit. Helpers come for it at the same moment, and do not
    /// keep each other out.
    jobs: RwLock<[Option<Arc<Job>>; 2]>,
    /// Jobs so far, counted with the lock of `rest` held: a helper looks at each once.
    posted: AtomicU64,
    rest: Mutex<Rest>,
    /// Helpers that wait for a job; the sampling thread that waits for its end.
    called: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct Rest {
    /// Helpers that sleep, or are about to.
    sleeping: usize,
    dismissed: bool,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("helpers", &self.helpers).field("posted", &self.posted).finish_non_exhaustive()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("rows", &self.items.len()).field("filled", &self.filled).finish_non_exhaustive()
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
    /// One a thread. Caches still have a thread's rows of the slot from the last time: a thread alone that starts with the
    /// same ones gains from it.
    shares: Box<[Padded<Share>]>,
    /// Rows that are filled.
    filled: AtomicUsize,
    /// What a panic said.
    failed: Mutex<Option<String>>,
}

/// Rows that one thread fills before it looks at others.
struct Share {
    /// The first row that nobody has taken.
    next: AtomicUsize,
    end: usize,
}

/// `of × share / whole`, where the product may be more than 32 bits hold.
fn part(of: usize, share: usize, whole: usize) -> usize {
    (of as u64 * share as u64 / whole as u64) as usize
}

impl Share {
    /// Shares of so many rows.
    fn of(rows: usize, threads: usize) -> Box<[Padded<Share>]> {
        let bound = |thread: usize| part(rows, thread, threads);
        let share = |thread| Padded(Share { next: AtomicUsize::new(bound(thread)), end: bound(thread + 1) });
        (0..threads).map(share).collect()
    }

    fn take(&self, rows: usize) -> Option<Range<usize>> {
        if self.next.load(Ordering::Relaxed) >= self.end {
            return None; // most looks are of this kind, and leave the line where it is
        }
        let start = self.next.fetch_add(rows, Ordering::Relaxed);
        (start < self.end).then(|| start..self.end.min(start + rows))
    }
}

impl Job {
    /// Whole rows of the feed's own store, dealt to nobody yet.
    fn new(store: &Arc<Store>, gate: &Arc<IntakeGate>, items: Vec<Selected>, slot: u32) -> Job {
        Job {
            store: store.clone(),
            mixed: None,
            gate: gate.clone(),
            items,
            slot,
            first_row: 0,
            table: None,
            block: 0,
            shares: Box::default(),
            filled: AtomicUsize::new(0),
            failed: Mutex::default(),
        }
    }

    /// Fills blocks until none is left, those of the caller's share first; true for whoever filled the last row.
    fn help(&self, thread: usize, scratch: &mut Scratch) -> bool {
        let shares = self.shares[thread..].iter().chain(&self.shares[..thread]);
        for share in shares {
            while let Some(rows) = share.take(self.block) {
                let count = rows.len();
                // A panic here is a bug of this crate; rows that nobody fills must not be waited for.
                let fill = || {
                    #[cfg(test)]
                    crate::sync::points::here(if thread == 0 { "sampling: fills" } else { "gather: fills" });
                    self.fill(rows, scratch);
                };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(fill)) {
                    lock(&self.failed).get_or_insert(panic_text(panic));
                }
                // SYNC: the last one's Acquire sees the rows of all, whose Releases these are.
                if self.filled.fetch_add(count, Ordering::AcqRel) + count == self.items.len() {
                    return true;
                }
            }
        }
        false
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

    /// Has a slot filled, which the caller has to itself, with the samples of `items`, which it has issued; or, by `tables`,
    /// with what a device needs to gather them. Helpers begin at once; [`Filling::finish`] does the rest.
    pub(crate) fn begin<'c>(
        &'c self,
        store: &Arc<Store>,
        gate: &Arc<IntakeGate>,
        items: Vec<Selected>,
        (slot, tables): (u32, Option<&Tables>),
    ) -> Filling<'c> {
        let (rows, bytes) = (items.len(), gate.layout.slot_bytes);
        let (worth_help, block) = match tables {
            None => (bytes >= WORTH_HELP, part(rows, BLOCK, bytes)),
            Some(_) => (rows >= WORTH_HELP_PLANNING, BLOCK_OF_PLANNING),
        };
        let mut job = Job::new(store, gate, items, slot);
        job.table = tables.map(|tables| (tables.at, tables.stride));
        self.share(job, worth_help, block)
    }

    /// As [`begin`](Crew::begin), for rows of a second store behind the first `first_row`.
    pub(crate) fn begin_mixed<'c>(
        &'c self,
        mixed: &Arc<Mixed>,
        gate: &Arc<IntakeGate>,
        items: Vec<Selected>,
        (slot, first_row): (u32, usize),
    ) -> Filling<'c> {
        let (rows, bytes) = (items.len(), gate.layout.slot_bytes / gate.layout.rows * items.len());
        let mut job = Job::new(&mixed.store, gate, items, slot);
        (job.mixed, job.first_row) = (Some(mixed.clone()), first_row);
        self.share(job, bytes >= WORTH_HELP, part(rows, BLOCK, bytes.max(1)))
    }

    /// Deals the rows out: in blocks of so many to all threads, if that is worth it.
    fn share(&self, mut job: Job, worth_help: bool, block: usize) -> Filling<'_> {
        let (rows, shared) = (job.items.len(), self.helpers > 0 && worth_help);
        let threads = if shared { self.helpers + 1 } else { 1 };
        job.block = if shared { block.max(1) } else { rows };
        job.shares = Share::of(rows, threads);
        let job = Arc::new(job);
        let number = shared.then(|| self.post(&job));
        Filling { crew: self, job: Some(job), number }
    }

    /// Gives a job to the helpers, and returns its number. Of two numbers before, the job is over.
    fn post(&self, job: &Arc<Job>) -> u64 {
        let number = self.posted.load(Ordering::Relaxed) + 1; // nobody else posts
        self.jobs.write()[(number & 1) as usize] = Some(job.clone());
        let rest = lock(&self.rest);
        // SYNC: the job was put there before: a helper that sees the number finds it.
        self.posted.store(number, Ordering::Release);
        let sleeping = rest.sleeping;
        drop(rest);
        if sleeping > 0 {
            self.called.notify_all();
        }
        number
    }

    /// The life of a helper, which are counted from 0: until the crew is dismissed.
    pub(crate) fn work(&self, helper: usize) {
        let (mut scratch, mut seen, mut spin) = (Scratch::default(), 0, Spin::default());
        loop {
            // Where batches follow each other closely, the next is there sooner than a sleeping thread would be.
            let next = || self.posted.load(Ordering::Acquire) != seen;
            if !spin.until(next) {
                let mut rest = lock(&self.rest);
                rest.sleeping += 1;
                while !next() && !rest.dismissed {
                    rest = self.called.wait(rest).unwrap_or_else(PoisonError::into_inner);
                }
                rest.sleeping -= 1;
                if rest.dismissed {
                    return;
                }
            }
            let newest = self.posted.load(Ordering::Acquire);
            for number in (seen + 1).max(newest - 1)..=newest {
                // It may be a later one than that, or over: then there is nothing to do in it.
                let job = self.jobs.read()[(number & 1) as usize].clone();
                if job.is_some_and(|job| job.help(1 + helper, &mut scratch)) {
                    drop(lock(&self.rest)); // whoever waits for it has looked, or is parked
                    self.done.notify_one();
                }
            }
            seen = newest;
        }
    }

    /// Ends the helpers.
    pub(crate) fn dismiss(&self) {
        lock(&self.rest).dismissed = true;
        self.called.notify_all();
    }
}

/// A batch that is being filled. Its drop waits until nobody touches the slot any more.
#[derive(Debug)]
pub(crate) struct Filling<'c> {
    crew: &'c Crew,
    /// Until it is over.
    job: Option<Arc<Job>>,
    /// Of a job that helpers know of.
    number: Option<u64>,
}

impl Filling<'_> {
    /// Whether helpers fill it, while the caller does something else.
    pub(crate) fn is_shared(&self) -> bool {
        self.number.is_some()
    }

    /// Fills what is left, and gives the list back when every row is filled and nobody touches the slot any more.
    ///
    /// # Panics
    /// If a row could not be filled, which is a bug of this crate.
    pub(crate) fn finish(mut self, scratch: &mut Scratch) -> Vec<Selected> {
        let Some(job) = self.end(scratch) else { return Vec::new() };
        let failed = lock(&job.failed).take(); // not held while it panics
        if let Some(text) = failed {
            panic!("a row could not be filled: {text}");
        }
        // A helper may still hold the job, but takes no row of it.
        Arc::try_unwrap(job).map_or_else(|job| Vec::with_capacity(job.items.len()), |job| job.items)
    }

    fn end(&mut self, scratch: &mut Scratch) -> Option<Arc<Job>> {
        let (job, crew) = (self.job.take()?, self.crew);
        let rows = job.items.len();
        // Others have a block each at the most: the end is near.
        let ended = || job.filled.load(Ordering::Acquire) == rows;
        if !job.help(0, scratch) && rows > 0 && !Spin::default().until(ended) {
            let mut rest = lock(&crew.rest);
            // SYNC: pairs with the AcqRel in `help`; the last helper notifies with the lock taken in between.
            while !ended() {
                rest = crew.done.wait(rest).unwrap_or_else(PoisonError::into_inner);
            }
        }
        if let Some(number) = self.number {
            crew.jobs.write()[(number & 1) as usize] = None;
        }
        Some(job)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.end(&mut Scratch::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_of_large_batches_are_right_with_32_bits_too() {
        assert_eq!((part(1 << 16, BLOCK, 1 << 18), part(i32::MAX as usize, 3, 4)), (1 << 14, 1_610_612_735));
    }

    proptest! {
        /// Whoever comes first, and however large the blocks: no row is left out, and none is given twice.
        #[test]
        fn shares_are_every_row_once(rows in 0usize..300, threads in 1usize..20, block in 1usize..70, order: u64) {
            let shares = Share::of(rows, threads);
            prop_assert_eq!(shares.len(), threads);
            let mut draws = crate::select::Draws::new(order, 0);
            let (mut taken, mut empty) = (vec![0; rows], 0);
            while empty < 20 * threads {
                match shares[draws.below(threads as u64) as usize].take(block) {
                    Some(of) => taken[of].iter_mut().for_each(|times| *times += 1),
                    None => empty += 1,
                }
            }
            for share in &shares {
                while let Some(of) = share.take(block) {
                    taken[of].iter_mut().for_each(|times| *times += 1);
                }
            }
            prop_assert!(taken.iter().all(|&times| times == 1));
        }
    }
}
