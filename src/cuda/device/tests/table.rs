//! A table of Rust functions stands in for a driver: what it may answer, and what is then never called.

use crate::cuda::device::{Device, DeviceError, DeviceTable};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};

thread_local! {
    /// What the functions below were called for, on this thread: the test's own.
    static CALLED: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// A function of some signature that notes its name and answers 0, or does what is given.
macro_rules! answers {
    ($name:ident($($arg:ident: $of:ty),*)) => { answers!($name($($arg: $of),*) 0) };
    ($name:ident($($arg:ident: $of:ty),*) $code:expr) => {{
        unsafe extern "C" fn function($($arg: $of),*) -> c_int {
            $(let _ = $arg;)*
            CALLED.with_borrow_mut(|called| called.push(stringify!($name)));
            $code
        }
        function
    }};
}

/// Writes through an out-pointer of the code under test.
fn put<T>(out: *mut T, value: T) -> c_int {
    // SAFETY: the code under test passes pointers to live values.
    unsafe { out.write(value) };
    0
}

fn table() -> DeviceTable {
    DeviceTable {
        cuInit: answers!(cuInit(flags: c_uint) flags as c_int),
        cuDeviceGetCount: answers!(cuDeviceGetCount(out: *mut c_int) put(out, 4)),
        cuDeviceGet: answers!(cuDeviceGet(out: *mut c_int, ordinal: c_int) put(out, ordinal + 40)),
        cuDeviceGetName: answers!(cuDeviceGetName(out: *mut c_char, room: c_int, device: c_int) {
            assert_eq!(device, 43, "the driver's own number");
            // Without an end.
            (0..room as usize).for_each(|at| { put(out.wrapping_add(at), b'x' as c_char); });
            0
        }),
        cuDeviceGetPCIBusId: answers!(cuDeviceGetPCIBusId(out: *mut c_char, room: c_int, device: c_int) {
            assert!(room >= 13 && device == 43);
            let address = b"0000:C1:00.0\0";
            (0..address.len()).for_each(|at| { put(out.wrapping_add(at), address[at] as c_char); });
            0
        }),
        cuDevicePrimaryCtxRetain: answers!(cuDevicePrimaryCtxRetain(out: *mut usize, device: c_int) put(out, device as usize * 10)),
        cuDevicePrimaryCtxRelease_v2: answers!(cuDevicePrimaryCtxRelease(device: c_int) device - 43),
        cuCtxGetCurrent: answers!(cuCtxGetCurrent(out: *mut usize) put(out, 7)),
        cuCtxPushCurrent_v2: answers!(cuCtxPushCurrent(context: usize) context as c_int - 430),
        cuCtxPopCurrent_v2: answers!(cuCtxPopCurrent(out: *mut usize) put(out, 430)),
        cuCtxGetStreamPriorityRange: answers!(cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
            put(least, 3) + put(greatest, -9)
        }),
        cuThreadExchangeStreamCaptureMode: answers!(cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
            // SAFETY: the code under test passes a live integer.
            assert!([2, 5].contains(unsafe { &*mode }));
            put(mode, 5)
        }),
        cuStreamCreateWithPriority: answers!(cuStreamCreateWithPriority(out: *mut usize, flags: c_uint, priority: c_int) {
            assert_eq!((flags, priority), (1, 3), "the least that the device has");
            put(out, 0x51)
        }),
        cuStreamDestroy_v2: answers!(cuStreamDestroy(stream: usize) stream as c_int - 0x51),
        cuStreamSynchronize: answers!(cuStreamSynchronize(_s: usize)),
        cuStreamWaitEvent: answers!(cuStreamWaitEvent(_s: usize, _e: usize, flags: c_uint) flags as c_int),
        cuStreamIsCapturing: answers!(cuStreamIsCapturing(_s: usize, out: *mut c_int) put(out, 0)),
        cuEventCreate: answers!(cuEventCreate(out: *mut usize, flags: c_uint) put(out, flags as usize)),
        cuEventDestroy_v2: answers!(cuEventDestroy(_e: usize)),
        cuEventRecord: answers!(cuEventRecord(_e: usize, _s: usize)),
        cuEventQuery: answers!(cuEventQuery(_e: usize) 4),
        cuEventSynchronize: answers!(cuEventSynchronize(_e: usize)),
        cuMemAlloc_v2: answers!(cuMemAlloc(_out: *mut u64, _n: usize) 2),
        cuMemFree_v2: answers!(cuMemFree(_a: u64)),
        cuMemcpyHtoDAsync_v2: answers!(cuMemcpyHtoDAsync(_d: u64, _h: *const c_void, _n: usize, _s: usize)),
        cuMemcpyDtoHAsync_v2: answers!(cuMemcpyDtoHAsync(_h: *mut c_void, _d: u64, _n: usize, _s: usize)),
        cuMemcpyDtoDAsync_v2: answers!(cuMemcpyDtoDAsync(_a: u64, _b: u64, _n: usize, _s: usize)),
        cuModuleLoadData: answers!(cuModuleLoadData(out: *mut usize, _image: *const c_void) put(out, 0x60)),
        cuModuleUnload: answers!(cuModuleUnload(module: usize) module as c_int - 0x60),
        cuModuleGetFunction: answers!(cuModuleGetFunction(_out: *mut usize, _m: usize, _name: *const c_char) 500),
        cuLaunchKernel: {
            #[allow(clippy::too_many_arguments)]
            unsafe extern "C" fn none(
                _f: usize,
                _a: c_uint,
                _b: c_uint,
                _c: c_uint,
                _d: c_uint,
                _e: c_uint,
                _g: c_uint,
                _h: c_uint,
                _s: usize,
                _p: *mut *mut c_void,
                _x: *mut *mut c_void,
            ) -> c_int {
                unreachable!("no kernel was found")
            }
            none
        },
        cuGetErrorName: answers!(cuGetErrorName(_c: c_int, _out: *mut *const c_char) 1),
        cuGetErrorString: answers!(cuGetErrorString(_c: c_int, out: *mut *const c_char) put(out, c"so".as_ptr())),
    }
}

