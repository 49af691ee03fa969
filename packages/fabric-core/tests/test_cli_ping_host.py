"""How `fabric ping HOST` and `fabric bench --connect HOST` find the other side, and what --provider and --on set.

With engines on both sides: packages/fabric-efa/tests/test_efa_cli.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fabric_core import NetAddr, registry
from fabric_core.cli import build, ping_backend, ping_meet
from fabric_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError

ADDRESS = NetAddr.parse("efa:tcp/127.0.0.1:4242#1f,tcp/127.0.0.2:4243#1f")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def answering(say: bytes, *, hang: bool = False, endless: bool = False) -> Iterator[int]:
    """Listen as somebody else does: says this to one who asks, then goes on, hangs, or hangs up. Yields the port."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                try:
                    connection.sendall(say)
                    while endless:
                        connection.sendall(say)
                except OSError:
                    return
                if hang:
                    done.wait(20)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            thread.join(20)


def test_everybody_who_asks_is_told_the_address_and_only_where_the_nics_are() -> None:
    hosts = ping_meet.hosts_of(ADDRESS)
    assert hosts == ["127.0.0.1", "127.0.0.2"]
    port = free_port()
    with ping_meet.Meeting(ADDRESS, hosts, port) as meeting:
        assert sorted(meeting.ports) == [("127.0.0.1", port), ("127.0.0.2", port)]
        with ThreadPoolExecutor(16) as pool:
            said = list(pool.map(lambda i: ping_meet.ask(hosts[i % 2], port, 20), range(64)))
        assert set(said) == {ADDRESS}
        with pytest.raises(PeerLost):
            ping_meet.ask("127.0.0.3", port, 5)
    with pytest.raises(PeerLost):  # left: closed
        ping_meet.ask("127.0.0.1", port, 5)


def test_a_gid_that_is_an_ipv4_address_is_where_its_nic_answers() -> None:
    """RoCE v2; a GID of InfiniBand, or of a link, is none."""
    end = "/0/11/18f65caa#2021c80c62cec639"
    roce = [f"00000000000000000000ffff0a4d000{number}{end}" for number in (1, 2)]
    other = [f"fe80000000000000020203fffe040506{end}", f"fe80000000000000ffff00000a4d0001{end}"]
    assert ping_meet.hosts_of(NetAddr("ibverbs", (*roce, *other))) == ["10.77.0.1", "10.77.0.2"]


def test_one_who_asks_and_does_not_read_is_in_nobodys_way() -> None:
    port = free_port()
    with ping_meet.Meeting(ADDRESS, ["127.0.0.1"], port), socket.create_connection(("127.0.0.1", port)):
        assert ping_meet.ask("127.0.0.1", port, 20) == ADDRESS


def test_a_taken_port_is_named_with_the_cure() -> None:
    port = free_port()
    with (
        ping_meet.Meeting(ADDRESS, ["127.0.0.1"], port),
        pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 .*--port"),
    ):
        ping_meet.Meeting(ADDRESS, ["127.0.0.1"], port)


@pytest.mark.parametrize(
    "say",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        b"\xff\xfe\n",
        b"fabric address \n",
        b"fabric address nonsense\n",
    ],
)
def test_what_is_no_address_is_refused(say: bytes) -> None:
    """C12: whoever answers there may be anybody."""
    with answering(say) as port, pytest.raises(ProtocolError):
        ping_meet.ask("127.0.0.1", port, 20)


def test_one_who_never_stops_talking_is_left() -> None:
    """C12: when what was said is longer than any address, and not at the deadline."""
    with answering(b"a" * 4096, endless=True) as port, pytest.raises(ProtocolError):
        ping_meet.ask("127.0.0.1", port, 20)


def test_one_who_says_nothing_is_waited_for_until_the_deadline() -> None:
    with answering(b"fabric addr", hang=True) as port:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port}"):
            ping_meet.ask("127.0.0.1", port, 0.2)
        assert time.monotonic() - begin >= 0.2


def test_an_unknown_name_is_a_mistake_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"no-such-machine\.invalid"):
        ping_meet.ask("no-such-machine.invalid", 1, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1", ("10.0.0.1", 17471)),
        ("10.0.0.1:99", ("10.0.0.1", 99)),
        ("node7.cluster", ("node7.cluster", 17471)),
        ("decoder0", None),
        ("local:decoder0", None),
        ("efa:tcp/10.0.0.1:4242#1f", None),
        ("efa:efa/fe80aa#1f", None),
        ("", None),
    ],
)
def test_a_machine_is_told_from_an_engine(text: str, expected: tuple[str, int] | None) -> None:
    assert ping_meet.host_of(text) == expected
    if text == "decoder0":  # with a backend that has no names
        assert ping_meet.host_of(text, plain=True) == (text, 17471)


