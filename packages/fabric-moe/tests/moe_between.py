"""Between a rank and its engine: what it submits is seen, and changed, whichever part of fabric-moe submits it.

C submits through the engine's table of functions: a copy of that table, with another `submit_many`, stands in. Python
submits through `Generation.post`.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence
from typing import Any

from fabric_core import BackendError, native_api
from fabric_moe import MoeGroup
from fabric_moe.generation import Generation, Write
from fabric_moe.proxy import Proxy

__all__ = ["between"]

#: Given a kind of immediate (None: a note) and the ranks that are written to, returns those that shall be; or raises
#: BackendError, after which C gets EIO.
Change = Callable[[int | None, list[int]], Sequence[int]]


class Target(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("remote", "loff", "roff", "len")]


_SUBMIT_MANY = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(Target), ctypes.c_uint32,
    ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64,
)  # fmt: skip
_PLACE = 8 + 2 * 8  #: of submit_many in the table


class Between:
    """What stands between one generation and its engine. `dropped`: the writes that were not let through."""

    def __init__(self, gen: Generation, change: Change) -> None:
        self.dropped: list[tuple[int, int | None, Write]] = []  #: (slot, kind, write)
        self._change = change
        self._post = gen.post
        self._numbers = {gen.target(rank)[0]: rank for rank in gen.members}
        self._kinds = {
            (rank, imm): (slot, kind)
            for rank in gen.members
            for slot, row in enumerate(gen.target(rank)[1])
            for kind, imm in enumerate(row)
        }
        real = native_api()
        size = ctypes.c_uint32.from_address(real + 4).value
        self._memory = ctypes.create_string_buffer(ctypes.string_at(real, size), size)
        self._real = _SUBMIT_MANY(ctypes.c_uint64.from_address(real + _PLACE).value)
        self._ours = _SUBMIT_MANY(self._submit_many)
        self.table = ctypes.addressof(self._memory)  #: for C
        ctypes.c_uint64.from_address(self.table + _PLACE).value = ctypes.cast(self._ours, ctypes.c_void_p).value or 0

    def post(self, slot: int, kind: int | None, writes: Sequence[Write]) -> None:
        kept = self._change(kind, [w.rank for w in writes]) if writes else []
        self.dropped += [(slot, kind, w) for w in writes if w.rank not in kept]
        self._post(slot, kind, [w for w in writes if w.rank in kept])

    def send_dropped(self) -> None:
        """What was not let through goes now."""
        for slot, kind, write in self.dropped:
            self._post(slot, kind, [write])
        self.dropped.clear()

    def _submit_many(
        self, engine: Any, op: int, local: int, targets: Any, n: int, imm: int, nic: int, ns: int, flag: int
    ) -> int:
        given = {self._numbers[targets[i].remote]: targets[i] for i in range(n)}
        slot, kind = self._kinds[next(iter(given)), imm]
        try:
            kept = self._change(kind, list(given))
        except BackendError:
            return -errno.EIO
        self.dropped += [
            (slot, kind, Write(rank, to.len, to.loff, to.roff)) for rank, to in given.items() if rank not in kept
        ]
        if not kept:  # something must be submitted: nothing, which raises nothing
            given, kept, imm = {0: Target(targets[0].remote, targets[0].loff, targets[0].roff, 0)}, [0], -1
        made = (Target * len(kept))(*[given[rank] for rank in kept])
        return int(self._real(engine, op, local, made, len(kept), imm, nic, ns, flag))


def between(group: MoeGroup, change: Change) -> Between:
    """Have `change` decide about all that this rank submits from now on, in this generation."""
    gen = group.generation
    stands = gen.stands_between = Between(gen, change)  # lives as long
    gen.post = stands.post
    if gen.proxy is not None:
        gen.proxy.stop()
        for slot in range(gen.config.depth):
            gen.transfers[slot] += gen.proxy.take(slot)
        gen.proxy = Proxy(gen, stands.table)
    return stands
