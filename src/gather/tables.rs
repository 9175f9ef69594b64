//! What the kernel and the host must know of a batch, as plain tables.
//!
//! Owns the arithmetic from a plan and a layout to chunks, to the place of the table of records in a slot, and to the
//! parts of a slot that are copied as they are. Pure.

use super::launch::{CHUNK, Chunk, Launch};
use crate::layout::Layout;
use crate::sample::{Declared, Derived};
use crate::store::Plan;
use std::ops::Range;

/// Columns of the host that lie no further apart than this are copied as one: what lies between is written by the kernel,
/// behind the copy. A copy of its own costs more than so many bytes.
const BRIDGED: usize = 16 << 10;
/// Chunks of a batch are counted in 32 bits, and threads count beyond the last.
const MOST_CHUNKS: usize = 1 << 31;

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    /// Where in the slot the table of records is.
    pub(crate) at: usize,
    /// 32-bit numbers a row: a record for each entry, and last, where returns are added up, how many steps.
    pub(crate) stride: usize,
    rows: usize,
    /// Parts of the slot that the host fills and the device gets as they are.
    pub(crate) copied: Vec<Range<usize>>,
    pub(super) chunks: Vec<Chunk>,
    /// Bits of γ⁰ to γⁿ.
    pub(super) powers: Vec<u32>,
    record_bytes: usize,
    /// Of the n-step return: the entry of the first reward, its place in a record, and the return's in the batch.
    sum: Option<[u32; 4]>,
}

impl Tables {
    /// The tables of a feed, or why the device cannot gather its batches.
    pub(crate) fn new(layout: &Layout, plan: &Plan, record_bytes: usize) -> Result<Tables, String> {
        let stride = plan.entries.len() + usize::from(plan.sum.is_some());
        let limit = |what: &str| Err(format!("{what} are more than the kernel counts"));
        if u32::try_from(layout.slot_bytes).is_err() {
            return limit("the bytes of a batch");
        }
        if plan.entries.len() >= 1 << 24 {
            return limit("the windows of a sample");
        }
        let chunks: usize = plan.moves.iter().map(|of| (of.bytes as usize).div_ceil(CHUNK)).sum();
        if chunks.checked_mul(layout.rows).is_none_or(|chunks| chunks > MOST_CHUNKS) {
            return limit("the chunks of a batch");
        }
        let ends = layout.columns.iter().skip(1).map(|column| column.offset).chain([layout.slot_bytes]);
        let columns: Vec<Range<usize>> = layout.columns.iter().zip(ends).map(|(c, end)| c.offset..end).collect();
        let is_hosts = |declared: &Declared| matches!(declared, Declared::Derived(derived) if !matches!(derived, Derived::NStepReturn { .. }));
        let hosts: Vec<bool> = layout.declared.iter().map(is_hosts).collect();
        // The table lies where the device will write: in the longest stretch of such columns.
        let needs = layout.rows.checked_mul(stride).and_then(|places| places.checked_mul(size_of::<u32>()));
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for (column, _) in columns.iter().zip(&hosts).filter(|(_, is_hosts)| !**is_hosts) {
            match stretches.last_mut().filter(|last| last.end == column.start) {
                Some(last) => last.end = column.end,
                None => stretches.push(column.clone()),
            }
        }
        let longest = stretches.into_iter().max_by_key(|stretch| stretch.len()).unwrap_or(0..0);
        if needs.is_none_or(|needs| longest.len() < needs) || plan.moves.is_empty() {
            return Err("the table of what to gather would be larger than the batch".to_owned());
        }
        let mut copied: Vec<Range<usize>> = Vec::new();
        for (column, _) in columns.iter().zip(&hosts).filter(|(_, is_hosts)| **is_hosts) {
            match copied.last_mut().filter(|last| column.start - last.end <= BRIDGED) {
                Some(last) => last.end = column.end,
                None => copied.push(column.clone()),
            }
        }
        let chunk_of = |of: &crate::store::Move| {
            let (bytes, of) = (of.bytes, *of);
            (0..bytes).step_by(CHUNK).map(move |at| {
                let length = (bytes - at).min(CHUNK as u32);
                Chunk::new(of.entry, of.from, at, length, of.to as u32, of.row_stride as u32)
            })
        };
        let sum = plan.sum.zip(layout.derived.n_step_return).map(|(sum, column)| {
            let column = &layout.columns[column];
            [sum.entry, sum.from, column.offset as u32, column.row_stride as u32]
        });
        Ok(Tables {
            at: longest.start,
            stride,
            rows: layout.rows,
            copied,
            chunks: plan.moves.iter().flat_map(chunk_of).collect(),
            powers: plan.powers.iter().map(|power| power.to_bits()).collect(),
            record_bytes,
            sum,
        })
    }

    /// Bytes of the table of records.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.stride * size_of::<u32>()
    }

    /// Everything of a launch but the addresses.
    pub(super) fn launch(&self) -> Launch {
        let [sum_entry, sum_from, sum_to, sum_row_stride] = self.sum.unwrap_or_default();
        Launch {
            record_bytes: self.record_bytes as u64,
            rows: self.rows as u32,
            stride: self.stride as u32,
            chunk_count: self.chunks.len() as u32,
            has_sum: u32::from(self.sum.is_some()),
            sum_entry,
            sum_from,
            sum_to,
            sum_row_stride,
            ..Launch::default()
        }
    }
}
