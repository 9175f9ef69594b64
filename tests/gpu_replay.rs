//! On a host with a GPU: batches that it gathers from the mapped store, and priorities that come back from it. Without one
//! each test prints `skipped: no CUDA device` and why.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/gathered.rs"]
mod gathered;
#[path = "common/priorities.rs"]
mod priorities;

use common::Watchdog;
use feeding::{DEADLINE, LEGACY, learner_on, until};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pinring::*;
use priorities::{Counted, ROWS};
use std::ffi::c_void;

/// Whether there is a GPU; says so if not.
fn has_gpu() -> bool {
    match probe_cuda(&CudaSearch::new()) {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {}", error.to_string().lines().next().unwrap_or_default());
            false
        }
    }
}

/// The driver as the learner's kernels use it, on device 0.
struct Driver {
    library: Library,
}

impl Driver {
    fn new() -> Driver {
        // SAFETY: the driver that a feed loads too.
        let driver = Driver { library: unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.unwrap() };
        let mut context = 0;
        // SAFETY: an out-pointer of ours, and the context that came through it.
        unsafe {
            assert_eq!(driver.get::<unsafe extern "C" fn(u32) -> i32>("cuInit")(0), 0);
            let retain = driver.get::<unsafe extern "C" fn(*mut usize, i32) -> i32>("cuDevicePrimaryCtxRetain");
            assert_eq!(retain(&mut context, 0), 0);
            assert_eq!(driver.get::<unsafe extern "C" fn(usize) -> i32>("cuCtxSetCurrent")(context), 0);
        }
        driver
    }

    fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the types at the calls are the functions' signatures.
        unsafe { *self.library.get::<F>(name).unwrap() }
    }

    fn memory(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: an out-pointer of ours.
        let code =
            unsafe { self.get::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2")(&mut address, bytes) };
        assert_eq!(code, 0);
        address
    }

    /// Writes values in their turn, as a kernel would. From ordinary memory, whose bytes are taken at the call.
    fn put(&self, address: u64, values: &[f32], stream: usize) {
        type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize, usize) -> i32;
        let (from, bytes) = (values.as_ptr().cast(), size_of_val(values));
        // SAFETY: memory of the test's, as long at both ends.
        assert_eq!(unsafe { self.get::<CopyIn>("cuMemcpyHtoDAsync_v2")(address, from, bytes, stream) }, 0);
    }

    /// Fills memory in its turn, which takes the device some time.
    fn fill(&self, address: u64, words: usize, stream: usize) {
        type Fill = unsafe extern "C" fn(u64, u32, usize, usize) -> i32;
        // SAFETY: memory of the test's.
        assert_eq!(unsafe { self.get::<Fill>("cuMemsetD32Async")(address, 0, words, stream) }, 0);
    }

    fn stream(&self) -> usize {
        let mut stream = 0;
        // SAFETY: an out-pointer of ours.
        let code =
            unsafe { self.get::<unsafe extern "C" fn(*mut usize, u32) -> i32>("cuStreamCreate")(&mut stream, 1) };
        assert_eq!(code, 0);
        stream
    }
}

#[test]
fn a_gpu_gathers_what_the_cpu_gathers_bit_by_bit() {
    if has_gpu() {
        let _watchdog = Watchdog::new("a_gpu_gathers_what_the_cpu_gathers_bit_by_bit", DEADLINE * 4);
        gathered::same_bit_by_bit(&CudaSearch::new(), 200);
    }
}

#[test]
fn priorities_from_a_gpu_are_those_from_the_host() {
    if has_gpu() {
        let _watchdog = Watchdog::new("priorities_from_a_gpu_are_those_from_the_host", DEADLINE * 4);
        let driver = Driver::new();
        let memory = driver.memory(ROWS * 4);
        priorities::same_as_from_the_host(&CudaSearch::new(), memory, |values| driver.put(memory, values, LEGACY), 500);
    }
}

/// The stream is far behind the learner's thread, and the next kernel overwrites the priorities: those that come are of
/// their place in the stream, one update a batch finds a place each time, and none waits.
#[test]
fn updates_far_ahead_of_the_stream_are_of_their_place_in_it() {
    if !has_gpu() {
        return;
    }
    let _watchdog = Watchdog::new("updates_far_ahead_of_the_stream_are_of_their_place_in_it", DEADLINE * 4);
    let (kind, driver) = (Counted::new(), Driver::new());
    for by in [Gather::Cpu, Gather::Mapped] {
        let feed = kind.builder(&CudaSearch::new()).gather(by).start().unwrap();
        let (stream, words) = (driver.stream(), 64 << 20);
        let (memory, work) = (driver.memory(ROWS * 4), driver.memory(words * 4));
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        kind.write(&mut writer, 0..200).unwrap();
        let (mut last, mut seen) = (vec![None; 200], Vec::new());
        for update in 0..2000 {
            let batch = learner.next_batch().unwrap();
            let keys = batch.keys();
            driver.fill(work, words, stream);
            drop(batch);
            let values: Vec<f32> = keys.iter().map(|(_, step)| (update % 97) as f32 + step as f32 / 256.0).collect();
            driver.put(memory, &values, stream);
            // SAFETY: as many values were put there, and it stays.
            unsafe { learner.update_priorities(&keys, memory, ROWS) }.unwrap();
            driver.put(memory, &[1e9; ROWS], stream);
            keys.iter().zip(values).for_each(|((_, step), value)| last[step as usize] = Some(value));
            seen.push(keys);
        }
        until("all have come", || feed.metrics().devices[0].updates == 2000);
        for keys in &seen[1000..] {
            let expected: Vec<_> = keys.iter().map(|(_, step)| last[step as usize]).collect();
            assert_eq!(feed.peek(keys).unwrap(), expected, "{by:?}");
        }
        drop((learner, writer));
        let report = feed.stop(DEADLINE).unwrap();
        assert_eq!((report.quarantined_slots, report.fault), (0, None));
    }
}
