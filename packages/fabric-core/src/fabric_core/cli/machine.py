"""What a figure was taken with and on, in words, for reports."""

from __future__ import annotations

import os
import platform

from fabric_core._version import __version__

__all__ = ["processors", "versions"]


def versions() -> str:
    """fabric-core, Python and kernel."""
    return f"fabric-core {__version__}, Python {platform.python_version()}, kernel {platform.release()}"


def processors() -> str:
    """CPUs that this process may use, and their model."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} CPUs, {model or platform.machine()}"
