"""`fabric bench` and `fabric ping`: patterns, plans and limits by themselves, then the commands with two processes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_core.cli import bench_ops, bench_run, build, limits, pattern, ping
from fabric_core.cli.bench import _sizes
from fabric_core.cli.bench_ops import Link, Plan, Sample
from fabric_core.cli.bench_peer import Server
from fabric_core.cli.bench_run import Job
from fabric_core.cli.models import Bench, Ping
from fabric_core.cli.session import Session, open_engine
from fabric_core.errors import BackendError, ProtocolError

ROW_KEYS = [
    "op",
    "size_bytes",
    "pages",
    "n",
    "time_p50_us",
    "time_p99_us",
    "gbit_s",
    "gbyte_s",
    "limit",
    "limit_gbyte_s",
    "limit_percent",
    "mops",
    "post_p50_us",
    "post_p99_us",
    "wrong_bytes",
]


def fabric(*argv: str, folder: Path, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FABRIC_LOCAL_DIR": str(folder / "d"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "fabric_core.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 1_048_573, 3_000_000])
def test_the_pattern_depends_on_the_seed_and_has_no_page_sized_period(length: int) -> None:
    a, b, c = bytearray(length), bytearray(length), bytearray(length)
    pattern.fill(memoryview(a), 1)
    pattern.fill(memoryview(b), 1)
    pattern.fill(memoryview(c), 2)
    assert a == b
    assert pattern.count_wrong(memoryview(a), memoryview(b)) == 0
    if length > 1000:
        assert pattern.count_wrong(memoryview(a), memoryview(c)) > length // 2
    if length > 2 << 20:
        assert a[:4096] != a[1 << 20 : (1 << 20) + 4096]


def test_count_wrong_counts_bytes_and_missing_ones() -> None:
    a, b = bytearray(200_000), bytearray(200_000)
    for place in (0, 65535, 65536, 199_999):
        b[place] = 1
    assert pattern.count_wrong(memoryview(a), memoryview(b)) == 4
    assert pattern.count_wrong(memoryview(a)[:10], memoryview(a)[:7]) == 3


def test_expected_pages_moves_each_page_to_its_place() -> None:
    order = pattern.permutation(8, 5)
    assert sorted(order) == list(range(8))
    assert order == pattern.permutation(8, 5)
    source = bytearray(2 * 8 * 16)
    pattern.fill(memoryview(source), 5)
    target = pattern.expected_pages(len(source), 5, 16, order, 8 * 16)
    for base in (0, 128):
        for k, place in enumerate(order):
            assert target[base + place * 16 : base + place * 16 + 16] == source[base + k * 16 : base + k * 16 + 16]


def test_sizes_sweep_and_single() -> None:
    options: dict[str, Any] = {"factor": 2, "page_len": "", "pages": 4}
    assert _sizes("write", "1K", "8K", **options) == [1024, 2048, 4096, 8192]
    assert _sizes("write", "1K", "", **options) == [1024]
    assert _sizes("paged", "1K", "2K", **options) == [4096, 8192]
    assert _sizes("paged", "", "", factor=2, page_len="512", pages=3) == [1536]


def test_plans_bound_volume_and_slots() -> None:
    job = Job("write", 16 << 20, 1, 0, 16, True)
    plan = job.plan(1, 0)
    assert plan.n == 16
    assert plan.slots == 4
    assert Plan(64, 5, 16).slots == 5
    assert Plan(1 << 30, 5, 16).slots == 1
    assert Job("imm", 64, 1, 7, 1, True).plan(1, 0).n == 7
    with pytest.raises(BackendError, match="at most 100"):
        Job("sendrecv", 101, 1, 0, 1, True).plan(1, 100)


def test_rows_take_medians_over_rounds_and_add_up_wrong_bytes() -> None:
    job = Job("write", 1000, 1, 10, 4, True)
    for nanoseconds, wrong in ((1000, 0), (3000, 2), (2000, 1)):
        times = array("q", [nanoseconds] * 10)
        job.samples.append(Sample(times, times, elapsed_ns=nanoseconds * 10, operations=10, wrong=wrong))
    job.limits = [limits.Limit("stream", 1e9, "test"), limits.Limit("stream", None, "test")]
    row = bench_run._row(job)
    assert (row.time_p50_us, row.post_p99_us, row.wrong_bytes) == (2.0, 2.0, 3)
    assert row.gbyte_s == pytest.approx(0.5)
    assert row.gbit_s == pytest.approx(4.0)
    assert row.mops == pytest.approx(0.5)
    assert row.limit_percent == pytest.approx(50)
    assert bench_run._verdict([job]).startswith("WRONG: 3 bytes")


def test_a_row_without_figures_is_empty_not_zero() -> None:
    job = Job("imm", 64, 1, 10, 4, False)
    job.samples.append(Sample())
    row = bench_run._row(job)
    assert (row.time_p50_us, row.gbit_s, row.limit_percent, row.wrong_bytes) == (None, None, None, None)
    assert "not compared" in bench_run._verdict([job])


@pytest.mark.parametrize("measure", [limits.stream, limits.cma])
def test_limits_are_measured_and_say_how(measure: Any) -> None:
    limit = measure(1 << 20, 2, 0.02)
    assert limit.bytes_per_s is None or limit.bytes_per_s > 1e8
    assert limit.how
    assert limit.name == measure.__name__


def test_percentiles() -> None:
    assert bench_run.percentile(array("q"), 0.5) is None
    assert bench_run.percentile(array("q", range(0, 101_000, 1000)), 0.99) == pytest.approx(99.0)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A client and a serving thread in this process."""
    monkeypatch.setenv("FABRIC_LOCAL_DIR", str(tmp_path / "d"))
    ended = threading.Event()
    with open_engine(name="there") as there:
        thread = threading.Thread(target=Server(there).run, args=(ended.is_set,))
        thread.start()
        try:
            with open_engine(name="here") as here, Session(here, 5.0) as session:
                link = Link(session, there.address, 4096, "engine")
                yield link
                link.close()
        finally:
            ended.set()
            thread.join(10)


