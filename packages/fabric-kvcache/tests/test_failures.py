"""What goes wrong for real: stopped, silent and restarted processes, NICs that fail, aborts at any moment.

Every request ends by its deadline with a reason; pages come back when nothing can land in them any more, not earlier;
no page of a request ever holds a byte of another one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import prefill_peer as peer
import pytest
from test_transfer import LAYOUT, check, prompt

from fabric_core import Cancelled, DeadlineExceeded, FabricError, NetAddr, PeerLost, StaleHandle, TransferEngine
from fabric_kvcache import Decoder, KvDamaged, KvLayout, PendingKv, Prefiller, PrefillRefused, asking
from fabric_kvcache.protocol import Ask, Hello
from fabric_kvcache.request import asks

if TYPE_CHECKING:
    from peer_process import Peers

DECODER = Path(__file__).parent / "decoder_peer.py"
SLACK = 30.0  # seconds: how late a busy machine may be


def decoding(engine: TransferEngine, pages: int = 24, **how: Any) -> Decoder:
    return Decoder(engine, LAYOUT, pages=pages, tail_bytes=peer.TAIL_BYTES, seed=3, **how)


def test_a_prefiller_that_stands_still_is_lost_and_its_pages_wait_for_it(peers: Peers) -> None:
    """SIGSTOP in the middle, and back. A stopped process may be in the middle of a copy: until it has answered, the
    pages stay in quarantine, and other requests do not get them. Afterwards it serves again."""
    prefiller = peers(shared=False)
    with TransferEngine.open(heartbeat=0.5) as engine, decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60, mode="stop"), timeout=60)
        prefiller.hear("half")
        os.kill(prefiller.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerLost, match=str(prefiller.address)):
            pending.wait()
        assert time.monotonic() - began < 2 * 0.5 + SLACK
        assert not pending.wait_settled(1.0)
        assert decoder.pool.quarantined == 8
        os.kill(prefiller.process.pid, signal.SIGCONT)
        assert pending.wait_settled(20)
        assert decoder.pool.free == 24
        ids = prompt(150, seed=1)
        with decoder.submit(prefiller.address, ids, timeout=60).wait() as kv:
            check(kv, LAYOUT, ids)


def test_a_prefiller_that_does_not_confirm_loses_its_right_to_write(peers: Peers) -> None:
    """It lives, and hears no Cancel. What it writes later is refused, and the pages belong to another request."""
    prefiller = peers(shared=False)
    with TransferEngine.open() as engine, decoding(engine, confirm_timeout=0.5) as decoder:
        deaf = decoder.submit(prefiller.address, prompt(60, mode="deaf"), timeout=60)
        prefiller.hear("held")
        deaf.cancel()
        with pytest.raises(Cancelled):
            deaf.wait()
        assert deaf.wait_settled(20)
        # All pages belong to another request now, which is served by somebody else.
        ids = prompt(24 * 8, seed=5)
        other = peers()
        with decoder.submit(other.address, ids, timeout=60).wait() as kv:
            prefiller.tell()
            assert "no longer exists" in prefiller.hear("refused")
            check(kv, LAYOUT, ids)


def test_a_restarted_prefiller_is_found_under_its_name(peers: Peers, engine: TransferEngine) -> None:
    name = f"again-{os.getpid()}"
    first = peers(shared=False, name=name)
    ids = prompt(30)
    with decoding(engine) as decoder:
        by_name = NetAddr.parse(f"local:{name}")
        with decoder.submit(by_name, ids, timeout=60).wait() as kv:
            check(kv, LAYOUT, ids)
        first.kill()
        peers(shared=False, name=name)
        end = time.monotonic() + 20
        while True:  # what is sent before its loss is noticed ends with PeerLost
            try:
                with decoder.submit(by_name, ids, timeout=60).wait() as kv:
                    check(kv, LAYOUT, ids)
                break
            except PeerLost:
                assert time.monotonic() < end
        assert decoder.pool.free == 24 or decoder.pool.quarantined == 0


def test_a_killed_decoder_ends_its_jobs_and_its_next_life_is_served(peers: Peers) -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=4, page_tokens=4)
    kv = np.ones((1, 8, 4), np.float32)
    name = f"decoder-{os.getpid()}"
    with TransferEngine.open() as engine, Prefiller(engine, layout, pages=8, tail_bytes=4) as prefiller:
        first = peers.run(DECODER, name, str(engine.address))
        job = prefiller.next(60)
        job.push_layer(0, 0, kv, kv)
        first.kill()
        second = peers.run(DECODER, name, str(engine.address))
        with prefiller.next(60) as again:
            for layer in again.layers:
                again.push_layer(layer, 0, kv, kv)
            again.push_tail(b"tail")
        second.hear("received 8 tokens")
        with pytest.raises((PeerLost, PrefillRefused, Cancelled), match=name):
            job.push_layer(1, 0, kv, kv)
        job.abandon("over")
        assert prefiller.pool.free == 8
        assert len(prefiller._sessions) == 1


# ---- both sides in this process


LAYERS, PAGES = 4, 32
BIG = KvLayout(layers=LAYERS, kv_heads=1, head_dim=64, page_tokens=64)  # 32 KiB a page, 4 MiB a request
TOKENS = PAGES * BIG.page_tokens


class Pushing(threading.Thread):
    """Serves requests whose every byte is the same: the first token."""

    def __init__(self, prefiller: Prefiller) -> None:
        super().__init__()
        self.prefiller = prefiller
        self.ends: list[str] = []
        self.over = threading.Event()

    def finished(self, count: int) -> None:
        """Wait until so many requests were served."""
        self._until(lambda: self.ends.count("finished") >= count)

    def ended(self, count: int) -> None:
        """Wait until so many jobs have ended, well or badly."""
        self._until(lambda: len(self.ends) >= count)

    def _until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not what():
            assert time.monotonic() < end
            time.sleep(0.002)

    def run(self) -> None:
        while not self.over.is_set():
            try:
                job = self.prefiller.next(0.05)
            except TimeoutError:
                continue
            try:
                with job:
                    pool = self.prefiller.pool.octets.reshape(LAYERS, -1, BIG.page_bytes)
                    pool[:, job.tables[0]] = int(job.tokens[0])
                    for layer in job.layers:
                        job.push(layer, 0, job.total)
                    job.push_tail(bytes([int(job.tokens[0])]) * 8)
                self.ends.append("finished")
            except FabricError as error:
                self.ends.append(type(error).__name__)


@contextmanager
def pair(pages: int, *, faults: str = "", own: str = "", **how: Any) -> Iterator[tuple[Decoder, Pushing]]:
    with (
        TransferEngine.open(faults=faults or None) as a,
        TransferEngine.open(faults=own or None) as b,
        Prefiller(a, BIG, pages=3 * PAGES, tail_bytes=8) as prefiller,
        Decoder(b, BIG, pages=pages, tail_bytes=8, seed=5, **how) as decoder,
    ):
        pushing = Pushing(prefiller)
        pushing.start()
        try:
            yield decoder, pushing
        finally:
            pushing.over.set()
            pushing.join(30)


def ask(decoder: Decoder, pushing: Pushing, tag: int, tokens: int = TOKENS, timeout: float = 60.0) -> PendingKv:
    return decoder.submit(pushing.prefiller.engine.address, [tag] * tokens, timeout=timeout)


def octets(decoder: Decoder, pages: Any) -> Any:
    return decoder.pool.octets.reshape(LAYERS, -1, BIG.page_bytes)[:, pages]


@pytest.mark.parametrize("faults", ["", "reorder,delay=1ms,partial=0.3"], ids=["as-it-is", "reordered"])
def test_no_page_holds_a_byte_of_an_aborted_request(faults: str) -> None:
    """Requests are aborted at random moments of their transfer. Once settled, their pages do not change any more, and
    the next request that gets them has all of its bytes, and only those."""
    rng = np.random.default_rng(7)
    with pair(PAGES + 4, faults=faults, verify=False) as (decoder, pushing):
        number = aborted = 0
        while aborted < 6:
            number += 1
            assert number < 100
            a, b = 2 * number, 2 * number + 1
            first = ask(decoder, pushing, a)
            point = int(rng.integers(0, LAYERS * PAGES))
            with suppress(StaleHandle):  # it has ended in this moment
                while not first.done and decoder.engine.imm_count(first._imm) < point:
                    pass
            first.cancel()
            try:
                first.wait().release()
            except Cancelled:
                aborted += 1
            assert first.wait_settled(20)
            pages = first.request.tables[0]
            decoder.pool.octets.reshape(LAYERS, -1, BIG.page_bytes)[:, pages] = 0
            small = decoder.submit(pushing.prefiller.engine.address, [255] * 64, timeout=60)  # time passes
            small.wait().release()
            kept = np.setdiff1d(pages, small.request.tables[0])
            assert not octets(decoder, kept).any(), f"round {number}: written after the end was confirmed"
            with ask(decoder, pushing, b).wait() as kv:
                assert (octets(decoder, kv.pages) == b).all(), f"round {number}: a byte of another request"
                assert kv.tail == bytes([b]) * 8
        assert decoder.pool.free == PAGES + 4


@pytest.mark.parametrize(
    ("faults", "harmless"),
    [
        ("reorder,delay=2ms,partial=0.3,refuse=0.05:1ms,rnr=0.2", True),
        ("fail=0.01:EIO,seed=3", False),
        ("fail_late=0.01,reorder,delay=1ms,seed=4", False),
        ("drop=0.01,seed=5", False),
    ],
    ids=["late", "lost", "done-and-failed", "never-completed"],
)
def test_under_faults_a_request_ends_with_its_bytes_or_with_a_reason(faults: str, harmless: bool) -> None:
    """Lost and late immediates: the decoder starts with all of its bytes or not at all, and no page stays away."""
    good = 0
    with pair(2 * PAGES, faults=faults, own="reorder,delay=1ms") as (decoder, pushing):
        for number in range(8):
            tag = number + 1
            pending = ask(decoder, pushing, tag, timeout=3.0 if "drop" in faults else 60.0)
            try:
                with pending.wait() as kv:
                    assert (octets(decoder, kv.pages) == tag).all()
                    good += 1
            except (PrefillRefused, DeadlineExceeded, PeerLost, KvDamaged):
                assert not harmless
            assert pending.wait_settled(20)
        if harmless:
            assert good == 8
        elif "drop" not in faults:  # a write that fails late has arrived: the prefiller sees it, the decoder need not
            pushing.ended(8)
            assert pushing.ends.count("finished") < 8
        assert decoder.pool.free == 2 * PAGES
        assert decoder.in_flight == 0


def test_immediates_that_come_after_the_end_count_for_nobody() -> None:
    """They are strays, and the next request does not hear of them."""
    with pair(2 * PAGES) as (decoder, pushing):
        engine = pushing.prefiller.engine
        stale = ask(decoder, pushing, 2)
        stale.wait().release()
        session = next(iter(pushing.prefiller._sessions.values()))
        before = decoder.engine.stats()["imm_stray"]
        for imm in (stale._imm, stale._seal_imm):
            engine.submit_barrier(None, None, imm, [session.slots]).wait(30)
        with ask(decoder, pushing, 3).wait() as kv:
            assert (octets(decoder, kv.pages) == 3).all()
        assert decoder.engine.stats()["imm_stray"] == before + 2


def test_a_cancel_that_overtakes_its_request_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have no order. The request comes after the end of it was confirmed: it is not served."""
    with pair(2 * PAGES) as (decoder, pushing):
        ask(decoder, pushing, 1).wait().release()
        pushing.finished(1)
        rank = next(iter(decoder.ranks._known.values()))
        held: list[Any] = []
        monkeypatch.setattr(asking, "send", lambda *args, **how: held.append((args, how)))
        pending = ask(decoder, pushing, 2)
        pending.cancel()
        assert pending.wait_settled(20), "the prefiller has confirmed a request that it never saw"
        monkeypatch.undo()
        for args, how in held:
            asking.send(*args, **how)
        with ask(decoder, pushing, 3).wait() as kv:
            assert (octets(decoder, kv.pages) == 3).all()
        assert rank.error is None
        pushing.finished(2)
        assert pushing.ends == ["finished", "finished"]


