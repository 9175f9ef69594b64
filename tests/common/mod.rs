//! What the tests share: scratch folders, a watchdog, a way to run one test alone in a fresh process, and the fake
//! CUDA runtime ([`fake`]). Each test file takes what it needs.
#![allow(dead_code)]

#[allow(unsafe_code)]
#[cfg(target_os = "linux")] // as the search for CUDA
pub mod fake;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Once, OnceLock, mpsc};
use std::time::Duration;

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

/// Bytes that the kernel could give, where it says so.
pub fn available() -> Option<usize> {
    let all = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kilobytes.trim().trim_end_matches(" kB").parse::<usize>().ok()?.checked_mul(1024)
}

/// A folder for a test's files, empty and of its own: in the build's folder for temporary files, or in the system's
/// where that one does not exist (a test binary that was carried to another machine).
pub fn scratch(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    static TIDY: Once = Once::new();
    TIDY.call_once(remove_left_over);
    let unique = format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let dir = build_dir().join("scratch").join(unique);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("create {}: {e}", dir.display()));
    dir
}

/// Removes the folders of test processes that have ended (each copy of the fake takes half a megabyte).
fn remove_left_over() {
    let Ok(entries) = std::fs::read_dir(build_dir().join("scratch")) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.rsplit('-').nth(1).and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Ends the process with a message if it still lives after `limit`: a threaded test that would hang fails instead.
///
/// ```ignore
/// let _watchdog = Watchdog::new("writers and learner", Duration::from_secs(60));
/// ```
#[derive(Debug)]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Starts to watch; dropping it ends the watch.
    pub fn new(what: &'static str, limit: Duration) -> Watchdog {
        let (alive, dropped) = mpsc::channel();
        std::thread::spawn(move || {
            if let Err(mpsc::RecvTimeoutError::Timeout) = dropped.recv_timeout(limit) {
                eprintln!("watchdog: '{what}' did not end within {limit:?}");
                std::process::abort();
            }
        });
        Watchdog { _alive: alive }
    }
}

/// Sets a flag when it goes, by a panic too: threads that go on until then end, so that their scope shows the panic and
/// does not wait for them for ever.
#[derive(Debug)]
pub struct SetAtEnd<'f>(pub &'f AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The variables that the search for CUDA reads, itself or through the loader.
pub const SEARCH_VARIABLES: [&str; 6] =
    ["VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"];

/// Set in the child that [`alone`] starts.
const CHILD: &str = "PINRING_TEST_CHILD";

/// Whether this process is the child that [`alone`] started for `test`.
pub fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|name| name == test)
}

/// Runs the test `test` of this binary alone in a fresh process: with the environment that `prepare` gives it and
/// none of the variables which the search for CUDA reads. The test starts with
/// `if !is_child("name") { alone("name", |_| {}); return; }`, or hands facts over by variables of its own.
pub fn alone(test: &str, prepare: impl FnOnce(&mut Command)) -> Output {
    let output = alone_output(test, prepare);
    let passed = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert!(
        output.status.success() && passed,
        "{test} in a process of its own: {}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// As [`alone`], for tests that look at how the process ended themselves.
pub fn alone_output(test: &str, prepare: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this test's own path"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test).stdin(Stdio::null());
    for name in SEARCH_VARIABLES {
        command.env_remove(name);
    }
    prepare(&mut command);
    command.output().expect("start this test's own binary")
}

/// Writes a text file and the folders above it.
pub fn write_text(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a file in a folder")).expect("create the folder");
    std::fs::write(path, text).expect("write the file");
}
