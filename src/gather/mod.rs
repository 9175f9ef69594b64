//! Batches gathered by the device: a kernel that reads the page-locked store through its mapped address.
//!
//! Owns who gathers ([`Gathering`]: what was asked for, what is possible, and why), the tables that the kernel works from
//! ([`Tables`]), the kernel itself with its text ([`GatherKernel`]), and its walk on the host for tests (`emulate`). The host
//! resolves windows to records and computes the columns that are no leaf's; the device moves the bytes of leaves and adds
//! up n-step returns. What it does not do: choose rows, or copy leaves on the host: that is `store`'s.
//!
//! A batch that the device is to gather travels through its slot all the same. The slot holds what the host knows: the
//! columns that it computed, in their places, and, where a window's column would be, the table of records. So there
//! is nothing to allocate for it, and the slot's lease keeps it until the kernel has ended.

#[cfg(test)]
#[allow(unsafe_code)]
mod emulate;
#[allow(unsafe_code)]
mod kernel;
#[cfg_attr(not(test), expect(dead_code, reason = "`emulate` reads what the tables write"))]
mod launch;
mod tables;

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

pub(crate) use kernel::GatherKernel;
pub(crate) use tables::Tables;

use crate::error::{Error, ErrorKind};
use crate::sync::lock;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, AtomicU8, AtomicUsize, Ordering};

/// Thread blocks of the kernel unless something else was asked for.
pub(crate) const BLOCKS: u32 = 4;

/// Who puts the rows of a sampled batch together.
///
/// ```
/// use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let obs = step.observation::<f32>("obs", &[4]);
/// # let mut sample = Sample::transition(step, 1, 0.99);
/// # sample.at(obs, 0);
/// let feed = Feed::builder(sample).batch(32).lanes(1).replay(1_000, Uniform::new()).gather(Gather::Auto).start()?;
/// println!("{}", feed.gather().expect("a replay feed")); // by the CPU here: no device is attached
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gather {
    /// The device, if it can: a device is attached, the store is page-locked and mapped, and the kernel could be loaded. Else
    /// the CPU. [`Feed::gather`](crate::Feed::gather) says which, and why. A batch that was begun before the device's
    /// learner was taken is the CPU's.
    #[default]
    Auto,
    /// The CPU, into a slot that is then copied.
    Cpu,
    /// The device, reading the mapped store: the start fails where that cannot be.
    Mapped,
}

/// Who gathers a feed's batches, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatherReport {
    /// The CPU, into slots.
    Cpu {
        /// Why not the device.
        why: String,
    },
    /// A kernel on the device, reading the mapped store; a batch that is not full is gathered by the CPU.
    Kernel {
        /// Its thread blocks, of 1,024 threads each.
        blocks: u32,
    },
}

impl fmt::Display for GatherReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GatherReport::Cpu { why } => write!(f, "batches are gathered by the CPU: {why}"),
            GatherReport::Kernel { blocks } => {
                write!(
                    f,
                    "batches are gathered by the device, with {blocks} blocks of 1024 threads, from the mapped store"
                )
            }
        }
    }
}

/// The error of a feed that asks for the device's gather where that cannot be.
pub(crate) fn refusal(kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("the device cannot gather, which `.gather(Gather::Mapped)` asks for: {why}"))
}

/// What a feed gathers with.
#[derive(Debug)]
pub(crate) struct Gathering {
    wanted: Gather,
    pub(crate) blocks: u32,
    /// The tables, and the device's address of record 0; or why the device cannot gather.
    parts: Result<(Tables, u64), String>,
    /// Devices that have yet to load the kernel.
    unloaded: AtomicUsize,
    /// Why a device could not load it.
    failed: Mutex<Option<String>>,
    /// Which end took the feed's batches first: they are gathered for that.
    end: AtomicU8,
    /// Device buffers that are free and not meant for a batch yet: of all devices together, or where these have their turns
    /// of each. Below 0 where batches wait that were not begun for one.
    free: Box<[AtomicIsize]>,
}

const NOBODY: u8 = 0;
const HOST: u8 = 1;
const DEVICE: u8 = 2;

