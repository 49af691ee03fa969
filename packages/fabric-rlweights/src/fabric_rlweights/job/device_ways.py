"""The yardsticks of `fabric rl bench --device`: what copying costs there, and what frameworks do on one GPU.

`rank0`: every parameter is broadcast by torch.distributed, and the inference rank loads it. On one GPU NCCL refuses
two ranks, so this is gloo, by way of host memory. `ipc`: rank 0 packs buckets that the inference rank maps (CUDA IPC;
on the CPU shared memory) and loads from: two of them, one is packed while the other is loaded.
"""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

from fabric_rlweights.meta import EngineTable

__all__ = ["Receiving", "Sending", "limit"]

BUCKET = 256 << 20  #: bytes
PATIENCE = timedelta(seconds=30)  #: with the other process: then a way has failed
Part = tuple[str, int, int, int]  #: parameter, first byte, bytes, where in the bucket


def _join(args: Any, rank: int) -> None:
    import torch.distributed as dist

    backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:gloo"
    world = args.trainers + args.receivers
    dist.init_process_group(backend, init_method=f"file://{args.store}", rank=rank, world_size=world, timeout=PATIENCE)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def buckets(sizes: dict[str, int], room: int) -> list[list[Part]]:
    """Cut parameters of so many bytes into buckets, each full but the last; places are whole blocks of 16 bytes."""
    found: list[list[Part]] = []
    at = room
    for name, size in sizes.items():
        begin = 0
        while begin < size:
            if at + 16 > room:
                found.append([])
                at = 0
            count = min(size - begin, room - at)
            found[-1].append((name, begin, count, at))
            begin += count
            at += -(-count // 16) * 16
    return found


def _sizes(tensors: dict[str, Any]) -> dict[str, int]:
    """Bytes by name, in an order that both sides have."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in sorted(tensors.items())}


def _room(tensors: dict[str, Any]) -> int:
    """Bytes of a bucket: of small models there are some, too."""
    return max(1024, min(BUCKET, sum(_sizes(tensors).values()) // 4))


def _hear(rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1, dtype=torch.uint8), rank)


def limit(device: str, parameters: dict[str, Any]) -> float:
    """Return the seconds that a copy of each parameter to other memory of the device takes; once before that."""
    import torch

    targets = [torch.empty_like(parameter, device=device) for parameter in parameters.values()]
    for _ in range(2):
        begin = time.monotonic()
        for target, parameter in zip(targets, parameters.values(), strict=True):
            target.copy_(parameter, non_blocking=True)
        if device != "cpu":
            torch.cuda.current_stream(device).synchronize()
        seconds = time.monotonic() - begin
    return seconds


class _Way:
    def __init__(self, args: Any) -> None:
        self._args = args
        self._shared: list[Any] = []
        self._told: list[tuple[Any, Any]] = []

    def run(self, what: str, word: dict[str, Any]) -> dict[str, Any]:
        """One measurement between two barriers of both processes."""
        try:
            return self._measured(what)
        except Exception as error:  # the other side hears nothing, and gives up in time
            return {"seconds": 0.0, "error": f"{type(error).__name__}: {error}"[:300]}

    def _measured(self, what: str) -> dict[str, Any]:
        import torch.distributed as dist

        if what == "ipc":
            self.prepare_ipc()
        dist.barrier()
        begin = time.monotonic()
        {"rank0": self.rank0, "ipc": self.ipc}[what]()
        self._settle()
        dist.barrier()
        return {"seconds": time.monotonic() - begin}

    def _tell(self, rank: int) -> None:
        """Does not wait until it is heard: both sides may be telling each other something."""
        import torch
        import torch.distributed as dist

        word = torch.zeros(1, dtype=torch.uint8)
        self._told.append((word, dist.isend(word, rank)))

    def _all_heard(self) -> None:
        for _word, work in self._told:
            work.wait()
        self._told.clear()

    def _settle(self) -> None:
        import torch

        if self._args.device != "cpu":
            torch.cuda.current_stream(self._args.device).synchronize()

    def prepare_ipc(self) -> None:
        """Share the buckets, once."""
        raise NotImplementedError

    def rank0(self) -> None:
        """One parameter after the other."""
        raise NotImplementedError

    def ipc(self) -> None:
        """One bucket after the other."""
        raise NotImplementedError


class Sending(_Way):
    """The trainer's side."""

    def __init__(self, args: Any, parameters: dict[str, Any]) -> None:
        super().__init__(args)
        self._parameters = parameters
        _join(args, args.rank)

    def rank0(self) -> None:
        import torch.distributed as dist

        for _name, parameter in sorted(self._parameters.items()):
            dist.broadcast(_bytes(parameter), src=0)

    def prepare_ipc(self) -> None:

        import torch
        import torch.distributed as dist
        from torch import multiprocessing

        if not self._shared:
            device, room = self._args.device, _room(self._parameters)
            if device == "cpu":  # by descriptors, memory is shared with children only
                multiprocessing.set_sharing_strategy("file_system")
            self._shared = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(2)]
            dist.broadcast_object_list([bytes(ForkingPickler.dumps(bucket)) for bucket in self._shared], src=0)

    def ipc(self) -> None:
        parts = buckets(_sizes(self._parameters), _room(self._parameters))
        there = self._args.trainers
        for number, bucket in enumerate(parts):
            if number >= 2:
                _hear(there)
            room = self._shared[number % 2]
            for name, begin, count, at in bucket:
                room[at : at + count].copy_(_bytes(self._parameters[name])[begin : begin + count], non_blocking=True)
            self._settle()
            self._tell(there)
        for _ in parts[:2]:
            _hear(there)
        self._all_heard()


class Receiving(_Way):
    """The only inference rank's side: its tensors are whole parameters, below each other."""

    def __init__(self, args: Any, table: EngineTable) -> None:
        super().__init__(args)
        self._table, self._places = table, dict[str, Any]()
        _join(args, args.trainers + args.rank)

    def use(self, tensors: dict[str, Any]) -> None:
        """Load into these from now on: which they are, a double buffer changes."""
        self._places = {
            entry.param: tensors[entry.tensor][entry.at[0] : entry.at[0] + entry.size[0]]
            for entry in self._table.entries
        }

    def rank0(self) -> None:
        import torch
        import torch.distributed as dist

        for _name, place in sorted(self._places.items()):
            full = torch.empty_like(place)
            dist.broadcast(_bytes(full), src=0)
            place.copy_(full)

    def prepare_ipc(self) -> None:
        import torch.distributed as dist

        if not self._shared:
            found: list[Any] = [None, None]
            dist.broadcast_object_list(found, src=0)
            self._shared = [ForkingPickler.loads(words) for words in found]

    def ipc(self) -> None:
        parts = buckets(_sizes(self._places), _room(self._places))
        for number, bucket in enumerate(parts):
            _hear(0)
            room = self._shared[number % 2]
            for name, begin, count, at in bucket:
                _bytes(self._places[name])[begin : begin + count].copy_(room[at : at + count])
            self._settle()
            self._tell(0)
        self._all_heard()
