"""Where `fabric ping HOST` and `fabric bench --connect HOST` get the other side's address from.

The answering side hands its address, a line of text, to whoever connects to a known TCP port, on those IP addresses
that its NICs have themselves: no other is opened. The address is no secret, and whoever has it must still pass first
contact (SECURITY.md). What comes back is read as a stranger's: of bounded length, and within a deadline.
"""

from __future__ import annotations

import ipaddress
import re
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fabric_core.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError
from fabric_core.wire import ADDR_MAX

if TYPE_CHECKING:
    from fabric_core import NetAddr

__all__ = ["PORT", "Meeting", "ask", "host_of", "hosts_of", "local_address"]

PORT = 17471  #: registered with nobody

_IN_DOMAIN = re.compile(r"/(\d{1,3}(?:\.\d{1,3}){3}):\d{1,5}#")
_IN_GID = re.compile(r"0{20}ffff([0-9a-f]{8})/")  # of RoCE v2: an IPv4 address as IPv6 writes it
_HOST = re.compile(r"((?:[A-Za-z0-9_-]+\.)+[A-Za-z0-9-]+)(?::(\d{1,5}))?")
_HELLO = "fabric address "  #: what a line begins with
_PATIENCE = 1.0  #: seconds that one who asks may take


def host_of(text: str, port: int = PORT, *, plain: bool = False) -> tuple[str, int] | None:
    """Return (host, port) if this names a machine and not an engine: 10.0.0.1, node7.cluster, 10.0.0.1:17471.

    `plain`: a word without a dot is a machine too, and not a name of the local backend.
    """
    found = _HOST.fullmatch(text.strip())
    if found:
        number = int(found[2] or port)
        if not 0 < number < 1 << 16:
            raise ConfigError(f"{text}: a port is a number from 1 to 65535")
        return found[1], number
    if plain and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text.strip()):
        return text.strip(), port
    return None


def hosts_of(address: NetAddr) -> list[str]:
    """Return the IP addresses of an engine's NICs, in their order; [] where they have none (names, EFA's own)."""
    found = [match[1] for domain in address.domains if (match := _IN_DOMAIN.search(domain))]
    gids = [match[1] for domain in address.domains if (match := _IN_GID.match(domain))]
    found += [str(ipaddress.IPv4Address(int(digits, 16))) for digits in gids]
    return list(dict.fromkeys(host for host in found if _is_ip(host)))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def local_address(host: str) -> str:
    """Return the IP address of ours from which packets to this one leave. Sends none. Raises PeerLost."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise PeerLost(f"no way to {host}: {error.strerror}", peer=host, code="EHOSTUNREACH") from error
        return str(probe.getsockname()[0])


class Meeting:
    """Tells everybody who asks at `port` of `hosts` what our address is, until it is left.

    Raises ConfigError for a port that cannot be had.
    """

    def __init__(self, address: NetAddr, hosts: list[str], port: int = PORT) -> None:
        self._line = f"{_HELLO}{address}\n".encode()
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            for host in hosts:
                self._listen(host, port)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._serve, name="fabric-meeting", daemon=True)

    def _listen(self, host: str, port: int) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be had ({error.strerror}): --port N here, and HOST:N there"
            ) from error
        listener.listen()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Where to ask."""
        return [one.getsockname() for one in self._sockets]

    def _serve(self) -> None:
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._woken:
                    return
                assert isinstance(key.fileobj, socket.socket)
                try:
                    asking, _ = key.fileobj.accept()
                except OSError:  # it has gone again
                    continue
                with asking:
                    asking.settimeout(_PATIENCE)
                    try:
                        asking.sendall(self._line)
                    except OSError:
                        continue

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.send(b"x")
        self._thread.join(2 * _PATIENCE)
        self._close()

    def _close(self) -> None:
        self._selector.close()
        for one in (*self._sockets, self._woken, self._wake):
            one.close()


def ask(host: str, port: int, timeout: float) -> NetAddr:
    """Ask the one who answers at HOST for its address.

    Raises PeerLost if nobody listens there, DeadlineExceeded if nothing comes within `timeout` seconds, ProtocolError
    if what comes is no address, ConfigError for a host without an IPv4 address.
    """
    from fabric_core import NetAddr

    until = time.monotonic() + timeout
    where = f"{host}:{port}"
    cure = f"on {host}: `fabric ping` or `fabric bench --serve`, with --backend and an address that is not 127.0.0.1"
    try:
        with socket.create_connection((socket.gethostbyname(host), port), timeout) as connection:
            line = _read_line(connection, until)
    except (socket.gaierror, UnicodeError) as error:  # the latter: a label that is too long
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host!r} is the name of no machine that is known here ({why})") from error
    except TimeoutError as error:
        text = f"nothing came within {timeout:g} s"
        raise DeadlineExceeded(text, peer=where, op="ask", code="ETIMEDOUT", cure=cure) from error
    except OSError as error:
        text = f"nobody answers there: {error.strerror or error}"
        raise PeerLost(text, peer=where, op="ask", code="ECONNREFUSED", cure=cure) from error
    if not line.startswith(_HELLO):
        raise ProtocolError(f"what answers at {where} is no fabric: it said {line[:40]!r}")
    return NetAddr.parse(line.removeprefix(_HELLO))


def _read_line(connection: socket.socket, until: float) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) <= ADDR_MAX + len(_HELLO):
        left = until - time.monotonic()
        if left <= 0:  # it may talk, a little at a time, for ever
            raise TimeoutError
        connection.settimeout(left)
        more = connection.recv(4096)
        if not more:
            break
        data += more
    return data.decode(errors="replace").rstrip("\n")
