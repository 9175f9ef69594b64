//! Loading a store from a file: one that was saved, or one that another program wrote.
//!
//! Owns the checks, all of which come before anything is changed, and the order of a load: selection pauses, everything is
//! forgotten, records are published again as their writers did, the oldest first, and what does not fit leaves as if it
//! had been overwritten. A file of a store of the same setting gives back record numbers, sampler and draws too, so that
//! selections go on where they were; of any other, priorities are taken over. What it does not do: write files.

use super::book::Change;
use super::container::{Array, Header, dtype_name};
use super::records::{Flags, Meta};
use super::saving::{CheckpointError, FORM, OWN, failed, finals_of, keeps};
use super::writing::Opened;
use super::{Store, wait};
use crate::element::DType;
use crate::select::Draws;
use crate::sync::lock;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

/// What a load brought.
///
/// ```
/// # use pinring::*;
/// # fn load(feed: &Feed) -> Result<()> {
/// let loaded = feed.load("replay.safetensors")?;
/// println!("{} of {} records live", loaded.live, loaded.records);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loaded {
    /// Records of the file.
    pub records: usize,
    /// Records that are in the store when it is loaded: fewer if that is smaller than the one that was saved. A `clear` meanwhile takes
    /// them away again.
    pub live: usize,
    /// Whether the file is of a store of the same setting, so that the sampler and its draws go on where they were.
    pub resumed: bool,
}

/// How often it is looked whether a further batch waits that was selected before.
const LOOK: Duration = Duration::from_millis(5);
/// Records that are read at once.
const BLOCK: usize = 256;
/// No lane has more steps: counts of those that are there leave room for those that come.
const MOST_STEPS: u64 = 1 << 62;

/// A file that fits, before anything is changed.
struct Source {
    file: File,
    header: Header,
    metas: Vec<Meta>,
    priorities: Vec<f32>,
    /// Of a store of the same setting.
    resume: Option<Resume>,
}

struct Resume {
    records: Vec<u32>,
    unused: Vec<u32>,
    lane_steps: Vec<u64>,
    sampler: Vec<u8>,
    draws: Option<Draws>,
    pace: Vec<f64>,
}

impl Store {
    /// Replaces everything by what a file holds. No writer may be alive. `writers` counts the lanes that have one; `discard` takes
    /// back what was selected before, while nothing else is selected.
    ///
    /// # Errors
    /// See [`CheckpointError`]. Only a file that cannot be read any more in the middle leaves the store changed: empty.
    pub(crate) fn load(
        &self,
        path: &Path,
        writers: &dyn Fn() -> usize,
        discard: &dyn Fn(),
    ) -> Result<Loaded, CheckpointError> {
        let foreign = |why: String| CheckpointError::Foreign { path: path.display().to_string(), why };
        let mut file = File::open(path).map_err(|error| failed("open", path, &error))?;
        let header = Header::read(&mut file).map_err(foreign)?;
        let mut source = self.check(file, header).map_err(foreign)?;
        let mut loading = self.pause(writers, discard)?;
        loading.whole = false;
        let clears = lock(&self.state).clears;
        let loaded = self.replace(&mut source).map_err(|error| match error {
            Problem::Io(reason) => failed("read", path, &reason),
            Problem::Closed(closed) => closed.into(),
        });
        // Cleared meanwhile: then all of it goes, and not what had come by then alone.
        loading.whole = loaded.is_ok() && lock(&self.state).clears == clears + 1;
        discard();
        loaded
    }

