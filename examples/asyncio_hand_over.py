"""asyncio: a prefill and a decode coroutine hand over a cache, request by request.

    python examples/asyncio_hand_over.py

Transfers and expectations are awaited directly; messages come in through a queue of the event loop.
"""

from __future__ import annotations

import asyncio
import json

from fabric_core import MrDesc, NetAddr, TransferEngine

SIZE = 1 << 18
REQUESTS = 4


def inbox(engine: TransferEngine) -> asyncio.Queue[bytes]:
    """Messages for this engine, as a queue of the running loop."""
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    engine.submit_recvs(4096, 8, lambda message: loop.call_soon_threadsafe(messages.put_nowait, message))
    return messages


async def decode(engine: TransferEngine, prefill: NetAddr) -> None:
    """Offers memory for each request, and uses what arrives."""
    cache = engine.empty(SIZE)
    _, desc = engine.reg_mr(cache)
    for number in range(REQUESTS):
        imm = engine.alloc_imm()
        arrived = engine.expect_imm_count(imm, 1, timeout=10, peers=[prefill])
        offer = {"number": number, "imm": imm, "desc": desc.to_bytes().hex()}
        await engine.submit_send(prefill, json.dumps(offer).encode())
        await arrived  # or PeerLost, at once, if the other side dies
        assert cache[:] == bytes([number + 1]) * SIZE
        engine.free_imm(imm)
        print(f"request {number}: {SIZE} bytes are here")


async def prefill(engine: TransferEngine) -> None:
    """Computes, and writes to where it was asked to."""
    cache, offers = engine.empty(SIZE), inbox(engine)
    handle, _ = engine.reg_mr(cache)
    for _ in range(REQUESTS):
        offer = json.loads(await offers.get())
        cache[:] = bytes([offer["number"] + 1]) * SIZE  # the computation
        target = MrDesc.from_bytes(bytes.fromhex(offer["desc"]))
        await engine.submit_single_write(SIZE, offer["imm"], (handle, 0), (target, 0))


async def main() -> None:
    with TransferEngine.open() as here, TransferEngine.open() as there:
        await asyncio.gather(prefill(here), decode(there, here.address))


asyncio.run(main())
