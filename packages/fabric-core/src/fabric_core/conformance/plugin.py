"""The kit's pytest options. Loaded in every pytest session where fabric-core is installed: it imports next to nothing.

Without --fabric-backend the kit's tests are skipped, so that a run over everything does not pick a backend by accident.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SCALES = ("quick", "normal", "long")
HANG_AFTER = {"quick": 120.0, "normal": 120.0, "long": 1800.0}  # seconds: a test that takes longer hangs


def _nic_count(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 8 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of NICs from 1 to 8, as in: --fabric-nics 1 2 4")
    return counts


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is wanted, as in: --fabric-set local_path=cma")
    return name, value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fabric", "fabric-core: conformance kit for backends")
    add = group.addoption
    add("--fabric-backend", metavar="NAME", help="the backend to test; without it the kit's tests are skipped")
    add(
        "--fabric-import",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this first, here and in peers: a module that registers a backend in code (may be repeated)",
    )
    add(
        "--fabric-nics",
        metavar="N",
        nargs="+",
        type=_nic_count,
        default=[(1, 2, 4)],
        help="numbers of NICs to run with (default: 1 2 4)",
    )
    add("--fabric-scale", choices=SCALES, default="normal", help="how much work each test does (default: normal)")
    add("--fabric-big", action="store_true", help="also move more than 4 GiB through sparse memory")
    add("--fabric-seed", type=int, default=1, metavar="N", help="seeds what is random (default: 1)")
    add(
        "--fabric-set",
        metavar="NAME=VALUE",
        action="append",
        type=_setting,
        default=[],
        help="a field of fabric_core.config.Settings for every engine of the run (may be repeated)",
    )
    add(
        "--fabric-slack",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how late a deadline may be noticed on this machine (default: 1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "big: moves more than 4 GiB; the kit runs it with --fabric-big only")


def pytest_report_header(config: pytest.Config) -> str | None:
    backend = config.getoption("--fabric-backend")
    if backend is None:
        return None
    settings = " ".join(f"{name}={value}" for name, value in config.getoption("--fabric-set"))
    nics = ",".join(map(str, nic_counts(config)))
    scale, seed = config.getoption("--fabric-scale"), config.getoption("--fabric-seed")
    return f"fabric: backend {backend}, {nics} NICs, scale {scale}, seed {seed} {settings}".rstrip()


def nic_counts(config: pytest.Config) -> tuple[int, ...]:
    given: list[tuple[int, ...]] = config.getoption("--fabric-nics")
    return tuple(dict.fromkeys(count for group in given for count in group))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    chosen = config.getoption("--fabric-backend") is not None
    watchdog = config.pluginmanager.hasplugin("timeout")
    for item in ours:
        if not chosen:
            item.add_marker(pytest.mark.skip(reason="conformance kit: choose what to test with --fabric-backend NAME"))
        elif item.get_closest_marker("big") and not config.getoption("--fabric-big"):
            item.add_marker(pytest.mark.skip(reason="moves more than 4 GiB: --fabric-big"))
        if watchdog and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(HANG_AFTER[config.getoption("--fabric-scale")]))
