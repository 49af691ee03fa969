"""What a stranger, a bad peer or bad bytes can do to an engine (S2 to S10, C12): nothing, and it is counted."""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import (
    BackendError,
    FabricError,
    MrDesc,
    NetAddr,
    ProtocolError,
    RemoteAccessError,
    TransferEngine,
    wire,
)
from fabric_core.cli.bench import parse_size
from fabric_core.config import Settings
from fabric_core.domain import Domain
from fabric_core.errors import ConfigError

SOURCES = Path(__file__).resolve().parents[2]
SECRET = "the secret of these tests"


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    found: list[TransferEngine] = []

    def open_one(**settings: Any) -> TransferEngine:
        engine = TransferEngine.open(backend="local", local_dir=str(tmp_path / "sockets"), secret=SECRET, **settings)
        found.append(engine)
        return engine

    yield open_one
    while found:  # emptied: pytest holds on to `open_one`, and the suite's last look wants them gone
        found.pop().close()


def refused(*some: TransferEngine) -> dict[str, int]:
    rows = [engine.stats()["refused"] for engine in some]
    return {kind: sum(row[kind] for row in rows) for kind in rows[0]}


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# ---- bytes are data (S2) ---------------------------------------------------------------------------------------------


def calls_that_make_code(text: str) -> list[str]:
    """Loaders that can run what they load, beyond the names that tests/test_workspace.py looks for."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            wrong += [name for name in names if name.split(".")[0] in {"yaml", "joblib", "jsonpickle", "code", "runpy"}]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            called = f"{node.func.value.id}.{node.func.attr}"
            flags = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unsafe = called == "torch.load" and flags.get("weights_only") != "True"
            unsafe |= called.endswith((".load", ".loads")) and flags.get("allow_pickle", "False") != "False"
            unsafe |= called in {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
            unsafe |= called.startswith("subprocess.") and flags.get("shell", "False") != "False"
            wrong += [called] * unsafe
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"compile", "__import__"}:
            wrong.append(node.func.id)
    return wrong


def test_nothing_that_is_shipped_makes_code_of_bytes() -> None:
    paths = sorted(SOURCES.glob("*/src/**/*.py"))
    assert len(paths) > 40
    assert {str(path): calls_that_make_code(path.read_text(encoding="utf-8")) for path in paths} == {
        str(path): [] for path in paths
    }


@pytest.mark.parametrize(
    "text",
    [
        "import yaml",
        "from yaml import load",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
        "compile(x, '', 'exec')",
    ],
)
def test_the_search_for_it_finds_it(text: str) -> None:
    assert calls_that_make_code(text)
    assert not calls_that_make_code("torch.load(f, weights_only=True); json.load(f); re.compile(x)")


_msgpack = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


@pytest.mark.parametrize("kind", ["addr", "desc"])
@given(st.data())
@settings(max_examples=300)
def test_any_record_is_a_value_or_a_protocol_error(kind: str, data: Any) -> None:
    """S2, C12: whatever msgpack can say, behind a good head."""
    head = {"addr": b"FbA", "desc": b"FbD"}[kind] + bytes([wire.WIRE_VERSION])
    value = data.draw(_msgpack | st.tuples(st.text(), st.lists(st.text()), *[st.integers(0, 2**64 - 1)] * 3))
    try:
        raw = head + msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return
    with contextlib.suppress(ProtocolError):
        wire.decode(kind, raw)
    with contextlib.suppress(ProtocolError):
        (NetAddr if kind == "addr" else MrDesc).from_bytes(raw)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 entries
        b"\x92\xa5local\xdd\xff\xff\xff\xff",
        b"\x92\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\x91" * 4000,  # arrays in arrays
        b"\xdc\xff\xff" + b"\xc0" * 4000,
        bytes(100_000_000),
    ],
    ids=["array", "nics", "text", "deep", "nils", "long"],
)
@pytest.mark.parametrize("kind", ["addr", "desc"])
def test_a_length_that_lies_costs_no_memory(kind: str, body: bytes) -> None:
    """S2, S8: refused without allocating what the header claims."""
    raw = {"addr": b"FbA", "desc": b"FbD"}[kind] + bytes([wire.WIRE_VERSION]) + body
    with pytest.raises(ProtocolError):
        wire.decode(kind, b"")  # the decoder is made at the first use
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode(kind, raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(raw) + (1 << 20)


@given(st.text(max_size=200))
@settings(max_examples=300)
def test_any_text_is_an_address_or_a_protocol_error(text: str) -> None:
    for candidate in (text, f"local:{text}", f"local:a.0#{text}"):
        with contextlib.suppress(ProtocolError):
            assert NetAddr.parse(str(NetAddr.parse(candidate))) == NetAddr.parse(candidate)


@given(st.text(max_size=40) | st.from_regex(r"[0-9]{1,400}[KMGkmg]?i?B?", fullmatch=True))
@settings(max_examples=300)
def test_any_size_on_the_command_line_is_a_number_or_a_usage_error(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except (ConfigError, typer.BadParameter):
        pass


@given(
    st.dictionaries(
        st.sampled_from(sorted(f"FABRIC_{name.upper()}" for name in Settings.model_fields)),
        st.text(st.characters(exclude_characters="\0"), max_size=60),
    )
)
@settings(max_examples=300)
def test_any_environment_is_settings_or_a_config_error(environ: dict[str, str]) -> None:
    with contextlib.suppress(ConfigError):
        repr(Settings.load(environ=environ))


# ---- nothing listens on a network (S3) -------------------------------------------------------------------------------

_PROBE = """
import os, socket, sys
from fabric_core import TransferEngine

