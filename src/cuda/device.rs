//! One device as the crate uses it: its primary context, and the driver's calls for streams, events, memory, copies.
//!
//! A [`Device`] retains the primary context of one ordinal, which every runtime and framework of the process shares,
//! so that their stream handles, events and addresses are ours too. Every call runs with that context current on the
//! calling thread and puts back what was, so that a caller's thread keeps the device which it had selected. The
//! functions are always the driver's: a process in which CUDA was initialised has it mapped.
//!
//! It owns handles and makes checked calls. It keeps no state of what was queued or has completed (whoever queues
//! does), waits for nothing by itself, and gives up no slot.

mod error;
mod handles;
#[cfg(target_os = "linux")]
mod load;
mod table;

// Devices have 64-bit addresses, which the tests take for their own.
#[cfg(all(test, target_os = "linux", target_pointer_width = "64"))]
mod tests;

pub use error::DeviceError;
pub(crate) use handles::{DeviceMemory, Event, Kernel, Stream};
pub(crate) use table::DeviceTable;

use super::types::{CudaError, CudaSearch, code};
use std::ffi::{CStr, c_int, c_uint};
use std::fmt;
use std::sync::Arc;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream.
const NON_BLOCKING: c_uint = 0x1;
/// `CU_EVENT_BLOCKING_SYNC`: a thread that waits sleeps, where it would burn a core.
const BLOCKING_SYNC: c_uint = 0x1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 0x2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_uint = 2;
/// Room for a device's name, which is shorter in every driver.
const NAME_BYTES: usize = 256;

/// A stream of anybody's: a `CUstream`, which is also a `cudaStream_t`.
///
/// 0 and 1 are the legacy default stream and 2 the calling thread's own default stream, of the device that the call
/// is made on: the calls of [`Device`] make its context current first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RawStream(pub(crate) usize);

/// What a graph capture has to do with a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Capture {
    /// Nothing: work put into it runs.
    None,
    /// It is capturing, or its capture was lost and not yet ended.
    Here,
    /// It is the legacy default stream, and a stream ordered with that one captures: work put into it would break that
    /// capture.
    Elsewhere,
}

/// The retained primary context of one device. Cheap to clone; given back when the last clone, stream, event and
/// memory of it is gone.
#[derive(Clone)]
pub(crate) struct Device(Arc<Context>);

struct Context {
    table: DeviceTable,
    ordinal: i32,
    device: c_int,
    context: usize,
    name: String,
    /// The process that retained it: in a forked child nothing may be called.
    pid: u32,
}

