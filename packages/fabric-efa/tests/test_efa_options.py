"""Settings, addresses, plug-in status: what needs no provider, or only its name."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_core import NetAddr, TransferEngine
from fabric_core.domain import GroupConfig, Unavailable
from fabric_core.errors import BackendError, ConfigError, FabricError, Unsupported
from fabric_efa import backend, library
from fabric_efa.nics import choose
from fabric_efa.options import VARIABLES, Options

CPU = GroupConfig(device="cpu", name="x")


def group(nics: int | None) -> GroupConfig:
    return GroupConfig(device="cpu", name="x", nics=nics)


def test_each_variable_is_declared_and_read() -> None:
    """`fabric env` knows them all, and nothing else is read."""
    environ = {
        "FABRIC_EFA_PROVIDER": " tcp ",
        "FABRIC_EFA_NICS": "127.0.0.2, eth0",
        "FABRIC_EFA_LIBRARY": "/lib/x.so",
        "FABRIC_EFA_STRICT": "7",
        "FABRIC_EFA_UNGUARDED": "1",
    }
    assert set(VARIABLES) == set(environ)
    assert Options.load(environ) == Options("tcp", ("127.0.0.2", "eth0"), "/lib/x.so", 7, True)
    assert Options.load({}) == Options()


@pytest.mark.parametrize("name", ["FABRIC_EFA_STRICT", "FABRIC_EFA_NICS", "FABRIC_EFA_UNGUARDED"])
def test_a_bad_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Options.load({name: "x,x"})


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("tcp/10.0.0.1:34567#1f", True),
        ("tcp+ofi_rxm/127.0.0.1:1#abcdef0123456789", True),
        ("efa/fe800000000000000cafe00000000000#1", True),
        ("tcp/10.0.0.1:34567", False),
        ("tcp/10.0.0.1:34567#", False),
        ("tcp/10.0.0.1#1", False),
        ("efa/abc#1", False),
        ("10.0.0.1:34567#1", False),
        ("tcp/host:1#1", False),
        ("", False),
    ],
)
def test_a_misspelt_address_is_refused_at_once(text: str, known: bool) -> None:
    """C12: by the backend's own word."""
    assert backend.known_address(text) is known


def test_nics_are_named_by_address_or_interface(tcp: str) -> None:
    options = Options(provider=tcp, nics=("127.0.0.2", "lo"))
    assert [choice.source for choice in choose(options, CPU)] == ["127.0.0.2", "127.0.0.1"]
    assert [choice.source for choice in choose(options, group(1))] == ["127.0.0.2"]
    with pytest.raises(ConfigError, match="3 NICs are wanted, FABRIC_EFA_NICS names 2"):
        choose(options, group(3))
    with pytest.raises(ConfigError, match="nosuch"):
        choose(Options(provider=tcp, nics=("nosuch",)), CPU)


def test_without_a_word_nothing_is_opened_to_the_network(tcp: str) -> None:
    """S3: the default is the loopback address."""
    with TransferEngine.open("cpu", "efa", nics=2) as engine:
        assert all(f"{tcp}/127.0.0.1:" in domain for domain in engine.address.domains)
        assert len(set(engine.address.domains)) == 2


def test_an_address_of_another_provider_is_refused(tcp: str) -> None:
    """C12: an address of EFA means nothing on tcp."""
    with TransferEngine.open("cpu", "efa", connect_timeout=0.5) as engine:
        strange = NetAddr.parse("efa:efa/fe800000000000000cafe00000000000#1")
        with pytest.raises(FabricError):
            engine.submit_send(strange, b"x").wait(5)


def test_gpu_memory_is_refused_on_sockets(tcp: str) -> None:
    with pytest.raises(Unsupported, match=tcp):
        backend.open_group(GroupConfig(device="cuda:0", name="x"))


