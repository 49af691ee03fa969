"""Layers of a device that computes behind the host's back."""

from __future__ import annotations

import threading
from typing import Any

from vllm_fakes import LIMIT

from fabric_kvcache.vllm.layer_events import LayerEvents


class Device:
    """Its events are done when it says so."""

    def __init__(self) -> None:
        self.events: list[threading.Event] = []

    def record(self) -> Any:
        event = threading.Event()
        self.events.append(event)
        event.synchronize = lambda: event.wait(LIMIT)  # type: ignore[attr-defined]
        return event


def test_layers_are_passed_on_when_they_are_computed_and_in_order() -> None:
    device, changed = Device(), threading.Semaphore(0)
    seen: list[int | None] = []

    def call(layer: int | None) -> None:
        seen.append(layer)
        changed.release()

    events = LayerEvents(device.record)
    for layer in range(3):
        events.after(call, layer)
    device.events[1].set()  # it cannot be done before the first one is
    assert not seen
    device.events[0].set()
    assert changed.acquire(timeout=LIMIT)
    assert changed.acquire(timeout=LIMIT)
    assert seen == [0, 1]
    waiting = threading.Thread(target=events.drain)
    waiting.start()
    assert waiting.is_alive()
    device.events[2].set()
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    assert seen == [0, 1, 2]
    events.close()


def test_closing_passes_on_what_is_left() -> None:
    device = Device()
    seen: list[int | None] = []
    events = LayerEvents(device.record)
    events.after(seen.append, 7)
    device.events[0].set()
    events.close()
    assert seen == [7]
    events.close()
