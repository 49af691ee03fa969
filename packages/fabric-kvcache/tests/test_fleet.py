"""`fabric demo kv --fleet`: four real processes, a real kill and a real retry; a few lines stand in for the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fabric_kvcache.demo.fleet import Fleet
from fabric_kvcache.demo.launch import DemoFailed, Options, Role
from fabric_kvcache.demo.report import KvFleet

ROLE = Path(__file__).parent / "fleet_role.py"
OPTIONS = Options(prompt="The keeper of the lighthouse wrote into his book. " * 4, max_new_tokens=12, timeout=60.0)


class FakeFleet(Fleet):
    """The demo with processes that have no torch."""

    def _program(self, role: Role) -> list[str]:
        return [sys.executable, str(ROLE), role]


def run(options: Options, stages: list[str]) -> KvFleet:
    with FakeFleet(options, stages.append) as fleet:
        try:
            return fleet.run_fleet()
        finally:
            processes = [child.process for child in fleet.children.values()]
            assert len(processes) == 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [OPTIONS, Options(**{**OPTIONS.__dict__, "page_tokens": 8, "chunk_tokens": 40})])
def test_the_other_prefiller_takes_over_and_everything_is_equal(options: Options) -> None:
    stages: list[str] = []
    data = run(options, stages)
    assert data.equal
    for result in data.decoders:
        assert result.text == result.one_text
        assert result.tokens == result.one_tokens
        assert result.kv_equal
        assert result.logits_equal
        assert result.bytes > 0
    assert data.decoders[0].text != data.decoders[1].text
    # The killed one had pushed half of its layers, and its request was asked again, of the one that lived.
    killed = data.killed
    assert (killed.name, killed.layers, killed.of) == ("prefiller0", 4, 8)
    (retried,) = (result for result in data.decoders if len(result.asked) > 1)
    (other,) = (result for result in data.decoders if len(result.asked) == 1)
    assert retried.asked == [killed.address, other.asked[0]]
    (failure,) = data.failures
    assert (failure.request_id, failure.prefiller) == (killed.request_id, killed.address)
    assert retried.request_id != killed.request_id
    assert {done.request_id for done in data.prefillers} == {result.request_id for result in data.decoders}
    assert any("was killed after 4 of 8 layers" in stage for stage in stages)


class Hopeless(FakeFleet):
    """Both prefillers die."""

    def _start_all(self, room: int) -> None:
        super()._start_all(room)
        self.doomed_too = self.children["prefiller1"].process

    def _give_work(self, decoder: str) -> None:
        if decoder == "decoder0" and not self.failures:
            self.doomed_too.kill()
        super()._give_work(decoder)


@pytest.mark.timeout(120)
def test_when_nobody_is_left_it_ends_with_one_sentence() -> None:
    with (
        Hopeless(OPTIONS, lambda _: None) as fleet,
        pytest.raises(
            DemoFailed, match=r"prefiller1 process .* was killed by SIGKILL|nobody is left for decoder"
        ) as caught,
    ):
        fleet.run_fleet()
    assert caught.value.code == 4
    assert all(child.process.poll() is not None for child in fleet.children.values())
