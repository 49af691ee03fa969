"""Where a device's worker and buffers should be: its NUMA node and that node's CPUs."""

from __future__ import annotations

import re
from pathlib import Path

from fabric_core.errors import ConfigError, Unsupported

__all__ = ["placement"]

_NODES = "/sys/devices/system/node"


def placement(device: str, root: str = _NODES) -> tuple[int | None, tuple[int, ...]]:
    """Return (NUMA node, its CPUs) of "cpu" (no preference) or "cpu:N" (node N).

    Raises:
        ConfigError: no such form, or no such node. Unsupported: a GPU.
    """
    from fabric_core.topology.sysfs import parse_cpulist

    if device == "cpu":
        return None, ()
    kind, _, number = device.partition(":")
    if kind != "cpu":
        if re.fullmatch(r"[a-z]+(:\d+)?", device):
            raise Unsupported(f"device {device!r} is not served yet: open the engine with device='cpu'")
        raise ConfigError(f"device={device!r}: expected 'cpu' or 'cpu:N'")
    try:
        node = int(number)
        text = Path(root, f"node{node}", "cpulist").read_text()
    except (ValueError, OSError):
        nodes = sorted(path.name[4:] for path in Path(root).glob("node[0-9]*"))
        raise ConfigError(f"device={device!r}: this machine has NUMA nodes {', '.join(nodes) or '(none)'}") from None
    return node, parse_cpulist(text)
