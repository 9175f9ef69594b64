//! The fake CUDA runtime of `tests/fake_cuda/lib.rs`, compiled once, copied under any name, and driven from a test.
//!
//! ```ignore
//! let fake = Fake::new(&scratch("register"), "libcudart.so.13");      // copied and loaded: an instance of its own
//! fake.inject("cudaHostRegister", 2, 712);                            // the second call from now fails
//! let feed = builder.cuda_library(fake.path()).start();               // the code under test loads the same file
//! assert_eq!(fake.calls_of("cudaHostRegister").len(), 2);
//! assert!(fake.live_registrations().is_empty());
//! ```
//!
//! Every copy has its own log, registrations and last-error slots. [`place`] copies without loading, for tests where
//! the search has to find the file by itself; [`Fake::open`] then joins the instance that it loaded. A `Fake` may be
//! used from any thread and is never closed. What each function of the fake does is said in its source.
//!
//! The compiler is `RUSTC`, else `rustc`. A host without one sets `PINRING_FAKE_CUDA` to a library built elsewhere
//! ([`library`] says where the build put it).
#![allow(dead_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCE: &str = include_str!("../fake_cuda/lib.rs");
/// The soname that the compiler writes; every copy gets its own file name in this place, as real runtimes have it.
const SONAME: &str = "libpinring_fake_soname_placeholder.so";

/// The folder for what the tests build and write.
pub fn build_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let wanted = option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from);
        let usable = wanted.filter(|dir| std::fs::create_dir_all(dir).is_ok());
        usable.unwrap_or_else(std::env::temp_dir).join("pinring-fake-cuda")
    })
    .clone()
}

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
    (SOURCE, SONAME, std::env::consts::ARCH).hash(&mut hasher);
    let stem = format!("fake-{:016x}", hasher.finish());
    let dir = build_dir();
    let built = dir.join(format!("{stem}.so"));
    if built.is_file() {
        return built;
    }
    std::fs::create_dir_all(&dir).expect("create the folder of the fake");
    // Under a name of this process, then renamed: several test processes may build at the same time.
    let source = dir.join(format!("{stem}-{}.rs", std::process::id()));
    let output = source.with_extension("so.part");
    std::fs::write(&source, SOURCE).expect("write the source of the fake");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(&rustc);
    command.args(["--edition", "2021", "--crate-name", "fake_cuda", "--crate-type", "cdylib"]);
    command.args(["-C", "opt-level=1", "-C", "strip=symbols", "-C"]);
    command.arg(format!("link-arg=-Wl,-soname,{SONAME}")).arg("-o").arg(&output).arg(&source);
    let run = command.output().unwrap_or_else(|e| {
        panic!("start {rustc:?} to build the fake CUDA runtime: {e}; set RUSTC, or PINRING_FAKE_CUDA to one built elsewhere")
    });
    assert!(run.status.success(), "build the fake CUDA runtime: {}", String::from_utf8_lossy(&run.stderr));
    std::fs::rename(&output, &built).expect("put the fake in place");
    let _ = std::fs::remove_file(&source);
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
    /// What it returned; `None` while it runs.
    pub code: Option<i32>,
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

    /// Takes back every injection, sleep and cap.
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
    /// still pending. Copies read their source now.
    pub fn run(&self, stream: usize) -> u64 {
        let f: extern "C" fn(usize) -> u64 = self.get("fake_run");
        f(stream)
    }

    /// The whole log, in order.
    pub fn calls(&self) -> Vec<Call> {
        let count: extern "C" fn() -> u64 = self.get("fake_call_count");
        let call: unsafe extern "C" fn(u64, *mut RawCall) -> i32 = self.get("fake_call");
        let one = |index| {
            let mut raw = std::mem::MaybeUninit::<RawCall>::uninit();
            // SAFETY: an out-pointer of the type that the function writes; it does so when it answers 0.
            let raw = unsafe {
                assert_eq!(call(index, raw.as_mut_ptr()), 0, "the log has a line {index}");
                raw.assume_init()
            };
            // SAFETY: a C string that lives as long as the library, which is never closed.
            let function = unsafe { CStr::from_ptr(raw.function) }.to_string_lossy().into_owned();
            let code = (raw.done != 0).then_some(raw.code);
            Call { sequence: raw.sequence, thread: raw.thread, pid: raw.pid, function, args: raw.args, code }
        };
        (0..count()).map(one).collect()
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
        let f: unsafe extern "C" fn(*mut [u64; 3], usize) -> usize = self.get("fake_registrations");
        let mut room = vec![[0; 3]; 64];
        loop {
            // SAFETY: `room` has as many places as the second argument says.
            let count = unsafe { f(room.as_mut_ptr(), room.len()) };
            if count <= room.len() {
                let one =
                    |r: &[u64; 3]| Registration { start: r[0] as usize, bytes: r[1] as usize, flags: r[2] as u32 };
                return room[..count].iter().map(one).collect();
            }
            room.resize(count, [0; 3]);
        }
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

    /// `cudaDeviceReset`, as some other owner in the process would call it.
    pub fn device_reset(&self) {
        let f: unsafe extern "C" fn() -> i32 = self.get("cudaDeviceReset");
        // SAFETY: no arguments; it forgets registrations and device memory of the fake.
        assert_eq!(unsafe { f() }, 0);
    }
}
