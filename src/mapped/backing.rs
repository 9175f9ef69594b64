//! What is behind one allocation: a page-locked block or device memory, and the device that it was made for.

use std::ptr::NonNull;

use crate::cuda::device::{Device, DeviceMemory, RawStream};
use crate::memory::PinnedBlock;

use super::statistics::MemoryKind;

/// The memory itself. Dropping it gives it back to the system or the device at once: who drops one has seen that no
/// queued work uses it (invariant 3).
#[derive(Debug)]
pub(super) enum Backing {
    PageLocked(Pinned),
    Device(DeviceMemory),
}

/// A page-locked block, whose end goes through the context of its device: a runtime that is called on a thread without
/// a context makes one, on device 0.
#[derive(Debug)]
pub(super) struct Pinned {
    device: Device,
    /// `None` only while it is dropped.
    block: Option<PinnedBlock>,
}

impl Pinned {
    pub(super) fn new(device: Device, block: PinnedBlock) -> Pinned {
        Pinned { device, block: Some(block) }
    }

    fn block(&self) -> &PinnedBlock {
        self.block.as_ref().expect("taken by the drop only")
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if block.stamp().is_inherited() {
            drop(block); // the child's copy of the addresses; no CUDA is called
        } else {
            self.device.within(|| drop(block));
        }
    }
}

impl Backing {
    pub(super) fn kind(&self) -> MemoryKind {
        match self {
            Backing::PageLocked(_) => MemoryKind::PageLocked,
            Backing::Device(_) => MemoryKind::Device,
        }
    }

    pub(super) fn device(&self) -> &Device {
        match self {
            Backing::PageLocked(pinned) => &pinned.device,
            Backing::Device(memory) => memory.device(),
        }
    }

    /// The first byte, as the device counts.
    pub(super) fn address(&self) -> u64 {
        match self {
            Backing::PageLocked(pinned) => pinned.block().device_address(),
            Backing::Device(memory) => memory.address(),
        }
    }

    /// The first byte, as the host counts.
    pub(super) fn host(&self) -> Option<NonNull<u8>> {
        match self {
            Backing::PageLocked(pinned) => Some(pinned.block().host()),
            Backing::Device(_) => None,
        }
    }

    /// Whether it is page-locked memory, as CUDA says now: a device reset ends that.
    pub(super) fn is_page_locked(&self) -> bool {
        match self {
            Backing::PageLocked(pinned) => pinned.device.within(|| pinned.block().is_page_locked()),
            Backing::Device(_) => false,
        }
    }

    /// The length that it takes: of page-locked memory whole pages.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Backing::PageLocked(pinned) => pinned.block().bytes(),
            Backing::Device(memory) => memory.bytes(),
        }
    }
}

/// One allocation in use.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) backing: Backing,
    /// The length asked for.
    pub(super) bytes: usize,
    /// Streams, besides the one that it is freed in, whose work uses it.
    pub(super) streams: Vec<RawStream>,
}
