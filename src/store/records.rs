//! Stored steps as bytes, and what the host knows of each.
//!
//! A *record* is one step of one lane, or the final observation of an episode: the step's leaves at offsets that are
//! multiples of 16 bytes, one behind the other in the order of declaration, a record's length being a multiple of 16 too.
//! Records lie one behind the other from the store's first byte, so record r begins at `r × record_bytes`. A *chunk* is
//! `chunk` consecutive records of one lane in order; lanes go on in another chunk, wherever that lies: `before` and
//! `after` follow a lane.
//!
//! A leaf that is kept on every k-th step of a lane lies elsewhere, in a *cell* for each step that may keep one: a chunk of
//! c records has ⌈c / k⌉ of them. A cell is as many records long as it takes, and cells lie behind the records, so what
//! reads a record reads a cell by the same arithmetic: only the record's number is another. What it does not do: decide which records live (see `book`).

use crate::schema::{LeafInfo, SchemaError};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Leaves begin at multiples of this many bytes within a record, and records end there: one vector load.
pub(crate) const RECORD_ALIGN: usize = 16;

/// A cache line, and how much of a record is read ahead of its copy.
const LINE: usize = 64;
const MOST_TOUCHED: usize = 1024;

/// Where the leaves lie in a record.
#[derive(Clone, Debug)]
pub(crate) struct RecordLayout {
    /// Of each leaf, in the order of declaration: its offset in the record or the cell.
    pub(crate) offsets: Vec<usize>,
    pub(crate) bytes: usize,
    /// Of each leaf that is kept on some steps only.
    pub(crate) sparse: Vec<Option<Sparse>>,
}

/// The cells of one leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sparse {
    /// On every so many steps.
    pub(crate) every: u64,
    /// Records a cell.
    records: u32,
    /// Cells a chunk; set with the first record when the store's size is known.
    cells: u32,
    first: u32,
}

impl Sparse {
    /// The record that the cell of a lane's step begins at, if the leaf is kept on that step. `chunk` is the chunk that the
    /// step lies in: kept steps of one chunk are consecutive multiples, no more than it has cells.
    #[inline]
    pub(crate) fn cell(&self, chunk: u32, step: u64) -> Option<u32> {
        let place = (step / self.every % u64::from(self.cells)) as u32;
        step.is_multiple_of(self.every).then_some(self.first + (chunk * self.cells + place) * self.records)
    }
}

impl RecordLayout {
    pub(crate) fn new(leaves: &[LeafInfo]) -> Result<RecordLayout, SchemaError> {
        let (mut offsets, mut end) = (Vec::new(), 0usize);
        for leaf in leaves {
            // Places and lengths within a record or a cell are counted in 32 bits.
            let begin = if leaf.every > 1 { 0 } else { end };
            offsets.push(begin);
            let next = begin.checked_add(leaf.bytes()).and_then(|end| end.checked_next_multiple_of(RECORD_ALIGN));
            let next = next
                .filter(|&end| u32::try_from(end).is_ok())
                .ok_or_else(|| SchemaError::Overflow { what: format!("a stored step up to leaf `{}`", leaf.name) })?;
            end = if leaf.every > 1 { end } else { next };
        }
        // A step of nothing but leaves that are kept on some steps still counts.
        let bytes = end.max(RECORD_ALIGN);
        let sparse = |leaf: &LeafInfo| {
            let records = leaf.bytes().div_ceil(bytes).try_into().unwrap_or(u32::MAX);
            (leaf.every > 1).then_some(Sparse { every: leaf.every as u64, records, cells: 0, first: 0 })
        };
        Ok(RecordLayout { offsets, bytes, sparse: leaves.iter().map(sparse).collect() })
    }

    /// Places the cells behind `chunks` chunks of `chunk` records; returns all records, cells included.
    pub(crate) fn place_cells(&mut self, chunk: u32, chunks: u32) -> Option<u32> {
        let mut end = chunk.checked_mul(chunks)?;
        for sparse in self.sparse.iter_mut().flatten() {
            sparse.cells = u64::from(chunk).div_ceil(sparse.every) as u32;
            sparse.first = end;
            let cells = chunks.checked_mul(sparse.cells)?;
            end = end.checked_add(cells.checked_mul(sparse.records)?)?;
        }
        Some(end)
    }
}

