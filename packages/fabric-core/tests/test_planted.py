"""R13: the tests bite. Bugs planted into copies of the engine are found; the whole table is `make planted`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
if not (TOOLS / "planted" / "bugs.py").exists() or not (shutil.which("cc") or shutil.which("gcc")):
    pytest.skip("needs the repository and a C compiler", allow_module_level=True)
sys.path.append(str(TOOLS))

from planted.bugs import BUGS  # noqa: E402
from planted.hunters import hunt  # noqa: E402
from planted.table import Bug, OutOfDate, edit  # noqa: E402
from planted.workshop import NATIVE, TESTS, Workshop, edited  # noqa: E402

# Quick ones of each kind of hunter; those of the simulator are found in its first few seeds.
HANDFUL = [
    "request published without a release",
    "stale handle accepted",
    "fires one write early",
    "wrong denominator on the wire",
    "ends under the NIC's hands",
    "event of a transfer lost",
    "final immediates before the payload",
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: re.sub(r"\W+", "-", bug.name))
def test_the_table_fits_the_engine(bug: Bug) -> None:
    assert edited(bug, (NATIVE / bug.file).read_text()) != (NATIVE / bug.file).read_text()
    assert bug.hunter == "sim" or (TESTS / f"{bug.hunter.split(':')[0]}.c").exists()


def test_the_table_is_what_was_promised() -> None:
    assert len(BUGS) >= 24
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {bug.name for bug in BUGS} >= set(HANDFUL)
    assert {bug.contract for bug in BUGS} >= {f"C{n}" for n in (1, 3, 4, 5, 6, 7, 8, 10, 11)}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("bug", [b for b in BUGS if b.name in HANDFUL], ids=lambda bug: re.sub(r"\W+", "-", bug.name))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    find = hunt(Workshop(ROOT / "build" / "planted"), bug, seeds=200)
    assert find.found, f"{bug.name} ({bug.breaks}) was not found by {find.by} in {find.after}"


def test_what_is_no_bug_is_not_found(tmp_path: Path) -> None:
    same = "pthread_mutex_lock(&pool->grow);"
    nothing = Bug("nothing", "C1", "pool.c", edit(same, f"{same} /* still */"), "nothing", "test_pool:plain")
    find = hunt(Workshop(tmp_path), nothing, seeds=1)
    assert not find.found, find.words


def test_a_table_that_is_out_of_date_says_so() -> None:
    bug = Bug("old", "C1", "pool.c", edit("this text was never there"), "nothing", "test_pool:plain")
    with pytest.raises(OutOfDate, match=r"old: the table is out of date: this occurs 0 times in pool\.c"):
        edited(bug, (NATIVE / "pool.c").read_text())
