"""What must hold for the repository as a whole: one version, complete packages, tidy names, no paths of one machine."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
MAX_LINES = 600
FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "eval", "exec"}

# Absolute paths that exist on one machine only. Allowed: names below /tmp that contain the user's or the process's id.
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(?:work|root|tmp|home/\w+)/[\w.-]+")
MACHINE_PATH_ALLOWED = re.compile(r"/tmp/fab[a-z-]*-(?:<uid>|\{|\$|%[du])")


def load_project(package: Path) -> dict[str, Any]:
    with (package / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def module_name(package: Path) -> str:
    return package.name.replace("-", "_")


def load_module(package: Path) -> ModuleType:
    return importlib.import_module(module_name(package))


def repository_files() -> list[Path]:
    """Files that are, or with the next commit would be, part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_of(path: Path) -> str | None:
    data = path.read_bytes()
    if b"\0" in data:
        return None
    return data.decode("utf-8", errors="replace")


def shipped_sources(*suffixes: str) -> list[Path]:
    return [path for path in sorted(ROOT.glob("packages/*/src/**/*")) if path.suffix in suffixes and path.is_file()]


def by_name(path: Path) -> str:
    return path.name


def test_every_package_has_the_same_version() -> None:
    versions = {package.name: load_project(package)["version"] for package in PACKAGES}
    assert len(versions) >= 6
    assert len(set(versions.values())) == 1, versions


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_package_says_its_version_at_run_time_too(package: Path) -> None:
    assert load_module(package).__version__ == load_project(package)["version"]


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_package_asks_for_exactly_its_sibling(package: Path) -> None:
    project = load_project(package)
    siblings = [need for need in project["dependencies"] if need.startswith("fabric-")]
    expected = [] if package.name == "fabric-core" else [f"fabric-core=={project['version']}"]
    assert siblings == expected


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_package_is_complete(package: Path) -> None:
    assert (package / "src" / module_name(package) / "py.typed").is_file()
    assert len((package / "README.md").read_text(encoding="utf-8").splitlines()) >= 3
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    project = load_project(package)
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_public_names_are_sorted_and_complete(package: Path) -> None:
    """`__all__` is exactly the public names, so that a helper imported for its own sake cannot become API."""
    script = (
        f"import types, {module_name(package)} as package\n"
        "public = {k: v for k, v in vars(package).items() if not k.startswith('_') and k != 'annotations'}\n"
        "print([k for k, v in public.items() if not isinstance(v, types.ModuleType)])\n"
    )
    # A fresh interpreter: other tests import submodules, which adds names.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    found = set(ast.literal_eval(done.stdout))
    module = load_module(package)
    declared: list[str] = module.__all__
    assert declared == sorted(declared)
    assert len(declared) == len(set(declared))
    assert [name for name in declared if not hasattr(module, name)] == []
    assert found - set(declared) == set()
    # A module-level __getattr__ may make a declared name only when it is asked for.
    if "__getattr__" not in vars(module):
        assert {name for name in declared if not name.startswith("_")} == found


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    wrong = []
    for path in repository_files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if MACHINE_PATH.search(line) and not MACHINE_PATH_ALLOWED.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("cd /work/main && make", True),
        ('open("/tmp/fabric/x")', True),
        ("/home/ada/src", True),
        ("/root/.cache", True),
        ("see docs/work/plan.md and ./tmp/x", False),
        ("$ROOT/tmp/x", False),
        ("tempfile.gettempdir() is often /tmp", False),
        ("https://example.org/work/item", False),
    ],
)
def test_the_search_for_machine_paths_finds_them(text: str, is_wrong: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) == is_wrong


def test_no_code_is_made_from_data() -> None:
    """No pickle, eval or exec in anything we ship: what a peer sends is data (contract C12).

    Except in the suite's test modules, which check that users may pickle our values.
    """
    wrong = []
    sources = [path for path in shipped_sources(".py") if not path.match("fabric_core/conformance/test_*.py")]
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [node.module or ""]
                case ast.Call(func=ast.Name(id=called)):
                    names = [called]
                case _:
                    continue
            found = {name.split(".", 1)[0] for name in names} & FORBIDDEN
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in sorted(found)]
    assert not wrong


def test_no_shipped_source_file_is_too_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in shipped_sources(".py", ".c", ".h")
        if path.name != "kernels_ptx.h"  # made by tools/make_ptx.py
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
