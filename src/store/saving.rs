//! Saving a store while it is written and sampled.
//!
//! Owns the order of a save: what is live at its start is noted under the locks; then records are read, the oldest first, as
//! they lie, chunk by chunk, and each chunk is let go when it was read. So a writer that catches up waits for one chunk
//! at a time. The file appears under its name when all of it is written. What it does not do: read files (see `loading`).

use super::book::Span;
use super::container::Header;
use super::records::{Flags, Meta, Sparse};
use super::{State, Store};
use crate::element::DType;
use crate::error::{Closed, Error, ErrorKind};
use crate::memory::Ring;
use crate::select::Sampler;
use crate::sync::lock;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the crate's own arrays are called, in front of their names.
pub(super) const OWN: &str = "pinring/";
/// What the file says that it is.
pub(super) const FORM: (&str, &str) = ("pinring", "store 1");

/// What a save wrote.
///
/// ```
/// # use pinring::*;
/// # fn save(feed: &Feed) -> Result<()> {
/// let saved = feed.save("replay.safetensors")?;
/// println!("{} records; a writer waited {:?} at the most", saved.records, saved.longest_wait);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// Records: steps, and final observations of ended episodes.
    pub records: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// The longest time that a writer waited for a chunk that was still to be read.
    pub longest_wait: Duration,
}

/// Why a store was not saved or loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file could not be read or written.
    #[error("{operation} `{path}`: {reason}")]
    File {
        /// What was done.
        operation: &'static str,
        /// The file.
        path: String,
        /// What the system said.
        reason: String,
    },
    /// Not a file that this store can be loaded from. The store is as it was.
    #[error("`{path}` cannot be loaded into this store: {why}")]
    Foreign {
        /// The file.
        path: String,
        /// What does not fit.
        why: String,
    },
    /// A save or a load is under way already.
    #[error("the store is being saved or loaded already: wait for that")]
    Busy,
    /// Loading replaces everything, also where lanes are.
    #[error("a store is loaded before its writers are made, but {lanes} lanes have one: drop them first")]
    Writers {
        /// Lanes that have a writer.
        lanes: usize,
    },
    /// The feed is over.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Error {
        let kind = match error {
            CheckpointError::Closed(closed) => return closed.into(),
            CheckpointError::File { .. } | CheckpointError::Foreign { .. } => ErrorKind::File,
            CheckpointError::Busy | CheckpointError::Writers { .. } => ErrorKind::Misuse,
        };
        Error::from_source(kind, error)
    }
}

/// What is noted at the start of a save.
struct Snapshot {
    spans: Vec<Span>,
    metas: Vec<Meta>,
    records: Vec<u32>,
    priorities: Vec<f32>,
    lane_steps: Vec<u64>,
    unused: Vec<u32>,
    sampler: Vec<u8>,
    draws: [u64; 4],
    pace: (u64, f64),
    /// Keeps the mapping (invariant 7).
    _ring: Arc<Ring>,
}

/// Lets every chunk go that a save has not read, however it ends.
struct Reading<'s> {
    store: &'s Store,
    spans: Vec<Span>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.store.state);
        self.spans.iter().for_each(|span| state.book.read(span.chunk));
        state.saving = false;
        drop(state);
        self.store.for_writers.notify_all();
    }
}

impl Store {
    /// Writes everything that is live now to a file.
    ///
    /// # Errors
    /// See [`CheckpointError`]; then there is no file, or the one that was there before.
    pub(crate) fn save(&self, path: &Path) -> Result<Saved, CheckpointError> {
        let (snapshot, reading) = self.begin_save()?;
        let draft = draft(path);
        let written = self.write(&draft, snapshot).and_then(|saved| {
            std::fs::rename(&draft, path).map_err(|error| failed("rename to", path, &error))?;
            // Its name is to be on the disk too. Not every file system lets a folder be opened for that.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
            Ok(saved)
        });
        drop(reading);
        if written.is_err() {
            let _ = std::fs::remove_file(&draft);
        }
        let longest_wait = std::mem::take(&mut lock(&self.state).longest_save_wait);
        Ok(Saved { longest_wait, ..written? })
    }

