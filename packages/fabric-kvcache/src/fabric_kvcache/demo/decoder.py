"""The decoder as a program: `python -m fabric_kvcache.demo.decoder --prefiller local:prefiller0 --prompt "..."`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from fabric_core import BackendError, ConfigError, NetAddr, PeerLost, TransferEngine
from fabric_core.cli.guard import BAD, GOOD
from fabric_core.cli.render import size
from fabric_kvcache.decoder import Decoder
from fabric_kvcache.demo.model import LanguageModel, Tokenizer, find_model, require_extras
from fabric_kvcache.demo.report import Failed, ModelFacts, Ready, Result, Task, Text
from fabric_kvcache.demo.role import Backend, ModelPath, Nics, PageTokens, Parent, Speaker, Threads, run_role
from fabric_kvcache.errors import PrefillRefused
from fabric_kvcache.received import ReceivedKv

Layers = list[tuple[NDArray[Any], NDArray[Any]]]

PROMPT = (
    "A ferry crosses the bay every hour. It leaves the north pier at ten past the hour and needs twenty-five minutes "
    "to reach the south pier, where it waits ten minutes before it goes back. On Sundays it does not run after six in "
    "the evening. The captain, Ines, has worked on the ferry for eleven years, and her dog Bruno sleeps on the bridge. "
    "Tourists like the view of the lighthouse on the left side, so that side fills up first. Summarize the most "
    "important facts about the ferry as a list."
)
PROMPT_TWO = (
    "A small bakery in a harbour town opens at five. Its oven takes forty loaves at a time, and a batch needs fifty "
    "minutes. On market days the queue reaches the fountain, and the baker's son sells the first loaves to the crews "
    "of the fishing boats. Rye bread sells out by nine, the sweet rolls by ten. Write a short notice for the door."
)
_SPARE_PAGES = 7  # so that the pages of a prompt are not simply all pages of the pool
_SEED = 1


def main(
    prefiller: Annotated[str, typer.Option(help="Address of the prefiller, for example local:prefiller0.")] = "",
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 48,
    compare: Annotated[bool, typer.Option(help="Then do the same in this process alone, and compare.")] = True,
    name: Annotated[str | None, typer.Option(help="Name of this process's engine. Default: random.")] = None,
    backend: Backend = "auto",
    nics: Nics = None,
    page_tokens: PageTokens = 16,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Of the comparison; must be the prefiller's own.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for prefill and transfer together.")] = 60.0,
    model: ModelPath = None,
    threads: Threads = 1,
    parent: Parent = 0,
) -> None:
    """Get a prompt's KV from a prefiller, and generate from there."""
    speaker = Speaker("decoder", parent)

    def body() -> int:
        if not prefiller and not speaker.events:
            raise ConfigError("--prefiller is needed: the address that the prefiller prints, or local:NAME")
        if not speaker.events:
            NetAddr.parse(prefiller)
        require_extras()
        path = find_model(model)
        with TransferEngine.open(backend=backend, nics=nics, name=name) as engine:
            speaker.say(f"loading {path.name} ...")
            tokenizer = Tokenizer(path)
            lm = LanguageModel(path, threads=threads)
            load_us = 1e6 * lm.load_seconds
            speaker.emit(Ready(role="decoder", pid=os.getpid(), address=str(engine.address), load_us=load_us))
            task = _told() if speaker.events else Task(prefiller=prefiller, prompt=prompt)
            run = Run(engine, lm, tokenizer, speaker, page_tokens=page_tokens, chunk=chunk_tokens)
            result = run.two_processes(task, max_new_tokens, timeout, compare=compare)
        speaker.emit(result)
        return GOOD if not compare or _equal(result, speaker) else BAD

    run_role(speaker, body)


def _told() -> Task:
    """Read what to do from the parent, which waits until both are ready."""
    line = sys.stdin.readline()
    if not line:
        raise BackendError("the parent process is gone")
    return Task.model_validate_json(line)


def _equal(result: Result, speaker: Speaker) -> bool:
    speaker.say(
        f"first token after {result.ttft_us / 1e3:.0f} ms, in one process {(result.one_ttft_us or 0) / 1e3:.0f} ms; "
        f"{result.writes} writes, {size(result.bytes)}"
    )
    same = result.tokens == result.one_tokens and bool(result.kv_equal) and bool(result.logits_equal)
    speaker.say("both ways gave the same" if same else "MISMATCH between the two ways")
    return same


