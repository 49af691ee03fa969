"""fabric_core.bootstrap: finding each other by name, with a deadline, whatever lies there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from fabric_core.bootstrap import MAX_BYTES, Board, FileBoard, StoreBoard, open_board
from fabric_core.errors import ConfigError, DeadlineExceeded, ProtocolError


@pytest.fixture(params=["file", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    """Each kind; the store is a real TCPStore on a port of the system's choice."""
    if request.param == "file":
        return open_board(f"file:{tmp_path}/board")
    distributed = pytest.importorskip("torch.distributed")
    return StoreBoard(distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def test_what_was_published_is_found(board: Board) -> None:
    board.publish("decoder0", "efa:tcp/10.0.0.1:1#1")
    board.publish("decoder0", "efa:tcp/10.0.0.1:2#2")
    assert board.lookup("decoder0", 1) == "efa:tcp/10.0.0.1:2#2"
    board.withdraw("decoder0")
    board.withdraw("decoder0")
    with pytest.raises(DeadlineExceeded):
        board.lookup("decoder0", 0)


def test_a_lookup_waits_until_its_deadline(board: Board) -> None:
    """R3: and names whom it waited for."""
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="prefiller3"):
        board.lookup("prefiller3", 0.2)
    assert 0.2 <= time.monotonic() - begin < 30
    later = threading.Timer(0.1, board.publish, ["prefiller3", "here"])
    later.start()
    assert board.lookup("prefiller3", 20) == "here"
    later.join()


@pytest.mark.parametrize("name", ["", "../secret", "a/b", ".hidden", "x" * 129, "a b", "a\n"])
def test_a_name_cannot_lead_elsewhere(board: Board, name: str) -> None:
    for attempt in (lambda: board.publish(name, "x"), lambda: board.lookup(name, 0), lambda: board.withdraw(name)):
        with pytest.raises(ConfigError):
            attempt()


@pytest.mark.parametrize("value", ["x" * (MAX_BYTES + 1), "a\0b", "line\nline"])
def test_only_short_printable_text_is_published(board: Board, value: str) -> None:
    with pytest.raises(ConfigError):
        board.publish("a", value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\0", b"x" * (MAX_BYTES + 1)])
def test_whatever_lies_there_is_text_or_an_error(tmp_path: Path, data: bytes) -> None:
    """C12: anybody may have written it."""
    board = FileBoard(tmp_path)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ProtocolError):
        board.lookup("a", 0)


def test_the_folder_is_made_for_us_alone(tmp_path: Path) -> None:
    """S4: descriptors are capabilities."""
    board = FileBoard(tmp_path / "new")
    board.publish("a", "b")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "a").stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path / "new") == ["a"], "nothing half written is left"


@pytest.mark.parametrize("where", ["", "board", "http://x", "tcp://host", "tcp://host:port"])
def test_a_place_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(ConfigError):
        open_board(where)
