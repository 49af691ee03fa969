"""Prepared sequences: a word that counts finished steps, and what each step submits, in C on the watcher's thread."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric_core.drafts import StepWrite, draft
from fabric_core.errors import (
    BackendError,
    BadRange,
    FabricError,
    StaleHandle,
    WaitTimeout,
    transfer_error,
)
from fabric_core.gpu import served
from fabric_core.native_lib import fast, ffi, lib
from fabric_core.operations import Transfer
from fabric_core.streams import gpu_of, refusal

if TYPE_CHECKING:
    from fabric_core.base import EngineBase

__all__ = ["Posted", "PreparedSequence", "StepWrite", "prepare"]

_SLICE = 0.1  # seconds: a wait lets Python handle signals so often


class Posted(NamedTuple):
    """A step that was submitted."""

    seen_ns: int
    posted_ns: int
    transfers: list[Transfer | None]  #: None: it was not submitted, or was taken before


class PreparedSequence:
    """Made by `TransferEngine.prepare_sequence`. Any thread. It holds its memory until it is closed.

    A write that the engine refuses (full for a millisecond, memory deregistered, deadline passed) ends its lane: what
    is left of that lane is passed over. With one lane that is the end of the sequence. Steps are counted on.
    """

    def __init__(
        self,
        engine: EngineBase,
        pointer: Any,
        opened: Any,
        device: int | None,
        own: int,
        held: Any,
    ) -> None:
        self._engine = engine
        self._core = engine._core
        self._pointer = pointer
        self._watch = int(opened.watch)
        self._device = device
        self._own = own  # a word that GPUs reach, to be given back
        self._held = held
        self._ends: list[int] = []  # of each step: one behind its last transfer
        self._keeps = False  # transfers, to be taken
        self.ptr = int(opened.word)  #: address of the u64 that counts finished steps, from 0
        self.closed = False

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self._ends)

    @property
    def value(self) -> int:
        """The word: steps that whoever computes has finished. Raises StaleHandle once closed: it is another's then.

        Setting it is what a GPU does: the watcher's thread submits. See `step`.
        """
        if self.closed:
            raise StaleHandle(f"{self!r} is closed")
        word: int = fast.load_u64(self.ptr)
        return word

    @value.setter
    def value(self, steps: int) -> None:
        if self.closed:
            raise StaleHandle(f"{self!r} is closed")
        fast.store_u64(self.ptr, steps)

    def step(self, upto: int | None = None) -> int:
        """Finish the next step, or all up to `upto` steps; submit in this thread. Returns how many steps that were.

        0: the watcher's thread was faster, or there are no more. A word that is beyond `upto` stays where it is.
        """
        if upto is not None and not 0 < upto < 1 << 63:
            raise BadRange(f"step({upto!r}): a number of steps, 1 to 2**63 - 1, or None for the next one")
        rc = int(lib.fab_sequence_step(self._pointer, upto or 0)) if self._core.address else -1
        if rc < 0:
            raise StaleHandle(f"{self!r} is closed")
        return rc

    def _look(self) -> Any:
        out = ffi.new("fab_sequence_state *")
        lib.fab_sequence_look(self._pointer, out)
        return out

    @property
    def submitted(self) -> int:
        """Steps that were submitted, or passed over because their lanes had ended."""
        return int(self._look().submitted)

    @property
    def ended(self) -> int:
        """Steps, counted from the first, whose transfers have all ended, well or badly."""
        return int(self._look().ended)

    @property
    def error(self) -> FabricError | None:
        """What was first seen to go wrong: a submit that was refused, or a transfer that ended badly.

        Ends are looked at in the order of the steps: a failure is seen when all before it have ended, and a refusal may
        be seen first. With `on_submitted`, a transfer that was taken and dropped tells nobody but its taker. A lane
        that was cancelled is no error; a transfer that was cancelled under way is.
        """
        return self._error(self._look())

    def _error(self, state: Any) -> FabricError | None:
        out, handle = state.first, int(state.first_handle)
        if not out.phase:
            return None
        if not handle:
            return refusal(out.err, "a step of a sequence was refused")
        group, engine = handle >> 24 & 0xFF, self._engine
        return transfer_error(
            out.err,
            op="sequence",
            peer=engine._peer_name(group, out.peer),
            nic=engine._nic_name(group, out.nic),
            writes=(int(out.ended), int(out.units)) if out.units else None,
        )

    def refused(self, lane: int = 0) -> FabricError | None:
        """Return why a submit of this lane was refused; None: none was, whether or not the lane was cancelled."""
        why = int(lib.fab_sequence_lane(self._pointer, lane))
        return refusal(why, "a step of a sequence was refused") if why and why != -errno.ECANCELED else None

    @property
    def seen_ns(self) -> list[int]:
        """When each submitted step was seen, before its first submit: nanoseconds of time.monotonic_ns()."""
        return self._times()[0]

    @property
    def posted_ns(self) -> list[int]:
        """When the last submit of each submitted step had returned: nanoseconds of time.monotonic_ns()."""
        return self._times()[1]

    def _times(self) -> tuple[list[int], list[int]]:
        room = self.steps
        seen, posted = ffi.new("uint64_t[]", room), ffi.new("uint64_t[]", room)
        n = lib.fab_sequence_times(self._pointer, seen, posted, 0, room)
        return ffi.unpack(seen, n) if n else [], ffi.unpack(posted, n) if n else []

    def take(self, first: int, most: int = 64) -> list[Posted]:
        """Return what was submitted from step `first` on, in order, `most` steps at a time; [] if nothing was yet.

        Each transfer is given once. Only for a sequence with `on_submitted`.
        """
        ends = self._ends
        if not 0 <= first <= len(ends) or most < 1:
            raise BadRange(f"take({first!r}, {most!r}): steps 0 to {len(ends)}, 1 or more of them")
        most = min(most, len(ends) - first)
        begin = at = ends[first - 1] if first else 0
        handles = ffi.new("uint64_t[]", (ends[first + most - 1] if most else begin) - begin + 1)
        times = ffi.new("uint64_t[]", 2 * most + 1)
        n = lib.fab_sequence_take(self._pointer, first, most, handles, times, times + most)
        found = []
        for k in range(n):
            end = ends[first + k]
            mine = [Transfer(self._engine, int(h)) if h else None for h in handles[at - begin : end - begin]]
            found.append(Posted(int(times[k]), int(times[most + k]), mine))
            at = end
        return found

    def cancel(self, lane: int | None = None, *, under_way: bool = False) -> int:
        """Submit nothing of a lane (None: of any) from the return on. Returns how many writes of it never will be.

        Its steps are passed over. What was submitted goes on; `under_way`: that is cancelled too. Idempotent.
        """
        if not self._core.address:
            return 0
        return int(lib.fab_sequence_cancel(self._pointer, -1 if lane is None else lane, under_way))

    def wait(self, timeout: float | None = None) -> None:
        """Block until all that was submitted so far has ended: nothing, if no addition to the word was seen yet.

        Raises WaitTimeout after `timeout` seconds (None: `settings.timeout`); the first error, see `error`.
        """
        seconds = self._engine.settings.timeout if timeout is None else timeout
        if not seconds >= 0:
            raise BadRange(f"wait(timeout={timeout!r}): a number of seconds, 0 or more")
        end = time.monotonic() + seconds
        upto = self.submitted
        while (state := self._look()).ended < upto:
            left = end - time.monotonic()
            if self.closed:
                raise StaleHandle(f"{self!r} is closed")
            if left <= 0:
                raise WaitTimeout(f"of {upto} steps {state.ended} have ended within {seconds:g} s; the others go on")
            lib.fab_transfer_wait(self._core.pointer, state.waits_for, int(min(left, _SLICE) * 1e9))
        if (error := self._error(state)) is not None:
            raise error

    def close(self) -> None:
        """Submit no more, and look at the word no more. What was submitted goes on, uncounted: `ended` stands still.

        Idempotent. A word that a GPU may still bump belongs to another then: cancel first, and close when that work has
        ended.
        """
        if self.closed:
            return
        self.closed = True
        self._held = None
        if self._keeps:
            self._engine._callbacks.drop_watcher(self._watch)
        # No address: the interpreter ends, and the C engine went first. Not 1: another thread closes it.
        if self._core.address and lib.fab_sequence_close(self._pointer) == 1:
            lib.fab_cuda_word_free(self._own)

    def __del__(self) -> None:
        if hasattr(self, "closed") and self._core.pid == os.getpid():
            self.close()
            lib.fab_sequence_free(self._pointer)  # not before: a call may be under way in another thread

    def __repr__(self) -> str:
        return f"<PreparedSequence of {self.steps} steps, word {self.ptr:#x}{', closed' if self.closed else ''}>"


def prepare(
    engine: Any,
    steps: Iterable[Iterable[StepWrite]],
    on_submitted: Callable[[], object] | None,
    device: str | None,
) -> PreparedSequence:
    """See TransferEngine.prepare_sequence."""
    engine._check_open()
    number = gpu_of(engine, device) if device is not None else served(engine.devices)
    held: dict[tuple[int, int], object] = {}
    rows = [list(step) for step in steps]
    if not rows:
        raise BadRange("a sequence without steps: it has at least one")
    drafts, at = [], (0, 0)
    try:
        for step, row in enumerate(rows):
            for place, write in enumerate(row):
                at = step, place
                drafts.append(draft(engine, step, write, held))
        made = ffi.new("fab_draft[]", drafts)
    except (OverflowError, TypeError, ValueError, AttributeError) as error:
        raise BadRange(f"write {at[1]} of step {at[0]} cannot be prepared: {error}") from None
    word = lib.fab_cuda_word_new(number) if number is not None else 0
    if number is not None and not word:
        raise BackendError(f"no pinned host memory for a word that cuda:{number} reaches")
    opened = ffi.new("fab_sequence_opened *")
    pointer = lib.fab_sequence_new(
        engine._core.pointer,
        made,
        len(drafts),
        len(rows),
        word,
        on_submitted is not None,
        opened,
    )
    if pointer == ffi.NULL:
        lib.fab_cuda_word_free(word)
        step = drafts[opened.item][-2] if opened.item < len(drafts) else 0
        raise refusal(opened.rc, f"a write of step {step} cannot be prepared")
    sequence = PreparedSequence(engine, pointer, opened, number, word, list(held.values()))
    sequence._ends = list(accumulate(map(len, rows)))
    if on_submitted is not None:
        sequence._keeps = True
        engine._callbacks.add_watcher(sequence._watch, lambda _old, _new: on_submitted())
    return sequence
