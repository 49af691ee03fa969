"""The senders' side of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

from fabric_core import MrDesc, StaleHandle, Transfer, TransferError
from fabric_rlweights.stream.buckets import Chain, Cutter, Head, Piece, data_of, put_head, slot_bytes
from fabric_rlweights.stream.member import Member, StreamFailed

__all__ = ["send"]

Pairs = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]


async def send(member: Member, weights: Pairs) -> dict[str, float]:
    """Send (name, tensor) pairs to all receivers. Every sender gives the same pairs in the same order.

    Returns {"bytes", "buckets", "seconds"} of the whole stream, all senders together.
    Raises StreamFailed, naming who failed, and whatever `weights` raises, which the others hear of.
    """
    sending = _Sending(member, member.begin())
    member.stop = sending.stop
    try:
        return await sending.run(weights)
    except BaseException as error:
        member.fail(sending.session, f"{type(error).__name__}: {error}")
        sending.stop()
        if isinstance(error, TransferError | StaleHandle):
            member.check(sending.session)  # it says more: who failed, or that the session was left
        raise
    finally:
        if member.stop == sending.stop:
            member.stop = None


class _Sending:
    def __init__(self, member: Member, session: int) -> None:
        self.member, self.session = member, session
        self.targets: list[MrDesc] = member.targets()
        self.cutter, self.chain = Cutter(member.size), Chain()
        self.bucket = 0
        self.pieces: list[Piece] = []
        self.bytes = 0
        self.under_way: list[list[Transfer]] = [[] for _ in range(member.slots)]  # by slot of ours

    async def run(self, weights: Pairs) -> dict[str, float]:
        begin = time.monotonic()
        async for name, tensor in _each(weights):
            octets = None
            for bucket, piece in self.cutter.add(name, tensor):
                if bucket != self.bucket:
                    await self._over(last=False)
                self.chain.add(piece)
                self.pieces.append(piece)
                if self._ours():
                    await self._free()
                    self.member.check(self.session)
                    if octets is None:
                        octets = _octets(tensor)
                    room = data_of(self.member.slot(self._place()))[piece.at : piece.at + piece.nbytes]
                    room.copy_(octets[piece.start : piece.start + piece.nbytes])
        await self._over(last=True)
        for slot in range(self.member.slots):
            await self._written(slot)
        seconds = time.monotonic() - begin
        return {"bytes": float(self.bytes), "buckets": float(self.bucket), "seconds": seconds}

    def stop(self) -> None:
        """Have writes under way end, so that memory can be given back."""
        for transfers in self.under_way:
            for transfer in transfers:
                transfer.cancel()

    def _ours(self) -> bool:
        return self.bucket % len(self.member.senders) == self.member.rank

    def _place(self) -> int:
        """Which slot of ours the bucket is packed in: ours take turns."""
        return self.bucket // len(self.member.senders) % self.member.slots

    async def _free(self) -> None:
        """Have the slot of ours empty."""
        await self._written(self._place())

    async def _over(self, last: bool) -> None:
        """The bucket is full, or the stream at its end."""
        self.member.check(self.session)
        data = max((piece.at + piece.nbytes for piece in self.pieces), default=0)
        self.bytes += sum(piece.nbytes for piece in self.pieces)
        if self._ours():
            await self._free()
            await asyncio.to_thread(self._credit)
            self._post(data, last)
        self.bucket, self.pieces = self.bucket + 1, []

    def _credit(self) -> None:
        """Wait until every receiver has the slot empty that this bucket goes to."""
        member, needed = self.member, self.bucket - self.member.slots

        def lacking() -> list[int]:
            return [rank for rank, taken in enumerate(member.taken) if taken < needed]

        with member.changed:
            heard = member.changed.wait_for(
                lambda: member.problem or member.session != self.session or not lacking(), member.timeout
            )
            late = ", ".join(f"receiver {rank}" for rank in lacking()[:8])
        member.check(self.session)
        if not heard:
            raise StreamFailed(f"{late} did not take bucket {needed} within {member.timeout:g} s")

    def _post(self, data: int, last: bool) -> None:
        member = self.member
        ours, theirs, size = self._place(), self.bucket % member.slots, slot_bytes(member.size)
        head = Head(self.session, self.bucket, last, self.chain.tensors, self.chain.digest, self.pieces)
        length = put_head(member.slot(ours), head, data)
        settle()
        self.under_way[ours] = [
            member.engine.submit_single_write(
                length, card.imms[theirs], (member.handle, ours * size), (desc, theirs * size), timeout=member.timeout
            )
            for card, desc in zip(member.receivers, self.targets, strict=True)
        ]

    async def _written(self, slot: int) -> None:
        while self.under_way[slot]:
            await self.under_way[slot][-1]
            self.under_way[slot].pop()


def settle() -> None:
    """Wait for what was given to GPUs: copies into a bucket, or out of it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _octets(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


async def _each(weights: Pairs) -> AsyncIterator[tuple[str, Any]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
