//! Items by priority: proportional prioritization.
//!
//! Owns priorities, their exponent, and importance weights, after Schaul et al. 2016, "Prioritized Experience Replay",
//! sections 3.3 and 3.4. What it does not do: compute priorities; a learner gives them.

use super::error::check_priority;
use super::state::{Reader, Saved};
use super::tree::{Min, Sum, Tree};
use super::{Draws, Pass, PriorityError, Sampler, SamplerError, Selected};

/// What the largest importance weight, which becomes 1, is the largest of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normalize {
    /// Of the batch: the usual choice. The row of the batch that was least likely has weight 1.
    #[default]
    Batch,
    /// Of the store: weights of different batches can be compared. The item of the store that is least likely has
    /// weight 1, whether it is in the batch or not. Updates cost about twice as much.
    Store,
}

/// Proportional prioritization: an item of priority p is selected with probability P = p^α / Σ p^α, with replacement,
/// and its row has the importance weight (N P)^−β, divided by the largest such weight of the batch or the store
/// (Schaul et al. 2016, "Prioritized Experience Replay", sections 3.3 and 3.4).
///
/// - The exponent α is applied here, once, to priorities from wherever they come: give |δ|, not |δ|^α.
/// - A priority below the [`floor`](Prioritized::floor) counts as the floor, the ε of section 3.3, so that 0 is a
///   priority like others.
/// - An item without a priority of its own gets the largest that was seen so far, 1 before any, so that each is soon
///   selected once.
/// - Sums are recomputed, never patched: they do not drift, however many updates there are.
///
/// Costs, for a batch of n among N items: selection O(n log₈ N), an update of n O(n log₈ N); an insert or removal O(1), and
/// its part of the next selection O(log₈ N). Memory: 13.2 bytes an item, 22.3 with [`Normalize::Store`].
///
/// ```
/// use pinring::{Draws, Prioritized, Sampler};
/// let mut sampler = Prioritized::new(1.0, 1.0);
/// sampler.begin(10).unwrap();
/// sampler.insert(0, Some(1.0)).unwrap();
/// sampler.insert(1, Some(3.0)).unwrap();
/// let mut rows = Vec::new();
/// sampler.select(1000, &mut Draws::new(1, 0), &mut rows);
/// for row in rows {
///     assert_eq!(row.probability, [0.25, 0.75][row.item as usize]);
///     assert_eq!(row.weight, [1.0, 1.0 / 3.0][row.item as usize]);
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Prioritized {
    alpha: f64,
    beta: f64,
    floor: f32,
    stratified: bool,
    /// Of each item, as it was given; [`ABSENT`] if it is not there.
    priorities: Vec<f32>,
    /// Of each item p^α.
    masses: Tree<Sum>,
    /// The same, where weights are normalised by the store.
    least: Option<Tree<Min>>,
    /// How many items are there whose mass is not 0.
    count: usize,
    largest: f32,
    /// Node and remainder of each row on its way down.
    rows: Vec<(u32, f64)>,
}

const ABSENT: f32 = -1.0;
/// What the first items get that come without a priority (Schaul et al. 2016, algorithm 1, line 2).
const FIRST: f32 = 1.0;
/// Changes are carried up once so many wait, so that their list stays small beside the tree.
const MOST_WAITING: usize = 4096;
const TAG: &[u8; 4] = b"prio";

impl Prioritized {
    /// α, the exponent of priorities, from 0 (uniform) to 4, is fixed. β, the exponent of importance weights, from 0 (no
    /// correction) to 1 (full correction), can be [set](Sampler::set_beta) at any time. What is out of range is refused
    /// by [`begin`](Sampler::begin).
    pub fn new(alpha: f64, beta: f64) -> Prioritized {
        Prioritized {
            alpha,
            beta,
            floor: 1e-6,
            stratified: false,
            priorities: Vec::new(),
            masses: Tree::new(0),
            least: None,
            count: 0,
            largest: FIRST,
            rows: Vec::new(),
        }
    }

    /// The least priority: whatever is below counts as this. 10⁻⁶ unless set. With 0, an item of priority 0 is never
    /// selected.
    pub fn floor(mut self, floor: f32) -> Prioritized {
        self.floor = floor;
        self
    }

    /// Whether a batch of n divides the total mass into n equal parts and takes a row from each (section 3.3): less
    /// variance, the same probabilities.
    pub fn stratified(mut self, stratified: bool) -> Prioritized {
        self.stratified = stratified;
        self
    }

    /// What importance weights are normalised by. [`Normalize::Batch`] unless set.
    pub fn normalize(mut self, by: Normalize) -> Prioritized {
        self.least = (by == Normalize::Store).then(|| Tree::new(0));
        self
    }

    /// The exponent, applied once. Within its range no `f32` above 0 under- or overflows.
    fn mass(&self, priority: f32) -> f64 {
        let priority = f64::from(priority.max(self.floor));
        if priority == 0.0 {
            0.0
        } else if self.alpha == 1.0 {
            priority
        } else {
            priority.powf(self.alpha)
        }
    }

    /// Puts in, replaces or, with [`ABSENT`], takes out.
    fn set(&mut self, item: u32, priority: f32) {
        let mass = if priority == ABSENT { 0.0 } else { self.mass(priority) };
        self.count -= usize::from(self.masses.get(item) > 0.0);
        self.count += usize::from(mass > 0.0);
        self.largest = self.largest.max(priority);
        self.priorities[item as usize] = priority;
        self.masses.set(item, mass);
        if let Some(least) = &mut self.least {
            least.set(item, if mass > 0.0 { mass } else { f64::INFINITY });
        }
    }

