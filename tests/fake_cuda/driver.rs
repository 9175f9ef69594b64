//! The functions of `libcuda`, on the same state.

use crate::launch::Launch;
use crate::streams::NON_BLOCKING;
use crate::{args, call, capture, codes, contexts, write};
use std::ffi::{c_char, c_void, CStr};

/// `cuCtxGetStreamPriorityRange`: the least and the greatest, as devices have them.
const PRIORITIES: (i32, i32) = (0, -5);

// ---- devices and contexts ----------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cuInit(flags: u32) -> i32 {
    call(c"cuInit", args![flags], |s| match (flags, s.devices.len()) {
        (0, 0) => Err(100),
        (0, _) => Ok(()),
        _ => Err(1),
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDriverGetVersion(out: *mut i32) -> i32 {
    call(c"cuDriverGetVersion", args![out], |s| write(out, s.driver))
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetCount(out: *mut i32) -> i32 {
    call(c"cuDeviceGetCount", args![out], |s| write(out, s.devices.len() as i32))
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGet(out: *mut i32, ordinal: i32) -> i32 {
    call(c"cuDeviceGet", args![out, ordinal], |s| {
        s.device(ordinal)?;
        write(out, ordinal)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetName(out: *mut c_char, room: i32, device: i32) -> i32 {
    call(c"cuDeviceGetName", args![out, room, device], |s| {
        s.device(device)?;
        let name = format!("Fake GPU {device}");
        if out.is_null() || room < 1 {
            return Err(1);
        }
        // SAFETY: the caller's buffer of `room` bytes, of which at most `room` are written, the last one zero.
        unsafe {
            let n = name.len().min(room as usize - 1);
            std::ptr::copy_nonoverlapping(name.as_ptr(), out.cast::<u8>(), n);
            out.add(n).write(0);
        }
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(out: *mut c_char, room: i32, device: i32) -> i32 {
    call(c"cuDeviceGetPCIBusId", args![out, room, device], |s| {
        s.device(device)?;
        let address = format!("0000:{:02X}:00.0", 0xc1 + device);
        if out.is_null() || (room as usize) <= address.len() {
            return Err(1);
        }
        // SAFETY: the caller's buffer of `room` bytes, which is enough.
        unsafe {
            std::ptr::copy_nonoverlapping(address.as_ptr(), out.cast::<u8>(), address.len());
            out.add(address.len()).write(0);
        }
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut usize, device: i32) -> i32 {
    call(c"cuDevicePrimaryCtxRetain", args![out, device], |s| {
        let context = s.retain(device)?;
        write(out, context)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> i32 {
    call(c"cuDevicePrimaryCtxRelease_v2", args![device], |s| s.release(device))
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> i32 {
    call(c"cuDevicePrimaryCtxReset_v2", args![device], |s| {
        s.device(device)?;
        s.destroy_context(device);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetCurrent(out: *mut usize) -> i32 {
    call(c"cuCtxGetCurrent", args![out], |_| write(out, contexts::current().unwrap_or(0)))
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetDevice(out: *mut i32) -> i32 {
    call(c"cuCtxGetDevice", args![out], |s| {
        let device = s.in_context()?;
        write(out, device)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: usize) -> i32 {
    call(c"cuCtxPushCurrent_v2", args![context], |s| s.push(context))
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut usize) -> i32 {
    call(c"cuCtxPopCurrent_v2", args![out], |s| {
        let context = s.pop()?;
        if out.is_null() {
            Ok(())
        } else {
            write(out, context)
        }
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> i32 {
    call(c"cuCtxGetStreamPriorityRange", args![least, greatest], |s| {
        s.in_context()?;
        write(least, PRIORITIES.0)?;
        write(greatest, PRIORITIES.1)
    })
}

// ---- memory ------------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, n: usize, flags: u32) -> i32 {
    call(c"cuMemHostRegister_v2", args![pointer, n, flags], |s| {
        let device = s.in_context()?;
        s.register(device, pointer as usize, n, flags)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> i32 {
    let mut waited = false;
    call(c"cuMemHostUnregister", args![pointer], |s| {
        s.in_context()?;
        s.unregister(pointer as usize, &mut waited)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostGetFlags(out: *mut u32, pointer: *mut c_void) -> i32 {
    call(c"cuMemHostGetFlags", args![out, pointer], |s| {
        s.in_context()?;
        let (_, registration) = s.memory.registration(pointer as usize).ok_or(1)?;
        write(out, registration.flags)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(out: *mut u64, pointer: *mut c_void, flags: u32) -> i32 {
    call(c"cuMemHostGetDevicePointer_v2", args![out, pointer, flags], |s| {
        s.in_context()?;
        write(out, s.memory.mapped(pointer as usize, flags)? as u64)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, n: usize) -> i32 {
    call(c"cuMemAlloc_v2", args![out, n], |s| {
        let device = s.in_context()?;
        let address = s.allocate(device, n)?;
        write(out, address as u64)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    let mut waited = false;
    call(c"cuMemFree_v2", args![address], |s| {
        s.in_context()?;
        s.free(address as usize, &mut waited)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, n: usize, stream: usize) -> i32 {
    let mut wait = None;
    call(c"cuMemcpyHtoDAsync_v2", args![dst, src, n, stream], |s| {
        s.in_context()?;
        s.copy_once(&mut wait, dst as usize, src as usize, n, 1, stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, n: usize, stream: usize) -> i32 {
    let mut wait = None;
    call(c"cuMemcpyDtoHAsync_v2", args![dst, src, n, stream], |s| {
        s.in_context()?;
        s.copy_once(&mut wait, dst as usize, src as usize, n, 2, stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, n: usize, stream: usize) -> i32 {
    let mut wait = None;
    call(c"cuMemcpyDtoDAsync_v2", args![dst, src, n, stream], |s| {
        s.in_context()?;
        s.copy_once(&mut wait, dst as usize, src as usize, n, 3, stream)
    })
}

// ---- kernels -----------------------------------------------------------------------------------------------------

/// A module is the gather kernel's: its name must stand in the PTX, which must be for a device of 7.5.
#[no_mangle]
pub unsafe extern "C" fn cuModuleLoadData(out: *mut usize, image: *const c_void) -> i32 {
    call(c"cuModuleLoadData", args![out, image], |s| {
        s.in_context()?;
        s.unsafe_while_capturing()?;
        // SAFETY: the contract of the call: text that ends with a zero.
        let text = unsafe { image.cast::<c_char>().as_ref() }.map(|text| unsafe { CStr::from_ptr(text) }).ok_or(1)?;
        let text = text.to_str().map_err(|_| 218)?;
        if !text.contains(".target sm_75") || !text.contains(".visible .entry") {
            return Err(218);
        }
        write(out, s.load_module(text))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuModuleGetFunction(out: *mut usize, module: usize, name: *const c_char) -> i32 {
    call(c"cuModuleGetFunction", args![out, module, name], |s| {
        s.in_context()?;
        // SAFETY: the contract of the call: a C string.
        let name = unsafe { name.as_ref() }.map(|name| unsafe { CStr::from_ptr(name) }).ok_or(1)?;
        let entry = format!(".visible .entry {}(", name.to_string_lossy());
        if s.modules.get(&module).ok_or(400)?.contains(&entry) {
            write(out, module)
        } else {
            Err(500)
        }
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuModuleUnload(module: usize) -> i32 {
    call(c"cuModuleUnload", args![module], |s| {
        s.in_context()?;
        s.unsafe_while_capturing()?;
        if s.launches_of(module) {
            s.memory.unloaded_in_flight += 1;
        }
        s.modules.remove(&module).map(|_| ()).ok_or(400)
    })
}

#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    blocks: u32,
    blocks_y: u32,
    blocks_z: u32,
    threads: u32,
    threads_y: u32,
    threads_z: u32,
    shared: u32,
    stream: usize,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> i32 {
    call(c"cuLaunchKernel", args![function, blocks, threads, shared, stream], |s| {
        s.in_context()?;
        if blocks == 0 || threads == 0 || threads > 1024 || (blocks_y, blocks_z, threads_y, threads_z) != (1, 1, 1, 1) {
            return Err(1);
        }
        if parameters.is_null() || !extra.is_null() {
            return Err(1);
        }
        // SAFETY: the contract of the call: the kernel has one parameter, a `Launch`, which is read here.
        let launch = unsafe { (*parameters).cast::<Launch>().read() };
        s.launch(function, launch, blocks * threads, stream)
    })
}

// ---- streams and events ------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cuStreamCreateWithPriority(out: *mut usize, flags: u32, priority: i32) -> i32 {
    call(c"cuStreamCreateWithPriority", args![out, flags, priority as i64], |s| {
        let device = s.in_context()?;
        if flags & !NON_BLOCKING != 0 {
            return Err(1);
        }
        write(out, s.create_stream(device, flags, priority.clamp(PRIORITIES.1, PRIORITIES.0)))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: usize) -> i32 {
    call(c"cuStreamDestroy_v2", args![stream], |s| {
        s.in_context()?;
        s.destroy_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamSynchronize(stream: usize) -> i32 {
    call(c"cuStreamSynchronize", args![stream], |s| {
        s.in_context()?;
        s.synchronize_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamQuery(stream: usize) -> i32 {
    call(c"cuStreamQuery", args![stream], |s| {
        s.in_context()?;
        s.query_stream(stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32 {
    call(c"cuStreamWaitEvent", args![stream, event, flags], |s| {
        s.in_context()?;
        s.wait(stream, event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: usize, out: *mut i32) -> i32 {
    call(c"cuStreamIsCapturing", args![stream, out], |s| {
        s.in_context()?;
        write(out, s.capture_status(stream)?)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: u32) -> i32 {
    call(c"cuStreamBeginCapture_v2", args![stream, mode], |s| {
        s.in_context()?;
        s.begin_capture(stream, mode)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamEndCapture(stream: usize, graph: *mut usize) -> i32 {
    call(c"cuStreamEndCapture", args![stream, graph], |s| {
        s.in_context()?;
        let ended = s.end_capture(stream);
        let made = if ended.is_ok() { s.handle() } else { 0 };
        let written = write(graph, made);
        ended.and(written)
    })
}

/// Nothing is kept of a graph.
#[no_mangle]
pub unsafe extern "C" fn cuGraphDestroy(graph: usize) -> i32 {
    call(c"cuGraphDestroy", args![graph], |_| if graph == 0 { Err(1) } else { Ok(()) })
}

#[no_mangle]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> i32 {
    call(c"cuThreadExchangeStreamCaptureMode", args![mode], |_| {
        // SAFETY: the caller's in-out-pointer, checked for null.
        let given = unsafe { mode.as_ref() }.copied().ok_or(1)?;
        write(mode, capture::exchange_mode(given)?)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuEventCreate(out: *mut usize, flags: u32) -> i32 {
    call(c"cuEventCreate", args![out, flags], |s| {
        let device = s.in_context()?;
        write(out, s.create_event(device, flags))
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuEventDestroy_v2(event: usize) -> i32 {
    call(c"cuEventDestroy_v2", args![event], |s| {
        s.in_context()?;
        s.destroy_event(event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuEventRecord(event: usize, stream: usize) -> i32 {
    call(c"cuEventRecord", args![event, stream], |s| {
        s.in_context()?;
        s.record(event, stream)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuEventQuery(event: usize) -> i32 {
    call(c"cuEventQuery", args![event], |s| {
        s.in_context()?;
        s.query_event(event)
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuEventSynchronize(event: usize) -> i32 {
    call(c"cuEventSynchronize", args![event], |s| {
        s.in_context()?;
        s.synchronize_event(event)
    })
}

// ---- errors ------------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn cuGetErrorName(code: i32, out: *mut *const c_char) -> i32 {
    codes::driver_name(code).ok_or(1).and_then(|name| write(out, name.as_ptr())).err().unwrap_or(0)
}

#[no_mangle]
pub unsafe extern "C" fn cuGetErrorString(code: i32, out: *mut *const c_char) -> i32 {
    codes::text(code).ok_or(1).and_then(|text| write(out, text.as_ptr())).err().unwrap_or(0)
}
