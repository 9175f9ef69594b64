//! Rows of a batch, copied on the host.
//!
//! Owns the copies from records into a slot and the derived columns of each row. Every row is a function of its item alone,
//! so rows may be filled by any thread in any order. What it does not do: choose items, or hold slots.

use super::plan::{Line, NOTHING, Plan, Row};
use super::records::Records;
use crate::layout::Layout;

/// Where the rows of one batch go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    base: *mut u8,
}

// SAFETY: an address alone; every use of it is an `unsafe fn`, whose caller holds the slot (invariant 2).
unsafe impl Send for Target {}
// SAFETY: as above; rows are disjoint, and each is filled by one thread.
unsafe impl Sync for Target {}

/// What a thread that fills rows keeps between them.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) line: Line,
    pub(crate) table: Vec<u32>,
}

impl Target {
    /// `base` is the first byte of a batch slot.
    pub(crate) fn new(base: *mut u8) -> Target {
        Target { base }
    }

    /// The numbers of a row in a table that lies `at` bytes into the slot.
    ///
    /// # Safety
    /// The table is inside the slot, at a multiple of 4 bytes; the row of it is the caller's, and nothing else touches it.
    pub(crate) unsafe fn numbers<'a>(&self, at: usize, row: usize, stride: usize) -> &'a mut [u32] {
        // SAFETY: the caller's duty. Any bytes are numbers, and a slot's bytes are initialised: mapped memory is zero.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at).cast::<u32>().add(row * stride), stride) }
    }

    /// # Safety
    /// `column` is one of the layout's, of element type `T`; `step` is one of its values; the row is the caller's.
    unsafe fn set<T>(&self, layout: &Layout, column: usize, row: usize, step: usize, value: T) {
        let column = &layout.columns[column];
        let at = column.offset + row * column.row_stride + step * column.step_stride;
        // SAFETY: inside the slot by the layout, aligned for the column's type; the caller's row.
        unsafe { self.base.add(at).cast::<T>().write(value) }
    }
}

/// Fills row `row` with the sample that begins at the item `first`: the moves of the plan, then the derived columns.
///
/// # Safety
/// As [`Plan::resolve`] for `first`; the caller has row `row` of the slot behind `target` to itself, and the slot has the
/// layout that the plan was made from.
pub(crate) unsafe fn fill_row(
    (layout, plan, records): (&Layout, &Plan, &Records),
    first: u32,
    weight: f32,
    target: Target,
    row: usize,
    scratch: &mut Scratch,
) -> Row {
    scratch.table.resize(plan.entries.len(), NOTHING);
    // SAFETY: the caller's duty.
    let known = unsafe { plan.resolve(records, first, &mut scratch.line, &mut scratch.table) };
    for step in &plan.moves {
        let (record, bytes) = (scratch.table[step.entry as usize], step.bytes as usize);
        // SAFETY: the move's place in the caller's row, by the layout that the plan was made from.
        let to = unsafe { target.base.add(step.to + row * step.row_stride) };
        match record {
            // SAFETY: as above.
            NOTHING => unsafe { std::ptr::write_bytes(to, 0, bytes) },
            // SAFETY: a leaf of a record that stays as it is until this gather ends (invariant 3); records and slots
            // never overlap.
            record => unsafe {
                let from = records.address(record).add(step.from as usize).cast_const();
                std::ptr::copy_nonoverlapping(from, to, bytes);
            },
        }
    }
    // SAFETY: the caller's duty; the scratch is as `resolve` left it.
    unsafe { derive((layout, plan, records), &known, weight, target, row, scratch, true) };
    known
}

/// As [`fill_row`], for a row that a device gathers: its line of the table of records goes to `numbers`, and the derived
/// columns that are the host's to their places. `numbers` has one for each entry of the plan, and one more where returns
/// are added up: their steps.
///
/// # Safety
/// As [`fill_row`].
pub(crate) unsafe fn plan_row(
    parts: (&Layout, &Plan, &Records),
    first: u32,
    weight: f32,
    target: Target,
    row: usize,
    scratch: &mut Scratch,
    numbers: &mut [u32],
) -> Row {
    let (layout, plan, records) = parts;
    let (entries, steps) = numbers.split_at_mut(plan.entries.len());
    // SAFETY: the caller's duty.
    let known = unsafe { plan.resolve(records, first, &mut scratch.line, entries) };
    steps.iter_mut().for_each(|steps| *steps = known.span);
    // SAFETY: the caller's duty; the scratch is as `resolve` left it.
    unsafe { derive((layout, plan, records), &known, weight, target, row, scratch, false) };
    known
}

/// Writes the derived columns of a row that `resolve` has just looked at; the n-step return only `with_return`.
///
/// # Safety
/// As [`fill_row`], and `scratch` is what `resolve` left for this row.
pub(crate) unsafe fn derive(
    (layout, plan, records): (&Layout, &Plan, &Records),
    known: &Row,
    weight: f32,
    target: Target,
    row: usize,
    scratch: &Scratch,
    with_return: bool,
) {
    let derived = &layout.derived;
    // SAFETY: here and below, the columns' own types and steps, in the caller's row.
    unsafe {
        if let Some(column) = derived.weight {
            target.set(layout, column, row, 0, weight);
        }
        if let (Some(column), Some(sum), true) = (derived.n_step_return, plan.sum, with_return) {
            let mut total = 0f32;
            for k in 0..known.span as usize {
                let record = scratch.table[sum.entry as usize + k];
                let reward = records.address(record).add(sum.from as usize).cast::<f32>().read();
                // One rounding for the product and one for the sum, as on a device without contraction.
                total = if k == 0 { reward } else { total + plan.powers[k] * reward };
            }
            target.set(layout, column, row, 0, total);
        }
        if let Some(column) = derived.discount {
            let discount = if known.end.terminated { 0.0 } else { plan.powers[known.span as usize] };
            target.set(layout, column, row, 0, discount);
        }
        if !layout.kind.has_time() {
            let flags = known.first.flags;
            let of_row = [
                (derived.terminated, known.end.terminated),
                (derived.truncated, known.end.truncated),
                (derived.is_first, flags.first),
                (derived.mask, !flags.masked),
            ];
            for (column, value) in of_row {
                column.into_iter().for_each(|column| target.set(layout, column, row, 0, value));
            }
            if let Some(column) = derived.policy_version {
                target.set(layout, column, row, 0, known.first.version as i64);
            }
            return;
        }
        let real = known.length as usize;
        let at = |step: usize| records.meta(scratch.line.record(plan.rules.back, step as u32));
        if derived.any_of_steps() {
            for step in 0..layout.steps {
                let meta = if step < real { at(step) } else { super::records::Meta::default() };
                let of_step = [
                    (derived.terminated, meta.flags.terminated),
                    (derived.truncated, meta.flags.truncated),
                    (derived.is_first, meta.flags.first),
                    (derived.mask, step < real && !meta.flags.masked),
                ];
                for (column, value) in of_step {
                    column.into_iter().for_each(|column| target.set(layout, column, row, step, value));
                }
                if let Some(column) = derived.policy_version {
                    target.set(layout, column, row, step, meta.version as i64);
                }
            }
        }
        if let Some(column) = derived.is_first {
            // The observation behind the last step: a final one begins nothing.
            let next = real == layout.steps && !known.end.ends() && at(real).flags.first;
            target.set(layout, column, row, layout.steps, next);
        }
    }
}
