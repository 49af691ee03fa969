"""What a machine consists of, as far as transfers care. Plain data: no file is read here."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Gpu", "Nic", "NumaNode", "PciDevice", "Port", "Topology"]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A PCI function and the bridges above it."""

    address: str  #: "0000:3b:00.0"
    path: tuple[str, ...]  #: from the host bridge ("pci0000:3a") down to `address` itself
    numa: int | None = None
    speed_gt_s: float | None = None  #: current link, gigatransfers per second
    width: int | None = None  #: current link, lanes
    max_speed_gt_s: float | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device."""

    number: int
    state: str  #: "active", "down", "init", ...
    physical: str  #: "linkup", "disabled", "polling", ...
    link_layer: str  #: "InfiniBand" or "Ethernet"
    rate_gbit_s: float | None
    gids: tuple[tuple[int, str, str], ...] = ()  #: (index, gid, type), without the empty ones


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device with hardware behind it: an RDMA device, a network interface, or one that is both."""

    name: str  #: the RDMA device's name if it is one, else the interface's
    netdev: str | None = None
    driver: str | None = None
    state: str = "unknown"  #: "up" or "down"
    rate_gbit_s: float | None = None  #: decimal
    mtu: int | None = None  #: bytes
    numa: int | None = None
    pci: PciDevice | None = None
    ports: tuple[Port, ...] = ()
    firmware: str | None = None

    @property
    def rdma(self) -> bool:
        """Tell whether it is an RDMA device."""
        return bool(self.ports)


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator on PCI."""

    index: int  #: in PCI order, as CUDA counts under CUDA_DEVICE_ORDER=PCI_BUS_ID
    vendor: str  #: "NVIDIA", "AMD", "Intel"
    model: str  #: the driver's name for it, or its PCI id
    pci: PciDevice
    numa: int | None = None

    @property
    def name(self) -> str:
        """Return "gpu0", ..."""
        return f"gpu{self.index}"


@dataclass(frozen=True, slots=True)
class Topology:
    """One machine."""

    nodes: tuple[NumaNode, ...] = ()
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    bridges: tuple[PciDevice, ...] = field(default=())  #: the bridges above NICs and GPUs

    def node_of(self, numa: int | None) -> NumaNode | None:
        """Return the node with that number."""
        return next((node for node in self.nodes if node.id == numa), None)
