"""Two processes of one host and what joins them: a socket for calls, and a shared page of counters.

The initiator's process is the one that is started; it starts the target with the same script. Run a peer's script to
measure that peer: `python nixl_adapter.py --quick`. Lines of JSON appear on stdout, one per figure.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from adapter import PING, PONG, SMALL, Adapter, Missing, Span

__all__ = [
    "CALLS",
    "ECHO",
    "SEEN",
    "STOP",
    "Link",
    "Options",
    "Stuck",
    "emit",
    "fence",
    "main",
    "orderly",
    "parse",
    "scratch",
]

REGION = 64 << 20
SEEN, CALLS, STOP, ECHO = 0, 8, 16, 24  #: words of the shared page, each on a cache line of its own
_LIFE_SECONDS = 300  #: of either process, at most


class Stuck(Exception):
    """Something took longer than a step may."""


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    repeats: int
    ops: frozenset[str]
    sizes: frozenset[int] = frozenset()  #: of writes; empty: all
    step_seconds: float = 30.0


class Link:
    """One end of what joins the two processes."""

    def __init__(self, directory: Path, target: bool) -> None:
        socket, page = str(directory / "calls"), directory / "page"
        self.connection: Connection[Any, Any]
        if target:
            deadline = time.monotonic() + 20
            while not os.path.exists(socket):
                if time.monotonic() > deadline:
                    raise Stuck("the initiator did not appear")
                time.sleep(0.01)
            self.connection = Client(socket, "AF_UNIX")
        else:
            page.write_bytes(bytes(mmap.PAGESIZE))
            with Listener(socket, "AF_UNIX") as listener:
                self.connection = listener.accept()
        with page.open("r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    def swap(self, mine: Any) -> Any:
        """Hand over an object for the other side's."""
        self.connection.send(mine)
        return self.connection.recv()

    def call(self, method: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """Have the target call a method: `crc`, or one of its adapter's."""
        self.connection.send((method, arguments))
        self.words[CALLS] += 1
        if not self.connection.poll(seconds):
            raise Stuck(f"{method}: no answer from the target")
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def crc(memory: Any, spans: Sequence[Span]) -> int:
    """Return one checksum over all bytes of the spans."""
    view, value = memoryview(memory), 0
    for offset, nbytes in spans:
        value = zlib.crc32(view[offset : offset + nbytes], value)
    return value


def _serve(adapter: Adapter, link: Link) -> None:
    """Run the target: look for notifications, and now and then for a call."""
    words, poll, memory = link.words, adapter.poll, memoryview(adapter.memory)
    seen = calls = idle = 0
    parent = os.getppid()
    while not words[STOP]:
        new = poll()
        if new:
            seen += new
            if words[ECHO]:
                memory[PONG : PONG + SMALL] = memory[PING : PING + SMALL]
                adapter.write_notify(PONG, SMALL)
            words[SEEN] = seen
            continue
        if adapter.threaded:
            if words[ECHO]:
                os.sched_yield()
            else:
                time.sleep(20e-6)
        idle += 1
        if idle & 0xFFFF == 0 and os.getppid() != parent:
            sys.exit("the initiator is gone")
        if words[CALLS] != calls:
            calls += 1
            method, arguments = link.connection.recv()
            answer: Any
            try:
                answer = crc(memory, *arguments) if method == "crc" else getattr(adapter, method)(*arguments)
            except Exception as error:
                answer = RuntimeError(f"target: {error!r}")
            link.connection.send(answer)


def emit(peer: str, op: str, size: int, values: Sequence[float], unit: str, **more: Any) -> None:
    """Print a figure. `p99` is the bad end: the slowest times, the lowest rates."""
    rate = unit.endswith("/s")
    ordered = sorted(values, reverse=rate)
    figure = {
        "peer": peer,
        "op": op,
        "size": size,
        "p50": _short(ordered[len(ordered) // 2]),
        "p99": _short(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]),
        "best": _short(ordered[0]),
        "unit": unit,
        "n": len(ordered),
    }
    print(json.dumps(figure | more), flush=True)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def fence() -> None:
    """Give this session's processes the processors before those of others, where that is allowed.

    The kernel shares them out between sessions first; nice values only count within one. `run.py` starts each
    measurement in a session of its own and asks for this by BENCH_FENCE.
    """
    if os.environ.get("BENCH_FENCE"):
        try:
            Path("/proc/self/autogroup").write_text("-20")
        except OSError:
            pass  # not our machine, or no such feature: `others` in the results tells


def orderly() -> None:
    """Have SIGTERM end the process by way of its finally blocks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def scratch() -> Path:
    """Make a directory for the shared page and the socket, in memory if there is such a place."""
    memory = "/dev/shm"
    return Path(tempfile.mkdtemp(prefix="peers-", dir=memory if os.path.isdir(memory) else None))


def parse(variants: Sequence[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure one library between two processes of this host.")
    parser.add_argument("--quick", action="store_true", help="fewer bytes and repeats: does it run, are the data right")
    parser.add_argument("--repeats", type=int, default=0, help="bursts per bandwidth figure (5; quick: 2)")
    parser.add_argument("--ops", default="write,paged,ping,submit,register")
    parser.add_argument("--sizes", default="", help="bytes of the writes that are measured: 1048576,67108864")
    if variants:
        parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main(arguments: argparse.Namespace, make: Callable[[], Adapter], started: bool = False) -> None:
    """Be one of the two processes. `started`: somebody else (mpiexec) starts both, in the given directory."""
    fence()
    orderly()
    signal.alarm(_LIFE_SECONDS)
    directory: Path = arguments.directory or scratch()
    options = Options(
        arguments.quick,
        arguments.repeats or (2 if arguments.quick else 5),
        frozenset(arguments.ops.split(",")),
        frozenset(int(size) for size in arguments.sizes.split(",") if size),
    )
    child = None
    status = 0
    if not arguments.target and not started:
        child = subprocess.Popen([sys.executable, *sys.argv, "--target", "--directory", str(directory)])
    link = None
    adapter = None
    try:
        link = Link(directory, arguments.target)
        adapter = make()
        begin = time.perf_counter()
        adapter.connect(link.swap(adapter.open("target" if arguments.target else "initiator", REGION)))
        link.swap(None)
        if arguments.target:
            _serve(adapter, link)
        else:
            took = (time.perf_counter() - begin) * 1e3
            emit(adapter.name, "connect", 0, [took], "ms", version=version(adapter.distribution))
            status = _measure(adapter, link, options)
            link.words[STOP] = 1
        if started:
            adapter.close()
    except Exception as error:
        traceback.print_exc()
        name = adapter.name if adapter else "?"
        print(json.dumps({"peer": name, "op": "run", "size": 0, "error": repr(error)[:300]}), flush=True)
        status = 1
    finally:
        if child:
            _end(child, link)
        if not arguments.target:
            shutil.rmtree(directory, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
    # How a library takes itself down is not what is measured here. MPI's, though, must run.
    sys.exit(status) if started else os._exit(status)


def _end(child: subprocess.Popen[bytes], link: Link | None) -> None:
    if link:
        link.words[STOP] = 1
    else:
        child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _measure(adapter: Adapter, link: Link, options: Options) -> int:
    from figures import Figures

    figures = Figures(adapter, link, options)
    for op in ("write", "paged", "ping", "submit", "register"):
        if op not in options.ops:
            continue
        try:
            getattr(figures, op)()
        except Missing as missing:
            print(json.dumps({"peer": adapter.name, "op": op, "size": 0, "missing": str(missing)}), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"peer": adapter.name, "op": op, "size": 0, "error": repr(error)[:300]}), flush=True)
            return 1
    return 0 if figures.verified else 1
