"""GPU ranks that meet and leave, and what their kernels say, without a GPU."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from gpu_fake import FakeDevice

from fabric_core import BackendError, BadRange, ConfigError, ProtocolError, TransferEngine
from fabric_moe import MoeConfig, RankLost, StepError
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda import generation, memory, peers, report

SHAPE: dict[str, Any] = {"ranks": 4, "experts": 10, "topk": 3, "hidden": 40, "max_tokens": 7}


def said(*kinds: int, lost: int = 0, culprits: int = 0) -> report.Report:
    """A report of kernels that said these kinds, each with 5 and 99."""
    words = report.Words(lost=lost, culprits=culprits)
    for kind in kinds:
        words.told[kind] += 1
        words.first[kind], words.second[kind] = 5, 99
    made = report.Report(ctypes.addressof(words), 1, 10, {2: "local://x"})
    made.keep = words  # type: ignore[attr-defined]
    return made


def test_errors_name_what_is_wrong() -> None:
    assert said().error() is None
    lost = said(lost=1, culprits=0b110).error()
    assert isinstance(lost, RankLost)
    assert lost.ranks == (1, 2)
    assert "rank 1 (this rank), rank 2 at local://x" in str(lost)
    for kind, words, error in [
        (report.BAD_ID, "token 5 named expert 99: experts go from 0 to 9", BadRange),
        (report.BAD_LIVE, "live=5, topk_ids has 99 tokens", BadRange),
        (report.OVERFLOW, "a view needed 5 rows, its capacity is 99", BadRange),
        (report.DISCARDED, r"ranks \[0, 2\] discarded", StepError),
    ]:
        found = said(kind).error()
        assert isinstance(found, error)
        assert re.search(words, str(found))


def test_what_costs_one_step_is_said_once_and_what_ends_a_group_always() -> None:
    once = said(report.BAD_ID, report.BAD_LIVE)
    assert [type(once.error()) for _ in range(3)] == [BadRange, BadRange, type(None)]
    once.keep.told[report.BAD_ID] += 1  # type: ignore[attr-defined]
    assert [type(once.error()) for _ in range(2)] == [BadRange, type(None)]  # and again for the next time
    for always, kind in ((said(lost=1, culprits=1), RankLost), (said(report.OVERFLOW, lost=1, culprits=1), BadRange)):
        assert [type(always.error()) for _ in range(2)] == [kind, kind]
        assert always.over


def test_a_rank_that_is_lost_is_not_forgotten_over_a_wrong_id() -> None:
    """Whatever is read and set back meanwhile: the host never writes a word that kernels write."""
    both = said(report.BAD_ID, lost=1, culprits=1)
    assert isinstance(both.error(), RankLost)
    late = said(report.BAD_ID)
    words = late.keep  # type: ignore[attr-defined]
    before = bytes(words)
    words.lost, words.culprits = 1, 0b100  # between the host's look and its mark
    assert isinstance(late.error(), RankLost)
    words.lost = words.culprits = 0
    assert isinstance(late.error(), BadRange)
    heard = report.Words.heard
    assert [i for i, (a, b) in enumerate(zip(before, bytes(words), strict=True)) if a != b] == [heard.offset]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    for module in (generation, peers):
        monkeypatch.setattr(module, "device", lambda number: made)
    monkeypatch.setattr(nvrtc, "cubin", lambda macros, arch: b"image")
    return made


def leave(fake: FakeDevice, gen: generation.GpuGeneration, ranks: Iterable[int]) -> None:
    """What ranks of other processes note when they leave, or give up."""
    for rank in ranks:
        fake.put(gen.inbound + gen.layout.in_notes + 8 * rank, (1 << rank).to_bytes(8, "little"))


def met(fake: FakeDevice, engine: TransferEngine, ours: Sequence[int] = (0, 1)) -> list[generation.GpuGeneration]:
    """Ranks of this process, and others up to rank 3 that another process has."""
    config = MoeConfig(**SHAPE)
    made = [generation.GpuGeneration(engine, config, r, 0, range(4), "cuda:0") for r in ours]
    cards = {gen.rank: gen.card() for gen in made}
    for r in set(range(4)).difference(ours):
        cards[r] = json.dumps({**json.loads(cards[ours[0]]), "rank": r, "process": "other", "handle": f"{r:0128x}"})
    for gen in made:
        gen.connect(cards)
    return made


def test_ranks_meet_by_address_or_by_handle(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    """The memory of another process is opened once for each of its ranks, however many of ours use it."""
    ours = met(fake, engines[0])
    for gen in ours:
        at = gen._memory.local + gen.layout.peers_at
        assert [fake.words[at + 8 * r] for r in range(4)] == [ours[0].inbound, ours[1].inbound, 1 << 60, 2 << 60]
        leave(fake, gen, (2, 3))
    assert len(fake.opened) == 2
    assert ours[0].common(1).alive == 0b1111
    ours[0].close()
    assert fake.closed == 0  # the other one still uses them
    ours[1].close()
    ours[1].close()
    assert fake.closed == 2
    assert fake.held == []


def test_memory_is_kept_until_all_others_have_left(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    """A rank that leaves tells all; until all have told it, they may write into what it leaves behind."""
    one, two = met(fake, engines[0])
    leave(fake, one, (2,))
    leave(fake, two, (2, 3))
    two.close()
    assert len(fake.held) == 4  # rank 0 has not left
    at = one.inbound
    one.close()
    assert fake.held == [at, at + (1 << 40)]  # rank 3 has not; rank 1 has, and its own memory is free now
    fake.put(at + one.layout.in_notes + 8 * 3, (8).to_bytes(8, "little"))
    memory.sweep()
    assert fake.held == []


def test_who_leaves_says_so_to_all(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    """Unless a kernel has said so: that note names the culprits, and stays."""
    one, two = met(fake, engines[0])
    notes = one.layout.in_notes
    for gen in (one, two):
        leave(fake, gen, (2, 3))
    fake.put(one.inbound + notes + 8, (0b1000).to_bytes(8, "little"))  # a kernel of rank 1 gave up because of rank 3
    fake.said(1).lost = 1
    theirs = two.inbound
    one.close()
    two.close()
    assert fake.held == []
    for at in (theirs, 1 << 60, 2 << 60):
        assert fake.words[at + notes] == 1 << 0
    assert fake.words[(1 << 40) + notes + 8] == 0b1000
    assert (1 << 60) + notes + 8 not in fake.words


def test_what_was_never_shown_is_free_at_once(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    gen = generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")
    gen.close()
    assert fake.held == []


def test_a_gpu_with_too_little_memory_for_a_block(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    fake.shared_limit = 90 << 10
    with pytest.raises(ConfigError, match=r"experts=8192 on ranks=1: kernels need \d+ bytes"):
        generation.GpuGeneration(engines[0], MoeConfig(**{**SHAPE, "ranks": 1, "experts": 8192}), 0, 0, [0], "cuda:0")


def test_memory_that_is_not_to_be_had(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    fake.full = True
    with pytest.raises(BackendError, match=r"out of memory.*lower max_tokens or depth"):
        generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"kind": None}, ProtocolError, "opened for host memory"),
        ({"version": 1}, ProtocolError, "speaks version 1"),
        ({"shape": {}}, ProtocolError, "another shape: ranks is None there and 4 here"),
        ({"shape": 7}, ProtocolError, "another shape"),
        ({"rank": 3}, ProtocolError, "is that of rank 3"),
        ({"members": [0, 1]}, ProtocolError, "mask the same ranks"),
        ({"handle": "ab"}, ProtocolError, "a handle of 1 bytes"),
        ({"handle": "xy"}, ProtocolError, "is no card"),
        ({"process": "other", "boot": "elsewhere"}, ConfigError, "on another host"),
    ],
)
def test_cards_that_are_wrong(
    fake: FakeDevice, engines: list[TransferEngine], change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    gen = generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")
    card = json.loads(gen.card())
    cards = {r: json.dumps({**card, "rank": r}) for r in range(4)}
    cards[1] = json.dumps({**card, "rank": 1, **change})
    with pytest.raises(kind, match=words):
        gen.connect(cards)
    for text in ("", "[]", "{", "7"):
        with pytest.raises(ProtocolError, match="no card"):
            gen.connect({**cards, 1: text})
    gen.close()
