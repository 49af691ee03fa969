"""`deep_ep` as a name: there when asked for, gone again, never in DeepEP's place; ranks meet by a process group."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deep_ep_group import LIMIT, Group, a_group, exchange  # noqa: E402

import fabric_moe.deep_ep  # noqa: E402
from fabric_core import ConfigError, Unsupported  # noqa: E402
from fabric_moe import deep_ep_meet  # noqa: E402
from fabric_moe.deep_ep import install, uninstall  # noqa: E402

EXCHANGED = [([1.0, 2.0], [1.0, 10.0]), ([1.0, 2.0], [2.0, 20.0])]  # of each rank: what came, what came back


@pytest.fixture
def shim() -> Iterator[ModuleType]:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed here")
    yield install(max_tokens=16, timeout=LIMIT)
    uninstall()


def test_nothing_is_installed_by_itself() -> None:
    assert "deep_ep" not in sys.modules
    assert importlib.util.find_spec("deep_ep") is None or "fabric" not in str(importlib.util.find_spec("deep_ep"))


def test_the_name_is_found_and_goes_again(shim: ModuleType) -> None:
    import deep_ep  # type: ignore[import-not-found]
    from deep_ep.utils import EventHandle, EventOverlap  # type: ignore[import-not-found]

    assert deep_ep is shim
    assert importlib.util.find_spec("deep_ep") is not None
    assert EventOverlap(EventHandle()).event is None
    config = deep_ep.Buffer.get_dispatch_config(num_ranks=8)
    assert isinstance(config, deep_ep.Config)
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) == 0
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256
    )
    assert hint > 0
    assert install(max_tokens=16, timeout=LIMIT) is shim
    uninstall()
    assert importlib.util.find_spec("deep_ep") is None


def test_deepep_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    with pytest.raises(ConfigError, match="imported already"):
        install()
    uninstall()
    assert "deep_ep" in sys.modules


def test_ranks_meet_by_their_group(shim: ModuleType) -> None:
    def work(group: Group) -> Any:
        buffer = shim.Buffer(group, num_nvl_bytes=1 << 20, num_rdma_bytes=0, explicitly_destroy=True)
        try:
            return exchange(buffer, group.rank)
        finally:
            group.all_gather_obj(None)
            buffer.destroy()
            buffer.destroy()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, a_group(2), timeout=LIMIT))
    assert found == EXCHANGED


def test_the_address_of_the_store_is_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /etc/hosts has a host's own name as a loopback, as Debian does, the others would wait for themselves."""
    names = {"a": "127.0.1.1", "b": "10.0.0.2"}
    asked: list[tuple[str, int]] = []

    class Probe:
        def __init__(self, *_: int) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def connect(self, where: tuple[str, int]) -> None:
            asked.append(where)

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.1", 4242

    monkeypatch.setattr(socket, "gethostbyname", lambda name: names[name])
    monkeypatch.setattr(socket, "socket", Probe)
    assert deep_ep_meet._address(["a", "a"]) == "127.0.0.1"
    assert deep_ep_meet._address(["b", "a"]) == "10.0.0.2"
    assert deep_ep_meet._address(["a", "a", "b"]) == "10.0.0.1"
    assert asked == [("b", 9)]


def test_ranks_meet_by_torchs_process_group(tmp_path: Path) -> None:
    """The one whose process serves the store leaves first, and the other one after it."""
    script = str(Path(__file__).parent / "deep_ep_group.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(r), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            said = next(line for line in rank.stdout if line.startswith("("))
            assert said.strip() == str(EXCHANGED[ranks.index(rank)])
        for rank in ranks:
            assert rank.communicate("\n", timeout=LIMIT)[0] == "left\n"
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(("more", "text"), [({"enable_shrink": True}, "enable_shrink"), ({"comm": object()}, "comm")])
def test_what_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        fabric_moe.deep_ep.Buffer(a_group(1)[0], **more)
