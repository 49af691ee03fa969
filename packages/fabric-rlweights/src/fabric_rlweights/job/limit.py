"""What copying costs on this host: processes copy bytes within their own memory, all at the same time.

The yardstick of `fabric rl bench`: as many processes as there are trainers, each with a trainer's share of the bytes,
cut as its parameters are; no messages, no sharing, every page touched before. Once with the C library's memcpy as it
is, and once where that uses streaming stores, which do not read the lines they overwrite and are faster out of cache.
The faster of the two is the limit.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fabric_rlweights.job.launch import Child
from fabric_rlweights.job.model import Model
from fabric_rlweights.job.wire import next_word, say

__all__ = ["KINDS", "main", "rates"]

#: name -> environment of the processes. glibc reads the tunable; another C library ignores it.
KINDS = {
    "memcpy": {},
    "streaming memcpy": {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000"},
}


def rates(model: Model, processes: int, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of all processes together, by kind, in each round; one round before is not counted."""
    found: dict[str, list[float]] = {}
    for kind, env in KINDS.items():
        children = [Child("copier", rank, "fabric_rlweights.job.limit", [], env) for rank in range(processes)]
        try:
            for child in children:
                sizes = [-(-np.prod(shape, dtype=int) * 2 // processes).item() for shape in model.shapes().values()]
                child.tell("prepare", sizes=sizes)
            total = sum(child.hear(120.0)["bytes"] for child in children)
            for _ in range(rounds + 1):
                for child in children:
                    child.tell("copy")
                answers = [child.hear(120.0) for child in children]
                took = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
                found.setdefault(kind, []).append(total / took / 1e9)
        finally:
            for child in children:
                child.tell("exit")
            for child in children:
                child.close()
    return {kind: seen[1:] for kind, seen in found.items()}


def main() -> None:
    """One process: copies when it is told to. Its clock is the host's, so that answers of several can be compared."""
    sources: list[Any] = []
    target = np.zeros(0, np.uint8)
    while (word := next_word()) is not None and word["do"] != "exit":
        if word["do"] == "prepare":
            sources = [np.full(size, 7, np.uint8) for size in word["sizes"]]
            target = np.full(sum(word["sizes"]), 1, np.uint8)
            say(bytes=target.size)
            continue
        begin, at = time.clock_gettime(time.CLOCK_MONOTONIC), 0
        for source in sources:
            np.copyto(target[at : at + source.size], source)
            at += source.size
        say(begin=begin, end=time.clock_gettime(time.CLOCK_MONOTONIC))


if __name__ == "__main__":
    main()
