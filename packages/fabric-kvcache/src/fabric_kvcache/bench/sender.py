"""The prefill side of `fabric kv bench`: plans, submits layer by layer, and notes when.

All source ranks that have something for the destination rank are played by this one process. Ranks that hold the same
bytes (replicas) share one memory here.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fabric_core import (
    DeadlineExceeded,
    FabricError,
    Flag,
    MrDesc,
    NetAddr,
    PreparedSequence,
    StepWrite,
    Transfer,
)
from fabric_core.cli.session import Buffer, Session
from fabric_kvcache.bench.content import fill
from fabric_kvcache.bench.timed import Busy, TimedPrefill
from fabric_kvcache.bench.work import Work
from fabric_kvcache.moves import Moves
from fabric_kvcache.plan import Chunk, Plan
from fabric_kvcache.shard import Shard

__all__ = ["Ready", "Run", "Sender"]

Ready = Literal["hook", "busy", "poll", "watcher"]
_ANSWER = 120.0  # seconds: overwriting or comparing the receiver's memory


@dataclass(slots=True)
class Run:
    """What one transfer brought. Times are nanoseconds of the monotonic clock, which both processes share."""

    writes: int
    nbytes: int
    plan_ns: array[int] = field(default_factory=lambda: array("q"))  #: of each chunk, all source ranks
    ready_ns: array[int] = field(default_factory=lambda: array("q"))  #: when each layer was ready
    posted_ns: array[int] = field(default_factory=lambda: array("q"))  #: when its last submit had returned
    late_us: list[float] = field(default_factory=list)
    began_ns: int = 0  #: the first submit
    arrived_ns: int = 0  #: the receiver has seen all immediates
    compute_us: float = 0.0  #: in all
    cpu_ns: int = 0  #: of this process, from the first submit until its writes have ended
    receiver_cpu_ns: int = 0
    wrong: int | None = None
    surplus: int = 0


class Sender:
    """Holds the source ranks' memory and the receiver's descriptor for one question. Close it."""

    def __init__(
        self, session: Session, peer: NetAddr, work: Work, chunks: list[Chunk], memory: str, there: str
    ) -> None:
        self.session = session
        self.engine = session.engine
        self.peer = peer
        self.work = work
        self.chunks = chunks
        answer = self._ask("open", "opened", work=work.to_json(), memory=there)
        self.desc = MrDesc.from_bytes(bytes.fromhex(answer["desc"]))
        self.tables = (work.tables(work.src, 0), work.tables(work.dst, 1))
        self._buffers: dict[object, Buffer] = {}
        self.plans: list[tuple[Plan, Buffer]] = [
            (work.plan(shard), self._buffer(shard, memory)) for shard in work.sources()
        ]
        self.layers = sorted({layer for plan, _buffer in self.plans for layer in plan.layers})
        self._tail = Buffer(self.engine, max(64, work.tail_bytes), memory)
        self._runs = 0

    def _buffer(self, shard: Shard, memory: str) -> Buffer:
        """Return the rank's memory with its KV; replicas share one."""
        key = tuple((shard.layers(n), shard.fields(n)) for n in range(len(shard.layout.groups)))
        if key not in self._buffers:
            made = self._buffers[key] = Buffer(self.engine, shard.nbytes, memory)
            octets = np.frombuffer(made.view, np.uint8)
            fill(octets, shard, self.tables[0], range(self.work.tokens), self.work.seed, self.work.scales)
            made.push(shard.nbytes)
        return self._buffers[key]

    def _ask(self, kind: str, wanted: str, **fields: Any) -> dict[str, Any]:
        self.session.tell(self.peer, kind, **fields)
        return self.session.hear(wanted, peer=self.peer, timeout=_ANSWER)

    def run(
        self,
        compute_us: list[float] | None,
        *,
        ready: Ready = "hook",
        merge: bool = True,
        verify: bool = True,
        timeout: float = 60.0,
    ) -> Run:
        """Transfer the prompt once: as fast as it goes, or (`compute_us`: of a layer, by chunk) as layers get ready.

        Raises FabricError; DeadlineExceeded if not everything arrives in time.
        """
        planned: list[list[tuple[Moves, Buffer]]] = []
        found = Run(0, 0)
        for chunk in self.chunks:
            begin = time.monotonic_ns()
            planned.append([(plan.moves(chunk, *self.tables, merge=merge), buffer) for plan, buffer in self.plans])
            found.plan_ns.append(time.monotonic_ns() - begin)
        every = [moves for row in planned for moves, _buffer in row]
        found.writes = sum(moves.writes for moves in every) + 1
        found.nbytes = sum(moves.nbytes for moves in every) + self.work.tail_bytes
        self._runs += 1
        mark = self._runs % 255
        np.frombuffer(self._tail.view, np.uint8)[:] = mark
        self._tail.push(len(self._tail.view))
        seconds = timeout + sum(compute_us or ()) * len(self.layers) / 1e6
        armed = self._ask("arm", "armed", count=found.writes, timeout=seconds, poll=ready == "poll")
        posting = _Posting(self, planned, int(armed["imm"]), found, seconds)
        cpu = time.process_time_ns()
        if compute_us is None:
            for number in range(len(self.chunks)):
                for place in range(len(self.layers)):
                    posting.layer(number, place)
        else:
            model = TimedPrefill(len(self.layers), compute_us)
            found.compute_us = model.total_us
            if ready == "watcher":
                posting.follow(model)
            else:
                model.run(
                    posting.layer, self.engine.progress if ready == "poll" else Busy() if ready == "busy" else None
                )
            found.late_us = model.late_us
        posting.settle(seconds)
        found.cpu_ns = time.process_time_ns() - cpu
        arrived = self.session.hear("arrived", "late", peer=self.peer, timeout=seconds + 10)
        if arrived["kind"] == "late":
            raise DeadlineExceeded(f"not everything arrived: {arrived['text']}", peer=str(self.peer), op="bench")
        found.arrived_ns, found.receiver_cpu_ns = int(arrived["at_ns"]), int(arrived["cpu_ns"])
        if verify:
            checked = self._ask("check", "checked", tail=mark)
            found.wrong, found.surplus = int(checked["wrong"]), int(checked["surplus"])
        return found

    def close(self) -> None:
        self._ask("close", "closed")
        for buffer in (*self._buffers.values(), self._tail):
            buffer.close()


