//! Which steps of a store become a batch.
//!
//! Owns selection: samplers that choose among *items*, and the [`Pace`] between inserts and samples. An item is a number
//! in `0..items`: the store's own, dense and used again after a removal. Everything here works on such numbers alone, on
//! one thread, and draws from a generator that is passed in, so that a seed says everything. What it does not do: know
//! steps, lanes, windows or slots, wait, or wake anybody.

mod draws;
pub(crate) mod error;
mod order;
pub(crate) mod pace;
mod prioritized;
mod state;
mod times;
mod tree;
mod uniform;

pub use draws::Draws;
pub use error::{PaceError, PriorityError, SamplerError};
pub use order::{Fifo, Lifo};
pub use pace::{Pace, PaceWait};
pub use prioritized::{Normalize, Prioritized};
pub use times::MaxTimes;
pub use uniform::{Uniform, WithoutReplacement};

use std::fmt;

/// One selected item: a row of the batch to come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selected {
    /// The item.
    pub item: u32,
    /// With what probability this row became this item; more than 0.
    pub probability: f64,
    /// The importance weight of the row, in (0, 1]; 1 where every item is as likely as the others.
    pub weight: f32,
}

/// Whether a pass over all items goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The pass goes on, or the sampler knows no passes.
    GoesOn,
    /// What was selected is the last of a pass: every item had its turn. The next selection begins another.
    Ended,
}

/// Chooses the items of a batch. Ready-made are [`Uniform`], [`WithoutReplacement`], [`Prioritized`], [`Fifo`] and
/// [`Lifo`], each also within [`MaxTimes`]; for anything else implement this trait.
///
/// A sampler is driven by one thread: it is told of every item that may be selected from now on and of every one that no
/// longer may, and it chooses when asked. It owns no data of the steps, and it must draw from nothing but the generator
/// that it is given, or batches are no longer a function of the seed.
///
/// ```
/// use pinring::{Draws, Pass, PriorityError, Sampler, SamplerError, Selected};
///
/// /// Every item in turn, by its number.
/// #[derive(Debug, Default)]
/// struct RoundRobin {
///     present: Vec<bool>,
///     count: usize,
///     next: usize,
/// }
///
/// impl Sampler for RoundRobin {
///     fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
///         *self = RoundRobin { present: vec![false; items as usize], ..RoundRobin::default() };
///         Ok(())
///     }
///     fn insert(&mut self, item: u32, _priority: Option<f32>) -> Result<(), PriorityError> {
///         self.count += usize::from(!std::mem::replace(&mut self.present[item as usize], true));
///         Ok(())
///     }
///     fn remove(&mut self, item: u32) {
///         self.count -= usize::from(std::mem::replace(&mut self.present[item as usize], false));
///     }
///     fn selectable(&self) -> usize {
///         self.count
///     }
///     fn select(&mut self, rows: usize, _draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
///         for _ in 0..if self.count > 0 { rows } else { 0 } {
///             while !self.present[self.next] {
///                 self.next = (self.next + 1) % self.present.len();
///             }
///             into.push(Selected { item: self.next as u32, probability: 1.0, weight: 1.0 });
///             self.next = (self.next + 1) % self.present.len();
///         }
///         Pass::GoesOn
///     }
/// }
///
/// let mut sampler = RoundRobin::default();
/// sampler.begin(4).unwrap();
/// for item in [0, 1, 3] {
///     sampler.insert(item, None).unwrap();
/// }
/// let mut rows = Vec::new();
/// sampler.select(5, &mut Draws::new(0, 0), &mut rows);
/// assert_eq!(rows.iter().map(|row| row.item).collect::<Vec<_>>(), [0, 1, 3, 0, 1]);
/// ```
pub trait Sampler: fmt::Debug + Send {
    /// Begins anew with no item: items will be `0..items`. Called once before everything else, and again when the store
    /// is cleared.
    ///
    /// # Errors
    /// Settings that cannot work.
    fn begin(&mut self, items: u32) -> Result<(), SamplerError>;

