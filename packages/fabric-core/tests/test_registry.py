"""The registry: what is found, who wins, and a reason for everything that is not used. Real metadata, fake packages."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric_core import registry
from fabric_core.domain import API_VERSION, Backend, DeviceInfo, Domain, GroupConfig, NativeDomain, Unavailable
from fabric_core.errors import BackendError, ConfigError
from fabric_core.registry import BACKENDS, COMMANDS, Plugin, discover, get_backend, select

Install = Callable[..., None]

GOOD = """
from fabric_core.domain import API_VERSION, DeviceInfo
class _Backend:
    name = "{name}"
    api_version = API_VERSION
    def probe(self):
        return [DeviceInfo("{name}0", "{name}", state="{state}", rate_gbit_s={rate})]
    def open_group(self, config):
        return []
backend = _Backend()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a package with a module and entry points, as pip would leave it."""
    monkeypatch.delenv("FABRIC_BACKENDS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def make(
        package: str, entries: str, source: str = "", *, module: str = "", version: str = "1.0", group: str = BACKENDS
    ) -> None:
        module = module or package.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nSummary: About {package}\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")

    yield make
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def code_backends() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


class CodeBackend:
    def __init__(self, name: str, api_version: int = API_VERSION) -> None:
        self.name = name
        self.api_version = api_version

    def probe(self) -> list[DeviceInfo | Unavailable]:
        return [DeviceInfo(f"{self.name}0", self.name, rate_gbit_s=1e6)]

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        return []


def find(name: str, group: str = BACKENDS, *, package: str = "", load: bool = True) -> Plugin:
    found = [plugin for plugin in discover(group, load=load) if plugin.name == name and package in ("", plugin.package)]
    assert found, name
    return found[0]


def test_local_is_built_in_even_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    plugin = find("local", load=False)
    assert (plugin.package, plugin.status) == ("fabric-core", "found")


def test_local_is_listed_once_although_metadata_names_it_too(install: Install) -> None:
    install("fabric-core", "local = fabric_core.backends.local:backend", module="shadow", version="0.0.1")
    assert [plugin.name for plugin in discover(BACKENDS, load=False)].count("local") == 1


def test_a_good_backend_is_ok_and_knows_its_package(install: Install) -> None:
    install("good-nic", "good = good_nic:backend", GOOD.format(name="good", state="up", rate=100), version="2.5")
    plugin = find("good")
    assert (plugin.status, plugin.package, plugin.version, plugin.api_version) == ("ok", "good-nic", "2.5", API_VERSION)
    assert plugin.summary == "About good-nic"
    backend = get_backend("good")
    assert backend is plugin.load()
    assert isinstance(backend, Backend)


@pytest.mark.parametrize(
    ("source", "reason", "cure"),
    [
        ("import does_not_exist_xyz", "ModuleNotFoundError", "'does_not_exist_xyz'"),
        ("raise RuntimeError('no firmware')", "RuntimeError: no firmware", "a defect of bad-nic"),
        ("raise SystemExit(3)", "SystemExit: 3", "a defect of bad-nic"),
        ("raise ImportError('libx.so.1: cannot open')", "ImportError: libx.so.1", "install the library"),
        ("def broken(:", "SyntaxError", "a defect of bad-nic"),
        ("x = 1", "has no attribute 'backend'", "a defect of bad-nic"),
        ("backend = object()", "object lacks name, api_version, probe, open_group", "tell its authors"),
    ],
)
def test_a_broken_backend_is_shown_with_reason_and_cure(install: Install, source: str, reason: str, cure: str) -> None:
    install("bad-nic", "bad = bad_nic:backend", source)
    plugin = find("bad")
    assert plugin.status == "failed"
    assert reason in plugin.reason
    assert cure in plugin.cure
    if "lacks" not in reason:
        assert "Traceback" in plugin.traceback
    with pytest.raises(BackendError, match=r"bad-nic 1\.0") as caught:
        get_backend("bad")
    assert cure in str(caught.value)


def test_an_entry_point_whose_module_is_gone_says_reinstall(install: Install) -> None:
    install("gone-nic", "gone = gone_nic_module:backend", module="something_else")
    assert "reinstall gone-nic" in find("gone").cure


def test_one_broken_backend_does_not_hide_the_others(install: Install) -> None:
    install("bad-nic", "bad = bad_nic:backend", "raise RuntimeError")
    install("good-nic", "good = good_nic:backend", GOOD.format(name="good", state="up", rate=1))
    assert {
        plugin.name: plugin.status for plugin in discover(BACKENDS) if not plugin.package.startswith("fabric-")
    } == {
        "bad": "failed",
        "good": "ok",
    }


@pytest.mark.parametrize(("version", "side"), [(0, "old-nic"), (99, "fabric-core")])
def test_another_api_version_is_incompatible_and_names_both(install: Install, version: int, side: str) -> None:
    source = GOOD.format(name="old", state="up", rate=1).replace(
        "api_version = API_VERSION", f"api_version = {version}"
    )
    install("old-nic", "old = old_nic:backend", source)
    plugin = find("old")
    assert plugin.status == "incompatible"
    assert f"API {version}" in plugin.reason
    assert f"has {API_VERSION}" in plugin.reason
    assert plugin.cure == f"upgrade {side}"
    with pytest.raises(BackendError, match="incompatible"):
        get_backend("old")


def test_a_backend_must_call_itself_what_it_is_known_as(install: Install) -> None:
    install("odd-nic", "odd = odd_nic:backend", GOOD.format(name="other", state="up", rate=1))
    assert "known as 'odd' but calls itself 'other'" in find("odd").reason


def test_of_duplicates_both_are_shown_and_the_first_package_wins(install: Install) -> None:
    install("b-nic", "twin = b_nic:backend", GOOD.format(name="twin", state="up", rate=1))
    install("a-nic", "twin = a_nic:backend", GOOD.format(name="twin", state="up", rate=1))
    twins = [(plugin.package, plugin.status) for plugin in discover(BACKENDS) if plugin.name == "twin"]
    assert twins == [("a-nic", "ok"), ("b-nic", "duplicate")]
    loser = find("twin", package="b-nic")
    assert "taken by a-nic 1.0" in loser.reason
    with pytest.raises(BackendError, match="duplicate"):
        loser.load()


def test_nobody_can_take_the_name_local(install: Install) -> None:
    install("aaa-nic", "local = aaa_nic:backend", GOOD.format(name="local", state="up", rate=1))
    assert find("local", package="aaa-nic").status == "duplicate"


def test_the_allow_list_filters_without_importing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("spy-nic", "spy = spy_nic:backend", "raise AssertionError('imported')")
    monkeypatch.setenv("FABRIC_BACKENDS", "local, other")
    plugin = find("spy")
    assert plugin.status == "filtered"
    assert plugin.reason == "FABRIC_BACKENDS allows only local, other"
    assert "spy_nic" not in sys.modules
    with pytest.raises(ConfigError, match="installed, but FABRIC_BACKENDS allows only"):
        get_backend("spy")


def test_settings_can_allow_what_the_environment_does_not(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("good-nic", "good = good_nic:backend", GOOD.format(name="good", state="up", rate=1))
    monkeypatch.setenv("FABRIC_BACKENDS", "local")
    assert get_backend("good", allow=["good"]).name == "good"
    with pytest.raises(ConfigError, match="installed, but"):
        select("local", allow=["good"])


def test_an_unknown_name_lists_the_known_ones_and_close_spellings(install: Install) -> None:
    install("good-nic", "verbose = good_nic:backend", GOOD.format(name="verbose", state="up", rate=1))
    with pytest.raises(ConfigError, match=r"no backend 'verbos'; known: .*local,.* verbose.*did you mean verbose"):
        get_backend("verbos")


def test_load_false_imports_nothing(install: Install) -> None:
    install("spy-nic", "spy = spy_nic:backend", "raise AssertionError('imported')")
    assert find("spy", load=False).status == "found"
    assert "spy_nic" not in sys.modules


def test_asking_for_one_backend_imports_no_other(install: Install) -> None:
    install("spy-nic", "spy = spy_nic:backend", "raise AssertionError('imported')")
    install("good-nic", "good = good_nic:backend", GOOD.format(name="good", state="up", rate=1))
    assert get_backend("good").name == "good"
    assert "spy_nic" not in sys.modules


@pytest.mark.usefixtures("code_backends")
def test_code_registers_a_backend_and_wins() -> None:
    mine = CodeBackend("mine")
    registry.register("mine", mine)
    assert get_backend("mine") is mine
    assert find("mine").package == "(code)"
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("mine", CodeBackend("mine"))
    other = CodeBackend("mine")
    registry.register("mine", other, replace=True)
    assert get_backend("mine") is other
    registry.unregister("mine")
    registry.unregister("mine")
    with pytest.raises(ConfigError, match="no backend 'mine'"):
        get_backend("mine")


@pytest.mark.usefixtures("code_backends")
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (CodeBackend("other"), "calls itself 'other'"),
        (CodeBackend("mine", api_version=7), "built for backend API 7"),
        (object(), "object lacks"),
    ],
)
def test_code_cannot_register_a_misfit(backend: Backend, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        registry.register("mine", backend)


@pytest.mark.usefixtures("code_backends")
def test_auto_takes_the_fastest_link_that_is_up(install: Install) -> None:
    install("slow-nic", "slow = slow_nic:backend", GOOD.format(name="slow", state="up", rate=25))
    install("fast-nic", "fast = fast_nic:backend", GOOD.format(name="fast", state="up", rate=400))
    install("down-nic", "down = down_nic:backend", GOOD.format(name="down", state="down", rate=800))
    install("none-nic", "none = none_nic:backend", GOOD.format(name="none", state="up", rate=None))
    install(
        "angry-nic",
        "angry = angry_nic:backend",
        GOOD.format(name="angry", state="up", rate=999) + "\n_Backend.probe = lambda self: 1 / 0\n",
    )
    registry.register("mine", CodeBackend("mine"))
    assert select().name == "fast"
    assert select("slow").name == "slow"


def test_auto_without_a_link_is_local(install: Install) -> None:
    install("none-nic", "none = none_nic:backend", GOOD.format(name="none", state="up", rate=None))
    assert select("auto").name == "local"


def test_commands_are_discovered_but_not_filtered(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("work-load", "work = work_load:app", "app = object()", group=COMMANDS)
    monkeypatch.setenv("FABRIC_BACKENDS", "local")
    assert find("work", COMMANDS).status == "ok"
    assert {plugin.group for plugin in discover()} == {BACKENDS, COMMANDS}


def test_damaged_metadata_does_not_hide_the_entry(install: Install, tmp_path: Path) -> None:
    install("odd-nic", "odd = odd_nic:backend", "x = 1")
    (tmp_path / "odd_nic-1.0.dist-info" / "METADATA").write_text("not metadata at all")
    assert "odd" in {plugin.name for plugin in discover(BACKENDS)}
