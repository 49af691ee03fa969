"""Backend for NICs driven through libibverbs.

Planned: RC and UD queue pairs for ConnectX, eRDMA, Broadcom, AMD and Soft-RoCE devices, with libibverbs loaded at run
time. This release holds no code: it registers no backend and `fabric devices` will not list anything from it.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
