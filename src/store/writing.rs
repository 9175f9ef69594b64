//! The writers' side: opening records, putting leaves, publishing.

use super::records::{Flags, Meta};
use super::{State, Store, wait};
use crate::error::Closed;
use crate::memory::Ring;
use crate::metrics::WriterCounters;
use crate::select::PaceWait;
use crate::sync::{Padded, Patience, lock};
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// So many changes may wait for the next selection; then a writer tells them to the sampler itself.
const MOST_CHANGES: usize = 1 << 16;

/// Why a writer does not get on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NoChunk {
    /// The learner is behind.
    Pace(PaceWait),
    /// The oldest steps are still being gathered.
    Gathering,
    Closed(Closed),
}

/// The record that one lane's next step, or its final observation, goes to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Opened {
    pub(crate) record: u32,
    /// Which step of its lane it will be.
    pub(crate) step: u64,
}

impl Opened {
    /// The one that lies `steps` behind it in the same chunk.
    pub(crate) fn behind(self, steps: u32) -> Opened {
        Opened { record: self.record + steps, step: self.step + u64::from(steps) }
    }
}

impl Store {
    /// Waits until the pace lets a step begin, and opens a record for it in each of the lanes from `first` on.
    pub(crate) fn begin(
        &self,
        first: u32,
        opened: &mut [Opened],
        patience: Patience,
        counters: &Padded<WriterCounters>,
    ) -> Result<(), NoChunk> {
        self.open_when(true, first, opened, patience, counters).map(drop)
    }

    /// Opens records, whatever the pace says; waits for gathers that still read the chunks which are due. Those that were
    /// opened already stay as they are. The mapping lives as long as what this returns.
    pub(crate) fn open(
        &self,
        first: u32,
        opened: &mut [Opened],
        counters: &Padded<WriterCounters>,
    ) -> Result<Arc<Ring>, Closed> {
        match self.open_when(false, first, opened, Patience::Forever, counters) {
            Ok(ring) => Ok(ring),
            Err(NoChunk::Closed(closed)) => Err(closed),
            Err(NoChunk::Pace(_) | NoChunk::Gathering) => unreachable!("a wait without end does not run out"),
        }
    }

    fn open_when(
        &self,
        paced: bool,
        first: u32,
        opened: &mut [Opened],
        patience: Patience,
        counters: &Padded<WriterCounters>,
    ) -> Result<Arc<Ring>, NoChunk> {
        let mut state = lock(&self.state);
        loop {
            if let Some(closed) = &state.closed {
                return Err(NoChunk::Closed(closed.clone()));
            }
            let selecting = || if state.selecting { state.pacer.waits_for_selection() } else { None };
            let waits = state.pacer.insert_waits().or_else(selecting).filter(|_| paced && !self.needs_steps(&state));
            let why = match waits {
                Some(pace) => NoChunk::Pace(pace),
                None if state.loading => NoChunk::Gathering,
                None => match self.try_open(&mut state, first, opened) {
                    Some(ring) => return Ok(ring),
                    None => NoChunk::Gathering,
                },
            };
            let left = patience.left();
            if left.is_some_and(|left| left.is_zero()) {
                return Err(why);
            }
            let begun = Instant::now();
            state.writers_waiting += 1;
            state = wait(&self.for_writers, state, left);
            state.writers_waiting -= 1;
            if state.saving && why == NoChunk::Gathering {
                state.longest_save_wait = state.longest_save_wait.max(begun.elapsed());
            }
            counters.block(begun.elapsed().as_nanos() as u64);
        }
    }

    fn try_open(&self, state: &mut State, first: u32, opened: &mut [Opened]) -> Option<Arc<Ring>> {
        for (opened, lane) in opened.iter_mut().zip(first..) {
            opened.record = state.book.open(lane, |chunk, from| self.records.begin_chunk(chunk, from))?;
            opened.step = state.book.steps(lane);
        }
        state.ring.clone()
    }

    /// Opens up to `most` consecutive records of one lane, whatever the pace says; returns the first, and how many.
    pub(crate) fn open_run(
        &self,
        lane: u32,
        most: usize,
        counters: &Padded<WriterCounters>,
    ) -> Result<(Arc<Ring>, Opened, u32), Closed> {
        let mut opened = [Opened::default()];
        let ring = self.open(lane, &mut opened, counters)?;
        let count = u32::try_from(most).unwrap_or(u32::MAX).min(self.records.left_in_chunk(opened[0].record));
        Ok((ring, opened[0], count))
    }

    /// Publishes `count` opened records of one lane, from `first` on.
    #[allow(unsafe_code)]
    pub(crate) fn publish_run(
        &self,
        lane: u32,
        first: Opened,
        count: u32,
        version: u64,
        flags: &dyn Fn(u32) -> Flags,
    ) -> Result<(), Closed> {
        let mut state = self.lock_open()?;
        for step in 0..count {
            let book = &mut state.book;
            let meta = Meta { step: book.steps(lane), version, age: book.age(lane), lane, flags: flags(step) };
            // SAFETY: opened by this lane's writer, not published, and the lock is held.
            unsafe { self.records.set_meta(first.record + step, meta) };
            // SAFETY: the book looks at published records alone, under the lock.
            book.publish_step(lane, None, &|record| unsafe { self.records.meta(record) });
            state.finals_due += usize::from(self.has_final(meta.flags));
        }
        state.pacer.insert(u64::from(count));
        self.published(state);
        Ok(())
    }

