"""Mooncake's transfer engine over TCP, the transport it has without a NIC, peers finding each other by handshake."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from adapter import Adapter, address_of, anonymous
from harness import main, parse

_HERE = "127.0.0.1"

#: (batch, the status call blocks until its end)
_Operation = tuple[int, bool]


class Mooncake(Adapter):
    name = "mooncake"
    distribution = "mooncake-transfer-engine-non-cuda"
    threaded = True

    def open(self, role: str, nbytes: int) -> tuple[str, int]:
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", _HERE)
        os.environ.setdefault("GLOG_minloglevel", "2")
        # A request of more than 1,024 pages is refused by default.
        os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "8192")
        module: Any = importlib.import_module("mooncake.engine")
        self.engine: Any = module.TransferEngine()
        self._must(self.engine.initialize(_HERE, "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
        try:
            self.note = module.TransferNotify("note", "1")
        except TypeError:
            self.note = module.TransferNotify()
            self.note.name, self.note.msg = "note", "1"
        self.opcode = module.TransferOpcode.Write
        self.memory = anonymous(nbytes)
        self.base = address_of(self.memory)
        self.register(self.memory)
        return f"{_HERE}:{self.engine.get_rpc_port()}", self.base

    @staticmethod
    def _must(good: bool, what: str) -> None:
        if not good:
            raise RuntimeError(f"Mooncake: {what} failed")

    def connect(self, other: tuple[str, int]) -> None:
        self.peer, self.remote = other

    def write(self, offset: int, nbytes: int) -> _Operation:
        batch = self.engine.transfer_submit_write(self.peer, self.base + offset, self.remote + offset, nbytes)
        self._must(batch != 0, "transfer_submit_write")
        return batch, False

    def done(self, operation: _Operation) -> bool:
        batch, blocks = operation
        if blocks:
            self._must(self.engine.get_batch_transfer_status([batch]) == 0, "a batch")
            return True
        state = self.engine.transfer_check_status(batch)
        self._must(state >= 0, "a write")
        return bool(state == 1)

    def notify(self) -> None:
        """Notifications only come with a write: the first bytes are written once more."""
        self.write_notify(0, 64)

    def write_notify(self, offset: int, nbytes: int) -> None:
        here, there = self.base + offset, self.remote + offset
        self._must(
            self.engine.transfer_sync(self.peer, here, there, nbytes, self.opcode, self.note) == 0, "transfer_sync"
        )

    def poll(self) -> int:
        return len(self.engine.get_notifies())

    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], _Operation], int]:
        source = [self.base + k * page for k in here]
        target = [self.remote + k * page for k in there]
        lengths = [page] * len(source)

        def post() -> _Operation:
            batch = self.engine.batch_transfer_async_write(self.peer, source, target, lengths)
            self._must(batch != 0, "batch_transfer_async_write")
            return batch, True

        return post, 0

    def register(self, memory: Any) -> int:
        address = address_of(memory)
        self._must(self.engine.register_memory(address, len(memory)) == 0, "register_memory")
        return address

    def deregister(self, registration: int) -> None:
        self._must(self.engine.unregister_memory(registration) == 0, "unregister_memory")


if __name__ == "__main__":
    main(parse(), Mooncake)
