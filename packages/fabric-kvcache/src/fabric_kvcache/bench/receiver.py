"""The decode side of `fabric kv bench`, a process of its own. It ends when its stdin does.

    python -m fabric_kvcache.bench.receiver --name NAME [--backend B] [--nics N]

It prints its address as JSON, then obeys one message at a time: "open" (allocate for a question), "arm" (overwrite the
memory, expect a number of immediates, wait for them, say when they were there), "check" (compare every byte), "close".
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fabric_core import FabricError, NetAddr, TransferEngine, TransferError
from fabric_core.cli.guard import fail
from fabric_core.cli.session import Buffer, Session, open_engine, parent_gone
from fabric_core.errors import DeadlineExceeded
from fabric_kvcache.bench.content import POISON, count_wrong, fill
from fabric_kvcache.bench.work import Work

__all__ = ["Receiver", "main"]

_MAX_BYTES = 64 << 30
_MAX_WAIT = 600.0  # seconds that an expectation may be armed for


class Receiver:
    """What the prefill side asks for."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.session = Session(engine)
        self.work: Work | None = None
        self.buffer: Buffer | None = None
        self.imm: int | None = None

    def run(self, stopped: threading.Event) -> None:
        with self.session:
            while not stopped.is_set():
                try:
                    message = self.session.hear(timeout=0.25)
                except DeadlineExceeded:
                    continue
                self._obey(message)
            self._close()

    def _obey(self, message: dict[str, Any]) -> None:
        try:
            sender = NetAddr.parse(str(message.get("from", "")))
        except FabricError as error:
            print(f"ignored a message without a sender: {error}", file=sys.stderr, flush=True)
            return
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "arm": self._arm,
            "check": self._check,
            "close": self._close,
        }

        try:
            command = commands.get(str(message.get("kind")))
            if command is None:
                raise ValueError(f"unknown request {message.get('kind')!r}")
            self.session.tell(sender, **command(**{"sender": sender, **message}))
        except (FabricError, KeyError, TypeError, ValueError, OSError, MemoryError) as error:
            self.session.tell(sender, "error", text=f"{type(error).__name__}: {error}"[:500])

    def _open(self, *, work: str, memory: str, **_: Any) -> dict[str, Any]:
        self._close()
        self.work = Work.from_json(work)
        if self.work.target_bytes > _MAX_BYTES:
            raise ValueError(f"{self.work.target_bytes} bytes asked for, at most {_MAX_BYTES}")
        self.buffer = Buffer(self.engine, self.work.target_bytes, memory)
        return {"kind": "opened", "desc": self.buffer.desc.to_bytes().hex(), "nics": self.engine.nics}

    def _arm(self, *, sender: NetAddr, count: int, timeout: float, poll: bool = False, **_: Any) -> dict[str, Any]:
        """Wait for a transfer. The processor's time counts from here on, so it includes this side of the copying.

        `poll`: look all the time, instead of sleeping until the engine wakes this thread.
        """
        assert self.buffer is not None, "open comes first"
        self._free()
        self._octets()[:] = POISON
        self.buffer.push(len(self.buffer.view))
        self.imm = self.engine.alloc_imm()
        limit = min(timeout, _MAX_WAIT)
        expectation = self.engine.expect_imm_count(self.imm, count, timeout=limit, peers=[sender])  # ends if it dies
        self.session.tell(sender, "armed", imm=self.imm)
        cpu = time.process_time_ns()
        try:
            while poll and not expectation.done:
                pass
            expectation.wait(_MAX_WAIT)
        except TransferError as error:
            return {"kind": "late", "text": str(error)[:500]}
        at = time.monotonic_ns()
        return {"kind": "arrived", "at_ns": at, "cpu_ns": time.process_time_ns() - cpu}

    def _check(self, *, tail: int, **_: Any) -> dict[str, Any]:
        """Compare the whole memory: what was to be written, and what was not."""
        assert self.work is not None
        assert self.buffer is not None
        work = self.work
        surplus = self._free()
        wanted = np.full(work.target_bytes, POISON, np.uint8)
        tables = work.tables(work.dst, 1)
        fill(wanted, work.target, tables, range(work.tokens), work.seed, work.scales)
        wanted[work.tail_offset : work.tail_offset + work.tail_bytes] = tail
        self.buffer.pull(len(self.buffer.view))
        wrong = count_wrong(self._octets(), wanted)
        return {"kind": "checked", "wrong": wrong, "surplus": surplus, "bytes": len(wanted)}

    def _octets(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert self.buffer is not None
        return np.frombuffer(self.buffer.view, np.uint8)

    def _free(self) -> int:
        surplus = 0 if self.imm is None else self.engine.free_imm(self.imm)
        self.imm = None
        return surplus

    def _close(self, **_: Any) -> dict[str, Any]:
        self._free()
        if self.buffer is not None:
            self.buffer.close()
        self.buffer = self.work = None
        return {"kind": "closed"}


def main() -> int:
    parser = argparse.ArgumentParser(description="The decode side of `fabric kv bench`.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--backend", default="")
    parser.add_argument("--nics", type=int)
    parser.add_argument("--device", default="cpu")
    words = parser.parse_args()
    stopped = parent_gone()
    try:
        with open_engine(backend=words.backend, name=words.name, nics=words.nics, device=words.device) as engine:
            receiver = Receiver(engine)
            print(json.dumps({"address": str(engine.address)}), flush=True)
            receiver.run(stopped)
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
