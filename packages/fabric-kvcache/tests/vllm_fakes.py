"""Stand-ins for what vLLM hands to the connector: tensors of an allocation, requests, scheduler outputs, blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_kvcache.vllm.caches import LayerCache

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
POISON = 0x7FC1


class Storage:
    def __init__(self, octets: NDArray[np.uint8]) -> None:
        self._octets = octets

    def data_ptr(self) -> int:
        return int(self._octets.ctypes.data)

    def nbytes(self) -> int:
        return int(self._octets.nbytes)


class FakeTensor:
    """A view of 16-bit words in an allocation, with a tensor's manners."""

    def __init__(self, words: NDArray[np.uint16], octets: NDArray[np.uint8]) -> None:
        self.words = words
        self.shape = words.shape
        self.dtype = "torch.bfloat16"
        self.device = SimpleNamespace(type="cpu")
        self._octets = octets

    def stride(self) -> tuple[int, ...]:
        return tuple(step // 2 for step in self.words.strides)

    def data_ptr(self) -> int:
        return int(self.words.ctypes.data)

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> Storage:
        return Storage(self._octets)


def cache_of(
    layers: int = 3,
    blocks: int = 12,
    heads: int = 2,
    tokens: int = 4,
    content: int = 8,
    *,
    order: str = "LBHN",
    of_model: int | None = None,
    names: Callable[[int], str] = "model.layers.{}.self_attn.attn".format,
    group: int = 0,
    window: int = 0,
    latent: bool = False,
) -> list[LayerCache]:
    """One allocation full of poison. `order`: of layers, blocks, heads and tokens, outermost first."""
    extents = {"L": layers, "B": blocks, "H": heads, "N": tokens}
    octets = np.zeros(2 * layers * blocks * heads * tokens * content, np.uint8)
    words = octets.view(np.uint16)
    words[:] = POISON
    shaped = words.reshape(*(extents[axis] for axis in order), content)
    shaped = shaped.transpose(*(order.index(axis) for axis in "LBHN"), 4)
    return [
        LayerCache(names(layer), group, latent, of_model or heads, window, FakeTensor(shaped[layer], octets))
        for layer in range(layers)
    ]


def words_of(caches: Sequence[LayerCache]) -> NDArray[np.uint16]:
    """Return a copy `[layer, block, head, token, content]`."""
    return np.stack([cache.tensor.words for cache in caches])


def fill(caches: Sequence[LayerCache], blocks: Iterable[int], salt: int = 0) -> None:
    """Write content that is different for every word into some blocks of all layers."""
    for layer, cache in enumerate(caches):
        for block in blocks:
            view = cache.tensor.words[block]
            at = np.arange(view.size, dtype=np.uint32).reshape(view.shape)
            view[:] = (at * 7 + block * 251 + layer * 4099 + salt * 17 + 1) % 30_000


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.001)


# ---- the scheduler's


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 1
    is_null: bool = False


@dataclass
class FakeBlocks:
    blocks: tuple[list[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


class FakePool:
    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1


@dataclass
class FakeManager:
    held: dict[str, FakeBlocks] = field(default_factory=dict)
    block_pool: FakePool = field(default_factory=FakePool)

    def get_blocks(self, request_id: str) -> FakeBlocks:
        return self.held[request_id]


def request(request_id: str, tokens: int, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=request_id, num_prompt_tokens=tokens, num_tokens=tokens, kv_transfer_params=params or None
    )


def scheduled(
    tokens: dict[str, int],
    *,
    new: Sequence[tuple[str, tuple[list[int], ...], int]] = (),
    cached: Sequence[tuple[str, tuple[list[int], ...] | None, int]] = (),
    resumed: Iterable[str] = (),
    preempted: Iterable[str] = (),
) -> Any:
    """What the scheduler decided: (request id, new blocks of each group, tokens that are computed already)."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed)
            for name, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _blocks, _computed in cached],
            new_block_ids=[blocks for _name, blocks, _computed in cached],
            num_computed_tokens=[computed for _name, _blocks, computed in cached],
            resumed_req_ids=set(resumed),
        ),
        preempted_req_ids=set(preempted),
    )