unsafe extern "C" fn mute(_: *mut c_char, _: c_int, _: c_int) -> c_int {
    1
}

fn called() -> Vec<&'static str> {
    CALLED.take()
}

#[test]
fn a_device_is_what_the_table_says() {
    assert_eq!(Device::from_table(table(), 4).unwrap_err(), DeviceError::NoSuchDevice { ordinal: 4, count: 4 });
    assert_eq!(called(), ["cuInit", "cuDeviceGetCount"]);
    let device = Device::from_table(table(), 3).unwrap();
    const RELAXED: &str = "cuThreadExchangeStreamCaptureMode";
    assert_eq!(called(), ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDevicePrimaryCtxRetain"]);
    assert_eq!((device.ordinal(), device.name().as_str()), (3, ""), "a name that does not end is none");

    assert_eq!(device.pci_address().unwrap(), "0000:C1:00.0");
    assert_eq!(called(), ["cuDeviceGetPCIBusId"], "no context is made current for it");
    let mute = DeviceTable { cuDeviceGetPCIBusId: mute, ..table() };
    assert_eq!(Device::from_table(mute, 3).unwrap().pci_address(), None);
    called();

    let stream = device.stream(true).unwrap();
    assert_eq!(stream.raw().0, 0x51);
    assert_eq!(called()[..3], ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxGetStreamPriorityRange"]);
    drop(stream);
    assert_eq!(
        called(),
        [RELAXED, "cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamDestroy", "cuCtxPopCurrent", RELAXED]
    );
    drop(device);
    assert_eq!(called(), [RELAXED, "cuDevicePrimaryCtxRelease", RELAXED]);
}

#[test]
fn a_driver_that_is_shutting_down_is_not_asked_for_words() {
    let device = Device::from_table(table(), 3).unwrap();
    let event = device.event().unwrap();
    assert_eq!(event.raw(), 3, "without timing, and waits sleep");
    called();
    let error = device.query(&event).unwrap_err();
    assert_eq!((error.operation(), error.code(), error.symbol()), ("cuEventQuery", 4, "CUDA_ERROR_DEINITIALIZED"));
    assert_eq!(called(), ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuEventQuery", "cuCtxPopCurrent"]);
    let error = device.alloc(1).unwrap_err();
    assert_eq!((error.code(), error.symbol(), error.text()), (2, "unknown to this driver", "so"));
}

#[test]
fn a_module_without_the_kernel_is_unloaded() {
    let device = Device::from_table(table(), 3).unwrap();
    called();
    let error = device.kernel(c"ptx", c"name").unwrap_err();
    assert_eq!((error.operation(), error.code()), ("cuModuleGetFunction", 500));
    let calls: Vec<_> = called().into_iter().filter(|call| call.starts_with("cuModule")).collect();
    assert_eq!(calls, ["cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload"]);
}
