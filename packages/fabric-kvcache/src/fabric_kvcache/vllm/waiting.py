"""Which prompts wait for a decoder, and which of them nobody will ask for: said by who had them computed.

A client may leave after its prompt was computed and before its decoder has asked for it. No abort reaches the prefill
engine then, and the blocks would wait for `hold`. So a prefill request may bring a `drop_key`, and who shows that key
at the card (card.py) ends the waiting. The ids of transfers may be guessed or seen by others, keys need not be.
"""

from __future__ import annotations

import hmac
import threading

__all__ = ["Waiting"]


class Waiting:
    """Of the scheduler half. `drop` is called by the card's threads, everything else by the scheduler's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the others
        self._known: dict[str, tuple[str, str]] = {}  # transfer id -> (request id, key)
        self._transfers: dict[str, str] = {}  # request id -> transfer id
        self._dropped: set[str] = set()  # request ids

    def add(self, request_id: str, transfer_id: str, key: str) -> None:
        """A prompt with a key is computed from now on, and waits for its decoder until `discard`."""
        if not key:
            return
        with self._lock:
            self._transfers[request_id] = transfer_id
            self._known[transfer_id] = (request_id, key)

    def discard(self, request_id: str) -> None:
        """It waits no more. Unknown ones are ignored."""
        with self._lock:
            transfer_id = self._transfers.pop(request_id, None)
            if transfer_id is not None and self._known.get(transfer_id, ("",))[0] == request_id:
                del self._known[transfer_id]
            self._dropped.discard(request_id)

    def drop(self, transfer_id: str, key: str) -> bool:
        """Nobody will ask for it any more. Return False if none waits under that id and key."""
        with self._lock:
            request_id, right = self._known.get(transfer_id, ("", ""))
            if not request_id or not hmac.compare_digest(right.encode(), key.encode()):
                return False
            self._dropped.add(request_id)
            return True

    def take(self) -> set[str]:
        """Return the ids of requests that nobody will ask for. They are named until `discard`."""
        with self._lock:
            return set(self._dropped)
