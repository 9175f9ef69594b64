//! CUDA, found and called at run time only: the handle through which the crate page-locks memory.
//!
//! `types` is what the search takes and tells, `names` and `places` know files and folders, `mapped` reads what the
//! process has mapped, `table` holds the functions, `driver` makes them from the driver alone, `ladder` searches.
//! `device` has one device's context, and the driver's calls for streams, events, memory and copies. Here is the handle with its checked calls, the memory of searches that succeeded, and the public probe.
//!
//! One handle serves the whole life of a ring: initialise, register, unregister and draining the last error go to the
//! same copy of the runtime, which is never closed. It does not own registrations (the ring does), selects no
//! device, and knows no streams, events or copies.

// Elsewhere nothing is found, so nothing is called.
#![cfg_attr(not(target_os = "linux"), allow(dead_code))]

pub(crate) mod device;
#[cfg(target_os = "linux")]
mod driver;
#[cfg(target_os = "linux")]
mod ladder;
#[cfg(target_os = "linux")]
mod mapped;
#[cfg(target_os = "linux")]
mod names;
#[cfg(target_os = "linux")]
mod places;
pub(crate) mod table;
pub(crate) mod types;

#[cfg(all(test, target_os = "linux"))]
#[path = "../../tests/common/mod.rs"]
pub(crate) mod common;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};
use table::PinTable;
use types::{Candidate, CudaError, CudaFindError, CudaSearch, Record, Rung, Version, code};

/// `cudaHostRegisterPortable`: page-locked for every context of the process, present and future.
const PORTABLE: u32 = 0x1;
/// `cudaHostRegisterMapped`: a kernel may read it at its device address.
const MAPPED: u32 = 0x2;

/// A CUDA library that answered. Cheap to clone; the library is never closed.
#[derive(Clone, Debug)]
pub(crate) struct Cuda(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    table: PinTable,
    library: PathBuf,
    rung: Rung,
    runtime_version: i32,
    driver_version: i32,
    candidates: Vec<Candidate>,
}

/// The searches of this process that succeeded. A failure is not kept: the next call looks again.
static FOUND: Mutex<Vec<(CudaSearch, Cuda)>> = Mutex::new(Vec::new());

impl Cuda {
    fn new(loaded: Loaded) -> Cuda {
        Cuda(Arc::new(loaded))
    }

    /// Finds CUDA and initialises it, on the calling thread. A search that succeeded before answers with the same
    /// handle. The lock is not held while CUDA is called, so that one call which hangs holds nobody else up.
    pub(crate) fn find(search: &CudaSearch) -> Result<Cuda, CudaFindError> {
        let kept = |found: &[(CudaSearch, Cuda)]| found.iter().find(|(s, _)| s == search).map(|(_, cuda)| cuda.clone());
        if let Some(cuda) = kept(&FOUND.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(cuda);
        }
        #[cfg(target_os = "linux")]
        let cuda = ladder::climb(search)?;
        #[cfg(not(target_os = "linux"))]
        let cuda: Cuda = Err(CudaFindError::Unsupported)?;
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have finished the same search meanwhile: then its handle is the one.
        Ok(kept(&found).unwrap_or_else(|| {
            found.push((search.clone(), cuda.clone()));
            cuda
        }))
    }

    /// A handle over functions given by a test. Nothing is initialised; the versions are asked.
    #[cfg(test)]
    pub(crate) fn from_table(table: PinTable, name: &str) -> Cuda {
        let (runtime_version, driver_version) = table.versions();
        let rung = Rung::ExplicitPath;
        Cuda::new(Loaded { table, library: name.into(), rung, runtime_version, driver_version, candidates: Vec::new() })
    }

    /// Runs `calls` without spoiling the graph captures of other threads. For every thread that registers, unregisters
    /// or asks, since it may be anybody's.
    #[doc(alias = "cudaThreadExchangeStreamCaptureMode")]
    pub(crate) fn relaxed<R>(&self, calls: impl FnOnce() -> R) -> R {
        self.0.table.relaxed(calls)
    }

    /// Page-locks a range, portable and mapped. Whoever calls it keeps the range mapped until it was unregistered
    /// (invariant 5; the ring does).
    #[doc(alias = "cudaHostRegister")]
    pub(crate) fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<(), CudaError> {
        let operation = self.operation("cudaHostRegister", "cuMemHostRegister");
        if bytes == 0 {
            let text = "refused without a call: zero bytes cannot be page-locked".into();
            return Err(CudaError::new(operation, code::INVALID_VALUE, "cudaErrorInvalidValue".into(), text));
        }
        // SAFETY: CUDA page-locks the pages of the range and refuses one that is not mapped; it reads and writes no
        // byte. That the range stays mapped while registered is invariant 5, kept by the ring that owns it.
        let answer = unsafe { (self.0.table.cudaHostRegister)(start.as_ptr().cast(), bytes, PORTABLE | MAPPED) };
        self.check(operation, answer)
    }

    /// Undoes [`register`](Self::register). It waits for every copy that the process has queued.
    #[doc(alias = "cudaHostUnregister")]
    pub(crate) fn unregister(&self, start: NonNull<u8>) -> Result<(), CudaError> {
        // SAFETY: CUDA looks the address up among its registrations and refuses one that is not there. Invariant 5.
        let answer = unsafe { (self.0.table.cudaHostUnregister)(start.as_ptr().cast()) };
        self.check(self.operation("cudaHostUnregister", "cuMemHostUnregister"), answer)
    }

