"""`fabric doctor`: each check against a machine made of answers, and the command against this one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_core.cli import build, checks, doctor
from fabric_core.cli.checks import Machine
from fabric_core.cli.models import Check
from fabric_core.topology import DumpSystem, Gpu, Nic, NumaNode, PciDevice, Port, Topology

GIB = 1 << 30
GID = (3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")


def machine(topology: Topology | None = None, **answers: dict[str, Any]) -> Machine:
    """A machine that answers what is given, and knows nothing else."""
    return Machine(DumpSystem(answers), topology or Topology(), uid=1000, local_dir="/run/fabric")


def rdma_nic(name: str = "mlx5_0", **port: Any) -> Nic:
    fields = {"number": 1, "state": "active", "physical": "linkup", "link_layer": "InfiniBand", "rate_gbit_s": 400.0}
    pci = PciDevice("0000:14:00.0", ("pci0000:10", "0000:10:01.0", "0000:14:00.0"), 0, 32.0, 16, 32.0, 16)
    return Nic(name, state="up", numa=0, pci=pci, ports=(Port(**{**fields, **port}),))


def gpu(bus: str = "pci0000:10", port: str = "0000:10:01.0") -> Gpu:
    return Gpu(0, "NVIDIA", "H200", PciDevice("0000:13:00.0", (bus, port, "0000:13:00.0"), 0), 0)


def result(found: list[Check], name: str) -> Check:
    matches = [check for check in found if check.name == name]
    assert len(matches) == 1, [check.name for check in found]
    return matches[0]


def limits(locked: str, files: str = "1048576") -> dict[str, Any]:
    text = (
        f"Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max open files            {files}              1048576              files\n"
        f"Max locked memory         {locked}             unlimited            bytes"
    )
    return {"/proc/self/limits": text}


@pytest.mark.parametrize(
    ("locked", "rdma", "status"),
    [
        ("unlimited", True, "OK"),
        ("8388608", False, "OK"),
        ("8388608", True, "FAIL"),
        (str(2 * GIB), True, "WARN"),
    ],
)
def test_memlock_matters_where_there_are_rdma_devices(locked: str, rdma: bool, status: str) -> None:
    topology = Topology(nics=(rdma_nic(),)) if rdma else None
    check = result(list(checks.check_limits(machine(topology, read=limits(locked)))), "memlock")
    assert check.status == status
    assert bool(check.cure) == (status in ("WARN", "FAIL"))


def test_few_open_files_are_a_warning() -> None:
    assert result(list(checks.check_limits(machine(read=limits("unlimited", "256")))), "nofile").status == "WARN"
    assert result(list(checks.check_limits(machine(read=limits("unlimited")))), "nofile").status == "OK"


def test_limits_that_cannot_be_read_are_skipped() -> None:
    assert [check.status for check in checks.check_limits(machine())] == ["SKIP"]


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "WARN"), (8 * GIB, "OK")])
def test_small_shared_memory_is_a_warning(free: int, status: str) -> None:
    read = {"/proc/meminfo": "MemAvailable:   9000000 kB\nHugePages_Total:       4"}
    found = list(checks.check_memory(machine(read=read, free_bytes={"/dev/shm": [free, 8 * GIB]})))
    assert result(found, "/dev/shm").status == status
    assert result(found, "available").status == "OK"
    assert result(found, "huge pages").found.startswith("4 reserved")


def test_missing_shared_memory_is_a_warning() -> None:
    assert result(list(checks.check_memory(machine())), "/dev/shm").found == "absent"


@pytest.mark.parametrize(
    ("scope", "caps", "status"),
    [
        (None, "0", "OK"),
        ("0", "0", "OK"),
        ("1", "0", "WARN"),
        ("1", "000001ffffffffff", "OK"),
        ("3", "000001ffffffffff", "WARN"),
    ],
)
def test_ptrace_scope(scope: str | None, caps: str, status: str) -> None:
    read = {"/proc/self/status": f"Name: x\nCapEff:\t{caps}", "/proc/sys/kernel/yama/ptrace_scope": scope}
    assert result(list(checks.check_local(machine(read=read))), "process_vm_writev").status == status


@pytest.mark.parametrize(
    ("owner", "status"),
    [(None, "OK"), ([0o700, 1000], "OK"), ([0o755, 1000], "FAIL"), ([0o700, 0], "FAIL")],
)
def test_the_socket_directory_must_be_private(owner: list[int] | None, status: str) -> None:
    found = list(checks.check_local(machine(owner={"/run/fabric": owner})))
    assert result(found, "socket directory").status == status


def test_processors() -> None:
    read = {
        "/proc/self/status": "Cpus_allowed_list:\t0-1",
        "/sys/fs/cgroup/cpu.max": "150000 100000",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    }
    found = list(checks.check_cpus(machine(read=read)))
    assert {check.name: check.status for check in found} == {
        "cores": "WARN",
        "quota": "WARN",
        "governor": "WARN",
        "isolated cores": "OK",
    }


def test_a_link_below_its_maximum_is_a_warning() -> None:
    slow = Nic("eth0", pci=PciDevice("0000:01:00.0", ("pci0000:00", "0000:01:00.0"), None, 16.0, 8, 16.0, 16))
    check = result(list(checks.check_pci(machine(Topology(nics=(slow,))))), "link of eth0")
    assert (check.status, check.found, check.wanted) == ("WARN", "16 GT/s x8", "16 GT/s x16")


@pytest.mark.parametrize(("bus", "status", "word"), [("pci0000:10", "OK", "PIX"), ("pci0000:20", "WARN", "NODE")])
def test_a_gpu_far_from_its_nic_is_a_warning(bus: str, status: str, word: str) -> None:
    topology = Topology((NumaNode(0, (0,)),), (rdma_nic(),), (gpu(bus),))
    check = result(list(checks.check_pci(machine(topology))), "NICs of gpu0")
    assert (check.status, check.found) == (status, f"{word} to mlx5_0")


def test_a_translating_iommu_is_a_warning() -> None:
    topology = Topology((), (rdma_nic(),), (gpu(),))
    names = {"/sys/class/iommu": ["dmar0"]}
    read = {"/proc/cmdline": "ro quiet"}
    assert result(list(checks.check_pci(machine(topology, names=names, read=read))), "IOMMU").status == "WARN"
    read = {"/proc/cmdline": "ro iommu=pt"}
    assert result(list(checks.check_pci(machine(topology, names=names, read=read))), "IOMMU").status == "OK"


def test_without_devices_pci_and_rdma_are_skipped() -> None:
    assert [check.status for check in checks.check_pci(machine())] == ["SKIP", "SKIP"]
    assert [check.status for check in checks.check_rdma(machine())] == ["SKIP"]
    assert [check.status for check in checks.check_gpus(machine())] == ["SKIP"]


@pytest.mark.parametrize(("access", "status"), [("rw", "OK"), ("r", "FAIL"), (None, "FAIL")])
def test_device_nodes_must_be_open_to_us(access: str | None, status: str) -> None:
    answers: dict[str, Any] = {}
    if access is not None:
        answers = {"names": {"/dev/infiniband": ["uverbs0"]}, "access": {"/dev/infiniband/uverbs0": access}}
    found = list(checks.check_rdma(machine(Topology(nics=(rdma_nic(),)), **answers)))
    assert result(found, "device nodes").status == status


def test_ports_gids_and_counters() -> None:
    counters = "/sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    read = {f"{counters}/packet_seq_err": "7", f"{counters}/out_of_buffer": "0"}
    good = rdma_nic(link_layer="Ethernet", gids=(GID,))
    found = list(checks.check_rdma(machine(Topology(nics=(good,)), read=read)))
    assert result(found, "mlx5_0 port 1").status == "OK"
    assert result(found, "mlx5_0 port 1 GID").found == "index 3"
    assert result(found, "mlx5_0 port 1 errors").found == "packet_seq_err=7"
    down = list(checks.check_rdma(machine(Topology(nics=(rdma_nic(state="down"),)))))
    assert result(down, "mlx5_0 port 1").status == "WARN"
    no_gid = list(checks.check_rdma(machine(Topology(nics=(rdma_nic(link_layer="Ethernet"),)))))
    assert result(no_gid, "mlx5_0 port 1 GID").status == "WARN"


@pytest.mark.parametrize(
    ("kernel", "driver", "peermem", "status"),
    [
        ("6.8.0", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64", False, "OK"),
        ("5.4.0", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64", False, "FAIL"),
        ("6.8.0", "NVRM version: NVIDIA UNIX x86_64 Kernel Module", False, "FAIL"),
        ("5.4.0", "", True, "OK"),
    ],
)
def test_gpu_memory_needs_dma_buf_or_peermem(kernel: str, driver: str, peermem: bool, status: str) -> None:
    read = {"/proc/sys/kernel/osrelease": kernel, "/proc/driver/nvidia/version": driver}
    resolve = {"/sys/module/nvidia_peermem": "/sys/module/nvidia_peermem"} if peermem else {}
    found = list(checks.check_gpus(machine(Topology(gpus=(gpu(),)), read=read, resolve=resolve)))
    assert result(found, "GPU memory").status == status


def test_every_check_survives_a_machine_that_knows_nothing() -> None:
    topology = Topology((), (rdma_nic(), Nic("eth0")), (gpu(),))
    for function in checks.CHECKS:
        for check in function(machine(topology)):
            assert check.found
            assert check.cure or check.status in ("OK", "SKIP"), check


def test_the_command_prints_one_object_with_pinned_keys() -> None:
    ran = CliRunner().invoke(build(["doctor"]), ["doctor", "--json"])
    content = json.loads(ran.stdout)
    assert content["schema"] == "fabric.doctor/1"
    assert list(content["data"]) == ["checks", "counts"]
    for check in content["data"]["checks"]:
        assert list(check) == ["group", "name", "status", "found", "wanted", "cure"]
    counts = content["data"]["counts"]
    assert sum(counts.values()) == len(content["data"]["checks"])
    assert ran.exit_code == (1 if counts["FAIL"] else 0)
    assert len(content["problems"]) == counts["FAIL"]


def test_a_misspelt_variable_and_a_misspelt_backend_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_TIMEOUTT", "3")
    monkeypatch.setenv("FABRIC_BACKENDS", "local,ibverb")
    found = list(doctor._software())
    assert result(found, "FABRIC_TIMEOUTT").cure == "did you mean FABRIC_TIMEOUT?"
    assert "'ibverb'" in result(found, "FABRIC_BACKENDS").found


def test_another_projects_script_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "fabric").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "fabric").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._script().status == "WARN"
    (tmp_path / "fabric").write_text("#!/usr/bin/python\nfrom fabric_core.cli import main\n")
    assert doctor._script().status == "OK"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "no `fabric` on PATH" in doctor._script().found
