//! Which records live, which of them can be sampled, and when memory is used again.
//!
//! Pure bookkeeping under the store's lock: no memory is touched. Each lane fills chunks in order. A full chunk is *closed*;
//! the oldest closed chunk over all lanes is *retired* (its records leave selection, and so do windows that reach into it)
//! as soon as the others hold `capacity` records; a retired chunk is used again when the gathers that were issued before
//! its retirement have ended. Those are counted by retirement (*epochs*), not by chunk.
//!
//! With c records a chunk, a store has ⌈capacity / c⌉ + lanes + 2 chunks. Closed ones hold less than capacity + c
//! records, so at most ⌈capacity / c⌉ are closed, at most one a lane is open, and whoever needs one finds three that are
//! free or retired: a lane waits for gathers alone, never for another lane.

use super::records::Meta;
use std::collections::VecDeque;

/// What makes a record the first step of a sample: an *item*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Records in front of it that windows reach, as far as its run goes.
    pub(crate) back: u64,
    /// Records behind it that windows reach, unless its run ends.
    pub(crate) forward: u64,
    /// Items begin every so many steps, of a run or of the lane.
    pub(crate) stride: u64,
    pub(crate) by_lane: bool,
    /// Steps that a run must have left, at its end.
    pub(crate) least: u64,
    /// Steps that carry no transition are no items.
    pub(crate) skip_masked: bool,
}

/// What the sampler has to be told, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// Without a priority: the largest so far.
    Insert {
        record: u32,
        priority: Option<f32>,
    },
    Remove {
        record: u32,
    },
    Update {
        record: u32,
        priority: f32,
    },
    /// Everything is gone.
    Clear,
}

/// A gather that may still read what was live when it was issued.
#[derive(Debug)]
#[must_use = "a gather that is never finished keeps chunks from being used again"]
pub(crate) struct Issued {
    epoch: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    lane: u32,
    /// Published records.
    filled: u32,
    /// Its place among the chunks that its lane ever had.
    ordinal: u64,
    /// A save has still to read it, so it is not used again.
    unread: bool,
}

/// Records of one chunk that a save reads: places `from..to` in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) chunk: u32,
    pub(crate) lane: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

impl Span {
    pub(crate) fn len(&self) -> usize {
        (self.to - self.from) as usize
    }
}

#[derive(Clone, Debug, Default)]
struct Lane {
    /// Live and open chunks, oldest first, and the ordinal of the first.
    chunks: VecDeque<u32>,
    first: u64,
    /// Positions count a lane's records, final observations included. The next one's:
    head: u64,
    /// Where the run begins that the next record is part of.
    run: u64,
    /// The first position of this run that was not looked at as an item.
    next_item: u64,
    /// Positions before this one are gone, in whatever chunk.
    live: u64,
    steps: u64,
}

pub(crate) struct Book {
    rules: Rules,
    capacity: u64,
    /// Records a chunk.
    size: u32,
    chunks: Vec<Chunk>,
    lanes: Vec<Lane>,
    free: Vec<u32>,
    /// Full chunks, oldest first.
    closed: VecDeque<u32>,
    /// Retired chunks and the epochs that they ended, oldest first.
    retired: VecDeque<(u32, u64)>,
    /// Records of open and closed chunks.
    held: u64,
    epoch: u64,
    /// Gathers in flight, by the epoch in which they were issued; the first is that of `oldest`.
    in_flight: VecDeque<u32>,
    oldest: u64,
    /// One bit a record.
    items: Vec<u64>,
    item_count: usize,
    pub(crate) changes: Vec<Change>,
}

/// What record numbers of a store depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) capacity: u64,
    pub(crate) chunk: u32,
    pub(crate) chunks: u32,
    pub(crate) lanes: u32,
}

/// Records a chunk, and chunks.
pub(crate) fn chunks(capacity: usize, lanes: usize) -> Option<(u32, u32)> {
    let size = (capacity / lanes.checked_mul(4)?).clamp(1, 64);
    let chunks = capacity.div_ceil(size).checked_add(lanes)?.checked_add(2)?;
    u32::try_from(chunks.checked_mul(size)?).ok()?;
    Some((size as u32, chunks as u32))
}

