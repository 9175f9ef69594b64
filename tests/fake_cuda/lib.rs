//! A fake CUDA for tests: the functions of `libcudart` and of `libcuda` that the crate calls, on one state, with
//! driver-like rules, a log of every call, errors on demand, and streams that move bytes only when a test says so.
//!
//! `tests/common/fake.rs` compiles this folder into a shared library and copies it under the names that a test needs.
//! Each copy is an instance of its own: own log, own devices, own registrations, own last-error slots. It depends on
//! `std` only, and on the walk of the gather kernel that the crate has beside it. What it does not do: other kernels,
//! graphs that can be launched, peer access, ordering with the legacy default stream.
//!
//! Here are the state, the log and how a call is made; `codes` has names and texts, `contexts` devices and who is
//! current where, `memory` registrations, device memory and copies, `streams` queues, events and how they run,
//! `capture` graph capture; `runtime` and `driver` export CUDA's functions, `control` those that only tests call.
//!
//! Rules it keeps, as the real libraries do:
//! - a failing call of the runtime leaves its code in the calling thread's last-error slot; `cudaGetLastError` reads
//!   and clears it, `cudaPeekAtLastError` reads it; the driver has no such slot;
//! - the driver answers 201 on a thread that has no current context, the runtime makes one current;
//! - registering: zero bytes or null 1, overlap with a live range 712, a cap exceeded 2;
//! - unregistering: an unknown pointer 713, the middle of a range 1; it first waits for every queued copy;
//! - a copy whose host side is registered is queued in its stream and reads its source when the stream runs; the
//!   bytes of a pageable source are taken at the call; one that leaves a registration or an allocation half-way, or
//!   whose device side is no device memory, answers 1;
//! - an event never recorded is complete, a pending one answers 600; recording in a stream of another device 400;
//! - freeing device memory first waits for the work of its device;
//! - after `cudaDeviceReset` old events and streams answer 709 and old registrations 713;
//! - while a capture in global mode is open, queries, synchronisation, registration, allocation and freeing answer
//!   900 on every thread that is not in relaxed mode, and the capture is lost; a wait of a capturing stream for an
//!   outside event 905, a query of a captured event 907, work in the legacy default stream 906, and it is lost too;
//! - a module is PTX that has the kernel; the gather kernel runs with its stream, by the host walk of its indices, and a
//!   launch that touches what is no device memory and no mapped registration, or at the wrong alignment, poisons the
//!   context with 700;
//! - once the process's exit hooks have run, every call answers 4.
#![allow(non_snake_case, clippy::missing_safety_doc)]

mod capture;
mod codes;
mod contexts;
mod control;
mod driver;
mod emulate;
mod kernels;
mod launch;
mod memory;
mod runtime;
mod streams;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, CStr};
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once};
use std::time::Duration;

/// What CUDA's functions return: `Err` holds the code.
type Answer = Result<(), i32>;
/// The answer of a call that cannot end yet: it is made again once something has changed.
const WAIT: i32 = i32::MIN;

/// One line of the log, as the control functions hand it out. `code` is meaningful once `done` is 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawCall {
    sequence: u64,
    thread: u64,
    pid: u32,
    code: i32,
    args: [u64; 5],
    function: *const c_char,
    /// The device whose context was current on the calling thread; -1 for none.
    device: i32,
    done: u8,
}
// SAFETY: `function` points at a C string that lives as long as the library.
unsafe impl Send for RawCall {}

struct Injection {
    function: String,
    /// Calls to let through before the one that fails; `None` = fail every call.
    after: Option<u64>,
    code: i32,
}

/// An error that stays, as that of a kernel which touched an illegal address.
struct Poison {
    /// Calls to let through before it begins.
    after: u64,
    code: i32,
}

/// What a call meets instead of an error of its own.
struct Trap {
    /// As of an [`Injection`].
    function: String,
    after: u64,
    kind: TrapKind,
}

#[derive(Clone, Copy)]
enum TrapKind {
    /// The call does not return before a test takes the faults back.
    Hang,
    /// The context of device 0 is destroyed just before it.
    Reset,
    /// From it on an error stays.
    Poison(i32),
}

#[derive(Default)]
struct State {
    calls: Vec<RawCall>,
    injections: Vec<Injection>,
    traps: Vec<Trap>,
    /// Calls are not kept.
    quiet: bool,
    /// The call that hangs.
    hung: Option<usize>,
    poison: Option<Poison>,
    sleeps: HashMap<String, u64>,
    log_file: Option<PathBuf>,
    runtime: i32,
    driver: i32,
    next_handle: usize,
    devices: Vec<contexts::Device>,
    memory: memory::Memory,
    streams: BTreeMap<usize, streams::Stream>,
    events: BTreeMap<usize, streams::Event>,
    captures: BTreeMap<u64, capture::Capture>,
    /// The PTX of each module.
    modules: BTreeMap<usize, String>,
    /// Whether work completes by itself, so long after it was queued.
    auto: Option<Duration>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Notified whenever something may have changed for a call that waits.
static CHANGED: Condvar = Condvar::new();
static EXITED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
}

extern "C" {
    fn atexit(hook: extern "C" fn()) -> i32;
    #[cfg(target_os = "linux")]
    fn gettid() -> i32;
    #[cfg(not(target_os = "linux"))]
    fn pthread_self() -> usize;
}