    fn settle(&mut self) {
        self.masses.settle();
        if let Some(least) = &mut self.least {
            least.settle();
        }
    }

    fn settle_when_many(&mut self) {
        if self.masses.waiting() >= MOST_WAITING {
            self.settle();
        }
    }

    fn has(&self, item: u32) -> bool {
        self.priorities[item as usize] != ABSENT
    }

    /// (N P)^−β / (N P_least)^−β = (p_least^α / p^α)^β.
    fn weight(&self, least: f64, mass: f64) -> f32 {
        let ratio = least / mass;
        // Single precision is enough for what becomes an `f32`, where it has the range.
        let weight = if ratio as f32 >= f32::MIN_POSITIVE {
            (ratio as f32).powf(self.beta as f32)
        } else {
            ratio.powf(self.beta) as f32
        };
        weight.clamp(f32::MIN_POSITIVE, 1.0)
    }
}

impl Sampler for Prioritized {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        if !(0.0..=4.0).contains(&self.alpha) {
            return Err(SamplerError::Alpha { got: self.alpha });
        }
        if !(self.floor.is_finite() && self.floor >= 0.0) {
            return Err(SamplerError::Floor { got: self.floor });
        }
        self.set_beta(self.beta)?;
        self.priorities.clear();
        self.priorities.resize(items as usize, ABSENT);
        self.masses = Tree::new(items as usize);
        self.least = self.least.take().map(|_| Tree::new(items as usize));
        (self.count, self.largest) = (0, FIRST);
        Ok(())
    }

    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        let priority = priority.map(|priority| check_priority(0, priority)).transpose()?;
        self.set(item, priority.unwrap_or(self.largest));
        self.settle_when_many();
        Ok(())
    }

    fn remove(&mut self, item: u32) {
        if self.has(item) {
            self.set(item, ABSENT);
            self.settle_when_many();
        }
    }

    fn update(&mut self, priorities: &[(u32, f32)]) -> Result<(), PriorityError> {
        for (index, &(_, priority)) in priorities.iter().enumerate() {
            check_priority(index, priority)?;
        }
        // Nothing but loads: many more of them wait for memory at once than with what follows between them.
        let touched = priorities.iter().fold(0, |touched, &(item, _)| {
            touched ^ self.masses.get(item).to_bits() ^ u64::from(self.priorities[item as usize].to_bits())
        });
        std::hint::black_box(touched);
        for &(item, priority) in priorities {
            if self.has(item) {
                self.set(item, priority);
            }
        }
        self.settle();
        Ok(())
    }

    fn priority(&self, item: u32) -> Option<f32> {
        self.has(item).then_some(self.priorities[item as usize])
    }

    /// Items whose mass is not 0.
    fn bytes(&self, items: u32) -> usize {
        let items = items as usize;
        let least = if self.least.is_some() { Tree::<Min>::bytes(items) } else { 0 };
        items.saturating_mul(size_of::<f32>()).saturating_add(Tree::<Sum>::bytes(items)).saturating_add(least)
    }

    fn selectable(&self) -> usize {
        self.count
    }

    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        self.settle();
        if self.count == 0 {
            return Pass::GoesOn;
        }
        let total = self.masses.root();
        let mut on_the_way = std::mem::take(&mut self.rows);
        on_the_way.clear();
        if self.stratified {
            let part = total / rows as f64;
            on_the_way.extend((0..rows).map(|row| (0, (row as f64 + draws.unit()) * part)));
        } else {
            on_the_way.extend((0..rows).map(|_| (0, draws.unit() * total)));
        }
        self.masses.find(&mut on_the_way);
        let mut least = f64::INFINITY;
        for (item, mass) in &mut on_the_way {
            *mass = self.masses.get(*item);
            least = least.min(*mass);
        }
        if let Some(of_store) = &self.least {
            least = of_store.root();
        }
        into.extend(on_the_way.iter().map(|&(item, mass)| Selected {
            item,
            probability: (mass / total).max(f64::MIN_POSITIVE),
            weight: self.weight(least, mass),
        }));
        self.rows = on_the_way;
        Pass::GoesOn
    }

    fn set_beta(&mut self, beta: f64) -> Result<(), SamplerError> {
        if !(0.0..=1.0).contains(&beta) {
            return Err(SamplerError::Beta { got: beta });
        }
        self.beta = beta;
        Ok(())
    }

    /// The priorities and the largest; not the settings, which are those of now.
    fn save(&self) -> Vec<u8> {
        let bits: Vec<u32> = self.priorities.iter().map(|priority| priority.to_bits()).collect();
        Saved::new(TAG).u64(u64::from(self.largest.to_bits())).items(&bits).bytes()
    }

    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        let mut reader = Reader::new(TAG, saved)?;
        let largest = f32::from_bits(reader.u64()? as u32);
        let priorities: Vec<f32> = reader.numbers()?.into_iter().map(f32::from_bits).collect();
        reader.end()?;
        if priorities.len() != self.priorities.len() {
            return Err(SamplerError::Saved { why: "the store had another size" });
        }
        let valid = |priority: f32| priority.is_finite() && priority >= 0.0;
        if !valid(largest) || !priorities.iter().all(|&priority| priority == ABSENT || valid(priority)) {
            return Err(SamplerError::Saved { why: "a priority is none" });
        }
        (0..).zip(priorities).for_each(|(item, priority)| self.set(item, priority));
        self.largest = largest;
        self.settle();
        Ok(())
    }
}
