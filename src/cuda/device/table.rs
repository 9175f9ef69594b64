//! The device table: the driver's functions for streams, events, copies, memory, modules and contexts, as one
//! struct of pointers.
//!
//! Filled from a loaded driver ([`DeviceTable::from_symbols`]) or by a test from Rust functions. It makes errors, in
//! the driver's names, and does nothing else with CUDA: `device.rs` calls. All handles and addresses are integers
//! here, the device's having 64 bits as those of every platform that CUDA exists for.

use super::super::types::{CudaError, code};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

#[cfg(target_os = "linux")]
use super::super::table::{MissingSymbol, table_from_symbols};

/// The functions, under NVIDIA's names. All may be called from any thread. The driver keeps no last error.
#[derive(Clone, Copy, Debug)]
#[allow(non_snake_case)]
pub(crate) struct DeviceTable {
    pub(crate) cuInit: unsafe extern "C" fn(c_uint) -> c_int,
    pub(crate) cuDeviceGetCount: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) cuDeviceGet: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    pub(crate) cuDeviceGetName: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    pub(crate) cuDeviceGetPCIBusId: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    pub(crate) cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    pub(crate) cuDevicePrimaryCtxRelease_v2: unsafe extern "C" fn(c_int) -> c_int,
    pub(crate) cuCtxGetCurrent: unsafe extern "C" fn(*mut usize) -> c_int,
    pub(crate) cuCtxPushCurrent_v2: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut usize) -> c_int,
    pub(crate) cuCtxGetStreamPriorityRange: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    pub(crate) cuThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut c_uint) -> c_int,
    pub(crate) cuStreamCreateWithPriority: unsafe extern "C" fn(*mut usize, c_uint, c_int) -> c_int,
    pub(crate) cuStreamDestroy_v2: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuStreamSynchronize: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuStreamWaitEvent: unsafe extern "C" fn(usize, usize, c_uint) -> c_int,
    pub(crate) cuStreamIsCapturing: unsafe extern "C" fn(usize, *mut c_int) -> c_int,
    pub(crate) cuEventCreate: unsafe extern "C" fn(*mut usize, c_uint) -> c_int,
    pub(crate) cuEventDestroy_v2: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuEventRecord: unsafe extern "C" fn(usize, usize) -> c_int,
    pub(crate) cuEventQuery: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuEventSynchronize: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuMemAlloc_v2: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    pub(crate) cuMemFree_v2: unsafe extern "C" fn(u64) -> c_int,
    pub(crate) cuMemcpyHtoDAsync_v2: unsafe extern "C" fn(u64, *const c_void, usize, usize) -> c_int,
    pub(crate) cuMemcpyDtoHAsync_v2: unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int,
    pub(crate) cuMemcpyDtoDAsync_v2: unsafe extern "C" fn(u64, u64, usize, usize) -> c_int,
    pub(crate) cuModuleLoadData: unsafe extern "C" fn(*mut usize, *const c_void) -> c_int,
    pub(crate) cuModuleUnload: unsafe extern "C" fn(usize) -> c_int,
    pub(crate) cuModuleGetFunction: unsafe extern "C" fn(*mut usize, usize, *const c_char) -> c_int,
    pub(crate) cuLaunchKernel: unsafe extern "C" fn(
        usize,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        usize,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> c_int,
    pub(crate) cuGetErrorName: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    pub(crate) cuGetErrorString: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

impl DeviceTable {
    /// The table of a loaded driver.
    #[cfg(target_os = "linux")]
    pub(super) fn from_symbols(library: &libloading::os::unix::Library) -> Result<DeviceTable, MissingSymbol> {
        Ok(table_from_symbols!(DeviceTable, library, {
            cuInit,
            cuDeviceGetCount,
            cuDeviceGet,
            cuDeviceGetName,
            cuDeviceGetPCIBusId,
            cuDevicePrimaryCtxRetain,
            cuDevicePrimaryCtxRelease_v2,
            cuCtxGetCurrent,
            cuCtxPushCurrent_v2,
            cuCtxPopCurrent_v2,
            cuCtxGetStreamPriorityRange,
            cuThreadExchangeStreamCaptureMode,
            cuStreamCreateWithPriority,
            cuStreamDestroy_v2,
            cuStreamSynchronize,
            cuStreamWaitEvent,
            cuStreamIsCapturing,
            cuEventCreate,
            cuEventDestroy_v2,
            cuEventRecord,
            cuEventQuery,
            cuEventSynchronize,
            cuMemAlloc_v2,
            cuMemFree_v2,
            cuMemcpyHtoDAsync_v2,
            cuMemcpyDtoHAsync_v2,
            cuMemcpyDtoDAsync_v2,
            cuModuleLoadData,
            cuModuleUnload,
            cuModuleGetFunction,
            cuLaunchKernel,
            cuGetErrorName,
            cuGetErrorString,
        }))
    }

    /// `Ok` for 0. For anything else the error, with the driver's name and text of the code.
    pub(super) fn check(&self, operation: &'static str, code: c_int) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            // Nothing of a driver that is being torn down is called any more.
            code::CUDART_UNLOADING => {
                let text = "the CUDA driver is shutting down".into();
                Err(CudaError::new(operation, code, "CUDA_ERROR_DEINITIALIZED".into(), text))
            }
            _ => {
                let symbol = self.words(self.cuGetErrorName, code);
                let text = self.words(self.cuGetErrorString, code);
                Err(CudaError::new(operation, code, symbol, text))
            }
        }
    }

    fn words(&self, lookup: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, code: c_int) -> String {
        let mut words = std::ptr::null();
        // SAFETY: the lookups take any integer and write null or a C string of static lifetime to an out-pointer of
        // ours; the library that holds the string is never closed (`Device::attach`).
        let words = unsafe {
            lookup(code, &mut words);
            if words.is_null() { None } else { Some(CStr::from_ptr(words)) }
        };
        words.map_or_else(|| "unknown to this driver".into(), |words| words.to_string_lossy().into_owned())
    }
}
