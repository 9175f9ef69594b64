//! The ring's memory: how much may be had, where it comes from, how it is page-locked, and how it is given back.
//!
//! Bottom up: `os` (system calls) → `mapping`, `fork` → `prefault`, `registration` → `ring`, `block` (one registration
//! alone). To the side: `budget`
//! (may we?), `numa` (where?), `progress` (how far?), `report` (how did it go?), `error` (why not?), `trial` (all of it without a
//! feed). This module owns the bytes of a feed and knows nothing of what they mean: no schema, no leases, no device
//! memory, no copies.

#[cfg(feature = "mapped-allocator")]
mod block;
mod budget;
mod error;
mod fork;
mod mapping;
mod numa;
mod os;
mod prefault;
mod progress;
mod registration;
mod report;
mod ring;
mod trial;

#[cfg(all(test, unix))]
mod tests;

pub use self::budget::{MemoryLimit, MemoryLimitKind};
pub use self::error::{BudgetRefusal, RegisterRefusal, RingError, SlotEnd};
pub use self::numa::NodeBytes;
pub use self::progress::{PinPhase, PinProgress};
pub use self::report::{PinReport, PinTimes};
pub use self::trial::{MapOutcome, PinOutcome, PinTrial};

#[cfg(feature = "mapped-allocator")]
pub(crate) use self::block::PinnedBlock;
pub(crate) use self::budget::memory_limit;
pub(crate) use self::fork::ForkStamp;
#[cfg(test)]
pub(crate) use self::fork::in_forked_child;
pub(crate) use self::mapping::{ask_huge_pages, stranded_bytes_in_process};
pub(crate) use self::progress::PinWatch;
#[cfg(test)]
pub(crate) use self::registration::pinned_bytes_in_process;
pub(crate) use self::ring::{Ring, RingPlan, check_memory};
