"""A trainer process without torch: rows of every parameter cut over the ranks, in numpy. Starts in a moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fabric_core import TransferEngine
from fabric_rlweights.job.model import whole
from fabric_rlweights.job.wire import arguments, model_of, next_word, say
from fabric_rlweights.meta import Shard, TrainerTable, contiguous
from fabric_rlweights.trainer import Trainer

__all__ = ["main"]


def main(around: Callable[[dict[str, Any], TransferEngine, Trainer], Any] | None = None) -> None:
    """Run until the launcher is through. `around`: for tests, returns the progress callback of a push."""
    args = arguments("trainer")
    parts = args.trainers // args.replicate
    part = args.rank % parts
    buffers: list[Any] = []
    shards: list[Shard] = []
    places: list[Any] = []
    for name, shape in model_of(args.model).shapes().items():
        step = -(-shape[0] // parts)
        first = min(part * step, shape[0])
        size = (min(step, shape[0] - first), *shape[1:])
        if size[0] == 0:
            continue
        start = (first,) + (0,) * (len(shape) - 1)
        shards.append(
            Shard(
                param=name, shape=shape, dtype=args.dtype, start=start, size=size, buffer=len(buffers), offset=0,
                strides=contiguous(size, 4 if args.dtype == "float32" else 2),
            )
        )  # fmt: skip
        buffers.append(np.zeros(size, np.float32 if args.dtype == "float32" else np.int16))
        places.append((name, shape, slice(first, first + size[0])))
    table = TrainerTable(rank=args.rank, shards=tuple(shards))
    with (
        TransferEngine.open() as engine,
        Trainer(engine, table, buffers, controller=args.controller, watermark=args.watermark) as trainer,
    ):
        say(event="up", rank=args.rank)
        while (word := next_word()) is not None:
            answer: dict[str, Any] = {}
            if word["do"] == "fill":
                for buffer, (name, shape, rows) in zip(buffers, places, strict=True):
                    bits = whole(name, shape, word["version"], args.seed)[rows]
                    if args.dtype == "float32":  # numbers that bfloat16 holds exactly
                        buffer[:] = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                    else:
                        buffer[:] = bits
            elif word["do"] == "push":
                progress = around(word, engine, trainer) if around is not None else None
                outcome = trainer.push(word["version"], timeout=word["seconds"], progress=progress)
                answer = dataclasses.asdict(outcome)
                answer["stats"].pop("digests")
            elif word["do"] == "exit":
                break
            say(event="done", do=word["do"], rank=args.rank, **answer)


if __name__ == "__main__":
    main()
