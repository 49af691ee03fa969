"""Every kind of cache x layout x page sizes x TP degrees x chunk cuts x prefix hits: byte equality, each byte once.

A prefix hit on "all" leaves the last token: a decoder needs its logits.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal

import numpy as np
import pytest
from layout_oracle import check, chunks_of

from fabric_kvcache.cache import AXES, AttentionGroup, CacheLayout, Group, LatentGroup
from fabric_kvcache.match import LayoutMismatch

KINDS = {"MHA": 8, "GQA": 2, "MQA": 1, "MLA": 0}  # KV heads; TP 4 replicates GQA's and MQA's
PACKINGS = {
    "HND": ["head-HND", "page-HND", "block-HND", "separate-HND", "heads-before-pages"],
    "NHD": ["page-NHD", "block-NHD", "separate-NHD"],
}
PAGES = (16, 32, 64, 128)
TPS = (1, 2, 4)
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp8+scales": {"dtype": "float8_e4m3", "scale_bytes": 4},
}
LAYERS = 3


def layout(kind: str, order: str, page: int, tp: int, mode: str, rng: np.random.Generator) -> CacheLayout:
    options: dict[str, Any] = {"layers": LAYERS, "page_tokens": page, **MODES[mode]}
    if kind == "MLA":
        group: Group = LatentGroup(latent_dim=6, axes="LPT" if order == "HND" else "PLT", **options)
    else:
        axes = str(rng.choice(PACKINGS[order]))
        at: Literal["page", "pool"] = "page" if AXES[axes].startswith("LP") else "pool"
        group = AttentionGroup(kv_heads=KINDS[kind], head_dim=2, axes=axes, scales_at=at, **options)
    return CacheLayout(groups=(group,), tp=tp)


def one(kind: str, mode: str, point: tuple[Any, ...], seed: int) -> str:
    """Check one point of the matrix; what the point leaves open comes from the seed. Returns what happened."""
    src_order, dst_order, src_page, dst_page, src_tp, dst_tp, cut, prefix = point
    rng = np.random.default_rng(seed)
    src = layout(kind, src_order, src_page, src_tp, mode, rng)
    dst = layout(kind, dst_order, dst_page, dst_tp, mode, rng)
    total = int(rng.integers(2, 3 * max(src_page, dst_page)))
    start = {"none": 0, "partial": total // 2 // dst_page * dst_page, "all": total - 1}[prefix]
    if mode == "fp8+scales":
        start -= start % dst_page  # a hit ends at a page there
    page = src_page if rng.random() < 0.5 else dst_page
    chunks = chunks_of(total, start, [page + cut, 2 * page + cut])
    if mode == "fp8+scales" and src_page % dst_page:
        with pytest.raises(LayoutMismatch, match=rf"scale for {src_page} tokens .* one for {dst_page}"):
            check(src, dst, chunks, seed)
        return "refused"
    writes = check(src, dst, chunks, seed, merge=bool(rng.integers(2)))
    senders = {a for (a, _b), count in writes.items() if count}
    if kind == "MLA":
        assert len(senders) == min(src_tp, LAYERS * dst_tp), "the load is not spread over all prefill ranks"
    return "moved"


ORDERS = tuple(PACKINGS)
POINTS = list(
    itertools.product(ORDERS, ORDERS, PAGES, PAGES, TPS, TPS, (-1, 0, 1), ("none", "partial", "all")),
)


#: How many points of each kind and mode; FABRIC_LAYOUT_MATRIX=all takes all of them, some minutes.
COUNT = os.environ.get("FABRIC_LAYOUT_MATRIX", "100")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_the_destination_is_written_once_and_right(kind: str, mode: str) -> None:
    count = len(POINTS) if COUNT == "all" else int(COUNT)
    chosen = np.random.default_rng(7).choice(len(POINTS), count, replace=False)
    seen = []
    for k in sorted(chosen.tolist()):
        try:
            seen.append(one(kind, mode, POINTS[k], k))
        except BaseException as error:
            error.add_note(f"point {k} of the matrix: {POINTS[k]}")
            raise
    assert seen.count("moved") > count // 5
    assert (seen.count("refused") > 0) == (mode == "fp8+scales")
