//! Where every byte of a batch lies.
//!
//! Owns the arithmetic from a sample and a batch size to offsets: columns one behind the other, each rounded up to
//! [`COLUMN_ALIGN`] bytes, a slot rounded up to [`SLOT_ALIGN`]. Pure: nothing here touches memory, so footprints are
//! exact before anything is allocated.

use crate::element::{DType, Element};
use crate::sample::{Column, Declared, Derived, Kind, Sample};
use crate::schema::{LeafInfo, SchemaError};

/// Columns begin at multiples of this many bytes within a slot: enough for the widest vector load, a cache line pair,
/// and the DMA engine.
pub const COLUMN_ALIGN: usize = 256;
/// Slots begin at multiples of this many bytes within the ring: a page.
pub const SLOT_ALIGN: usize = 4096;
/// Leaves begin at multiples of this many bytes within a lane buffer: a cache line.
const LEAF_ALIGN: usize = 64;

/// What is known of one column, as data: for learners driven by a config file, and for tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnInfo {
    /// The name: that of the leaf, or of the derived column.
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// The shape of a full batch's array, in the sample's order (`[B, T, …]` or `[T, B, …]`).
    pub shape: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct ColumnLayout {
    pub name: String,
    pub dtype: DType,
    /// Shape of one step's value.
    pub item_shape: Vec<usize>,
    pub item_bytes: usize,
    /// Values per row: 1, T or T + 1, or those of a window.
    pub steps: usize,
    /// Whether its values lie along an axis of their own, be it of one.
    pub axis: bool,
    /// Bytes from the start of the slot.
    pub offset: usize,
    /// Bytes from one row to the next, and from one step of a row to the next.
    pub row_stride: usize,
    pub step_stride: usize,
}

/// The derived columns that the sample asked for, by their index among the columns.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DerivedColumns {
    /// Whether there is any.
    pub any: bool,
    pub terminated: Option<usize>,
    pub truncated: Option<usize>,
    pub is_first: Option<usize>,
    pub mask: Option<usize>,
    pub policy_version: Option<usize>,
    pub n_step_return: Option<usize>,
    pub discount: Option<usize>,
    pub weight: Option<usize>,
}

impl DerivedColumns {
    /// Whether there is one that has a value for each step.
    pub(crate) fn any_of_steps(&self) -> bool {
        [self.terminated, self.truncated, self.is_first, self.mask, self.policy_version].iter().any(Option::is_some)
    }
}

/// A batch slot, and what writers need of the schema.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub schema: u64,
    pub rows: usize,
    /// Steps a row: 1 for single steps.
    pub steps: usize,
    pub kind: Kind,
    pub time_major: bool,
    pub within_episode: bool,
    pub pad_short: bool,
    /// γ of a transition.
    pub gamma: f64,
    /// Of steps and unrolls leaves first, in the order of declaration; behind them what was asked for.
    pub columns: Vec<ColumnLayout>,
    /// What was asked for: the last of `columns`.
    pub declared: Vec<Declared>,
    pub leaves: Vec<LeafInfo>,
    pub reward: Option<usize>,
    pub derived: DerivedColumns,
    pub slot_bytes: usize,
}

fn overflow(what: impl Into<String>) -> SchemaError {
    SchemaError::Overflow { what: what.into() }
}

fn round_up(value: usize, align: usize) -> Option<usize> {
    value.checked_next_multiple_of(align).filter(|&v| isize::try_from(v).is_ok())
}

