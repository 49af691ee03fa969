"""Starts the decode side of a benchmark, and ends it."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fabric_core import BackendError

__all__ = ["receiver_process"]

_START_SECONDS = 60.0


@contextmanager
def receiver_process(backend: str, nics: int | None, device: str) -> Iterator[str]:
    """Start the decode side; yields its address, ends it afterwards."""
    name = f"kvbench-{os.getpid()}-{secrets.token_hex(2)}"
    words = [sys.executable, "-m", "fabric_kvcache.bench.receiver", "--name", name, "--backend", backend]
    words += ["--device", device, *(() if nics is None else ("--nics", str(nics)))]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            ready = selector.select(_START_SECONDS)
        line = child.stdout.readline() if ready else b""
        try:
            address = str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            raise BackendError("the second process did not start; what it said is above") from None
        yield address
    finally:
        child.stdin.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
