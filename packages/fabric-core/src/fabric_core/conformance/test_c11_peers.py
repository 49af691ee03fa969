"""C11: peers come and go. First contact connects, loss is noticed and named, a restarted peer is a new one."""

from __future__ import annotations

import time

import pytest

from fabric_core import DeadlineExceeded, FabricError, MrDesc, NetAddr, PeerLost, PeerRestarted
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, fails, finish, names, pattern, settle
from fabric_core.conformance.remote import Remote, RemoteRaised, Remotes
from fabric_core.operations import Operation


def test_first_contact_needs_no_ceremony(engines: Engines, remote: Remote) -> None:
    """C11: an address is enough; the peer did not hear of us before."""
    engine = engines.open()
    pool = remote.do("recvs", length=64, count=2)
    finish([engine.submit_send(remote.address, pattern(1, 64))])
    assert remote.messages(pool, 1) == [pattern(1, 64)]


def test_a_name_without_an_incarnation_means_whoever_is_there(
    engines: Engines, remotes: Remotes, kit: Kit, free_name: str
) -> None:
    """C11: how two processes find each other before they exchanged anything."""
    engine, remote = engines.open(), remotes.start(name=free_name)
    pool = remote.do("recvs", length=64, count=2)
    finish([engine.submit_send(NetAddr.parse(f"{kit.backend}:{free_name}"), b"who is there?")])
    assert remote.messages(pool, 1) == [b"who is there?"]


def test_what_is_in_flight_to_a_killed_peer_fails_at_once_and_names_it(
    engines: Engines, remotes: Remotes, kit: Kit, nics: int
) -> None:
    """C11, C1: messages that wait for a buffer fail with PeerLost, long before their own deadline."""
    engine, doomed, good = engines.open(nics=nics), remotes.start(nics=nics), remotes.start(nics=nics)
    calls = Calls()
    good_pool = good.do("recvs", length=64, count=4)
    stuck = [engine.submit_send(doomed.address, b"nobody receives", calls, timeout=60) for _ in range(10)]
    finish([engine.submit_send(good.address, b"before")])
    doomed.kill()
    begin = time.monotonic()
    for send in stuck:
        assert names(fails(send, PeerLost, within=kit.slack), doomed.address)
    assert time.monotonic() - begin <= kit.slack
    finish([engine.submit_send(good.address, b"after")])
    assert sorted(good.messages(good_pool, 2)) == [b"after", b"before"]
    calls.wait(10)


def test_an_expectation_that_names_its_peers_fails_when_one_is_killed(
    engines: Engines, remotes: Remotes, kit: Kit
) -> None:
    """C3, C11: at once and with the culprit's name; expectations on other peers wait on."""
    engine, doomed, good = engines.open(), remotes.start(), remotes.start()
    imms = [engine.alloc_imm() for _ in range(3)]
    both = engine.expect_imm_count(imms[0], 2, timeout=60, peers=[good.address, doomed.address])
    one = engine.expect_imm_count(imms[1], 1, timeout=60, peers=[doomed.address])
    other = engine.expect_imm_count(imms[2], 1, timeout=60, peers=[good.address])
    memory = Memory(engine, 64)
    for remote in (doomed, good):  # they are connected and alive: one immediate of each
        remote.ends_well(remote.do("barrier", imm=imms[0] if remote is good else imms[1], descs=[memory.blob]))
    finish([one])
    one = engine.expect_imm_count(imms[1], 1, timeout=60, peers=[doomed.address])
    doomed.kill()
    for expectation in (both, one):
        assert names(fails(expectation, PeerLost, within=kit.slack), doomed.address)
    assert not other.done
    good.ends_well(good.do("barrier", imm=imms[2], descs=[memory.blob]))
    finish([other])
    assert engine.free_imm(imms[0]) == 1  # what the good peer had sent is not lost