impl Layout {
    pub(crate) fn new(sample: &Sample, rows: usize) -> Result<Layout, SchemaError> {
        sample.check()?;
        if let Kind::Unroll { steps: usize::MAX } = sample.kind {
            return Err(overflow("an unroll"));
        }
        let has_time = sample.kind.has_time();
        let leaf =
            |leaf: &LeafInfo, steps: usize, axis: bool| (leaf.dtype, leaf.shape.clone(), leaf.bytes(), steps, axis);
        let own = sample.step.leaves[..sample.leaf_columns()].iter();
        let own = own.map(|info| leaf(info, sample.steps_of(info.observation), has_time));
        let asked = sample.declared.iter().map(|declared| match declared {
            Declared::Window(window) => leaf(&sample.step.leaves[window.leaf], window.len(), !window.single),
            Declared::Derived(derived) => {
                let (dtype, of_rows) = (derived.dtype(), derived.of_rows());
                let steps = if of_rows { 1 } else { sample.steps_of(derived.of_observations()) };
                (dtype, Vec::new(), dtype.size(), steps, has_time && !of_rows)
            }
        });
        let (mut columns, mut end) = (Vec::new(), 0usize);
        for ((name, _), (dtype, item_shape, item_bytes, steps, axis)) in
            sample.names().into_iter().zip(own.chain(asked))
        {
            let too_large = || overflow(format!("column `{name}` of {rows} rows"));
            let row = item_bytes.checked_mul(steps).ok_or_else(too_large)?;
            let whole = row.checked_mul(rows).ok_or_else(too_large)?;
            let (row_stride, step_stride) =
                if sample.time_major { (item_bytes, item_bytes * rows) } else { (row, item_bytes) };
            let offset = end;
            end = offset.checked_add(whole).and_then(|end| round_up(end, COLUMN_ALIGN)).ok_or_else(too_large)?;
            let column =
                ColumnLayout { name, dtype, item_shape, item_bytes, steps, axis, offset, row_stride, step_stride };
            columns.push(column);
        }
        let place = |wanted: &dyn Fn(&Derived) -> bool| {
            let is = |declared: &Declared| matches!(declared, Declared::Derived(derived) if wanted(derived));
            sample.declared.iter().position(is).map(|place| sample.leaf_columns() + place)
        };
        let at = |wanted: Derived| place(&|derived| *derived == wanted);
        Ok(Layout {
            schema: sample.step.schema,
            rows,
            steps: sample.steps_of(false),
            kind: sample.kind,
            time_major: sample.time_major,
            within_episode: sample.within_episode,
            pad_short: sample.pad_short,
            gamma: sample.gamma,
            columns,
            declared: sample.declared.clone(),
            leaves: sample.step.leaves.clone(),
            reward: sample.step.reward,
            derived: DerivedColumns {
                any: !sample.declared.is_empty(),
                terminated: at(Derived::Terminated),
                truncated: at(Derived::Truncated),
                is_first: at(Derived::IsFirst),
                mask: at(Derived::Mask),
                policy_version: at(Derived::PolicyVersion),
                n_step_return: place(&|derived| matches!(derived, Derived::NStepReturn { .. })),
                discount: at(Derived::Discount),
                weight: at(Derived::Weight),
            },
            slot_bytes: round_up(end, SLOT_ALIGN).ok_or_else(|| overflow("a batch"))?,
        })
    }

    pub(crate) fn is_unroll(&self) -> bool {
        matches!(self.kind, Kind::Unroll { .. })
    }

    /// The shape of column `index` in a batch of `rows` rows.
    pub(crate) fn shape(&self, index: usize, rows: usize) -> Vec<usize> {
        let column = &self.columns[index];
        let mut shape = match (column.axis, self.time_major) {
            (false, _) => vec![rows],
            (true, false) => vec![rows, column.steps],
            (true, true) => vec![column.steps, rows],
        };
        shape.extend_from_slice(&column.item_shape);
        shape
    }

    /// The axis of a column's shape that counts rows.
    pub(crate) fn row_axis(&self, index: usize) -> usize {
        usize::from(self.columns[index].axis && self.time_major)
    }

    /// The number of a column. A clone of the sample has the same schema and may have declared other columns later, so
    /// the element type is compared too: bytes are never taken for what they are not.
    ///
    /// # Panics
    /// If it is a column of another sample: the documented panic of every view.
    #[track_caller]
    pub(crate) fn own<T: Element>(&self, column: Column<T>) -> usize {
        let index = column.index as usize;
        assert!(
            column.schema == self.schema && self.columns.get(index).is_some_and(|own| own.dtype == T::DTYPE),
            "a column of another sample was passed: use the handles of the sample that this feed was built from"
        );
        index
    }

    pub(crate) fn infos(&self) -> Vec<ColumnInfo> {
        let info = |(index, column): (usize, &ColumnLayout)| ColumnInfo {
            name: column.name.clone(),
            dtype: column.dtype,
            shape: self.shape(index, self.rows),
        };
        self.columns.iter().enumerate().map(info).collect()
    }
}

/// One leaf's place, as a writer reaches it: `base + offset + row * row_stride + step * step_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub offset: usize,
    pub row_stride: usize,
    pub step_stride: usize,
    /// Bytes of one lane's value.
    pub bytes: usize,
    /// Bytes of the values of all the writer's lanes.
    pub all: usize,
    pub dtype: DType,
}

impl Place {
    /// The places of the leaves in a batch slot. Replayed samples have none: steps are written in a lane buffer, which
    /// `buffer` describes.
    pub(crate) fn in_slot(layout: &Layout, buffer: &[Place]) -> Vec<Place> {
        let place = |(c, of): (&ColumnLayout, &Place)| Place {
            offset: c.offset,
            row_stride: c.row_stride,
            step_stride: c.step_stride,
            ..*of
        };
        match layout.kind.is_replayed() {
            true => buffer.to_vec(),
            false => layout.columns.iter().zip(buffer).map(place).collect(),
        }
    }

