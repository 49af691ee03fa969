"""What the whole KV cache of one instance looks like: groups of layers, their shapes, TP and PP. Data and checks only.

`KvLayout` (layout.py) is one uniform pool, the same on both sides. `CacheLayout` describes any cache, so that two sides
that differ can be mapped onto each other: see plan.py. Both sides describe themselves; the file format is in
`CacheLayout.to_json`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fabric_core import ConfigError, ProtocolError
from fabric_kvcache.layout import ITEM_BYTES, KvLayout

__all__ = [
    "AXES",
    "MAX_JSON",
    "SCHEMA",
    "AttentionGroup",
    "CacheLayout",
    "Group",
    "LatentGroup",
    "StateGroup",
    "StatePart",
    "show_layers",
]

_FAMILY = "fabric.kv.layout/"
SCHEMA = f"{_FAMILY}1"
MAX_JSON = 1 << 20  #: bytes of a layout as JSON

_MAX_LAYERS = 4096
_MAX_GROUPS = 64
_MAX_TP = 1024

#: The usual orders of a pool's axes, outermost first: Layer, Page, K or V, Head, Token; the head's elements are last.
#: Any other order can be said by its five letters.
AXES = {
    "head-HND": "LPHKT",  # K and V of a head together, heads first: what this package's own pools look like
    "page-HND": "LPKHT",  # K and V interleaved per page
    "page-NHD": "LPKTH",
    "block-HND": "LPHTK",  # one block: K and V of a token side by side, vLLM's [B, H, N, C]
    "block-NHD": "LPTHK",
    "separate-HND": "LKPHT",  # a tensor for K and one for V
    "separate-NHD": "LKPTH",
    "heads-before-pages": "LHPKT",
}

_MAX_UNITS = 4096
_MAX_PAGE_TOKENS = 1 << 16
_MAX_ITEM = 1 << 20

_Units = Annotated[int, msgspec.Meta(ge=1, le=_MAX_UNITS)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=_MAX_PAGE_TOKENS)]
_Item = Annotated[int, msgspec.Meta(ge=1, le=_MAX_ITEM)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_LAYERS)]
_Layers = (
    Annotated[int, msgspec.Meta(ge=1, le=_MAX_LAYERS)]
    | Annotated[tuple[_Layer, ...], msgspec.Meta(min_length=1, max_length=_MAX_LAYERS)]
)
_Name = Annotated[str, msgspec.Meta(max_length=64)]


def _whole(what: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{what}={value!r}: must be an integer from {least} to {most}")


def show_layers(layers: tuple[int, ...]) -> str:
    """Name layers briefly: "0-3, 7"."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:7], f"... ({len(layers)} layers)"])


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    layers: _Layers  #: the model's layers in this group, in the pool's order; a number N means 0 to N-1
    content: _Name = ""  #: tells two caches of the same kind and layer apart, "index" for example

    def _check(self) -> None:
        if isinstance(self.layers, int):
            _whole("layers", self.layers, 1, _MAX_LAYERS)
        else:
            if not self.layers:
                raise ConfigError("layers=(): name at least one layer")
            for layer in self.layers:
                _whole("layer", layer, 0, _MAX_LAYERS - 1)
            if len(set(self.layers)) != len(self.layers):
                raise ConfigError(f"layers={list(self.layers)}: a layer is named twice; name each once")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class _Paged(_Group, frozen=True, kw_only=True, forbid_unknown_fields=True):
    page_tokens: _Tokens
    dtype: str  #: see layout.ITEM_BYTES; bytes are moved as they are
    window: _Bytes = 0  #: only so many of the last tokens are wanted (sliding window); 0: all
    scale_bytes: _Bytes = 0  #: quantised: bytes of the scale of one page and head, for K and for V each; 0: none
    scales_at: Literal["page", "pool"] = "page"  #: behind each page's data, or in one block behind all pages
    page_bytes: _Bytes = 0  #: pages are padded to that size; 0: they are not

    def _check(self) -> None:
        super()._check()
        _whole("page_tokens", self.page_tokens, 1, _MAX_PAGE_TOKENS)
        for name in ("window", "scale_bytes", "page_bytes"):
            _whole(name, getattr(self, name), 0, 1 << 40)
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(ITEM_BYTES)}")
        if self.scales_at not in {"page", "pool"}:
            raise ConfigError(f'scales_at={self.scales_at!r}: must be "page" or "pool"')

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


