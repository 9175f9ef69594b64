//! A fake CUDA runtime for tests: the functions of `libcudart` that the crate calls, with driver-like rules, a log
//! of every call, errors on demand, and streams that move bytes only when a test says so.
//!
//! `tests/common/fake.rs` compiles this file into a shared library and copies it under the names that a test needs.
//! Each copy is an instance of its own: own log, own registrations, own last-error slots. The file depends on `std`
//! only. What it does not do: devices with different memories, graph capture, kernels.
//!
//! Rules it keeps, as the real runtime does:
//! - a failing call leaves its code in the calling thread's last-error slot; `cudaGetLastError` reads and clears
//!   it, `cudaPeekAtLastError` reads it;
//! - registering: zero bytes or null 1, overlap with a live range 712, a cap exceeded 2;
//! - unregistering: an unknown pointer 713, the middle of a range 1; it first lets every queued copy finish;
//! - a copy whose host side is registered is queued in its stream and reads its source when the stream runs; one
//!   whose host side is pageable moves at once; one that leaves a registration half-way answers 1;
//! - an event never recorded is complete, a pending one answers 600;
//! - after `cudaDeviceReset` old events and streams answer 709 and old registrations 713;
//! - once the process's exit hooks have run, every call answers 4.
#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_char, c_void, CStr};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::Duration;

/// What lies between a registered host address and its device address: so that code which assumes that the two are
/// equal is found out.
const DEVICE_OFFSET: usize = 0x4000_0000_0000;
/// `cudaHostRegisterMapped`.
const MAPPED: u32 = 0x2;

const CODES: &[(i32, &CStr, &CStr)] = &[
    (0, c"cudaSuccess", c"no error"),
    (1, c"cudaErrorInvalidValue", c"invalid argument"),
    (2, c"cudaErrorMemoryAllocation", c"out of memory"),
    (3, c"cudaErrorInitializationError", c"initialization error"),
    (4, c"cudaErrorCudartUnloading", c"driver shutting down"),
    (34, c"cudaErrorStubLibrary", c"CUDA driver is a stub library"),
    (35, c"cudaErrorInsufficientDriver", c"CUDA driver version is insufficient for CUDA runtime version"),
    (46, c"cudaErrorDevicesUnavailable", c"CUDA-capable device(s) is/are busy or unavailable"),
    (100, c"cudaErrorNoDevice", c"no CUDA-capable device is detected"),
    (101, c"cudaErrorInvalidDevice", c"invalid device ordinal"),
    (201, c"cudaErrorDeviceUninitialized", c"invalid device context"),
    (400, c"cudaErrorInvalidResourceHandle", c"invalid resource handle"),
    (600, c"cudaErrorNotReady", c"device not ready"),
    (700, c"cudaErrorIllegalAddress", c"an illegal memory access was encountered"),
    (709, c"cudaErrorContextIsDestroyed", c"context is destroyed"),
    (712, c"cudaErrorHostMemoryAlreadyRegistered", c"part or all of the requested memory range is already mapped"),
    (713, c"cudaErrorHostMemoryNotRegistered", c"pointer does not correspond to a registered memory region"),
    (803, c"cudaErrorSystemDriverMismatch", c"system has unsupported display driver / cuda driver combination"),
    (804, c"cudaErrorCompatNotSupportedOnDevice", c"forward compatibility was attempted on non supported HW"),
];

/// One line of the log, as the control functions hand it out. `code` is meaningful once `done` is 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawCall {
    pub sequence: u64,
    pub thread: u64,
    pub pid: u32,
    pub code: i32,
    pub args: [u64; 5],
    pub function: *const c_char,
    pub done: u8,
}
// SAFETY: `function` points at a C string that lives as long as the library.
unsafe impl Send for RawCall {}

struct Injection {
    function: String,
    /// Calls to let through before the one that fails; `None` = fail every call.
    after: Option<u64>,
    code: i32,
}

#[derive(Clone, Copy)]
enum Op {
    Copy { dst: usize, src: usize, n: usize },
    Record { event: usize, turn: u64 },
    Wait { event: usize, turn: u64 },
}

