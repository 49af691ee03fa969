"""How processes of different machines find each other: small texts under names, in a shared folder or a TCPStore.

    board = open_board("file:/shared/job42")            or open_board("tcp://10.0.0.1:29500")
    board.publish("decoder0", str(engine.address))
    peer = NetAddr.parse(board.lookup("prefiller3", timeout=30))

Values are short and printable: an address, or a descriptor as hex. A descriptor is a capability: put it only where
nobody but the job can read (a folder of mode 0700; a TCPStore has no access control, so use it in a closed network).
Everything has a deadline. Imports the standard library only; torch is imported when a TCPStore is asked for.
"""

from __future__ import annotations

import datetime
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fabric_core.errors import ConfigError, DeadlineExceeded, ProtocolError

__all__ = ["Board", "FileBoard", "StoreBoard", "open_board"]

MAX_BYTES = 65536  #: of one value
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FIRST_PAUSE = 0.001
_LAST_PAUSE = 0.1


class Board(Protocol):
    """Where names are published and looked up."""

    def publish(self, name: str, value: str) -> None:
        """Put a value under a name; a later one takes its place. Raises ConfigError, OSError."""
        ...

    def lookup(self, name: str, timeout: float) -> str:
        """Return the value under a name, waiting for it at most `timeout` seconds. Raises DeadlineExceeded."""
        ...

    def withdraw(self, name: str) -> None:
        """Take a name off; one that is not there is fine."""
        ...


def open_board(where: str) -> Board:
    """Return the board at "file:FOLDER" or "tcp://HOST:PORT" (a torch TCPStore that somebody serves).

    Raises ConfigError for anything else, or when torch is not installed.
    """
    if where.startswith("file:"):
        return FileBoard(where.removeprefix("file:"))
    match = re.fullmatch(r"tcp://([^/:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", where)
    if match:
        return StoreBoard.connect(match[1].strip("[]"), int(match[2]))
    raise ConfigError(f"{where!r} is no place to meet: file:FOLDER or tcp://HOST:PORT")


def _checked(name: str, value: str = "") -> str:
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"{name!r} is no name to publish under: 1 to 128 letters, digits, and . _ - but no leading dot"
        )
    if len(value.encode()) > MAX_BYTES or not value.isprintable():
        raise ConfigError(f"the value of {name} is not printable, or longer than {MAX_BYTES} bytes")
    return name


def _read_value(name: str, data: bytes) -> str:
    """Whatever lies there was written by somebody: it is text of a bounded size, or an error (C12)."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"what lies under {name} is longer than {MAX_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"what lies under {name} is no text") from None
    if not text.isprintable():
        raise ProtocolError(f"what lies under {name} is not printable")
    return text


def _until(look: Callable[[], bytes | None], name: str, where: str, timeout: float) -> str:
    end = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while (data := look()) is None:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"nobody published {name} at {where} within {timeout:g} s", op="lookup", code="ETIME"
            )
        time.sleep(min(pause, left))  # the other side is another machine: there is nothing to be woken by
        pause = min(pause * 2, _LAST_PAUSE)
    return _read_value(name, data)


class FileBoard:
    """A folder that all sides see: one file per name, written aside and renamed, so that none is read half."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"file:{self.folder}: {error.strerror}") from None

    def publish(self, name: str, value: str) -> None:
        """See Board."""
        target = self.folder / _checked(name, value)
        handle, aside = tempfile.mkstemp(dir=self.folder, prefix=".")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise

    def lookup(self, name: str, timeout: float) -> str:
        """See Board."""
        path = self.folder / _checked(name)

        def look() -> bytes | None:
            try:
                with path.open("rb") as file:
                    return file.read(MAX_BYTES + 1)
            except FileNotFoundError:
                return None

        return _until(look, name, f"file:{self.folder}", timeout)

    def withdraw(self, name: str) -> None:
        """See Board."""
        (self.folder / _checked(name)).unlink(missing_ok=True)


class StoreBoard:
    """A torch.distributed.TCPStore, or anything with its get, set, check and delete_key."""

    def __init__(self, store: Any, prefix: str = "fabric/") -> None:
        self._store = store
        self._prefix = prefix

    @classmethod
    def connect(cls, host: str, port: int, timeout: float = 30.0) -> StoreBoard:
        """Connect to a store that a process of the job serves (`TCPStore(host, port, is_master=True)`)."""
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise ConfigError(f"tcp://{host}:{port} needs torch with torch.distributed: {error}") from None
        try:
            return cls(TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout)))
        except (RuntimeError, OSError) as error:
            text = f"no store answers at tcp://{host}:{port}: {error}"
            raise DeadlineExceeded(text, op="connect", code="ETIME") from None

    def publish(self, name: str, value: str) -> None:
        """See Board."""
        self._store.set(self._prefix + _checked(name, value), value)

    def lookup(self, name: str, timeout: float) -> str:
        """See Board."""
        key = self._prefix + _checked(name)

        def look() -> bytes | None:
            return bytes(self._store.get(key)) if self._store.check([key]) else None

        return _until(look, name, "the store", timeout)

    def withdraw(self, name: str) -> None:
        """See Board."""
        self._store.delete_key(self._prefix + _checked(name))
