// Fills a batch in device memory from steps that lie in page-locked host memory, which it reads by its mapped address.
//
// The work is flattened over rows and 16-byte chunks of a row: thread i of all takes chunks i, i + threads, and so on, four
// at a time, so that four loads of each thread are on the link at once, however many leaves there are and however long.
// Records and their leaves begin at multiples of 16 bytes; a leaf's place in the batch need not. Where it does not, a
// thread asks its neighbour in the warp for the end of the chunk before its own, and writes 16 bytes that are aligned in the
// batch; only at the ends of a leaf and of a warp are single elements written.
// Behind the chunks, one thread a row adds up the rewards of an n-step return, in step order, with each product and each sum
// rounded once, as the host does.
//
// `scripts/kernel/build.py` makes `kernel.ptx` of this. `emulate.rs` walks the same indices on the host: change both.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// No record: zeros.
static const u32 NOTHING = 0xffffffff;
// Chunks that one thread has under way at once.
static const u32 DEPTH = 4;
// Of a chunk's layout: nothing of its leaf and row comes before it.
static const u32 FIRST = 1 << 7;
// All threads of a warp.
static const u32 ALL = 0xffffffff;

// `Launch` of `launch.rs`.
struct Launch {
    // Record 0; row 0 of the batch.
    u64 store, batch;
    // Of each row `stride` numbers: the record of each entry, and last the steps that its return adds up.
    u64 table;
    // Of each chunk of a row: bytes into the record, (entry << 8 | first of its leaf << 7 | log2(alignment) << 4 |
    // bytes - 1), bytes into the batch, bytes from row to row.
    u64 chunks;
    // Discounts to the powers 0 to n.
    u64 powers;
    u64 record_bytes;
    u32 rows, stride, chunk_count;
    // Returns: the entry of the first reward, its bytes into the record, bytes into the batch. None if `has_sum` is 0.
    u32 has_sum, sum_entry, sum_from, sum_to, sum_row_stride;
};

// Bytes `from` to `end` of the chunk, `to` being where its first byte goes; all three are multiples of an element.
template <typename T> static __device__ void put(u8 *to, const uint4 &value, u32 from, u32 end) {
    const T *parts = reinterpret_cast<const T *>(&value);
#pragma unroll
    for (u32 i = 0; i < 16 / sizeof(T); i++) {
        if (i * sizeof(T) >= from && i * sizeof(T) < end) {
            reinterpret_cast<T *>(to)[i] = parts[i];
        }
    }
}

static __device__ void put_aligned(u8 *to, const uint4 &value, u32 layout, u32 from, u32 end) {
    switch (layout >> 4 & 7) {
    case 4: break; // never: a chunk of such a leaf that is whole has been written
    case 3: put<u64>(to, value, from, end); break;
    case 2: put<u32>(to, value, from, end); break;
    case 1: put<u16>(to, value, from, end); break;
    default: put<u8>(to, value, from, end); break;
    }
}

// The last `past` bytes of `before`, then the first of `value`: 16 in all. `past` is from 0 to 15.
static __device__ uint4 joined(const uint4 &before, const uint4 &value, u32 past) {
    const u32 skip = 16 - past, words = skip >> 2, bits = (skip & 3) * 8;
    const u32 all[8] = {before.x, before.y, before.z, before.w, value.x, value.y, value.z, value.w};
    u32 some[6], few[5];
#pragma unroll
    for (u32 i = 0; i < 6; i++) {
        some[i] = words & 2 ? all[i + 2] : all[i];
    }
#pragma unroll
    for (u32 i = 0; i < 5; i++) {
        few[i] = words & 1 ? some[i + 1] : some[i];
    }
    const uint4 out = make_uint4(__funnelshift_r(few[0], few[1], bits), __funnelshift_r(few[1], few[2], bits),
                                 __funnelshift_r(few[2], few[3], bits), __funnelshift_r(few[3], few[4], bits));
    return past == 0 ? value : out;
}