/// What the host knows of one record. It never lies across two cache lines: selected records are anywhere, and each line of
/// them is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(32))]
pub(crate) struct Meta {
    /// Counts the lane's stored steps, from 0. A final observation has the number of the step that comes next.
    pub(crate) step: u64,
    /// The version of the weights that the step was acted with.
    pub(crate) version: u64,
    /// Records of this run (the stretch that windows never leave) in front of it; more than 2³² count as that.
    pub(crate) age: u32,
    pub(crate) lane: u32,
    pub(crate) flags: Flags,
}

/// What a writer said of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) terminated: bool,
    pub(crate) truncated: bool,
    /// It carries no transition.
    pub(crate) masked: bool,
    /// Its observation is the first of an episode.
    pub(crate) first: bool,
    /// It is no step, but the final observation of the episode in front of it.
    pub(crate) last: bool,
}

impl Flags {
    pub(crate) fn ends(self) -> bool {
        self.terminated || self.truncated
    }
}

/// Every record of a store, as addresses.
#[derive(Debug)]
pub(crate) struct Records {
    base: NonNull<u8>,
    pub(crate) layout: RecordLayout,
    /// Records a chunk.
    chunk: u32,
    metas: Box<[UnsafeCell<Meta>]>,
    /// Of each chunk, the one that its lane came from and the one that it went on in.
    links: Box<[[AtomicU32; 2]]>,
    /// Of each chunk, how often it was begun: part of keys.
    generations: Box<[AtomicU32]>,
}

// SAFETY: `base` is only followed, and a meta only touched, by a writer for records that it has opened and not published,
// which are its lane's alone, or by a gather for published records that are not reused before it ends (invariant 3).
unsafe impl Send for Records {}
// SAFETY: as above; a shared `Records` gives no access by itself, each access is an `unsafe fn` with that duty.
unsafe impl Sync for Records {}

impl Records {
    /// `base` is the store's first byte, of `chunks × chunk` records.
    pub(crate) fn new(layout: RecordLayout, base: NonNull<u8>, chunk: u32, chunks: u32) -> Records {
        let metas = (0..chunk as usize * chunks as usize).map(|_| UnsafeCell::default()).collect();
        let links = (0..chunks).map(|_| [AtomicU32::new(0), AtomicU32::new(0)]).collect();
        let generations = (0..chunks).map(|_| AtomicU32::new(0)).collect();
        Records { base, layout, chunk, metas, links, generations }
    }

    /// Ordinary memory for one record and for one chunk.
    pub(crate) const fn bytes_beside() -> (usize, usize) {
        (size_of::<Meta>(), size_of::<[AtomicU32; 3]>())
    }

    /// The first byte of a record. Following it is up to the caller's right to the record.
    #[inline]
    pub(crate) fn address(&self, record: u32) -> *mut u8 {
        self.base.as_ptr().wrapping_add(record as usize * self.layout.bytes)
    }

    /// # Safety
    /// The record is opened by the caller's lane and not published, and the caller holds the store's lock.
    pub(crate) unsafe fn set_meta(&self, record: u32, meta: Meta) {
        // SAFETY: nobody reads the meta of a record that was not published (invariant 3).
        unsafe { *self.metas[record as usize].get() = meta }
    }

    /// # Safety
    /// The record is published, and the caller holds the store's lock or a gather that was issued while it was live.
    #[inline]
    pub(crate) unsafe fn meta(&self, record: u32) -> Meta {
        // SAFETY: it was written before it was published, and is not reused while a gather may read it (invariant 3).
        unsafe { *self.metas[record as usize].get() }
    }

    /// Reads what brings a record's meta into the caches and, `with_bytes`, its first lines; longer records go on by
    /// themselves. What it returns is of no meaning.
    ///
    /// # Safety
    /// As [`meta`](Records::meta).
    #[inline]
    pub(crate) unsafe fn touch(&self, record: u32, with_bytes: bool) -> u64 {
        // SAFETY: the caller's duty.
        let mut touched = unsafe { self.meta(record) }.step;
        if with_bytes {
            for line in (0..self.layout.bytes.min(MOST_TOUCHED)).step_by(LINE) {
                // SAFETY: within the record, which stays as it is for the caller (invariant 3).
                touched ^= u64::from(unsafe { self.address(record).add(line).read() });
            }
        }
        touched
    }

