"""An example to copy from: trainers and inference ranks of one torchrun job, with a real FSDP2 model.

    torchrun --nproc-per-node 3 -m fabric_rlweights.job.torchrun --receivers 1 --updates 3

The first ranks train, the last ones hold an inference engine's weights. Rank 0 runs the controller too, and its address
goes to everybody by one broadcast. Exit code 1 if an inference rank does not hold what the trainers have.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.job.model import Model, engine_table, shard, torch_model
from fabric_rlweights.job.receiver import matches
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Trainer

__all__ = ["main"]

MODEL = Model(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)


def tell_all(text: str, rank: int) -> str:
    """Give rank 0's text to everybody."""
    import torch
    import torch.distributed as dist

    room = torch.zeros(512, dtype=torch.uint8)
    if rank == 0:
        room[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.broadcast(room, src=0)
    return bytes(room.tolist()).rstrip(b"\0").decode()


def train(rank: int, module: Any, controller: str, updates: int) -> None:
    """A trainer rank: a step of the optimizer, then a push."""
    from fabric_rlweights.job.trainer import fill

    table, buffers = table_of(rank, dict(module.named_parameters()))
    with TransferEngine.open() as engine, Trainer(engine, table, buffers, controller=controller) as trainer:
        for version in range(1, updates + 1):
            fill(module, version, seed=0)  # stands for the optimizer's step
            outcome = trainer.push(version, timeout=60)
            if not outcome.committed:
                raise SystemExit(f"update {version} was not committed: {outcome.reason}")
            if rank == 0:
                print(f"version {version} is served everywhere, {outcome.seconds * 1e3:.0f} ms", flush=True)


def serve(rank: int, ranks: int, controller: str, updates: int) -> None:
    """An inference rank: memory for its tensors, and nothing to do."""
    bare = engine_table(MODEL, rank, ranks)
    arrays = {tensor.name: np.zeros(tensor.shape, np.uint16) for tensor in bare.tensors}
    with TransferEngine.open() as engine, Receiver(engine, bare, arrays, controller=controller) as receiver:
        if not receiver.wait_version(updates, 120):
            raise SystemExit(f"inference rank {rank}: version {updates} did not come")
        wrong = matches(bare, receiver.tensors, updates, 0, MODEL.shapes())
    if wrong:
        raise SystemExit(f"inference rank {rank}: {wrong} are not what the trainers have")
    print(f"inference rank {rank}: {len(bare.tensors)} tensors are right", flush=True)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3)
    args = parser.parse_args()
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group("gloo")
    rank, trainers = dist.get_rank(), dist.get_world_size() - args.receivers
    if trainers < 1:
        raise SystemExit(f"--receivers {args.receivers} leaves no trainer of {dist.get_world_size()} ranks")
    mesh = DeviceMesh("cpu", torch.arange(trainers), mesh_dim_names=("dp",))  # by all ranks
    controller = None
    if rank == 0:
        engine = TransferEngine.open()
        controller = Controller(engine, trainers=trainers, receivers=args.receivers, digests=True)
    address = tell_all(str(engine.address) if rank == 0 else "", rank)
    if rank < trainers:
        module = torch_model(MODEL)
        shard(module, mesh)
        module.to_empty(device="cpu")
        train(rank, module, address, args.updates)
    else:
        serve(rank - trainers, args.receivers, address, args.updates)
    dist.barrier()
    if controller is not None:
        controller.close()
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
