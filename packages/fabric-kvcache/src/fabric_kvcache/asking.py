"""A decoder asks: which prefill ranks have something for this one, and the messages that tell them what it wants."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fabric_core import FabricError, PeerLost
from fabric_kvcache import hub
from fabric_kvcache.errors import PrefillRefused
from fabric_kvcache.pairs import every_rank, pair_plan, sends_tail
from fabric_kvcache.protocol import MAX_MESSAGE, SEAL, Ask
from fabric_kvcache.ranks import PrefillRank
from fabric_kvcache.request import Request, asks, body_of
from fabric_kvcache.shard import Shard

if TYPE_CHECKING:
    from fabric_kvcache.decoder import Decoder
    from fabric_kvcache.pending import PendingKv

__all__ = ["again", "begin", "send"]


def begin(decoder: Decoder, pending: PendingKv) -> None:
    """All ranks have answered: find out who has something for this one, and ask them."""
    request, ranks = pending.request, pending._ranks
    for rank in ranks:
        if rank.error is not None:
            raise rank.error if isinstance(rank.error, PrefillRefused | PeerLost) else _about(rank)
    sources, tail_of = choose(decoder, ranks, request)
    lost = [error for rank in sources if (error := decoder.ranks.opened(rank, request.epoch, pending)) is not None]
    if lost or not pending._begun(sources):  # nothing was sent
        for rank in sources:
            decoder.ranks.closed(rank, request.epoch)
        if lost:
            raise lost[0]
        return
    body = body_of(request.tokens, request.tables)
    base = decoder.slots.offset(pending._slot)
    for number, rank in enumerate(sources):
        if pending._phase == "ended":  # a Cancel is on its way, and finds either nothing or all of it
            return
        send(decoder, pending, rank, body, base, number, tail=rank is tail_of)


def again(decoder: Decoder, pending: PendingKv, old: PrefillRank, new: PrefillRank) -> None:
    """A rank that had forgotten this decoder has answered a second handshake: ask it what the first one was asked."""
    request = pending.request
    if new.error is not None:
        raise new.error if isinstance(new.error, PrefillRefused | PeerLost) else _about(new)
    if new.shard != old.shard or new.shard is None:
        raise PrefillRefused(
            f"it was {old.shard}, and is {new.shard} now: ask again", peer=str(new.given), op="handshake"
        )
    error = decoder.ranks.opened(new, request.epoch, pending)
    if error is not None:
        raise error
    if not pending._replaced(old, new):  # nothing was sent
        decoder.ranks.closed(new, request.epoch)
        return
    mine = decoder.shard
    tail = request.tail and sends_tail(new.shard, (mine.tp, mine.pp), request.seed)
    number = pending._sources.index(new)
    body, base = body_of(request.tokens, request.tables), decoder.slots.offset(pending._slot)
    send(decoder, pending, new, body, base, number, tail=tail)


def send(
    decoder: Decoder, pending: PendingKv, rank: PrefillRank, body: bytes, base: int, number: int, *, tail: bool
) -> None:
    """Send a request to one prefill rank, in as many messages as it takes. `base`: where the request's slot begins."""
    request = pending.request
    left = max(0.001, pending.deadline - time.monotonic())
    head = Ask(
        session=rank.session,
        epoch=request.epoch,
        request_id=request.request_id,
        reply_to=decoder.engine.address.to_bytes(),
        seed=request.seed,
        start=request.start,
        total=request.total,
        prompt=len(request.tokens) > 0,
        tables=tuple(len(table) for table in request.tables),
        tail=tail,
        tail_offset=base + SEAL.size * decoder.max_sources,
        seal_offset=base + SEAL.size * number,
        imm=pending._imm,
        seal_imm=pending._seal_imm,
        timeout_ms=max(1, int(left * 1000)),
        offset=0,
        data=body[:4],
    )

    def sent(error: FabricError | None) -> None:
        if isinstance(error, PeerLost):
            decoder.ranks.lost(rank, error)
        elif error is not None:
            pending._fail(error)

    for part in asks(head, body, min(decoder.engine.max_message, MAX_MESSAGE)):
        hub.post(decoder.engine, rank.address, part, left, sent)


def choose(
    decoder: Decoder, ranks: list[PrefillRank], request: Request
) -> tuple[list[PrefillRank], PrefillRank | None]:
    """Return the ranks that have something for this one, and which of them sends the tail."""
    shards = [rank.shard for rank in ranks]
    layout = shards[0].layout if shards[0] is not None else None
    have = {(shard.tp, shard.pp): rank for shard, rank in zip(shards, ranks, strict=True) if shard is not None}
    if layout is None or any(shard is None or shard.layout != layout for shard in shards):
        raise PrefillRefused(
            f"{ranks[0].address} and {ranks[-1].address} describe different caches: name the ranks of one instance",
            op="handshake",
        )
    every = every_rank(layout)
    if len(have) != len(ranks) or set(have) != set(every):
        lacking = [f"TP {tp} PP {pp}" for tp, pp in every if (tp, pp) not in have]
        raise PrefillRefused(
            f"the prefill instance has TP {layout.tp} x PP {layout.pp} ranks and {len(ranks)} were named; "
            + (f"missing: {', '.join(lacking[:4])}" if lacking else "some of them twice"),
            op="handshake",
        )
    mine = Shard(decoder.shard.layout, tp=decoder.shard.tp, pp=decoder.shard.pp)
    sources, tail_of = [], None
    for key in every:
        rank, src = have[key], have[key].shard
        assert src is not None
        tail = request.tail and sends_tail(src, (mine.tp, mine.pp), request.seed)
        tail_of = rank if tail else tail_of
        if (
            tail
            or pair_plan(src, Shard(decoder.shard.layout, tp=decoder.shard.tp, pp=decoder.shard.pp), request.seed).jobs
        ):
            sources.append(rank)
    if len(sources) > decoder.max_sources:
        raise PrefillRefused(
            f"{len(sources)} prefill ranks have something for {mine}, and max_sources is {decoder.max_sources}",
            op="handshake",
            cure="raise max_sources",
        )
    return sources, tail_of


def _about(rank: PrefillRank) -> PrefillRefused:
    return PrefillRefused(f"it cannot be asked: {rank.error}", peer=str(rank.given), op="handshake")
