"""Ranks of a stream in one process, and weights for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fabric_rlweights.stream import Member, receive, send
from fabric_rlweights.stream.member import new_session

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
KIB = 1 << 10


def some_weights(salt: int) -> list[tuple[str, Any]]:
    """Whole in a bucket, over several ones, empty, of no dimension, not contiguous, of odd sizes and several types."""
    dice = torch.Generator().manual_seed(salt)

    def noise(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, generator=dice).to(dtype)

    return [
        ("embed", noise(40, 96)),  # 7.5 KiB: two buckets and more
        ("norm", noise(33, dtype=torch.float32)),
        ("nothing", noise(0, 7)),
        ("scale", noise(dtype=torch.float32)),
        ("turned", noise(24, 32).t()),
        ("eight", noise(5, 13).to(torch.float8_e4m3fn)),
        ("mask", noise(77) > 0),
        ("head", noise(3, 1000)),
        ("last", noise(1)),
    ]


@dataclass
class World:
    """Members that have joined a session."""

    senders: list[Member]
    receivers: list[Member]

    @property
    def all(self) -> list[Member]:
        return self.senders + self.receivers

    def join(self) -> None:
        cards = [member.prepare() for member in self.all]
        senders, receivers = cards[: len(self.senders)], cards[len(self.senders) :]
        session = new_session()
        for rank, member in enumerate(self.senders):
            member.join(session, "sender", rank, senders, receivers)
        for rank, member in enumerate(self.receivers):
            member.join(session, "receiver", rank, senders, receivers)

    def update(self, weights: list[list[tuple[str, Any]]], takers: Any = None) -> list[Any]:
        """Run a stream: what each sender sends. Returns what each rank's call returned, or raised."""

        async def everybody() -> list[Any]:
            calls = [send(member, pairs) for member, pairs in zip(self.senders, weights, strict=True)]
            return await asyncio.wait_for(
                asyncio.gather(*calls, *map(takers or take, self.receivers), return_exceptions=True), LIMIT
            )

        return asyncio.run(everybody())


async def take(member: Member) -> list[tuple[str, Any]]:
    """Use each tensor before the next is asked for, as engines do."""
    return [(name, tensor.clone()) async for name, tensor in receive(member)]


@contextmanager
def a_world(
    senders: int, receivers: int, size: int = 3 * KIB, slots: int = 2, timeout: float = LIMIT
) -> Iterator[World]:
    def some(count: int) -> list[Member]:
        return [Member(size, slots=slots, device="cpu", backend="local", timeout=timeout) for _ in range(count)]

    world = World(some(senders), some(receivers))
    try:
        world.join()
        yield world
    finally:
        for member in world.all:
            member.close()


def octets(tensor: Any) -> Any:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: Any, wanted: list[tuple[str, Any]]) -> bool:
    """Whether names, order, types, shapes and every byte are the same."""
    return (
        isinstance(found, list)
        and [name for name, _ in found] == [name for name, _ in wanted]
        and all(a.dtype == b.dtype and a.shape == b.shape for (_, a), (_, b) in zip(found, wanted, strict=True))
        and all(torch.equal(octets(a), octets(b)) for (_, a), (_, b) in zip(found, wanted, strict=True))
    )
