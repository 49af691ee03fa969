"""Which lines of the C engine do C tests and simulated seeds run, which branches of fabric_core does pytest? (R17)

C: gcc --coverage over fabric-core's C sources, every tests/c/test_*.c, and seeds of the simulator; counted by gcov.
What only Python reaches (door.c) is not part of it. Python: coverage.py around pytest of fabric-core, subprocesses
included.

usage: measure_coverage.py [c] [python] [--seeds N] [--missing]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages" / "fabric-core"
NATIVE = CORE / "src" / "fabric_core" / "native"
TESTS = CORE / "tests" / "c"
WORK = ROOT / "build" / "coverage"
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "--coverage", "-fprofile-update=atomic"]
INCLUDE = [f"-I{NATIVE / 'include'}", f"-I{NATIVE}", f"-I{TESTS}"]
TEST_SECONDS = 300


def run(
    command: list[str], seconds: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it did; a failure is an exception with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, cwd=WORK, env=env)
    if done.returncode not in (0, 77):
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done


def build_c(compiler: str) -> list[Path]:
    """Compile the engine once and every C test; return the programs."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    listed = subprocess.run(
        [sys.executable, str(NATIVE / "build_native.py"), "--print-sources"], capture_output=True, text=True, check=True
    )
    sources = listed.stdout.split()
    objects = [WORK / f"{'_'.join(Path(s).relative_to(NATIVE).parts)}.o" for s in sources]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: run([compiler, *FLAGS, *INCLUDE, "-c", pair[0], "-o", str(pair[1])]),
                      zip(sources, objects, strict=True)))  # fmt: skip
    mains = sorted(TESTS.glob("test_*.c"))
    if (NATIVE / "sim" / "cdef_sim.h").exists():
        mains.append(ROOT / "tools" / "planted" / "hunt.c")
    programs = [WORK / main.stem for main in mains]
    for main, program in zip(mains, programs, strict=True):
        plain = [flag for flag in FLAGS if "coverage" not in flag]
        run([compiler, *plain, *INCLUDE, "-c", str(main), "-o", f"{program}.main.o"])
        run([compiler, *FLAGS, f"{program}.main.o", *map(str, objects), "-o", str(program), "-pthread", "-ldl", "-lrt"])
    return programs


def count_c() -> dict[str, tuple[set[int], set[int]]]:
    """Return for each source or header: its lines, and those that ran."""
    lines: dict[str, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for notes in sorted(WORK.glob("*.gcno")):
        told = run(["gcov", "--json-format", "--stdout", str(notes)]).stdout
        for report in filter(None, told.splitlines()):
            found: dict[str, Any] = json.loads(report)
            for file in found["files"]:
                path = Path(found["current_working_directory"], file["file"]).resolve()
                if not path.is_relative_to(NATIVE):
                    continue
                there, ran = lines[str(path.relative_to(NATIVE))]
                for entry in file["lines"]:
                    there.add(entry["line_number"])
                    if entry["count"]:
                        ran.add(entry["line_number"])
    return lines


def group_of(name: str) -> str:
    """The part of the engine a file belongs to: its folder, or `engine`."""
    head = name.split("/", 1)[0]
    return "engine" if head.endswith((".c", ".h")) or head == "include" else head


def measure_c(compiler: str, seeds: int, missing: bool) -> None:
    """Print the C table."""
    for program in build_c(compiler):
        try:
            run([str(program), "1", str(seeds)] if program.name == "hunt" else [str(program)], TEST_SECONDS)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # what ran, ran; failing is the tests' business
            print(f"{program.name}: {str(error).splitlines()[0]}", file=sys.stderr)
    files = count_c()
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, (there, ran) in sorted(files.items()):
        if name.endswith(".c"):
            groups[group_of(name)][0] += len(there)
            groups[group_of(name)][1] += len(ran)
        print(f"  {name:28} {len(ran):5} of {len(there):5} lines {100 * len(ran) / len(there):6.1f} %")
        if missing and there - ran:
            print(f"    not run: {' '.join(map(str, sorted(there - ran)))}")
    total = [sum(column) for column in zip(*groups.values(), strict=True)]
    for name, (there, ran) in [*sorted(groups.items()), ("all", total)]:
        print(f"C lines, {name:19} {ran:5} of {there:5}       {100 * ran / there:6.1f} %")


def measure_python(missing: bool, tests: list[str]) -> None:
    """Print what coverage.py says of fabric_core."""
    env = {**os.environ, "COVERAGE_FILE": str(ROOT / "build" / "coverage.data")}
    base = [sys.executable, "-m", "coverage"]
    for old in (ROOT / "build").glob("coverage.data*"):
        old.unlink()
    subprocess.run(
        [*base, "run", "-m", "pytest", "-q", *(tests or [str(CORE / "tests")])], cwd=ROOT, env=env, check=False
    )
    subprocess.run([*base, "combine", "-q"], cwd=ROOT, env=env, check=True)
    report = [*base, "report", "--include=*/fabric_core/*", "--omit=*/native/*"]
    subprocess.run([*report, *([] if missing else ["--skip-covered"])], cwd=ROOT, env=env, check=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["c", "python", []], help="default: both")
    parser.add_argument("--seeds", type=int, default=100, help="simulated seeds (default 100)")
    parser.add_argument("--missing", action="store_true", help="print the numbers of the lines that did not run")
    parser.add_argument("--tests", action="append", default=[], help="for pytest instead of all of fabric-core's")
    options = parser.parse_args()
    what = options.what or ["c", "python"]
    if "c" in what:
        measure_c(os.environ.get("CC", "gcc"), options.seeds, options.missing)
    if "python" in what:
        measure_python(options.missing, options.tests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