class _Posting:
    """The submits of one run."""

    def __init__(
        self, sender: Sender, planned: list[list[tuple[Moves, Buffer]]], imm: int, found: Run, timeout: float
    ) -> None:
        self.sender = sender
        self.planned = planned
        self.imm = imm
        self.found = found
        self.timeout = timeout
        self.flag = Flag()
        self.transfers: list[Transfer] = []
        self._last = len(planned) * len(sender.layers)
        self._next = 0
        self._sequence: PreparedSequence | None = None
        self._prepared = self._prepare(0)

    def _prepare(self, number: int) -> list[tuple[Any, ...]]:
        """Make the arguments of a layer's submits. All is known when the chunk begins, so it need not be ready."""
        chunk, place = divmod(number, len(self.sender.layers))
        return [
            (length, self.imm, (buffer.handle, source), (self.sender.desc, target), self.flag)
            for moves, buffer in self.planned[chunk]
            for length, source, target in moves.at(self.sender.layers[place])
        ]

    def layer(self, chunk: int, place: int) -> None:
        """The next layer is ready: submit its writes; after the last one, the tail too."""
        ready = time.monotonic_ns()
        sender, found = self.sender, self.found
        assert self._next == chunk * len(sender.layers) + place
        submit, keep, timeout = sender.engine.submit_paged_writes, self.transfers.append, self.timeout
        for arguments in self._prepared:
            keep(submit(*arguments, timeout=timeout))
        posted = time.monotonic_ns()
        found.began_ns = found.began_ns or ready
        found.ready_ns.append(ready)
        found.posted_ns.append(posted)
        self._next += 1
        if self._next == self._last:
            tail, target = (sender._tail.handle, 0), (sender.desc, sender.work.tail_offset)
            keep(
                sender.engine.submit_single_write(
                    sender.work.tail_bytes, self.imm, tail, target, self.flag, timeout=timeout
                )
            )
        else:
            self._prepared = self._prepare(self._next)

    def follow(self, model: TimedPrefill) -> None:
        """Let the engine submit when a word says so, which the model's hook bumps, as a GPU would: by a store.

        Ready is when it was stored, posted what the engine has noted. The tail is a step of its own.
        """
        sender, found, bumped = self.sender, self.found, self.found.ready_ns
        rows = [
            [
                StepWrite(length, imm, src, dst, timeout=self.timeout)
                for length, imm, src, dst, _flag in self._prepare(number)
            ]
            for number in range(self._last)
        ]
        tail, target = (sender._tail.handle, 0), (sender.desc, sender.work.tail_offset)
        rows.append([StepWrite(sender.work.tail_bytes, self.imm, tail, target, timeout=self.timeout)])
        self._sequence = sequence = sender.engine.prepare_sequence(rows)

        def hook(_chunk: int, _place: int) -> None:
            bumped.append(time.monotonic_ns())
            steps = len(bumped)
            sequence.value = steps if steps < self._last else steps + 1

        model.run(hook)
        end = time.monotonic() + self.timeout
        while sequence.submitted < len(rows):
            if time.monotonic() > end:
                raise FabricError(f"{sequence.submitted} of {len(rows)} steps were posted within {self.timeout:g} s")
            time.sleep(0.0005)
        found.began_ns = bumped[0]
        found.posted_ns.extend(sequence.posted_ns[: self._last])

    def settle(self, timeout: float) -> None:
        """Wait until every write has ended here. Raises the first error that it finds.

        The last one first: this thread is awake, and who waits for what is under way carries it out (the waiter helps).
        """
        end = time.monotonic() + timeout
        for transfer in reversed(self.transfers):
            transfer.wait(max(0.0, end - time.monotonic()))
        if self._sequence is not None:
            self._sequence.wait(timeout)
            self._sequence.close()
