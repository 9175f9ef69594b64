"""TorchRL's replay buffer: uniform samples of 512 rows, moved to the device without waiting."""

import workloads

PEER = "torchrl"


def run(clock, quick):
    import torch
    import torchrl
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    for workload, leaves in workloads.WORKLOADS.items():
        size = workloads.row_bytes(leaves)
        rows = (1 if quick else 2) * 10**9 // size
        store = workloads.make_rows(leaves, rows)
        for prefetch in (0, 3):
            for pin in (False, True) if clock.pin else (False,):
                buffer = TensorDictReplayBuffer(
                    storage=LazyTensorStorage(rows),
                    batch_size=workloads.BATCH,
                    prefetch=prefetch or None,
                    pin_memory=pin,
                )
                buffer.extend(TensorDict(store, [rows]))
                batch = buffer.sample()
                workloads.check(batch, batch["index"].reshape(-1).cpu(), leaves)
                call = lambda: buffer.sample().to(clock.device, non_blocking=True)
                way = f"uniform, prefetch={prefetch}, pin_memory={pin}"
                clock.time(PEER, workload, way, call, size * workloads.BATCH, threads=torch.get_num_threads(), version=torchrl.__version__)
                del buffer