class AttentionGroup(_Paged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="attention"):
    """Layers with keys and values per head. A TP degree above `kv_heads` means that heads are replicated."""

    kv_heads: _Units  #: of the model, all ranks together
    head_dim: _Item
    axes: str = "head-HND"  #: a name of AXES, or the letters L P K H T, outermost first

    def __post_init__(self) -> None:
        self._check()
        _whole("kv_heads", self.kv_heads, 1, _MAX_UNITS)
        _whole("head_dim", self.head_dim, 1, _MAX_ITEM)
        letters = self.letters
        if sorted(letters) != sorted("LPKHT"):
            raise ConfigError(
                f"axes={self.axes!r}: must be one of {', '.join(AXES)}, or the letters LPKHT in any order"
            )
        whole = set(letters[:2]) == {"L", "P"}
        if not whole and self.scale_bytes and self.scales_at == "page":
            raise ConfigError(f'axes={self.axes!r}: a page is not in one piece; say scales_at="pool" for its scales')
        if not whole and self.page_bytes:
            raise ConfigError(
                f"axes={self.axes!r}: a page is not in one piece and cannot be padded; leave page_bytes out"
            )

    @property
    def letters(self) -> str:
        return AXES.get(self.axes, self.axes)

    @property
    def units(self) -> int:
        """What tensor parallelism divides."""
        return self.kv_heads

    @property
    def planes(self) -> int:
        return 2

    @property
    def unit_bytes(self) -> int:
        """Of one token, head, and K or V."""
        return self.head_dim * self.item_bytes

    def __str__(self) -> str:
        scales = f" with {self.scale_bytes}-byte scales" if self.scale_bytes else ""
        return f"{self.kv_heads} KV heads x {self.head_dim} {self.dtype}{scales}, {self.page_tokens} tokens a page"


class LatentGroup(_Paged, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="latent"):
    """Layers with one vector per token which every TP rank holds as a whole: MLA's latent, or an index of keys."""

    latent_dim: _Item
    axes: Literal["LPT", "PLT"] = "LPT"

    def __post_init__(self) -> None:
        self._check()
        _whole("latent_dim", self.latent_dim, 1, _MAX_ITEM)
        if self.axes not in {"LPT", "PLT"}:
            raise ConfigError(f"axes={self.axes!r}: must be LPT or PLT")

    @property
    def letters(self) -> str:
        return self.axes.replace("T", "KHT")

    @property
    def units(self) -> int:
        return 1

    @property
    def planes(self) -> int:
        return 1

    @property
    def unit_bytes(self) -> int:
        return self.latent_dim * self.item_bytes

    def __str__(self) -> str:
        scales = f" with {self.scale_bytes}-byte scales" if self.scale_bytes else ""
        return f"a latent vector of {self.latent_dim} {self.dtype}{scales}, {self.page_tokens} tokens a page"


class StatePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a state that tensor parallelism divides by itself: heads of an SSM, channels of a convolution."""

    name: _Name
    units: _Units  #: of the model; with a TP degree above it, units are replicated
    unit_bytes: _Item

    def __post_init__(self) -> None:
        _whole("units", self.units, 1, _MAX_UNITS)
        _whole("unit_bytes", self.unit_bytes, 1, _MAX_ITEM)


class StateGroup(_Group, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="state"):
    """Layers with a state of fixed size per request (Mamba). Its page is a slot: all parts, one behind another."""

    parts: Annotated[tuple[StatePart, ...], msgspec.Meta(min_length=1, max_length=64)]
    page_bytes: _Bytes = 0
    axes: Literal["LP", "PL"] = "LP"

    def __post_init__(self) -> None:
        self._check()
        _whole("page_bytes", self.page_bytes, 0, 1 << 40)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"parts={names}: at least one, and each with a name of its own")
        if self.axes not in {"LP", "PL"}:
            raise ConfigError(f"axes={self.axes!r}: must be LP or PL")

    @property
    def letters(self) -> str:
        return self.axes

    def __str__(self) -> str:
        return "a state of " + " and ".join(f"{p.name} ({p.units} x {p.unit_bytes} bytes)" for p in self.parts)


Group = AttentionGroup | LatentGroup | StateGroup


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV cache of one instance: `tp` x `pp` ranks, each with one pool per group."""

    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=_MAX_GROUPS)]
    tp: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TP)] = 1
    pp: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LAYERS)] = 1
    stages: Annotated[tuple[_Layer, ...], msgspec.Meta(max_length=_MAX_LAYERS)] = ()  #: layers per PP rank; (): even
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ConfigError(f"schema={self.schema!r}: this version knows {SCHEMA}")
        _whole("tp", self.tp, 1, _MAX_TP)
        _whole("pp", self.pp, 1, _MAX_LAYERS)
        if not 1 <= len(self.groups) <= _MAX_GROUPS:
            raise ConfigError(f"{len(self.groups)} groups: must be 1 to {_MAX_GROUPS}")
        self._check_stages()
        seen: set[tuple[str, str, int]] = set()
        for group in self.groups:
            self._check_tp(group)
            for layer in group.layer_numbers:
                key = (type(group).__name__, group.content, layer)
                if key in seen:
                    raise ConfigError(f"layer {layer} is in two groups of a kind; give one of them another `content`")
                seen.add(key)

    def _check_stages(self) -> None:
        total = self.total_layers
        if self.stages:
            for count in self.stages:
                _whole("stages", count, 0, _MAX_LAYERS)
            if len(self.stages) != self.pp or sum(self.stages) != total:
                raise ConfigError(
                    f"stages={list(self.stages)}: must be {self.pp} numbers (pp) with the sum {total} (layers)"
                )
        elif total % self.pp:
            raise ConfigError(
                f"pp={self.pp} does not divide {total} layers; say stages, the number of layers of each of the ranks"
            )

    def _check_tp(self, group: Group) -> None:
        if isinstance(group, StateGroup):
            divided = [(f"{part.units} units of {part.name}", part.units) for part in group.parts]
        else:
            divided = [(f"{group.units} KV heads", group.units)]
        for what, units in divided:
            if units % self.tp and self.tp % units:
                raise ConfigError(
                    f"tp={self.tp} and {what}: one must be a multiple of the other, so that every rank holds whole ones"
                )

    @property
    def total_layers(self) -> int:
        return 1 + max(max(group.layer_numbers) for group in self.groups)

    def stage_layers(self, pp: int) -> range:
        """Return the model's layers that a PP rank computes."""
        if not 0 <= pp < self.pp:
            raise ConfigError(f"pp rank {pp} of {self.pp}: must be below it")
        counts = self.stages or (self.total_layers // self.pp,) * self.pp
        first = sum(counts[:pp])
        return range(first, first + counts[pp])

    @classmethod
    def of(cls, layout: KvLayout) -> CacheLayout:
        """Describe the pools of `Decoder` and `Prefiller`."""
        group = AttentionGroup(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            page_tokens=layout.page_tokens,
            dtype=layout.dtype,
        )
        return cls(groups=(group,))

    def to_json(self) -> bytes:
        """Return the layout as JSON, for a file or a handshake."""
        return msgspec.json.format(_encoder.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes | str) -> CacheLayout:
        """Read what `to_json` wrote. Raises ProtocolError, and nothing else, for anything that is no layout."""
        octets = data.encode(errors="replace") if isinstance(data, str) else data
        if len(octets) > MAX_JSON:
            raise ProtocolError(f"a KV layout of {len(octets)} bytes: at most {MAX_JSON} are read")
        try:
            schema = _head.decode(octets).schema
            if schema.startswith(_FAMILY) and schema != SCHEMA:
                raise ProtocolError(
                    f"the layout's schema is {schema!r}, this version reads {SCHEMA}; "
                    "install the same fabric-kvcache on both sides"
                )
            return _decoder.decode(octets)
        except ProtocolError:
            raise
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a KV layout: {error}") from None


class _Head(msgspec.Struct):
    schema: Annotated[str, msgspec.Meta(max_length=64)]


_encoder = msgspec.json.Encoder()
_head = msgspec.json.Decoder(_Head)
_decoder = msgspec.json.Decoder(CacheLayout)
