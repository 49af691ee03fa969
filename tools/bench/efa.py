"""The libfabric backend beside a plain C program on the same provider (tools/bench/fi_plain.c), in turn, in one run.

    python tools/bench/efa.py --provider net [--node 127.0.0.1] [--library PATH] [--rounds 7]
    python tools/bench/efa.py --provider shm --node ''
    python tools/bench/efa.py --provider net --post       our own part of posting a write

All do the same: one process writes COUNT times SIZE bytes, each with an immediate, into memory of another process; the
clock runs from the first post until the other side has seen all of them and said so. All poll, as the plain program
does. Three columns: the plain program, the engine over this backend driven from C (bench_efa.c of the package's tests),
and the same through Python. Printed per shape: the median rate of each, with the lowest and the highest, the ratio of
the medians to the plain program's, and what one core copies. Data are compared after a first round, outside the
clock. Exit code 1: data arrived wrong. No exit code depends on a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_core import Expectation, MrDesc, Pages, Transfer, TransferEngine
from fabric_core.native_lib import lib

HERE = Path(__file__).resolve().parent
SPAN = 64 << 20
DEADLINE = 120.0
WARM, TAKEN = 3, 5  #: rounds of each turn: TCP takes a while to find its pace


@dataclass(frozen=True)
class Shape:
    """What is written: `count` writes of `size` bytes, `window` in flight; 0: one paged write of `count` pages."""

    name: str
    size: int
    count: int
    window: int


SHAPES = (
    Shape("64 KiB", 64 << 10, 2000, 32),
    Shape("256 KiB", 256 << 10, 800, 32),
    Shape("1 MiB", 1 << 20, 200, 16),
    Shape("4 MiB", 4 << 20, 64, 8),
    Shape("16 MiB", 16 << 20, 16, 4),
    Shape("4096 x 1 KiB pages", 1024, 4096, 0),
    Shape("1024 x 32 KiB pages", 32 << 10, 1024, 0),
)


def finish(operation: Transfer | Expectation) -> None:
    """Poll until it has ended, as the plain program does. Raises what it failed with."""
    while not operation.done:
        pass
    operation.wait(DEADLINE)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)


def serve(nics: int) -> None:
    """The other process: expects what it is told to, and says when it is there."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with TransferEngine.open("cpu", "efa", nics=nics) as engine:
        memory = engine.empty(SPAN)
        _handle, desc = engine.reg_mr(memory)
        imm = engine.alloc_imm()
        answers.write(json.dumps({"desc": desc.to_bytes().hex(), "imm": imm}) + "\n")
        for line in sys.stdin:
            count = int(line)
            if count < 0:
                wrong = sum(byte != 0x5A for byte in bytes(memory)[:-count])
                answers.write(f"{wrong}\n")
                memoryview(memory)[:] = bytes(SPAN)
                continue
            arrived = engine.expect_imm_count(imm, count, timeout=DEADLINE)
            answers.write("ready\n")
            finish(arrived)
            answers.write("seen\n")


class Ours:
    """fabric over the backend."""

    def __init__(self, nics: int) -> None:
        self.engine = TransferEngine.open("cpu", "efa", nics=nics)
        self.peer = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", "--nics", str(nics)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        hello = json.loads(self._line())
        self.desc, self.imm = MrDesc.from_bytes(bytes.fromhex(hello["desc"])), hello["imm"]
        self.memory = self.engine.empty(SPAN)
        memoryview(self.memory)[:] = b"\x5a" * SPAN
        self.handle, _ = self.engine.reg_mr(self.memory)

    def _line(self) -> str:
        assert self.peer.stdout is not None
        line = self.peer.stdout.readline()
        if not line:
            sys.exit("the other process ended")
        return line

    def _tell(self, number: int) -> None:
        assert self.peer.stdin is not None
        self.peer.stdin.write(f"{number}\n")

    def round(self, shape: Shape) -> float:
        """Seconds of one round."""
        self._tell(shape.count)
        self._line()
        begin = time.perf_counter()
        if not shape.window:
            pages = Pages(list(range(shape.count)), shape.size)
            finish(
                self.engine.submit_paged_writes(
                    shape.size, self.imm, (self.handle, pages), (self.desc, pages), timeout=DEADLINE
                )
            )
        else:
            places = SPAN // shape.size
            flying: deque[Transfer] = deque()
            for k in range(shape.count):
                at = k % places * shape.size
                if len(flying) == shape.window:
                    finish(flying.popleft())
                flying.append(
                    self.engine.submit_single_write(
                        shape.size, self.imm, (self.handle, at), (self.desc, at), timeout=DEADLINE
                    )
                )
            for one in flying:
                finish(one)
        self._line()
        return time.perf_counter() - begin

    def wrong(self, shape: Shape) -> int:
        """Bytes that are not what was sent, since the last call."""
        self._tell(-min(SPAN, shape.size * shape.count))
        return int(self._line())

    def close(self) -> None:
        assert self.peer.stdin is not None
        self.peer.stdin.close()
        self.peer.wait(20)
        self.engine.close()


