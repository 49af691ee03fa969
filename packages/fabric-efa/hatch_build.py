"""Builds `fabric_efa._native`, the libfabric domain (`fabric_core.extension` says how, and which variables it heeds).

libfabric itself is loaded at run time, but its headers are needed here. Where they are missing the package is built
without the extension and says so when it is used: everything else of a workspace must install on a bare machine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
SIBLING = ROOT.parent / "fabric-core" / "src" / "fabric_core" / "extension.py"


def extension() -> Any:
    """Return what is built; what does it is the sibling's in a source tree, else the installed fabric-core's."""
    spec = importlib.util.spec_from_file_location("fabric_core_extension", SIBLING) if SIBLING.is_file() else None
    if spec and spec.loader:
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
    else:
        from fabric_core import extension as builder
    return builder.Extension(
        ROOT,
        "fabric_efa",
        cdef="cdef_efa.h",
        needs="rdma/fi_rma.h",
        without="built without libfabric's headers (libfabric-dev): it will not open",
        libraries=["dl"],
    )


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's entry."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if SIBLING.is_file() else ["fabric-core"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            extension().build_into(version, build_data)
