"""Prompts that have ended: who asks for one of them is refused with the reason, instead of being left waiting."""

from __future__ import annotations

import time
from collections.abc import Set

from fabric_core import FabricError
from fabric_kvcache.prefiller import Prefiller

__all__ = ["Gone"]

_REMEMBERED = 120.0  # seconds
_MOST = 4096


class Gone:
    """Of one worker. One thread."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller
        self._reasons: dict[str, tuple[float, str]] = {}  # transfer id -> until when, and why

    def add(self, transfer_id: str, reason: str) -> None:
        self._reasons.pop(transfer_id, None)
        self._reasons[transfer_id] = (time.monotonic() + _REMEMBERED, reason)
        if len(self._reasons) > _MOST:
            del self._reasons[next(iter(self._reasons))]

    def refuse(self, asked: Set[str], live: Set[str]) -> None:
        """Refuse those of `asked` that have ended. `live`: ids that are in use, perhaps once more."""
        now = time.monotonic()
        for transfer_id in (asked & self._reasons.keys()) - live:
            until, reason = self._reasons[transfer_id]
            if until < now:
                del self._reasons[transfer_id]
                continue
            try:
                self._prefiller.take(transfer_id, 0).abandon(f"the prefill has ended: {reason}", "refused")
            except FabricError:  # it was cancelled meanwhile
                pass
