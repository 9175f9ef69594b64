//! Rows of a known shape and content, where they lie in a batch, and the threads that write them into a feed.

use super::driver::Failure;
use super::kernels::weight_of_rows;
use pinring::{COLUMN_ALIGN, Column, Feed, Leaf, SLOT_ALIGN, Sample, Step, Writer};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Batches of `rows` rows of `leaves` leaves of `words` 32-bit words each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub rows: usize,
    pub leaves: usize,
    pub words: usize,
}

/// The handles of the leaves and columns of a [`Shape`].
#[derive(Clone, Debug)]
pub struct Handles {
    pub leaves: Vec<Leaf<u32>>,
    pub columns: Vec<Column<u32>>,
}

impl Shape {
    /// 512 rows of 67 KB in 44 leaves: structured observations.
    pub const STRUCTURED: Shape = Shape { rows: 512, leaves: 44, words: 381 };
    /// 512 rows of 28 KB in 4 leaves: pixels.
    pub const PIXELS: Shape = Shape { rows: 512, leaves: 4, words: 1764 };

    /// Batches of about so many bytes: exactly, where they can be divided.
    pub fn of_bytes(bytes: usize, leaves: usize, rows: usize) -> Shape {
        Shape { rows, leaves, words: (bytes / (4 * leaves * rows)).max(1) }
    }

    pub fn declare(&self) -> (Sample, Handles) {
        let mut step = Step::new();
        let leaves: Vec<_> = (0..self.leaves).map(|i| step.leaf::<u32>(&format!("leaf{i}"), &[self.words])).collect();
        let mut sample = Sample::step(step);
        let columns = leaves.iter().map(|&leaf| sample.all(leaf)).collect();
        (sample, Handles { leaves, columns })
    }

    pub fn column_words(&self) -> usize {
        self.rows * self.words
    }

    /// Where column `leaf` begins in a batch.
    pub fn column_offset(&self, leaf: usize) -> usize {
        leaf * (self.column_words() * 4).next_multiple_of(COLUMN_ALIGN)
    }

    /// Bytes of a batch, as the ring has it: what one copy moves.
    pub fn batch_bytes(&self) -> usize {
        self.column_offset(self.leaves).next_multiple_of(SLOT_ALIGN)
    }

    /// Fills memory laid out like a batch with the rows of lanes 0, 1, … at step `step`.
    pub fn fill(&self, memory: &mut [u8], tag: u64, step: u64) {
        for leaf in 0..self.leaves {
            let column = &mut memory[self.column_offset(leaf)..][..self.column_words() * 4];
            for (row, bytes) in column.chunks_exact_mut(self.words * 4).enumerate() {
                let word = stamp(tag, leaf, row as u64, step).to_ne_bytes();
                bytes.chunks_exact_mut(4).for_each(|place| place.copy_from_slice(&word));
            }
        }
    }

    /// The weight of column `leaf` of a batch with these rows: (lane, step).
    pub fn column_weight(&self, tag: u64, leaf: usize, rows: impl Iterator<Item = (u64, u64)>) -> u64 {
        weight_of_rows(rows.map(|(lane, step)| stamp(tag, leaf, lane, step)), self.words)
    }
}

/// What every word of a leaf of a row holds.
pub fn stamp(tag: u64, leaf: usize, lane: u64, step: u64) -> u32 {
    let mut z = (tag << 56) ^ ((leaf as u64) << 40) ^ (lane << 28) ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z >> 32) as u32
}

/// What writers put into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Words that tell leaf, lane and step.
    Stamped,
    /// The same few rows again and again, out of the writer's cache: as cheap as a commit gets.
    Cached,
    /// Rows that come from memory: nothing of them is in a cache.
    Memory,
    /// Nothing: the rows that lie in the ring already are committed as they are, so that only the feed is at work.
    There,
}

/// What [`Content::Memory`] rotates over: more than the caches of a core, and of all cores together.
const MEMORY_BYTES: usize = 64 << 20;

#[derive(Debug)]
struct Orders {
    /// Batches that may be written in all.
    batches: u64,
    content: Content,
    over: bool,
}

/// Threads that write rows, each its share of every batch, when told to.
#[derive(Debug)]
pub struct Writers {
    orders: Arc<(Mutex<Orders>, Condvar)>,
    threads: Vec<JoinHandle<Result<(), Failure>>>,
}

