//! The driver's rules that the crate is built on, asked of a driver call by call: once of the fake, once of a real one.
//! [`EXPECTED`] is what both must answer, so that the fake cannot drift from the hardware.

mod acts;

use acts::{ACTS, INSIDE, LEGACY};
use libloading::os::unix::Library;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Any driver, by name of function: the tests' own calls go past the code under test.
pub(super) struct Raw(Library);

impl Raw {
    pub(super) fn open(path: &Path) -> Raw {
        // SAFETY: the fake, or the driver of this host, which are loaded already or made to be.
        Raw(unsafe { Library::new(path) }.unwrap())
    }

    /// Calls a function of up to five integers or pointers.
    pub(super) fn call(&self, name: &str, args: &[usize]) -> i32 {
        let mut five = [0; 5];
        five[..args.len()].copy_from_slice(args);
        let [a, b, c, d, e] = five;
        // SAFETY: every function called by these tests takes up to five integers or pointers and returns an int; the C
        // calling convention lets surplus integer arguments be passed. Pointers are to memory that outlives the call,
        // or, for copies, the run of the stream.
        unsafe {
            let f = self.0.get::<unsafe extern "C" fn(usize, usize, usize, usize, usize) -> i32>(name).unwrap();
            f(a, b, c, d, e)
        }
    }

    /// Launches one thread of a kernel without arguments.
    pub(super) fn launch(&self, kernel: usize, stream: usize) -> i32 {
        type Launch = unsafe extern "C" fn(usize, u32, u32, u32, u32, u32, u32, u32, usize, usize, usize) -> i32;
        // SAFETY: the signature of `cuLaunchKernel`; the kernel takes no arguments, so both lists may be null.
        unsafe { (self.0.get::<Launch>("cuLaunchKernel").unwrap())(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0) }
    }

    /// Calls a function that writes a handle to its first argument.
    pub(super) fn made(&self, name: &str, args: &[usize]) -> Result<usize, i32> {
        let mut handle = 0_usize;
        let out = (&raw mut handle).expose_provenance();
        match self.call(name, &[&[out], args].concat()) {
            0 => Ok(handle),
            code => Err(code),
        }
    }
}

const BYTES: usize = 1 << 20;

/// What the questions need.
struct World<'a> {
    raw: &'a Raw,
    context: usize,
    /// Captures. Not ordered with the legacy default stream.
    capturing: usize,
    /// Captures. Ordered with it.
    blocking: usize,
    other: usize,
    recorded: usize,
    never: usize,
    device: usize,
    locked: usize,
    pageable: usize,
    /// For what a call writes.
    out: AtomicUsize,
    lines: Vec<String>,
}

/// Which thread makes a call while a stream captures: the one that captures, another as it began, another in relaxed mode.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Caller {
    Capturing,
    Other,
    Relaxed,
}

