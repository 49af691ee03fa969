"""The deterministic simulator from Python: expand a seed into options, run seeds, many at a time in child processes.

A run is one call into C (`native/sim/`): real engines over simulated NICs under virtual time. The same seed with the
same options gives the same run, shown by a 64-bit hash over its events. A seed is run in a child process where a crash
of the engine must not take the caller along: a child that dies or does not answer in time is a violation with its seed.

`python -m fabric_core.sim` is such a child: one JSON object per line in, one per line out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from queue import Queue
from typing import IO, Any

from fabric_core.errors import ConfigError

__all__ = ["Child", "Option", "Result", "expand", "options", "run", "run_many"]

#: A seed that has not ended after so many seconds of real time hangs.
SEED_SECONDS = 300.0

_TRACE_BYTES = 1 << 16
_COUNTS = (
    "transfers",
    "done",
    "failed",
    "cancelled",
    "fired",
    "messages",
    "writes",
    "bytes",
    "requests",
    "imms",
    "strays",
    "events",
    "steps",
    "lost_peers",
    "virtual_ns",
)


@dataclass(frozen=True, slots=True)
class Option:
    """One number that shapes a run. Times are nanoseconds; `_permille` and `_percent` are chances."""

    name: str
    help: str
    calm: int  #: the value that makes no trouble
    lo: int
    hi: int
    calm_percent: int  #: of the seeds that leave it calm


@dataclass(slots=True)
class Result:
    """What came of one seed."""

    seed: int
    hash: int = 0  #: over all events in their order
    violation: str = ""  #: checker, virtual time and what; "" if nothing was violated
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    trace: str = ""  #: the last events, if asked for


def options() -> list[Option]:
    """Return the table of all options."""
    from fabric_core.native_lib import ffi, lib

    rows = (lib.fab_sim_option_at(i) for i in range(lib.fab_sim_option_count()))
    return [
        Option(ffi.string(o.name).decode(), ffi.string(o.help).decode(), o.calm, o.lo, o.hi, o.calm_percent)
        for o in rows
    ]


def expand(seed: int, changes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the value of every option for a seed, with `changes` on top. Raises ConfigError for an unknown name."""
    from fabric_core.native_lib import ffi, lib

    values = ffi.new("uint64_t[]", lib.fab_sim_option_count())
    lib.fab_sim_expand(seed, values)
    table = {option.name: int(value) for option, value in zip(options(), values, strict=True)}
    for name, value in (changes or {}).items():
        if name not in table:
            raise ConfigError(f"the simulator has no option {name!r}; `fabric sim options` lists them")
        if not 0 <= value < 1 << 64:
            raise ConfigError(f"option {name}: {value} is no number of 64 bits without a sign")
        table[name] = value
    return table


def run(seed: int, changes: Mapping[str, int] | None = None, *, trace: bool = False) -> Result:
    """Run one seed in this process. Raises ConfigError for options that make no sense together."""
    from fabric_core.native_lib import ffi, lib, text

    values = ffi.new("uint64_t[]", list(expand(seed, changes).values()))
    report = ffi.new("fab_sim_report *")
    lines = ffi.new("char[]", _TRACE_BYTES) if trace else ffi.NULL
    if lib.fab_sim_run(seed, values, report, lines, _TRACE_BYTES) < 0:
        raise ConfigError("the simulator cannot run with these options; `fabric sim options` shows their ranges")
    faults: dict[str, int] = {}
    for i in range(len(report.faults)):
        name = lib.fab_sim_fault_name(i)
        if name == ffi.NULL:
            break
        if report.faults[i]:
            faults[text(name)] = int(report.faults[i])
    return Result(
        seed=seed,
        hash=int(report.hash),
        violation=text(report.violation) if report.violated else "",
        counts={name: int(getattr(report, name)) for name in _COUNTS},
        faults=faults,
        trace=text(lines) if trace else "",
    )


# ---- children --------------------------------------------------------------------------------------------------------


class Child:
    """A process that runs seeds; used by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, seed: int, changes: Mapping[str, int], *, trace: bool = False, times: int = 1) -> list[Result]:
        """Run a seed `times` times; a child that dies or hangs gives a violation instead."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fabric_core.sim"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONFAULTHANDLER": ""},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        order = {"seed": seed, "set": dict(changes), "trace": trace}
        results = []
        for _ in range(times):
            try:
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
                answer = _line(process.stdout, SEED_SECONDS)
            except BrokenPipeError:
                answer = b""
            if answer is None:
                process.kill()
                self._bury()
                results.append(Result(seed, violation=f"hang: not finished after {SEED_SECONDS:g} s"))
                return results
            if not answer:
                results.append(Result(seed, violation=self._bury()))
                return results
            reply = json.loads(answer)
            if "error" in reply:
                raise ConfigError(reply["error"])
            results.append(Result(**reply))
        return results

    def _bury(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        _, err = process.communicate()
        code = process.returncode
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = err.decode(errors="replace").strip()
        return f"crash: the engine ended its process ({name})" + (f": {said[-300:]}" if said else "")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.communicate()


def _line(stream: IO[bytes], seconds: float) -> bytes | None:
    """Return a line, b"" at the end, None when the time is over. The child writes a line in one piece."""
    until = time.monotonic() + seconds
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            return b""
        data += part
    return data


def run_many(seeds: Iterable[int], changes: Mapping[str, int], jobs: int) -> Iterator[Result]:
    """Run seeds in `jobs` child processes and yield results as they come; stop early by closing the iterator."""
    todo = iter(seeds)
    lock = threading.Lock()
    results: Queue[Result | Exception | None] = Queue()
    stop = threading.Event()

    def work() -> None:
        child = Child()
        try:
            while not stop.is_set():
                with lock:
                    seed = next(todo, None)
                if seed is None:
                    break
                for result in child.run(seed, changes):
                    results.put(result)
        except Exception as error:
            results.put(error)
        finally:
            child.close()
            results.put(None)

    threads = [threading.Thread(target=work, name=f"fabric-sim-{i}", daemon=True) for i in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        left = jobs
        while left:
            item = results.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _end_with_parent() -> None:
    """Die when the thread that started us ends: a seed may run for minutes, and nobody is left to read of it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


def _serve(orders: IO[str], out: IO[str]) -> None:
    _end_with_parent()
    for line in orders:
        order: dict[str, Any] = json.loads(line)
        try:
            reply = asdict(run(order["seed"], order["set"], trace=order["trace"]))
        except ConfigError as error:
            reply = {"error": str(error)}
        out.write(json.dumps(reply) + "\n")
        out.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
