"""docs/reliability.md names tests; each of them must exist, so that the page cannot promise what nobody checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
C_TESTS = ROOT / "packages" / "fabric-core" / "tests" / "c"


def rows() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def python_names() -> set[str]:
    """Names of all test functions and test files in the repository's Python."""
    files = [p for top in ("packages", "tests") for p in (ROOT / top).rglob("test_*.py") if "build" not in p.parts]
    names = {path.name for path in files}
    for path in files:
        names.update(re.findall(r"def (test_\w+)\(", path.read_text()))
    return names


def looks_like_a_c_test(name: str) -> bool:
    """Tests in C are functions, named beside their program."""
    return bool(re.fullmatch(r"test_\w+|[a-z]+_[a-z_]+", name)) and name not in ("max_inflight", "on_error")


def test_every_test_the_page_names_exists() -> None:
    known, missing = python_names(), []
    for row in rows():
        program = None
        for name in re.findall(r"`([^`]+)`", row):
            if name.startswith("c/"):
                program = C_TESTS / name.removeprefix("c/")
                if not program.exists():
                    missing.append(name)
                    program = None
            elif re.fullmatch(r"\w+\.py", name) or name in known:
                if name not in known:
                    missing.append(name)
            elif looks_like_a_c_test(name) and (not program or f"void {name}(" not in program.read_text()):
                missing.append(name)
    assert not missing, f"named on the page, and nowhere to be found: {missing}"


def test_every_promise_has_a_row() -> None:
    named = {match.group(1) for row in rows() if (match := re.match(r"\| (R\d+) \|", row))}
    assert named == {f"R{n}" for n in range(1, 18)}


@pytest.mark.parametrize("word", ["planted", "coverage", "tidy"])
def test_the_commands_of_the_page_are_targets(word: str) -> None:
    assert re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
