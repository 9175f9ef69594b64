//! The step store: each step once, sampled as windows.
//!
//! Owns the records (`records`), which of them live (`book`), what samples read of them (`plan`), the copies into a batch
//! (`gather`), the sampler (`selector`), both waits (writers for room or for the pace, the sampling for items or for
//! the pace), and the file it is saved in (`saving`, `loading`, `container`). What it does not do: hold batch slots (see `intake`), or run on a thread of its own.
//!
//! A record is published by its lane's writer under the store's lock, and from then on stays as it is until its chunk is
//! retired and every gather that was issued before has ended (invariant 3). Order of locks: `selector`, then `state`.

mod book;
mod config;
mod container;
mod gather;
mod loading;
mod mixed;
mod plan;
mod records;
mod sampling;
mod saving;
mod selector;
mod writing;

pub(crate) use config::{StoreConfig, StorePlan};
pub(crate) use gather::{Scratch, Target};
pub(crate) use mixed::Mixed;
pub(crate) use plan::{Move, Plan};
pub(crate) use records::Flags;
pub(crate) use sampling::{NoItems, OpenGather, Selection, Wanted};
pub(crate) use selector::Selector;
pub(crate) use writing::{NoChunk, Opened};
pub use {loading::Loaded, saving::CheckpointError, saving::Saved};
#[cfg(test)]
pub(crate) use {plan::NOTHING, records::RecordLayout};

use crate::error::Closed;
use crate::layout::Layout;
use crate::memory::Ring;
use crate::select::pace::Pacer;
use crate::sync::lock;
use book::Book;
use records::Records;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) layout: Arc<Layout>,
    pub(crate) plan: Plan,
    records: Records,
    selector: Mutex<Selector>,
    state: Mutex<State>,
    /// Writers that wait for a chunk or for the pace.
    for_writers: Condvar,
    /// The sampling thread, which waits for items or for the pace.
    for_sampling: Condvar,
    /// So many items there must be before a batch is asked for, while somebody writes.
    least_items: usize,
    /// So many items there are once the store is full, whatever is written.
    sure_items: usize,
    /// Whether the sampler has any use for new priorities.
    pub(crate) has_priorities: bool,
    stale_keys: AtomicU64,
}

#[derive(Debug)]
struct State {
    book: Book,
    pacer: Pacer,
    /// Steps that ended an episode and whose final observations are still to come: their commit is under way.
    finals_due: usize,
    /// Keeps the mapping while records can be touched; given up when the feed is stopped or dropped.
    ring: Option<Arc<Ring>>,
    closed: Option<Closed>,
    /// Nobody writes any more.
    ended: bool,
    /// How often it was cleared.
    clears: u64,
    writers_waiting: usize,
    sampling_waits: bool,
    /// The sampler is being asked: how many of the rows that are reserved for it it has is not known yet.
    selecting: bool,
    /// The sampler had nothing to offer, and has been told of nothing since.
    refused: bool,
    /// A save or a load is under way.
    saving: bool,
    loading: bool,
    /// Lanes whose runs end with the load, whatever becomes of it: they got a writer meanwhile, or lost an episode.
    cuts: BTreeSet<u32>,
    /// How long a writer has waited at the most since the save began.
    longest_save_wait: Duration,
}

impl State {
    /// What the sampler has to be told, to be told now.
    fn take_changes(&mut self) -> Vec<book::Change> {
        let changes = std::mem::take(&mut self.book.changes);
        self.refused &= changes.is_empty();
        changes
    }
}

impl Store {
    /// A store in the ring's memory from slot `first_slot` on.
    pub(crate) fn new(config: StoreConfig, layout: Arc<Layout>, ring: Arc<Ring>, first_slot: usize) -> Store {
        let StoreConfig { size, plan, record_layout, selector, pacer, least_items, sure_items } = config;
        let records = Records::new(record_layout, ring.slot(first_slot), size.chunk, size.chunks);
        let book = Book::new(plan.rules, size.capacity, size.chunk, size.chunks, size.lanes);
        let state = State {
            book,
            pacer,
            finals_due: 0,
            ring: Some(ring),
            closed: None,
            ended: false,
            clears: 0,
            writers_waiting: 0,
            sampling_waits: false,
            selecting: false,
            refused: false,
            saving: false,
            loading: false,
            cuts: BTreeSet::new(),
            longest_save_wait: Duration::ZERO,
        };
        Store {
            layout,
            plan,
            records,
            has_priorities: selector.sampler.has_priorities(),
            selector: Mutex::new(selector),
            state: Mutex::new(state),
            for_writers: Condvar::new(),
            for_sampling: Condvar::new(),
            least_items,
            sure_items,
            stale_keys: AtomicU64::new(0),
        }
    }

    /// Closes both sides; whoever waits hears why. The first reason stays. What is stored can still be saved until `let_go`.
    pub(crate) fn close(&self, reason: Closed) {
        lock(&self.state).closed.get_or_insert(reason);
        self.for_writers.notify_all();
        self.for_sampling.notify_all();
    }

    /// Gives up the memory, once it is closed.
    pub(crate) fn let_go(&self) {
        let ring = lock(&self.state).ring.take();
        drop(ring); // perhaps the last share: unmapping takes long
    }

    /// Nobody writes any more.
    pub(crate) fn end(&self) {
        lock(&self.state).ended = true;
        self.for_sampling.notify_all();
    }

    /// Writers that wait.
    pub(crate) fn writers_waiting(&self) -> usize {
        lock(&self.state).writers_waiting
    }

    /// Tells the sampler what has changed.
    fn settle(&self) -> MutexGuard<'_, Selector> {
        let mut selector = lock(&self.selector);
        let changes = lock(&self.state).take_changes();
        selector.apply(&changes);
        selector
    }
}

fn wait<'a>(condvar: &Condvar, state: MutexGuard<'a, State>, left: Option<Duration>) -> MutexGuard<'a, State> {
    match left {
        None => condvar.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
        Some(left) => condvar.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0,
    }
}