#[derive(Default)]
struct Event {
    stream: usize,
    recorded: u64,
    done: u64,
    epoch: u64,
}

#[derive(Default)]
struct Stream {
    ops: VecDeque<Op>,
    epoch: u64,
}

struct State {
    calls: Vec<RawCall>,
    injections: Vec<Injection>,
    sleeps: HashMap<String, u64>,
    cap_call: u64,
    cap_total: u64,
    runtime: i32,
    driver: i32,
    devices: i32,
    epoch: u64,
    next_handle: usize,
    registrations: BTreeMap<usize, (usize, u32)>,
    device_memory: BTreeMap<usize, Vec<u8>>,
    streams: BTreeMap<usize, Stream>,
    events: HashMap<usize, Event>,
    log_file: Option<std::path::PathBuf>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static EXITED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
    static DEVICE: Cell<i32> = const { Cell::new(0) };
    static CONTEXTS: Cell<u32> = const { Cell::new(0) };
}

extern "C" {
    fn atexit(hook: extern "C" fn()) -> i32;
    #[cfg(target_os = "linux")]
    fn gettid() -> i32;
    #[cfg(not(target_os = "linux"))]
    fn pthread_self() -> usize;
}

struct Locked(MutexGuard<'static, Option<State>>);
impl std::ops::Deref for Locked {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().unwrap()
    }
}
impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().unwrap()
    }
}

fn lock() -> Locked {
    let mut guard = STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    guard.get_or_insert_with(|| State {
        calls: Vec::new(),
        injections: Vec::new(),
        sleeps: HashMap::new(),
        cap_call: u64::MAX,
        cap_total: u64::MAX,
        runtime: 13000,
        driver: 13000,
        devices: 1,
        epoch: 0,
        next_handle: 0x1000,
        registrations: BTreeMap::new(),
        device_memory: BTreeMap::new(),
        streams: BTreeMap::new(),
        events: HashMap::new(),
        log_file: None,
    });
    Locked(guard)
}

extern "C" fn exit_hook() {
    EXITED.store(true, Ordering::SeqCst);
    write_line(&lock().log_file, "exit-hook");
}

