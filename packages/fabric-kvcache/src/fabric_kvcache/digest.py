"""Checksums of KV that survive resharding: one number for every token and head, and sums of them.

    sent = digest_sent(plan, memory, tables, total)                # at each prefill rank, when all is computed
    held = digest_held(shard, memory, tables, total)               # at the decode rank, when all has arrived
    assert held == add(sent_by_rank_0, sent_by_rank_1, ...)

The number of a vector (K and V of one head and token, or a latent vector) depends on its bytes and on its place in the
*model*: layer, head, token. A sum modulo 2**64 over them does not depend on any order, and parts add up to the whole.
So layouts, page sizes and degrees of parallelism may differ, and what several ranks send adds up to what one holds. A
quantised vector's scale belongs to each of its tokens.

This finds what goes wrong by accident (a bit, a page in a wrong place, one of another request); it is no signature, and
does not keep an attacker from anything. `digests` has the single numbers, `differences` says which are not the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_kvcache.cache import Group, StateGroup
from fabric_kvcache.plan import Plan
from fabric_kvcache.shard import Field, Shard

__all__ = ["Difference", "Key", "add", "differences", "digest_held", "digest_sent", "digests"]

Numbers = NDArray[np.uint64]
Tables = Sequence[Any]  #: for each group the pool's pages of the request, from token 0 on; of a state, its slot

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SLICE = 1 << 22  # bytes that are gathered at a time: about what a processor's caches hold


class Key(NamedTuple):
    """What a row of numbers is of."""

    kind: str  #: attention, latent or state
    content: str
    layer: int
    field: str
    unit: int  #: the model's number of the head

    def __str__(self) -> str:
        what = f"{self.content} " if self.content else ""
        return f"layer {self.layer} {what}{self.kind} head {self.unit}{'' if self.field == 'kv' else ' ' + self.field}"


class Difference(NamedTuple):
    """Tokens `first` to `end` of a head that are not the same on both sides, or that only one side has."""

    key: Key
    first: int
    end: int

    def __str__(self) -> str:
        tokens = f"token {self.first}" if self.end == self.first + 1 else f"tokens {self.first} to {self.end - 1}"
        return f"{self.key}, {tokens}"


def digest_held(shard: Shard, memory: Any, tables: Tables, total: int, start: int = 0) -> int:
    """Sum up what a rank holds of a request: its tokens from `start` to `total`, of all layers and heads of the rank.

    `memory`: the rank's pools, readable by the host. Raises BadRange for tables that are too short or leave the pool.
    """
    found = 0
    for number, group in enumerate(shard.layout.groups):
        for field in shard.fields(number):
            units = (field.first, field.count)
            for layer in shard.layers(number):
                wanted = _wanted(group, total, start)
                for _first, numbers in _rows(shard, memory, tables, number, field, layer, units, wanted):
                    found += int(numbers.sum(dtype=np.uint64))
    return found % (1 << 64)


def digest_sent(plan: Plan, memory: Any, tables: Tables, total: int, start: int = 0) -> int:
    """Sum up what the plan's source rank sends of a request to its destination rank. Arguments as in `digest_held`.

    `start`: tokens that the destination has already.
    """
    found = 0
    for job in plan.jobs:
        wanted = _wanted(plan.dst.layout.groups[job.dst_group], total, start)
        for layer in job.layers:
            for _first, numbers in _rows(plan.src, memory, tables, job.src_group, job.src, layer, job.units, wanted):
                found += int(numbers.sum(dtype=np.uint64))
    return found % (1 << 64)


def add(*sums: int) -> int:
    """Add sums of parts: of several ranks, or of several ranges of tokens."""
    return sum(sums) % (1 << 64)


def digests(shard: Shard, memory: Any, tables: Tables, total: int, start: int = 0) -> dict[Key, Numbers]:
    """Return the numbers of all tokens from 0 to `total`, by head; 0 for those that are not wanted here."""
    found: dict[Key, Numbers] = {}
    for number, group in enumerate(shard.layout.groups):
        for field in shard.fields(number):
            for layer in shard.layers(number):
                wanted = _wanted(group, total, start)
                whole = np.zeros((field.count, max(total, wanted.stop)), np.uint64)
                units = (field.first, field.count)
                for first, numbers in _rows(shard, memory, tables, number, field, layer, units, wanted):
                    whole[:, first : first + numbers.shape[1]] = numbers
                for place, row in enumerate(whole):
                    found[Key(_kind(group), group.content, layer, field.name, field.first + place)] = row
    return found


def differences(here: Mapping[Key, Numbers], there: Mapping[Key, Numbers]) -> Iterator[Difference]:
    """Yield where two sides differ, in the heads that both have; merge the mappings of ranks with `|` before."""
    for key in sorted(here.keys() & there.keys()):
        a, b = here[key], there[key]
        length = max(len(a), len(b))
        unlike = np.pad(a, (0, length - len(a))) != np.pad(b, (0, length - len(b)))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], unlike, [False]]).astype(np.int8)))
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield Difference(key, first, end)


# ---- inside ----------------------------------------------------------------------------------------------------------


def _kind(group: Group) -> str:
    return str(type(group).__struct_config__.tag)


def _wanted(group: Group, total: int, start: int) -> range:
    """Return the tokens of a request that a group's pool has to hold; a state counts as its token 0."""
    if not 0 <= start < total:
        raise BadRange(f"tokens {start} to {total}: must be 0 <= start < total")
    if isinstance(group, StateGroup):
        return range(1)
    return range(max(start, total - group.window if group.window else 0), total)


