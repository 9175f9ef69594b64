//! The fake CUDA of `tests/fake_cuda`, compiled once, copied under any name, and driven from a test.
//!
//! ```ignore
//! let fake = Fake::new(&scratch("register"), "libcudart.so.13");      // copied and loaded: an instance of its own
//! fake.inject("cudaHostRegister", 2, 712);                            // the second call from now fails
//! let feed = builder.cuda_library(fake.path()).start();               // the code under test loads the same file
//! assert_eq!(fake.calls_of("cudaHostRegister").len(), 2);
//! assert!(fake.live_registrations().is_empty());
//! ```
//!
//! With devices: the same copy is runtime and driver, and what is queued moves when the test says so, or by itself.
//!
//! ```ignore
//! let fake = Fake::new(&scratch("feed"), "libcudart.so.13");
//! fake.devices(2);
//! let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
//! let learner = fake.user_stream(0);                                  // a stream as a framework has one
//! // … the code under test queues its copies …
//! fake.run_all();                                                     // or fake.auto_run(true), before
//! assert_eq!(fake.device_bytes(address, 4), [1, 2, 3, 4]);
//! assert_eq!(fake.hazards(), Hazards::default());
//! ```
//!
//! Every copy has its own log, devices, registrations and last-error slots. [`place`] copies without loading, for tests where
//! the search has to find the file by itself; [`Fake::open`] then joins the instance that it loaded. A `Fake` may be
//! used from any thread and is never closed. What each function of the fake does is said in its source.
//!
//! The compiler is `RUSTC`, else `rustc`. A host without one sets `PINRING_FAKE_CUDA` to a library built elsewhere
//! ([`library`] says where the build put it).
#![allow(dead_code)]

use super::build_dir;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

const SOURCES: [(&str, &str); 12] = [
    ("lib.rs", include_str!("../fake_cuda/lib.rs")),
    ("capture.rs", include_str!("../fake_cuda/capture.rs")),
    ("codes.rs", include_str!("../fake_cuda/codes.rs")),
    ("contexts.rs", include_str!("../fake_cuda/contexts.rs")),
    ("control.rs", include_str!("../fake_cuda/control.rs")),
    ("driver.rs", include_str!("../fake_cuda/driver.rs")),
    ("emulate.rs", include_str!("../../src/gather/emulate.rs")),
    ("kernels.rs", include_str!("../fake_cuda/kernels.rs")),
    ("launch.rs", include_str!("../../src/gather/launch.rs")),
    ("memory.rs", include_str!("../fake_cuda/memory.rs")),
    ("runtime.rs", include_str!("../fake_cuda/runtime.rs")),
    ("streams.rs", include_str!("../fake_cuda/streams.rs")),
];
/// The soname that the compiler writes; every copy gets its own file name in this place, as real runtimes have it.
const SONAME: &str = "libpinring_fake_soname_placeholder.so";

/// The compiled fake, before it is copied. Built at the first call of a process unless its file is there already.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| match std::env::var_os("PINRING_FAKE_CUDA") {
        Some(path) => {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "PINRING_FAKE_CUDA={}: no such file", path.display());
            path
        }
        None => compile(),
    })
}

fn compile() -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (SOURCES, SONAME, std::env::consts::ARCH).hash(&mut hasher);
    let stem = format!("fake-{:016x}", hasher.finish());
    let dir = build_dir();
    let built = dir.join(format!("{stem}.so"));
    if built.is_file() {
        return built;
    }
    std::fs::create_dir_all(&dir).expect("create the folder of the fake");
    // Under a name of this process, then renamed: several test processes may build at the same time.
    let folder = dir.join(format!("{stem}-{}", std::process::id()));
    let output = folder.with_extension("so.part");
    std::fs::create_dir_all(&folder).expect("create the folder of the fake's sources");
    for (name, text) in SOURCES {
        std::fs::write(folder.join(name), text).expect("write the sources of the fake");
    }
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(&rustc);
    command.args(["--edition", "2021", "--crate-name", "fake_cuda", "--crate-type", "cdylib"]);
    command.args(["-C", "opt-level=1", "-C", "strip=symbols", "-C"]);
    command.arg(format!("link-arg=-Wl,-soname,{SONAME}")).arg("-o").arg(&output).arg(folder.join("lib.rs"));
    let run = command.output().unwrap_or_else(|e| {
        panic!("start {rustc:?} to build the fake CUDA runtime: {e}; set RUSTC, or PINRING_FAKE_CUDA to one built elsewhere")
    });
    assert!(run.status.success(), "build the fake CUDA runtime: {}", String::from_utf8_lossy(&run.stderr));
    std::fs::rename(&output, &built).expect("put the fake in place");
    let _ = std::fs::remove_dir_all(&folder);
    built
}

