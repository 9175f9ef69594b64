//! Has the kernel back a mapping with pages, by several threads, before anybody registers it.
//!
//! Registration would fault the pages in too, but one at a time and on one thread. The threads take chunks from a
//! shared cursor, so a slow one holds nobody up; the calling thread works along and is the one that tells the watch,
//! so a system that gives no threads is only slower.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::error::RingError;
use super::mapping::{HUGE_PAGE_BYTES, Mapping};
use super::numa::{Node, OnNode};
use super::progress::PinWatch;

/// What a thread takes at a time, and how often a start can be cancelled: whole huge pages.
const CHUNK_BYTES: usize = 16 * HUGE_PAGE_BYTES;

/// A start is short; it need not take every core of a large host.
const MOST_THREADS: usize = 8;

/// The number of threads for this machine: one a core, at most 8.
pub(super) fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_THREADS))
}

/// An allocation of many GiB is waited for by the program that asked: on large hosts it takes more of the cores.
#[cfg(feature = "mapped-allocator")]
const MOST_BLOCK_THREADS: usize = 16;

/// The number of threads for a block: one a core, at most 16.
#[cfg(feature = "mapped-allocator")]
pub(super) fn block_threads() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_BLOCK_THREADS))
}

/// Makes every page of `mapping` present, on `node` if there is one that these threads may run on. Returns how many
/// threads worked at it.
pub(super) fn prefault(
    mapping: &Mapping,
    threads: usize,
    node: Option<&Node>,
    watch: &PinWatch,
) -> Result<usize, RingError> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<io::Error>> = Mutex::new(None);
    let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner);

    let work = |tells: bool| {
        let _on_node = node.and_then(OnNode::enter);
        while failed().is_none() && !watch.is_cancelled() {
            // Relaxed: the cursor only has to give each chunk to one thread; the scope's end publishes the pages.
            let from = next.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
            if from >= mapping.bytes() {
                return;
            }
            let to = mapping.bytes().min(from + CHUNK_BYTES);
            match mapping.fault_in(from..to) {
                Ok(()) => watch.add(to - from),
                Err(error) => *failed() = Some(error),
            }
            if tells {
                watch.tell();
            }
        }
    };

    let threads = thread::scope(|scope| {
        let chunks = mapping.bytes().div_ceil(CHUNK_BYTES);
        let spawn = || thread::Builder::new().name("pr-prefault".into()).spawn_scoped(scope, || work(false));
        let spawned = (1..threads.min(chunks)).map_while(|_| spawn().ok()).count();
        work(true);
        1 + spawned
    });
    watch.check()?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(threads),
        Some(source) => Err(RingError::Map { operation: "pre-fault", bytes: mapping.bytes(), source }),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::super::progress::PinPhase;
    use super::*;

    #[test]
    fn every_byte_is_counted_once_whatever_the_threads() {
        for threads in [1, 2, 3, 8] {
            let mapping = Mapping::new(2 * CHUNK_BYTES + 4096).unwrap();
            let watch = PinWatch::new(None);
            let _running = watch.begin(mapping.bytes());
            watch.enter(PinPhase::Prefaulting).unwrap();
            let worked = prefault(&mapping, threads, None, &watch).unwrap();
            assert!((1..=threads.min(3)).contains(&worked), "{worked} of {threads} threads for 3 chunks");
            assert_eq!(watch.progress().bytes_done, mapping.bytes(), "{threads} threads");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_pages_are_there_afterwards() {
        let mapping = Mapping::new(CHUNK_BYTES + 4096).unwrap();
        assert_eq!(mapping.pages().unwrap().present, 0);
        prefault(&mapping, 2, None, &PinWatch::new(None)).unwrap();
        assert_eq!(mapping.pages().unwrap().present, mapping.bytes());
    }

    #[test]
    fn a_cancelled_watch_ends_it_between_chunks() {
        let mapping = Mapping::new(4 * CHUNK_BYTES).unwrap();
        let slot = std::sync::Arc::new(std::sync::OnceLock::<PinWatch>::new());
        let inner = std::sync::Arc::downgrade(&slot); // the slot has the watch, which has this
        let watch = PinWatch::new(Some(Box::new(move |_| inner.upgrade().unwrap().get().unwrap().cancel())));
        slot.set(watch.clone()).unwrap();
        let _running = watch.begin(mapping.bytes());
        let error = prefault(&mapping, 1, None, &watch).unwrap_err();
        assert!(matches!(error, RingError::Cancelled { bytes_done: CHUNK_BYTES, .. }), "{error:?}");
    }
}
