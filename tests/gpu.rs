//! On a host with a GPU: a page-locked feed as a user meets it, checked by CUDA handles of the test's own.
//!
//! Without a usable CUDA each test prints `skipped: no CUDA device` and why. With `PINRING_GPU_REQUIRED=1` that is a
//! failure. `PINRING_GPU_BYTES` is the length of the ring (8 GiB), `PINRING_GPU_RUNTIMES=path:path` names runtimes to use
//! beside the one that the search finds. Run with `--nocapture` to see the figures. Each test has a process of its own,
//! and they take turns.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod common;

use common::{SEARCH_VARIABLES, Watchdog, alone, is_child};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pinring::*;
use std::ffi::{c_int, c_uint, c_void};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const GIB: f64 = (1 << 30) as f64;
const SLOT: usize = 64 * MIB;
/// What the ring asks for: portable and mapped.
const FLAGS: c_uint = 3;
const DEADLINE: Duration = Duration::from_secs(30);
/// Hands a runtime's path to the child.
const RUNTIME: &str = "PINRING_GPU_RUNTIME";

// ---- processes -----------------------------------------------------------------------------------------------

/// True in the child that runs `test` alone. Elsewhere starts that child, in the environment of now and what `prepare`
/// adds, and prints what it printed.
fn in_child(test: &'static str, prepare: impl FnOnce(&mut Command)) -> bool {
    static TURN: Mutex<()> = Mutex::new(());
    if is_child(test) {
        println!(); // the harness has left its line open
        return true;
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let output = alone(test, |child| {
        for name in SEARCH_VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                child.env(name, value);
            }
        }
        prepare(child);
    });
    let text = String::from_utf8_lossy(&output.stdout);
    let harness = |line: &&str| ["", "ok"].contains(line) || line.starts_with("running ") || line.starts_with("test ");
    text.lines().filter(|line| !harness(line)).for_each(|line| println!("{line}"));
    false
}

/// Whether CUDA can be used here. If not, says that `test` is skipped, or fails if a GPU is required.
fn has_cuda(test: &str, search: &CudaSearch) -> bool {
    match probe_cuda(search) {
        Ok(_) => true,
        Err(error) => {
            skip(test, &error);
            false
        }
    }
}

fn skip(test: &str, why: &CudaFindError) {
    assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {why}");
    let why = why.to_string();
    println!("skipped: no CUDA device: {test}: {}", why.split(" Searched, ").next().unwrap_or_default());
}

// ---- the witness ---------------------------------------------------------------------------------------------

/// Asks CUDA about addresses through functions that the test looked up itself.
struct Witness {
    flags: unsafe extern "C" fn(*mut c_uint, *mut c_void) -> c_int,
    clear: Option<unsafe extern "C" fn() -> c_int>,
}

impl Witness {
    /// Through the library in use.
    fn of(report: &CudaReport) -> Witness {
        // SAFETY: the library is loaded already; this adds a handle, which is never closed.
        let library = unsafe { Library::open(Some(report.library()), RTLD_NOW | RTLD_LOCAL) };
        let library = std::mem::ManuallyDrop::new(library.expect("the library in use"));
        // SAFETY: in all of it, the functions are declared with the signatures of NVIDIA's headers, and called with live
        // out-pointers and the device that the driver named.
        unsafe {
            if report.rung() != Rung::Driver {
                let flags = *library.get(b"cudaHostGetFlags\0").expect("cudaHostGetFlags");
                return Witness { flags, clear: Some(*library.get(b"cudaGetLastError\0").expect("cudaGetLastError")) };
            }
            // The driver wants a current context: the primary one of device 0, as the feed uses.
            type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
            let retain = *library.get::<Retain>(b"cuDevicePrimaryCtxRetain\0").expect("cuDevicePrimaryCtxRetain");
            let push = *library
                .get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxPushCurrent_v2\0")
                .expect("cuCtxPushCurrent_v2");
            let mut context = std::ptr::null_mut();
            assert_eq!(retain(&mut context, 0), 0);
            assert_eq!(push(context), 0);
            Witness { flags: *library.get(b"cuMemHostGetFlags\0").expect("cuMemHostGetFlags"), clear: None }
        }
    }

