"""PyTorch alone: the ways of copying a tensor of 34.3 MB that its users know."""

import torch

import workloads

PEER = "torch copies"
BYTES = workloads.BATCH * 67_000


def run(clock, _quick):
    device = clock.device
    pageable = torch.ones(BYTES, dtype=torch.uint8)
    pinned = torch.ones(BYTES, dtype=torch.uint8, pin_memory=clock.pin)
    ways = {
        'to("cuda")': lambda: pageable.to(device, copy=True),
        'to("cuda", non_blocking=True)': lambda: pageable.to(device, non_blocking=True, copy=True),
        'already pinned, to("cuda")': lambda: pinned.to(device, copy=True),
        'already pinned, to("cuda", non_blocking=True)': lambda: pinned.to(device, non_blocking=True, copy=True),
    }
    if clock.pin:
        ways['pin_memory().to("cuda")'] = lambda: pageable.pin_memory().to(device)
        ways['pin_memory().to("cuda", non_blocking=True)'] = lambda: pageable.pin_memory().to(device, non_blocking=True)
    for way, call in ways.items():
        clock.time(PEER, "one tensor of 34.3 MB", way, call, BYTES)
