"""Where a device's worker and buffers should be: its NUMA node and that node's CPUs."""

from __future__ import annotations

import re
from pathlib import Path

from fabric_core.errors import ConfigError, Unsupported

__all__ = ["placement"]

_PCI = "/sys/bus/pci/devices"
_NODES = "/sys/devices/system/node"


def placement(device: str, root: str = _NODES) -> tuple[int | None, tuple[int, ...]]:
    """Return (NUMA node, its CPUs) of "cpu" (no preference), "cpu:N" (node N), or "cuda:N" (the node of that GPU).

    Raises:
        ConfigError: no such form, node or GPU. Unsupported: another kind of device, or no driver for it.
    """
    from fabric_core.topology.sysfs import parse_cpulist

    if device == "cpu":
        return None, ()
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return _of_gpu(device, Path(root))
    if kind != "cpu":
        if re.fullmatch(r"[a-z]+(:\d+)?", device):
            raise Unsupported(f"device {device!r} is not served: open the engine with device='cpu' or 'cuda:N'")
        raise ConfigError(f"device={device!r}: expected 'cpu' or 'cpu:N'")
    try:
        node = int(number)
        text = Path(root, f"node{node}", "cpulist").read_text()
    except (ValueError, OSError):
        nodes = sorted(path.name[4:] for path in Path(root).glob("node[0-9]*"))
        raise ConfigError(f"device={device!r}: this machine has NUMA nodes {', '.join(nodes) or '(none)'}") from None
    return node, parse_cpulist(text)


def _of_gpu(device: str, root: Path) -> tuple[int | None, tuple[int, ...]]:
    from fabric_core import gpu
    from fabric_core.topology.sysfs import parse_cpulist

    pci = gpu.describe(gpu.ordinal(device)).pci
    try:
        node = int(Path(_PCI, pci, "numa_node").read_text())
        return (node, parse_cpulist((root / f"node{node}" / "cpulist").read_text())) if node >= 0 else (None, ())
    except (ValueError, OSError):  # one node, or a kernel that does not say
        return None, ()
