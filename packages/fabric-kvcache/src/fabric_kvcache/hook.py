"""What a model calls after each layer, from its own thread. The writes are submitted there and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from fabric_kvcache.steps import Step

__all__ = ["LayerHook"]


class LayerHook:
    """`hook(layer)` submits that layer of the hook's chunk. Layers come in any order, each once.

    What can be known before a layer is ready was worked out when the hook was made.
    """

    __slots__ = ("_made", "_make", "_post")

    def __init__(
        self, made: dict[int, Step], make: Callable[[int], Step | None], post: Callable[[Step, float], None]
    ) -> None:
        self._made = made
        self._make = make
        self._post = post

    @property
    def left(self) -> tuple[int, ...]:
        """The layers that it was not called with, of those whose writes were worked out beforehand."""
        return tuple(self._made)

    def __call__(self, layer: int) -> None:
        """Raises what `PrefillJob.push` does. A layer that another rank sends is passed over."""
        began = time.perf_counter()
        step = self._made.pop(layer, None)
        if step is None:
            step = self._make(layer)
            if step is None:
                return
        self._post(step, began)
