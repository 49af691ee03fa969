"""The prefiller as a program: `python -m fabric_kvcache.demo.prefiller --name prefiller0`. Serves until interrupted."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from fabric_core import ConfigError, FabricError, TransferEngine, WaitTimeout
from fabric_core.cli.render import size
from fabric_kvcache.demo.model import LanguageModel, find_model, require_extras
from fabric_kvcache.demo.report import Prefilled, Ready, measure
from fabric_kvcache.demo.role import Backend, Chunk, ModelPath, Nics, PageTokens, Parent, Speaker, Threads, run_role
from fabric_kvcache.demo.stopwatch import Stopwatch
from fabric_kvcache.job import PrefillJob
from fabric_kvcache.prefiller import Prefiller

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
                _serve(prefiller, lm, speaker, chunk_tokens, requests)
        return 0

    run_role(speaker, body)


def _serve(prefiller: Prefiller, lm: LanguageModel, speaker: Speaker, chunk: int, requests: int) -> None:
    served = 0
    while not requests or served < requests:
        try:
            job = prefiller.next(_IDLE)
        except WaitTimeout:
            continue
        served += 1
        try:
            figures = _serve_one(job, lm, chunk)
        except FabricError as error:
            # The decoder was told, if it still lives; a prefiller goes on with the next one.
            speaker.say(f"request {job.request.request_id} of {job.decoder} failed: {error}")
            continue
        speaker.emit(figures)
        speaker.say(
            f"request {figures.request_id}: {figures.tokens} tokens in {figures.prefill_us / 1e3:.0f} ms; "
            f"{figures.writes} writes, {size(figures.bytes)}, {figures.overlap:.0%} of the transfer hidden"
        )


def _serve_one(job: PrefillJob, lm: LanguageModel, chunk: int) -> Prefilled:
    stopwatch = Stopwatch()
    ids = job.tokens.tolist()
    with job:
        began = time.perf_counter()
        _cache, logits = lm.prefill(ids, chunk=chunk, on_layer=job.push_layer, stopwatch=stopwatch)
        ended = time.perf_counter()
        job.push_tail(logits.data)
    return measure(job.request.request_id, job.pushes, stopwatch.spans, (began, ended), tokens=len(ids), chunk=chunk)


if __name__ == "__main__":
    typer.run(main)
