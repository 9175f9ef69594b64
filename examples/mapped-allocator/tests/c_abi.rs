//! The C library as a C program meets it: the built file, opened and called by name, against the fake CUDA.
#![cfg(target_os = "linux")]

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/life.rs"]
mod life;

use common::fake::{Fake, Hazards};
use common::scratch;
use libloading::os::unix::{Library, Symbol};
use life::{alone, rings};
use std::ffi::{CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// `cudaStreamNonBlocking`.
const NON_BLOCKING: u32 = 1;

/// The library that was built with this test.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("this test's own path");
    let path = own.with_file_name("libpinring_mapped.so");
    assert!(path.is_file(), "{}: cargo builds it with this test", path.display());
    path
}

/// The counts as the header lays them out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    live_bytes: u64,
    live: u64,
    peak_bytes: u64,
    peak: u64,
    allocations: u64,
    frees: u64,
    allocated_bytes: u64,
    waiting_bytes: u64,
    cached_bytes: u64,
    captured_bytes: u64,
    quarantined_bytes: u64,
}

/// The library, opened as a framework opens it, and closed at the end of a test.
struct Api {
    library: Library,
}

impl Api {
    /// Opens it, with the fake as runtime and driver.
    fn open(fake: &Fake) -> Api {
        // SAFETY: the library has no initialisers of its own.
        let library = unsafe { Library::open(Some(library()), libloading::os::unix::RTLD_NOW) };
        let api = Api { library: library.expect("the library can be opened") };
        let path = CString::new(fake.path().as_os_str().as_bytes()).unwrap();
        assert_eq!(api.use_libraries(&path), 0);
        api
    }

    /// `F` is the C signature that the header has for the name.
    fn get<F>(&self, name: &str) -> Symbol<F> {
        // SAFETY: the callers below name each function with the header's signature.
        unsafe { self.library.get(name) }.unwrap_or_else(|error| panic!("{name}: {error:?}"))
    }

    fn use_libraries(&self, path: &CString) -> c_int {
        let f = self.get::<unsafe extern "C" fn(*const c_char, *const c_char) -> c_int>("pinned_use_libraries");
        // SAFETY: C strings that outlive the call.
        unsafe { f(path.as_ptr(), path.as_ptr()) }
    }

    fn malloc(&self, size: isize, device: c_int) -> usize {
        self.get::<extern "C" fn(isize, c_int, usize) -> usize>("pinned_malloc")(size, device, 0)
    }

    fn pool_malloc(&self, size: isize, device: c_int) -> usize {
        self.get::<extern "C" fn(isize, c_int, usize) -> usize>("pinned_pool_malloc")(size, device, 0)
    }

    /// With a size and a device that are wrong: neither is looked at.
    fn free(&self, ptr: usize, stream: usize) {
        self.get::<extern "C" fn(usize, isize, c_int, usize)>("pinned_free")(ptr, -7, 99, stream);
    }

    fn pool_free(&self, ptr: usize, stream: usize) {
        self.get::<extern "C" fn(usize, isize, c_int, usize)>("pinned_pool_free")(ptr, 1, 0, stream);
    }

    fn use_pinned(&self, enabled: bool) {
        self.get::<extern "C" fn(c_int)>("pinned_use")(enabled.into());
    }

    fn host_ptr_of(&self, ptr: usize) -> usize {
        self.get::<extern "C" fn(usize) -> usize>("pinned_host_ptr_of")(ptr)
    }

    fn release(&self, patience_ms: u32) -> usize {
        self.get::<extern "C" fn(u32) -> usize>("pinned_release")(patience_ms)
    }

    fn set_cache_limit(&self, bytes: usize) {
        self.get::<extern "C" fn(usize)>("pinned_set_cache_limit")(bytes);
    }

    fn counts(&self) -> (Counts, Counts) {
        let (mut page_locked, mut device) = (Counts::default(), Counts::default());
        let f = self.get::<unsafe extern "C" fn(c_int, *mut Counts, *mut Counts)>("pinned_statistics");
        // SAFETY: pointers to structs of the header's layout.
        unsafe {
            f(-1, &mut page_locked, std::ptr::null_mut());
            f(-1, std::ptr::null_mut(), &mut device);
        }
        (page_locked, device)
    }

