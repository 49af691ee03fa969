"""How far two devices are from each other, in the words of `nvidia-smi topo`, and which NICs belong to which GPU."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_core.topology.model import Gpu, Nic, PciDevice, Topology

__all__ = ["DISTANCES", "LEGEND", "distance", "nics_for_cpu", "nics_for_gpus"]

#: From near to far.
DISTANCES = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")

LEGEND = {
    "X": "itself",
    "PIX": "below one PCIe switch (or two functions of one card)",
    "PXB": "through several PCIe switches, not through the CPU",
    "PHB": "through one PCIe host bridge of the CPU",
    "NODE": "between PCIe host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
}


def distance(a: Gpu | Nic, b: Gpu | Nic, *, nodes: int = 1) -> str:
    """Return a word of DISTANCES. `nodes`: NUMA nodes of the machine, for devices that do not say where they are."""
    if a.pci and b.pci:
        if a.pci.address == b.pci.address:
            return "X"
        if a.pci.path[:1] == b.pci.path[:1]:
            return _below_one_host_bridge(a.pci, b.pci)
    if a == b:
        return "X"
    if a.numa is not None and b.numa is not None:
        return "NODE" if a.numa == b.numa else "SYS"
    return "NODE" if nodes <= 1 else "SYS"


def _below_one_host_bridge(a: PciDevice, b: PciDevice) -> str:
    shared = 0
    for left, right in zip(a.path, b.path, strict=False):
        if left != right:
            break
        shared += 1
    if shared <= 1:  # only the host bridge itself
        return "PHB"
    # What is left below the last common bridge: the device alone (a card's other function) or, in a switch, one
    # downstream port and the device. More than that means another switch in between.
    return "PIX" if max(len(a.path), len(b.path)) - shared <= 2 else "PXB"


def nics_for_gpus(topology: Topology, nics: Sequence[Nic] | None = None) -> dict[str, tuple[Nic, ...]]:
    """Assign NICs to GPUs: gpu name -> its NICs, best first.

    Each GPU takes the NICs nearest to it. GPUs with the same nearest NICs divide them evenly, in PCI order; when there
    are fewer NICs than such GPUs, they share. By default only RDMA devices are considered, if there are any.
    """
    usable = list(nics) if nics is not None else _default_nics(topology)
    nearest: dict[str, tuple[Nic, ...]] = {}
    for gpu in topology.gpus:
        near = {nic.name: DISTANCES.index(distance(gpu, nic, nodes=len(topology.nodes))) for nic in usable}
        best = min(near.values(), default=0)
        nearest[gpu.name] = tuple(nic for nic in usable if near[nic.name] == best)
    result: dict[str, tuple[Nic, ...]] = {}
    for name, mine in nearest.items():
        rivals = [other for other, theirs in nearest.items() if theirs == mine]
        rank = rivals.index(name)
        if len(mine) >= len(rivals):
            result[name] = mine[rank * len(mine) // len(rivals) : (rank + 1) * len(mine) // len(rivals)]
        else:
            result[name] = mine[rank * len(mine) // len(rivals) :][:1]
    return result


def nics_for_cpu(topology: Topology, numa: int | None = None) -> tuple[Nic, ...]:
    """Return the NICs for host memory: those of a NUMA node if it has any, else all."""
    usable = _default_nics(topology)
    local = tuple(nic for nic in usable if numa is not None and nic.numa == numa)
    return local or tuple(usable)


def _default_nics(topology: Topology) -> list[Nic]:
    rdma = [nic for nic in topology.nics if nic.rdma]
    return rdma or list(topology.nics)
