"""The figures, taken by the initiator.

    write     GB/s: many writes of a size, some in flight, then a notification; the clock stops when the target's Python
              has seen it. Small sizes take turns at 64 places, so they stay in the caches
    paged     GB/s: one request of many pages in random order on both sides, and its notification, likewise.
              paged_build and paged_post: what the calls take before the data move
    ping      one way of a 64-byte write and its notification: half of there and back, Python polling on both sides
    submit    the call that starts a 64-byte write, nothing else being in flight
    register  the call, for memory that has been touched; deregister likewise

After the timed bursts of a size the source gets new bytes, is written once more, and every byte of it is compared.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from typing import Any

from adapter import PING, PONG, SMALL, Adapter, Missing, Span
from harness import ECHO, REGION, SEEN, Link, Options, Stuck, crc, emit

__all__ = ["PAGED", "REGISTERED", "SIZES", "Figures", "plan"]

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
PAGED = ((1024, 32 << 10), (4096, 1 << 10))
REGISTERED = (4 << 10, 1 << 20, 64 << 20)
_WARMUP = 50


def plan(size: int, quick: bool) -> tuple[int, int, int]:
    """Return (writes of a burst, of which at most so many in flight, places they take turns at)."""
    volume, most = (16 << 20, 300) if quick else (64 << 20, 2000)
    least = 2 if size >= 16 << 20 else 8
    return max(least, min(volume // size, most)), max(1, min(16, (32 << 20) // size)), min(64, REGION // size)


class Figures:
    """One peer's figures, in the initiator's process."""

    def __init__(self, adapter: Adapter, link: Link, options: Options) -> None:
        self.adapter, self.link, self.options = adapter, link, options
        self.memory = memoryview(adapter.memory)
        self.raised = 0  # notifications
        self.salt = 0
        self.verified = True
        self._fill(REGION)

    # ---- parts

    def _wait(self, operation: Any) -> None:
        done, threaded = self.adapter.done, self.adapter.threaded
        if done(operation):
            return
        deadline = time.monotonic() + self.options.step_seconds
        while not done(operation):
            if threaded:
                os.sched_yield()
            if time.monotonic() > deadline:
                raise Stuck("a write did not complete")

    def _wait_seen(self, more: int) -> None:
        """Wait until the target has seen that many more notifications."""
        words, progress, threaded = self.link.words, self.adapter.progress, self.adapter.threaded
        self.raised += more
        deadline = time.monotonic() + self.options.step_seconds
        while words[SEEN] < self.raised:
            progress()
            if threaded:
                os.sched_yield()
            if time.monotonic() > deadline:
                raise Stuck(f"the target has seen {words[SEEN]} of {self.raised} notifications")

    def _notify(self) -> None:
        self.adapter.notify()
        self._wait_seen(1)

    def _expect(self, spans: list[Span]) -> None:
        if self.adapter.two_sided:
            self.link.call("expect", spans)

    def _fill(self, nbytes: int) -> None:
        """Put bytes into the source that it never held before, no two pages of them alike."""
        self.salt += 1
        noise = random.Random(self.salt).randbytes(1 << 20)
        for number, offset in enumerate(range(0, nbytes, len(noise))):
            turn = number * 97
            part = min(len(noise), nbytes - offset)
            self.memory[offset : offset + part] = (noise[turn:] + noise[:turn])[:part]

    def _compare(self, here: list[Span], there: list[Span]) -> bool:
        same = bool(crc(self.memory, here) == self.link.call("crc", there))
        self.verified = self.verified and same
        return same

    # ---- figures

    def write(self) -> None:
        for size in SIZES:
            if self.options.sizes and size not in self.options.sizes:
                continue
            count, window, places = plan(size, self.options.quick)
            spans = [(i % places * size, size) for i in range(count)]
            used = spans[:places]
            self._burst(spans, window)
            rates = [size * count / self._burst(spans, window) / 1e9 for _ in range(self.options.repeats)]
            self._fill(len(used) * size)
            self._burst(spans, window)
            same = self._compare(used, used)
            emit(self.adapter.name, "write", size, rates, "GB/s", count=count, window=window, verified=same)

    def _burst(self, spans: list[Span], window: int) -> float:
        self._expect(spans)
        write, wait = self.adapter.write, self._wait
        flying: deque[Any] = deque()
        begin = time.perf_counter()
        for offset, nbytes in spans:
            if len(flying) >= window:
                wait(flying.popleft())
            flying.append(write(offset, nbytes))
        for operation in flying:
            wait(operation)
        self._notify()
        return time.perf_counter() - begin

    def paged(self) -> None:
        order = random.Random(5)
        clock = time.perf_counter
        for pages, size in PAGED:
            # Not the first page: Mooncake's notification writes there.
            here, there = (order.sample(range(1, REGION // size), pages) for _ in range(2))
            targets = [(k * size, size) for k in there]
            rates, built, posted = [], [], []
            for last in [*[False] * (self.options.repeats + 1), True]:
                if last:
                    self._fill(REGION)
                self._expect(targets)
                begin = clock()
                post, raises = self.adapter.paged(size, here, there)
                ready = clock()
                operation = post()
                after = clock()
                self._wait(operation)
                if raises:
                    self._wait_seen(raises)
                else:
                    self._notify()
                rates.append(pages * size / (clock() - begin) / 1e9)
                built.append((ready - begin) * 1e6)
                posted.append((after - ready) * 1e6)
            same = self._compare([(k * size, size) for k in here], targets)
            name = self.adapter.name
            emit(name, "paged", size, rates[1:-1], "GB/s", pages=pages, verified=same)
            emit(name, "paged_build", size, built[1:-1], "us", pages=pages)
            emit(name, "paged_post", size, posted[1:-1], "us", pages=pages)

    def ping(self) -> None:
        adapter, memory, words, clock = self.adapter, self.memory, self.link.words, time.perf_counter
        turns = 200 if self.options.quick else 2000
        there_and_back: list[float] = []
        wrong = 0
        words[ECHO] = 1
        enough = clock() + (1 if self.options.quick else 4)  # a slow peer need not be slow so many times
        for turn in range(-_WARMUP, turns):
            stamp = (turn + _WARMUP + 1).to_bytes(8, "little")
            memory[PING : PING + 8] = stamp
            begin = clock()
            if begin > enough and turn > 10:
                break
            adapter.write_notify(PING, SMALL)
            deadline = begin + self.options.step_seconds
            while not adapter.poll():
                if adapter.threaded:
                    os.sched_yield()
                if clock() > deadline:
                    raise Stuck("no answer to a ping")
            end = clock()
            wrong += memory[PONG : PONG + 8] != stamp
            self.raised += 1
            if turn >= 0:
                there_and_back.append((end - begin) * 1e6 / 2)
        self._wait_seen(0)
        words[ECHO] = 0
        self.verified = self.verified and not wrong
        emit(adapter.name, "ping", SMALL, there_and_back, "us", verified=not wrong)

    def submit(self) -> None:
        count = 200 if self.options.quick else 2000
        took = []
        spans = [(i % 64 * 64, SMALL) for i in range(count)]
        self._expect(spans)
        clock = time.perf_counter
        for offset, nbytes in spans:
            begin = clock()
            operation = self.adapter.write(offset, nbytes)
            took.append((clock() - begin) * 1e6)
            self._wait(operation)
        self._notify()
        emit(self.adapter.name, "submit", SMALL, took, "us")

    def register(self) -> None:
        adapter, clock = self.adapter, time.perf_counter
        for size in REGISTERED:
            on, off = [], []
            for _ in range(20 if size <= 1 << 20 else 5):
                memory = adapter.allocate(size)
                begin = clock()
                registration = adapter.register(memory)
                middle = clock()
                adapter.deregister(registration)
                off.append((clock() - middle) * 1e6)
                on.append((middle - begin) * 1e6)
            if not on:
                raise Missing("nothing was registered")
            emit(adapter.name, "register", size, on, "us")
            emit(adapter.name, "deregister", size, off, "us")
