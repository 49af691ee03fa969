"""The machine as a few read-only questions, so that a capture of one can stand in for it.

Three implementations of `System`: the real one (below any root), a recording one that remembers each answer, and a
dump that gives the recorded answers back. What was never asked is not in a dump, and reads as absent.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from fabric_core.errors import ProtocolError

__all__ = ["DumpSystem", "RealSystem", "Recorder", "System", "load_dump", "save_dump"]

SCHEMA = "fabric.system-dump/1"

#: Longest file that is read. sysfs and procfs files are smaller; this bounds dumps and surprises.
MAX_BYTES = 256 * 1024


class System(ABC):
    """Read-only view of a machine. Paths are absolute, as on that machine; whatever cannot be read is absent."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """Return the text of a file without surrounding blanks, or None."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; [] if there is none."""

    @abstractmethod
    def resolve(self, path: str) -> str | None:
        """Return the path with all symbolic links followed, or None if it does not exist."""

    @abstractmethod
    def access(self, path: str) -> str:
        """Return what we may do with it: "", "r", "w" or "rw". Nothing is opened."""

    @abstractmethod
    def free_bytes(self, path: str) -> tuple[int, int] | None:
        """Return (free, total) bytes of the file system that holds `path`, or None."""

    @abstractmethod
    def owner(self, path: str) -> tuple[int, int] | None:
        """Return (permission bits, uid), or None if it does not exist."""

    def exists(self, path: str) -> bool:
        """Tell whether there is something at `path`."""
        return self.resolve(path) is not None

    def number(self, path: str) -> int | None:
        """Return the file's content as an integer, or None."""
        text = self.read(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None


class RealSystem(System):
    """The running machine, or a directory tree that looks like one."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._root = os.path.realpath(root).rstrip("/")

    def _at(self, path: str) -> str:
        return self._root + path

    def read(self, path: str) -> str | None:
        try:
            with open(self._at(path), "rb") as file:
                return file.read(MAX_BYTES).decode("utf-8", "replace").strip()
        except OSError:  # a NIC without link answers EINVAL to a read of its speed
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except OSError:
            return []

    def resolve(self, path: str) -> str | None:
        real = os.path.realpath(self._at(path))
        if not os.path.lexists(real):
            return None
        if self._root and not real.startswith(self._root + "/"):
            return real if real == self._root else None  # a link that leads out of the tree
        return real[len(self._root) :] or "/"

    def access(self, path: str) -> str:
        where = self._at(path)
        return "".join(letter for letter, mode in (("r", os.R_OK), ("w", os.W_OK)) if os.access(where, mode))

    def free_bytes(self, path: str) -> tuple[int, int] | None:
        try:
            found = os.statvfs(self._at(path))
        except OSError:
            return None
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def owner(self, path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(self._at(path))
        except OSError:
            return None
        return found.st_mode & 0o7777, found.st_uid


class Recorder(System):
    """Passes questions on and remembers the answers, for `save_dump`."""

    def __init__(self, inner: System) -> None:
        self._inner = inner
        self.answers: dict[str, dict[str, Any]] = {
            "read": {},
            "names": {},
            "resolve": {},
            "access": {},
            "free_bytes": {},
        }

    def _ask(self, verb: str, path: str) -> Any:
        answer = getattr(self._inner, verb)(path)
        self.answers[verb][path] = answer
        return answer

    def read(self, path: str) -> str | None:
        answer: str | None = self._ask("read", path)
        return answer

    def names(self, path: str) -> list[str]:
        answer: list[str] = self._ask("names", path)
        return answer

    def resolve(self, path: str) -> str | None:
        answer: str | None = self._ask("resolve", path)
        return answer

    def access(self, path: str) -> str:
        answer: str = self._ask("access", path)
        return answer

    def free_bytes(self, path: str) -> tuple[int, int] | None:
        answer: tuple[int, int] | None = self._ask("free_bytes", path)
        return answer

    def owner(self, path: str) -> tuple[int, int] | None:
        answer: tuple[int, int] | None = self._ask("owner", path)
        return answer


class DumpSystem(System):
    """Gives recorded answers back."""

    def __init__(self, answers: dict[str, dict[str, Any]], *, host: str = "", time: str = "") -> None:
        self._answers = answers
        self.host = host  #: where the dump was taken
        self.time = time  #: when, ISO 8601

    def _answer(self, verb: str, path: str, kind: type) -> Any:
        answer = self._answers.get(verb, {}).get(path)
        return answer if isinstance(answer, kind) else None

    def read(self, path: str) -> str | None:
        answer: str | None = self._answer("read", path, str)
        return answer

    def names(self, path: str) -> list[str]:
        answer = self._answer("names", path, list) or []
        return [name for name in answer if isinstance(name, str)]

    def resolve(self, path: str) -> str | None:
        answer: str | None = self._answer("resolve", path, str)
        return answer

    def access(self, path: str) -> str:
        return self._answer("access", path, str) or ""

    def _pair(self, verb: str, path: str) -> tuple[int, int] | None:
        answer = self._answer(verb, path, list) or []
        return (answer[0], answer[1]) if len(answer) == 2 and all(isinstance(part, int) for part in answer) else None

    def free_bytes(self, path: str) -> tuple[int, int] | None:
        return self._pair("free_bytes", path)

    def owner(self, path: str) -> tuple[int, int] | None:
        return self._pair("owner", path)


def save_dump(recorder: Recorder, path: str | os.PathLike[str], *, host: str, time: str) -> None:
    """Write what the recorder saw as JSON. Holds host names, addresses of NICs, and no secrets."""
    content = {"schema": SCHEMA, "host": host, "time": time, "answers": recorder.answers}
    Path(path).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_dump(path: str | os.PathLike[str]) -> DumpSystem:
    """Read a dump. Raises ProtocolError if the file is not one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProtocolError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{os.fspath(path)}: not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("answers"), dict):
        raise ProtocolError(f"{os.fspath(path)}: not a dump of `fabric topo --dump` (schema {SCHEMA})")
    answers = {verb: asked for verb, asked in content["answers"].items() if isinstance(asked, dict)}
    return DumpSystem(answers, host=str(content.get("host", "")), time=str(content.get("time", "")))
