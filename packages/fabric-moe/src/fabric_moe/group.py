"""`MoeGroup`: one rank's place in a group that dispatches tokens to experts and combines what comes back."""

from __future__ import annotations

import importlib
from typing import Any

from fabric_core import BadRange
from fabric_moe import combine, dispatch, faults
from fabric_moe.dtypes import Bytes, as_rows, flat, is_torch
from fabric_moe.errors import StepError
from fabric_moe.membership import Membership
from fabric_moe.step import DONE, RETURNED, SENT

__all__ = ["MoeGroup"]


def halves(gpu: Any) -> Any:
    """Return the four halves on a GPU, which need torch and a driver."""
    return importlib.import_module(getattr(gpu, "halves", "fabric_moe.cuda.halves"))


class MoeGroup(Membership):
    """One rank of a group. Its four halves are called in the same order on all ranks, by one thread at a time.

        step = group.dispatch_send(x, topk_ids, topk_weights)     # never waits for another rank
        received = group.dispatch_recv(step)
        view = received.contiguous(alignment=8)
        group.combine_send(view, experts(view))                   # never waits for another rank
        y = group.combine_recv(step)                              # [tokens, hidden]

    Made by `open`, or by `open_many` for ranks that share a thread. A context manager.
    """

    # ---- the four halves

    def dispatch_send(
        self, x: Any, topk_ids: Any, topk_weights: Any = None, *, scales: Any = None, live: Any = None
    ) -> Any:
        """Send each token to the ranks of its experts. Never waits for another rank.

        Args:
            x: [T, hidden] of the group's type, or [T, token bytes] of uint8. T may differ by rank and step.
            topk_ids: [T, k] integers; -1 is no expert; the same expert twice counts twice.
            topk_weights: [T, k], applied by `combine_send`; None: 1.
            scales: [T, ...] whatever travels with the tokens, `scale_bytes` for each.
            live: only the first so many tokens take part; on a GPU also a tensor of one int32, read when the kernel
                runs. There the result has all rows: those beyond are 0, or as they were if added to.

        Raises:
            BadRange: a shape or an id is wrong; nothing was sent. StepError: more than `depth` steps are under way.
            RankLost: the group is broken.
        """
        self._check()
        if self.gpu is not None:
            return halves(self.gpu).dispatch_send(self, x, topk_ids, topk_weights, scales, live)
        return faults.guard(self, lambda: dispatch.send(self, x, topk_ids, topk_weights, scales, live))

    def dispatch_recv(self, step: Any, *, timeout: float | None = None) -> Any:
        """Wait for the tokens of this rank's experts. Raises RankLost with those that did not come in time.

        Returns a Received; on a GPU a GpuReceived, and the view's kernel waits, for the group's `timeout`.
        """
        self._check()
        if self.gpu is not None:
            self._must_be_ours(step)
            return halves(self.gpu).dispatch_recv(step)
        self._must_be_a_step(step)
        step.must_be(SENT, "dispatch_recv")
        self._must_be_ours(step)
        return faults.guard(self, lambda: dispatch.receive(self, step, self._seconds(timeout)))

    def combine_send(self, view: Any, y: Any, *, weighted: bool = True, dtype: str | None = None) -> None:
        """Send the experts' results back, summed for each token. Never waits for another rank.

        Args:
            view: which rows they are of.
            y: [rows of the view, hidden], or of the view's shape; padding is not looked at.
            weighted: multiply by the router's weights. Views that hold each row once are summed by the caller: their
                rows are taken as they are.
            dtype: type of y, where it is not y's own: "bfloat16" for an array of uint16. Default then: `out_dtype`.
        """
        self._check()
        if not hasattr(view, "rows") or not hasattr(view, "step"):
            raise StepError(
                f"a {type(view).__name__} is no view: give what contiguous(), masked(), compact() or rank_major() made"
            )
        if self.gpu is not None:
            self._must_be_ours(view.step)
            halves(self.gpu).combine_send(view, y, weighted, dtype)
            return
        faults.guard(self, lambda: combine.send(self, view, y, weighted, dtype))

    def combine_recv(
        self, step: Any, *, out: Any = None, accumulate: bool = False, timeout: float | None = None
    ) -> Any:
        """Wait for the sums of this rank's tokens: [T, hidden] of `out_dtype`, in the order they were given.

        Args:
            out: where to put them. accumulate: add to what is there.

        Returns `out`, or a fresh tensor or array, as the tokens were; bfloat16 without torch is uint16.
        Raises RankLost with the ranks that did not come in time. On a GPU the result is there when the stream gets
        there, and what went wrong is raised by the next call, or by `check`.
        """
        self._check()
        if self.gpu is not None:
            self._must_be_ours(step)
            return halves(self.gpu).combine_recv(step, out, accumulate)
        self._must_be_a_step(step)
        step.must_be(RETURNED, "combine_recv")
        self._must_be_ours(step)
        return faults.guard(self, lambda: combine.receive(self, step, out, accumulate, self._seconds(timeout)))

    def discard(self, step: Any) -> None:
        """In place of `combine_send`, where no rank wants the result; `combine_recv` then raises StepError."""
        self._check()
        if self.gpu is not None:
            self._must_be_ours(step)
            halves(self.gpu).discard(step)
            return
        self._must_be_ours(step)
        faults.guard(self, lambda: combine.discard(self, step))

    def check(self) -> None:
        """Raise what kernels on the GPU have met since the last call, after a synchronisation of the stream say.

        RankLost with the ranks that did not come; BadRange for an expert that there is none of, or a view that was too
        small. Every half does this first. Does nothing for a group in host memory unless it is broken.
        """
        self._check()

    def unreachable(self) -> int:
        """Return how many expert ids were left out on a GPU, since `open` or `mask`, for their ranks are masked.

        Waits for the GPU. In host memory each step tells: `step.unreachable`.
        """
        if self._closed:
            raise StepError(f"{self!r} was closed")
        return 0 if self.gpu is None else self.gpu.unreachable()

    # ---- for the halves

    def free_slot(self) -> tuple[int, int]:
        """Return the next step's number, and which memory it gets. Raises StepError while a step is not over there."""
        number, depth = self.next_step, self.config.depth
        former = self.steps[number % depth]
        if former is not None and former.state != DONE:
            raise StepError(
                f"step {number} needs the memory of step {former.number}, which is not over ({former.state}): call its "
                f"remaining halves first, or open the group with a depth above {depth}"
            )
        return number, number % depth

    def token_rows(self, x: Any, what: str, size: int, tokens: int, kind: str | None = None) -> tuple[Bytes, bool]:
        """Return the first `tokens` rows of what the caller gave, as bytes, and whether it was a torch tensor.

        kind: the type that its numbers must have; None: whatever they are.
        """
        if x is None:
            raise BadRange(f"{what}=None: the group was made with {size} bytes of it for each token")
        rows = as_rows(flat(x, what), size, what, kind)
        if len(rows) < tokens:
            raise BadRange(f"{what} has {len(rows)} rows, topk_ids has {tokens} tokens")
        return rows[:tokens], is_torch(x)

    # ---- trouble

    def _check(self) -> None:
        self._must_be_here()
        if self.broken is not None:
            raise self.broken
        if self.gpu is not None and (error := self.gpu.report.error()) is not None:
            if not self.gpu.usable():
                self.broken = error
            raise error

    @staticmethod
    def _must_be_a_step(step: Any) -> None:
        if not hasattr(step, "must_be"):
            raise StepError(f"a {type(step).__name__} is no step: give what dispatch_send() returned")

    def _must_be_ours(self, step: Any) -> None:
        self._must_be_a_step(step)
        if step not in self.steps or step.generation is not self.generation:
            raise StepError(f"{step!r} belongs to another group, or to a generation that is over")

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.config.timeout if timeout is None else timeout
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise BadRange(f"timeout={timeout!r}: a number of seconds, 0 or more")
        return seconds
