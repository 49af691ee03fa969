"""Backend for AWS EFA, and for any libfabric provider with reliable datagram endpoints: tcp, shm, verbs, cxi.

    engine = TransferEngine.open("cuda:0", backend="efa")

`docs/efa.md` says what it needs and how to choose a provider. libfabric is loaded when the backend is first asked for
devices, so importing this costs nothing and never fails for want of it.
"""

from __future__ import annotations

from fabric_efa.backend import EfaBackend, backend

__version__ = "0.1.0"

__all__ = ["EfaBackend", "__version__", "backend"]
