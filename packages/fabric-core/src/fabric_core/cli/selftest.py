"""One small transfer between two engines of this process, for `fabric doctor`."""

from __future__ import annotations

import os
import secrets
import time

from fabric_core.cli.pattern import count_wrong, fill
from fabric_core.cli.session import Buffer, open_engine
from fabric_core.errors import BackendError

__all__ = ["loopback"]

_BYTES = 64 * 1024


def loopback() -> str:
    """Write 64 KiB with an immediate and compare; returns a sentence. Raises FabricError if anything is wrong."""
    name = f"doctor-{os.getpid()}-{secrets.token_hex(2)}"
    with open_engine(name=f"{name}-a") as here, open_engine(name=f"{name}-b") as there:
        source, target = Buffer(here, _BYTES, "engine"), Buffer(there, _BYTES, "engine")
        try:
            fill(source.view, 7)
            imm = there.alloc_imm()
            arrived = there.expect_imm_count(imm, 1, timeout=5.0)
            begin = time.perf_counter()
            here.submit_single_write(_BYTES, imm, (source.handle, 0), (target.desc, 0), timeout=5.0).wait()
            arrived.wait()
            elapsed = (time.perf_counter() - begin) * 1e6
            wrong = count_wrong(target.view, source.view)
        finally:
            source.close()
            target.close()
        if wrong:
            raise BackendError(f"{wrong} of {_BYTES} bytes are wrong after a write on backend {here.backend}")
        return f"64 KiB on backend {here.backend} in {elapsed:.0f} us, contact included"
