"""Who may import whom: core imports no other fabric package, the others only core; and `import fabric_core` is light.

The first two are read from the source (every import, also those inside functions); the last one is measured in a fresh
interpreter, because a chain of imports is easily missed by reading.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for path in ROOT.glob("packages/*/src/*") if (path / "__init__.py").is_file())
FABRIC = {path.name for path in SOURCES}

# Must not be loaded by `import fabric_core`.
HEAVY = ("msgspec", "numpy", "pydantic", "rich", "torch", "typer")


class Import(NamedTuple):
    file: str
    line: int
    module: str
    at_import_time: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def walk(body: list[ast.stmt], *, at_import_time: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement of `body`, with whether it runs when the module is imported."""
    for statement in body:
        yield statement, at_import_time
        if isinstance(statement, ast.If) and is_type_checking(statement.test):
            yield from walk(statement.body, at_import_time=False)
            yield from walk(statement.orelse, at_import_time=at_import_time)
            continue
        deferred = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = at_import_time and not deferred
        for block in ("body", "orelse", "finalbody"):
            yield from walk(getattr(statement, block, []), at_import_time=inner)
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from walk(part.body, at_import_time=inner)


def imports_of(source: str, file: str) -> Iterator[Import]:
    for statement, at_import_time in walk(ast.parse(source, file).body, at_import_time=True):
        if isinstance(statement, ast.Import):
            for name in statement.names:
                yield Import(file, statement.lineno, name.name, at_import_time)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield Import(file, statement.lineno, statement.module, at_import_time)


def imports_in(package: Path) -> list[Import]:
    return [
        found
        for path in sorted(package.rglob("*.py"))
        for found in imports_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def is_below(module: str, *roots: str) -> bool:
    return module.split(".", 1)[0] in roots


def loaded_after(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rsplit("|", 1)[1].strip() for line in lines}


def test_the_scanner_tells_import_time_from_later() -> None:
    source = """
import a
if TYPE_CHECKING:
    import b
else:
    import c
try:
    import d.e
except ImportError:
    from f import g
def later():
    with x:
        import h
class Body:
    import i
match y:
    case 1:
        import j
"""
    seen = {found.module: found.at_import_time for found in imports_of(source, "<test>")}
    assert seen == {"a": True, "b": False, "c": True, "d.e": True, "f": True, "h": False, "i": True, "j": True}


def test_all_packages_are_scanned() -> None:
    assert {"fabric_core", "fabric_efa", "fabric_ibverbs", "fabric_kvcache", "fabric_moe", "fabric_rlweights"} <= FABRIC


@pytest.mark.parametrize("package", SOURCES, ids=lambda path: path.name)
def test_no_package_imports_another_one_except_core(package: Path) -> None:
    allowed = {package.name, "fabric_core"}
    others = sorted(FABRIC - allowed)
    wrong = [str(found) for found in imports_in(package) if is_below(found.module, *others)]
    assert not wrong


@pytest.mark.parametrize("package", SOURCES, ids=lambda path: path.name)
def test_torch_is_never_imported_at_import_time(package: Path) -> None:
    wrong = [str(found) for found in imports_in(package) if found.at_import_time and is_below(found.module, "torch")]
    assert not wrong


def test_core_never_imports_numpy_at_import_time() -> None:
    core = next(path for path in SOURCES if path.name == "fabric_core")
    # The suite's test modules are loaded by pytest alone; the extra `conformance` asks for numpy.
    imports = [found for found in imports_in(core) if "/fabric_core/conformance/test_" not in found.file]
    wrong = [str(found) for found in imports if found.at_import_time and is_below(found.module, "numpy")]
    assert not wrong


def test_importing_core_loads_nothing_heavy() -> None:
    loaded = loaded_after("import fabric_core")
    assert "fabric_core" in loaded
    assert sorted(name for name in loaded if is_below(name, *HEAVY)) == []
