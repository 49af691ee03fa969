"""One generation of a group whose tokens lie on GPUs and travel through the engine, between hosts say."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fabric_core import BackendError, Expectation, FabricError, MrDesc, ProtocolError, TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda.driver import Kernel, device
from fabric_moe.cuda.generation import ordinal
from fabric_moe.gpu_nic.card import Card
from fabric_moe.gpu_nic.layout import NicLayout
from fabric_moe.gpu_nic.memory import NicMemory, must_be_ordered
from fabric_moe.gpu_nic.proxy import KINDS, NicProxy, needs_c
from fabric_moe.gpu_nic.report import NicReport

__all__ = ["Nic", "NicGeneration", "source"]

log = logging.getLogger("fabric.moe")

SOURCES = ("words.cuh", "pack.cu", "arrive.cu", "sums.cu")
UNREACHABLE_AT = 4 * (16 + 2 + 1)  # in `struct Local` of words.cuh
_OWED = 5.0  # seconds at most for writes that others are still owed
_LAST_WORDS = 0.5  # seconds for the notes of a rank that leaves
_BEATS = 0.5  # of `local`, which beats four times in the seconds of its setting
_NAMES = (
    "moe_nic_count", "moe_nic_pack", "moe_nic_wait_rows", "moe_nic_lay_out", "moe_nic_wait_sums",
    "moe_nic_combine_recv", "moe_nic_combine_bfloat16", "moe_nic_combine_float16", "moe_nic_combine_float32",
)  # fmt: skip
_MODULES: dict[tuple[int, bytes], Any] = {}  # a module stays loaded: groups of one shape share it
_KEPT: list[NicMemory] = []  # of ranks whose GPU has failed: nobody knows what still uses it


class Nic(ctypes.Structure):
    """`struct Nic` of words.cuh."""

    _fields_ = (
        ("mail", ctypes.c_uint64),
        ("host", ctypes.c_uint64),
        ("local", ctypes.c_uint64),
        ("counted", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("in_", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
        ("alive", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    )


def source() -> str:
    """Return the text of the kernels."""
    here = Path(__file__).parent
    return "\n".join((here / name).read_text() for name in SOURCES)


class NicGeneration:
    """Memory, kernels and peers of one rank. Made in two halves, so that several ranks can live in one thread."""

    halves = "fabric_moe.gpu_nic.halves"  #: the module of its four halves

    def __init__(
        self, engine: TransferEngine, config: MoeConfig, rank: int, number: int, members: Iterable[int], where: str
    ) -> None:
        needs_c()
        self.engine = engine
        self.config = config
        self.rank = rank
        self.number = number
        self.members = config.members_with(rank, members)
        self.layout = NicLayout.of(config)
        self.device = device(ordinal(where))
        must_be_ordered(engine, self.device)
        self.addresses: dict[int, str] = {}
        image = nvrtc.cubin(self.layout.macros(), self.device.arch, source())
        key = (self.device.number, image)
        if key not in _MODULES:
            _MODULES[key] = self.device.load(image)
        self.kernels: dict[str, Kernel] = {name: self.device.kernel(_MODULES[key], name) for name in _NAMES}
        self._imms: list[list[int]] = [[] for _ in range(config.depth)]
        self._lifelines: list[Expectation] = []
        self._closed = False
        self._memory = NicMemory(engine, self.device, self.place, self.layout)
        self._descs: list[MrDesc] = []  # held as long as they are written to
        self.report = NicReport(self._memory, rank, config.experts, self.addresses)
        try:
            for row in self._imms:
                while len(row) < KINDS:
                    row.append(engine.alloc_imm())
            self._life = engine.alloc_imm()  # nobody raises it
        except BaseException:
            self._give_back()
            raise

    @property
    def place(self) -> str:
        """Where the tokens are, as engine and torch call it."""
        return f"cuda:{self.device.number}"

    def stream(self) -> int:
        """Return the stream that kernels are queued on: torch's current one."""
        import torch

        return int(torch.cuda.current_stream(self.device.number).cuda_stream)

    def nic(self, slot: int) -> Nic:
        """Return what every kernel of a slot is told."""
        at, layout = self._memory, self.layout
        return Nic(
            at.mail, at.words, at.local, at.mail + layout.counted_at(slot), at.mail + layout.counted_at(slot, True),
            at.outgoing + slot * layout.out_stride, at.incoming + slot * layout.in_stride, at.scratch(slot),
            sum(1 << r for r in self.members), int(self.config.timeout * 1e9), self.rank, slot,
        )  # fmt: skip

    # ---- meeting

    def card(self) -> str:
        """Return what the others must know, as one printable line."""
        _, _, control, data = self._memory.descs
        return Card(self.rank, self.members, self.engine.address, control, data, self._imms).text(self.config)

    def connect(self, texts: dict[int, str]) -> None:
        """Take the cards of all members, our own too. Raises ProtocolError, BackendError."""
        layout, r, depth = self.layout, self.config.ranks, self.config.depth
        control, data, lifelines = [0] * r, [0] * r, [0] * r
        theirs = [[[0] * KINDS for _ in range(depth)] for _ in range(r)]
        from_control, from_data = self._memory.handles[:2]
        ours = str(self.engine.address)
        for rank in self.members:
            card = Card.read(texts[rank], self.config, rank, self.members)
            if (card.control.nbytes, card.data.nbytes) != (layout.control_bytes, depth * layout.in_stride):
                raise ProtocolError(
                    f"rank {rank} offers {card.data.nbytes} bytes, {depth * layout.in_stride} are agreed"
                )
            self._descs += card.control, card.data
            control[rank] = self.engine.native_target(from_control, card.control)
            data[rank] = self.engine.native_target(from_data, card.data)
            theirs[rank] = card.imms
            self.addresses[rank] = str(card.address)
            if self.addresses[rank] != ours:
                line = self.engine.expect_imm_count(self._life, 1, timeout=math.inf, peers=[card.address])
                self._lifelines.append(line)
                lifelines[rank] = line.native_handle
        used = (self.engine, self._memory)
        self.report.proxy = NicProxy(self._shape(), control, data, theirs, self._imms, lifelines, used)
        if self.number and self.engine.backend == "local":
            # The others have deregistered the memory of the former generation. What of it is mapped here is closed at
            # the next beat of the backend, by a call that waits for the device, and holds up the engine's own copies:
            # no kernel of ours may be waiting for one then.
            time.sleep(self.engine.settings.heartbeat * _BEATS)

    def _shape(self) -> dict[str, int]:
        c, at, layout = self.config, self._memory, self.layout
        return {
            "engine": self.engine.native_handle, "control_local": at.handles[0].native_handle,
            "data_local": at.handles[1].native_handle, "control_in": at.address(at.control_in),
            "control_out": at.address(at.control_out), "mail": at.mail, "said": at.words,
            "counted": at.mail + layout.counted_at(0), "arrived": at.mail + layout.counted_at(0, True),
            "counted_stride": layout.counted_at(1) - layout.counted_at(0), "counts_stride": layout.counts_stride,
            "in_stride": layout.in_stride, "in_sums": layout.in_sums, "out_stride": layout.out_stride,
            "out_sums": layout.out_sums, "row_bytes": layout.row_bytes, "sum_bytes": c.sum_bytes,
            "alive": sum(1 << r for r in self.members), "transfer_ns": int(2e9 * c.timeout), "shared": layout.shared,
            "sent": c.max_tokens * c.fan_out, "ranks": c.ranks, "rank": self.rank, "generation": self.number,
            "depth": c.depth, "max_tokens": c.max_tokens, "topk": c.topk, "held": layout.held,
            "private_rows": layout.private,
        }  # fmt: skip

    # ---- the end

    def close(self) -> None:
        """Wait for our kernels, send what is owed, tell the others, and give everything back. Idempotent.

        Where the GPU has failed, the memory is kept. After Ctrl-C it may be called again.
        """
        if self._closed:
            return
        broken: BackendError | None = None
        try:
            self.device.synchronize()  # every kernel ends: those that wait have a limit
        except BackendError as error:
            broken = error
        if (proxy := self.report.proxy) is not None:
            if broken is None and not self.report.over:
                proxy.finish(_OWED)
            proxy.note(self.rank)
            proxy.finish(_LAST_WORDS)
        if broken is not None:
            log.warning("rank %d: %s: its memory is kept", self.rank, broken)
            _KEPT.append(self._memory)
        self._give_back(broken is None)

    def _give_back(self, memory: bool = True) -> None:
        if self.report.proxy is not None:
            self.report.proxy.free()
        self._closed = True
        for imm in [*(imm for row in self._imms for imm in row), *([self._life] if hasattr(self, "_life") else [])]:
            with contextlib.suppress(FabricError):
                self.engine.free_imm(imm)
        if memory:
            self._memory.release()

    def usable(self) -> bool:
        """Whether the kernels take further steps."""
        return not self.report.over

    def unreachable(self) -> int:
        """Return how many expert ids were left out because their ranks are masked. Waits for the GPU."""
        self.device.synchronize()
        word = self.device.get(self._memory.local + UNREACHABLE_AT, 4)
        return int.from_bytes(word, "little")
