"""sysfs -> Topology. Every attribute may be missing: old kernels, containers, virtual devices."""

from __future__ import annotations

import re

from fabric_core.topology.model import Gpu, Nic, NumaNode, PciDevice, Port, Topology
from fabric_core.topology.system import RealSystem, System

__all__ = ["parse_cpulist", "pci_device", "read"]

_PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_HOST_BRIDGE = re.compile(r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_EMPTY_GIDS = ("0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000")
_MAX_GIDS = 16  # a port has up to 256, nearly all empty


def read(system: System | None = None) -> Topology:
    """Read a machine. Never raises for what is missing: it is then not in the result."""
    system = RealSystem() if system is None else system
    nodes = _nodes(system)
    nics = _nics(system)
    gpus = _gpus(system)
    devices = [thing.pci for thing in nics] + [thing.pci for thing in gpus]
    above = {step: None for pci in devices if pci for step in pci.path[1:-1]}
    bridges = [bridge for step in above if (bridge := pci_device(system, f"/sys/bus/pci/devices/{step}"))]
    return Topology(nodes, nics, gpus, tuple(bridges))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Turn "0-3,8" into (0, 1, 2, 3, 8); what is no number is left out."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if last else low
        except ValueError:
            continue
        cpus.update(range(low, min(high, low + 65535) + 1))
    return tuple(sorted(cpus))


def _nodes(system: System) -> tuple[NumaNode, ...]:
    base = "/sys/devices/system/node"
    found = []
    for name in system.names(base):
        if not re.fullmatch(r"node\d+", name):
            continue
        meminfo = system.read(f"{base}/{name}/meminfo") or ""
        found.append(
            NumaNode(
                id=int(name[4:]),
                cpus=parse_cpulist(system.read(f"{base}/{name}/cpulist") or ""),
                memory_bytes=_kib(meminfo, "MemTotal"),
                free_bytes=_kib(meminfo, "MemFree"),
            )
        )
    return tuple(sorted(found, key=lambda node: node.id))


def _kib(meminfo: str, key: str) -> int | None:
    match = re.search(rf"{key}:\s+(\d+) kB", meminfo)
    return int(match.group(1)) * 1024 if match else None


def pci_device(system: System, path: str) -> PciDevice | None:
    """Describe what a `device` link leads to, or the nearest PCI function above it (virtio sits below one)."""
    real = system.resolve(path)
    if real is None:
        return None
    parts = real.split("/")
    while parts and not _PCI_ADDRESS.match(parts[-1]):
        parts.pop()
    if not parts:
        return None
    where = "/".join(parts)
    steps = tuple(part for part in parts if _PCI_ADDRESS.match(part) or _HOST_BRIDGE.match(part))
    return PciDevice(
        address=parts[-1],
        path=steps,
        numa=_numa(system, where),
        speed_gt_s=_first_number(system.read(f"{where}/current_link_speed")),
        width=_width(system.number(f"{where}/current_link_width")),
        max_speed_gt_s=_first_number(system.read(f"{where}/max_link_speed")),
        max_width=_width(system.number(f"{where}/max_link_width")),
    )


def _numa(system: System, where: str) -> int | None:
    node = system.number(f"{where}/numa_node")
    return node if node is not None and node >= 0 else None


def _width(lanes: int | None) -> int | None:
    return lanes if lanes and lanes < 255 else None  # 0 and 255: the device does not say


def _first_number(text: str | None) -> float | None:
    match = re.match(r"\d+(\.\d+)?", text or "")
    return float(match.group()) if match else None


def _nics(system: System) -> tuple[Nic, ...]:
    found: list[Nic] = []
    used: set[str] = set()
    for name in system.names("/sys/class/infiniband"):
        base = f"/sys/class/infiniband/{name}"
        netdev = next(iter(system.names(f"{base}/device/net")), None)
        if netdev:
            used.add(netdev)
        found.append(_rdma_nic(system, name, base, netdev))
    for name in system.names("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        if name in used or not system.exists(f"{base}/device"):
            continue  # no hardware behind it: lo, bridges, veth
        pci = pci_device(system, f"{base}/device")
        carrier = system.read(f"{base}/operstate")
        found.append(
            Nic(
                name=name,
                netdev=name,
                driver=_driver(system, base),
                state="up" if carrier == "up" else "down" if carrier == "down" else "unknown",
                rate_gbit_s=_ethernet_rate(system, name),
                mtu=system.number(f"{base}/mtu"),
                numa=_numa(system, f"{base}/device") if pci is None else pci.numa,
                pci=pci,
            )
        )
    return tuple(sorted(found, key=lambda nic: (not nic.rdma, nic.pci.address if nic.pci else "~", nic.name)))


def _rdma_nic(system: System, name: str, base: str, netdev: str | None) -> Nic:
    pci = pci_device(system, f"{base}/device")
    ports = tuple(
        _port(system, f"{base}/ports/{number}", int(number))
        for number in system.names(f"{base}/ports")
        if number.isdigit()
    )
    active = [port for port in ports if port.state == "active"]
    rates = [port.rate_gbit_s for port in active or ports if port.rate_gbit_s]
    return Nic(
        name=name,
        netdev=netdev,
        driver=_driver(system, base),
        state="up" if active else "down",
        rate_gbit_s=sum(rates) if rates else None,
        mtu=system.number(f"/sys/class/net/{netdev}/mtu") if netdev else None,
        numa=pci.numa if pci else _numa(system, f"{base}/device"),
        pci=pci,
        ports=ports,
        firmware=system.read(f"{base}/fw_ver"),
    )


def _port(system: System, base: str, number: int) -> Port:
    gids = []
    for index in sorted(int(name) for name in system.names(f"{base}/gids") if name.isdigit())[:_MAX_GIDS]:
        gid = system.read(f"{base}/gids/{index}") or ""
        if gid and gid not in _EMPTY_GIDS:
            gids.append((index, gid, system.read(f"{base}/gid_attrs/types/{index}") or ""))
    return Port(
        number=number,
        state=_word(system.read(f"{base}/state")),
        physical=_word(system.read(f"{base}/phys_state")),
        link_layer=system.read(f"{base}/link_layer") or "unknown",
        rate_gbit_s=_first_number(system.read(f"{base}/rate")),
        gids=tuple(gids),
    )


def _word(text: str | None) -> str:
    """Turn the kernel's "4: ACTIVE" into "active"."""
    return (text or "unknown").rpartition(":")[2].strip().lower() or "unknown"


def _ethernet_rate(system: System, name: str) -> float | None:
    megabit = system.number(f"/sys/class/net/{name}/speed")
    return megabit / 1000 if megabit and megabit > 0 else None


def _driver(system: System, base: str) -> str | None:
    target = system.resolve(f"{base}/device/driver")
    return target.rpartition("/")[2] if target else None


def _gpus(system: System) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for address in system.names("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{address}"
        code = system.number(f"{base}/class")
        if code is None or code >> 16 not in (0x03, 0x12):  # display controllers, processing accelerators
            continue
        vendor = _VENDORS.get(system.number(f"{base}/vendor") or 0)
        pci = pci_device(system, base)
        if vendor is None or pci is None or (code >> 16 == 0x12 and vendor == "Intel"):
            continue  # a server's console chip; Intel's 0x12 are crypto and memory engines
        model = _nvidia_model(system, address) or f"{vendor} {_pci_id(system, base)}"
        found.append(Gpu(len(found), vendor, model, pci, pci.numa))
    return tuple(found)


def _pci_id(system: System, base: str) -> str:
    vendor, device = system.number(f"{base}/vendor") or 0, system.number(f"{base}/device") or 0
    return f"{vendor:04x}:{device:04x}"


def _nvidia_model(system: System, address: str) -> str | None:
    text = system.read(f"/proc/driver/nvidia/gpus/{address}/information") or ""
    match = re.search(r"Model:\s*(.+)", text)
    return match.group(1).strip() if match else None
