"""How a KV cache lies in memory: the one place that computes sizes and offsets. Pure arithmetic and numpy views.

A pool is `[layer][page]`; a page holds `page_tokens` tokens of one layer:

    page = [head][K, V][token][dim]

K and V of a page lie together, so a page is one write. Heads come first, so any run of consecutive heads is one
contiguous piece of the page with both its K and its V, which is what a side that holds only some heads reads or writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from fabric_core import BadRange, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ITEM_BYTES", "KvLayout", "pack", "unpack"]

#: Element types by name, and their size. Bytes are moved as they are: no arithmetic is done on elements here.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1}

_WORDS: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 2: np.dtype("<u2"), 1: np.dtype("u1")}
_LIMIT = 4096
_Extent = Annotated[int, msgspec.Meta(ge=1, le=_LIMIT)]


class KvLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The shape of a paged KV cache. Two sides that exchange pages must agree on all of it."""

    layers: _Extent
    kv_heads: _Extent
    head_dim: _Extent
    page_tokens: _Extent
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _LIMIT:
                raise ConfigError(f"{name}={value!r}: must be an integer from 1 to {_LIMIT}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(ITEM_BYTES)}")

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.kv_heads} KV heads x {self.head_dim}, "
            f"{self.page_tokens} tokens a page, {self.dtype}"
        )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def word(self) -> np.dtype[Any]:
        """An unsigned integer as wide as an element: numpy knows no bfloat16, and bytes are all we move."""
        return _WORDS[self.item_bytes]

    @property
    def head_bytes(self) -> int:
        """K and V of one head of one page."""
        return 2 * self.page_tokens * self.head_dim * self.item_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Of all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.item_bytes

    def pages_for(self, tokens: int) -> int:
        """Return how many pages (of each layer) hold that many tokens."""
        return -(-tokens // self.page_tokens)

    def pool_bytes(self, pages: int) -> int:
        """Return the size of a pool with `pages` pages of each layer."""
        return self.layers * pages * self.page_bytes

    def layer_offset(self, layer: int, pages: int) -> int:
        """Return where a layer's pages begin in a pool of `pages` pages."""
        if not 0 <= layer < self.layers:
            raise BadRange(f"layer {layer} of a cache with {self.layers} layers")
        return layer * pages * self.page_bytes

    def page_offset(self, layer: int, page: int, pages: int) -> int:
        """Return where a page begins in a pool of `pages` pages."""
        if not 0 <= page < pages:
            raise BadRange(f"page {page} of a pool of {pages} pages")
        return self.layer_offset(layer, pages) + page * self.page_bytes

    def head_range(self, first: int, count: int) -> tuple[int, int]:
        """Return (offset in a page, bytes) of `count` heads from `first` on."""
        if first < 0 or count < 1 or first + count > self.kv_heads:
            raise BadRange(f"heads {first}..{first + count} of a cache with {self.kv_heads} KV heads")
        return first * self.head_bytes, count * self.head_bytes

    def view(self, memory: Any, pages: int) -> NDArray[Any]:
        """View a pool's memory as words: `[layer, page, head, K or V, token, dim]`."""
        words = np.frombuffer(memory, dtype=self.word, count=self.pool_bytes(pages) // self.item_bytes)
        return words.reshape(self.layers, pages, self.kv_heads, 2, self.page_tokens, self.head_dim)


def check_fit(
    layer: NDArray[Any], pages: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], first: int = 0
) -> None:
    """Raise BadRange if these cannot be packed there: another shape, another width of the elements, other pages."""
    heads, _two, size, dim = layer.shape[1:]
    shape = (heads, keys.shape[1] if keys.ndim == 3 else 0, dim)
    if keys.shape != shape or values.shape != shape:
        raise BadRange(f"keys {keys.shape} and values {values.shape} do not fit {heads} heads x {dim}")
    width = layer.dtype.itemsize
    if keys.dtype.itemsize != width or values.dtype.itemsize != width:
        raise BadRange(f"keys of {keys.dtype} and values of {values.dtype}: the cache's elements have {width} bytes")
    if not 0 <= first < size or len(pages) != -(-(first + shape[1]) // size):
        raise BadRange(f"{shape[1]} tokens from token {first} on do not lie in {len(pages)} pages of {size}")


def pack(layer: NDArray[Any], pages: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], first: int = 0) -> None:
    """Write keys and values, each `[head, token, dim]`, into pages of one layer's view; nothing else of them changes.

    `first`: which token of `pages[0]` is the first one; `pages` are the ones that these tokens lie in, in order. Raises
    as `check_fit` does, and then nothing has changed.
    """
    check_fit(layer, pages, keys, values, first)
    heads, _two, size, dim = layer.shape[1:]
    tokens = keys.shape[1]
    head = min(size - first, tokens) if first else 0  # what completes a page that was begun before
    begun = 1 if first else 0
    full, rest = divmod(tokens - head, size)
    for which, source in ((0, keys), (1, values)):
        words = source.view(layer.dtype)
        if head:
            layer[pages[0], :, which, first : first + head] = words[:, :head]
        if full:
            whole = words[:, head : head + full * size].reshape(heads, full, size, dim)
            layer[pages[begun : begun + full], :, which] = whole.transpose(1, 0, 2, 3)
        if rest:
            layer[pages[begun + full], :, which, :rest] = words[:, head + full * size :]


def unpack(layer: NDArray[Any], pages: NDArray[Any], tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy the first `tokens` tokens out of pages of one layer's view: keys and values, each `[head, token, dim]`."""
    _pages, heads, _two, size, dim = layer.shape
    if not 0 <= tokens <= len(pages) * size:
        raise BadRange(f"{tokens} tokens of {len(pages)} pages of {size}")
    picked = layer[pages].transpose(2, 1, 0, 3, 4).reshape(2, heads, len(pages) * size, dim)
    return np.ascontiguousarray(picked[0, :, :tokens]), np.ascontiguousarray(picked[1, :, :tokens])
