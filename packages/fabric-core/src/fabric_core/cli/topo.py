"""`fabric topo`: the matrix, the tree, and which NICs each GPU gets."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from fabric_core.cli.guard import guarded, say
from fabric_core.cli.models import Report, Topo, TopoGroup, TopoNode, TopoThing, now
from fabric_core.cli.options import Json
from fabric_core.cli.render import Column, console, emit_json, rate, show_table, size, text_lines
from fabric_core.topology import (
    DISTANCES,
    LEGEND,
    Gpu,
    Nic,
    RealSystem,
    Recorder,
    System,
    Topology,
    distance,
    load_dump,
    nics_for_cpu,
    nics_for_gpus,
    read,
    save_dump,
)

__all__ = ["command", "cpu_ranges", "describe"]


def cpu_ranges(cpus: tuple[int, ...] | list[int]) -> str:
    """Turn (0, 1, 2, 8) into "0-2,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def describe(topology: Topology, origin: str) -> Topo:
    """Work out distances and groups."""
    things: list[Gpu | Nic] = [*topology.gpus, *topology.nics]
    nodes = len(topology.nodes)
    return Topo(
        origin=origin,
        nodes=[TopoNode(id=node.id, cpus=list(node.cpus), memory_bytes=node.memory_bytes) for node in topology.nodes],
        things=[_thing(thing, topology) for thing in things],
        matrix={a.name: {b.name: distance(a, b, nodes=nodes) for b in things} for a in things},
        groups=_groups(topology),
    )


def _thing(thing: Gpu | Nic, topology: Topology) -> TopoThing:
    node = topology.node_of(thing.numa)
    if isinstance(thing, Gpu):
        kind, model, state, speed = "gpu", thing.model, "up", None
    else:
        words = [thing.driver or "", f"firmware {thing.firmware}" if thing.firmware else ""]
        kind, model, state, speed = "nic", " ".join(filter(None, words)), thing.state, thing.rate_gbit_s
    return TopoThing.model_validate(
        {
            "name": thing.name,
            "kind": kind,
            "model": model,
            "state": state,
            "rate_gbit_s": speed,
            "numa": thing.numa,
            "pci": thing.pci.address if thing.pci else None,
            "path": list(thing.pci.path) if thing.pci else [],
            "cpus": cpu_ranges(node.cpus) if node else "",
        }
    )


def _groups(topology: Topology) -> list[TopoGroup]:
    nodes = len(topology.nodes)
    groups = []
    for gpu in topology.gpus:
        nics = nics_for_gpus(topology)[gpu.name]
        words = [distance(gpu, nic, nodes=nodes) for nic in nics]
        word = max(words, key=DISTANCES.index, default="-")
        groups.append(TopoGroup(device=gpu.name, nics=_names(nics), distance=word, rate_gbit_s=_sum(nics)))
    for node in topology.nodes:
        nics = nics_for_cpu(topology, node.id)
        groups.append(
            TopoGroup(
                device=f"cpu:{node.id}",
                nics=_names(nics),
                distance="NODE" if nodes <= 1 or all(nic.numa == node.id for nic in nics) else "SYS",
                rate_gbit_s=_sum(nics),
            )
        )
    return groups


def _names(nics: tuple[Nic, ...]) -> list[str]:
    return [nic.name for nic in nics]


def _sum(nics: tuple[Nic, ...]) -> float | None:
    rates = [nic.rate_gbit_s for nic in nics if nic.rate_gbit_s]
    return sum(rates) if rates else None


@guarded
def command(
    dump: Annotated[
        Path | None, typer.Option("--dump", help="Also write what was read to this file (JSON), for --from elsewhere.")
    ] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Read such a file instead of this machine.")] = None,
    json: Json = False,
) -> None:
    """How GPUs, NICs and NUMA nodes hang together, and which NICs each GPU gets."""
    system: System = RealSystem()
    origin = f"this machine ({socket.gethostname()})"
    if source is not None:
        loaded = load_dump(source)
        system, origin = loaded, f"{loaded.host}, dumped at {loaded.time}"
    recorder = Recorder(system)
    data = describe(read(recorder), origin)
    if dump is not None:
        try:
            save_dump(recorder, dump, host=socket.gethostname(), time=now())
        except OSError as error:
            raise typer.BadParameter(f"{dump} cannot be written: {error.strerror}", param_hint="--dump") from None
        say(f"written: {dump}")
    if json:
        emit_json(Report[Topo](schema="fabric.topo/1", data=data))
    else:
        _show(data)


def _show(data: Topo) -> None:
    out = console()
    text_lines(out, data.origin, "")
    names = [thing.name for thing in data.things]
    if names:
        columns = [Column(""), *(Column(name) for name in names), Column("CPUS", drop=2), Column("NUMA", drop=1)]
        rows = [
            [thing.name, *(data.matrix[thing.name][other] for other in names), thing.cpus or "-", _dash(thing.numa)]
            for thing in data.things
        ]
        show_table(out, columns, rows)
        used = {word for row in data.matrix.values() for word in row.values()}
        text_lines(out, "", *(f"  {word:<5} {LEGEND[word]}" for word in DISTANCES if word in used), "")
    else:
        text_lines(out, "no GPU and no NIC with hardware behind it; the local backend needs neither", "")
    text_lines(out, *_tree(data), "")
    columns = [Column("GROUP"), Column("NICS", text=True), Column("AGG(Gb/s)", right=True), Column("PATH")]
    groups = [
        [group.device, " ".join(group.nics) or "-", rate(group.rate_gbit_s), group.distance] for group in data.groups
    ]
    show_table(out, columns, groups)


def _dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _tree(data: Topo) -> list[str]:
    """NUMA node -> host bridge -> bridges -> device, with box characters."""
    lines: list[str] = []
    nodes: list[int | None] = [node.id for node in data.nodes]
    alone = len(nodes) == 1  # then everything belongs to it, said or not
    if not alone and any(thing.numa not in nodes for thing in data.things):
        nodes.append(None)
    for number in nodes:
        node = next((node for node in data.nodes if node.id == number), None)
        if node is None:
            lines.append("no NUMA node known")
        else:
            memory = f", {size(node.memory_bytes)}" if node.memory_bytes else ""
            lines.append(f"NUMA {node.id}: CPUs {cpu_ranges(node.cpus) or 'none'}{memory}")
        branch: dict[str, dict[str, object]] = {}
        for thing in data.things:
            if alone or thing.numa == number or (number is None and thing.numa not in nodes):
                place = branch
                for step in thing.path[:-1]:
                    place = place.setdefault(step, {})  # type: ignore[assignment]
                label = f"{thing.path[-1]} {thing.name}" if thing.path else thing.name
                speed = f" {thing.rate_gbit_s:g} Gb/s" if thing.rate_gbit_s else ""
                place[f"{label} ({thing.model}{speed})" if thing.model or speed else label] = {}
        lines += _branch_lines(branch, "")
    return lines


def _branch_lines(branch: dict[str, dict[str, object]], indent: str) -> list[str]:
    lines = []
    for i, (label, below) in enumerate(branch.items()):
        last = i == len(branch) - 1
        lines.append(f"{indent}{'└─' if last else '├─'} {label}")
        lines += _branch_lines(below, indent + ("   " if last else "│  "))  # type: ignore[arg-type]
    return lines
