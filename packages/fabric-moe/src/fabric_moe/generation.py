"""One generation of a group: its members, the memory registered for them, and the writes between them.

When ranks are masked or come back, the others make a new generation: fresh memory and fresh immediates. So whatever a
slow or half-dead rank still writes for the old one lands in memory that nobody reads, and counts for nobody.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fabric_core import (
    BackendError,
    Expectation,
    FabricError,
    MrDesc,
    MrHandle,
    NetAddr,
    ProtocolError,
    QueueFull,
    ScatterDst,
    Transfer,
    TransferEngine,
)
from fabric_moe import kernels
from fabric_moe.config import MoeConfig, machine_memory
from fabric_moe.layout import Inbound, Layout, Outbound
from fabric_moe.meet import Card

if TYPE_CHECKING:
    from fabric_moe.proxy import Proxy

__all__ = ["COUNTS", "CREDIT", "ROWS", "SUMS", "Generation", "Write"]

#: Kinds of immediates; each rank has one of each for each slot.
COUNTS, ROWS, SUMS, CREDIT = range(4)
KINDS = 4


class Write(NamedTuple):
    """One write: `length` bytes from `src` of our outbound memory to `dst` of the rank's inbound memory."""

    rank: int
    length: int
    src: int
    dst: int


class Generation:
    """Memory, immediates and peers of one rank. Made in two halves, so that several ranks can live in one thread."""

    in_c = True  #: whether the proxy sends, where it was built; else Python (the bench compares them)

    def __init__(
        self, engine: TransferEngine, config: MoeConfig, rank: int, number: int, members: Iterable[int]
    ) -> None:
        self.engine = engine
        self.config = config
        self.rank = rank
        self.number = number
        self.members = config.members_with(rank, members)
        self.alive = np.zeros(config.ranks, np.bool_)
        self.alive[list(self.members)] = True
        self.layout = Layout.of(config)
        self.imms: list[list[int]] = []
        self.transfers: list[list[Transfer]] = [[] for _ in range(config.depth)]
        self.proxy: Proxy | None = None  #: what sends in C; None before the meeting, or where that was not built
        self._handles: list[MrHandle] = []
        self._descs: dict[int, MrDesc] = {}
        self._imms: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.addresses: dict[int, str] = {}
        self._addrs: dict[str, NetAddr] = {}  # by their text, which need not be read in every step
        try:
            self._take()
        except FabricError:
            self.close()
            raise

    def _take(self) -> None:
        """Get memory and immediates. Raises BackendError, which says how much was wanted; QueueFull."""
        engine, config = self.engine, self.config
        wanted, most = config.memory()["total"], machine_memory()
        try:
            if wanted > most:
                raise BackendError(f"this machine has {most} bytes of memory")
            self.inbound = Inbound(self.layout, engine.empty(self.layout.in_bytes))
            self.outbound = Outbound(self.layout, engine.empty(self.layout.out_bytes))
            for memory, write in ((self.outbound.memory, False), (self.inbound.memory, True)):
                handle, self.desc = engine.reg_mr(memory, write=write)
                self._handles.append(handle)
        except (BackendError, OverflowError) as error:
            raise BackendError(
                f"{error}; rank {self.rank} wants {wanted} bytes: lower max_tokens, shared_rows, private_max or depth"
            ) from error
        for _ in range(config.depth):
            self.imms.append([])
            for _ in range(KINDS):
                self.imms[-1].append(engine.alloc_imm())

    # ---- meeting

    def card(self) -> str:
        """Return what the others must know."""
        imms = tuple(tuple(row) for row in self.imms)
        return Card(self.rank, self.members, self.engine.address, self.desc, imms, {}).text(self.config)

    def connect(self, texts: dict[int, str]) -> None:
        """Take the cards of all members, our own too. Raises ProtocolError."""
        for rank in self.members:
            card = Card.read(texts[rank], self.config, rank, KINDS)
            if card.members != self.members:
                raise ProtocolError(
                    f"rank {rank} makes a group of ranks {list(card.members)}, this rank of {list(self.members)}: "
                    "mask the same ranks everywhere"
                )
            if card.desc.nbytes != self.layout.in_bytes:
                raise ProtocolError(f"rank {rank} offers {card.desc.nbytes} bytes, {self.layout.in_bytes} are agreed")
            self._descs[rank] = card.desc
            self._imms[rank] = card.imms
            self.addresses[rank] = str(card.address)
            self._addrs[self.addresses[rank]] = card.address
        self.peers = tuple(dict.fromkeys(self.addresses.values()))
        if kernels.NATIVE is not None and self.in_c:
            from fabric_moe.proxy import Proxy

            self.proxy = Proxy(self)

    @property
    def source(self) -> MrHandle:
        """The registration of the outbound memory."""
        return self._handles[0]

    def target(self, rank: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return the number in C of a rank's inbound memory, and its immediates by slot and kind."""
        return self.engine.native_target(self.source, self._descs[rank]), self._imms[rank]

    def ranks_at(self, peer: str | None) -> tuple[int, ...]:
        """Return the ranks that live at an address."""
        return tuple(rank for rank, address in self.addresses.items() if address == peer)

    def expect(self, slot: int, kind: int, count: int, peers: Sequence[str]) -> Expectation:
        """Begin to wait for so many writes of a kind; it fails at once when one of these peers is lost."""
        where = [self._addrs[peer] for peer in peers]
        return self.engine.expect_imm_count(self.imms[slot][kind], count, timeout=math.inf, peers=where)

    # ---- writing

    def post(self, slot: int, kind: int | None, writes: Sequence[Write]) -> None:
        """Submit writes, each of which raises its target's immediate of that kind. Keeps the transfers of the slot.

        One scatter takes one immediate, and each rank chose its own: where processes start alike they chose the same
        numbers, and all goes in one scatter.
        """
        groups: dict[int | None, list[ScatterDst]] = {}
        for w in writes:
            imm = None if kind is None else self._imms[w.rank][slot][kind]
            groups.setdefault(imm, []).append(ScatterDst(self._descs[w.rank], w.length, w.src, w.dst))
        for imm, targets in groups.items():
            self.transfers[slot].append(
                self.engine.submit_scatter(None, None, imm, self.source, targets, timeout=2 * self.config.timeout)
            )

    def settle(self, slot: int, timeout: float) -> None:
        """Wait until nothing of the slot's outbound memory is being read. Raises what went wrong with a transfer."""
        transfers = self._under_way(slot)
        while transfers:  # what is not over stays on the list, to be cancelled by close()
            if not transfers[0].done:
                transfers[0].wait(timeout)
            if error := transfers.pop(0).exception():
                raise error

    def _under_way(self, slot: int) -> list[Transfer]:
        """Return the slot's list of transfers, with those that the proxy has submitted."""
        if self.proxy is not None:
            self.transfers[slot] += self.proxy.take(slot)
        return self.transfers[slot]

    def finish(self, seconds: float) -> None:
        """Wait for the end of all writes, at most so long: what others are still owed leaves. Raises nothing."""
        deadline = time.monotonic() + seconds
        for slot in range(self.config.depth):
            for transfer in self._under_way(slot):
                with contextlib.suppress(FabricError):  # whoever waited for it hears of it in other ways
                    transfer.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Cancel what is under way; give memory and immediates back, as far as the engine takes them. Idempotent."""
        if self.proxy is not None:
            self.proxy.stop()
        for slot in range(self.config.depth):
            transfers = self._under_way(slot)
            for transfer in transfers:
                with contextlib.suppress(FabricError):
                    transfer.cancel()
            transfers.clear()
        for row in self.imms:
            for imm in row:
                with contextlib.suppress(FabricError):
                    self.engine.free_imm(imm)
        self.imms = []
        if self.proxy is not None:
            self.proxy.free()
            self.proxy = None
        for handle in self._handles:
            # A NIC that still reads it keeps it registered, and the engine keeps its memory: nothing is pulled away.
            with contextlib.suppress(FabricError, QueueFull):
                handle.close(timeout=0.5)