def test_an_expectation_on_a_peer_that_is_dead_already_fails_too(engines: Engines, remote: Remote, kit: Kit) -> None:
    """C3, C11: whether or not we ever had contact."""
    engine = engines.open(connect_timeout=1.0)
    remote.kill()
    expectation = engine.expect_imm_count(engine.alloc_imm(), 1, timeout=60, peers=[remote.address])
    assert names(fails(expectation, PeerLost, within=1.0 + kit.slack), remote.address)


def test_a_peer_that_closed_its_engine_is_lost_too(engines: Engines, remotes: Remotes, kit: Kit) -> None:
    """C11: an orderly end is an end."""
    engine, leaving = engines.open(), remotes.start()
    stuck = engine.submit_send(leaving.address, b"nobody receives", timeout=60)
    expectation = engine.expect_imm_count(engine.alloc_imm(), 1, timeout=60, peers=[leaving.address])
    target, source = leaving.memory(64), Memory(engine, 64)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    leaving.do("close", timeout=5.0)
    waiting: list[Operation] = [stuck, expectation]
    for operation in waiting:
        assert names(fails(operation, PeerLost, within=kit.slack), leaving.address)


def test_writes_to_a_dead_peer_fail_and_never_hang(engines: Engines, remotes: Remotes, kit: Kit) -> None:
    """C11: also those submitted long after its death, one after the other."""
    engine, doomed = engines.open(connect_timeout=1.0), remotes.start()
    target, source = doomed.memory(1 << 20), Memory(engine, 1 << 20)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    doomed.kill()
    for _ in range(3):
        late = engine.submit_single_write(1 << 20, None, (source.handle, 0), (target.desc, 0))
        assert names(fails(late, PeerLost, within=1.5 + kit.slack), doomed.address)


@pytest.mark.parametrize("what", ["send", "expectation"])
def test_a_peer_that_stands_still_is_noticed(engines: Engines, remotes: Remotes, kit: Kit, what: str) -> None:
    """C11, C3: by the heartbeat or by the operation's deadline, and in any case by name."""
    engine, still = engines.open(heartbeat=0.5), remotes.start(heartbeat=0.5)
    source, target = Memory(engine, 64), still.memory(64)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    still.stop()
    begin = time.monotonic()
    operation: Operation
    if what == "send":
        operation = engine.submit_send(still.address, b"are you there?", timeout=3.0)
    else:
        operation = engine.expect_imm_count(engine.alloc_imm(), 1, timeout=3.0, peers=[still.address])
    with pytest.raises((PeerLost, DeadlineExceeded)) as ended:
        operation.wait(3.1 + kit.slack)
    assert time.monotonic() - begin <= 3.1 + kit.slack
    assert names(ended.value, still.address), f"does not say who stood still: {ended.value}"
    still.cont()


def test_a_peer_that_was_given_up_can_be_reached_when_it_wakes_up(
    engines: Engines, remotes: Remotes, kit: Kit, nics: int
) -> None:
    """C11: what was lost is lost, and new operations make a new contact; nothing old arrives with them."""
    engine, sleeper = engines.open(nics=nics, heartbeat=0.3), remotes.start(nics=nics, heartbeat=0.3)
    source, target = Memory(engine, 4096, pattern(1, 4096)), sleeper.memory(4096)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    sleeper.stop()
    lost = engine.submit_send(sleeper.address, b"lost", timeout=3)
    assert settle([lost]) == ["failed"]
    sleeper.cont()
    pool, imm, end = sleeper.do("recvs", length=64, count=4), sleeper.alloc_imm(), time.monotonic() + 10
    while settle([engine.submit_send(sleeper.address, b"found", timeout=3)]) != ["done"]:
        assert time.monotonic() < end, "the peer cannot be reached any more"
    arrived = sleeper.expect(imm, 1)
    finish([engine.submit_single_write(4096, imm, (source.handle, 0), (target.desc, 0))])
    sleeper.ends_well(arrived)
    assert target.holds(pattern(1, 4096))
    assert sleeper.messages(pool, 1) == [b"found"]


