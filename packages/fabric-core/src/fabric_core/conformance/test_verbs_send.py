"""Messages into pools of receive buffers."""

from __future__ import annotations

import time

import pytest

from fabric_core import BadRange, NetAddr, TransferEngine, TransferError
from fabric_core.conformance.kit import DEADLINE, Calls, Engines, Kit, Pair, fails, finish, pattern, settle
from fabric_core.conformance.remote import Remote, Remotes


def numbered(sender: int, count: int, size: int) -> list[bytes]:
    return [sender.to_bytes(2, "little") + k.to_bytes(4, "little") + pattern(k, size) for k in range(count)]


def test_a_message_arrives_as_it_was_sent(wide: Pair) -> None:
    """C1: once here, once there."""
    calls, done = Calls(), Calls()
    wide.b.submit_recvs(4096, 4, calls)
    sent = wide.a.submit_send(wide.b.address, pattern(1, 1000), done)
    finish([sent])
    assert calls.wait() == [pattern(1, 1000)]
    assert done.wait() == [sent]


def test_a_small_pool_rotates_under_many_messages(engines: Engines, nics: int, kit: Kit) -> None:
    """C1, C2: two buffers take any number of messages of several senders, each exactly once, in any order."""
    receiver, senders = engines.open(nics=nics), [engines.open(nics=nics) for _ in range(3)]
    calls, count = Calls(), kit.scaled(20, 100, 2000)
    receiver.submit_recvs(1024, 2, calls)
    messages = [numbered(k, count, 500) for k in range(len(senders))]
    sends = [
        sender.submit_send(receiver.address, message)
        for row in zip(*messages, strict=True)
        for sender, message in zip(senders, row, strict=True)
    ]
    finish(sends, timeout=60)
    calls.wait(len(sends))
    assert sorted(calls.firsts) == sorted(message for one in messages for message in one)


def test_an_empty_message_is_a_message(pair: Pair) -> None:
    """C1: no bytes, still one call."""
    calls = Calls()
    pair.b.submit_recvs(64, 2, calls)
    finish([pair.a.submit_send(pair.b.address, b"")])
    assert calls.wait() == [b""]


def test_an_empty_buffer_takes_an_empty_message(pair: Pair) -> None:
    """C1: and refuses any other."""
    calls = Calls()
    pair.b.submit_recvs(0, 1, calls)
    assert fails(pair.a.submit_send(pair.b.address, b"x"), TransferError, within=10).code == "EMSGSIZE"
    finish([pair.a.submit_send(pair.b.address, b"")])
    assert calls.wait() == [b""]


def test_the_longest_message_arrives_and_one_byte_more_is_refused(pair: Pair) -> None:
    """C6: max_message is what can be sent; the error names both numbers."""
    size = pair.a.max_message
    assert size >= 1024
    calls = Calls()
    pair.b.submit_recvs(size, 2, calls)
    finish([pair.a.submit_send(pair.b.address, pattern(2, size))])
    assert calls.wait() == [pattern(2, size)]
    with pytest.raises(BadRange) as refused:
        pair.a.submit_send(pair.b.address, bytes(size + 1))
    assert str(size) in str(refused.value)
    assert str(size + 1) in str(refused.value)


def test_a_message_longer_than_the_posted_buffer_fails_at_its_sender_alone(pair: Pair) -> None:
    """C1: the sender is told EMSGSIZE, the receiver sees nothing of it, and both go on."""
    calls = Calls()
    pair.b.submit_recvs(100, 4, calls)
    error = fails(pair.a.submit_send(pair.b.address, bytes(101)), TransferError, within=10)
    assert error.code == "EMSGSIZE"
    finish(pair.a.submit_send(pair.b.address, pattern(k, 100)) for k in range(10))
    calls.wait(10)
    assert sorted(calls.firsts) == sorted(pattern(k, 100) for k in range(10))


def test_a_message_sent_before_the_receives_waits_for_them(pair: Pair) -> None:
    """C8: a receiver that is late is backpressure, not an error."""
    sends = [pair.a.submit_send(pair.b.address, pattern(k, 64), timeout=20) for k in range(5)]
    calls = Calls()
    pair.b.submit_recvs(64, 2, calls)
    finish(sends)
    calls.wait(5)
    assert sorted(calls.firsts) == sorted(pattern(k, 64) for k in range(5))


def test_the_message_is_copied_at_submit(pair: Pair) -> None:
    """C7: the caller may reuse its buffer at once."""
    calls, buffer = Calls(), bytearray(pattern(3, 256))
    sent = pair.a.submit_send(pair.b.address, buffer)
    buffer[:] = bytes(256)
    pair.b.submit_recvs(256, 1, calls)
    finish([sent])
    assert calls.wait() == [pattern(3, 256)]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"])
