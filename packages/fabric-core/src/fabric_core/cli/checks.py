"""The checks of `fabric doctor` that look at the machine: pure functions over a recorded or real `System`.

Each takes a `Machine` and yields what it found. FAIL: something will not work. WARN: it works, but slowly or not for
everybody. SKIP: does not apply here, and why. What looks at the running process instead is in `doctor.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fabric_core.cli.models import Check
from fabric_core.cli.render import size
from fabric_core.topology import DISTANCES, Nic, System, Topology, distance, nics_for_gpus
from fabric_core.topology.sysfs import parse_cpulist

__all__ = ["CHECKS", "Machine"]

GIB = 1 << 30
_CAP_SYS_PTRACE = 19
_COUNTERS = ("packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err", "implied_nak_seq_err", "out_of_buffer")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks may look at."""

    system: System
    topology: Topology
    uid: int
    local_dir: str


Status = Literal["OK", "WARN", "FAIL", "SKIP"]


def _check(group: str, name: str, status: Status, found: str, wanted: str = "", *, cure: str = "") -> Check:
    return Check(group=group, name=name, status=status, found=found, wanted=wanted, cure=cure)


# ---- limits ----------------------------------------------------------------------------------------------------------


def _soft_limit(system: System, name: str) -> int | None:
    """Return a soft limit from /proc/self/limits: -1 for unlimited, None for not found."""
    match = re.search(rf"^{name}\s+(\S+)", system.read("/proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return None
    return -1 if match.group(1) == "unlimited" else int(match.group(1))


def check_limits(machine: Machine) -> Iterator[Check]:
    """Lockable memory (NICs pin what is registered) and open files."""
    locked = _soft_limit(machine.system, "Max locked memory")
    rdma = any(nic.rdma for nic in machine.topology.nics)
    if locked is None:
        yield _check("limits", "memlock", "SKIP", "/proc/self/limits is not readable")
    elif locked < 0 or not rdma:
        text = "unlimited" if locked < 0 else f"{size(locked)}; no RDMA device here that would pin memory"
        yield _check("limits", "memlock", "OK", text)
    else:
        cure = "`ulimit -l unlimited`; permanently: memlock in /etc/security/limits.conf, LimitMEMLOCK= in a unit"
        yield _check("limits", "memlock", "FAIL" if locked < GIB else "WARN", size(locked), "unlimited", cure=cure)
    files = _soft_limit(machine.system, "Max open files")
    if files is not None:
        good = files < 0 or files >= 1024
        cure = "" if good else "`ulimit -n 65536`"
        text = "unlimited" if files < 0 else str(files)
        yield _check("limits", "nofile", "OK" if good else "WARN", text, "" if good else ">= 1024", cure=cure)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _meminfo(system: System, key: str) -> int | None:
    match = re.search(rf"^{key}:\s+(\d+)", system.read("/proc/meminfo") or "", re.MULTILINE)
    return int(match.group(1)) if match else None


def check_memory(machine: Machine) -> Iterator[Check]:
    """Free memory, /dev/shm, huge pages."""
    free = _meminfo(machine.system, "MemAvailable")
    if free is not None:
        good = free * 1024 >= GIB
        yield _check("memory", "available", "OK" if good else "WARN", size(free * 1024), "" if good else ">= 1 GiB")
    shm = machine.system.free_bytes("/dev/shm")
    if shm is None:
        yield _check("memory", "/dev/shm", "WARN", "absent", "a tmpfs", cure="mount -t tmpfs tmpfs /dev/shm")
    else:
        good = shm[0] >= GIB
        cure = "" if good else "docker run --shm-size=8g; elsewhere: mount -o remount,size=8g /dev/shm"
        found = f"{size(shm[0])} of {size(shm[1])} free"
        yield _check("memory", "/dev/shm", "OK" if good else "WARN", found, "" if good else ">= 1 GiB", cure=cure)
    reserved = _meminfo(machine.system, "HugePages_Total")
    transparent = machine.system.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", transparent)
    yield _check(
        "memory",
        "huge pages",
        "OK",
        f"{reserved or 0} reserved, transparent: {chosen.group(1) if chosen else 'unknown'}",
    )


# ---- the local backend -----------------------------------------------------------------------------------------------


def check_local(machine: Machine) -> Iterator[Check]:
    """May processes of this user write into each other's memory, and is the socket directory private?"""
    system = machine.system
    scope = system.number("/proc/sys/kernel/yama/ptrace_scope")
    caps = re.search(r"^CapEff:\s+([0-9a-f]+)", system.read("/proc/self/status") or "", re.MULTILINE)
    privileged = bool(caps and int(caps.group(1), 16) >> _CAP_SYS_PTRACE & 1)
    if not scope or (scope <= 2 and privileged):
        why = "no restriction" if not scope else f"ptrace_scope={scope}, but CAP_SYS_PTRACE is held"
        yield _check("local", "process_vm_writev", "OK", why)
    else:
        cure = "engine.empty() memory needs no permission; else `sysctl kernel.yama.ptrace_scope=0`, or CAP_SYS_PTRACE"
        found = f"ptrace_scope={scope}: other memory goes through a bounce ring (slower)"
        yield _check("local", "process_vm_writev", "WARN", found, "0", cure=cure)
    place = machine.local_dir
    owner = system.owner(place)
    if owner is None:
        yield _check("local", "socket directory", "OK", f"{place}, made at the first use")
    elif owner[1] != machine.uid:
        found = f"{place} belongs to uid {owner[1]}"
        yield _check("local", "socket directory", "FAIL", found, f"uid {machine.uid}", cure="set FABRIC_LOCAL_DIR")
    elif owner[0] & 0o077:
        found = f"{place} has mode {owner[0]:04o}"
        yield _check("local", "socket directory", "FAIL", found, "0700", cure=f"chmod 700 {place}")
    else:
        yield _check("local", "socket directory", "OK", place)


# ---- processors ------------------------------------------------------------------------------------------------------


def check_cpus(machine: Machine) -> Iterator[Check]:
    """Cores we may use, quota, frequency governor, isolated cores."""
    system = machine.system
    match = re.search(r"^Cpus_allowed_list:\s+(\S+)", system.read("/proc/self/status") or "", re.MULTILINE)
    if match:
        cores = len(parse_cpulist(match.group(1)))
        good = cores >= 4
        cure = "" if good else "nothing to do: workers sleep when idle (polling=adaptive); expect tens of microseconds"
        yield _check("cpu", "cores", "OK" if good else "WARN", str(cores), "" if good else ">= 4", cure=cure)
    quota = (system.read("/sys/fs/cgroup/cpu.max") or "max").split()
    if quota[0] != "max":
        cure = "use whole cores (cpuset) instead of a quota: a throttled worker stalls for milliseconds"
        yield _check("cpu", "quota", "WARN", " ".join(quota), "max", cure=cure)
    governor = system.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is None:
        yield _check("cpu", "governor", "SKIP", "the kernel does not say (virtual machine)")
    else:
        good = governor == "performance"
        cure = "" if good else "`cpupower frequency-set -g performance`"
        yield _check("cpu", "governor", "OK" if good else "WARN", governor, "" if good else "performance", cure=cure)
    isolated = system.read("/sys/devices/system/cpu/isolated")
    yield _check("cpu", "isolated cores", "OK", isolated or "none")


# ---- PCI -------------------------------------------------------------------------------------------------------------


def check_pci(machine: Machine) -> Iterator[Check]:
    """Links that run below what the device can do; GPUs far from their NICs; IOMMU mode."""
    topology = machine.topology
    things = [(nic.name, nic.pci) for nic in topology.nics] + [(gpu.name, gpu.pci) for gpu in topology.gpus]
    seen = False
    for name, pci in things:
        if pci is None or not (pci.speed_gt_s and pci.width and pci.max_speed_gt_s and pci.max_width):
            continue
        seen = True
        found, wanted = f"{pci.speed_gt_s:g} GT/s x{pci.width}", f"{pci.max_speed_gt_s:g} GT/s x{pci.max_width}"
        if (pci.speed_gt_s, pci.width) == (pci.max_speed_gt_s, pci.max_width):
            yield _check("pci", f"link of {name}", "OK", found)
        else:
            cure = "reseat the card, use a wider slot, look at the BIOS; an idle GPU lowers its speed by itself"
            yield _check("pci", f"link of {name}", "WARN", found, wanted, cure=cure)
    if not seen:
        yield _check("pci", "link speed", "SKIP", "no device here has a PCIe link that says its speed")
    rdma = [nic for nic in topology.nics if nic.rdma]
    if not (topology.gpus and rdma):
        yield _check("pci", "GPU to NIC", "SKIP", f"{len(topology.gpus)} GPUs, {len(rdma)} RDMA devices")
        return
    for gpu in topology.gpus:
        nics = nics_for_gpus(topology)[gpu.name]
        word = max((distance(gpu, nic, nodes=len(topology.nodes)) for nic in nics), key=DISTANCES.index)
        near = DISTANCES.index(word) <= DISTANCES.index("PXB")
        found = f"{word} to {' '.join(nic.name for nic in nics)}"
        cure = "" if near else "GPU memory then passes the CPU: move cards below one switch, or expect less bandwidth"
        yield _check(
            "pci", f"NICs of {gpu.name}", "OK" if near else "WARN", found, "" if near else "PIX or PXB", cure=cure
        )
    if machine.system.names("/sys/class/iommu"):
        through = "iommu=pt" in (machine.system.read("/proc/cmdline") or "")
        cure = "" if through else "boot with iommu=pt: translation of every access costs peer-to-peer bandwidth"
        yield _check(
            "pci", "IOMMU", "OK" if through else "WARN", "pass-through" if through else "translating", cure=cure
        )


# ---- RDMA ------------------------------------------------------------------------------------------------------------


def check_rdma(machine: Machine) -> Iterator[Check]:
    """Ports, GIDs, device nodes, error counters."""
    devices = [nic for nic in machine.topology.nics if nic.rdma]
    if not devices:
        yield _check("rdma", "devices", "SKIP", "none; the local backend needs none")
        return
    nodes = [name for name in machine.system.names("/dev/infiniband") if name.startswith("uverbs")]
    closed = [name for name in nodes if machine.system.access(f"/dev/infiniband/{name}") != "rw"]
    if closed or not nodes:
        found = f"no access to {' '.join(closed)}" if closed else "/dev/infiniband/uverbs* is missing"
        cure = "container: --device /dev/infiniband; else join the group that owns the nodes, or load ib_uverbs"
        yield _check("rdma", "device nodes", "FAIL", found, "read and write", cure=cure)
    else:
        yield _check("rdma", "device nodes", "OK", " ".join(nodes))
    for nic in devices:
        yield from _rdma_device(machine, nic)


def _rdma_device(machine: Machine, nic: Nic) -> Iterator[Check]:
    for port in nic.ports:
        name = f"{nic.name} port {port.number}"
        found = f"{port.state}, {port.physical}" + (f", {port.rate_gbit_s:g} Gb/s" if port.rate_gbit_s else "")
        if port.state != "active":
            cure = "plug the cable, start the subnet manager (InfiniBand), or set the interface up (Ethernet)"
            yield _check("rdma", name, "WARN", found, "active", cure=cure)
            continue
        yield _check("rdma", name, "OK", found)
        if port.link_layer == "Ethernet":
            routable = [index for index, gid, kind in port.gids if kind == "RoCE v2" and gid.startswith("0000:")]
            cure = "" if routable else "give the interface an IPv4 address"
            text = f"index {routable[0]}" if routable else "none"
            wanted = "" if routable else "RoCE v2, IPv4"
            yield _check("rdma", f"{name} GID", "OK" if routable else "WARN", text, wanted, cure=cure)
        base = f"/sys/class/infiniband/{nic.name}/ports/{port.number}/hw_counters"
        moved = {name: value for name in _COUNTERS if (value := machine.system.number(f"{base}/{name}"))}
        if moved:
            text = ", ".join(f"{name}={value}" for name, value in moved.items())
            cure = "look whether they still grow; sequence errors mean loss: check PFC/ECN on the switch"
            yield _check("rdma", f"{name} errors", "WARN", text, "0", cure=cure)


# ---- GPU memory ------------------------------------------------------------------------------------------------------


def check_gpus(machine: Machine) -> Iterator[Check]:
    """Can a NIC reach GPU memory: dma-buf (kernel 5.12 and the open driver), or nvidia-peermem."""
    nvidia = [gpu for gpu in machine.topology.gpus if gpu.vendor == "NVIDIA"]
    if not nvidia:
        yield _check("gpu", "GPU memory", "SKIP", f"{len(machine.topology.gpus)} GPUs, none of NVIDIA")
        return
    kernel = re.match(r"(\d+)\.(\d+)", machine.system.read("/proc/sys/kernel/osrelease") or "")
    modern = bool(kernel) and (int(kernel[1]), int(kernel[2])) >= (5, 12) if kernel else False
    is_open = "Open Kernel Module" in (machine.system.read("/proc/driver/nvidia/version") or "")
    peermem = machine.system.exists("/sys/module/nvidia_peermem")
    if (modern and is_open) or peermem:
        yield _check("gpu", "GPU memory", "OK", "nvidia-peermem" if peermem else "dma-buf")
    else:
        found = f"kernel {'>=' if modern else '<'} 5.12, {'open' if is_open else 'closed'} driver, no nvidia-peermem"
        cure = "`modprobe nvidia-peermem`, or install the open driver on a kernel >= 5.12"
        yield _check("gpu", "GPU memory", "FAIL", found, "dma-buf or nvidia-peermem", cure=cure)


CHECKS: tuple[Callable[[Machine], Iterator[Check]], ...] = (
    check_limits,
    check_memory,
    check_local,
    check_cpus,
    check_pci,
    check_rdma,
    check_gpus,
)
