//! What a sample reads of the store, as plain tables.
//!
//! For each row of a batch a *window table* row holds one record for each [`Entry`]: the record that the entry's offset
//! falls on, or [`NOTHING`] where the sample is padded with zeros. [`Plan::resolve`] fills it, following the row's lane.
//! The [`Move`]s are the same for every row and batch: of the record of entry `entry`, `bytes` bytes from `from` go to
//! `to + row × row_stride` in the batch. All of it is numbers, so whoever gathers needs nothing else: a record lies at
//! `record × record_bytes` from the store's first byte, moves begin at multiples of 16 bytes within the record, and only
//! the place in the batch may be less aligned (of a scalar column it is a multiple of the element's size).
//!
//! Derived columns are functions of [`Row`] and, for n-step returns, of the rewards at the entries of [`Plan::sum`]; they
//! are computed on the host (see `derive`). What it does not do: touch the bytes of leaves.

use super::book::Rules;
use super::records::{Flags, Meta, RecordLayout, Records, Sparse};
use crate::layout::Layout;
use crate::sample::{Anchor, Declared, Derived, Kind, Pad, Window};
use std::collections::HashMap;

/// No record: the place in the batch is zeroed.
pub(crate) const NOTHING: u32 = u32::MAX;

/// One offset that columns read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) anchor: Anchor,
    pub(crate) offset: i32,
    /// Of an observation the episode's final one is read too.
    pub(crate) observation: bool,
    pub(crate) pad: Pad,
    /// Of a leaf that is kept on some steps only: then the table holds the record that its cell begins at.
    pub(crate) sparse: Option<Sparse>,
}

/// One value of one column, for every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    /// The entry whose record it is read from.
    pub(crate) entry: u32,
    /// Bytes from the record's first.
    pub(crate) from: u32,
    pub(crate) bytes: u32,
    /// Where row 0 has it, in bytes from the batch's first.
    pub(crate) to: usize,
    pub(crate) row_stride: usize,
}

/// The rewards of n-step returns: at entries `entry .. entry + n`, an `f32` each, `from` bytes into the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) entry: u32,
    pub(crate) from: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) entries: Vec<Entry>,
    pub(crate) moves: Vec<Move>,
    pub(crate) sum: Option<Sum>,
    /// γ⁰ to γⁿ, each computed in `f64` and rounded once.
    pub(crate) powers: Vec<f32>,
    pub(crate) rules: Rules,
    /// Observation leaves that are read behind an episode's last step.
    pub(crate) reads_final: Vec<usize>,
    /// Steps from the first to the bootstrap step, if the episode does not end before.
    span: u32,
    within_episode: bool,
    /// Steps whose flags columns show: 1 for a transition.
    steps: u32,
}

/// What the host knows of one row, once it was resolved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    pub(crate) first: Meta,
    /// Steps from the first to the bootstrap step.
    pub(crate) span: u32,
    /// Real steps of the row, at most those that it has room for.
    pub(crate) length: u32,
    /// How the episode ended, if it did before or at the bootstrap step.
    pub(crate) end: Flags,
}

/// The lane around one row's first step: what `resolve` has seen last, kept so that nothing is allocated for each row.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// From `back` records in front of the first step on; the first `back − reached` are not real.
    records: Vec<u32>,
}

impl Line {
    /// The record at offset `at` of the first step, `back` being the plan's.
    pub(crate) fn record(&self, back: u64, at: u32) -> u32 {
        self.records[back as usize + at as usize]
    }
}

