"""Random layouts, and pairs of them that describe the same model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fabric_kvcache.cache import AXES, AttentionGroup, CacheLayout, Group, LatentGroup, StateGroup, StatePart

Draw = Any
_ORDERS = st.sampled_from(sorted(AXES)) | st.permutations("LPKHT").map("".join)


def degrees(*units: int) -> list[int]:
    """TP degrees at which every rank holds whole units."""
    return [tp for tp in (1, 2, 3, 4, 6, 8) if all(n % tp == 0 or tp % n == 0 for n in units)]


def _placed(draw: Draw, letters: str, data: int, scale: int) -> dict[str, Any]:
    """Where scales lie, and padding: whatever this order allows. `data`: enough for any rank's page."""
    whole = set(letters[:2]) == {"L", "P"}
    at = draw(st.sampled_from(["page", "pool"])) if whole else "pool"
    pad = data + draw(st.integers(0, 9)) if whole and draw(st.booleans()) else 0
    return {"scale_bytes": scale, "scales_at": at, "page_bytes": pad}


def _attention(draw: Draw, model: dict[str, Any], size: int, layers: tuple[int, ...]) -> AttentionGroup:
    axes = draw(_ORDERS)
    room = 2 * model["kv_heads"] * (size * model["head_dim"] * 2 + model["scale"])
    return AttentionGroup(
        layers=layers, page_tokens=size, dtype="bfloat16", axes=axes, window=model["window"],
        kv_heads=model["kv_heads"], head_dim=model["head_dim"],
        **_placed(draw, AXES.get(axes, axes), room, model["scale"]),
    )  # fmt: skip


def _latent(draw: Draw, model: dict[str, Any], size: int, layers: tuple[int, ...]) -> LatentGroup:
    axes = draw(st.sampled_from(["LPT", "PLT"]))
    room = size * model["latent_dim"] + model["scale"]
    return LatentGroup(
        layers=layers, page_tokens=size, dtype="float8_e4m3", axes=axes, window=model["window"],
        latent_dim=model["latent_dim"], content="index", **_placed(draw, "LP", room, model["scale"]),
    )  # fmt: skip


def _state(draw: Draw, model: dict[str, Any], layers: tuple[int, ...]) -> StateGroup:
    parts = draw(st.permutations(model["parts"]))
    room = sum(part.units * part.unit_bytes for part in parts)
    pad = room + 3 if draw(st.booleans()) else 0
    return StateGroup(layers=layers, parts=tuple(parts), axes=draw(st.sampled_from(["LP", "PL"])), page_bytes=pad)


def _model(draw: Draw) -> list[dict[str, Any]]:
    """The kinds of layers of a model; every side of a transfer makes groups of its own of them."""
    total = draw(st.integers(1, 6))
    kinds = []
    names = draw(st.lists(st.sampled_from(["attention", "latent", "state"]), min_size=1, max_size=3, unique=True))
    for kind in names:
        layers = draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True))
        kinds.append(
            {
                "kind": kind,
                "layers": layers,
                "kv_heads": draw(st.sampled_from([1, 2, 3, 4, 8])),
                "head_dim": draw(st.integers(1, 3)),
                "latent_dim": draw(st.integers(1, 5)),
                "scale": draw(st.sampled_from([0, 0, 1, 4])),
                "window": draw(st.sampled_from([0, 0, 5, 30])),
                "parts": [
                    StatePart(name=name, units=draw(st.sampled_from([1, 2, 4, 8])), unit_bytes=draw(st.integers(1, 5)))
                    for name in ("ssm", "conv")
                ],
            }
        )
    return kinds


def _side(draw: Draw, model: list[dict[str, Any]], sizes: dict[str, int]) -> CacheLayout:
    groups: list[Group] = []
    for kind in model:
        layers = draw(st.permutations(kind["layers"]))
        # One group, or two with different orders: engines group the same layers differently.
        at = draw(st.integers(1, len(layers)))
        for part in (tuple(layers[:at]), tuple(layers[at:])):
            if part and kind["kind"] == "state":
                groups.append(_state(draw, kind, part))
            elif part:
                make = _attention if kind["kind"] == "attention" else _latent
                groups.append(make(draw, kind, sizes[kind["kind"]], part))
    units = [k["kv_heads"] for k in model if k["kind"] == "attention"]
    units += [part.units for k in model if k["kind"] == "state" for part in k["parts"]]
    total = 1 + max(layer for k in model for layer in k["layers"])
    pp = draw(st.integers(1, min(3, total)))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=pp - 1, max_size=pp - 1)))
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    return CacheLayout(groups=tuple(groups), tp=draw(st.sampled_from(degrees(*units))), pp=pp, stages=stages)


@st.composite
def layouts(draw: Draw) -> CacheLayout:
    sizes = {"attention": draw(st.integers(1, 9)), "latent": draw(st.integers(1, 9))}
    return _side(draw, _model(draw), sizes)


@st.composite
def pairs(draw: Draw) -> tuple[CacheLayout, CacheLayout]:
    """Two layouts that can be mapped: with scales, the source's page is a multiple of the destination's."""
    model = _model(draw)
    src, dst = {}, {}
    for kind in ("attention", "latent"):
        scaled = any(k["kind"] == kind and k["scale"] for k in model)
        dst[kind] = draw(st.integers(1, 9))
        src[kind] = dst[kind] * draw(st.integers(1, 3)) if scaled else draw(st.integers(1, 9))
    return _side(draw, model, src), _side(draw, model, dst)
