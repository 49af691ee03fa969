"""SGLang's disaggregation with the backend `fabric`: its own option, registry, managers, senders and receivers.

`make test-engines` runs it; SGLang 0.5.23 was tried. Pools are numpy arrays: PyPI has no SGLang for processors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang.version", reason="make test-engines runs it")

from sglang_pair import DIM, HEADS, LIMIT, PAGE, PAGES, Pool, free_port, manager, wait, without_pictures

without_pictures()

from fabric_kvcache.sglang import register  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns of kernels that need a GPU
FAILED, READY, DONE = 0, 2, 4  # of SGLang's KVPoll
SOURCE, TARGET = np.array([5, 6, 9, 30, 2], np.int32), np.array([1, 2, 3, 20, 11], np.int32)


class World:
    """A bootstrap server, and managers that find each other by it."""

    def __init__(self) -> None:
        from sglang.srt.disaggregation.utils import (  # type: ignore[import-not-found]
            KVClassType,
            TransferBackend,
            get_kv_class,
        )
        from sglang.srt.runtime_context import get_context, get_parallel  # type: ignore[import-not-found]

        self.managers: list[Any] = []
        self._stack = contextlib.ExitStack()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._stack.enter_context(
            get_context().override_server_args(
                disaggregation_bootstrap_port=port,
                host="127.0.0.1",
                disaggregation_transfer_backend="fabric",
            )
        )
        one = {f"attn_{kind}_size": 1 for kind in ("tp", "cp", "dp", "dcp")}
        first = {f"attn_{kind}_rank": 0 for kind in ("tp", "cp", "dp", "dcp")}
        self._stack.enter_context(get_parallel().override(**one, **first, pp_group=None))
        kind = TransferBackend("fabric")
        server = get_kv_class(kind, KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
        self._stack.callback(server.close)
        self.sender, self.receiver = (get_kv_class(kind, c) for c in (KVClassType.SENDER, KVClassType.RECEIVER))

    def make(self, mode: str, pool: Pool, **more: Any) -> Any:
        self.managers.append(manager(mode, pool, **more))
        return self.managers[-1]

    def receive(self, decode: Any, room: int, state: Any = ()) -> Any:
        """A receiver that has told the prefill side where its pages are."""
        end = time.monotonic() + LIMIT
        while not decode.try_ensure_parallel_info(self.address):
            assert time.monotonic() < end
        receiver = self.receiver(decode, self.address, room)
        receiver.init(0)
        receiver.send_metadata(TARGET, aux_index=6, state_indices=list(state))
        return receiver

    def send(self, prefill: Any, room: int) -> Any:
        """A sender that knows where to."""
        sender = self.sender(prefill, self.address, room)
        sender.init(len(SOURCE), 3)
        return sender

    def close(self) -> None:
        for made in self.managers:
            made.teardown()
        self._stack.close()


@pytest.fixture(scope="session")
def registered() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry  # type: ignore[import-not-found]

    register()
    register()
    HookRegistry.apply_hooks()  # SGLang does so when all its plug-ins were called


@pytest.fixture
def world(registered: None) -> Iterator[World]:
    made = World()
    yield made
    made.close()


def check(source: list[Any], target: list[Any], before: list[Any]) -> None:
    """The pages that were sent are there, and no other byte has changed."""
    for a, b, old in zip(source, target, before, strict=True):
        wanted = old.copy()
        wanted[TARGET] = a[SOURCE]
        assert np.array_equal(b, wanted)


def heads_of(pool: Pool, heads: slice) -> list[Any]:
    """Some heads of a pool, as a pool of so many."""
    return [x.reshape(PAGES, PAGE, HEADS, 2 * DIM)[:, :, heads].reshape(PAGES, PAGE, -1) for x in pool.kv]


@pytest.mark.parametrize("mla", [False, True])
def test_pages_go_chunk_by_chunk(world: World, mla: bool) -> None:
    ours, theirs = Pool(1, HEADS, mla), Pool(2, HEADS, mla)
    before = [x.copy() for x in theirs.kv]
    prefill, decode = world.make("prefill", ours, mla=mla), world.make("decode", theirs, mla=mla)
    assert prefill.engine.engine.settings.heartbeat == 5.0
    sender = world.send(prefill, 7)
    receiver = world.receive(decode, 7)
    wait(sender.poll, READY, "sender")
    sender.send(SOURCE[:2])
    assert receiver.poll() == READY
    sender.send(SOURCE[2:])
    wait(sender.poll, DONE, "sender")
    wait(receiver.poll, DONE, "receiver")
    check(ours.kv, theirs.kv, before)
    assert np.array_equal(theirs.aux[6], ours.aux[3])
    assert sender.get_transfer_metric().transfer_total_bytes == len(SOURCE) * sum(x.nbytes // PAGES for x in ours.kv)


def test_one_prefill_rank_to_two_decode_ranks(world: World) -> None:
    ours, pools = Pool(1, HEADS), [Pool(2 + r, HEADS // 2) for r in range(2)]
    before = [[x.copy() for x in pool.kv] for pool in pools]
    prefill = world.make("prefill", ours)
    decodes = [world.make("decode", pools[r], tp=2, rank=r) for r in range(2)]
    sender = world.send(prefill, 8)
    receivers = [world.receive(decode, 8) for decode in decodes]
    wait(sender.poll, READY, "sender")
    sender.send(SOURCE)
    wait(sender.poll, DONE, "sender")
    for r, receiver in enumerate(receivers):
        wait(receiver.poll, DONE, f"receiver {r}")
        check(heads_of(ours, slice(2 * r, 2 * r + 2)), pools[r].kv, before[r])


def test_two_prefill_ranks_to_one_decode_rank(world: World) -> None:
    pools, theirs = [Pool(1 + r, HEADS // 2) for r in range(2)], Pool(5, HEADS)
    before = theirs.kv[0].copy()
    prefills = [world.make("prefill", pools[r], tp=2, rank=r) for r in range(2)]
    decode = world.make("decode", theirs)
    senders = [world.send(prefill, 9) for prefill in prefills]
    receiver = world.receive(decode, 9)
    for sender in senders:
        wait(sender.poll, READY, "sender")
        sender.send(SOURCE)
    wait(receiver.poll, DONE, "receiver")
    for r in range(2):
        for a, b in zip(pools[r].kv, heads_of(theirs, slice(2 * r, 2 * r + 2)), strict=True):
            assert np.array_equal(b[TARGET], a[SOURCE])
    others = np.setdiff1d(np.arange(PAGES), TARGET)
    assert np.array_equal(theirs.kv[0][others], before[others])


def test_pages_of_a_sliding_window_go_along(world: World) -> None:
    """SGLang's state pools: other pages than those of the layers that see everything."""
    ours, theirs = Pool(1, HEADS, window=True), Pool(2, HEADS, window=True)
    before = [x.copy() for x in theirs.window]
    prefill, decode = world.make("prefill", ours), world.make("decode", theirs)
    sender = world.send(prefill, 13)
    receiver = world.receive(decode, 13, [[7, 31]])
    wait(sender.poll, READY, "sender")
    sender.send(SOURCE, [[4, 39]])
    wait(sender.poll, DONE, "sender")
    wait(receiver.poll, DONE, "receiver")
    for a, b, old in zip(ours.window, theirs.window, before, strict=True):
        old[[7, 31]] = a[[4, 39]]
        assert np.array_equal(b, old)


