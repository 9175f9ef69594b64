//! Why there is no ring: one variant a step of the start, each with the numbers that a user needs to act on it.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::cuda::types::{CudaError, CudaFindError, code};

use super::budget::MemoryLimit;
use super::progress::PinPhase;

/// Why a ring could not be made. Nothing is left mapped or registered.
///
/// The text of an error is complete: it contains the text of its source.
///
/// ```
/// use pinring::{PinTrial, RingError};
/// let error = PinTrial::new(4096, 0).run().unwrap_err();
/// assert!(matches!(error, RingError::ZeroBytes { slots: 0, slot_bytes: 4096 }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The ring would hold nothing; CUDA was not asked.
    #[error("a ring of {slots} slots of {slot_bytes} bytes holds nothing; both must be at least 1")]
    ZeroBytes {
        /// Slots asked for.
        slots: usize,
        /// Bytes of each.
        slot_bytes: usize,
    },
    /// Slots begin at page boundaries, so their length is whole pages.
    #[error("a slot of {slot_bytes} bytes is not a multiple of 4096; round it up to {rounded}", rounded = .slot_bytes.next_multiple_of(4096))]
    Misaligned {
        /// Bytes of each slot asked for.
        slot_bytes: usize,
    },
    /// The ring does not fit the address space.
    #[error("a ring of {slots} slots of {slot_bytes} bytes is longer than the address space; ask for less")]
    Overflow {
        /// Slots asked for.
        slots: usize,
        /// Bytes of each.
        slot_bytes: usize,
    },
    /// The ring is larger than what this process may still take; nothing was allocated.
    #[error(transparent)]
    Budget(#[from] Box<BudgetRefusal>),
    /// The operating system refused the memory.
    #[error(
        "could not {operation} {bytes} bytes for the ring: {source}; ask for a smaller ring, or see `ulimit -v`, the \
         container's memory and the host's overcommit setting"
    )]
    Map {
        /// `map` or `pre-fault`.
        operation: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// There is no usable CUDA.
    #[error(transparent)]
    Find(#[from] Box<CudaFindError>),
    /// CUDA refused to page-lock the ring.
    #[error(transparent)]
    Register(#[from] Box<RegisterRefusal>),
    /// CUDA registered the ring, but does not know one of its addresses.
    #[error(
        "slot {slot} is not page-locked at its {end} byte (0x{address:x}), although registering it succeeded: {source}"
    )]
    Verify {
        /// Number of the slot.
        slot: usize,
        /// Which end of it was asked about.
        end: SlotEnd,
        /// The address asked about.
        address: usize,
        /// CUDA's answer.
        source: CudaError,
    },
    /// CUDA registered the ring, but gives no device address for a part of it.
    #[error("CUDA gives no device address for slots {} to {} (0x{address:x}), although registering them succeeded: {source}", .slots.start, .slots.end - 1)]
    DeviceAddress {
        /// The slots of the registration.
        slots: Range<usize>,
        /// The host address asked about.
        address: usize,
        /// CUDA's answer.
        source: CudaError,
    },
    /// The start was cancelled; what had been done is undone.
    #[error("cancelled while {phase}, after {bytes_done} of {bytes_total} bytes")]
    Cancelled {
        /// What was going on.
        phase: PinPhase,
        /// Bytes that were done in this phase.
        bytes_done: usize,
        /// Bytes of the ring.
        bytes_total: usize,
    },
}

impl From<RingError> for crate::error::Error {
    fn from(error: RingError) -> Self {
        use crate::error::ErrorKind;
        let kind = match &error {
            RingError::Find(_) => ErrorKind::Cuda,
            RingError::Cancelled { .. } => ErrorKind::Stopped,
            _ => ErrorKind::Memory,
        };
        Self::from_source(kind, error)
    }
}

/// An end of a slot.
///
/// ```
/// assert_eq!(pinring::SlotEnd::Last.to_string(), "last");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotEnd {
    /// Its first byte.
    First,
    /// Its last byte.
    Last,
}

impl fmt::Display for SlotEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlotEnd::First => "first",
            SlotEnd::Last => "last",
        })
    }
}

