//! What a row of a batch holds, declared once over a step's leaves.
//!
//! Owns the kinds of samples (a step, an unroll of T steps), the derived columns, and the typed handles ([`Column`])
//! through which a batch is read. What it does not do: place columns in memory (see `layout`), choose rows.

use crate::element::{DType, Element};
use crate::schema::{self, Leaf, SchemaError, Step};
use std::fmt;
use std::marker::PhantomData;

/// A handle on one named array of a batch, of element type `T`. A plain number: copy it where it is needed.
///
/// ```
/// use pinring::{Column, Sample, Step};
/// let mut step = Step::new();
/// let reward = step.leaf::<f32>("reward", &[]);
/// let mut sample = Sample::unroll(step, 20);
/// let rewards: Column<f32> = sample.all(reward); // [B, 20] in a batch
/// # let _ = rewards;
/// ```
pub struct Column<T> {
    pub(crate) schema: u64,
    pub(crate) index: u32,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Column<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Column<T> {}
impl<T: Element> fmt::Debug for Column<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Column<{}>({})", T::DTYPE, self.index)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Step,
    Unroll { steps: usize },
}

/// A column computed from what writers said of their steps, not written as a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Derived {
    Terminated,
    Truncated,
    IsFirst,
    Mask,
    PolicyVersion,
}

impl Derived {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Derived::Terminated => "terminated",
            Derived::Truncated => "truncated",
            Derived::IsFirst => "is_first",
            Derived::Mask => "mask",
            Derived::PolicyVersion => "policy_version",
        }
    }
    pub(crate) fn dtype(self) -> DType {
        match self {
            Derived::PolicyVersion => DType::I64,
            _ => DType::Bool,
        }
    }
    /// Whether it speaks of observations, of which an unroll of T steps has T + 1.
    pub(crate) fn of_observations(self) -> bool {
        self == Derived::IsFirst
    }
}

/// What a row of a batch holds: the step itself, or an *unroll* of T consecutive steps of one lane.
///
/// Every leaf of the step is a column under its own name; flags that writers set with
/// [`end`](crate::StepMut::end), and the versions they acted with, become columns when they are asked for.
///
/// | column | [`Sample::step`] | [`Sample::unroll`], batch-major | time-major |
/// |---|---|---|---|
/// | an observation | `[B, …]` | `[B, T + 1, …]` | `[T + 1, B, …]` |
/// | any other leaf | `[B, …]` | `[B, T, …]` | `[T, B, …]` |
/// | `terminated`, `truncated`, `mask`, `policy_version` | `[B]` | `[B, T]` | `[T, B]` |
/// | `is_first` | `[B]` | `[B, T + 1]` | `[T + 1, B]` |
///
/// ```
/// use pinring::{Sample, Step};
/// let mut step = Step::new();
/// let obs = step.observation::<u8>("obs", &[4, 84, 84]);
/// let reward = step.leaf::<f32>("reward", &[]);
/// let mut sample = Sample::unroll(step, 20);
/// sample.time_major();
/// let (obs, reward) = (sample.all(obs), sample.all(reward)); // [21, B, 4, 84, 84] and [20, B]
/// let ended = sample.terminated();
/// # let _ = (obs, reward, ended);
/// ```
#[derive(Clone, Debug)]
pub struct Sample {
    pub(crate) step: Step,
    pub(crate) kind: Kind,
    pub(crate) time_major: bool,
    pub(crate) within_episode: bool,
    pub(crate) derived: Vec<Derived>,
}

impl Sample {
    /// A row is one step.
    pub fn step(step: Step) -> Sample {
        Sample::new(step, Kind::Step)
    }

    /// A row is `steps` consecutive steps of one lane, and the observation after the last of them.
    pub fn unroll(step: Step, steps: usize) -> Sample {
        let mut sample = Sample::new(step, Kind::Unroll { steps });
        if steps == 0 {
            sample.step.keep(SchemaError::EmptyUnroll);
        }
        sample
    }

    fn new(step: Step, kind: Kind) -> Sample {
        let mut sample = Sample { step, kind, time_major: false, within_episode: false, derived: Vec::new() };
        if sample.step.leaves.is_empty() {
            sample.step.keep(SchemaError::NoLeaves);
        }
        sample
    }

    /// Puts time first: `[T, B, …]` instead of `[B, T, …]`. Only for unrolls.
    pub fn time_major(&mut self) -> &mut Sample {
        if self.kind == Kind::Step {
            self.step.keep(SchemaError::NotInThisSample {
                column: "time_major",
                needs: "an unroll: a single step has no time",
            });
        }
        self.time_major = true;
        self
    }

