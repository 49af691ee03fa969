"""The backend and its domain: one listening socket per NIC, one connection per peer and direction.

A request is framed when the connection has room, and ends when the peer acknowledged it: by then a write is applied to
the peer's memory, and a message is in a posted buffer. A peer is lost when its connection ends, or when it does not
answer pings. The incarnation is part of the address, and is asked for in the first frame.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
import socket
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count

from fabric_core import BackendError
from fabric_core.domain import (
    API_VERSION,
    MAX_NICS,
    Access,
    Completion,
    CompletionKind,
    DeviceInfo,
    Domain,
    DomainCaps,
    GroupConfig,
    Memory,
    MrKeys,
    NativeDomain,
    Unavailable,
    WorkKind,
    WorkRequest,
)
from fabric_pysock.wire import MAX_SEND, MAX_WRITE, OUT_FULL, VERSION, Frame, Kind, Stream

QUEUED = 4096  # requests of one kind that wait for a peer; more is "full"
SENDS_ON_THE_WIRE = 16  # messages that a peer may have to keep until it posts buffers
CANCEL_GRACE_NS = 200_000_000
PATIENCE = 3  # heartbeats without a sign of life


@dataclass(eq=False)
class Link:
    """One connection. `peer` is set on our own calls; requests go out there, acknowledgements come back."""

    stream: Stream
    peer: int | None = None
    up: bool = False
    lost: int = 0
    writes: deque[WorkRequest] = field(default_factory=deque)
    sends: deque[WorkRequest] = field(default_factory=deque)
    flying: dict[int, tuple[int, int]] = field(default_factory=dict)  # seq -> (kind, id)
    flying_sends: int = 0
    heard: int = 0  # when it last gave a sign of life; 0: not looked at yet
    pinged: int = 0
    wanted: int = select.EPOLLIN | select.EPOLLOUT


class PySockDomain(Domain):
    """One NIC. The engine calls it from one thread at a time, except for mr_reg, mr_dereg and address."""

    def __init__(self, folder: str, name: str, connect_timeout: float, heartbeat: float) -> None:
        self._folder, self._name = folder, name
        self._incarnation = secrets.token_hex(4)
        self._connect_ns, self._heartbeat_ns = int(connect_timeout * 1e9), int(heartbeat * 1e9)
        self._now = 0
        self._numbers, self._seqs = count(1), count(1)
        self._links: dict[int, Link] = {}  # descriptor -> connection
        self._peers: dict[int, Link] = {}
        self._regions: dict[int, Memory] = {}
        self._region_lock = threading.Lock()  # a write of a peer against mr_dereg
        self._buffers: deque[tuple[int, int, int]] = deque()
        self._messages: deque[tuple[Link, int, bytes]] = deque()  # that wait for a buffer
        self._cancelled: deque[tuple[int, Link, int]] = deque()
        self._done: deque[Completion] = deque()
        self._listener = _listen(f"{folder}/pysock-{name}")
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    # ---- what there is

    def caps(self) -> DomainCaps:
        return DomainCaps(max_write=MAX_WRITE, max_send=MAX_SEND)

    def address(self) -> str:
        return f"{self._name}#{self._incarnation}"

    def mr_reg(self, memory: Memory) -> MrKeys:
        key = secrets.randbits(62)
        with self._region_lock:
            self._regions[key] = memory
        return MrKeys(local_key=key, remote_key=key, remote_base=memory.addr)

    def mr_dereg(self, local_key: int) -> None:
        with self._region_lock:
            del self._regions[local_key]

    # ---- peers

    def peer_open(self, addr: str) -> int:
        name, _hash, incarnation = addr.partition("#")
        if not name.rpartition(".")[2].isdigit():
            name += ".0"  # a bare name: whoever has it, by its first NIC
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"{self._folder}/pysock-{name}")
        except OSError as error:
            sock.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{name}: {error.strerror}") from None
        link = self._add(sock, next(self._numbers))
        link.stream.push(Frame(Kind.HELLO, VERSION, payload=incarnation.encode()))
        return link.peer or 0

    def peer_close(self, peer: int) -> None:
        link = self._peers.pop(peer)
        if not link.lost:
            link.peer = None  # nobody wants to hear of its end
            self._lose(link, errno.ECANCELED)

    def _add(self, sock: socket.socket, peer: int | None = None) -> Link:
        link = Link(Stream(sock), peer)
        self._links[sock.fileno()] = link
        if peer is not None:
            self._peers[peer] = link
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        return link

    def _lose(self, link: Link, status: int) -> None:
        """Every request of the link ends; then the peer is down."""
        link.lost = status
        sock = link.stream.sock
        self._epoll.unregister(sock)
        del self._links[sock.fileno()]
        sock.close()
        ids = [request.id for request in (*link.writes, *link.sends)] + [id for _, id in link.flying.values()]
        self._done += [Completion(CompletionKind.OP, id, status=-status, peer=link.peer or 0) for id in ids]
        link.writes.clear()
        link.sends.clear()
        link.flying.clear()
        self._messages = deque(entry for entry in self._messages if entry[0] is not link)
        if link.peer is not None:
            self._done.append(Completion(CompletionKind.PEER_DOWN, peer=link.peer, status=-status))

    # ---- work

    def post(self, peer: int, writes: list[WorkRequest]) -> int:  # type: ignore[override]
        link, taken = self._peers[peer], 0
        if link.lost:
            raise OSError(link.lost, "the peer is lost")
        for request in writes:
            queue = link.sends if request.kind == WorkKind.SEND else link.writes
            if len(queue) >= QUEUED:
                break
            queue.append(replace(request))
            taken += 1
        self._transmit(link)
        return taken

    def _transmit(self, link: Link) -> None:
        """Frame what there is room for, and ask for a wake-up if the kernel did not take all of it."""
        stream = link.stream
        try:
            while link.up and stream.waiting < OUT_FULL:
                if link.sends and link.flying_sends < SENDS_ON_THE_WIRE:
                    request, kind = link.sends.popleft(), Kind.SEND
                    link.flying_sends += 1
                elif link.writes:
                    request, kind = link.writes.popleft(), Kind.WRITE
                else:
                    break
                seq = next(self._seqs)
                link.flying[seq] = (kind, request.id)
                payload = ctypes.string_at(request.local_addr, request.length) if request.length else b""
                stream.push(Frame(kind, seq, 0, request.imm, request.remote_key, request.remote_addr, payload))
                stream.flush()
            stream.flush()
        except OSError:
            pass  # epoll says so too, and then the link is lost
        wanted = select.EPOLLIN | (select.EPOLLOUT if stream.waiting else 0)
        if wanted != link.wanted:
            link.wanted = wanted
            self._epoll.modify(stream.sock, wanted)

    def cancel(self, id: int) -> None:
        for link in list(self._links.values()):
            for queue in (link.writes, link.sends):
                for request in [request for request in queue if request.id == id]:
                    queue.remove(request)
                    self._done.append(Completion(CompletionKind.OP, id, status=-errno.ECANCELED))
            for seq in [seq for seq, (_, its) in link.flying.items() if its == id]:
                if link.flying[seq][0] == Kind.SEND:
                    link.stream.push(Frame(Kind.CANCEL, seq))
                self._cancelled.append((self._now + CANCEL_GRACE_NS, link, seq))
            self._transmit(link)

    def post_recv(self, id: int, addr: int, length: int) -> bool:
        self._buffers.append((id, addr, length))
        while self._messages and self._buffers:
            self._deliver(*self._messages.popleft())
        return True

    # ---- what comes in

    def poll(self, max: int, now_ns: int) -> list[Completion]:
        self._now = now_ns
        for descriptor, _events in self._epoll.poll(0):
            link = self._links.get(descriptor)
            if link is not None:
                self._receive(link)
                if not link.lost:
                    self._transmit(link)
            elif descriptor == self._listener.fileno():
                self._accept()
        self._watch_time(now_ns)
        return [self._done.popleft() for _ in range(min(max, len(self._done)))]

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.accept()
        except BlockingIOError:
            return  # the caller changed its mind
        sock.setblocking(False)
        self._add(sock)

    def _receive(self, link: Link) -> None:
        try:
            for frame in link.stream.pull():
                link.heard = self._now
                self._take(link, frame)
                if link.lost:
                    return
        except ConnectionError:
            self._lose(link, errno.ECONNRESET)
        except ValueError:
            self._done.append(Completion(CompletionKind.FAULT, status=-errno.EPROTO))
            self._lose(link, errno.EPROTO)

    def _take(self, link: Link, frame: Frame) -> None:
        if frame.kind == Kind.HELLO:
            wanted = frame.payload.decode(errors="replace")
            known = wanted in ("", self._incarnation)
            status = errno.EPROTO if frame.seq != VERSION else 0 if known else errno.ESTALE
            link.stream.push(Frame(Kind.WELCOME, status=status))
        elif frame.kind == Kind.WELCOME and frame.status:
            self._lose(link, frame.status)
        elif frame.kind == Kind.WELCOME and link.peer is not None:
            link.up = True
            self._done.append(Completion(CompletionKind.PEER_UP, peer=link.peer))
        elif frame.kind == Kind.WRITE:
            status = self._write(frame)
            link.stream.push(Frame(Kind.ACK, frame.seq, status))
            if frame.imm is not None and not status:
                self._done.append(Completion(CompletionKind.IMM, imm=frame.imm))
        elif frame.kind == Kind.SEND:
            self._deliver(link, frame.seq, frame.payload)
        elif frame.kind == Kind.CANCEL:
            waiting = [entry for entry in self._messages if entry[0] is link and entry[1] == frame.seq]
            for entry in waiting:
                self._messages.remove(entry)
                link.stream.push(Frame(Kind.ACK, frame.seq, errno.ECANCELED))
        elif frame.kind == Kind.ACK:
            self._acknowledged(link, frame.seq, frame.status)
        elif frame.kind == Kind.PING:
            link.stream.push(Frame(Kind.PONG))

    def _write(self, frame: Frame) -> int:
        """Apply a peer's write, if it stays inside what was opened for it. Nothing else may be trusted."""
        with self._region_lock:
            region = self._regions.get(frame.key)
            if region is None:
                return errno.EKEYREVOKED
            if not region.access & Access.REMOTE_WRITE:
                return errno.EACCES
            at = frame.addr - region.addr
            if at < 0 or at + len(frame.payload) > region.length:
                return errno.EFAULT
            ctypes.memmove(frame.addr, frame.payload, len(frame.payload))
        return 0

    def _deliver(self, link: Link, seq: int, message: bytes) -> None:
        if not self._buffers:
            self._messages.append((link, seq, message))
            return
        id, addr, length = self._buffers[0]
        status = errno.EMSGSIZE if len(message) > length else 0
        if not status:
            self._buffers.popleft()
            ctypes.memmove(addr, message, len(message))
            self._done.append(Completion(CompletionKind.RECV, id, len(message)))
        link.stream.push(Frame(Kind.ACK, seq, status))
        self._transmit(link)

    def _acknowledged(self, link: Link, seq: int, status: int) -> None:
        kind, id = link.flying.pop(seq, (0, 0))
        if kind:
            link.flying_sends -= kind == Kind.SEND
            self._done.append(Completion(CompletionKind.OP, id, status=-status, peer=link.peer or 0))

    def _watch_time(self, now: int) -> None:
        while self._cancelled and self._cancelled[0][0] < now:
            _end, link, seq = self._cancelled.popleft()
            self._acknowledged(link, seq, errno.ECANCELED)  # the peer does not answer: given up
        for link in [link for link in self._peers.values() if not link.lost]:
            link.heard = link.heard or now
            silent, heartbeat = now - link.heard, self._heartbeat_ns
            if silent > (PATIENCE * heartbeat if link.up else self._connect_ns):
                self._lose(link, errno.ETIMEDOUT)
            elif link.up and silent > heartbeat and now - link.pinged > heartbeat:
                link.pinged = now
                link.stream.push(Frame(Kind.PING))
                self._transmit(link)

    # ---- sleeping and ending

    def wait_fd(self) -> int:
        return self._epoll.fileno()

    def arm(self, on: bool) -> bool:
        return on and bool(self._done)  # the sockets themselves are level-triggered: nothing is missed

    def close(self) -> None:
        path = self._listener.getsockname()
        for link in list(self._links.values()):
            self._lose(link, errno.ECANCELED)
        os.unlink(path)
        self._listener.close()
        self._epoll.close()


def _listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or _somebody_listens(path):
                raise
            os.unlink(path)  # its owner was killed
            sock.bind(path)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise BackendError(f"pysock: cannot listen at {path}: {error.strerror or error}") from None
    return sock


def _somebody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


class PySockBackend:
    """What the entry point names."""

    name = "pysock"
    api_version = API_VERSION

    def probe(self) -> list[DeviceInfo | Unavailable]:
        return [DeviceInfo("pysock", self.name, caps=("imm",), note="an example: Unix sockets, pure Python")]

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        settings = config.settings
        os.makedirs(settings.local_dir, mode=0o700, exist_ok=True)
        domains: list[NativeDomain | Domain] = []
        try:
            for k in range(min(config.nics or 1, MAX_NICS)):
                name, timing = f"{config.name}.{k}", (settings.connect_timeout, settings.heartbeat)
                domains.append(PySockDomain(settings.local_dir, name, *timing))
        except BackendError:
            for domain in domains:
                assert isinstance(domain, PySockDomain)
                domain.close()
            raise
        return domains


backend = PySockBackend()
