"""NIXL with its UCX backend. Its progress thread is off: with it, every figure here is worse.

Prepared requests are posted again and again, which is its quickest way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from adapter import Adapter, address_of, anonymous
from harness import main, parse


class Nixl(Adapter):
    name = "nixl"
    distribution = "nixl-cu12"

    def open(self, role: str, nbytes: int) -> tuple[bytes, int]:
        api: Any = importlib.import_module("nixl_cu12._api")
        self.agent: Any = api.nixl_agent(role, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.memory = anonymous(nbytes)
        self.base, self.nbytes = address_of(self.memory), nbytes
        self.registration = self.register(self.memory)
        self.prepared: dict[tuple[int, int, bytes], Any] = {}
        self.pages: dict[int, tuple[Any, Any]] = {}
        return self.agent.get_agent_metadata(), self.base

    def connect(self, other: tuple[bytes, int]) -> None:
        metadata, self.remote = other
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.agent.make_connection(self.peer)

    def _post(self, offset: int, nbytes: int, notification: bytes = b"") -> Any:
        """Post, and return the request, or None if it is over already."""
        key = offset, nbytes, notification
        request = self.prepared.get(key)
        if request is None:
            here = self.agent.get_xfer_descs([(self.base + offset, nbytes, 0)], "DRAM")
            there = self.agent.get_xfer_descs([(self.remote + offset, nbytes, 0)], "DRAM")
            request = self.agent.initialize_xfer("WRITE", here, there, self.peer, notification)
            self.prepared[key] = request
        state = self.agent.transfer(request, notification) if notification else self.agent.transfer(request)
        return request if self._pending(state) else None

    @staticmethod
    def _pending(state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("NIXL says ERR")
        return state != "DONE"

    def write(self, offset: int, nbytes: int) -> Any:
        return self._post(offset, nbytes)

    def done(self, operation: Any) -> bool:
        return operation is None or not self._pending(self.agent.check_xfer_state(operation))

    def notify(self) -> None:
        self.agent.send_notif(self.peer, b"all")

    def poll(self) -> int:
        new = self.agent.get_new_notifs()
        return sum(len(messages) for messages in new.values()) if new else 0

    def write_notify(self, offset: int, nbytes: int) -> None:
        request = self._post(offset, nbytes, b"one")
        while not self.done(request):  # without being polled, it does not send the notification
            pass

    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], Any], int]:
        np: Any = importlib.import_module("numpy")
        if page not in self.pages:
            rows = np.zeros((self.nbytes // page, 3), dtype=np.uint64)
            rows[:, 0] = np.arange(len(rows), dtype=np.uint64) * page
            rows[:, 1] = page
            shift = np.array([1, 0, 0], dtype=np.uint64)
            self.pages[page] = (
                self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows + shift * np.uint64(self.base), "DRAM"),
                self.agent.prep_xfer_dlist(self.peer, rows + shift * np.uint64(self.remote), "DRAM"),
            )
        source, target = self.pages[page]
        request = self.agent.make_prepped_xfer(
            "WRITE", source, np.asarray(here, dtype=np.int32), target, np.asarray(there, dtype=np.int32)
        )
        return lambda: request if self._pending(self.agent.transfer(request)) else None, 0

    def register(self, memory: Any) -> Any:
        return self.agent.register_memory([(address_of(memory), len(memory), 0, "")], "DRAM")

    def deregister(self, registration: Any) -> None:
        self.agent.deregister_memory(registration)


if __name__ == "__main__":
    main(parse(), Nixl)
