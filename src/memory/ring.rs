//! The ring: every slot of a feed in one mapping, page-locked as a whole or not there at all.
//!
//! There are two ways to a ring, and holding one *is* the proof that all its steps succeeded (invariant 1). The order
//! is: budget, CUDA, map, pre-fault, register, verify; whatever fails, what was done is undone in reverse by the one
//! `Drop` there is (`registration.rs`). A ring says where its slots are; who may touch them is decided by the leases
//! above it. Leases share the ring, so that the last of them ends it (invariant 7).

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use crate::cuda::Cuda;
use crate::cuda::types::{CudaFindError, CudaSearch};

use super::budget::HostFiles;
use super::error::{BudgetRefusal, RingError};
use super::fork::ForkStamp;
use super::mapping::{Mapping, Pages};
use super::numa::{Node, NodeBytes};
use super::prefault::{default_threads, prefault};
use super::progress::{PinPhase, PinWatch};
use super::registration::{Held, PIECE_BYTES};
use super::report::{PinReport, PinTimes};

/// Slots begin and end at multiples of this.
pub(crate) const SLOT_ALIGN: usize = 4096;

/// The shape of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RingPlan {
    /// A multiple of [`SLOT_ALIGN`].
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
    /// Ordinary memory that whoever asks takes beside the ring: it counts against the budget.
    pub(crate) beside: usize,
    /// Whether a ring larger than its budget is tried all the same.
    pub(crate) ignore_budget: bool,
}

impl RingPlan {
    /// Slots with nothing beside them.
    pub(crate) fn new(slot_bytes: usize, slots: usize) -> RingPlan {
        RingPlan { slot_bytes, slots, beside: 0, ignore_budget: false }
    }

    /// Length of the ring in bytes, if there can be such a ring.
    pub(super) fn bytes(&self) -> Result<usize, RingError> {
        let RingPlan { slot_bytes, slots, .. } = *self;
        if slot_bytes == 0 || slots == 0 {
            return Err(RingError::ZeroBytes { slots, slot_bytes });
        }
        let bytes = slot_bytes.checked_mul(slots).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or(RingError::Overflow { slots, slot_bytes })?;
        if slot_bytes % SLOT_ALIGN != 0 {
            return Err(RingError::Misaligned { slot_bytes });
        }
        Ok(bytes)
    }
}

/// What the making of a ring depends on besides its shape.
#[derive(Debug, Clone)]
pub(crate) struct Conditions {
    /// Where the memory budget is read.
    pub(crate) host: HostFiles,
    /// Threads that have the pages faulted in.
    pub(crate) prefault_threads: usize,
    /// About what one registration takes.
    pub(crate) piece_bytes: usize,
    /// The NUMA node that the ring is to lie on, if it matters.
    pub(crate) node: Option<Node>,
}

impl Conditions {
    /// This machine.
    pub(crate) fn here() -> Conditions {
        Conditions {
            host: HostFiles::system(),
            prefault_threads: default_threads(),
            piece_bytes: PIECE_BYTES,
            node: None,
        }
    }
}

/// The memory of a feed.
#[derive(Debug)]
pub(crate) struct Ring {
    held: Held,
    slot_bytes: usize,
    slots: usize,
    times: PinTimes,
    pinned: Option<Pinned>,
}

/// What is known of a page-locked ring.
#[derive(Debug)]
struct Pinned {
    report: PinReport,
    /// Of each registration, in the order of the slots: its number of slots and the device's address of the first.
    pieces: Vec<(usize, u64)>,
}

impl Ring {
    /// A ring in ordinary memory: mapped, huge pages asked for, every page present. Opens no CUDA.
    pub(crate) fn unpinned(plan: &RingPlan, watch: &PinWatch) -> Result<Ring, RingError> {
        Ring::unpinned_under(&Conditions::here(), plan, watch)
    }

    /// A ring of which every byte is page-locked for every device, and was verified to be. `address`: the PCI address of
    /// the device that it is to be near; asked for only where a ring can be far.
    pub(crate) fn pinned(
        plan: &RingPlan,
        search: &CudaSearch,
        address: impl FnOnce() -> Option<String>,
        watch: &PinWatch,
    ) -> Result<Ring, RingError> {
        let here = Conditions::here();
        let conditions = Conditions { node: here.host.node_near(address), ..here };
        Ring::pinned_under(&conditions, plan, || Cuda::find(search), watch)
    }

