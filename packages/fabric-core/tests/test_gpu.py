"""GPU memory in the engine: on a GPU where there is one, else the same on a stand-in for the driver (c/fake_cuda.c).

`pytest -m gpu` runs these on a GPU only; what only a stand-in can show (a slow GPU, a broken context) is skipped there.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_core import (
    BadRange,
    ConfigError,
    FabricError,
    MrDesc,
    Pages,
    PeerLost,
    RemoteAccessError,
    ScatterDst,
    StepWrite,
    Transfer,
    TransferEngine,
    Unsupported,
)
from fabric_core.conformance.gpu_side import Driver, Memory, Side

HERE = Path(__file__).parent


def real() -> bool:
    try:
        lib = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        return lib.cuInit(0) == 0 and lib.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


REAL = real()
pytestmark = [pytest.mark.gpu] if REAL else []
stand_in = pytest.mark.skipif(REAL, reason="only a stand-in for the driver can be told to do this")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    if not REAL:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler for the stand-in, and no GPU")
        out = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-pthread", "-o", out, HERE / "c" / "fake_cuda.c"], check=True
        )
        os.environ["FABRIC_CUDA_LIBRARY"] = str(out)
    return Driver()


@pytest.fixture
def sides(driver: Driver) -> Iterator[Callable[..., Side]]:
    driver.enter()
    made: list[Side] = []

    def make(device: str = "cuda:0", **env: str) -> Side:
        made.append(Side(device, **env))
        return made[-1]

    yield make
    for side in made:
        side.close()


def data_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def target(side: Side, kind: str, nbytes: int) -> tuple[MrDesc, int]:
    made = side.ask("make", kind=kind, nbytes=nbytes)
    return MrDesc.from_bytes(base64.b64decode(made["desc"])), made["imm"]


def outcome(transfer: Transfer) -> str:
    """The code of its error once it has ended, "" if it has ended well."""
    try:
        transfer.wait(20)
    except FabricError as error:
        return error.code
    return ""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def one_write_arrives(engine: TransferEngine, driver: Driver, side: Side, data: bytes) -> None:
    """From GPU memory of ours into GPU memory of the other process, compared there."""
    memory = Memory(engine, "gpu", len(data), driver)
    memory.put(data)
    handle, _ = engine.reg_mr(memory.what)
    desc, imm = target(side, "gpu", len(data))
    engine.submit_single_write(len(data), imm, (handle, 0), (desc, 0)).wait(20)
    assert side.ask("expect", imm=imm, count=1, within=20)["digest"] == digest(data)


KINDS = [("gpu", "gpu"), ("gpu", "empty"), ("gpu", "heap"), ("empty", "gpu"), ("heap", "gpu"), ("empty", "heap")]


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
@pytest.mark.parametrize(("nics", "linger"), [(1, 0), (2, 0), (1, 300)])
def test_c10_writes_between_processes(
    driver: Driver, sides: Callable[..., Side], ours: str, theirs: str, nics: int, linger: int
) -> None:
    """Each pair of kinds of memory: one large write of odd length at odd places, and many pages in random order."""
    nbytes = (8 << 20) + 4096
    side = sides()
    with TransferEngine.open("cuda:0", "local", nics=nics, gpu_linger_us=linger) as engine:
        memory = Memory(engine, ours, nbytes, driver)
        data = data_of(1, nbytes)
        memory.put(data)
        handle, _ = engine.reg_mr(memory.what)
        desc, imm = target(side, theirs, nbytes)
        expected = bytearray(nbytes)
        for length, at, to in ((5 << 20) + 3, 13, 7), (64, 0, (6 << 20)), (1, 5, (7 << 20) + 1):
            engine.submit_single_write(length, imm, (handle, at), (desc, to)).wait(20)
            expected[to : to + length] = data[at : at + length]
        assert side.ask("expect", imm=imm, count=3, within=20)["digest"] == digest(expected)

        desc, imm = target(side, theirs, nbytes)
        for page in (1024, 3 * 1024, 4000, 32768):
            count = min(2000, nbytes // page)
            order = np.random.default_rng(page).permutation(nbytes // page).astype(np.uint32)
            src, dst = order[:count], order[::-1][:count].copy()
            engine.submit_paged_writes(page, imm, (handle, Pages(src, page)), (desc, Pages(dst, page))).wait(20)
            if page == 1024:
                expected = bytearray(nbytes)
            for i, j in zip(src.tolist(), dst.tolist(), strict=True):
                expected[j * page : (j + 1) * page] = data[i * page : (i + 1) * page]
            assert side.ask("expect", imm=imm, count=count, within=20)["digest"] == digest(expected)


@pytest.mark.parametrize("kinds", KINDS)
def test_inside_one_process(driver: Driver, kinds: tuple[str, str]) -> None:
    nbytes = (1 << 20) + 5
    driver.enter()
    with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
        src, dst = Memory(a, kinds[0], nbytes, driver), Memory(b, kinds[1], nbytes, driver)
        src.put(data_of(2, nbytes))
        handle, _ = a.reg_mr(src.what)
        _, desc = b.reg_mr(dst.what)
        imm = b.alloc_imm()
        count = b.expect_imm_count(imm, 1)
        a.submit_single_write(nbytes, imm, (handle, 0), (desc, 0)).wait(20)
        count.wait(20)
        assert dst.get() == src.get()


def test_a_kernel_that_stays_comes_and_goes(driver: Driver) -> None:
    """Batches before, at and after the moment when it leaves: none is lost, none is done twice."""
    driver.enter()
    with (
        TransferEngine.open("cuda:0", "local", gpu_linger_us=200) as a,
        TransferEngine.open("cuda:0", "local") as b,
    ):
        nbytes, page = 1 << 20, 4096
        src, dst = Memory(a, "gpu", nbytes, driver), Memory(b, "gpu", nbytes, driver)
        data = data_of(8, nbytes)
        src.put(data)
        handle, _ = a.reg_mr(src.what)
        _, desc = b.reg_mr(dst.what)
        imm = b.alloc_imm()
        rng = random.Random(9)
        numbers = np.arange(nbytes // page, dtype=np.uint32)
        for n in range(1, 301):
            order = np.random.default_rng(n).permutation(numbers)
            a.submit_paged_writes(page, imm, (handle, Pages(order, page)), (desc, Pages(numbers, page))).wait(20)
            b.expect_imm_count(imm, len(numbers)).wait(20)
            if n % 20 == 0:
                got = dst.get()
                assert all(
                    got[i * page : (i + 1) * page] == data[j * page : (j + 1) * page] for i, j in enumerate(order)
                )
                a.submit_single_write(nbytes, None, (handle, 0), (desc, 0)).wait(20)  # a copy engine's
                assert b.imm_count(imm) == 0
            until = time.monotonic() + rng.choice([0, 0, 150e-6, 200e-6, 250e-6, 1e-3])
            while time.monotonic() < until:
                pass


@pytest.mark.parametrize("linger", [0, 300_000])
def test_lists_of_pages_that_come_again(driver: Driver, linger: int) -> None:
    """A kernel that stays keeps lists in GPU memory: more than fit, some differ in one number, several in flight."""
    driver.enter()
    page, total = 64, 4096
    rng = np.random.default_rng(10)
    lists = [rng.permutation(total).astype(np.uint32)[:n] for n in (1, 2, 3, 40, 40, 257, 512, 513, 700, 4095)]
    targets = [numbers[::-1].copy() for numbers in lists]
    for index, place in ((4, -1), (5, 0), (8, 350)):
        for changed, same in ((lists, targets), (targets, lists)):
            changed.append(changed[index].copy())
            changed[-1][place] = np.setdiff1d(np.arange(total), changed[-1])[0]
            same.append(same[index])
    with (
        TransferEngine.open("cuda:0", "local", gpu_linger_us=linger) as a,
        TransferEngine.open("cuda:0", "local") as b,
    ):
        src = Memory(a, "gpu", page * total, driver)
        dst = Memory(b, "gpu", page * total * len(lists), driver)  # for each list a part of its own
        handle, _ = a.reg_mr(src.what)
        _, desc = b.reg_mr(dst.what)
        expected = np.zeros((len(lists), total, page), dtype=np.uint8)
        for n in range(10):
            data = rng.integers(0, 256, (total, page), dtype=np.uint8)
            src.put(data.tobytes())
            flying = []
            for k in rng.permutation(len(lists)).tolist():
                expected[k][targets[k]] = data[lists[k]]
                where = (handle, Pages(lists[k], page)), (desc, Pages(targets[k], page, k * total * page))
                flying.append(a.submit_paged_writes(page, None, *where))
                if n % 2:
                    flying[-1].wait(60)
            for transfer in flying:
                transfer.wait(60)
            assert dst.get() == expected.tobytes(), n


def test_c10_a_small_batch_does_not_end_the_large_one_before_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel that stays: blocks that have nothing to do for the large one are done with the small one first."""
    driver.enter()
    monkeypatch.setenv("FAKE_CUDA_LATE_LISTS", "1")
    piece, small, targets = 512 << 10, 64, 32  # the GPU's first blocks get the first piece, and each 16th after it
    with (
        TransferEngine.open("cuda:0", "local", gpu_linger_us=300_000) as a,
        TransferEngine.open("cuda:0", "local") as b,
    ):
        nbytes = targets * piece
        src, dst, other = (
            Memory(a, "gpu", nbytes, driver),
            Memory(b, "empty", nbytes, driver),
            Memory(b, "gpu", 64, driver),
        )
        handle, _ = a.reg_mr(src.what)
        (_, desc), (_, there) = b.reg_mr(dst.what), b.reg_mr(other.what)
        cuts = [ScatterDst(desc, piece if i % 16 else small, i * piece, i * piece) for i in range(targets)]
        ends = [cut.dst_offset + cut.length - 1 for cut in cuts]
        with memoryview(dst.what) as view:
            for n in range(1, 9):
                driver.put(src.ptr, bytes([n]) * nbytes)
                posted = a.stats()["wrs"] + targets
                large = a.submit_scatter(None, None, None, handle, cuts)
                while a.stats()["wrs"] < posted and not large.done:
                    pass
                a.stats()  # and begun
                after = a.submit_paged_writes(64, None, (handle, Pages([0], 64)), (there, Pages([0], 64)))
                large.wait(60)
                assert [view[end] for end in ends] == [n] * targets, n
                after.wait(60)


