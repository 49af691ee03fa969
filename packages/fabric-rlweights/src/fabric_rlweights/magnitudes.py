"""The exchange of magnitudes between trainer ranks, for scales that cover parts of several: one write for each pair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from fabric_core import MrDesc, MrHandle, NetAddr, Transfer, TransferEngine, WaitTimeout
from fabric_rlweights.boxes import Ints
from fabric_rlweights.quantise import Floats
from fabric_rlweights.route import Route

__all__ = ["Magnitudes"]


class Magnitudes:
    """One rank's part. Its buffers live as long as the route.

    A rank whose memory may still be written by a late neighbour takes fresh memory: see `renew`.
    """

    def __init__(self, engine: TransferEngine, route: Route) -> None:
        self._engine = engine
        self._route = route
        self.shared = route.shared()
        self._place = {int(row): index for index, row in enumerate(self.shared)}
        self._floats = np.prod(route.touch_size[self.shared], axis=1, dtype=np.int64)
        self._at = np.cumsum(self._floats) - self._floats
        self._own = np.zeros(int(self._floats.sum()), np.float32)
        self._have = np.zeros(len(self.shared), dtype=bool)
        self._pairs = self._by_piece()
        self._imm: int | None = None
        self._into_handle: MrHandle | None = None
        sent = int(route.out[:, 2].sum())
        self._out = np.zeros(max(sent, 1), np.float32)
        self._out_handle, _ = engine.reg_mr(self._out, write=False)
        self.renew()

    def _by_piece(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for here, there in self._route.partners(self.shared):
            for i, j in zip(here.tolist(), there.tolist(), strict=True):
                found.setdefault(i, []).append(j)
        return found

    def renew(self) -> None:
        """Take fresh memory for what comes in: nothing that is still under way can reach it.

        Where an engine pins memory, the driver may wait for all that the GPU was given.
        """
        if self._into_handle is not None:
            if not self._route.senders:
                return  # nobody writes there
            self._into_handle.close()
        self._into = np.zeros(max(int(self._route.into[:, 1].sum()), 1), np.float32)
        self._into_handle, self.desc = self._engine.reg_mr(self._into)

    def begin(self) -> int:
        """Start an update; returns the immediate that neighbours raise."""
        self.end()
        self._have[:] = False
        self._imm = self._engine.alloc_imm()
        return self._imm

    def end(self) -> None:
        """Give the update's immediate back."""
        if self._imm is not None:
            self._engine.free_imm(self._imm)
            self._imm = None

    def close(self) -> None:
        """Deregister."""
        self.end()
        self._out_handle.close()
        if self._into_handle is not None:
            self._into_handle.close()

    def put(self, row: int, largest: Floats) -> None:
        """Give the magnitudes of a piece of this rank, as `quantise.magnitudes` returns them."""
        index = self._place[row]
        self._own[self._at[index] : self._at[index] + self._floats[index]] = largest.ravel()
        self._have[index] = True

    def send(self, peers: dict[int, tuple[MrDesc, int]], timeout: float, posted: list[Transfer]) -> None:
        """Post what the neighbours need; `peers`: rank -> (descriptor, immediate).

        `posted` takes the transfers: they are to be waited for, or ended, as an update's writes are. Raises
        TransferError; then it holds those that were posted before.
        """
        assert self._have.all()
        row, receiver, floats, at, there = (self._route.out[:, k] for k in range(5))
        for r, n, a in zip(row.tolist(), floats.tolist(), at.tolist(), strict=True):
            begin = self._at[self._place[r]]
            self._out[a : a + n] = self._own[begin : begin + n]
        for rank in np.unique(receiver).tolist():
            desc, imm = peers[rank]
            mine = receiver == rank
            nbytes, offset = int(floats[mine].sum()) * 4, int(at[mine].min()) * 4
            into = int(there[mine].min()) * 4
            posted.append(
                self._engine.submit_single_write(nbytes, imm, (self._out_handle, offset), (desc, into), timeout=timeout)
            )

    def wait(
        self, addrs: dict[int, NetAddr], deadline: float, wake: threading.Event, check: Callable[[], None]
    ) -> None:
        """Wait for all neighbours. Raises TransferError (PeerLost, DeadlineExceeded).

        Whoever wants to break it off sets `wake`, and has `check` raise.
        """
        senders = self._route.senders
        if not senders:
            return
        assert self._imm is not None
        expectation = self._engine.expect_imm_count(
            self._imm,
            len(senders),
            lambda _: wake.set(),
            timeout=max(0.0, deadline - time.monotonic()),
            peers=[addrs[rank] for rank in senders],
        )
        while True:
            check()
            wake.wait(max(0.0, deadline - time.monotonic()) + 0.1)  # the expectation ends by its own deadline
            wake.clear()
            try:
                expectation.wait(0)
                return
            except WaitTimeout:
                continue  # woken to break it off: `check` raises

    def largest(self, row: int, shape: tuple[int, ...]) -> Floats:
        """Return the magnitudes of all blocks that a piece touches, everybody's parts taken together."""
        index = self._place[row]
        begin = self._at[index]
        found = self._own[begin : begin + self._floats[index]].reshape(self._route.touch_size[row]).copy()
        start, size = self._route.touch_start[row], self._route.touch_size[row]
        for other in self._pairs.get(index, ()):
            o_start, o_size, values = self._of(other)
            low, high = np.maximum(start, o_start), np.minimum(start + size, o_start + o_size)
            here = tuple(slice(a, b) for a, b in zip(low - start, high - start, strict=True))
            there = tuple(slice(a, b) for a, b in zip(low - o_start, high - o_start, strict=True))
            found[here] = np.maximum(found[here], values[there])
        return found.reshape(shape)

    def _of(self, other: int) -> tuple[Ints, Ints, Floats]:
        if other < len(self.shared):
            row, begin = int(self.shared[other]), self._at[other]
            size = self._route.touch_size[row]
            values = self._own[begin : begin + self._floats[other]]
            return self._route.touch_start[row], size, values.reshape(size)
        k = other - len(self.shared)
        _sender, floats, begin, _key = self._route.into[k].tolist()
        size = self._route.into_size[k]
        return self._route.into_start[k], size, self._into[begin : begin + floats].reshape(size)
