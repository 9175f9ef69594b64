/* The mapped allocator of pinring: memory that a GPU uses under a device address, and that lies in the GPU or, page-locked
 * and mapped, in the host. One allocator for the process, made at the first call.
 *
 * Every function may be called from any thread, also while some thread captures a CUDA graph, and stays valid until the
 * process ends. None lets a panic out. In a forked child of a process that has allocated, allocating fails, freeing does
 * nothing, and CUDA is not called.
 *
 * A `pinring_stream` is a CUstream or cudaStream_t. */
#ifndef PINRING_MAPPED_H
#define PINRING_MAPPED_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void *pinring_stream;

/* ---- allocating and freeing: the signatures of PyTorch's CUDAPluggableAllocator ---------------------------------- */

/* `size` bytes for `device`, of the kind that the mode says, or the calling thread's override. Returns the device
 * address; NULL where it failed (pinned_last_error says why), and for 0 bytes, which is no failure. Nothing is queued in
 * `stream`. Page-locked memory is aligned to 2 MiB and takes whole pages of 4096 bytes; device memory is aligned to 256.
 * Where memory is short, what was freed is waited for (10 s at most) and given back, and it is tried once more. */
void *pinned_malloc(ssize_t size, int device, pinring_stream stream);

/* Frees what either malloc returned, whatever its kind and the mode now: `size` and `device` are not looked at. The memory
 * is used again, or given back, when what is queued in `stream` (a live stream; default streams are those of the
 * allocation's device) has completed; the call does not wait. NULL is left alone; what is no allocation's first byte is a
 * failure that frees nothing. */
void pinned_free(void *ptr, ssize_t size, int device, pinring_stream stream);

/* The same pair, always page-locked: for pools. */
void *pinned_pool_malloc(ssize_t size, int device, pinring_stream stream);
void pinned_pool_free(void *ptr, ssize_t size, int device, pinring_stream stream);

/* `stream`, of a device that something was allocated for, uses the allocation that `ptr` lies in too: its free is ordered
 * behind that stream as well. */
void pinned_record_stream(void *ptr, pinring_stream stream);

/* ---- mode -------------------------------------------------------------------------------------------------------- */

/* Sets the mode of pinned_malloc: page-locked memory (not 0) or the device's (0, as at first). */
void pinned_use(int enabled);
/* 1 where the mode is page-locked memory. */
int pinned_is_mode(void);
/* Overrides the mode for the calling thread: 1 page-locked, 0 device, negative: no longer. Returns what was. */
int pinned_override(int kind);

/* ---- asking ------------------------------------------------------------------------------------------------------ */

/* The host address of a byte of a page-locked allocation, by the device address of that byte, the first or any within.
 * NULL for device memory, for one past the end, and for what is not allocated here. */
void *pinned_host_ptr_of(const void *device_ptr);

typedef struct pinned_counts {
    uint64_t live_bytes;        /* of allocations in use, as they were asked for */
    uint64_t live;              /* allocations in use */
    uint64_t peak_bytes;        /* the most that live_bytes has been */
    uint64_t peak;              /* the most that live has been */
    uint64_t allocations;       /* made so far */
    uint64_t frees;             /* done so far */
    uint64_t allocated_bytes;   /* asked for so far */
    uint64_t waiting_bytes;     /* freed, and streams may still use them */
    uint64_t cached_bytes;      /* freed page-locked memory, ready for reuse */
    uint64_t captured_bytes;    /* freed in a stream while it was captured */
    uint64_t quarantined_bytes; /* nobody may use them: the end of the work on them cannot be known */
} pinned_counts;

/* Writes the counts of one device, or of all (device < 0). A NULL is left out. */
void pinned_statistics(int device, pinned_counts *page_locked, pinned_counts *of_device);
/* Sets the peaks to what is live. */
void pinned_reset_peaks(int device);

/* Copies the text of the calling thread's last failure (of the process's, if this thread had none) and a zero to `out`, as
 * much as fits into `room` bytes. Returns the length of the whole text, 0 where nothing failed. */
size_t pinned_last_error(char *out, size_t room);
/* Whether failures are also written to the standard error; on at first. */
void pinned_print_errors(int enabled);

/* ---- giving back, settings --------------------------------------------------------------------------------------- */

/* Gives back the cache, and what streams have done with within `patience_ms`. Returns the freed bytes that streams still
 * use. CUDA waits for all queued copies of the process while it unregisters. */
size_t pinned_release(uint32_t patience_ms);
/* The same with ten seconds of patience: for a framework that calls a function without arguments. */
void pinned_release_patiently(void);
/* Gives back what was freed in streams while they were captured: only when those graphs are destroyed, no launch of them is
 * running, and what was queued in those streams before the capture has completed. Returns its bytes. */
size_t pinned_release_captured(void);
/* How many bytes of freed page-locked memory are kept for reuse; 1 GiB at first, 0 is none. */
void pinned_set_cache_limit(size_t bytes);
/* Whether page-locked memory beyond what the host and its cgroups seem to have left is asked for all the same. */
void pinned_ignore_memory_budget(int ignore);
/* Names libcudart (and no other is used), libcuda, or both; NULL: looked for. 0, or -1 where the allocator is in use. */
int pinned_use_libraries(const char *runtime, const char *driver);

#ifdef __cplusplus
}
#endif
#endif