    /// The flags of the registration that holds an address; code 1 where there is none.
    #[doc(alias = "cudaHostGetFlags")]
    pub(crate) fn host_flags(&self, address: NonNull<u8>) -> Result<u32, CudaError> {
        let mut flags = 0;
        // SAFETY: the out-pointer is a live integer of ours; the address is only looked up.
        let answer = unsafe { (self.0.table.cudaHostGetFlags)(&mut flags, address.as_ptr().cast()) };
        self.check(self.operation("cudaHostGetFlags", "cuMemHostGetFlags"), answer).map(|()| flags)
    }

    /// The device address of a registered host address, for device 0's context or the caller's current one.
    #[doc(alias = "cudaHostGetDevicePointer")]
    pub(crate) fn device_pointer(&self, address: NonNull<u8>) -> Result<u64, CudaError> {
        let mut device: *mut c_void = ptr::null_mut();
        // SAFETY: the out-pointer is a live pointer of ours; the address is only looked up.
        let answer = unsafe { (self.0.table.cudaHostGetDevicePointer)(&mut device, address.as_ptr().cast(), 0) };
        self.check(self.operation("cudaHostGetDevicePointer", "cuMemHostGetDevicePointer"), answer)
            .map(|()| device.addr() as u64)
    }

    /// The calling thread's last-error slot in this copy of the runtime, read without clearing it. For tests.
    #[doc(alias = "cudaPeekAtLastError")]
    #[cfg(test)]
    pub(crate) fn last_error(&self) -> i32 {
        // SAFETY: it takes nothing and reads this thread's slot.
        unsafe { (self.0.table.cudaPeekAtLastError)() }
    }

    /// The file that is in use.
    pub(crate) fn library(&self) -> &Path {
        &self.0.library
    }

    /// Where it was found.
    pub(crate) fn rung(&self) -> Rung {
        self.0.rung
    }

    /// The runtime's CUDA version, 13000 for 13.0; 0 for the driver alone.
    pub(crate) fn runtime_version(&self) -> i32 {
        self.0.runtime_version
    }

    /// The CUDA version that the driver supports, 13000 for 13.0.
    pub(crate) fn driver_version(&self) -> i32 {
        self.0.driver_version
    }

    /// Everything that was looked at, in order.
    pub(crate) fn candidates(&self) -> &[Candidate] {
        &self.0.candidates
    }

    /// The same for the public.
    pub(crate) fn report(&self) -> CudaReport {
        CudaReport(self.clone())
    }

    fn check(&self, operation: &'static str, answer: i32) -> Result<(), CudaError> {
        self.0.table.check(operation, answer)
    }

    fn operation(&self, of_runtime: &'static str, of_driver: &'static str) -> &'static str {
        if self.0.rung == Rung::Driver { of_driver } else { of_runtime }
    }
}

/// Which CUDA library is in use, where it was found, and everything that was looked at on the way.
///
/// Its `Display` is the whole of it, one candidate a line.
///
/// ```
/// # use pinring::{CudaSearch, probe_cuda};
/// if let Ok(report) = probe_cuda(&CudaSearch::new()) {
///     println!("{} by {}", report.library().display(), report.rung());
///     println!("{report}");
/// }
/// ```
#[derive(Clone, Debug)]
pub struct CudaReport(Cuda);

impl CudaReport {
    /// The file that is in use. Where the loader found it by name: that file, if the system says which it is.
    pub fn library(&self) -> &Path {
        self.0.library()
    }

    /// The rung that it was found on.
    pub fn rung(&self) -> Rung {
        self.0.rung()
    }

    /// The runtime's CUDA version as CUDA counts: 13000 is 13.0. 0 on the last rung, which has no runtime.
    pub fn runtime_version(&self) -> i32 {
        self.0.runtime_version()
    }

    /// The CUDA version that the installed driver supports: 13000 is 13.0.
    pub fn driver_version(&self) -> i32 {
        self.0.driver_version()
    }

    /// Everything that was looked at, in order: the chosen library, those before it, and those of the same rung
    /// after it.
    pub fn candidates(&self) -> &[Candidate] {
        self.0.candidates()
    }
}

impl fmt::Display for CudaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CUDA through {} [{}], {}, {}. Searched, in order:{}",
            self.library().display(),
            self.rung(),
            Version("runtime", self.runtime_version()),
            Version("driver", self.driver_version()),
            Record(self.candidates())
        )
    }
}

/// Looks for CUDA as a feed with pinning does, initialises it, and reports what was found or why nothing was.
///
/// For finding out what a host, a container or a job's environment will do before a training run depends on it. It
/// page-locks nothing. It does what initialising CUDA does: the library is loaded for the rest of the process, and
/// the current device gets a context (some hundred MB of its memory). A success is kept for the process: the same
/// search answers from memory, and a feed with the same search uses the same library. A failure is not kept.
///
/// # Errors
///
/// [`CudaFindError`]: no library could be loaded, or none could initialise CUDA, with every candidate and its reason.
/// On systems other than Linux always [`CudaFindError::Unsupported`]. It does not panic.
///
/// ```
/// use pinring::{CudaSearch, probe_cuda};
///
/// match probe_cuda(&CudaSearch::new()) {
///     Ok(report) => println!("{report}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub fn probe_cuda(search: &CudaSearch) -> Result<CudaReport, CudaFindError> {
    Cuda::find(search).map(|cuda| cuda.report())
}
