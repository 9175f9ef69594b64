//! The kernel's walk, on the host.
//!
//! Owns the same index arithmetic as `kernel.cu`, warp by warp, so that tests without a device run it: it follows
//! a launch as the fake CUDA got it. It uses `std` alone: the fake compiles it too. What it does not do: stand in for the
//! kernel where there is no device; a feed then gathers with `store`'s own copies.

use super::launch::{CHUNK, Chunk, DEPTH, Launch, NOTHING, WARP};

/// Gives the host's address of bytes by the device's, or `None` where there are none.
pub type At<'a> = &'a dyn Fn(u64, usize) -> Option<*mut u8>;

/// Runs the launch with so many threads, of all blocks together: a multiple of those of a warp. Where `at` has no bytes, or
/// something is not aligned, the walk ends and says so with false, as a device would with an error.
///
/// # Safety
/// What `at` gives for addresses of the launch is readable, and within the batch writable, and aligned as on a device.
pub unsafe fn emulate(launch: &Launch, threads: u32, at: At<'_>) -> bool {
    if !threads.is_multiple_of(WARP) {
        return false; // a shuffle would wait for lanes that there are not
    }
    let mut warps = (0..threads).step_by(WARP as usize);
    // SAFETY: the caller's promise.
    let copied = warps.all(|warp| unsafe { copy(launch, threads, warp, at) }.is_some());
    // SAFETY: as above.
    copied && (0..threads).all(|thread| unsafe { add_up(launch, threads, thread, at) }.is_some())
}

/// A chunk that a thread holds.
#[derive(Clone, Copy)]
struct Held {
    value: [u8; CHUNK],
    chunk: Chunk,
    /// Where its first byte goes, by the device's address.
    to: u64,
}

impl Held {
    /// How far its place lies past a multiple of a chunk's bytes.
    fn past(&self) -> usize {
        (self.to % CHUNK as u64) as usize
    }
}

unsafe fn entry(a: &Launch, row: u32, entry: u32, at: At<'_>) -> Option<u32> {
    let address = a.table + 4 * (u64::from(row) * u64::from(a.stride) + u64::from(entry));
    // SAFETY: as at `emulate`.
    at(address, 4).map(|at| unsafe { at.cast::<u32>().read() })
}

/// All chunks of the warp whose first thread is `warp`.
unsafe fn copy(a: &Launch, threads: u32, warp: u32, at: At<'_>) -> Option<()> {
    let total = a.rows * a.chunk_count;
    let mut first = warp;
    while first < total {
        for k in 0..DEPTH {
            let mut held = [None; WARP as usize];
            for (i, held) in (first + k * threads..total).zip(&mut held) {
                // SAFETY: as at `emulate`.
                *held = Some(unsafe { load(a, i, at) }?);
            }
            // SAFETY: as at `emulate`.
            unsafe { write(&held, at) }?;
        }
        first += DEPTH * threads;
    }
    Some(())
}

unsafe fn load(a: &Launch, i: u32, at: At<'_>) -> Option<Held> {
    let (row, place) = (i / a.chunk_count, i % a.chunk_count);
    let chunk = at(a.chunks + 16 * u64::from(place), 16)?;
    // SAFETY: as at `emulate`; here and below.
    let chunk = unsafe { chunk.cast::<Chunk>().read() };
    // SAFETY: as above.
    let record = unsafe { entry(a, row, chunk.entry(), at) }?;
    let mut value = [0u8; CHUNK];
    if record != NOTHING {
        let from = at(a.store + u64::from(record) * a.record_bytes + u64::from(chunk.from), CHUNK)?;
        // A device refuses an address that is not a multiple of what is loaded at once.
        if !(from as usize).is_multiple_of(CHUNK) {
            return None;
        }
        // SAFETY: as above.
        value = unsafe { from.cast::<[u8; CHUNK]>().read() };
    }
    let to = a.batch + u64::from(chunk.to) + u64::from(row) * u64::from(chunk.row_stride);
    Some(Held { value, chunk, to })
}

/// Writes what the threads of a warp hold to its places.
unsafe fn write(held: &[Option<Held>; WARP as usize], at: At<'_>) -> Option<()> {
    let joins = |lane: usize| {
        let held = held.get(lane).copied().flatten();
        held.is_some_and(|h| lane > 0 && !h.chunk.is_first() && h.past() > 0 && h.past() + h.chunk.bytes() >= CHUNK)
    };
    for (lane, held_here) in held.iter().enumerate() {
        let Some(here) = held_here else { continue };
        let (past, bytes) = (here.past(), here.chunk.bytes());
        let whole = joins(lane) || past + CHUNK == bytes;
        if whole {
            let mut piece = here.value;
            if past > 0 {
                piece.rotate_right(past);
                piece[..past].copy_from_slice(&held[lane - 1]?.value[CHUNK - past..]);
            }
            // SAFETY: as at `emulate`.
            unsafe { store(here.to - past as u64, &piece, CHUNK, at) }?;
        }
        let from = if whole { CHUNK - past } else { 0 };
        let end = if joins(lane + 1) { CHUNK - past } else { bytes };
        // Parts of which the kernel has no branch.
        if from < end && here.chunk.alignment() == CHUNK {
            return None;
        }
        for part in (from..end).step_by(here.chunk.alignment()) {
            let part = part..part + here.chunk.alignment();
            // SAFETY: as at `emulate`.
            unsafe { store(here.to + part.start as u64, here.value.get(part)?, here.chunk.alignment(), at) }?;
        }
    }
    Some(())
}

/// Writes bytes at once, which a device does at multiples of as many alone.
unsafe fn store(to: u64, bytes: &[u8], alignment: usize, at: At<'_>) -> Option<()> {
    let to = at(to, bytes.len())?;
    if !(to as usize).is_multiple_of(alignment) {
        return None;
    }
    // SAFETY: as at `emulate`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    Some(())
}

/// The returns of the rows of one thread.
unsafe fn add_up(a: &Launch, threads: u32, thread: u32, at: At<'_>) -> Option<()> {
    if a.has_sum == 0 {
        return Some(());
    }
    for row in (thread..a.rows).step_by(threads as usize) {
        // SAFETY: as at `emulate`; here and below.
        let steps = unsafe { entry(a, row, a.stride - 1, at) }?;
        let mut sum = 0f32;
        for k in 0..steps {
            // SAFETY: as above.
            let record = unsafe { entry(a, row, a.sum_entry + k, at) }?;
            let reward = at(a.store + u64::from(record) * a.record_bytes + u64::from(a.sum_from), 4)?;
            let power = at(a.powers + 4 * u64::from(k), 4)?;
            // SAFETY: as above.
            let (reward, power) = unsafe { (reward.cast::<f32>().read(), power.cast::<f32>().read()) };
            sum = if k == 0 { reward } else { sum + power * reward };
        }
        let to = a.batch + u64::from(a.sum_to) + u64::from(row) * u64::from(a.sum_row_stride);
        // SAFETY: as above.
        unsafe { store(to, &sum.to_ne_bytes(), 4, at) }?;
    }
    Some(())
}
