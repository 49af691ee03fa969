"""Weight transfer from the ranks of a trainer to the ranks of inference engines.

Planned: a transfer schedule worked out once from both sides' parameter layouts, then one-sided writes straight into the
inference engines' weights. This release holds no code and adds no command.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
