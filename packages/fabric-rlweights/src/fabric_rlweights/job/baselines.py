"""What frameworks do without us, on torch.distributed with gloo, so that one run shows the ratio.

`rank0`: every parameter is gathered (`full_tensor`), rank 0 broadcasts it to all inference ranks, which cut out their
part. `broadcast`: as checkpoint-engine does, every trainer broadcasts its own shards in buckets, each to all inference
ranks.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fabric_rlweights.meta import EngineTable, TrainerTable

__all__ = ["Receiving", "groups", "mesh_of", "run_trainer"]

BUCKET = 64 << 20  #: bytes
Arrays = dict[str, Any]


def mesh_of(trainers: int, tp: int, replicate: int, device_mesh: Any) -> Any:
    """The trainers' mesh; all processes of the group call it."""
    import torch

    ranks = torch.arange(trainers)
    if replicate > 1:
        return device_mesh("cpu", ranks.view(replicate, -1, tp), mesh_dim_names=("replicate", "dp", "tp"))
    return device_mesh("cpu", ranks.view(-1, tp), mesh_dim_names=("dp", "tp"))


def groups(args: Any) -> dict[int, Any]:
    """One group for each trainer with all inference ranks; all processes call it."""
    import torch.distributed as dist

    there = list(range(args.trainers, args.trainers + args.receivers))
    return {rank: dist.new_group([rank, *there]) for rank in range(args.trainers)}


def run_trainer(
    what: str,
    word: dict[str, Any],
    args: Any,
    module: Any,
    buffers: list[Any],
    table: TrainerTable,
    made: dict[int, Any],
) -> dict[str, Any]:
    """One measurement on a trainer; returns its seconds between two barriers of all processes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    dist.barrier()
    begin = time.monotonic()
    if what == "rank0":
        params = dict(module.named_parameters())
        for name in word["shapes"]:  # in the receivers' order
            param = params[name]
            full = param.full_tensor() if isinstance(param, DTensor) else param
            if args.rank == 0:
                dist.broadcast(_bytes(full.detach()), src=0, group=made[0])
    elif what == "broadcast":
        for bucket in _buckets(table):
            flat = torch.cat([_bytes(buffers[s.buffer]) for s in bucket])
            dist.broadcast(flat, src=args.rank, group=made[args.rank])
    else:
        raise ValueError(f"a trainer has no {what!r}")
    dist.barrier()
    return {"seconds": time.monotonic() - begin}


def _bytes(buffer: Any) -> Any:
    import torch

    return buffer.reshape(-1).view(torch.uint8)


def _buckets(table: TrainerTable) -> list[list[Any]]:
    found: list[list[Any]] = []
    room = 0
    for shard in table.shards:
        nbytes = int(np.prod(shard.size)) * 2
        if not found or nbytes > room:
            found.append([])
            room = BUCKET
        found[-1].append(shard)
        room -= nbytes
    return found


class Receiving:
    """The inference side of the baselines."""

    def __init__(self, args: Any, table: EngineTable, arrays: Arrays) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        torch.set_num_threads(1)
        self._args, self._table, self._arrays = args, table, arrays
        rank = args.trainers + args.rank
        dist.init_process_group(
            "gloo", init_method=f"file://{args.store}", rank=rank, world_size=args.trainers + args.receivers
        )
        mesh_of(args.trainers, args.tp, args.replicate, DeviceMesh)
        self._groups = groups(args)
        self._entries: dict[str, list[Any]] = {}
        for entry in table.entries:
            self._entries.setdefault(entry.param, []).append(entry)

    def run(self, what: str, word: dict[str, Any]) -> dict[str, Any]:
        """One measurement."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        begin = time.monotonic()
        if what == "rank0":
            for name, shape in word["shapes"].items():
                full = torch.empty(shape, dtype=torch.int16)
                dist.broadcast(_bytes(full), src=0, group=self._groups[0])
                self._load(name, [0] * len(shape), full.numpy())
        elif what == "broadcast":
            tables = [TrainerTable.model_validate_json(text) for text in word["tables"]]
            for table in tables:
                for bucket in _buckets(table):
                    sizes = [int(np.prod(s.size)) * 2 for s in bucket]
                    flat = torch.empty(sum(sizes), dtype=torch.uint8)
                    dist.broadcast(flat, src=table.rank, group=self._groups[table.rank])
                    at = 0
                    for shard, nbytes in zip(bucket, sizes, strict=True):
                        part = flat.numpy()[at : at + nbytes].view(np.uint16).reshape(shard.size)
                        self._load(shard.param, list(shard.start), part)
                        at += nbytes
        else:
            raise ValueError(f"a receiver has no {what!r}")
        dist.barrier()
        return {"seconds": time.monotonic() - begin}

    def _load(self, param: str, first: list[int], box: Any) -> None:
        """Copy a box of a parameter to wherever it belongs here."""
        for entry in self._entries.get(param, ()):
            low = [max(a, b) for a, b in zip(first, entry.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(first, box.shape, entry.start, entry.size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            here = tuple(slice(a - f, b - f) for a, b, f in zip(low, high, first, strict=True))
            there = tuple(
                slice(a - s + t, b - s + t) for a, b, s, t in zip(low, high, entry.start, entry.at, strict=True)
            )
            self._arrays[entry.tensor][there] = box[here].view(np.uint16)
