//! Every item as likely as the others: with replacement, and without.
//!
//! Owns the list of present items. What it does not do: priorities.

use super::state::{Reader, Saved};
use super::{Draws, Pass, PriorityError, Sampler, SamplerError, Selected};

/// No place: the item is not there.
const ABSENT: u32 = u32::MAX;

/// The present items without gaps, and where each is.
#[derive(Clone, Debug, Default)]
struct Dense {
    items: Vec<u32>,
    places: Vec<u32>,
}

impl Dense {
    /// Of both lists.
    fn bytes(items: u32) -> usize {
        (items as usize).saturating_mul(2 * size_of::<u32>())
    }

    fn begin(&mut self, items: u32) {
        self.items.clear();
        self.places.clear();
        self.places.resize(items as usize, ABSENT);
    }

    fn place(&self, item: u32) -> Option<usize> {
        let place = self.places[item as usize];
        (place != ABSENT).then_some(place as usize)
    }

    /// False if it was there already.
    fn push(&mut self, item: u32) -> bool {
        let new = self.place(item).is_none();
        if new {
            self.places[item as usize] = self.items.len() as u32;
            self.items.push(item);
        }
        new
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.items.swap(a, b);
        self.places[self.items[a] as usize] = a as u32;
        self.places[self.items[b] as usize] = b as u32;
    }

    /// Takes out the item at a place; the last one moves there.
    fn swap_remove(&mut self, place: usize) {
        self.swap(place, self.items.len() - 1);
        if let Some(item) = self.items.pop() {
            self.places[item as usize] = ABSENT;
        }
    }

    fn save(&self, saved: Saved) -> Saved {
        saved.u64(self.places.len() as u64).items(&self.items)
    }

    fn restored(&self, reader: &mut Reader<'_>) -> Result<Dense, SamplerError> {
        let mut dense = Dense::default();
        dense.begin(reader.items(self.places.len())?);
        for item in reader.present(self.places.len())? {
            if !dense.push(item) {
                return Err(SamplerError::Saved { why: "an item is there twice" });
            }
        }
        Ok(dense)
    }
}

/// Uniform, with replacement: every row of a batch is any of the items, each as likely as the others.
///
/// Insert, remove and each selected row cost O(1). Memory: 8 bytes an item.
///
/// ```
/// use pinring::{Draws, Sampler, Uniform};
/// let mut sampler = Uniform::new();
/// sampler.begin(100).unwrap();
/// sampler.insert(7, None).unwrap();
/// sampler.insert(9, None).unwrap();
/// let mut rows = Vec::new();
/// sampler.select(4, &mut Draws::new(1, 0), &mut rows);
/// assert!(rows.iter().all(|row| [7, 9].contains(&row.item) && row.probability == 0.5));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Uniform {
    dense: Dense,
}

impl Uniform {
    /// The sampler, with no items yet.
    pub fn new() -> Uniform {
        Uniform::default()
    }
}

const UNIFORM: &[u8; 4] = b"unif";

impl Sampler for Uniform {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.dense.begin(items);
        Ok(())
    }

    fn insert(&mut self, item: u32, _priority: Option<f32>) -> Result<(), PriorityError> {
        self.dense.push(item);
        Ok(())
    }

    fn remove(&mut self, item: u32) {
        if let Some(place) = self.dense.place(item) {
            self.dense.swap_remove(place);
        }
    }

    fn has_priorities(&self) -> bool {
        false
    }

    fn bytes(&self, items: u32) -> usize {
        Dense::bytes(items)
    }

    fn selectable(&self) -> usize {
        self.dense.items.len()
    }

    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        let items = &self.dense.items;
        if !items.is_empty() {
            let probability = 1.0 / items.len() as f64;
            into.extend((0..rows).map(|_| {
                let item = items[draws.below(items.len() as u64) as usize];
                Selected { item, probability, weight: 1.0 }
            }));
        }
        Pass::GoesOn
    }

    fn save(&self) -> Vec<u8> {
        self.dense.save(Saved::new(UNIFORM)).bytes()
    }

    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        let mut reader = Reader::new(UNIFORM, saved)?;
        let dense = self.dense.restored(&mut reader)?;
        reader.end()?;
        self.dense = dense;
        Ok(())
    }
}

