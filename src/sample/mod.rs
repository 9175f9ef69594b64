//! What a row of a batch holds, declared once over a step's leaves.
//!
//! Owns the kinds of samples (a step, an unroll of T steps, a transition or a sequence of stored steps), the windows and
//! derived columns, and the typed handles ([`Column`]) through which a batch is read. What it does not do: place columns
//! in memory (see `layout`), choose rows.

mod windows;

pub use windows::Pad;
pub(crate) use windows::{Anchor, Window};

use crate::element::{DType, Element};
use crate::schema::{self, Leaf, MOST_STEPS, SchemaError, Step};
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
    Unroll {
        steps: usize,
    },
    /// A step of the store, and the step `n` later.
    Transition {
        n: usize,
    },
    /// `len` consecutive steps of the store; one begins every `stride` steps.
    Sequence {
        len: usize,
        stride: usize,
    },
}

impl Kind {
    /// Whether rows are windows of a step store, not steps as they were written.
    pub(crate) fn is_replayed(self) -> bool {
        matches!(self, Kind::Transition { .. } | Kind::Sequence { .. })
    }
    /// Whether a row has a time axis.
    pub(crate) fn has_time(self) -> bool {
        matches!(self, Kind::Unroll { .. } | Kind::Sequence { .. })
    }
}

/// A column that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declared {
    Window(Window),
    Derived(Derived),
}

/// A column computed from what writers said of their steps, not written as a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Derived {
    Terminated,
    Truncated,
    IsFirst,
    Mask,
    PolicyVersion,
    /// The discounted sum of this reward leaf over the steps up to the bootstrap step.
    NStepReturn {
        reward: usize,
    },
    Discount,
    Weight,
}

impl Derived {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Derived::Terminated => "terminated",
            Derived::Truncated => "truncated",
            Derived::IsFirst => "is_first",
            Derived::Mask => "mask",
            Derived::PolicyVersion => "policy_version",
            Derived::NStepReturn { .. } => "n_step_return",
            Derived::Discount => "discount",
            Derived::Weight => "weight",
        }
    }
    pub(crate) fn dtype(self) -> DType {
        match self {
            Derived::PolicyVersion => DType::I64,
            Derived::NStepReturn { .. } | Derived::Discount | Derived::Weight => DType::F32,
            _ => DType::Bool,
        }
    }
    /// Whether it speaks of observations, of which an unroll of T steps has T + 1.
    pub(crate) fn of_observations(self) -> bool {
        self == Derived::IsFirst
    }
    /// Whether it speaks of the row, not of its steps.
    pub(crate) fn of_rows(self) -> bool {
        matches!(self, Derived::NStepReturn { .. } | Derived::Discount | Derived::Weight)
    }
}

/// What a row of a batch holds: the step itself, or an *unroll* of T consecutive steps of one lane, in the order in which
/// they were written; or, sampled from a [replay](crate::FeedBuilder::replay) store, a [*transition*](Sample::transition)
/// or a [*sequence*](Sample::sequence).
///
/// # Steps and unrolls
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
///
/// # Transitions and sequences
///
/// The store keeps each step once; a sample is a window of one lane's steps, and its columns are those that are asked
/// for. The *first step* of a row is t. Its *bootstrap step* is t + n for a transition and t + T for a sequence, or the
/// episode's final observation if that comes first.
///
/// | column | holds | transition | sequence of T, batch-major (time-major: the first two swapped) |
/// |---|---|---|---|
/// | [`at(leaf, o)`](Sample::at) | step t + o | `[B, …]` | `[B, …]` |
/// | [`window(leaf, a..b, pad)`](Sample::window) | steps t + a to t + b − 1 | `[B, b − a, …]` | `[B, b − a, …]` |
/// | [`next(leaf)`](Sample::next) | the bootstrap step | `[B, …]` | `[B, …]` |
/// | [`next_window(leaf, a..b, pad)`](Sample::next_window) | the steps around the bootstrap step | `[B, b − a, …]` | `[B, b − a, …]` |
/// | [`all(leaf)`](Sample::all) | every step; of an observation one more | `[B, …]` | `[B, T + 1, …]`, `[B, T, …]` |
/// | `terminated`, `truncated`, `mask`, `policy_version` | flags of the steps | `[B]` | `[B, T]` |
/// | `is_first` | flags of the observations | `[B]` | `[B, T + 1]` |
/// | `n_step_return`, `discount` | sums up to the bootstrap step | `[B]` | |
/// | `weight` | importance weights | `[B]` | `[B]` |
///
/// ```
/// use pinring::{Pad, Sample, Step};
/// let mut step = Step::new();
/// let frame = step.observation::<u8>("frame", &[84, 84]); // one frame a step: stacks are windows
/// let action = step.leaf::<i64>("action", &[]);
/// let reward = step.leaf::<f32>("reward", &[]);
/// let mut sample = Sample::transition(step, 3, 0.99);
/// let (now, then) = (sample.window(frame, -3..1, Pad::Repeat), sample.next_window(frame, -3..1, Pad::Repeat));
/// let (action, ret, discount) = (sample.at(action, 0), sample.n_step_return(reward), sample.discount());
/// # let _ = (now, then, action, ret, discount);
/// ```
#[derive(Clone, Debug)]
pub struct Sample {
    pub(crate) step: Step,
    pub(crate) kind: Kind,
    pub(crate) time_major: bool,
    pub(crate) within_episode: bool,
    /// Whether an episode's end pads sequences instead of keeping them from beginning there.
    pub(crate) pad_short: bool,
    /// γ of a transition.
    pub(crate) gamma: f64,
    /// In the order of declaration. Of steps and unrolls every leaf is a column in front of these.
    pub(crate) declared: Vec<Declared>,
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