impl Device {
    /// Loads the driver, once for each path, and retains the primary context of `ordinal`. What is current on the
    /// calling thread stays so, and a capture that somebody has open stays intact.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: no driver, no such device, or the call that failed. Nothing is retained then.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub(crate) fn attach(search: &CudaSearch, ordinal: i32) -> Result<Device, DeviceError> {
        #[cfg(target_os = "linux")]
        return Device::from_table(load::driver(search.driver_library(), ordinal)?, ordinal);
        #[cfg(not(target_os = "linux"))]
        {
            let _ = search;
            Err(DeviceError::Unsupported { ordinal })
        }
    }

    /// The same over functions given by a test.
    pub(crate) fn from_table(table: DeviceTable, ordinal: i32) -> Result<Device, DeviceError> {
        let check =
            |operation, answer| table.check(operation, answer).map_err(|error| DeviceError::Call { ordinal, error });
        let (mut count, mut device, mut context) = (0, 0, 0);
        // SAFETY: it takes flags that must be 0, and may be called any number of times.
        check("cuInit", unsafe { (table.cuInit)(0) })?;
        // SAFETY: the out-pointer is a live integer of ours.
        check("cuDeviceGetCount", unsafe { (table.cuDeviceGetCount)(&mut count) })?;
        if !(0..count).contains(&ordinal) {
            return Err(DeviceError::NoSuchDevice { ordinal, count });
        }
        // SAFETY: the out-pointer is a live integer of ours.
        check("cuDeviceGet", unsafe { (table.cuDeviceGet)(&mut device, ordinal) })?;
        let mut name = [0; NAME_BYTES];
        // SAFETY: the buffer is ours and as long as the second argument says; the driver ends what it writes with a
        // zero. The device is the one that it just named.
        check("cuDeviceGetName", unsafe { (table.cuDeviceGetName)(name.as_mut_ptr(), NAME_BYTES as c_int, device) })?;
        // SAFETY: the out-pointer is a live integer of ours; the device is the one that the driver named. What is retained
        // here is released once, by the drop of the `Context` made below.
        check("cuDevicePrimaryCtxRetain", unsafe { (table.cuDevicePrimaryCtxRetain)(&mut context, device) })?;
        let name = name.map(|c| c as u8);
        let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |n| n.to_string_lossy().into());
        tracing::debug!(ordinal, %name, "device attached");
        Ok(Device(Arc::new(Context { table, ordinal, device, context, name, pid: std::process::id() })))
    }

    /// The number that it was attached by.
    pub(crate) fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// The name that the driver has for it.
    #[allow(dead_code)] // for tests
    pub(crate) fn name(&self) -> String {
        self.0.name.clone()
    }

    /// Its address on the PCI bus, as `0000:C1:00.0`; `None` where the driver does not say.
    pub(crate) fn pci_address(&self) -> Option<String> {
        let mut address = [0; NAME_BYTES];
        let Context { table, device, ordinal, .. } = &*self.0;
        // SAFETY: the buffer is ours and as long as the second argument says; the driver ends what it writes with a zero.
        let answer = unsafe { (table.cuDeviceGetPCIBusId)(address.as_mut_ptr(), NAME_BYTES as c_int, *device) };
        if let Err(error) = table.check("cuDeviceGetPCIBusId", answer) {
            tracing::debug!(ordinal, %error, "the driver does not say where the device is");
            return None;
        }
        let address = address.map(|c| c as u8);
        CStr::from_bytes_until_nul(&address).ok().map(|address| address.to_string_lossy().into())
    }

    /// Whether both are the same device's context.
    pub(crate) fn is(&self, other: &Device) -> bool {
        self.0.context == other.0.context && self.0.table.cuInit as usize == other.0.table.cuInit as usize
    }

    /// Makes this device's context the current one of the calling thread, a thread of ours, for good: what a runtime then
    /// does there, it does on this device, and makes no context on another.
    #[doc(alias = "cuCtxPushCurrent")]
    pub(crate) fn select(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained by `from_table`; the caller keeps this `Device` while its thread calls CUDA.
        let answer = unsafe { (self.0.table.cuCtxPushCurrent_v2)(self.0.context) };
        self.0.table.check("cuCtxPushCurrent", answer)
    }

    /// Puts the calling thread into relaxed capture mode: the first call of a thread of ours, since while a learner
    /// captures a graph in global mode a query or allocation of another thread would spoil its capture.
    #[doc(alias = "cuThreadExchangeStreamCaptureMode")]
    pub(crate) fn relax_capture_mode(&self) -> Result<(), CudaError> {
        let mut mode = RELAXED;
        self.call("cuThreadExchangeStreamCaptureMode", |table| {
            // SAFETY: the pointer is to a live integer of ours, which gets the mode that was.
            unsafe { (table.cuThreadExchangeStreamCaptureMode)(&mut mode) }
        })
    }

    /// Runs `calls` with the calling thread in relaxed capture mode, for queries on threads of the user's: while some
    /// other thread captures a graph in global mode, they would spoil its capture.
    pub(crate) fn relaxed<R>(&self, calls: impl FnOnce() -> R) -> R {
        relaxed(&self.0.table, calls)
    }

    /// Runs `calls` with this device's context current on the calling thread and puts back what was: for calls of a
    /// runtime, which go to the current device. Where it cannot be made current the calls are made all the same, and
    /// their own answers tell.
    #[cfg(feature = "mapped-allocator")]
    pub(crate) fn within<R>(&self, calls: impl FnOnce() -> R) -> R {
        // SAFETY: the context was retained by `from_table` and is released only when `self.0` is gone.
        let pushed = unsafe { (self.0.table.cuCtxPushCurrent_v2)(self.0.context) } == 0;
        let result = calls();
        if pushed {
            let mut current = 0;
            // SAFETY: the out-pointer is a live integer of ours.
            self.0.note("cuCtxPopCurrent", unsafe { (self.0.table.cuCtxPopCurrent_v2)(&mut current) });
        }
        result
    }

    // ---- what it makes ----

    /// Creates a stream that is not ordered with the legacy default stream. With `low_priority` it has the least that
    /// the device knows, else the default. (On devices so far the least *is* the default, and copies have none.)
    #[doc(alias = "cuStreamCreateWithPriority")]
    pub(crate) fn stream(&self, low_priority: bool) -> Result<Stream, CudaError> {
        let (mut least, mut greatest, mut handle) = (0, 0, 0);
        if low_priority {
            self.call("cuCtxGetStreamPriorityRange", |table| {
                // SAFETY: the out-pointers are live integers of ours.
                unsafe { (table.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) }
            })?;
        }
        self.call("cuStreamCreateWithPriority", |table| {
            // SAFETY: the out-pointer is a live integer of ours; `Stream`'s drop destroys what was created.
            unsafe { (table.cuStreamCreateWithPriority)(&mut handle, NON_BLOCKING, least) }
        })?;
        Ok(Stream::new(self.clone(), handle))
    }

    /// Creates an event without timing, whose waits sleep. Never recorded, it reads as complete: see [`Event`].
    #[doc(alias = "cuEventCreate")]
    pub(crate) fn event(&self) -> Result<Event, CudaError> {
        let mut handle = 0;
        self.call("cuEventCreate", |table| {
            // SAFETY: the out-pointer is a live integer of ours; `Event`'s drop destroys what was created.
            unsafe { (table.cuEventCreate)(&mut handle, DISABLE_TIMING | BLOCKING_SYNC) }
        })?;
        Ok(Event::new(self.clone(), handle))
    }

    /// Allocates device memory, aligned to 256 bytes at least. Zero bytes are refused without a call.
    #[doc(alias = "cuMemAlloc")]
    pub(crate) fn alloc(&self, bytes: usize) -> Result<DeviceMemory, CudaError> {
        if bytes == 0 {
            let text = "refused without a call: zero bytes cannot be allocated".into();
            return Err(CudaError::new("cuMemAlloc", code::INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE".into(), text));
        }
        let mut address = 0;
        self.call("cuMemAlloc", |table| {
            // SAFETY: the out-pointer is a live integer of ours; `DeviceMemory`'s drop frees what was allocated.
            unsafe { (table.cuMemAlloc_v2)(&mut address, bytes) }
        })?;
        Ok(DeviceMemory::new(self.clone(), address, bytes))
    }

    // ---- copies ----

    /// Queues a copy from the host to the device. From page-locked memory it returns at once and reads `src` when the
    /// stream gets there; from other memory the driver copies first.
    ///
    /// # Safety
    ///
    /// Both ranges stay allocated, and the bytes of `src` unchanged, until an event recorded behind the copy has
    /// completed (invariant 3). `stream` is a live stream of this device.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub(crate) unsafe fn copy_in(
        &self,
        dst: u64,
        src: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise about both ranges and the stream (invariant 3).
        self.call("cuMemcpyHtoDAsync", |table| unsafe {
            (table.cuMemcpyHtoDAsync_v2)(dst, src.cast(), bytes, stream.0)
        })
    }

    /// Queues a copy from the device to the host.
    ///
    /// # Safety
    ///
    /// Both ranges stay allocated, and nobody else touches `dst`, until an event recorded behind the copy has
    /// completed (invariant 3). `stream` is a live stream of this device.
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub(crate) unsafe fn copy_out(
        &self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise about both ranges and the stream (invariant 3).
        self.call("cuMemcpyDtoHAsync", |table| unsafe {
            (table.cuMemcpyDtoHAsync_v2)(dst.cast(), src, bytes, stream.0)
        })
    }

    /// Queues a copy inside the device's memory. The ranges do not overlap.
    ///
    /// # Safety
    ///
    /// Both ranges stay allocated until an event recorded behind the copy has completed (invariant 3), and what else
    /// touches them is ordered with it. `stream` is a live stream of this device.
    #[doc(alias = "cuMemcpyDtoDAsync")]
    pub(crate) unsafe fn copy_within(
        &self,
        dst: u64,
        src: u64,
        bytes: usize,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise about both ranges and the stream (invariant 3).
        self.call("cuMemcpyDtoDAsync", |table| unsafe { (table.cuMemcpyDtoDAsync_v2)(dst, src, bytes, stream.0) })
    }

    // ---- kernels ----

    /// Loads a module and finds a kernel in it. PTX is compiled by the driver, for this device.
    #[doc(alias = "cuModuleLoadData")]
    pub(crate) fn kernel(&self, ptx: &CStr, name: &CStr) -> Result<Kernel, CudaError> {
        let (mut module, mut function) = (0, 0);
        self.call("cuModuleLoadData", |table| {
            // SAFETY: the out-pointer is a live integer of ours; the text ends with a zero, as PTX must. `Kernel`'s drop
            // unloads what was loaded.
            unsafe { (table.cuModuleLoadData)(&mut module, ptx.as_ptr().cast()) }
        })?;
        let mut kernel = Kernel::new(self.clone(), module);
        self.call("cuModuleGetFunction", |table| {
            // SAFETY: as above; the module was just loaded.
            unsafe { (table.cuModuleGetFunction)(&mut function, module, name.as_ptr()) }
        })?;
        kernel.set_function(function);
        Ok(kernel)
    }

    /// Queues a kernel of one parameter, in so many blocks of so many threads.
    ///
    /// # Safety
    ///
    /// The kernel takes a `P`, and whatever it touches stays as it needs it until an event recorded behind it has
    /// completed (invariant 3). `stream` is a live stream of this device.
    #[doc(alias = "cuLaunchKernel")]
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel,
        (blocks, threads): (u32, u32),
        parameter: &P,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        debug_assert!(self.is(kernel.device()), "a kernel of {:?} was used with {self:?}", kernel.device());
        let mut parameters = [std::ptr::from_ref(parameter).cast_mut().cast()];
        // SAFETY: the caller's promise about the kernel and the stream; the parameter is read during the call.
        self.call("cuLaunchKernel", |table| unsafe {
            let (function, list) = (kernel.function(), parameters.as_mut_ptr());
            (table.cuLaunchKernel)(function, blocks, 1, 1, threads, 1, 1, 0, stream.0, list, std::ptr::null_mut())
        })
    }

    // ---- order and completion ----

    /// Records the event behind everything that is in the stream now. Where this fails the event keeps what it was:
    /// it may read complete, and what is in the stream may not be.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this device.
    #[doc(alias = "cuEventRecord")]
    pub(crate) unsafe fn record(&self, event: &Event, stream: RawStream) -> Result<(), CudaError> {
        self.owns(event);
        // SAFETY: the event is live, since it is borrowed; the stream by the caller's promise.
        self.call("cuEventRecord", |table| unsafe { (table.cuEventRecord)(event.raw(), stream.0) })
    }

    /// What is queued in the stream from now on runs after the event's last record. The host does not wait.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this device.
    #[doc(alias = "cuStreamWaitEvent")]
    pub(crate) unsafe fn wait(&self, stream: RawStream, event: &Event) -> Result<(), CudaError> {
        self.owns(event);
        // SAFETY: the event is live, since it is borrowed; the stream by the caller's promise. The flags must be 0.
        self.call("cuStreamWaitEvent", |table| unsafe { (table.cuStreamWaitEvent)(stream.0, event.raw(), 0) })
    }

    /// Whether the event's last record has completed. True for one that was never recorded: see [`Event`].
    #[doc(alias = "cuEventQuery")]
    pub(crate) fn query(&self, event: &Event) -> Result<bool, CudaError> {
        self.owns(event);
        // SAFETY: the event is live, since it is borrowed.
        let answer = self.answer(|table| unsafe { (table.cuEventQuery)(event.raw()) })?;
        match answer {
            code::NOT_READY => Ok(false),
            answer => self.0.table.check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Sleeps until the event's last record has completed. Without end if it never does.
    #[doc(alias = "cuEventSynchronize")]
    pub(crate) fn synchronize_event(&self, event: &Event) -> Result<(), CudaError> {
        self.owns(event);
        // SAFETY: the event is live, since it is borrowed.
        self.call("cuEventSynchronize", |table| unsafe { (table.cuEventSynchronize)(event.raw()) })
    }

    /// Waits until everything in the stream has completed. Without end if it never does.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this device.
    #[doc(alias = "cuStreamSynchronize")]
    pub(crate) unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the stream is live by the caller's promise.
        self.call("cuStreamSynchronize", |table| unsafe { (table.cuStreamSynchronize)(stream.0) })
    }

    /// Whether work put into the stream now would go into a graph, or break one.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this device.
    pub(crate) unsafe fn is_capturing(&self, stream: RawStream) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.capture(stream) }.map(|capture| capture != Capture::None)
    }

    /// What a graph capture has to do with the stream now.
    ///
    /// # Safety
    ///
    /// `stream` is a live stream of this device.
    #[doc(alias = "cuStreamIsCapturing")]
    pub(crate) unsafe fn capture(&self, stream: RawStream) -> Result<Capture, CudaError> {
        let mut status = 0;
        // SAFETY: the stream is live by the caller's promise; the out-pointer is a live integer of ours.
        let answer = self.answer(|table| unsafe { (table.cuStreamIsCapturing)(stream.0, &mut status) })?;
        match answer {
            code::STREAM_CAPTURE_IMPLICIT => Ok(Capture::Elsewhere),
            answer => self.0.table.check("cuStreamIsCapturing", answer).map(|()| match status {
                0 => Capture::None,
                _ => Capture::Here,
            }),
        }
    }

    // ---- how calls are made ----

    /// Makes a call with the context current, and checks its answer.
    fn call(&self, operation: &'static str, call: impl FnOnce(&DeviceTable) -> c_int) -> Result<(), CudaError> {
        let answer = self.answer(call)?;
        self.0.table.check(operation, answer)
    }

    /// Makes a call with the context current on this thread, and puts back what was. An error here is that of making
    /// it current: the call was not made.
    fn answer(&self, call: impl FnOnce(&DeviceTable) -> c_int) -> Result<c_int, CudaError> {
        let Context { table, context, .. } = &*self.0;
        let mut current = 0;
        // SAFETY: the out-pointer is a live integer of ours.
        if unsafe { (table.cuCtxGetCurrent)(&mut current) } == 0 && current == *context {
            return Ok(call(table));
        }
        // SAFETY: the context was retained by `from_table` and is released only when `self.0` is gone.
        table.check("cuCtxPushCurrent", unsafe { (table.cuCtxPushCurrent_v2)(*context) })?;
        let answer = call(table);
        // SAFETY: the out-pointer is a live integer of ours. The call has had its effect or not, whatever becomes of
        // the pop: that is what the caller must learn.
        self.0.note("cuCtxPopCurrent", unsafe { (table.cuCtxPopCurrent_v2)(&mut current) });
        Ok(answer)
    }

    /// Destroys a handle, for its drop.
    fn give_back(&self, operation: &'static str, destroy: impl FnOnce(&DeviceTable) -> c_int) {
        if self.0.pid != std::process::id() {
            return;
        }
        match relaxed(&self.0.table, || self.answer(destroy)) {
            Ok(answer) => self.0.note(operation, answer),
            Err(error) => self.0.note(error.operation(), error.code()),
        }
    }

    fn owns(&self, event: &Event) {
        debug_assert!(self.is(event.device()), "an event of {:?} was used with {self:?}", event.device());
    }
}

