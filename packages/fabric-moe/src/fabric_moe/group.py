"""`MoeGroup`: one rank's place in a group that dispatches tokens to experts and combines what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from fabric_core import BadRange, ConfigError, FabricError, TransferEngine
from fabric_moe import combine, dispatch, faults
from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import Bytes, as_rows, is_torch
from fabric_moe.errors import StepError
from fabric_moe.faults import Notes
from fabric_moe.generation import Generation
from fabric_moe.meet import Board
from fabric_moe.step import DONE, RETURNED, SENT
from fabric_moe.window import Window

if TYPE_CHECKING:
    from fabric_moe.cuda.generation import GpuGeneration

__all__ = ["MoeGroup"]

log = logging.getLogger("fabric.moe")

_CARDS = 30.0  # seconds that all ranks have to come together


def halves() -> Any:
    """Return the four halves on a GPU, which need torch and a driver."""
    from fabric_moe.cuda import halves as found

    return found


class MoeGroup:
    """One rank of a group. Its four halves are called in the same order on all ranks, by one thread at a time.

        step = group.dispatch_send(x, topk_ids, topk_weights)     # never waits for another rank
        received = group.dispatch_recv(step)
        view = received.contiguous(alignment=8)
        group.combine_send(view, experts(view))                   # never waits for another rank
        y = group.combine_recv(step)                              # [tokens, hidden]

    Made by `open`, or by `open_many` for ranks that share a thread. A context manager.
    """

    def __init__(
        self, engine: TransferEngine, config: MoeConfig, rank: int, board: Board, job: str, generation: int = 0,
        members: Iterable[int] | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= rank < config.ranks:
            raise ConfigError(f"rank={rank!r}: ranks go from 0 to {config.ranks - 1}")
        self.engine = engine
        self.config = config
        self.rank = rank
        self._board = board
        self._job = job
        first = str(engine.devices[0]) if engine.devices else "cpu"
        self.device = device or (first if first.startswith("cuda") else "cpu")  #: where the tokens are
        self._begin(generation, range(config.ranks) if members is None else members)

    @classmethod
    def open(
        cls, engine: TransferEngine, config: MoeConfig, rank: int, board: Board, *, job: str = "moe",
        generation: int = 0, members: Iterable[int] | None = None, device: str | None = None, timeout: float = _CARDS,
    ) -> Self:  # fmt: skip
        """Join a group: register memory, and meet the other ranks on the board.

        Args:
            engine: whose NICs move the tokens; several ranks may share one.
            board: where the ranks meet, see `fabric_core.bootstrap.open_board`, or a `Table` within one process.
            job: name of the group on the board, printable; every group needs its own.
            generation, members: of a group that has gone on without this rank and takes it in again by `regroup`.
            device: where the tokens are: "cuda:0", or "cpu". Default: the first device of the engine.
            timeout: seconds that the other ranks have to come.

        Raises:
            ConfigError, ProtocolError: shapes that make no sense, or differ. DeadlineExceeded: a rank did not come.
        """
        return cls._connected([cls(engine, config, rank, board, job, generation, members, device)], timeout)[0]

    @classmethod
    def open_many(
        cls, engines: Sequence[TransferEngine], config: MoeConfig, ranks: Sequence[int], board: Board, *,
        job: str = "moe", device: str | None = None, timeout: float = _CARDS,
    ) -> list[Self]:  # fmt: skip
        """Join with several ranks of one thread; rank i uses engine i modulo their number."""
        groups = [
            cls(engines[i % len(engines)], config, rank, board, job, device=device) for i, rank in enumerate(ranks)
        ]
        return cls._connected(groups, timeout)

    @classmethod
    def _connected(cls, groups: list[Self], timeout: float) -> list[Self]:
        try:
            for group in groups:
                group.regroup_end(timeout=timeout)
        except BaseException:
            for group in groups:
                group.close()
            raise
        return groups

    def _begin(self, number: int, members: Iterable[int]) -> None:
        self.generation: Any  # a Generation, or a GpuGeneration, which has the same halves of meeting
        if self.device == "cpu":
            self.generation = Generation(self.engine, self.config, self.rank, number, members)
            self.notes = Notes(self.generation)
        else:
            from fabric_moe.cuda.generation import GpuGeneration

            self.generation = GpuGeneration(self.engine, self.config, self.rank, number, members, self.device)
        self.steps: list[Any] = [None] * self.config.depth
        self.next_step = 1
        self.window = Window(self.config)
        self.broken: FabricError | None = None  #: why no further step is taken
        self._board.publish(self._name(self.rank), self.generation.card())

    @property
    def gpu(self) -> GpuGeneration | None:
        """The generation on a GPU; None for a group in host memory."""
        return None if self.device == "cpu" else self.generation

    def _name(self, rank: int) -> str:
        return f"{self._job}.g{self.generation.number}.r{rank}"

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
            return halves().dispatch_send(self, x, topk_ids, topk_weights, scales, live)
        return faults.guard(self, lambda: dispatch.send(self, x, topk_ids, topk_weights, scales, live))

    def dispatch_recv(self, step: Any, *, timeout: float | None = None) -> Any:
        """Wait for the tokens of this rank's experts. Raises RankLost with those that did not come in time.

        Returns a Received; on a GPU a GpuReceived, and the view's kernel waits, for the group's `timeout`.
        """
        self._check()
        if self.gpu is not None:
            self._must_be_ours(step)
            return halves().dispatch_recv(step)
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
        if self.gpu is not None:
            self._must_be_ours(view.step)
            halves().combine_send(view, y, weighted, dtype)
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
            return halves().combine_recv(step, out, accumulate)
        step.must_be(RETURNED, "combine_recv")
        self._must_be_ours(step)
        return faults.guard(self, lambda: combine.receive(self, step, out, accumulate, self._seconds(timeout)))

    def discard(self, step: Any) -> None:
        """In place of `combine_send`, where no rank wants the result; `combine_recv` then raises StepError."""
        self._check()
        if self.gpu is not None:
            self._must_be_ours(step)
            halves().discard(step)
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
        return 0 if self.gpu is None else self.gpu.unreachable()

    # ---- members

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return tuple(self.generation.members)

    def mask(self, ranks: Iterable[int], *, timeout: float = _CARDS) -> None:
        """Go on without some ranks: all others call this with the same ones. Steps that are under way are lost.

        Tokens for experts of masked ranks are left out and counted in `step.unreachable`.
        """
        gone = set(ranks)
        self.regroup([rank for rank in self.members if rank not in gone], timeout=timeout)

    def regroup(self, members: Iterable[int], *, timeout: float = _CARDS) -> None:
        """Start afresh with these ranks. One that comes back opens with `generation=` the number that this leads to."""
        self.regroup_begin(members)
        self.regroup_end(timeout=timeout)

    def regroup_begin(self, members: Iterable[int]) -> None:
        """First half of `regroup`, for ranks that share a thread; `regroup_end` follows."""
        wanted = tuple(members)
        if self.rank not in wanted:
            raise BadRange(f"members={wanted}: rank {self.rank} cannot leave itself out; close() it")
        self._leave()
        self._begin(self.generation.number + 1, wanted)

    def regroup_end(self, *, timeout: float = _CARDS) -> None:
        """Second half: meet the others. Raises DeadlineExceeded, ProtocolError; a further `regroup` may follow."""
        deadline = time.monotonic() + timeout
        try:
            cards = {
                rank: self._board.lookup(self._name(rank), max(0.0, deadline - time.monotonic()))
                for rank in self.generation.members
            }
            self.generation.connect(cards)
        except FabricError as error:
            self.broken = error
            raise

    def close(self) -> None:
        """Leave. Steps that are under way are lost, for the others too. Idempotent."""
        self.broken = self.broken or FabricError("this group was closed")
        self._leave()

    def _leave(self) -> None:
        try:
            self._board.withdraw(self._name(self.rank))
        except (OSError, FabricError) as error:
            log.warning("%s stays on the board: %s", self._name(self.rank), error)
        self.generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MoeGroup {self._job} rank {self.rank} of {self.config.ranks}, generation {self.generation.number}>"

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

    def token_rows(self, x: Any, what: str, size: int, tokens: int) -> tuple[Bytes, bool]:
        """Return the first `tokens` rows of what the caller gave, as bytes, and whether it was a torch tensor."""
        if x is None:
            raise BadRange(f"{what}=None: the group was made with {size} bytes of it for each token")
        flat = x.reshape(x.shape[0], -1) if len(x.shape) > 2 else x
        rows = as_rows(flat, size, what)
        if len(rows) < tokens:
            raise BadRange(f"{what} has {len(rows)} rows, topk_ids has {tokens} tokens")
        return rows[:tokens], is_torch(x)

    # ---- trouble

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.gpu is not None and (error := self.gpu.report.error()) is not None:
            if not self.gpu.usable():
                self.broken = error
            raise error

    def _must_be_ours(self, step: Any) -> None:
        if step is not self.steps[step.slot] or step.generation is not self.generation:
            raise StepError(f"{step!r} belongs to another group, or to a generation that is over")

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.config.timeout if timeout is None else timeout
        if not seconds >= 0:
            raise BadRange(f"timeout={timeout!r}: a number of seconds, 0 or more")
        return seconds
