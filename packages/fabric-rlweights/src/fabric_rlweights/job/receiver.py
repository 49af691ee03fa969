"""One inference process: memory for its tensors, a receiver, and a way to look at what arrived."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import numpy as np

from fabric_core import TransferEngine
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.job.model import engine_table, whole
from fabric_rlweights.job.wire import arguments, model_of, next_word, say
from fabric_rlweights.meta import EngineTable

__all__ = ["main"]


class Noted(Hooks):
    """Counts what happens, for the launcher."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self, version: int) -> None:
        self.calls.append(f"pause {version}")

    def reset_caches(self, version: int) -> None:
        self.calls.append(f"reset {version}")

    def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")


def matches(table: EngineTable, tensors: dict[str, Any], version: int, seed: int, shapes: dict[str, Any]) -> list[str]:
    """Return the tensors that are not what a load of that version's whole parameters makes."""
    made = {tensor.name: np.zeros(tensor.shape, np.int16) for tensor in table.tensors}
    cache: dict[str, Any] = {}
    for entry in table.entries:
        if entry.param not in cache:
            cache[entry.param] = whole(entry.param, shapes[entry.param], version, seed)
        box = cache[entry.param][tuple(slice(a, a + n) for a, n in zip(entry.start, entry.size, strict=True))]
        made[entry.tensor][tuple(slice(a, a + n) for a, n in zip(entry.at, entry.size, strict=True))] = box
    return [name for name, bits in made.items() if not np.array_equal(tensors[name].view(np.int16), bits.reshape(-1))]


def main() -> None:
    """Run until the launcher is through."""
    args = arguments("receiver")
    from fabric_rlweights.receiver import Receiver

    model = model_of(args.model)
    tp = args.receivers
    plain = engine_table(model, args.rank % tp, tp)
    with TransferEngine.open() as engine:
        size = sum(int(np.prod(t.shape)) * 2 + 64 for t in plain.tensors)
        memory, place = engine.empty(size), 0
        arrays, tensors = {}, []
        for tensor in plain.tensors:
            nbytes = int(np.prod(tensor.shape)) * 2
            arrays[tensor.name] = np.frombuffer(memory, np.uint16, nbytes // 2, place).reshape(tensor.shape)
            tensors.append(tensor.model_copy(update={"address": memory.ptr + place}))
            place += -(-nbytes // 64) * 64
        for array in arrays.values():
            array.fill(0xFFFF)
        table = EngineTable(rank=args.rank, tensors=tuple(tensors), entries=plain.entries)
        extra: Any = None
        if args.store.endswith("all"):
            from fabric_rlweights.job import baselines

            extra = baselines.Receiving(args, table, arrays)
        hooks = Noted()
        with Receiver(
            engine, table, arrays, controller=args.controller, hooks=hooks, double_buffer=args.double_buffer
        ) as receiver:
            say(event="up", rank=args.rank, pid=os.getpid())
            while (word := next_word()) is not None:
                what, begin = word["do"], time.monotonic()
                answer: dict[str, Any] = {}
                if what == "check":
                    wrong = matches(table, receiver.tensors, word["version"], args.seed, model.shapes())
                    answer = {"wrong": wrong[:5], "serving": receiver.serving, "version": receiver.version}
                    answer["calls"] = hooks.calls
                elif what == "wait":
                    answer = {"there": receiver.wait_version(word["version"], word["seconds"])}
                elif what == "state":
                    answer = {"serving": receiver.serving, "version": receiver.version, "calls": hooks.calls}
                elif what == "digest":
                    parts = (array.tobytes() for _name, array in sorted(receiver.tensors.items()))
                    total = hashlib.blake2b()
                    for part in parts:
                        total.update(part)
                    answer = {"digest": total.hexdigest()}
                elif what == "spoil":
                    for data in receiver.tensors.values():
                        data.fill(0xFF)
                elif what == "exit":
                    break
                else:
                    answer = extra.run(what, word)
                say(event="done", do=what, rank=args.rank, took=time.monotonic() - begin, **answer)


if __name__ == "__main__":
    main()
