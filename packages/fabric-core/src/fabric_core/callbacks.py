"""The callback thread: the one place where user code runs because of the engine.

It waits in C without the GIL, is woken once per batch, and calls whatever was registered. An exception there is logged
with its traceback and reported to `engine.on_error`; the engine goes on (C9).
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabric_core.errors import CODES, BackendError, FabricError, NicLost, code_name, transfer_error
from fabric_core.native_lib import ffi, lib

if TYPE_CHECKING:
    from fabric_core.base import EngineBase
    from fabric_core.operations import Operation

__all__ = ["CallbackThread"]

log = logging.getLogger("fabric.callbacks")
_BATCH = 256
_EVENT = struct.Struct("=IiQQQQ")  # a fab_event, read in one go: attributes of a C struct are looked up one by one
_TRANSFER, _EXPECT, _RECV, _WATCH = lib.FAB_EV_TRANSFER, lib.FAB_EV_EXPECT, lib.FAB_EV_RECV, lib.FAB_EV_WATCH


class CallbackThread:
    """Dispatches the events of one engine. Started at the first need, ended by `stop`."""

    def __init__(self, engine: EngineBase) -> None:
        self._core = engine._core
        self._engine_ref = weakref.ref(engine)  # an engine that nobody holds any more must be collected, and close
        # Reentrant: what is dropped under it may end a watcher, whose __del__ comes back here.
        self._lock = threading.RLock()
        self._operations: dict[tuple[int, int], Operation] = {}  # keeps them alive until their event came
        self._pools: dict[int, tuple[int, Callable[[bytes], object]]] = {}  # number: (bytes of a buffer, on_message)
        self._watchers: dict[int, Callable[[int, int], object]] = {}
        self._over = False  # the thread has ended, and with the engine every operation: callbacks are called at once
        self._thread = threading.Thread(target=self._run, name="fabric-callbacks", daemon=True)
        self._thread.start()

    # ---- registering (any thread)

    def add(self, operation: Operation, callback: Callable[[Any], object]) -> None:
        """Have `callback(operation)` called once, after the operation has ended."""
        from fabric_core.operations import Transfer

        if not callable(callback):
            raise TypeError(f"a callback can be called, a {type(callback).__name__} cannot")
        kind = lib.FAB_EV_TRANSFER if isinstance(operation, Transfer) else lib.FAB_EV_EXPECT
        with self._lock:
            if self._over:
                first, operation._callbacks = False, ()  # type: ignore[assignment]
            elif operation._callbacks is None:
                operation._callbacks = [callback]
                self._operations[kind, operation._handle] = operation
                first = True
            else:  # its event is on the way, or was dispatched: then `_dispatch` left an empty tuple behind
                first = False
                if isinstance(operation._callbacks, list):
                    operation._callbacks.append(callback)
                    return
        if first:
            operation._notify(operation._core.address, operation._handle)
        else:
            self.call(callback, operation)

    def forget(self, operation: Operation, callback: Callable[[Any], object]) -> None:
        """Take back a callback that has not been called yet."""
        with self._lock:
            if isinstance(operation._callbacks, list) and callback in operation._callbacks:
                operation._callbacks.remove(callback)

    def add_pool(self, pool: int, length: int, on_message: Callable[[bytes], object]) -> None:
        """Have messages that arrive in a pool handed to `on_message`."""
        with self._lock:
            self._pools[pool] = (length, on_message)

    def drop_pool(self, pool: int) -> None:
        """No further messages of this pool."""
        with self._lock:
            self._pools.pop(pool, None)

    def add_watcher(self, watcher: int, on_change: Callable[[int, int], object]) -> None:
        """Have changes of a watched word handed to `on_change(old, new)`."""
        with self._lock:
            self._watchers[watcher] = on_change

    def drop_watcher(self, watcher: int) -> None:
        """No further changes."""
        with self._lock:
            self._watchers.pop(watcher, None)

    def is_current(self) -> bool:
        """Whether the caller is the callback thread: it must not wait for itself."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """Deliver what is left, then end the thread."""
        lib.fab_events_stop(self._core.pointer)
        if not self.is_current():
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning("a callback still runs %.1f s after close() of its engine; it is left alone", timeout)

    # ---- the thread

    def _run(self) -> None:
        core = self._core
        events = ffi.new("fab_event[]", _BATCH)
        memory = ffi.buffer(events)
        wait, pointer, dispatch = lib.fab_events_wait, core.pointer, self._dispatch
        while True:
            n = wait(pointer, events, _BATCH, 1 << 40)
            if n == -errno.ESHUTDOWN:
                break
            for i in range(n):
                event = _EVENT.unpack_from(memory, i * _EVENT.size)
                try:
                    dispatch(*event)
                except Exception:
                    log.exception("an event of kind %d could not be dispatched", event[0])

        with self._lock:
            self._over = True
            late = list(self._operations)  # registered after the last look at the events
        for kind, id in late:
            self._dispatch(kind, 0, id, 0, 0, 0)

    def _dispatch(self, kind: int, status: int, id: int, a: int, b: int, c: int) -> None:
        if kind == _WATCH:
            on_change = self._watchers.get(id)  # one look: no lock needed
            if on_change is not None:
                self.call(on_change, a, b)
        elif kind in (_TRANSFER, _EXPECT):
            with self._lock:
                operation = self._operations.pop((kind, id), None)
                callbacks = operation._callbacks if operation is not None else None
                if operation is not None:
                    operation._callbacks = ()  # type: ignore[assignment]  # later ones are called at once
            for callback in callbacks or ():
                self.call(callback, operation)
        elif kind == _RECV:
            message = bytes(ffi.buffer(ffi.cast("char *", a), b))
            try:
                self._message(id, message)
            finally:
                lib.fab_recv_return(self._core.pointer, 0, c)  # only now may the next message take the buffer
        elif kind == lib.FAB_EV_PEER_LOST:
            self._peer_lost(id)
        elif kind == lib.FAB_EV_NIC:
            self._nic_changed(id >> 32, id & 0xFFFFFFFF, a, status)
        elif kind == lib.FAB_EV_FAULT:
            code = code_name(status)
            known = CODES.get(code)
            why = f": {known.meaning} [{code}]; {known.cure}" if known else f" [{code}]"
            self.report(BackendError(f"the backend refused something that came in{why}"))

    def _message(self, pool: int, message: bytes) -> None:
        """Hand a message to its pool; what a closed pool's buffers still take goes to another pool."""
        with self._lock:
            found = self._pools.get(pool)
            if found is None:
                found = next((p for p in self._pools.values() if p[0] >= len(message)), None)
        if found is not None:
            self.call(found[1], message)
        else:
            self.report(
                BackendError(
                    f"a message of {len(message)} bytes came in after its receive pool was closed: it is dropped"
                )
            )

    def _peer_lost(self, id: int) -> None:
        engine = self._engine_ref()
        if engine is None or engine.on_peer_lost is None:
            return
        group, peer = id >> 32, id & 0xFFFFFFFF
        out = ffi.new("fab_peer_stats *")
        lib.fab_engine_peer_stats(self._core.pointer, group, peer, out)
        name = engine._peer_name(group, peer) or "?"
        self.call(engine.on_peer_lost, transfer_error(out.status or -errno.ECONNRESET, peer=name))

    def _nic_changed(self, group: int, nic: int, peer: int, status: int) -> None:
        engine = self._engine_ref()
        if engine is None:
            return
        name = engine._nic_name(group, nic)
        to = engine._peer_name(group, peer)
        if status:
            # NicLost whatever the status says of peers: told of a path only while the peer has another (decision 0007)
            code = code_name(status)
            reason = "nothing comes back from there over this NIC" if to and code == "ETIMEDOUT" else ""
            self.report(NicLost(reason, nic=name, peer=to, code=code, cure="the other NICs carry on"))
        else:
            log.warning("%s is back", f"the path over {name} to {to}" if to else f"NIC {name}")

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Run user code: whatever it raises is reported and goes no further."""
        try:
            callback(*args)
        except BaseException as error:  # SystemExit too: it may end a program, not the thread that serves all callbacks
            log.error("callback %r raised", callback, exc_info=error)
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Tell `engine.on_error`; it may not raise either."""
        engine = self._engine_ref()
        handler = engine.on_error if engine is not None else None
        if handler is None:
            if isinstance(error, FabricError):
                log.error("%s", error)
            return
        try:
            handler(error)
        except BaseException:
            log.exception("engine.on_error itself raised")
