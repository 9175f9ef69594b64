//! The kernel on one device, with the tables that are the same for every batch.
//!
//! Owns the module and the tables' memory. What it does not do: know when a launch has ended; whoever queues it does.

use super::Tables;
use super::launch::Launch;
use crate::cuda::device::{Device, DeviceMemory, Kernel, RawStream, Stream};
use crate::cuda::types::CudaError;
use std::ffi::CStr;

/// The kernel's text, made of `kernel.cu` by `scripts/kernel/build.py`: for compute capability 7.5 and later.
const PTX: &str = concat!(include_str!("kernel.ptx"), "\0");
const NAME: &CStr = c"pinring_gather";
const THREADS: u32 = 1024;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct GatherKernel {
    kernel: Kernel,
    chunks: DeviceMemory,
    powers: Option<DeviceMemory>,
    blocks: u32,
    /// All of a launch but the batch and its table.
    launch: Launch,
}

impl GatherKernel {
    /// Loads the kernel and puts the tables on the device; waits for both.
    pub(crate) fn new(
        device: &Device,
        stream: &Stream,
        (tables, store): &(Tables, u64),
        blocks: u32,
    ) -> Result<GatherKernel, CudaError> {
        let ptx = CStr::from_bytes_with_nul(PTX.as_bytes()).expect("a text that ends with its only zero");
        let kernel = device.kernel(ptx, NAME)?;
        let put = |words: &[u32]| {
            let memory = device.alloc(size_of_val(words))?;
            // SAFETY: the memory is as long as the words, which stay until the wait below has ended.
            unsafe { device.copy_in(memory.address(), words.as_ptr().cast(), size_of_val(words), stream.raw())? };
            Ok(memory)
        };
        let chunks: Vec<u32> =
            tables.chunks.iter().flat_map(|chunk| [chunk.from, chunk.layout, chunk.to, chunk.row_stride]).collect();
        let made = put(&chunks).and_then(|chunks| match tables.powers.is_empty() {
            true => Ok((chunks, None)),
            false => Ok((chunks, Some(put(&tables.powers)?))),
        });
        // SAFETY: a live stream of this device.
        let settled = unsafe { device.synchronize_stream(stream.raw()) };
        let (chunks, powers) = made?;
        settled?;
        let launch = Launch {
            store: *store,
            chunks: chunks.address(),
            powers: powers.as_ref().map_or(0, DeviceMemory::address),
            ..tables.launch()
        };
        Ok(GatherKernel { kernel, chunks, powers, blocks, launch })
    }

    /// Queues the gather of one full batch into `batch`, whose table is at `table`.
    ///
    /// # Safety
    /// Until an event recorded behind it has completed: the batch's memory is the kernel's to write, the table stays as it
    /// is, and so do the records that it names (invariant 3), whose gather was issued and has not ended. `stream` is a live
    /// stream of the device.
    pub(crate) unsafe fn queue(&self, batch: u64, table: u64, stream: RawStream) -> Result<(), CudaError> {
        let launch = Launch { batch, table, ..self.launch };
        // SAFETY: the kernel takes a `Launch`. What it reads and writes: the caller's promise, and memory of ours.
        unsafe { self.kernel.device().launch(&self.kernel, (self.blocks, THREADS), &launch, stream) }
    }
}

impl GatherKernel {
    /// Keeps module and tables for the rest of the process: it may still run (invariant 4). Returns how many pieces of device
    /// memory that are, and their bytes.
    pub(crate) fn quarantine(self) -> (usize, usize) {
        let tables = || std::iter::once(&self.chunks).chain(&self.powers);
        let kept = (tables().count(), tables().map(DeviceMemory::bytes).sum());
        std::mem::forget(self);
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head of the text has the hash of the source that it was made of.
    #[test]
    fn the_text_is_that_of_the_source() {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        let hash = include_bytes!("kernel.cu").iter().fold(0xcbf2_9ce4_8422_2325, step);
        let line = PTX.lines().nth(1).unwrap();
        assert_eq!(line, format!("// {hash:016x}"), "kernel.cu was changed: run scripts/kernel/build.py");
    }

    #[test]
    fn the_text_has_the_kernel_and_one_end() {
        assert!(CStr::from_bytes_with_nul(PTX.as_bytes()).is_ok());
        assert!(PTX.contains(".target sm_75") && PTX.contains(".visible .entry pinring_gather("));
        assert!(!PTX.contains("fma.rn.f32"), "a product and a sum are rounded each, as on the host");
        // The parameter is a `Launch`, as `kernel.cu` has it.
        assert!(PTX.contains(&format!("pinring_gather_param_0[{}]", size_of::<Launch>())));
    }
}
