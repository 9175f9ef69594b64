//! The schema of a step: which leaves it has.
//!
//! Owns names, element types and shapes, and the typed handles ([`Leaf`]) through which a writer reaches them. Mistakes
//! made while declaring are kept and reported once, when the feed is built, so that declarations read without `?`.
//! What it does not do: lay anything out in memory (see `layout`).

use crate::element::{DType, Element};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle on one named array of a step, of element type `T`.
///
/// Handles are plain numbers: copy them into every env thread. A leaf is not a [`Column`](crate::Column); a batch is
/// read through columns, and a leaf there does not compile:
///
/// ```compile_fail
/// # use pinring::*;
/// # fn read(batch: &Batch) {
/// let mut step = Step::new();
/// let reward = step.leaf::<f32>("reward", &[]);
/// batch.view(reward); // expects a Column<f32>
/// # }
/// ```
pub struct Leaf<T> {
    pub(crate) schema: u64,
    pub(crate) index: u32,
    pub(crate) element: PhantomData<fn() -> T>,
}

impl<T> Clone for Leaf<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Leaf<T> {}
impl<T: Element> fmt::Debug for Leaf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leaf<{}>({})", T::DTYPE, self.index)
    }
}

/// What is known of one leaf, as data: for learners driven by a config file, and for tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafInfo {
    /// The name; dots nest (`"obs.units"`).
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// The shape of one lane's value; empty for a scalar.
    pub shape: Vec<usize>,
    /// Whether it is an observation: known before the action, and once more after the last one.
    pub observation: bool,
    pub(crate) reject_non_finite: bool,
    /// A store keeps it on every so many steps of a lane.
    pub(crate) every: usize,
}

impl LeafInfo {
    /// Elements of one lane's value; `usize::MAX` of a leaf that [`Sample::check`](crate::Sample::check) refuses as too large.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |elements, &dim| elements.saturating_mul(dim))
    }
    /// Bytes of one lane's value; `usize::MAX` of a leaf that is refused as too large.
    pub fn bytes(&self) -> usize {
        self.elements().saturating_mul(self.dtype.size())
    }
}

/// Offsets and lengths are no larger than this, so that sums of them never overflow.
pub(crate) const MOST_STEPS: usize = 1 << 20;

/// What is wrong with a schema or a sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// A step without leaves.
    #[error("the step has no leaf: declare at least one with `observation` or `leaf`")]
    NoLeaves,
    /// A leaf or a derived column of that name exists already.
    #[error("the name `{name}` is used twice: every leaf and every column needs a name of its own")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A name that cannot be nested: empty, or with an empty part between dots.
    #[error("`{name}` is no leaf name: names are non-empty parts joined by single dots, like `obs.units`")]
    Name {
        /// The name.
        name: String,
    },
    /// One name is the parent of another.
    #[error("`{parent}` is a leaf, so `{name}` cannot lie beneath it: rename one of them")]
    Nested {
        /// The shorter name.
        parent: String,
        /// The longer name.
        name: String,
    },
    /// A dimension of zero.
    #[error("leaf `{name}` of shape {shape:?} holds nothing: every dimension must be at least 1")]
    ZeroSize {
        /// The leaf.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// More bytes than an address can name.
    #[error(
        "{what} does not fit in memory: its size in bytes overflows; make the shape, the unroll or the batch smaller"
    )]
    Overflow {
        /// The leaf, column or slot.
        what: String,
    },
    /// A reward must be one number a step.
    #[error("leaf `{name}` has shape {shape:?}, but a reward is one number a step: its shape must be []")]
    RewardShape {
        /// The leaf.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A handle made by another step.
    #[error("a handle of another step was passed to `{verb}`: use the handles that this step returned")]
    Foreign {
        /// The method that was called.
        verb: &'static str,
    },
    /// No leaf or column of that name.
    #[error("there is no `{name}`; there are: {known}")]
    Missing {
        /// The name that was asked for.
        name: String,
        /// Every name there is.
        known: String,
    },
    /// The name exists with another element type.
    #[error("`{name}` holds {got}, not {expected}: ask for it as `{got}`")]
    ElementType {
        /// The name.
        name: String,
        /// The type that was asked for.
        expected: DType,
        /// The type that it has.
        got: DType,
    },
    /// An unroll of no steps.
    #[error("an unroll of 0 steps holds nothing: give `Sample::unroll` at least 1")]
    EmptyUnroll,
    /// A transition or a sequence of no steps, or of too many.
    #[error("{what} is {got}: it must be from 1 to {most}")]
    Steps {
        /// Which number.
        what: &'static str,
        /// What it is.
        got: usize,
        /// The largest that it can be.
        most: usize,
    },
    /// A discount that is none.
    #[error("a discount of {gamma}: γ must lie from 0 to 1")]
    Gamma {
        /// What came.
        gamma: String,
    },
    /// A window without a step, or too far away.
    #[error("the offsets {from}..{to} hold no step: give a range like `-3..1`, within {most} steps of the anchor")]
    Offsets {
        /// The first offset.
        from: i32,
        /// One past the last offset.
        to: i32,
        /// How far they may be away.
        most: i32,
    },
    /// A leaf that is kept on some steps is read, or sequences begin, where it is not.
    #[error(
        "leaf `{leaf}` is kept on every {every}th step: sequences must begin there (a stride that is a multiple of it), and \
         read it by `at` with offsets that are"
    )]
    Sparse {
        /// The leaf.
        leaf: String,
        /// The distance of the steps on which it is kept.
        every: usize,
    },
    /// A sample of a step store, of which no column was asked for.
    #[error("the sample has no column: ask for at least one, with `at`, `window`, `all` or `next`")]
    NoColumns,
    /// A derived column that this kind of sample does not have.
    #[error("`{column}` needs {needs}")]
    NotInThisSample {
        /// The column.
        column: &'static str,
        /// What the sample would have to be.
        needs: &'static str,
    },
}

