//! A mapping and its registrations with CUDA, made one after the other and undone in reverse, here and nowhere else.
//!
//! **Pieces.** One copy may not cross two registrations, and one DMA moves a whole slot, so a registration is always
//! whole slots. Pieces of about 1 GiB keep a large ring cancellable and its progress visible; a smaller ring is one
//! piece. Where CUDA refuses a piece with code 2, which some drivers say to a single call above a size of theirs, the
//! piece is halved by slots and tried again, down to one slot; the size found is kept for the rest.
//!
//! **The end.** [`Held`] has the only `Drop`, which serves a failed start and a ring's normal end alike: unregister,
//! last piece first, then unmap. What CUDA does not let go of stays mapped (invariant 5).
//!
//! It does not decide when: `cudaHostUnregister` waits for every queued copy of the process, so the owner of the last
//! handle should not be a learner's thread in mid-training.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::Cuda;
use crate::cuda::types::{CudaError, code};

use super::budget::HostFiles;
use super::error::{RegisterRefusal, RingError, SlotEnd};
use super::fork::ForkStamp;
use super::mapping::Mapping;
use super::os;
use super::progress::PinWatch;

/// What one registration takes, if slots are smaller: large enough that calls are few, small enough that "cancel" is
/// soon.
pub(super) const PIECE_BYTES: usize = 1 << 30;

/// Bytes that rings of this process have registered now.
static PINNED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that this process holds page-locked in rings, half-made ones and those that CUDA did not let go of included.
pub(crate) fn pinned_bytes_in_process() -> usize {
    PINNED.load(Ordering::Relaxed)
}

/// The mapping of a ring, and what of it is registered.
#[derive(Debug)]
pub(super) struct Held {
    /// `None`: nothing is ever registered.
    cuda: Option<Cuda>,
    /// The slots of each registration, in the order in which they were made.
    pieces: Vec<Range<usize>>,
    slot_bytes: usize,
    slots: usize,
    stamp: ForkStamp,
    /// Bytes that CUDA did not let go of: for whoever still wants to know when this is dropped.
    kept: Arc<AtomicUsize>,
    /// Dropped after `Held::drop` has unregistered (invariant 5): fields go after the struct's own `Drop`.
    mapping: Mapping,
}

impl Held {
    pub(super) fn new(mapping: Mapping, slot_bytes: usize, slots: usize, cuda: Option<Cuda>) -> Held {
        assert!(slot_bytes * slots <= mapping.bytes());
        Held { cuda, pieces: Vec::new(), slot_bytes, slots, stamp: ForkStamp::now(), kept: Arc::default(), mapping }
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(super) fn kept_bytes(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.kept)
    }

    pub(super) fn stamp(&self) -> ForkStamp {
        self.stamp
    }

