"""The other ranks' memory on GPUs of this host: by address within a process, by CUDA IPC handles between processes."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from fabric_core import BackendError, ConfigError, ProtocolError
from fabric_moe.config import MoeConfig
from fabric_moe.cuda.driver import device
from fabric_moe.roster import process_id

__all__ = ["VERSION", "Peers", "boot_id"]

VERSION = 4
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HANDLE = 64


def boot_id() -> str:
    """Return what tells this host from others."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "?"


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


class Peers:
    """Addresses, here, of what other ranks have for us to write into."""

    def __init__(self, config: MoeConfig, rank: int, members: tuple[int, ...], number: int) -> None:
        self._config = config
        self._rank = rank
        self._members = members
        self._device = number
        self._handles: list[bytes] = []
        self.at: dict[int, int] = {}  #: rank -> address
        self.names: dict[int, str] = {}  #: rank -> address of its engine
        self.foreign: set[int] = set()  #: ranks of other processes

    def reach(self, rank: int, card: dict[str, Any]) -> None:
        """Open the memory of a rank by its card. Raises ProtocolError, ConfigError, BackendError."""
        if card.get("kind") != "cuda":
            raise ProtocolError(f"rank {rank} was opened for host memory, this rank for cuda:{self._device}")
        if card["version"] != VERSION:
            raise ProtocolError(
                f"rank {rank} speaks version {card['version']!r} of the protocol, this side {VERSION}: "
                "install the same fabric-moe on all"
            )
        shape = card["shape"]
        if words := self._config.differences(shape if isinstance(shape, dict) else {}):
            raise ProtocolError(f"rank {rank} was opened with another shape: {words}")
        if card["rank"] != rank:
            raise ProtocolError(f"the card under the name of rank {rank} is that of rank {card['rank']}")
        if tuple(card["members"]) != self._members:
            raise ProtocolError(
                f"rank {rank} makes a group of ranks {card['members']}, this rank of {list(self._members)}: "
                "mask the same ranks everywhere"
            )
        self.names[rank] = str(card["address"])
        handle = bytes.fromhex(card["handle"])
        if len(handle) != _HANDLE:
            raise ProtocolError(f"rank {rank} gives a handle of {len(handle)} bytes, {_HANDLE} are right")
        if card["process"] == process_id():
            if card["device"] != self._device:
                device(self._device).reach(device(int(card["device"])))
            self.at[rank] = int(card["at"])
            return
        if card["boot"] != boot_id():
            raise ConfigError(
                f"rank {rank} is on another host ({card['address']}): GPUs write into each other's memory within one "
                "host; open the group with through='engine' on all ranks, or with device=None and give host tensors"
            )
        try:
            self.at[rank] = _OPENED.take(self._device, handle)
        except BackendError as error:
            raise BackendError(f"memory of rank {rank} cannot be opened: {error}") from error
        self._handles.append(handle)
        self.foreign.add(rank)

    def close(self) -> None:
        """Let go of their memory. Idempotent."""
        for handle in self._handles:
            with contextlib.suppress(BackendError):
                _OPENED.give(self._device, handle)
        self._handles.clear()
        self.at.clear()
