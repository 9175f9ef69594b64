//! Stored steps as bytes, and what the host knows of each.
//!
//! A *record* is one step of one lane, or the final observation of an episode: the step's leaves at offsets that are
//! multiples of 16 bytes, one behind the other in the order of declaration, a record's length being a multiple of 16 too.
//! Records lie one behind the other from the store's first byte, so record r begins at `r × record_bytes`. A *chunk* is
//! `chunk` consecutive records of one lane in order; lanes go on in another chunk, wherever that lies: `before` and
//! `after` follow a lane. What it does not do: decide which records live (see `book`).

use crate::schema::{LeafInfo, SchemaError};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Leaves begin at multiples of this many bytes within a record, and records end there: one vector load.
pub(crate) const RECORD_ALIGN: usize = 16;

/// Where the leaves lie in a record.
#[derive(Clone, Debug)]
pub(crate) struct RecordLayout {
    /// Of each leaf, in the order of declaration.
    pub(crate) offsets: Vec<usize>,
    pub(crate) bytes: usize,
}

impl RecordLayout {
    pub(crate) fn new(leaves: &[LeafInfo]) -> Result<RecordLayout, SchemaError> {
        let (mut offsets, mut end) = (Vec::new(), 0usize);
        for leaf in leaves {
            offsets.push(end);
            let next = end.checked_add(leaf.bytes()).and_then(|end| end.checked_next_multiple_of(RECORD_ALIGN));
            end = next
                .filter(|&end| u32::try_from(end).is_ok())
                .ok_or_else(|| SchemaError::Overflow { what: format!("a stored step up to leaf `{}`", leaf.name) })?;
        }
        Ok(RecordLayout { offsets, bytes: end })
    }
}

/// What the host knows of one record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// The lane's step, counted from 0. A final observation has that of the step it follows.
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
    fn a_lane_is_followed_from_chunk_to_chunk() {
        let layout = RecordLayout { offsets: vec![0], bytes: 16 };
        let records = Records::new(layout, NonNull::dangling(), 4, 3);
        records.begin_chunk(2, None);
        records.begin_chunk(0, Some(2));
        assert_eq!((records.generation(3), records.generation(4)), (1, 0));
        assert_eq!((records.after(10), records.after(11), records.after(0)), (11, 0, 1));
        assert_eq!((records.before(1), records.before(0), records.before(11)), (0, 11, 10));
    }
}
