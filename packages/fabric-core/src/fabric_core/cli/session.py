"""Two `fabric` processes talk: small JSON messages over the engine's own SEND, so that nothing but fabric is tested.

Control messages begin with "{"; anything else is payload of the sendrecv benchmark and goes to `on_data`. One pool of
receives serves both. Callbacks come on the engine's callback thread, everything else runs on the caller's.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import secrets
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fabric_core.errors import DeadlineExceeded, ProtocolError

if TYPE_CHECKING:
    from fabric_core import MrDesc, MrHandle, NetAddr, SharedMemory, TransferEngine

__all__ = ["Buffer", "Session", "give_up", "open_engine", "parse_address"]

#: Receives posted at a time, and the longest message (or the backend's own limit, if that is lower).
_RECEIVES = 64
_LONGEST = 64 * 1024

Message = dict[str, Any]


def open_engine(*, backend: str = "", name: str = "", nics: int | None = None) -> TransferEngine:
    """Open an engine for host memory. Raises BackendError, Unsupported or ConfigError."""
    from fabric_core import TransferEngine

    return TransferEngine.open(
        "cpu", backend or None, nics=nics, name=name or f"fabric-{os.getpid()}-{secrets.token_hex(2)}"
    )


def parse_address(text: str) -> NetAddr:
    """Read an address; a bare name means the local backend. Raises ProtocolError."""
    from fabric_core import NetAddr

    return NetAddr.parse(text if ":" in text else f"local:{text}")


def give_up(what: str, seconds: float, peer: object) -> NoReturn:
    """Raise the DeadlineExceeded of a Python polling loop."""
    raise DeadlineExceeded(f"{what} did not arrive within {seconds:g} s", peer=str(peer), op="bench", code="ETIME")


class Buffer:
    """A registered buffer: shareable ("engine") or ordinary ("user") memory."""

    def __init__(self, engine: TransferEngine, nbytes: int, kind: str) -> None:
        self.memory: SharedMemory | mmap.mmap = engine.empty(nbytes) if kind == "engine" else mmap.mmap(-1, nbytes)
        self.view = memoryview(self.memory).cast("B")
        self.handle: MrHandle
        self.desc: MrDesc
        self.handle, self.desc = engine.reg_mr(self.memory)

    def close(self) -> None:
        """Deregister; the memory itself goes when nobody looks at it any more."""
        self.handle.close()
        self.view.release()


class Session:
    """An engine, its receives, and an inbox of control messages."""

    def __init__(self, engine: TransferEngine, timeout: float = 10.0) -> None:
        self.engine = engine
        self.timeout = timeout  #: seconds to wait for an answer
        self.on_data: Callable[[bytes], None] | None = None
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.stops: set[str] = set()  #: senders of "stop", which overtakes the inbox: it ends what is being done
        self.longest = min(_LONGEST, engine.max_message)
        self._pool = engine.submit_recvs(self.longest, _RECEIVES, self._arrived)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def _arrived(self, message: bytes) -> None:
        if message[:1] != b"{":
            if self.on_data is not None:
                self.on_data(message)
            return
        try:
            content = json.loads(message)
        except ValueError:
            print(f"ignored a message of {len(message)} bytes that is not JSON", file=sys.stderr)
            return
        if not isinstance(content, dict):
            return
        if content.get("kind") == "stop":
            self.stops.add(str(content.get("from")))
        else:
            self.inbox.put(content)

    def tell(self, to: NetAddr, kind: str, **fields: Any) -> None:
        """Send a control message and wait until it is delivered. Raises TransferError."""
        content = {"kind": kind, "from": str(self.engine.address), **fields}
        self.engine.submit_send(to, json.dumps(content).encode(), timeout=self.timeout).wait(self.timeout + 1)

    def hear(self, *kinds: str, peer: object = "", timeout: float | None = None) -> Message:
        """Return the next message of one of these kinds. Raises DeadlineExceeded, ProtocolError on "error"."""
        limit = self.timeout if timeout is None else timeout
        try:
            message = self.inbox.get(timeout=limit)
        except queue.Empty:
            text = f"no answer ({' or '.join(kinds)}) within {limit:g} s"
            raise DeadlineExceeded(text, peer=str(peer), op="recv", code="ETIME") from None
        if message.get("kind") == "error":
            raise ProtocolError(f"the peer {peer} refused: {message.get('text')}")
        if kinds and message.get("kind") not in kinds:
            raise ProtocolError(f"the peer {peer} said {message.get('kind')!r}, expected {' or '.join(kinds)}")
        return message