impl Book {
    pub(crate) fn new(rules: Rules, capacity: usize, size: u32, chunks: u32, lanes: usize) -> Book {
        Book {
            rules,
            capacity: capacity as u64,
            size,
            chunks: vec![Chunk::default(); chunks as usize],
            lanes: vec![Lane::default(); lanes],
            free: (0..chunks).rev().collect(),
            closed: VecDeque::new(),
            retired: VecDeque::new(),
            held: 0,
            epoch: 0,
            in_flight: VecDeque::new(),
            oldest: 0,
            items: vec![0; (chunks as usize * size as usize).div_ceil(64)],
            item_count: 0,
            changes: Vec::new(),
        }
    }

    /// Ordinary memory for one record, for one chunk and for one lane, with the changes that wait; rounded up.
    pub(crate) const fn bytes_beside() -> (usize, usize, usize) {
        (1, size_of::<Chunk>() + 2 * size_of::<u32>() + size_of::<(u32, u64)>(), size_of::<Lane>())
    }

    pub(crate) fn shape(&self) -> Shape {
        let (chunks, lanes) = (self.chunks.len() as u32, self.lanes());
        Shape { capacity: self.capacity, chunk: self.size, chunks, lanes }
    }

    pub(crate) fn lanes(&self) -> u32 {
        self.lanes.len() as u32
    }

    /// Records that can be sampled.
    pub(crate) fn items(&self) -> usize {
        self.item_count
    }

    /// Records in the store that are not retired.
    pub(crate) fn held(&self) -> usize {
        self.held as usize
    }

    pub(crate) fn steps(&self, lane: u32) -> u64 {
        self.lanes[lane as usize].steps
    }

    /// The record that the lane's next one goes to, if the lane has a chunk with room, or gets one now: then `begin` hears
    /// of the new chunk, and of the one before it. `None`: every chunk that is not in use may still be read by a gather.
    pub(crate) fn open(&mut self, lane: u32, begin: impl FnOnce(u32, Option<u32>)) -> Option<u32> {
        let state = &self.lanes[lane as usize];
        let ordinal = state.head / u64::from(self.size);
        if ordinal == state.first + state.chunks.len() as u64 {
            let chunk = self.take_chunk()?;
            let entry = &mut self.chunks[chunk as usize];
            (entry.lane, entry.filled, entry.ordinal) = (lane, 0, ordinal);
            let state = &mut self.lanes[lane as usize];
            begin(chunk, state.chunks.back().copied());
            state.chunks.push_back(chunk);
        }
        self.record(lane, self.lanes[lane as usize].head)
    }

    fn take_chunk(&mut self) -> Option<u32> {
        if let Some(chunk) = self.free.pop() {
            return Some(chunk);
        }
        let &(chunk, epoch) = self.retired.front()?;
        let read = (self.in_flight.is_empty() || self.oldest > epoch) && !self.chunks[chunk as usize].unread;
        if read {
            self.retired.pop_front();
        }
        read.then_some(chunk)
    }

    /// The record at a position of a lane, if its chunk is not retired.
    fn record(&self, lane: u32, position: u64) -> Option<u32> {
        let state = &self.lanes[lane as usize];
        let place = (position / u64::from(self.size)).checked_sub(state.first)?;
        let chunk = state.chunks.get(place as usize)?;
        Some(chunk * self.size + (position % u64::from(self.size)) as u32)
    }

    /// How many records of its run the lane's next one has in front of it.
    pub(crate) fn age(&self, lane: u32) -> u32 {
        let state = &self.lanes[lane as usize];
        u32::try_from(state.head - state.run).unwrap_or(u32::MAX)
    }

    /// The opened record of a lane holds its next step. `look` tells what is known of published records, this one too.
    pub(crate) fn publish_step(&mut self, lane: u32, priority: Option<f32>, look: &dyn Fn(u32) -> Meta) {
        let position = self.advance(lane);
        let state = &mut self.lanes[lane as usize];
        state.steps += 1;
        if position >= state.run + self.rules.forward {
            let item = position - self.rules.forward;
            state.next_item = item + 1;
            self.offer(lane, item, priority, look);
        }
        self.evict(look);
    }

    /// The opened record of a lane holds the final observation of the run that ends here.
    pub(crate) fn publish_final(&mut self, lane: u32, priority: Option<f32>, look: &dyn Fn(u32) -> Meta) {
        let end = self.advance(lane);
        let state = &self.lanes[lane as usize];
        for item in state.next_item.max(state.run)..end {
            if item + self.rules.least <= end {
                self.offer(lane, item, priority, look);
            }
        }
        self.cut(lane);
        self.evict(look);
    }

