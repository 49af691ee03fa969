"""Builds `fabric_core._native`, the C engine, as one abi3 extension.

What goes into it is the business of `src/fabric_core/native/build_native.py`, when it is compiled and where the result
goes that of `src/fabric_core/extension.py`, which the other packages use too.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "fabric_core"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fabric_core_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the source tree is incomplete")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extension() -> Any:
    """Return what is built."""
    parts, building = _load(PACKAGE / "native" / "build_native.py"), _load(PACKAGE / "extension.py")
    return building.Extension(ROOT, "fabric_core", builder=partial(parts.ffibuilder, building.declarations))


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's entry."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            extension().build_into(version, build_data)