/// The schema of a step: what a writer writes each time its env moves.
///
/// ```
/// use pinring::Step;
///
/// let mut step = Step::new();
/// let obs = step.observation::<u8>("obs", &[4, 84, 84]); // known before the action
/// let action = step.leaf::<i64>("action", &[]);
/// let reward = step.leaf::<f32>("reward", &[]);
/// step.reward(reward); // its sum is the episode's return
/// # let _ = (obs, action);
/// ```
///
/// Mistakes (a name used twice, a dimension of zero, a size that overflows) are reported by
/// [`start`](crate::FeedBuilder::start) and by every method that computes a footprint.
#[derive(Clone, Debug)]
pub struct Step {
    pub(crate) schema: u64,
    pub(crate) leaves: Vec<LeafInfo>,
    pub(crate) reward: Option<usize>,
    pub(crate) fault: Option<SchemaError>,
}

impl Default for Step {
    fn default() -> Self {
        Step::new()
    }
}

impl Step {
    /// A step without leaves.
    pub fn new() -> Step {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Step { schema: NEXT.fetch_add(1, Ordering::Relaxed), leaves: Vec::new(), reward: None, fault: None }
    }

    /// Declares an observation: known before the action, and once more after the last one, so an unroll of T steps
    /// holds T + 1 of them. `shape` is one lane's value; `&[]` is a scalar.
    pub fn observation<T: Element>(&mut self, name: &str, shape: &[usize]) -> Leaf<T> {
        self.declare(name, shape, true)
    }

    /// Declares any other leaf: an action, a reward, a log-probability. An unroll of T steps holds T of them.
    pub fn leaf<T: Element>(&mut self, name: &str, shape: &[usize]) -> Leaf<T> {
        self.declare(name, shape, false)
    }

    /// Names the leaf whose sum over an episode is that episode's return. It must be a scalar.
    pub fn reward<T: Element>(&mut self, leaf: Leaf<T>) -> &mut Step {
        if let Some(index) = self.own(leaf, "reward") {
            let info = &self.leaves[index];
            if info.elements() == 1 && info.shape.is_empty() {
                self.reward = Some(index);
            } else {
                let (name, shape) = (info.name.clone(), info.shape.clone());
                self.keep(SchemaError::RewardShape { name, shape });
            }
        }
        self
    }

