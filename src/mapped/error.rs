//! Why an allocation was not made, or a free not done. Data only.

use std::fmt;

use crate::cuda::device::DeviceError;
use crate::cuda::types::CudaError;
use crate::error::{Error, ErrorKind};
use crate::memory::RingError;

/// Why [`MappedAllocator`](super::MappedAllocator) made no allocation. Nothing is left allocated, mapped or registered.
///
/// The text is complete: what was asked for, what is held already, CUDA's or the system's answer, and the limits.
///
/// ```
/// use pinring::{MappedAllocator, MappedError, MemoryKind};
/// let error = MappedAllocator::new().allocate(MemoryKind::PageLocked, 0, 0).unwrap_err();
/// assert!(matches!(error, MappedError::Size { bytes: 0 }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappedError {
    /// No allocation has this size.
    #[error("an allocation of {bytes} bytes cannot be made: a size is 1 to {} bytes", isize::MAX)]
    Size {
        /// Bytes asked for.
        bytes: usize,
    },
    /// This process is a forked child of the one that the allocator belongs to, and CUDA cannot be used in it.
    #[error(
        "nothing was allocated: this process was forked after its parent began to allocate, and CUDA cannot be used in \
         such a child; start it anew (multiprocessing's `spawn`) or allocate in the parent"
    )]
    UsedAfterFork,
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device did not give the memory.
    #[error(
        "could not allocate {bytes} bytes of the memory of device {device}: {source}. {live} bytes of it are allocated \
         here, {waiting} more wait for their streams"
    )]
    DeviceMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The device asked for.
        device: i32,
        /// Bytes of it that this allocator has given out.
        live: usize,
        /// Freed bytes of it that streams may still use.
        waiting: usize,
        /// The driver's answer.
        source: CudaError,
    },
    /// The page-locked memory could not be had: out of memory, no CUDA runtime, or refused.
    #[error(
        "could not allocate {bytes} bytes of page-locked memory for device {device}: {source}. {live} bytes of it are \
         allocated here, {waiting} more wait for their streams"
    )]
    PageLocked {
        /// Bytes asked for.
        bytes: usize,
        /// The device asked for.
        device: i32,
        /// Page-locked bytes that this allocator has given out.
        live: usize,
        /// Freed page-locked bytes that streams may still use.
        waiting: usize,
        /// What failed: an allocation is made like a ring of one slot.
        source: Box<RingError>,
    },
}

impl From<MappedError> for Error {
    fn from(error: MappedError) -> Error {
        let kind = match &error {
            MappedError::Size { .. } => ErrorKind::Input,
            MappedError::UsedAfterFork => ErrorKind::Misuse,
            MappedError::Device(_) => ErrorKind::Cuda,
            MappedError::PageLocked { source, .. } if matches!(**source, RingError::Find(_)) => ErrorKind::Cuda,
            MappedError::DeviceMemory { .. } | MappedError::PageLocked { .. } => ErrorKind::Memory,
        };
        Error::from_source(kind, error)
    }
}

/// Why [`MappedAllocator::free`](super::MappedAllocator::free) did not free.
///
/// ```
/// use pinring::{FreeError, MappedAllocator};
/// // SAFETY: 0x1000 is no allocation, so nothing is freed.
/// let error = unsafe { MappedAllocator::new().free(0x1000, 0) }.unwrap_err();
/// assert!(matches!(error, FreeError::Unknown { address: 0x1000, inside: None }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// No allocation begins there. Nothing was freed.
    #[error("0x{address:x} was not freed: it is {}", Whose(*.inside))]
    Unknown {
        /// The address that was passed.
        address: u64,
        /// The start of the live allocation that it lies in.
        inside: Option<u64>,
    },
    /// The end of the work that may use the memory cannot be known, so it is kept for the rest of the process: allocated
    /// to nobody, and never used again.
    #[error(
        "the {bytes} bytes at 0x{address:x} are kept for the rest of the process: it cannot be known when their stream \
         has done with them: {source}"
    )]
    Unordered {
        /// The device address of the allocation.
        address: u64,
        /// Its length.
        bytes: usize,
        /// The driver's answer.
        source: CudaError,
    },
}

impl From<FreeError> for Error {
    fn from(error: FreeError) -> Error {
        let kind = match &error {
            FreeError::Unknown { .. } => ErrorKind::Misuse,
            FreeError::Unordered { .. } => ErrorKind::Cuda,
        };
        Error::from_source(kind, error)
    }
}

struct Whose(Option<u64>);

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(start) => write!(f, "inside the allocation that begins at 0x{start:x}; pass that address"),
            None => f.write_str("no allocation of this allocator, or was freed before"),
        }
    }
}
