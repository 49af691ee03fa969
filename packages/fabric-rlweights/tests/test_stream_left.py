"""A stream whose session is left, or begun anew, while it runs: it ends, and does nothing to the next one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode does not find stream_world.py by itself

from stream_world import LIMIT, World, a_world, same, some_weights, take  # noqa: E402

from fabric_core import ConfigError  # noqa: E402
from fabric_rlweights.stream import StreamFailed, receive, send  # noqa: E402


async def until(so: Callable[[], bool]) -> None:
    """Let others run until it is so."""

    async def wait() -> None:
        while not so():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), LIMIT)


async def waits_for_credit(world: World) -> asyncio.Task[Any]:
    """A sender that has filled both slots of a receiver that takes nothing."""
    receiver = world.receivers[0]
    old = asyncio.create_task(send(world.senders[0], some_weights(1) * 3))
    await until(lambda: all(receiver.engine.imm_count(imm) for imm in receiver.imms))
    return old


async def waits_for_a_bucket(world: World) -> asyncio.Task[Any]:
    old = asyncio.create_task(take(world.receivers[0]))
    await until(lambda: world.receivers[0]._waiting is not None)
    return old


@pytest.mark.parametrize("waits", [waits_for_credit, waits_for_a_bucket])
@pytest.mark.parametrize("again", [False, True])
def test_it_ends_and_the_next_update_is_right(waits: Any, again: bool) -> None:
    weights = some_weights(2)

    async def ends(old: asyncio.Task[Any]) -> None:
        with pytest.raises(StreamFailed, match="left, or prepared anew"):
            await asyncio.wait_for(old, LIMIT / 3)  # before its own deadline

    async def everybody(world: World) -> None:
        old = await waits(world)
        if not again:
            for member in world.all:
                member.leave()
            await ends(old)  # by that alone, whoever comes next
        world.join()
        sent = asyncio.create_task(send(world.senders[0], weights))
        assert same(await asyncio.wait_for(take(world.receivers[0]), LIMIT), weights)
        await asyncio.wait_for(sent, LIMIT)
        if again:
            await ends(old)

    with a_world(1, 1) as world:
        asyncio.run(everybody(world))
        assert world.senders[0].stop is None
        assert world.receivers[0]._waiting is None


def test_a_receiver_in_the_middle_of_a_bucket() -> None:
    """What it has taken for the old session is not said in the new one."""
    weights = some_weights(3) * 2

    async def everybody(world: World) -> None:
        old, sending = receive(world.receivers[0]), asyncio.create_task(send(world.senders[0], weights))
        await asyncio.wait_for(anext(old), LIMIT)
        world.join()
        sent = asyncio.create_task(send(world.senders[0], weights))
        with pytest.raises(StreamFailed, match="left, or prepared anew"):
            async for _ in old:
                pass
        assert same(await asyncio.wait_for(take(world.receivers[0]), LIMIT), weights)
        await asyncio.wait_for(sent, LIMIT)
        with pytest.raises(StreamFailed):
            await asyncio.wait_for(sending, LIMIT)

    with a_world(1, 1) as world:
        asyncio.run(everybody(world))


@pytest.mark.parametrize(("given", "seconds"), [(None, 5.0), ("0.5", 0.5)])
def test_a_rank_may_stand_still_for_a_while(monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: float) -> None:
    if given is not None:
        monkeypatch.setenv("FABRIC_HEARTBEAT", given)
    with a_world(1, 1) as world:
        assert [member.engine.settings.heartbeat for member in world.all] == [seconds] * 2


def test_a_stream_needs_a_session() -> None:
    async def both(world: World) -> None:
        with pytest.raises(ConfigError, match="join"):
            await send(world.senders[0], [])
        with pytest.raises(ConfigError, match="join"):
            await take(world.receivers[0])

    with a_world(1, 1) as world:
        for member in world.all:
            member.leave()
        asyncio.run(both(world))