    fn begin_save(&self) -> Result<(Snapshot, Reading<'_>), CheckpointError> {
        let mut selector = lock(&self.selector);
        let mut state = lock(&self.state);
        let Some(ring) = state.ring.clone() else {
            return Err(state.closed.clone().map_or(CheckpointError::Busy, CheckpointError::from));
        };
        if state.saving || state.loading {
            return Err(CheckpointError::Busy);
        }
        let changes = state.take_changes();
        let spans = state.book.begin_save();
        (state.saving, state.longest_save_wait) = (true, Duration::ZERO);
        let (unused, pace, lanes) = (state.book.unused(&spans), state.pacer.saved(), state.book.lanes());
        let lane_steps = (0..lanes).map(|lane| state.book.steps(lane)).collect();
        drop(state);
        let reading = Reading { store: self, spans: spans.clone() };
        // Now the sampler knows what was live then, and nothing later. One that panicked before has nothing to say: whoever
        // loads the file tells another of all items anew.
        selector.apply_if_whole(&changes);
        let sampler = selector.whole();
        let records: Vec<u32> = spans
            .iter()
            .flat_map(|span| (span.from..span.to).map(|place| self.records.first(span.chunk) + place))
            .collect();
        let priority = |record| sampler.and_then(|sampler| sampler.priority(record)).unwrap_or(f32::NAN);
        let priorities = records.iter().map(|&record| priority(record)).collect();
        let (sampler, draws) = (sampler.map_or_else(Vec::new, Sampler::save), selector.draws.state());
        drop(selector);
        // SAFETY: published when the save began, and their chunks are not used again before they were read (invariant 3).
        let metas = records.iter().map(|&record| unsafe { self.records.meta(record) }).collect();
        let snapshot =
            Snapshot { spans, metas, records, priorities, lane_steps, unused, sampler, draws, pace, _ring: ring };
        Ok((snapshot, reading))
    }

    /// Writes the whole file under a name of its own.
    fn write(&self, draft: &Path, snapshot: Snapshot) -> Result<Saved, CheckpointError> {
        let failed = |operation| move |error: std::io::Error| failed(operation, draft, &error);
        let (mut header, rows) = (self.header(&snapshot), snapshot.records.len());
        let head = header.write();
        let mut file = File::create(draft).map_err(failed("create"))?;
        file.write_all(&head).map_err(failed("write"))?;
        let mut put = |name: &str, skip: u64, bytes: &[u8]| {
            let begin = header.find(name).map_or(0, |array| array.begin);
            file.seek(SeekFrom::Start(header.data + begin + skip))?;
            file.write_all(bytes)
        };
        let mut kept = vec![0u64; self.layout.leaves.len()];
        let (mut row, mut buffer) = (0, Vec::new());
        for span in &snapshot.spans {
            for (leaf, info) in self.layout.leaves.iter().enumerate() {
                buffer.clear();
                for place in row..row + span.len() {
                    self.read_leaf(leaf, snapshot.records[place], &snapshot.metas[place], &mut buffer);
                }
                put(&info.name, kept[leaf], &buffer).map_err(failed("write"))?;
                kept[leaf] += buffer.len() as u64;
            }
            row += span.len();
            lock(&self.state).book.read(span.chunk);
            self.for_writers.notify_all();
        }
        let metas = &snapshot.metas;
        let mut own = |name: &str, bytes: Vec<u8>| put(&format!("{OWN}{name}"), 0, &bytes).map_err(failed("write"));
        own("lane", metas.iter().flat_map(|meta| meta.lane.to_le_bytes()).collect())?;
        own("step", metas.iter().flat_map(|meta| meta.step.to_le_bytes()).collect())?;
        own("version", metas.iter().flat_map(|meta| meta.version.to_le_bytes()).collect())?;
        own("age", metas.iter().flat_map(|meta| meta.age.to_le_bytes()).collect())?;
        own("flags", metas.iter().map(|meta| meta.flags.bits()).collect())?;
        own("record", snapshot.records.iter().flat_map(|record| record.to_le_bytes()).collect())?;
        own("priority", snapshot.priorities.iter().flat_map(|priority| priority.to_le_bytes()).collect())?;
        own("lane_steps", snapshot.lane_steps.iter().flat_map(|steps| steps.to_le_bytes()).collect())?;
        own("unused", snapshot.unused.iter().flat_map(|chunk| chunk.to_le_bytes()).collect())?;
        own("draws", snapshot.draws.iter().flat_map(|draw| draw.to_le_bytes()).collect())?;
        let (inserted, behind) = snapshot.pace;
        own("pace", [inserted as f64, behind].iter().flat_map(|value| value.to_le_bytes()).collect())?;
        own("sampler", snapshot.sampler)?;
        let bytes = header.data + header.arrays.last().map_or(0, |last| last.end);
        file.set_len(bytes).map_err(failed("write"))?;
        file.sync_all().map_err(failed("write"))?;
        Ok(Saved { records: rows, bytes, longest_wait: Duration::ZERO })
    }

