"""Topology, read from a made-up machine: 2 NUMA nodes, 2 GPUs, 4 NICs (and a console chip and a virtual device)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fabric_core.errors import ProtocolError
from fabric_core.topology import (
    DISTANCES,
    LEGEND,
    Nic,
    RealSystem,
    Recorder,
    Topology,
    distance,
    load_dump,
    nics_for_cpu,
    nics_for_gpus,
    read,
    save_dump,
)
from fabric_core.topology.sysfs import parse_cpulist

GIB = 1 << 30

# host bridge / root port / switch upstream / switch downstream / device
BRIDGE_A = "pci0000:10/0000:10:01.0/0000:11:00.0"
BRIDGE_B = "pci0000:80/0000:80:01.0/0000:81:00.0"
DEVICES = {
    # address: (path, numa, class, vendor, device)
    "0000:13:00.0": (f"{BRIDGE_A}/0000:12:00.0/0000:13:00.0", 0, 0x030200, 0x10DE, 0x2335),
    "0000:14:00.0": (f"{BRIDGE_A}/0000:12:01.0/0000:14:00.0", 0, 0x020700, 0x15B3, 0x1021),
    "0000:16:00.0": (f"{BRIDGE_A}/0000:12:02.0/0000:15:00.0/0000:15:08.0/0000:16:00.0", 0, 0x020700, 0x15B3, 0x1021),
    "0000:20:00.0": ("pci0000:10/0000:10:02.0/0000:20:00.0", 0, 0x020000, 0x8086, 0x1592),
    "0000:83:00.0": (f"{BRIDGE_B}/0000:82:00.0/0000:83:00.0", 1, 0x030200, 0x10DE, 0x2335),
    "0000:84:00.0": (f"{BRIDGE_B}/0000:82:01.0/0000:84:00.0", 1, 0x020700, 0x15B3, 0x1021),
    "0000:05:00.0": ("pci0000:00/0000:00:05.0/0000:05:00.0", 0, 0x030000, 0x1A03, 0x2000),
}
RDMA = {"mlx5_0": "0000:14:00.0", "mlx5_1": "0000:16:00.0", "mlx5_2": "0000:84:00.0"}


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(
        Path(*[".."] * (len(path.relative_to(path.parents[-2]).parts) - 1)) / target.relative_to(target.parents[-2])
    )


def make_machine(root: Path) -> Path:
    """Lay out what the kernel would show. Links are relative, as the kernel's are."""
    sys = root / "sys"
    for node, (cpus, total) in {0: ("0-3,8-11", 64), 1: ("4-7,12-15", 64)}.items():
        put(sys / f"devices/system/node/node{node}/cpulist", cpus)
        put(
            sys / f"devices/system/node/node{node}/meminfo",
            f"Node {node} MemTotal:       {total * GIB // 1024} kB\nNode {node} MemFree:        1024 kB",
        )
    for address, (path, numa, code, vendor, device) in DEVICES.items():
        home = sys / "devices" / path
        put(home / "numa_node", numa)
        put(home / "class", f"0x{code:06x}")
        put(home / "vendor", f"0x{vendor:04x}")
        put(home / "device", f"0x{device:04x}")
        put(home / "current_link_speed", "32.0 GT/s PCIe")
        put(home / "max_link_speed", "32.0 GT/s PCIe")
        put(home / "current_link_width", 8 if address == "0000:16:00.0" else 16)
        put(home / "max_link_width", 16)
        link(sys / "bus/pci/devices" / address, home)
    for bridge in ("0000:10:01.0", "0000:12:00.0"):
        found = next((sys / "devices").rglob(bridge))
        link(sys / "bus/pci/devices" / bridge, found)
        put(found / "class", "0x060400")
    driver = sys / "bus/pci/drivers/mlx5_core"
    driver.mkdir(parents=True)
    for name, address in RDMA.items():
        home = sys / "devices" / DEVICES[address][0]
        link(home / "driver", driver)
        down = name == "mlx5_2"
        here = home / "infiniband" / name
        put(here / "fw_ver", "28.39.1002")
        put(here / "ports/1/state", "1: DOWN" if down else "4: ACTIVE")
        put(here / "ports/1/phys_state", "3: Disabled" if down else "5: LinkUp")
        put(here / "ports/1/rate", "400 Gb/sec (4X NDR)")
        put(here / "ports/1/link_layer", "Ethernet" if name == "mlx5_1" else "InfiniBand")
        put(here / "ports/1/gids/0", "fe80:0000:0000:0000:0002:c903:0000:1491")
        put(here / "ports/1/gid_attrs/types/0", "IB/RoCE v1")
        put(here / "ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000")
        put(here / "ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001")
        put(here / "ports/1/gid_attrs/types/3", "RoCE v2")
        link(here / "device", home)
        link(sys / "class/infiniband" / name, here)
    net = sys / "devices" / DEVICES["0000:16:00.0"][0] / "net/eth4"
    put(net / "mtu", 9000)
    link(net / "device", net.parents[1])
    link(sys / "class/net/eth4", net)
    ordinary = sys / "devices" / DEVICES["0000:20:00.0"][0] / "net/eth0"
    put(ordinary / "mtu", 1500)
    put(ordinary / "speed", 25000)
    put(ordinary / "operstate", "up")
    link(ordinary / "device", ordinary.parents[1])
    link(sys / "class/net/eth0", ordinary)
    put(sys / "devices/virtual/net/lo/mtu", 65536)
    link(sys / "class/net/lo", sys / "devices/virtual/net/lo")
    put(root / "proc/driver/nvidia/gpus/0000:13:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 47")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def topo(root: Path) -> Topology:
    return read(RealSystem(root))


