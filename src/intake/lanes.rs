//! Which lanes are taken, and whether anybody can still write.
//!
//! Owns the numbers of lanes and writers, and the count of handles: when the last writer and the last intake handle
//! are gone, the source is at its end.

use crate::sync::{Padded, lock};
use std::ops::Range;
use std::sync::Mutex;

/// Rows and claims count lanes in 32 bits.
const MOST: usize = u32::MAX as usize;

#[derive(Debug)]
pub(crate) struct LaneTable {
    max: Option<usize>,
    /// Read whenever a slot is opened.
    state: Padded<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    /// One entry per writer alive: its index and its lanes.
    writers: Vec<(usize, Range<usize>)>,
    /// Writers and intake handles alive.
    handles: usize,
    ended: bool,
}

/// A writer's place among the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// The smallest number that no other writer has: its stripe.
    pub(crate) index: usize,
    pub(crate) lanes: Range<usize>,
}

/// Why there is no seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoSeat {
    /// So many lanes are allowed, and so many are taken.
    Lanes { max: usize, taken: usize },
    /// The source ended.
    Ended,
}

impl LaneTable {
    pub(crate) fn new(max: Option<usize>) -> LaneTable {
        LaneTable { max, state: Padded::default() }
    }

    /// Counts one more intake handle.
    pub(crate) fn add_handle(&self) {
        lock(&self.state).handles += 1;
    }

    /// Counts one handle less; true when it was the last one.
    #[must_use]
    pub(crate) fn drop_handle(&self) -> bool {
        let mut taken = lock(&self.state);
        taken.handles -= 1;
        taken.ended |= taken.handles == 0;
        taken.ended
    }

    /// Seats a writer in the lowest run of free lanes.
    pub(crate) fn seat(&self, lanes: usize) -> Result<Seat, NoSeat> {
        let mut taken = lock(&self.state);
        if taken.ended {
            return Err(NoSeat::Ended);
        }
        let mut ranges: Vec<Range<usize>> = taken.writers.iter().map(|(_, lanes)| lanes.clone()).collect();
        ranges.sort_by_key(|range| range.start);
        let mut first = 0;
        for range in &ranges {
            if range.start - first >= lanes {
                break;
            }
            first = range.end;
        }
        let max = self.max.unwrap_or(MOST).min(MOST);
        let Some(end) = first.checked_add(lanes).filter(|&end| end <= max) else {
            let used = ranges.iter().map(ExactSizeIterator::len).sum();
            return Err(NoSeat::Lanes { max, taken: used });
        };
        let index = (0..).find(|i| taken.writers.iter().all(|(other, _)| other != i)).unwrap_or(0);
        taken.writers.push((index, first..end));
        taken.handles += 1;
        Ok(Seat { index, lanes: first..end })
    }

    /// Frees a writer's seat; true when nobody is left to write.
    #[must_use]
    pub(crate) fn leave(&self, seat: &Seat) -> bool {
        lock(&self.state).writers.retain(|(index, _)| *index != seat.index);
        self.drop_handle()
    }

    /// Lanes that writers drive.
    pub(crate) fn taken(&self) -> usize {
        lock(&self.state).writers.iter().map(|(_, lanes)| lanes.len()).sum()
    }

    /// Writers alive, and the widest of them.
    pub(crate) fn writers(&self) -> (usize, usize) {
        let taken = lock(&self.state);
        (taken.writers.len(), taken.writers.iter().map(|(_, lanes)| lanes.len()).max().unwrap_or(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_reused_lowest_first_and_bounded() {
        let table = LaneTable::new(Some(10));
        table.add_handle();
        let (a, b) = (table.seat(4).unwrap(), table.seat(4).unwrap());
        assert_eq!((a.index, a.lanes.clone(), b.index, b.lanes.clone()), (0, 0..4, 1, 4..8));
        assert_eq!(table.seat(3), Err(NoSeat::Lanes { max: 10, taken: 8 }));
        assert!(!table.leave(&a));
        let c = table.seat(3).unwrap();
        assert_eq!((c.index, c.lanes.clone()), (0, 0..3));
        assert_eq!(table.seat(2).unwrap().lanes, 8..10);
        assert_eq!(table.writers(), (3, 4));
    }

    #[test]
    fn the_last_handle_ends_the_source() {
        let table = LaneTable::new(None);
        table.add_handle();
        let seat = table.seat(1).unwrap();
        assert!(!table.drop_handle());
        assert!(table.leave(&seat));
        assert_eq!(table.seat(1), Err(NoSeat::Ended));
    }
}
