"""What the mapped allocator promises, checked and measured on a GPU with the torch that is there.

    python3 accept_on_gpu.py            # everything; about four minutes, 48 GiB of host memory, 45 of the GPU's
    python3 accept_on_gpu.py --quick    # small sizes, a few seconds of stress
    python3 accept_on_gpu.py table pool # some parts

Each part runs in a process of its own, since an allocator is chosen once a process. A line is a figure, or a check that
says `ok` or `FAIL`; the last line counts them, and the exit status is 1 if one failed."""

import ctypes
import gc
import os
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import warnings

GIB, MIB = 1 << 30, 1 << 20
QUICK = "--quick" in sys.argv
failed = 0


def say(what, value):
    print(f"{what}: {value}", flush=True)


def check(what, holds, shown=""):
    global failed
    failed += not holds
    print(f"{'ok  ' if holds else 'FAIL'} {what}{f': {shown}' if shown != '' else ''}", flush=True)


def smi(query):
    command = ["nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def hbm():
    """What is in use of the GPU's memory, in GiB, whoever uses it."""
    return float(smi("memory.used")) / 1024


def memory(name):
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text).group(1)) / (1 << 20)


def module():
    import pinring_mapped

    # Some hosts show a part of their memory and give more as it is used.
    if memory("MemAvailable") < 56:
        pinring_mapped.ignore_memory_budget()
    return pinring_mapped


def maps():
    """Mapped ranges and their bytes, as the kernel has them now."""
    ranges = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        ranges.append((start, end))
    return len(ranges), sum(end - start for start, end in ranges)


