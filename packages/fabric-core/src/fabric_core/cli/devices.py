"""`fabric devices`: NICs by backend."""

from __future__ import annotations

from typing import Annotated

import typer

from fabric_core.cli.guard import guarded
from fabric_core.cli.models import Device, Devices, Missing, Report
from fabric_core.cli.options import Json, Verbose
from fabric_core.cli.render import Column, console, emit_json, rate, show_table, text_lines
from fabric_core.config import Settings
from fabric_core.domain import DeviceInfo
from fabric_core.registry import BACKENDS, discover, get_backend
from fabric_core.topology import DISTANCES, Topology, distance, read

__all__ = ["command", "gather"]


def gather(backend: str = "", topology: Topology | None = None) -> Devices:
    """Probe all backends, or one. Raises ConfigError or BackendError only for one that was asked for by name."""
    allow = Settings.load().backends
    if backend:
        get_backend(backend, allow=allow)
    topology = read() if topology is None else topology
    devices: list[Device] = []
    missing: list[Missing] = []
    for plugin in discover(BACKENDS, allow=allow, only=backend or None):
        if backend not in ("", plugin.name):
            continue
        if plugin.status != "ok":
            reason = f"{plugin.status}: {plugin.reason}"
            missing.append(Missing(name=plugin.name, backend=plugin.name, reason=reason, cure=plugin.cure))
            continue
        try:
            found = plugin.load().probe()
        except Exception as error:  # the contract forbids it, so name the culprit
            text = f"its probe raised {type(error).__name__}: {error}"
            missing.append(Missing(name=plugin.name, backend=plugin.name, reason=text, cure=f"tell {plugin.package}"))
            continue
        for item in found:
            if isinstance(item, DeviceInfo):
                devices.append(_device(item, topology))
            else:
                missing.append(Missing(name=item.name, backend=plugin.name, reason=item.reason, cure=item.cure))
    return Devices(devices=devices, unavailable=missing)


def _device(info: DeviceInfo, topology: Topology) -> Device:
    return Device(
        name=info.name,
        backend=info.backend,
        state=info.state,
        rate_gbit_s=info.rate_gbit_s,
        numa=info.numa,
        pci=info.pci,
        gpu=_nearest_gpu(info, topology),
        mtu_bytes=info.mtu,
        caps=list(info.caps),
        note=info.note,
    )


def _nearest_gpu(info: DeviceInfo, topology: Topology) -> str | None:
    nic = next((nic for nic in topology.nics if info.pci and nic.pci and nic.pci.address == info.pci), None)
    if nic is None:
        return None
    words = [(gpu, distance(gpu, nic, nodes=len(topology.nodes))) for gpu in topology.gpus]
    nearest = min(words, key=lambda pair: (DISTANCES.index(pair[1]), pair[0].index), default=None)
    return f"{nearest[0].name} {nearest[1]}" if nearest else None


@guarded
def command(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Only this backend.")] = "",
    names: Annotated[bool, typer.Option("--list", "-l", help="Names only, one a line.")] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """NICs that can be used, and those that cannot, with the reason."""
    data = gather(backend)
    if json:
        problems = [f"{item.name}: {item.reason}" for item in data.unavailable]
        emit_json(Report[Devices](schema="fabric.devices/1", data=data, problems=problems))
        return
    if names:
        for device in data.devices:
            print(device.name)
        return
    _show(data, verbose)


def _show(data: Devices, verbose: bool) -> None:
    out = console()
    columns = [
        Column("DEVICE"),
        Column("BACKEND"),
        Column("STATE", status=True),
        Column("RATE(Gb/s)", right=True),
        Column("NUMA", right=True, drop=2),
        Column("PCI", drop=3),
        Column("GPU", drop=1),
        Column("MTU", right=True, drop=5),
        Column("CAPS", drop=4, text=True),
    ]
    rows = [
        [
            device.name,
            device.backend,
            device.state,
            rate(device.rate_gbit_s),
            "-" if device.numa is None else str(device.numa),
            device.pci or "-",
            device.gpu or "-",
            "-" if device.mtu_bytes is None else str(device.mtu_bytes),
            ",".join(device.caps) or "-",
        ]
        for device in data.devices
    ]
    if rows:
        show_table(out, columns, rows)
    else:
        text_lines(
            out, "no device can be used; `fabric doctor` says what is missing, `fabric plugins` what is installed"
        )
    if verbose:
        text_lines(out, *(f"{device.name}: {device.note}" for device in data.devices if device.note))
    if data.unavailable:
        text_lines(out, "")
        columns = [Column("NOT USABLE"), Column("BACKEND"), Column("REASON", text=True), Column("CURE", text=True)]
        show_table(out, columns, [[item.name, item.backend, item.reason, item.cure] for item in data.unavailable])
