"""The trainer side: every rank calls `push(version)` when its weights are ready, and hears how it ended.

trainer = Trainer(engine, table, buffers, controller="local:rl")
outcome = trainer.push(7, timeout=30)       # on every rank, like a collective; but it ends by its deadline
outcome.committed, outcome.culprits, outcome.reason
"""

from __future__ import annotations

import logging
import math
import numbers
import operator
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fabric_core import ConfigError, FabricError, MrDesc, NetAddr
from fabric_rlweights.channel import Lost
from fabric_rlweights.presence import Over, Presence
from fabric_rlweights.protocol import Assign, Go, Offer, Quiet, Result, Sent
from fabric_rlweights.sender import Links, SentStats

__all__ = ["Outcome", "Trainer"]

log = logging.getLogger("fabric.rlweights")
_SLACK = 1.0  #: seconds beyond the deadline until the controller's word is given up
_LONGEST = 86400.0  #: seconds of an update: one day


@dataclass(frozen=True)
class Outcome:
    """How an update ended."""

    version: int
    committed: bool
    reason: str = ""  #: why not
    culprits: tuple[str, ...] = ()  #: "trainer 3", "receiver 1", "controller"
    seconds: float = 0.0
    stats: SentStats = field(default_factory=SentStats)  #: this rank's part


class _Broken(Exception):
    """Another rank failed, so the update was broken off; or this one is being closed."""


class Trainer(Presence):
    """One trainer rank. A context manager."""

    def push(
        self, version: int, *, timeout: float = 60.0, progress: Callable[[int, int], None] | None = None
    ) -> Outcome:
        """Take part in an update; returns within `timeout` seconds and a moment, whatever happens.

        The weights must not change meanwhile. On a GPU, what this thread's current stream was given before is waited
        for. `progress(done, all)` counts this rank's bytes.

        Args:
            version: a whole number from 0 on, below 2**63.
            timeout: seconds, above 0 and at most 86400 (a day).

        Raises ConfigError for other values of these.
        """
        version, timeout = _checked(version, timeout)
        begin = time.monotonic()
        deadline = begin + timeout
        stats = SentStats()

        def over(committed: bool, reason: str, culprits: Sequence[str]) -> Outcome:
            return Outcome(version, committed, reason, tuple(culprits), time.monotonic() - begin, stats)

        self._answered.wait(timeout)
        if self._over:
            return over(False, self._over, [f"trainer {self.rank}"])
        if not self._answered.is_set():
            return over(False, self.problem or "there is no plan yet: not everybody has said hello", ["controller"])
        if not self._ready.is_set() and not self._take_up_again():
            return over(False, self.problem, [f"trainer {self.rank}"])
        with self._state:
            if self._pushing:
                raise RuntimeError(f"trainer {self.rank}: push() is called by two threads")
            self._pushing = True
            self._idle.clear()
        try:
            self._catch_up()
            self._offer(version, deadline)
            while True:
                if self.over:
                    return over(False, self.over, [f"trainer {self.rank}"])
                try:
                    word = self._going.get(timeout=max(0.0, deadline + _SLACK - time.monotonic()))
                except queue.Empty:
                    return over(False, "the controller said nothing until the deadline: in doubt", ["controller"])
                if isinstance(word, Lost):
                    return over(False, f"the controller is gone: {word.reason}: in doubt", ["controller"])
                if isinstance(word, Result) and word.version == version:
                    return over(word.committed, word.reason, word.culprits)
                if isinstance(word, Go) and word.version == version:
                    stats = self._write(word, progress)
                elif isinstance(word, Go):
                    self._refuse(word)
                elif isinstance(word, Assign):
                    self._assign(word)
                    self._offer(version, deadline)
        finally:
            with self._state:
                self._pushing = False
                self._catch_up()
                self._idle.set()

    def _catch_up(self) -> None:
        """What came for no push, or too late for one."""
        for word in self._drain():
            if isinstance(word, Assign):
                self._assign(word)
            elif isinstance(word, Go):
                self._refuse(word)

    def _drain(self) -> list[Go | Result | Lost | Assign | Over]:
        found = []
        while not self._going.empty():
            found.append(self._going.get_nowait())
        return found

    def _offer(self, version: int, deadline: float) -> None:
        if self._sender is None:
            return  # the controller has heard why
        magnitudes = self._sender.magnitudes
        imm, left = magnitudes.begin(), max(0.0, deadline - time.monotonic())
        self._channel.send(
            self.controller, Offer(self.rank, version, left, self._plan, imm, magnitudes.desc.to_bytes())
        )

    def _write(self, go: Go, progress: Callable[[int, int], None] | None) -> SentStats:
        assert self._sender is not None
        with self._state:
            if go.attempt in self._broken:
                return SentStats()
            self._writing = go.attempt
            self._sender.wake.clear()
        deadline = time.monotonic() + go.seconds
        stats, problem, culprit = SentStats(), "", ""
        try:
            links = _links(go, self._descs)
            stats = self._sender.run(links, deadline, check=self._check, digests=go.digests, progress=progress)
        except _Broken:
            pass  # whoever broke it has told the controller
        except (FabricError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            culprit = str(getattr(error, "peer", None) or "")
        except Exception as error:
            log.exception("trainer %d: update %d", self.rank, go.version)
            problem = f"{type(error).__name__}: {error}"
        except BaseException as error:  # Ctrl-C, or an exit: the others need not wait until the deadline
            with self._state:
                self._writing = None
            sent = Sent(go.attempt, self.rank, f"push() was left: {type(error).__name__}", "", {}, 0)
            self._channel.send(self.controller, sent)
            self._sender.magnitudes.renew()
            raise
        with self._state:
            self._writing = None
            broken = go.attempt in self._broken or bool(self._over)
        if broken:
            self._channel.send(self.controller, Quiet("trainer", go.attempt, self.rank))
        else:
            sums = stats.digests
            self._channel.send(self.controller, Sent(go.attempt, self.rank, problem[:4000], culprit, sums, stats.bytes))
        if problem or broken:
            self._sender.magnitudes.renew()  # for the next offer; it may take a while
        return stats

    def _check(self) -> None:
        attempt = self._writing
        if self._over:
            raise _Broken(self._over)
        if attempt is not None and attempt in self._broken:
            raise _Broken(self._broken[attempt])


def _checked(version: object, timeout: object) -> tuple[int, float]:
    """Raise ConfigError for what the protocol cannot carry, and for what would be no deadline."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise ConfigError(f"push(version={version!r}): a whole number from 0 on, below 2**63")
    real = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    seconds = float(timeout) if real else math.nan  # type: ignore[arg-type]
    if not 0.0 < seconds <= _LONGEST:
        raise ConfigError(f"push(timeout={timeout!r}): seconds, above 0 and at most {_LONGEST:g}")
    return number, seconds


def _links(go: Go, known: dict[bytes, MrDesc]) -> Links:
    """`known`: the descriptors of the update before, which the engine knows already; becomes those of this one."""
    blobs = {blob for descs in go.tensors.values() for blob in descs.values()}
    found = {blob: known.get(blob) or MrDesc.from_bytes(blob) for blob in blobs}
    known.clear()
    known.update(found)
    return Links(
        {rank: {number: found[blob] for number, blob in descs.items()} for rank, descs in go.tensors.items()},
        dict(go.imms),
        {rank: (MrDesc.from_bytes(blob), imm) for rank, (blob, imm) in go.trainers.items()},
        {rank: NetAddr.from_bytes(blob) for rank, blob in go.addrs.items()},
    )