impl Writers {
    /// Of a feed whose batches have `shape`; `threads` at most, as many as share a batch evenly. Each has 16 lanes that step
    /// together, as an environment vector has them, if its share can be divided so.
    pub fn start(feed: &Feed, shape: Shape, handles: &Handles, tag: u64, threads: usize) -> Result<Writers, Failure> {
        Writers::with(feed, shape, handles, tag, (threads, 16))
    }

    /// One thread with a lane for each row of a batch: a commit is a batch. For [`Content::There`].
    pub fn wide(feed: &Feed, shape: Shape, handles: &Handles, tag: u64) -> Result<Writers, Failure> {
        Writers::with(feed, shape, handles, tag, (1, shape.rows))
    }

    fn with(
        feed: &Feed,
        shape: Shape,
        handles: &Handles,
        tag: u64,
        (threads, most_lanes): (usize, usize),
    ) -> Result<Writers, Failure> {
        let threads = (1..=threads.min(shape.rows)).rev().find(|n| shape.rows.is_multiple_of(*n)).unwrap_or(1);
        let share = shape.rows / threads;
        let lanes = (1..=share.min(most_lanes)).rev().find(|n| share.is_multiple_of(*n)).unwrap_or(1);
        let orders = Orders { batches: 0, content: Content::Stamped, over: false };
        let orders = Arc::new((Mutex::new(orders), Condvar::new()));
        let threads = (0..threads).map(|_| {
            let mut hand = Hand {
                writer: feed.writer(lanes)?,
                leaves: handles.leaves.clone(),
                shape,
                tag,
                lanes,
                step: 0,
                row: vec![7; lanes * shape.words],
                memory: Vec::new(),
                at: 0,
            };
            let orders = orders.clone();
            Ok(std::thread::spawn(move || {
                let commits = share / lanes;
                let mut done = 0;
                loop {
                    let content = {
                        let mut state = orders.0.lock().unwrap_or_else(PoisonError::into_inner);
                        while !state.over && done >= state.batches {
                            state = orders.1.wait(state).unwrap_or_else(PoisonError::into_inner);
                        }
                        if state.over {
                            return Ok(());
                        }
                        state.content
                    };
                    for _ in 0..commits {
                        if !hand.commit(content)? {
                            return Ok(()); // the feed was stopped
                        }
                    }
                    done += 1;
                }
            }))
        });
        let threads = threads.collect::<Result<_, Failure>>()?;
        Ok(Writers { orders, threads })
    }

    /// Lets them write so many more batches.
    pub fn order(&self, batches: u64, content: Content) {
        let mut state = self.orders.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.batches = state.batches.saturating_add(batches);
        state.content = content;
        drop(state);
        self.orders.1.notify_all();
    }

    /// Waits for the threads to end, after the feed was stopped.
    pub fn join(mut self) -> Result<(), Failure> {
        self.end();
        self.threads.drain(..).try_for_each(|thread| thread.join().map_err(|_| "a writer panicked")?)
    }

    fn end(&self) {
        self.orders.0.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.orders.1.notify_all();
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.end();
    }
}

/// One writing thread's things.
struct Hand {
    writer: Writer,
    leaves: Vec<Leaf<u32>>,
    shape: Shape,
    tag: u64,
    lanes: usize,
    step: u64,
    row: Vec<u32>,
    memory: Vec<u32>,
    at: usize,
}

impl Hand {
    /// One step of every lane; false if the feed is closed.
    fn commit(&mut self, content: Content) -> Result<bool, Failure> {
        let first = self.writer.lanes().start;
        if content == Content::Memory && self.memory.is_empty() {
            self.memory = vec![9; (MEMORY_BYTES / 4).max(self.row.len() * 4)];
        }
        let Ok(mut step) = self.writer.step() else { return Ok(false) };
        for (index, &leaf) in self.leaves.iter().enumerate() {
            match content {
                Content::Stamped => {
                    for (lane, values) in self.row.chunks_exact_mut(self.shape.words).enumerate() {
                        values.fill(stamp(self.tag, index, (first + lane) as u64, self.step));
                    }
                    step.put(leaf, &self.row)?;
                }
                Content::Cached => step.put(leaf, &self.row)?,
                Content::Memory => {
                    let values = self.lanes * self.shape.words;
                    if self.at + values > self.memory.len() {
                        self.at = 0;
                    }
                    step.put(leaf, &self.memory[self.at..][..values])?;
                    self.at += values;
                }
                Content::There => {
                    step.overwrite(leaf);
                }
            }
        }
        self.step += 1;
        Ok(step.commit().is_ok())
    }
}
