"""PyTorch by hand: rows gathered into a pinned stage by `index_select`, then copied leaf by leaf without waiting; and
gathered from the device's own memory."""

import torch

import workloads

PEER = "torch index_select"


def run(clock, quick):
    for workload, leaves in workloads.WORKLOADS.items():
        size = workloads.row_bytes(leaves)
        rows = (1 if quick else 4) * 10**9 // size  # 4 GB: more than the caches
        store = workloads.make_rows(leaves, rows)
        stage = workloads.make_rows(leaves, workloads.BATCH, pin=clock.pin)

        def sample(numbers):
            for name, leaf in store.items():
                torch.index_select(leaf, 0, numbers, out=stage[name])
            return workloads.to_device(stage, clock.device)

        numbers = torch.randint(rows, (workloads.BATCH,))
        batch = sample(numbers)
        clock.synchronize()
        workloads.check(batch, numbers, leaves)

        call = lambda: sample(torch.randint(rows, (workloads.BATCH,)))
        clock.time(PEER, workload, "uniform, pinned stage", call, size * workloads.BATCH, threads=torch.get_num_threads())

        place = 0

        def in_order():
            nonlocal place
            place = (place + workloads.BATCH) % (rows - workloads.BATCH)
            return sample(torch.arange(place, place + workloads.BATCH))

        clock.time(PEER, workload, "in order, pinned stage", in_order, size * workloads.BATCH, threads=torch.get_num_threads())

        if clock.device.type == "cuda":
            from_memory_of_the_device(clock, workload, leaves, size)


def from_memory_of_the_device(clock, workload, leaves, size):
    """All rows in the device's own memory: what a replay costs where that is large enough."""
    rows = 4 * 10**9 // size
    store = {name: leaf.to(clock.device) for name, leaf in workloads.make_rows(leaves, rows).items()}

    def sample(numbers):
        return {name: torch.index_select(leaf, 0, numbers) for name, leaf in store.items()}

    numbers = torch.randint(rows, (workloads.BATCH,), device=clock.device)
    workloads.check(sample(numbers), numbers.cpu(), leaves)
    call = lambda: sample(torch.randint(rows, (workloads.BATCH,), device=clock.device))
    clock.time(PEER, workload, "uniform, rows in the device's memory", call, size * workloads.BATCH)
