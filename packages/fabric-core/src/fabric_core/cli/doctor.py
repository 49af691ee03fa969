"""`fabric doctor`: run all checks, say what is wrong and what to do."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fabric_core.cli.checks import CHECKS, Machine
from fabric_core.cli.devices import gather as gather_devices
from fabric_core.cli.env import declared_variables
from fabric_core.cli.guard import BAD, guarded
from fabric_core.cli.models import Check, Doctor, Report
from fabric_core.cli.options import Json, Verbose
from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
from fabric_core.config import Settings, default_local_dir, unknown_variables
from fabric_core.errors import ConfigError, FabricError
from fabric_core.registry import BACKENDS, discover
from fabric_core.topology import RealSystem, read

__all__ = ["command", "gather"]


def gather(peer: str = "") -> Doctor:
    """Run every check; a check that raises becomes a FAIL of its own."""
    checks: list[Check] = []
    try:
        settings = Settings.load()
        checks.append(Check(group="software", name="settings", status="OK", found="valid"))
        local_dir = settings.local_dir
    except ConfigError as error:
        checks.append(Check(group="software", name="settings", status="FAIL", found=str(error), cure="`fabric env`"))
        local_dir = default_local_dir()
        # The rest of the checks should still run, and some of them load settings themselves.
        return _count([*checks, *_machine_checks(local_dir), *_software()])
    checks += _software()
    checks += _backends()
    checks += _backend_checks()
    checks += _faults(settings)
    checks += _security(settings)
    checks += _machine_checks(local_dir)
    checks += _cuda()
    checks += _live(peer)
    return _count(checks)


def _count(checks: list[Check]) -> Doctor:
    words = ("OK", "WARN", "FAIL", "SKIP")
    return Doctor(checks=checks, counts={word: sum(check.status == word for check in checks) for word in words})


def _machine_checks(local_dir: str) -> list[Check]:
    system = RealSystem()
    machine = Machine(system, read(system), os.getuid(), local_dir)
    return [check for function in CHECKS for check in function(machine)]


def _software() -> Iterator[Check]:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = ".".join(str(part) for part in sys.version_info[:3]) + (" free-threaded" if free_threaded else "")
    yield Check(group="software", name="Python", status="OK", found=version)
    try:
        importlib.import_module("fabric_core._native")
        yield Check(group="software", name="engine", status="OK", found="compiled engine loads")
    except ImportError as error:
        cure = "install a wheel, or run `make native` in a checkout"
        yield Check(group="software", name="engine", status="FAIL", found=str(error), cure=cure)
    yield _script()
    for name, near in unknown_variables(os.environ, declared_variables()).items():
        cure = f"did you mean {near}?" if near else "`fabric env` lists what there is"
        yield Check(group="software", name=name, status="WARN", found="set, but nothing reads it", cure=cure)
    installed = {plugin.name for plugin in discover(BACKENDS, load=False)}
    for name in os.environ.get("FABRIC_BACKENDS", "").split(","):
        if name.strip() and name.strip() not in installed:
            found = f"names {name.strip()!r}, which is not installed"
            yield Check(group="software", name="FABRIC_BACKENDS", status="WARN", found=found, cure="`fabric plugins`")
    for plugin in discover():
        if plugin.status in ("failed", "incompatible", "duplicate"):
            bad = plugin.status != "duplicate"
            yield Check(
                group="software",
                name=f"plug-in {plugin.name}",
                status="FAIL" if bad else "WARN",
                found=f"{plugin.status}: {plugin.reason}",
                cure=plugin.cure,
            )


def _cuda() -> Iterator[Check]:
    """Do the GPUs that the machine has serve a `cuda:N` engine?"""
    from fabric_core import gpu

    there = [item for item in read(RealSystem()).gpus if item.vendor == "NVIDIA"]
    reason = gpu.why_not()
    if not reason:
        found = ", ".join(f"{item.device} {item.name}" for item in gpu.gpus())
        yield Check(group="gpu", name="CUDA driver", status="OK", found=found)
    elif there:
        cure = "install the NVIDIA driver (nvidia-smi must work); in a container, pass the GPUs: --gpus all"
        yield Check(group="gpu", name="CUDA driver", status="WARN", found=reason, cure=cure)


def _faults(settings: Settings) -> Iterator[Check]:
    """Does something make operations fail on purpose?"""
    if settings.faults is not None:
        found = f"FABRIC_FAULTS={settings.faults}: every engine fails on purpose"
        yield Check(group="software", name="faults", status="WARN", found=found, wanted="not set", cure="unset it")


def _security(settings: Settings) -> Iterator[Check]:
    """Are handshakes authenticated, and what is open to whom?"""
    from fabric_core.secret import handshake_key, origin

    try:
        source = origin(settings)
        secret = handshake_key(settings) is not None
    except ConfigError as error:
        cure = "no engine opens until this is put right"
        yield Check(group="security", name="handshakes", status="FAIL", found=str(error), cure=cure)
        return
    if secret:
        found = f"authenticated by {source}; local: open to processes of this uid that hold the secret"
        yield Check(group="security", name="handshakes", status="OK", found=found)
    else:
        found = "not authenticated: no secret is set; local: open to every process of this uid"
        cure = "set FABRIC_SECRET_FILE on all sides if other jobs share this uid or network (SECURITY.md)"
        yield Check(group="security", name="handshakes", status="OK", found=found, cure=cure)
    found = "not by fabric: data travels in clear text; local: it stays in the memory of this host"
    yield Check(group="security", name="encryption", status="OK", found=found)


def _script() -> Check:
    """Two other projects install a script called `fabric`."""
    first = shutil.which("fabric")
    if first is None:
        cure = "add its directory to PATH; `fabricctl` and `python -m fabric_core.cli` are the same command"
        return Check(group="software", name="script", status="WARN", found="no `fabric` on PATH", cure=cure)
    try:
        ours = b"fabric_core" in Path(first).read_bytes()[:65536]
    except OSError:
        ours = False
    cure = "" if ours else "another project's script comes first: call `fabricctl`, or change the order of PATH"
    return Check(group="software", name="script", status="OK" if ours else "WARN", found=first, cure=cure)


def _backends() -> Iterator[Check]:
    found = gather_devices()
    for item in found.unavailable:
        if not item.reason.startswith(("failed", "incompatible", "duplicate")):  # those are told by _software
            yield Check(group="backends", name=item.name, status="SKIP", found=item.reason, wanted="", cure=item.cure)
    for device in found.devices:
        status = "OK" if device.state == "up" else "WARN"
        yield Check.model_validate(
            {"group": "backends", "name": f"{device.backend} {device.name}", "status": status, "found": device.state}
        )
    if not any(device.state == "up" for device in found.devices):
        cure = "`fabric devices` and `fabric plugins` say why"
        yield Check(group="backends", name="usable device", status="FAIL", found="none", wanted="one", cure=cure)


def _backend_checks() -> Iterator[Check]:
    """What backends look at themselves (`Backend.checks`); one that raises becomes a FAIL of its own."""
    for plugin in discover(BACKENDS):
        look = getattr(plugin.load(), "checks", None) if plugin.status == "ok" else None
        if look is None:
            continue
        try:
            for found in look():
                yield Check.model_validate({"group": plugin.name, **found})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            cure = f"a defect of {plugin.package}"
            yield Check(group=plugin.name, name="checks", status="FAIL", found=text, cure=cure)


def _live(peer: str) -> Iterator[Check]:
    """Move real bytes: within this process, and to a peer that runs `fabric ping`, if one was named."""
    try:
        from fabric_core.cli.selftest import loopback

        yield Check(group="live", name="write to ourselves", status="OK", found=loopback())
    except (ImportError, AttributeError, FabricError, OSError) as error:
        cure = "`fabric explain` knows error names; with a compiled engine this is a defect"
        yield Check(group="live", name="write to ourselves", status="FAIL", found=f"{error}", cure=cure)
        return
    if peer:
        from fabric_core.cli.ping import measure

        try:
            data = measure(peer, count=20, size=64, nics=None, timeout=5.0)
        except FabricError as error:
            yield Check(
                group="live", name=f"peer {peer}", status="FAIL", found=str(error), cure="run `fabric ping` there"
            )
        else:
            status = "OK" if not data.lost else "FAIL"
            text = f"{data.sent - data.lost} of {data.sent} answered, p50 {data.p50_us or 0:.1f} us"
            yield Check.model_validate({"group": "live", "name": f"peer {peer}", "status": status, "found": text})


@guarded
def command(
    peer: Annotated[str, typer.Option("--peer", help="Also ping this address (run `fabric ping` there first).")] = "",
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Check this machine for what usually goes wrong. Exit code 1: a check failed.

    Without -v, only what is not OK is shown.
    """
    data = gather(peer)
    bad = [f"{check.group} {check.name}: {check.found}" for check in data.checks if check.status == "FAIL"]
    if json:
        emit_json(Report[Doctor](schema="fabric.doctor/1", data=data, problems=bad))
    else:
        _show(data, verbose)
    if bad:
        raise typer.Exit(BAD)


def _show(data: Doctor, verbose: bool) -> None:
    out = console()
    shown = [check for check in data.checks if verbose or check.status in ("WARN", "FAIL")]
    columns = [
        Column("STATUS", status=True),
        Column("GROUP", drop=1),
        Column("CHECK"),
        Column("FOUND", text=True),
        Column("WANTED", text=True, drop=2),
        Column("CURE", text=True),
    ]
    if shown:
        rows = [[check.status, check.group, check.name, check.found, check.wanted, check.cure] for check in shown]
        show_table(out, columns, rows)
        text_lines(out, "")
    text_lines(out, ", ".join(f"{count} {word}" for word, count in data.counts.items()))
    if not verbose:
        text_lines(out, "`fabric doctor -v` shows every check")