impl Context {
    /// Reports what failed where no error can be returned. Quiet where it has nothing to say to anyone: at the exit
    /// of the process, and after a device reset, which took the handle with it.
    fn note(&self, operation: &'static str, answer: c_int) {
        if matches!(answer, code::CUDART_UNLOADING | code::CONTEXT_IS_DESTROYED) {
            return;
        }
        if let Err(error) = self.table.check(operation, answer) {
            tracing::warn!(ordinal = self.ordinal, %error, "a call failed where no error can be returned");
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let (table, device) = (&self.table, self.device);
        // SAFETY: `from_table` retained it once, and every stream, event and memory of it is gone: each holds this.
        let answer = relaxed(table, || unsafe { (table.cuDevicePrimaryCtxRelease_v2)(device) });
        self.note("cuDevicePrimaryCtxRelease", answer);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {:?})", self.0.ordinal, self.0.name)
    }
}

/// Runs `call` in relaxed capture mode and puts the thread's mode back. Where the mode cannot be changed the call is
/// made all the same, and its own answer tells.
fn relaxed<R>(table: &DeviceTable, call: impl FnOnce() -> R) -> R {
    let mut mode = RELAXED;
    // SAFETY: the pointer is to a live integer of ours, which gets the mode that was.
    let changed = unsafe { (table.cuThreadExchangeStreamCaptureMode)(&mut mode) } == 0;
    let result = call();
    if changed {
        // SAFETY: as above; the mode is the one that the driver just gave.
        unsafe { (table.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }
    result
}
