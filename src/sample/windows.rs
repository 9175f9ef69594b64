//! Windows around a stored step, and what is summed up over them.

use super::{Column, Declared, Derived, Kind, Sample};
use crate::element::Element;
use crate::schema::{Leaf, MOST_STEPS, SchemaError};
use std::ops::Range;

/// What a window holds where its episode has no step: before the first one and behind the last.
///
/// ```
/// # use pinring::*;
/// # let mut step = Step::new();
/// let frame = step.observation::<u8>("frame", &[84, 84]);
/// let mut sample = Sample::transition(step, 3, 0.99);
/// let stack = sample.window(frame, -3..1, Pad::Repeat); // at an episode's first step: that frame four times
/// # let _ = stack;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pad {
    /// Zeros.
    #[default]
    Zeros,
    /// The nearest value that the episode has.
    Repeat,
}

/// Where a window's offset 0 lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Anchor {
    /// The sample's first step.
    First,
    /// The step that the sample bootstraps from: `n` (or `len`) later, or the episode's final observation if that comes
    /// first.
    Bootstrap,
}

/// A leaf's values at consecutive steps around an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) leaf: usize,
    pub(crate) anchor: Anchor,
    /// Offsets `from..to`.
    pub(crate) from: i32,
    pub(crate) to: i32,
    pub(crate) pad: Pad,
    /// One value, without an axis of its own.
    pub(crate) single: bool,
}

const REPLAYED: &str = "a sample of a step store: `Sample::transition` or `Sample::sequence`";

/// Columns of transitions and sequences.
impl Sample {
    /// The value of `leaf` at `offset` from the row's first step; zeros where the episode has no such step. For
    /// transitions and sequences.
    pub fn at<T: Element>(&mut self, leaf: Leaf<T>, offset: i32) -> Column<T> {
        let offsets = offset..offset.saturating_add(1);
        self.windowed(leaf, "at", Window { single: true, ..Window::from_first(offsets, Pad::Zeros) })
    }

    /// The values of `leaf` at `offsets` from the row's first step, `-3..1` being the step and the three before it. Of an
    /// observation the offset behind an episode's last step is its final observation. For transitions and sequences.
    pub fn window<T: Element>(&mut self, leaf: Leaf<T>, offsets: Range<i32>, pad: Pad) -> Column<T> {
        self.windowed(leaf, "window", Window::from_first(offsets, pad))
    }

    /// The value of `leaf` at the bootstrap step: see the table above. Of anything but an observation it is zeros where
    /// the episode ended. For transitions and sequences.
    pub fn next<T: Element>(&mut self, leaf: Leaf<T>) -> Column<T> {
        let window = Window { anchor: Anchor::Bootstrap, single: true, ..Window::from_first(0..1, Pad::Zeros) };
        self.windowed(leaf, "next", window)
    }

    /// The values of `leaf` at `offsets` from the bootstrap step: `-3..1` ends with it. For transitions and sequences.
    pub fn next_window<T: Element>(&mut self, leaf: Leaf<T>, offsets: Range<i32>, pad: Pad) -> Column<T> {
        self.windowed(leaf, "next_window", Window { anchor: Anchor::Bootstrap, ..Window::from_first(offsets, pad) })
    }

    fn windowed<T: Element>(&mut self, leaf: Leaf<T>, verb: &'static str, window: Window) -> Column<T> {
        self.own(leaf, verb);
        if !self.kind.is_replayed() {
            self.step.keep(SchemaError::NotInThisSample { column: verb, needs: REPLAYED });
        }
        let most = MOST_STEPS as i32;
        if window.from >= window.to || window.from < -most || window.to > most {
            self.step.keep(SchemaError::Offsets { from: window.from, to: window.to, most });
        }
        self.declare_window(Window { leaf: leaf.index as usize, ..window })
    }

    /// The discounted sum of `reward` over the steps from the first up to the bootstrap step, where it stops:
    /// Σ γᵏ r(t + k), in `f32`, multiplied and added in the order of the steps with γᵏ from a table. For transitions.
    pub fn n_step_return(&mut self, reward: Leaf<f32>) -> Column<f32> {
        self.needs_transition("n_step_return");
        if self.own(reward, "n_step_return") {
            let info = &self.step.leaves[reward.index as usize];
            if !info.shape.is_empty() {
                let (name, shape) = (info.name.clone(), info.shape.clone());
                self.step.keep(SchemaError::RewardShape { name, shape });
            }
        }
        self.derive(Derived::NStepReturn { reward: reward.index as usize })
    }

    /// What the value of the bootstrap step counts: γᵏ for k steps up to it, 0 if the episode terminated there. Where it
    /// was truncated the final observation is bootstrapped from. For transitions.
    pub fn discount(&mut self) -> Column<f32> {
        self.needs_transition("discount");
        self.derive(Derived::Discount)
    }

    /// The importance weight of the row: 1 unless the sampler gives rows unequal chances. For transitions and sequences.
    pub fn weight(&mut self) -> Column<f32> {
        if !self.kind.is_replayed() {
            self.step.keep(SchemaError::NotInThisSample { column: "weight", needs: REPLAYED });
        }
        self.derive(Derived::Weight)
    }

    fn needs_transition(&mut self, column: &'static str) {
        if !matches!(self.kind, Kind::Transition { .. }) {
            let needs = "a transition, which has the n and the γ: `Sample::transition(step, n, gamma)`";
            self.step.keep(SchemaError::NotInThisSample { column, needs });
        }
    }

    /// Leaves that are kept on some steps only are read on those.
    pub(super) fn check_sparse(&self) -> Result<(), SchemaError> {
        for (index, leaf) in self.step.leaves.iter().enumerate().filter(|(_, leaf)| leaf.every > 1) {
            let kept = |window: &Window| {
                let at_first = window.single && window.anchor == Anchor::First;
                window.leaf != index || (at_first && (window.from.unsigned_abs() as usize).is_multiple_of(leaf.every))
            };
            let mut windows = self.declared.iter().filter_map(|declared| match declared {
                Declared::Window(window) => Some(window),
                Declared::Derived(_) => None,
            });
            let begins = matches!(self.kind, Kind::Sequence { stride, .. } if stride.is_multiple_of(leaf.every));
            if !begins || !windows.all(kept) {
                return Err(SchemaError::Sparse { leaf: leaf.name.clone(), every: leaf.every });
            }
        }
        Ok(())
    }
}

impl Window {
    pub(super) fn from_first(offsets: Range<i32>, pad: Pad) -> Window {
        let (from, to) = (offsets.start, offsets.end);
        Window { leaf: 0, anchor: Anchor::First, from, to, pad, single: false }
    }

    /// Values a row. Offsets that are refused may be any numbers.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(i64::from(self.to) - i64::from(self.from)).unwrap_or(0)
    }

    /// `all`: how many values of the leaf a sequence has; `None` of a transition, which has one.
    pub(super) fn name(&self, leaf: &str, all: Option<usize>) -> String {
        let next = if self.anchor == Anchor::Bootstrap { "next." } else { "" };
        let pad = if self.pad == Pad::Repeat { " repeated" } else { "" };
        let whole = all == Some(self.len()) && pad.is_empty();
        match (self.single, self.from, next.is_empty()) {
            (true, 0, true) if all.is_none() => leaf.to_owned(),
            (true, 0, false) => format!("next.{leaf}"),
            (true, from, _) => format!("{next}{leaf}[{from}]"),
            (false, 0, true) if whole => leaf.to_owned(),
            (false, from, _) => format!("{next}{leaf}[{from}..{}]{pad}", self.to),
        }
    }
}
