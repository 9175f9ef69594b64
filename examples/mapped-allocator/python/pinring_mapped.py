"""pinring's mapped allocator from Python: the C library through ctypes, and page-locked "cuda" tensors in a MemPool.

    import torch, pinring_mapped

    pool = pinring_mapped.Pool()                 # CUDA may be in use already
    with pool:                                   # this thread's new tensors lie in page-locked host memory
        weights = torch.empty(4096, 4096, device="cuda")
    pinring_mapped.host_ptr_of(weights)          # the same bytes, as the host reaches them

PyTorch's own caching allocator hands the pool's memory out, so its statistics are right and freed tensors are reused.
`pinned_allocator`, beside this file, replaces PyTorch's allocator as a whole instead. docs/mapped-allocator.md compares
the two. Importing this module opens no CUDA and does not need torch; only what takes tensors or makes pools does.

The library is looked for in PINRING_MAPPED_LIBRARY, beside this file, and in the repository's target/release and
target/debug: `cargo build --release -p pinring-mapped-allocator` makes it.
"""

import ctypes
import os
import pathlib
import threading

__all__ = [
    "Counts", "Pool", "host_ptr_of", "ignore_memory_budget", "last_error", "library_path", "print_errors", "release",
    "release_captured", "reset_peaks", "set_cache_limit", "statistics", "use_libraries",
]


class Counts(ctypes.Structure):
    """The counts of one kind of memory; include/pinring_mapped.h describes each."""

    _fields_ = [(name, ctypes.c_uint64) for name in (
        "live_bytes", "live", "peak_bytes", "peak", "allocations", "frees", "allocated_bytes", "waiting_bytes",
        "cached_bytes", "captured_bytes", "quarantined_bytes")]

    def as_dict(self):
        return {name: getattr(self, name) for name, _ in self._fields_}

    def __repr__(self):
        return f"Counts({', '.join(f'{name}={value}' for name, value in self.as_dict().items())})"


def _find():
    named = os.environ.get("PINRING_MAPPED_LIBRARY")
    if named:
        return pathlib.Path(named)
    here = pathlib.Path(__file__).resolve().parent
    name = "libpinring_mapped.so"
    places = [here / name] + [up / "target" / kind / name for up in here.parents for kind in ("release", "debug")]
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"{name} is neither beside {__file__} nor in a target folder above it: build it with "
        "`cargo build --release -p pinring-mapped-allocator`, or name it in PINRING_MAPPED_LIBRARY")


library_path = str(_find())
_lib = ctypes.CDLL(library_path)


