"""A role of the demo as it is, with a model of a few lines instead of torch: `fleet_role.py prefiller|decoder OPTIONS`.

The "model" makes keys and values from the prompt, and its text from every byte of its cache: a cache that is not the
same gives another text.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from fabric_kvcache.demo import decoder, prefiller
from fabric_kvcache.layout import KvLayout


class FakeTokenizer:
    def __init__(self, _path: Path) -> None:
        pass

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FakeModel:
    name, layers, kv_heads, head_dim, max_tokens, tail_bytes, load_seconds = "fake", 8, 2, 16, 4096, 4 * 123, 0.0

    def __init__(self, _path: Path, *, threads: int = 1) -> None:
        self.threads = threads

    def layout(self, page_tokens: int) -> KvLayout:
        return KvLayout(self.layers, self.kv_heads, self.head_dim, page_tokens, "float32")

    def prefill(self, ids: Sequence[int], *, chunk: int = 0, on_layer: Any = None, stopwatch: Any = None) -> Any:
        cache = []
        for layer in range(self.layers):
            rng = np.random.default_rng([layer, *ids])
            keys, values = rng.random((2, self.kv_heads, len(ids), self.head_dim), np.float32)
            if stopwatch is not None:
                stopwatch._begin()
            for first in range(0, len(ids), chunk or len(ids)):
                end = first + (chunk or len(ids))
                if on_layer is not None:
                    on_layer(layer, first, keys[:, first:end], values[:, first:end])
            if stopwatch is not None:
                stopwatch._end(layer)
            cache.append((keys, values))
        logits = np.zeros(123, np.float32)
        logits[97:] = np.random.default_rng([99, *ids]).random(26, np.float32)  # a letter
        return cache, logits

    def import_cache(self, layers: Any) -> Any:
        return layers

    def generate(self, cache: Any, logits: Any, count: int, on_token: Any = None) -> list[int]:
        state = 0
        for keys, values in cache:
            state = zlib.crc32(values.tobytes(), zlib.crc32(keys.tobytes(), state))
        tokens = [int(np.argmax(logits))]
        while len(tokens) < count:
            state = zlib.crc32(bytes(tokens), state)
            tokens.append(97 + state % 26)
        for token in tokens:
            on_token(token)
        return tokens


def main() -> None:
    role = sys.argv.pop(1)
    for module in (decoder, prefiller):
        for name, fake in (
            ("LanguageModel", FakeModel),
            ("Tokenizer", FakeTokenizer),
            ("find_model", lambda _path=None: Path("fake")),
            ("require_extras", lambda: None),
        ):
            if hasattr(module, name):
                setattr(module, name, fake)
    typer.run(prefiller.main if role == "prefiller" else decoder.main)


if __name__ == "__main__":
    main()
