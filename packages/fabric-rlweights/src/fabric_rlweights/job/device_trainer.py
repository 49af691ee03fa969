"""One trainer process with whole parameters as plain torch tensors on a device, or offloaded from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fabric_core import TransferEngine
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.job.device_model import digest_of, fill, in_fp8, reference
from fabric_rlweights.job.device_ways import Sending, limit
from fabric_rlweights.job.model import engine_table
from fabric_rlweights.job.wire import arguments, model_of, next_word, say
from fabric_rlweights.trainer import Trainer

__all__ = ["main"]


def digests(parameters: dict[str, Any], device: str, args: Any) -> dict[str, int]:
    """What an inference rank must have of each parameter, and of its scales."""
    table = engine_table(model_of(args.model), 0, 1)
    quantised = {tensor.name for tensor in in_fp8(table).tensors if tensor.quant} if args.fp8 else set()
    tensor_of = {entry.param: entry.tensor for entry in table.entries}
    found = {}
    for name, parameter in parameters.items():
        x = parameter.to(device)
        if tensor_of[name] in quantised:
            x, scales = reference(x)
            found[name + " scales"] = digest_of(scales)
        found[name] = digest_of(x)
    return found


def main() -> None:
    """Run until the launcher is through."""
    import torch

    args = arguments("trainer")
    torch.set_num_threads(1)
    where = "cpu" if args.offloaded else args.device
    parameters = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=where)
        for name, shape in model_of(args.model).shapes().items()
    }
    ways = Sending(args, parameters) if args.store.endswith("all") else None
    table, buffers = table_of(args.rank, parameters)
    with (
        TransferEngine.open(args.device) as engine,
        Trainer(engine, table, buffers, controller=args.controller, watermark=args.watermark) as trainer,
    ):
        say(event="up", rank=args.rank)
        while (word := next_word()) is not None:
            what, answer = word["do"], dict[str, Any]()
            if what == "fill":
                fill(parameters, args.device, word["version"])
            elif what == "push":
                outcome = trainer.push(word["version"], timeout=word["seconds"])
                answer = dataclasses.asdict(outcome)
                answer["stats"].pop("digests")
            elif what == "digests":
                answer = {"digests": digests(parameters, args.device, args)}
            elif what == "limit":
                answer = {"seconds": limit(args.device, parameters)}
            elif what == "exit":
                break
            elif ways is not None:
                answer = ways.run(what, word)
            say(event="done", do=what, rank=args.rank, **answer)


if __name__ == "__main__":
    main()