def test_a_byte_that_is_wrong_is_found(link: Link) -> None:
    plan = Plan(size=1024, n=4, window=4)
    assert bench_ops.write(link, plan).wrong == 0
    bench_ops._prepare(link, plan, 4096)
    assert (bench_ops._verify(link, plan, 4096) or 0) > 4000  # cleared, and nothing written yet
    link.buffer.view[1000] ^= 1
    link.engine.submit_single_write(4096, None, (link.buffer.handle, 0), (link.remote, 0)).wait()
    assert bench_ops._verify(link, plan, 4096) == 1


def test_pages_at_a_wrong_place_are_found(link: Link) -> None:
    plan = Plan(size=4096, n=1, window=1, pages=4)
    assert bench_ops.paged(link, plan).wrong == 0
    bench_ops._prepare(link, plan, 4096)
    link.engine.submit_single_write(4096, None, (link.buffer.handle, 0), (link.remote, 0)).wait()
    assert (bench_ops._verify(link, plan, 4096, page=1024, pages=4, span=4096) or 0) > 1024


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"kind": "nonsense"}, "unknown request 'nonsense'"),
        ({"kind": "open", "bytes": 1 << 50}, "from 1 to"),
        ({"kind": "open", "bytes": float("inf")}, "from 1 to"),
        ({"kind": "clear", "bytes": 10**15}, "from 1 to 4096"),
        ({"kind": "check", "bytes": 4096, "seed": 1, "page": 1024, "pages": 10**12, "span": 4096}, "from 1 to 4"),
        ({"kind": "check", "bytes": 10**15, "seed": 1}, "from 1 to 4096"),
        ({"kind": "echo", "bytes": 4097}, "from 1 to 4096"),
        ({"kind": "messages", "bytes": 0, "seed": 1}, "from 1 to"),
        ({"kind": "messages", "bytes": 10**15, "seed": 1}, "from 1 to"),
        ({"kind": "count", "n": float("inf")}, "from 1 to"),
        ({"kind": "open", "bytes": "many"}, "ValueError"),
        ({"kind": "open", "bytes": 10, "desc": "00ff"}, "ProtocolError"),
        ({"kind": "check"}, "KeyError"),
    ],
)
def test_a_server_answers_bad_requests_and_goes_on(link: Link, request_: dict[str, Any], reason: str) -> None:
    fields = {key: value for key, value in request_.items() if key != "kind"}
    with pytest.raises(ProtocolError, match=reason):
        link.ask(request_["kind"], "never", **fields)
    assert link.ask("close", "closed")["kind"] == "closed"