def own():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    return inodes

def found():
    mine, wrong = own(), []
    for table in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "sctp/eps"):
        try:
            lines = open(f"/proc/self/net/{table}").read().splitlines()[1:]
        except OSError:
            continue
        wrong += [f"{table} {line.split()[1]}" for line in lines if mine & set(line.split())]
    for line in open("/proc/self/net/unix").read().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if parts[6] in mine and len(parts) > 7 and parts[7].startswith("@"):
            wrong.append(f"abstract {parts[7]}")
    return wrong

directory = sys.argv[1]
a, b = (TransferEngine.open(backend="local", local_dir=directory, nics=2) for _ in range(2))
memory = bytearray(64)
handle, desc = b.reg_mr(memory)
source, _ = a.reg_mr(bytearray(64))
a.submit_single_write(64, None, (source, 0), (desc, 0)).wait(10)
assert own()
print("engine:", found())
tcp = socket.create_server(("127.0.0.1", 0))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
hidden = socket.socket(socket.AF_UNIX)
hidden.bind("\\0fabric-test")
print("planted:", len(found()))
a.close()
b.close()
"""


def test_an_engine_listens_on_no_network_and_has_no_abstract_socket(tmp_path: Path) -> None:
    """S3: read from the kernel's own tables, during traffic; and the look finds planted ones."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, str(tmp_path / "s")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["engine: []", "planted: 3"], done.stderr


