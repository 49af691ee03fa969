"""One generation of a group on GPUs: its members, the memory that they write into each other's, the kernels."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fabric_core import BackendError, ConfigError, FabricError, ProtocolError, TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda.driver import Kernel, device
from fabric_moe.cuda.layout import GpuLayout
from fabric_moe.cuda.memory import Memory, sweep
from fabric_moe.cuda.peers import VERSION, Peers, boot_id
from fabric_moe.cuda.report import Report
from fabric_moe.roster import process_id

__all__ = ["Common", "GpuGeneration"]

log = logging.getLogger("fabric.moe")

UNREACHABLE_AT = 4 * (16 + 2 + 1)  # in `struct Local` of common.cuh
_PATIENCE = 1.0  # seconds that one who leaves in good order waits for other processes to leave too
_NAMES = (
    "moe_dispatch_send", "moe_dispatch_send_one", "moe_dispatch_recv", "moe_combine_recv",
    "moe_combine_send_bfloat16", "moe_combine_send_float16", "moe_combine_send_float32",
)  # fmt: skip


class Common(ctypes.Structure):
    """`struct Common` of common.cuh."""

    _fields_ = (
        ("peers", ctypes.c_uint64),
        ("mine", ctypes.c_uint64),
        ("local", ctypes.c_uint64),
        ("turns", ctypes.c_uint64),
        ("host", ctypes.c_uint64),
        ("alive", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    )


_MODULES: dict[tuple[int, bytes], Any] = {}  # a module stays loaded: groups of one shape share it


def ordinal(name: str) -> int:
    """Return N of "cuda:N". Raises ConfigError."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise ConfigError(f"device={name!r}: 'cuda:N', or None for host memory")
    return int(number or 0)


class GpuGeneration:
    """Memory, kernels and peers of one rank. Made in two halves, so that several ranks can live in one thread."""

    def __init__(
        self, engine: TransferEngine, config: MoeConfig, rank: int, number: int, members: Iterable[int], where: str
    ) -> None:
        self.engine = engine
        self.config = config
        self.rank = rank
        self.number = number
        self.members = config.members_with(rank, members)
        self.layout = GpuLayout.of(config)
        self.device = device(ordinal(where))
        if (wanted := self.layout.most_shared) > self.device.shared_limit:
            raise ConfigError(
                f"experts={config.experts} on ranks={config.ranks}: kernels need {wanted} bytes of a block's memory, "
                f"{where} has {self.device.shared_limit}; host memory takes more"
            )
        image = nvrtc.cubin(self.layout.macros(), self.device.arch)
        key = (self.device.number, image)
        if key not in _MODULES:
            _MODULES[key] = self.device.load(image)
        self.kernels: dict[str, Kernel] = {name: self.device.kernel(_MODULES[key], name) for name in _NAMES}
        sweep()
        self._memory = Memory(self.device, self.layout, rank)
        self._peers = Peers(config, rank, self.members, self.device.number)
        self._closed = False
        self.report = Report(self._memory.words, rank, config.experts, self.addresses)

    @property
    def addresses(self) -> dict[int, str]:
        """Where the engines of all ranks are."""
        return self._peers.names

    @property
    def inbound(self) -> int:
        """Address of the memory that the others write."""
        return self._memory.inbound

    def common(self, slot: int) -> Common:
        """Return what every kernel of a slot is told."""
        local = self._memory.local
        return Common(
            local + self.layout.peers_at, self.inbound, local, local + self.layout.turns_at(slot),
            self._memory.words, sum(1 << r for r in self.members), int(self.config.timeout * 1e9), self.rank, slot,
        )  # fmt: skip

    def rows_at(self, slot: int) -> int:
        """Return the address of the rows of a slot: [ranks, max_tokens], `layout.row_bytes` each."""
        return self.inbound + slot * self.layout.in_stride + self.layout.in_rows

    # ---- meeting

    def card(self) -> str:
        """Return what the others must know, as one printable line."""
        return json.dumps(
            {
                "version": VERSION,
                "kind": "cuda",
                "rank": self.rank,
                "members": list(self.members),
                "address": str(self.engine.address),
                "process": process_id(),
                "boot": boot_id(),
                "device": self.device.number,
                "at": self.inbound,
                "handle": self.device.handle_of(self.inbound).hex(),
                "shape": asdict(self.config),
            },
            separators=(",", ":"),
        )

    def connect(self, texts: dict[int, str]) -> None:
        """Take the cards of all members, our own too, and open their memory. Raises ProtocolError, ConfigError."""
        self._memory.shown_to(rank for rank in self.members if rank != self.rank)
        for rank in self.members:
            try:
                self._peers.reach(rank, json.loads(texts[rank]))
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                if isinstance(error, FabricError):
                    raise
                raise ProtocolError(f"what lies under the name of rank {rank} is no card: {error!r}") from None
        at = self._peers.at
        peers = (ctypes.c_uint64 * self.config.ranks)(*(at.get(r, self.inbound) for r in range(self.config.ranks)))
        self.device.put(self._memory.local + self.layout.peers_at, bytes(peers))

    def close(self) -> None:
        """Wait for our kernels, tell the others, and give back what nobody writes any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.device.synchronize()  # every kernel ends: those that wait have a limit
        except BackendError as error:
            log.warning("rank %d: %s: its memory is kept", self.rank, error)
            return
        lost = self.report.lost
        self._memory.say_goodbye({rank: at for rank, at in self._peers.at.items() if rank != self.rank})
        self._peers.close()
        self._memory.release(self._peers.foreign, 0.0 if lost else _PATIENCE)
        sweep()

    def usable(self) -> bool:
        """Whether the kernels take further steps."""
        return not self.report.over

    def unreachable(self) -> int:
        """Return how many expert ids were left out because their ranks are masked. Waits for the GPU."""
        self.device.synchronize()
        word = self.device.get(self._memory.local + UNREACHABLE_AT, 4)
        return int.from_bytes(word, "little")
