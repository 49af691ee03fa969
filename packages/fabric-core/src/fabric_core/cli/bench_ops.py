"""What `fabric bench` measures, seen from the client. One function per operation, each fills a `Sample`.

    write     TIME: submit until done, one write at a time. GBIT/S, MOPS: `window` writes in flight
    paged     the same with `pages` pages per operation, scattered at the target; MOPS counts pages
    imm       TIME: one way of a write with an immediate, half of the round trip; both sides poll in a Python loop
    sendrecv  TIME: one way of a message through the callback threads of both sides. Rates: `window` in flight
    submit    POST: the Python call alone, of 64-byte writes

POST is always the time that the submit call takes. Every operation ends with a comparison of the data.
"""

from __future__ import annotations

import collections
import queue
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fabric_core.cli.pattern import count_wrong, fill, permutation
from fabric_core.cli.session import Buffer, Session, give_up
from fabric_core.errors import TransferError

if TYPE_CHECKING:
    from fabric_core import Flag, MrDesc, NetAddr, Transfer, TransferEngine

__all__ = ["OPS", "Link", "Plan", "Sample"]

#: Latency samples of one figure at most: enough for a p99, short enough for large sizes.
_LATENCY_SAMPLES = 1000
_WARMUP = 20
_ENDED = 0xFFFFFFFF  # low half of a Flag's value: operations that ended

