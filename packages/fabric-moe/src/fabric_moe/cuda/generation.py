"""One generation of a group on GPUs: members, the memory that they write into each other's, the kernels.

Ranks of other processes are reached by CUDA IPC handles, ranks of this process by address. The handles travel on the
cards (meet.py). Memory of a generation that broke is kept until the process ends: a rank that is late may still write
into it, and memory that a peer has mapped cannot be called back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import threading
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fabric_core import BackendError, ConfigError, FabricError, ProtocolError, TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda.driver import Kernel, device
from fabric_moe.cuda.layout import GpuLayout
from fabric_moe.cuda.report import LOST, OVERFLOW, Report, Words

__all__ = ["Common", "GpuGeneration"]

log = logging.getLogger("fabric.moe")

VERSION = 1
UNREACHABLE_AT = 4 * (16 + 2 + 1)  # in `struct Local` of common.cuh
_PROCESS = uuid.uuid4().hex  # tells ranks of this process from others
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMES = (
    "moe_dispatch_send", "moe_dispatch_recv", "moe_combine_recv", "moe_combine_send_bfloat16",
    "moe_combine_send_float16", "moe_combine_send_float32",
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


class _Opened:
    """Handles that this process has opened: one mapping for each, however many ranks use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[int, bytes], list[int]] = {}  # -> [address, users]

    def take(self, number: int, handle: bytes) -> int:
        with self._lock:
            entry = self._found.get((number, handle))
            if entry is None:
                entry = self._found[number, handle] = [device(number).open_handle(handle), 0]
            entry[1] += 1
            return entry[0]

    def give(self, number: int, handle: bytes) -> None:
        with self._lock:
            entry = self._found[number, handle]
            entry[1] -= 1
            if entry[1] == 0:
                del self._found[number, handle]
                device(number).close_handle(entry[0])


_OPENED = _Opened()
_MODULES: dict[tuple[int, bytes], Any] = {}  # a module stays loaded: groups of one shape share it


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "?"


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
        self.addresses: dict[int, str] = {}
        image = nvrtc.cubin(self.layout.macros(), self.device.arch)
        key = (self.device.number, image)
        if key not in _MODULES:
            _MODULES[key] = self.device.load(image)
        self.kernels: dict[str, Kernel] = {name: self.device.kernel(_MODULES[key], name) for name in _NAMES}
        self.inbound = self._local = self._host = 0
        self._peers: list[tuple[int, bytes]] = []  # handles that are open
        self.broken = False
        self._closed = False
        try:
            self.inbound = self.device.allocate(self.layout.in_bytes)
            self._local = self.device.allocate(self.layout.local_bytes)
            self._host = self.device.host_words(ctypes.sizeof(Words))
        except BackendError as error:
            self.close()
            raise BackendError(
                f"{error}; this rank wants {self.layout.memory()['total']} bytes: lower max_tokens or depth"
            ) from error
        self.report = Report(self._host, rank, config.experts, self.addresses)

    def common(self, slot: int) -> Common:
        """Return what every kernel of a slot is told."""
        return Common(
            self._local + self.layout.peers_at, self.inbound, self._local, self._local + self.layout.turns_at(slot),
            self._host, sum(1 << r for r in self.members), int(self.config.timeout * 1e9), self.rank, slot,
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
                "process": _PROCESS,
                "boot": _boot(),
                "device": self.device.number,
                "at": self.inbound,
                "handle": self.device.handle_of(self.inbound).hex(),
                "shape": asdict(self.config),
            },
            separators=(",", ":"),
        )

    def connect(self, texts: dict[int, str]) -> None:
        """Take the cards of all members, our own too, and open their memory. Raises ProtocolError, ConfigError."""
        found = [self.inbound] * self.config.ranks
        for rank in self.members:
            try:
                found[rank] = self._reach(rank, json.loads(texts[rank]))
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                if isinstance(error, FabricError):
                    raise
                raise ProtocolError(f"what lies under the name of rank {rank} is no card: {error!r}") from None
        peers = (ctypes.c_uint64 * self.config.ranks)(*found)
        self.device.put(self._local + self.layout.peers_at, bytes(peers))

    def _reach(self, rank: int, card: dict[str, Any]) -> int:
        if card.get("kind") != "cuda":
            raise ProtocolError(f"rank {rank} was opened for host memory, this rank for cuda:{self.device.number}")
        if card["version"] != VERSION:
            raise ProtocolError(
                f"rank {rank} speaks version {card['version']!r} of the protocol, this side {VERSION}: "
                "install the same fabric-moe on all"
            )
        shape = card["shape"]
        if words := self.config.differences(shape if isinstance(shape, dict) else {}):
            raise ProtocolError(f"rank {rank} was opened with another shape: {words}")
        if card["rank"] != rank:
            raise ProtocolError(f"the card under the name of rank {rank} is that of rank {card['rank']}")
        if tuple(card["members"]) != self.members:
            raise ProtocolError(
                f"rank {rank} makes a group of ranks {card['members']}, this rank of {list(self.members)}: "
                "mask the same ranks everywhere"
            )
        self.addresses[rank] = str(card["address"])
        handle = bytes.fromhex(card["handle"])
        if len(handle) != 64:
            raise ProtocolError(f"rank {rank} gives a handle of {len(handle)} bytes, 64 are right")
        if card["process"] == _PROCESS:
            if card["device"] != self.device.number:
                self.device.reach(device(int(card["device"])))
            return int(card["at"])
        if card["boot"] != _boot():
            raise ConfigError(
                f"rank {rank} is on another host ({card['address']}): GPUs write into each other's memory within one "
                "host; open the group with device=None and give host tensors"
            )
        try:
            at = _OPENED.take(self.device.number, handle)
        except BackendError as error:
            raise BackendError(f"memory of rank {rank} cannot be opened: {error}") from error
        self._peers.append((self.device.number, handle))
        return at

    def close(self) -> None:
        """Wait for our kernels, and give back what nobody writes any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.device.synchronize()  # every kernel ends: those that wait have a limit
        except BackendError as error:
            log.warning("rank %d: %s", self.rank, error)
            self.broken = True
        for number, handle in self._peers:
            with contextlib.suppress(BackendError):
                _OPENED.give(number, handle)
        if self.broken or self.report_said_lost():
            log.info("rank %d keeps %d bytes, which a late rank may still write", self.rank, self.layout.in_bytes)
            return
        with contextlib.suppress(BackendError):
            for at in (self.inbound, self._local):
                if at:
                    self.device.free(at)
            if self._host:
                self.device.free_host(self._host)

    def usable(self) -> bool:
        """Whether the kernels take further steps."""
        return not Words.from_address(self._host).code & (LOST | OVERFLOW)

    def unreachable(self) -> int:
        """Return how many expert ids were left out because their ranks are masked. Waits for the GPU."""
        self.device.synchronize()
        word = self.device.get(self._local + UNREACHABLE_AT, 4)
        return int.from_bytes(word, "little")

    def report_said_lost(self) -> bool:
        """Whether a kernel gave up on a peer."""
        return bool(self._host) and bool(Words.from_address(self._host).code & LOST)
