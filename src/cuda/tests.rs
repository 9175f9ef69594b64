//! The handle's checked calls, against the fake runtime and against a table of Rust functions.

use super::common::fake::{self, Fake};
use super::common::{SEARCH_VARIABLES, Watchdog, alone, is_child, scratch};
use super::table::PinTable;
use super::types::{CudaFindError, CudaSearch, Rung};
use super::{Cuda, Loaded, driver};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

/// A fake of its own, and the handle over it.
fn load(test: &str) -> (Fake, Cuda) {
    let fake = Fake::new(&scratch(test), "libcudart.so.13");
    let cuda = Cuda::find(&CudaSearch::new().library_only(fake.path())).unwrap();
    (fake, cuda)
}

/// A page of memory to register, at an address that stays.
fn page() -> (Vec<u8>, NonNull<u8>) {
    let mut memory = vec![0_u8; 8192];
    let start = NonNull::new(memory.as_mut_ptr()).unwrap();
    (memory, start)
}

#[test]
fn a_range_is_registered_portable_and_mapped_and_the_error_slot_is_left_alone() {
    let (fake, cuda) = load("handle-register");
    let (_memory, start) = page();
    fake.set_last_error(700);
    cuda.register(start, 8192).unwrap();
    assert_eq!(cuda.host_flags(start).unwrap(), 3);
    assert_ne!(cuda.device_pointer(start).unwrap(), 0);
    let registered = fake.live_registrations();
    assert_eq!((registered.len(), registered[0].start, registered[0].bytes), (1, start.addr().get(), 8192));
    cuda.unregister(start).unwrap();
    assert!(fake.live_registrations().is_empty());
    assert_eq!(cuda.last_error(), 700, "another's error stays where it was: no call of ours failed");
    assert_eq!(
        fake.functions(),
        [
            "cudaThreadExchangeStreamCaptureMode",
            "cudaFree",
            "cudaThreadExchangeStreamCaptureMode",
            "cudaRuntimeGetVersion",
            "cudaDriverGetVersion",
            "cudaHostRegister",
            "cudaHostGetFlags",
            "cudaHostGetDevicePointer",
            "cudaHostUnregister",
            "cudaPeekAtLastError",
        ]
    );
    assert_eq!(fake.calls()[1].args[0], 0, "cudaFree(0)");
}

#[test]
fn a_failed_call_keeps_its_code_and_symbol_and_drains_the_slot_of_its_own_copy() {
    let dir = scratch("handle-drain");
    let (chosen, other) = (Fake::new(&dir, "libcudart.so.12"), Fake::new(&dir, "libcudart.so.13"));
    let cuda = Cuda::find(&CudaSearch::new().library_only(chosen.path())).unwrap();
    let (_memory, start) = page();
    chosen.inject("cudaHostRegister", 1, 712);
    let error = cuda.register(start, 4096).unwrap_err();
    assert_eq!((error.operation(), error.code()), ("cudaHostRegister", 712));
    assert_eq!(error.symbol(), "cudaErrorHostMemoryAlreadyRegistered");
    assert_eq!(error.text(), "part or all of the requested memory range is already mapped");
    assert_eq!(chosen.peek_last_error(), 0);
    assert!(other.calls().is_empty());

    for (code, call) in [(713, cuda.unregister(start)), (1, cuda.host_flags(start).map(drop))] {
        assert_eq!(call.unwrap_err().code(), code);
        assert_eq!(chosen.peek_last_error(), 0);
    }
    assert_eq!(cuda.device_pointer(start).unwrap_err().operation(), "cudaHostGetDevicePointer");
    assert_eq!(chosen.peek_last_error(), 0);
}