    /// As [`unpinned`](Ring::unpinned), on terms of the caller's.
    pub(crate) fn unpinned_under(
        conditions: &Conditions,
        plan: &RingPlan,
        watch: &PinWatch,
    ) -> Result<Ring, RingError> {
        let bytes = plan.bytes()?;
        let _running = watch.begin(bytes);
        check_budget(bytes, plan, conditions)?;
        let mut times = PinTimes::default();
        let (held, _) = map(conditions, plan, bytes, None, watch, &mut times)?;
        watch.enter(PinPhase::Done)?;
        tracing::debug!(bytes, slots = plan.slots, "ring mapped");
        Ok(Ring { held, slot_bytes: plan.slot_bytes, slots: plan.slots, times, pinned: None })
    }

    /// As [`pinned`](Ring::pinned), on terms of the caller's, with the CUDA that `find` finds.
    pub(crate) fn pinned_under(
        conditions: &Conditions,
        plan: &RingPlan,
        find: impl FnOnce() -> Result<Cuda, CudaFindError>,
        watch: &PinWatch,
    ) -> Result<Ring, RingError> {
        let bytes = plan.bytes()?;
        let _running = watch.begin(bytes);
        check_budget(bytes, plan, conditions)?;

        let mut times = PinTimes::default();
        watch.enter(PinPhase::FindingCuda)?;
        let began = Instant::now();
        let cuda = find().map_err(Box::new)?;
        times.find = began.elapsed();

        // From here on `held` undoes everything if a later line returns.
        let (mut held, prefault_threads) = map(conditions, plan, bytes, Some(cuda.clone()), watch, &mut times)?;

        let addresses = pin(&mut held, &cuda, conditions, watch, &mut times)?;

        watch.enter(PinPhase::Done)?;
        let nodes = conditions.host.nodes_of(held.mapping().addresses());
        let device_node = conditions.node.as_ref().map(|node| node.number);
        warn_if_far(nodes.as_deref(), device_node);
        let report = PinReport {
            cuda: cuda.report(),
            page_locked_bytes: bytes,
            slots_verified: plan.slots,
            pieces: held.pieces().len(),
            prefault_threads,
            huge_page_bytes: held.mapping().pages().map(|pages| pages.huge),
            nodes,
            device_node,
            times,
        };
        tracing::info!(bytes, slots = plan.slots, library = %cuda.library().display(), "ring page-locked");
        let pieces = held.pieces().iter().map(|piece| piece.len()).zip(addresses).collect();
        let pinned = Some(Pinned { report, pieces });
        Ok(Ring { held, slot_bytes: plan.slot_bytes, slots: plan.slots, times, pinned })
    }