    fn header(&self, snapshot: &Snapshot) -> Header {
        let rows = snapshot.records.len() as u64;
        let mut header = Header::default();
        let mut say = |key: &str, value: String| header.metadata.push((key.to_owned(), value));
        say(FORM.0, FORM.1.to_owned());
        say("setting", self.setting());
        // A commit that truncates an episode was refused without them; of the others some may be missing, and are zeros.
        let finals = self.plan.reads_final.iter().map(|&leaf| &self.layout.leaves[leaf].name);
        finals.for_each(|name| say(&finals_of(name), "there".to_owned()));
        for (leaf, info) in self.layout.leaves.iter().enumerate() {
            let kept = self.records.layout.sparse[leaf]
                .map_or(rows, |sparse| snapshot.metas.iter().filter(|meta| keeps(&sparse, meta)).count() as u64);
            let shape = std::iter::once(kept).chain(info.shape.iter().map(|&dim| dim as u64)).collect();
            header.add(&info.name, info.dtype, shape);
        }
        let lengths = [
            ("step", DType::U64, rows),
            ("version", DType::U64, rows),
            ("lane_steps", DType::U64, snapshot.lane_steps.len() as u64),
            ("draws", DType::U64, 4),
            ("pace", DType::F64, 2),
            ("lane", DType::U32, rows),
            ("age", DType::U32, rows),
            ("record", DType::U32, rows),
            ("priority", DType::F32, rows),
            ("unused", DType::U32, snapshot.unused.len() as u64),
            ("flags", DType::U8, rows),
            ("sampler", DType::U8, snapshot.sampler.len() as u64),
        ];
        lengths.into_iter().for_each(|(name, dtype, len)| header.add(&format!("{OWN}{name}"), dtype, vec![len]));
        header
    }

    /// What record numbers depend on: a store of the same setting takes them over, and draws go on as they were.
    pub(super) fn setting(&self) -> String {
        let state: &State = &lock(&self.state);
        format!("{:?} {:?}", state.book.shape(), self.plan.rules)
    }

    /// Appends a leaf's value of one record, if it is kept there. Of a final observation other leaves are zeros.
    fn read_leaf(&self, leaf: usize, record: u32, meta: &Meta, into: &mut Vec<u8>) {
        let info = &self.layout.leaves[leaf];
        let bytes = info.bytes();
        if self.records.layout.sparse[leaf].is_some_and(|sparse| !keeps(&sparse, meta)) {
            return;
        }
        match self.records.place(record, leaf, meta.step) {
            // SAFETY: a leaf of a record that is live or waits for the save to read it, which this is (invariant 3); the
            // snapshot keeps the mapping.
            Some(at) if info.observation || !meta.flags.last => unsafe {
                into.extend_from_slice(std::slice::from_raw_parts(at, bytes));
            },
            _ => into.resize(into.len() + bytes, 0),
        }
    }
}

/// What the metadata has of an observation whose final value is there wherever an episode was truncated.
pub(super) fn finals_of(leaf: &str) -> String {
    format!("final observations of {leaf}")
}

/// Whether a leaf of some steps is kept on this one.
pub(super) fn keeps(sparse: &Sparse, meta: &Meta) -> bool {
    !meta.flags.last && meta.step.is_multiple_of(sparse.every)
}

pub(super) fn failed(operation: &'static str, path: &Path, error: &dyn std::fmt::Display) -> CheckpointError {
    CheckpointError::File { operation, path: path.display().to_string(), reason: error.to_string() }
}

/// The file's name while it is written: beside it, so that it can be renamed, and no other save's.
fn draft(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}-{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

impl Flags {
    /// As a byte of a file.
    pub(super) fn bits(self) -> u8 {
        let Flags { terminated, truncated, masked, first, last } = self;
        [terminated, truncated, masked, first, last].iter().rev().fold(0, |bits, &flag| bits << 1 | u8::from(flag))
    }

    pub(super) fn from_bits(bits: u8) -> Option<Flags> {
        let flag = |place: u8| bits >> place & 1 == 1;
        let (terminated, truncated, masked, first, last) = (flag(0), flag(1), flag(2), flag(3), flag(4));
        (bits < 32).then_some(Flags { terminated, truncated, masked, first, last })
    }
}
