"""A prefiller as a process of its own, for the tests: numpy makes its "model". `python peer.py NAME MODE ...`.

Prints one word per line on stdout when something has happened; goes on at a line on stdin where it says so.

serve     serves every request as it should
withhold  leaves out one page, and stays silent
stop      pushes half of the layers, prints "half", and goes no further
refuse    fails in the middle of the first request, then serves
hurry     writes one page twice instead of another one: the number of immediates is right, the data are not
late      holds the first request back until it is told to go on, which is after its deadline; then serves
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import FabricError, Pages, TransferEngine, WaitTimeout
from fabric_kvcache import KvLayout, Prefiller, PrefillJob

LAYOUT = KvLayout(layers=6, kv_heads=3, head_dim=16, page_tokens=8)
TAIL_BYTES = 1000
WITHHELD = (4, 2)  # layer, page


def fake_layer(layout: KvLayout, prompt: NDArray[Any], layer: int) -> NDArray[Any]:
    """Keys and values `[K or V, head, token, dim]` of a prompt: what any process computes for it. Never all ones."""
    shape = (2, layout.kv_heads, len(prompt), layout.head_dim)
    seed = [layer, *(int(token) for token in prompt)]
    top = (1 << 8 * layout.item_bytes) - 1
    return np.random.default_rng(seed).integers(0, top, size=shape, dtype=np.uint64).astype(layout.word)


def fake_tail(prompt: NDArray[Any], nbytes: int) -> bytes:
    return np.random.default_rng([99, *(int(token) for token in prompt)]).bytes(nbytes)


def say(word: str) -> None:
    print(word, flush=True)


def push(job: PrefillJob, layout: KvLayout, layers: range, chunk: int) -> None:
    step = chunk or len(job.tokens)
    for first in range(0, len(job.tokens), step):
        for layer in layers:
            keys, values = fake_layer(layout, job.tokens, layer)[:, :, first : first + step]
            job.push_layer(layer, first, keys, values)


def raw(job: PrefillJob, prefiller: Prefiller, layer: int, numbers: list[int], fill: int) -> None:
    """Write pages of a request without the job's bookkeeping."""
    size, pool = job.request.layout.page_bytes, prefiller.pool
    lease = pool.lease(1)
    pool.view[0, lease.pages] = fill
    source = np.repeat(lease.pages, len(numbers))
    target = job.request.page_indices[numbers]
    prefiller.engine.submit_paged_writes(
        size,
        job.request.imm,
        (pool.handle, Pages(source, size, 0)),
        (job._desc, Pages(target, size, job.request.layout.layer_offset(layer, job.request.pool_pages))),
    ).wait(10)
    lease.release()


def misbehave(mode: str, job: PrefillJob, prefiller: Prefiller, layout: KvLayout) -> None:
    every = range(layout.layers)
    if mode == "stop":
        push(job, layout, range(layout.layers // 2), 0)
        for transfer in job._transfers:
            transfer.wait(10)
        say("half")
    elif mode in {"withhold", "hurry"}:
        layer, page = WITHHELD
        push(job, layout, range(layer), 0)
        push(job, layout, every[layer + 1 :], 0)
        numbers = [k for k in range(len(job.request.page_indices)) if k != page]
        raw(job, prefiller, layer, numbers + ([0] if mode == "hurry" else []), 7)
        job.push_tail(fake_tail(job.tokens, TAIL_BYTES))
        for transfer in job._transfers:
            transfer.wait(10)
        say("pushed")
    elif mode == "late":
        say("held")
        sys.stdin.readline()
        for layer in every:
            raw(job, prefiller, layer, list(range(len(job.request.page_indices))), 13)
        say("written")
    elif mode == "refuse":
        try:
            with job:
                push(job, layout, range(2), 0)
                raise RuntimeError("the model tripped")
        except RuntimeError:
            say("tripped")


def main() -> None:
    name, mode, nics, chunk, dtype, pages = sys.argv[1:]
    layout = KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.page_tokens, dtype)
    with (
        TransferEngine.open(name=name, nics=int(nics)) as engine,
        Prefiller(engine, layout, pages=int(pages), tail_bytes=TAIL_BYTES) as prefiller,
    ):
        say(str(engine.address))
        first = True
        while True:
            try:
                job = prefiller.next(30)
            except WaitTimeout:
                return
            if first and mode != "serve":
                misbehave(mode, job, prefiller, layout)
            else:
                try:
                    with job:
                        push(job, layout, range(layout.layers), int(chunk))
                        job.push_tail(fake_tail(job.tokens, TAIL_BYTES))
                    say("served")
                except FabricError as error:
                    say(f"failed: {error}")
            first = False


if __name__ == "__main__":
    main()