    /// The flags of the registration that holds an address, or CUDA's code.
    fn ask(&self, address: usize) -> Result<c_uint, c_int> {
        let mut flags = 0;
        // SAFETY: a live out-pointer; the address is looked up and not followed.
        match unsafe { (self.flags)(&mut flags, std::ptr::without_provenance_mut(address)) } {
            0 => Ok(flags),
            code => {
                // SAFETY: it takes nothing, and clears this thread's slot of the error just made.
                self.clear.map(|clear| unsafe { clear() });
                Err(code)
            }
        }
    }

    /// Every page of these slots, a huge page apart, and their last bytes.
    fn assert_locked(&self, slots: &[usize], bytes: usize) {
        for &slot in slots {
            for address in (slot..slot + bytes).step_by(2 * MIB).chain([slot + bytes - 1]) {
                let flags = self.ask(address).unwrap_or_else(|code| panic!("0x{address:x} is not locked: {code}"));
                assert_eq!(flags & FLAGS, FLAGS, "0x{address:x}");
            }
        }
    }

    fn assert_free(&self, slots: &[usize], bytes: usize) {
        for &slot in slots {
            for address in [slot, slot + bytes / 2, slot + bytes - 1] {
                assert_eq!(self.ask(address), Err(1), "0x{address:x}: nothing is registered there any more");
            }
        }
    }
}

// ---- a feed whose batches are plain bytes --------------------------------------------------------------------

struct Bytes {
    feed: Feed,
    leaf: Leaf<u8>,
    column: Column<u8>,
}

impl Bytes {
    /// One row of `slot` bytes a batch.
    fn start(slot: usize, slots: usize, search: CudaSearch) -> Bytes {
        Bytes::start_with(slot, slots, search, |builder| builder)
    }

    fn start_with(
        slot: usize,
        slots: usize,
        search: CudaSearch,
        set: impl FnOnce(FeedBuilder) -> FeedBuilder,
    ) -> Bytes {
        let mut step = Step::new();
        let leaf = step.leaf::<u8>("bytes", &[slot]);
        let mut sample = Sample::step(step);
        let column = sample.all(leaf);
        let builder = Feed::builder(sample).batch(1).buffers(slots).pinning(Pinning::Required).cuda(search);
        assert_eq!(builder.page_locked_bytes().unwrap(), slot * slots);
        Bytes { feed: set(builder).start().unwrap(), leaf, column }
    }

    /// A batch of these bytes.
    fn write(&self, writer: &mut Writer, byte: u8) {
        let mut step = writer.step().unwrap();
        step.view_mut(self.leaf).as_slice_mut().unwrap().fill(byte);
        step.commit().unwrap();
    }

    /// Every slot of the ring as a batch, each filled with its number.
    fn fill(&self, slots: usize) -> Vec<Batch> {
        let (mut writer, learner) = (self.feed.writer(1).unwrap(), self.feed.learner().unwrap());
        let batches = (0..slots).map(|number| {
            self.write(&mut writer, number as u8);
            learner.next_batch().unwrap()
        });
        batches.collect()
    }

    /// The address of a batch's slot.
    fn address(&self, batch: &Batch) -> usize {
        batch.slice(self.column).as_ptr().addr()
    }
}

// ---- tests ---------------------------------------------------------------------------------------------------

/// The whole life of a large ring: pinned, every slot locked by the witness's word, and nothing left of it.
fn pin_use_and_let_go(what: &str, search: CudaSearch) {
    let wanted = std::env::var("PINRING_GPU_BYTES").map_or(8 << 30, |bytes| bytes.parse().expect("a number of bytes"));
    let slots = (wanted / SLOT).max(2);
    let gib = (slots * SLOT) as f64 / GIB;

    let began = Instant::now();
    let bytes = Bytes::start(SLOT, slots, search);
    let started = began.elapsed();
    let report = bytes.feed.pin_report().expect("pinning is required").clone();
    assert_eq!((report.page_locked_bytes, report.slots_verified), (slots * SLOT, slots));
    println!("{what}: {report}");
    let per_gib = |time: Duration| time.as_secs_f64() / gib;
    println!(
        "{what}: {gib:.2} GiB started in {:.3} s: {:.4} s/GiB (find {:.3} s; pre-fault {:.4}, register {:.4}, verify {:.4} \
         s/GiB)",
        started.as_secs_f64(),
        per_gib(started),
        report.times.find.as_secs_f64(),
        per_gib(report.times.prefault),
        per_gib(report.times.register),
        per_gib(report.times.verify),
    );

    let batches = bytes.fill(slots);
    let witness = Witness::of(&report.cuda);
    let mut addresses: Vec<usize> = batches.iter().map(|batch| bytes.address(batch)).collect();
    addresses.sort_unstable();
    let contiguous = addresses.windows(2).all(|pair| pair[1] - pair[0] == SLOT);
    assert!(contiguous && addresses.len() == slots, "one slot behind the other");
    witness.assert_locked(&addresses, SLOT);
    let metrics = bytes.feed.metrics();
    assert_eq!((metrics.page_locked_bytes, metrics.batches_held), (slots * SLOT, slots));

    drop(batches);
    let began = Instant::now();
    let stopped = bytes.feed.stop(DEADLINE).unwrap();
    println!("{what}: stopped and released in {:.3} s: {stopped}", began.elapsed().as_secs_f64());
    assert_eq!((stopped.still_out, stopped.threads_given_up.len()), (0, 0));
    witness.assert_free(&addresses, SLOT);
    assert_eq!(bytes.feed.metrics().stranded_bytes, 0);
}

