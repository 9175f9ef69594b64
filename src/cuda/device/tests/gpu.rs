//! On real hardware, where there is some: the device table does what its callers are promised.

use super::rules::{self, Raw};
use crate::cuda::Cuda;
use crate::cuda::common::{SEARCH_VARIABLES, alone, is_child};
use crate::cuda::device::{Device, DeviceError, RawStream};
use crate::cuda::types::CudaSearch;
use std::ffi::CStr;
use std::path::Path;
use std::ptr::NonNull;
use std::time::Instant;

const BYTES: usize = 4 << 20;

/// Whether the test goes on here: on a host with a GPU, in a process of its own, where no fake is loaded and what is
/// done to the device harms no other test.
fn here(test: &str) -> bool {
    if !Path::new("/dev/nvidiactl").exists() {
        println!("skipped: this host has no GPU's driver");
        return false;
    }
    if driver().call("cuInit", &[0]) == 100 {
        println!("skipped: no device is visible to this process");
        return false;
    }
    let test = format!("cuda::device::tests::gpu::{test}");
    if is_child(&test) {
        return true;
    }
    let output = alone(&test, |child| {
        for name in SEARCH_VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                child.env(name, value);
            }
        }
    });
    println!("{}", String::from_utf8_lossy(&output.stdout));
    false
}

fn driver() -> Raw {
    Raw::open(Path::new("libcuda.so.1"))
}

/// What is current on this thread.
fn current(raw: &Raw) -> usize {
    raw.made("cuCtxGetCurrent", &[]).unwrap()
}

#[test]
fn the_real_driver_keeps_the_rules_of_the_fake() {
    if here("the_real_driver_keeps_the_rules_of_the_fake") {
        rules::assert_kept(&rules::answers(&driver()));
    }
}

/// Writes to an address that is nobody's.
const STRAY: &CStr =
    c".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry stray() { .reg .u64 %a; .reg .u32 %v; \
    mov.u64 %a, 16; mov.u32 %v, 1; st.global.u32 [%a], %v; ret; }";

#[test]
fn the_real_driver_fails_after_an_illegal_address_as_the_fake_does() {
    if !here("the_real_driver_fails_after_an_illegal_address_as_the_fake_does") {
        return;
    }
    let raw = driver();
    let answers = rules::answers_after_700(&raw, |stream| {
        let module = raw.made("cuModuleLoadData", &[STRAY.as_ptr().expose_provenance()]).unwrap();
        let name = c"stray".as_ptr().expose_provenance();
        let kernel = raw.made("cuModuleGetFunction", &[module, name]).unwrap();
        assert_eq!(raw.launch(kernel, stream), 0);
    });
    rules::assert_kept_after_700(&answers);
}

#[test]
fn on_a_real_gpu() {
    if !here("on_a_real_gpu") {
        return;
    }
    let raw = driver();
    let error = Device::attach(&CudaSearch::new(), 99).unwrap_err();
    assert!(matches!(error, DeviceError::NoSuchDevice { ordinal: 99, count: 1.. }), "{error}");
    let device = Device::attach(&CudaSearch::new(), 0).unwrap();
    println!("{device:?}");
    assert!(!device.name().is_empty());
    assert_eq!((device.ordinal(), current(&raw)), (0, 0));
    device.relax_capture_mode().unwrap();
    there_and_back(&device);
    assert_eq!(current(&raw), 0, "nothing stays current on a thread that had nothing");
    captures(&device, &raw);
    std::thread::scope(|s| s.spawn(|| current_stays(&device, &raw)).join().unwrap());
    costs(&device, &raw);
}

