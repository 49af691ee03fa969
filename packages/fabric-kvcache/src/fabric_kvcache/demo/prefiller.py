"""The prefiller as a program: `python -m fabric_kvcache.demo.prefiller --name prefiller0`. Serves until interrupted."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Annotated, Any

import typer
from numpy.typing import NDArray

from fabric_core import BackendError, ConfigError, FabricError, TransferEngine, WaitTimeout
from fabric_core.cli.render import size
from fabric_kvcache.demo.model import LanguageModel, OnLayer, find_model, require_extras
from fabric_kvcache.demo.report import Halfway, Prefilled, Ready, measure
from fabric_kvcache.demo.role import Backend, Chunk, ModelPath, Nics, PageTokens, Parent, Speaker, Threads, run_role
from fabric_kvcache.demo.stopwatch import Stopwatch
from fabric_kvcache.job import PrefillJob
from fabric_kvcache.prefiller import Prefiller

_HOLD = 60.0  # seconds: how long a held prefiller waits for its end
_IDLE = 0.5  # seconds: how often an idle prefiller looks whether it should end


def main(
    name: Annotated[str, typer.Option(help="Name under which decoders find this process: local:NAME.")] = "prefiller0",
    backend: Backend = "auto",
    nics: Nics = None,
    page_tokens: PageTokens = 16,
    chunk_tokens: Chunk = 0,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens of all prompts in work at a time.")] = 2048,
    requests: Annotated[int, typer.Option(min=0, help="End after that many requests; 0: serve until Ctrl-C.")] = 0,
    model: ModelPath = None,
    threads: Threads = 1,
    parent: Parent = 0,
    hold: Annotated[bool, typer.Option(hidden=True, help="Stop halfway through the first request.")] = False,
) -> None:
    """Compute prompts, and push their KV into the memory of whoever asked."""
    speaker = Speaker("prefiller", parent)

    def body() -> int:
        # Completions are noted by a Python thread while this one runs the model: let it have its turn sooner than the
        # default of 5 ms, which is longer than the transfers themselves.
        sys.setswitchinterval(0.0005)
        require_extras()
        path = find_model(model)
        if chunk_tokens % page_tokens:
            raise ConfigError(f"--chunk-tokens {chunk_tokens}: must be a multiple of --page-tokens, {page_tokens}")
        with TransferEngine.open(backend=backend, nics=nics, name=name) as engine:
            speaker.say(f"loading {path.name} ...")
            lm = LanguageModel(path, threads=threads)
            layout = lm.layout(page_tokens)
            with Prefiller(engine, layout, pages=layout.pages_for(pool_tokens), tail_bytes=lm.tail_bytes) as prefiller:
                load_us = 1e6 * lm.load_seconds
                speaker.emit(Ready(role="prefiller", pid=os.getpid(), address=str(engine.address), load_us=load_us))
                speaker.say(f"{lm.name} at local:{name} ({engine.address}); Ctrl-C ends it")
                _serve(prefiller, lm, speaker, chunk_tokens, requests, hold)
        return 0

    run_role(speaker, body)


def _serve(prefiller: Prefiller, lm: LanguageModel, speaker: Speaker, chunk: int, requests: int, hold: bool) -> None:
    served = 0
    while not requests or served < requests:
        try:
            job = prefiller.next(_IDLE)
        except WaitTimeout:
            continue
        served += 1
        try:
            figures = _serve_one(job, lm, chunk, _held(job, lm, speaker) if hold else job.push_layer)
        except FabricError as error:
            # The decoder was told, if it still lives; a prefiller goes on with the next one.
            speaker.say(f"request {job.request.request_id} of {job.decoder} failed: {error}")
            continue
        speaker.emit(figures)
        speaker.say(
            f"request {figures.request_id}: {figures.tokens} tokens in {figures.prefill_us / 1e3:.0f} ms; "
            f"{figures.writes} writes, {size(figures.bytes)}, {figures.overlap:.0%} of the transfer hidden"
        )


def _held(job: PrefillJob, lm: LanguageModel, speaker: Speaker) -> OnLayer:
    """Push half of the layers, tell the parent, and stand still: it kills us there."""
    pushed = 0

    def push(layer: int, first: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        nonlocal pushed
        job.push_layer(layer, first, keys, values)
        pushed += 1
        if pushed == max(1, lm.layers // 2):
            speaker.emit(Halfway(request_id=job.request.request_id, layers=pushed, of=lm.layers))
            threading.Event().wait(_HOLD)
            raise BackendError(f"held for {_HOLD:g} s, and nobody killed this process")

    return push


def _serve_one(job: PrefillJob, lm: LanguageModel, chunk: int, on_layer: OnLayer) -> Prefilled:
    stopwatch = Stopwatch()
    ids = job.tokens.tolist()
    with job:
        began = time.perf_counter()
        _cache, logits = lm.prefill(ids, chunk=chunk, on_layer=on_layer, stopwatch=stopwatch)
        ended = time.perf_counter()
        job.push_tail(logits.data)
    return measure(job.request.request_id, job.pushes, stopwatch.spans, (began, ended), tokens=len(ids), chunk=chunk)


if __name__ == "__main__":
    typer.run(main)