/// Copies the fake to `dir/name` without loading it; its soname becomes `name`. Creates `dir`.
pub fn place(dir: &Path, name: &str) -> PathBuf {
    place_edited(dir, name, |_| {})
}

/// As [`place`], of a library that lacks the function `symbol`.
pub fn place_without(dir: &Path, name: &str, symbol: &str) -> PathBuf {
    place_edited(dir, name, |bytes| {
        let wanted: Vec<u8> = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let mut found = false;
        for at in 0..bytes.len().saturating_sub(wanted.len()) {
            if bytes[at..].starts_with(&wanted) {
                bytes[at + wanted.len() - 2] = b'?';
                found = true;
            }
        }
        assert!(found, "the fake has no symbol {symbol}");
    })
}

/// As [`place`], of a library that claims to be for 32-bit processes.
pub fn place_wrong_class(dir: &Path, name: &str) -> PathBuf {
    place_edited(dir, name, |bytes| bytes[4] = 1)
}

fn place_edited(dir: &Path, name: &str, edit: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(library()).expect("read the built fake");
    assert!(name.len() <= SONAME.len(), "{name} is longer than the room for a soname");
    let mut at = 0;
    while at + SONAME.len() <= bytes.len() {
        if bytes[at..].starts_with(SONAME.as_bytes()) {
            bytes[at..at + SONAME.len()].fill(0);
            bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
        }
        at += 1;
    }
    edit(&mut bytes);
    std::fs::create_dir_all(dir).expect("create the folder of the copy");
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
    path
}

/// One line of a fake's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Position in the log of this instance, from 0: the order in which calls began.
    pub sequence: u64,
    /// The calling thread, as [`Fake::thread`] names it.
    pub thread: u64,
    /// The calling process.
    pub pid: u32,
    /// The function's C name.
    pub function: String,
    /// Its arguments in order, as integers; unused places are 0.
    pub args: [u64; 5],
    /// The device whose context was current on the calling thread.
    pub device: Option<i32>,
    /// What it returned; `None` while it runs.
    pub code: Option<i32>,
}

/// One live piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Whose memory it is.
    pub device: i32,
}

/// One live stream that was created, not a default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// Its handle.
    pub handle: usize,
    /// Whose stream it is.
    pub device: i32,
    /// The flags that it was created with; 1 = non-blocking.
    pub flags: u32,
    /// Its priority: 0 is the least, -5 the greatest.
    pub priority: i32,
    /// How many operations are queued in it.
    pub queued: usize,
    /// Whether the test holds it.
    pub held: bool,
}

/// One live event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventInfo {
    /// Its handle.
    pub handle: usize,
    /// Whose event it is.
    pub device: i32,
    /// The flags that it was created with; 1 = waits sleep, 2 = without timing.
    pub flags: u32,
    /// How often it was recorded, captures not counted.
    pub recorded: u64,
}

/// What the code under test should never do. The fake lets queued copies finish first, as real hardware may not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hazards {
    /// Copies refused with 1 since a device side was not wholly inside one allocation.
    pub out_of_range: u64,
    /// Device memory that was freed while queued copies used it.
    pub freed_in_flight: u64,
    /// Host memory that was unregistered while queued copies used it.
    pub unregistered_in_flight: u64,
    /// Modules that were unloaded while kernels of theirs were queued.
    pub unloaded_in_flight: u64,
}

/// What a call meets that is more than an error of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// It does not return before [`Fake::clear_faults`].
    Hang,
    /// The context of device 0 is destroyed just before it.
    Reset,
    /// From it on an error stays, as by [`Fake::poison`].
    Poison(i32),
}

/// One live registration of a fake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// First byte.
    pub start: usize,
    /// Length in bytes.
    pub bytes: usize,
    /// The flags of `cudaHostRegister`.
    pub flags: u32,
}

