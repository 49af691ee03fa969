"""The `local` backend: processes of one host, host and GPU memory, no NIC and no port. Works wherever Linux does.

Memory made by `engine.empty()` is mapped by the peer and copied straight in; any other memory is reached by
process_vm_writev, or where that is forbidden, through a shared ring. GPU memory is opened by the peer (CUDA IPC), and
the peer's GPU copies. The work is done in C (`native/local/`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from typing import TYPE_CHECKING, Any

from fabric_core.domain import API_VERSION, DeviceInfo, GroupConfig, NativeDomain, Unavailable
from fabric_core.errors import BackendError

if TYPE_CHECKING:
    from fabric_core.domain import Domain

__all__ = ["LocalBackend", "backend"]

_PATHS = ("auto", "map", "cma", "bounce")
_ERR_MAX = 512
_SWEEP = 16
_RANDOM_NAME = re.compile(r"e(\d+)-[0-9a-f]{8}(-g\d+)?\.sock")


class LocalBackend:
    """See the module's text. Settings: `nics`, `local_dir`, `local_path`, `local_shuffle`, `heartbeat`, `secret`."""

    name = "local"
    api_version = API_VERSION

    def probe(self) -> list[DeviceInfo | Unavailable]:
        """One device, everywhere."""
        if not hasattr(os, "memfd_create"):
            return [Unavailable("local", "this system has no memfd_create", "use Linux 3.17 or later")]
        return [DeviceInfo("local", "local", caps=("imm",), note="processes of this host, host and GPU memory")]

    def known_address(self, domain: str) -> bool:
        """Whether this is NAME, NAME.NIC or NAME.NIC#INCARNATION."""
        return re.fullmatch(r"[A-Za-z0-9_-]{1,64}(\.[0-7])?(#[0-9a-f]{1,16})?", domain) is not None

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        """Open `config.nics` (default 1) NICs under `config.name`.

        Raises BackendError with the reason, and ConfigError if the job's secret cannot be used.
        """
        from fabric_core.native_lib import ffi, lib, text
        from fabric_core.secret import handshake_key

        settings: Any = config.settings
        key = handshake_key(settings)
        nics = config.nics or 1
        gpu = 0
        if config.device.startswith("cuda"):
            from fabric_core.gpu import ordinal

            gpu = 1 + ordinal(config.device)
        _sweep(settings.local_dir)
        held = [ffi.new("char[]", os.fsencode(settings.local_dir)), ffi.new("char[]", config.name.encode())]
        cfg = ffi.new(
            "fab_local_cfg *",
            {
                "dir": held[0],
                "name": held[1],
                "nics": nics,
                "path": _PATHS.index(settings.local_path),
                "shuffle_seed": -1 if settings.local_shuffle is None else settings.local_shuffle,
                "connect_timeout_ns": int(settings.connect_timeout * 1e9),
                "heartbeat_ns": int(settings.heartbeat * 1e9),
                "gpu": gpu,
                "gpu_linger_ns": settings.gpu_linger_us * 1000,
                "key": ffi.NULL if key is None else ffi.from_buffer("uint8_t[32]", key),
            },
        )
        node = ffi.new("fab_local_node **")
        err = ffi.new("char[]", _ERR_MAX)
        if lib.fab_local_open(cfg, node, err, _ERR_MAX) < 0:
            raise BackendError(f"local backend {config.name!r}: {text(err)}")
        ops = int(ffi.cast("uintptr_t", lib.fab_local_ops()))
        return [NativeDomain(ops, int(ffi.cast("uintptr_t", lib.fab_local_domain(node[0], i)))) for i in range(nics)]


def _sweep(directory: str) -> None:
    """Remove a few sockets whose owners were killed: only those with a random name, where nobody answers."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        dead = (
            e.path for e in entries if (m := _RANDOM_NAME.fullmatch(e.name)) and not os.path.exists(f"/proc/{m[1]}")
        )
        for path in itertools.islice(dead, _SWEEP):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                except OSError:
                    pass


backend = LocalBackend()