def _declare(name, result, *arguments):
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_pointer, _int = ctypes.c_void_p, ctypes.c_int
malloc = _declare("pinned_malloc", _pointer, ctypes.c_ssize_t, _int, _pointer)
free = _declare("pinned_free", None, _pointer, ctypes.c_ssize_t, _int, _pointer)
pool_malloc = _declare("pinned_pool_malloc", _pointer, ctypes.c_ssize_t, _int, _pointer)
pool_free = _declare("pinned_pool_free", None, _pointer, ctypes.c_ssize_t, _int, _pointer)
record_stream = _declare("pinned_record_stream", None, _pointer, _pointer)
use = _declare("pinned_use", None, _int)
is_mode = _declare("pinned_is_mode", _int)
override = _declare("pinned_override", _int, _int)
host_ptr = _declare("pinned_host_ptr_of", _pointer, _pointer)
_statistics = _declare("pinned_statistics", None, _int, ctypes.POINTER(Counts), ctypes.POINTER(Counts))
_reset_peaks = _declare("pinned_reset_peaks", None, _int)
_last_error = _declare("pinned_last_error", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
_print_errors = _declare("pinned_print_errors", None, _int)
_release = _declare("pinned_release", ctypes.c_size_t, ctypes.c_uint32)
_release_captured = _declare("pinned_release_captured", ctypes.c_size_t)
_set_cache_limit = _declare("pinned_set_cache_limit", None, ctypes.c_size_t)
_ignore_memory_budget = _declare("pinned_ignore_memory_budget", None, _int)
_use_libraries = _declare("pinned_use_libraries", _int, ctypes.c_char_p, ctypes.c_char_p)


def address_of(function):
    """The address of a C function, for PyTorch's setters."""
    return ctypes.cast(function, _pointer).value


def use_libraries(runtime=None, driver=None):
    """Names the files of libcudart and libcuda, before anything is allocated; None: it is looked for."""
    paths = [None if path is None else os.fsencode(path) for path in (runtime, driver)]
    if _use_libraries(*paths) != 0:
        raise RuntimeError(last_error())


def host_ptr_of(tensor):
    """The host address of a tensor's first element, or 0 if it does not lie in page-locked memory of this allocator.

    A device address, as an int, will do as well as a tensor."""
    address = tensor if isinstance(tensor, int) else tensor.data_ptr()
    return host_ptr(address) or 0


def statistics(device=None):
    """(page-locked, device memory): the Counts of one device, or of all."""
    page_locked, of_device = Counts(), Counts()
    _statistics(-1 if device is None else device, page_locked, of_device)
    return page_locked, of_device


def reset_peaks(device=None):
    """Sets the peaks to what is live."""
    _reset_peaks(-1 if device is None else device)


def last_error():
    """Why the last call of this thread failed (of any thread, if none of this one did); empty if none has."""
    buffer = ctypes.create_string_buffer(8192)
    _last_error(buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def print_errors(enabled):
    """Whether failures are also written to the standard error, as they are at first."""
    _print_errors(bool(enabled))


def release(patience=10.0):
    """Gives the cached page-locked memory back to the host, and what streams have done with within `patience` seconds.
    Returns the freed bytes that streams still use."""
    return _release(int(patience * 1000))


def release_captured():
    """Gives back what was freed while its stream was captured. The graphs must be destroyed, no launch of them running, and
    what was queued before the captures done (torch.cuda.synchronize() sees to both)."""
    return _release_captured()


def set_cache_limit(bytes):
    """How many bytes of freed page-locked memory are kept for reuse (1 GiB at first)."""
    _set_cache_limit(bytes)


def ignore_memory_budget(ignore=True):
    """Asks for page-locked memory beyond what seems to be left: for hosts whose memory grows as it is used."""
    _ignore_memory_budget(bool(ignore))


# Each allocator that PyTorch was given: PyTorch calls it until the last block of it is gone, which may be at exit.
_allocators = []


class Pool:
    """A torch.cuda.MemPool whose memory is page-locked host memory.

    A context manager: tensors that this thread makes inside lie in the pool. May be entered again and again; dropping it
    gives its memory back once its tensors are gone. `mem_pool` is PyTorch's object, for `torch.cuda.use_mem_pool` and
    for graphs."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("a pool needs CUDA, and torch.cuda.is_available() is False")
        if not hasattr(torch.cuda, "MemPool"):
            raise RuntimeError(f"torch {torch.__version__} has no torch.cuda.MemPool: use pinned_allocator, or torch 2.5 or newer")
        torch.cuda.init()
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library_path, "pinned_pool_malloc", "pinned_pool_free")
        _allocators.append(allocator)
        self.mem_pool = torch.cuda.MemPool(allocator.allocator())
        self._entered = threading.local()

    def __enter__(self):
        import torch

        context = torch.cuda.use_mem_pool(self.mem_pool)
        context.__enter__()
        self._contexts().append(context)
        return self

    def __exit__(self, *failure):
        return self._contexts().pop().__exit__(*failure)

    def _contexts(self):
        if not hasattr(self._entered, "contexts"):
            self._entered.contexts = []
        return self._entered.contexts

    def empty(self, *size, **options):
        """torch.empty in the pool, on the current device unless `device` says another."""
        return self._in_pool("empty", size, options)

    def _in_pool(self, function, size, options):
        import torch

        options.setdefault("device", "cuda")
        with self:
            return getattr(torch, function)(*size, **options)

    def move(self, module):
        """Moves a module's parameters and buffers into the pool, in place, and returns it."""
        import torch

        with self:
            # `to` keeps a tensor that is on the device already, and so would leave it where it is.
            return module._apply(lambda t: torch.empty_like(t, device=t.device if t.is_cuda else "cuda").copy_(t))
