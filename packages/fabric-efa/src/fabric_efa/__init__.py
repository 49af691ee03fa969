"""Backend for AWS EFA, and for any libfabric provider with reliable datagram endpoints.

Planned: the `efa` provider first, with `tcp`, `shm`, `verbs` and `cxi` through the same code, and libfabric loaded at
run time. This release holds no code: it registers no backend and `fabric devices` will not list anything from it.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
