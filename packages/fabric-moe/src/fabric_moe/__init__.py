"""Dispatch and combine of tokens between the experts of a mixture-of-experts model.

Planned: a host proxy that drives scatters and barriers of `fabric_core` for GPU kernels. This release holds no code and
adds no command.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