    /// Refuses NaN and infinities in this leaf when a step is committed; the default is to store them bit for bit.
    pub fn reject_non_finite<T: Element>(&mut self, leaf: Leaf<T>) -> &mut Step {
        if let Some(index) = self.own(leaf, "reject_non_finite") {
            self.leaves[index].reject_non_finite = true;
        }
        self
    }

    /// Has a [replay](crate::FeedBuilder::replay) store keep this leaf on every `k`-th step of a lane only, counted from the
    /// lane's first: for what is large and needed once a sequence, like a recurrent state. The sequences begin at those
    /// steps, so their stride must be a multiple of `k`; the leaf is read by [`Sample::at`](crate::Sample::at). Writers write
    /// it at each step, and the store ignores what it does not keep.
    ///
    /// ```
    /// # use pinring::*;
    /// # fn main() -> Result<()> {
    /// let mut step = Step::new();
    /// let obs = step.observation::<f32>("obs", &[4]);
    /// let state = step.observation::<f32>("state", &[2, 512]); // 4 KB: on every 40th step only
    /// step.every(state, 40);
    /// let mut sample = Sample::sequence(step, 80, 40);
    /// let (obs, state) = (sample.all(obs), sample.at(state, 0));
    /// let footprint = Feed::builder(sample).lanes(1).replay(10_000, Uniform::new()).footprint()?;
    /// assert_eq!(footprint.record_bytes_each, 16);
    /// # let _ = (obs, state);
    /// # Ok(()) }
    /// ```
    pub fn every<T: Element>(&mut self, leaf: Leaf<T>, k: usize) -> &mut Step {
        if let Some(index) = self.own(leaf, "every") {
            if k == 0 || k > MOST_STEPS {
                self.keep(SchemaError::Steps { what: "the distance of kept steps", got: k, most: MOST_STEPS });
            }
            self.leaves[index].every = k.clamp(1, MOST_STEPS);
        }
        self
    }

    /// The leaf of that name and element type, for schemas that come from a config file.
    ///
    /// # Errors
    /// [`SchemaError::Missing`] lists the names there are; [`SchemaError::ElementType`] names the type it has.
    pub fn find<T: Element>(&self, name: &str) -> Result<Leaf<T>, SchemaError> {
        let index = find(self.leaves.iter().map(|leaf| (leaf.name.as_str(), leaf.dtype)), name, T::DTYPE)?;
        Ok(self.handle(index))
    }

    /// Every leaf, in the order of declaration.
    pub fn leaves(&self) -> &[LeafInfo] {
        &self.leaves
    }

    fn declare<T: Element>(&mut self, name: &str, shape: &[usize], observation: bool) -> Leaf<T> {
        if let Err(fault) = self.check(name, shape, T::DTYPE) {
            self.keep(fault);
        }
        self.leaves.push(LeafInfo {
            name: name.to_owned(),
            dtype: T::DTYPE,
            shape: shape.to_vec(),
            observation,
            reject_non_finite: false,
            every: 1,
        });
        self.handle(self.leaves.len() - 1)
    }

    fn check(&self, name: &str, shape: &[usize], dtype: DType) -> Result<(), SchemaError> {
        if name.split('.').any(str::is_empty) {
            return Err(SchemaError::Name { name: name.to_owned() });
        }
        for leaf in &self.leaves {
            if leaf.name == name {
                return Err(SchemaError::Duplicate { name: name.to_owned() });
            }
            let (short, long) =
                if leaf.name.len() < name.len() { (&leaf.name[..], name) } else { (name, &leaf.name[..]) };
            if long.strip_prefix(short).is_some_and(|rest| rest.starts_with('.')) {
                return Err(SchemaError::Nested { parent: short.to_owned(), name: long.to_owned() });
            }
        }
        if shape.contains(&0) {
            return Err(SchemaError::ZeroSize { name: name.to_owned(), shape: shape.to_vec() });
        }
        shape
            .iter()
            .try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim))
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .map(drop)
            .ok_or_else(|| SchemaError::Overflow { what: format!("leaf `{name}` of shape {shape:?}") })
    }

    fn own<T: Element>(&mut self, leaf: Leaf<T>, verb: &'static str) -> Option<usize> {
        if self.has(leaf) {
            return Some(leaf.index as usize);
        }
        self.keep(SchemaError::Foreign { verb });
        None
    }

    /// Whether the leaf is this step's. A clone has the same schema, and may have declared others later.
    pub(crate) fn has<T: Element>(&self, leaf: Leaf<T>) -> bool {
        let known = self.leaves.get(leaf.index as usize);
        leaf.schema == self.schema && known.is_some_and(|known| known.dtype == T::DTYPE)
    }

    /// Keeps the first mistake; later ones are often its echo.
    pub(crate) fn keep(&mut self, fault: SchemaError) {
        self.fault.get_or_insert(fault);
    }

    fn handle<T>(&self, index: usize) -> Leaf<T> {
        Leaf { schema: self.schema, index: index as u32, element: PhantomData }
    }
}

