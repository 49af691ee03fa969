"""FSDP2 trainers and inference ranks in one torchrun job: after each step of the optimizer, the weights are pushed.

    torchrun --standalone --nproc-per-node 3 examples/rl/torchrun_fsdp2.py --receivers 1 --updates 3

The first ranks train, the last ones hold the weights of an inference engine, which fuses gate and up projections.
Rank 0 runs the controller too; its address goes to everybody by one broadcast. Exit code 1 if an inference rank does
not hold what the trainers have. torch on CPUs with gloo is enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fabric_core import TransferEngine
from fabric_rlweights import Controller, Hooks, Receiver, Recorder, Trainer, table_of

HIDDEN, INNER, LAYERS = 48, 80, 2


class Block(nn.Module):
    """As the trainer has it: one parameter for each projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Engine:
    """As an inference engine has it: gate and up are one tensor, which its loader fills."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for layer in range(LAYERS):
            self.tensors[f"{layer}.gate_up"] = torch.zeros(2 * INNER, HIDDEN, dtype=torch.bfloat16)
            self.tensors[f"{layer}.down"] = torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            layer, projection = name.split(".")[:2]
            if projection == "down_proj":
                self.tensors[f"{layer}.down"].copy_(weight)
            else:
                first = 0 if projection == "gate_proj" else INNER
                self.tensors[f"{layer}.gate_up"].narrow(0, first, INNER).copy_(weight)


class PausingHooks(Hooks):
    """What a real engine does around an update; this one has nothing to stop and no cache to reset."""

    def pause(self, version: int) -> None:
        pass

    def reset_caches(self, version: int) -> None:
        pass


def tell_all(text: str) -> str:
    """Give rank 0's text to everybody."""
    words = [text]
    dist.broadcast_object_list(words, src=0)
    return words[0]


def train(rank: int, mesh: DeviceMesh, controller: str, updates: int) -> None:
    torch.manual_seed(0)  # the same weights everywhere, before they are cut
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    table, buffers = table_of(rank, dict(model.named_parameters()))
    with TransferEngine.open() as engine, Trainer(engine, table, buffers, controller=controller) as trainer:
        for version in range(1, updates + 1):
            loss = model(torch.randn(4, HIDDEN, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome = trainer.push(version, timeout=60)
            if not outcome.committed:
                raise SystemExit(f"update {version} was not committed: {outcome.reason} (by {outcome.culprits})")
            if rank == 0:
                print(f"version {version} is served everywhere", flush=True)
        for _name, parameter in model.named_parameters():  # only to check: what a gather would have brought
            whole = parameter.full_tensor().detach()
            dist.broadcast(whole.view(torch.uint8), src=0)


def serve(rank: int, controller: str, updates: int) -> None:
    inference = Engine()
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with Recorder({name: (shape, "bfloat16") for name, shape in shapes.items()}) as recorder:
        inference.load_weights(recorder.weights())  # the loader, unchanged, is watched; nothing is loaded
    table = recorder.table(rank, inference.tensors)
    with (
        TransferEngine.open() as engine,
        Receiver(engine, table, inference.tensors, controller=controller, hooks=PausingHooks()) as receiver,
    ):
        if not receiver.wait_version(updates, 120):
            raise SystemExit(f"inference rank {rank}: version {updates} did not come")
        wanted = Engine()
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=torch.bfloat16)
            dist.broadcast(whole.view(torch.uint8), src=0)
            wanted.load_weights([(name, whole)])
    wrong = [name for name, tensor in wanted.tensors.items() if not torch.equal(tensor, inference.tensors[name])]
    if wrong:
        raise SystemExit(f"inference rank {rank}: {wrong} are not what the trainers have")
    print(f"inference rank {rank}: {len(wanted.tensors)} tensors are what the trainers have", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--updates", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, trainers = dist.get_rank(), dist.get_world_size() - args.receivers
    if trainers < 1:
        raise SystemExit(f"--receivers {args.receivers} leaves no trainer of {dist.get_world_size()} ranks")
    mesh = DeviceMesh("cpu", torch.arange(trainers), mesh_dim_names=("dp",))  # all ranks must call this
    control: Any = None
    if rank == 0:
        engine = TransferEngine.open()
        control = Controller(engine, trainers=trainers, receivers=args.receivers)
    address = tell_all(str(engine.address) if rank == 0 else "")
    if rank < trainers:
        train(rank, mesh, address, args.updates)
    else:
        serve(rank - trainers, address, args.updates)
    dist.barrier()
    if control is not None:
        control.close()
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
