//! Time on a processor, of one thread or of the whole process: what it costs, whoever else runs on the machine.

use std::time::Duration;

/// Of this thread so far. `None` where the system does not say.
pub fn of_thread() -> Option<Duration> {
    clock(Which::Thread)
}

/// Of every thread of this process so far. `None` where the system does not say.
pub fn of_process() -> Option<Duration> {
    clock(Which::Process)
}

#[derive(Clone, Copy)]
enum Which {
    Thread,
    Process,
}

#[cfg(unix)]
fn clock(which: Which) -> Option<Duration> {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(match which {
        Which::Thread => ClockId::ThreadCPUTime,
        Which::Process => ClockId::ProcessCPUTime,
    });
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

#[cfg(not(unix))]
fn clock(_: Which) -> Option<Duration> {
    None
}