    /// Keeps anything from being selected, and waits until nothing is read. What was selected before and waits is discarded: it
    /// may wait for a learner, with the records that it reads.
    fn pause(&self, writers: &dyn Fn() -> usize, discard: &dyn Fn()) -> Result<Loading<'_>, CheckpointError> {
        let mut state = lock(&self.state);
        if state.saving || state.loading {
            return Err(CheckpointError::Busy);
        }
        state.loading = true;
        drop(state);
        #[cfg(test)]
        crate::sync::points::here("load: pauses");
        // From here on a writer that is made opens nothing.
        let (loading, lanes) = (Loading { store: self, whole: true }, writers());
        if lanes > 0 {
            return Err(CheckpointError::Writers { lanes });
        }
        let mut state = lock(&self.state);
        loop {
            if let Some(closed) = state.closed.clone() {
                drop(state);
                return Err(closed.into()); // what is there can still be saved
            }
            if !state.book.is_read() {
                break;
            }
            drop(state);
            discard();
            state = lock(&self.state);
            if state.book.is_read() {
                state.writers_waiting += 1;
                state = wait(&self.for_writers, state, Some(LOOK)); // what is being filled comes to lie there too
                state.writers_waiting -= 1;
            }
        }
        drop(state);
        Ok(loading)
    }

    /// Reads and checks what the file says of each record, and the form of all arrays.
    fn check(&self, mut file: File, header: Header) -> Result<Source, String> {
        if header.metadata(FORM.0) != Some(FORM.1) {
            return Err(format!("its metadata does not say `{}`: `{}`", FORM.0, FORM.1));
        }
        let rows = header.find(&format!("{OWN}flags")).and_then(|array| array.shape.first().copied()).unwrap_or(0);
        let all = |name: &str, dtype| own(&header, name, dtype, Some(rows));
        let flags = read(&mut file, &header, all("flags", DType::U8)?)?;
        let lanes = numbers(&read(&mut file, &header, all("lane", DType::U32)?)?, u32::from_le_bytes);
        let ages = numbers(&read(&mut file, &header, all("age", DType::U32)?)?, u32::from_le_bytes);
        let steps = numbers(&read(&mut file, &header, all("step", DType::U64)?)?, u64::from_le_bytes);
        let versions = numbers(&read(&mut file, &header, all("version", DType::U64)?)?, u64::from_le_bytes);
        let mut metas = Vec::with_capacity(rows as usize);
        for row in 0..rows as usize {
            let flags = Flags::from_bits(flags[row]).ok_or_else(|| format!("record {row} has flags that are none"))?;
            metas.push(Meta { step: steps[row], version: versions[row], age: ages[row], lane: lanes[row], flags });
        }
        self.check_runs(&metas)?;
        for (leaf, info) in self.layout.leaves.iter().enumerate() {
            let kept = self.records.layout.sparse[leaf]
                .map_or(rows, |sparse| metas.iter().filter(|meta| keeps(&sparse, meta)).count() as u64);
            let shape: Vec<u64> = std::iter::once(kept).chain(info.shape.iter().map(|&dim| dim as u64)).collect();
            let array = header.find(&info.name).ok_or_else(|| format!("it has no leaf `{}`", info.name))?;
            if array.shape != shape || array.dtype != dtype_name(info.dtype) {
                let (found, dtype) = (&array.shape, &array.dtype);
                return Err(format!(
                    "leaf `{}` is {dtype} {found:?}, and should be {} {shape:?}",
                    info.name, info.dtype
                ));
            }
            if info.dtype == DType::Bool && !is_of_bools(&mut file, &header, array)? {
                return Err(format!("leaf `{}` holds bytes that are no bool", info.name));
            }
        }
        // Whoever wrote it by other means gave them all.
        if header.metadata("setting").is_some() && metas.iter().any(|meta| meta.flags.truncated) {
            let names = self.plan.reads_final.iter().map(|&leaf| &self.layout.leaves[leaf].name);
            if let Some(name) = names.into_iter().find(|name| header.metadata(&finals_of(name)).is_none()) {
                return Err(format!(
                    "it was saved by a feed that did not need the final observations of leaf `{name}`, so some may be \
                     missing where an episode was truncated, and samples here bootstrap from them"
                ));
            }
        }
        let priorities = match header.find(&format!("{OWN}priority")) {
            Some(_) => numbers(&read(&mut file, &header, all("priority", DType::F32)?)?, f32::from_le_bytes),
            None => Vec::new(),
        };
        let same = header.metadata("setting") == Some(self.setting().as_str());
        let resume = if same { Some(self.resume(&mut file, &header, &metas)?) } else { None };
        Ok(Source { file, header, metas, priorities, resume })
    }

    /// Lanes exist, and their records follow each other as writers write them.
    fn check_runs(&self, metas: &[Meta]) -> Result<(), String> {
        let most = lock(&self.state).book.lanes();
        let mut last: Vec<Option<Meta>> = vec![None; most as usize];
        for (row, meta) in metas.iter().enumerate() {
            let Some(last) = last.get_mut(meta.lane as usize) else {
                return Err(format!(
                    "record {row} is of lane {}, and the store has {most} lanes: give it more by `.lanes`",
                    meta.lane
                ));
            };
            let (flags, begins) = (meta.flags, meta.age == 0);
            let behind_end = last.is_some_and(|last| last.flags.last);
            let follows = match *last {
                None => !flags.last || !begins,
                Some(last) => begins || meta.age == last.age.saturating_add(1),
            };
            let owes = self.layout.within_episode && last.is_some_and(|last| last.flags.ends());
            // A lane's steps are counted one by one, or those that keep a leaf would lie on each other.
            let number = last.map_or(Some(meta.step), |last| last.step.checked_add(u64::from(!last.flags.last)));
            let counted = number == Some(meta.step) && meta.step < MOST_STEPS;
            let whole = if owes { flags.last } else { !flags.last || last.is_none() };
            if !follows || !counted || !whole || (behind_end && !begins) || (flags.last && !self.layout.within_episode)
            {
                return Err(format!("record {row} does not follow the one before it of lane {}", meta.lane));
            }
            *last = Some(*meta);
        }
        Ok(())
    }

    fn resume(&self, file: &mut File, header: &Header, metas: &[Meta]) -> Result<Resume, String> {
        let rows = metas.len() as u64;
        let records = read(file, header, own(header, "record", DType::U32, Some(rows))?)?;
        let unused = read(file, header, own(header, "unused", DType::U32, None)?)?;
        let lane_steps = read(file, header, own(header, "lane_steps", DType::U64, None)?)?;
        let draws = numbers(&read(file, header, own(header, "draws", DType::U64, Some(4))?)?, u64::from_le_bytes);
        let pace = read(file, header, own(header, "pace", DType::F64, Some(2))?)?;
        let resume = Resume {
            records: numbers(&records, u32::from_le_bytes),
            unused: numbers(&unused, u32::from_le_bytes),
            lane_steps: numbers(&lane_steps, u64::from_le_bytes),
            sampler: read(file, header, own(header, "sampler", DType::U8, None)?)?,
            draws: <[u64; 4]>::try_from(draws).ok().and_then(Draws::from_state),
            pace: numbers(&pace, f64::from_le_bytes),
        };
        // Every chunk is in use or not, and once.
        let mut chunks = self.chunk_order(&resume);
        chunks.sort_unstable();
        let all = lock(&self.state).book.shape();
        let paced =
            resume.pace.iter().all(|rows| rows.is_finite()) && (0.0..MOST_STEPS as f64).contains(&resume.pace[0]);
        let right = chunks.iter().copied().eq(0..all.chunks)
            && resume.lane_steps.len() == all.lanes as usize
            && resume.lane_steps.iter().zip(last_steps(metas, all.lanes)).all(|(&steps, last)| match last {
                Some(last) => steps == last,
                None => steps < MOST_STEPS,
            })
            && paced;
        if right { Ok(resume) } else { Err("its record numbers are not those of a store".to_owned()) }
    }

    /// Chunks in the order in which they have to be taken, the last first.
    fn chunk_order(&self, resume: &Resume) -> Vec<u32> {
        let mut used: Vec<u32> = Vec::new();
        for &record in &resume.records {
            let chunk = self.records.chunk_of(record);
            if used.last() != Some(&chunk) {
                used.push(chunk);
            }
        }
        resume.unused.iter().copied().chain(used.into_iter().rev()).collect()
    }

    fn replace(&self, source: &mut Source) -> Result<Loaded, Problem> {
        let mut selector = lock(&self.selector);
        let mut state = lock(&self.state);
        state.book.reset(source.resume.as_ref().map(|resume| self.chunk_order(resume)));
        state.clears += 1;
        state.pacer.clear();
        drop(state);
        let mut skip = vec![0u64; self.layout.leaves.len()];
        let mut seated = vec![false; lock(&self.state).book.lanes() as usize];
        let rows = source.metas.len();
        let mut block = Block::default();
        for start in (0..rows).step_by(BLOCK) {
            let end = rows.min(start + BLOCK);
            self.read_block(source, start..end, &mut skip, &mut block)?;
            for row in start..end {
                let meta = source.metas[row];
                let first = !std::mem::replace(&mut seated[meta.lane as usize], true);
                let slot = source.resume.as_ref().map_or(0, |resume| self.records.slot(resume.records[row]));
                self.publish_loaded(meta, first.then_some(slot), &mut block)?;
            }
            let changes = lock(&self.state).take_changes();
            selector.apply(&changes);
        }
        let mut state = lock(&self.state);
        let live = state.book.held();
        // Whatever an episode's next step would be, nobody goes on with it.
        (0..state.book.lanes()).for_each(|lane| state.book.cut(lane));
        let newest = newest_records(&block.published, &source.priorities);
        let newest = newest.into_iter().filter(|(record, _)| state.book.is_item(*record));
        let updates: Vec<Change> = newest.map(|(record, priority)| Change::Update { record, priority }).collect();
        let mut resumed = false;
        if let Some(resume) = &source.resume {
            resume.lane_steps.iter().zip(0..).for_each(|(&steps, lane)| state.book.set_steps(lane, steps));
            if let [inserted, behind] = resume.pace[..] {
                state.pacer.restore(inserted as u64, behind);
            }
        } else {
            let (inserted, _) = state.pacer.saved();
            state.pacer.restore(inserted, f64::MAX); // as far behind as the pace allows, not all of what was loaded
        }
        drop(state);
        selector.apply(&updates);
        if let Some(resume) = &source.resume {
            // Another sampler, or one that saves nothing, goes on from the priorities alone.
            resumed = !resume.sampler.is_empty() && selector.restore(&resume.sampler);
            if let (true, Some(draws)) = (resumed, &resume.draws) {
                selector.draws = draws.clone();
            }
        }
        Ok(Loaded { records: rows, live, resumed })
    }

    /// Reads the leaves of some records.
    fn read_block(
        &self,
        source: &mut Source,
        rows: std::ops::Range<usize>,
        skip: &mut [u64],
        block: &mut Block,
    ) -> Result<(), Problem> {
        block.leaves.resize_with(self.layout.leaves.len(), Vec::new);
        block.taken = vec![0; self.layout.leaves.len()];
        for (leaf, info) in self.layout.leaves.iter().enumerate() {
            let kept = self.records.layout.sparse[leaf].map_or(rows.len(), |sparse| {
                source.metas[rows.clone()].iter().filter(|meta| keeps(&sparse, meta)).count()
            });
            let bytes = &mut block.leaves[leaf];
            bytes.resize(kept * info.bytes(), 0);
            let begin = source.header.find(&info.name).map_or(0, |array| array.begin) + source.header.data + skip[leaf];
            source.file.seek(SeekFrom::Start(begin)).map_err(|error| Problem::Io(error.to_string()))?;
            source.file.read_exact(bytes).map_err(|error| Problem::Io(error.to_string()))?;
            skip[leaf] += bytes.len() as u64;
        }
        Ok(())
    }

    /// Publishes one record as its writer did. `seat`: it is its lane's first, at this place of a chunk.
    fn publish_loaded(&self, meta: Meta, seat: Option<u32>, block: &mut Block) -> Result<(), Problem> {
        let mut state = lock(&self.state);
        if let Some(closed) = &state.closed {
            return Err(Problem::Closed(closed.clone()));
        }
        let lane = meta.lane;
        if let Some(slot) = seat {
            state.book.seat(lane, slot, meta.age);
        } else if meta.age == 0 {
            state.book.cut(lane);
        }
        let opened = state.book.open(lane, |chunk, from| self.records.begin_chunk(chunk, from));
        // Nothing is read while a store is loaded, so what was retired is free at once.
        let Some(record) = opened else { return Err(Problem::Io("the store has no room".to_owned())) };
        for (leaf, info) in self.layout.leaves.iter().enumerate() {
            if self.records.layout.sparse[leaf].is_some_and(|sparse| !keeps(&sparse, &meta)) {
                continue;
            }
            let (taken, bytes) = (block.taken[leaf], info.bytes());
            let value = &block.leaves[leaf][taken..taken + bytes];
            block.taken[leaf] += bytes;
            // SAFETY: opened for this lane, which has no writer, and not published (invariant 2); the ring is there, since
            // the store is not closed and its lock is held (invariant 7). A bool leaf was checked to hold bools.
            unsafe { self.put(Opened { record, step: meta.step }, leaf, Some(value.as_ptr())) };
        }
        state.book.set_steps(lane, meta.step);
        // SAFETY: as above.
        unsafe { self.records.set_meta(record, meta) };
        // SAFETY: the book looks at published records alone, under the lock.
        let look = |record: u32| unsafe { self.records.meta(record) };
        match meta.flags.last {
            true => state.book.publish_final(lane, None, &look),
            false => {
                state.book.publish_step(lane, None, &look);
                state.pacer.insert(1);
            }
        }
        block.published.push(record);
        Ok(())
    }
}