    /// The first byte of slot `index`.
    ///
    /// # Panics
    /// If there is no such slot: a bug of the caller.
    pub(crate) fn slot(&self, index: usize) -> NonNull<u8> {
        self.held.slot(index)
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of all slots.
    pub(crate) fn bytes(&self) -> usize {
        self.slot_bytes * self.slots
    }

    /// Whether the ring is page-locked: as a whole, or not.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// How it came to be page-locked; `None` for an unpinned ring.
    pub(crate) fn report(&self) -> Option<&PinReport> {
        self.pinned.as_ref().map(|pinned| &pinned.report)
    }

    /// Bytes that CUDA does not let go of at this ring's end, and that stay mapped: to be read after it.
    pub(crate) fn kept_bytes(&self) -> Arc<AtomicUsize> {
        self.held.kept_bytes()
    }

    /// How long its making took.
    pub(crate) fn times(&self) -> &PinTimes {
        &self.times
    }

    /// What the kernel has behind the ring now; `None` where it does not say.
    pub(super) fn pages(&self) -> Option<Pages> {
        self.held.mapping().pages()
    }

    /// The address under which devices reach slot `index`; `None` for an unpinned ring.
    ///
    /// # Panics
    /// If there is no such slot: a bug of the caller.
    pub(crate) fn device_address(&self, index: usize) -> Option<u64> {
        assert!(index < self.slots, "slot {index} of {}", self.slots);
        let mut index = index;
        for (slots, address) in &self.pinned.as_ref()?.pieces {
            if index < *slots {
                return Some(address + (index * self.slot_bytes) as u64);
            }
            index -= slots;
        }
        None
    }

    /// The same of slot `first`, if all slots behind it follow for devices as they do here.
    pub(crate) fn device_line(&self, first: usize) -> Option<u64> {
        let begin = self.device_address(first)?;
        let follows = |index| self.device_address(index) == Some(begin + ((index - first) * self.slot_bytes) as u64);
        (first..self.slots).all(follows).then_some(begin)
    }

    /// The mark of the process that made this ring: in a forked child its bytes read zero, and nobody may use it.
    pub(crate) fn stamp(&self) -> ForkStamp {
        self.held.stamp()
    }
}

/// Says so if a part of the ring is not at its device's node: full there, or barred from it by the process's own rules.
fn warn_if_far(nodes: Option<&[NodeBytes]>, device_node: Option<u32>) {
    let (Some(nodes), Some(device_node)) = (nodes, device_node) else { return };
    let bytes: usize = nodes.iter().filter(|on| on.node != device_node).map(|on| on.bytes).sum();
    if bytes > 0 {
        tracing::warn!(bytes, device_node, "a part of the ring lies on another NUMA node than its device's");
    }
}

/// Refuses a ring that this process has no memory for. Nothing has been allocated.
pub(super) fn check_budget(bytes: usize, plan: &RingPlan, conditions: &Conditions) -> Result<(), RingError> {
    if plan.ignore_budget {
        return Ok(());
    }
    let budget = conditions.host.budget();
    let (asked, beside) = (bytes as u64, plan.beside as u64);
    match budget.tightest().cloned() {
        Some(tightest) if tightest.headroom < asked.saturating_add(beside) => {
            Err(RingError::from(Box::new(BudgetRefusal { asked, beside, tightest, limits: budget.limits })))
        }
        _ => Ok(()),
    }
}

/// Refuses a ring that this process has no memory for, with what is to be allocated beside it and `more`, before any of it
/// is: what is allocated beside cannot fail in a way that says why.
pub(crate) fn check_memory(plan: &RingPlan, more: usize) -> Result<(), RingError> {
    let (bytes, beside) = (plan.bytes()?, plan.beside.saturating_add(more));
    check_budget(bytes, &RingPlan { beside, ..plan.clone() }, &Conditions::here())?;
    let all = bytes.saturating_add(beside);
    let mut probe = Vec::<u8>::new(); // of addresses alone: no page of it is touched
    let source = std::io::ErrorKind::OutOfMemory;
    probe.try_reserve_exact(all).map_err(|_| RingError::Map { operation: "map", bytes: all, source: source.into() })?;
    std::hint::black_box(&probe);
    Ok(())
}

/// Maps and pre-faults; also returns how many threads did.
pub(super) fn map(
    conditions: &Conditions,
    plan: &RingPlan,
    bytes: usize,
    cuda: Option<Cuda>,
    watch: &PinWatch,
    times: &mut PinTimes,
) -> Result<(Held, usize), RingError> {
    watch.enter(PinPhase::Mapping)?;
    let began = Instant::now();
    let mapping = Mapping::new(bytes).map_err(|source| RingError::Map { operation: "map", bytes, source })?;
    times.map = began.elapsed();

    watch.enter(PinPhase::Prefaulting)?;
    let began = Instant::now();
    let threads = prefault(&mapping, conditions.prefault_threads, conditions.node.as_ref(), watch)?;
    times.prefault = began.elapsed();
    Ok((Held::new(mapping, plan.slot_bytes, plan.slots, cuda), threads))
}

/// Page-locks every slot, verifies it, and asks for the device's address of each registration.
pub(super) fn pin(
    held: &mut Held,
    cuda: &Cuda,
    conditions: &Conditions,
    watch: &PinWatch,
    times: &mut PinTimes,
) -> Result<Vec<u64>, RingError> {
    cuda.relaxed(|| {
        watch.enter(PinPhase::Registering)?;
        let began = Instant::now();
        held.register(conditions.piece_bytes, watch, &conditions.host)?;
        times.register = began.elapsed();

        watch.enter(PinPhase::Verifying)?;
        let began = Instant::now();
        held.verify(watch)?;
        let addresses = held.device_addresses()?;
        times.verify = began.elapsed();
        Ok(addresses)
    })
}
