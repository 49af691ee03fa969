"""What can go wrong with a request, beyond what fabric_core raises."""

from __future__ import annotations

from fabric_core import FabricError, TransferError

__all__ = ["KvDamaged", "PrefillRefused"]


class PrefillRefused(TransferError):
    """The prefiller will not complete the request, or the pair cannot work. The text is its reason."""


class KvDamaged(FabricError):
    """The prefiller notified more than it wrote: all immediates came, but some pages are not, or only partly, there."""