/// While it lives nothing is selected and no record opened. Its drop ends that, also where a sampler panicked; a store that
/// was not loaded as a `whole` is empty then.
struct Loading<'s> {
    store: &'s Store,
    whole: bool,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if !self.whole {
            self.store.clear();
        }
        let mut state = lock(&self.store.state);
        state.loading = false;
        std::mem::take(&mut state.cuts).into_iter().for_each(|lane| state.book.cut(lane));
        drop(state);
        self.store.for_writers.notify_all();
        self.store.for_sampling.notify_all();
    }
}

/// Of each lane that has records, the number of the step that comes next.
fn last_steps(metas: &[Meta], lanes: u32) -> Vec<Option<u64>> {
    let mut next = vec![None; lanes as usize];
    for meta in metas {
        next[meta.lane as usize] = Some(meta.step + u64::from(!meta.flags.last));
    }
    next
}

/// What went wrong while the store was being replaced.
enum Problem {
    Io(String),
    Closed(crate::error::Closed),
}

/// Leaves of some records, and the records that were published so far.
#[derive(Default)]
struct Block {
    leaves: Vec<Vec<u8>>,
    /// Bytes of each leaf that were put.
    taken: Vec<usize>,
    published: Vec<u32>,
}

/// The priority of what each record holds now: records of a small store were used several times.
fn newest_records(published: &[u32], priorities: &[f32]) -> Vec<(u32, f32)> {
    let valid = |&(_, &priority): &(&u32, &f32)| priority.is_finite() && priority >= 0.0;
    let pairs = published.iter().zip(priorities).filter(valid);
    pairs.map(|(&record, &priority)| (record, priority)).collect()
}