def build(folder: str) -> tuple[str, str]:
    """Compile the plain program and ours, unless they are there."""
    compiler = shutil.which("cc") or "gcc"
    plain, engine = f"{folder}/fi_plain", f"{folder}/bench_efa"
    if Path(plain).exists() and Path(engine).exists():
        return plain, engine
    subprocess.run([compiler, "-std=gnu11", "-O2", HERE / "fi_plain.c", "-o", plain, "-ldl"], check=True)
    root = HERE.parents[1] / "packages"
    core, efa = root / "fabric-core/src/fabric_core/native", root / "fabric-efa/src/fabric_efa/native"
    listed = subprocess.run(
        [sys.executable, core / "build_native.py", "--print-sources"], capture_output=True, text=True, check=True
    )
    sources = [f"{root}/fabric-efa/tests/c/bench_efa.c", *listed.stdout.split(), *map(str, sorted(efa.glob("*.c")))]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", f"-I{core}/include", f"-I{core}", f"-I{efa}", "-pthread"]
    subprocess.run([compiler, *flags, *sources, "-o", engine, "-ldl", "-lrt"], check=True)
    return plain, engine


def where(options: argparse.Namespace) -> list[str]:
    return [options.library or "libfabric.so.1", options.provider, options.node]


def program(path: str, options: argparse.Namespace, shape: Shape) -> list[float]:
    """Seconds of a program's rounds, without the first ones, which connect and warm up."""
    numbers = [str(number) for number in (shape.size, shape.count, shape.window, WARM + TAKEN)]
    command = [path, *where(options), *numbers]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE)
    if ended.returncode == 4:
        sys.exit(f"{shape.name}: wrong data")
    ended.check_returncode()
    return [float(line) for line in ended.stdout.split()[WARM:]]


def show(shape: Shape, took: dict[str, list[float]], wrong: int) -> dict[str, Any]:
    def rate(seconds: float) -> float:
        return shape.count / seconds / 1e3 if not shape.window else shape.size * shape.count / seconds / 1e9

    unit = "k pages/s" if not shape.window else "GB/s"
    rates = {name: sorted(map(rate, seconds)) for name, seconds in took.items()}
    median = {name: statistics.median(found) for name, found in rates.items()}
    copy = float(lib.fab_limit_stream(shape.size, min(SPAN, shape.size * shape.count), 0.1)) / 1e9
    limit = copy if shape.window else copy * 1e6 / shape.size
    text = f"{shape.name:<20}"
    for name, found in rates.items():
        text += f" {name} {median[name]:8.2f} [{found[0]:.2f}..{found[-1]:.2f}]"
        text += f" x{median[name] / median['plain']:.2f}" if name != "plain" else ""
    print(f"{text} copy {limit:.2f} {unit}", flush=True)
    ratios = {name: median[name] / median["plain"] for name in rates}
    return {"shape": shape.name, "unit": unit, "rates": rates, "ratios": ratios, "limit": limit, "wrong": wrong}


def post(engine: str, options: argparse.Namespace) -> None:
    """Print what posting one write costs us: the provider's calls are replaced by ones that do nothing."""
    for batch in (1, 8, 64):
        words = [engine, *where(options), "post", str(batch)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=True)
        took = sorted(float(line) for line in ended.stdout.split())
        print(f"post, {batch:2} in a call: {statistics.median(took):.0f} ns each [{took[0]:.0f}..{took[-1]:.0f}]")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--node", default="127.0.0.1", help="source address; empty for shm")
    parser.add_argument("--library", default="")
    parser.add_argument("--nics", type=int, default=1, help="of the Python side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--folder", default="", help="build the programs here, or use those that are here")
    parser.add_argument("--post", action="store_true", help="only our own part of posting a write")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.nics)
        return 0
    os.environ["FABRIC_EFA_PROVIDER"] = options.provider
    os.environ["FABRIC_EFA_LIBRARY"] = options.library
    print(f"# {platform.node()} {os.cpu_count()} CPUs, provider {options.provider}, load {os.getloadavg()[0]:.1f}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain, engine = build(options.folder or folder)
        if options.post:
            post(engine, options)
            return 0
        for shape in (shape for shape in SHAPES if options.only in shape.name):
            python = Ours(options.nics)
            took: dict[str, list[float]] = {"plain": [], "engine": [], "python": []}
            python.round(shape)  # connects, and warms up
            wrong = python.wrong(shape)
            for number in range(options.rounds):
                for name in list(took)[:: -1 if number % 2 else 1]:
                    if name == "python":
                        took[name] += [python.round(shape) for _ in range(WARM + TAKEN)][WARM:]
                    else:
                        took[name] += program(plain if name == "plain" else engine, options, shape)
            python.close()
            rows.append(show(shape, took, wrong))
    if options.json:
        print(json.dumps(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
