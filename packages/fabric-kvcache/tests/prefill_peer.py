"""A prefiller as a process of its own, for the tests: `prefill_peer.py NAME NICS CHUNK DTYPE PAGES`.

What it does with a request is said by the request's first token (`MODES`); any other token means that it serves it as
it should. Prints one word per line on stdout when something has happened; goes on at a line on stdin where it says so.

withhold  leaves out one page but counts it, and stays silent
stop      pushes half of the layers, prints "half", and goes no further
refuse    fails in the middle
hurry     writes one page twice instead of another one: the number of immediates is right, the data are not
deaf      hears no Cancel from now on, prints "held", and when told to go on writes without asking anybody
double    raises the request's immediate once more than there are writes, then serves it as it should
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import FabricError, Pages, TransferEngine, WaitTimeout
from fabric_kvcache import KvLayout, Prefiller, PrefillJob
from fabric_kvcache.coverage import Coverage

LAYOUT = KvLayout(layers=6, kv_heads=3, head_dim=16, page_tokens=8)
TAIL_BYTES = 1000
WITHHELD = (4, 2)  # layer, page
MODES = {mode: 60_000 + k for k, mode in enumerate(["withhold", "stop", "refuse", "hurry", "deaf", "double"])}


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


def raw(job: PrefillJob, prefiller: Prefiller, layout: KvLayout, layer: int, numbers: list[int], fill: int) -> None:
    """Write pages of a request without the job's bookkeeping."""
    size, pool, target = layout.page_bytes, prefiller.pool, job._targets[0]
    lease = pool.lease(1)
    pool.view[0, lease.pages] = fill
    source = np.repeat(lease.pages, len(numbers))
    pages = target.session.shard.pool_pages[0]
    prefiller.engine.submit_paged_writes(
        size,
        target.head.imm,
        (pool.handle, Pages(source, size, 0)),
        (target.session.desc, Pages(target.request.tables[0][numbers], size, layout.layer_offset(layer, pages))),
    ).wait(10)
    lease.release()


def all_but_one_page(job: PrefillJob, layout: KvLayout, layer: int, page: int, pushed_twice: int | None) -> None:
    """Push everything but a page; count it all the same, or push another one twice."""
    size, total = layout.page_tokens, len(job.tokens)
    for each in range(layout.layers):
        keys, values = fake_layer(layout, job.tokens, each)
        for first in range(0, total, size):
            if (each, first) != (layer, page * size):
                job.push_layer(each, first, keys[:, first : first + size], values[:, first : first + size])
    job._ledger.covered[layer] = Coverage()
    if pushed_twice is None:
        job._targets[0].writes += 1
    else:
        first = pushed_twice * size
        keys, values = fake_layer(layout, job.tokens, layer)
        job.push_layer(layer, first, keys[:, first : first + size], values[:, first : first + size])
    job._ledger.open_layers.clear()
    job.push_tail(fake_tail(job.tokens, TAIL_BYTES))


def settle(job: PrefillJob) -> None:
    for transfer in job._targets[0].transfers():
        transfer.wait(10)


def misbehave(mode: str, job: PrefillJob, prefiller: Prefiller, layout: KvLayout) -> None:
    if mode == "stop":
        push(job, layout, range(layout.layers // 2), 0)
        settle(job)
        say("half")
    elif mode in {"withhold", "hurry"}:
        all_but_one_page(job, layout, *WITHHELD, 0 if mode == "hurry" else None)
        settle(job)
        say("pushed")
    elif mode == "deaf":
        prefiller._cancel = lambda message: None  # type: ignore[method-assign]
        say("held")
        sys.stdin.readline()
        try:
            for layer in range(layout.layers):
                raw(job, prefiller, layout, layer, list(range(len(job.request.tables[0]))), 13)
            say("written")
        except FabricError as error:
            say(f"refused: {error}")
    elif mode == "refuse":
        try:
            with job:
                push(job, layout, range(2), 0)
                raise RuntimeError("the model tripped")
        except RuntimeError:
            say("tripped")


def main() -> None:
    name, nics, chunk, dtype, pages = sys.argv[1:]
    layout = KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.page_tokens, dtype)
    modes = {token: mode for mode, token in MODES.items()}
    with (
        TransferEngine.open(name=name, nics=int(nics)) as engine,
        Prefiller(engine, layout, pages=int(pages), tail_bytes=TAIL_BYTES) as prefiller,
    ):
        say(str(engine.address))
        while True:
            try:
                job = prefiller.next(1800)  # the tests end it
            except WaitTimeout:
                return
            mode = modes.get(int(job.tokens[0]))
            if mode == "double":
                target = job._targets[0]
                engine.submit_barrier(None, None, target.head.imm, [target.session.slots]).wait(30)
            elif mode is not None:
                misbehave(mode, job, prefiller, layout)
                continue
            try:
                with job:
                    push(job, layout, range(layout.layers), int(chunk))
                    job.push_tail(fake_tail(job.tokens, TAIL_BYTES))
            except FabricError as error:
                say(f"failed: {error}")


if __name__ == "__main__":
    main()
