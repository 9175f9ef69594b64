//! The CUDA driver as the benches use it, beside the crate: a table of functions loaded from `libcuda.so.1`, and handles
//! that give themselves back.
//!
//! The benches time what a user's own code would call, so they call the driver themselves and not through the crate.
//! Every call is checked; nothing waits unless its name says so. A [`Cuda`] is one device (the first visible one unless
//! asked otherwise) and its primary context, which frameworks and the crate share. A thread that makes calls has that
//! context current, by [`Cuda::make_current`]: frameworks do that for their threads. Nothing is closed at the end of the
//! process.
#![allow(dead_code)] // each bench uses a part

#[path = "handles.rs"] // the example of the repository includes this file from elsewhere
mod handles;

#[allow(unused_imports)] // each bench uses a part
pub use handles::{DeviceMemory, Event, Function, Graph, HostMemory, Module, RawStream, Stream};

use libloading::Library;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;

/// What goes wrong: a call, in the driver's words, or something of the bench.
pub type Failure = Box<dyn Error + Send + Sync>;

const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream.
const NON_BLOCKING: c_uint = 0x1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`.
const PLAIN_EVENT: c_uint = 0x1 | 0x2;
/// `CU_MEMHOSTALLOC_PORTABLE`, also `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: c_uint = 0x1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
const THREAD_LOCAL: c_uint = 1;
/// `CU_JIT_ERROR_LOG_BUFFER` and its size.
const JIT_LOG: [c_uint; 2] = [5, 6];
const NOT_READY: c_int = 600;

macro_rules! table {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions, under NVIDIA's names.
        #[allow(non_snake_case)]
        struct Table {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Table {
            #[allow(non_snake_case)]
            fn load(library: &Library) -> Result<Table, Failure> {
                $(
                    // SAFETY: the function is declared with the signature of NVIDIA's header for this symbol.
                    let $name = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                    let $name = *$name.map_err(|error| format!("{LIBRARY} has no {}: {}", stringify!($name), with_sources(&error)))?;
                )*
                Ok(Table { $($name),* })
            }
        }
    };
}

table! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDevicePrimaryCtxRetain(*mut usize, c_int);
    cuCtxSetCurrent(usize);
    cuGetErrorName(c_int, *mut *const c_char);
    cuGetErrorString(c_int, *mut *const c_char);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, usize);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, usize);
    cuMemsetD32Async(u64, c_uint, usize, usize);
    cuStreamCreate(*mut usize, c_uint);
    cuStreamDestroy_v2(usize);
    cuStreamSynchronize(usize);
    cuStreamWaitEvent(usize, usize, c_uint);
    cuStreamIsCapturing(usize, *mut c_int);
    cuStreamBeginCapture_v2(usize, c_uint);
    cuStreamEndCapture(usize, *mut usize);
    cuEventCreate(*mut usize, c_uint);
    cuEventDestroy_v2(usize);
    cuEventRecord(usize, usize);
    cuEventQuery(usize);
    cuEventSynchronize(usize);
    cuEventElapsedTime(*mut f32, usize, usize);
    cuModuleLoadDataEx(*mut usize, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    cuModuleGetFunction(*mut usize, usize, *const c_char);
    cuLaunchKernel(usize, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, usize, *mut *mut c_void, *mut *mut c_void);
    cuGraphInstantiateWithFlags(*mut usize, usize, u64);
    cuGraphLaunch(usize, usize);
    cuGraphDestroy(usize);
    cuGraphExecDestroy(usize);
}

/// An error's text and that of what caused it.
fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The driver and the primary context of the first visible device.
pub struct Cuda {
    table: Table,
    context: usize,
    name: String,
    version: c_int,
}