fn write_line(file: &Option<std::path::PathBuf>, line: &str) {
    if let Some(path) = file {
        if let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = f.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Logs a call, applies what a test injected for it, runs `body`, and keeps the last-error slot.
fn call(function: &'static CStr, args: [u64; 5], body: impl FnOnce(&mut State) -> i32) -> i32 {
    static HOOK: Once = Once::new();
    // SAFETY: `exit_hook` is a function of this library, which the tests never close.
    HOOK.call_once(|| unsafe {
        atexit(exit_hook);
    });
    let name = function.to_str().unwrap();
    let (index, injected, sleep) = {
        let mut s = lock();
        let index = s.calls.len();
        s.calls.push(RawCall {
            sequence: index as u64,
            thread: fake_thread(),
            pid: std::process::id(),
            code: 0,
            args,
            function: function.as_ptr(),
            done: 0,
        });
        let mut injected = None;
        for injection in s.injections.iter_mut().filter(|i| i.function == name || i.function == "*") {
            match &mut injection.after {
                Some(0) if injected.is_none() => {
                    injected = Some(injection.code);
                    injection.function.clear();
                }
                None if injected.is_none() => injected = Some(injection.code),
                Some(left) if *left > 0 => *left -= 1,
                _ => {}
            }
        }
        s.injections.retain(|i| !i.function.is_empty());
        (index, injected, s.sleeps.get(name).copied().unwrap_or(0))
    };
    if sleep > 0 {
        std::thread::sleep(Duration::from_millis(sleep));
    }
    let mut s = lock();
    let code = if EXITED.load(Ordering::SeqCst) {
        4
    } else if let Some(code) = injected {
        code
    } else {
        body(&mut s)
    };
    s.calls[index].code = code;
    s.calls[index].done = 1;
    let line = format!("{index} pid={} thread={} {name} {args:x?} -> {code}", std::process::id(), fake_thread());
    write_line(&s.log_file, &line);
    drop(s);
    let reads_slot = matches!(name, "cudaGetLastError" | "cudaPeekAtLastError");
    if code != 0 && !reads_slot && name.starts_with("cuda") {
        LAST_ERROR.set(code);
    }
    code
}

impl State {
    fn handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle
    }

    /// The registration that holds `address`.
    fn registration(&self, address: usize) -> Option<(usize, usize, u32)> {
        let (&start, &(len, flags)) = self.registrations.range(..=address).next_back()?;
        (address < start + len).then_some((start, len, flags))
    }

    /// Handles 0, 1 and 2 are the default streams and always exist.
    fn stream(&mut self, stream: usize) -> Result<&mut Stream, i32> {
        let epoch = self.epoch;
        if stream <= 2 {
            return Ok(self.streams.entry(stream).or_default());
        }
        match self.streams.get_mut(&stream) {
            Some(s) if s.epoch == epoch => Ok(s),
            Some(_) => Err(709),
            None => Err(400),
        }
    }

    fn event(&mut self, event: usize) -> Result<&mut Event, i32> {
        let epoch = self.epoch;
        match self.events.get_mut(&event) {
            Some(e) if e.epoch == epoch => Ok(e),
            Some(_) => Err(709),
            None => Err(400),
        }
    }

    /// Runs a stream in order, to its end or just past the record `until`. At a wait for an event that is still
    /// pending it stops, or, with `force`, first runs the stream which that event was recorded in.
    fn run(&mut self, stream: usize, force: bool, until: Option<(usize, u64)>) -> u64 {
        let mut ran = 0;
        while let Some(&op) = self.streams.get(&stream).and_then(|s| s.ops.front()) {
            match op {
                // SAFETY: the contract of cudaMemcpyAsync: both ranges stay valid until the stream has run this
                // copy. `copy` and not `copy_nonoverlapping`, since a test may well pass the same buffer.
                Op::Copy { dst, src, n } => unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, n) },
                Op::Record { event, turn } => {
                    if let Some(e) = self.events.get_mut(&event) {
                        e.done = e.done.max(turn);
                    }
                }
                Op::Wait { event, turn } => {
                    let pending = self.events.get(&event).filter(|e| e.done < turn).map(|e| e.stream);
                    match pending {
                        Some(other) if force && other != stream => {
                            self.run(other, true, Some((event, turn)));
                        }
                        Some(_) => break,
                        None => {}
                    }
                }
            }
            if let Some(s) = self.streams.get_mut(&stream) {
                s.ops.pop_front();
            }
            ran += 1;
            if matches!(op, Op::Record { event, turn } if until == Some((event, turn))) {
                break;
            }
        }
        ran
    }

    fn run_all(&mut self) {
        for stream in self.streams.keys().copied().collect::<Vec<_>>() {
            self.run(stream, true, None);
        }
    }

    fn register(&mut self, start: usize, len: usize, flags: u32) -> i32 {
        if start == 0 || len == 0 || flags & !0xf != 0 {
            return 1;
        }
        let Some(end) = start.checked_add(len) else { return 1 };
        let before = self.registrations.range(..end).next_back();
        if before.is_some_and(|(&other, &(n, _))| other + n > start) {
            return 712;
        }
        let total: u64 = self.registrations.values().map(|r| r.0 as u64).sum();
        if len as u64 > self.cap_call || total + len as u64 > self.cap_total {
            return 2;
        }
        self.registrations.insert(start, (len, flags));
        0
    }

    fn unregister(&mut self, start: usize) -> i32 {
        self.run_all();
        if self.registrations.remove(&start).is_some() {
            0
        } else if self.registration(start).is_some() {
            1
        } else {
            713
        }
    }

    /// Queues or does one copy. `kind`: 1 host to device, 2 device to host, 3 device to device.
    fn copy(&mut self, dst: usize, src: usize, n: usize, kind: i32, stream: usize) -> i32 {
        if let Err(code) = self.stream(stream) {
            return code;
        }
        let host = match kind {
            1 => src,
            2 => dst,
            3 => 0,
            _ => return 1,
        };
        if n == 0 {
            return 0;
        }
        if dst == 0 || src == 0 {
            return 1;
        }
        let queued = match self.registration(host) {
            Some((start, len, _)) if host + n > start + len => return 1,
            Some(_) => true,
            None => kind == 3,
        };
        let copy = Op::Copy { dst, src, n };
        match self.stream(stream) {
            Ok(s) => s.ops.push_back(copy),
            Err(code) => return code,
        }
        if !queued {
            self.run(stream, true, None);
        }
        0
    }
}