#[test]
fn the_search_finds_a_cuda_that_locks_every_slot_and_lets_go_of_it() {
    const TEST: &str = "the_search_finds_a_cuda_that_locks_every_slot_and_lets_go_of_it";
    if in_child(TEST, |_| {}) && has_cuda(TEST, &CudaSearch::new()) {
        let _watchdog = Watchdog::new(TEST, Duration::from_secs(300));
        pin_use_and_let_go("search", CudaSearch::new());
    }
}

#[test]
fn each_runtime_that_is_named_does_the_same() {
    const TEST: &str = "each_runtime_that_is_named_does_the_same";
    if let Some(path) = std::env::var_os(RUNTIME) {
        println!();
        let search = CudaSearch::new().library_only(&path);
        if has_cuda(TEST, &search) {
            let _watchdog = Watchdog::new(TEST, Duration::from_secs(300));
            pin_use_and_let_go(&path.display().to_string(), search);
        }
        return;
    }
    let named = std::env::var_os("PINRING_GPU_RUNTIMES").unwrap_or_default();
    let paths: Vec<_> = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()).collect();
    if paths.is_empty() {
        println!("skipped: {TEST}: PINRING_GPU_RUNTIMES names none");
    }
    for path in paths {
        in_child(TEST, |child| {
            child.env(RUNTIME, &path);
        });
    }
}

/// As in a process whose framework brings a CUDA of its own: a feed through the runtime that the search finds, another
/// through the one that is named, both on a stream and checked by copies of the latter.
#[test]
fn two_runtimes_at_once_feed_a_device() {
    const TEST: &str = "two_runtimes_at_once_feed_a_device";
    let Some(path) = std::env::var_os(RUNTIME) else {
        let named = std::env::var_os("PINRING_GPU_RUNTIMES").unwrap_or_default();
        let paths: Vec<_> = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()).collect();
        if paths.is_empty() {
            println!("skipped: {TEST}: PINRING_GPU_RUNTIMES names none");
        }
        for path in paths {
            in_child(TEST, |child| {
                child.env(RUNTIME, &path);
            });
        }
        return;
    };
    println!();
    let named = CudaSearch::new().library_only(&path);
    if !has_cuda(TEST, &CudaSearch::new()) {
        return;
    }
    let _watchdog = Watchdog::new(TEST, Duration::from_secs(120));
    const SLOT: usize = MIB;
    let start = |search| Bytes::start_with(SLOT, 4, search, |builder| builder.device(0));
    let first = start(CudaSearch::new());
    let found = first.feed.pin_report().expect("pinning is required").cuda.library().to_owned();
    let file = |path: &std::path::Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if file(&found) == file(path.as_ref()) {
        println!("skipped: {TEST}: the search finds {} itself", found.display());
        return;
    }
    let user = User::of(path.as_ref());
    let second = start(named);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
    for runtime in [file(&found), file(path.as_ref())] {
        assert!(maps.contains(&*runtime.to_string_lossy()), "{} is mapped", runtime.display());
    }
    let feeds = [first, second];
    // SAFETY: the user's stream is never destroyed.
    let learners = feeds.each_ref().map(|bytes| unsafe { bytes.feed.learner_on(0, user.stream) }.unwrap());
    let mut writers = feeds.each_ref().map(|bytes| bytes.feed.writer(1).unwrap());
    for round in 0..100 {
        for ((bytes, learner), writer) in feeds.iter().zip(&learners).zip(&mut writers) {
            bytes.write(writer, round);
            let batch = learner.next_batch().unwrap();
            let read = user.read(batch.column(bytes.column).ptr, SLOT);
            drop(batch);
            assert!(read.iter().all(|byte| *byte == round), "round {round}: {}", read[0]);
        }
    }
    drop((learners, writers));
    for bytes in feeds {
        let stopped = bytes.feed.stop(DEADLINE).unwrap();
        assert_eq!((stopped.still_out, stopped.threads_given_up.len(), stopped.fault), (0, 0, None));
    }
    println!("{} and {}: 100 batches through each, read by the latter", found.display(), path.display());
}

