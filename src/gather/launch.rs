//! What the kernel is launched with.
//!
//! Owns the form, which is that of `struct Launch` in `kernel.cu`. It uses `std` alone: the fake CUDA of the tests compiles
//! it too.

/// No record: zeros.
pub const NOTHING: u32 = u32::MAX;
/// Chunks that one thread has under way at once.
pub const DEPTH: u32 = 4;
/// Threads that go together, and see each other's chunks.
pub const WARP: u32 = 32;
/// Bytes of a chunk.
pub const CHUNK: usize = 16;

/// The kernel's one parameter: addresses of the device, and numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Record 0 of the store, by the address under which the device reaches it.
    pub store: u64,
    /// The batch's first byte.
    pub batch: u64,
    /// Of each row `stride` numbers of 32 bits: the record of each entry, and last, where returns are added up, their steps.
    pub table: u64,
    /// `chunk_count` of [`Chunk`].
    pub chunks: u64,
    /// Discounts to the powers 0 to n, as `f32`.
    pub powers: u64,
    pub record_bytes: u64,
    pub rows: u32,
    pub stride: u32,
    pub chunk_count: u32,
    /// 1 if returns are added up.
    pub has_sum: u32,
    /// The entry of the first reward, its bytes into the record, and the return's into the batch.
    pub sum_entry: u32,
    pub sum_from: u32,
    pub sum_to: u32,
    pub sum_row_stride: u32,
}

/// Up to 16 bytes of each row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Bytes into the record; a multiple of 16.
    pub from: u32,
    /// `entry << 8 | first of its leaf << 7 | log2(alignment) << 4 | bytes - 1`.
    pub layout: u32,
    /// Bytes into the batch, of row 0, and from row to row: multiples of the alignment.
    pub to: u32,
    pub row_stride: u32,
}

impl Chunk {
    /// Of leaf and row the chunk that begins at `at`. `bytes` is from 1 to 16, less than 16 in the last one alone; entries
    /// are below 2²⁴.
    pub fn new(entry: u32, from: u32, at: u32, bytes: u32, to: u32, row_stride: u32) -> Chunk {
        let (from, to) = (from + at, to + at);
        let alignment = (to | row_stride | CHUNK as u32).trailing_zeros();
        // A shorter chunk is written in parts that it has whole.
        let whole = (bytes | CHUNK as u32).trailing_zeros();
        let first = u32::from(at == 0);
        Chunk { from, layout: entry << 8 | first << 7 | alignment.min(whole) << 4 | (bytes - 1), to, row_stride }
    }

    pub fn entry(&self) -> u32 {
        self.layout >> 8
    }

    pub fn bytes(&self) -> usize {
        (self.layout & 15) as usize + 1
    }

    /// Nothing of its leaf and row comes before it.
    pub fn is_first(&self) -> bool {
        self.layout >> 7 & 1 == 1
    }

    pub fn alignment(&self) -> usize {
        1 << (self.layout >> 4 & 7)
    }
}