    fn last_error(&self) -> String {
        let mut buffer = vec![0u8; 4096];
        let f = self.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>("pinned_last_error");
        // SAFETY: a buffer of that length.
        let length = unsafe { f(buffer.as_mut_ptr(), buffer.len()) };
        assert_eq!(buffer[length.min(buffer.len() - 1)], 0, "ends with a zero");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

fn fake(name: &str, devices: i32) -> Fake {
    let fake = Fake::new(&scratch(name), "libcudart.so.13");
    fake.devices(devices);
    fake
}

fn assert_nothing_is_left(fake: &Fake, api: &Api) {
    let (page_locked, device) = api.counts();
    for counts in [page_locked, device] {
        let left = [counts.live_bytes, counts.live, counts.waiting_bytes, counts.cached_bytes, counts.captured_bytes];
        assert_eq!(left, [0; 5], "{counts:?}");
        assert_eq!((counts.quarantined_bytes, counts.allocations), (0, counts.frees));
    }
    assert_eq!((fake.live_registrations(), fake.live_allocations(), rings()), (vec![], vec![], vec![]));
    assert_eq!((fake.hazards(), fake.contexts(), fake.peek_last_error()), (Hazards::default(), 0, 0));
}

alone! {
    fn each_pointer_is_freed_as_it_was_made_whatever_the_mode_and_size() {
        let fake = fake("modes", 1);
        let api = Api::open(&fake);
        api.set_cache_limit(0);
        let stream = fake.user_stream(NON_BLOCKING);
        for i in 0..1000 {
            api.use_pinned(true);
            let p = api.malloc(10_000, 0);
            api.use_pinned(false);
            let q = api.malloc(10_000, 0);
            assert!(p != 0 && q != 0, "{}", api.last_error());
            if i == 0 {
                assert_eq!(fake.live_registrations()[0].bytes, 12_288, "whole pages");
                assert_eq!(api.host_ptr_of(p + 9_999), fake.live_registrations()[0].start + 9_999);
                assert_eq!((api.host_ptr_of(p + 10_000), api.host_ptr_of(q)), (0, 0));
                let made = fake.calls().len();
                api.free(p + 64, stream); // interior
                assert!(api.last_error().contains("inside the allocation that begins at"), "{}", api.last_error());
                api.free(0xdead_0000, stream); // foreign
                assert!(api.last_error().contains("0xdead0000 was not freed"), "{}", api.last_error());
                api.free(0, stream); // nothing
                assert_eq!((fake.calls().len(), api.counts().0.live, api.counts().1.live), (made, 1, 1));
            }
            let order = if i % 2 == 0 { [p, q] } else { [q, p] };
            if i % 3 == 0 { api.use_pinned(true) }
            api.free(order[0], stream);
            api.pool_free(order[1], stream); // either function frees either kind
            fake.run(stream);
        }
        assert_eq!(api.release(10_000), 0);
        let registered: Vec<u64> = fake.calls_of("cudaHostRegister").iter().map(|call| call.args[0]).collect();
        let unregistered = fake.calls_of("cudaHostUnregister");
        assert_eq!((registered.len(), unregistered.len(), fake.calls_of("cuMemFree_v2").len()), (1000, 1000, 1000));
        assert!(unregistered.iter().all(|call| registered.contains(&call.args[0]) && call.code == Some(0)));
        assert!(fake.calls_of("cuMemFree_v2").iter().all(|call| call.code == Some(0) && !registered.contains(&call.args[0])));
        assert_nothing_is_left(&fake, &api);
    }
}

alone! {
    fn failures_are_null_with_a_text_and_the_device_of_the_caller_stays() {
        let fake = fake("failures", 1);
        let api = Api::open(&fake);
        assert_eq!(api.last_error(), "");
        assert_eq!(api.malloc(1024, 1), 0, "there is one device");
        assert!(api.last_error().starts_with("there is no device 1: 1 device is visible"), "{}", api.last_error());
        fake.devices(2);
        fake.inject("cuDevicePrimaryCtxRetain", 1, 101);
        assert_eq!(api.malloc(1024, 1), 0);
        assert!(api.last_error().contains("device 1") && api.last_error().contains("101"), "{}", api.last_error());
        assert_eq!(fake.calls_of("cuMemAlloc_v2"), []);

        fake.set_device(0);
        let q = api.malloc(1024, 1);
        assert_ne!(q, 0);
        assert_eq!(fake.calls_of("cuMemAlloc_v2")[0].device, Some(1));
        assert_eq!((fake.current_device(), fake.contexts()), (Some(0), 0));
        api.free(q, 0);

        fake.run_all();
        assert_eq!(api.release(10_000), 0); // else it waits, and tries again
        for (function, pool) in [("cuMemAlloc_v2", false), ("cudaHostRegister", true)] {
            fake.inject(function, 1, 2);
            let made = if pool { api.pool_malloc(4096, 0) } else { api.malloc(4096, 0) };
            assert_eq!(made, 0);
            let text = api.last_error();
            assert!(text.contains("could not allocate 4096 bytes") && text.contains("returned 2 "), "{text}");
            assert_eq!(fake.peek_last_error(), 0, "drained");
        }
        for size in [-1, isize::MIN] {
            assert_eq!((api.malloc(size, 0), api.pool_malloc(size, 0)), (0, 0));
            assert!(api.last_error().contains("the size is negative"), "{}", api.last_error());
        }
        let before = api.last_error();
        assert_eq!((api.malloc(0, 0), api.pool_malloc(0, 0)), (0, 0));
        assert_eq!(api.last_error(), before, "nothing was asked for: no failure");
        let path = CString::new("/none").unwrap();
        assert_eq!(api.use_libraries(&path), -1);
        assert!(api.last_error().contains("cannot be named any more"), "{}", api.last_error());
        // Another thread, which has had no failure, sees the process's.
        std::thread::scope(|scope| scope.spawn(|| assert!(api.last_error().contains("any more"))).join().unwrap());
        fake.run_all();
        assert_eq!(api.release(10_000), 0);
        assert_nothing_is_left(&fake, &api);
    }
}

alone! {
    fn a_free_is_ordered_behind_its_stream() {
        let fake = fake("ordered", 1);
        let api = Api::open(&fake);
        api.set_cache_limit(0);
        for stream in [fake.user_stream(NON_BLOCKING), 0] {
            let p = api.pool_malloc(4096, 0);
            let host = api.host_ptr_of(p) as *mut u8;
            // SAFETY: this test's memory.
            unsafe { host.write_bytes(0x77, 4096) };
            let target = fake.user_memory(4096);
            assert_eq!(fake.user_copy_in(target, host, 4096, stream), 0);
            api.pool_free(p, stream);
            assert_eq!(api.release(0), 4096, "the copy is still queued");
            assert_eq!(fake.live_registrations().len(), 1);
            fake.run(stream);
            assert_eq!(fake.device_bytes(target, 4096), [0x77; 4096], "the copy saw the bytes");
            assert_eq!(api.release(10_000), 0);
            let last = |function, code| {
                let calls = fake.calls_of(function);
                calls.iter().rfind(|call| call.code == Some(code)).map(|call| call.sequence)
            };
            assert!(last("cuEventQuery", 0) < last("cudaHostUnregister", 0), "complete, then unregistered");
            fake.free_user_memory(target);
        }
        // A thousand on an idle stream wait for no device.
        let stream = fake.user_stream(NON_BLOCKING);
        fake.auto_run(true);
        api.set_cache_limit(1 << 20);
        let before = fake.calls().len();
        for _ in 0..1000 {
            let p = api.pool_malloc(4096, 0);
            api.pool_free(p, stream);
        }
        let calls = &fake.functions()[before..];
        assert!(!calls.iter().any(|call| call.contains("Synchronize") || call == "cudaHostUnregister"));
        assert!(calls.len() < 60_000, "{}", calls.len());
        assert_eq!(api.release(10_000), 0);
        assert_nothing_is_left(&fake, &api);
    }
}

alone! {
    fn statistics_count_and_the_mode_of_one_thread_is_its_own() {
        let fake = fake("statistics", 1);
        let api = Api::open(&fake);
        fake.auto_run(true);
        api.use_pinned(true);
        let (p, q) = (api.malloc(4096, 0), api.malloc(8192, 0));
        api.free(p, 0);
        let (counts, device) = api.counts();
        assert_eq!((counts.live_bytes, counts.peak_bytes, counts.allocations, counts.live), (8192, 12288, 2, 1));
        assert_eq!(device, Counts::default());

        let set = api.get::<extern "C" fn(c_int) -> c_int>("pinned_override");
        let is_mode = api.get::<extern "C" fn() -> c_int>("pinned_is_mode");
        assert_eq!((set(0), is_mode()), (-1, 1), "the mode stays");
        let d = api.malloc(512, 0);
        assert_eq!(api.host_ptr_of(d), 0, "overridden");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let p = api.malloc(512, 0);
                assert_ne!(api.host_ptr_of(p), 0, "not on other threads");
                api.free(p, 0);
            });
        });
        assert_eq!((set(1), set(-1), set(-1)), (0, 1, -1));
        api.get::<extern "C" fn(c_int)>("pinned_reset_peaks")(-1);
        assert_eq!(api.counts().0.peak_bytes, 8192);
        [q, d].into_iter().for_each(|ptr| api.free(ptr, 0));
        assert_eq!(api.release(10_000), 0);
        assert_nothing_is_left(&fake, &api);
    }
}

