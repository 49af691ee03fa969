"""The proxy in C as one rank of a generation sees it: counts, rows and what follows them are sent without Python.

Whoever is first sends what arrived counts make possible: the rank's own thread, or one in C that all ranks of the
process share (native/thread.c). Where the C part was not built, `second_phase.py` does the same.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BackendError, Expectation, FabricError, Transfer
from fabric_core import native_api as engine_table
from fabric_moe import kernels
from fabric_moe.dtypes import Bytes
from fabric_moe.errors import StepError
from fabric_moe.trouble import impossible_counts, other_step, other_sums, overwritten, refused

if TYPE_CHECKING:
    from fabric_moe.generation import Generation

__all__ = ["Proxy"]

_TAKEN = 64  #: transfers that are looked at in one call


class Proxy:
    """What a rank has sent, and will send, in one generation. Called by the group's thread."""

    def __init__(self, gen: Generation, table: int | None = None) -> None:
        """Of a generation that has met the others. table: address of the engine's functions; None: its own.

        Raises BackendError.
        """
        native, c, layout = kernels.NATIVE, gen.config, gen.layout
        self._lib, self._ffi = native.lib, native.ffi
        self._gen, self._engine, self._pid = gen, gen.engine, os.getpid()
        shape = self._ffi.new(
            "moe_shape *",
            {
                "api": engine_table() if table is None else table, "engine": gen.engine.native_handle,
                "inbound": gen.inbound.bytes.ctypes.data, "outbound": gen.outbound.bytes.ctypes.data,
                "local": gen.source.native_handle, "in_stride": layout.in_stride, "in_rows": layout.in_rows,
                "in_sums": layout.in_sums, "in_credits": layout.in_credits, "counts_stride": layout.counts_stride,
                "out_stride": layout.out_stride, "out_rows": layout.out_rows, "out_sums": layout.out_sums,
                "row_bytes": c.row_bytes, "sum_bytes": c.sum_bytes, "shared": c.shared, "stage_rows": c.stage_rows,
                "transfer_ns": int(2e9 * c.timeout),
                "patience_ns": int(1e9 * gen.engine.settings.submit_timeout), "ranks": c.ranks, "rank": gen.rank,
                "generation": gen.number, "depth": c.depth, "private_max": c.private_max, "max_tokens": c.max_tokens,
            },
        )  # fmt: skip
        remotes = np.zeros(c.ranks, np.uint64)
        theirs = np.zeros((c.ranks, c.depth, self._lib.MOE_KINDS), np.uint32)
        for rank in gen.members:
            remotes[rank], theirs[rank] = gen.target(rank)
        credits = np.array([row[self._lib.MOE_CREDIT] for row in gen.imms], np.uint32)
        made = self._lib.moe_rank_new(
            shape, kernels.pointer(remotes, "uint64_t"), kernels.pointer(gen.alive, "uint8_t"),
            kernels.pointer(theirs, "uint32_t"), kernels.pointer(credits, "uint32_t"),
        )  # fmt: skip
        self._rank = made
        self._numbers = [0] * c.depth
        self._trouble = self._ffi.new("moe_trouble *")  # of the rank's own thread
        self._handles = np.empty(_TAKEN, np.uint64)
        if made == self._ffi.NULL:
            raise BackendError(f"rank {gen.rank}: no memory for the proxy, no thread for it, or another fabric-core")

    def _live(self) -> Any:
        if self._rank == self._ffi.NULL:
            raise StepError("this generation of the group is over, or was closed")
        return self._rank

    # ---- a step

    def begin(self, slot: int, number: int, window: int, starts: NDArray[np.int64]) -> None:
        """Begin a step. starts: [R + 1] where the rows for each rank begin; the first `window` of each go early."""
        self._numbers[slot] = number
        self._lib.moe_begin(self._live(), slot, number, window, kernels.pointer(starts, "int64_t"))

    def arm(self, slot: int, counts: Expectation) -> None:
        """Say what ends when the counts of all ranks are here; hold it."""
        self._lib.moe_arm(self._live(), slot, counts.native_handle)

    def send_counts(self, slot: int) -> None:
        """Send our counts to all ranks. Raises QueueFull, EngineClosed, BackendError."""
        self._check(self._lib.moe_send_counts(self._live(), slot, self._trouble), slot)

    def send_rows(self, slot: int) -> None:
        """Send the early rows, which lie in the outbound memory; the rest if the counts are here. Raises as above."""
        self._check(self._lib.moe_send_rows(self._live(), slot, self._trouble), slot)

    def attend(self, slot: int) -> None:
        """Say that the caller waits for the counts, and calls `rest` then."""
        self._lib.moe_attend(self._live(), slot)

    def rest(self, slot: int) -> None:
        """The counts are here: send what they make possible, unless that was done. Raises as above; ProtocolError."""
        self._check(self._lib.moe_rest(self._live(), slot, self._trouble), slot)

    def read(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what all ranks say: [R, R] rows from source for destination, [R] how many go early.

        Raises ProtocolError for what is of another step, or what no rank can have (C12).
        """
        ranks = self._gen.config.ranks
        counts, private = np.empty((ranks, ranks), np.int64), np.empty(ranks, np.int64)
        self._check(
            self._lib.moe_read(
                self._live(),
                slot,
                kernels.pointer(counts, "int64_t"),
                kernels.pointer(private, "int64_t"),
                self._trouble,
            ),
            slot,
        )
        return counts, private

    def owes(self, slot: int) -> bool:
        """Return whether rows of the slot's step have not left, but will if the others go on."""
        return bool(self._lib.moe_owes(self._live(), slot))

    def failed(self, slot: int) -> FabricError | None:
        """Return what went wrong on the other thread."""
        rc = self._lib.moe_look(self._live(), slot, self._trouble)
        return self._error(slot) if rc else None

    # ---- combine

    def weigh(
        self, slot: int, sums: Any, y: Bytes, name: str, at: NDArray[np.int64], weights: NDArray[Any] | None
    ) -> None:
        """Put the partial sums for all sources where they are sent from: kernels.weigh, for all of them."""
        kinds, c = kernels.C_TYPES, self._gen.config
        acc = np.empty(c.hidden, np.float32)
        self._check(
            self._lib.moe_weigh_all(
                self._live(), slot, sums, kernels.pointer(y, "uint8_t"), kinds[name], c.hidden,
                kernels.pointer(at, "int64_t"),
                self._ffi.NULL if weights is None else kernels.pointer(weights, "float"), at.shape[1],
                kernels.pointer(acc, "float"), kinds[c.wire], self._trouble,
            ),
            slot,
        )  # fmt: skip

    def sums(self, starts: NDArray[np.int64], before: NDArray[np.int64], flags: int) -> Any:
        """Return what C must know of a step's sums: [R + 1] where each source's rows begin; [R] what it sent to others.

        The arrays must live as long.
        """
        return self._ffi.new(
            "moe_sums *", (kernels.pointer(starts, "int64_t"), kernels.pointer(before, "int64_t"), flags)
        )

    def send_sums(self, slot: int, sums: Any) -> None:
        """Add the heads, and send all blocks. Raises QueueFull, EngineClosed, BackendError."""
        self._check(self._lib.moe_send_sums(self._live(), slot, sums, self._trouble), slot)

    def check_sums(self, slot: int) -> NDArray[np.uint8]:
        """Return [R] the flags of the heads that came back. Raises ProtocolError if one is not of this step."""
        flags = np.empty(self._gen.config.ranks, np.uint8)
        if self._lib.moe_check_sums(self._live(), slot, kernels.pointer(flags, "uint8_t"), self._trouble):
            t = self._trouble[0]
            raise other_sums(t.rank, (t.generation, t.step), self._numbers[slot])
        return flags

    # ---- its transfers, and its end

    def take(self, slot: int) -> list[Transfer]:
        """Return the transfers of a slot that have not ended well so far; they are the caller's from now on."""
        found: list[Transfer] = []
        while True:
            n = self._lib.moe_take(self._live(), slot, kernels.pointer(self._handles, "uint64_t"), _TAKEN)
            found += [Transfer(self._engine, int(handle)) for handle in self._handles[:n]]
            if n < _TAKEN:
                return found

    def stop(self) -> None:
        """Send nothing more."""
        if self._rank != self._ffi.NULL and self._pid == os.getpid():  # a fork's child has no part in it
            self._lib.moe_rank_stop(self._rank)

    def free(self) -> None:
        """Give its memory back, after `stop`, and after the immediates were freed. Nothing else may be called then."""
        rank, self._rank = self._rank, self._ffi.NULL
        if rank != self._ffi.NULL and self._pid == os.getpid():
            self._lib.moe_rank_free(rank)

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.stop()  # not free: an expectation that nobody ended may still ring

    # ---- trouble

    def _check(self, rc: int, slot: int) -> None:
        if rc:
            raise self._error(slot)

    def _error(self, slot: int) -> FabricError:
        t, lib, gen = self._trouble[0], self._lib, self._gen
        step = self._numbers[slot]
        if t.code == lib.MOE_OTHER_STEP:
            return other_step(t.rank, (t.generation, t.step), (gen.number, step))
        if t.code == lib.MOE_BAD_COUNTS and t.rank == gen.rank:
            return overwritten(gen.rank, step)
        if t.code == lib.MOE_BAD_COUNTS:
            return impossible_counts(t.rank, t.private_rows, t.most, t.total, gen.config)
        return refused(gen.rank, step, t.rc)