    /// From now on the item may be selected. `priority` is what its writer gave it. An item that is there already only
    /// gets that priority.
    ///
    /// # Errors
    /// A priority that is none: nothing is changed then.
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError>;

    /// From now on the item may not be selected. One that is not there is passed over.
    fn remove(&mut self, item: u32);

    /// New priorities, in order, so that the last one of an item counts. Items that are not there are passed over.
    /// Samplers without priorities ignore them.
    ///
    /// # Errors
    /// A priority that is none: nothing is changed then, for any item.
    fn update(&mut self, priorities: &[(u32, f32)]) -> Result<(), PriorityError> {
        let _ = priorities;
        Ok(())
    }

    /// The item's priority; `None` if it is not there, or if the sampler has no priorities.
    fn priority(&self, item: u32) -> Option<f32> {
        let _ = item;
        None
    }

    /// Whether [`update`](Sampler::update) changes anything. Where it does, a feed on a device reserves page-locked room for
    /// the priorities that come back from there.
    fn has_priorities(&self) -> bool {
        true
    }

    /// How many different items may be selected now. No batch is asked for while there are fewer than it has rows, or, where a
    /// [`Pace`] is given, fewer than its `min_size`; when the last writer is gone, one is enough.
    fn selectable(&self) -> usize;

    /// Pushes up to `rows` selected items. Fewer make a short batch. None at all is a refusal: the sampler is asked
    /// again after the next insert, removal or update.
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass;

    /// How many times an item is selected at most. A [`Pace`] that asks for more samples an insert is refused.
    fn most_times(&self) -> Option<u32> {
        None
    }

    /// About how many bytes it takes for so many items, once [`begin`](Sampler::begin) was called: they count against the
    /// memory budget, which is looked at before.
    fn bytes(&self, items: u32) -> usize {
        let _ = items;
        0
    }

    /// Sets the exponent of the importance weights.
    ///
    /// # Errors
    /// The sampler has none, or the value cannot be one.
    fn set_beta(&mut self, beta: f64) -> Result<(), SamplerError> {
        let _ = beta;
        Err(SamplerError::NoBeta)
    }

    /// Everything that later selections depend on beside the generator, as bytes of the sampler's own. A sampler that
    /// gives none is told of all items anew when a store is restored.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Becomes the sampler that [`save`](Sampler::save) was called on; [`begin`](Sampler::begin) was called before, with
    /// the items of now.
    ///
    /// # Errors
    /// These bytes are not of this sampler with so many items. Nothing is changed then.
    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        let _ = saved;
        Err(SamplerError::Saved { why: "this sampler saves nothing" })
    }
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn begin(&mut self, items: u32) -> Result<(), SamplerError> {
        (**self).begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> Result<(), PriorityError> {
        (**self).insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        (**self).remove(item);
    }
    fn update(&mut self, priorities: &[(u32, f32)]) -> Result<(), PriorityError> {
        (**self).update(priorities)
    }
    fn priority(&self, item: u32) -> Option<f32> {
        (**self).priority(item)
    }
    fn has_priorities(&self) -> bool {
        (**self).has_priorities()
    }
    fn selectable(&self) -> usize {
        (**self).selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        (**self).select(rows, draws, into)
    }
    fn most_times(&self) -> Option<u32> {
        (**self).most_times()
    }
    fn bytes(&self, items: u32) -> usize {
        (**self).bytes(items)
    }
    fn set_beta(&mut self, beta: f64) -> Result<(), SamplerError> {
        (**self).set_beta(beta)
    }
    fn save(&self) -> Vec<u8> {
        (**self).save()
    }
    fn restore(&mut self, saved: &[u8]) -> Result<(), SamplerError> {
        (**self).restore(saved)
    }
}