alone! {
    fn blocks_can_be_freed_after_cuda_has_shut_down() {
        // Exit hooks run in the reverse of their order: this one after the fake's, which answers 4 from then on.
        extern "C" fn at_exit() {
            let (api, blocks) = LEFT.get().expect("set before the end");
            blocks.iter().for_each(|block| api.free(*block, 0));
            let (page_locked, device) = api.counts();
            let live = (page_locked.live_bytes, device.live_bytes, page_locked.frees, device.frees);
            println!("at exit: {live:?}");
            if live != (0, 0, 3, 1) {
                std::process::abort();
            }
        }
        unsafe extern "C" {
            fn atexit(hook: extern "C" fn()) -> c_int;
        }
        static LEFT: std::sync::OnceLock<(Api, [usize; 4])> = std::sync::OnceLock::new();
        // SAFETY: a function of this program.
        assert_eq!(unsafe { atexit(at_exit) }, 0);
        let fake = fake("exit", 1);
        let api = Api::open(&fake);
        let blocks = [api.pool_malloc(4096, 0), api.pool_malloc(1 << 20, 0), api.pool_malloc(1, 0), api.malloc(4096, 0)];
        assert!(blocks.iter().all(|block| *block != 0), "{}", api.last_error());
        api.release(0); // "shut down", with live blocks
        assert_eq!((api.counts().0.live, fake.live_registrations().len()), (3, 3));
        LEFT.set((api, blocks)).ok().expect("set once");
    }
}