def runtime():
    """The CUDA runtime that this process has loaded."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.rsplit(" ", 1)[-1]
        if re.search(r"/libcudart[^/]*\.so", path):
            return ctypes.CDLL(path)
    raise RuntimeError("no libcudart is loaded")


def registered(addresses):
    """How many of these host addresses CUDA has registered."""
    cudart, flags, found = runtime(), ctypes.c_uint(), 0
    for address in addresses:
        found += cudart.cudaHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address)) == 0
        cudart.cudaGetLastError()
    return found


def all_returned(pm, what):
    left = pm.release(20.0)
    for kind, counts in zip(("page-locked", "device"), pm.statistics()):
        held = {name: value for name, value in counts.as_dict().items()
                if name in ("live_bytes", "live", "waiting_bytes", "cached_bytes", "captured_bytes", "quarantined_bytes") and value}
        check(f"{what}: {kind} memory is all returned", not held and counts.allocations == counts.frees, held or counts.frees)
    check(f"{what}: no stream still uses freed memory", left == 0, left)


# ---- parts ---------------------------------------------------------------------------------------------------------

def host():
    import torch

    say("GPU, driver", smi("name,driver_version"))
    say("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    say("host", f"{os.cpu_count()} cores, MemTotal {memory('MemTotal'):.1f} GiB, MemAvailable {memory('MemAvailable'):.1f} GiB, "
                f"{os.uname().release}, huge pages {pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled').read_text().strip()}"
        if pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").exists() else f"{os.cpu_count()} cores, {os.uname().release}")
    say("library", module().library_path)


def table():
    """The allocator as PyTorch's only one: what the GPU's memory shows, step by step."""
    large, small = (2, 1) if QUICK else (40, 4)
    base = hbm()
    import pinned_allocator
    import torch

    pm = module()
    rows = [("start", 0.0)]

    def row(what):
        torch.cuda.synchronize()
        rows.append((what, hbm() - base))

    def tensor(gib, pinned):
        pinned_allocator.use_pinned(pinned)
        return pinned_allocator.checked(torch.empty(gib * GIB, dtype=torch.uint8, device="cuda"))

    torch.cuda.synchronize()
    begun = time.perf_counter()
    a = tensor(large, True)
    took = time.perf_counter() - begun
    check(f"{large} GiB page-locked in 4 s, in a process that has page-locked nothing before", took <= 4.0,
          f"{took:.2f} s, CUDA's start not included")
    row(f"{large} GiB page-locked")
    begun = time.perf_counter()
    b = tensor(large, False)
    say(f"{large} GiB of the GPU's", f"{time.perf_counter() - begun:.3f} s")
    row(f"+ {large} GiB of the GPU's")
    c = tensor(small, True)
    row(f"+ {small} GiB page-locked")
    for t in (a, b, c):
        t[-1] = 7
    check("the last bytes are written", all(int(t[-1]) == 7 for t in (a, b, c)))
    check("the mode is as it was set", pinned_allocator.is_pinned_mode() is True)
    check("host addresses", (pinned_allocator.host_ptr_of(a) != 0, pinned_allocator.host_ptr_of(b)) == (True, 0))
    end = pinned_allocator.host_ptr_of(a) + large * GIB - 1
    check("the host sees what the GPU wrote", ctypes.c_ubyte.from_address(end).value == 7)
    check("memory_allocated()", torch.cuda.memory_allocated() == (2 * large + small) * GIB, torch.cuda.memory_allocated() / GIB)
    check("max_memory_allocated()", torch.cuda.max_memory_allocated() >= (2 * large + small) * GIB)
    pinned_allocator.use_pinned(False)
    d = pinned_allocator.pin_empty(1024, 1024, dtype=torch.float16)
    check("pin_empty overrides the mode and leaves it", pinned_allocator.host_ptr_of(d) != 0 and not pinned_allocator.is_pinned_mode())
    begun = time.perf_counter()
    del a, b, c, d, t
    gc.collect()
    torch.cuda.empty_cache()
    say("all freed and given back", f"{time.perf_counter() - begun:.2f} s")
    row("all freed")
    for what, used in rows:
        say(f"  {what:28}", f"{used:6.2f} GiB")
    used = [used for _, used in rows]
    context = used[1]
    check("page-locked memory takes none of the GPU's but the context", context < 0.9, f"{context:.2f}")
    check("the GPU's takes what it is", abs(used[2] - used[1] - large) < 0.1, f"{used[2] - used[1]:.2f}")
    check("more page-locked memory takes none", abs(used[3] - used[2]) < 0.1, f"{used[3] - used[2]:.2f}")
    check("all freed: the context is left", abs(used[4] - context) < 0.1, f"{used[4]:.2f}")
    all_returned(pm, "table")
    big = pm.pool_malloc(large * GIB, 0, None)  # warm: the host has given this much before
    begun = time.perf_counter()
    pm.pool_free(big, 0, 0, None)
    pm.release()
    say(f"{large} GiB given back", f"{time.perf_counter() - begun:.2f} s")


def pin():
    """How long page-locking takes: where the host's memory was never touched, and again; and in small pieces."""
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    pm = module()
    gib = 2 if QUICK else 40
    pm.pool_free(pm.pool_malloc(4096, 0, None), 0, 0, None)  # CUDA is found
    for turn in ("cold", "again"):
        begun = time.perf_counter()
        block = pm.pool_malloc(gib * GIB, 0, None)
        took = time.perf_counter() - begun
        if not block:
            check(f"{gib} GiB can be had", False, pm.last_error())
            return
        say(f"{gib} GiB page-locked, {turn}", f"{took:.2f} s, {took / gib:.3f} s a GiB")
        if turn == "cold":
            check(f"{gib} GiB page-locked in 4 s, cold", took <= 4.0, f"{took:.2f}")
            say("MemTotal now", f"{memory('MemTotal'):.1f} GiB")
        begun = time.perf_counter()
        pm.pool_free(block, 0, 0, None)
        pm.release()
        say(f"{gib} GiB given back", f"{time.perf_counter() - begun:.2f} s")
    for kib in (4, 64, 1024, 20 * 1024):
        times, n = [], 20
        pm.set_cache_limit(0)
        for _ in range(n):
            begun = time.perf_counter()
            block = pm.pool_malloc(kib * 1024, 0, None)
            times.append(time.perf_counter() - begun)
            pm.pool_free(block, 0, 0, None)
            pm.release()
        pm.set_cache_limit(GIB)
        pm.pool_free(pm.pool_malloc(kib * 1024, 0, None), 0, 0, None)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(n):
            pm.pool_free(pm.pool_malloc(kib * 1024, 0, None), 0, 0, None)
            torch.cuda.synchronize()
        cached = (time.perf_counter() - begun) / n
        say(f"a block of {kib} KiB", f"{1e6 * sorted(times)[n // 2]:.0f} µs made, {1e6 * cached:.0f} µs malloc, free and synchronize with the cache")
    all_returned(pm, "pin")


