//! Work for the device: kernels that spin, one that computes, and one that weighs memory to tell whether it is whole.
#![allow(dead_code)] // each bench uses a part

use super::driver::{Cuda, DeviceMemory, Failure, Function, RawStream};

/// The kernels, for any device from compute capability 7.5 on.
pub const PTX: &str = include_str!("kernels.ptx");
/// Blocks and threads of a full weighing.
const WIDE: (u32, u32) = (264, 256);
/// Blocks and threads that fill any device so far, some times over.
const FULL: (u32, u32) = (132 * 16, 256);
/// Words that [`Kernels::touch`] reads.
const TOUCHED: u64 = 1024;

#[derive(Debug)]
pub struct Kernels {
    cuda: &'static Cuda,
    spin: Function,
    weigh: Function,
    work: Function,
    cycles_per_us: f64,
    /// Where `touch` adds.
    sink: DeviceMemory,
}

impl Kernels {
    /// Loads the kernels and finds out how fast the device's clock runs.
    pub fn new(cuda: &'static Cuda) -> Result<Kernels, Failure> {
        let module = cuda.module(PTX)?;
        let (spin, weigh) = (cuda.function(&module, c"spin")?, cuda.function(&module, c"weigh")?);
        let work = cuda.function(&module, c"work")?;
        let mut kernels = Kernels { cuda, spin, weigh, work, cycles_per_us: 1000.0, sink: cuda.alloc(256)? };
        let stream = cuda.stream()?;
        let (begin, end) = (cuda.timed_event()?, cuda.timed_event()?);
        let cycles = 2_000_000;
        for _ in 0..20 {
            // The clock rises under load: the last turn counts.
            begin.record(stream.raw())?;
            kernels.spin_cycles(cycles, stream.raw())?;
            end.record(stream.raw())?;
            stream.synchronize()?;
            kernels.cycles_per_us = cycles as f64 / begin.micros_until(&end)?;
        }
        Ok(kernels)
    }

    /// Cycles of the device's clock in that time.
    pub fn cycles(&self, micros: f64) -> u64 {
        (micros * self.cycles_per_us) as u64
    }

    /// One small kernel that runs so many cycles.
    #[inline]
    pub fn spin_cycles(&self, cycles: u64, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: `spin` takes one integer and touches no memory.
        unsafe { self.cuda.launch(self.spin, (1, 32), &mut [cycles], stream) }
    }

    /// Microseconds from one small kernel to the next where they wait for nothing else: queued behind a long one.
    pub fn period(&self, cycles: u64) -> Result<f64, Failure> {
        const KERNELS: u32 = 500; // fewer than a stream queues
        let stream = self.cuda.stream()?;
        let (begin, end) = (self.cuda.timed_event()?, self.cuda.timed_event()?);
        let mut least = f64::INFINITY;
        for _ in 0..5 {
            self.spin_cycles(self.cycles(10_000.0), stream.raw())?;
            begin.record(stream.raw())?;
            for _ in 0..KERNELS {
                self.spin_cycles(cycles, stream.raw())?;
            }
            end.record(stream.raw())?;
            stream.synchronize()?;
            least = least.min(begin.micros_until(&end)? / f64::from(KERNELS));
        }
        Ok(least)
    }

    /// A small kernel that reads the first words of a batch: what makes the step depend on it.
    ///
    /// # Safety
    /// `at` has 4 KiB that stay allocated until the stream has passed this.
    #[inline]
    pub unsafe fn touch(&self, at: u64, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: `weigh` takes these three; the caller's promise for `at`; the sink lives as long as the kernels.
        unsafe { self.cuda.launch(self.weigh, (1, 256), &mut [at, TOUCHED, self.sink.address], stream) }
    }

    /// So many turns of eight multiplications and additions in each thread of a grid that fills the device.
    pub fn work(&self, turns: u64, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: `work` takes these two; the sink lives as long as the kernels, and is written by none of its threads.
        unsafe { self.cuda.launch(self.work, FULL, &mut [turns, self.sink.address], stream) }
    }

    /// Adds the weight of `words` 32-bit words to the 64-bit integer at `sum`: see [`weight`].
    ///
    /// # Safety
    /// Both stay allocated until the stream has passed this.
    pub unsafe fn weigh(&self, at: u64, words: usize, sum: u64, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: `weigh` takes these three; the caller's promise for both addresses.
        unsafe { self.cuda.launch(self.weigh, WIDE, &mut [at, words as u64, sum], stream) }
    }
}

/// What the kernel `weigh` adds for these words.
pub fn weight(words: impl IntoIterator<Item = u32>) -> u64 {
    words
        .into_iter()
        .zip(0u64..)
        .fold(0, |sum: u64, (word, i)| sum.wrapping_add(u64::from(word).wrapping_mul(2 * i + 1)))
}

/// The weight of rows of `words` equal words each.
pub fn weight_of_rows(rows: impl IntoIterator<Item = u32>, words: usize) -> u64 {
    // The sum of 2 (r W + j) + 1 over the W words of row r is W² (2 r + 1).
    weight(rows).wrapping_mul((words as u64).wrapping_mul(words as u64))
}