def test_a_peer_that_stood_still_for_a_moment_is_not_lost(engines: Engines, remotes: Remotes) -> None:
    """C11: a pause shorter than the heartbeat's patience changes nothing."""
    engine, slow = engines.open(heartbeat=30), remotes.start(heartbeat=30)
    pool = slow.do("recvs", length=64, count=2)
    finish([engine.submit_send(slow.address, b"one")])
    slow.stop()
    waiting = engine.submit_send(slow.address, b"two")
    slow.cont()
    finish([waiting])
    assert sorted(slow.messages(pool, 2)) == [b"one", b"two"]


def test_the_old_address_of_a_restarted_peer_is_not_its_new_one(
    engines: Engines, remotes: Remotes, kit: Kit, free_name: str
) -> None:
    """C11: old addresses and descriptors are void, by name PeerRestarted; fresh ones work; so does the bare name."""
    engine = engines.open(connect_timeout=1.0)
    source = Memory(engine, 64, pattern(1, 64))
    first = remotes.start(name=free_name)
    old = first.memory(64)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (old.desc, 0))])
    first.kill()
    second = remotes.start(name=free_name)
    new = second.memory(64)
    assert second.address != first.address, "an address holds its incarnation"
    for _ in range(2):
        error = fails(
            engine.submit_single_write(64, None, (source.handle, 0), (old.desc, 0)), PeerLost, within=1.5 + kit.slack
        )
        assert names(error, first.address)
    fails(engine.submit_send(first.address, b"old"), PeerLost, within=1.5 + kit.slack)
    assert new.get() == bytes(64), "a write with an old descriptor landed in the new process"
    pool, imm = second.do("recvs", length=64, count=2), second.alloc_imm()
    arrived = second.expect(imm, 1)
    finish([engine.submit_single_write(64, imm, (source.handle, 0), (new.desc, 0))])
    second.ends_well(arrived)
    assert new.holds(pattern(1, 64))
    finish([engine.submit_send(second.address, b"fresh")])
    finish([engine.submit_send(NetAddr.parse(f"{kit.backend}:{free_name}"), b"bare")])
    assert sorted(second.messages(pool, 2)) == [b"bare", b"fresh"]


def test_whoever_never_met_the_first_incarnation_is_told_of_the_restart(
    engines: Engines, remotes: Remotes, kit: Kit, free_name: str
) -> None:
    """C11: PeerRestarted exactly: somebody answers, and it is not who the descriptor means."""
    first = remotes.start(name=free_name)
    old = first.memory(64)
    blob = old.desc.to_bytes()
    first.kill()
    remotes.start(name=free_name)
    engine = engines.open(connect_timeout=1.0)
    source = Memory(engine, 64)
    stale = engine.submit_single_write(64, None, (source.handle, 0), (MrDesc.from_bytes(blob), 0))
    error = fails(stale, PeerRestarted, within=1.5 + kit.slack)
    assert names(error, first.address)


def test_a_name_survives_the_restart_of_its_owner(engines: Engines, remotes: Remotes, kit: Kit, free_name: str) -> None:
    """C11: bootstrapping by name works again with each incarnation."""
    engine, bare = engines.open(connect_timeout=1.0), NetAddr.parse(f"{kit.backend}:{free_name}")
    for turn in range(3):
        remote = remotes.start(name=free_name)
        pool = remote.do("recvs", length=64, count=2)
        end = time.monotonic() + 10
        while True:  # the first attempt may still meet the corpse
            try:
                engine.submit_send(bare, bytes([turn])).wait(10)
                break
            except PeerLost:
                assert time.monotonic() < end
        assert remote.messages(pool, 1) == [bytes([turn])]
        remote.kill()


