"""pinring's mapped allocator as PyTorch's only allocator. Import it before anything uses CUDA:

    import pinned_allocator                     # first: PyTorch takes no other allocator once CUDA is in use
    import torch

    pinned_allocator.use_pinned(True)
    w = torch.randn(4096, 4096, device="cuda")  # in page-locked host memory: nothing of the GPU's
    pinned_allocator.use_pinned(False)          # what follows is in the GPU's memory; w stays where it is
    buf = pinned_allocator.pin_empty(4096, 4096, dtype=torch.float16)
    pinned_allocator.host_ptr_of(w)             # the host's address of the same bytes; 0 for a tensor in the GPU

Every allocation is one of CUDA's: there is no caching of GPU memory. The statistics of torch.cuda answer from this
allocator's counts. `pinring_mapped.Pool` is the way that keeps PyTorch's allocator; docs/mapped-allocator.md compares them.
"""

import torch

import pinring_mapped
from pinring_mapped import host_ptr_of, last_error, release, release_captured, statistics

__all__ = ["host_ptr_of", "is_pinned_mode", "last_error", "pin_empty", "release", "release_captured", "statistics", "use_pinned"]


def use_pinned(enabled):
    """True: tensors made from now on lie in page-locked host memory. False: in the GPU's. Others stay where they are."""
    pinring_mapped.use(bool(enabled))


def is_pinned_mode():
    """Whether new tensors lie in page-locked host memory."""
    return bool(pinring_mapped.is_mode())


def pin_empty(*size, dtype=None, device="cuda"):
    """An uninitialised tensor in page-locked memory whatever the mode, which stays as it is, for other threads too."""
    before = pinring_mapped.override(1)
    try:
        tensor = torch.empty(*size, dtype=dtype, device=device)
    finally:
        pinring_mapped.override(before)
    return checked(tensor)


def checked(tensor):
    """The tensor; torch.OutOfMemoryError where its memory could not be had. PyTorch does not look for itself: it goes
    on with a null pointer, and the first kernel reports an illegal address."""
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise torch.OutOfMemoryError(last_error())
    return tensor


def _install():
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "pinned_allocator was imported too late: PyTorch has initialised CUDA, and takes no other allocator then. "
            "Import it before the first use of CUDA, or use pinring_mapped.Pool, which may come at any time")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(pinring_mapped.library_path, "pinned_malloc", "pinned_free")
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise RuntimeError(
            f"pinned_allocator could not be installed: {error}. Import it before the first use of CUDA and once, or use "
            "pinring_mapped.Pool, which may come at any time") from error
    pinring_mapped._allocators.append(allocator)
    inner = allocator.allocator()
    # A tensor that another stream uses is freed behind that one too; torch.cuda.empty_cache() gives the cache back.
    inner.set_record_stream_fn(pinring_mapped.address_of(pinring_mapped._lib.pinned_record_stream))
    inner.set_reset_fn(pinring_mapped.address_of(pinring_mapped._lib.pinned_release_patiently))


def _stats(device=None):
    """What torch.cuda.memory_stats and its relatives read, from this allocator's counts: both kinds together."""
    kinds = statistics(torch.cuda._utils._get_device_index(device, optional=True))

    def of(current, peak, allocated, freed):
        values = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        return {"all": values, "large_pool": dict.fromkeys(values, 0), "small_pool": dict.fromkeys(values, 0)}

    def total(name):
        return sum(getattr(kind, name) for kind in kinds)

    live, unused = total("live_bytes"), sum(
        total(name) for name in ("waiting_bytes", "cached_bytes", "captured_bytes", "quarantined_bytes"))
    allocated = total("allocated_bytes")
    in_use = of(live, total("peak_bytes"), allocated, allocated - live)
    held = of(live + unused, max(total("peak_bytes"), live + unused), allocated, allocated - live)
    count = of(total("live"), total("peak"), total("allocations"), total("frees"))
    nothing = of(0, 0, 0, 0)
    return {
        "allocation": count, "allocated_bytes": in_use, "active": count, "active_bytes": in_use,
        "requested_bytes": in_use, "reserved_bytes": held, "segment": count, "inactive_split": nothing,
        "inactive_split_bytes": nothing, "num_alloc_retries": 0, "num_ooms": 0, "oversize_allocations": nothing,
        "oversize_segments": nothing,
    }


def _patch():
    def nested(device=None):
        # As with PyTorch's own allocator: nothing is told before CUDA is in use.
        return _stats(device) if torch.cuda.is_initialized() else {}

    def reset_peaks(device=None):
        pinring_mapped.reset_peaks(torch.cuda._utils._get_device_index(device, optional=True))

    torch.cuda.memory.memory_stats_as_nested_dict = torch.cuda.memory_stats_as_nested_dict = nested
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        setattr(torch.cuda.memory, name, reset_peaks)
        setattr(torch.cuda, name, reset_peaks)


_install()
_patch()
