"""Which NICs a group gets: those that were named, or those nearest to its device."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from fabric_core.domain import MAX_NICS, GroupConfig
from fabric_core.errors import BackendError, ConfigError
from fabric_core.topology import DISTANCES, RealSystem, Topology, distance, nics_for_gpus, read
from fabric_efa import library
from fabric_efa.options import Options

__all__ = ["Choice", "choose", "default_provider", "device_of", "rank"]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Choice:
    """What to ask of libfabric for one NIC."""

    provider: str
    domain: str = ""
    source: str = ""


def default_provider(options: Options) -> str:
    """Return FABRIC_EFA_PROVIDER, or else efa where there is such a device, or else tcp.

    Up to libfabric 1.17 "tcp" meant tcp under ofi_rxm, and what is called tcp now was called net.
    """
    if options.provider:
        return options.provider
    if library.offers(options, "efa"):
        return "efa"
    major, minor = (int(part) for part in library.versions(options)[0].split("."))
    return "net" if (major, minor) < (1, 18) and library.offers(options, "net", _LOOPBACK) else "tcp"


def choose(options: Options, config: GroupConfig) -> list[Choice]:
    """Return what to open for a group. Raises ConfigError, BackendError."""
    provider = default_provider(options)
    if options.nics:
        return _named(options, provider, config.nics)
    if provider.startswith("efa"):
        return _near(options, provider, config)
    wanted = config.nics or 1
    if provider.startswith(("shm", "sm2")):
        return [Choice(provider) for _ in range(wanted)]
    # Without a word from the user nothing is opened to the network; on one host several NICs may share an address.
    return [Choice(provider, source=_LOOPBACK) for _ in range(wanted)]


def _named(options: Options, provider: str, wanted: int | None) -> list[Choice]:
    names = options.nics[: wanted or MAX_NICS]
    if wanted and wanted > len(names):
        raise ConfigError(f"{wanted} NICs are wanted, FABRIC_EFA_NICS names {len(names)}: {', '.join(names)}")
    return [_one(options, provider, name) for name in names]


def _one(options: Options, provider: str, name: str) -> Choice:
    """An address stays one, the name of an interface becomes its address, anything else is a domain of the provider."""
    try:
        return Choice(provider, source=str(ipaddress.ip_address(name)))
    except ValueError:
        pass
    if not provider.startswith("efa") and (address := _interface(name)):
        return Choice(provider, source=address)
    domains = sorted({nic.domain for nic in library.offers(options, provider)})
    for domain in domains:
        if domain == name or domain.startswith(f"{name}-"):  # "rdmap0s6" for "rdmap0s6-rdm"
            return Choice(provider, domain=domain)
    raise ConfigError(f"FABRIC_EFA_NICS: {name!r} is no address, no interface, and none of {', '.join(domains)}")


def _interface(name: str) -> str:
    """Return the IPv4 address of a network interface, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _near(options: Options, provider: str, config: GroupConfig) -> list[Choice]:
    """EFA: the devices that core's topology gives to this GPU, or to the CPU's NUMA node; else all of them."""
    offered = {device_of(nic.domain): nic.domain for nic in library.offers(options, provider) if nic.state != "down"}
    if not offered:
        raise BackendError(f"provider {provider}: no device that is up; `fabric doctor` and `fi_info -p efa` say more")
    mine, others = rank(read(RealSystem()), config, sorted(offered))
    wanted = min(config.nics or len(mine) or len(others), MAX_NICS)
    if wanted > len(offered):
        raise ConfigError(f"{wanted} NICs are wanted, there are {len(offered)} EFA devices")
    return [Choice(provider, domain=offered[device]) for device in [*mine, *others][:wanted]]


def device_of(domain: str) -> str:
    """Return the RDMA device behind a domain of the efa provider: "rdmap0s6" of "rdmap0s6-rdm"."""
    return domain.rpartition("-")[0] or domain


def rank(topology: Topology, config: GroupConfig, devices: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (those that serve this device, the others from near to far), each by PCI address.

    GPUs below one PCIe switch divide its NICs evenly: the NICs of a neighbour are among the others.
    """
    usable = [nic for nic in topology.nics if nic.name in devices]
    unknown = [device for device in devices if device not in {nic.name for nic in usable}]
    if config.device.startswith("cuda:"):
        name = f"gpu{config.device.partition(':')[2]}"
        gpu = next((gpu for gpu in topology.gpus if gpu.name == name), None)
        mine = nics_for_gpus(topology, usable).get(name, ())
        if gpu is not None:
            far = {nic.name: DISTANCES.index(distance(gpu, nic, nodes=len(topology.nodes))) for nic in usable}
            usable.sort(key=lambda nic: far[nic.name])
    else:
        mine = tuple(nic for nic in usable if config.numa is not None and nic.numa == config.numa)
    names = [nic.name for nic in mine]
    return names, [nic.name for nic in usable if nic.name not in names] + unknown
