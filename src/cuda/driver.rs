//! Page-locking through the driver alone, for hosts that have `libcuda.so.1` and no runtime, or only runtimes which
//! the driver is too old for: the pin table with thin adapters over the driver's functions.
//!
//! The driver's codes are the runtime's numbers. It has no last-error slot, and its calls need a context that is
//! current on the calling thread: each adapter pushes the primary context of one device, which every runtime in the
//! process shares, and pops it again, so that no caller's thread is left with another context than it had. That device
//! is the one whose context the first thread that initialises has, as the pinning thread of a feed with devices does, and
//! else device 0. It allocates nothing and never gives the primary context back.

use super::table::{MissingSymbol, PinTable, table_from_symbols};
use super::types::code;
use libloading::os::unix::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

/// The driver's functions, under NVIDIA's names.
#[derive(Debug)]
#[allow(non_snake_case)]
struct Driver {
    cuInit: unsafe extern "C" fn(c_uint) -> c_int,
    cuDriverGetVersion: unsafe extern "C" fn(*mut c_int) -> c_int,
    cuDeviceGet: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    cuCtxGetDevice: unsafe extern "C" fn(*mut c_int) -> c_int,
    cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    cuCtxPushCurrent_v2: unsafe extern "C" fn(usize) -> c_int,
    cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut usize) -> c_int,
    cuMemHostRegister_v2: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    cuMemHostUnregister: unsafe extern "C" fn(*mut c_void) -> c_int,
    cuMemHostGetFlags: unsafe extern "C" fn(*mut c_uint, *mut c_void) -> c_int,
    cuMemHostGetDevicePointer_v2: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_uint) -> c_int,
    cuGetErrorName: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    cuGetErrorString: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    cuThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut c_uint) -> c_int,
}

/// A process has one driver. Its library is never closed.
static DRIVER: OnceLock<Driver> = OnceLock::new();
/// The primary context that is used, once retained.
static CONTEXT: OnceLock<usize> = OnceLock::new();

/// The pin table over a loaded driver, and an address inside it.
pub(super) fn table(library: &Library) -> Result<(PinTable, usize), MissingSymbol> {
    let loaded = table_from_symbols!(Driver, library, {
        cuInit,
        cuDriverGetVersion,
        cuDeviceGet,
        cuCtxGetDevice,
        cuDevicePrimaryCtxRetain,
        cuCtxPushCurrent_v2,
        cuCtxPopCurrent_v2,
        cuMemHostRegister_v2,
        cuMemHostUnregister,
        cuMemHostGetFlags,
        cuMemHostGetDevicePointer_v2,
        cuGetErrorName,
        cuGetErrorString,
        cuThreadExchangeStreamCaptureMode,
    });
    let driver = DRIVER.get_or_init(|| loaded);
    let table = PinTable {
        cudaFree: init,
        cudaHostRegister: register,
        cudaHostUnregister: unregister,
        cudaHostGetFlags: flags,
        cudaHostGetDevicePointer: device_pointer,
        cudaRuntimeGetVersion: no_runtime,
        cudaDriverGetVersion: driver_version,
        cudaGetErrorName: error_name,
        cudaGetErrorString: error_text,
        cudaGetLastError: no_slot,
        cudaPeekAtLastError: no_slot,
        cudaThreadExchangeStreamCaptureMode: exchange_capture_mode,
    };
    Ok((table, driver.cuInit as *const () as usize))
}

/// Runs a call with the primary context current on this thread, and puts back what was.
fn in_context(call: impl FnOnce(&Driver) -> c_int) -> c_int {
    let (Some(driver), Some(&context)) = (DRIVER.get(), CONTEXT.get()) else { return code::INITIALIZATION };
    // SAFETY: `context` was retained by `init` and is never released.
    let pushed = unsafe { (driver.cuCtxPushCurrent_v2)(context) };
    if pushed != 0 {
        return pushed;
    }
    let answer = call(driver);
    let mut popped = 0;
    // SAFETY: the out-pointer is a live integer of ours. The answer of the pop is dropped: the call has had its
    // effect or not, and that is what the caller must learn.
    unsafe { (driver.cuCtxPopCurrent_v2)(&mut popped) };
    answer
}