unsafe fn write<T>(out: *mut T, value: T) -> i32 {
    if out.is_null() {
        return 1;
    }
    // SAFETY: the caller's out-pointer, checked for null above.
    unsafe { out.write(value) };
    0
}

fn name_of(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|c| c.0 == code).map(|c| c.1)
}

fn text_of(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|c| c.0 == code).map(|c| c.2)
}

// ---- the runtime: versions, devices, errors --------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaRuntimeGetVersion(out: *mut i32) -> i32 {
    call(c"cudaRuntimeGetVersion", [out as u64, 0, 0, 0, 0], |s| write(out, s.runtime))
}

#[no_mangle]
pub unsafe extern "C" fn cudaDriverGetVersion(out: *mut i32) -> i32 {
    call(c"cudaDriverGetVersion", [out as u64, 0, 0, 0, 0], |s| write(out, s.driver))
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetDeviceCount(out: *mut i32) -> i32 {
    call(c"cudaGetDeviceCount", [out as u64, 0, 0, 0, 0], |s| write(out, s.devices))
}

#[no_mangle]
pub unsafe extern "C" fn cudaSetDevice(device: i32) -> i32 {
    call(c"cudaSetDevice", [device as u64, 0, 0, 0, 0], |s| {
        if device < 0 || device >= s.devices {
            return 101;
        }
        DEVICE.set(device);
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetDevice(out: *mut i32) -> i32 {
    call(c"cudaGetDevice", [out as u64, 0, 0, 0, 0], |_| write(out, DEVICE.get()))
}

#[no_mangle]
pub unsafe extern "C" fn cudaDeviceSynchronize() -> i32 {
    call(c"cudaDeviceSynchronize", [0; 5], |s| {
        s.run_all();
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaDeviceReset() -> i32 {
    call(c"cudaDeviceReset", [0; 5], |s| {
        s.run_all();
        s.registrations.clear();
        s.device_memory.clear();
        s.epoch += 1;
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetLastError() -> i32 {
    call(c"cudaGetLastError", [0; 5], |_| LAST_ERROR.replace(0))
}

#[no_mangle]
pub unsafe extern "C" fn cudaPeekAtLastError() -> i32 {
    call(c"cudaPeekAtLastError", [0; 5], |_| LAST_ERROR.get())
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetErrorName(code: i32) -> *const c_char {
    name_of(code).unwrap_or(c"unrecognized error code").as_ptr()
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetErrorString(code: i32) -> *const c_char {
    text_of(code).unwrap_or(c"unrecognized error code").as_ptr()
}

// ---- the runtime: memory ---------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, n: usize) -> i32 {
    call(c"cudaMalloc", [out as u64, n as u64, 0, 0, 0], |s| {
        let mut memory = vec![0xCD_u8; n];
        let address = memory.as_mut_ptr();
        s.device_memory.insert(address as usize, memory);
        write(out, address.cast())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaFree(pointer: *mut c_void) -> i32 {
    call(c"cudaFree", [pointer as u64, 0, 0, 0, 0], |s| {
        if pointer.is_null() {
            return 0;
        }
        s.run_all();
        i32::from(s.device_memory.remove(&(pointer as usize)).is_none())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostRegister(pointer: *mut c_void, n: usize, flags: u32) -> i32 {
    call(c"cudaHostRegister", [pointer as u64, n as u64, flags as u64, 0, 0], |s| {
        s.register(pointer as usize, n, flags)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostUnregister(pointer: *mut c_void) -> i32 {
    call(c"cudaHostUnregister", [pointer as u64, 0, 0, 0, 0], |s| s.unregister(pointer as usize))
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostGetFlags(out: *mut u32, pointer: *mut c_void) -> i32 {
    call(c"cudaHostGetFlags", [out as u64, pointer as u64, 0, 0, 0], |s| match s.registration(pointer as usize) {
        Some((_, _, flags)) => write(out, flags),
        None => 1,
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostGetDevicePointer(out: *mut *mut c_void, pointer: *mut c_void, flags: u32) -> i32 {
    call(c"cudaHostGetDevicePointer", [out as u64, pointer as u64, flags as u64, 0, 0], |s| {
        match s.registration(pointer as usize) {
            Some((_, _, f)) if f & MAPPED != 0 && flags == 0 => {
                write(out, (pointer as usize + DEVICE_OFFSET) as *mut c_void)
            }
            _ => 1,
        }
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaMemcpyAsync(
    dst: *mut c_void,
    src: *const c_void,
    n: usize,
    kind: i32,
    stream: usize,
) -> i32 {
    call(c"cudaMemcpyAsync", [dst as u64, src as u64, n as u64, kind as u64, stream as u64], |s| {
        s.copy(dst as usize, src as usize, n, kind, stream)
    })
}

// ---- the runtime: streams and events ---------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaStreamCreateWithFlags(out: *mut usize, flags: u32) -> i32 {
    call(c"cudaStreamCreateWithFlags", [out as u64, flags as u64, 0, 0, 0], |s| {
        let handle = s.handle();
        let epoch = s.epoch;
        s.streams.insert(handle, Stream { ops: VecDeque::new(), epoch });
        write(out, handle)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamDestroy(stream: usize) -> i32 {
    call(c"cudaStreamDestroy", [stream as u64, 0, 0, 0, 0], |s| {
        if stream <= 2 {
            return 400;
        }
        if let Err(code) = s.stream(stream) {
            return code;
        }
        s.run(stream, true, None);
        s.streams.remove(&stream);
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamSynchronize(stream: usize) -> i32 {
    call(c"cudaStreamSynchronize", [stream as u64, 0, 0, 0, 0], |s| {
        if let Err(code) = s.stream(stream) {
            return code;
        }
        s.run(stream, true, None);
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamQuery(stream: usize) -> i32 {
    call(c"cudaStreamQuery", [stream as u64, 0, 0, 0, 0], |s| match s.stream(stream) {
        Ok(s) if s.ops.is_empty() => 0,
        Ok(_) => 600,
        Err(code) => code,
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32 {
    call(c"cudaStreamWaitEvent", [stream as u64, event as u64, flags as u64, 0, 0], |s| {
        let turn = match s.event(event) {
            Ok(e) => e.recorded,
            Err(code) => return code,
        };
        match s.stream(stream) {
            Ok(s) => s.ops.push_back(Op::Wait { event, turn }),
            Err(code) => return code,
        }
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventCreateWithFlags(out: *mut usize, flags: u32) -> i32 {
    call(c"cudaEventCreateWithFlags", [out as u64, flags as u64, 0, 0, 0], |s| {
        let handle = s.handle();
        let epoch = s.epoch;
        s.events.insert(handle, Event { epoch, ..Event::default() });
        write(out, handle)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventRecord(event: usize, stream: usize) -> i32 {
    call(c"cudaEventRecord", [event as u64, stream as u64, 0, 0, 0], |s| {
        if let Err(code) = s.stream(stream) {
            return code;
        }
        let turn = match s.event(event) {
            Ok(e) => {
                e.stream = stream;
                e.recorded += 1;
                e.recorded
            }
            Err(code) => return code,
        };
        match s.stream(stream) {
            Ok(s) => s.ops.push_back(Op::Record { event, turn }),
            Err(code) => return code,
        }
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventQuery(event: usize) -> i32 {
    call(c"cudaEventQuery", [event as u64, 0, 0, 0, 0], |s| match s.event(event) {
        Ok(e) if e.done >= e.recorded => 0,
        Ok(_) => 600,
        Err(code) => code,
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventSynchronize(event: usize) -> i32 {
    call(c"cudaEventSynchronize", [event as u64, 0, 0, 0, 0], |s| {
        let (stream, turn, pending) = match s.event(event) {
            Ok(e) => (e.stream, e.recorded, e.done < e.recorded),
            Err(code) => return code,
        };
        if pending {
            s.run(stream, true, Some((event, turn)));
        }
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventDestroy(event: usize) -> i32 {
    call(c"cudaEventDestroy", [event as u64, 0, 0, 0, 0], |s| {
        if let Err(code) = s.event(event) {
            return code;
        }
        s.events.remove(&event);
        0
    })
}

// ---- the driver: what page-locking on a host without a runtime needs ---------------------------------------------

/// The driver answers 201 to a call that needs a context on a thread that has none.
fn in_context(body: impl FnOnce() -> i32) -> i32 {
    if CONTEXTS.get() == 0 {
        return 201;
    }
    body()
}

#[no_mangle]
pub unsafe extern "C" fn cuInit(flags: u32) -> i32 {
    call(c"cuInit", [flags as u64, 0, 0, 0, 0], |_| 0)
}

#[no_mangle]
pub unsafe extern "C" fn cuDriverGetVersion(out: *mut i32) -> i32 {
    call(c"cuDriverGetVersion", [out as u64, 0, 0, 0, 0], |s| write(out, s.driver))
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGet(out: *mut i32, ordinal: i32) -> i32 {
    call(c"cuDeviceGet", [out as u64, ordinal as u64, 0, 0, 0], |s| match ordinal {
        o if o >= 0 && o < s.devices => write(out, o),
        _ => 101,
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut usize, device: i32) -> i32 {
    call(c"cuDevicePrimaryCtxRetain", [out as u64, device as u64, 0, 0, 0], |_| write(out, 0xC0DE + device as usize))
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: usize) -> i32 {
    call(c"cuCtxPushCurrent_v2", [context as u64, 0, 0, 0, 0], |_| {
        CONTEXTS.set(CONTEXTS.get() + 1);
        0
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut usize) -> i32 {
    call(c"cuCtxPopCurrent_v2", [out as u64, 0, 0, 0, 0], |_| {
        in_context(|| {
            CONTEXTS.set(CONTEXTS.get() - 1);
            write(out, 0xC0DE)
        })
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, n: usize, flags: u32) -> i32 {
    call(c"cuMemHostRegister_v2", [pointer as u64, n as u64, flags as u64, 0, 0], |s| {
        in_context(|| s.register(pointer as usize, n, flags))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> i32 {
    call(c"cuMemHostUnregister", [pointer as u64, 0, 0, 0, 0], |s| in_context(|| s.unregister(pointer as usize)))
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostGetFlags(out: *mut u32, pointer: *mut c_void) -> i32 {
    call(c"cuMemHostGetFlags", [out as u64, pointer as u64, 0, 0, 0], |s| {
        in_context(|| match s.registration(pointer as usize) {
            Some((_, _, flags)) => write(out, flags),
            None => 1,
        })
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(out: *mut u64, pointer: *mut c_void, flags: u32) -> i32 {
    call(c"cuMemHostGetDevicePointer_v2", [out as u64, pointer as u64, flags as u64, 0, 0], |s| {
        in_context(|| match s.registration(pointer as usize) {
            Some((_, _, f)) if f & MAPPED != 0 && flags == 0 => write(out, (pointer as usize + DEVICE_OFFSET) as u64),
            _ => 1,
        })
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuGetErrorName(code: i32, out: *mut *const c_char) -> i32 {
    name_of(code).map_or(1, |name| write(out, name.as_ptr()))
}

#[no_mangle]
pub unsafe extern "C" fn cuGetErrorString(code: i32, out: *mut *const c_char) -> i32 {
    text_of(code).map_or(1, |text| write(out, text.as_ptr()))
}

// ---- control: for the tests only, never logged -----------------------------------------------------------------

unsafe fn text(pointer: *const c_char) -> String {
    // SAFETY: `tests/common/fake.rs` passes C strings.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The `nth` call of `function` from now on (1 = the next) returns `code` and does nothing; 0 = every call from now
/// on. The function `*` means any of them.
#[no_mangle]
pub unsafe extern "C" fn fake_inject(function: *const c_char, nth: u64, code: i32) {
    let function = unsafe { text(function) };
    lock().injections.push(Injection { function, after: nth.checked_sub(1), code });
}

/// Takes back every injection, sleep and cap.
#[no_mangle]
pub extern "C" fn fake_clear_faults() {
    let mut s = lock();
    s.injections.clear();
    s.sleeps.clear();
    s.cap_call = u64::MAX;
    s.cap_total = u64::MAX;
}

#[no_mangle]
pub unsafe extern "C" fn fake_sleep(function: *const c_char, ms: u64) {
    let function = unsafe { text(function) };
    lock().sleeps.insert(function, ms);
}

#[no_mangle]
pub extern "C" fn fake_cap(bytes_per_call: u64, bytes_in_total: u64) {
    let mut s = lock();
    s.cap_call = bytes_per_call;
    s.cap_total = bytes_in_total;
}

#[no_mangle]
pub extern "C" fn fake_versions(runtime: i32, driver: i32) {
    let mut s = lock();
    s.runtime = runtime;
    s.driver = driver;
}

#[no_mangle]
pub extern "C" fn fake_devices(count: i32) {
    lock().devices = count;
}

/// Runs what is queued in `stream`; returns how many operations ran. It stops at a wait for a pending event.
#[no_mangle]
pub extern "C" fn fake_run(stream: usize) -> u64 {
    lock().run(stream, false, None)
}

#[no_mangle]
pub extern "C" fn fake_call_count() -> u64 {
    lock().calls.len() as u64
}

#[no_mangle]
pub unsafe extern "C" fn fake_call(index: u64, out: *mut RawCall) -> i32 {
    match lock().calls.get(index as usize) {
        // SAFETY: the caller's out-pointer.
        Some(&call) => unsafe { write(out, call) },
        None => 1,
    }
}

/// Writes up to `room` live registrations (start, bytes, flags) to `out`; returns how many there are.
#[no_mangle]
pub unsafe extern "C" fn fake_registrations(out: *mut [u64; 3], room: usize) -> usize {
    let s = lock();
    for (i, (&start, &(len, flags))) in s.registrations.iter().take(room).enumerate() {
        // SAFETY: i < room, the size that the caller gave.
        unsafe { out.add(i).write([start as u64, len as u64, flags as u64]) };
    }
    s.registrations.len()
}

/// The calling thread's last-error slot, read without a log line.
#[no_mangle]
pub extern "C" fn fake_last_error() -> i32 {
    LAST_ERROR.get()
}

/// Puts a code into the calling thread's last-error slot, as some other code's failed call would have.
#[no_mangle]
pub extern "C" fn fake_set_last_error(code: i32) {
    LAST_ERROR.set(code);
}

/// How many driver contexts the calling thread has pushed and not popped.
#[no_mangle]
pub extern "C" fn fake_contexts() -> u32 {
    CONTEXTS.get()
}

/// From now on one line per call goes to this file too, and `exit-hook` when the process ends.
#[no_mangle]
pub unsafe extern "C" fn fake_log_file(path: *const c_char) {
    let path = unsafe { text(path) };
    lock().log_file = Some(path.into());
}

/// The id under which the calling thread appears in the log.
#[no_mangle]
pub extern "C" fn fake_thread() -> u64 {
    // SAFETY: no arguments, no memory.
    #[cfg(target_os = "linux")]
    return unsafe { gettid() } as u64;
    // SAFETY: no arguments, no memory.
    #[cfg(not(target_os = "linux"))]
    return unsafe { pthread_self() } as u64;
}
