//! Errors of the control plane, and why a feed ended.
//!
//! Owns [`Error`] (one opaque type with a [`kind`](Error::kind), whose text is complete) and [`Closed`], the reason that
//! every wait ends with. Errors of single verbs (`StepError`, `CommitError`, …) live beside their verbs and convert
//! into [`Error`] with `?`.

use crate::schema::SchemaError;
use std::fmt;
use std::sync::Arc;

/// What kind of thing went wrong, for code that has to decide.
///
/// ```
/// use pinring::{ErrorKind, Feed, Sample, Step};
/// let empty = Feed::builder(Sample::step(Step::new())).start().unwrap_err();
/// assert_eq!(empty.kind(), ErrorKind::Schema);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A mistake in a step or a sample.
    Schema,
    /// Settings of the builder that contradict each other or the machine.
    Config,
    /// No usable CUDA: not found, or it would not start.
    Cuda,
    /// The ring could not be mapped or page-locked.
    Memory,
    /// An actor failed; the text names it.
    Fault,
    /// The feed was stopped, or its start was cancelled.
    Stopped,
    /// Every writer is gone and everything was delivered.
    Ended,
    /// Bad input to a writer: a shape, a leaf never written, a value that the leaf rejects.
    Input,
    /// The ring was full, or every batch was held.
    Full,
    /// The call is not allowed here: a second learner, or a stop from a thread of the feed itself.
    Misuse,
    /// A thread could not be started.
    Thread,
    /// A file could not be read or written, or is none of ours.
    File,
}

/// The error of everything that is not a single writer's or learner's verb. Its text is complete: causes included.
///
/// ```
/// use pinring::{Feed, Sample, Step};
/// let mut step = Step::new();
/// step.leaf::<f32>("reward", &[]);
/// step.leaf::<f32>("reward", &[]);
/// let error = Feed::builder(Sample::step(step)).start().unwrap_err();
/// assert!(error.to_string().contains("`reward` is used twice"));
/// ```
pub struct Error {
    kind: ErrorKind,
    text: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
        Error { kind, text: text.into(), source: None }
    }

    /// An error whose text is that of `source`, which already includes its own causes.
    pub(crate) fn from_source(kind: ErrorKind, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error { kind, text: source.to_string(), source: Some(Box::new(source)) }
    }

    /// What kind of thing went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Error {
    /// The kind and the whole text, so that `main() -> Result<()>` prints something to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.text)
    }
}

impl std::error::Error for Error {
    /// The typed error that this one carries, for `downcast_ref`.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

impl From<SchemaError> for Error {
    fn from(error: SchemaError) -> Error {
        Error::from_source(ErrorKind::Schema, error)
    }
}

/// The failure of an actor: who, doing what, and why. The first one is final and stops the feed.
///
/// An actor fails by a panic: a bug of this crate, or a callback or waker of the program's own. In a program built with
/// `panic = "abort"` there are no faults: the panic ends it.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    pub(crate) actor: &'static str,
    pub(crate) text: String,
}

impl Fault {
    /// The actor that failed: also the end of its thread's name.
    pub fn actor(&self) -> &str {
        self.actor
    }
    /// What it said: the panic's text, or the error with the CUDA symbol.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} actor failed: {}", self.actor, self.text)
    }
}

/// Why nothing more passes between writers and learner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Closed {
    /// The last writer and the last intake handle are gone.
    #[error("the feed ended: every writer and intake handle is gone")]
    Ended,
    /// A writer of a lockstep feed was dropped, so no further batch can be complete.
    #[error(
        "the feed ended: the writer of lanes {first}..{end} was dropped, and in lockstep every batch needs every lane"
    )]
    LaneGone {
        /// Its first lane.
        first: usize,
        /// One past its last lane.
        end: usize,
    },
    /// `stop` was called, or the feed was dropped.
    #[error("the feed was stopped, by `stop` or by the drop of the `Feed`")]
    Stopped,
    /// The learner was dropped, so nobody takes batches any more.
    #[error("the learner was dropped: nobody takes batches any more")]
    LearnerGone,
    /// This process was forked from the one that started the feed. Its threads and its ring are not here.
    #[error(
        "this process was forked after the feed was started: the feed's threads and its ring belong to the parent; start \
         a feed of its own here, or fork first"
    )]
    UsedAfterFork,
    /// An actor failed.
    #[error("the feed was stopped by a fault: {0}; start a new feed")]
    Fault(Arc<Fault>),
}

impl Closed {
    /// Whether the source came to its end, and nobody closed anything.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Closed::Ended | Closed::LaneGone { .. })
    }
}

impl From<Closed> for Error {
    fn from(closed: Closed) -> Error {
        let kind = match closed {
            Closed::Ended | Closed::LaneGone { .. } => ErrorKind::Ended,
            Closed::Stopped | Closed::LearnerGone => ErrorKind::Stopped,
            Closed::UsedAfterFork => ErrorKind::Misuse,
            Closed::Fault(_) => ErrorKind::Fault,
        };
        Error::from_source(kind, closed)
    }
}