    /// A lane begins chunk `chunk`, coming from `from`. Nothing of the chunk is published, and no gather reads it.
    pub(crate) fn begin_chunk(&self, chunk: u32, from: Option<u32>) {
        // Readers come through the store's lock, which is held here: no ordering of their own is needed.
        let generation = &self.generations[chunk as usize];
        generation.store(generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if let Some(from) = from {
            self.links[from as usize][1].store(chunk, Ordering::Relaxed);
            self.links[chunk as usize][0].store(from, Ordering::Relaxed);
        }
    }

    /// How often the chunk of this record was begun. It stays as long as a gather may read the record.
    pub(crate) fn generation(&self, record: u32) -> u32 {
        self.generations[(record / self.chunk) as usize].load(Ordering::Relaxed)
    }

    /// The first record of a chunk.
    pub(crate) fn first(&self, chunk: u32) -> u32 {
        chunk * self.chunk
    }

    /// The place of a record in its chunk.
    pub(crate) fn slot(&self, record: u32) -> u32 {
        record % self.chunk
    }

    /// Records from this one to the end of its chunk.
    pub(crate) fn left_in_chunk(&self, record: u32) -> u32 {
        self.chunk - record % self.chunk
    }

    /// The chunk that a record lies in.
    #[inline]
    pub(crate) fn chunk_of(&self, record: u32) -> u32 {
        record / self.chunk
    }

    /// Where a leaf of a lane's step lies: `None` if it is not kept on this one.
    #[inline]
    pub(crate) fn place(&self, record: u32, leaf: usize, step: u64) -> Option<*mut u8> {
        let record = match &self.layout.sparse[leaf] {
            None => record,
            Some(sparse) => sparse.cell(record / self.chunk, step)?,
        };
        Some(self.address(record).wrapping_add(self.layout.offsets[leaf]))
    }

    /// The lane's record in front of this one, which must be published and live or in a gather's hands.
    #[inline]
    pub(crate) fn before(&self, record: u32) -> u32 {
        match record % self.chunk {
            0 => self.links[(record / self.chunk) as usize][0].load(Ordering::Relaxed) * self.chunk + self.chunk - 1,
            _ => record - 1,
        }
    }

    /// The lane's record behind this one; as `before`.
    #[inline]
    pub(crate) fn after(&self, record: u32) -> u32 {
        match record % self.chunk + 1 == self.chunk {
            true => self.links[(record / self.chunk) as usize][1].load(Ordering::Relaxed) * self.chunk,
            false => record + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Step;

    #[test]
    fn leaves_lie_at_multiples_of_sixteen_bytes() {
        let mut step = Step::new();
        step.observation::<u8>("frame", &[17]);
        step.leaf::<f32>("reward", &[]);
        step.leaf::<f64>("big", &[2]);
        let layout = RecordLayout::new(&step.leaves).unwrap();
        assert_eq!((layout.offsets, layout.bytes), (vec![0, 32, 48], 64));
    }

    #[test]
    fn kept_steps_have_cells_of_their_own() {
        let mut step = Step::new();
        step.observation::<u8>("frame", &[16]);
        let state = step.leaf::<f32>("state", &[10]); // three records
        step.every(state, 3);
        let mut layout = RecordLayout::new(&step.leaves).unwrap();
        assert_eq!((layout.bytes, layout.place_cells(4, 5)), (16, Some(20 + 5 * 2 * 3)));
        let sparse = layout.sparse[1].unwrap();
        // Whatever step a chunk begins with, the steps it keeps have different cells inside the store.
        for (chunk, first) in [(0, 0), (3, 7), (4, 5)] {
            let cells: Vec<_> = (first..first + 4).filter_map(|step| sparse.cell(chunk, step)).collect();
            assert_eq!(cells.len(), (first..first + 4).filter(|step| step % 3 == 0).count());
            assert!(cells.iter().all(|cell| (20 + chunk * 6..20 + chunk * 6 + 4).contains(cell)), "{cells:?}");
            assert!(cells.windows(2).all(|pair| pair[0] != pair[1]));
        }
    }

    #[test]
    fn a_lane_is_followed_from_chunk_to_chunk() {
        let layout = RecordLayout { offsets: vec![0], bytes: 16, sparse: vec![None] };
        let records = Records::new(layout, NonNull::dangling(), 4, 3);
        records.begin_chunk(2, None);
        records.begin_chunk(0, Some(2));
        assert_eq!((records.generation(3), records.generation(4)), (1, 0));
        assert_eq!((records.after(10), records.after(11), records.after(0)), (11, 0, 1));
        assert_eq!((records.before(1), records.before(0), records.before(11)), (0, 11, 10));
    }
}
