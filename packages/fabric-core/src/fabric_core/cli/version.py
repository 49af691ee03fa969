"""`fabric version`."""

from __future__ import annotations

import ctypes
import importlib
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

from fabric_core._version import __version__
from fabric_core.cli.guard import guarded
from fabric_core.cli.models import Library, Report, Version
from fabric_core.cli.options import Json
from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
from fabric_core.registry import discover

__all__ = ["command", "gather"]

_DEPENDENCIES = ("cffi", "msgspec", "pydantic", "typer", "numpy", "torch")

#: Vendor libraries are loaded when they are needed; here only to see whether they are there.
_LIBRARIES = (
    ("libibverbs.so.1", "fabric-ibverbs"),
    ("libfabric.so.1", "fabric-efa"),
    ("libcuda.so.1", "GPU memory"),
)


def gather() -> Version:
    """Look at packages without importing them, and at libraries by loading them."""
    packages = {"fabric-core": __version__}
    for plugin in discover(load=False):
        if plugin.package not in ("?", "(code)"):
            packages.setdefault(plugin.package, plugin.version)
    for name in _DEPENDENCIES:
        try:
            packages[name] = package_version(name)
        except PackageNotFoundError:
            continue
    return Version(
        packages=packages,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        native=_native(),
        libraries=[Library(name=name, found=_try(name), needed_by=user) for name, user in _LIBRARIES],
    )


def _try(name: str) -> str:
    try:
        ctypes.CDLL(name)
    except OSError:
        return ""
    return name


def _native() -> dict[str, str]:
    """Describe the compiled engine: its file, how it was built, and the copy routine chosen for this CPU."""
    try:
        native = importlib.import_module("fabric_core._native")
    except ImportError as error:
        return {"missing": str(error)}
    facts = {"file": str(getattr(native, "__file__", "?"))}
    for name, function in (("build", "fab_build_info"), ("copy", "fab_local_copy_kind")):
        ask = getattr(native.lib, function, None)
        if ask is not None:
            facts[name] = native.ffi.string(ask()).decode()
    return facts


@guarded
def command(json: Json = False) -> None:
    """Versions of all packages, how the engine was built, and which vendor libraries are there."""
    data = gather()
    if json:
        emit_json(Report[Version](schema="fabric.version/1", data=data))
        return
    out = console()
    show_table(out, [Column("PACKAGE"), Column("VERSION")], [[*pair] for pair in data.packages.items()])
    text_lines(out, "", f"python    {data.python}", f"platform  {data.platform}")
    text_lines(out, *(f"native    {key}: {value}" for key, value in data.native.items()))
    text_lines(out, "")
    rows = [[library.name, "yes" if library.found else "no", library.needed_by] for library in data.libraries]
    show_table(out, [Column("LIBRARY"), Column("FOUND"), Column("NEEDED BY")], rows)
