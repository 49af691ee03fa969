"""Backend for NICs driven through libibverbs: ConnectX, and whatever else has reliable connections (RC queue pairs).

    engine = TransferEngine.open("cpu", backend="ibverbs")

`docs/ibverbs.md` says what it needs, its settings, and what was tried on which NIC. libibverbs is loaded when the
backend is first asked for devices, so importing this costs nothing and never fails for want of it.
"""

from __future__ import annotations

from fabric_ibverbs.backend import VerbsBackend, backend

__version__ = "0.1.0"

__all__ = ["VerbsBackend", "__version__", "backend"]
