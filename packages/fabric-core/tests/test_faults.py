"""Faults on purpose: plans read and write, harmless ones pass the kit, and under harmful ones every operation still
ends once, names a culprit, and nothing lands after an end (C1, C7, R4, R8)."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FabricError,
    NicLost,
    Pages,
    PeerLost,
    ScatterDst,
    TransferEngine,
    TransferError,
    faults,
)
from fabric_core.cli.doctor import gather
from fabric_core.config import Settings
from fabric_core.conformance.kit import GUARD, Calls, Memory, eventually, finish, pattern, settle
from fabric_core.faults import Plan
from fabric_core.operations import Operation

# ---- plans -----------------------------------------------------------------------------------------------------------

SHARES = st.sampled_from([0.0, 1e-6, 0.001, 0.25, 1.0])
TIMES = st.sampled_from([1e-9, 5e-7, 1e-3, 0.0025, 0.5, 1.0, 1.5, 90.0])
CODES = st.sampled_from(["EIO", "EBADF", "EKEYREVOKED", "ENOMEM"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    words: dict[str, Any] = {
        name: draw(SHARES) for name in ("drop", "fail", "fail_late", "partial", "rnr", "refuse", "cut")
    }
    if words["refuse"]:
        words["refuse_for"] = draw(TIMES)
    if words["cut"]:
        words["cut_for"] = draw(TIMES)
    if words["fail"] or words["fail_late"]:
        words["fail_code"] = draw(CODES)
    kinds: list[dict[str, Any]] = [{}, {"kill_ops": 5000}, {"kill_after": 0.25}]
    kill = draw(st.sampled_from(kinds))
    if kill:
        words |= {"kill_nic": draw(st.integers(0, 7)), **kill}
    for name in ("delay", "revive"):
        words[name] = draw(st.one_of(st.just(0.0), TIMES))
    return Plan(reorder=draw(st.booleans()), seed=draw(st.integers(0, (1 << 64) - 1)), **words)


@given(plans())
@settings(max_examples=300, deadline=None)
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


def test_the_plan_of_the_docs_is_what_it_says() -> None:
    plan = Plan.parse("reorder,delay=2ms,drop=0.01,fail=0.001:EIO,kill_nic=1@5000,seed=7")
    assert plan == Plan(reorder=True, delay=2e-3, drop=0.01, fail=0.001, kill_nic=1, kill_ops=5000, seed=7)
    assert not plan.harmless
    assert Plan.parse(" refuse=0.1:3ms , kill_nic=0@1.5s ") == Plan(
        refuse=0.1, refuse_for=3e-3, kill_nic=0, kill_after=1.5
    )
    assert Plan.parse("reorder,delay=1us,partial=1,rnr=1,refuse=0.5").harmless


@pytest.mark.parametrize(
    "text",
    [
        "reorder=1", "delay", "delay=2", "delay=-1ms", "delay=1e400s", "drop=2", "drop=x", "drop=nan", "drop=0.1:EIO",
        "fail=0.1:EWHAT", "refuse=0.1:often", "kill_nic=1", "kill_nic=9@5", "kill_nic=1@0", "kill_nic=x@5", "seed=-1",
        "seed=x", "drop=0.1,drop=0.2", "chaos", "seed=99999999999999999999999",
    ],
)  # fmt: skip
def test_c12_a_plan_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="faults"):
        Plan.parse(text)
    with pytest.raises(ConfigError, match="faults"):
        TransferEngine.open(faults=text)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_=:@.,-0123456789 ", max_size=60))
@settings(max_examples=500, deadline=None)
def test_c12_any_text_is_a_plan_or_a_clean_error(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except ConfigError:
        return
    assert Plan.parse(str(plan)) == plan or (plan.fail, plan.fail_late, plan.refuse, plan.cut).count(0)


def test_there_are_no_faults_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FABRIC_FAULTS", raising=False)
    assert Settings.load().faults is None
    with TransferEngine.open() as engine, pytest.raises(ConfigError, match="no faults"):
        faults.control(engine)
    assert not [check for check in gather().checks if check.name == "faults"]


def test_the_environment_sets_them_and_doctor_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_FAULTS", "delay=1ms")
    with TransferEngine.open(nics=2) as engine:
        assert faults.control(engine).counts(1)["taken"] == 0
    (check,) = [check for check in gather().checks if check.name == "faults"]
    assert (check.status, "delay=1ms" in check.found) == ("WARN", True)


# ---- the kit ---------------------------------------------------------------------------------------------------------

KIT = [
    sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", "--pyargs", "fabric_core.conformance",
    "--fabric-backend", "local", "--fabric-scale", "quick", "--fabric-slack", "20",
]  # fmt: skip
DATA = "test_c02 or test_c05 or test_c10 or test_property or test_verbs_write or test_verbs_paged or test_verbs_scatter"
HARMLESS = {
    "reorder and delay": "reorder,delay=1ms,seed=1",
    "little room": "partial=0.4,refuse=0.05:200us,rnr=0.3,seed=2",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", HARMLESS)
def test_the_kit_passes_under_a_harmless_plan(plan: str, tmp_path: Path) -> None:
    assert Plan.parse(HARMLESS[plan]).harmless
    command = [*KIT, "--fabric-nics", "1", "2", "4", "--fabric-set", f"faults={HARMLESS[plan]}", "-k", DATA]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-8000:]}{ended.stderr[-2000:]}"


# ---- harmful plans ---------------------------------------------------------------------------------------------------

HARMFUL = {
    "completions are lost": ("drop=0.03", 1),
    "requests fail": ("fail=0.02:EIO,fail_late=0.02", 1),
    "links are cut": ("cut=0.01:5ms,reorder", 2),
    "a NIC dies and comes back": ("kill_nic=1@120,revive=30ms,delay=500us", 2),
    "all of it": (
        "reorder,delay=500us,drop=0.01,fail=0.01:EIO,fail_late=0.01,refuse=0.02:300us,partial=0.3,cut=0.003:5ms,"
        "kill_nic=1@150,revive=20ms",
        2,
    ),
}
PAGE = 2048
ROUND = 24  # operations at once


def submit(
    engine: TransferEngine, rng: random.Random, source: Memory, target: Memory, at: int, imm: int, calls: Any
) -> Any:
    """One operation of a random kind into 16 pages of the target; returns it and how many counts it makes."""
    kind, timeout = rng.choice(("write", "paged", "scatter")), 0.6
    if kind == "write":
        length = rng.randrange(1, 16 * PAGE)
        done = engine.submit_single_write(length, imm, (source.handle, at), (target.desc, at), calls, timeout=timeout)
        return done, 1, [(at, length)]
    count = rng.randrange(1, 17)
    places = rng.sample(range(16), count)
    if kind == "paged":
        pages = Pages(places, PAGE, at)
        done = engine.submit_paged_writes(
            PAGE, imm, (source.handle, pages), (target.desc, pages), calls, timeout=timeout
        )
    else:
        parts = [ScatterDst(target.desc, PAGE, at + k * PAGE, at + k * PAGE) for k in places]
        done = engine.submit_scatter(None, calls, imm, source.handle, parts, timeout=timeout)
    return done, count, [(at + k * PAGE, PAGE) for k in places]


@pytest.mark.parametrize("name", HARMFUL)
@pytest.mark.parametrize("seed", [1, 2])
def test_c1_c7_under_harm_each_operation_ends_once_and_is_quiet(name: str, seed: int) -> None:
    """R4, R8, C4: and what ended well is there, counted exactly; what failed counts for its part at most."""
    plan, nics = HARMFUL[name]
    rng, size = random.Random(seed), ROUND * 16 * PAGE
    ended_badly = 0
    with (
        TransferEngine.open(nics=nics, faults=f"{plan},seed={seed}", local_shuffle=seed) as engine,
        TransferEngine.open(nics=nics) as peer,
    ):
        data = pattern(seed, size)
        source, target = Memory(engine, size, data), Memory(peer, size, GUARD)
        turn = 0
        while turn < 8 or (turn < 80 and not ended_badly):  # a cut that meets nothing in flight does no harm
            shared = turn % 2 == 0  # of one memory that both can map, or of the heap
            if turn in (1, 2):
                source, target = Memory(engine, size, data, shared=shared), Memory(peer, size, GUARD, shared=shared)
            imms = [peer.alloc_imm() for _ in range(ROUND)]
            made = []
            for k in range(ROUND):
                calls = Calls()
                made.append((*submit(engine, rng, source, target, k * 16 * PAGE, imms[k], calls), calls, imms[k]))
            begin = time.monotonic()
            settle([operation for operation, *_ in made])
            assert time.monotonic() - begin < 0.6 + 1.0 + 20.0, "deadline, the grace of a cancelled transfer, slack"
            for operation, count, ranges, calls, imm in made:
                calls.wait(1)
                error = operation.exception()
                if error is None:
                    for at, length in ranges:
                        assert target.get(at, length) == data[at : at + length], "ended well, and is not there"
                    eventually(lambda imm=imm, count=count: peer.imm_count(imm) == count, "exactly its counts")  # type: ignore[misc]
                else:
                    ended_badly += 1
                    assert isinstance(error, TransferError)
                    assert error.peer == str(peer.address) or error.nic, f"names nobody: {error!r}"
            target.put(GUARD * size)  # they have all ended: from here on nothing may land (C7)
            for _ in range(200):
                engine.progress()
                peer.progress()
            assert target.get() == GUARD * size, "a write landed after its operation had ended"
            for _operation, count, _ranges, calls, imm in made:
                assert calls.count == 1, "ended twice"
                assert peer.free_imm(imm) <= count, "an immediate came too often"
            turn += 1
        assert ended_badly, "the plan did no harm"
        assert engine.stats()["inflight"] == 0
        counts = [faults.control(engine).counts(nic) for nic in range(nics)]
        assert [(c["taken"] == c["ended"], c["open"]) for c in counts] == [(True, 0)] * nics


@pytest.fixture
def two() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with TransferEngine.open(nics=2, faults="seed=1") as engine, TransferEngine.open(nics=2) as peer:
        yield engine, peer


def write(engine: TransferEngine, source: Memory, target: Memory, **more: Any) -> Operation:
    return engine.submit_single_write(source.nbytes, None, (source.handle, 0), (target.desc, 0), **more)


def test_r8_a_killed_nic_leaves_its_work_to_the_other_and_comes_back(
    two: tuple[TransferEngine, TransferEngine],
) -> None:
    engine, peer = two
    switch, heard = faults.control(engine), Calls()
    engine.on_error = heard
    source, target = Memory(engine, 1 << 20, pattern(1, 1 << 20)), Memory(peer, 1 << 20)
    finish([write(engine, source, target)])
    before = [switch.counts(nic)["taken"] for nic in (0, 1)]
    assert all(before), "a large write goes over both"
    switch.kill_nic(1)
    (lost,) = heard.wait(1)
    assert isinstance(lost, NicLost)
    assert lost.nic == engine.address.domains[1]
    finish([write(engine, source, target) for _ in range(5)])
    assert target.get() == pattern(1, 1 << 20)
    assert switch.counts(1) | {"held": 0} == switch.counts(1) | {"held": 0, "taken": before[1], "kills": 1, "down": 1}
    with pytest.raises((NicLost, FabricError)):
        write(engine, source, target, nic=1).wait(5)
    switch.revive_nic(1)

    def is_back() -> bool:
        settle([write(engine, source, target)])
        return switch.counts(1)["taken"] > before[1]

    eventually(is_back, "the NIC that came back is used again")


def test_c1_a_lost_completion_ends_at_its_deadline_and_names_the_peer() -> None:
    with TransferEngine.open(faults="drop=1") as engine, TransferEngine.open() as peer:
        source, target = Memory(engine, 64, pattern(1, 64)), Memory(peer, 64)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded) as ended:
            write(engine, source, target, timeout=0.3).wait(30)
        assert 0.3 <= time.monotonic() - begin < 0.3 + 20
        assert ended.value.peer == str(peer.address)
        assert target.get() == pattern(1, 64), "the write itself had happened"
        assert faults.control(engine).counts(0)["dropped"] == 1


@pytest.mark.parametrize(("word", "lands"), [("fail", False), ("fail_late", True)])
def test_a_chosen_errno_is_what_the_operation_ends_with(word: str, lands: bool) -> None:
    with TransferEngine.open(faults=f"{word}=1:EREMOTEIO") as engine, TransferEngine.open() as peer:
        source, target = Memory(engine, 64, pattern(1, 64)), Memory(peer, 64)
        with pytest.raises(TransferError) as ended:
            write(engine, source, target).wait(5)
        assert (ended.value.code, ended.value.peer) == ("EREMOTEIO", str(peer.address))
        assert target.get() == (pattern(1, 64) if lands else bytes(64))


def test_c11_one_cut_link_costs_a_path_and_all_of_them_the_peer(two: tuple[TransferEngine, TransferEngine]) -> None:
    engine, peer = two
    lost = Calls()
    engine.on_peer_lost = lost
    switch = faults.control(engine)
    with TransferEngine.open(nics=2) as other:
        source = Memory(engine, 1 << 18, pattern(1, 1 << 18))
        target, elsewhere = Memory(peer, 1 << 18), Memory(other, 1 << 18)
        finish([write(engine, source, target), write(engine, source, elsewhere)])
        switch.cut(peer.name, 1)
        eventually(lambda: switch.counts(1)["cuts"] >= 1, "the link is cut")
        finish([write(engine, source, target) for _ in range(5)])
        assert lost.count == 0
        switch.cut(peer.name, 0)
        (error,) = lost.wait(1)
        assert isinstance(error, PeerLost)
        assert error.peer == str(peer.address)
        assert settle([write(engine, source, target)]) == ["failed"]
        finish([write(engine, source, elsewhere) for _ in range(5)])
        for nic in (0, 1):
            switch.mend(nic)
        eventually(lambda: settle([write(engine, source, target)]) == ["done"], "a mended link is opened again")


def test_a_cut_that_cannot_be_kept_is_refused(two: tuple[TransferEngine, TransferEngine]) -> None:
    engine, peer = two
    switch = faults.control(engine)
    source, target = Memory(engine, 8), Memory(peer, 8)
    for i in range(8):
        switch.cut(f"somebody-{i}", 0)
    finish([write(engine, source, target)])  # NICs are polled for it: the first eight are in force
    for i in range(8, 16):
        switch.cut(f"somebody-{i}", 0)
    with pytest.raises(ConfigError, match="16 at a time"):
        switch.cut("the seventeenth", 0)
    switch.mend(0)
    eventually(lambda: _can_cut(switch), "mended, there is room again")


def _can_cut(switch: faults.Control) -> bool:
    try:
        switch.cut("another one", 0)
    except ConfigError:
        return False
    return True


def test_a_switch_says_what_it_cannot_do(two: tuple[TransferEngine, TransferEngine]) -> None:
    engine, _ = two
    switch = faults.control(engine)
    with pytest.raises(ConfigError, match="NIC 2"):
        switch.kill_nic(2)
    with pytest.raises(ConfigError, match="seconds"):
        switch.cut("x", 0, seconds=0)
    engine.close()
    with pytest.raises(EngineClosed):
        switch.kill_nic(0)
    assert switch.counts(0)["taken"] == 0


def test_r9_engines_with_faults_leave_nothing_behind() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def cycle() -> None:
        with TransferEngine.open(nics=2, faults="drop=0.5,kill_nic=1@3") as engine, TransferEngine.open() as peer:
            source, target = Memory(engine, 64), Memory(peer, 64)
            for _ in range(8):
                write(engine, source, target)

    cycle()
    before = descriptors()
    for _ in range(20):
        cycle()
    eventually(lambda: descriptors() <= before, "no descriptor stays")


def test_a_python_backend_can_be_wrapped_too() -> None:
    """The decorator takes any table of functions: here cffi's callbacks of a domain that holds nothing."""
    from fabric_core.native_lib import ffi, lib

    table = ffi.new("fab_domain_ops *", {"abi_version": 1, "struct_size": ffi.sizeof("fab_domain_ops")})
    closed: list[int] = []
    keep = {
        "wait_fd": ffi.callback("int(void *)", lambda _ctx: -1),
        "poll": ffi.callback("int(void *, fab_wc *, uint32_t, uint64_t)", lambda *_: -errno.EIO),
        "close": ffi.callback("void(void *)", lambda _ctx: closed.append(1)),
    }
    for name, function in keep.items():
        setattr(table, name, function)
    from fabric_core.domain import NativeDomain

    (wrapped,) = faults.wrap([NativeDomain(int(ffi.cast("uintptr_t", table)), 0, keep)], Plan(reorder=True))
    ops, ctx = lib.fab_fault_ops(), ffi.cast("void *", wrapped.ctx)
    assert ops.wait_fd(ctx) == -1
    assert ops.poll(ctx, ffi.new("fab_wc[4]"), 4, 1) == -errno.EIO
    ops.close(ctx)
    assert closed == [1]
