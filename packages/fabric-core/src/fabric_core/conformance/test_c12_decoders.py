"""C12: any bytes fed to a decoder give a clean error. Whatever is accepted is a whole value that encodes again."""

from __future__ import annotations

import pickle
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_core import FabricError, MrDesc, NetAddr, ProtocolError
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, finish

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


def thoroughly(kit: Kit, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], share: int = 1) -> None:
    """Runs `check` over many examples of `strategy`."""

    @settings(
        max_examples=kit.scaled(200, 1000, 20_000) // share,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @seed(kit.seed)
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid` with a few bytes changed, cut out, doubled or added."""

    def apply(edits: list[tuple[str, int, bytes]]) -> bytes:
        data = valid
        for kind, where, what in edits:
            at = where % (len(data) + 1)
            if kind == "change":
                data = data[:at] + what + data[at + len(what) :]
            elif kind == "insert":
                data = data[:at] + what + data[at:]
            elif kind == "cut":
                data = data[:at]
            else:
                data = data[:at] + data[at + len(what) :]
        return data

    edit = st.tuples(
        st.sampled_from(["change", "insert", "cut", "drop"]),
        st.integers(0, max(1, len(valid))),
        st.binary(min_size=1, max_size=8),
    )
    return st.lists(edit, min_size=1, max_size=4).map(apply)


def decodes_or_says_no(decode: Callable[[Any], Any], encode: Callable[[Any], Any], data: Any) -> None:
    try:
        value = decode(data)
    except ProtocolError:
        return
    assert decode(encode(value)) == value
    repr(value)
    str(value)


@pytest.mark.parametrize("kind", [MrDesc, NetAddr])
def test_random_bytes_are_a_protocol_error(kit: Kit, kind: Any) -> None:
    """C12: from_bytes of descriptors and addresses."""
    thoroughly(kit, st.binary(max_size=300), lambda data: decodes_or_says_no(kind.from_bytes, kind.to_bytes, data))


@pytest.mark.parametrize("kind", [MrDesc, NetAddr])
def test_damaged_bytes_are_a_protocol_error(kit: Kit, engines: Engines, kind: Any) -> None:
    """C12: mutations of real ones, with several NICs."""
    engine = engines.open(nics=max(kit.nics))
    value = Memory(engine, 4096).desc if kind is MrDesc else engine.address
    thoroughly(kit, mutations(value.to_bytes()), lambda data: decodes_or_says_no(kind.from_bytes, kind.to_bytes, data))


def test_strings_that_are_no_address_are_a_protocol_error(kit: Kit, engine: Any) -> None:
    """C12: NetAddr.parse of random text and of damaged addresses."""
    damaged = mutations(str(engine.address).encode()).map(lambda data: data.decode("latin-1"))
    texts = st.one_of(st.text(max_size=100), damaged, st.just(":"), st.just("local:"), st.just("x" * 100_000))
    thoroughly(kit, texts, lambda text: decodes_or_says_no(NetAddr.parse, str, text))


@pytest.mark.parametrize("kind", [MrDesc, NetAddr])
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 64, bytes(1 << 20)], ids=["empty", "zero", "ones", "long"])
def test_corner_cases_are_a_protocol_error(kind: Any, data: bytes) -> None:
    """C12: nothing, and far too much."""
    with pytest.raises(ProtocolError):
        kind.from_bytes(data)


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_every_shortened_descriptor_is_a_protocol_error(engine: Any, cut: int) -> None:
    """C12: and every lengthened one."""
    blob = Memory(engine, 64).desc.to_bytes()
    for end in range(0, len(blob), cut):
        with pytest.raises(ProtocolError):
            MrDesc.from_bytes(blob[:end])
    with pytest.raises(ProtocolError):
        MrDesc.from_bytes(blob + b"\0")


def test_values_survive_the_trip(engines: Engines, nics: int) -> None:
    """C12: bytes and text mean the same value; equal values hash equal."""
    engine = engines.open(nics=nics)
    desc = Memory(engine, 4096).desc
    again = MrDesc.from_bytes(desc.to_bytes())
    assert (again, again.addr, again.ptr, again.nbytes) == (desc, engine.address, desc.ptr, 4096)
    for address in (NetAddr.from_bytes(engine.address.to_bytes()), NetAddr.parse(str(engine.address))):
        assert address == engine.address
        assert hash(address) == hash(engine.address)
    assert MrDesc.from_bytes(memoryview(desc.to_bytes())) == desc


def test_descriptors_do_not_show_their_keys(engine: Any) -> None:
    """Security: what lets a peer write is not in repr(), where logs would get it from."""
    desc = Memory(engine, 64).desc
    assert len(repr(desc)) < 400
    assert desc.to_bytes().hex() not in repr(desc)


def test_a_damaged_descriptor_that_decodes_still_cannot_hurt(engines: Engines) -> None:
    """C12, C6: a forged key is refused by the peer; both engines go on, and no other memory changes."""
    pair = engines.pair(connect_timeout=0.3)
    source, target, guard = Memory(pair.a, 64), Memory(pair.b, 64), Memory(pair.b, 4096, b"\x11")
    blob = bytearray(target.desc.to_bytes())
    for at in range(len(blob)):
        forged = bytearray(blob)
        forged[at] ^= 0x55
        try:
            desc = MrDesc.from_bytes(bytes(forged))
        except ProtocolError:
            continue
        try:
            pair.a.submit_single_write(64, None, (source.handle, 0), (desc, 0), timeout=5).wait(10)
        except FabricError:
            pass
    calls = Calls()
    good = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), calls)
    finish([good])
    calls.wait()
    assert guard.get() == b"\x11" * 4096


def test_noise_at_the_door_is_turned_away(kit: Kit, engines: Engines, tmp_path: Path) -> None:
    """C12: whoever connects to a Unix socket of the backend and talks nonsense is dropped; peers are served on."""
    pair = engines.pair(local_dir=str(tmp_path), connect_timeout=1.0)
    doors = [path for path in tmp_path.rglob("*") if stat.S_ISSOCK(path.stat().st_mode)]
    if not doors:
        pytest.skip(f"the backend {kit.backend} has no Unix sockets")
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    held: list[socket.socket] = []

    def knock(noise: tuple[bytes, bool]) -> None:
        for door in doors:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
                visitor = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
                try:
                    visitor.connect(str(door))
                    visitor.send(noise[0])
                except OSError:
                    pass
                if noise[1] and len(held) < 64:
                    held.append(visitor)  # says half a word and never goes away
                else:
                    visitor.close()

    noises = st.tuples(
        st.one_of(st.binary(max_size=200), st.binary(min_size=1, max_size=8).map(lambda b: b * 5000)), st.booleans()
    )
    thoroughly(kit, noises, knock, share=20)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(64, imm, (source.handle, 0), (target.desc, 0)), arrived])
    finish([pair.b.submit_barrier(None, None, pair.a.alloc_imm(), [source.desc])])
    for visitor in held:
        visitor.close()


@pytest.mark.parametrize("what", ["address", "desc"])
def test_values_can_be_pickled_between_processes(engine: Any, what: str) -> None:
    """Users put them into their own messages; it must not smuggle an engine along."""
    value = engine.address if what == "address" else Memory(engine, 64).desc
    assert pickle.loads(pickle.dumps(value)) == value
