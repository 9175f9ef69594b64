//! The C functions of pinring's mapped allocator: one allocator for the process, made at the first call.
//!
//! `include/pinring_mapped.h` declares and describes them; `python/` uses them from PyTorch. Here is only what a C caller
//! needs around `pinring::MappedAllocator`: null for errors, the text of the last one, and no panic that leaves
//! (`guarded`). The allocator is never dropped, so that every function stays valid until the process ends, also for
//! blocks that a framework frees at its very end.

mod failure;

use failure::{failed, guarded};
use pinring::{CudaSearch, KindStatistics, MappedAllocator, MemoryKind};
use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

static ALLOCATOR: OnceLock<MappedAllocator> = OnceLock::new();
/// Where CUDA is looked for.
static SEARCH: Mutex<Search> = Mutex::new(Search::Unnamed);

enum Search {
    Unnamed,
    Named(CudaSearch),
    /// The allocator is made from what was named, or is being made: it is too late.
    Used,
}
/// A mode that was set before; an atomic, so that asking takes no lock.
static PINNED_MODE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The kind of this thread's allocations, whatever the mode.
    static OVERRIDE: Cell<Option<MemoryKind>> = const { Cell::new(None) };
}

fn allocator() -> &'static MappedAllocator {
    ALLOCATOR.get_or_init(|| {
        let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
        MappedAllocator::with_search(match std::mem::replace(&mut *search, Search::Used) {
            Search::Named(search) => search,
            Search::Unnamed | Search::Used => CudaSearch::new(),
        })
    })
}

/// The device of an argument: any negative number is all of them.
fn device_of(device: c_int) -> Option<i32> {
    (device >= 0).then_some(device)
}

fn allocate(kind: MemoryKind, size: isize, device: c_int) -> *mut c_void {
    if size == 0 {
        return std::ptr::null_mut(); // as CUDA does: no memory, and no error
    }
    let Ok(bytes) = usize::try_from(size) else {
        failed(&format!("an allocation of {size} bytes cannot be made: the size is negative"));
        return std::ptr::null_mut();
    };
    match allocator().allocate(kind, bytes, device) {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address as usize),
        Err(error) => {
            failed(&error.to_string());
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// As for [`pinned_free`].
unsafe fn free(ptr: *mut c_void, stream: *mut c_void) {
    if ptr.is_null() {
        return;
    }
    // SAFETY: the caller's promise: the stream is live, and nothing uses the memory but what is queued in it.
    if let Err(error) = unsafe { allocator().free(ptr.addr() as u64, stream.addr()) } {
        failed(&error.to_string());
    }
}

// ---- PyTorch's two functions, twice -----------------------------------------------------------------------------

/// Allocates by the mode. Null where that failed; see [`pinned_last_error`].
#[unsafe(no_mangle)]
pub extern "C" fn pinned_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    guarded(std::ptr::null_mut(), || {
        let mode = if PINNED_MODE.load(Ordering::Relaxed) { MemoryKind::PageLocked } else { MemoryKind::Device };
        allocate(OVERRIDE.get().unwrap_or(mode), size, device)
    })
}

/// Frees what any of the allocating functions returned, behind `stream`.
///
/// # Safety
/// The stream is live, and from now on nothing uses the memory but what is queued in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    // SAFETY: the caller's promise.
    guarded((), || unsafe { free(ptr, stream) });
}

/// Allocates page-locked memory, whatever the mode.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_pool_malloc(size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    guarded(std::ptr::null_mut(), || allocate(MemoryKind::PageLocked, size, device))
}

/// As [`pinned_free`].
///
/// # Safety
/// As for [`pinned_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_pool_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: *mut c_void) {
    // SAFETY: the caller's promise.
    guarded((), || unsafe { free(ptr, stream) });
}

/// Notes that `stream` uses the allocation that `ptr` lies in.
///
/// # Safety
/// The stream is live, and stays so until the allocation is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    guarded((), || {
        // SAFETY: the caller's promise.
        unsafe { allocator().record_stream(ptr.addr() as u64, stream.addr()) };
    });
}

// ---- mode -------------------------------------------------------------------------------------------------------

/// Sets the mode: page-locked memory, or the device's.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_use(enabled: c_int) {
    PINNED_MODE.store(enabled != 0, Ordering::Relaxed);
}

/// 1 in the mode of page-locked memory, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_is_mode() -> c_int {
    PINNED_MODE.load(Ordering::Relaxed).into()
}

/// Overrides the mode for the calling thread: 1 page-locked, 0 the device's memory, negative: no longer. Returns what was.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_override(kind: c_int) -> c_int {
    let new = match kind {
        0 => Some(MemoryKind::Device),
        1.. => Some(MemoryKind::PageLocked),
        _ => None,
    };
    match OVERRIDE.replace(new) {
        None => -1,
        Some(MemoryKind::Device) => 0,
        Some(MemoryKind::PageLocked) => 1,
    }
}

// ---- asking -----------------------------------------------------------------------------------------------------

/// The host address of a byte of page-locked memory, by its device address; null for anything else.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_host_ptr_of(device_ptr: *const c_void) -> *mut c_void {
    guarded(std::ptr::null_mut(), || {
        let host = allocator().host_ptr_of(device_ptr.addr() as u64);
        host.map_or(std::ptr::null_mut(), |host| host.as_ptr().cast())
    })
}

