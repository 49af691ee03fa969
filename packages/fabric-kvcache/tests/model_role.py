"""A side of requests with tiny models, as a process of its own: `model_role.py prefill`, `... decode ADDRESSES`.

The decode side reads the names of models from stdin. For each it asks for a prompt's KV, continues from what came, and
does the same without anybody's help; it prints both as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tiny_models
from numpy.typing import NDArray
from tiny_models import CHUNK, FAR, NAMES, TAIL_BYTES, TinyModel

from fabric_core import NetAddr, TransferEngine
from fabric_kvcache import Decoder, Prefiller
from fabric_kvcache.hook import LayerHook

PAGE_TOKENS = {"prefill": 8, "decode": 16}
PAGES = 16
TOKENS = 53  # ends inside a page of either side, and beyond the window
COUNT = 12


def prompt(name: str) -> list[int]:
    random = np.random.default_rng(NAMES.index(name))
    return [int(token) for token in random.integers(3, tiny_models.VOCABULARY, TOKENS)]


def prefill() -> None:
    """One engine has one prefiller, so each model has an engine."""
    models = {name: TinyModel(name) for name in NAMES}
    engines = {name: TransferEngine.open() for name in NAMES}
    prefillers = {
        name: Prefiller(engines[name], model.layout(PAGE_TOKENS["prefill"]), pages=PAGES, tail_bytes=TAIL_BYTES)
        for name, model in models.items()
    }
    print(str(engines[NAMES[0]].address), flush=True)
    print(json.dumps({name: str(engine.address) for name, engine in engines.items()}), flush=True)
    for line in sys.stdin:
        serve(models[line.strip()], prefillers[line.strip()])
        print("served", flush=True)


def serve(model: TinyModel, prefiller: Prefiller) -> None:
    """Put each layer's vectors where the pool has them, and push them from there by a hook of their chunk."""
    octets, shard, size = prefiller.pool.octets, prefiller.shard, PAGE_TOKENS["prefill"]
    hooks: dict[int, LayerHook] = {}
    with prefiller.next(60) as job:

        def on_layer(layer: int, first: int, vectors: NDArray[np.float32]) -> None:
            number, pages = tiny_models.view(octets, shard, layer)
            tokens = np.arange(first, first + len(vectors))
            pages[job.tables[number][tokens // size], tokens % size] = vectors
            if first not in hooks:
                hooks[first] = job.hook(first, min(first + CHUNK, job.total))
            hooks[first](layer)

        _cache, logits = model.prefill(job.tokens.tolist(), on_layer)
        job.push_tail(logits)


def decode(addresses: dict[str, str]) -> None:
    with TransferEngine.open() as engine:
        print(str(engine.address), flush=True)
        for line in sys.stdin:
            name = line.strip()
            model = TinyModel(name)
            ids = prompt(name)
            alone, logits = model.prefill(ids)
            wanted = model.generate(alone, logits, COUNT)
            layout = model.layout(PAGE_TOKENS["decode"])
            with (
                Decoder(engine, layout, pages=PAGES, tail_bytes=TAIL_BYTES) as decoder,
                decoder.submit(NetAddr.parse(addresses[name]), ids, timeout=120).wait() as kv,
            ):
                size, layers, moved = PAGE_TOKENS["decode"], [], TAIL_BYTES
                for layer, window in enumerate(model.windows):
                    number, pages = tiny_models.view(decoder.pool.octets, decoder.shard, layer)
                    first = max(0, TOKENS - window) if window else 0
                    tokens = np.arange(TOKENS)
                    vectors = pages[kv.tables[number][tokens // size], tokens % size]
                    vectors[:first] = FAR
                    layers.append(vectors)
                    moved += vectors[first:].nbytes
                first_logits = np.frombuffer(kv.tail, np.float32)
                got = model.generate(model.load(layers), first_logits, COUNT)
                answer = {
                    "alone": wanted,
                    "handed over": got,
                    "logits equal": bool(np.array_equal(logits, first_logits)),
                    "bytes": kv.nbytes,
                    "bytes wanted": moved,
                }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill()
    else:
        decode(json.loads(sys.argv[2]))