/// Stands for `cudaFree(0)`: initialises the driver and makes the primary context of the thread's device, or of device 0.
unsafe extern "C" fn init(pointer: *mut c_void) -> c_int {
    let Some(driver) = DRIVER.get() else { return code::INITIALIZATION };
    if !pointer.is_null() {
        return code::INVALID_VALUE;
    }
    if CONTEXT.get().is_none() {
        let (mut device, mut context) = (0, 0);
        // SAFETY: the out-pointers are live integers of ours; the device is the one that the driver just named.
        let answer = unsafe {
            let mut answer = (driver.cuInit)(0);
            // An error says that this thread has no context, so any device will do.
            if answer == 0 && (driver.cuCtxGetDevice)(&mut device) != 0 {
                answer = (driver.cuDeviceGet)(&mut device, 0);
            }
            if answer == 0 {
                answer = (driver.cuDevicePrimaryCtxRetain)(&mut context, device);
            }
            answer
        };
        if answer != 0 {
            return answer;
        }
        CONTEXT.get_or_init(|| context);
    }
    in_context(|_| 0)
}

unsafe extern "C" fn register(pointer: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    // SAFETY: as for the runtime's function: see `Cuda::register`. The flags have the same values in both.
    in_context(|driver| unsafe { (driver.cuMemHostRegister_v2)(pointer, bytes, flags) })
}

unsafe extern "C" fn unregister(pointer: *mut c_void) -> c_int {
    // SAFETY: as for the runtime's function: see `Cuda::unregister`.
    in_context(|driver| unsafe { (driver.cuMemHostUnregister)(pointer) })
}

unsafe extern "C" fn flags(out: *mut c_uint, pointer: *mut c_void) -> c_int {
    // SAFETY: as for the runtime's function: see `Cuda::host_flags`.
    in_context(|driver| unsafe { (driver.cuMemHostGetFlags)(out, pointer) })
}

unsafe extern "C" fn device_pointer(out: *mut *mut c_void, pointer: *mut c_void, flags: c_uint) -> c_int {
    // SAFETY: as for the runtime's function: see `Cuda::device_pointer`. A device address has 64 bits as has this.
    in_context(|driver| unsafe { (driver.cuMemHostGetDevicePointer_v2)(out, pointer, flags) })
}

unsafe extern "C" fn no_runtime(out: *mut c_int) -> c_int {
    // SAFETY: the caller's out-pointer: `PinTable::versions` passes a live integer.
    unsafe { out.write(0) };
    0
}

unsafe extern "C" fn driver_version(out: *mut c_int) -> c_int {
    // SAFETY: the caller's out-pointer, as above.
    DRIVER.get().map_or(code::INITIALIZATION, |driver| unsafe { (driver.cuDriverGetVersion)(out) })
}

unsafe extern "C" fn exchange_capture_mode(mode: *mut c_uint) -> c_int {
    // SAFETY: the caller's pointer: `PinTable::relaxed` passes a live integer.
    DRIVER.get().map_or(code::INITIALIZATION, |driver| unsafe { (driver.cuThreadExchangeStreamCaptureMode)(mode) })
}

unsafe extern "C" fn error_name(code: c_int) -> *const c_char {
    let Some(driver) = DRIVER.get() else { return ptr::null() };
    let mut name = ptr::null();
    // SAFETY: the out-pointer is a live pointer of ours; for an unknown code the driver leaves or sets it null.
    unsafe { (driver.cuGetErrorName)(code, &mut name) };
    name
}

unsafe extern "C" fn error_text(code: c_int) -> *const c_char {
    let Some(driver) = DRIVER.get() else { return ptr::null() };
    let mut text = ptr::null();
    // SAFETY: the out-pointer is a live pointer of ours; for an unknown code the driver leaves or sets it null.
    unsafe { (driver.cuGetErrorString)(code, &mut text) };
    text
}

/// The driver keeps no last error.
unsafe extern "C" fn no_slot() -> c_int {
    0
}
