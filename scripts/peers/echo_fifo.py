"""echo's FIFO server in this process: submit 512 samples, take the batch, move it to the device without waiting."""

import time

import numpy as np
import torch

import workloads

PEER = "echo"


def run(clock, _quick):
    import echo

    if not hasattr(echo, "Server"):
        raise ImportError("the `echo` that is installed is another package: it has no Server")
    for workload, leaves in workloads.WORKLOADS.items():
        size = workloads.row_bytes(leaves)
        source = {name: leaf.numpy() for name, leaf in workloads.make_rows(leaves, workloads.BATCH).items()}
        samples = [{name: np.ascontiguousarray(leaf[i]) for name, leaf in source.items()} for i in range(workloads.BATCH)]
        for pin in (False, True) if clock.pin else (False,):
            server = echo.Server(samples[0], batch_size=workloads.BATCH, pin_host_memory=pin)
            try:
                returns, done = turns(clock, server, samples, leaves)
            finally:
                server.close()
            way = f"FIFO, pin_host_memory={pin}"
            clock.line(PEER, workload, way, returns, done, size * workloads.BATCH)


def turns(clock, server, samples, leaves):
    """Only taking the batch and moving it is timed; submitting is not."""
    returns, done = [], []
    for turn in range(clock.turns + 3):
        for sample in samples:
            server.submit(sample)
        clock.synchronize()
        begun = time.perf_counter()
        taken = server.sample()
        batch = workloads.to_device({name: torch.from_numpy(leaf) for name, leaf in taken.batch.items()}, clock.device)
        returned = time.perf_counter()
        clock.synchronize()
        ended = time.perf_counter()
        if turn == 0:
            workloads.check(batch, torch.arange(workloads.BATCH), leaves)
        if turn >= 3:
            returns.append((returned - begun) * 1e6)
            done.append((ended - begun) * 1e6)
    return returns, done

