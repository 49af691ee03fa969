"""One inference process whose weights are torch tensors on a device: bf16, or fp8 with scales of blocks."""

from __future__ import annotations

from typing import Any

from fabric_core import TransferEngine
from fabric_rlweights.job.device_model import BLOCK, digest_of, in_fp8, memory_for
from fabric_rlweights.job.device_ways import Receiving
from fabric_rlweights.job.model import engine_table
from fabric_rlweights.job.receiver import Noted
from fabric_rlweights.job.wire import arguments, model_of, next_word, say
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.receiver import Receiver

__all__ = ["main"]


def views(table: EngineTable, served: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that are served as what they are: tensors of the table's types and shapes."""
    import torch

    found = {}
    for tensor in table.tensors:
        data = served[tensor.name]
        data = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        found[tensor.name] = data.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return found


def digests(table: EngineTable, tensors: dict[str, Any]) -> dict[str, int]:
    """Of each parameter, and of its scales, as they lie in the tensors."""
    found = {}
    scales = {tensor.name: tensor.quant.scales for tensor in table.tensors if tensor.quant is not None}
    for entry in table.entries:
        box = tuple(slice(a, a + n) for a, n in zip(entry.at, entry.size, strict=True))
        found[entry.param] = digest_of(tensors[entry.tensor][box])
        if entry.tensor in scales:
            box = tuple(slice(a // BLOCK, (a + n) // BLOCK) for a, n in zip(entry.at, entry.size, strict=True))
            found[entry.param + " scales"] = digest_of(tensors[scales[entry.tensor]][box])
    return found


def main() -> None:
    """Run until the launcher is through."""
    import torch

    args = arguments("receiver")
    torch.set_num_threads(1)
    plain = engine_table(model_of(args.model), args.rank, args.receivers)
    table, memory = memory_for(in_fp8(plain) if args.fp8 else plain, args.device)
    ways = Receiving(args, table) if args.store.endswith("all") else None
    with (
        TransferEngine.open(args.device) as engine,
        Receiver(
            engine, table, memory, controller=args.controller, hooks=Noted(), double_buffer=args.double_buffer
        ) as receiver,
    ):
        say(event="up", rank=args.rank)
        while (word := next_word()) is not None:
            what, answer = word["do"], dict[str, Any]()
            if what == "digests":
                answer = {"digests": digests(table, views(table, receiver.tensors)), "serving": receiver.serving}
            elif what == "spoil":
                for data in views(table, receiver.tensors).values():
                    data.view(torch.uint8).fill_(0xFF)
                if args.device != "cpu":
                    torch.cuda.synchronize(args.device)
            elif what == "exit":
                break
            elif ways is not None:
                ways.use(views(table, receiver.tensors))
                answer = ways.run(what, word)
            say(event="done", do=what, rank=args.rank, **answer)


if __name__ == "__main__":
    main()