def test_an_abort_is_answered_before_pages_are_used_again(world: World) -> None:
    theirs = Pool(2, HEADS)
    before = theirs.kv[0].copy()
    prefill, decode = world.make("prefill", Pool(1, HEADS)), world.make("decode", theirs)
    sender = world.send(prefill, 10)
    receiver = world.receive(decode, 10)
    wait(sender.poll, READY, "sender")
    receiver.abort()
    wait(sender.poll, FAILED, "sender")
    assert decode.enable_deferred_decode_kv_release
    wait(lambda: decode.is_abort_release_safe(10, 1) or None, True, "the answer")
    sender.send(SOURCE)
    with pytest.raises(Exception, match="Aborted by AbortReq"):
        receiver.failure_exception()
    assert np.array_equal(theirs.kv[0], before)


def test_a_decoder_that_is_gone_fails_its_request_only(world: World) -> None:
    ours, theirs = Pool(1, HEADS), Pool(3, HEADS)
    before = [x.copy() for x in theirs.kv]
    prefill = world.make("prefill", ours)
    gone, other = world.make("decode", Pool(2, HEADS)), world.make("decode", theirs)
    senders = [world.send(prefill, room) for room in (11, 12)]
    world.receive(gone, 11)
    receiver = world.receive(other, 12)
    for sender in senders:
        wait(sender.poll, READY, "sender")
    gone.engine.close()
    senders[0].send(SOURCE)
    wait(senders[0].poll, FAILED, "sender")
    senders[1].send(SOURCE)
    wait(receiver.poll, DONE, "receiver")
    check(ours.kv, theirs.kv, before)


def test_the_option_is_sglangs_own(registered: None) -> None:
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES  # type: ignore[import-not-found]
    from sglang.srt.disaggregation.utils import (  # type: ignore[import-not-found]
        KVClassType,
        TransferBackend,
        get_kv_class,
    )

    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("fabric") == 1
    assert [kind.value for kind in TransferBackend].count("fabric") == 1
    assert get_kv_class(TransferBackend.FABRIC, KVClassType.MANAGER).__name__ == "FabricKVManager"
    assert get_kv_class(TransferBackend.FAKE, KVClassType.MANAGER).__name__ == "FakeKVManager"  # the others stay