    /// A row is a stored step t and what became of it: the rewards of the next `n` steps, discounted by `gamma`, and the
    /// step that the value is bootstrapped from, `n` later or where the episode ends. For a
    /// [replay](crate::FeedBuilder::replay) feed. A step can be sampled as soon as its bootstrap step is stored.
    pub fn transition(step: Step, n: usize, gamma: f64) -> Sample {
        let mut sample = Sample::new(step, Kind::Transition { n });
        (sample.within_episode, sample.gamma) = (true, gamma);
        if n == 0 || n > MOST_STEPS {
            sample.step.keep(SchemaError::Steps { what: "the n of a transition", got: n, most: MOST_STEPS });
        }
        if !gamma.is_finite() || !(0.0..=1.0).contains(&gamma) {
            sample.step.keep(SchemaError::Gamma { gamma: gamma.to_string() });
        }
        sample
    }

    /// A row is `len` consecutive stored steps of one lane; one begins every `stride` steps. For a
    /// [replay](crate::FeedBuilder::replay) feed. Within episodes (the default) strides are counted from the episode's
    /// first step, and sequences that the end would cut short are left out: see [`pad_short`](Sample::pad_short).
    pub fn sequence(step: Step, len: usize, stride: usize) -> Sample {
        let mut sample = Sample::new(step, Kind::Sequence { len, stride });
        sample.within_episode = true;
        for (what, got) in [("the length of a sequence", len), ("the stride of sequences", stride)] {
            if got == 0 || got > MOST_STEPS {
                sample.step.keep(SchemaError::Steps { what, got, most: MOST_STEPS });
            }
        }
        sample
    }

    fn new(step: Step, kind: Kind) -> Sample {
        let mut sample = Sample {
            step,
            kind,
            time_major: false,
            within_episode: false,
            pad_short: false,
            gamma: 1.0,
            declared: Vec::new(),
        };
        if sample.step.leaves.is_empty() {
            sample.step.keep(SchemaError::NoLeaves);
        }
        sample
    }

    /// Puts time first: `[T, B, …]` instead of `[B, T, …]`. Only for unrolls and sequences.
    pub fn time_major(&mut self) -> &mut Sample {
        if !self.kind.has_time() {
            self.step.keep(SchemaError::NotInThisSample {
                column: "time_major",
                needs: "an unroll or a sequence: a single step has no time",
            });
        }
        self.time_major = true;
        self
    }

    /// Whether an unroll or a sequence stops where its episode stops.
    ///
    /// Unrolls. `false`, the default: they run through episode ends. `true`: an unroll that an end cuts short is padded
    /// with zeros; [`mask`](Sample::mask) tells which steps are real, and the observation behind the last real one is the
    /// final observation if the writer gave it.
    ///
    /// Sequences. `true`, the default: every window ends with its episode, whose final observation is kept. `false`: they
    /// run through episode ends as lanes do, and final observations are not kept. Transitions always stay within.
    pub fn within_episode(&mut self, within: bool) -> &mut Sample {
        let column = "within_episode";
        if self.kind == Kind::Step && within {
            let needs = "an unroll or a sequence: a single step has no end";
            self.step.keep(SchemaError::NotInThisSample { column, needs });
        }
        if matches!(self.kind, Kind::Transition { .. }) && !within {
            let needs = "an unroll or a sequence: a transition bootstraps where its episode ends";
            self.step.keep(SchemaError::NotInThisSample { column, needs });
        }
        self.within_episode = within;
        self
    }

    /// Whether sequences begin so late in an episode that its end cuts them short: they are then padded, and
    /// [`mask`](Sample::mask) tells which steps are real. `false`, the default, leaves them out, so an episode shorter
    /// than the sequence is never sampled.
    pub fn pad_short(&mut self, pad: bool) -> &mut Sample {
        if !matches!(self.kind, Kind::Sequence { .. }) {
            let needs = "a sequence: nothing else is left out for being short";
            self.step.keep(SchemaError::NotInThisSample { column: "pad_short", needs });
        }
        self.pad_short = pad;
        self
    }