def test_a_name_can_be_had_once(engines: Engines, free_name: str) -> None:
    """C11: two living engines never share an address."""
    first = engines.open(name=free_name)
    try:
        second = engines.open(name=free_name)
    except FabricError:
        return
    assert first.address != second.address
    assert {str(first.address)}.isdisjoint(str(second.address).partition(":")[2].split(","))


def test_nobody_at_an_address_is_said_within_the_connect_timeout(engines: Engines, kit: Kit, free_name: str) -> None:
    """C11: PeerLost, with the address, in bounded time."""
    engine = engines.open(connect_timeout=1.0)
    nowhere = NetAddr.parse(f"{kit.backend}:{free_name}")
    error = fails(engine.submit_send(nowhere, b"hello?", timeout=30), PeerLost, within=1.1 + kit.slack)
    assert names(error, nowhere)


def test_an_address_of_another_backend_is_refused(engines: Engines) -> None:
    """C12: at once, not after a timeout."""
    engine = engines.open()
    with pytest.raises(FabricError):
        engine.submit_send(NetAddr.parse("quite-another-backend:x"), b"").wait(5)


def test_many_peers_are_met_and_lost(engines: Engines, kit: Kit) -> None:
    """C11: engines of this process come and go while one stays."""
    stays, calls = engines.open(), Calls()
    stays.submit_recvs(64, 4, calls)
    target = Memory(stays, 64)
    imm, rounds = stays.alloc_imm(), kit.scaled(5, 15, 100)
    for k in range(rounds):
        with kit.open() as visitor:
            mine = Memory(visitor, 64, pattern(k, 64))
            arrived = stays.expect_imm_count(imm, 1, peers=[visitor.address])
            sent = visitor.submit_single_write(64, imm, (mine.handle, 0), (target.desc, 0))
            finish([sent, arrived, visitor.submit_send(stays.address, bytes([k]))])
            assert target.get() == pattern(k, 64)
    calls.wait(rounds)
    assert stays.free_imm(imm) == 0


def test_both_sides_may_call_first_at_the_same_time(engines: Engines, remotes: Remotes, kit: Kit) -> None:
    """C11: crossing handshakes."""
    for _ in range(kit.scaled(2, 5, 50)):
        engine, remote = engines.open(), remotes.start()
        pool, calls = remote.do("recvs", length=64, count=2), Calls()
        engine.submit_recvs(64, 2, calls)
        there = remote.do("send", to=str(engine.address), seed=1, nbytes=64, timeout=None)
        here = engine.submit_send(remote.address, pattern(2, 64))
        finish([here])
        remote.ends_well(there)
        assert (calls.wait(), remote.messages(pool, 1)) == ([pattern(1, 64)], [pattern(2, 64)])


def test_the_death_of_a_sender_is_told_to_its_receiver(engines: Engines, remotes: Remotes, kit: Kit) -> None:
    """C3, C11: half of what a sender promised has arrived; the rest never will, and that is said at once."""
    engine, sender = engines.open(), remotes.start()
    target, origin = Memory(engine, 64), sender.memory(64, seed=1)
    imm = engine.alloc_imm()
    expectation = engine.expect_imm_count(imm, 2, timeout=60, peers=[sender.address])
    sender.ends_well(sender.do("write", length=64, imm=imm, src=(origin.number, 0), dst=(target.blob, 0)))
    assert settle([engine.expect_imm_count(engine.alloc_imm(), 1, timeout=0.05)]) == ["failed"]
    assert not expectation.done
    sender.kill()
    assert names(fails(expectation, PeerLost, within=kit.slack), sender.address)
    assert engine.imm_count(imm) == 1


def test_a_peer_refuses_a_descriptor_that_makes_no_sense(remote: Remote) -> None:
    """C12: the kit's own peer answers with an error, so that the tests above can trust it."""
    with pytest.raises(RemoteRaised):
        remote.do("write", length=1, imm=None, src=(999, 0), dst=("AAAA", 0))
