"""How long it takes from a word that is bumped, as after each layer of a model, until that layer's writes are posted.

    python tools/bench/word_to_posted.py [--layers 48] [--every-us 1500] [--rounds 3] [--gpu] [--polling busy]

Three ways in turn, each with 64 pages of 32 KiB a layer between two processes on this host: `sequence`, the engine's
watcher thread submits what was prepared; `step`, the bumping thread does (no word has to be seen); `callback`, a
watcher's Python callback submits. With --gpu the bump is a GPU's, in a CUDA graph with a kernel before each that takes
about as long; a thread that reads the word all the time says when it could be seen (Python: it is late by up to 1 us).
"""

from __future__ import annotations

import argparse
import base64
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fabric_core import MrDesc, Pages, PreparedSequence, StepWrite, TransferEngine
from fabric_core.conformance.gpu_side import Driver, Memory, Side
from fabric_core.native_lib import fast

PAGE, PAGES = 32768, 64
PATIENCE = 60.0  # seconds
LABELS = ("min", "p10", "p50", "p90", "p99")


def percentiles(name: str, ready: list[int], posted: list[int]) -> None:
    us = (np.array(posted) - np.array(ready)) / 1000
    p = np.percentile(us, [0, 10, 50, 90, 99])
    row = "  ".join(f"{label} {value:8.1f}" for label, value in zip(LABELS, p, strict=True))
    print(f"{name:<22} {row}", flush=True)


class Bench:
    """One engine here, one process there; `rows` are what the layers write."""

    def __init__(self, words: argparse.Namespace) -> None:
        device = "cuda:0" if words.gpu else "cpu"
        kind = "gpu" if words.gpu else "empty"
        self.layers, self.every = words.layers, words.every_us / 1e6
        self.side = Side(device)
        self.engine = TransferEngine.open(device, "local", polling=words.polling)
        self.memory = Memory(self.engine, kind, PAGE * PAGES, Driver() if words.gpu else None)
        self.handle, _ = self.engine.reg_mr(self.memory.what)
        made = self.side.ask("make", kind=kind, nbytes=PAGE * PAGES)
        self.desc = MrDesc.from_bytes(base64.b64decode(made["desc"]))
        order = np.random.default_rng(1).permutation(PAGES).astype(np.uint32)
        self.row = PAGE, None, (self.handle, Pages(order, PAGE)), (self.desc, Pages(order, PAGE))
        self.engine.submit_paged_writes(*self.row).wait(60)  # first contact

    def sequence(self) -> PreparedSequence:
        return self.engine.prepare_sequence([[StepWrite(*self.row)] for _ in range(self.layers)])

    def bump(self, each: Callable[[int], object]) -> list[int]:
        """Call `each(steps)` every so often; return when."""
        ready, due = [], time.monotonic()
        for number in range(self.layers):
            due += self.every
            time.sleep(max(0.0, due - time.monotonic()))
            ready.append(time.monotonic_ns())
            each(number + 1)
        return ready

    def ended(self, sequence: PreparedSequence) -> list[int]:
        """Wait until all steps were submitted and have ended; return when each was posted."""
        until = time.monotonic() + PATIENCE
        while sequence.submitted < self.layers:
            if time.monotonic() > until:
                raise TimeoutError(f"{sequence.submitted} of {self.layers} steps were submitted in {PATIENCE:g} s")
            time.sleep(0.001)
        sequence.wait(PATIENCE)
        posted = sequence.posted_ns
        sequence.close()
        return posted

    def by_sequence(self) -> tuple[list[int], list[int]]:
        sequence = self.sequence()
        ready = self.bump(lambda steps: fast.store_u64(sequence.ptr, steps))
        return ready, self.ended(sequence)

    def by_step(self) -> tuple[list[int], list[int]]:
        sequence = self.sequence()
        ready = self.bump(sequence.step)
        return ready, self.ended(sequence)

    def by_callback(self) -> tuple[list[int], list[int]]:
        posted: list[int] = []
        transfers: list[Any] = []
        whole = threading.Event()

        def changed(_old: int, new: int) -> None:
            while len(posted) < new:
                transfers.append(self.engine.submit_paged_writes(*self.row))
                posted.append(time.monotonic_ns())
            if new == self.layers:
                whole.set()

        watcher = self.engine.alloc_uvm_watcher(changed)
        ready = self.bump(lambda steps: fast.store_u64(watcher.ptr, steps))
        if not whole.wait(PATIENCE):
            raise TimeoutError(f"{len(posted)} of {self.layers} steps were submitted in {PATIENCE:g} s")
        for transfer in transfers:
            transfer.wait(PATIENCE)
        watcher.close()
        return ready, posted

    def by_gpu(self) -> tuple[list[int], list[int]]:
        """A CUDA graph: a kernel that takes some time, then the next step of the sequence, for each layer."""
        import torch

        sequence = self.sequence()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        cycles = int(self.every * 1.7e9)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(self.layers):
                torch.cuda._sleep(cycles)
                self.engine.stream_submit(sequence, torch.cuda.current_stream())
        seen: list[int] = []
        load, now, ptr = fast.load_u64, time.monotonic_ns, sequence.ptr
        with torch.cuda.stream(stream):
            graph.replay()
        until = now() + int(1e9 * PATIENCE)
        while len(seen) < self.layers and now() < until:
            value = load(ptr)
            if value > len(seen):
                seen.extend([now()] * (value - len(seen)))
        stream.synchronize()
        return seen, self.ended(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--every-us", type=float, default=1500.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--polling", default="adaptive")
    words = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}, {words}")
    bench = Bench(words)
    ways = {"sequence": bench.by_sequence, "step": bench.by_step, "callback": bench.by_callback}
    if words.gpu:
        ways["sequence, by a graph"] = bench.by_gpu
    found: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in ways}
    for turn in range(words.rounds + 1):
        for name, way in ways.items():
            ready, posted = way()
            if turn:  # the first round warms up
                found[name][0].extend(ready)
                found[name][1].extend(posted)
    for name, (ready, posted) in found.items():
        percentiles(name, ready, posted)
    bench.engine.close()
    bench.side.process.kill()
    bench.side.process.wait()


if __name__ == "__main__":
    main()