impl Cuda {
    /// [`open_on`](Cuda::open_on) the first visible device.
    pub fn open() -> Result<&'static Cuda, Failure> {
        Cuda::open_on(0)
    }

    /// Loads the driver, retains the primary context of a device and makes it current on this thread. The error says why
    /// there is no such device to use.
    pub fn open_on(ordinal: c_int) -> Result<&'static Cuda, Failure> {
        // SAFETY: loading runs the library's initialisers, which NVIDIA makes to run in any process.
        let library = unsafe { Library::new(LIBRARY) }
            .map_err(|error| format!("{LIBRARY} was not loaded: {}", with_sources(&error)))?;
        let library = ManuallyDrop::new(library); // never closed: its functions are in use until the end
        let table = Table::load(&library)?;
        let mut cuda = Cuda { table, context: 0, name: String::new(), version: 0 };
        let (mut count, mut device) = (0, 0);
        let mut name = [0; 256];
        // SAFETY: all of it: the out-pointers are live integers and a buffer of ours, as long as the call says; the device
        // is the one that the driver named.
        unsafe {
            cuda.check("cuInit", (cuda.table.cuInit)(0))?;
            let answer = (cuda.table.cuDriverGetVersion)(&mut cuda.version);
            cuda.check("cuDriverGetVersion", answer)?;
            cuda.check("cuDeviceGetCount", (cuda.table.cuDeviceGetCount)(&mut count))?;
            if ordinal >= count {
                return Err(format!("the driver sees {count} devices, so none of the number {ordinal}").into());
            }
            cuda.check("cuDeviceGet", (cuda.table.cuDeviceGet)(&mut device, ordinal))?;
            let answer = (cuda.table.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device);
            cuda.check("cuDeviceGetName", answer)?;
            let answer = (cuda.table.cuDevicePrimaryCtxRetain)(&mut cuda.context, device);
            cuda.check("cuDevicePrimaryCtxRetain", answer)?;
        }
        let name = name.map(|c| c as u8);
        cuda.name = CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |n| n.to_string_lossy().into());
        let cuda: &'static Cuda = Box::leak(Box::new(cuda));
        cuda.make_current()?;
        Ok(cuda)
    }

    /// Makes the context current on the calling thread, as a framework has it on its threads.
    pub fn make_current(&self) -> Result<(), Failure> {
        // SAFETY: the context was retained by `open` and is never released.
        self.check("cuCtxSetCurrent", unsafe { (self.table.cuCtxSetCurrent)(self.context) })
    }

    /// The device's name and the driver's version, as `13.0`.
    pub fn describe(&self) -> String {
        format!("{}, driver {}.{}", self.name, self.version / 1000, self.version % 1000 / 10)
    }

    /// Bytes of device memory that are free, and all of them.
    pub fn memory(&self) -> Result<(usize, usize), Failure> {
        let (mut free, mut all) = (0, 0);
        // SAFETY: the out-pointers are live integers of ours.
        self.check("cuMemGetInfo", unsafe { (self.table.cuMemGetInfo_v2)(&mut free, &mut all) })?;
        Ok((free, all))
    }

    // ---- what it makes ----

    /// A stream that is not ordered with the legacy default stream.
    pub fn stream(&'static self) -> Result<Stream, Failure> {
        let mut handle = 0;
        // SAFETY: the out-pointer is a live integer of ours; the drop destroys what was created.
        self.check("cuStreamCreate", unsafe { (self.table.cuStreamCreate)(&mut handle, NON_BLOCKING) })?;
        Ok(Stream { cuda: self, handle })
    }

    /// An event without timing, whose waits sleep.
    pub fn event(&'static self) -> Result<Event, Failure> {
        self.make_event(PLAIN_EVENT)
    }

    /// An event with timing, whose waits spin.
    pub fn timed_event(&'static self) -> Result<Event, Failure> {
        self.make_event(0)
    }

    fn make_event(&'static self, flags: c_uint) -> Result<Event, Failure> {
        let mut handle = 0;
        // SAFETY: the out-pointer is a live integer of ours; the drop destroys what was created.
        self.check("cuEventCreate", unsafe { (self.table.cuEventCreate)(&mut handle, flags) })?;
        Ok(Event { cuda: self, handle })
    }

    /// Device memory, of undefined content.
    pub fn alloc(&'static self, bytes: usize) -> Result<DeviceMemory, Failure> {
        let mut address = 0;
        // SAFETY: the out-pointer is a live integer of ours; the drop frees what was allocated.
        self.check("cuMemAlloc", unsafe { (self.table.cuMemAlloc_v2)(&mut address, bytes) })?;
        Ok(DeviceMemory { cuda: self, address, bytes })
    }

    /// Page-locked host memory, zeroed.
    pub fn page_locked(&'static self, bytes: usize) -> Result<HostMemory, Failure> {
        let mut at = ptr::null_mut();
        // SAFETY: the out-pointer is a live pointer of ours; the drop frees what was allocated.
        self.check("cuMemHostAlloc", unsafe { (self.table.cuMemHostAlloc)(&mut at, bytes, PORTABLE) })?;
        let at: *mut u8 = at.cast();
        // SAFETY: `bytes` bytes of our own.
        unsafe { at.write_bytes(0, bytes) };
        Ok(HostMemory { cuda: self, at, bytes })
    }

    /// Page-locks memory that is there.
    ///
    /// # Safety
    /// The memory stays allocated until [`unregister`](Cuda::unregister).
    pub unsafe fn register(&self, memory: &[u8]) -> Result<(), Failure> {
        let at = memory.as_ptr().cast_mut().cast();
        // SAFETY: the caller's promise. Its bytes are not changed.
        self.check("cuMemHostRegister", unsafe { (self.table.cuMemHostRegister_v2)(at, memory.len(), PORTABLE) })
    }

    /// Ends what `register` began.
    pub fn unregister(&self, memory: &[u8]) -> Result<(), Failure> {
        // SAFETY: an address that is not registered is an error of the call and nothing else.
        self.check("cuMemHostUnregister", unsafe {
            (self.table.cuMemHostUnregister)(memory.as_ptr().cast_mut().cast())
        })
    }

    /// Loads PTX for this device.
    pub fn module(&self, ptx: &str) -> Result<Module, Failure> {
        let ptx = CString::new(ptx)?;
        let mut log = vec![0u8; 4096];
        let mut options = JIT_LOG;
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut::<c_void>(log.len())];
        let mut handle = 0;
        // SAFETY: the text ends with a zero, the two options have the values that the header asks for, and all of it
        // outlives the call.
        let answer = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            (self.table.cuModuleLoadDataEx)(&mut handle, ptx.as_ptr().cast(), 2, options, values)
        };
        self.check("cuModuleLoadDataEx", answer).map_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).map_or_else(|_| "".into(), CStr::to_string_lossy);
            format!("{error}: {log}")
        })?;
        Ok(Module(handle))
    }

    /// A kernel of a module.
    pub fn function(&self, module: &Module, name: &CStr) -> Result<Function, Failure> {
        let mut handle = 0;
        // SAFETY: the module is loaded and is never unloaded; the name is a C string.
        let answer = unsafe { (self.table.cuModuleGetFunction)(&mut handle, module.0, name.as_ptr()) };
        self.check("cuModuleGetFunction", answer)?;
        Ok(Function(handle))
    }

    // ---- what streams do ----

    /// Launches a kernel whose parameters are 64-bit integers.
    ///
    /// # Safety
    /// The kernel takes just these parameters; where they are addresses, what it reads and writes there stays allocated
    /// until it has run.
    #[inline]
    pub unsafe fn launch<const N: usize>(
        &self,
        function: Function,
        (blocks, threads): (u32, u32),
        parameters: &mut [u64; N],
        stream: RawStream,
    ) -> Result<(), Failure> {
        let mut pointers: [*mut c_void; N] = [ptr::null_mut(); N];
        for (pointer, parameter) in pointers.iter_mut().zip(parameters) {
            *pointer = ptr::from_mut(parameter).cast();
        }
        // SAFETY: the caller's promise; the driver copies the parameters before the call returns.
        self.check("cuLaunchKernel", unsafe {
            let (parameters, none) = (pointers.as_mut_ptr(), ptr::null_mut());
            (self.table.cuLaunchKernel)(function.0, blocks, 1, 1, threads, 1, 1, 0, stream.0, parameters, none)
        })
    }

    /// Queues a copy to the device: `cudaMemcpyAsync`, whatever kind of memory `from` is.
    ///
    /// # Safety
    /// Both ranges stay allocated and the bytes unchanged until the stream has passed the copy.
    #[inline]
    pub unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: usize, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        self.check("cuMemcpyHtoDAsync", unsafe { (self.table.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream.0) })
    }

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// Both ranges stay allocated, and nobody touches `to`, until the stream has passed the copy.
    #[inline]
    pub unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: usize, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        self.check("cuMemcpyDtoHAsync", unsafe { (self.table.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, stream.0) })
    }

    /// Sets `words` 32-bit words of device memory.
    ///
    /// # Safety
    /// They stay allocated until the stream has passed the call.
    pub unsafe fn set(&self, to: u64, word: u32, words: usize, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        self.check("cuMemsetD32Async", unsafe { (self.table.cuMemsetD32Async)(to, word, words, stream.0) })
    }

    #[inline]
    fn check(&self, operation: &'static str, code: c_int) -> Result<(), Failure> {
        if code == 0 { Ok(()) } else { Err(self.failure(operation, code)) }
    }

    #[cold]
    fn failure(&self, operation: &'static str, code: c_int) -> Failure {
        let words = |lookup: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut words = ptr::null();
            // SAFETY: it takes any integer, and writes null or a C string of static lifetime.
            unsafe {
                lookup(code, &mut words);
                if words.is_null() { "unknown".into() } else { CStr::from_ptr(words).to_string_lossy().into_owned() }
            }
        };
        let (symbol, text) = (words(self.table.cuGetErrorName), words(self.table.cuGetErrorString));
        format!("{operation} returned {code} {symbol} ({text})").into()
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.describe())
    }
}
