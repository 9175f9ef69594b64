//! The kernel's walk, on the host.
//!
//! Owns the same index arithmetic as `kernel.cu`, thread by thread, so that tests without a device run it: it follows
//! a launch as the fake CUDA got it. It uses `std` alone: the fake compiles it too. What it does not do: stand in for the
//! kernel where there is no device; a feed then gathers with `store`'s own copies.

use super::launch::{Chunk, DEPTH, Launch, NOTHING};

/// Runs the launch with so many threads, of all blocks together. `at` gives the host's address of bytes by the device's, or
/// `None` where there are none; then the walk ends, and says so with false, as a device would with an error.
///
/// # Safety
/// What `at` gives for addresses of the launch is readable, and within the batch writable, and aligned as on a device.
pub unsafe fn emulate(launch: &Launch, threads: u32, at: &dyn Fn(u64, usize) -> Option<*mut u8>) -> bool {
    // SAFETY: here and below: the caller's promise.
    (0..threads).all(|thread| unsafe { run(launch, threads, thread, at) }.is_some())
}

unsafe fn run(a: &Launch, threads: u32, thread: u32, at: &dyn Fn(u64, usize) -> Option<*mut u8>) -> Option<()> {
    let entry = |row: u32, entry: u32| {
        let address = a.table + 4 * (u64::from(row) * u64::from(a.stride) + u64::from(entry));
        // SAFETY: as at `emulate`; here and below.
        at(address, 4).map(|at| unsafe { at.cast::<u32>().read() })
    };
    let total = a.rows * a.chunk_count;
    let mut first = thread;
    while first < total {
        for k in 0..DEPTH {
            let i = first + k * threads;
            if i >= total {
                continue;
            }
            let (row, place) = (i / a.chunk_count, i % a.chunk_count);
            let chunk = at(a.chunks + 16 * u64::from(place), 16)?;
            // SAFETY: as at `emulate`.
            let chunk = unsafe { chunk.cast::<Chunk>().read() };
            let record = entry(row, chunk.entry())?;
            let mut value = [0u8; 16];
            if record != NOTHING {
                let from = at(a.store + u64::from(record) * a.record_bytes + u64::from(chunk.from), 16)?;
                // A device refuses an address that is not a multiple of what is loaded at once.
                if !(from as usize).is_multiple_of(16) {
                    return None;
                }
                // SAFETY: as at `emulate`.
                value = unsafe { from.cast::<[u8; 16]>().read() };
            }
            let to = at(a.batch + u64::from(chunk.to) + u64::from(row) * u64::from(chunk.row_stride), chunk.bytes())?;
            let whole = |number: usize| number.is_multiple_of(chunk.alignment());
            if !whole(to as usize) || !whole(chunk.bytes()) {
                return None;
            }
            // SAFETY: as at `emulate`.
            unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, chunk.bytes()) };
        }
        first += DEPTH * threads;
    }
    if a.has_sum == 0 {
        return Some(());
    }
    let mut row = thread;
    while row < a.rows {
        let steps = entry(row, a.stride - 1)?;
        let mut sum = 0f32;
        for k in 0..steps {
            let record = entry(row, a.sum_entry + k)?;
            let reward = at(a.store + u64::from(record) * a.record_bytes + u64::from(a.sum_from), 4)?;
            let power = at(a.powers + 4 * u64::from(k), 4)?;
            // SAFETY: as at `emulate`.
            let (reward, power) = unsafe { (reward.cast::<f32>().read(), power.cast::<f32>().read()) };
            sum = if k == 0 { reward } else { sum + power * reward };
        }
        let to = at(a.batch + u64::from(a.sum_to) + u64::from(row) * u64::from(a.sum_row_stride), 4)?;
        // SAFETY: as at `emulate`.
        unsafe { to.cast::<f32>().write(sum) };
        row += threads;
    }
    Some(())
}