def test_an_engine_for_host_memory_reaches_a_peers_gpu(driver: Driver, sides: Callable[..., Side]) -> None:
    """It makes no context: the bytes go through the ring, and the peer's GPU takes them in."""
    side = sides()
    with TransferEngine.open("cpu", "local") as engine:
        data = data_of(3, 300_001)
        handle, _ = engine.reg_mr(bytearray(data))
        desc, imm = target(side, "gpu", len(data))
        engine.submit_single_write(len(data), imm, (handle, 0), (desc, 0)).wait(20)
        assert side.ask("expect", imm=imm, count=1, within=20)["digest"] == digest(data)


@pytest.mark.parametrize("path", ["auto", "map", "cma", "bounce"])
def test_every_path_setting(driver: Driver, sides: Callable[..., Side], path: str) -> None:
    side = sides()
    with TransferEngine.open("cuda:0", "local", local_path=path) as engine:
        one_write_arrives(engine, driver, side, data_of(4, 200_000))


@stand_in
@pytest.mark.parametrize("lacks", ["FAKE_CUDA_NO_IPC", "FAKE_CUDA_NO_WORDS"])
def test_without_handles_or_stream_words(
    driver: Driver, sides: Callable[..., Side], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory without a handle (torch's expandable segments), and GPUs whose streams cannot write words."""
    monkeypatch.setenv(lacks, "1")
    side = sides()
    with TransferEngine.open("cuda:0", "local") as engine:
        one_write_arrives(engine, driver, side, data_of(5, 300_000))


@stand_in
def test_c7_a_region_stays_until_the_gpu_has_let_go(
    driver: Driver, sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deregistering waits for copies that are in flight: afterwards nothing changes there."""
    side = sides()
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "50000")
    with TransferEngine.open("cuda:0", "local") as engine:
        memory = Memory(engine, "gpu", 1 << 20, driver)
        memory.put(b"\x5a" * (1 << 20))
        handle, _ = engine.reg_mr(memory.what)
        desc, imm = target(side, "gpu", 1 << 20)
        engine.submit_single_write(64, None, (handle, 0), (desc, 0)).wait(20)  # opens it
        begun = [engine.submit_single_write(1 << 19, None, (handle, 0), (desc, 0)) for _ in range(12)]
        end = time.monotonic() + 5
        while engine.stats()["wrs"] < 3 and time.monotonic() < end:
            pass
        first = side.ask("dereg", imm=imm)["digest"]
        ends = {outcome(transfer) for transfer in begun}
        assert ends <= {"", "EKEYREVOKED"}
        assert side.ask("digest", imm=imm)["digest"] == first


@stand_in
@pytest.mark.parametrize("how", ["kill", "close", "cancel"])
def test_c1_everything_ends_while_the_gpu_is_slow(
    driver: Driver, sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    side = sides()
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "30000")
    ends: list[str] = []
    engine = TransferEngine.open("cuda:0", "local", heartbeat=0.5)
    try:
        memory = Memory(engine, "gpu", 1 << 20, driver)
        handle, _ = engine.reg_mr(memory.what)
        desc, _imm = target(side, "gpu", 1 << 20)
        engine.submit_single_write(64, None, (handle, 0), (desc, 0)).wait(20)
        made = [
            engine.submit_single_write(1 << 18, None, (handle, 0), (desc, 0), lambda t: ends.append(t.state))
            for _ in range(40)
        ]
        if how == "kill":
            side.process.send_signal(signal.SIGKILL)
        elif how == "cancel":
            for transfer in made:
                transfer.cancel()
        else:
            engine.close(5)
        codes = {outcome(transfer) for transfer in made}
        if how == "kill":
            assert {type(transfer.exception()) for transfer in made} <= {type(None), PeerLost}, codes
    finally:
        engine.close()
    assert len(ends) == 40
    assert len(set(ends)) > 1 or ends[0] != "done"


@stand_in
def test_a_broken_context_ends_all_and_says_so(sides: Callable[..., Side], tmp_path: Path) -> None:
    """In a process of its own: the context stays broken."""
    script = tmp_path / "broken.py"
    script.write_text(
        "from fabric_core.conformance.gpu_side import Driver, Memory\n"
        "from fabric_core import TransferEngine, FabricError\n"
        "d = Driver()\n"
        "with TransferEngine.open('cuda:0', 'local') as a, TransferEngine.open('cuda:0', 'local') as b:\n"
        "    s, t = Memory(a, 'gpu', 4096, d), Memory(b, 'gpu', 4096, d)\n"
        "    h, _ = a.reg_mr(s.what); _, desc = b.reg_mr(t.what)\n"
        "    for i in range(8):\n"
        "        try:\n"
        "            a.submit_single_write(4096, None, (h, 0), (desc, 0)).wait(5)\n"
        "        except FabricError as error:\n"
        "            print(type(error).__name__, error.code)\n"
    )
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "FAKE_CUDA_FAIL_AFTER": "3"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 5, ran.stdout
    assert "EIO" in ran.stdout


def test_a_stream_starts_transfers_and_waits_for_them(driver: Driver, sides: Callable[..., Side]) -> None:
    """A prepared write per stream_submit; the stream waits for the ends; a watcher hears of what comes after."""
    side = sides()
    heard: list[tuple[int, int]] = []
    with TransferEngine.open("cuda:0", "local") as engine:
        memory = Memory(engine, "gpu", 1 << 16, driver)
        data = data_of(6, 1 << 16)
        memory.put(data)
        handle, _ = engine.reg_mr(memory.what)
        desc, imm = target(side, "gpu", 1 << 16)
        flag = engine.gpu_flag()
        whole = engine.prepare_write(1 << 16, imm, (handle, 0), (desc, 0), flag)
        order = np.arange(16, dtype=np.uint32)
        pages = engine.prepare_paged_writes(
            4096, imm, (handle, Pages(order, 4096)), (desc, Pages(order[::-1].copy(), 4096)), flag
        )
        watcher = engine.alloc_uvm_watcher(lambda old, new: heard.append((old, new)))
        for n in range(1, 51):
            engine.stream_submit(whole)
            engine.stream_wait(flag, n)
        engine.stream_signal(watcher, 1)
        end = time.monotonic() + 10
        while not heard and time.monotonic() < end:
            time.sleep(0.001)
        assert heard == [(0, 1)]
        assert (flag.done, flag.failed, whole.submitted) == (50, 0, 50)
        assert side.ask("expect", imm=imm, count=50, within=10)["digest"] == digest(data)
        engine.stream_submit(pages)
        expected = b"".join(data[i * 4096 : (i + 1) * 4096] for i in reversed(range(16)))
        assert side.ask("expect", imm=imm, count=16, within=10)["digest"] == digest(expected)
        whole.close()
        with pytest.raises(FabricError, match="closed"):
            engine.stream_submit(whole)
        # a stream waits for immediates
        arrived = engine.gpu_flag()
        own = engine.alloc_imm()
        engine.expect_imm_count(own, 3, arrived)
        engine.stream_wait(arrived)
        engine.stream_signal(watcher, 2)
        _, here = engine.reg_mr(memory.what)
        for n in range(3):
            assert watcher.value == 1, n
            engine.submit_single_write(64, own, (handle, 0), (here, 1024)).wait(10)
        while watcher.value != 2 and time.monotonic() < end:
            time.sleep(0.001)
        assert watcher.value == 2


def test_a_prepared_transfer_that_cannot_be_done_is_refused(driver: Driver) -> None:
    driver.enter()
    with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
        memory, there = Memory(a, "gpu", 4096, driver), Memory(b, "gpu", 4096, driver)
        handle, _ = a.reg_mr(memory.what)
        _, desc = b.reg_mr(there.what)
        with pytest.raises(BadRange):
            a.prepare_write(4097, None, (handle, 0), (desc, 0))
        with pytest.raises(BadRange):
            a.prepare_paged_writes(
                1024, None, (handle, Pages(np.arange(5, dtype=np.uint32), 1024)),
                (desc, Pages(np.arange(5, dtype=np.uint32), 1024)),
            )  # fmt: skip
        prepared = a.prepare_write(64, None, (handle, 0), (desc, 0))
        a.dereg_mr(handle)
        a.stream_submit(prepared)
        end = time.monotonic() + 10
        while not prepared.flag.done and time.monotonic() < end:
            time.sleep(0.001)
        assert prepared.flag.failed == 1
        with pytest.raises(FabricError, match="not registered"):
            prepared.submitted  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (BadRange, {"imm": -7}),  # which C takes for none
        (BadRange, {"imm": 1 << 29}),
        (BadRange, {"nic": -2}),
        (ConfigError, {"nic": 3}),
        (BadRange, {"timeout": float("nan")}),
        (BadRange, {"src": -1}),
        (BadRange, {"src": Pages([0], 64), "dst": 0}),
        (BadRange, {"src": Pages([], 64), "dst": Pages([], 64)}),  # no pages are not one write
        (BadRange, {"src": Pages([0, 1], 64), "dst": Pages([0], 64)}),
        (RemoteAccessError, {"write": False}),
    ],
    ids=repr,
)
def test_what_cannot_be_prepared_is_named_at_once(
    driver: Driver, kind: type[Exception], arguments: dict[str, Any]
) -> None:
    """And leaves no word behind: the words of 2,000 refusals would fill several allocations."""
    driver.enter()
    arguments = dict(arguments)
    src, dst = arguments.pop("src", 0), arguments.pop("dst", 0)
    imm, write = arguments.pop("imm", None), arguments.pop("write", True)
    with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
        memory, there = Memory(a, "gpu", 4096, driver), Memory(b, "gpu", 4096, driver)
        handle, _ = a.reg_mr(memory.what)
        _, desc = b.reg_mr(there.what, write=write)
        flag = a.gpu_flag()
        seen = set()
        for _ in range(2000):
            with pytest.raises(kind):
                a.prepare_paged_writes(64, imm, (handle, src), (desc, dst), flag, **arguments)
            seen.add(a.gpu_flag().ptr >> 16)
        assert len(seen) <= 3


@stand_in
def test_a_lost_peer_is_told_of_while_more_is_submitted(
    driver: Driver, sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = sides()
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "20000")
    lost = threading.Event()
    with TransferEngine.open("cuda:0", "local", heartbeat=0.5) as engine:
        engine.on_peer_lost = lambda error: lost.set()
        memory = Memory(engine, "gpu", 1 << 16, driver)
        handle, _ = engine.reg_mr(memory.what)
        desc, _imm = target(side, "gpu", 1 << 16)
        engine.submit_single_write(64, None, (handle, 0), (desc, 0)).wait(20)
        end = time.monotonic() + 6
        src, dst = (handle, Pages([0, 1], 1 << 15)), (desc, Pages([1, 0], 1 << 15))
        flying = [engine.submit_paged_writes(1 << 15, None, src, dst) for _ in range(8)]
        side.process.kill()
        while not lost.is_set() and time.monotonic() < end:  # there is always something in flight
            flying = [transfer for transfer in flying if not transfer.done]
            if len(flying) < 8:
                flying.append(engine.submit_paged_writes(1 << 15, None, src, dst))
        assert lost.is_set()


def test_host_memory_that_is_registered_in_parts_and_as_a_whole(driver: Driver) -> None:
    """The driver pins no page twice, copies nothing that is pinned in part; a part's pin ends with it."""
    driver.enter()
    nbytes, half = 1 << 17, 1 << 16
    with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
        there = Memory(b, "gpu", nbytes, driver)
        _, desc = b.reg_mr(there.what)
        for cuts in ([(half, nbytes)], [(0, half), (half, nbytes)], [(4096, 8192)]):
            base = np.zeros(nbytes + 4096, dtype=np.uint8)
            skip = -base.ctypes.data % 4096
            whole = base[skip : skip + nbytes]
            parts = [a.reg_mr(whole[begin:end])[0] for begin, end in cuts]
            handle, _ = a.reg_mr(whole)
            pages = Pages(range(nbytes // 4096), 4096)
            for n in (1, 2):
                whole[:] = np.random.default_rng(n).integers(0, 256, nbytes, dtype=np.uint8)
                a.submit_single_write(nbytes, None, (handle, 0), (desc, 0)).wait(20)
                assert there.get() == whole.tobytes()
                whole[:] = n
                a.submit_paged_writes(4096, None, (handle, pages), (desc, pages)).wait(20)
                assert there.get() == whole.tobytes()
                for part in parts:
                    a.dereg_mr(part)
                parts = []
            a.dereg_mr(handle)


@stand_in
def test_gpus_of_one_process_without_peer_access(driver: Driver, tmp_path: Path) -> None:
    """A kernel that wrote to the other GPU would end the context: copy engines do it. In a process of its own."""
    script = tmp_path / "two.py"
    script.write_text(
        "from fabric_core import Pages, TransferEngine\n"
        "from fabric_core.native_lib import ffi, lib\n"
        "def alloc(device):\n"
        "    out = ffi.new('uint64_t *')\n"
        "    assert lib.fab_cuda_alloc(device, 65536, out) == 0\n"
        "    return out[0], 65536, f'cuda:{device}'\n"
        "data = bytearray(b'\\x07' * 65536)\n"
        "with TransferEngine.open('cuda:0', 'local') as a, TransferEngine.open('cuda:1', 'local') as b:\n"
        "    s, t = alloc(0), alloc(1)\n"
        "    lib.fab_cuda_copy(0, s[0], int(ffi.cast('uintptr_t', ffi.from_buffer(data))), 65536)\n"
        "    (h, _), (_, desc) = a.reg_mr(s), b.reg_mr(t)\n"
        "    pages = Pages(range(15), 4096)\n"
        "    a.submit_paged_writes(4096, None, (h, pages), (desc, pages)).wait(10)\n"
        "    a.submit_single_write(4095, None, (h, 1), (desc, 15 * 4096)).wait(10)\n"
        "    got = bytearray(65536)\n"
        "    lib.fab_cuda_copy(1, int(ffi.cast('uintptr_t', ffi.from_buffer(got))), t[0], 65536)\n"
        "    print(got == data[:-1] + b'\\0')\n"
    )
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "FAKE_CUDA_DEVICES": "2"},
    )  # fmt: skip
    assert ran.stdout == "True\n", ran.stderr


def test_a_watcher_may_be_dropped_by_the_end_of_another(driver: Driver) -> None:
    """What the callback of the one holds is let go under the lock that the end of the other takes."""
    driver.enter()
    with TransferEngine.open("cuda:0", "local") as engine:
        held = [engine.alloc_uvm_watcher(lambda old, new: None)]
        watcher = engine.alloc_uvm_watcher(lambda old, new, held=held: None)
        del held
        thread = threading.Thread(target=watcher.close, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


def test_flags_may_be_dropped_in_the_child_of_a_fork(driver: Driver) -> None:
    driver.enter()
    with TransferEngine.open("cuda:0", "local") as engine:
        flag = engine.gpu_flag()
        child = os.fork()
        if not child:
            try:
                del flag
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert flag.value == 0


def test_mistakes_are_named(driver: Driver) -> None:
    driver.enter()
    with pytest.raises(ConfigError, match="cuda:63"):
        TransferEngine.open("cuda:63", "local")
    with pytest.raises(ConfigError, match="cuda:x"):
        TransferEngine.open("cuda:x", "local")
    ptr = driver.alloc(4096)
    with TransferEngine.open("cpu", "local") as engine:
        with pytest.raises(Unsupported, match="device='cuda:0'"):
            engine.reg_mr((ptr, 4096, "cuda:0"))
        with pytest.raises(Unsupported, match="serves no GPU"):
            engine.gpu_flag()
    with TransferEngine.open(devices=["cpu", "cuda:0"], backend="local") as engine:
        handle, desc = engine.reg_mr((ptr, 4096, "cuda:0"))
        assert handle.device == "cuda:0"
        assert desc.addr != engine.address
        with pytest.raises(Unsupported):
            engine.reg_mr((ptr, 4096, "cuda:0"), device="cpu")
        with pytest.raises(BadRange, match="not on cuda:3"):
            engine.reg_mr((ptr, 4096, "cuda:3"))
        with pytest.raises(BadRange, match="not \\(all\\) memory of cuda:0"):
            engine.reg_mr((ptr, 1 << 44, "cuda:0"))
        with pytest.raises(Unsupported, match="does not know"):
            engine.reg_mr((0x7000, 4096, "cuda:0"))
    driver.free(ptr)


def test_r9_nothing_is_left_behind(driver: Driver) -> None:
    """Pins, mappings, streams and descriptors go with their engine."""
    driver.enter()

    def cycle() -> None:
        with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
            memory, there = Memory(a, "heap", 8192, driver), Memory(b, "gpu", 8192, driver)
            handle, _ = a.reg_mr(memory.what)
            again, _ = a.reg_mr(memory.what)  # the same pages: one pin
            _, desc = b.reg_mr(there.what)
            a.submit_single_write(8192, None, (handle, 0), (desc, 0)).wait(10)
            a.dereg_mr(handle)
            a.submit_single_write(8192, None, (again, 0), (desc, 0)).wait(10)
        driver.free(there.ptr)

    for _ in range(3):
        cycle()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(30):
        cycle()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after <= (before[0] + 1, before[1] + 1)


def test_without_a_driver_nothing_changes() -> None:
    """The reason is said, and CPU engines are as before."""
    code = (
        "import os; os.environ['FABRIC_CUDA_LIBRARY'] = '/nonexistent/libcuda.so.1'\n"
        "from fabric_core import TransferEngine, Unsupported\n"
        "try: TransferEngine.open('cuda:0', 'local')\n"
        "except Unsupported as error: print(error)\n"
        "TransferEngine.open('cpu', 'local').close()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "no CUDA driver" in ran.stdout, ran.stderr
    assert ran.returncode == 0


@pytest.mark.parametrize("memory", ["gpu", "gpu:engine", "engine:gpu"])
def test_bench_measures_gpu_memory(driver: Driver, memory: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fabric_core.cli", "bench", "paged", "--memory", memory, "--page-len", "4K",
         "--pages", "64", "-n", "40", "--json"], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    row = json.loads(ran.stdout)["data"]["rows"][0]
    assert row["wrong_bytes"] == 0
    assert row["limit"] == "link"


class Array:
    """What CuPy and others offer."""

    def __init__(self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        face = {"shape": shape, "strides": strides, "typestr": "<f4", "data": (ptr, False), "version": 3}
        self.__cuda_array_interface__ = face


def test_cuda_arrays_are_registered(driver: Driver) -> None:
    driver.enter()
    ptr = driver.alloc(4096)
    with TransferEngine.open("cuda:0", "local") as engine:
        handle, desc = engine.reg_mr(Array(ptr, (16, 64), None))
        assert (handle.nbytes, desc.nbytes, handle.device) == (4096, 4096, "cuda:0")
        engine.reg_mr(Array(ptr, (16, 64), (256, 4)))
        with pytest.raises(BadRange, match="contiguous"):
            engine.reg_mr(Array(ptr, (16, 32), (256, 4)))
        with pytest.raises(BadRange, match="empty"):
            engine.reg_mr(Array(ptr, (0, 32), None))
    driver.free(ptr)


def torch_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return REAL and torch.cuda.is_available()


needs_torch = pytest.mark.skipif(not torch_cuda(), reason="needs a GPU and torch for CUDA")


@needs_torch
def test_a_captured_graph_submits_and_waits_each_time_it_runs() -> None:
    import torch

    with TransferEngine.open("cuda:0", "local") as a, TransferEngine.open("cuda:0", "local") as b:
        src = torch.zeros(1 << 20, dtype=torch.float32, device="cuda:0")
        dst = torch.zeros_like(src)
        seen = torch.zeros_like(src)
        handle, _ = a.reg_mr(src)
        _, desc = b.reg_mr(dst)
        torch.cuda.synchronize()
        prepared = a.prepare_write(4 << 20, None, (handle, 0), (desc, 0))
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            now = torch.cuda.current_stream()
            src.add_(1)
            a.stream_signal(prepared.flag, 0, now)
            a.stream_submit(prepared, now)
            a.stream_wait(prepared.flag, 1, now)
            seen.copy_(dst)
        for n in range(1, 101):
            graph.replay()
            torch.cuda.synchronize()
            assert float(seen.min()) == float(seen.max()) == n
        assert prepared.submitted == 100


@needs_torch
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_tensors_of_either_allocator_of_torch(sides: Callable[..., Side], tmp_path: Path, allocator: str) -> None:
    """Expandable segments have no handle to give to a peer: the bytes go through the ring, slower and as right."""
    script = tmp_path / "receiver.py"
    script.write_text(
        "import sys, torch\n"
        "from fabric_core import TransferEngine\n"
        "with TransferEngine.open('cuda:0', 'local') as engine:\n"
        "    pad = torch.empty(1000, device='cuda:0')\n"
        "    t = torch.zeros(3_000_001, dtype=torch.uint8, device='cuda:0')\n"
        "    _, desc = engine.reg_mr(t)\n"
        "    imm = engine.alloc_imm()\n"
        "    print(desc.to_bytes().hex(), imm, flush=True)\n"
        "    engine.expect_imm_count(imm, 1, timeout=60).wait(60)\n"
        "    print(int(t.to(torch.int64).sum()), flush=True)\n"
    )
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else dict(os.environ)
    import torch

    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        try:
            text, imm = child.stdout.readline().split()
            src = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, device="cuda:0")
            with TransferEngine.open("cuda:0", "local") as engine:
                handle, _ = engine.reg_mr(src)
                torch.cuda.synchronize()
                desc = MrDesc.from_bytes(bytes.fromhex(text))
                engine.submit_single_write(3_000_001, int(imm), (handle, 0), (desc, 0)).wait(30)
            assert int(child.stdout.readline()) == int(src.to(torch.int64).sum())
        finally:
            child.kill()


@pytest.mark.skipif(shutil.which("clang-14") is None, reason="needs clang-14 to make PTX")
def test_the_kernels_are_what_their_source_gives() -> None:
    script = HERE.parents[2] / "tools" / "make_ptx.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=100)


def test_doctor_names_the_gpus(driver: Driver) -> None:
    """And `fabric env` the variable that names the driver."""
    ran = subprocess.run(
        [sys.executable, "-m", "fabric_core.cli", "doctor", "--json"], capture_output=True, text=True, timeout=100
    )
    checks = {check["name"]: check for check in json.loads(ran.stdout)["data"]["checks"]}
    assert checks["CUDA driver"]["status"] == "OK"
    assert "cuda:0" in checks["CUDA driver"]["found"]
    assert "FABRIC_CUDA_LIBRARY" not in checks


# ---- sequences: a stream's steps are a model's layers


class Layers:
    """`count` layers of 16 pages, each with content of its own, into pages in reverse order."""

    def __init__(self, engine: TransferEngine, side: Side, driver: Driver, count: int) -> None:
        self.count, size = count, 16 * 4096
        self.side = side
        self.data = data_of(8, count * size)
        memory = Memory(engine, "gpu", count * size, driver)
        memory.put(self.data)
        self.memory = memory
        handle, _ = engine.reg_mr(memory.what)
        desc, self.imm = target(side, "gpu", count * size)
        order = np.arange(16, dtype=np.uint32)
        self.steps = []
        for at in range(0, count * size, size):
            src, dst = Pages(order, 4096, at), Pages(order[::-1].copy(), 4096, at)
            self.steps.append([StepWrite(4096, self.imm, (handle, src), (desc, dst))])

    def arrived(self, layers: int, before: int) -> bool:
        """Whether the peer has exactly the first so many, after it has seen those that were not there `before`."""
        size = 16 * 4096
        expected = bytearray(self.count * size)
        for page in range(layers * 16):
            layer, at = divmod(page, 16)
            to = layer * size + (15 - at) * 4096
            expected[to : to + 4096] = self.data[page * 4096 : (page + 1) * 4096]
        answer = self.side.ask("expect", imm=self.imm, count=16 * (layers - before), within=10)
        return bool(answer["digest"] == digest(bytes(expected)))


def test_a_stream_posts_the_layers_of_a_sequence(driver: Driver, sides: Callable[..., Side]) -> None:
    """By the next step, and by the number of finished ones; nothing but those layers is there."""
    side = sides()
    with TransferEngine.open("cuda:0", "local") as engine:
        layers = Layers(engine, side, driver, 8)
        sequence = engine.prepare_sequence(layers.steps)
        engine.stream_submit(sequence)
        assert layers.arrived(1, 0)
        for _ in range(2):
            engine.stream_submit(sequence)
        assert layers.arrived(3, 1)
        engine.stream_signal(sequence, 7)
        assert layers.arrived(7, 3)
        sequence.wait(10)
        assert (sequence.value, sequence.submitted, sequence.ended, sequence.error) == (7, 7, 7, None)
        engine.stream_signal(sequence, 8)
        assert layers.arrived(8, 7)
        sequence.close()
        with pytest.raises(FabricError, match="closed"):
            engine.stream_submit(sequence)


@needs_torch
def test_a_graph_posts_each_layer_as_it_is_computed(driver: Driver, sides: Callable[..., Side]) -> None:
    """Kernels and steps in one captured graph: each layer leaves with what its own kernel has written."""
    import torch

    side = sides()
    with TransferEngine.open("cuda:0", "local") as engine:
        count, size = 12, 16 * 4096
        kv = torch.zeros(count, size, dtype=torch.uint8, device="cuda:0")
        handle, _ = engine.reg_mr(kv)
        desc, imm = target(side, "gpu", count * size)
        steps = [[StepWrite(size, imm, (handle, n * size), (desc, n * size))] for n in range(count)]
        sequence = engine.prepare_sequence(steps)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for n in range(count):
                torch.cuda._sleep(200_000)
                kv[n].fill_(n + 1)
                engine.stream_submit(sequence, torch.cuda.current_stream())
        assert sequence.submitted == 0  # a captured step is none yet
        with torch.cuda.stream(stream):
            graph.replay()
        answer = side.ask("expect", imm=imm, count=count, within=30)
        expected = b"".join(bytes([n + 1]) * size for n in range(count))
        assert answer["digest"] == digest(expected)
        sequence.wait(10)
        assert sequence.posted_ns == sorted(sequence.posted_ns)
        assert len(sequence.posted_ns) == count
