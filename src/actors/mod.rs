//! The control plane: actix actors, each the root future of a runtime on a thread of its own.
//!
//! | actor | owns | waits for | sends |
//! |---|---|---|---|
//! | supervisor | the feed's start, its faults and its stop | pinning, exit reports, stop | the running parts, the stop's report |
//! | pinning | CUDA's start and a share of the ring | nothing, then stop | the ring, or why there is none |
//! | feeding (one a device) | the device's stream, buffers and in-flight list | batches, completions, the close | its desk, the first CUDA error |
//! | sampling (of a replay feed) | its stream's round and the threads that help it | free slots, items, the close | its exit report |
//! | ingest | the intake gate, its watch and its end | stop | its exit report |
//!
//! Only control passes through mailboxes: nothing that must be bounded is a message, and actix types never leave this
//! module's callers.

pub(crate) mod crew;
pub(crate) mod feeding;
pub(crate) mod host;
pub(crate) mod ingest;
pub(crate) mod pinning;
pub(crate) mod sampling;
pub(crate) mod supervisor;
