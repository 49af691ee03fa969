"""Has vLLM's processes sleep where they wait for each other. Part of vllm_ttft.py, which puts it on their PYTHONPATH.

A worker waits for its engine, and the engine for its worker, by calling `sched_yield` for a second before they sleep.
Two engines have four such loops; on two processors they are in the way of the one that computes. It is the same for
every connector.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "vllm.distributed.device_communicators.shm_broadcast"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that one module as ever, and changes a default when it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                condition = module.SpinCondition.__init__
                if condition.__defaults__ != (1,):
                    raise ImportError(f"{_NAME}: SpinCondition has other defaults than known: leave out --calm")
                condition.__defaults__ = (0,)

            loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Finder())