    /// Whether an unroll stops where its episode stops. `false`, the default: unrolls run through episode ends.
    /// `true`: an unroll that an end cuts short is padded with zeros; [`mask`](Sample::mask) tells which steps are
    /// real, and the observation behind the last real one is the final observation if the writer gave it.
    pub fn within_episode(&mut self, within: bool) -> &mut Sample {
        if self.kind == Kind::Step && within {
            self.step.keep(SchemaError::NotInThisSample {
                column: "within_episode",
                needs: "an unroll: a single step has no end",
            });
        }
        self.within_episode = within;
        self
    }

    /// The handle on the column of `leaf`: see the table above for its shape. Every leaf is a column, whether its handle
    /// is asked for or not; the derived columns below are added when they are asked for.
    pub fn all<T: Element>(&mut self, leaf: Leaf<T>) -> Column<T> {
        if !self.step.has(leaf) {
            self.step.keep(SchemaError::Foreign { verb: "all" });
        }
        self.handle(leaf.index as usize)
    }

    /// Whether the episode was terminated by this step.
    pub fn terminated(&mut self) -> Column<bool> {
        self.derive(Derived::Terminated)
    }

    /// Whether the episode was truncated (cut by a time limit, say) at this step.
    pub fn truncated(&mut self) -> Column<bool> {
        self.derive(Derived::Truncated)
    }

    /// Whether this observation is the first of its episode.
    pub fn is_first(&mut self) -> Column<bool> {
        self.derive(Derived::IsFirst)
    }

    /// Whether this step carries a transition: false for padding, and for steps that the writer took out with
    /// [`mask_out`](crate::StepMut::mask_out).
    pub fn mask(&mut self) -> Column<bool> {
        self.derive(Derived::Mask)
    }

    /// The version of the weights that each step was acted with.
    pub fn policy_version(&mut self) -> Column<i64> {
        self.derive(Derived::PolicyVersion)
    }

    /// The column of that name and element type: a leaf, or a derived column that was declared.
    ///
    /// # Errors
    /// [`SchemaError::Missing`] lists the names there are; [`SchemaError::ElementType`] names the type it has.
    pub fn find<T: Element>(&self, name: &str) -> Result<Column<T>, SchemaError> {
        Ok(self.handle(schema::find(self.names(), name, T::DTYPE)?))
    }

    /// The first mistake made while declaring, if any. The feed's builder reports the same one.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn check(&self) -> Result<(), SchemaError> {
        if let Some(fault) = &self.step.fault {
            return Err(fault.clone());
        }
        let taken = self.derived.iter().find(|d| self.step.leaves.iter().any(|leaf| leaf.name == d.name()));
        taken.map_or(Ok(()), |d| Err(SchemaError::Duplicate { name: d.name().to_owned() }))
    }

    fn names(&self) -> impl Iterator<Item = (&str, DType)> + Clone {
        let leaves = self.step.leaves.iter().map(|leaf| (leaf.name.as_str(), leaf.dtype));
        leaves.chain(self.derived.iter().map(|d| (d.name(), d.dtype())))
    }

    fn derive<T: Element>(&mut self, derived: Derived) -> Column<T> {
        let place = self.derived.iter().position(|&d| d == derived).unwrap_or_else(|| {
            self.derived.push(derived);
            self.derived.len() - 1
        });
        self.handle(self.step.leaves.len() + place)
    }

    fn handle<T>(&self, index: usize) -> Column<T> {
        Column { schema: self.step.schema, index: index as u32, element: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_columns_are_declared_once_and_found_by_name() {
        let mut step = Step::new();
        step.leaf::<f32>("reward", &[]);
        let mut sample = Sample::unroll(step, 5);
        let (a, b) = (sample.terminated(), sample.terminated());
        assert_eq!(a.index, b.index);
        assert_eq!(sample.find::<bool>("terminated").unwrap().index, a.index);
        assert!(sample.find::<bool>("truncated").is_err());
        assert!(sample.find::<i64>("reward").is_err());
        assert_eq!(sample.check(), Ok(()));
    }

    #[test]
    fn a_leaf_may_not_take_the_name_of_a_derived_column() {
        let mut step = Step::new();
        step.leaf::<bool>("mask", &[]);
        let mut sample = Sample::unroll(step, 5);
        assert_eq!(sample.check(), Ok(()));
        sample.mask();
        assert_eq!(sample.check(), Err(SchemaError::Duplicate { name: "mask".into() }));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert_eq!(Sample::step(Step::new()).check(), Err(SchemaError::NoLeaves));
        let mut step = Step::new();
        step.leaf::<f32>("reward", &[]);
        assert_eq!(Sample::unroll(step.clone(), 0).check(), Err(SchemaError::EmptyUnroll));
        let mut sample = Sample::step(step.clone());
        sample.time_major();
        assert!(matches!(sample.check(), Err(SchemaError::NotInThisSample { column: "time_major", .. })));
        let foreign = Step::new().leaf::<f32>("reward", &[]);
        let mut sample = Sample::step(step);
        sample.all(foreign);
        assert_eq!(sample.check(), Err(SchemaError::Foreign { verb: "all" }));
    }
}