#: Kept for the life of the process: after an error, operations may still be in flight that will bump theirs.
_flags: list[Flag] = []


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: one figure."""

    size: int  #: bytes of one operation
    n: int  #: operations in the throughput part
    window: int  #: operations in flight in the throughput part
    pages: int = 1
    verify: bool = True
    seed: int = 1
    timeout: float = 30.0

    @property
    def slots(self) -> int:
        """Return how many places of the buffer are used in turn: up to 64, and 64 MiB, to leave the caches."""
        return max(1, min(self.n, 64, (64 << 20) // max(1, self.size)))


@dataclass(slots=True)
class Sample:
    """What was measured: nanoseconds."""

    latency_ns: array[int] = field(default_factory=lambda: array("q"))
    post_ns: array[int] = field(default_factory=lambda: array("q"))
    elapsed_ns: int = 0
    operations: int = 0  #: in elapsed_ns; 0: this operation has no throughput part
    wrong: int | None = None  #: bytes; None: not compared


class Link:
    """A client's connection to a bench peer, with a buffer on either side."""

    def __init__(self, session: Session, peer: NetAddr, nbytes: int, memory: str, there: str = "") -> None:
        from fabric_core import MrDesc

        self.session = session
        self.engine: TransferEngine = session.engine
        self.peer = peer
        self.nbytes = nbytes
        self.buffer = Buffer(self.engine, nbytes, memory)
        self.imm = self.engine.alloc_imm()  #: raised here by the peer
        here = self.buffer.desc.to_bytes().hex()
        begin = time.perf_counter_ns()
        answer = self.ask("open", "opened", bytes=nbytes, memory=there or memory, desc=here, imm=self.imm)
        self.connect_ns = time.perf_counter_ns() - begin
        self.remote: MrDesc = MrDesc.from_bytes(bytes.fromhex(answer["desc"]))
        self.remote_imm = int(answer["imm"])
        self.peer_nics = int(answer["nics"])
        self.longest = min(session.longest, int(answer["longest"]))

    def ask(self, kind: str, wanted: str, timeout: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.session.tell(self.peer, kind, **fields)
        return self.session.hear(wanted, peer=self.peer, timeout=timeout)

    @contextmanager
    def echoing(self, size: int, *, spin: bool = False) -> Iterator[None]:
        """Have the peer write back what arrives. Ctrl-C ends that too: else it waits for more, and others for it."""
        self.ask("echo", "echoing", bytes=size, spin=spin)
        try:
            yield
        except KeyboardInterrupt:
            self.session.leave(self.peer)
            raise
        self.session.tell(self.peer, "stop")
        self.session.hear("echoed", peer=self.peer)

    def close(self) -> None:
        """Free the peer's buffer and ours."""
        self.ask("close", "closed")
        self.buffer.close()
        self.engine.free_imm(self.imm)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _one_by_one(submit: Callable[[int, Flag | None], Transfer], n: int, plan: Plan) -> array[int]:
    """Submit, poll until done, repeat."""
    samples = array("q", bytes(8 * n))
    clock = time.perf_counter_ns
    for i in range(n):
        begin = clock()
        transfer = submit(i, None)
        while not transfer.done:
            if clock() - begin > plan.timeout * 1e9:
                break
        samples[i] = clock() - begin
        transfer.wait(plan.timeout)
    return samples


def _windowed(
    engine: TransferEngine, submit: Callable[[int, Flag | None], Transfer], plan: Plan, sample: Sample
) -> None:
    """Keep `window` operations in flight until `n` have ended. Raises the first error of an operation."""
    from fabric_core import Flag

    flag = Flag()
    _flags.append(flag)
    post = array("q", bytes(8 * plan.n))
    recent: collections.deque[Transfer] = collections.deque(maxlen=plan.window + 1)
    clock = time.perf_counter_ns
    patience = int(plan.timeout * 1e9)

    def wait_for(count: int) -> None:
        """Poll until `count` operations ended, or one of them badly."""
        since = clock()
        while (word := flag.value) & _ENDED < count and not word >> 32:
            engine.progress()
            if clock() - since > patience:
                give_up(f"the end of operation {count}", plan.timeout, "the peer")

    begin = clock()
    for i in range(plan.n):
        word = flag.value
        if word >> 32:
            break
        if i - (word & _ENDED) >= plan.window:
            wait_for(i - plan.window + 1)
        before = clock()
        transfer = submit(i, flag)
        post[i] = clock() - before
        recent.append(transfer)
    else:
        wait_for(plan.n)
    sample.elapsed_ns = clock() - begin
    sample.operations = plan.n
    sample.post_ns = post
    if flag.value >> 32:
        errors = (transfer.exception() for transfer in recent)
        raise next((error for error in errors if error), None) or TransferError("an operation failed", op="bench")


def _verify(link: Link, plan: Plan, length: int, **layout: int) -> int | None:
    if not plan.verify:
        return None
    answer = link.ask("check", "checked", timeout=60.0, bytes=length, seed=plan.seed, **layout)
    return int(answer["wrong"])


def _prepare(link: Link, plan: Plan, length: int) -> None:
    fill(link.buffer.view[:length], plan.seed)
    link.buffer.push(length)
    link.ask("clear", "cleared", timeout=60.0, bytes=length)


# ---- operations ------------------------------------------------------------------------------------------------------


def write(link: Link, plan: Plan) -> Sample:
    """Single writes, no immediate."""
    slots, size = plan.slots, plan.size
    _prepare(link, plan, slots * size)
    engine = link.engine
    sources = [(link.buffer.handle, slot * size) for slot in range(slots)]
    targets = [(link.remote, slot * size) for slot in range(slots)]

    def submit(i: int, flag: Flag | None) -> Transfer:
        slot = i % slots
        return engine.submit_single_write(size, None, sources[slot], targets[slot], flag)

    return _throughput(link, plan, submit, slots * size, {})


def paged(link: Link, plan: Plan) -> Sample:
    """Paged writes: pages in order here, in a random order there."""
    from fabric_core import Pages

    slots, page = plan.slots, plan.size // plan.pages
    _prepare(link, plan, slots * plan.size)
    engine = link.engine
    here, there = array("I", range(plan.pages)), permutation(plan.pages, plan.seed)
    sources = [(link.buffer.handle, Pages(here, page, slot * plan.size)) for slot in range(slots)]
    targets = [(link.remote, Pages(there, page, slot * plan.size)) for slot in range(slots)]

    def submit(i: int, flag: Flag | None) -> Transfer:
        slot = i % slots
        return engine.submit_paged_writes(page, None, sources[slot], targets[slot], flag)

    return _throughput(link, plan, submit, slots * plan.size, {"page": page, "pages": plan.pages, "span": plan.size})


def _throughput(
    link: Link, plan: Plan, submit: Callable[[int, Flag | None], Transfer], length: int, layout: dict[str, int]
) -> Sample:
    _one_by_one(submit, min(_WARMUP, plan.n), plan)
    sample = Sample(latency_ns=_one_by_one(submit, min(plan.n, _LATENCY_SAMPLES), plan))
    _windowed(link.engine, submit, plan, sample)
    sample.wrong = _verify(link, plan, length, **layout)
    return sample


def submit(link: Link, plan: Plan) -> Sample:
    """Single writes, of which only the submit call counts."""
    sample = write(link, plan)
    sample.latency_ns = array("q")
    return sample


def imm(link: Link, plan: Plan) -> Sample:
    """Ping-pong of writes with an immediate. Each answer is compared: it must be the very bytes of this turn."""
    engine, view, size = link.engine, link.buffer.view, plan.size
    half = link.nbytes // 2
    _prepare(link, plan, link.nbytes)
    clock = time.perf_counter_ns
    source, target, raised, mine = (link.buffer.handle, half), (link.remote, 0), link.remote_imm, link.imm
    count = engine.imm_count
    base, limit = count(mine), plan.timeout * 1e9
    sample = Sample(latency_ns=array("q", bytes(8 * plan.n)), post_ns=array("q", bytes(8 * plan.n)), wrong=0)
    mark = view[half : half + min(8, size)]
    back = view[: len(mark)]
    with link.echoing(size, spin=True):
        for i in range(-_WARMUP, plan.n):
            mark[:] = (i + _WARMUP + 1).to_bytes(8, "little")[: len(mark)]
            wanted = base + i + _WARMUP + 1
            begin = clock()
            engine.submit_single_write(size, raised, source, target)
            posted = clock()
            turns = 0
            while count(mine) < wanted:
                turns += 1
                if turns & 1023 == 0 and clock() - begin > limit:
                    give_up(f"immediate {wanted}", plan.timeout, link.peer)
            end = clock()
            if i >= 0:
                sample.latency_ns[i] = (end - begin) // 2
                sample.post_ns[i] = posted - begin
            if plan.verify and sample.wrong is not None and back != mark:
                sample.wrong += len(mark)
    if plan.verify and sample.wrong is not None:
        sample.wrong += count_wrong(view[:size], view[half : half + size])
    else:
        sample.wrong = None
    return sample


def sendrecv(link: Link, plan: Plan) -> Sample:
    """Messages: first there and back one at a time, then many in flight."""
    engine, peer, session, size = link.engine, link.peer, link.session, plan.size
    expected = bytearray(size)
    fill(memoryview(expected), plan.seed)
    expected[0] = 0  # control messages begin with "{"
    message = bytes(expected)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    session.on_data = answers.put
    link.ask("messages", "listening", bytes=size, seed=plan.seed, echo=True)
    clock = time.perf_counter_ns
    n = min(plan.n, _LATENCY_SAMPLES)
    sample = Sample(latency_ns=array("q", bytes(8 * n)), wrong=0)
    wrong = 0
    for i in range(-_WARMUP, n):
        begin = clock()
        engine.submit_send(peer, message)
        try:
            answer = answers.get(
                timeout=plan.timeout
            )  # a blocking wait: polling here would keep the GIL from callbacks
        except queue.Empty:
            give_up("the message back", plan.timeout, peer)
        if i >= 0:
            sample.latency_ns[i] = (clock() - begin) // 2
        if answer != message:
            wrong += count_wrong(memoryview(answer), memoryview(message))
    link.ask("messages", "listening", bytes=size, seed=plan.seed, echo=False)
    _windowed(engine, lambda i, flag: engine.submit_send(peer, message, flag), plan, sample)
    counted = link.ask("count", "counted", n=plan.n)
    session.on_data = None
    wrong += int(counted["wrong"]) + abs(plan.n - int(counted["n"])) * size
    sample.wrong = wrong if plan.verify else None
    return sample


OPS: dict[str, Callable[[Link, Plan], Sample]] = {
    "write": write,
    "paged": paged,
    "imm": imm,
    "sendrecv": sendrecv,
    "submit": submit,
}
