"""Describing a cache: what is refused and with which words, and JSON in and out."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from layout_strategies import layouts

from fabric_core import ConfigError, ProtocolError
from fabric_kvcache.cache import (
    AXES,
    MAX_JSON,
    SCHEMA,
    AttentionGroup,
    CacheLayout,
    LatentGroup,
    StateGroup,
    StatePart,
    show_layers,
)
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.shard import Shard


def attention(**changes: Any) -> AttentionGroup:
    usual: dict[str, Any] = {"layers": 4, "kv_heads": 4, "head_dim": 8, "page_tokens": 16, "dtype": "bfloat16"}
    return AttentionGroup(**{**usual, **changes})


def latent(**changes: Any) -> LatentGroup:
    usual: dict[str, Any] = {"layers": 4, "latent_dim": 576, "page_tokens": 16, "dtype": "bfloat16"}
    return LatentGroup(**{**usual, **changes})


@given(layouts())
def test_a_layout_survives_json(layout: CacheLayout) -> None:
    assert CacheLayout.from_json(layout.to_json()) == layout
    assert hash(CacheLayout.from_json(layout.to_json())) == hash(layout)


@given(st.binary(max_size=200) | st.text(max_size=200))
@example(b"[" * 100_000)
@example(b'{"schema": "fabric.kv.layout/1", "groups": []}')
@example('{"schema": "fabric.kv.layout/1", "groups": 7}')
def test_anything_else_is_a_protocol_error_and_nothing_worse(data: bytes | str) -> None:
    with pytest.raises(ProtocolError):
        CacheLayout.from_json(data)


@given(layouts(), st.data())
def test_a_damaged_layout_is_refused_or_is_another_layout(layout: CacheLayout, data: Any) -> None:
    octets = bytearray(layout.to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(CacheLayout.from_json(bytes(octets)), CacheLayout)


def test_another_version_is_named_with_what_to_do() -> None:
    with pytest.raises(ProtocolError, match=r"'fabric.kv.layout/2', this version reads fabric.kv.layout/1; install"):
        CacheLayout.from_json(b'{"schema": "fabric.kv.layout/2", "groups": "anything"}')


def test_a_huge_layout_is_not_even_read() -> None:
    with pytest.raises(ProtocolError, match=f"at most {MAX_JSON}"):
        CacheLayout.from_json(b" " * (MAX_JSON + 1))


def test_an_unknown_field_is_an_error() -> None:
    text = CacheLayout(groups=(attention(),)).to_json().replace(b'"head_dim"', b'"head_dmi"')
    with pytest.raises(ProtocolError, match=r"head_dmi|head_dim"):
        CacheLayout.from_json(text)


WRONG: list[tuple[Any, str]] = [
    (lambda: attention(layers=0), "layers=0"),
    (lambda: attention(layers=()), "at least one layer"),
    (lambda: attention(layers=(1, 1)), "named twice; name each once"),
    (lambda: attention(layers=(5000,)), "layer=5000"),
    (lambda: attention(kv_heads=0), "kv_heads=0: must be"),
    (lambda: attention(head_dim=True), "head_dim=True"),
    (lambda: attention(page_tokens=1.5), "page_tokens=1.5"),
    (lambda: attention(dtype="int4"), "dtype='int4': must be one of float32"),
    (lambda: attention(axes="HND"), "axes='HND': must be one of head-HND"),
    (lambda: attention(window=-1), "window=-1"),
    (lambda: attention(scale_bytes=4, scales_at="disk"), "scales_at='disk'"),
    (lambda: attention(scale_bytes=4, axes="separate-HND"), 'say scales_at="pool"'),
    (lambda: attention(page_bytes=1 << 20, axes="LKPHT"), "leave page_bytes out"),
    (lambda: latent(latent_dim=0), "latent_dim=0"),
    (lambda: latent(axes="TPL"), "axes='TPL': must be LPT or PLT"),
    (lambda: StateGroup(layers=1, parts=()), "at least one"),
    (lambda: StateGroup(layers=1, parts=(StatePart(name="a", units=1, unit_bytes=1),) * 2), "name of its own"),
    (lambda: StatePart(name="a", units=0, unit_bytes=1), "units=0"),
    (lambda: CacheLayout(groups=()), "0 groups"),
    (lambda: CacheLayout(groups=(attention(),), tp=3), "tp=3 and 4 KV heads: one must be a multiple"),
    (lambda: CacheLayout(groups=(attention(),), tp=0), "tp=0"),
    (lambda: CacheLayout(groups=(attention(),), pp=3), "pp=3 does not divide 4 layers; say stages"),
    (lambda: CacheLayout(groups=(attention(),), pp=2, stages=(1, 2)), "must be 2 numbers .* sum 4"),
    (lambda: CacheLayout(groups=(attention(), attention(layers=(3,)))), "layer 3 is in two groups"),
    (lambda: CacheLayout(groups=(attention(),), schema="fabric.kv.layout/9"), "fabric.kv.layout/9"),
    (lambda: Shard(CacheLayout(groups=(attention(),)), tp=1), "tp rank 1 of 1"),
    (lambda: Shard(CacheLayout(groups=(attention(),)), pp=1), "pp rank 1 of 1"),
    (lambda: Shard(CacheLayout(groups=(attention(),)), pages=(1, 2)), "has 1 groups; give a number for each"),
    (lambda: Shard(CacheLayout(groups=(attention(),)), pages=0), "at least one page"),
    (
        lambda: Shard(CacheLayout(groups=(attention(),)), pages=1 << 60).nbytes,
        "group 0: its pool ends at byte .* fewer",
    ),
    (lambda: Shard(CacheLayout(groups=(attention(page_bytes=8),))).nbytes, "page_bytes=8: a page has 2048 bytes"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[words for _make, words in WRONG])
def test_what_makes_no_sense_names_the_value_and_the_cure(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_layout_is_frozen() -> None:
    with pytest.raises(AttributeError):
        CacheLayout(groups=(attention(),)).tp = 2  # type: ignore[misc]


def test_two_caches_of_one_layer_have_different_contents() -> None:
    layout = CacheLayout(groups=(latent(), latent(latent_dim=128, content="index")), tp=8)
    assert CacheLayout.from_json(layout.to_json()) == layout


def test_the_named_orders_are_orders() -> None:
    assert all(sorted(letters) == sorted("LPKHT") for letters in AXES.values())


def test_pipeline_stages_divide_the_layers() -> None:
    layout = CacheLayout(groups=(attention(layers=(0, 2, 4)), latent(layers=(1, 3))), pp=2, stages=(3, 2))
    assert [Shard(layout, pp=pp).layers(group) for pp in (0, 1) for group in (0, 1)] == [(0, 2), (1,), (4,), (3,)]


def test_pools_lie_behind_each_other_or_where_they_are_said_to() -> None:
    layout = CacheLayout(groups=(attention(), latent()))
    first, second = 4 * 3 * 4 * 2 * 16 * 8 * 2, 4 * 5 * 16 * 576 * 2
    shard = Shard(layout, pages=[3, 5])  # type: ignore[arg-type]
    assert [shard.fields(group)[0].base for group in (0, 1)] == [0, first]
    assert shard.nbytes == first + second
    placed = Shard(layout, pages=(3, 5), bases=(second + 64, 64))
    assert [placed.fields(group)[0].base for group in (0, 1)] == [second + 64, 64]
    assert placed.nbytes == second + 64 + first


@given(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 3, 64]), st.sampled_from([1, 7, 16]), st.integers(1, 5)
)
def test_the_pools_of_decoder_and_prefiller_are_described_as_they_are(
    layers: int, heads: int, dim: int, size: int, pages: int
) -> None:
    own = KvLayout(layers, heads, dim, size, "bfloat16")
    shard = Shard(CacheLayout.of(own), pages=pages)
    (field,) = shard.fields(0)
    assert shard.nbytes == own.pool_bytes(pages)
    assert (field.layer, field.page, field.unit) == (pages * own.page_bytes, own.page_bytes, own.head_bytes)


def test_layers_are_shown_briefly() -> None:
    assert show_layers((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert show_layers(tuple(range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, ... (20 layers)"


def test_the_schema_is_in_the_file() -> None:
    assert msgspec.json.decode(CacheLayout(groups=(attention(),)).to_json())["schema"] == SCHEMA
