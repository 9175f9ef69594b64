//! The pin table: the dozen functions that page-locking needs, as one struct of pointers.
//!
//! Filled from a loaded runtime ([`PinTable::from_symbols`]), from the driver (`driver.rs`) or by a test from Rust
//! functions. It makes errors and drains the runtime's last-error slot, and does nothing else with CUDA.

use super::types::{CudaError, code};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `cudaStreamCaptureModeRelaxed`.
const RELAXED: c_uint = 2;

/// The functions, under NVIDIA's names. All may be called from any thread.
#[derive(Clone, Copy, Debug)]
#[allow(non_snake_case)]
pub(crate) struct PinTable {
    pub(crate) cudaFree: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(crate) cudaHostRegister: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    pub(crate) cudaHostUnregister: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(crate) cudaHostGetFlags: unsafe extern "C" fn(*mut c_uint, *mut c_void) -> c_int,
    pub(crate) cudaHostGetDevicePointer: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_uint) -> c_int,
    pub(crate) cudaRuntimeGetVersion: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) cudaDriverGetVersion: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) cudaGetErrorName: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(crate) cudaGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(crate) cudaGetLastError: unsafe extern "C" fn() -> c_int,
    #[cfg_attr(not(test), allow(dead_code))] // for tests
    pub(crate) cudaPeekAtLastError: unsafe extern "C" fn() -> c_int,
    pub(crate) cudaThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut c_uint) -> c_int,
}

/// A function that a library lacks, and what the loader said.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub(crate) struct MissingSymbol {
    pub(crate) symbol: &'static str,
    pub(crate) reason: String,
}

/// Fills a struct of function pointers from a library: each field by the symbol of its name.
#[cfg(target_os = "linux")]
macro_rules! table_from_symbols {
    ($table:ident, $library:expr, { $($symbol:ident),* $(,)? }) => {
        $table { $($symbol: crate::cuda::table::symbol($library, stringify!($symbol))?),* }
    };
}
#[cfg(target_os = "linux")]
pub(super) use table_from_symbols;

/// Looks up one function. `F` must be a function pointer of the symbol's C signature, or a pointer for its address.
#[cfg(target_os = "linux")]
pub(super) fn symbol<F: Copy>(
    library: &libloading::os::unix::Library,
    symbol: &'static str,
) -> Result<F, MissingSymbol> {
    // SAFETY: the tables of this module and of `driver.rs` declare each function with the signature of NVIDIA's
    // headers, the same in CUDA 11, 12 and 13; `Option` of a function pointer holds the null that a symbol may be.
    match unsafe { library.get::<Option<F>>(symbol) } {
        Ok(found) => (*found).ok_or_else(|| MissingSymbol { symbol, reason: "its address is null".into() }),
        Err(error) => Err(MissingSymbol { symbol, reason: full_text(&error) }),
    }
}

/// The innermost source of an error: there libloading keeps the loader's words.
#[cfg(target_os = "linux")]
pub(super) fn full_text(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => full_text(source),
        None => error.to_string(),
    }
}

impl PinTable {
    /// The table of a loaded CUDA runtime.
    #[cfg(target_os = "linux")]
    pub(super) fn from_symbols(library: &libloading::os::unix::Library) -> Result<PinTable, MissingSymbol> {
        Ok(table_from_symbols!(PinTable, library, {
            cudaFree,
            cudaHostRegister,
            cudaHostUnregister,
            cudaHostGetFlags,
            cudaHostGetDevicePointer,
            cudaRuntimeGetVersion,
            cudaDriverGetVersion,
            cudaGetErrorName,
            cudaGetErrorString,
            cudaGetLastError,
            cudaPeekAtLastError,
            cudaThreadExchangeStreamCaptureMode,
        }))
    }

    /// `Ok` for 0. For anything else the error, with the last-error slot drained: invariant 8. It is called with
    /// the return value of the call of ours that was made last, on the same thread.
    pub(super) fn check(&self, operation: &'static str, code: c_int) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            // Nothing of a runtime that is being torn down is called any more.
            code::CUDART_UNLOADING => {
                let text = "the CUDA runtime is shutting down".into();
                Err(CudaError::new(operation, code, "cudaErrorCudartUnloading".into(), text))
            }
            _ => {
                // SAFETY: a function of a runtime that is never closed (invariant 8; `Cuda` in `mod.rs`); it takes
                // nothing and clears this thread's slot, which holds the code of our own call.
                unsafe { (self.cudaGetLastError)() };
                let symbol = self.words(self.cudaGetErrorName, code);
                let text = self.words(self.cudaGetErrorString, code);
                Err(CudaError::new(operation, code, symbol, text))
            }
        }
    }

    fn words(&self, lookup: unsafe extern "C" fn(c_int) -> *const c_char, code: c_int) -> String {
        // SAFETY: the lookups take any integer and return null or a C string of static lifetime; the library that
        // holds the string is never closed (`Cuda` in `mod.rs`).
        let words = unsafe {
            let pointer = lookup(code);
            if pointer.is_null() { None } else { Some(CStr::from_ptr(pointer)) }
        };
        words.map_or_else(|| "unknown to this CUDA library".into(), |words| words.to_string_lossy().into_owned())
    }

    /// Runs `calls` with the calling thread in relaxed capture mode and puts its mode back: while some other thread
    /// captures a graph in global mode, to initialise CUDA or to page-lock memory would spoil its capture. Where the mode cannot be changed
    /// the calls are made all the same, and their own answers tell.
    pub(super) fn relaxed<R>(&self, calls: impl FnOnce() -> R) -> R {
        let mut mode = RELAXED;
        let mut exchange = || {
            // SAFETY: the pointer is to a live integer of ours, which gets the mode that was.
            let answer = unsafe { (self.cudaThreadExchangeStreamCaptureMode)(&mut mode) };
            self.check("cudaThreadExchangeStreamCaptureMode", answer).is_ok()
        };
        let changed = exchange();
        let result = calls();
        if changed {
            exchange();
        }
        result
    }

    /// The CUDA versions of the runtime and of the driver; 0 where there is none or it does not say.
    pub(super) fn versions(&self) -> (i32, i32) {
        (self.version(self.cudaRuntimeGetVersion), self.version(self.cudaDriverGetVersion))
    }

    fn version(&self, ask: unsafe extern "C" fn(*mut c_int) -> c_int) -> i32 {
        let mut version = 0;
        // SAFETY: the out-pointer is a live integer of ours.
        let answer = unsafe { ask(&mut version) };
        self.check("the version's question", answer).map_or(0, |()| version)
    }
}
