"""What the tests of prepared pushes share."""

from __future__ import annotations

import ctypes

from kv_pair import TOKENS, Pair

from fabric_kvcache import LayerWatch, PrefillJob
from fabric_kvcache.ahead import PreparedWatch

SINGLE = [(token, token + 1) for token in range(TOKENS)]  # a step for each token and layer
STEPS = 2 * TOKENS


def word_of(watch: LayerWatch) -> ctypes.c_uint64:
    """The word as a GPU bumps it."""
    return ctypes.c_uint64.from_address(watch.ptr)


def fill(pair: Pair, value: int) -> None:
    pair.prefiller.pool.view[:] = value


def prepared(job: PrefillJob, chunks: list[tuple[int, int]]) -> PreparedWatch:
    watch = job.watch(chunks)
    assert isinstance(watch, PreparedWatch)
    return watch
