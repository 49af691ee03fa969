"""Two `fabric` processes talk: small JSON messages over the engine's own SEND, so that nothing but fabric is tested.

Control messages begin with "{"; anything else is payload of the sendrecv benchmark and goes to `on_data`. One pool of
receives serves both. Callbacks come on the engine's callback thread, everything else runs on the caller's.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fabric_core.errors import DeadlineExceeded, FabricError, ProtocolError
from fabric_core.gpu import told
from fabric_core.native_lib import ffi, lib
from fabric_core.streams import gpu_of

if TYPE_CHECKING:
    from fabric_core import MrDesc, MrHandle, NetAddr, SharedMemory, TransferEngine

__all__ = ["Buffer", "Session", "give_up", "open_engine", "parent_gone", "parse_address"]

#: Receives posted at a time, and the longest message (or the backend's own limit, if that is lower).
_RECEIVES = 64
_LONGEST = 64 * 1024

Message = dict[str, Any]


def open_engine(*, backend: str = "", name: str = "", nics: int | None = None, device: str = "cpu") -> TransferEngine:
    """Open an engine. Raises BackendError, Unsupported or ConfigError."""
    from fabric_core import TransferEngine

    return TransferEngine.open(
        device, backend or None, nics=nics, name=name or f"fabric-{os.getpid()}-{secrets.token_hex(2)}"
    )


def parse_address(text: str) -> NetAddr:
    """Read an address; a bare name means the local backend. Raises ProtocolError."""
    from fabric_core import NetAddr

    return NetAddr.parse(text if ":" in text else f"local:{text}")


def parent_gone() -> threading.Event:
    """Return an event that is set when stdin ends: a helper must not outlive whoever started it."""
    ended = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: a daemon thread inside it breaks the interpreter's exit
            pass
        ended.set()

    threading.Thread(target=watch, name="fabric-parent", daemon=True).start()
    return ended


def give_up(what: str, seconds: float, peer: object) -> NoReturn:
    """Raise the DeadlineExceeded of a Python polling loop."""
    raise DeadlineExceeded(f"{what} did not arrive within {seconds:g} s", peer=str(peer), op="bench", code="ETIME")


class Buffer:
    """A registered buffer: shareable ("engine"), ordinary ("user") or GPU ("gpu") memory.

    What is in it is seen through `view`: of GPU memory a copy, brought up to date by `pull`, carried over by `push`.
    """

    def __init__(self, engine: TransferEngine, nbytes: int, kind: str) -> None:
        self.memory: SharedMemory | mmap.mmap = engine.empty(nbytes) if kind == "engine" else mmap.mmap(-1, nbytes)
        self.view = memoryview(self.memory).cast("B")
        self.handle: MrHandle
        self.desc: MrDesc
        self._ptr = self._gpu = 0
        if kind == "gpu":
            self._gpu = gpu_of(engine, None)
            out = ffi.new("uint64_t *")
            told(lib.fab_cuda_alloc(self._gpu, nbytes, out), f"{nbytes} bytes of cuda:{self._gpu}")
            self._ptr = out[0]
            self.push(nbytes)
            self.handle, self.desc = engine.reg_mr((self._ptr, nbytes, f"cuda:{self._gpu}"))
        else:
            self.handle, self.desc = engine.reg_mr(self.memory)

    def _host(self) -> int:
        return int(ffi.cast("uintptr_t", ffi.from_buffer(self.view)))

    def push(self, length: int) -> None:
        """Have the first `length` bytes of `view` in the memory."""
        if self._ptr:
            told(lib.fab_cuda_copy(self._gpu, self._ptr, self._host(), length), "copy to the GPU")

    def pull(self, length: int) -> None:
        """Have the first `length` bytes of the memory in `view`."""
        if self._ptr:
            told(lib.fab_cuda_copy(self._gpu, self._host(), self._ptr, length), "copy from the GPU")

    def close(self) -> None:
        """Deregister; the memory itself goes when nobody looks at it any more."""
        self.handle.close()
        self.view.release()
        lib.fab_cuda_free(self._gpu, self._ptr)
        self._ptr = 0


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

    def tell(self, to: NetAddr, kind: str, *, within: float | None = None, **fields: Any) -> None:
        """Send a control message and wait until it is delivered. Raises TransferError."""
        limit = self.timeout if within is None else within
        content = {"kind": kind, "from": str(self.engine.address), **fields}
        self.engine.submit_send(to, json.dumps(content).encode(), timeout=limit).wait(limit + 1)

    def leave(self, peer: NetAddr) -> None:
        """Say "stop" if that can still be said: after Ctrl-C, so that the peer does not wait for more."""
        with contextlib.suppress(FabricError):
            self.tell(peer, "stop", within=1.0)

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
