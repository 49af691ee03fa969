"""What a limited gate and passing on within a node change in a prediction, and what the docs say of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fabric_core import ConfigError
from fabric_moe.cli import moe_app
from fabric_moe.gate import Limit
from fabric_moe.simulate import HOP, KERNELS, simulate, targets

V3 = Limit(8, 4)


def test_a_limit_on_groups_saves_what_is_not_sent() -> None:
    even, limited = (simulate("cx7", 64, way="node", limit=limit) for limit in (None, V3))
    assert even.meets == pytest.approx(targets(256, [32] * 8, 8))
    assert limited.meets == pytest.approx(3.953, abs=0.002)
    for more, less in ((even.combine_bytes, limited.combine_bytes), (even.least_combine_us, limited.least_combine_us)):
        assert less / more == pytest.approx(limited.meets / even.meets, rel=1e-6)
    assert limited.combine_bytes == round(128 * limited.meets * 7 / 8 * 14336)  # one of 8 nodes is its own
    assert even.routing == "even"
    assert limited.routing == "even, of 8 groups at most 4"


def test_copies_for_each_expert_do_not_know_of_groups() -> None:
    even, limited = (simulate("cx7", 64, way="expert", limit=limit) for limit in (None, V3))
    assert limited.combine_us == even.combine_us
    assert even.meets == limited.meets == 8


def test_a_limit_that_forbids_nothing_is_none() -> None:
    """To what is drawn: 16384 tokens."""
    even, limited = (simulate("cx7", 64, way="rank", limit=limit) for limit in (None, Limit(8, 8)))
    assert limited.meets == pytest.approx(even.meets, abs=0.02)
    assert limited.combine_us == pytest.approx(even.combine_us, rel=0.01)


def test_passing_on_adds_a_hop_and_the_share_of_a_node_or_all() -> None:
    free, hop, whole = (simulate("cx7", 64, way="node", hop_us=h, whole=w) for h, w in ((0, 0), (HOP, 0), (0, True)))
    assert hop.dispatch_us - free.dispatch_us == pytest.approx(HOP)
    assert hop.combine_us - free.combine_us == pytest.approx(HOP)
    rows = 128 * targets(256, [4] * 64, 8)  # that a rank passes on, to 8 ranks, at 450 GB/s
    assert whole.combine_us - free.combine_us == pytest.approx(rows * 14336 / 450e3 * 7 / 8)
    for ranks, way in ((64, "rank"), (8, "node")):  # nothing is passed on: one node
        slow, plain = simulate("cx7", ranks, way=way, hop_us=9, whole=True), simulate("cx7", ranks, way=way)  # type: ignore[arg-type]
        assert (slow.dispatch_us, slow.combine_us) == (plain.dispatch_us, plain.combine_us)


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="groups=7: experts=256 must be a multiple"):
        simulate("cx7", 64, way="expert", limit=Limit(7, 2))
    said = CliRunner().invoke(moe_app, ["simulate", "--nic", "cx7", "--ranks", "64", "--most-groups", "4"])
    assert said.exit_code == 2
    assert "most=4 groups of a token: from 1 to groups=1" in said.output


def test_the_command_passes_its_inputs_on_and_says_them() -> None:
    words = ["simulate", "--nic", "cx7", "--ranks", "64", "--way", "node", "--kernels", "h200", "--groups", "8",
             "--most-groups", "4", "--hop", "5", "--whole"]  # fmt: skip
    (found,) = json.loads(CliRunner().invoke(moe_app, [*words, "--json"]).stdout)["data"]["answers"]
    wanted = simulate("cx7", 64, way="node", kernels=KERNELS["h200"], limit=V3, hop_us=5, whole=True)
    assert found == wanted.model_dump()
    said = " ".join(CliRunner().invoke(moe_app, words).stdout.split())
    assert "experts drawn: even, of 8 groups at most 4; passing on in a node: 5 us and all rows at 450 GB/s" in said
    plain = json.loads(CliRunner().invoke(moe_app, [*words[:7], "--json"]).stdout)["data"]["answers"]
    assert plain == [simulate("cx7", 64, way="node").model_dump()]  # the defaults are those of the function


def test_the_goal_in_the_docs_is_what_is_predicted() -> None:
    """Rows of the docs: kernels, even in flow, even whole, limited in flow, limited whole."""
    page = Path(__file__).parents[3] / "docs" / "moe.md"
    if not page.is_file():
        pytest.skip("the package stands alone")
    lines = re.findall(r"^\| `(\w+)`:[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", page.read_text(), re.M)
    assert [line[0] for line in lines] == ["paper", "h200", "asked"]
    for name, *cells in lines:
        ways = [(limit, whole) for limit in (None, V3) for whole in (False, True)]
        for cell, (limit, whole) in zip(cells, ways, strict=True):
            found = simulate("cx7", 64, way="node", kernels=KERNELS[name], limit=limit, whole=whole)
            numbers = [float(number) for number in cell.replace("*", "").split("/")]
            assert numbers == pytest.approx([found.dispatch_us, found.combine_us], abs=0.051), (name, limit, whole)
