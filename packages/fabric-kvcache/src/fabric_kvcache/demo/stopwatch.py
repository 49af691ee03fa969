"""When each layer of a model began and ended."""

from __future__ import annotations

import functools
import time
from typing import Any

__all__ = ["Stopwatch"]


class Stopwatch:
    """Notes `(layer, began, ended)` for each pass through a layer, in time.perf_counter()."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, float, float]] = []
        self._began = 0.0

    def attach(self, layers: Any) -> list[Any]:
        """Hook a model's layers; returns the hooks, for their `remove()`."""
        hooks: list[Any] = []
        for number, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(self._begin))
            hooks.append(layer.register_forward_hook(functools.partial(self._end, number)))
        return hooks

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, number: int, *_: Any) -> None:
        self.spans.append((number, self._began, time.perf_counter()))
