"""What needs no NIC: settings, which port and GID are chosen, addresses, and what is said of what is missing."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fabric_core import ConfigError
from fabric_core.domain import DeviceInfo, GroupConfig, Unavailable
from fabric_core.errors import BackendError
from fabric_core.topology import Nic, Port, Topology
from fabric_ibverbs import backend, library
from fabric_ibverbs.nics import choose, gid_index
from fabric_ibverbs.options import VARIABLES, Options

IPV4, IPV6, LOCAL = "0000:0000:0000:0000:0000:ffff:0a4d:0001", "2001:0db8::1", "fe80:0000:0000:0000:0202:03ff:fe04:0506"


def port(number: int = 1, state: str = "active", layer: str = "Ethernet", *gids: tuple[int, str, str]) -> Port:
    return Port(number, state, "linkup", layer, 400.0, gids or ((0, LOCAL, "RoCE v2"), (1, IPV4, "RoCE v2")))


def machine(*nics: Nic) -> Topology:
    return Topology(nics=nics)


ONE, TWO = Nic("mlx5_0", ports=(port(),), state="up"), Nic("mlx5_1", ports=(port(),), state="up")
DOWN = Nic("mlx5_2", ports=(port(state="down"),), state="down")
DUAL = Nic("mlx5_3", ports=(port(state="down"), port(2)), state="up")


def names(options: Options, *nics: Nic, wanted: int | None = None) -> list[str]:
    chosen = choose(options, GroupConfig("cpu", "x", wanted), machine(*nics))
    return [f"{choice.nic.name}:{choice.port.number}" for choice in chosen]


# ---- settings --------------------------------------------------------------------------------------------------------


def test_every_variable_is_read_and_documented() -> None:
    """`fabric env` shows what Options.load reads, no more and no less."""
    source = Path(library.__file__).with_name("options.py").read_text()
    for variable in VARIABLES:
        short = variable.removeprefix("FABRIC_VERBS_")
        assert f'number("{short}"' in source or f'environ.get("{variable}"' in source, variable
    assert Options.load({}) == Options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMEOUT", "7"),
        ("TIMEOUT", "25"),
        ("RETRY", "7"),  # software RDMA takes 7 as "for ever": nothing may wait without an end
        ("RETRY", "0"),
        ("DEPTH", "100"),
        ("DEPTH", "many"),
        ("CHAIN", "0"),
        ("MTU", "1500"),
        ("PKEY", "0x10000"),
        ("SL", "16"),
        ("TRAFFIC_CLASS", "256"),
        ("GID", "-1"),
        ("GID", "256"),  # verbs has 8 bits for the index in a path: it would be another one there
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(name: str, value: str) -> None:
    """C6: the variable and the value are named; nothing is guessed."""
    with pytest.raises(ConfigError, match=f"FABRIC_VERBS_{name}"):
        Options.load({f"FABRIC_VERBS_{name}": value})


def test_settings_are_parsed() -> None:
    options = Options.load(
        {
            "FABRIC_VERBS_NICS": " a, b:2 ,",
            "FABRIC_VERBS_PKEY": "0x8001",
            "FABRIC_VERBS_RELAXED": "0",
            "FABRIC_VERBS_GID": "3",
        }
    )
    assert options == replace(Options(), nics=("a", "b:2"), pkey=0x8001, relaxed=False, gid=3)


# ---- which NICs ------------------------------------------------------------------------------------------------------


def test_ports_that_are_up_are_opened_and_no_more_than_asked() -> None:
    assert names(Options(), ONE, DOWN, TWO, DUAL) == ["mlx5_0:1", "mlx5_1:1", "mlx5_3:2"]
    assert names(Options(), ONE, DOWN, TWO, wanted=1) == ["mlx5_0:1"]


def test_named_ports_are_opened_in_the_order_of_their_names() -> None:
    assert names(Options(nics=("mlx5_3:2", "mlx5_0")), ONE, DUAL) == ["mlx5_3:2", "mlx5_0:1"]


@pytest.mark.parametrize("bad", ["nobody", "mlx5_0:2", "mlx5_2", "mlx5_0,mlx5_0", "mlx 5"])
def test_a_name_that_is_not_there_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="FABRIC_VERBS_NICS"):
        names(Options(nics=tuple(bad.split(","))), ONE, DOWN)


def test_more_nics_than_there_are_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match="mlx5_0, mlx5_1"):
        names(Options(), ONE, TWO, DOWN, wanted=3)


def test_no_nic_that_is_up_is_said_so() -> None:
    with pytest.raises(BackendError, match="mlx5_2"):
        names(Options(), DOWN)


# ---- which GID: never a hard-coded 0 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (((0, LOCAL, "RoCE v1"), (1, LOCAL, "RoCE v2"), (2, IPV4, "RoCE v1"), (3, IPV4, "RoCE v2")), 3),
        (((0, LOCAL, "RoCE v2"), (5, IPV6, "RoCE v2")), 5),
        (((0, LOCAL, "RoCE v1"), (1, LOCAL, "RoCE v2")), 1),
        (((4, LOCAL, "IB/RoCE v1"),), 4),
    ],
)
def test_the_gid_is_the_best_of_the_table(gids: tuple[tuple[int, str, str], ...], index: int) -> None:
    """RoCE v2 with an IPv4 address before other v2, before v1."""
    mine = port(1, "active", "Ethernet", *gids)
    assert gid_index(Options(), Nic("x", ports=(mine,)), mine) == index


def test_the_gid_can_be_chosen_and_must_be_there() -> None:
    mine = port()
    assert gid_index(Options(gid=0), ONE, mine) == 0
    with pytest.raises(ConfigError, match="FABRIC_VERBS_GID = 7"):
        gid_index(Options(gid=7), ONE, mine)
    assert gid_index(Options(), ONE, port(1, "active", "InfiniBand")) == 0


# ---- addresses, and what is missing ----------------------------------------------------------------------------------

GOOD = "00000000000000000000ffff0a4d0001/0/1b/2ff66ce6#47932d4b650389d9"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "local",
        GOOD[1:],
        GOOD.upper(),
        GOOD.replace("/0/", "/"),
        GOOD + "0",
        GOOD.partition("#")[0],
        GOOD + ",x",
        "#1",
    ],
)
def test_a_misspelt_address_is_known_to_be_none(bad: str) -> None:
    """C12: refused at once, in Python."""
    assert backend.known_address(GOOD)
    assert not backend.known_address(bad)


def test_a_peer_too_many_is_told_with_the_setting_that_bounds_them() -> None:
    """C6: the engine's own words for ENOSPC speak of registrations."""
    assert "FABRIC_VERBS_PEERS" in backend.words("nic", "peer", -errno.ENOSPC)
    assert backend.words("nic", "peer", -errno.ETIMEDOUT) == ""


def test_a_missing_library_is_one_line_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels import everywhere and say what is missing."""

    def missing(_options: Options) -> None:
        raise library.Missing("libibverbs cannot be used: no such file", "install it")

    monkeypatch.setattr(library, "load", missing)
    (found,) = backend.probe()
    assert found == Unavailable("ibverbs", "libibverbs cannot be used: no such file", "install it")


def test_a_library_that_is_none_is_refused() -> None:
    """The C side checks what it loads. In a process of its own: a good library that is loaded stays."""
    program = "from fabric_ibverbs import library, options; library.load(options.Options(library='libm.so.6'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if "built without" in done.stderr:
        pytest.skip("built without libibverbs's headers")
    assert "it is not libibverbs" in done.stderr
    assert "FABRIC_VERBS_LIBRARY" in done.stderr


def test_probe_never_raises_and_names_every_device() -> None:
    for found in backend.probe():
        assert isinstance(found, DeviceInfo | Unavailable)
        assert found.name
