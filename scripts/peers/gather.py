"""PyTorch by hand: rows gathered into a pinned stage by `index_select`, then copied leaf by leaf without waiting."""

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