/// A ring that is larger than its budget.
///
/// ```
/// # use pinring::{PinTrial, RingError};
/// if let Err(RingError::Budget(refusal)) = PinTrial::new(1 << 30, 1 << 30).map_only() {
///     assert!(refusal.asked > refusal.budget());
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetRefusal {
    /// Bytes of the ring.
    pub asked: u64,
    /// Bytes of ordinary memory that would come beside it.
    pub beside: u64,
    /// The limit that it exceeds.
    pub tightest: MemoryLimit,
    /// Every limit that was read, the tightest too.
    pub limits: Vec<MemoryLimit>,
}

impl BudgetRefusal {
    /// Bytes that could have been had.
    pub fn budget(&self) -> u64 {
        self.tightest.headroom
    }
}

impl fmt::Display for BudgetRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a ring of {} bytes", self.asked)?;
        if self.beside > 0 {
            write!(f, " and {} bytes of ordinary memory beside it", self.beside)?;
        }
        write!(
            f,
            " needs more than the {} bytes of memory that this process may still take: {}; \
             nothing was allocated. Ask for a smaller ring, or for more memory for this process",
            self.tightest.headroom, self.tightest
        )
    }
}

impl std::error::Error for BudgetRefusal {}

/// A refused call of `cudaHostRegister`.
///
/// ```
/// # use pinring::{PinTrial, RingError};
/// match PinTrial::new(1 << 20, 4).run() {
///     Err(RingError::Register(refusal)) => println!("{} bytes: {refusal}", refusal.asked),
///     Err(other) => println!("{other}"),
///     Ok(outcome) => println!("{outcome}"),
/// }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct RegisterRefusal {
    /// Bytes of the whole ring.
    pub asked: usize,
    /// The slots of the refused call.
    pub slots: Range<usize>,
    /// Their addresses.
    pub addresses: Range<usize>,
    /// Bytes of this ring that had been page-locked before the refused call, and are free again.
    pub registered: usize,
    /// Bytes that this process keeps page-locked in other rings.
    pub pinned_by_process: usize,
    /// The addresses within the refused range that somebody else has page-locked, if CUDA said that this is the
    /// reason.
    pub other_owner: Option<Range<usize>>,
    /// `ulimit -l` in bytes; `None` = unlimited. On Linux CUDA's page-locking was not counted against it where that was
    /// looked at.
    pub memlock_limit: Option<u64>,
    /// What bounds the memory of this process.
    pub limits: Vec<MemoryLimit>,
    /// Whether this is the Windows Subsystem for Linux.
    pub wsl: bool,
    /// CUDA's answer.
    pub source: CudaError,
}

impl fmt::Display for RegisterRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "could not page-lock slots {} to {} (0x{:x} to 0x{:x}, {} bytes) of a ring of {} bytes: {}. \
             {} bytes of this ring were page-locked before that call, {} bytes of other rings of this process are",
            self.slots.start,
            self.slots.end - 1,
            self.addresses.start,
            self.addresses.end,
            self.addresses.len(),
            self.asked,
            self.source,
            self.registered,
            self.pinned_by_process,
        )?;
        match self.source.code() {
            code::MEMORY_ALLOCATION => self.fmt_quota(f),
            code::ALREADY_REGISTERED => self.fmt_owner(f),
            _ => Ok(()),
        }
    }
}

impl RegisterRefusal {
    /// Code 2 speaks of "memory" and means the host's.
    fn fmt_quota(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(". What bounds this process: ulimit -l ")?;
        match self.memlock_limit {
            None => f.write_str("unlimited")?,
            Some(bytes) => write!(f, "{bytes} bytes")?,
        }
        for limit in &self.limits {
            write!(f, "; {limit}")?;
        }
        if self.wsl {
            f.write_str(
                "; this is WSL2, which grants far less page-locked memory than there is: ask for a smaller ring",
            )?;
        }
        Ok(())
    }

    fn fmt_owner(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(". The range is pinned by another owner")?;
        if let Some(range) = &self.other_owner {
            write!(f, " from 0x{:x} to 0x{:x}", range.start, range.end)?;
        }
        f.write_str(
            ": something in this process registered it, and freed it without unregistering; \
             pinring leaves that registration alone",
        )
    }
}

impl std::error::Error for RegisterRefusal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