/// The id under which the calling thread appears in the log.
fn thread_id() -> u64 {
    // SAFETY: no arguments, no memory.
    #[cfg(target_os = "linux")]
    return unsafe { gettid() } as u64;
    // SAFETY: no arguments, no memory.
    #[cfg(not(target_os = "linux"))]
    return unsafe { pthread_self() } as u64;
}

struct Locked(MutexGuard<'static, Option<State>>);

impl Deref for Locked {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().unwrap()
    }
}

impl Locked {
    /// Waits until something changed, at most so long.
    fn wait(self, limit: Duration) -> Locked {
        Locked(CHANGED.wait_timeout(self.0, limit).unwrap_or_else(|poisoned| poisoned.into_inner()).0)
    }
}

fn lock() -> Locked {
    let mut guard = STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    guard.get_or_insert_with(|| {
        let mut state = State { runtime: 13000, driver: 13000, next_handle: 0x1000, ..State::default() };
        state.set_devices(1);
        state
    });
    Locked(guard)
}

extern "C" fn exit_hook() {
    EXITED.store(true, Ordering::SeqCst);
    // In a forked child the lock may be held by a thread that is not there.
    for _ in 0..1000 {
        if let Ok(guard) = STATE.try_lock() {
            if let Some(state) = &*guard {
                write_line(&state.log_file, "exit-hook");
            }
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_line(file: &Option<PathBuf>, line: &str) {
    if let Some(path) = file {
        if let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = f.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Logs a call, applies what a test injected for it, runs `body` until it can end, and keeps the last-error slot.
fn call(function: &'static CStr, args: [u64; 5], mut body: impl FnMut(&mut State) -> Answer) -> i32 {
    static HOOK: Once = Once::new();
    // SAFETY: `exit_hook` is a function of this library, which the tests never close.
    HOOK.call_once(|| unsafe {
        atexit(exit_hook);
    });
    let name = function.to_str().unwrap();
    let (index, injected, sleep) = {
        let mut s = lock();
        let index = s.calls.len();
        let call = RawCall {
            sequence: index as u64,
            thread: thread_id(),
            pid: std::process::id(),
            code: 0,
            args,
            function: function.as_ptr(),
            device: contexts::current().map_or(-1, contexts::device_of),
            done: 0,
        };
        if !s.quiet {
            s.calls.push(call);
        }
        s.spring(name, index);
        (index, s.injected(name), s.sleeps.get(name).copied().unwrap_or(0))
    };
    let mut s = lock();
    while s.hung == Some(index) {
        s = s.wait(Duration::from_millis(100));
    }
    drop(s);
    if sleep > 0 {
        std::thread::sleep(Duration::from_millis(sleep));
    }
    let mut s = lock();
    let code = loop {
        let code = if EXITED.load(Ordering::SeqCst) {
            4
        } else if let Some(code) = injected {
            code
        } else if let Some(code) = s.poisoned().filter(|_| codes::needs_context(name)) {
            code
        } else {
            body(&mut s).err().unwrap_or(0)
        };
        if code != WAIT {
            break code;
        }
        s = s.wait(Duration::from_millis(100));
    };
    if let Some(call) = s.calls.get_mut(index) {
        (call.code, call.done) = (code, 1);
    }
    let line = format!("{index} pid={} thread={} {name} {args:x?} -> {code}", std::process::id(), thread_id());
    write_line(&s.log_file, &line);
    drop(s);
    CHANGED.notify_all();
    let reads_slot = matches!(name, "cudaGetLastError" | "cudaPeekAtLastError");
    if code != 0 && !reads_slot && name.starts_with("cuda") {
        LAST_ERROR.set(code);
    }
    code
}

impl State {
    /// Counts a call of `name` against the injections; the code that it must return.
    fn injected(&mut self, name: &str) -> Option<i32> {
        if let Some(poison) = &mut self.poison {
            poison.after = poison.after.saturating_sub(1);
        }
        let mut injected = None;
        for injection in self.injections.iter_mut().filter(|i| i.function == name || i.function == "*") {
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
        self.injections.retain(|i| !i.function.is_empty());
        injected
    }

    /// Springs the traps that call `index`, of `name`, has come to.
    fn spring(&mut self, name: &str, index: usize) {
        let mut sprung = None;
        self.traps.retain_mut(|trap| {
            if trap.function != name && trap.function != "*" {
                return true;
            }
            let stays = trap.after > 0;
            trap.after = trap.after.saturating_sub(1);
            sprung = if stays { sprung } else { Some(trap.kind) };
            stays
        });
        match sprung {
            None => {}
            Some(TrapKind::Hang) => self.hung = Some(index),
            Some(TrapKind::Reset) => self.destroy_context(0),
            Some(TrapKind::Poison(code)) => self.poison = Some(Poison { after: 0, code }),
        }
    }

    /// The error that stays, once it has begun.
    fn poisoned(&self) -> Option<i32> {
        self.poison.as_ref().filter(|poison| poison.after == 0).map(|poison| poison.code)
    }

    fn handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle
    }
}

/// Writes an answer through an out-pointer.
fn write<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(1);
    }
    // SAFETY: the caller's out-pointer, checked for null above.
    unsafe { out.write(value) };
    Ok(())
}

/// As the log has arguments: integers, five of them.
macro_rules! args {
    ($($arg:expr),*) => {{
        let given: &[u64] = &[$($arg as u64),*];
        let mut args = [0; 5];
        args[..given.len()].copy_from_slice(given);
        args
    }};
}
use args;
