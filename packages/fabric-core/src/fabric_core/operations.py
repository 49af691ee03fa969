"""Results that are still to come: `Transfer` (something we sent) and `Expectation` (something we wait for).

Both are waited for, polled, awaited, cancelled, or given a callback in the same way. The state lives in C; these
objects hold a handle to it, and give it back when they are garbage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Self

from fabric_core.errors import CODES, BadRange, EngineClosed, FabricError, WaitTimeout, code_name, transfer_error
from fabric_core.native_lib import fast, ffi, lib

if TYPE_CHECKING:
    from fabric_core.base import EngineBase

__all__ = ["Expectation", "Operation", "Transfer"]

_STATES = ("pending", "done", "failed", "cancelled")
_OPS = {1: "write", 2: "paged_writes", 3: "scatter", 4: "barrier", 5: "send"}
_SLICE = 0.1  # seconds


class Operation:
    """What Transfer and Expectation have in common."""

    __slots__ = ("__weakref__", "_callbacks", "_core", "_engine", "_handle")

    # the C functions of the kind: set by the subclasses
    _poll: Callable[[int, int], int]
    _notify: Callable[[int, int], int]
    _release: Callable[[int, int], int]
    _wait: Callable[[Any, int, int], int]
    _outcome: Callable[[Any, int, Any], int]
    _cancel: Callable[[Any, int], int]

    def __init__(self, engine: EngineBase, handle: int) -> None:
        self._engine = engine
        self._core = engine._core  # keeps the C engine's memory, also after close()
        self._handle = handle
        self._callbacks: list[Callable[[Any], object]] | None = None

    @property
    def native_handle(self) -> int:
        """Its number in C, for native callers (`native_api`). Hold this object for as long as it is used."""
        return self._handle

    # ---- looking

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly. Polls, and so helps the engine along; never blocks."""
        return self._phase() != 0

    @property
    def state(self) -> str:
        """ "pending", "done", "failed" or "cancelled"."""
        return _STATES[self._phase()]

    def _phase(self) -> int:
        phase = self._poll(self._core.address, self._handle)
        if phase < 0:
            raise EngineClosed("this operation belongs to an engine of another process: a fork does not take it along")
        return phase

    def exception(self) -> FabricError | None:
        """Return why it ended badly; None while it is pending or when it is fine."""
        self._phase()
        out = ffi.new("fab_outcome *")
        self._outcome(self._core.pointer, self._handle, out)
        return self._error(out) if out.phase > lib.FAB_DONE else None

    def _error(self, out: Any) -> FabricError:
        engine = self._engine
        peer, nic = engine._peer_name(self._group(), out.peer), engine._nic_name(self._group(), out.nic)
        words = engine._backend_words(nic, peer or "", out.err) if nic else ""
        code = code_name(out.err)
        meaning = CODES[code].meaning if code in CODES else "failed"
        return transfer_error(
            out.err,
            op=self._op_name(out),
            peer=peer,
            nic=nic,
            reason=f"{meaning}: {words}" if words else "",
            writes=(int(out.ended), int(out.units)) if out.units else None,
        )

    def _op_name(self, out: Any) -> str:
        return _OPS.get(out.op, "operation")

    def _group(self) -> int:
        return 0

    # ---- waiting

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended; the GIL is free meanwhile.

        Args:
            timeout: seconds to wait; None: `settings.timeout`. It bounds this call, not the operation.

        Raises:
            WaitTimeout: it is still pending.
            TransferError: it ended badly (PeerLost, DeadlineExceeded, RemoteAccessError, Cancelled, ...).
        """
        seconds = self._engine.settings.timeout if timeout is None else timeout
        if not seconds >= 0:
            raise BadRange(f"wait(timeout={timeout!r}): a number of seconds, 0 or more")
        end = time.monotonic() + seconds
        left = seconds
        while True:  # in slices, so that Python gets to handle signals (Ctrl-C)
            phase = self._wait(self._core.pointer, self._handle, int(max(0.0, min(left, _SLICE)) * 1e9))
            left = end - time.monotonic()
            if phase != lib.FAB_PENDING or left <= 0:
                break
        if phase == lib.FAB_DONE:
            return
        if phase < 0:
            self._phase()
        if phase == lib.FAB_PENDING:
            raise WaitTimeout(f"{self!r} has not ended within {seconds:g} s; it goes on: wait again, or cancel() it")
        error = self.exception()
        assert error is not None
        raise error

    def cancel(self) -> None:
        """Ask for its end. It ends once no NIC reads its source any more (C7), as cancelled unless it was faster."""
        self._phase()
        self._cancel(self._core.pointer, self._handle)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` on the engine's callback thread when it ends, also if it has ended already."""
        self._phase()
        self._engine._callbacks.add(self, callback)

    def __await__(self) -> Generator[Any, None, None]:
        if self._phase() == 0:
            yield from self._future().__await__()
        error = self.exception()
        if error is not None:
            raise error

    def _future(self) -> asyncio.Future[None]:
        """A future that the callback thread completes. Cancelling the awaiting task cancels only the waiting."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: Any) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        self.add_done_callback(ended)
        future.add_done_callback(lambda f: self._engine._callbacks.forget(self, ended) if f.cancelled() else None)
        return future

    def __del__(self) -> None:
        try:
            self._release(self._core.address, self._handle)
        except (AttributeError, TypeError):  # half made, or the interpreter is going down
            pass

    def __repr__(self) -> str:
        phase = self._poll(self._core.address, self._handle)
        return f"<{type(self).__name__} {self._handle:#x} {_STATES[phase] if phase >= 0 else 'of another process'}>"

    def __enter__(self) -> Self:
        raise TypeError("an operation is no context manager: call .wait(), or await it")

    def __exit__(self, *exc: object) -> None: ...


class Transfer(Operation):
    """A write, paged write, scatter, barrier or send that was submitted. Ends exactly once (C1)."""

    __slots__ = ()

    _poll = staticmethod(fast.transfer_poll)
    _notify = staticmethod(fast.transfer_notify)
    _release = staticmethod(fast.transfer_release)
    _wait = staticmethod(lib.fab_transfer_wait)
    _outcome = staticmethod(lib.fab_transfer_outcome)
    _cancel = staticmethod(lib.fab_transfer_cancel)

    def _group(self) -> int:
        return self._handle >> 24 & 0xFF


class Expectation(Operation):
    """A number of immediates that somebody waits for."""

    __slots__ = ("count", "imm")

    _poll = staticmethod(fast.expect_poll)
    _notify = staticmethod(fast.expect_notify)
    _release = staticmethod(fast.expect_release)
    _wait = staticmethod(lib.fab_expect_wait)
    _outcome = staticmethod(lib.fab_expect_outcome)
    _cancel = staticmethod(lib.fab_expect_cancel)

    def __init__(self, engine: EngineBase, handle: int, imm: int, count: int) -> None:
        super().__init__(engine, handle)
        self.imm = imm
        self.count = count

    def _op_name(self, out: Any) -> str:
        return f"expect {self.count} of immediate {self.imm:#x}"