def test_the_old_self_of_a_decoder_ends_at_the_first_word_of_the_new_one() -> None:
    """Before its loss is noticed: the same place, another incarnation."""
    with pair(2 * PAGES) as (decoder, pushing):
        ask(decoder, pushing, 1).wait().release()
        prefiller = pushing.prefiller
        (session,) = prefiller._sessions.values()
        address = decoder.engine.address
        new_life = NetAddr(address.backend, tuple(d.partition("#")[0] + "#abc" for d in address.domains))
        shard = decoder.shard
        hello = Hello(
            1, 2, new_life.to_bytes(), shard.layout, 0, 0, shard.pool_pages, (),
            session.desc.to_bytes(), session.slots.to_bytes(), 8, "",
        )  # fmt: skip
        prefiller._greet(hello)
        assert session.id not in prefiller._sessions
        with ask(decoder, pushing, 3).wait() as kv:  # greeted anew, once; and that ends the other one
            assert (octets(decoder, kv.pages) == 3).all()
        assert len(prefiller._sessions) == 1


def test_unfinished_requests_do_not_pile_up_at_the_prefiller() -> None:
    """C12: parts of requests whose rest never comes are bounded, and refused beyond."""
    with pair(2 * PAGES) as (decoder, pushing):
        ask(decoder, pushing, 1).wait().release()
        prefiller = pushing.prefiller
        (session,) = prefiller._sessions.values()
        assert session.assemblies == {}
        pending = ask(decoder, pushing, 2)
        head = next(iter(asks(_head(pending, decoder, session.id), bytes(40_000), 4096)))
        for epoch in range(1000, 1000 + prefiller.max_waiting + 10):
            prefiller._ask(msgspec.structs.replace(head, epoch=epoch))
        assert len(session.assemblies) == prefiller.max_waiting
        pending.wait().release()


def _head(pending: PendingKv, decoder: Decoder, session: int) -> Any:
    return Ask(
        session, 999, "x", decoder.engine.address.to_bytes(), 1, 0, 9_999, True, (1,), False, 0, 0,
        pending._imm, pending._seal_imm, 60_000, 0, bytes(4),
    )  # fmt: skip