#[repr(C)]
struct RawCall {
    sequence: u64,
    thread: u64,
    pid: u32,
    code: i32,
    args: [u64; 5],
    function: *const c_char,
    device: i32,
    done: u8,
}

/// A loaded copy of the fake CUDA runtime.
#[derive(Debug)]
pub struct Fake {
    path: PathBuf,
    library: std::mem::ManuallyDrop<Library>,
}

impl Fake {
    /// Copies the fake to `dir/name` and loads it.
    pub fn new(dir: &Path, name: &str) -> Fake {
        Fake::open(&place(dir, name))
    }

    /// Loads a copy made by [`place`], or joins it where the process has it loaded.
    pub fn open(path: &Path) -> Fake {
        // SAFETY: the library is ours; loading it runs no code of its own.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.unwrap_or_else(|e| panic!("load {}: {e:?}", path.display()));
        Fake { path: path.to_owned(), library: std::mem::ManuallyDrop::new(library) }
    }

    /// The file of this copy.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the copy, by name. `F` must be its C signature.
    fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers below name each function with the signature that its source gives it.
        let symbol = unsafe { self.library.get::<F>(name) };
        *symbol.unwrap_or_else(|e| panic!("{name} of {}: {e:?}", self.path.display()))
    }

    /// The `nth` call of `function` from now on (1 = the next) returns `code` and does nothing; with 0 every call
    /// does. The function `"*"` counts the calls of all functions.
    pub fn inject(&self, function: &str, nth: u64, code: i32) {
        let function = CString::new(function).unwrap();
        let f: unsafe extern "C" fn(*const c_char, u64, i32) = self.get("fake_inject");
        // SAFETY: `function` is a C string that outlives the call.
        unsafe { f(function.as_ptr(), nth, code) }
    }

    /// Every call of `function` takes `ms` milliseconds longer; other calls go on meanwhile. 0 ends it.
    pub fn sleep(&self, function: &str, ms: u64) {
        let function = CString::new(function).unwrap();
        let f: unsafe extern "C" fn(*const c_char, u64) = self.get("fake_sleep");
        // SAFETY: `function` is a C string that outlives the call.
        unsafe { f(function.as_ptr(), ms) }
    }

    /// Registrations beyond these sizes answer 2: the bytes of one call, and of all live ones together.
    pub fn cap(&self, bytes_per_call: u64, bytes_in_total: u64) {
        let f: extern "C" fn(u64, u64) = self.get("fake_cap");
        f(bytes_per_call, bytes_in_total)
    }

    /// An error that stays, as 700 does: from the `nth` call of any function on (1 = the next) every call answers
    /// `code` but those that need no context (push, pop, versions, …), and nothing that is queued runs any more. No
    /// reset ends it, as on a real GPU; [`clear_faults`](Self::clear_faults) does.
    pub fn poison(&self, nth: u64, code: i32) {
        let f: extern "C" fn(u64, i32) = self.get("fake_poison");
        f(nth, code)
    }

    /// The `nth` call of `function` from now on (1 = the next, `"*"` = of any) meets this.
    pub fn trap(&self, function: &str, nth: u64, trap: Trap) {
        let function = CString::new(function).unwrap();
        let kind = match trap {
            Trap::Hang => 0,
            Trap::Reset => 1,
            Trap::Poison(code) => code,
        };
        let f: unsafe extern "C" fn(*const c_char, u64, i32) = self.get("fake_trap");
        // SAFETY: `function` is a C string that outlives the call.
        unsafe { f(function.as_ptr(), nth, kind) }
    }

    /// The call that hangs.
    pub fn hung(&self) -> Option<Call> {
        let f: extern "C" fn() -> u64 = self.get("fake_hung");
        Some(f()).filter(|index| *index != u64::MAX).map(|index| self.call(index))
    }

    /// Takes back every injection, trap, sleep and cap, and the error that stays; a call that hangs goes on.
    pub fn clear_faults(&self) {
        let f: extern "C" fn() = self.get("fake_clear_faults");
        f()
    }

    /// What the version functions answer (13000 = CUDA 13.0, which both are at first; driver 0 = none installed).
    pub fn versions(&self, runtime: i32, driver: i32) {
        let f: extern "C" fn(i32, i32) = self.get("fake_versions");
        f(runtime, driver)
    }

    /// How many devices there are; 1 at first.
    pub fn devices(&self, count: i32) {
        let f: extern "C" fn(i32) = self.get("fake_devices");
        f(count)
    }

    /// Runs what is queued in a stream and returns how many operations ran. It stops at a wait for an event that is
    /// still pending. Copies read their source now. 0, 1 and 2 are the default streams of the calling thread's
    /// current device.
    pub fn run(&self, stream: usize) -> u64 {
        self.run_some(stream, u64::MAX)
    }

    /// As [`run`](Self::run), at most so many operations.
    pub fn run_some(&self, stream: usize, most: u64) -> u64 {
        let f: extern "C" fn(usize, u64) -> u64 = self.get("fake_run");
        f(stream, most)
    }

    /// Runs all streams, in the order in which they were made and again until nothing more can run; returns how many
    /// operations ran.
    pub fn run_all(&self) -> u64 {
        let f: extern "C" fn() -> u64 = self.get("fake_run_all");
        f()
    }

    /// Lets what is queued complete by itself, or no longer: on a thread of the fake, or at the next query.
    pub fn auto_run(&self, on: bool) {
        self.auto_run_after(on.then_some(Duration::ZERO))
    }

    /// As [`auto_run`](Self::auto_run), so long after each operation was queued; `None` = not by itself.
    pub fn auto_run_after(&self, delay: Option<Duration>) {
        let f: extern "C" fn(u8, u64) = self.get("fake_auto_run");
        f(delay.is_some().into(), delay.map_or(0, |delay| delay.as_micros() as u64))
    }

    /// Holds a stream, or lets it go: while it is held nothing in it runs, whoever asks, and calls that wait for it
    /// do not return.
    pub fn hold(&self, stream: usize, held: bool) {
        let f: extern "C" fn(usize, u8) -> i32 = self.get("fake_hold");
        assert_eq!(f(stream, held.into()), 0, "there is a stream {stream:#x}");
    }

    /// The whole log, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.calls_from(0)
    }

    /// The log from one line on.
    pub fn calls_from(&self, first: u64) -> Vec<Call> {
        (first..self.call_count()).map(|index| self.call(index)).collect()
    }

    /// How many lines the log has.
    pub fn call_count(&self) -> u64 {
        let count: extern "C" fn() -> u64 = self.get("fake_call_count");
        count()
    }

    fn call(&self, index: u64) -> Call {
        let call: unsafe extern "C" fn(u64, *mut RawCall) -> i32 = self.get("fake_call");
        let mut raw = std::mem::MaybeUninit::<RawCall>::uninit();
        // SAFETY: an out-pointer of the type that the function writes; it does so when it answers 0.
        let raw = unsafe {
            assert_eq!(call(index, raw.as_mut_ptr()), 0, "the log has a line {index}");
            raw.assume_init()
        };
        // SAFETY: a C string that lives as long as the library, which is never closed.
        let function = unsafe { CStr::from_ptr(raw.function) }.to_string_lossy().into_owned();
        let code = (raw.done != 0).then_some(raw.code);
        let device = (raw.device >= 0).then_some(raw.device);
        Call { sequence: raw.sequence, thread: raw.thread, pid: raw.pid, function, args: raw.args, device, code }
    }

    /// The lines of one function.
    pub fn calls_of(&self, function: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.function == function).collect()
    }

    /// The names of the functions called, in order.
    pub fn functions(&self) -> Vec<String> {
        self.calls().into_iter().map(|call| call.function).collect()
    }

    /// What is registered now, by address.
    pub fn live_registrations(&self) -> Vec<Registration> {
        let one = |r: [u64; 3]| Registration { start: r[0] as usize, bytes: r[1] as usize, flags: r[2] as u32 };
        self.rows("fake_registrations").into_iter().map(one).collect()
    }

    /// The device memory that is allocated now, by address.
    pub fn live_allocations(&self) -> Vec<Allocation> {
        let one = |r: [u64; 3]| Allocation { address: r[0], bytes: r[1] as usize, device: r[2] as i32 };
        self.rows("fake_allocations").into_iter().map(one).collect()
    }

    /// The streams that are alive now, in the order in which they were made.
    pub fn live_streams(&self) -> Vec<StreamInfo> {
        let one = |r: [u64; 6]| StreamInfo {
            handle: r[0] as usize,
            device: r[1] as i32,
            flags: r[2] as u32,
            priority: r[3] as i64 as i32,
            queued: r[4] as usize,
            held: r[5] != 0,
        };
        self.rows("fake_streams").into_iter().map(one).collect()
    }

    /// The events that are alive now, in the order in which they were made.
    pub fn live_events(&self) -> Vec<EventInfo> {
        let one =
            |r: [u64; 4]| EventInfo { handle: r[0] as usize, device: r[1] as i32, flags: r[2] as u32, recorded: r[3] };
        self.rows("fake_events").into_iter().map(one).collect()
    }

    /// What a function of the fake lists.
    fn rows<const N: usize>(&self, function: &str) -> Vec<[u64; N]> {
        let f: unsafe extern "C" fn(*mut [u64; N], usize) -> usize = self.get(function);
        let mut room = vec![[0; N]; 64];
        loop {
            // SAFETY: `room` has as many places as the second argument says.
            let count = unsafe { f(room.as_mut_ptr(), room.len()) };
            if count <= room.len() {
                room.truncate(count);
                return room;
            }
            room.resize(count, [0; N]);
        }
    }

    /// How often the primary context of a device is retained now.
    pub fn retained(&self, device: i32) -> u32 {
        let f: extern "C" fn(i32) -> u32 = self.get("fake_retained");
        f(device)
    }

    /// What should not have happened and did.
    pub fn hazards(&self) -> Hazards {
        let f: unsafe extern "C" fn(*mut [u64; 4]) = self.get("fake_hazards");
        let mut counts = [0; 4];
        // SAFETY: an out-pointer to a live array.
        unsafe { f(&mut counts) };
        let [out_of_range, freed_in_flight, unregistered_in_flight, unloaded_in_flight] = counts;
        Hazards { out_of_range, freed_in_flight, unregistered_in_flight, unloaded_in_flight }
    }

    /// Bytes of device memory as they are now, whatever is queued.
    pub fn device_bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.device_copy(address, bytes.as_mut_ptr(), std::ptr::null(), len);
        bytes
    }

    /// Writes device memory, as a kernel would.
    pub fn write_device(&self, address: u64, bytes: &[u8]) {
        self.device_copy(address, std::ptr::null_mut(), bytes.as_ptr(), bytes.len());
    }

    fn device_copy(&self, address: u64, out: *mut u8, from: *const u8, len: usize) {
        let f: unsafe extern "C" fn(u64, *mut u8, *const u8, usize) -> i32 = self.get("fake_device_bytes");
        // SAFETY: one side is null, and the other has `len` bytes.
        let code = unsafe { f(address, out, from, len) };
        assert_eq!(code, 0, "{len} bytes at {address:#x} are no device memory");
    }

    /// The calling thread's last-error slot in this copy, read without a line in the log.
    pub fn peek_last_error(&self) -> i32 {
        let f: extern "C" fn() -> i32 = self.get("fake_last_error");
        f()
    }

    /// Puts a code into that slot, as a failed call of somebody else would have.
    pub fn set_last_error(&self, code: i32) {
        let f: extern "C" fn(i32) = self.get("fake_set_last_error");
        f(code)
    }

    /// How many driver contexts the calling thread has pushed and not popped.
    pub fn contexts(&self) -> u32 {
        let f: extern "C" fn() -> u32 = self.get("fake_contexts");
        f()
    }

    /// The device whose context is current on the calling thread.
    pub fn current_device(&self) -> Option<i32> {
        let f: extern "C" fn() -> i32 = self.get("fake_current_device");
        Some(f()).filter(|device| *device >= 0)
    }

    /// The calling thread's capture mode: 0 global, as every thread begins; 1 thread-local; 2 relaxed.
    pub fn capture_mode(&self) -> u32 {
        let f: extern "C" fn() -> u32 = self.get("fake_capture_mode");
        f()
    }

    /// Whether calls are kept in the log, as they are at first: for runs that are long, where nobody reads it.
    pub fn keep_log(&self, keep: bool) {
        let f: extern "C" fn(u8) = self.get("fake_keep_log");
        f(keep.into())
    }

    /// Also appends a line for every call to this file, and `exit-hook` when the process ends: for what happens in
    /// a child process or after `main`.
    pub fn log_file(&self, path: &Path) {
        let path = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        let f: unsafe extern "C" fn(*const c_char) = self.get("fake_log_file");
        // SAFETY: `path` is a C string that outlives the call.
        unsafe { f(path.as_ptr()) }
    }

    /// The calling thread's id as the log shows it.
    pub fn thread(&self) -> u64 {
        let f: extern "C" fn() -> u64 = self.get("fake_thread");
        f()
    }

    /// Registers a range as some other owner in the process would; returns the code.
    pub fn foreign_register(&self, start: *mut u8, bytes: usize) -> i32 {
        let f: unsafe extern "C" fn(*mut u8, usize, u32) -> i32 = self.get("cudaHostRegister");
        // SAFETY: the fake only notes the range.
        unsafe { f(start, bytes, 0) }
    }

    /// `cudaSetDevice` on this thread, as the code around would call it.
    pub fn set_device(&self, device: i32) {
        let f: unsafe extern "C" fn(i32) -> i32 = self.get("cudaSetDevice");
        // SAFETY: it takes any integer.
        assert_eq!(unsafe { f(device) }, 0, "there is a device {device}");
    }

    /// A stream of the current device as a framework creates one: non-blocking with `flags` 1, else 0.
    pub fn user_stream(&self, flags: u32) -> usize {
        let f: unsafe extern "C" fn(*mut usize, u32) -> i32 = self.get("cudaStreamCreateWithFlags");
        let mut stream = 0;
        // SAFETY: an out-pointer to a live integer.
        assert_eq!(unsafe { f(&mut stream, flags) }, 0, "the stream is created");
        stream
    }

    /// Memory of the current device as a framework allocates it.
    pub fn user_memory(&self, bytes: usize) -> u64 {
        let f: unsafe extern "C" fn(*mut u64, usize) -> i32 = self.get("cudaMalloc");
        let mut address = 0;
        // SAFETY: an out-pointer to a live integer of the size of a pointer.
        assert_eq!(unsafe { f(&mut address, bytes) }, 0, "the memory is allocated");
        address
    }

    /// Frees that memory again.
    pub fn free_user_memory(&self, address: u64) {
        let f: unsafe extern "C" fn(u64) -> i32 = self.get("cudaFree");
        // SAFETY: the fake looks the address up.
        assert_eq!(unsafe { f(address) }, 0, "the memory is freed");
    }

    /// Queues a copy from the host to the device, as a framework does; its code.
    pub fn user_copy_in(&self, dst: u64, src: *const u8, bytes: usize, stream: usize) -> i32 {
        let f: unsafe extern "C" fn(u64, *const u8, usize, i32, usize) -> i32 = self.get("cudaMemcpyAsync");
        // SAFETY: the tests keep both ranges until the copy has run; what is no device memory is refused.
        unsafe { f(dst, src, bytes, 1, stream) }
    }

    /// Begins a capture in a stream on this thread, as a framework does; `mode` as [`capture_mode`](Self::capture_mode)
    /// numbers them, 0 being the default of torch.
    pub fn begin_capture(&self, stream: usize, mode: u32) {
        let f: unsafe extern "C" fn(usize, u32) -> i32 = self.get("cudaStreamBeginCapture");
        // SAFETY: it takes any integers.
        assert_eq!(unsafe { f(stream, mode) }, 0, "the capture begins");
    }

    /// Ends the capture, on the thread that began it; whether it is intact.
    pub fn end_capture(&self, stream: usize) -> bool {
        let f: unsafe extern "C" fn(usize, *mut usize) -> i32 = self.get("cudaStreamEndCapture");
        let mut graph = 0;
        // SAFETY: it takes any integer, and an out-pointer to a live one.
        match unsafe { f(stream, &mut graph) } {
            0 => true,
            901 => false,
            code => panic!("the capture of {stream:#x} cannot be ended: {code}"),
        }
    }

    /// Undoes that.
    pub fn foreign_unregister(&self, start: *mut u8) -> i32 {
        let f: unsafe extern "C" fn(*mut u8) -> i32 = self.get("cudaHostUnregister");
        // SAFETY: the fake looks the address up.
        unsafe { f(start) }
    }

    /// `cudaDeviceReset`, as some other owner in the process would call it.
    pub fn device_reset(&self) {
        let f: unsafe extern "C" fn() -> i32 = self.get("cudaDeviceReset");
        // SAFETY: no arguments; it forgets registrations and device memory of the fake.
        assert_eq!(unsafe { f() }, 0);
    }
}
