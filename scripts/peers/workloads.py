"""What the peers have in common: the rows, the clock, and one line of JSON for each figure.

The rows are those of the Rust benches: batches of 512 rows of 28 KB in 4 leaves (pixels) and of 67 KB in 44 leaves
(structured observations). A call is timed twice: when it returns, which is what keeps the learner's thread, and when its
batch is on the device.
"""

import statistics
import time

import torch

from lines import say

BATCH = 512
PARTS = (4, 32, 128, 256, 704)


def pixels():
    """28,237 bytes in 4 leaves: name, shape of a row, type."""
    return [("obs", (84, 84, 4), torch.uint8)] + _scalars()


def structured():
    """67,000 bytes in 44 leaves."""
    parts = [(f"part{i}", (PARTS[i % len(PARTS)],), torch.float32) for i in range(40)]
    return [("obs", (31_019,), torch.uint8)] + parts + _scalars()


def _scalars():
    return [("action", (), torch.int64), ("reward", (), torch.float32), ("done", (), torch.bool)]


WORKLOADS = {"pixels, 28 KB, 4 leaves": pixels(), "structured, 67 KB, 44 leaves": structured()}


def row_bytes(leaves):
    return sum(torch.empty(shape, dtype=dtype).nbytes for _, shape, dtype in leaves)


def make_rows(leaves, rows, pin=False):
    """`rows` rows, leaf by leaf. Row i of every leaf holds i in its first element, as far as the type goes."""
    made = {}
    for name, shape, dtype in leaves:
        leaf = torch.zeros((rows, *shape), dtype=dtype, pin_memory=pin)
        first = torch.arange(rows) % (2 if dtype == torch.bool else 251)
        leaf.view(rows, -1)[:, 0] = first.to(dtype)
        made[name] = leaf
    return made


def check(batch, numbers, leaves):
    """Whether row i of the batch is row numbers[i]."""
    for name, _, dtype in leaves:
        first = batch[name].reshape(len(numbers), -1)[:, 0].cpu()
        expected = (torch.as_tensor(numbers) % (2 if dtype == torch.bool else 251)).to(dtype)
        if not torch.equal(first, expected):
            raise AssertionError(f"leaf {name} of a batch is not what was stored")


class Clock:
    """Times calls on a device."""

    def __init__(self, device, turns):
        self.device = torch.device(device)
        self.turns = turns
        self.pin = self.device.type == "cuda"

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, peer, workload, way, call, bytes_of_batch, **more):
        """Times `call`, which returns what it made, and prints the line."""
        returns, done = [], []
        for turn in range(self.turns + 3):
            self.synchronize()
            begun = time.perf_counter()
            made = call()
            returned = time.perf_counter()
            self.synchronize()
            ended = time.perf_counter()
            del made
            if turn >= 3:
                returns.append((returned - begun) * 1e6)
                done.append((ended - begun) * 1e6)
        self.line(peer, workload, way, returns, done, bytes_of_batch, **more)

    def line(self, peer, workload, way, returns, done, bytes_of_batch, **more):
        """Prints the line of a call that was timed: µs until it returned, and until it was done."""
        say(
            peer=peer,
            workload=workload,
            way=way,
            device=self.device.type,
            turns=len(done),
            batch_bytes=bytes_of_batch,
            returns_us=round(statistics.median(returns), 1),
            done_us=round(statistics.median(done), 1),
            done_us_least=round(min(done), 1),
            done_us_most=round(max(done), 1),
            gb_per_s=round(bytes_of_batch / statistics.median(done) / 1e3, 2),
            **more,
        )


def to_device(batch, device):
    """Leaf by leaf, without waiting: what a learner does with a batch of tensors."""
    return {name: leaf.to(device, non_blocking=True) for name, leaf in batch.items()}