def pool():
    """A MemPool after CUDA was initialised."""
    import torch

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    pm = module()
    gib = 1 if QUICK else 8
    base, hbm_base = torch.cuda.memory_allocated(), hbm()
    p = pm.Pool()
    begun = time.perf_counter()
    with p:
        a = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    say(f"{gib} GiB in the pool", f"{time.perf_counter() - begun:.2f} s, {hbm() - hbm_base:+.2f} GiB of the GPU's")
    check("it takes none of the GPU's memory", hbm() - hbm_base < 0.15)
    check("memory_allocated() counts it", torch.cuda.memory_allocated() - base == gib * GIB, torch.cuda.memory_allocated() - base)
    b = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    check("outside the pool it is the GPU's", 0.9 < hbm() - hbm_base < 1.25, f"{hbm() - hbm_base:.2f}")
    check("memory_allocated() counts both", torch.cuda.memory_allocated() - base == (gib + 1) * GIB)
    check("host addresses", pm.host_ptr_of(a) != 0 and pm.host_ptr_of(b) == 0)
    view = a[12345:]
    check("of a view too", pm.host_ptr_of(view) == pm.host_ptr_of(a) + 12345)
    a[:4].copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    torch.cuda.synchronize()
    check("the host reads the GPU's write", ctypes.string_at(pm.host_ptr_of(a), 4) == bytes([1, 2, 3, 4]))
    with p:
        small = [torch.full((n,), float(n), device="cuda") for n in (1, 7, 1000, 300_000)]
    check("small tensors share segments", len({pm.host_ptr_of(t) // (2 * MIB) for t in small[:3]}) == 1 and all(pm.host_ptr_of(t) for t in small))
    torch.cuda.synchronize()
    values = [ctypes.cast(pm.host_ptr_of(t) + 4 * (t.numel() - 1), ctypes.POINTER(ctypes.c_float))[0] for t in small]
    check("each at its host address", values == [1.0, 7.0, 1000.0, 300_000.0], values)
    made = pm.statistics()[0].allocations
    with p:
        again = torch.empty(7, device="cuda")
    check("PyTorch caches above the pool", pm.statistics()[0].allocations == made)
    try:
        with p:
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
        check("more than the host has is refused", False)
    except torch.OutOfMemoryError as error:
        check("more than the host has is torch.OutOfMemoryError", True, str(error).splitlines()[0][:90])
        check("and the reason can be asked for", "17592186044416 bytes of page-locked memory" in pm.last_error(), pm.last_error()[:160])
    del a, b, view, small, again
    gc.collect()
    torch.cuda.synchronize()
    check("memory_allocated() is back", torch.cuda.memory_allocated() == base, torch.cuda.memory_allocated() - base)
    del p
    gc.collect()
    torch.cuda.empty_cache()
    all_returned(pm, "pool")


def model():
    """A model whose weights lie in a pool computes what one in the GPU's memory does, bit for bit."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    pm = module()
    p = pm.Pool()

    def both(what, make, run):
        torch.manual_seed(1)
        net = make().cuda().eval()
        with torch.no_grad():
            first = run(net)
            before = torch.cuda.memory_allocated()
            begun = time.perf_counter()
            p.move(net)
            torch.cuda.synchronize()
            moved = time.perf_counter() - begun
            # PyTorch counts the blocks that it cut, which may be a little longer than the tensors.
            moved_by = torch.cuda.memory_allocated() - before
            check(f"{what}: PyTorch counts as before", abs(moved_by) < 4 * MIB, f"{moved_by:+} bytes")
            tensors = list(net.parameters()) + list(net.buffers())
            check(f"{what}: every weight is in page-locked memory", all(pm.host_ptr_of(t) for t in tensors))
            begun = time.perf_counter()
            second = run(net)
            torch.cuda.synchronize()
            took = time.perf_counter() - begun
        same = [torch.equal(a, b) for a, b in zip(first, second)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        say(f"{what}: {size / MIB:.0f} MiB of weights", f"moved in {moved:.2f} s, then a run takes {1e3 * took:.1f} ms")
        check(f"{what}: the same bits", all(same) and len(same) > 0, f"{sum(t.numel() for t in first)} numbers")

    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        say("GPT-2", "left out: no transformers here")
    else:
        config = GPT2Config(n_embd=256, n_layer=4, n_head=4) if QUICK else GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        tokens = torch.arange(512, device="cuda")[None] * 31 % 50_000

        def run(net):
            logits = net(tokens).logits
            text = net.generate(tokens[:, :32], max_new_tokens=16, do_sample=False, pad_token_id=0)
            return [logits, text]

        for dtype in (torch.float32, torch.bfloat16):
            both(f"GPT-2 {config.n_layer} layers, {dtype}", lambda: GPT2LMHeadModel(config).to(dtype), run)
    images = torch.randn(8, 3, 224, 224, device="cuda")
    try:
        import torchvision

        both("ResNet-50", lambda: torchvision.models.resnet50(), lambda net: [net(images)])
    except ImportError:
        say("ResNet-50", "left out: no torchvision here")
    encoder = lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(512, 8, batch_first=True), 4, enable_nested_tensor=False)
    words = torch.randn(4, 128, 512, device="cuda")
    both("encoder", encoder, lambda net: [net(words)])


def read():
    """How fast kernels read page-locked memory, beside the copy engine."""
    import torch

    pm = module()
    bytes = GIB // 4 if QUICK else GIB
    p = pm.Pool()
    a = p.empty(bytes // 4, dtype=torch.float32)
    a.fill_(1.0)
    on_gpu = torch.empty_like(a, device="cuda")
    pinned = torch.empty(bytes // 4, dtype=torch.float32, pin_memory=True)

    def rate(work, repeat=10):
        for _ in range(2):
            work()
        times = []
        for _ in range(repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return bytes / sorted(times)[repeat // 2] / 1e9

    link = rate(lambda: on_gpu.copy_(pinned, non_blocking=True))
    say("link: page-locked host memory to the GPU, copy engine", f"{link:.1f} GB/s")
    summed = rate(lambda: a.sum())
    copied = rate(lambda: on_gpu.copy_(a))
    added = rate(lambda: torch.add(a, 1.0, out=on_gpu))
    written = rate(lambda: a.fill_(1.0))
    say("a kernel sums it", f"{summed:.1f} GB/s, {summed / link:.2f} of the link")
    say("copied to the GPU's memory", f"{copied:.1f} GB/s, {copied / link:.2f}")
    say("a kernel reads it and writes the GPU's memory", f"{added:.1f} GB/s, {added / link:.2f}")
    say("a kernel fills it", f"{written:.1f} GB/s")
    check("streaming read is 0.85 of the link", summed >= 0.85 * link, f"{summed / link:.3f}")
    check("and the sum is right", float(a.sum()) == bytes / 4)


def threads():
    """Eight threads and four streams for a minute, both kinds, through PyTorch's tensors."""
    import pinned_allocator
    import torch

    pm = module()
    pm.set_cache_limit(256 * MIB)
    seconds = 5 if QUICK else 60
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.empty(1, device="cuda")
    seen, wrong, turns = [], [], [0] * 8

    def work(me, stop):
        rng, held = random.Random(me), []
        while time.monotonic() < stop:
            stream = rng.choice(streams)
            with torch.cuda.stream(stream):
                if len(held) < 6 and rng.random() < 0.6:
                    n = rng.choice((1, 1000, 50_000, 1_000_000, rng.randrange(1, 4_000_000)))
                    if rng.random() < 0.5:
                        pm.use(rng.random() < 0.5)  # for every thread
                        t = torch.full((n,), me, dtype=torch.int32, device="cuda")
                    else:
                        t = pinned_allocator.pin_empty(n, dtype=torch.int32).fill_(me)
                    host = pm.host_ptr_of(t)
                    if host:
                        seen.append(host)
                    held.append((t, stream))
                elif held:
                    t, made = held.pop(rng.randrange(len(held)))
                    if made != stream:  # used on another stream than it was made in, and freed at once
                        stream.wait_stream(made)
                        t.record_stream(stream)
                    total = t.sum(dtype=torch.int64)
                    n = t.numel()
                    del t
                    if rng.random() < 0.3 and int(total) != me * n:
                        wrong.append((me, n, int(total)))
            turns[me] += 1

    def crew(seconds):
        stop = time.monotonic() + seconds
        threads = [threading.Thread(target=work, args=(me, stop)) for me in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        torch.cuda.synchronize()
        gc.collect()
        pm.release(20.0)

    crew(2)  # so that kernels are loaded and threads have had their heaps
    start = maps()
    turns = [0] * 8
    crew(seconds)
    say("turns of 8 threads", f"{sum(turns)} in {seconds} s; {pm.statistics()[0].allocations} page-locked, {pm.statistics()[1].allocations} of the GPU's")
    check("every sum was right", not wrong, wrong[:3])
    all_returned(pm, "threads")
    check("no registration is left", registered(set(seen)) == 0, f"{len(set(seen))} addresses asked")
    end = maps()
    say("mapped at the start, at the end", f"{start[0]} ranges of {start[1] / GIB:.3f} GiB, {end[0]} of {end[1] / GIB:.3f} GiB")
    check("mappings are back to the start", abs(end[0] - start[0]) <= 16 and end[1] - start[1] < 256 * MIB,
          f"{end[0] - start[0]:+} ranges, {(end[1] - start[1]) / MIB:+.1f} MiB")


def captures():
    """Calls during a capture, with the pool, and with the allocator as PyTorch's only one (in a process of its own)."""
    import torch

    pm = module()
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            (x * 2 + 1).sum()
    torch.cuda.synchronize()
    p = pm.Pool()
    mine = pm.pool_malloc(MIB, 0, None)
    other, results = torch.cuda.Stream(), []

    def work():
        blocks = [pm.pool_malloc(MIB, 0, None), pm.malloc(MIB, 0, None), pm.pool_malloc(MIB, 0, None)]
        results.append(all(blocks) and pm.host_ptr_of(blocks[0]) != 0)
        for block in blocks:
            pm.free(block, 0, 0, other.cuda_stream)
        pm.release(0.0)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x * 2
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        pm.free(mine, 0, 0, torch.cuda.current_stream().cuda_stream)
        y = y + 1
    check("work was done on the capturing thread and on another", results == [True, True], pm.last_error())
    check("what is freed in the captured stream is kept for the graph", pm.statistics()[0].captured_bytes == MIB)
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    check("the capture is intact and replays", float(y[0]) == 7.0, float(y[0]))
    inside = torch.cuda.CUDAGraph()
    with p:
        z = torch.ones(1000, device="cuda")
    with torch.cuda.graph(inside):
        z.mul_(2)
    inside.replay()
    inside.replay()
    torch.cuda.synchronize()
    check("a graph works on page-locked tensors", float(z[5]) == 4.0, float(z[5]))
    del graph, inside, y, z
    torch.cuda.synchronize()
    check("given back by call", pm.release_captured() == MIB)
    del p
    gc.collect()
    torch.cuda.empty_cache()
    all_returned(pm, "captures")


def captures_alone():
    import pinned_allocator
    import torch

    pm = module()
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            ((x * 2 + 1) * x).sum()
    torch.cuda.synchronize()
    for pinned in (False, True):
        pinned_allocator.use_pinned(pinned)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ((x * 2 + 1) * x).sum()  # its temporaries are freed while it is captured
        noise = [torch.full((1000,), 9e9, device="cuda") for _ in range(20)]  # would be their memory, were it used again
        x.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        check(f"a graph with temporaries replays right, {'page-locked' if pinned else 'GPU memory'}", float(y) == 21000.0, float(y))
        del noise
        kept = sum(counts.captured_bytes for counts in pm.statistics())
        check("they are kept meanwhile", kept > 0, kept)
        del graph, y
        torch.cuda.synchronize()
        check("and given back by call", pm.release_captured() == kept)
    del x
    gc.collect()
    all_returned(pm, "captures alone")


def reports():
    """Faults that people met with such allocators, on the real driver."""
    import torch

    torch.cuda.init()
    torch.empty(1, device="cuda")
    pm = module()
    pm.print_errors(False)
    stream = torch.cuda.Stream()
    s = stream.cuda_stream

    # Freed by what it is, not by the mode of now.
    pm.set_cache_limit(0)
    pm.pool_free(pm.pool_malloc(4096, 0, None), 0, 0, s)
    pm.release()
    seen, before = [], maps()
    for i in range(100 if QUICK else 1000):
        pm.use(True)
        a = pm.malloc(10_000, 0, None)
        pm.use(False)
        b = pm.malloc(10_000, 0, None)
        seen.append(pm.host_ptr_of(a))
        pm.use(i % 2 == 0)
        for block in ((a, b) if i % 2 else (b, a)):
            pm.free(block, -1, 5, s)
    pm.use(False)
    all_returned(pm, "modes interleaved")
    check("modes interleaved: no registration is left", registered(set(seen)) == 0, len(set(seen)))
    check("modes interleaved: mappings are back", abs(maps()[0] - before[0]) <= 4, f"{maps()[0] - before[0]:+} ranges, {maps()[1] - before[1]:+} bytes")
    a = pm.pool_malloc(8192, 0, None)
    pm.free(a + 64, 0, 0, s)
    check("an interior pointer is refused", "inside the allocation" in pm.last_error() and pm.statistics()[0].live == 1)
    pm.free(0x1234_5678, 0, 0, s)
    check("a foreign pointer is refused", "0x12345678 was not freed" in pm.last_error() and pm.statistics()[0].live == 1)
    check("one past the end has no host address", (pm.host_ptr_of(a + 8191) != 0, pm.host_ptr_of(a + 8192)) == (True, 0))
    pm.free(a, 0, 0, s)

    # The device that is asked for, or a reason.
    count = torch.cuda.device_count()
    check("a device that is not there", pm.malloc(1024, count, None) is None and f"no device {count}" in pm.last_error(), pm.last_error()[:70])
    check("more than the GPU has", pm.malloc(1 << 42, 0, None) is None and "returned 2 " in pm.last_error(), pm.last_error()[:110])
    check("a negative size", pm.malloc(-5, 0, None) is None and "negative" in pm.last_error())
    check("PyTorch sees no error of ours", float(torch.ones(3, device="cuda").sum()) == 3.0)
    check("the current device stays", torch.cuda.current_device() == 0)
    if count > 1:
        b = pm.malloc(1024, 1, None)
        check("memory of the second device, current stays 0", b is not None and torch.cuda.current_device() == 0)
        pm.free(b, 0, 1, None)

    # A free is ordered behind its stream.
    cudart = runtime()
    for handle in (s, None):
        n = 64 * MIB
        a = pm.pool_malloc(n, 0, None)
        ctypes.memset(pm.host_ptr_of(a), 0x5A, n)
        target = torch.zeros(n, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if handle else torch.cuda.default_stream()):
            torch.cuda._sleep(400_000_000)
            code = cudart.cudaMemcpyAsync(ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(a), ctypes.c_size_t(n), 4, ctypes.c_void_p(handle))
        begun = time.perf_counter()
        pm.pool_free(a, 0, 0, handle)
        took = time.perf_counter() - begun
        waiting = pm.statistics()[0].waiting_bytes
        check("a free does not wait for its stream, and its memory does", (code, waiting) == (0, n) and took < 0.05, f"{1e6 * took:.0f} µs")
        torch.cuda.synchronize()
        check("the copy saw its bytes", bool((target == 0x5A).all()))
        del target
    pm.set_cache_limit(GIB)
    pm.pool_free(pm.pool_malloc(4096, 0, None), 0, 0, s)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # the device is busy in another stream
    begun = time.perf_counter()
    for _ in range(1000):
        block = pm.pool_malloc(4096, 0, None)
        pm.pool_free(block, 0, 0, s)
    took = time.perf_counter() - begun
    check("a thousand on an idle stream wait for no device", not torch.cuda.default_stream().query(), f"{1e3 * took:.0f} ms for all")
    torch.cuda.synchronize()
    all_returned(pm, "reports")

    # Forked children, as a DataLoader's workers are.
    p = pm.Pool()
    t = p.empty(1000)
    block = pm.pool_malloc(GIB // 4, 0, None)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking with threads: that is what is tested
    begun = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        pm.pool_free(block, 0, 0, None)
        refused = pm.pool_malloc(4096, 0, None) is None and "was forked" in pm.last_error()
        os._exit(0 if refused and pm.host_ptr_of(block) == 0 else 3)
    check("a forked child frees nothing and gets nothing", os.waitpid(pid, 0)[1] == 0, f"{1e3 * (time.perf_counter() - begun):.0f} ms")
    data = torch.utils.data.DataLoader(list(range(64)), batch_size=8, num_workers=2)
    check("a DataLoader's workers run beside it", sum(int(b.sum()) for b in data) == 2016 and float(t.fill_(2).sum()) == 2000.0)
    pm.pool_free(block, 0, 0, None)
    del t, p
    gc.collect()
    torch.cuda.empty_cache()
    all_returned(pm, "forks")


def order():
    """Imported first, imported too late, and tensors that live until the process ends."""
    here = str(pathlib.Path(__file__).resolve().parent)

    def run(what, code, holds):
        environment = dict(os.environ, PYTHONPATH=here + os.pathsep + os.environ.get("PYTHONPATH", ""))
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
        last = (ran.stderr.strip().splitlines() or ["nothing on the standard error"])[-1]
        check(what, holds(ran), f"status {ran.returncode}; {last[:150]}")

    run("imported first, with tensors at the end", "import pinned_allocator as p, torch\np.use_pinned(True)\n"
        "x = torch.ones(1000, device='cuda'); p.use_pinned(False); y = torch.ones(1000, device='cuda')\n"
        "print(float((x + y).sum()), p.host_ptr_of(x) != 0, p.host_ptr_of(y))",
        lambda ran: ran.returncode == 0 and ran.stdout.strip() == "2000.0 True 0" and not ran.stderr.strip())
    run("imported too late", "import torch\ntorch.ones(1, device='cuda')\nimport pinned_allocator",
        lambda ran: ran.returncode == 1 and "was imported too late" in ran.stderr)
    run("a pool with tensors at the end", "import torch, pinring_mapped as pm\ntorch.ones(1, device='cuda')\np = pm.Pool()\n"
        "with p: x = torch.ones(1000, device='cuda')\nprint(float(x.sum()))",
        lambda ran: ran.returncode == 0 and ran.stdout.strip() == "1000.0" and not ran.stderr.strip())
    run("no memory is an exception", "import pinned_allocator as p, torch\n"
        "try: p.pin_empty(1 << 44, dtype=torch.uint8)\nexcept torch.OutOfMemoryError as e: print('refused', e)",
        lambda ran: ran.returncode == 0 and ran.stdout.startswith("refused could not allocate 17592186044416 bytes"))
    run("no GPU to be seen", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport pinring_mapped as pm\npm.print_errors(False)\n"
        "print(pm.pool_malloc(4096, 0, None), pm.last_error())\n"
        "try: pm.Pool()\nexcept RuntimeError as e: print(e)",
        lambda ran: ran.returncode == 0 and "100 CUDA_ERROR_NO_DEVICE" in ran.stdout and "needs CUDA" in ran.stdout)


PARTS = [host, pin, table, pool, model, read, captures, captures_alone, reports, order, threads]


def main():
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    wanted = [a for a in sys.argv[1:] if not a.startswith("--")]
    if "--part" in sys.argv:
        {part.__name__: part for part in PARTS}[wanted[0]]()
        sys.exit(1 if failed else 0)
    ok = bad = 0
    for part in PARTS:
        if wanted and part.__name__ not in wanted:
            continue
        print(f"\n== {part.__name__}: {(part.__doc__ or '').splitlines()[0] if part.__doc__ else ''}", flush=True)
        begun = time.perf_counter()
        options = ["--part"] + (["--quick"] if QUICK else [])
        try:
            ran = subprocess.run([sys.executable, "-B", __file__, part.__name__, *options], capture_output=True, text=True, timeout=240)
            text, status = ran.stdout + ran.stderr, ran.returncode
        except subprocess.TimeoutExpired as late:
            text, status = (late.stdout or b"").decode() + (late.stderr or b"").decode(), "out of time"
        print(text.rstrip(), flush=True)
        ok += text.count("\nok  ") + text.startswith("ok  ")
        bad += text.count("\nFAIL ") + text.startswith("FAIL ")
        if status not in (0, 1) or (status == 1 and "FAIL" not in text):
            bad += 1
            print(f"FAIL {part.__name__} ended with {status}", flush=True)
        print(f"-- {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"\n{ok} checks hold, {bad} fail", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