/// Uniform, without replacement: pass after pass over all items, each pass in an order of its own. A pass ends with a
/// batch that may be short, and says so ([`Pass::Ended`]).
///
/// An item inserted during a pass still has its turn in it. A pass whose last items were removed ends unsaid.
///
/// Insert, remove and each selected row cost O(1). Memory: 8 bytes an item.
///
/// ```
/// use pinring::{Draws, Pass, Sampler, WithoutReplacement};
/// let mut sampler = WithoutReplacement::new();
/// sampler.begin(5).unwrap();
/// (0..5).for_each(|item| sampler.insert(item, None).unwrap());
/// let (mut draws, mut rows) = (Draws::new(1, 0), Vec::new());
/// assert_eq!(sampler.select(3, &mut draws, &mut rows), Pass::GoesOn);
/// assert_eq!(sampler.select(3, &mut draws, &mut rows), Pass::Ended); // two were left
/// let mut items: Vec<u32> = rows.iter().map(|row| row.item).collect();
/// items.sort();
/// assert_eq!(items, [0, 1, 2, 3, 4]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct WithoutReplacement {
    dense: Dense,
    /// So many items at the front have had their turn in this pass.
    seen: usize,
}

impl WithoutReplacement {
    /// The sampler, with no items yet.
    pub fn new() -> WithoutReplacement {
        WithoutReplacement::default()
    }
}

const WITHOUT: &[u8; 4] = b"pass";

impl Sampler for WithoutReplacement {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        self.dense.begin(items);
        self.seen = 0;
        Ok(())
    }

    fn insert(&mut self, item: u32, _priority: Option<f32>) -> Result<(), PriorityError> {
        self.dense.push(item);
        Ok(())
    }

    fn remove(&mut self, item: u32) {
        let Some(mut place) = self.dense.place(item) else { return };
        if place < self.seen {
            // The last of the seen moves into its place, so that the gap is at the front of the others.
            self.seen -= 1;
            self.dense.swap(place, self.seen);
            place = self.seen;
        }
        self.dense.swap_remove(place);
    }

    fn has_priorities(&self) -> bool {
        false
    }

    fn bytes(&self, items: u32) -> usize {
        Dense::bytes(items)
    }

    fn selectable(&self) -> usize {
        self.dense.items.len()
    }

    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        let all = self.dense.items.len();
        if self.seen == all {
            self.seen = 0;
        }
        for _ in 0..rows.min(all - self.seen) {
            let left = all - self.seen;
            let drawn = self.seen + draws.below(left as u64) as usize;
            self.dense.swap(self.seen, drawn);
            let item = self.dense.items[self.seen];
            into.push(Selected { item, probability: 1.0 / left as f64, weight: 1.0 });
            self.seen += 1;
        }
        if self.seen < all || rows == 0 || all == 0 {
            return Pass::GoesOn;
        }
        self.seen = 0; // whatever is inserted from now on belongs to the next pass, and so do all others
        Pass::Ended
    }

    fn save(&self) -> Vec<u8> {
        self.dense.save(Saved::new(WITHOUT)).u64(self.seen as u64).bytes()
    }

    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        let mut reader = Reader::new(WITHOUT, saved)?;
        let dense = self.dense.restored(&mut reader)?;
        let seen = reader.u64()?;
        reader.end()?;
        if seen > dense.items.len() as u64 {
            return Err(SamplerError::Saved { why: "a pass has seen more items than there are" });
        }
        (self.dense, self.seen) = (dense, seen as usize);
        Ok(())
    }
}
