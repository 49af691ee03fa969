"""`fabric kv bench`: its content and its clock, its check against planted damage, the command with real processes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import Bytes, offsets, ranks
from layout_strategies import pairs

from fabric_core import ConfigError, DeadlineExceeded, NetAddr, TransferEngine
from fabric_core.cli.session import Session
from fabric_kvcache.bench.content import POISON, count_wrong, fill
from fabric_kvcache.bench.receiver import Receiver
from fabric_kvcache.bench.sender import Sender
from fabric_kvcache.bench.start import receiver_process
from fabric_kvcache.bench.timed import TimedPrefill
from fabric_kvcache.bench.work import Work, cut_layers
from fabric_kvcache.cache import CacheLayout
from fabric_kvcache.plan import Chunk
from fabric_kvcache.presets import PRESETS

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
QWEN = cut_layers(PRESETS["qwen3-235b"].layout, 3)


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fabric_core.cli", "kv", "bench", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=100)


# ---- content and clock -----------------------------------------------------------------------------------------------


def move(work: Work, source: Bytes, target: Bytes, rank: Any, tables: tuple[list[Any], list[Any]]) -> None:
    moves = work.plan(rank).moves(Chunk(0, work.tokens, work.tokens), *tables)
    for layer in moves.layers:
        for length, a, b in moves.at(layer):
            target[offsets(b, length)] = source[offsets(a, length)]


@settings(max_examples=30, deadline=None)
@given(pairs(), st.integers(1, 60), st.integers(0, 99), st.data())
def test_both_sides_make_the_same_bytes_whatever_their_layouts(
    pair: tuple[CacheLayout, CacheLayout], tokens: int, seed: int, data: Any
) -> None:
    src, dst = pair
    rank = data.draw(st.sampled_from(range(dst.tp * dst.pp)))
    work = Work(src=src, dst=dst, dst_tp=rank % dst.tp, dst_pp=rank // dst.tp, tokens=tokens, tail_bytes=0, seed=seed)
    assert Work.from_json(work.to_json()) == work
    tables = work.tables(src, 0), work.tables(dst, 1)
    whole = range(tokens)
    wanted, got = (np.full(max(1, work.target.nbytes), POISON, np.uint8) for _ in range(2))
    fill(wanted, work.target, tables[1], whole, seed, work.scales)
    for shard in ranks(src, work.sources()[0].pages) if work.sources() else []:  # type: ignore[arg-type]
        source = np.zeros(max(1, shard.nbytes), np.uint8)
        fill(source, shard, tables[0], whole, seed, work.scales)
        move(work, source, got, shard, tables)
    assert count_wrong(got, wanted) == 0


def test_vectors_of_other_coordinates_differ() -> None:
    """Else a vector in a wrong place could pass."""
    work = Work(src=QWEN, dst=QWEN, tokens=200, tail_bytes=0, seed=1)
    octets = np.zeros(work.target.nbytes, np.uint8)
    fill(octets, work.target, work.tables(QWEN, 1), range(200), 1, work.scales)
    vectors = octets.reshape(-1, 256)
    vectors = vectors[vectors.any(axis=1)]
    assert len(vectors) == 3 * 2 * 200
    assert len(np.unique(vectors[:, :8], axis=0)) == len(vectors)


def test_a_timed_prefill_calls_each_layer_in_order_and_never_early() -> None:
    model = TimedPrefill(4, [2000.0, 3000.0])
    seen: list[tuple[int, int, int]] = []
    begin = time.monotonic_ns()
    model.run(lambda chunk, layer: seen.append((chunk, layer, time.monotonic_ns())))
    assert [(chunk, layer) for chunk, layer, _at in seen] == [(c, n) for c in range(2) for n in range(4)]
    due = begin
    for chunk, _layer, at in seen:
        due += 1000 * (2000, 3000)[chunk]
        assert at >= due
    assert len(model.late_us) == 8
    assert min(model.late_us) >= 0
    assert model.total_us == 4 * 5000


def test_a_timed_prefill_can_be_stopped_while_a_layer_computes() -> None:
    model = TimedPrefill(1, [1e9])  # a thousand seconds
    called: list[int] = []
    thread = threading.Thread(target=model.run, args=(lambda *_: called.append(1),))
    thread.start()
    model.stop()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert called == []


def test_fewer_layers_are_the_first_ones() -> None:
    assert QWEN.total_layers == 3
    assert cut_layers(QWEN, 0) is QWEN
    staged = CacheLayout(groups=QWEN.groups, pp=2, stages=(1, 2))
    with pytest.raises(ConfigError, match="leave --layers out"):
        cut_layers(staged, 2)


# ---- planted damage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[tuple[Session, NetAddr]]:
    with ExitStack() as stack:
        address = NetAddr.parse(stack.enter_context(receiver_process("", None, "cpu")))
        engine = stack.enter_context(TransferEngine.open())
        yield stack.enter_context(Session(engine)), address


def test_every_kind_of_damage_is_seen(session: tuple[Session, NetAddr]) -> None:
    work = Work(src=QWEN, dst=QWEN, tokens=500, tail_bytes=100, seed=5)
    chunks = [Chunk(0, 200, 500), Chunk(200, 500, 500)]
    sender = Sender(*session, work, chunks, "engine", "user")
    good = sender.run(None)
    assert (good.wrong, good.surplus, good.nbytes) == (0, 0, 3 * 2 * 500 * 256 + 100)
    plan, buffer = sender.plans[0]
    at = int(sender.tables[0][0][1]) * plan.src.fields(0)[0].page + 77  # the second page of layer 0
    buffer.view[at] ^= 1
    assert sender.run(None).wrong == 1
    buffer.view[at] ^= 1
    assert sender.run([100.0, 50.0], merge=False, ready="poll").wrong == 0
    # A page of the request goes to a page of nobody's: its own place stays as it was, and that one does not.
    table = sender.tables[1][0]
    kept = int(table[2])
    table[2] = next(page for page in range(plan.dst.pool_pages[0]) if page not in table)
    assert sender.run(None).wrong == pytest.approx(2 * 3 * 2 * 128 * 256, rel=0.01)  # some bytes are POISON anyhow
    table[2] = kept
    # Two pages of one request change places: all the right bytes are there, in the wrong order.
    table[[0, 1]] = table[[1, 0]]
    assert (sender.run([100.0, 50.0], ready="watcher").wrong or 0) > 100_000
    sender.close()


def test_a_write_that_is_left_out_ends_at_the_deadline(
    session: tuple[Session, NetAddr], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(src=QWEN, dst=QWEN, tokens=200, tail_bytes=8, seed=5)
    sender = Sender(*session, work, [Chunk(0, 200, 200)], "engine", "engine")
    submit = sender.engine.submit_single_write
    monkeypatch.setattr(sender.engine, "submit_single_write", lambda n, _imm, *rest, **kw: submit(n, None, *rest, **kw))
    with pytest.raises(DeadlineExceeded, match="not everything arrived"):
        sender.run(None, timeout=0.5)
    monkeypatch.undo()
    assert sender.run(None).wrong == 0
    sender.close()


def test_a_receiver_does_not_wait_for_a_sender_that_is_gone() -> None:
    """It would outlive a command that was killed, until the deadline of what it waits for."""
    work = Work(src=QWEN, dst=QWEN, tokens=200, tail_bytes=8, seed=5)
    heard: list[dict[str, Any]] = []
    with TransferEngine.open() as there:
        receiver = Receiver(there)
        with TransferEngine.open() as here, Session(here) as session, receiver.session:
            receiver._open(work=work.to_json(), memory="engine")
            arm = functools.partial(receiver._arm, sender=here.address, count=1, timeout=500)
            thread = threading.Thread(target=lambda: heard.append(arm()), daemon=True)
            thread.start()
            assert session.hear(timeout=60)["kind"] == "armed"
            here.close()
            thread.join(60)
            assert [one["kind"] for one in heard] == ["late"]
            receiver._close()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_moves_every_preset_and_compares_every_byte() -> None:
    done = command("--json", "--layers", "2", "--tokens", "256", "--compute-us", "300", "--rounds", "1", "--no-merge")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["problems"]) == ("fabric.kv.bench/1", [])
    rows = report["data"]["rows"]
    assert [(row["name"], row["tokens"]) for row in rows] == [(name, 256) for name in PRESETS]
    writes = {"qwen3-235b": (2, 128), "deepseek-v3": (1, 64), "llama3-70b": (1, 16)}
    for row in rows:
        assert (row["wrong_bytes"], row["surplus"], row["layers"]) == (0, 0, 2)
        pieces, page = writes[row["name"]]
        assert row["writes"] == 2 * pieces * -(-row["tokens"] // page) + 1
        preset = PRESETS[row["name"]]
        each = 2 * preset.layout.groups[0].unit_bytes  # type: ignore[union-attr]
        each *= row["tokens"] * preset.layout.groups[0].planes  # type: ignore[union-attr]
        assert row["bytes"] == each + preset.tail_bytes
        assert 0 < row["posted_p50_us"] <= row["posted_p99_us"]
        assert row["exposed_us"] > 0
        assert row["overhead_percent"] == pytest.approx(100 * row["exposed_us"] / 600)
        assert row["sender_cpu_us_per_write"] > 0
        assert row["gbyte_s"] == pytest.approx(row["bytes"] / row["burst_us"] / 1e3)
        assert row["limit_gbyte_s"] > 0


def test_ranks_chunks_and_the_watcher() -> None:
    """Four prefill ranks into one, in chunks that end inside pages, several NICs, user memory."""
    done = command(
        "qwen3-235b", "--to", "qwen3-235b:tp1", "--layers", "2", "--tokens", "1000", "--chunk-tokens", "300",
        "--compute-us", "300", "--rounds", "1", "--ready", "watcher", "--memory", "user", "--nics", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["data"]["rows"][0]
    assert (row["source_ranks"], row["chunks"], row["wrong_bytes"], row["ready"]) == (4, 4, 0, "watcher")
    assert row["bytes"] == 2 * 1000 * 2 * 4 * 256 + 4 * 151936


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("qwen3-235b", "--to", "llama3-70b"), "the destination 0-79"),
        (("qwen3-235b", "--layers", "0", "--tokens", "1024K"), "take fewer --layers or --tokens"),
        (("qwen3-235b", "--ready", "never"), "must be hook, busy, watcher or poll"),
    ],
)
def test_usage_is_told_in_one_sentence(words: tuple[str, ...], told: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""
