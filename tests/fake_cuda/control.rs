//! What only tests call: never logged, never failing. `tests/common/fake.rs` has them typed and described.

use crate::memory::Memory;
use crate::streams::How;
use crate::{capture, contexts, lock, thread_id, Injection, Poison, RawCall, State, Trap, TrapKind, CHANGED, LAST_ERROR};
use std::ffi::{c_char, CStr};
use std::time::Duration;

unsafe fn text(pointer: *const c_char) -> String {
    // SAFETY: `tests/common/fake.rs` passes C strings.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Changes the state, and wakes who waits for a change.
fn change<R>(how: impl FnOnce(&mut State) -> R) -> R {
    let result = how(&mut lock());
    CHANGED.notify_all();
    result
}

/// Writes up to `room` rows to `out`; returns how many there are.
unsafe fn rows<const N: usize>(out: *mut [u64; N], room: usize, rows: impl Iterator<Item = [u64; N]>) -> usize {
    let mut count = 0;
    for row in rows {
        if count < room {
            // SAFETY: count < room, the size that the caller gave.
            unsafe { out.add(count).write(row) };
        }
        count += 1;
    }
    count
}

// ---- faults --------------------------------------------------------------------------------------------------------

/// The `nth` call of `function` from now on (1 = the next) returns `code` and does nothing; 0 = every call from now
/// on. The function `*` means any of them.
#[no_mangle]
pub unsafe extern "C" fn fake_inject(function: *const c_char, nth: u64, code: i32) {
    let function = unsafe { text(function) };
    change(|s| s.injections.push(Injection { function, after: nth.checked_sub(1), code }));
}

/// From the `nth` call of any function on (1 = the next) everything that needs a context answers `code`, and nothing
/// in a stream runs.
#[no_mangle]
pub extern "C" fn fake_poison(nth: u64, code: i32) {
    change(|s| s.poison = Some(Poison { after: nth, code }));
}

/// The `nth` call of `function` from now on (1 = the next, `*` = of any): with `kind` 0 it does not return, with 1 the
/// context of device 0 is destroyed just before it, with another that is an error which stays from it on.
#[no_mangle]
pub unsafe extern "C" fn fake_trap(function: *const c_char, nth: u64, kind: i32) {
    let function = unsafe { text(function) };
    let kind = match kind {
        0 => TrapKind::Hang,
        1 => TrapKind::Reset,
        code => TrapKind::Poison(code),
    };
    change(|s| s.traps.push(Trap { function, after: nth.saturating_sub(1), kind }));
}

/// The place in the log of the call that hangs; `u64::MAX` if none does.
#[no_mangle]
pub extern "C" fn fake_hung() -> u64 {
    lock().hung.map_or(u64::MAX, |index| index as u64)
}

/// Takes back every injection, trap, sleep and cap, and the error that stays.
#[no_mangle]
pub extern "C" fn fake_clear_faults() {
    change(|s| {
        s.injections.clear();
        s.traps.clear();
        s.hung = None;
        s.sleeps.clear();
        s.poison = None;
        let unlimited = Memory::default();
        (s.memory.cap_call, s.memory.cap_total) = (unlimited.cap_call, unlimited.cap_total);
    });
}

#[no_mangle]
pub unsafe extern "C" fn fake_sleep(function: *const c_char, ms: u64) {
    let function = unsafe { text(function) };
    lock().sleeps.insert(function, ms);
}

#[no_mangle]
pub extern "C" fn fake_cap(bytes_per_call: u64, bytes_in_total: u64) {
    let mut s = lock();
    (s.memory.cap_call, s.memory.cap_total) = (bytes_per_call, bytes_in_total);
}

// ---- what there is -------------------------------------------------------------------------------------------------

#[no_mangle]
pub extern "C" fn fake_versions(runtime: i32, driver: i32) {
    let mut s = lock();
    (s.runtime, s.driver) = (runtime, driver);
}

#[no_mangle]
pub extern "C" fn fake_devices(count: i32) {
    lock().set_devices(count);
}

// ---- running -------------------------------------------------------------------------------------------------------

/// Runs at most `most` operations of a stream; returns how many ran.
#[no_mangle]
pub extern "C" fn fake_run(stream: usize, most: u64) -> u64 {
    change(|s| {
        let key = if s.streams.contains_key(&stream) { Ok(stream) } else { s.stream(stream) };
        key.map_or(0, |key| s.run(key, How::Told, None, most))
    })
}

#[no_mangle]
pub extern "C" fn fake_run_all() -> u64 {
    change(|s| s.run_all(How::Told))
}

#[no_mangle]
pub extern "C" fn fake_auto_run(on: u8, delay_us: u64) {
    change(|s| s.auto = (on != 0).then_some(Duration::from_micros(delay_us)));
    if on != 0 {
        State::start_auto_runner();
    }
}

#[no_mangle]
pub extern "C" fn fake_hold(stream: usize, held: u8) -> i32 {
    change(|s| {
        let key = if s.streams.contains_key(&stream) { Ok(stream) } else { s.stream(stream) };
        match key.ok().and_then(|key| s.streams.get_mut(&key)) {
            Some(stream) => {
                stream.held = held != 0;
                0
            }
            None => 400,
        }
    })
}

// ---- reading -------------------------------------------------------------------------------------------------------

#[no_mangle]
pub extern "C" fn fake_call_count() -> u64 {
    lock().calls.len() as u64
}

#[no_mangle]
pub unsafe extern "C" fn fake_call(index: u64, out: *mut RawCall) -> i32 {
    let s = lock();
    s.calls.get(index as usize).ok_or(1).and_then(|&call| crate::write(out, call)).err().unwrap_or(0)
}

/// Live registrations: start, bytes, flags.
#[no_mangle]
pub unsafe extern "C" fn fake_registrations(out: *mut [u64; 3], room: usize) -> usize {
    let s = lock();
    let all = s.memory.registrations.iter();
    unsafe { rows(out, room, all.map(|(&start, r)| [start as u64, r.bytes as u64, r.flags.into()])) }
}

/// Live device memory: start, bytes, device.
#[no_mangle]
pub unsafe extern "C" fn fake_allocations(out: *mut [u64; 3], room: usize) -> usize {
    let s = lock();
    let all = s.memory.allocations.iter();
    unsafe { rows(out, room, all.map(|(&start, a)| [start as u64, a.bytes as u64, a.device as u64])) }
}

/// Streams that were created and not destroyed, of contexts that are there: handle, device, flags, priority (as an
/// `i64`), queued operations, whether it is held.
#[no_mangle]
pub unsafe extern "C" fn fake_streams(out: *mut [u64; 6], room: usize) -> usize {
    let s = lock();
    let live = s.streams.iter().filter(|(_, stream)| {
        let epoch = s.devices.get(stream.device as usize).map(|d| d.epoch);
        stream.default.is_none() && !stream.destroyed && epoch == Some(stream.epoch)
    });
    let row = |(&handle, stream): (&usize, &crate::streams::Stream)| {
        let (device, priority) = (stream.device as u64, i64::from(stream.priority) as u64);
        [handle as u64, device, stream.flags.into(), priority, stream.ops.len() as u64, stream.held.into()]
    };
    unsafe { rows(out, room, live.map(row)) }
}

/// Events that were created and not destroyed, of contexts that are there: handle, device, flags, how often it was
/// recorded.
#[no_mangle]
pub unsafe extern "C" fn fake_events(out: *mut [u64; 4], room: usize) -> usize {
    let s = lock();
    let live = s.events.iter().filter(|(_, event)| {
        let epoch = s.devices.get(event.device as usize).map(|d| d.epoch);
        !event.destroyed && epoch == Some(event.epoch)
    });
    let row = |(&handle, event): (&usize, &crate::streams::Event)| {
        [handle as u64, event.device as u64, event.flags.into(), event.recorded]
    };
    unsafe { rows(out, room, live.map(row)) }
}

/// How often the primary context of a device is retained.
#[no_mangle]
pub extern "C" fn fake_retained(device: i32) -> u32 {
    lock().device(device).map_or(0, |d| d.retained)
}

/// What should not have happened: copies out of range; device memory freed, host memory unregistered and modules
/// unloaded under what is queued.
#[no_mangle]
pub unsafe extern "C" fn fake_hazards(out: *mut [u64; 4]) {
    let s = lock();
    let memory = &s.memory;
    let under_copies = [memory.freed_in_flight, memory.unregistered_in_flight, memory.unloaded_in_flight];
    let _ = crate::write(out, [memory.out_of_range, under_copies[0], under_copies[1], under_copies[2]]);
}

/// Copies bytes of device memory to `out`, or from `from`, outside every stream; 1 where the range is none.
#[no_mangle]
pub unsafe extern "C" fn fake_device_bytes(address: u64, out: *mut u8, from: *const u8, n: usize) -> i32 {
    let s = lock();
    let Some(at) = s.memory.device_range(address as usize, n) else { return 1 };
    // SAFETY: the device range was just checked, and the lock keeps it; the other side is the caller's, of n bytes.
    unsafe {
        match from.is_null() {
            true => std::ptr::copy_nonoverlapping(at as *const u8, out, n),
            false => std::ptr::copy_nonoverlapping(from, at as *mut u8, n),
        }
    }
    0
}

/// The calling thread's last-error slot.
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
    contexts::pushed() as u32
}

/// The device whose context is current on the calling thread; -1 for none.
#[no_mangle]
pub extern "C" fn fake_current_device() -> i32 {
    contexts::current().map_or(-1, contexts::device_of)
}

/// The calling thread's capture mode.
#[no_mangle]
pub extern "C" fn fake_capture_mode() -> u32 {
    capture::mode()
}

/// Whether calls are kept in the log; those that are there go when they are not.
#[no_mangle]
pub extern "C" fn fake_keep_log(keep: u8) {
    change(|s| {
        s.quiet = keep == 0;
        if s.quiet {
            s.calls = Vec::new();
        }
    });
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
    thread_id()
}
