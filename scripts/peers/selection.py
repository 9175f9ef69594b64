"""Selection alone: a batch of 512 out of a million prioritized items, and new priorities for it, on the host.

The work of `benches/sample.rs`, case `prioritized/1000000`: alpha 0.6, beta 0.4, priorities spread over four powers of
ten. cpprb's sampling also gathers the rows, which are as small as it allows: 4 bytes.
"""

import contextlib
import importlib.metadata
import random
import statistics
import time

from lines import say

ITEMS, BATCH, ALPHA, BETA = 1_000_000, 512, 0.6, 0.4


def run(clock, quick):
    turns = 100 if quick else 1000
    for name, peer in (("torchrl", torchrl), ("cpprb", cpprb)):
        try:
            with one_thread():
                sample, update = peer()
                time_both(name, sample, update, turns)
        except ImportError as error:
            say(peer=name, result="not installed", error=str(error))


@contextlib.contextmanager
def one_thread():
    """PyTorch on one thread for a while; the peers that come later have all of them again."""
    try:
        import torch
    except ImportError:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def priorities(count):
    chosen = random.Random(1)
    return [10.0 ** (chosen.randrange(4) - 2) * (0.5 + chosen.random()) for _ in range(count)]


def torchrl():
    import torch
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    storage = LazyTensorStorage(ITEMS)
    storage.set(range(ITEMS), torch.zeros(ITEMS))
    sampler = PrioritizedSampler(max_capacity=ITEMS, alpha=ALPHA, beta=BETA)
    everything = torch.arange(ITEMS)
    sampler.extend(everything)
    sampler.update_priority(everything, torch.tensor(priorities(ITEMS)))
    fresh = torch.tensor(priorities(BATCH))

    def sample():
        numbers, info = sampler.sample(storage, BATCH)
        numbers = numbers[0] if isinstance(numbers, tuple) else numbers
        if len(numbers) != BATCH or not any("weight" in name for name in info):
            raise AssertionError("rows or weights are missing")
        return numbers

    return sample, lambda numbers: sampler.update_priority(numbers, fresh)


def cpprb():
    import numpy
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(ITEMS, {"obs": {"dtype": numpy.float32}}, alpha=ALPHA)
    buffer.add(obs=numpy.zeros(ITEMS, dtype=numpy.float32), priorities=numpy.array(priorities(ITEMS)))
    fresh = numpy.array(priorities(BATCH))

    def sample():
        batch = buffer.sample(BATCH, beta=BETA)
        if len(batch["indexes"]) != BATCH or len(batch["weights"]) != BATCH:
            raise AssertionError("rows or weights are missing")
        return batch["indexes"]

    return sample, lambda numbers: buffer.update_priorities(numbers, fresh)


def time_both(peer, sample, update, turns):
    sampling, updating = [], []
    for turn in range(turns + 10):
        begun = time.perf_counter()
        numbers = sample()
        sampled = time.perf_counter()
        update(numbers)
        updated = time.perf_counter()
        if turn >= 10:
            sampling.append((sampled - begun) * 1e6)
            updating.append((updated - sampled) * 1e6)
    figures = {}
    for name, times in (("sample", sampling), ("update", updating)):
        figures |= {
            f"{name}_us": round(statistics.median(times), 1),
            f"{name}_us_least": round(min(times), 1),
            f"{name}_us_most": round(max(times), 1),
        }
    version = importlib.metadata.version(peer)
    say(peer=peer, way="prioritized, one thread", items=ITEMS, batch=BATCH, turns=turns, **figures, version=version)
