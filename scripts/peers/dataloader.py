"""PyTorch's DataLoader with `pin_memory`, and `to(non_blocking=True)`: seconds from batch to batch, in steady state.

Two data sets: one that hands out rows, which the loader collates (the usual way), and one that hands out whole batches
from contiguous storage (the fast way). The loader works ahead, so the figure is its rate, not the latency of a call.
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset

import workloads

PEER = "torch DataLoader"


class Rows(Dataset):
    """One row at a time."""

    def __init__(self, store, rows):
        self.store, self.rows = store, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        return {name: leaf[number] for name, leaf in self.store.items()}


class Batches(Dataset):
    """One batch at a time: a slice of every leaf."""

    def __init__(self, store, rows):
        self.store, self.batches = store, rows // workloads.BATCH

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        rows = slice(number * workloads.BATCH, (number + 1) * workloads.BATCH)
        return {name: leaf[rows].clone() for name, leaf in self.store.items()}


def run(clock, quick):
    workers = (0, 4) if quick else (0, 4, 8)
    for workload, leaves in workloads.WORKLOADS.items():
        size = workloads.row_bytes(leaves)
        batches = 8 if quick else 24
        rows = batches * workloads.BATCH
        store = workloads.make_rows(leaves, rows)
        for count in workers:
            for way, data, batch in (
                ("rows, collated", Rows(store, rows), workloads.BATCH),
                ("whole batches", Batches(store, rows), None),
            ):
                loader = DataLoader(
                    data, batch_size=batch, num_workers=count, pin_memory=clock.pin, persistent_workers=count > 0
                )
                figures = epochs(clock, loader, leaves)
                seconds = figures["seconds"] / figures["batches"]
                workloads.say(
                    peer=PEER,
                    workload=workload,
                    way=f"{way}, pin_memory={clock.pin}",
                    device=clock.device.type,
                    workers=count,
                    batch_bytes=size * workloads.BATCH,
                    done_us=round(seconds * 1e6, 1),
                    returns_us=round(figures["blocked"] / figures["batches"] * 1e6, 1),
                    gb_per_s=round(size * workloads.BATCH / seconds / 1e9, 2),
                )
                del loader


def epochs(clock, loader, leaves):
    """Two epochs: the first is checked and warms up, the second is timed."""
    for epoch in range(2):
        clock.synchronize()
        begun, blocked, batches, number = time.perf_counter(), 0.0, 0, 0
        ahead = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(ahead, None)
            if batch is None:
                break
            batch = workloads.to_device(batch, clock.device)
            blocked += time.perf_counter() - asked
            batches += 1
            if epoch == 0:
                workloads.check(batch, torch.arange(number, number + workloads.BATCH), leaves)
                number += workloads.BATCH
        clock.synchronize()
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "blocked": blocked, "batches": batches}
