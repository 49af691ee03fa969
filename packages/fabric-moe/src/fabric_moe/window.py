"""How many rows are sent to a rank before the counts of all ranks are known: as many as were needed lately."""

from __future__ import annotations

from collections import deque

from fabric_moe.config import MoeConfig

__all__ = ["Window"]

_STEPS = 64
_GRAIN = 8


class Window:
    """Grows at once to what a step needed, and falls back when no step of the last 64 needed it.

    Never below `private_tokens`, never above `private_max`. Each rank has its own; it travels with the counts.
    """

    def __init__(self, config: MoeConfig) -> None:
        self._least = config.private_tokens
        self._most = config.private_max
        self._needs: deque[int] = deque(maxlen=_STEPS)
        self.rows = self._least  #: of the next step

    def saw(self, need: int) -> None:
        """Hear how many rows a step had for its fullest destination."""
        self._needs.append(need)
        wanted = -(-max(self._needs) // _GRAIN) * _GRAIN
        self.rows = min(self._most, max(self._least, wanted))