/// A stream, and copies from the device, by a runtime of the user's own.
struct User {
    copy: unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> c_int,
    wait: unsafe extern "C" fn(*mut c_void) -> c_int,
    stream: *mut c_void,
}

impl User {
    fn of(path: &std::path::Path) -> User {
        // SAFETY: in all of it, the functions are declared with the signatures of NVIDIA's headers, and called with live
        // out-pointers. The library is never closed.
        unsafe {
            let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).expect("the runtime that was named");
            let library = std::mem::ManuallyDrop::new(library);
            type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int;
            let create = *library.get::<Create>(b"cudaStreamCreateWithFlags\0").expect("cudaStreamCreateWithFlags");
            let mut stream = std::ptr::null_mut();
            assert_eq!(create(&mut stream, 1), 0);
            let copy = *library.get(b"cudaMemcpyAsync\0").expect("cudaMemcpyAsync");
            let wait = *library.get(b"cudaStreamSynchronize\0").expect("cudaStreamSynchronize");
            User { copy, wait, stream }
        }
    }

    fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: as many bytes at both ends, waited for here; 2 is from the device to the host.
        unsafe {
            let from = std::ptr::without_provenance(address as usize);
            assert_eq!((self.copy)(read.as_mut_ptr().cast(), from, bytes, 2, self.stream), 0);
            assert_eq!((self.wait)(self.stream), 0);
        }
        read
    }
}

#[test]
fn a_batch_held_across_the_stop_keeps_its_memory_locked() {
    const TEST: &str = "a_batch_held_across_the_stop_keeps_its_memory_locked";
    if !in_child(TEST, |_| {}) || !has_cuda(TEST, &CudaSearch::new()) {
        return;
    }
    let _watchdog = Watchdog::new(TEST, Duration::from_secs(120));
    let slot = MIB;
    let bytes = Bytes::start(slot, 8, CudaSearch::new());
    let mut batches = bytes.fill(8);
    let addresses: Vec<usize> = batches.iter().map(|batch| bytes.address(batch)).collect();
    let witness = Witness::of(&bytes.feed.pin_report().expect("pinning is required").cuda);

    let held = batches.remove(5);
    drop(batches);
    let stopped = bytes.feed.stop(DEADLINE).unwrap();
    assert_eq!(stopped.still_out, 1, "{stopped}");
    let column = bytes.column;
    drop(bytes);
    witness.assert_locked(&addresses, slot); // the ring is locked as a whole, or not
    assert!(held.slice(column).iter().all(|&byte| byte == 5), "and its bytes are as they were");

    std::thread::spawn(move || drop(held)).join().unwrap();
    witness.assert_free(&addresses, slot);
    println!("a batch that outlived its feed kept 8 slots locked until it was dropped, on another thread");
}

#[test]
fn without_a_visible_device_the_error_says_so_with_code_100() {
    const TEST: &str = "without_a_visible_device_the_error_says_so_with_code_100";
    if !in_child(TEST, |child| {
        child.env("CUDA_VISIBLE_DEVICES", "");
    }) {
        return;
    }
    let error = probe_cuda(&CudaSearch::new()).unwrap_err();
    match &error {
        CudaFindError::Init { error: answer, .. } if answer.code() == 100 => {}
        // No CUDA, or no driver: nothing to hide a device from.
        CudaFindError::NotFound { .. } => return skip(TEST, &error),
        CudaFindError::Init { error: answer, .. } if answer.code() == 35 => return skip(TEST, &error),
        _ => panic!("{error}"),
    }
    let mut step = Step::new();
    step.leaf::<f32>("reward", &[]);
    let start = Feed::builder(Sample::step(step)).pinning(Pinning::Required).start().unwrap_err();
    assert_eq!(start.kind(), ErrorKind::Cuda);
    let text = start.to_string();
    for part in
        ["returned 100", "no device is visible", "CUDA_VISIBLE_DEVICES", "Searched, in order:", "[already loaded]"]
    {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    println!("without a visible device: {text}");
}
