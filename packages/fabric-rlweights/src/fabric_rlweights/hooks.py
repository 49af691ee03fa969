"""What an inference engine does around an update. Subclass it; every method may be left out."""

from __future__ import annotations

from typing import Any

__all__ = ["Hooks"]

Bytes = Any  #: a numpy array of uint8; where the weights are on a GPU a torch tensor of uint8, there


class Hooks:
    """Called on the receiver's thread. What raises leaves the engine paused, and the report names this rank.

    In place: pause, (writes), finish/load, reset_caches, resume. With a double buffer: (writes), pause, finish/load,
    exchange, reset_caches, resume. After a failed update in place there is no resume until one succeeds, and no pause
    either: the engine is paused already. `resume` is called when every rank has the new version, so that no two ranks
    sample with different ones. What hooks up to `reset_caches` give to the thread's current CUDA stream is waited for.
    """

    def pause(self, version: int) -> None:
        """Stop sampling; return when nothing reads the weights any more."""

    def resume(self, version: int) -> None:
        """Sample again: all weights are of this version."""

    def reset_caches(self, version: int) -> None:
        """Throw away what was computed with older weights: prefix caches above all."""

    def exchange(self, tensors: dict[str, Bytes]) -> None:
        """With a double buffer: use these bytes from now on."""

    def finish(self, name: str, data: Bytes) -> None:
        """Make a tensor of class `staging` out of its loadable copy (C-contiguous). Default: an error."""
        raise NotImplementedError(f"{name} is of layout staging: the engine's hook `finish` must make it")

    def load(self, name: str, data: Bytes) -> None:
        """Give a parameter of class `fallback`, whole, to the engine's own loader. Default: an error."""
        raise NotImplementedError(f"{name} falls back to the engine's loader: the hook `load` must call it")

    def told(self, version: int, committed: bool, reason: str) -> None:
        """Hear how an update ended everywhere."""
