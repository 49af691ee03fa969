"""GPUs, NICs, NUMA nodes and how far they are from each other, read from sysfs.

    topo = read()                                   this machine
    topo = read(RealSystem(root))                   a tree that looks like one
    topo = read(load_dump("other-machine.json"))    what `fabric topo --dump` wrote elsewhere

`system.py` is the only file that touches the file system, `sysfs.py` turns files into `model.py`'s classes, `graph.py`
says how far things are apart. Imports the standard library only; nothing here writes, and nothing here needs root.
"""

from __future__ import annotations

from fabric_core.topology.graph import DISTANCES, LEGEND, distance, nics_for_cpu, nics_for_gpus
from fabric_core.topology.model import Gpu, Nic, NumaNode, PciDevice, Port, Topology
from fabric_core.topology.sysfs import read
from fabric_core.topology.system import DumpSystem, RealSystem, Recorder, System, load_dump, save_dump

__all__ = [
    "DISTANCES",
    "LEGEND",
    "DumpSystem",
    "Gpu",
    "Nic",
    "NumaNode",
    "PciDevice",
    "Port",
    "RealSystem",
    "Recorder",
    "System",
    "Topology",
    "distance",
    "load_dump",
    "nics_for_cpu",
    "nics_for_gpus",
    "read",
    "save_dump",
]