    /// Copies one leaf into an opened record, if it is kept on that step; `None` zeroes it.
    ///
    /// # Safety
    /// `from` holds the leaf's value, outside of the ring; the record was opened for a lane of the caller's and not
    /// published, and the caller holds the ring that `open` returned.
    #[inline]
    #[allow(unsafe_code)]
    pub(crate) unsafe fn put(&self, opened: Opened, leaf: usize, from: Option<*const u8>) {
        let bytes = self.layout.leaves[leaf].bytes();
        let Some(to) = self.records.place(opened.record, leaf, opened.step) else { return };
        // SAFETY: an opened record and its chunk's cells for that step are its lane's alone (invariant 2), and a leaf lies
        // inside of them by the layout.
        unsafe {
            match from {
                Some(from) => std::ptr::copy_nonoverlapping(from, to, bytes),
                None => std::ptr::write_bytes(to, 0, bytes),
            }
        }
    }

    /// Publishes the opened step of each of the lanes from `first` on: `of` tells its flags and its writer's priority. A
    /// step of which it tells nothing is not kept.
    #[allow(unsafe_code)]
    pub(crate) fn publish_steps(
        &self,
        first: u32,
        opened: &[Opened],
        version: u64,
        of: &dyn Fn(usize) -> Option<(Flags, Option<f32>)>,
    ) -> Result<(), Closed> {
        let mut state = self.lock_open()?;
        for (index, opened) in opened.iter().enumerate() {
            let (lane, book) = (first + index as u32, &mut state.book);
            let Some((flags, priority)) = of(index) else {
                book.cut(lane);
                continue;
            };
            let meta = Meta { step: book.steps(lane), version, age: book.age(lane), lane, flags };
            // SAFETY: opened by this lane's writer, not published, and the lock is held.
            unsafe { self.records.set_meta(opened.record, meta) };
            // SAFETY: the book looks at published records alone, under the lock.
            book.publish_step(lane, priority, &|record| unsafe { self.records.meta(record) });
            state.finals_due += usize::from(self.has_final(flags));
            state.pacer.insert(1);
        }
        self.published(state);
        Ok(())
    }

    /// Publishes the final observation of a lane, whose run ends with it.
    #[allow(unsafe_code)]
    pub(crate) fn publish_final(&self, lane: u32, opened: Opened, priority: Option<f32>) -> Result<(), Closed> {
        let mut state = self.lock_open()?;
        let book = &mut state.book;
        let flags = Flags { last: true, ..Flags::default() };
        let meta = Meta { step: book.steps(lane), version: 0, age: book.age(lane), lane, flags };
        // SAFETY: as for a step.
        unsafe { self.records.set_meta(opened.record, meta) };
        // SAFETY: as for a step.
        book.publish_final(lane, priority, &|record| unsafe { self.records.meta(record) });
        state.finals_due -= 1;
        self.published(state);
        Ok(())
    }

    /// Whether such a step is followed by a final observation, in the same commit.
    fn has_final(&self, flags: Flags) -> bool {
        self.layout.within_episode && flags.ends()
    }

    /// The lanes' runs end without an end: at `abandon`, and when writers come and go.
    pub(crate) fn cut(&self, lanes: Range<usize>) {
        let mut state = lock(&self.state);
        let lanes = lanes.map(|lane| lane as u32);
        if state.loading {
            state.cuts.extend(lanes); // what is being loaded must not be cut in two
        } else {
            lanes.for_each(|lane| state.book.cut(lane));
        }
    }

    /// Observation leaves that samples read behind an episode's last step.
    pub(crate) fn reads_final(&self) -> Vec<usize> {
        self.plan.reads_final.clone()
    }

    fn lock_open(&self) -> Result<MutexGuard<'_, State>, Closed> {
        let state = lock(&self.state);
        match &state.closed {
            Some(closed) => Err(closed.clone()),
            None => Ok(state),
        }
    }

    /// Wakes the sampling if it waits, and keeps the changes that wait for it few. What was published may also have pushed out
    /// items that a batch needs: then every writer that waits for the learner goes on, not this one alone.
    pub(super) fn published(&self, state: MutexGuard<'_, State>) {
        let (waits, many) = (state.sampling_waits, state.book.changes.len() >= MOST_CHANGES);
        let writers = state.writers_waiting > 0 && self.needs_steps(&state);
        drop(state);
        if waits {
            self.for_sampling.notify_one();
        }
        if writers {
            self.for_writers.notify_all();
        }
        if many {
            let mut selector = lock(&self.selector);
            let changes = lock(&self.state).take_changes();
            selector.apply_if_whole(&changes);
        }
    }
}
