//! Where every byte of a batch lies.
//!
//! Owns the arithmetic from a sample and a batch size to offsets: columns one behind the other, each rounded up to
//! [`COLUMN_ALIGN`] bytes, a slot rounded up to [`SLOT_ALIGN`]. Pure: nothing here touches memory, so footprints are
//! exact before anything is allocated.

use crate::element::{DType, Element};
use crate::sample::{Column, Derived, Kind, Sample};
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
    /// Values per row: 1, T or T + 1.
    pub steps: usize,
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
    /// Leaves first, in the order of declaration; derived columns behind them.
    pub columns: Vec<ColumnLayout>,
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
        let steps = match sample.kind {
            Kind::Step => 1,
            Kind::Unroll { steps } => steps,
        };
        let observations = match sample.kind {
            Kind::Step => 1,
            Kind::Unroll { steps } => steps.checked_add(1).ok_or_else(|| overflow("an unroll"))?,
        };
        let leaves = sample.step.leaves.iter().map(|leaf| {
            (
                leaf.name.clone(),
                leaf.dtype,
                leaf.shape.clone(),
                leaf.bytes(),
                if leaf.observation { observations } else { steps },
            )
        });
        let derived = sample.derived.iter().map(|d| {
            let steps = if d.of_observations() { observations } else { steps };
            (d.name().to_owned(), d.dtype(), Vec::new(), d.dtype().size(), steps)
        });
        let (mut columns, mut end) = (Vec::new(), 0usize);
        for (name, dtype, item_shape, item_bytes, steps) in leaves.chain(derived) {
            let too_large = || overflow(format!("column `{name}` of {rows} rows"));
            let row = item_bytes.checked_mul(steps).ok_or_else(too_large)?;
            let whole = row.checked_mul(rows).ok_or_else(too_large)?;
            let (row_stride, step_stride) =
                if sample.time_major { (item_bytes, item_bytes * rows) } else { (row, item_bytes) };
            let offset = end;
            end = offset.checked_add(whole).and_then(|end| round_up(end, COLUMN_ALIGN)).ok_or_else(too_large)?;
            columns.push(ColumnLayout { name, dtype, item_shape, item_bytes, steps, offset, row_stride, step_stride });
        }
        let at = |wanted| sample.derived.iter().position(|&d| d == wanted).map(|i| sample.step.leaves.len() + i);
        Ok(Layout {
            schema: sample.step.schema,
            rows,
            steps,
            kind: sample.kind,
            time_major: sample.time_major,
            within_episode: sample.within_episode,
            columns,
            leaves: sample.step.leaves.clone(),
            reward: sample.step.reward,
            derived: DerivedColumns {
                any: !sample.derived.is_empty(),
                terminated: at(Derived::Terminated),
                truncated: at(Derived::Truncated),
                is_first: at(Derived::IsFirst),
                mask: at(Derived::Mask),
                policy_version: at(Derived::PolicyVersion),
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
        let mut shape = match (self.is_unroll(), self.time_major) {
            (false, _) => vec![rows],
            (true, false) => vec![rows, column.steps],
            (true, true) => vec![column.steps, rows],
        };
        shape.extend_from_slice(&column.item_shape);
        shape
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
    pub dtype: DType,
}

impl Place {
    /// The places of the leaves in a batch slot.
    pub(crate) fn in_slot(layout: &Layout) -> Vec<Place> {
        let place = |c: &ColumnLayout| Place {
            offset: c.offset,
            row_stride: c.row_stride,
            step_stride: c.step_stride,
            bytes: c.item_bytes,
            dtype: c.dtype,
        };
        layout.columns[..layout.leaves.len()].iter().map(place).collect()
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
            places.push(Place { offset: end, row_stride: bytes, step_stride: bytes * lanes, bytes, dtype: leaf.dtype });
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
        step.observation::<u8>("obs", &[1 << 40]);
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
