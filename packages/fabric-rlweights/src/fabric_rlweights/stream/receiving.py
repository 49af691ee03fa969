"""The receivers' side of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fabric_core import NetAddr, TransferError
from fabric_rlweights.dtypes import torch_dtype
from fabric_rlweights.stream.buckets import Chain, Head, Piece, data_of, take_head
from fabric_rlweights.stream.member import Member, StreamFailed
from fabric_rlweights.stream.sending import settle
from fabric_rlweights.stream.words import Taken

__all__ = ["receive"]


async def receive(member: Member) -> AsyncIterator[tuple[str, Any]]:
    """Give (name, tensor) as they come. A tensor may be a view of a bucket: use it before you ask for the next one.

    Raises StreamFailed, naming who failed. If the caller stops early or raises, the others hear of it.
    """
    session = member.begin()
    chain, whole = Chain(), _Whole()
    bucket = 0
    try:
        while True:
            await _arrival(member, session, bucket)
            slot = member.slot(bucket % member.slots)
            head = take_head(slot)
            _same(member, session, head, bucket, chain)
            data = data_of(slot)
            for piece in head.pieces:
                octets = data[piece.at : piece.at + piece.nbytes]
                found = whole.add(piece, octets)
                if found is not None:
                    yield piece.name, found.view(torch_dtype(piece.dtype)).view(piece.shape)
            settle()
            if head.last:
                whole.must_be_over()
                return
            member.check(session)
            member.say(member.owner(bucket + member.slots), Taken(session, member.rank, bucket))
            bucket += 1
    except GeneratorExit:
        member.fail(session, f"it stopped taking weights at bucket {bucket}")
        raise
    except BaseException as error:
        member.fail(session, f"{type(error).__name__}: {error}")
        raise


async def _arrival(member: Member, session: int, bucket: int) -> None:
    member.check(session)
    imm, owner = member.imms[bucket % member.slots], member.owner(bucket)
    peers = [NetAddr.parse(owner.address)]
    expectation = member.engine.expect_imm_count(imm, 1, timeout=member.timeout, peers=peers)
    member.wait_for(expectation)
    try:
        await expectation
    except TransferError as error:
        member.check(session)
        raise StreamFailed(f"bucket {bucket} of sender {bucket % len(member.senders)} did not come: {error}") from error
    finally:
        member.waited(expectation)
    member.check(session)


def _same(member: Member, session: int, head: Head, bucket: int, chain: Chain) -> None:
    """Raise StreamFailed if this is not the bucket that is due, or if senders do not send the same tensors."""
    sender = bucket % len(member.senders)
    if head.session != session or head.bucket != bucket:
        raise StreamFailed(
            f"bucket {bucket} of session {session} was due, sender {sender} wrote bucket {head.bucket} of "
            f"session {head.session}"
        )
    for piece in head.pieces:
        chain.add(piece)
    if (head.tensors, head.chain) != (chain.tensors, chain.digest):
        raise StreamFailed(
            f"sender {sender} sends other tensors than those before it: it has seen {head.tensors} up to bucket "
            f"{bucket}, {chain.tensors} have come; all senders must give the same names, shapes and types in one order"
        )


class _Whole:
    """Tensors that come in several buckets."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._have = 0
        self._octets: Any = None

    def add(self, piece: Piece, octets: Any) -> Any:
        """Return the bytes of a tensor that is complete now, else None. Raises StreamFailed for a gap."""
        import torch

        if piece.start != self._have or (self._piece is not None and piece.name != self._piece.name):
            raise StreamFailed(f"{piece.name} comes from byte {piece.start} on: byte {self._have} was due")
        if piece.start == 0 and piece.nbytes == piece.whole:
            return octets
        if self._piece is None:
            self._octets = torch.empty(piece.whole, dtype=torch.uint8, device=octets.device)
        self._piece = piece
        self._octets[piece.start : piece.start + piece.nbytes] = octets
        self._have = piece.start + piece.nbytes
        if self._have < piece.whole:
            return None
        found, self._piece, self._have, self._octets = self._octets, None, 0, None
        return found

    def must_be_over(self) -> None:
        """Raise StreamFailed if a tensor lacks a part."""
        if self._piece is not None:
            raise StreamFailed(f"{self._piece.name}: {self._have} of {self._piece.whole} bytes came")
