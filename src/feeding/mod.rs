//! Feeding a device: the data side, shared by the feeding thread and the learner's.
//!
//! A [`Desk`] stands between them, one per device. The feeding thread puts device batches on it as soon as their copy
//! is *issued*; the learner's stream, not its thread, waits for the copy. The learner puts buffers back as soon as their
//! release is *recorded*; the feeding stream, not its thread, waits for that. A slot of the ring comes home only when
//! its copy's event has completed (invariant 3), and never if that cannot be learned (invariant 4).

pub(crate) mod batch;
pub(crate) mod copy;
pub(crate) mod desk;
pub(crate) mod download;
pub(crate) mod feeder;
pub(crate) mod learner;
pub(crate) mod rounds;
pub(crate) mod updates;

#[cfg(all(test, target_os = "linux"))]
mod tests;

pub(crate) use desk::Desk;
