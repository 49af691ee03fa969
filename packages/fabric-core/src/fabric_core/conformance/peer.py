"""The other side, as a program of its own: `python -m fabric_core.conformance.peer`.

Reads one JSON object per line from stdin, `{"do": verb, ...}`, and answers each with one line on stdout,
`{"ok": value}` or `{"error": {...}}`. It ends when stdin does, and when its parent dies. `remote.py` drives it.

Verbs never wait for the network, except `wait`, which has a deadline: the driver stays in charge of time.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any

from fabric_core import MrDesc, NetAddr, Pages, ScatterDst, TransferEngine
from fabric_core.conformance.kit import Calls, Memory, pattern
from fabric_core.operations import Operation

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """SIGKILL when the thread that started us ends. The parent may be gone already: then stdin is at its end."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def as_error(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "peer": getattr(error, "peer", None),
        "code": getattr(error, "code", None),
    }


def desc_of(text: str) -> MrDesc:
    return MrDesc.from_bytes(base64.b64decode(text))


class Peer:
    """One engine and what the driver made on it, by number."""

    def __init__(self) -> None:
        self.engine: TransferEngine
        self.memories: dict[int, Memory] = {}
        self.operations: dict[int, Operation] = {}
        self.seen: dict[int, Calls] = {}  # expectation -> for each callback, the checksums of its ranges
        self.messages: dict[int, Calls] = {}
        self.pools: dict[int, Any] = {}
        self.faults = Calls()
        self._last = 0

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _started(self, operation: Operation) -> int:
        number = self._number()
        self.operations[number] = operation
        return number

    def open(self, backend: str, nics: int, name: str | None, settings: dict[str, Any], imports: list[str]) -> str:
        for module in imports:
            importlib.import_module(module)
        self.engine = TransferEngine.open("cpu", backend, nics=nics, name=name, **settings)
        self.engine.on_error = self.faults
        return str(self.engine.address)

    def close(self, timeout: float) -> None:
        self.engine.close(timeout)

    def memory(self, nbytes: int, seed: int | None, byte: int | None, shared: bool, write: bool) -> dict[str, Any]:
        fill = pattern(seed, nbytes) if seed is not None else bytes([byte or 0])
        memory = Memory(self.engine, nbytes, fill, shared=shared, write=write)
        number = self._number()
        self.memories[number] = memory
        return {"number": number, "desc": base64.b64encode(memory.desc.to_bytes()).decode()}

    def put(self, memory: int, seed: int, nbytes: int, offset: int) -> None:
        self.memories[memory].put(pattern(seed, nbytes), offset)

    def get(self, memory: int, offset: int, length: int | None) -> str:
        return base64.b64encode(self.memories[memory].get(offset, length)).decode()

    def crc(self, memory: int, offset: int, length: int | None) -> int:
        return zlib.crc32(self.memories[memory].get(offset, length))

    def dereg(self, memory: int) -> None:
        self.engine.dereg_mr(self.memories[memory].handle)

    def alloc_imm(self) -> int:
        return self.engine.alloc_imm()

    def free_imm(self, imm: int) -> int:
        return self.engine.free_imm(imm)

    def imm_count(self, imm: int) -> int:
        return self.engine.imm_count(imm)

    def expect(
        self, imm: int, count: int, timeout: float | None, peers: list[str], ranges: list[tuple[int, int, int]]
    ) -> int:
        """`ranges`: (memory, offset, length) to checksum inside the callback, where the payload has to be visible."""
        seen = Calls()

        def look(_expectation: Operation) -> None:
            seen([zlib.crc32(self.memories[number].get(at, size)) for number, at, size in ranges])

        addresses = [NetAddr.parse(peer) for peer in peers]
        expectation = self.engine.expect_imm_count(imm, count, look, timeout=timeout, peers=addresses)
        number = self._started(expectation)
        self.seen[number] = seen
        return number

    def write(self, length: int, imm: int | None, src: tuple[int, int], dst: tuple[str, int], **more: Any) -> int:
        source = (self.memories[src[0]].handle, src[1])
        target = (desc_of(dst[0]), dst[1])
        return self._started(self.engine.submit_single_write(length, imm, source, target, **more))

    def paged(
        self, length: int, imm: int | None, src: tuple[int, list[int], int], dst: tuple[str, list[int], int]
    ) -> int:
        source = (self.memories[src[0]].handle, Pages(src[1], src[2]))
        target = (desc_of(dst[0]), Pages(dst[1], dst[2]))
        return self._started(self.engine.submit_paged_writes(length, imm, source, target))

    def scatter(self, imm: int | None, memory: int, targets: list[tuple[str, int, int, int]]) -> int:
        parts = [ScatterDst(desc_of(desc), length, at, to) for desc, length, at, to in targets]
        return self._started(self.engine.submit_scatter(None, None, imm, self.memories[memory].handle, parts))

    def barrier(self, imm: int, descs: list[str]) -> int:
        return self._started(self.engine.submit_barrier(None, None, imm, [desc_of(desc) for desc in descs]))

    def send(self, to: str, seed: int, nbytes: int, timeout: float | None) -> int:
        return self._started(self.engine.submit_send(NetAddr.parse(to), pattern(seed, nbytes), timeout=timeout))

    def recvs(self, length: int, count: int) -> int:
        number = self._number()
        self.messages[number] = Calls()
        self.pools[number] = self.engine.submit_recvs(length, count, self.messages[number])
        return number

    def got(self, pool: int, count: int, timeout: float) -> list[str]:
        messages = self.messages[pool].wait(count, timeout) if count else self.messages[pool].firsts
        return [base64.b64encode(message).decode() for message in messages]

    def wait(self, operation: int, timeout: float) -> dict[str, Any]:
        it = self.operations[operation]
        error: BaseException | None = None
        try:
            it.wait(timeout)
        except Exception as caught:
            error = caught
        seen = None
        if operation in self.seen and it.done:
            seen = self.seen[operation].wait()  # the callback comes after the end, but it comes
        return {"state": it.state, "error": as_error(error) if error else None, "seen": seen}

    def errors(self) -> list[dict[str, Any]]:
        return [as_error(error) for error in self.faults.firsts]

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()


def serve() -> None:
    die_with_parent()
    peer = Peer()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not get between the answers
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        verb: Callable[..., Any] = getattr(peer, request.pop("do"))
        try:
            answer = {"ok": verb(**request)}
        except Exception as error:
            answer = {"error": as_error(error)}
        answers.write(json.dumps(answer, default=str) + "\n")
    os._exit(0)  # as if killed: the driver closes the engine first if the test wants it


if __name__ == "__main__":
    serve()
