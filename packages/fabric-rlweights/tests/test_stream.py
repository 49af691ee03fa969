"""Weights through buckets: every byte on every receiver, bounded memory, and ends that name who is to blame."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode does not find stream_world.py by itself

from stream_world import KIB, LIMIT, World, a_world, same, some_weights, take  # noqa: E402

from fabric_core import ConfigError, ProtocolError  # noqa: E402
from fabric_rlweights.stream import Member, StreamFailed, receive, send  # noqa: E402
from fabric_rlweights.stream.buckets import Chain, Cutter, Head, put_head, slot_bytes, take_head  # noqa: E402


@pytest.mark.parametrize(("senders", "receivers", "slots"), [(1, 1, 2), (2, 1, 2), (2, 3, 2), (5, 2, 3)])
def test_every_byte_comes_to_everybody(senders: int, receivers: int, slots: int) -> None:
    weights = some_weights(1)
    with a_world(senders, receivers, slots=slots) as world:
        results = world.update([weights] * senders)
        for result in results[senders:]:
            assert same(result, weights), result
        for result in results[:senders]:
            assert result["bytes"] == sum(t.numel() * t.element_size() for _, t in weights)
            assert result["buckets"] > 4


def test_update_after_update_in_the_same_engines() -> None:
    with a_world(2, 2) as world:
        for salt in range(3):
            weights = some_weights(salt)
            assert all(same(result, weights) for result in world.update([weights] * 2)[2:])
            world.join()  # verl prepares, joins and leaves around each update


def test_a_generator_and_an_async_one_do() -> None:
    weights = some_weights(4)

    async def slowly() -> Any:
        for pair in weights:
            await asyncio.sleep(0)
            yield pair

    with a_world(2, 1) as world:
        results = world.update([iter(weights), slowly()])  # type: ignore[list-item]
        assert same(results[2], weights)


def test_no_weights_at_all() -> None:
    with a_world(3, 2) as world:
        assert [same(result, []) for result in world.update([[]] * 3)[3:]] == [True, True]


def test_a_slow_receiver_is_not_overrun() -> None:
    """Its buckets stay as they are while it uses them: the others wait for it."""

    async def slowly(member: Member) -> list[tuple[str, Any]]:
        found = []
        async for name, tensor in receive(member):
            for _ in range(50 if member.rank == 0 else 1):
                await asyncio.sleep(0)
            found.append((name, tensor.clone()))
        return found

    weights = some_weights(5) * 5
    with a_world(2, 2) as world:
        assert all(same(result, weights) for result in world.update([weights] * 2, slowly)[2:])


def test_senders_that_differ_are_found() -> None:
    good, bad = some_weights(6), some_weights(6)
    bad[0] = ("embedding", bad[0][1])
    with a_world(2, 1) as world:
        *_, result = world.update([good, bad])
        assert isinstance(result, StreamFailed)
        assert "sender 1 sends other tensors" in str(result)


def test_a_sender_that_raises_ends_it_for_all() -> None:
    weights = some_weights(7)

    def breaks() -> Iterator[tuple[str, Any]]:
        yield from weights[:2]
        raise RuntimeError("out of memory today")

    with a_world(2, 2) as world:
        own, other, *takers = world.update([breaks(), weights])  # type: ignore[list-item]
        assert isinstance(own, RuntimeError)
        for result in (other, *takers):
            assert isinstance(result, StreamFailed), result
            assert "sender 0: RuntimeError: out of memory today" in str(result)


def test_a_receiver_that_stops_ends_it_for_all() -> None:
    async def stops(member: Member) -> list[tuple[str, Any]]:
        if member.rank == 0:
            return await take(member)
        stream = receive(member)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return []

    with a_world(2, 2) as world:
        weights = some_weights(8) * 3
        one, two, first, _ = world.update([weights] * 2, stops)
        for result in (one, two, first):
            assert isinstance(result, StreamFailed), result
            assert "receiver 1: it stopped taking weights" in str(result)


def test_a_receiver_that_is_gone_is_named() -> None:
    async def leaves(member: Member) -> list[tuple[str, Any]]:
        if member.rank == 1:
            await anext(receive(member))
            member.engine.close()
            return []
        return await take(member)

    with a_world(1, 2) as world:
        sender, first, _ = world.update([some_weights(9) * 3], leaves)
        assert isinstance(sender, StreamFailed)
        assert isinstance(first, StreamFailed)
        assert "receiver 1" in str(first) or str(world.receivers[1].engine.address) in str(first)


def test_nobody_sends() -> None:
    absent = pytest.raises(StreamFailed, match="bucket 0 of sender 0 did not come")
    with a_world(1, 1, timeout=0.05) as world, absent:
        asyncio.run(take(world.receivers[0]))


def test_nobody_takes() -> None:
    absent = pytest.raises(StreamFailed, match=r"receiver 0 did not take bucket 0 within 0\.05 s")
    with a_world(1, 1, timeout=0.05) as world, absent:
        asyncio.run(send(world.senders[0], some_weights(1)))


def test_sizes_that_differ_are_refused() -> None:
    members = [Member(4 * KIB, device="cpu", backend="local"), Member(8 * KIB, device="cpu", backend="local")]
    try:
        cards = [member.prepare() for member in members]
        with pytest.raises(ConfigError, match="receiver 0 has 2 buckets of 8192 bytes, sender 0 has 2 of 4096"):
            members[0].join(1, "sender", 0, cards[:1], cards[1:])
    finally:
        for member in members:
            member.close()


@pytest.mark.parametrize(
    "wrong", [{"size": 10}, {"size": True}, {"slots": 1}, {"slots": 2.5}, {"timeout": 0}, {"timeout": float("nan")}]
)
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Member(**{"size": 4 * KIB, **wrong})


def test_memory_is_given_back(world_of_one: World) -> None:
    """After `leave` nobody can write there: the next session has descriptors of its own."""
    sender, receiver = world_of_one.senders[0], world_of_one.receivers[0]
    receiver.leave()
    with pytest.raises(StreamFailed):
        asyncio.run(asyncio.wait_for(send(sender, some_weights(1)), LIMIT))


@pytest.fixture
def world_of_one() -> Iterator[World]:
    with a_world(1, 1) as world:
        yield world


def test_bytes_that_are_no_bucket() -> None:
    slot = torch.zeros(slot_bytes(KIB), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="no bucket"):
        take_head(slot)
    chain, cutter = Chain(), Cutter(KIB)
    pieces = [piece for _, piece in cutter.add("w", torch.zeros(16))]
    put_head(slot, Head(1, 0, True, 0, chain.digest, pieces), 10)  # the piece has 64 bytes
    with pytest.raises(ProtocolError, match="outside of its bucket of 10 bytes"):
        take_head(slot)


def test_a_name_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="letters"):
        list(Cutter(KIB).add("n" * (1 << 19), torch.zeros(1)))


def test_many_tiny_tensors_do_not_overflow_a_head() -> None:
    cutter = Cutter(1 << 30)
    tiny = torch.zeros(1)
    buckets = {bucket for number in range(60000) for bucket, _ in cutter.add(f"layer.{number}.bias", tiny)}
    assert len(buckets) > 3