/// A round trip through page-locked memory, ordered by events alone.
fn there_and_back(device: &Device) {
    // On a thread of its own: a runtime makes a context current on the thread that initialises it.
    let cuda = std::thread::spawn(|| Cuda::find(&CudaSearch::new()).unwrap()).join().unwrap();
    let mut host: Vec<u8> = (0..2 * BYTES).map(|i| ((i * 31) >> 3) as u8).collect();
    locked(&cuda, &mut host, true);
    let start = NonNull::new(host.as_mut_ptr()).unwrap();
    let (streams, events) =
        ([device.stream(true).unwrap(), device.stream(false).unwrap()], [(); 3].map(|()| device.event().unwrap()));
    let [feeder, learner] = [streams[0].raw(), streams[1].raw()];
    let [ready, read, back] = &events;
    let memory = [(); 2].map(|()| device.alloc(BYTES).unwrap());
    assert!(memory[0].address() % 256 == 0 && memory[0].bytes() == BYTES);
    assert!(device.query(ready).unwrap(), "never recorded");
    let (from, to) = (start.as_ptr(), start.as_ptr().wrapping_add(BYTES));
    // SAFETY: both halves of `host` and both memories live until `back` has completed, and nobody touches them.
    unsafe {
        device.copy_in(memory[0].address(), from, BYTES, feeder).unwrap();
        device.record(ready, feeder).unwrap();
        device.wait(learner, ready).unwrap();
        device.copy_within(memory[1].address(), memory[0].address(), BYTES, learner).unwrap();
        device.record(read, learner).unwrap();
        device.wait(feeder, read).unwrap();
        device.copy_out(to, memory[1].address(), BYTES, feeder).unwrap();
        device.record(back, feeder).unwrap();
        for stream in [RawStream(0), RawStream(1), RawStream(2), feeder] {
            assert!(!device.is_capturing(stream).unwrap(), "{stream:?}");
        }
    }
    device.synchronize_event(back).unwrap();
    assert!(events.iter().all(|event| device.query(event).unwrap()));
    let (first, second) = host.split_at(BYTES);
    assert!(first == second, "what came back is what was sent");
    // SAFETY: the stream lives.
    unsafe { device.synchronize_stream(feeder).unwrap() };
    // SAFETY: the source leaves its registration half-way: nothing is queued.
    let error = unsafe { device.copy_in(memory[0].address(), to.wrapping_add(BYTES - 64), 128, feeder) }.unwrap_err();
    assert_eq!((error.operation(), error.code(), error.symbol()), ("cuMemcpyHtoDAsync", 1, "CUDA_ERROR_INVALID_VALUE"));
    assert_eq!(device.alloc(1 << 46).unwrap_err().symbol(), "CUDA_ERROR_OUT_OF_MEMORY");
    locked(&cuda, &mut host, false);
}

/// Locks memory or unlocks it, on a thread of its own as above.
fn locked(cuda: &Cuda, memory: &mut [u8], lock: bool) {
    std::thread::scope(|s| {
        s.spawn(move || {
            let start = NonNull::new(memory.as_mut_ptr()).unwrap();
            if lock { cuda.register(start, memory.len()) } else { cuda.unregister(start) }.unwrap();
        });
    });
}

