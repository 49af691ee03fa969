"""fabric-core: point-to-point RDMA transfers for LLM systems. One engine, any NIC. Start at `TransferEngine.open`."""

from __future__ import annotations

from fabric_core._version import __version__
from fabric_core.engine import TransferEngine
from fabric_core.errors import (
    BackendError,
    BadRange,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FabricError,
    NicLost,
    PeerLost,
    PeerRestarted,
    ProtocolError,
    QueueFull,
    RemoteAccessError,
    StaleHandle,
    TransferError,
    Unsupported,
    WaitTimeout,
)
from fabric_core.native_api import get_include, native_api
from fabric_core.operations import Expectation, Transfer
from fabric_core.pools import RecvPool, UvmWatcher
from fabric_core.sequence import PreparedSequence, StepWrite
from fabric_core.types import Flag, MrDesc, MrHandle, NetAddr, Pages, PeerGroup, ScatterDst, SharedMemory

__all__ = [
    "BackendError",
    "BadRange",
    "Cancelled",
    "ConfigError",
    "DeadlineExceeded",
    "EngineClosed",
    "Expectation",
    "FabricError",
    "Flag",
    "MrDesc",
    "MrHandle",
    "NetAddr",
    "NicLost",
    "Pages",
    "PeerGroup",
    "PeerLost",
    "PeerRestarted",
    "PreparedSequence",
    "ProtocolError",
    "QueueFull",
    "RecvPool",
    "RemoteAccessError",
    "ScatterDst",
    "SharedMemory",
    "StaleHandle",
    "StepWrite",
    "Transfer",
    "TransferEngine",
    "TransferError",
    "Unsupported",
    "UvmWatcher",
    "WaitTimeout",
    "__version__",
    "get_include",
    "native_api",
]