def test_an_address_that_is_not_ours_is_libfabrics_error(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_EFA_NICS", "192.0.2.7")
    with pytest.raises(BackendError, match=r"192\.0\.2\.7"):
        TransferEngine.open("cpu", "efa").close()


@pytest.mark.parametrize(
    ("library_path", "said"), [("/nonexistent/libfabric.so.1", "cannot be used"), ("libc.so.6", "not libfabric")]
)
def test_a_library_that_cannot_be_used_is_one_line(library_path: str, said: str) -> None:
    """In a process of its own: a library that is loaded stays."""
    if not library_is_built():
        pytest.skip("built without libfabric's headers")
    script = "from fabric_efa import backend; print(backend.probe()[0].reason)"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={"FABRIC_EFA_LIBRARY": library_path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said in ended.stdout
    assert len(ended.stdout.splitlines()) == 1


def library_is_built() -> bool:
    try:
        library._module()
    except FabricError:
        return False
    return True


def test_a_build_without_headers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package installs on a bare machine, and `fabric plugins` and `devices` say what to do."""

    def absent() -> None:
        raise library.Missing(
            "built without libfabric's headers", cure="install libfabric-dev and reinstall fabric-efa"
        )

    monkeypatch.setattr(library, "_module", absent)
    (found,) = backend.probe()
    assert isinstance(found, Unavailable)
    assert (found.reason, found.cure) == (
        "built without libfabric's headers",
        "install libfabric-dev and reinstall fabric-efa",
    )


def test_doctor_finds_an_efa_instance_that_is_half_set_up(tcp: str, tmp_path: Path) -> None:
    from fabric_efa.doctor import checks

    driver = tmp_path / "sys/bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    device = tmp_path / "sys/class/infiniband/rdmap0s6/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    found = {check["name"]: check for check in checks(tmp_path)}
    assert found["EFA device"]["found"] == "rdmap0s6"
    assert found["EFA installer"]["status"] == "WARN"
    assert found["efa provider"]["status"] == "FAIL"
    assert "rdmap0s6" in found["efa provider"]["found"]
    assert "security group" in found


def test_doctor_finds_what_the_installer_and_the_kernel_say(tcp: str, tmp_path: Path) -> None:
    """Its list of packages, huge pages, and the limit of memory that a NIC may pin."""
    from fabric_efa.doctor import checks

    driver = tmp_path / "sys/bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    for name, module in (("rdmap0s6", "efa"), ("mlx5_0", "mlx5_core")):
        device = tmp_path / f"sys/class/infiniband/{name}/device"
        device.mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/drivers/{module}").mkdir(exist_ok=True)
        (device / "driver").symlink_to(tmp_path / f"sys/bus/pci/drivers/{module}")
    (tmp_path / "opt/amazon").mkdir(parents=True)
    (tmp_path / "opt/amazon/efa_installed_packages").write_text("efa-2.17.2\nlibfabric-aws-2.1.0amzn3.0\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nHugePages_Free:     5128\n")
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, before[1]))
    try:
        found = {check["name"]: check for check in checks(tmp_path)}
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert found["EFA device"]["found"] == "rdmap0s6"
    assert found["EFA installer"] == {
        "name": "EFA installer", "status": "OK", "found": "libfabric-aws-2.1.0amzn3.0", "wanted": "", "cure": "",
    }  # fmt: skip
    assert found["huge pages"]["found"] == "5128 free"
    assert (found["lockable memory"]["status"], found["lockable memory"]["found"]) == ("FAIL", "1024 KiB")
    assert "allow the group itself" in found["security group"]["cure"]


HANDLERS = """
import os, signal, re
from fabric_efa import library
from fabric_efa.options import Options
def caught():
    with open("/proc/self/status") as file:
        return re.search("SigCgt:.*", file.read())[0]
before = caught()
library.offers(Options(), "tcp")
after = caught()
print(before == after, before, after)
signal.signal(signal.SIGINT, lambda *_: os._exit(42))
os.kill(os.getpid(), signal.SIGINT)
"""


def test_libfabric_leaves_signals_to_the_program(tcp: str, tmp_path: Path) -> None:
    """Some of its libraries install handlers when they are loaded, and would turn Ctrl-C into a crash dump."""
    ran = subprocess.run([sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.stdout.startswith("True"), (ran.stdout, ran.stderr)
    assert ran.returncode == 42
    assert not list(tmp_path.iterdir())