/// The counts of one kind of memory: the C struct of the same name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub struct pinned_counts {
    /// Bytes of allocations in use.
    pub live_bytes: u64,
    /// Allocations in use.
    pub live: u64,
    /// The most that `live_bytes` has been.
    pub peak_bytes: u64,
    /// The most that `live` has been.
    pub peak: u64,
    /// Allocations made so far.
    pub allocations: u64,
    /// Allocations freed so far.
    pub frees: u64,
    /// Bytes asked for so far.
    pub allocated_bytes: u64,
    /// Freed bytes that streams may still use.
    pub waiting_bytes: u64,
    /// Freed page-locked bytes in the cache.
    pub cached_bytes: u64,
    /// Bytes freed in streams while they were captured.
    pub captured_bytes: u64,
    /// Bytes that nobody may use any more.
    pub quarantined_bytes: u64,
}

impl From<KindStatistics> for pinned_counts {
    fn from(counts: KindStatistics) -> pinned_counts {
        pinned_counts {
            live_bytes: counts.live_bytes as u64,
            live: counts.live as u64,
            peak_bytes: counts.peak_bytes as u64,
            peak: counts.peak as u64,
            allocations: counts.allocations,
            frees: counts.frees,
            allocated_bytes: counts.allocated_bytes,
            waiting_bytes: counts.waiting_bytes as u64,
            cached_bytes: counts.cached_bytes as u64,
            captured_bytes: counts.captured_bytes as u64,
            quarantined_bytes: counts.quarantined_bytes as u64,
        }
    }
}

/// Writes the counts of one device, or of all where it is negative. A null pointer is left out.
///
/// # Safety
/// Each pointer is null or one to a writable struct.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_statistics(
    device: c_int,
    page_locked: *mut pinned_counts,
    of_device: *mut pinned_counts,
) {
    guarded((), || {
        let statistics = allocator().statistics(device_of(device));
        for (out, counts) in [(page_locked, statistics.page_locked), (of_device, statistics.device)] {
            if !out.is_null() {
                // SAFETY: the caller's pointer, checked for null.
                unsafe { out.write(counts.into()) };
            }
        }
    });
}

/// Sets the peaks of one device, or of all where it is negative, to what is live.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_reset_peaks(device: c_int) {
    guarded((), || allocator().reset_peaks(device_of(device)));
}

/// Copies the text of the calling thread's last failure (or, if it had none, of the process's) and a zero byte to `out`,
/// as much as `room` bytes hold. Returns the length of the whole text: 0 where nothing failed.
///
/// # Safety
/// `out` points at `room` writable bytes, or `room` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_last_error(out: *mut c_char, room: usize) -> usize {
    guarded(0, || {
        let text = failure::last();
        if !out.is_null() && room > 0 {
            let length = text.len().min(room - 1);
            // SAFETY: the caller's buffer of `room` bytes, of which `length` and one more are written.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, length);
                out.add(length).write(0);
            }
        }
        text.len()
    })
}

// ---- settings and giving back -----------------------------------------------------------------------------------

/// Whether failures are also written to the standard error, as they are at first.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_print_errors(enabled: c_int) {
    failure::PRINTS.store(enabled != 0, Ordering::Relaxed);
}

/// Gives back the cache, and what streams have done with within so many milliseconds. Returns the freed bytes that
/// streams still use.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_release(patience_ms: u32) -> usize {
    guarded(0, || allocator().release_cached(Duration::from_millis(patience_ms.into())))
}

/// [`pinned_release`] with ten seconds of patience: what `torch.cuda.empty_cache()` can call.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_release_patiently() {
    pinned_release(10_000);
}

/// Gives back what was freed in streams while they were captured. Returns its bytes.
///
/// # Safety
/// Those graphs are destroyed, no launch of them is running, and what was queued in those streams before the capture has
/// completed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_release_captured() -> usize {
    // SAFETY: the caller's promise.
    guarded(0, || unsafe { allocator().release_captured() })
}

/// How many bytes of freed page-locked memory are kept for reuse.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_set_cache_limit(bytes: usize) {
    guarded((), || allocator().set_cache_limit(bytes));
}

/// Whether page-locked memory is asked for beyond what seems to be left.
#[unsafe(no_mangle)]
pub extern "C" fn pinned_ignore_memory_budget(ignore: c_int) {
    guarded((), || allocator().ignore_memory_budget(ignore != 0));
}

/// Names the CUDA runtime, the driver, or both (null: looked for). 0 where that was noted, -1 where it comes too late.
///
/// # Safety
/// Each pointer is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinned_use_libraries(runtime: *const c_char, driver: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let path = |pointer: *const c_char| (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) });
    guarded(-1, || {
        let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*search, Search::Used) {
            drop(search);
            failed("the CUDA libraries cannot be named any more: the allocator is in use; do it before anything else");
            return -1;
        }
        let mut named = CudaSearch::new();
        if let Some(runtime) = path(runtime) {
            named = named.library_only(OsStr::from_bytes(runtime.to_bytes()));
        }
        if let Some(driver) = path(driver) {
            named = named.driver(OsStr::from_bytes(driver.to_bytes()));
        }
        *search = Search::Named(named);
        0
    })
}
