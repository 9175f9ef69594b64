//! The functions of `libcudart`.

use crate::streams::NON_BLOCKING;
use crate::{args, call, capture, codes, contexts, write, LAST_ERROR};
use std::ffi::{c_char, c_void};

fn code(code: i32) -> crate::Answer {
    if code == 0 {
        Ok(())
    } else {
        Err(code)
    }
}

// ---- versions, devices, errors -----------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaRuntimeGetVersion(out: *mut i32) -> i32 {
    call(c"cudaRuntimeGetVersion", args![out], |s| write(out, s.runtime))
}

#[no_mangle]
pub unsafe extern "C" fn cudaDriverGetVersion(out: *mut i32) -> i32 {
    call(c"cudaDriverGetVersion", args![out], |s| write(out, s.driver))
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetDeviceCount(out: *mut i32) -> i32 {
    call(c"cudaGetDeviceCount", args![out], |s| write(out, s.devices.len() as i32))
}

#[no_mangle]
pub unsafe extern "C" fn cudaSetDevice(device: i32) -> i32 {
    call(c"cudaSetDevice", args![device], |s| s.select(device))
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetDevice(out: *mut i32) -> i32 {
    call(c"cudaGetDevice", args![out], |_| write(out, contexts::selected()))
}

#[no_mangle]
pub unsafe extern "C" fn cudaDeviceSynchronize() -> i32 {
    call(c"cudaDeviceSynchronize", args![], |s| {
        let device = s.in_runtime()?;
        s.unsafe_while_capturing()?;
        s.settle_devices(Some(device))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaDeviceReset() -> i32 {
    call(c"cudaDeviceReset", args![], |s| {
        let device = contexts::selected();
        s.device(device)?;
        s.destroy_context(device);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetLastError() -> i32 {
    call(c"cudaGetLastError", args![], |_| code(LAST_ERROR.replace(0)))
}

#[no_mangle]
pub unsafe extern "C" fn cudaPeekAtLastError() -> i32 {
    call(c"cudaPeekAtLastError", args![], |_| code(LAST_ERROR.get()))
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetErrorName(code: i32) -> *const c_char {
    codes::runtime_name(code).unwrap_or(c"unrecognized error code").as_ptr()
}

#[no_mangle]
pub unsafe extern "C" fn cudaGetErrorString(code: i32) -> *const c_char {
    codes::text(code).unwrap_or(c"unrecognized error code").as_ptr()
}

// ---- memory ------------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, n: usize) -> i32 {
    call(c"cudaMalloc", args![out, n], |s| {
        let device = s.in_runtime()?;
        if n == 0 {
            return write(out, std::ptr::null_mut());
        }
        let address = s.allocate(device, n)?;
        write(out, address as *mut c_void)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaFree(pointer: *mut c_void) -> i32 {
    let mut waited = false;
    call(c"cudaFree", args![pointer], |s| {
        s.in_runtime()?;
        s.unsafe_while_capturing()?; // also of nothing, as seen on hardware
        if pointer.is_null() {
            return Ok(());
        }
        s.free(pointer as usize, &mut waited)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostRegister(pointer: *mut c_void, n: usize, flags: u32) -> i32 {
    call(c"cudaHostRegister", args![pointer, n, flags], |s| {
        let device = s.in_runtime()?;
        s.register(device, pointer as usize, n, flags)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostUnregister(pointer: *mut c_void) -> i32 {
    let mut waited = false;
    call(c"cudaHostUnregister", args![pointer], |s| {
        s.in_runtime()?;
        s.unregister(pointer as usize, &mut waited)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostGetFlags(out: *mut u32, pointer: *mut c_void) -> i32 {
    call(c"cudaHostGetFlags", args![out, pointer], |s| {
        s.in_runtime()?;
        let (_, registration) = s.memory.registration(pointer as usize).ok_or(1)?;
        write(out, registration.flags)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaHostGetDevicePointer(out: *mut *mut c_void, pointer: *mut c_void, flags: u32) -> i32 {
    call(c"cudaHostGetDevicePointer", args![out, pointer, flags], |s| {
        s.in_runtime()?;
        write(out, s.memory.mapped(pointer as usize, flags)? as *mut c_void)
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
    let mut wait = None;
    call(c"cudaMemcpyAsync", args![dst, src, n, kind, stream], |s| {
        s.in_runtime()?;
        s.copy_once(&mut wait, dst as usize, src as usize, n, kind, stream)
    })
}

// ---- streams and events ------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cudaStreamCreateWithFlags(out: *mut usize, flags: u32) -> i32 {
    call(c"cudaStreamCreateWithFlags", args![out, flags], |s| {
        let device = s.in_runtime()?;
        if flags & !NON_BLOCKING != 0 {
            return Err(1);
        }
        write(out, s.create_stream(device, flags, 0))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamDestroy(stream: usize) -> i32 {
    call(c"cudaStreamDestroy", args![stream], |s| {
        s.in_runtime()?;
        s.destroy_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamSynchronize(stream: usize) -> i32 {
    call(c"cudaStreamSynchronize", args![stream], |s| {
        s.in_runtime()?;
        s.synchronize_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamQuery(stream: usize) -> i32 {
    call(c"cudaStreamQuery", args![stream], |s| {
        s.in_runtime()?;
        s.query_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32 {
    call(c"cudaStreamWaitEvent", args![stream, event, flags], |s| {
        s.in_runtime()?;
        s.wait(stream, event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamBeginCapture(stream: usize, mode: u32) -> i32 {
    call(c"cudaStreamBeginCapture", args![stream, mode], |s| {
        s.in_runtime()?;
        s.begin_capture(stream, mode)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaStreamEndCapture(stream: usize, graph: *mut usize) -> i32 {
    call(c"cudaStreamEndCapture", args![stream, graph], |s| {
        s.in_runtime()?;
        let ended = s.end_capture(stream);
        let made = if ended.is_ok() { s.handle() } else { 0 };
        let written = write(graph, made);
        ended.and(written)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: *mut u32) -> i32 {
    call(c"cudaThreadExchangeStreamCaptureMode", args![mode], |_| {
        // SAFETY: the caller's in-out-pointer, checked for null.
        let given = unsafe { mode.as_ref() }.copied().ok_or(1)?;
        write(mode, capture::exchange_mode(given)?)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventCreateWithFlags(out: *mut usize, flags: u32) -> i32 {
    call(c"cudaEventCreateWithFlags", args![out, flags], |s| {
        let device = s.in_runtime()?;
        write(out, s.create_event(device, flags))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventRecord(event: usize, stream: usize) -> i32 {
    call(c"cudaEventRecord", args![event, stream], |s| {
        s.in_runtime()?;
        s.record(event, stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventQuery(event: usize) -> i32 {
    call(c"cudaEventQuery", args![event], |s| {
        s.in_runtime()?;
        s.query_event(event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventSynchronize(event: usize) -> i32 {
    call(c"cudaEventSynchronize", args![event], |s| {
        s.in_runtime()?;
        s.synchronize_event(event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cudaEventDestroy(event: usize) -> i32 {
    call(c"cudaEventDestroy", args![event], |s| {
        s.in_runtime()?;
        s.destroy_event(event)
    })
}