/// The place of `name` in `known`, if it has element type `dtype`.
pub(crate) fn find<'a>(
    known: impl Iterator<Item = (&'a str, DType)> + Clone,
    name: &str,
    dtype: DType,
) -> Result<usize, SchemaError> {
    match known.clone().enumerate().find(|(_, (n, _))| *n == name) {
        Some((index, (_, got))) if got == dtype => Ok(index),
        Some((_, (_, got))) => Err(SchemaError::ElementType { name: name.to_owned(), expected: dtype, got }),
        None => {
            let known = known.map(|(n, d)| format!("`{n}` ({d})")).collect::<Vec<_>>().join(", ");
            Err(SchemaError::Missing { name: name.to_owned(), known })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(declare: impl FnOnce(&mut Step)) -> SchemaError {
        let mut step = Step::new();
        declare(&mut step);
        step.fault.expect("the schema was taken")
    }

    #[test]
    fn mistakes_are_kept_and_name_the_leaf() {
        let twice = fault(|s| {
            s.leaf::<f32>("reward", &[]);
            s.leaf::<f64>("reward", &[]);
        });
        assert_eq!(twice, SchemaError::Duplicate { name: "reward".into() });
        assert!(
            matches!(fault(|s| { s.leaf::<u8>("a", &[3, 0]); }), SchemaError::ZeroSize { name, .. } if name == "a")
        );
        assert!(matches!(
            fault(|s| {
                s.leaf::<u64>("a", &[usize::MAX / 4]);
            }),
            SchemaError::Overflow { .. }
        ));
        assert!(matches!(
            fault(|s| {
                s.leaf::<u8>("a", &[usize::MAX, usize::MAX]);
            }),
            SchemaError::Overflow { .. }
        ));
        for bad in ["", ".", "a.", ".a", "a..b"] {
            assert_eq!(
                fault(|s| {
                    s.leaf::<u8>(bad, &[]);
                }),
                SchemaError::Name { name: bad.into() }
            );
        }
        let nested = fault(|s| {
            s.observation::<u8>("obs.units", &[]);
            s.observation::<u8>("obs", &[]);
        });
        assert_eq!(nested, SchemaError::Nested { parent: "obs".into(), name: "obs.units".into() });
        let foreign = fault(|s| {
            let other = Step::new().leaf::<f32>("reward", &[]);
            s.reward(other);
        });
        assert_eq!(foreign, SchemaError::Foreign { verb: "reward" });
        assert!(matches!(
            fault(|s| {
                let reward = s.leaf::<f32>("reward", &[2]);
                s.reward(reward);
            }),
            SchemaError::RewardShape { .. }
        ));
    }

    #[test]
    fn siblings_with_a_common_stem_are_fine() {
        let mut step = Step::new();
        step.observation::<u8>("obs", &[]);
        step.observation::<u8>("obs_next", &[]);
        step.observation::<u8>("a.b", &[]);
        step.observation::<u8>("a.c", &[]);
        assert_eq!(step.fault, None);
    }

    #[test]
    fn found_by_name_and_type() {
        let mut step = Step::new();
        step.observation::<u8>("obs", &[4]);
        let reward = step.leaf::<f32>("reward", &[]);
        assert_eq!(step.find::<f32>("reward").unwrap().index, reward.index);
        assert!(matches!(step.find::<f64>("reward"), Err(SchemaError::ElementType { got: DType::F32, .. })));
        let missing = step.find::<f32>("rewards").unwrap_err().to_string();
        assert!(missing.contains("`reward` (f32)"), "{missing}");
    }
}
