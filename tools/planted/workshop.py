"""A copy of the engine with one edit, compiled. Objects are kept by content, so a bug costs one compilation or two."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planted.table import Bug, OutOfDate

ROOT = Path(__file__).resolve().parent.parent.parent
CORE = ROOT / "packages" / "fabric-core"
NATIVE = CORE / "src" / "fabric_core" / "native"
TESTS = CORE / "tests" / "c"
HUNT = Path(__file__).resolve().parent / "hunt.c"

BASE = ["-std=gnu11", "-D_GNU_SOURCE", "-pthread", "-g1", "-w"]  # -w: a planted bug may leave a variable unused
FLAVOURS = {
    "plain": ["-O2"],
    "asan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=thread"],
}
LIBRARIES = ["-pthread", "-ldl", "-lrt"]
# Tests that need only a part of the engine: the rest is not compiled for them.
PARTS = {"test_ring": [], "test_pool": ["pool.c"]}


class BuildFailed(RuntimeError):
    """A planted bug does not compile: the table is out of date, or wrong."""


def edited(bug: Bug, text: str) -> str:
    """Return the file's text with the bug in it. Raises OutOfDate if an old text does not occur exactly once."""
    for old, new in bug.edits:
        if (found := text.count(old)) != 1:
            raise OutOfDate(
                f"{bug.name}: the table is out of date: this occurs {found} times in {bug.file}, not once:\n{old}"
            )
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Workshop:
    """Where copies and objects live; `cache` is kept from run to run."""

    cache: Path
    compiler: str = "cc"
    jobs: int = 2

    def _place(self, bug: Bug | None) -> Path:
        return self.cache / "trees" / (re.sub(r"\W+", "-", bug.name) if bug else "clean")

    def tree(self, bug: Bug | None) -> Path:
        """Make a copy of native/ (with the bug in it) and return it. Raises OutOfDate."""
        path = self._place(bug) / "native"
        if path.exists():
            shutil.rmtree(path)
        shutil.copytree(NATIVE, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "door.*", "*.so"))
        if bug:
            file = path / bug.file
            file.write_text(edited(bug, file.read_text()))
        return path

    def forget(self, bug: Bug) -> None:
        """Delete the copy, but not the objects."""
        shutil.rmtree(self._place(bug), ignore_errors=True)

    def sources(self, tree: Path) -> list[Path]:
        """Return the files of the copy that belong to the engine, its backends and the simulator."""
        parts = [p for p in sorted(tree.iterdir()) if (p / f"cdef_{p.name}.h").is_file()]
        return [*sorted(tree.glob("*.c")), *(source for part in parts for source in sorted(part.glob("*.c")))]

    def _object(self, tree: Path, source: Path, flags: list[str], headers: bytes) -> Path:
        key = hashlib.sha256(b"\0".join([" ".join(flags).encode(), headers, source.name.encode(), source.read_bytes()]))
        made = self.cache / "objects" / f"{source.stem}-{key.hexdigest()[:24]}.o"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            part = made.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            include = [f"-I{tree / 'include'}", f"-I{tree}", f"-I{TESTS}"]
            self._run([self.compiler, *flags, *include, "-c", str(source), "-o", str(part)])
            part.replace(made)
        return made

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildFailed(f"{' '.join(command)}\n{done.stderr.strip()}")

    def program(self, tree: Path, main: Path, flavour: str, parts: Iterable[str] | None = None) -> Path:
        """Compile `main` with the engine of this copy and return the program. Raises BuildFailed."""
        flags = [*BASE, *FLAVOURS[flavour]]
        headers = hashlib.sha256()
        for header in sorted([*tree.rglob("*.h"), *TESTS.glob("*.h")]):
            headers.update(header.read_bytes())
        sources = self.sources(tree) if parts is None else [tree / part for part in parts]
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda s: self._object(tree, s, flags, headers.digest()), [main, *sources]))
        made = tree.parent / f"{main.stem}.{flavour}"
        self._run([self.compiler, *flags, *map(str, objects), "-o", str(made), *LIBRARIES])
        return made

    def test(self, tree: Path, name: str, flavour: str) -> Path:
        """Compile one of the C tests of fabric-core."""
        return self.program(tree, TESTS / f"{name}.c", flavour, PARTS.get(name))

    def hunt(self, tree: Path, flavour: str = "plain") -> Path:
        """Compile the program that runs simulated seeds."""
        return self.program(tree, HUNT, flavour)