#[test]
fn in_relaxed_mode_no_other_threads_capture_is_lost_and_the_mode_is_put_back() {
    let (fake, cuda) = load("handle-relaxed");
    let (_memory, start) = page();
    let stream = fake.user_stream(1);
    fake.begin_capture(stream, 0);
    let address = start.addr().get();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = NonNull::new(address as *mut u8).unwrap();
            cuda.relaxed(|| {
                assert_eq!(fake.capture_mode(), 2);
                cuda.register(start, 4096).unwrap();
                cuda.unregister(start).unwrap();
            });
            assert_eq!(fake.capture_mode(), 0);
        });
    });
    assert!(fake.end_capture(stream), "the capture is whole");

    // A mode that cannot be changed is not put back either; the call itself says what is wrong.
    fake.begin_capture(stream, 0);
    fake.inject("cudaThreadExchangeStreamCaptureMode", 1, 1);
    let refused = cuda.relaxed(|| cuda.register(start, 4096)).unwrap_err();
    assert_eq!((refused.code(), fake.peek_last_error(), fake.capture_mode()), (900, 0, 0));
    assert!(!fake.end_capture(stream));
}

#[test]
fn zero_bytes_are_refused_without_a_call() {
    let (fake, cuda) = load("handle-zero");
    let before = fake.calls().len();
    let error = cuda.register(page().1, 0).unwrap_err();
    assert_eq!((error.code(), error.symbol()), (1, "cudaErrorInvalidValue"));
    assert!(error.to_string().contains("zero bytes"), "{error}");
    assert_eq!(fake.calls().len(), before);
}

#[test]
fn a_runtime_that_is_shutting_down_is_not_called_again() {
    let (fake, cuda) = load("handle-unloading");
    let (_memory, start) = page();
    fake.inject("cudaHostUnregister", 1, 4);
    let error = cuda.unregister(start).unwrap_err();
    assert_eq!((error.code(), error.symbol()), (4, "cudaErrorCudartUnloading"));
    assert_eq!(fake.functions().last().unwrap(), "cudaHostUnregister");
}