impl Gathering {
    /// `devices` are those that the feed attaches; `parts` are their tables and the store's address, or why there are none.
    pub(crate) fn new(
        wanted: Gather,
        blocks: u32,
        devices: usize,
        parts: impl FnOnce() -> Result<(Tables, u64), String>,
    ) -> Gathering {
        let parts = match (wanted, devices) {
            (Gather::Cpu, _) => Err("asked for".to_owned()),
            (_, 0) => Err("no device is attached".to_owned()),
            _ => parts(),
        };
        Gathering {
            wanted,
            blocks,
            parts,
            unloaded: AtomicUsize::new(devices),
            failed: Mutex::default(),
            end: AtomicU8::new(NOBODY),
            free: Box::new([AtomicIsize::new(0)]),
        }
    }

    /// What a device needs to load the kernel, if it is to gather.
    pub(crate) fn parts(&self) -> Option<&(Tables, u64)> {
        self.parts.as_ref().ok()
    }

    /// A device has loaded the kernel, or says why not.
    pub(crate) fn loaded(&self, loaded: Result<(), String>) {
        match loaded {
            Ok(()) => _ = self.unloaded.fetch_sub(1, Ordering::Release),
            Err(why) => _ = lock(&self.failed).get_or_insert(why),
        }
    }

    /// Why a start that asked for the device cannot be.
    pub(crate) fn refused(&self) -> Option<Error> {
        let why = self.why_not().filter(|_| self.wanted == Gather::Mapped)?;
        Some(refusal(ErrorKind::Cuda, &why))
    }

    fn why_not(&self) -> Option<String> {
        let of_parts = self.parts.as_ref().err().cloned();
        of_parts.or_else(|| lock(&self.failed).clone())
    }

    /// Whether the device can gather, if its learner is the one that takes batches.
    fn is_possible(&self) -> bool {
        // SYNC: pairs with the Release of `loaded`: what each device made is there.
        self.parts.is_ok() && self.unloaded.load(Ordering::Acquire) == 0
    }

    /// A learner of the host was asked for: false if batches are gathered by the device, out of its reach.
    pub(crate) fn take_host(&self) -> bool {
        let first = self.end.compare_exchange(NOBODY, HOST, Ordering::Relaxed, Ordering::Relaxed);
        let of_device = self.wanted == Gather::Mapped || first == Err(DEVICE);
        !(of_device && self.is_possible())
    }

    /// A learner on a device was taken.
    pub(crate) fn take_device(&self) {
        let _ = self.end.compare_exchange(NOBODY, DEVICE, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The tables, if full batches are the device's to gather. Then none is begun without a free buffer there.
    pub(crate) fn tables(&self) -> Option<&Tables> {
        let by_device = self.wanted == Gather::Mapped || self.end.load(Ordering::Relaxed) == DEVICE;
        self.parts.as_ref().ok().filter(|_| by_device && self.is_possible()).map(|(tables, _)| tables)
    }

    /// Batches go to so many devices in turn.
    pub(crate) fn in_turns(self, devices: usize) -> Gathering {
        Gathering { free: (0..devices).map(|_| AtomicIsize::new(0)).collect(), ..self }
    }

    /// Which devices' buffers the batch of that number may go to.
    pub(crate) fn turn(&self, sequence: u64) -> usize {
        (sequence % self.free.len() as u64) as usize
    }

    /// Whether a device buffer is free for a further batch of that turn.
    pub(crate) fn has_credit(&self, turn: usize) -> bool {
        self.free[turn].load(Ordering::Relaxed) > 0
    }

    /// Whether batches wait of that turn that there are no free buffers for.
    pub(crate) fn owes(&self, turn: usize) -> bool {
        self.free[turn].load(Ordering::Relaxed) < 0
    }

    /// So many device buffers more are free for that turn, or less.
    pub(crate) fn lend(&self, turn: usize, buffers: isize) {
        self.free[turn].fetch_add(buffers, Ordering::Relaxed);
    }

    pub(crate) fn report(&self) -> GatherReport {
        let end = self.end.load(Ordering::Relaxed);
        match self.why_not() {
            Some(why) => GatherReport::Cpu { why },
            None if end == HOST => GatherReport::Cpu { why: "the learner takes batches on the host".to_owned() },
            None => GatherReport::Kernel { blocks: self.blocks },
        }
    }
}
