"""How a rank joins a group, goes on without some ranks or with all again, and leaves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

from fabric_core import BadRange, ConfigError, FabricError, TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.errors import StepError
from fabric_moe.faults import Notes
from fabric_moe.generation import Generation
from fabric_moe.meet import Board
from fabric_moe.roster import Roster, gather
from fabric_moe.step import DONE, RETURNED
from fabric_moe.window import Window

__all__ = ["CARDS", "Membership", "meet"]

log = logging.getLogger("fabric.moe")

CARDS = 30.0  # seconds that all ranks have to come together
_OWED = 5.0  # seconds at most for writes that others are still owed; two heartbeats tell who does not take them
_OVER = (RETURNED, DONE)  # states of a step that asks nothing more of its rank, but for rows that wait for room
_LAST_WORDS = 0.5  # seconds for the notes of a rank that leaves in the middle of a step


class Membership:
    """The part of `MoeGroup` that is not a half of a step."""

    def __init__(
        self, engine: TransferEngine, config: MoeConfig, rank: int, board: Board, job: str, generation: int = 0,
        members: Iterable[int] | None = None, device: str | None = None, through: str | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(config, MoeConfig) or not hasattr(board, "publish"):
            given = f"config is a {type(config).__name__}, board a {type(board).__name__}"
            raise ConfigError(f"{given}: a MoeConfig is wanted, and what open_board() or Table() has made")
        for name, value, most in (("rank", rank, config.ranks - 1), ("generation", generation, (1 << 32) - 1)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ConfigError(f"{name}={value!r}: {name}s go from 0 to {most}")
        self.engine = engine
        self.config = config
        self.rank = rank
        self._board = board
        self._job = job
        self._closed = False
        self._pid = os.getpid()
        first = str(engine.devices[0]) if engine.devices else "cpu"
        self.device = device or (first if first.startswith("cuda") else "cpu")  #: where the tokens are
        if through not in (None, "engine"):
            raise ConfigError(f"through={through!r}: 'engine', or None")
        self.through = through  #: "engine": tokens on GPUs go over its NICs, also within a host
        self._begin(generation, range(config.ranks) if members is None else members)

    @classmethod
    def open(
        cls, engine: TransferEngine, config: MoeConfig, rank: int, board: Board, *, job: str = "moe",
        generation: int = 0, members: Iterable[int] | None = None, device: str | None = None,
        through: str | None = None, timeout: float = CARDS,
    ) -> Self:  # fmt: skip
        """Join a group: register memory, and meet the other ranks on the board.

        Args:
            engine: whose NICs move the tokens; several ranks may share one.
            board: where the ranks meet, see `fabric_core.bootstrap.open_board`, or a `Table` within one process.
            job: name of the group on the board, printable; every group needs its own.
            generation, members: of a group that has gone on without this rank and takes it in again by `regroup`.
            device: where the tokens are: "cuda:0", or "cpu". Default: the first device of the engine.
            through: "engine" for tokens on GPUs of several hosts, which then go over the engine's NICs; it must serve
                the device. None: on GPUs of one host, kernels write into each other's memory.
            timeout: seconds that the other ranks have to come.

        Raises:
            ConfigError, ProtocolError: shapes that make no sense, or differ. DeadlineExceeded: a rank did not come.
            BackendError: not enough memory.
        """
        return cls._connected([(engine, rank)], config, board, job, generation, members, device, through, timeout)[0]

    @classmethod
    def open_many(
        cls, engines: Sequence[TransferEngine], config: MoeConfig, ranks: Sequence[int], board: Board, *,
        job: str = "moe", device: str | None = None, through: str | None = None, timeout: float = CARDS,
    ) -> list[Self]:  # fmt: skip
        """Join with several ranks of one thread; rank i uses engine i modulo their number."""
        places = [(engines[i % len(engines)], rank) for i, rank in enumerate(ranks)]
        return cls._connected(places, config, board, job, 0, None, device, through, timeout)

    @classmethod
    def _connected(
        cls, places: Sequence[tuple[TransferEngine, int]], config: MoeConfig, board: Board, job: str, generation: int,
        members: Iterable[int] | None, device: str | None, through: str | None, timeout: float,
    ) -> list[Self]:  # fmt: skip
        members = None if members is None else tuple(members)
        groups: list[Self] = []
        try:
            for engine, rank in places:
                groups.append(cls(engine, config, rank, board, job, generation, members, device, through))
            meet(groups, timeout)
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
        elif self.through == "engine":
            from fabric_moe.gpu_nic.generation import NicGeneration

            self.generation = NicGeneration(self.engine, self.config, self.rank, number, members, self.device)
        else:
            from fabric_moe.cuda.generation import GpuGeneration

            self.generation = GpuGeneration(self.engine, self.config, self.rank, number, members, self.device)
        self.steps: list[Any] = [None] * self.config.depth
        self.next_step = 1
        self.window = Window(self.config)
        self.broken: FabricError | None = None  #: why no further step is taken
        self._roster = Roster(self._board, self._job, number, self.rank, self.generation.members)
        try:
            self._roster.publish(self.generation.card())
        except BaseException:
            self.generation.close()
            raise

    @property
    def gpu(self) -> Any:
        """The generation on a GPU, of either kind; None for a group in host memory."""
        return None if self.device == "cpu" else self.generation

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return tuple(self.generation.members)

    def mask(self, ranks: Iterable[int], *, timeout: float = CARDS) -> None:
        """Go on without some ranks: all others call this with the same ones. Steps that are under way are lost.

        Tokens for experts of masked ranks are left out and counted in `step.unreachable`. Raises BadRange for a rank
        that is no member.
        """
        gone = set(ranks)
        if strangers := gone.difference(self.members):
            raise BadRange(f"mask({sorted(gone)}): {sorted(strangers)} are no members; these are {list(self.members)}")
        self.regroup([rank for rank in self.members if rank not in gone], timeout=timeout)

    def regroup(self, members: Iterable[int], *, timeout: float = CARDS) -> None:
        """Start afresh with these ranks. One that comes back opens with `generation=` the number that this leads to."""
        self.regroup_begin(members)
        self.regroup_end(timeout=timeout)

    def regroup_begin(self, members: Iterable[int]) -> None:
        """First half of `regroup`, for ranks that share a thread; `regroup_end` follows."""
        self._must_be_here()
        if self._closed:
            raise StepError(f"{self!r} was closed: open another one")
        wanted = tuple(members)
        if self.rank not in wanted:
            raise BadRange(f"members={wanted}: rank {self.rank} cannot leave itself out; close() it")
        wanted = self.config.members_with(self.rank, wanted)
        if self.broken is None and self.device == "cpu":
            self.generation.finish(_OWED)  # others may still need the sums of a step that is over here
        if self.device == "cpu":
            self.notes.finish(_LAST_WORDS)
        self._leave()
        try:
            self._begin(self.generation.number + 1, wanted)
        except BaseException as error:
            self.broken = _why(error)  # the former generation is gone
            raise

    def regroup_end(self, *, timeout: float = CARDS) -> None:
        """Second half: meet the others. Raises DeadlineExceeded, ProtocolError; a further `regroup` may follow."""
        meet([self], timeout)

    def close(self) -> None:
        """Leave. Idempotent. What this rank owes to others for steps that are over here still leaves, within 5 s.

        Steps whose results it has not sent are lost, for the others too: they are told at once.
        In the child of a fork it does nothing: the rank is the parent's.
        """
        if self._pid != os.getpid():
            return
        if not self._closed and self.device == "cpu":
            if self.broken is None:
                self._finish()
                owing = [s.number for s in self.steps if s is not None and (s.state not in _OVER or s.owes_rows())]
                if owing:
                    self.notes.write(min(owing), [self.rank])
            self.notes.finish(_LAST_WORDS)
        self._closed = True
        self.broken = self.broken or FabricError("this group was closed: open another one")
        self._leave()

    def _finish(self) -> None:
        """Wait until what others are owed for steps that are over here has left, unless one of them has given up."""
        deadline = time.monotonic() + _OWED
        over = [step for step in self.steps if step is not None and step.state in _OVER]
        while any(step.owes_rows() for step in over) and time.monotonic() < deadline:
            if self.notes.read(lambda: ()) is not None or any(step.failed() for step in over):
                break
            time.sleep(0.001)  # it leaves on another thread when the others make room
        self.generation.finish(max(0.0, deadline - time.monotonic()))

    def _must_be_here(self) -> None:
        """Raise StepError in the child of a fork: memory that is shared, and locks in C, are the parent's."""
        if self._pid != os.getpid():
            words = f"rank {self.rank} of {self._job} belongs to process {self._pid}"
            raise StepError(f"{words}: a fork does not take it along; open another group, with an engine of its own")

    def _leave(self) -> None:
        try:
            self._roster.withdraw()
        except (OSError, FabricError) as error:
            log.warning("rank %d of %s stays on the board: %s", self.rank, self._job, error)
        self.generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MoeGroup {self._job} rank {self.rank} of {self.config.ranks}, generation {self.generation.number}>"


def meet(groups: Sequence[Membership], timeout: float) -> None:
    """Have groups of this thread meet all other ranks. Raises DeadlineExceeded, ProtocolError; then they are broken."""
    try:
        found = gather([group._roster for group in groups], timeout)
        for group, cards in zip(groups, found, strict=True):
            group.generation.connect(cards)
    except BaseException as error:
        for group in groups:
            group.broken = _why(error)
        raise


def _why(error: BaseException) -> FabricError:
    if isinstance(error, FabricError):
        return error
    return StepError(f"this group has not met: {error!r}; regroup() on all ranks, or close()")