def _rows(
    shard: Shard,
    memory: Any,
    tables: Tables,
    number: int,
    field: Field,
    layer: int,
    units: tuple[int, int],
    wanted: range,
) -> Iterator[tuple[int, Numbers]]:
    """Yield (first token, numbers [unit, token]) of some units of a field in a layer."""
    group, pool = shard.layout.groups[number], shard.pool_pages[number]
    octets = np.frombuffer(memory, np.uint8)
    if len(octets) < shard.nbytes:
        raise BadRange(f"a memory of {len(octets)} bytes: the pools of {shard} have {shard.nbytes}")
    size = 1 if isinstance(group, StateGroup) else group.page_tokens
    table = np.asarray(tables[number])
    if len(wanted) and len(table) <= (wanted.stop - 1) // size:
        raise BadRange(f"group {number}: {len(table)} pages, but token {wanted.stop - 1} lies in page "
                       f"{(wanted.stop - 1) // size}")  # fmt: skip
    used = table[wanted.start // size : (wanted.stop - 1) // size + 1] if len(wanted) else table[:0]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < pool:
        raise BadRange(f"group {number}: pages {int(used.min())} to {int(used.max())} of a pool of {pool}")
    view = _view(octets, shard, number, field, layer, units)
    places = _places(f"{_kind(group)}/{group.content}/{layer}/{field.name}", units)
    step = max(1, _SLICE // max(1, field.planes * units[1] * field.item))
    for first in range(wanted.start, wanted.stop, step):
        which = np.arange(first, min(first + step, wanted.stop))
        vectors = view[table[which // size], which % size if field.tokens else 0]
        yield first, _mixed(_folded(vectors) + _mixed(places[None, :] + which.astype(np.uint64)[:, None] * _SPREAD)).T


def _view(
    octets: NDArray[np.uint8], shard: Shard, number: int, field: Field, layer: int, units: tuple[int, int]
) -> NDArray[np.uint8]:
    """View some units of a field in a layer, in place: [page, token, plane, unit, byte]."""
    start = field.base + shard.layers(number).index(layer) * field.layer + (units[0] - field.first) * field.unit
    return np.lib.stride_tricks.as_strided(
        octets[start:],
        shape=(shard.pool_pages[number], field.tokens or 1, field.planes, units[1], field.item),
        strides=(field.page, field.token, field.plane, field.unit, 1),
        writeable=False,
    )


def _places(label: str, units: tuple[int, int]) -> Numbers:
    base = np.uint64(int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little"))
    return base + np.arange(units[0], units[0] + units[1], dtype=np.uint64) * _MIX[0]


@functools.lru_cache(maxsize=64)
def _factors(planes: int, words: int) -> Numbers:
    """Odd numbers, one for each word of a vector: a word that changes changes the sum of the products."""
    numbers = np.arange(1, planes * words + 1, dtype=np.uint64) * _SPREAD
    return (_mixed(numbers) | np.uint64(1)).reshape(planes, words)


def _folded(vectors: NDArray[np.uint8]) -> Numbers:
    """Make one number of the bytes of each vector: [token, plane, unit, byte] to [token, unit]."""
    tokens, planes, units, item = vectors.shape
    words = -(-item // 8)
    if item % 8:
        padded = np.zeros((tokens, planes, units, 8 * words), np.uint8)
        padded[..., :item] = vectors
        vectors = padded
    numbers = np.ascontiguousarray(vectors).view("<u8").astype(np.uint64, copy=False)
    total: Numbers = np.einsum("tpuw,pw->tu", numbers, _factors(planes, words))
    return total


def _mixed(numbers: Numbers) -> Numbers:
    """Mix each number, one to one, so that none is a sum or multiple of others."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
