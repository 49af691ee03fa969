"""A watch whose pushes are prepared ahead: the engine submits them in C when the word says so, and Python hears of it.

All chunks and layers are one sequence of the engine's, in which each decoder rank is a lane, so that a rank which
cancels is not written to any more while the others go on. What was submitted is adopted afterwards, in order: noted,
waited for and sealed as if it had been pushed here. What a full engine has refused is pushed here, with more patience.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from fabric_core import (
    DeadlineExceeded,
    FabricError,
    QueueFull,
    Transfer,
    TransferEngine,
)
from fabric_core.sequence import Posted
from fabric_kvcache.sending import Sender
from fabric_kvcache.steps import Batch, Step
from fabric_kvcache.target import Target
from fabric_kvcache.watcher import LayerWatch, Part

__all__ = ["PreparedWatch"]

_AT_A_TIME = 64  # steps

Pushed = Callable[[Step, bool, int], None]  #: a step, whether it counts, and how many of its transfers were not made


class _Lane:
    """What the sequence may submit to one decoder rank."""

    def __init__(self, watch: PreparedWatch, number: int, target: Target) -> None:
        self.watch = watch
        self.number = number
        self.target = target
        self.upto: int | None = None  #: steps, once it was cancelled: those after them submit nothing to this rank

    def cancel(self) -> bool:
        return self.watch._end(self, under_way=True)


class PreparedWatch(LayerWatch):
    """Made by `PrefillJob.watch`. `pushed` is called with the job's lock held, once for each step that was reached.

    `unpushed(parts)` is called, with it held too, for what is left when it was closed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        parts: Sequence[Part],
        steps: Sequence[Step | None],
        sender: Sender,
        lock: AbstractContextManager[object],
        pushed: Pushed,
        unpushed: Callable[[Sequence[Part]], object],
    ) -> None:
        super().__init__(parts)
        self._made = list(steps)
        self._lock = lock  # guards what was pushed
        self._tell = pushed
        self._give_up = unpushed
        self._adopted = 0  # steps; guarded by _changed, as the lanes' `upto`
        self._ended = False  # nothing is submitted any more, whatever the decoder ranks want
        targets = dict.fromkeys(batch.target for step in steps if step is not None for batch in step.batches)
        self._lanes = {target: _Lane(self, number, target) for number, target in enumerate(targets)}
        rows = (
            [
                sender.ahead(batch.target, piece, self._lanes[batch.target].number)
                for batch in (step.batches if step is not None else ())
                for piece in batch.pieces
            ]
            for step in steps
        )
        self._word = self._sequence = engine.prepare_sequence(rows, on_submitted=self._hear)
        for target, lane in self._lanes.items():
            target.lend(lane)

    @property
    def posted_ns(self) -> list[int]:
        """When each step's last submit had returned: nanoseconds of time.monotonic_ns()."""
        return self._sequence.posted_ns

    def _store(self, steps: int) -> None:
        if steps > 0 and not self._word.closed:
            self._sequence.step(steps)
        self._hear()

    def _hear(self) -> None:
        """Adopt what was submitted meanwhile; after the last step of a watch that was closed, give the word back."""
        with self._lock:
            more = not self._word.closed
            while more:  # in few calls: each may have to wait for the GIL
                taken = self._sequence.take(self._adopted, _AT_A_TIME)
                for posted in taken:
                    self._adopt(self._adopted, posted)
                    with self._changed:
                        self._adopted += 1
                more = len(taken) == _AT_A_TIME  # what comes later is told of later
        for lane in self._lanes.values():
            if self._settled(lane):
                lane.target.returned(lane)
        if self._closed and self._adopted == len(self.steps):
            self._word.close()

    def _end(self, lane: _Lane, *, under_way: bool) -> bool:
        """Submit nothing of a lane any more. Returns whether everything that was has been adopted."""
        self._sequence.cancel(lane.number, under_way=under_way)
        with self._changed:
            if lane.upto is None:
                lane.upto = self._sequence.submitted
        return self._settled(lane)

    def _settled(self, lane: _Lane) -> bool:
        with self._changed:
            return self._adopted >= (len(self.steps) if lane.upto is None else lane.upto)

    def _end_all(self) -> None:
        self._ended = True
        self._sequence.cancel()  # all lanes at once, so that no step goes to some of them only
        for lane in self._lanes.values():
            self._end(lane, under_way=False)

    def _finish(self) -> None:
        first = not self._ended
        self._end_all()
        if first:
            with self._lock:
                self._give_up(self.steps[self._sequence.submitted :])
        self._hear()

    # ---- a step that was submitted (with the job's lock held)

    def _adopt(self, number: int, posted: Posted) -> None:
        step, self._made[number] = self._made[number], None
        if step is None or (step.batches and all(self._passed(batch, number) for batch in step.batches)):
            if step is None:  # another rank sends that layer
                self._count()
            return
        transfers = iter(posted.transfers)
        step.push.began = step.push.submitting = posted.seen_ns / 1e9
        step.push.submitted = posted.posted_ns / 1e9
        missing, whole = 0, True
        for batch in step.batches:
            left = self._adopt_batch(batch, [next(transfers) for _ in batch.submits])
            missing += left
            whole = whole and (not left or not batch.target.open)
        try:
            self._tell(step, whole, missing)
        except FabricError as error:
            self._end_all()
            with self._changed:
                self.error = self.error or error
                self._changed.notify_all()
            return
        if whole:
            self._count()

    def _passed(self, batch: Batch, number: int) -> bool:
        """Whether nothing of it was submitted because this watch had been closed."""
        upto = self._lanes[batch.target].upto
        return self._ended and upto is not None and number >= upto

    def _adopt_batch(self, batch: Batch, transfers: list[Transfer | None]) -> int:
        """Returns how many of its transfers were not made."""
        target = batch.target
        made = [transfer for transfer in transfers if transfer is not None]
        refused = None if None not in transfers else self._sequence.refused(self._lanes[target].number)
        if made or isinstance(refused, QueueFull):
            target.adopt(batch.writes, batch.nbytes, made, batch.on_done)
        left = tuple(submit for submit, one in zip(batch.submits, transfers, strict=True) if one is None)
        if not left or not target.open:
            return len(left)
        if isinstance(refused, QueueFull):
            return len(left) - target.write(0, 0, left)
        if isinstance(refused, DeadlineExceeded):
            target.expire()
        elif refused is not None:
            target.stop("failed", f"a write could not be submitted: {refused}", refused)
        return len(left)

    def _count(self) -> None:
        with self._changed:
            self._pushed += 1
            self._changed.notify_all()