/// While somebody captures, a thread of ours and drops on any thread leave the capture intact.
fn captures(device: &Device, raw: &Raw) {
    let context = raw.made("cuDevicePrimaryCtxRetain", &[0]).unwrap();
    assert_eq!(raw.call("cuCtxPushCurrent_v2", &[context]), 0);
    let [beside, ordered] = [1, 0].map(|flags| raw.made("cuStreamCreateWithPriority", &[flags, 0]).unwrap());
    let (stream, event, memory) =
        (device.stream(false).unwrap(), device.event().unwrap(), device.alloc(BYTES).unwrap());
    // SAFETY: the streams live until the end of this function.
    let capturing = |handle| unsafe { device.is_capturing(RawStream(handle)) }.unwrap();

    assert_eq!(raw.call("cuStreamBeginCapture_v2", &[beside, 0]), 0);
    assert!(capturing(beside) && !capturing(ordered) && !capturing(0));
    // SAFETY: the stream lives until the drop below.
    unsafe { device.record(&event, stream.raw()).unwrap() };
    device.synchronize_event(&event).unwrap();
    assert!(device.query(&event).unwrap());
    // On a thread in global mode, as a user's is. Where there is a second device, its context is made now.
    let mine = move || {
        drop((stream, event, memory));
        drop(Device::attach(&CudaSearch::new(), 1));
    };
    std::thread::spawn(mine).join().unwrap();
    let mut graph = 0_usize;
    let place = (&raw mut graph).expose_provenance();
    assert_eq!(raw.call("cuStreamEndCapture", &[beside, place]), 0, "the capture is intact");
    assert_eq!(raw.call("cuGraphDestroy", &[graph]), 0);

    assert!([(0, 0), (101, 0)].contains(&a_context_is_made_beside_a_capture(raw, beside)), "attaching needs no mode");

    assert_eq!(raw.call("cuStreamBeginCapture_v2", &[ordered, 0]), 0);
    assert!(capturing(ordered) && capturing(0) && capturing(1), "the legacy stream would be drawn in");
    assert!(!capturing(beside));
    assert_eq!(raw.call("cuStreamEndCapture", &[ordered, place]), 0, "the capture is intact");
    assert_eq!(raw.call("cuGraphDestroy", &[graph]), 0);
    for stream in [beside, ordered] {
        assert_eq!(raw.call("cuStreamDestroy_v2", &[stream]), 0);
    }
    assert_eq!(raw.call("cuCtxPopCurrent_v2", &[place]), 0);
    assert_eq!(raw.call("cuDevicePrimaryCtxRelease_v2", &[0]), 0);
}

/// A context is made while a stream captures, by a thread that is not relaxed: the code, and that of the capture's end.
fn a_context_is_made_beside_a_capture(raw: &Raw, stream: usize) -> (i32, i32) {
    let mut graph = 0_usize;
    let place = (&raw mut graph).expose_provenance();
    assert_eq!(raw.call("cuStreamBeginCapture_v2", &[stream, 0]), 0);
    let retained = std::thread::scope(|s| s.spawn(|| raw.made("cuDevicePrimaryCtxRetain", &[1])).join().unwrap());
    let end = raw.call("cuStreamEndCapture", &[stream, place]);
    if retained.is_ok() {
        raw.call("cuDevicePrimaryCtxRelease_v2", &[1]);
    }
    raw.call("cuGraphDestroy", &[graph]);
    (retained.err().unwrap_or(0), end)
}

/// A thread that works with one device and calls another keeps its own.
fn current_stays(device: &Device, raw: &Raw) {
    let other = match Device::attach(&CudaSearch::new(), 1) {
        Ok(other) => other,
        Err(DeviceError::NoSuchDevice { .. }) => {
            println!("skipped: two devices are needed to see that a thread keeps its own");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let context = raw.made("cuDevicePrimaryCtxRetain", &[1]).unwrap();
    assert_eq!(raw.call("cuCtxPushCurrent_v2", &[context]), 0);
    there_and_back(device);
    assert_eq!(current(raw), context);
    there_and_back(&other);
    assert_eq!(current(raw), context);
}

/// What the calls cost, for the record.
fn costs(device: &Device, raw: &Raw) {
    let (stream, event) = (device.stream(false).unwrap(), device.event().unwrap());
    let time = |what: &str, call: &dyn Fn()| {
        let begin = Instant::now();
        (0..100_000).for_each(|_| call());
        println!("{what}: {:.0} ns", begin.elapsed().as_nanos() as f64 / 1e5);
    };
    let calls = || {
        time("query", &|| assert!(device.query(&event).unwrap()));
        // SAFETY: the stream lives.
        time("capturing?", &|| assert!(!unsafe { device.is_capturing(stream.raw()) }.unwrap()));
        // SAFETY: the stream lives.
        time("wait", &|| unsafe { device.wait(stream.raw(), &event).unwrap() });
    };
    println!("with another context current:");
    calls();
    let context = raw.made("cuDevicePrimaryCtxRetain", &[0]).unwrap();
    assert_eq!(raw.call("cuCtxPushCurrent_v2", &[context]), 0);
    println!("with the context current:");
    calls();
    assert_ne!(current(raw), 0);
}
