//! One stretch of page-locked memory that is one registration: what a single allocation is made of.
//!
//! It is made as a ring of one slot is (budget, map, pre-fault, register, verify), on the same code, and ends by the same
//! `Drop` (`registration.rs`). A copy or a kernel may touch all of it at once, since one registration holds it. It
//! knows no devices, no streams and no mode: whoever drops one has seen that no device uses it any more (invariant 3).

use std::ptr::NonNull;

use crate::cuda::Cuda;
use crate::cuda::types::CudaFindError;

use super::error::RingError;
use super::fork::ForkStamp;
use super::prefault::block_threads;
use super::progress::{PinPhase, PinWatch};
use super::registration::Held;
use super::report::PinTimes;
use super::ring::{Conditions, RingPlan, SLOT_ALIGN, check_budget, map, pin};

/// A page-locked stretch. Its bytes are zero at first.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    held: Held,
    bytes: usize,
    device_address: u64,
}

impl PinnedBlock {
    /// The bytes that a block for `bytes` takes: whole pages.
    pub(crate) fn rounded(bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(SLOT_ALIGN)
    }

    /// A block of at least `bytes`, mapped for the device that is current on the calling thread and every other.
    pub(crate) fn new(
        bytes: usize,
        ignore_budget: bool,
        find: impl FnOnce() -> Result<Cuda, CudaFindError>,
    ) -> Result<PinnedBlock, RingError> {
        let slot_bytes = Self::rounded(bytes).ok_or(RingError::Overflow { slots: 1, slot_bytes: bytes })?;
        let plan = RingPlan { ignore_budget, ..RingPlan::new(slot_bytes, 1) };
        let bytes = plan.bytes()?;
        let conditions = Conditions { prefault_threads: block_threads(), ..Conditions::here() };
        check_budget(bytes, &plan, &conditions)?;

        let (watch, mut times) = (PinWatch::new(None), PinTimes::default());
        let _running = watch.begin(bytes);
        watch.enter(PinPhase::FindingCuda)?;
        let cuda = find().map_err(Box::new)?;
        let (mut held, _) = map(&conditions, &plan, bytes, Some(cuda.clone()), &watch, &mut times)?;
        let addresses = pin(&mut held, &cuda, &conditions, &watch, &mut times)?;
        let [device_address] = addresses[..] else { unreachable!("one slot is one registration") };
        tracing::debug!(bytes, %times, "block page-locked");
        Ok(PinnedBlock { held, bytes, device_address })
    }

    /// Its first byte, as the host counts.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.held.slot(0)
    }

    /// Its first byte, as devices count.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Its length, in whole pages.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether CUDA still says so, of both ends.
    pub(crate) fn is_page_locked(&self) -> bool {
        self.held.verify(&PinWatch::new(None)).is_ok()
    }

    /// The mark of the process that made it.
    pub(crate) fn stamp(&self) -> ForkStamp {
        self.held.stamp()
    }
}