    pub(super) fn slot(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.slots, "slot {index} of {}", self.slots);
        self.mapping.at(index * self.slot_bytes)
    }

    pub(super) fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    fn cuda(&self) -> &Cuda {
        self.cuda.as_ref().expect("only a ring with CUDA is registered")
    }

    /// Page-locks every slot. After an error, what had been registered is undone by `drop`.
    pub(super) fn register(&mut self, piece_bytes: usize, watch: &PinWatch, host: &HostFiles) -> Result<(), RingError> {
        let mut at_once = slots_at_once(piece_bytes, self.slot_bytes);
        let mut first = 0;
        while first < self.slots {
            watch.check()?;
            let piece = first..self.slots.min(first.saturating_add(at_once));
            let bytes = piece.len() * self.slot_bytes;
            match self.cuda().register(self.slot(first), bytes) {
                Ok(()) => {
                    first = piece.end;
                    self.pieces.push(piece);
                    PINNED.fetch_add(bytes, Ordering::Relaxed);
                    watch.add(bytes);
                    watch.tell();
                }
                Err(error) if error.code() == code::MEMORY_ALLOCATION && piece.len() > 1 => {
                    at_once = piece.len().div_ceil(2);
                }
                Err(error) => return Err(self.refusal(piece, error, host)),
            }
        }
        Ok(())
    }

    fn refusal(&self, slots: Range<usize>, source: CudaError, host: &HostFiles) -> RingError {
        let start = self.slot(slots.start).addr().get();
        let addresses = start..start + slots.len() * self.slot_bytes;
        let registered = self.pieces.iter().map(|piece| piece.len() * self.slot_bytes).sum();
        let other_owner = (source.code() == code::ALREADY_REGISTERED).then(|| self.owned_by_another(&slots)).flatten();
        RingError::from(Box::new(RegisterRefusal {
            asked: self.slots * self.slot_bytes,
            slots,
            addresses,
            registered,
            pinned_by_process: pinned_bytes_in_process().saturating_sub(registered),
            other_owner,
            memlock_limit: os::memlock_limit(),
            limits: host.budget().limits,
            wsl: host.is_wsl(),
            source,
        }))
    }

    /// The first run of pages in these slots that CUDA knows, though we did not register them.
    fn owned_by_another(&self, slots: &Range<usize>) -> Option<Range<usize>> {
        let page = os::page_bytes();
        let pages = slots.start * self.slot_bytes..slots.end * self.slot_bytes;
        let known = |offset: &usize| self.cuda().host_flags(self.mapping.at(*offset)).is_ok();
        let first = pages.clone().step_by(page).find(known)?;
        let end = (first..pages.end).step_by(page).find(|offset| !known(offset));
        let base = self.mapping.at(0).addr().get();
        Some(base + first..base + end.unwrap_or(pages.end))
    }

    /// Asks CUDA about both ends of every slot. Success is what "pinned" means (invariant 1).
    pub(super) fn verify(&self, watch: &PinWatch) -> Result<(), RingError> {
        for piece in &self.pieces {
            watch.check()?;
            for slot in piece.clone() {
                let first = slot * self.slot_bytes;
                let ends = [(SlotEnd::First, first), (SlotEnd::Last, first + self.slot_bytes - 1)];
                for (end, offset) in ends {
                    let byte = self.mapping.at(offset);
                    if let Err(source) = self.cuda().host_flags(byte) {
                        let address = byte.addr().get();
                        return Err(RingError::Verify { slot, end, address, source });
                    }
                }
            }
            watch.add(piece.len() * self.slot_bytes);
            watch.tell();
        }
        Ok(())
    }

    /// The device's address of each piece. Asked, not assumed to be the host's.
    pub(super) fn device_addresses(&self) -> Result<Vec<u64>, RingError> {
        let of = |piece: &Range<usize>| {
            let start = self.slot(piece.start);
            self.cuda().device_pointer(start).map_err(|source| RingError::DeviceAddress {
                slots: piece.clone(),
                address: start.addr().get(),
                source,
            })
        };
        self.pieces.iter().map(of).collect()
    }

    /// Unregisters every piece, the last first; tells the mapping what must stay.
    fn release(&mut self) {
        let Some(cuda) = self.cuda.take() else { return };
        // In a forked child the registrations are the parent's, and CUDA is not to be called.
        if self.stamp.is_inherited() || self.pieces.is_empty() {
            self.forget(|_| Ok(()));
        } else {
            cuda.relaxed(|| self.forget(|start| cuda.unregister(start)));
        }
    }

    fn forget(&mut self, unregister: impl Fn(NonNull<u8>) -> Result<(), CudaError>) {
        let mut outcome = Outcome::default();
        while let Some(piece) = self.pieces.pop() {
            let range = piece.start * self.slot_bytes..piece.end * self.slot_bytes;
            let let_go = match unregister(self.slot(piece.start)) {
                Ok(()) => true,
                Err(error) => outcome.note(error, range.len()),
            };
            if let_go {
                PINNED.fetch_sub(range.len(), Ordering::Relaxed);
            } else {
                self.kept.fetch_add(range.len(), Ordering::Relaxed);
                self.mapping.keep(range);
            }
        }
        outcome.tell();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

/// How many slots one piece takes: whole ones, at least one.
fn slots_at_once(piece_bytes: usize, slot_bytes: usize) -> usize {
    (piece_bytes / slot_bytes).max(1)
}

/// What went wrong while unregistering: at most two events a ring, however many pieces it had.
#[derive(Default)]
struct Outcome {
    /// Bytes where nothing was registered any more, as after a device reset, and CUDA's first such answer.
    lost: Option<(CudaError, usize)>,
    /// Bytes that CUDA did not let go of, and its first such answer.
    stranded: Option<(CudaError, usize)>,
}

impl Outcome {
    /// Takes note of a refused unregistration. Returns whether the memory is free of CUDA all the same.
    fn note(&mut self, error: CudaError, bytes: usize) -> bool {
        match error.code() {
            code::NOT_REGISTERED => {
                self.lost.get_or_insert((error, 0)).1 += bytes;
                true
            }
            // The process ends and the runtime is gone. Nobody can say what the driver still holds: keep it, and say
            // nothing.
            code::CUDART_UNLOADING => false,
            _ => {
                self.stranded.get_or_insert((error, 0)).1 += bytes;
                false
            }
        }
    }

    fn tell(self) {
        if let Some((error, bytes)) = self.lost {
            tracing::warn!(
                bytes,
                %error,
                "the ring was no longer page-locked when it was dropped: was the device reset?"
            );
        }
        if let Some((error, bytes)) = self.stranded {
            tracing::warn!(
                bytes,
                %error,
                "CUDA did not unregister the ring; its memory stays mapped for the rest of the process"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_whole_slots_and_at_most_the_size_asked_for_unless_one_slot_is_larger() {
        assert_eq!(slots_at_once(PIECE_BYTES, 4096), PIECE_BYTES / 4096);
        assert_eq!(slots_at_once(PIECE_BYTES, PIECE_BYTES / 2), 2);
        assert_eq!(slots_at_once(PIECE_BYTES, PIECE_BYTES / 2 + 4096), 1);
        assert_eq!(slots_at_once(PIECE_BYTES, PIECE_BYTES + 4096), 1);
        assert_eq!(slots_at_once(PIECE_BYTES, usize::MAX), 1);
    }
}
