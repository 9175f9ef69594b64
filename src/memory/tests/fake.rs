//! CUDA as a table of Rust functions over one static state: driver-like rules for registrations, a log, faults on
//! demand.
//!
//! The state belongs to the process, so every test that uses it runs in a process of its own (`alone`).

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::cuda::Cuda;
use crate::cuda::table::PinTable;

/// How far device addresses are from host addresses, so that nobody gets away with assuming that they are equal. Where
/// addresses have 32 bits there is room for little.
pub(super) const DEVICE_OFFSET: u64 = 1 << (usize::BITS - 18);

/// One call that reached CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Call {
    Register { start: usize, bytes: usize, flags: u32 },
    Unregister { start: usize },
    HostFlags { byte: usize },
    DevicePointer { start: usize },
}

#[derive(Default)]
pub(super) struct State {
    pub(super) calls: Vec<Call>,
    /// What is registered. A test that pushes a range here plays another owner.
    pub(super) live: Vec<Range<usize>>,
    /// The calls, counted from 1 since the last `clear_log`, which fail, and with what.
    pub(super) fail: Vec<(usize, i32)>,
    /// What every call of `Register`, or of `Unregister`, answers.
    pub(super) fail_register: Option<i32>,
    pub(super) fail_unregister: Option<i32>,
    pub(super) cap_per_call: Option<usize>,
    pub(super) cap_total: Option<usize>,
    /// `Register` waits until this is false.
    pub(super) hold_register: bool,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// Changes or reads the state.
pub(super) fn with<R>(f: impl FnOnce(&mut State) -> R) -> R {
    let mut state: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    CHANGED.notify_all();
    f(state.get_or_insert_default())
}

fn wait_while_held() {
    let state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let held = |state: &mut Option<State>| state.get_or_insert_default().hold_register;
    drop(CHANGED.wait_while(state, held).unwrap_or_else(PoisonError::into_inner));
}

pub(super) fn last_error() -> i32 {
    LAST_ERROR.get()
}

/// The calls since the last time; the count for `fail` begins anew.
pub(super) fn take_calls() -> Vec<Call> {
    with(|state| std::mem::take(&mut state.calls))
}

pub(super) fn cuda() -> Cuda {
    let table = PinTable {
        cudaFree: init,
        cudaHostRegister: register,
        cudaHostUnregister: unregister,
        cudaHostGetFlags: host_flags,
        cudaHostGetDevicePointer: device_pointer,
        cudaRuntimeGetVersion: version,
        cudaDriverGetVersion: version,
        cudaGetErrorName: name,
        cudaGetErrorString: name,
        cudaGetLastError: get_last_error,
        cudaPeekAtLastError: peek_at_last_error,
        cudaThreadExchangeStreamCaptureMode: exchange_capture_mode,
    };
    Cuda::from_table(table, "fake")
}

/// Logs `call` and answers what was asked for it, else what `rule` says.
fn answer(call: Call, fault: impl FnOnce(&State) -> Option<i32>, rule: impl FnOnce(&mut State) -> i32) -> i32 {
    let code = with(|state| {
        state.calls.push(call);
        let number = state.calls.len();
        let one = state.fail.iter().find(|(at, _)| *at == number).map(|(_, code)| *code);
        one.or_else(|| fault(state)).unwrap_or_else(|| rule(state))
    });
    if code != 0 {
        LAST_ERROR.set(code);
    }
    code
}

unsafe extern "C" fn register(start: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    wait_while_held();
    let start = start.addr();
    answer(
        Call::Register { start, bytes, flags },
        |state| state.fail_register,
        |state| {
            let asked = start..start + bytes;
            let total: usize = state.live.iter().map(Range::len).sum();
            if bytes == 0 {
                1
            } else if state.live.iter().any(|live| live.start < asked.end && asked.start < live.end) {
                712
            } else if state.cap_per_call.is_some_and(|cap| bytes > cap)
                || state.cap_total.is_some_and(|cap| total + bytes > cap)
            {
                2
            } else {
                state.live.push(asked);
                0
            }
        },
    )
}

unsafe extern "C" fn unregister(start: *mut c_void) -> c_int {
    // SAFETY: not a fact but the question: memory that was unmapped before it was unregistered faults here.
    unsafe { start.cast::<u8>().read_volatile() };
    let start = start.addr();
    answer(
        Call::Unregister { start },
        |state| state.fail_unregister,
        |state| match state.live.iter().position(|live| live.start == start) {
            Some(at) => {
                state.live.remove(at);
                0
            }
            None if state.live.iter().any(|live| live.contains(&start)) => 1,
            None => 713,
        },
    )
}

unsafe extern "C" fn host_flags(flags: *mut c_uint, byte: *mut c_void) -> c_int {
    let byte = byte.addr();
    let known = |state: &mut State| state.live.iter().any(|live| live.contains(&byte));
    let code = answer(Call::HostFlags { byte }, |_| None, |state| if known(state) { 0 } else { 1 });
    if code == 0 {
        // SAFETY: the out-pointer of the call.
        unsafe { flags.write(3) };
    }
    code
}

unsafe extern "C" fn device_pointer(address: *mut *mut c_void, start: *mut c_void, _flags: c_uint) -> c_int {
    let start = start.addr();
    let known = |state: &mut State| state.live.iter().any(|live| live.contains(&start));
    let code = answer(Call::DevicePointer { start }, |_| None, |state| if known(state) { 0 } else { 1 });
    if code == 0 {
        // SAFETY: the out-pointer of the call.
        unsafe { address.write(std::ptr::without_provenance_mut(start + DEVICE_OFFSET as usize)) };
    }
    code
}

unsafe extern "C" fn get_last_error() -> c_int {
    LAST_ERROR.replace(0)
}

/// Not in the log: nothing of a ring depends on it.
unsafe extern "C" fn exchange_capture_mode(_: *mut c_uint) -> c_int {
    0
}

unsafe extern "C" fn peek_at_last_error() -> c_int {
    LAST_ERROR.get()
}

unsafe extern "C" fn init(_: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn version(version: *mut c_int) -> c_int {
    // SAFETY: the out-pointer of the call.
    unsafe { version.write(13_000) };
    0
}

unsafe extern "C" fn name(_: c_int) -> *const c_char {
    c"cudaErrorFake".as_ptr()
}