    /// The places of the leaves in a lane buffer of `lanes` lanes and `depth` steps (row = lane), and its bytes.
    pub(crate) fn in_lane_buffer(
        layout: &Layout,
        lanes: usize,
        depth: usize,
    ) -> Result<(Vec<Place>, usize), SchemaError> {
        let (mut places, mut end) = (Vec::new(), 0usize);
        for leaf in &layout.leaves {
            let bytes = leaf.bytes();
            let whole = bytes.checked_mul(lanes).and_then(|b| b.checked_mul(depth));
            let next = whole.and_then(|whole| end.checked_add(whole)).and_then(|end| round_up(end, LEAF_ALIGN));
            let next = next.ok_or_else(|| overflow(format!("the lane buffer of {lanes} lanes")))?;
            let all = bytes * lanes;
            places.push(Place { offset: end, row_stride: bytes, step_stride: all, bytes, all, dtype: leaf.dtype });
            end = next;
        }
        Ok((places, end))
    }

    #[inline]
    pub(crate) fn at(&self, row: usize, step: usize) -> usize {
        self.offset + row * self.row_stride + step * self.step_stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Step;
    use proptest::prelude::*;

    fn sample(leaves: &[(usize, bool)], steps: usize, time_major: bool) -> Sample {
        let mut step = Step::new();
        for (i, &(size, observation)) in leaves.iter().enumerate() {
            match (observation, i % 2) {
                (true, _) => _ = step.observation::<u8>(&format!("l{i}"), &[size]),
                (false, 0) => _ = step.leaf::<f32>(&format!("l{i}"), &[size]),
                (false, _) => _ = step.leaf::<i64>(&format!("l{i}"), &[size]),
            }
        }
        let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
        if time_major && steps > 0 {
            sample.time_major();
        }
        sample.terminated();
        sample.is_first();
        sample
    }

    proptest! {
        /// Every byte of every value has a place of its own, inside the slot, at the element's alignment.
        #[test]
        fn values_never_overlap(
            leaves in prop::collection::vec((1usize..5, any::<bool>()), 1..5),
            steps in 0usize..4,
            rows in 1usize..6,
            time_major: bool,
        ) {
            let layout = Layout::new(&sample(&leaves, steps, time_major), rows).unwrap();
            let mut taken = vec![false; layout.slot_bytes];
            for column in &layout.columns {
                prop_assert_eq!(column.offset % COLUMN_ALIGN, 0);
                for row in 0..rows {
                    for step in 0..column.steps {
                        let at = column.offset + row * column.row_stride + step * column.step_stride;
                        prop_assert_eq!(at % column.dtype.size(), 0);
                        for byte in &mut taken[at..at + column.item_bytes] {
                            prop_assert!(!*byte);
                            *byte = true;
                        }
                    }
                }
            }
            prop_assert_eq!(layout.slot_bytes % SLOT_ALIGN, 0);
            let used: usize = (0..layout.columns.len())
                .map(|c| layout.shape(c, rows).iter().product::<usize>() * layout.columns[c].dtype.size())
                .sum();
            prop_assert_eq!(used, taken.iter().filter(|&&t| t).count());
        }
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let mut step = Step::new();
        step.observation::<u8>("obs", &[1 << (usize::BITS - 24)]);
        let sample = Sample::unroll(step, 1 << 20);
        assert!(matches!(Layout::new(&sample, 1 << 10), Err(SchemaError::Overflow { .. })));
        let mut step = Step::new();
        step.observation::<u8>("obs", &[1]);
        assert!(matches!(Layout::new(&Sample::unroll(step, usize::MAX), 1), Err(SchemaError::Overflow { .. })));
    }

    #[test]
    fn shapes_follow_the_table_of_sample() {
        let layout = Layout::new(&sample(&[(3, true), (2, false)], 5, false), 4).unwrap();
        assert_eq!(layout.shape(0, 4), [4, 6, 3]);
        assert_eq!(layout.shape(1, 4), [4, 5, 2]);
        assert_eq!(layout.shape(2, 4), [4, 5]); // terminated
        assert_eq!(layout.shape(3, 4), [4, 6]); // is_first
        let layout = Layout::new(&sample(&[(3, true)], 5, true), 4).unwrap();
        assert_eq!(layout.shape(0, 4), [6, 4, 3]);
        let layout = Layout::new(&sample(&[(3, true)], 0, false), 4).unwrap();
        assert_eq!(layout.shape(0, 3), [3, 3]);
    }
}
