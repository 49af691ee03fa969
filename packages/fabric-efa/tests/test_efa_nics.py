"""Which EFA devices a group gets, on a machine laid out like a p5en: read from sysfs, recorded, and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_core.domain import GroupConfig
from fabric_core.topology import RealSystem, Recorder, Topology, load_dump, read, save_dump
from fabric_efa.nics import device_of, rank

#: Two sockets, on each one PCIe switch: below the first two GPUs and four NICs, below the second one GPU and two NICs.
SWITCH = {
    0: "pci0000:50/0000:50:00.0/0000:51:00.0",
    1: "pci0000:a0/0000:a0:00.0/0000:a1:00.0",
}
GPU, EFA = (0x030200, 0x10DE, 0x2335), (0x020000, 0x1D0F, 0xEFA3)
DEVICES = {  # address: (path above it, NUMA node, (class, vendor, device))
    "0000:55:00.0": (f"{SWITCH[0]}/0000:52:00.0", 0, GPU),
    "0000:56:00.0": (f"{SWITCH[0]}/0000:52:01.0", 0, EFA),
    "0000:57:00.0": (f"{SWITCH[0]}/0000:52:02.0", 0, EFA),
    "0000:58:00.0": (f"{SWITCH[0]}/0000:52:03.0", 0, EFA),
    "0000:59:00.0": (f"{SWITCH[0]}/0000:52:04.0", 0, EFA),
    "0000:5a:00.0": (f"{SWITCH[0]}/0000:52:05.0", 0, GPU),
    "0000:a5:00.0": (f"{SWITCH[1]}/0000:a2:00.0", 1, GPU),
    "0000:a6:00.0": (f"{SWITCH[1]}/0000:a2:01.0", 1, EFA),
    "0000:a7:00.0": (f"{SWITCH[1]}/0000:a2:02.0", 1, EFA),
}
NAMES = {
    "rdmap86s0": "0000:56:00.0",
    "rdmap87s0": "0000:57:00.0",
    "rdmap88s0": "0000:58:00.0",
    "rdmap89s0": "0000:59:00.0",
    "rdmap166s0": "0000:a6:00.0",
    "rdmap167s0": "0000:a7:00.0",
}


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def lay_out(root: Path) -> None:
    """What the kernel would show of it."""
    sys = root / "sys"
    for node in (0, 1):
        put(sys / f"devices/system/node/node{node}/cpulist", f"{node * 4}-{node * 4 + 3}")
    (sys / "bus/pci/devices").mkdir(parents=True)
    (sys / "class/infiniband").mkdir(parents=True)
    driver = sys / "bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    for address, (path, numa, (code, vendor, device)) in DEVICES.items():
        home = sys / "devices" / path / address
        put(home / "numa_node", numa)
        put(home / "class", f"0x{code:06x}")
        put(home / "vendor", f"0x{vendor:04x}")
        put(home / "device", f"0x{device:04x}")
        (sys / "bus/pci/devices" / address).symlink_to(home)
    for name, address in NAMES.items():
        home = (sys / "bus/pci/devices" / address).resolve()
        (home / "driver").symlink_to(driver)
        here = home / "infiniband" / name
        put(here / "ports/1/state", "4: ACTIVE")
        put(here / "ports/1/phys_state", "5: LinkUp")
        put(here / "ports/1/link_layer", "Unspecified")
        put(here / "ports/1/rate", "200 Gb/sec (4X HDR)")
        (here / "device").symlink_to(home)
        (sys / "class/infiniband" / name).symlink_to(here)


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """Through a dump, as `fabric topo --dump` writes it: what was not recorded is not there."""
    root = tmp_path_factory.mktemp("p5en")
    lay_out(root)
    recorder = Recorder(RealSystem(root))
    seen = read(recorder)
    save_dump(recorder, root / "dump.json", host="p5en", time="2026-01-01T00:00:00Z")
    found = read(load_dump(root / "dump.json"))
    assert found == seen
    assert len(found.nics) == len(NAMES)
    return found


def group(device: str, numa: int | None = None) -> GroupConfig:
    return GroupConfig(device=device, name="x", numa=numa)


ALL = sorted(NAMES)
FIRST = ["rdmap86s0", "rdmap87s0"]
SECOND = ["rdmap88s0", "rdmap89s0"]
FAR = ["rdmap166s0", "rdmap167s0"]


@pytest.mark.parametrize(
    ("device", "mine", "others"),
    [
        ("cuda:0", FIRST, [*SECOND, *FAR]),
        ("cuda:1", SECOND, [*FIRST, *FAR]),
        ("cuda:2", FAR, [*FIRST, *SECOND]),
    ],
)
def test_a_gpu_gets_its_share_of_its_pcie_switch(
    topology: Topology, device: str, mine: list[str], others: list[str]
) -> None:
    """Paper, 3: two of 200 Gb/s for each GPU. More than those come from the nearest that are left."""
    assert rank(topology, group(device), ALL) == (mine, others)


def test_a_nic_that_is_not_offered_is_not_given(topology: Topology) -> None:
    """One that is down, or that libfabric does not know: its neighbour serves alone."""
    left = [name for name in ALL if name != "rdmap166s0"]
    assert rank(topology, group("cuda:2"), left) == (["rdmap167s0"], [*FIRST, *SECOND])


@pytest.mark.parametrize(("numa", "mine"), [(0, [*FIRST, *SECOND]), (1, FAR)])
def test_host_memory_gets_the_nics_of_its_node(topology: Topology, numa: int, mine: list[str]) -> None:
    assert rank(topology, group("cpu", numa), ALL)[0] == mine


def test_without_a_topology_all_of_them_serve(topology: Topology) -> None:
    """A container may hide sysfs: then the names are all there is."""
    assert rank(Topology(), group("cuda:0"), ALL) == ([], ALL)
    assert rank(topology, group("cpu"), ALL) == ([], [*FIRST, *SECOND, *FAR])


def test_the_device_behind_a_domain_name() -> None:
    assert [device_of(name) for name in ("rdmap0s6-rdm", "rdmap0s6-dgrm", "lo")] == ["rdmap0s6", "rdmap0s6", "lo"]