#[test]
fn a_success_is_kept_and_a_failure_is_not() {
    let _watchdog = Watchdog::new("two searches at once", Duration::from_secs(60));
    let fake = Fake::new(&scratch("handle-kept"), "libcudart.so.13");
    let search = CudaSearch::new().library_only(fake.path());
    fake.inject("cudaFree", 1, 35);
    assert!(matches!(Cuda::find(&search), Err(CudaFindError::Init { error, .. }) if error.code() == 35));
    fake.sleep("cudaFree", 100);
    let (a, b) = std::thread::scope(|s| {
        let [a, b] = [(); 2].map(|()| s.spawn(|| Cuda::find(&search).unwrap()));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert!(Arc::ptr_eq(&a.0, &b.0));
    let calls = fake.calls().len();
    assert!(Arc::ptr_eq(&a.0, &Cuda::find(&search).unwrap().0));
    assert_eq!(fake.calls().len(), calls, "answered from memory");
    // A search that differs is another one, over the same library.
    let other = Cuda::find(&search.clone().wheel_root("/nowhere")).unwrap();
    assert!(!Arc::ptr_eq(&a.0, &other.0));
    assert_eq!(other.library(), fake.path());
}

#[test]
fn a_table_of_rust_functions_stands_in_for_a_library() {
    static REGISTERED: AtomicU32 = AtomicU32::new(0);
    static SLOT: AtomicI32 = AtomicI32::new(0);
    unsafe extern "C" fn free(_: *mut c_void) -> c_int {
        panic!("a given table is not initialised")
    }
    unsafe extern "C" fn register(_: *mut c_void, _: usize, flags: c_uint) -> c_int {
        REGISTERED.store(flags, Ordering::Relaxed);
        0
    }
    unsafe extern "C" fn unregister(_: *mut c_void) -> c_int {
        SLOT.store(713, Ordering::Relaxed);
        713
    }
    unsafe extern "C" fn flags(_: *mut c_uint, _: *mut c_void) -> c_int {
        0
    }
    unsafe extern "C" fn device_pointer(_: *mut *mut c_void, _: *mut c_void, _: c_uint) -> c_int {
        0
    }
    unsafe extern "C" fn version(out: *mut c_int) -> c_int {
        // SAFETY: the crate passes a live integer.
        unsafe { out.write(12090) };
        0
    }
    unsafe extern "C" fn no_version(_: *mut c_int) -> c_int {
        35
    }
    unsafe extern "C" fn words(_: c_int) -> *const c_char {
        std::ptr::null()
    }
    unsafe extern "C" fn last() -> c_int {
        SLOT.swap(0, Ordering::Relaxed)
    }
    unsafe extern "C" fn peek() -> c_int {
        SLOT.load(Ordering::Relaxed)
    }
    unsafe extern "C" fn exchange(_: *mut c_uint) -> c_int {
        0
    }
    let table = PinTable {
        cudaFree: free,
        cudaHostRegister: register,
        cudaHostUnregister: unregister,
        cudaHostGetFlags: flags,
        cudaHostGetDevicePointer: device_pointer,
        cudaRuntimeGetVersion: version,
        cudaDriverGetVersion: no_version,
        cudaGetErrorName: words,
        cudaGetErrorString: words,
        cudaGetLastError: last,
        cudaPeekAtLastError: peek,
        cudaThreadExchangeStreamCaptureMode: exchange,
    };
    let cuda = Cuda::from_table(table, "rust functions");
    assert_eq!((cuda.runtime_version(), cuda.driver_version()), (12090, 0));
    cuda.register(page().1, 1).unwrap();
    assert_eq!(REGISTERED.load(Ordering::Relaxed), 3);
    let error = cuda.unregister(page().1).unwrap_err();
    assert_eq!((error.code(), error.symbol()), (713, "unknown to this CUDA library"));
    assert_eq!(cuda.last_error(), 0);
    assert!(
        cuda.report().to_string().starts_with("CUDA through rust functions [explicit path], runtime 12.9, no driver")
    );
}

#[test]
fn the_driver_alone_registers_and_leaves_no_context_behind() {
    let path = fake::place(&scratch("handle-driver"), "libcuda.so.1");
    let fake = Fake::open(&path);
    // SAFETY: the fake is loaded already.
    let library = unsafe { libloading::os::unix::Library::new(&path) }.unwrap();
    let (table, inside) = driver::table(&library).unwrap();
    assert_eq!(super::mapped::file_at(inside).unwrap(), path);
    let handle = || {
        let (runtime_version, driver_version) = table.versions();
        let (library, candidates) = (path.clone(), Vec::new());
        Cuda::new(Loaded { table, library, rung: Rung::Driver, runtime_version, driver_version, candidates })
    };
    let (_memory, start) = page();

    let early = handle().register(start, 4096).unwrap_err();
    assert_eq!((early.operation(), early.code()), ("cuMemHostRegister", 3), "before it is initialised");
    let init = || {
        // SAFETY: it takes null.
        unsafe { (table.cudaFree)(std::ptr::null_mut()) }
    };
    for (function, code) in [("cuInit", 100), ("cuDeviceGet", 101), ("cuDevicePrimaryCtxRetain", 2)] {
        fake.inject(function, 1, code);
        assert_eq!(init(), code, "{function}");
    }
    assert_eq!(init(), 0);
    assert_eq!(fake.contexts(), 0);

    let cuda = handle();
    assert_eq!((cuda.runtime_version(), cuda.driver_version()), (0, 13000));
    let elsewhere = cuda.clone();
    let address = start.addr().get();
    std::thread::spawn(move || elsewhere.register(NonNull::new(address as *mut u8).unwrap(), 4096).unwrap())
        .join()
        .expect("any thread may register");
    assert_eq!(cuda.host_flags(start).unwrap(), 3);
    assert_ne!(cuda.device_pointer(start).unwrap(), 0);
    let error = cuda.register(start, 4096).unwrap_err();
    assert_eq!((error.operation(), error.code()), ("cuMemHostRegister", 712));
    fake.inject("cuCtxPushCurrent_v2", 1, 709);
    assert_eq!(cuda.unregister(start).unwrap_err().code(), 709);
    cuda.unregister(start).unwrap();
    assert!(fake.live_registrations().is_empty());
    assert_eq!(fake.contexts(), 0);
    assert!(fake.functions().iter().all(|function| function.starts_with("cu") && !function.starts_with("cuda")));
}

/// A feed of the second device alone must not make a context on the first.
#[test]
fn the_driver_alone_uses_the_device_whose_context_the_thread_has() {
    const TEST: &str = "cuda::tests::the_driver_alone_uses_the_device_whose_context_the_thread_has";
    if !is_child(TEST) {
        alone(TEST, |_| {}); // what is retained is kept for the process
        return;
    }
    let path = fake::place(&scratch("handle-second"), "libcuda.so.1");
    let fake = Fake::open(&path);
    fake.devices(2);
    fake.set_device(1);
    // SAFETY: the fake is loaded already.
    let library = unsafe { libloading::os::unix::Library::new(&path) }.unwrap();
    let (table, _) = driver::table(&library).unwrap();
    // SAFETY: it takes null.
    assert_eq!(unsafe { (table.cudaFree)(std::ptr::null_mut()) }, 0);
    assert_eq!([0, 1].map(|device| fake.retained(device)), [0, 1]);
}

/// On real hardware: the same answers as the fake gives, through a runtime and through the driver alone.
#[test]
fn on_a_gpu_memory_is_locked_through_the_runtime_and_through_the_driver() {
    const TEST: &str = "cuda::tests::on_a_gpu_memory_is_locked_through_the_runtime_and_through_the_driver";
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        println!("skipped: this host has no GPU's driver");
        return;
    }
    if !is_child(TEST) {
        // Alone, since the other tests' fakes would be found among the loaded runtimes; with the host's environment.
        let output = alone(TEST, |child| {
            for name in SEARCH_VARIABLES {
                if let Some(value) = std::env::var_os(name) {
                    child.env(name, value);
                }
            }
        });
        println!("{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let runtime = Cuda::find(&CudaSearch::new()).unwrap();
    println!("{}", runtime.report());
    // SAFETY: the driver of this host, which the runtime has loaded.
    let library = unsafe { libloading::os::unix::Library::new("libcuda.so.1") }.unwrap();
    let (table, _) = driver::table(&library).unwrap();
    // SAFETY: it takes null.
    assert_eq!(unsafe { (table.cudaFree)(std::ptr::null_mut()) }, 0);
    let (runtime_version, driver_version) = table.versions();
    let (path, candidates) = ("libcuda.so.1".into(), Vec::new());
    let loaded = Loaded { table, library: path, rung: Rung::Driver, runtime_version, driver_version, candidates };
    let driver = Cuda::new(loaded);
    assert_eq!(driver.driver_version(), runtime.driver_version());

    let mut memory = vec![1_u8; 1 << 20];
    let start = NonNull::new(memory.as_mut_ptr()).unwrap();
    let middle = NonNull::from(&mut memory[4096]);
    let code = |result: Result<(), super::CudaError>| result.map_err(|error| error.code());
    for (cuda, other) in [(&runtime, &driver), (&driver, &runtime)] {
        cuda.register(start, memory.len()).unwrap();
        for sees in [cuda, other] {
            assert_eq!(sees.host_flags(middle).unwrap() & 3, 3, "the registration is the process's");
            assert_ne!(sees.device_pointer(middle).unwrap(), 0);
            assert_eq!(code(sees.register(start, memory.len())), Err(712));
            assert_eq!(code(sees.register(middle, 4096)), Err(712));
            assert_eq!(code(sees.unregister(middle)), Err(1));
            assert_eq!(sees.last_error(), 0);
        }
        cuda.unregister(start).unwrap();
        assert_eq!(code(cuda.unregister(start)), Err(713));
        assert_eq!(runtime.last_error(), 0);
    }
}
