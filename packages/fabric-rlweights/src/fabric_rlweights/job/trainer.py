"""One trainer process: a real FSDP2 x TP model over gloo, which pushes its shards."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fabric_core import TransferEngine
from fabric_rlweights.job import baselines
from fabric_rlweights.job.model import whole
from fabric_rlweights.job.wire import arguments, model_of, next_word, say

__all__ = ["main"]


def fill(module: Any, version: int, seed: int) -> None:
    """Give every parameter the bits that `whole` makes, by way of torch: from the whole tensor to this rank's part."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, param in module.named_parameters():
        full = torch.from_numpy(whole(name, tuple(param.shape), version, seed)).view(torch.bfloat16)
        with torch.no_grad():
            if isinstance(param, DTensor):
                part = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().copy_(part.to_local())
            else:
                param.copy_(full)


def fill_fast(module: Any, version: int) -> None:
    """Random bits: the same ones where ranks hold replicas of a part, other ones elsewhere."""
    import torch
    from torch.distributed.tensor import DTensor

    for number, (_name, param) in enumerate(module.named_parameters()):
        local, part = param, 0
        if isinstance(param, DTensor):
            local = param.to_local()
            for at, placement in zip(param.device_mesh.get_coordinate(), param.placements, strict=True):
                part = part * 64 + (0 if placement.is_replicate() else at + 1)
        generator = torch.Generator().manual_seed(1_000_003 * version + 1009 * number + part)
        with torch.no_grad():
            flat = local.view(-1).view(torch.int16)
            block = torch.randint(-32768, 32767, (min(flat.numel(), 1 << 18),), dtype=torch.int16, generator=generator)
            for begin in range(0, flat.numel(), block.numel()):
                piece = flat[begin : begin + block.numel()]
                piece.copy_(block[: piece.numel()] + begin % 251)


def build(args: Any) -> tuple[Any, Any]:
    """Return (module, state): sharded over the mesh, memory allocated."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from fabric_rlweights.job.model import shard, torch_model

    torch.set_num_threads(1)
    world = args.trainers + (args.receivers if args.store.endswith("all") else 0)
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=world)
    mesh = baselines.mesh_of(args.trainers, args.tp, args.replicate, DeviceMesh)
    module = torch_model(model_of(args.model))
    shard(module, mesh)
    module.to_empty(device="cpu")
    return module, mesh


def main() -> None:
    """Run until the launcher is through."""
    args = arguments("trainer")
    import torch.distributed as dist

    from fabric_rlweights.dtensor import table_of
    from fabric_rlweights.trainer import Trainer

    module, _mesh = build(args)
    table, buffers = table_of(args.rank, dict(module.named_parameters()))
    groups = baselines.groups(args) if args.store.endswith("all") else {}
    with (
        TransferEngine.open() as engine,
        Trainer(engine, table, buffers, controller=args.controller, watermark=args.watermark) as trainer,
    ):
        say(event="up", rank=args.rank, bytes=sum(b.numel() * b.element_size() for b in buffers))
        while (word := next_word()) is not None:
            what = word["do"]
            begin = time.monotonic()
            answer: dict[str, Any] = {}
            if what == "fill":
                fill(module, word["version"], args.seed)
            elif what == "fill_fast":
                fill_fast(module, word["version"])
            elif what == "barrier":
                dist.barrier()
            elif what == "push":
                outcome = trainer.push(word["version"], timeout=word["seconds"])
                answer = {**dataclasses.asdict(outcome)}
                answer["stats"].pop("digests")
            elif what == "table":
                answer = {"table": table.model_dump_json()}
            elif what == "exit":
                break
            else:
                answer = baselines.run_trainer(what, word, args, module, buffers, table, groups)
            say(event="done", do=what, rank=args.rank, took=time.monotonic() - begin, **answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
