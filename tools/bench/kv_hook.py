"""From "layer ready" to "posted" as a model's thread sees it: `job.hook` of a real request, between two processes.

    python tools/bench/kv_hook.py --rounds 8 --between busy

One rank of Qwen3-235B at TP 4 (16 layers, 4,096 tokens, 64 pages of 32 KiB a layer, random). The model's thread is
busy between layers, as with a model that runs on processors, sleeps, or spins as one does that waits for a GPU. POSTED
is from the hook's call until its last submit has returned (`job.pushes`), CALL the whole call. The first request is
left out. `fabric kv bench` measures the same of the engine alone, without a job around it.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from fabric_core import TransferEngine
from fabric_kvcache import Decoder, Prefiller
from fabric_kvcache.bench.timed import Busy, TimedPrefill
from fabric_kvcache.bench.work import cut_layers
from fabric_kvcache.cache import AttentionGroup, CacheLayout
from fabric_kvcache.presets import PRESETS

TOKENS = 4096
PAGES = 40
TAIL = 4096
PATIENCE = 60.0  # seconds


def layout(layers: int) -> CacheLayout:
    """Return what one of the four ranks holds, as a model of its own."""
    whole = cut_layers(PRESETS["qwen3-235b"].layout, layers)
    (group,) = whole.groups
    assert isinstance(group, AttentionGroup)
    return msgspec.structs.replace(whole, tp=1, groups=(msgspec.structs.replace(group, kv_heads=1),))


def decode(prefiller: str, layers: int, requests: int) -> None:
    with (
        TransferEngine.open(name=f"kv-hook-{secrets.token_hex(4)}") as engine,
        Decoder(engine, layout(layers), pages=PAGES, tail_bytes=TAIL, seed=1) as decoder,
    ):
        for number in range(requests):
            decoder.submit(prefiller, TOKENS, timeout=PATIENCE, request_id=f"r{number}").wait().release()
        sys.stdin.readline()


def request(prefiller: Prefiller, layers: int, idle: Callable[[], object] | None) -> tuple[list[float], list[float]]:
    """Serve one. Return (posted, call) of each layer in microseconds."""
    calls: list[float] = []
    with prefiller.next(PATIENCE) as job:
        hook = job.hook(0, TOKENS)

        def ready(_chunk: int, layer: int) -> None:
            began = time.perf_counter()
            hook(layer)
            calls.append(1e6 * (time.perf_counter() - began))

        TimedPrefill(layers, PRESETS["qwen3-235b"].compute_us(TOKENS)).run(ready, idle)
        job.push_tail(bytes(TAIL))
    posted = [1e6 * (push.submitted - push.began) for push in job.pushes if push.layer >= 0]
    return posted, calls


def main() -> None:
    parser = argparse.ArgumentParser(description="From layer ready to posted, through a job's hook.")
    parser.add_argument("--between", choices=["busy", "sleep", "spin"], default="busy")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.decode:
        decode(words.decode, words.layers, words.rounds + 1)
        return
    idle = {"busy": Busy(), "sleep": None, "spin": threading.Event().is_set}[words.between]
    with (
        TransferEngine.open(name=f"kv-hook-{secrets.token_hex(4)}") as engine,
        Prefiller(engine, layout(words.layers), pages=PAGES, tail_bytes=TAIL) as prefiller,
    ):
        options = ["--decode", str(engine.address), "--layers", str(words.layers), "--rounds", str(words.rounds)]
        child = subprocess.Popen([sys.executable, __file__, *options], stdin=subprocess.PIPE)
        assert child.stdin is not None
        try:
            found = [request(prefiller, words.layers, idle) for _ in range(words.rounds + 1)][1:]
        finally:
            child.stdin.close()
            child.wait(PATIENCE)
    for name, values in zip(("posted", "call"), zip(*found, strict=True), strict=True):
        p = np.percentile(np.concatenate(values), [10, 50, 90, 99])
        rounds = [float(np.median(one)) for one in values]
        print(
            f"{words.between:6} {name:6} us: p10 {p[0]:.1f}  p50 {p[1]:.1f}  p90 {p[2]:.1f}  p99 {p[3]:.1f}; "
            f"p50 of each round {min(rounds):.1f}..{max(rounds):.1f}"
        )


if __name__ == "__main__":
    main()
