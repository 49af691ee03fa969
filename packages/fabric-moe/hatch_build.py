"""Builds `fabric_moe._native`, the loops over rows (`fabric_core.extension` says how, and which variables it heeds).

Where there is no C compiler the package is built without it: numpy then does the same, several times slower.
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
        "fabric_moe",
        cdef="cdef_moe.h",
        needs="stdint.h",
        without="built without its C part, for want of a compiler: numpy takes its place",
        # -O3 vectorises the loops; contraction off: see rows.c
        cflags=[*builder.CFLAGS, "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-Wshadow", "-Wconversion"],
    )


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's entry."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if SIBLING.is_file() else ["fabric-core"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            extension().build_into(version, build_data)
