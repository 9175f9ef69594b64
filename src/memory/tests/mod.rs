//! The ring against a fake CUDA. Each test runs in a process of its own, since what it looks at (what the kernel has
//! mapped, what CUDA has registered, the figures of the process) is the whole process's.

mod end;
mod fake;
mod fork;
mod start;

use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cuda::types::CudaError;

use super::budget::HostFiles;
use super::error::RingError;
use super::mapping::address_range;
use super::progress::{PinProgress, PinWatch};
use super::ring::{Conditions, Ring, RingPlan};

const MIB: usize = 1 << 20;

/// Set in the process that runs one test.
const CHILD: &str = "PINRING_TEST_ALONE";

/// Declares a test that runs in a process of its own, with a watchdog.
macro_rules! alone {
    ($(#[$meta:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            $crate::memory::tests::run_alone(concat!(module_path!(), "::", stringify!($name)), || $body);
        }
    };
}
use alone;

fn run_alone(test: &str, body: impl FnOnce()) {
    // The harness knows tests by their path without the crate's name.
    let test = test.split_once("::").unwrap().1;
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        return body();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--test-threads=1"])
        .env(CHILD, test)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("{test} did not end within 120 s");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// What the kernel has mapped and wipes on fork, each with the bytes that are in memory: the rings of this process (and
/// the page of `fork.rs`).
#[cfg(target_os = "linux")]
fn rings_in_kernel() -> Vec<(Range<usize>, usize)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut rings, mut current, mut resident) = (Vec::new(), 0..0, 0);
    for line in smaps.lines() {
        if let Some(range) = address_range(line) {
            current = range;
        } else if let Some(kib) = line.strip_prefix("Rss:") {
            resident = kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024;
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && flags.split_whitespace().any(|flag| flag == "wf")
        {
            rings.push((current.clone(), resident));
        }
    }
    rings
}

/// Elsewhere the kernel has no such list; CUDA's side is still tested.
#[cfg(not(target_os = "linux"))]
fn rings_in_kernel() -> Vec<(Range<usize>, usize)> {
    Vec::new()
}

fn ring_ranges() -> Vec<Range<usize>> {
    rings_in_kernel().into_iter().map(|(range, _)| range).collect()
}

fn resident_ring_bytes() -> usize {
    rings_in_kernel().iter().map(|(_, resident)| resident).sum()
}

/// A ring is shared by every thread of a feed.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Ring>();
    shared::<PinWatch>();
};

/// This machine, with a known number of threads and pieces of `piece_bytes`.
fn conditions(piece_bytes: usize) -> Conditions {
    // No limits: what other tests take from this machine meanwhile must not matter.
    let host = HostFiles::at("/nonexistent", "/nonexistent");
    Conditions { host, prefault_threads: 2, piece_bytes, ..Conditions::here() }
}

fn plan(slot_bytes: usize, slots: usize) -> RingPlan {
    RingPlan::new(slot_bytes, slots)
}

/// A ring of `slots` slots of 1 MiB, in pieces of at most `at_once` slots.
fn pin(slots: usize, at_once: usize) -> Result<Ring, RingError> {
    pin_watched(slots, at_once, &PinWatch::new(None))
}

fn pin_watched(slots: usize, at_once: usize, watch: &PinWatch) -> Result<Ring, RingError> {
    Ring::pinned_under(&conditions(at_once * MIB), &plan(MIB, slots), || Ok(fake::cuda()), watch)
}

fn watch(callback: impl Fn(&PinProgress) + Send + Sync + 'static) -> PinWatch {
    PinWatch::new(Some(Box::new(callback)))
}

/// Makes and drops one ring, so that what the process does once (the page of `fork.rs`, threads' stacks) is done.
/// Returns what the kernel has mapped afterwards, which every later test step must come back to.
fn baseline() -> Vec<Range<usize>> {
    drop(pin(2, 1).unwrap());
    assert_nothing_is_left(&ring_ranges());
    fake::take_calls();
    ring_ranges()
}

/// Nothing registered, nothing counted, nothing mapped beyond `baseline`, no error left behind for somebody else's
/// call.
#[track_caller]
fn assert_nothing_is_left(baseline: &[Range<usize>]) {
    assert!(fake::with(|state| state.live.is_empty()), "registered");
    assert_eq!(super::pinned_bytes_in_process(), 0);
    assert_eq!(super::stranded_bytes_in_process(), 0);
    assert_eq!(ring_ranges(), baseline);
    assert_eq!(fake::last_error(), 0);
}

/// The code of the CUDA error in a failed start.
fn code(error: &RingError) -> Option<i32> {
    match error {
        RingError::Register(refusal) => Some(refusal.source.code()),
        RingError::Verify { source, .. } | RingError::DeviceAddress { source, .. } => Some(CudaError::code(source)),
        _ => None,
    }
}