    /// The handle on the column of `leaf`: see the tables above for its shape. Of steps and unrolls every leaf is a
    /// column, whether its handle is asked for or not; every other column is added when it is asked for. What an end
    /// leaves of it is zeros.
    pub fn all<T: Element>(&mut self, leaf: Leaf<T>) -> Column<T> {
        let (index, own) = (leaf.index as usize, self.own(leaf, "all"));
        match self.kind {
            Kind::Sequence { .. } => {
                let observation = own && self.step.leaves[index].observation;
                let to = self.steps_of(observation) as i32;
                self.declare_window(Window { leaf: index, ..Window::from_first(0..to, Pad::Zeros) })
            }
            Kind::Transition { .. } => self.at(leaf, 0),
            Kind::Step | Kind::Unroll { .. } => self.handle(index),
        }
    }

    /// Values that a leaf has in a row: of an observation one more than steps.
    pub(crate) fn steps_of(&self, observation: bool) -> usize {
        match self.kind {
            Kind::Step | Kind::Transition { .. } => 1,
            Kind::Unroll { steps } => steps.saturating_add(usize::from(observation)),
            Kind::Sequence { len, .. } => len.min(MOST_STEPS) + usize::from(observation),
        }
    }

    fn declare_window<T: Element>(&mut self, window: Window) -> Column<T> {
        self.declare(Declared::Window(window))
    }

    fn own<T: Element>(&mut self, leaf: Leaf<T>, verb: &'static str) -> bool {
        let own = self.step.has(leaf);
        if !own {
            self.step.keep(SchemaError::Foreign { verb });
        }
        own
    }

    /// Whether the episode was terminated by this step; of a transition: between its first and its bootstrap step.
    pub fn terminated(&mut self) -> Column<bool> {
        self.derive(Derived::Terminated)
    }

    /// Whether the episode was truncated (cut by a time limit, say) at this step; of a transition: between its first and
    /// its bootstrap step.
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

    /// The version of the weights that each step (of a transition: the first) was acted with.
    pub fn policy_version(&mut self) -> Column<i64> {
        self.derive(Derived::PolicyVersion)
    }

    /// The column of that name and element type: a leaf, or a column that was declared. Windows are named after their leaf
    /// and offsets, `obs[-3..1]`, `next.obs`; `all(leaf)` is named like the leaf, and so is a transition's `at(leaf, 0)`.
    ///
    /// # Errors
    /// [`SchemaError::Missing`] lists the names there are; [`SchemaError::ElementType`] names the type it has.
    pub fn find<T: Element>(&self, name: &str) -> Result<Column<T>, SchemaError> {
        let names = self.names();
        Ok(self.handle(schema::find(names.iter().map(|(name, dtype)| (name.as_str(), *dtype)), name, T::DTYPE)?))
    }

    /// The first mistake made while declaring, if any. The feed's builder reports the same one.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn check(&self) -> Result<(), SchemaError> {
        if let Some(fault) = &self.step.fault {
            return Err(fault.clone());
        }
        if self.kind.is_replayed() && self.declared.is_empty() {
            return Err(SchemaError::NoColumns);
        }
        self.check_sparse()?;
        let names = self.names();
        let twice = names.iter().enumerate().find(|(place, (name, _))| names[..*place].iter().any(|(n, _)| n == name));
        twice.map_or(Ok(()), |(_, (name, _))| Err(SchemaError::Duplicate { name: name.clone() }))
    }

    /// Names and element types of all columns.
    pub(crate) fn names(&self) -> Vec<(String, DType)> {
        let leaves = &self.step.leaves;
        let own = leaves[..self.leaf_columns()].iter().map(|leaf| (leaf.name.clone(), leaf.dtype));
        let declared = self.declared.iter().map(|declared| match declared {
            Declared::Derived(derived) => (derived.name().to_owned(), derived.dtype()),
            Declared::Window(window) => match leaves.get(window.leaf) {
                Some(leaf) => {
                    let all = self.kind.has_time().then(|| self.steps_of(leaf.observation));
                    (window.name(&leaf.name, all), leaf.dtype)
                }
                None => (String::new(), DType::U8), // a foreign leaf, which `check` has reported
            },
        });
        own.chain(declared).collect()
    }

    /// Columns that every leaf has without being asked for.
    pub(crate) fn leaf_columns(&self) -> usize {
        if self.kind.is_replayed() { 0 } else { self.step.leaves.len() }
    }

    fn derive<T: Element>(&mut self, derived: Derived) -> Column<T> {
        self.declare(Declared::Derived(derived))
    }

    fn declare<T: Element>(&mut self, declared: Declared) -> Column<T> {
        let place = self.declared.iter().position(|&d| d == declared).unwrap_or_else(|| {
            self.declared.push(declared);
            self.declared.len() - 1
        });
        self.handle(self.leaf_columns() + place)
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