/// One call made during a capture, with what comes before and after it, outside of the capture.
struct Act {
    name: &'static str,
    before: fn(&World<'_>) -> usize,
    act: fn(&World<'_>, usize) -> i32,
    after: fn(&World<'_>, usize),
}

const GLOBAL: usize = 0;
const THREAD_LOCAL: usize = 1;

impl World<'_> {
    fn say(&mut self, what: &str, answer: impl std::fmt::Display) {
        // At once too: a driver may not survive a question.
        println!("{what}: {answer}");
        self.lines.push(format!("{what}: {answer}"));
    }

    fn ask(&mut self, what: &str, name: &str, args: &[usize]) {
        let code = self.raw.call(name, args);
        self.say(what, code);
    }

    /// The address of `out`, which holds `value` then.
    fn out(&self, value: usize) -> usize {
        self.out.store(value, Ordering::Relaxed);
        self.out.as_ptr().expose_provenance()
    }

    fn register(&self, at: usize, bytes: usize) -> i32 {
        self.raw.call("cuMemHostRegister_v2", &[at, bytes, 3])
    }

    fn unregister(&self, at: usize) -> i32 {
        self.raw.call("cuMemHostUnregister", &[at])
    }

    fn status(&self, stream: usize) -> String {
        let mut status = 0_i32;
        let code = self.raw.call("cuStreamIsCapturing", &[stream, (&raw mut status).expose_provenance()]);
        if code == 0 { format!("status {status}") } else { code.to_string() }
    }

    /// Ends a capture: "intact", or the code.
    fn end(&self, stream: usize) -> String {
        let mut graph = 0_usize;
        let code = self.raw.call("cuStreamEndCapture", &[stream, (&raw mut graph).expose_provenance()]);
        if graph != 0 {
            self.raw.call("cuGraphDestroy", &[graph]);
        }
        if code == 0 { "intact".to_owned() } else { format!("lost {code}") }
    }

    /// A capture of `stream` in `mode`, during which `caller` makes a call.
    fn during(&mut self, stream: usize, mode: usize, caller: Caller, act: &Act) {
        let given = (act.before)(self);
        let begun = self.raw.call("cuStreamBeginCapture_v2", &[stream, mode]);
        assert_eq!(begun, 0, "{}: the capture begins", act.name);
        let code = match caller {
            Caller::Capturing => (act.act)(self, given),
            other => std::thread::scope(|s| {
                let world = &*self;
                s.spawn(move || world.elsewhere(other, || (act.act)(world, given))).join().unwrap()
            }),
        };
        let end = self.end(stream);
        (act.after)(self, given);
        let mode = ["global", "thread-local", "relaxed"][mode];
        self.say(&format!("{mode}, {caller:?}, {}", act.name), format!("{code}, {end}"));
    }

    fn elsewhere<R>(&self, caller: Caller, call: impl FnOnce() -> R) -> R {
        assert_eq!(self.raw.call("cuCtxPushCurrent_v2", &[self.context]), 0);
        if caller == Caller::Relaxed {
            let mut mode = 2_u32;
            let code = self.raw.call("cuThreadExchangeStreamCaptureMode", &[(&raw mut mode).expose_provenance()]);
            assert_eq!((code, mode), (0, 0), "every thread begins in global mode");
        }
        call()
    }
}

/// What both answer.
const EXPECTED: &str = include_str!("rules/answers.txt");

/// The same once a kernel has touched an illegal address.
const EXPECTED_AFTER_700: &str = include_str!("rules/answers-after-700.txt");

/// Compares with [`EXPECTED`], the answers of two devices only where there were two.
pub(super) fn assert_kept(answers: &[String]) {
    let two = answers.iter().any(|line| line.starts_with("two devices"));
    same(answers, EXPECTED.lines().filter(|line| two || !line.starts_with("two devices")));
}

pub(super) fn assert_kept_after_700(answers: &[String]) {
    same(answers, EXPECTED_AFTER_700.lines());
}

fn same<'a>(answers: &[String], expected: impl Iterator<Item = &'a str>) {
    let expected: Vec<&str> = expected.collect();
    for (answer, expected) in answers.iter().zip(&expected) {
        assert_eq!(answer, expected);
    }
    assert_eq!(answers.len(), expected.len());
}

impl<'a> World<'a> {
    /// Everything but the streams, events and memory, which need a context to be current.
    fn new(raw: &'a Raw, host: &mut [u8]) -> World<'a> {
        assert_eq!(raw.call("cuInit", &[0]), 0);
        let base = host.as_mut_ptr().expose_provenance().next_multiple_of(BYTES);
        World {
            raw,
            context: raw.made("cuDevicePrimaryCtxRetain", &[0]).unwrap(),
            capturing: 0,
            blocking: 0,
            other: 0,
            recorded: 0,
            never: 0,
            device: 0,
            locked: base,
            pageable: base + 2 * BYTES,
            out: AtomicUsize::new(0),
            lines: Vec::new(),
        }
    }

    fn fill(&mut self) {
        let raw = self.raw;
        assert_eq!(raw.call("cuCtxPushCurrent_v2", &[self.context]), 0);
        let stream = |flags: usize| raw.made("cuStreamCreateWithPriority", &[flags, 0]).unwrap();
        let event = || raw.made("cuEventCreate", &[3]).unwrap();
        (self.capturing, self.other, self.blocking) = (stream(1), stream(1), stream(0));
        (self.recorded, self.never) = (event(), event());
        self.device = raw.made("cuMemAlloc_v2", &[BYTES]).unwrap();
        assert_eq!(self.register(self.locked, BYTES), 0);
    }
}

/// Asks a driver everything. It ends with a reset of the device, after which nobody in the process can go on.
pub(super) fn answers(raw: &Raw) -> Vec<String> {
    let mut host = vec![7_u8; 5 * BYTES];
    let mut w = World::new(raw, &mut host);
    without_a_context(&mut w);
    w.fill();
    memory_and_events(&mut w);
    let ends = |w: &World<'_>| assert_eq!(raw.call("cuStreamSynchronize", &[w.other]), 0);
    for (mode, callers) in
        [(GLOBAL, &[Caller::Other, Caller::Relaxed, Caller::Capturing][..]), (THREAD_LOCAL, &[Caller::Other])]
    {
        for caller in callers {
            for act in &ACTS {
                w.during(w.capturing, mode, *caller, act);
                ends(&w);
            }
        }
    }
    for act in &INSIDE {
        w.during(w.capturing, GLOBAL, Caller::Capturing, act);
        ends(&w);
    }
    after_the_end(&mut w);
    for act in &LEGACY {
        w.during(w.blocking, GLOBAL, Caller::Capturing, act);
        w.during(w.capturing, GLOBAL, Caller::Capturing, &Act { name: "the same beside it", ..copy(act) });
        assert_eq!(raw.call("cuStreamSynchronize", &[0]), 0);
    }
    devices(&mut w);
    reset(&mut w);
    drop(host);
    w.lines
}

/// Asks a driver what still works once `break_it` has let a kernel touch an illegal address.
pub(super) fn answers_after_700(raw: &Raw, break_it: impl FnOnce(usize)) -> Vec<String> {
    let mut host = vec![7_u8; 5 * BYTES];
    let mut w = World::new(raw, &mut host);
    w.fill();
    assert_eq!(raw.call("cuEventRecord", &[w.recorded, w.other]), 0);
    assert_eq!(raw.call("cuStreamSynchronize", &[w.other]), 0);
    break_it(w.other);
    let stream = w.other;
    w.ask("wait of the host for the stream", "cuStreamSynchronize", &[stream]);
    w.ask("query of an event that had completed", "cuEventQuery", &[w.recorded]);
    w.ask("query of an event that was never recorded", "cuEventQuery", &[w.never]);
    w.ask("wait of the host for an event", "cuEventSynchronize", &[w.recorded]);
    w.ask("record", "cuEventRecord", &[w.recorded, stream]);
    w.ask("wait of a stream", "cuStreamWaitEvent", &[stream, w.recorded, 0]);
    w.ask("capturing?", "cuStreamIsCapturing", &[stream, w.out(0)]);
    w.ask("copy in", "cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, stream]);
    w.ask("copy out", "cuMemcpyDtoHAsync_v2", &[w.locked, w.device, 64, stream]);
    w.ask("copy within", "cuMemcpyDtoDAsync_v2", &[w.device + 4096, w.device, 64, stream]);
    w.ask("alloc", "cuMemAlloc_v2", &[w.out(0), BYTES]);
    w.ask("create an event", "cuEventCreate", &[w.out(0), 3]);
    w.ask("create a stream", "cuStreamCreateWithPriority", &[w.out(0), 1, 0]);
    w.ask("register", "cuMemHostRegister_v2", &[w.pageable, BYTES, 3]);
    w.ask("flags of locked memory", "cuMemHostGetFlags", &[w.out(0), w.locked]);
    w.ask("address of locked memory", "cuMemHostGetDevicePointer_v2", &[w.out(0), w.locked, 0]);
    w.ask("unregister", "cuMemHostUnregister", &[w.locked]);
    w.ask("destroy an event", "cuEventDestroy_v2", &[w.recorded]);
    w.ask("destroy a stream", "cuStreamDestroy_v2", &[w.blocking]);
    w.ask("free", "cuMemFree_v2", &[w.device]);
    w.ask("what is current", "cuCtxGetCurrent", &[w.out(0)]);
    w.ask("capture mode", "cuThreadExchangeStreamCaptureMode", &[w.out(0)]);
    w.ask("pop", "cuCtxPopCurrent_v2", &[w.out(0)]);
    w.ask("push", "cuCtxPushCurrent_v2", &[w.context]);
    w.ask("pop", "cuCtxPopCurrent_v2", &[w.out(0)]);
    w.ask("init", "cuInit", &[0]);
    w.ask("count of devices", "cuDeviceGetCount", &[w.out(0)]);
    w.ask("release", "cuDevicePrimaryCtxRelease_v2", &[0]);
    w.ask("retain", "cuDevicePrimaryCtxRetain", &[w.out(0), 0]);
    w.ask("reset", "cuDevicePrimaryCtxReset_v2", &[0]);
    w.ask("retain after a reset", "cuDevicePrimaryCtxRetain", &[w.out(0), 0]);
    std::mem::forget(host); // locked, where it could not be unlocked
    w.lines
}

/// An event that was last recorded in a capture which has ended.
fn after_the_end(w: &mut World<'_>) {
    let event = w.raw.made("cuEventCreate", &[3]).unwrap();
    assert_eq!(w.raw.call("cuStreamBeginCapture_v2", &[w.capturing, GLOBAL]), 0);
    assert_eq!(w.raw.call("cuEventRecord", &[event, w.capturing]), 0);
    let end = w.end(w.capturing);
    w.say("a record in a capture, and its end", end);
    w.ask("after the end, query", "cuEventQuery", &[event]);
    w.ask("after the end, wait of the host", "cuEventSynchronize", &[event]);
    w.ask("after the end, wait of a stream", "cuStreamWaitEvent", &[w.other, event, 0]);
    w.ask("after the end, record", "cuEventRecord", &[event, w.other]);
    w.ask("after the end, wait of the host for that", "cuEventSynchronize", &[event]);
    w.ask("after the end, query of that", "cuEventQuery", &[event]);
    w.ask("after the end, destroy", "cuEventDestroy_v2", &[event]);
}

fn copy(act: &Act) -> Act {
    Act { name: act.name, before: act.before, act: act.act, after: act.after }
}

fn without_a_context(w: &mut World<'_>) {
    let place = w.out(0);
    w.ask("without a context, alloc", "cuMemAlloc_v2", &[place, BYTES]);
    w.ask("without a context, stream", "cuStreamCreateWithPriority", &[place, 1, 0]);
    w.ask("without a context, event", "cuEventCreate", &[place, 3]);
    w.ask("without a context, register", "cuMemHostRegister_v2", &[w.locked, BYTES, 3]);
    w.ask("without a context, capturing? of the legacy stream", "cuStreamIsCapturing", &[0, place]);
    w.ask("without a context, pop", "cuCtxPopCurrent_v2", &[place]);
    w.ask("without a context, capture mode", "cuThreadExchangeStreamCaptureMode", &[w.out(2)]);
    w.ask("without a context, capture mode back", "cuThreadExchangeStreamCaptureMode", &[w.out(0)]);
    let mode = w.out.load(Ordering::Relaxed) as u32;
    w.say("without a context, the capture mode was", mode);
}

fn memory_and_events(w: &mut World<'_>) {
    let (device, locked, other) = (w.device, w.locked, w.other);
    w.ask("query of an event that was never recorded", "cuEventQuery", &[w.never]);
    w.ask("wait of the host for one", "cuEventSynchronize", &[w.never]);
    w.ask("wait of a stream for one", "cuStreamWaitEvent", &[other, w.never, 0]);
    w.ask("record", "cuEventRecord", &[w.recorded, other]);
    w.ask("wait of the host for it", "cuEventSynchronize", &[w.recorded]);
    w.ask("query of it", "cuEventQuery", &[w.recorded]);
    w.ask("zero bytes of device memory", "cuMemAlloc_v2", &[w.out(0), 0]);
    w.ask("too much device memory", "cuMemAlloc_v2", &[w.out(0), 1 << 46]);
    w.ask("free of an unknown address", "cuMemFree_v2", &[device + 4096]);
    w.ask("copy in, zero bytes", "cuMemcpyHtoDAsync_v2", &[device, locked, 0, other]);
    w.ask("copy in, to host memory", "cuMemcpyHtoDAsync_v2", &[w.pageable, locked, 64, other]);
    w.ask("copy in, beyond the device memory", "cuMemcpyHtoDAsync_v2", &[device + BYTES - 32, locked, 64, other]);
    w.ask("copy in, beyond the locked memory", "cuMemcpyHtoDAsync_v2", &[device, locked + BYTES - 32, 64, other]);
    w.ask("copy in, into the locked memory", "cuMemcpyHtoDAsync_v2", &[device, locked - 32, 64, other]);
    w.ask("copy out, beyond the locked memory", "cuMemcpyDtoHAsync_v2", &[locked + BYTES - 32, device, 64, other]);
    assert_eq!(w.register(locked + BYTES, BYTES), 0);
    w.ask("copy in, across two registrations", "cuMemcpyHtoDAsync_v2", &[device, locked + BYTES - 32, 64, other]);
    assert_eq!(w.unregister(locked + BYTES), 0);
    let mapped = w.raw.made("cuMemHostGetDevicePointer_v2", &[locked, 0]).unwrap();
    w.ask("copy within, from mapped memory", "cuMemcpyDtoDAsync_v2", &[device, mapped, 64, other]);
    w.ask("zero bytes registered", "cuMemHostRegister_v2", &[w.pageable, 0, 3]);
    w.ask("registered twice", "cuMemHostRegister_v2", &[locked, BYTES, 3]);
    w.ask("unregistered from the middle", "cuMemHostUnregister", &[locked + 4096]);
    w.ask("unregistered and unknown", "cuMemHostUnregister", &[w.pageable]);
    w.ask("capture of the legacy stream", "cuStreamBeginCapture_v2", &[0, GLOBAL]);
    w.ask("end of a capture that was not begun", "cuStreamEndCapture", &[other, w.out(0)]);
    let mut current = 0;
    for stream in [0, 1, 2, other] {
        current += i32::from(w.status(stream) != "status 0");
    }
    w.say("streams that capture while none does", current);
}

/// With two devices: what belongs to which.
fn devices(w: &mut World<'_>) {
    let Ok(context) = w.raw.made("cuDevicePrimaryCtxRetain", &[1]) else { return };
    let mine = w.recorded;
    w.ask("two devices, record in its own stream", "cuEventRecord", &[mine, w.other]);
    assert_eq!(w.raw.call("cuCtxPushCurrent_v2", &[context]), 0);
    let stream = w.raw.made("cuStreamCreateWithPriority", &[1, 0]).unwrap();
    let event = w.raw.made("cuEventCreate", &[3]).unwrap();
    let memory = w.raw.made("cuMemAlloc_v2", &[BYTES]).unwrap();
    w.ask("two devices, record in the other one's stream", "cuEventRecord", &[mine, stream]);
    w.ask("two devices, record in the current one's legacy stream", "cuEventRecord", &[mine, 0]);
    w.ask("two devices, wait of the host for the other one's event", "cuEventSynchronize", &[mine]);
    w.ask("two devices, query of it", "cuEventQuery", &[mine]);
    w.ask("two devices, wait for the other one's event", "cuStreamWaitEvent", &[stream, mine, 0]);
    w.ask("two devices, copy in the other one's stream", "cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, w.other]);
    w.ask("two devices, wait of the host for it", "cuStreamSynchronize", &[w.other]);
    w.ask("two devices, copy in from memory locked elsewhere", "cuMemcpyHtoDAsync_v2", &[memory, w.locked, 64, stream]);
    w.ask("two devices, to the other one's memory", "cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, stream]);
    w.ask("two devices, wait of the host", "cuStreamSynchronize", &[stream]);
    w.ask("two devices, free", "cuMemFree_v2", &[memory]);
    w.ask("two devices, destroy", "cuEventDestroy_v2", &[event]);
    assert_eq!(w.raw.call("cuCtxPopCurrent_v2", &[w.out(0)]), 0);
    assert_eq!(w.out.load(Ordering::Relaxed), context);
    let other = w.status(stream);
    w.say("two devices, capturing? of the other one's stream", other);
    w.ask("two devices, destroy the other one's stream", "cuStreamDestroy_v2", &[stream]);
    w.ask("two devices, release", "cuDevicePrimaryCtxRelease_v2", &[1]);
}

fn reset(w: &mut World<'_>) {
    let place = w.out(0);
    w.ask("reset", "cuDevicePrimaryCtxReset_v2", &[0]);
    w.ask("after a reset, query", "cuEventQuery", &[w.recorded]);
    w.ask("after a reset, wait of the host for the stream", "cuStreamSynchronize", &[w.other]);
    w.ask("after a reset, record", "cuEventRecord", &[w.recorded, w.other]);
    w.ask("after a reset, copy in", "cuMemcpyHtoDAsync_v2", &[w.device, w.pageable, 64, w.other]);
    w.ask("after a reset, alloc", "cuMemAlloc_v2", &[place, BYTES]);
    w.ask("after a reset, free", "cuMemFree_v2", &[w.device]);
    w.ask("after a reset, destroy the event", "cuEventDestroy_v2", &[w.never]);
    w.ask("after a reset, destroy the stream", "cuStreamDestroy_v2", &[w.blocking]);
    w.ask("after a reset, unregister", "cuMemHostUnregister", &[w.locked]);
    w.ask("after a reset, pop", "cuCtxPopCurrent_v2", &[place]);
    w.ask("after a reset, push", "cuCtxPushCurrent_v2", &[w.context]);
    w.ask("after a reset, pop", "cuCtxPopCurrent_v2", &[place]);
    let again = w.raw.made("cuDevicePrimaryCtxRetain", &[0]);
    w.say("after a reset, retain", again.map_or_else(|e| e, |_| 0));
    w.say("after a reset, the same context", again == Ok(w.context));
    if let Ok(again) = again {
        w.ask("retained again, push", "cuCtxPushCurrent_v2", &[again]);
        w.ask("retained again, query of the old event", "cuEventQuery", &[w.recorded]);
        w.ask("retained again, free of the old memory", "cuMemFree_v2", &[w.device]);
        w.ask("retained again, unregister", "cuMemHostUnregister", &[w.locked]);
        w.ask("retained again, register", "cuMemHostRegister_v2", &[w.locked, BYTES, 3]);
        w.ask("retained again, unregister", "cuMemHostUnregister", &[w.locked]);
        w.ask("retained again, pop", "cuCtxPopCurrent_v2", &[place]);
        w.ask("release", "cuDevicePrimaryCtxRelease_v2", &[0]);
        w.ask("release", "cuDevicePrimaryCtxRelease_v2", &[0]);
        w.ask("release once too often", "cuDevicePrimaryCtxRelease_v2", &[0]);
    }
}