def nic(topo: Topology, name: str) -> Nic:
    return next(nic for nic in topo.nics if nic.name == name)


def test_numa_nodes_have_cpus_and_memory(topo: Topology) -> None:
    assert [node.id for node in topo.nodes] == [0, 1]
    assert topo.nodes[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert topo.nodes[1].memory_bytes == 64 * GIB
    assert topo.nodes[1].free_bytes == 1 << 20


def test_gpus_are_counted_in_pci_order_and_console_chips_are_none(topo: Topology) -> None:
    assert [(gpu.name, gpu.pci.address, gpu.numa) for gpu in topo.gpus] == [
        ("gpu0", "0000:13:00.0", 0),
        ("gpu1", "0000:83:00.0", 1),
    ]
    assert [gpu.model for gpu in topo.gpus] == ["NVIDIA H200", "NVIDIA 10de:2335"]


def test_nics_are_rdma_devices_first_and_virtual_ones_are_left_out(topo: Topology) -> None:
    assert [nic.name for nic in topo.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "eth0"]


def test_an_rdma_device_has_ports_driver_firmware_and_its_interface(topo: Topology) -> None:
    device = nic(topo, "mlx5_1")
    assert (device.netdev, device.driver, device.firmware, device.mtu) == ("eth4", "mlx5_core", "28.39.1002", 9000)
    assert (device.state, device.rate_gbit_s, device.numa) == ("up", 400.0, 0)
    (port,) = device.ports
    assert (port.number, port.state, port.physical, port.link_layer) == (1, "active", "linkup", "Ethernet")
    assert port.gids == (
        (0, "fe80:0000:0000:0000:0002:c903:0000:1491", "IB/RoCE v1"),
        (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    )
    assert nic(topo, "mlx5_2").state == "down"


def test_an_ordinary_interface_has_its_speed(topo: Topology) -> None:
    device = nic(topo, "eth0")
    assert (device.rate_gbit_s, device.state, device.mtu, device.rdma) == (25.0, "up", 1500, False)


def test_pci_ancestry_and_link(topo: Topology) -> None:
    pci = nic(topo, "mlx5_1").pci
    assert pci is not None
    assert pci.path[0] == "pci0000:10"
    assert pci.path[-1] == pci.address == "0000:16:00.0"
    assert (pci.speed_gt_s, pci.width, pci.max_width) == (32.0, 8, 16)
    assert {bridge.address for bridge in topo.bridges} == {"0000:10:01.0", "0000:12:00.0"}


@pytest.mark.parametrize(
    ("gpu", "name", "word"),
    [
        (0, "mlx5_0", "PIX"),  # two downstream ports of one switch
        (0, "mlx5_1", "PXB"),  # another switch in between
        (0, "eth0", "PHB"),  # another root port
        (0, "mlx5_2", "SYS"),
        (1, "mlx5_2", "PIX"),
        (1, "eth0", "SYS"),
    ],
)
def test_distances_use_the_words_of_nvidia_smi(topo: Topology, gpu: int, name: str, word: str) -> None:
    assert distance(topo.gpus[gpu], nic(topo, name), nodes=2) == word
    assert distance(nic(topo, name), topo.gpus[gpu], nodes=2) == word


def test_distance_of_devices_on_two_host_bridges_of_one_node_and_without_pci() -> None:
    topo_node = Nic("a", numa=0), Nic("b", numa=0), Nic("c", numa=1), Nic("d")
    a, b, c, d = topo_node
    assert distance(a, a) == "X"
    assert distance(a, b, nodes=2) == "NODE"
    assert distance(a, c, nodes=2) == "SYS"
    assert distance(a, d, nodes=1) == "NODE"
    assert distance(a, d, nodes=2) == "SYS"


def test_every_word_is_in_the_legend() -> None:
    assert set(LEGEND) == set(DISTANCES)


def test_each_gpu_takes_the_nics_nearest_to_it(topo: Topology) -> None:
    groups = nics_for_gpus(topo)
    assert {name: [nic.name for nic in nics] for name, nics in groups.items()} == {
        "gpu0": ["mlx5_0"],
        "gpu1": ["mlx5_2"],
    }


def test_gpus_at_the_same_distance_divide_the_nics(topo: Topology) -> None:
    same = tuple(Nic(f"n{i}", numa=0) for i in range(4))
    gpus = topo.gpus[:1] + tuple(type(topo.gpus[0])(i, "NVIDIA", "x", topo.gpus[0].pci, 0) for i in (1,))
    both = Topology(topo.nodes, same, gpus)
    assert [[nic.name for nic in nics] for nics in nics_for_gpus(both).values()] == [["n0", "n1"], ["n2", "n3"]]
    few = Topology(topo.nodes, same[:1], gpus)
    assert [[nic.name for nic in nics] for nics in nics_for_gpus(few).values()] == [["n0"], ["n0"]]
    assert nics_for_gpus(Topology(topo.nodes, (), gpus)) == {"gpu0": (), "gpu1": ()}


def test_host_memory_takes_the_nics_of_its_node_else_all(topo: Topology) -> None:
    assert [nic.name for nic in nics_for_cpu(topo, 1)] == ["mlx5_2"]
    assert [nic.name for nic in nics_for_cpu(topo)] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert [nic.name for nic in nics_for_cpu(topo, 7)] == ["mlx5_0", "mlx5_1", "mlx5_2"]


def test_a_dump_reads_back_to_the_same_topology(root: Path, topo: Topology, tmp_path: Path) -> None:
    recorder = Recorder(RealSystem(root))
    read(recorder)
    save_dump(recorder, tmp_path / "dump.json", host="node7", time="2026-01-01T00:00:00+00:00")
    loaded = load_dump(tmp_path / "dump.json")
    assert read(loaded) == topo
    assert loaded.host == "node7"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema": "other/1", "answers": {}}',
        '{"schema": "fabric.system-dump/1"}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_bad_dump_is_a_protocol_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "dump.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ProtocolError, match=r"dump\.json"):
        load_dump(file)


def test_a_dump_with_nonsense_answers_reads_as_an_empty_machine(tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    answers = {
        "read": {"/sys/devices/system/node/node0/cpulist": 5},
        "names": {"/sys/class/net": "eth0", "/sys/class/infiniband": [1, None]},
        "resolve": [],
        "owner": {"/x": ["a", "b"]},
    }
    file.write_text(json.dumps({"schema": "fabric.system-dump/1", "answers": answers}))
    loaded = load_dump(file)
    assert read(loaded) == Topology()
    assert loaded.owner("/x") is None


def test_an_empty_root_is_an_empty_machine(tmp_path: Path) -> None:
    assert read(RealSystem(tmp_path)) == Topology()


def test_a_link_that_leads_out_of_the_tree_is_absent(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc")
    assert RealSystem(tmp_path).resolve("/out") is None


def test_this_machine_can_be_read() -> None:
    assert read().nodes is not None


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("5", (5,)), ("x,1-y,2", (2,)), ("3-1", ())]
)
def test_parse_cpulist(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == cpus