def test_the_sockets_are_for_their_owner_alone(engines: Any, tmp_path: Path) -> None:
    """S3: whatever the umask says."""
    before = os.umask(0)
    try:
        engines()
    finally:
        os.umask(before)
    place = tmp_path / "sockets"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in place.glob("*.sock")] == [0o600]
    assert stat.S_IMODE((place / ".lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(BackendError, match="open to others"):
        TransferEngine.open(backend="local", local_dir=str(place))


# ---- least access, revocation, age of descriptors (S4, S7) -----------------------------------------------------------

PATHS = ("auto", "map", "cma", "bounce")


def pair(engines: Any, path: str) -> tuple[TransferEngine, TransferEngine, Any]:
    a, b = engines(local_path=path), engines(local_path=path)
    handle, _ = a.reg_mr(np.full(4096, 0x5A, dtype=np.uint8), write=False)
    return a, b, handle


def forged(desc: MrDesc, **changes: Any) -> MrDesc:
    fields: dict[str, Any] = {
        name: getattr(desc, name) for name in ("addr", "ptr", "nbytes", "access", "keys", "bases")
    }
    return MrDesc(**{**fields, **changes})


def test_write_is_the_default_and_can_be_left_out(engines: Any) -> None:
    """S4: the documented default; a source needs `write=False`, and is then no target."""
    engine = engines()
    assert engine.reg_mr(bytearray(8))[1].writable
    assert not engine.reg_mr(bytearray(8), write=False)[1].writable
    assert "write: whether peers that hold the descriptor may write there" in (TransferEngine.reg_mr.__doc__ or "")


@pytest.mark.parametrize("path", PATHS)
def test_a_read_only_descriptor_is_refused_at_submit_and_when_forged_at_the_target(engines: Any, path: str) -> None:
    """S4, S9, C6."""
    a, b, handle = pair(engines, path)
    memory = b.empty(4096)
    _, desc = b.reg_mr(memory, write=False)
    with pytest.raises(RemoteAccessError, match="may not be written"):
        a.submit_single_write(8, None, (handle, 0), (desc, 0))
    with pytest.raises(RemoteAccessError) as caught:
        a.submit_single_write(8, None, (handle, 0), (forged(desc, access=1), 0)).wait(10)
    assert caught.value.code == "EACCES"
    assert refused(a, b)["rights"] == 1
    assert bytes(memory) == bytes(4096)


@pytest.mark.parametrize("path", PATHS)
def test_a_descriptor_made_longer_is_refused_at_the_target(engines: Any, path: str) -> None:
    """S4, S9: the neighbouring memory is registered too, but under another key."""
    a, b, handle = pair(engines, path)
    memory = b.empty(8192)
    view = np.frombuffer(memory, dtype=np.uint8)
    _, desc = b.reg_mr(view[:4096])
    b.reg_mr(view[4096:])
    longer = forged(desc, nbytes=8192)
    for offset, length in ((4090, 8), (4096, 8), (8191, 1), (0, 4096)):
        transfer = a.submit_single_write(length, None, (handle, 0), (longer, offset))
        if offset:
            with pytest.raises(RemoteAccessError) as caught:
                transfer.wait(10)
            assert caught.value.code == "EFAULT"
        else:
            transfer.wait(10)
    assert refused(a, b)["range"] == 3
    assert not view[4096:].any()
    del view


@pytest.mark.parametrize("path", PATHS)
def test_guessed_and_old_keys_are_refused(engines: Any, path: str) -> None:
    """S7, S9: a replayed descriptor after re-registration of the same memory, and keys made up."""
    a, b, handle = pair(engines, path)
    memory = b.empty(4096)
    owner, old = b.reg_mr(memory)
    a.submit_single_write(8, None, (handle, 0), (old, 0)).wait(10)
    owner.close()
    _, new = b.reg_mr(memory)
    assert new.keys != old.keys
    memory[:8] = bytes(8)
    guesses = [forged(new, keys=[new.keys[0] ^ 1 << bit]) for bit in (0, 13, 31, 32, 45, 63)]
    for desc in [old, *guesses]:
        with pytest.raises(RemoteAccessError) as caught:
            a.submit_single_write(8, None, (handle, 0), (desc, 0)).wait(10)
        assert caught.value.code == "EKEYREVOKED"
    assert refused(a, b)["revoked"] == 1 + len(guesses)
    assert bytes(memory[:8]) == bytes(8)
    a.submit_single_write(8, None, (handle, 0), (new, 0)).wait(10)
    assert bytes(memory[:8]) == b"\x5a" * 8


def test_keys_and_incarnations_do_not_repeat(engines: Any, tmp_path: Path) -> None:
    """S6: generations and incarnations start at random places."""
    firsts, lives = set(), set()
    for _ in range(8):
        with TransferEngine.open(backend="local", local_dir=str(tmp_path / "other"), name="same") as engine:
            firsts.add(engine.reg_mr(bytearray(8))[1].keys[0] >> 32)
            lives.add(str(engine.address))
    assert len(firsts) == len(lives) == 8


# ---- a bad peer cannot exhaust us (S8, R11) --------------------------------------------------------------------------


def test_ten_thousand_silent_connections_keep_no_friend_out(engines: Any, tmp_path: Path) -> None:
    """S8, R11: the oldest half-open ones go first; memory stays where it was."""
    a, b = engines(), engines()
    door = next(iter((tmp_path / "sockets").glob(f"{b.name}.sock")))
    source, _ = a.reg_mr(bytearray(b"friend"))
    target = bytearray(6)
    _, desc = b.reg_mr(target)
    friends = [(friend := engines(), friend.reg_mr(bytearray(b"friend"))[0]) for _ in range(4)]
    held: list[socket.socket] = []
    resident = 0
    for i in range(10_000):
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        visitor.connect(str(door))
        held.append(visitor)
        if len(held) > 400:
            held.pop(0).close()
        if i == 5_000:  # the friends have met b, and their links cost what they cost
            resident = _resident()
        if i % 1_000 == 999 and friends:
            friend, mine = friends.pop()
            friend.submit_single_write(6, None, (mine, 0), (desc, 0)).wait(5)
    until(lambda: refused(b)["half_open"] > 1_000)
    assert _resident() - resident < 1 << 20
    a.submit_single_write(6, None, (source, 0), (desc, 0)).wait(5)  # one more, while they all stand there
    assert target == b"friend"
    assert not friends
    for visitor in held:
        visitor.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_registrations_have_a_bound_with_a_clear_error(engines: Any) -> None:
    """S8: and what is given back can be used again."""
    engine = engines()
    memory = bytearray(64)
    kept = [engine.reg_mr(memory)[0] for _ in range(16_384)]
    with pytest.raises(BackendError, match=r"cannot be registered .*16384 registrations .* are open.*close\(\)"):
        engine.reg_mr(memory)
    kept.pop().close()
    engine.reg_mr(memory)


def test_messages_have_a_bound_at_submit(engines: Any) -> None:
    """S8, C6."""
    a, b = engines(), engines()
    a.submit_send(b.address, bytes(a.max_message), timeout=0.1)
    with pytest.raises(FabricError, match="too long"):
        a.submit_send(b.address, bytes(a.max_message + 1))


def test_noise_is_counted_by_kind(engines: Any, tmp_path: Path) -> None:
    """S9: malformed, another version."""
    engine = engines()
    door = str(next(iter((tmp_path / "sockets").glob("*.sock"))))
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 300, b"flo", b"fcol" + b"\xff\xff\1\0" + bytes(300)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.connect(door)
            visitor.send(noise)
            visitor.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                visitor.recv(1000)  # until we are answered or turned away
    until(lambda: refused(engine)["malformed"] == 3 and refused(engine)["version"] == 1)


# ---- counters of any backend (S9) ------------------------------------------------------------------------------------


def test_a_backend_in_python_may_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabric_core import registry, shim
    from fabric_core.native_lib import ffi, lib

    class Counts(Domain):
        found: dict[str, int] = {}  # noqa: RUF012

        def counters(self) -> dict[str, int]:
            return self.found

    for name in Counts.__abstractmethods__:
        monkeypatch.setattr(Counts, name, lambda *_: None)
    monkeypatch.setattr(Counts, "__abstractmethods__", frozenset())
    domain = Counts()  # type: ignore[abstract]
    native = shim.adapt(domain, lambda _: None)
    ops, ctx = ffi.cast("const fab_domain_ops *", native.ops), ffi.cast("void *", native.ctx)
    out = ffi.new("fab_counter[]", 3)
    try:
        assert ops.counters(ctx, out, 3) == 0
        domain.found = {"auth": 7, "a_name_that_is_much_longer_than_thirty_one_bytes": 1, "range": 2**64 - 1, "more": 1}
        assert ops.counters(ctx, out, 3) == 3
        assert [ffi.string(entry.name).decode() for entry in out] == [
            "auth",
            "a_name_that_is_much_longer_than",
            "range",
        ]
        assert [entry.value for entry in out] == [7, 1, 2**64 - 1]
        domain.found = {"bad": -1}
        assert ops.counters(ctx, out, 3) < 0
    finally:
        ops.close(ctx)
    assert lib is not None
    assert registry is not None


def test_stats_may_be_asked_for_at_any_time(engines: Any) -> None:
    engine = engines()
    assert set(engine.stats()["refused"]) >= {"auth", "malformed", "version", "stale", "half_open", "uid", "revoked"}
    engine.close()
    assert isinstance(engine.stats()["refused"], dict)
