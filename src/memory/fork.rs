//! Notices, without a system call, that this process is a forked child: one page that the kernel clears in children.
//!
//! The page holds a number that no process shares with its parent. A *stamp* is that number as it was when a ring was
//! made; a ring whose stamp differs from the page belongs to the parent, and this process may neither call CUDA for
//! it nor trust its bytes. A child that makes a ring of its own writes the next number, so its own rings are at home
//! and the inherited ones stay foreign. Where the kernel has no wipe-on-fork, the process id takes the page's place
//! (one system call a question).
//!
//! It does not notice a `vfork` or a thread: neither copies the memory.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::os;

/// The number of the process that made a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForkStamp(u64);

static MARK: OnceLock<Mark> = OnceLock::new();

/// How many numbers were handed out. Ordinary memory: a child inherits it, and so never hands out one of its
/// parent's.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

enum Mark {
    /// A page that reads zero in a forked child. Never unmapped.
    Page(NonNull<AtomicU64>),
    /// The id of the process that asked last.
    ProcessId(AtomicU64),
}

// SAFETY: the page is mapped for the life of the process and is only reached as an atomic.
unsafe impl Send for Mark {}
// SAFETY: as for Send.
unsafe impl Sync for Mark {}

impl ForkStamp {
    /// The stamp for what this process makes now.
    pub(crate) fn now() -> ForkStamp {
        match MARK.get_or_init(Mark::new) {
            Mark::Page(page) => {
                // SAFETY: `Mark::new` mapped the page, aligned and writable, and nobody unmaps it.
                let number = unsafe { page.as_ref() };
                // Relaxed throughout: the number publishes nothing but itself, and only this process writes it.
                let current = number.load(Ordering::Relaxed);
                if current != 0 {
                    return ForkStamp(current);
                }
                let fresh = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
                match number.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => ForkStamp(fresh),
                    Err(another_thread) => ForkStamp(another_thread),
                }
            }
            Mark::ProcessId(last) => {
                let id = u64::from(os::process_id());
                last.store(id, Ordering::Relaxed);
                ForkStamp(id)
            }
        }
    }

    /// Whether what carries this stamp was made by a parent of this process.
    #[inline]
    pub(crate) fn is_inherited(self) -> bool {
        match MARK.get() {
            None => false,
            Some(mark) => mark.current() != self.0,
        }
    }
}

/// For tests: whether this process is a forked child of one that used pinring, and has made no ring of its own since.
#[cfg(test)]
pub(crate) fn in_forked_child() -> bool {
    match MARK.get() {
        None => false,
        Some(Mark::ProcessId(last)) => last.load(Ordering::Relaxed) != u64::from(os::process_id()),
        Some(mark @ Mark::Page(_)) => mark.current() == 0,
    }
}

impl Mark {
    fn new() -> Mark {
        Mark::wiped_page().unwrap_or_else(|| Mark::ProcessId(AtomicU64::new(u64::from(os::process_id()))))
    }

    /// One page that a child reads as zero, if the system can do that.
    fn wiped_page() -> Option<Mark> {
        let bytes = os::page_bytes();
        let start = os::reserve(bytes).ok()?;
        // SAFETY: `reserve` just gave us exactly this page.
        let opened = unsafe { os::open(start, bytes) }.is_ok();
        // SAFETY: as above.
        if opened && unsafe { os::wipe_on_fork(start, bytes) } {
            return Some(Mark::Page(start.cast::<AtomicU64>()));
        }
        // SAFETY: the page is ours and nobody has seen its address.
        let _ = unsafe { os::unmap(start, bytes) };
        None
    }

    #[inline]
    fn current(&self) -> u64 {
        match self {
            // SAFETY: `wiped_page` mapped the page, aligned and writable, and nobody unmaps it.
            Mark::Page(page) => unsafe { page.as_ref() }.load(Ordering::Relaxed),
            Mark::ProcessId(_) => u64::from(os::process_id()),
        }
    }
}