/// One of the crate's own arrays, of that element type and length.
fn own<'h>(header: &'h Header, name: &str, dtype: DType, len: Option<u64>) -> Result<&'h Array, String> {
    let name = format!("{OWN}{name}");
    let array = header.find(&name).ok_or_else(|| format!("it has no array `{name}`"))?;
    let right =
        array.dtype == dtype_name(dtype) && array.shape.len() == 1 && len.is_none_or(|len| array.shape[0] == len);
    if right { Ok(array) } else { Err(format!("array `{name}` is {} {:?}", array.dtype, array.shape)) }
}

fn read(file: &mut File, header: &Header, array: &Array) -> Result<Vec<u8>, String> {
    let length = usize::try_from(array.end - array.begin);
    let length = length.map_err(|_| format!("array `{}` is larger than this machine can address", array.name))?;
    let mut bytes = vec![0; length];
    file.seek(SeekFrom::Start(header.data + array.begin)).map_err(|error| error.to_string())?;
    file.read_exact(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Whether every byte of an array is 0 or 1. Looked at piece by piece: a leaf may be as large as the store.
fn is_of_bools(file: &mut File, header: &Header, array: &Array) -> Result<bool, String> {
    let mut piece = [0; 4096];
    let mut left = array.end - array.begin;
    file.seek(SeekFrom::Start(header.data + array.begin)).map_err(|error| error.to_string())?;
    while left > 0 {
        let length = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
        file.read_exact(&mut piece[..length]).map_err(|error| error.to_string())?;
        if piece[..length].iter().any(|&byte| byte > 1) {
            return Ok(false);
        }
        left -= length as u64;
    }
    Ok(true)
}

fn numbers<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|chunk| from(std::array::from_fn(|i| chunk[i]))).collect()
}