// Writes a thread's chunk to its place; all threads of a warp come here together, with chunks that follow each other.
static __device__ void write(u8 *to, const uint4 &value, u32 layout, bool mine) {
    const u32 lane = threadIdx.x & 31, bytes = (layout & 15) + 1;
    // How far the chunk's place lies past a multiple of 16 bytes: as far as all of its leaf and row.
    const u32 past = (u32)reinterpret_cast<u64>(to) & 15;
    const uint4 before = make_uint4(__shfl_up_sync(ALL, value.x, 1), __shfl_up_sync(ALL, value.y, 1),
                                    __shfl_up_sync(ALL, value.z, 1), __shfl_up_sync(ALL, value.w, 1));
    const bool joins = mine && lane > 0 && !(layout & FIRST) && past > 0 && past + bytes >= 16;
    const bool next_joins = (__ballot_sync(ALL, joins) >> lane & 2) != 0;
    if (!mine) {
        return;
    }
    const bool whole = joins || past + 16 - bytes == 0;
    if (whole) {
        *reinterpret_cast<uint4 *>(to - past) = joined(before, value, past);
    }
    // What is left of the chunk: what lies before the piece that was written, or behind it and not in the next one.
    const u32 from = whole ? 16 - past : 0, end = next_joins ? 16 - past : bytes;
    if (from < end) {
        put_aligned(to, value, layout, from, end);
    }
}

extern "C" __global__ void __launch_bounds__(1024) pinring_gather(const Launch a) {
    const u32 threads = gridDim.x * blockDim.x;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u8 *const store = reinterpret_cast<const u8 *>(a.store);
    u8 *const batch = reinterpret_cast<u8 *>(a.batch);
    const u32 *const table = reinterpret_cast<const u32 *>(a.table);
    const uint4 *const chunks = reinterpret_cast<const uint4 *>(a.chunks);
    const u32 total = a.rows * a.chunk_count;
    // Threads of a warp stay together: they go on as long as its first one has something to do.
    for (u32 first = thread; first - (threadIdx.x & 31) < total; first += DEPTH * threads) {
        uint4 chunk[DEPTH], values[DEPTH];
        u32 row[DEPTH], record[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
            const u32 i = min(first + k * threads, total - 1);
            row[k] = i / a.chunk_count;
            chunk[k] = __ldg(chunks + (i - row[k] * a.chunk_count));
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
            record[k] = __ldg(table + (u64)row[k] * a.stride + (chunk[k].y >> 8));
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
            values[k] = make_uint4(0, 0, 0, 0);
            if (first + k * threads < total && record[k] != NOTHING) {
                values[k] = *reinterpret_cast<const uint4 *>(store + record[k] * a.record_bytes + chunk[k].x);
            }
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++) {
            write(batch + chunk[k].z + (u64)row[k] * chunk[k].w, values[k], chunk[k].y, first + k * threads < total);
        }
    }
    if (!a.has_sum) {
        return;
    }
    const float *const powers = reinterpret_cast<const float *>(a.powers);
    for (u32 row = thread; row < a.rows; row += threads) {
        const u32 *const records = table + (u64)row * a.stride;
        const u32 steps = records[a.stride - 1];
        float sum = 0.0f;
        for (u32 first = 0; first < steps; first += DEPTH) {
            float rewards[DEPTH];
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                if (first + k < steps) {
                    const u64 record = records[a.sum_entry + first + k];
                    rewards[k] = *reinterpret_cast<const float *>(store + record * a.record_bytes + a.sum_from);
                }
            }
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                if (first + k == 0) {
                    sum = rewards[0];
                } else if (first + k < steps) {
                    sum = __fadd_rn(sum, __fmul_rn(powers[first + k], rewards[k]));
                }
            }
        }
        *reinterpret_cast<float *>(batch + a.sum_to + (u64)row * a.sum_row_stride) = sum;
    }
}
