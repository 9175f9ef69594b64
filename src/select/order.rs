//! Items by age: the oldest first, or the newest.
//!
//! Owns a list of items in the order of their insertion. What it does not do: forget an item that was selected; that is
//! [`MaxTimes`](super::MaxTimes)'s.

use super::state::{Reader, Saved};
use super::{Draws, Pass, PriorityError, Sampler, SamplerError, Selected};

/// No neighbour.
const NONE: u32 = u32::MAX;

/// A doubly linked list through two arrays.
#[derive(Clone, Debug, Default)]
struct ByAge {
    /// Of each item its older and its newer neighbour. An item that is not there is its own neighbour.
    neighbours: Vec<[u32; 2]>,
    /// The newest and the oldest: the neighbours of what lies beyond the ends.
    ends: [u32; 2],
    count: usize,
}

const OLDER: usize = 0;
const NEWER: usize = 1;

impl ByAge {
    fn begin(&mut self, items: u32) {
        self.neighbours.clear();
        self.neighbours.extend((0..items).map(|item| [item; 2]));
        (self.ends, self.count) = ([NONE; 2], 0);
    }

    fn has(&self, item: u32) -> bool {
        self.neighbours[item as usize][OLDER] != item
    }

    /// Makes `item` the neighbour of `of` in a direction; beyond the ends if that is no item.
    fn link(&mut self, of: u32, direction: usize, item: u32) {
        match self.neighbours.get_mut(of as usize) {
            Some(neighbours) => neighbours[direction] = item,
            None => self.ends[direction] = item,
        }
    }

    /// False if it was there already.
    fn push(&mut self, item: u32) -> bool {
        let new = !self.has(item);
        if new {
            let newest = self.ends[OLDER];
            self.neighbours[item as usize] = [newest, NONE];
            self.link(newest, NEWER, item);
            self.ends[OLDER] = item;
            self.count += 1;
        }
        new
    }

    fn remove(&mut self, item: u32) {
        if self.has(item) {
            let [older, newer] = self.neighbours[item as usize];
            self.link(older, NEWER, newer);
            self.link(newer, OLDER, older);
            self.neighbours[item as usize] = [item; 2];
            self.count -= 1;
        }
    }

    /// The items from one end: towards the newer from the oldest, towards the older from the newest.
    fn walk(&self, direction: usize) -> impl Iterator<Item = u32> {
        let present = |item: u32| (item != NONE).then_some(item);
        std::iter::successors(present(self.ends[direction]), move |&item| {
            present(self.neighbours[item as usize][direction])
        })
    }

    fn select(&self, direction: usize, rows: usize, into: &mut Vec<Selected>) -> Pass {
        into.extend(self.walk(direction).take(rows).map(|item| Selected { item, probability: 1.0, weight: 1.0 }));
        Pass::GoesOn
    }

    fn save(&self, tag: &[u8; 4]) -> Vec<u8> {
        let items: Vec<u32> = self.walk(NEWER).collect();
        Saved::new(tag).u64(self.neighbours.len() as u64).items(&items).bytes()
    }

    fn restored(&self, tag: &[u8; 4], saved: &[u8]) -> Result<ByAge, SamplerError> {
        let mut reader = Reader::new(tag, saved)?;
        let mut list = ByAge::default();
        list.begin(reader.items(self.neighbours.len())?);
        for item in reader.present(self.neighbours.len())? {
            if !list.push(item) {
                return Err(SamplerError::Saved { why: "an item is there twice" });
            }
        }
        reader.end()?;
        Ok(list)
    }
}

macro_rules! by_age {
    ($(#[$doc:meta])* $name:ident, $direction:expr, $tag:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name {
            list: ByAge,
        }

        impl $name {
            /// The sampler, with no items yet.
            pub fn new() -> $name {
                $name::default()
            }
        }

        impl Sampler for $name {
            fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
                self.list.begin(items);
                Ok(())
            }
            fn insert(&mut self, item: u32, _priority: Option<f32>) -> Result<(), PriorityError> {
                self.list.push(item);
                Ok(())
            }
            fn remove(&mut self, item: u32) {
                self.list.remove(item);
            }
            fn bytes(&self, items: u32) -> usize {
                (items as usize).saturating_mul(size_of::<[u32; 2]>())
            }
            fn has_priorities(&self) -> bool {
                false
            }
            fn selectable(&self) -> usize {
                self.list.count
            }
            fn select(&mut self, rows: usize, _draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
                self.list.select($direction, rows, into)
            }
            fn save(&self) -> Vec<u8> {
                self.list.save($tag)
            }
            fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
                self.list = self.list.restored($tag, saved)?;
                Ok(())
            }
        }
    };
}

by_age! {
    /// The oldest items, oldest first. A batch never holds an item twice; the next one begins with the oldest again,
    /// so a queue is `MaxTimes::new(Fifo::new(), 1)`.
    ///
    /// Insert, remove and each selected row cost O(1). Memory: 8 bytes an item.
    ///
    /// ```
    /// use pinring::{Draws, Fifo, MaxTimes, Sampler};
    /// let mut queue = MaxTimes::new(Fifo::new(), 1);
    /// queue.begin(9).unwrap();
    /// [5, 3, 8].into_iter().for_each(|item| queue.insert(item, None).unwrap());
    /// let mut rows = Vec::new();
    /// queue.select(2, &mut Draws::new(0, 0), &mut rows);
    /// queue.select(2, &mut Draws::new(0, 0), &mut rows);
    /// assert_eq!(rows.iter().map(|row| row.item).collect::<Vec<_>>(), [5, 3, 8]);
    /// ```
    Fifo, NEWER, b"fifo"
}

by_age! {
    /// The newest items, newest first. A batch never holds an item twice; the next one begins with the newest again,
    /// so a stack is `MaxTimes::new(Lifo::new(), 1)`.
    ///
    /// Insert, remove and each selected row cost O(1). Memory: 8 bytes an item.
    ///
    /// ```
    /// use pinring::{Draws, Lifo, Sampler};
    /// let mut newest = Lifo::new();
    /// newest.begin(9).unwrap();
    /// [5, 3, 8].into_iter().for_each(|item| newest.insert(item, None).unwrap());
    /// let mut rows = Vec::new();
    /// newest.select(2, &mut Draws::new(0, 0), &mut rows);
    /// assert_eq!(rows.iter().map(|row| row.item).collect::<Vec<_>>(), [8, 3]);
    /// ```
    Lifo, OLDER, b"lifo"
}
