"""A GPU in name only, for what can be said of cards, memory and reports without one."""

from __future__ import annotations

import ctypes
from typing import Any

from fabric_core import BackendError
from fabric_moe.cuda import report


class FakeDevice:
    """Memory is a table of words by address; whatever was not written reads as zeros."""

    def __init__(self) -> None:
        self.number, self.arch, self.multiprocessors, self.shared_limit = 0, "sm_90", 132, 226 << 10
        self.host: list[Any] = []
        self.held: list[int] = []
        self.allocated = 0
        self.opened: list[bytes] = []
        self.closed = 0
        self.full = False
        self.words: dict[int, int] = {}  #: 8 bytes by address

    def said(self, which: int = 0) -> report.Words:
        """What kernels of the `which`-th generation have told the host."""
        return report.Words.from_address(ctypes.addressof(self.host[which]))

    def load(self, image: bytes) -> bytes:
        return image

    def kernel(self, module: Any, name: str) -> str:
        return name

    def allocate(self, nbytes: int) -> int:
        if self.full:
            raise BackendError("cuMemAlloc_v2: out of memory (2)")
        self.allocated += 1
        self.held.append(self.allocated << 40)
        return self.held[-1]

    def free(self, at: int) -> None:
        self.held.remove(at)

    def free_host(self, at: int) -> None:
        pass

    def host_words(self, nbytes: int) -> int:
        self.host.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.host[-1])

    def put(self, at: int, data: bytes) -> None:
        for i, word in enumerate(memoryview(data).cast("Q")):
            self.words[at + 8 * i] = word

    def get(self, at: int, nbytes: int) -> bytes:
        return b"".join(self.words.get(at + i, 0).to_bytes(8, "little") for i in range(0, nbytes, 8))[:nbytes]

    def handle_of(self, at: int) -> bytes:
        return at.to_bytes(64, "little")

    def open_handle(self, handle: bytes) -> int:
        self.opened.append(handle)
        return len(self.opened) << 60

    def close_handle(self, at: int) -> None:
        self.closed += 1

    def synchronize(self) -> None:
        pass