    /// The lane's run ends without an end: what its windows would still need never comes.
    pub(crate) fn cut(&mut self, lane: u32) {
        let state = &mut self.lanes[lane as usize];
        (state.run, state.next_item) = (state.head, state.head);
    }

    /// Counts a record in, and returns its position.
    fn advance(&mut self, lane: u32) -> u64 {
        let state = &mut self.lanes[lane as usize];
        let position = state.head;
        state.head += 1;
        self.held += 1;
        let chunk = state.chunks[(position / u64::from(self.size) - state.first) as usize];
        let entry = &mut self.chunks[chunk as usize];
        entry.filled += 1;
        // By its place, not by what it holds: a restored one may begin in the middle.
        if (position + 1).is_multiple_of(u64::from(self.size)) {
            self.closed.push_back(chunk);
        }
        position
    }

    /// Makes a position an item, if it may be one.
    fn offer(&mut self, lane: u32, item: u64, priority: Option<f32>, look: &dyn Fn(u32) -> Meta) {
        let state = &self.lanes[lane as usize];
        let first = state.live.max(state.first * u64::from(self.size));
        if state.run.max(item.saturating_sub(self.rules.back)) < first {
            return;
        }
        let Some(record) = self.record(lane, item) else { return };
        let counted = if self.rules.by_lane { look(record).step } else { item - state.run };
        if !counted.is_multiple_of(self.rules.stride) || (self.rules.skip_masked && look(record).flags.masked) {
            return;
        }
        self.items[record as usize / 64] |= 1 << (record % 64);
        self.item_count += 1;
        self.changes.push(Change::Insert { record, priority });
    }

    pub(crate) fn is_item(&self, record: u32) -> bool {
        self.items[record as usize / 64] >> (record % 64) & 1 == 1
    }

    fn remove(&mut self, record: u32) {
        if self.is_item(record) {
            self.items[record as usize / 64] &= !(1 << (record % 64));
            self.item_count -= 1;
            self.changes.push(Change::Remove { record });
        }
    }

    fn evict(&mut self, look: &dyn Fn(u32) -> Meta) {
        while let Some(&chunk) = self.closed.front() {
            if self.held - u64::from(self.chunks[chunk as usize].filled) < self.capacity {
                break;
            }
            self.closed.pop_front();
            self.retire(chunk, look);
        }
    }

    fn retire(&mut self, chunk: u32, look: &dyn Fn(u32) -> Meta) {
        (chunk * self.size..(chunk + 1) * self.size).for_each(|record| self.remove(record));
        let entry = &self.chunks[chunk as usize];
        let (lane, filled, end) = (entry.lane, entry.filled, (entry.ordinal + 1) * u64::from(self.size));
        let state = &mut self.lanes[lane as usize];
        debug_assert_eq!(state.chunks.front(), Some(&chunk), "a lane's chunks are retired in order");
        state.chunks.pop_front();
        state.first += 1;
        self.held -= u64::from(filled);
        let reached = end..self.lanes[lane as usize].head.min(end + self.rules.back);
        for position in reached {
            let Some(record) = self.record(lane, position).filter(|record| self.is_item(*record)) else { continue };
            if position - u64::from(look(record).age).min(self.rules.back) < end {
                self.remove(record);
            }
        }
        self.retired.push_back((chunk, self.epoch));
        self.epoch += 1;
        if self.in_flight.is_empty() {
            self.oldest = self.epoch;
        }
    }

    /// A save of what is live now begins: what it has to read, the oldest first. Those chunks are not used again before
    /// `read`.
    pub(crate) fn begin_save(&mut self) -> Vec<Span> {
        let open = self.lanes.iter().filter_map(|lane| {
            let full = lane.head.is_multiple_of(u64::from(self.size));
            lane.chunks.back().copied().filter(|_| !full)
        });
        let chunks: Vec<u32> = self.closed.iter().copied().chain(open).collect();
        let size = u64::from(self.size);
        let span = |chunk: u32| {
            let entry = &self.chunks[chunk as usize];
            let lane = &self.lanes[entry.lane as usize];
            let first = entry.ordinal * size;
            let (from, to) = (lane.live.clamp(first, first + size), lane.head.min(first + size));
            (from < to).then_some(Span {
                chunk,
                lane: entry.lane,
                from: (from - first) as u32,
                to: (to - first) as u32,
            })
        };
        let spans: Vec<Span> = chunks.into_iter().filter_map(span).collect();
        spans.iter().for_each(|span| self.chunks[span.chunk as usize].unread = true);
        spans
    }