alone! {
    /// A DataLoader's worker: forked while other threads of the parent are in the library, their failures half told.
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        unsafe extern "C" {
            fn fork() -> c_int;
            fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
            fn _exit(code: c_int) -> !;
            fn alarm(seconds: u32) -> u32;
        }
        let fake = fake("fork", 1);
        let api = Api::open(&fake);
        let block = api.pool_malloc(4096, 0);
        assert_ne!(block, 0, "{}", api.last_error());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        api.free(0xdead_0000, 0); // a failure, which is printed
                    }
                });
            }
            for _ in 0..50 {
                // SAFETY: the child calls the library alone, which is what is tested, and ends.
                unsafe {
                    let pid = fork();
                    assert!(pid >= 0, "fork");
                    if pid == 0 {
                        alarm(60); // a child that waits is killed by it
                        api.free(block, 0);
                        let ok = api.malloc(4096, 0) == 0 && api.host_ptr_of(block) == 0 && api.counts().0.live == 0;
                        _exit(i32::from(!ok));
                    }
                    let mut status = 0;
                    assert_eq!((waitpid(pid, &mut status, 0), status), (pid, 0), "in the child");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        api.free(block, 0);
        fake.run_all();
        assert_eq!(api.release(10_000), 0);
        assert_nothing_is_left(&fake, &api);
    }
}

/// The names of the functions that a text declares, by what stands before and behind them.
fn names(text: &str, before: &str) -> Vec<String> {
    let mut found: Vec<String> = text
        .match_indices("pinned_")
        .filter(|(at, _)| text[..*at].ends_with(before))
        .map(|(at, _)| text[at..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned())
        .filter(|name| text.contains(&format!("{before}{name}(")))
        .collect();
    found.sort();
    found.dedup();
    found
}

#[test]
fn the_header_the_library_and_the_python_module_have_the_same_functions() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("read {path}: {e}"));
    let source = names(&read("src/lib.rs"), "extern \"C\" fn ");
    assert!(source.len() > 15, "{source:?}");
    // In the header a declaration begins its line.
    let header: String = read("include/pinring_mapped.h")
        .lines()
        .filter(|l| l.ends_with(';') && l.contains('('))
        .collect::<Vec<_>>()
        .join("\n");
    for name in &source {
        assert!(header.contains(&format!("{name}(")), "the header lacks {name}");
    }
    assert_eq!(header.lines().count(), source.len(), "the header declares what the library lacks:\n{header}");
    let python = read("python/pinring_mapped.py");
    for name in source.iter().filter(|name| *name != "pinned_release_patiently") {
        assert!(python.contains(&format!("\"{name}\"")), "python lacks {name}");
    }
    // SAFETY: the library has no initialisers of its own.
    let library = unsafe { Library::open(Some(library()), libloading::os::unix::RTLD_NOW) }.unwrap();
    for name in source {
        // SAFETY: only looked up.
        unsafe { library.get::<extern "C" fn()>(name.as_str()) }.unwrap_or_else(|e| panic!("{name}: {e:?}"));
    }
}

#[test]
fn the_python_module_works_without_torch() {
    let test = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/test_pinring_mapped.py");
    let fake = common::fake::place(&scratch("python"), "libcudart.so.13");
    let mut command = std::process::Command::new("python3");
    command.arg("-B").arg(&test).env("PINRING_MAPPED_LIBRARY", library()).env("PINRING_FAKE_LIBRARY", fake);
    match command.output() {
        Ok(output) => {
            let text =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
            assert!(output.status.success() && text.contains("OK"), "{}: {text}", output.status);
            eprintln!("{}", text.trim());
        }
        Err(error) => eprintln!("skipped: python3 cannot be started: {error}"),
    }
}