impl Plan {
    pub(crate) fn new(layout: &Layout, records: &RecordLayout) -> Plan {
        let (span, stride) = match layout.kind {
            Kind::Transition { n } => (n, 1),
            Kind::Sequence { len, stride } => (len, stride),
            Kind::Step | Kind::Unroll { .. } => unreachable!("only replayed samples have a plan"),
        };
        let is_transition = matches!(layout.kind, Kind::Transition { .. });
        // Of a transition the bootstrap step is always waited for; of a sequence only where a column needs it.
        let mut forward = if is_transition { span as i64 } else { span as i64 - 1 };
        let mut back = 0i64;
        let first_column = layout.columns.len() - layout.declared.len();
        let (mut entries, mut moves, mut sum) = (Vec::new(), Vec::new(), None);
        // By a map: windows may be a million steps wide.
        let mut places = HashMap::new();
        let mut entry_of = |entry: Entry| {
            *places.entry(entry).or_insert_with(|| {
                entries.push(entry);
                entries.len() as u32 - 1
            })
        };
        for (declared, column) in layout.declared.iter().zip(&layout.columns[first_column..]) {
            match *declared {
                Declared::Window(window) => {
                    let sparse = records.sparse[window.leaf];
                    let observation = layout.leaves[window.leaf].observation && sparse.is_none();
                    let (from, to) = (i64::from(window.from), i64::from(window.to));
                    match window.anchor {
                        Anchor::First => (back, forward) = (back.max(-from), forward.max(to - 1)),
                        // It is at least one step behind the first.
                        Anchor::Bootstrap => (back, forward) = (back.max(-from - 1), forward.max(span as i64 + to - 1)),
                    }
                    for (step, offset) in (window.from..window.to).enumerate() {
                        let entry = Entry { anchor: window.anchor, offset, observation, pad: window.pad, sparse };
                        moves.push(Move {
                            entry: entry_of(entry),
                            from: records.offsets[window.leaf] as u32,
                            bytes: column.item_bytes as u32,
                            to: column.offset + step * column.step_stride,
                            row_stride: column.row_stride,
                        });
                    }
                }
                Declared::Derived(Derived::IsFirst) if !is_transition => forward = forward.max(span as i64),
                Declared::Derived(_) => {}
            }
        }
        if let Some(reward) = layout.declared.iter().find_map(|declared| match declared {
            Declared::Derived(Derived::NStepReturn { reward }) => Some(*reward),
            _ => None,
        }) {
            // A run of their own: entries of one column are consecutive.
            let entry = entries.len() as u32;
            entries.extend((0..span as i32).map(|offset| Entry {
                anchor: Anchor::First,
                offset,
                observation: false,
                pad: Pad::Zeros,
                sparse: None,
            }));
            sum = Some(Sum { entry, from: records.offsets[reward] as u32 });
        }
        let powers = match is_transition {
            true => (0..=span).map(|k| layout.gamma.powi(k as i32) as f32).collect(),
            false => Vec::new(),
        };
        let behind = |window: &Window| window.anchor == Anchor::Bootstrap || window.to > 1;
        let reads_final = layout.declared.iter().filter_map(|declared| match declared {
            Declared::Window(window) if layout.within_episode && behind(window) => Some(window.leaf),
            _ => None,
        });
        let mut reads_final: Vec<_> =
            reads_final.filter(|&leaf| layout.leaves[leaf].observation && layout.leaves[leaf].every == 1).collect();
        reads_final.sort_unstable();
        reads_final.dedup();
        let least = if is_transition || layout.pad_short { 1 } else { span as u64 };
        Plan {
            entries,
            moves,
            sum,
            powers,
            rules: Rules {
                back: back as u64,
                forward: forward as u64,
                stride: stride as u64,
                by_lane: layout.leaves.iter().any(|leaf| leaf.every > 1),
                least,
                skip_masked: is_transition,
            },
            reads_final,
            span: span as u32,
            within_episode: layout.within_episode,
            steps: layout.steps as u32,
        }
    }

    /// Finds the record of every entry for the row that begins with the item `first`, and what is known of it.
    ///
    /// # Safety
    /// `first` is an item of the store that `records` are of, or was one when a gather of the caller's was issued that has
    /// not ended.
    pub(crate) unsafe fn resolve(&self, records: &Records, first: u32, line: &mut Line, table: &mut [u32]) -> Row {
        // SAFETY: whatever an item's windows reach is published, and stays as long as the item's gather (invariant 3).
        let meta = |record: u32| unsafe { records.meta(record) };
        let (back, forward) = (self.rules.back as usize, self.rules.forward as usize);
        line.records.resize(back + forward + 2, NOTHING);
        let first_meta = meta(first);
        let reached = back.min(first_meta.age as usize);
        let mut record = first;
        line.records[back] = first;
        for place in (back - reached..back).rev() {
            record = records.before(record);
            line.records[place] = record;
        }
        // Forward to the last step that a column may show, or the episode's end and its final observation.
        let (mut record, mut flags, mut at) = (first, first_meta.flags, 0);
        let mut end = Flags::default();
        while at < forward {
            record = records.after(record);
            line.records[back + at + 1] = record;
            at += 1;
            if self.within_episode && flags.ends() {
                end = flags;
                break;
            }
            flags = meta(record).flags;
        }
        let ended = end.ends();
        // The last real step, and the last observation.
        let (last, last_observation) = if ended { (at as i64 - 1, at as i64) } else { (at as i64, at as i64) };
        let real = (last + 1) as u32;
        let span = if ended { self.span.min(real) } else { self.span };
        let lowest = -(reached as i64);
        for (entry, place) in self.entries.iter().zip(table) {
            let anchor = if entry.anchor == Anchor::First { 0 } else { i64::from(span) };
            let at = anchor + i64::from(entry.offset);
            let highest = if entry.observation { last_observation } else { last };
            let inside = at.clamp(lowest, highest);
            let record = match inside == at || entry.pad == Pad::Repeat {
                true => line.records[(back as i64 + inside) as usize],
                false => NOTHING,
            };
            *place = match entry.sparse {
                Some(sparse) if record != NOTHING => {
                    sparse.cell(records.chunk_of(record), meta(record).step).unwrap_or(NOTHING)
                }
                _ => record,
            };
        }
        let length = self.steps.min(real);
        Row { first: first_meta, span, length, end: if ended && real <= self.span { end } else { Flags::default() } }
    }
}
