"""What `fabric doctor` looks at for EFA: library, devices, memory limits, and a word on what only AWS can tell."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from fabric_core.errors import FabricError
from fabric_efa import library
from fabric_efa.nics import default_provider, device_of
from fabric_efa.options import Options

__all__ = ["checks"]

_INSTALLER = Path("/opt/amazon/efa_installed_packages")
_RDMA = Path("/sys/class/infiniband")
_HUGEPAGES = Path("/proc/meminfo")

Found = dict[str, str]


def _one(name: str, status: str, found: str, wanted: str = "", cure: str = "") -> Found:
    return {"name": name, "status": status, "found": found, "wanted": wanted, "cure": cure}


def checks(root: Path = Path("/")) -> Iterator[Found]:
    """Yield what was found. `root`: where the files are looked for, for tests."""
    try:
        options = Options.load()
        version, api = library.versions(options)
    except FabricError as error:
        yield _one("libfabric", "SKIP", getattr(error, "reason", str(error)), cure=getattr(error, "cure", ""))
        return
    yield _one("libfabric", "OK", f"version {version}, asked for API {api}")
    provider = default_provider(options)
    offered = library.offers(options, provider)
    if not offered:
        cure = "`fi_info -l` lists the providers of this library"
        yield _one("provider", "FAIL", f"{provider}: nothing offered", "an endpoint", cure)
    else:
        chosen = "FABRIC_EFA_PROVIDER" if options.provider else "the default"
        yield _one("provider", "OK", f"{provider} ({chosen}): {', '.join(sorted({nic.domain for nic in offered}))}")
    if not provider.startswith("efa") and not options.nics and not provider.startswith("shm"):
        cure = "FABRIC_EFA_NICS=eth0 (an interface or its address) to be reached from other machines"
        yield _one("addresses", "OK", "127.0.0.1: this machine only", cure=cure)
    yield from _hardware(root, options)


def _hardware(root: Path, options: Options) -> Iterator[Found]:
    devices = _devices(root)
    if not devices:
        yield _one("EFA device", "SKIP", "none: not an EFA instance, or its driver is not loaded")
        return
    yield _one("EFA device", "OK", ", ".join(devices))
    installed = _read(root / _INSTALLER.relative_to("/"))
    if installed:
        yield _one(
            "EFA installer", "OK", "; ".join(line for line in installed.splitlines() if "libfabric" in line)[:200]
        )
    else:
        yield _one("EFA installer", "WARN", "not found", "/opt/amazon/efa", "install the AWS EFA software")
    opened = {device_of(nic.domain) for nic in library.offers(options, "efa")}
    missing = [device for device in devices if device not in opened]
    if missing:
        cure = "is this libfabric built with the efa provider? FABRIC_EFA_LIBRARY=/opt/amazon/efa/lib/libfabric.so.1"
        yield _one("efa provider", "FAIL", f"does not offer {', '.join(missing)}", "every device", cure)
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield _one("lockable memory", "OK", "unlimited")
    else:
        yield _one("lockable memory", "FAIL", f"{soft >> 10} KiB", "unlimited", "`ulimit -l unlimited`, limits.conf")
    yield _hugepages(root)
    yield _one(
        "security group",
        "SKIP",
        "cannot be seen from here",
        "all traffic allowed in and out between its own members",
        "allow the group itself as source and destination; without it first contact ends in ETIMEDOUT",
    )


def _devices(root: Path) -> list[str]:
    """Return the RDMA devices that the efa driver serves."""
    folder = root / _RDMA.relative_to("/")
    if not folder.is_dir():
        return []
    found = []
    for device in sorted(folder.iterdir()):
        driver = device / "device" / "driver"
        if driver.exists() and driver.resolve().name == "efa":
            found.append(device.name)
    return found


def _hugepages(root: Path) -> Found:
    text = _read(root / _HUGEPAGES.relative_to("/"))
    free = next((line.split()[1] for line in text.splitlines() if line.startswith("HugePages_Free")), "0")
    if free.isdecimal() and int(free) > 0:
        return _one("huge pages", "OK", f"{free} free")
    return _one(
        "huge pages", "OK", "none free", cure="the provider uses some for its queues if it can; a few hundred help"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