class Run:
    """One prompt, both ways."""

    def __init__(
        self,
        engine: TransferEngine,
        lm: LanguageModel,
        tokenizer: Tokenizer,
        speaker: Speaker,
        *,
        page_tokens: int,
        chunk: int,
    ) -> None:
        self.engine = engine
        self.lm = lm
        self.tokenizer = tokenizer
        self.speaker = speaker
        self.layout = lm.layout(page_tokens)
        self.chunk = chunk

    def two_processes(self, task: Task, count: int, timeout: float, *, compare: bool) -> Result:
        lm, prompt = self.lm, task.prompt
        ids = self.tokenizer.encode(prompt)
        if len(ids) + count > lm.max_tokens:
            raise ConfigError(f"{len(ids)} tokens of prompt and {count} new ones are more than {lm.max_tokens}")
        # Once more for a retry: pages that a dead prefiller might still write may not be back yet.
        pages = self.layout.pages_for(len(ids)) * (2 if task.retry else 1) + _SPARE_PAGES
        with Decoder(self.engine, self.layout, pages=pages, tail_bytes=lm.tail_bytes, seed=_SEED) as decoder:
            began = time.perf_counter()
            kv, asked = self._ask(decoder, task, ids, timeout)
            with kv:
                logits = np.frombuffer(kv.tail, dtype=np.float32)
                first_token = (int(np.argmax(logits)), time.perf_counter())
                layers: Layers = [kv.layer(number) for number in range(self.layout.layers)]
                cache = lm.import_cache(layers)
                imported = time.perf_counter()
                tokens, text = self._generate(cache, logits, count, "two")
                ended = time.perf_counter()
                assert tokens[:1] in ([], [first_token[0]])
                result = Result(
                    request_id=kv.request.request_id,
                    model=ModelFacts(
                        name=lm.name,
                        layers=lm.layers,
                        kv_heads=lm.kv_heads,
                        head_dim=lm.head_dim,
                        dtype=self.layout.dtype,
                        threads=lm.threads,
                    ),
                    backend=self.engine.backend,
                    nics=self.engine.nics,
                    prompt=prompt,
                    prompt_tokens=len(ids),
                    chunk_tokens=self.chunk,
                    page_tokens=self.layout.page_tokens,
                    pages=len(kv.pages),
                    page_bytes=self.layout.page_bytes,
                    writes=kv.writes,
                    bytes=kv.nbytes,
                    ttft_us=1e6 * (first_token[1] - began),
                    import_us=1e6 * (imported - first_token[1]),
                    decode_us=1e6 * (ended - imported),
                    tokens=tokens,
                    text=text,
                    compared=compare,
                    asked=asked,
                )
        if compare:
            self._one_process(result, ids, count, layers, logits)
        return result

    def _ask(self, decoder: Decoder, task: Task, ids: list[int], timeout: float) -> tuple[ReceivedKv, list[str]]:
        """Ask the task's prefiller, and if that fails and the parent has another one, that one."""
        asked: list[str] = []
        while True:
            asked.append(task.prefiller)
            pending = decoder.submit(NetAddr.parse(task.prefiller), ids, timeout=timeout)
            try:
                return pending.wait(), asked
            except (PeerLost, PrefillRefused) as error:
                if not task.retry:
                    raise
                request_id = pending.request.request_id
                self.speaker.emit(Failed(request_id=request_id, prefiller=task.prefiller, message=str(error)))
                task = _told()

    def _one_process(
        self, result: Result, ids: list[int], count: int, layers: Layers, logits: NDArray[np.float32]
    ) -> None:
        """Do it all here, and compare: every byte of KV, the logits, and what was generated."""
        own: list[list[tuple[NDArray[Any], NDArray[Any]]]] = [[] for _ in range(self.layout.layers)]

        def keep(layer: int, _first: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
            own[layer].append((keys, values))

        began = time.perf_counter()
        cache, own_logits = self.lm.prefill(ids, chunk=self.chunk, on_layer=keep)
        int(np.argmax(own_logits))
        result.one_ttft_us = 1e6 * (time.perf_counter() - began)
        result.kv_equal = all(_same(pieces, pair) for pieces, pair in zip(own, layers, strict=True))
        result.logits_equal = own_logits.tobytes() == logits.tobytes()
        result.one_tokens, result.one_text = self._generate(cache, own_logits, count, "one")

    def _generate(
        self, cache: Any, logits: NDArray[np.float32], count: int, way: Literal["two", "one"]
    ) -> tuple[list[int], str]:
        stream = TextStream(self.tokenizer, lambda text: self._show(way, text))
        tokens = self.lm.generate(cache, logits, count, stream.add)
        text = stream.end()
        if not self.speaker.events:
            print(flush=True)
        return tokens, text

    def _show(self, way: Literal["two", "one"], text: str) -> None:
        self.speaker.emit(Text(way=way, text=text))
        if not self.speaker.events:
            print(text, end="", flush=True)


def _same(pieces: Sequence[tuple[NDArray[Any], NDArray[Any]]], pair: tuple[NDArray[Any], NDArray[Any]]) -> bool:
    """Compare the bytes of a layer: chunks on one side, the whole on the other."""
    for which in (0, 1):
        whole = np.concatenate([piece[which] for piece in pieces], axis=1)
        if not np.array_equal(whole.view(np.uint32), pair[which].view(np.uint32)):
            return False
    return True


class TextStream:
    """Turns tokens into text as they come; a character that needs several tokens is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> None:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(self._shown):
            self._flush(text)

    def end(self) -> str:
        """Show what was held back; returns the whole text."""
        text = self._tokenizer.decode(self._ids)
        self._flush(text)
        return text

    def _flush(self, text: str) -> None:
        if len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text


if __name__ == "__main__":
    typer.run(main)
