//! How large a store is, and what it is built from.
//!
//! Owns the arithmetic from a capacity to records and bytes, and the check that samples fit. Pure.

use super::book::chunks;
use super::plan::Plan;
use super::records::{RecordLayout, Records};
use super::selector::Selector;
use super::{Book, Pacer};
use crate::layout::{Layout, SLOT_ALIGN};
use crate::schema::SchemaError;

/// The size of a store, known before anything is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StorePlan {
    pub(crate) capacity: usize,
    pub(crate) lanes: usize,
    /// Records a chunk, and chunks.
    pub(crate) chunk: u32,
    pub(crate) chunks: u32,
    pub(crate) record_bytes: usize,
    /// All records, those of cells included.
    records: u32,
    /// What a sample's windows reach: records in front of its first step, and behind it.
    pub(crate) back: usize,
    pub(crate) forward: usize,
    /// Samples begin every so many steps.
    pub(crate) stride: usize,
}

/// What a store is built from.
#[derive(Debug)]
pub(crate) struct StoreConfig {
    pub(crate) size: StorePlan,
    pub(crate) plan: Plan,
    pub(crate) record_layout: RecordLayout,
    pub(crate) selector: Selector,
    pub(crate) pacer: Pacer,
    pub(crate) least_items: usize,
    pub(crate) sure_items: usize,
}

impl StoreConfig {
    /// `paced`: the user has said from how many samples on batches are selected, so a batch's rows do not matter.
    pub(crate) fn new(
        size: StorePlan,
        layout: &Layout,
        selector: Selector,
        pacer: Pacer,
        paced: bool,
    ) -> Result<StoreConfig, SchemaError> {
        let mut record_layout = RecordLayout::new(&layout.leaves)?;
        record_layout.place_cells(size.chunk, size.chunks);
        let plan = Plan::new(layout, &record_layout);
        let sure_items = size.sure_items();
        let least_items = if paced { 1 } else { layout.rows.min(sure_items) };
        Ok(StoreConfig { size, plan, record_layout, selector, pacer, least_items, sure_items })
    }
}

impl StorePlan {
    pub(crate) fn new(layout: &Layout, capacity: usize, lanes: usize) -> Result<StorePlan, SchemaError> {
        let mut records = RecordLayout::new(&layout.leaves)?;
        let too_large = || SchemaError::Overflow { what: format!("a store of {capacity} steps of {lanes} lanes") };
        let (chunk, chunks) = chunks(capacity, lanes).ok_or_else(too_large)?;
        let all = records.place_cells(chunk, chunks).ok_or_else(too_large)?;
        let rules = Plan::new(layout, &records).rules;
        let plan = StorePlan {
            capacity,
            lanes,
            chunk,
            chunks,
            record_bytes: records.bytes,
            records: all,
            back: rules.back as usize,
            forward: rules.forward as usize,
            stride: rules.stride as usize,
        };
        plan.bytes().map(|_| plan)
    }

    /// Records that steps may lie in.
    pub(crate) fn steps(&self) -> u32 {
        self.chunk * self.chunks
    }

    /// All records, those included that hold leaves which are kept on some steps.
    pub(crate) fn records(&self) -> usize {
        self.records as usize
    }

    /// Bytes of all records, rounded up to a page.
    pub(crate) fn bytes(&self) -> Result<usize, SchemaError> {
        let bytes = self.records().checked_mul(self.record_bytes);
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(SLOT_ALIGN));
        bytes.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(|| SchemaError::Overflow {
            what: format!("a store of {} records of {} bytes", self.records(), self.record_bytes),
        })
    }

    /// Steps from one sample's beginning to the next.
    pub(crate) fn stride(&self) -> u64 {
        self.stride as u64
    }

    /// Records of one lane that one sample needs at most.
    pub(crate) fn reach(&self) -> usize {
        self.back + self.forward + 1
    }

    /// More samples than this are never there: steps whose windows are not complete yet are none.
    pub(crate) fn most_items(&self) -> usize {
        (self.capacity - self.forward.min(1)).div_ceil(self.stride)
    }

    /// So many samples are there once the store is full, of episodes of whatever length; at least 1.
    pub(crate) fn sure_items(&self) -> usize {
        let lost = self.lanes.saturating_mul(self.reach() - 1);
        (self.capacity.saturating_sub(lost) / (2 * self.stride)).max(1)
    }

    /// Ordinary memory beside the records, if it can be addressed.
    pub(crate) fn bytes_beside(&self) -> Option<usize> {
        let (meta, links) = Records::bytes_beside();
        let (record, chunk, lane) = Book::bytes_beside();
        let [steps, chunks] = [(self.steps(), meta + record), (self.chunks, links + chunk)]
            .map(|(count, bytes)| usize::try_from(count).ok()?.checked_mul(bytes));
        steps?.checked_add(chunks?)?.checked_add(self.lanes.checked_mul(lane)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(lanes: usize, reach: usize) -> StorePlan {
        let (back, forward) = (reach, 1);
        StorePlan {
            capacity: 100,
            lanes,
            chunk: 4,
            chunks: 50,
            record_bytes: 16,
            records: 200,
            back,
            forward,
            stride: 1,
        }
    }

    /// On machines with 32-bit addresses counts far below their limits reach this.
    #[test]
    fn memory_beside_a_store_that_cannot_be_addressed_is_none() {
        let one = plan(1, 0).bytes_beside().unwrap();
        let lane = plan(2, 0).bytes_beside().unwrap() - one;
        assert_eq!(plan(1001, 0).bytes_beside(), Some(one + 1000 * lane));
        assert_eq!(plan(usize::MAX / 8, 0).bytes_beside(), None);
        assert_eq!(plan((usize::MAX - one) / lane + 2, 0).bytes_beside(), None);
    }

    #[test]
    fn a_store_whose_windows_reach_beyond_it_is_sure_of_one_item() {
        assert_eq!(plan(2, 9).sure_items(), 40);
        assert_eq!(plan(1 << 20, usize::MAX / 4).sure_items(), 1);
    }
}