    /// A save has read a chunk.
    pub(crate) fn read(&mut self, chunk: u32) {
        self.chunks[chunk as usize].unread = false;
    }

    /// Whether a gather or a save may still read something.
    pub(crate) fn is_read(&self) -> bool {
        !self.in_flight.is_empty() || self.chunks.iter().any(|chunk| chunk.unread)
    }

    /// The chunks that hold nothing of `spans`, in the order in which they will be taken, the last first.
    pub(crate) fn unused(&self, spans: &[Span]) -> Vec<u32> {
        let mut unused: Vec<u32> = self.retired.iter().rev().map(|&(chunk, _)| chunk).collect();
        unused.extend(&self.free);
        let mut known = vec![false; self.chunks.len()];
        let used = unused.iter().copied().chain(spans.iter().map(|span| span.chunk));
        used.for_each(|chunk| known[chunk as usize] = true);
        // Lanes have these open, and nothing in them that lives.
        unused.extend((0..).zip(known).filter(|(_, known)| !known).map(|(chunk, _)| chunk));
        unused
    }

    /// Forgets everything, also what lanes have open; nothing may be read. `order`: the chunks in the order in which they
    /// are taken from now on, the last first; `None` if it does not matter.
    pub(crate) fn reset(&mut self, order: Option<Vec<u32>>) {
        let (chunks, lanes) = (self.chunks.len() as u32, self.lanes.len());
        let mut fresh = Book::new(self.rules, self.capacity as usize, self.size, chunks, lanes);
        fresh.free = order.unwrap_or(fresh.free);
        (fresh.epoch, fresh.oldest) = (self.epoch + 1, self.epoch + 1);
        fresh.changes.push(Change::Clear);
        *self = fresh;
    }

    /// Where a lane goes on after a reset: at place `slot` of its next chunk, with a record that has `age` records of its
    /// run in front of it, which are gone.
    pub(crate) fn seat(&mut self, lane: u32, slot: u32, age: u32) {
        let size = u64::from(self.size);
        let ordinal = u64::from(age) / size + 1;
        let head = ordinal * size + u64::from(slot);
        let state = &mut self.lanes[lane as usize];
        (state.first, state.head, state.live) = (ordinal, head, head);
        (state.run, state.next_item) = (head - u64::from(age), head); // those in front of it can be no items
    }

    /// The lane's next step has that number.
    pub(crate) fn set_steps(&mut self, lane: u32, steps: u64) {
        self.lanes[lane as usize].steps = steps;
    }

    /// A gather of what is live now begins.
    pub(crate) fn issue(&mut self) -> Issued {
        if self.in_flight.is_empty() {
            self.oldest = self.epoch;
        }
        let place = (self.epoch - self.oldest) as usize;
        if self.in_flight.len() <= place {
            self.in_flight.resize(place + 1, 0);
        }
        self.in_flight[place] += 1;
        Issued { epoch: self.epoch }
    }

    /// A gather has ended.
    pub(crate) fn finish(&mut self, issued: Issued) {
        self.in_flight[(issued.epoch - self.oldest) as usize] -= 1;
        while let Some(0) = self.in_flight.front() {
            self.in_flight.pop_front();
            self.oldest += 1;
        }
    }

    pub(crate) fn has(&self, record: u32) -> bool {
        record / self.size < self.chunks.len() as u32
    }

    /// Queues a new priority of an item.
    pub(crate) fn update(&mut self, record: u32, priority: f32) {
        self.changes.push(Change::Update { record, priority });
    }

    /// Everything leaves selection. Closed chunks are retired; in an open one a lane goes on behind what it has written.
    pub(crate) fn clear(&mut self) {
        self.items.fill(0);
        self.item_count = 0;
        self.changes.clear();
        self.changes.push(Change::Clear);
        while let Some(chunk) = self.closed.pop_front() {
            let entry = &self.chunks[chunk as usize];
            self.held -= u64::from(entry.filled);
            let state = &mut self.lanes[entry.lane as usize];
            state.chunks.pop_front();
            state.first += 1;
            self.retired.push_back((chunk, self.epoch));
        }
        self.epoch += 1;
        if self.in_flight.is_empty() {
            self.oldest = self.epoch;
        }
        self.lanes.iter_mut().for_each(|lane| lane.live = lane.head);
    }
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Book").field("held", &self.held).field("items", &self.item_count).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