def test_who_leaves_in_the_middle_keeps_nobody_waiting(link: Link, tmp_path: Path) -> None:
    """Ctrl-C in a ping, or its process killed: the next one is answered at once, not after the echo's patience."""
    code = (
        "import os, sys\n"
        "from fabric_core.cli.bench_ops import Link\n"
        "from fabric_core.cli.session import Session, open_engine, parse_address\n"
        "with open_engine() as engine, Session(engine, 5.0) as session:\n"
        "    link = Link(session, parse_address(sys.argv[1]), 4096, 'engine')\n"
        "    link.ask('echo', 'echoing', bytes=8)\n"
        "    if sys.argv[2] == 'leaves':\n"
        "        session.leave(link.peer)\n"
        "    print('gone', flush=True)\n"
        "    os._exit(0)\n"
    )
    for how in ("leaves", "dies"):
        words = [sys.executable, "-c", code, str(link.peer), how]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "gone\n", done.stderr
        assert link.ask("clear", "cleared", bytes=16)  # within 5 s, half of an echo's patience


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "extra"),
    [
        ("write", ["-b", "1K", "-e", "64K", "-f", "8"]),
        ("write", ["-b", "100K", "--memory", "user", "--nics", "2", "--peer-nics", "3"]),
        ("paged", ["--page-len", "1000", "--pages", "9", "--nics", "2"]),
        ("imm", ["-b", "64"]),
        ("sendrecv", ["-b", "1", "-e", "4K", "-f", "64"]),
        ("submit", []),
    ],
)
def test_bench_moves_the_right_bytes(op: str, extra: list[str], tmp_path: Path) -> None:
    done = fabric("bench", op, *extra, "-n", "40", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["schema"] == "fabric.bench/1"
    data = content["data"]
    keys = ["machine", "backend", "address", "nics", "peer_nics", "parameters", "rows", "verdict"]
    assert list(data) == keys
    assert data["verdict"].startswith("OK")
    for row in data["rows"]:
        assert list(row) == ROW_KEYS
        assert row["wrong_bytes"] == 0
        assert row["n"] == 40
        assert row["post_p50_us"] > 0
    if "--peer-nics" in extra:
        assert (data["nics"], data["peer_nics"]) == (2, 3)


def test_1_wrong_bytes_are_a_bad_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("write", 64, 1, 1, 1, True, samples=[Sample(wrong=3)])
    result = Bench(
        machine={},
        backend="local",
        address="local:x",
        nics=1,
        peer_nics=1,
        parameters={},
        rows=[bench_run._row(job)],
        verdict=bench_run._verdict([job]),
    )
    monkeypatch.setattr(bench_run, "run", lambda *_, **__: result)
    ran = CliRunner().invoke(build(["bench"]), ["bench", "write"])
    assert ran.exit_code == 1
    assert "WRONG: 3 bytes" in ran.stdout
    content = json.loads(CliRunner().invoke(build(["bench"]), ["bench", "write", "--json"]).stdout)
    assert content["problems"] == ["write 64: 3 bytes are wrong"]


def test_1_lost_pings_are_a_bad_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = dict.fromkeys(("connect_us", "min_us", "p50_us", "p99_us", "max_us"), None)
    result = Ping(address="local:x", local_nics=["a"], remote_nics=["b"], bytes=64, sent=3, lost=3, **figures)
    monkeypatch.setattr(ping, "measure", lambda *_, **__: result)
    ran = CliRunner().invoke(build(["ping"]), ["ping", "local:x"])
    assert ran.exit_code == 1
    assert "a -> b" in ran.stdout


def test_bench_csv_and_rounds(tmp_path: Path) -> None:
    done = fabric("bench", "write", "-b", "64K", "-n", "20", "--rounds", "2", "--csv", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert list(row) == ROW_KEYS
    assert row["wrong_bytes"] == "0"


def test_bench_table_has_a_header_and_a_verdict(tmp_path: Path) -> None:
    done = fabric("bench", "write", "-b", "64K", "-n", "20", "--no-verify", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["versions", "machine", "polling", "backend", "run"]
    assert "data were not compared" in lines[-1]


def test_ping_and_bench_with_a_serving_process(tmp_path: Path) -> None:
    env = {**os.environ, "FABRIC_LOCAL_DIR": str(tmp_path / "d")}
    command = [sys.executable, "-m", "fabric_core.cli", "bench", "--serve", "two", "--nics", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as child:
        assert child.stdout is not None
        try:
            address = child.stdout.readline().strip()
            assert address.startswith("local:two")
            for target in (address, "local:two", "two"):
                done = fabric("ping", target, "-n", "5", "-i", "0", "--json", folder=tmp_path)
                assert done.returncode == 0, done.stderr
                data = json.loads(done.stdout)["data"]
                assert (data["sent"], data["lost"], len(data["remote_nics"])) == (5, 0, 2)
                assert data["min_us"] <= data["p50_us"] <= data["p99_us"] <= data["max_us"]
            text = fabric("ping", address, "-n", "3", "-i", "0", folder=tmp_path).stdout
            assert "p50(us)" in text
            done = fabric("bench", "imm", "-n", "30", "--connect", address, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "OK: all data" in done.stdout
            checks = json.loads(fabric("doctor", "--peer", address, "--json", folder=tmp_path).stdout)["data"]["checks"]
            (found,) = [check for check in checks if check["name"] == f"peer {address}"]
            assert (found["status"], found["found"][:17]) == ("OK", "20 of 20 answered")
        finally:
            child.kill()


def test_4_the_peer_dies_in_the_middle(tmp_path: Path) -> None:
    env = {**os.environ, "FABRIC_LOCAL_DIR": str(tmp_path / "d")}
    command = [sys.executable, "-m", "fabric_core.cli", "bench", "write", "-b", "64K", "-n", "10000000", "--no-verify"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as parent:
        try:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            deadline = time.monotonic() + 20
            while not children.read_text().split():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(2)
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
            _, told = parent.communicate(timeout=40)
        finally:
            parent.kill()
    assert parent.returncode == 4, told
    assert "local:bench-" in told
    assert "Traceback" not in told


def test_the_second_process_ends_with_the_first(tmp_path: Path) -> None:
    env = {**os.environ, "FABRIC_LOCAL_DIR": str(tmp_path / "d")}
    command = [sys.executable, "-m", "fabric_core.cli.bench_peer", "--name", "orphan"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["address"].startswith("local:orphan")
        child.stdin.close()
        assert child.wait(10) == 0