@given(st.text(max_size=60), st.booleans())
def test_no_address_is_taken_for_a_machine(text: str, plain: bool) -> None:
    try:
        address = str(NetAddr.parse(text))
    except ProtocolError:
        return
    assert ping_meet.host_of(address, plain=plain) is None


@pytest.mark.parametrize("text", ["10.0.0.1:0", "10.0.0.1:65536", "node7.cluster:99999"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        ping_meet.host_of(text)


def test_a_name_that_no_machine_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="name of no machine"):
        ping_meet.ask("a" * 70 + ".com", 17471, 1.0)


def test_answering_and_measuring_are_not_asked_for_at_once() -> None:
    ran = CliRunner().invoke(build(["bench"]), ["bench", "write", "--serve", "a", "--connect", "local:b"])
    assert ran.exit_code == 2


@pytest.mark.parametrize(("option", "suffix"), [("provider", "PROVIDER"), ("on", "NICS")])
def test_an_option_sets_the_variable_that_the_backend_declares(
    option: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        name, variables = "thing", {f"FABRIC_THING_{suffix}": "help"}

    name = f"FABRIC_THING_{suffix}"
    monkeypatch.setenv(name, "before")
    monkeypatch.setattr(ping_backend, "get_backend", lambda _name: Backend)
    values = {"provider": "", "on": "", option: "this"}
    assert ping_backend.choose("thing", **values) == "thing"
    assert os.environ[name] == "this"
    other = {"provider": "", "on": "", "on" if option == "provider" else "provider": "that"}
    with pytest.raises(ConfigError, match=r"that: backend thing has no such setting"):
        ping_backend.choose("thing", **other)


@pytest.mark.parametrize("command", ["ping", "bench"])
def test_2_a_provider_of_a_backend_without_any(command: str) -> None:
    ran = CliRunner().invoke(build([command]), [command, "--backend", "local", "--provider", "tcp"])
    assert ran.exit_code == 2, ran.output
    assert "--provider tcp: backend local has no such setting" in ran.stderr


def test_2_nics_of_an_unnamed_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FABRIC_BACKEND", raising=False)
    ran = CliRunner().invoke(build(["ping"]), ["ping", "--on", "eth0"])
    assert ran.exit_code == 2
    assert "--on eth0: of which backend?" in ran.stderr


def test_4_nobody_answers_at_a_machine() -> None:
    ran = CliRunner().invoke(build(["ping"]), ["ping", f"127.0.0.1:{free_port()}"])
    assert ran.exit_code == 4
    assert "fabric ping" in ran.stderr, "the cure: what to run there"


def test_what_the_address_wants_is_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        variables = {"FABRIC_EFA_PROVIDER": "", "FABRIC_EFA_NICS": ""}  # noqa: RUF012

    monkeypatch.setattr(ping_backend, "get_backend", lambda _name: Backend)
    monkeypatch.setattr(ping_meet, "local_address", lambda host: host.rpartition(".")[0] + ".77")
    for name in Backend.variables:
        monkeypatch.setenv(name, "")
    text = "efa:tcp+ofi_rxm/10.0.1.1:4242#1f,tcp+ofi_rxm/10.0.2.1:4242#1f"
    ping_backend.find(text, "", 1, 1)
    assert os.environ["FABRIC_EFA_PROVIDER"] == "tcp;ofi_rxm"
    assert os.environ["FABRIC_EFA_NICS"] == "10.0.1.77,10.0.2.77"
    monkeypatch.setenv("FABRIC_EFA_NICS", "eth9")
    ping_backend.find(text, "efa", 1, 1)
    assert os.environ["FABRIC_EFA_NICS"] == "eth9"
    with pytest.raises(ConfigError, match="--backend sim: the peer has backend efa"):
        ping_backend.find(text, "sim", 1, 1)


def test_the_local_backend_needs_nothing_set() -> None:
    before = dict(os.environ)
    assert ping_backend.find("decoder0", "", 1, 1) == NetAddr.parse("local:decoder0")
    assert dict(os.environ) == before
    assert registry.get_backend("local").name == "local"