def test_anything_like_bytes_can_be_sent(pair: Pair, make: type) -> None:
    """C6: the buffer protocol is enough."""
    calls = Calls()
    pair.b.submit_recvs(64, 1, calls)
    finish([pair.a.submit_send(pair.b.address, make(b"hello"))])
    assert calls.wait() == [b"hello"]


def test_a_closed_pool_takes_nothing_more_in_silence(engines: Engines, pair: Pair) -> None:
    """C1: its sender is told by the deadline; or, where a NIC cannot take a buffer back, the receiver is told."""
    calls = Calls()
    pool = pair.b.submit_recvs(64, 2, calls)
    finish([pair.a.submit_send(pair.b.address, b"before")])
    calls.wait(1)
    pool.close()
    pool.close()  # once more changes nothing
    late = pair.a.submit_send(pair.b.address, b"after", timeout=0.3)
    if settle([late]) == ["done"]:
        engines.errors(pair.b).wait(1, timeout=5)
    assert calls.firsts == [b"before"]


def test_a_new_pool_takes_over_from_a_closed_one(pair: Pair) -> None:
    """C1: messages go to whoever receives now."""
    old, new = Calls(), Calls()
    pool = pair.b.submit_recvs(64, 2, old)
    finish([pair.a.submit_send(pair.b.address, b"one")])
    old.wait()
    pool.close()
    pair.b.submit_recvs(64, 2, new)
    finish([pair.a.submit_send(pair.b.address, b"two")])
    assert new.wait() == [b"two"]
    assert old.firsts == [b"one"]


def test_two_pools_share_what_arrives(pair: Pair) -> None:
    """C1: each message goes to exactly one of them."""
    one, two = Calls(), Calls()
    pair.b.submit_recvs(64, 2, one)
    pair.b.submit_recvs(64, 2, two)
    finish(pair.a.submit_send(pair.b.address, bytes([k])) for k in range(20))
    end = time.monotonic() + DEADLINE  # taken by a buffer is told to the sender; the callback may come later
    while len(one.firsts) + len(two.firsts) < 20 and time.monotonic() < end:
        time.sleep(0.001)
    pair.b.close()  # after it no callback can come
    assert sorted(one.firsts + two.firsts) == [bytes([k]) for k in range(20)]


def test_an_engine_can_send_to_itself(engine: TransferEngine) -> None:
    """C1: a peer like any other."""
    calls = Calls()
    engine.submit_recvs(64, 2, calls)
    finish([engine.submit_send(engine.address, b"me")])
    assert calls.wait() == [b"me"]


def test_messages_go_both_ways_between_processes(engine: TransferEngine, remote: Remote) -> None:
    """C11: the receiver may answer the sender whom it never contacted."""
    pool, calls = remote.do("recvs", length=4096, count=4), Calls()
    engine.submit_recvs(4096, 4, calls)
    finish([engine.submit_send(remote.address, pattern(4, 4096))])
    assert remote.messages(pool, 1) == [pattern(4, 4096)]
    remote.ends_well(remote.do("send", to=str(engine.address), seed=5, nbytes=77, timeout=None))
    assert calls.wait() == [pattern(5, 77)]


def test_many_processes_send_to_one_pool(engine: TransferEngine, remotes: Remotes, kit: Kit) -> None:
    """C1, C2: nothing is lost or doubled between three senders."""
    senders, calls, each = [remotes.start() for _ in range(3)], Calls(), kit.scaled(10, 30, 300)
    engine.submit_recvs(256, 3, calls)
    started = [
        (sender, sender.do("send", to=str(engine.address), seed=1000 * k + n, nbytes=200, timeout=None))
        for n in range(each)
        for k, sender in enumerate(senders)
    ]
    for sender, number in started:
        sender.ends_well(number)
    calls.wait(3 * each)
    assert sorted(calls.firsts) == sorted(pattern(1000 * k + n, 200) for n in range(each) for k in range(3))


def test_a_message_handed_to_the_callback_is_the_callers_own(pair: Pair) -> None:
    """C7: it does not change when its buffer is used again."""
    calls = Calls()
    pair.b.submit_recvs(64, 1, calls)
    finish(pair.a.submit_send(pair.b.address, bytes([k]) * 64) for k in range(5))
    calls.wait(5)
    assert all(type(message) is bytes for message in calls.firsts)
    assert sorted(message[0] for message in calls.firsts) == [0, 1, 2, 3, 4]


def test_an_address_survives_the_trip_over_the_wire(engine: TransferEngine, remote: Remote) -> None:
    """C11: a receiver bootstrapped with bytes can write back to whoever sent them."""
    pool = remote.do("recvs", length=4096, count=1)
    finish([engine.submit_send(remote.address, engine.address.to_bytes())])
    (message,) = remote.messages(pool, 1)
    assert NetAddr.from_bytes(message) == engine.address
