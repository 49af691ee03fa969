"""The KV demo between two NICs: a prefiller on one, a decoder on the other, and the text of one process alone.

Twice: with a model of a few lines instead of torch (the demo's processes and everything that crosses the wire are the
real ones), and with the real model. In the emulated machine importing torch and transformers takes minutes, so this
has runs of its own: `make test-verbs VERBS_ARGS=stand-in` and `tools/rdma-guest/kv_demo.sh`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from verbs_rig import grown, hardware, need

HOURS = 7200  #: seconds, for the real model on an emulated processor
pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(1500)]

ROLE = Path(__file__).resolve().parents[2] / "fabric-kvcache" / "tests" / "fleet_role.py"
ROLE_HERE = Path(__file__).with_name("verbs_demo_role.py")


def demo() -> Any:
    return pytest.importorskip("fabric_kvcache.demo.launch", reason="needs fabric-kvcache")


def two_nics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *program: str | Path) -> None:
    """Each role has its NIC: what the demo calls as its Python sees to that. `program`: what gets its arguments."""
    need(2)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *prefiller*) nic=rxe0;; *) nic=rxe1;; esac\n'
        f'FABRIC_VERBS_NICS=$nic exec {shlex.join(map(str, [sys.executable, *program]))} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FABRIC_HEARTBEAT", "20")  # both compute on two slow processors
    monkeypatch.setenv("FABRIC_CONNECT_TIMEOUT", "20")


def check(kind: Any, options: Any) -> None:
    """Runs it: text, keys, values and logits are equal to the last bit, and the pages did cross the wire."""
    before, began = hardware("rxe0"), time.monotonic()

    def say(what: object) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what}", flush=True)

    with kind(options, say, say) as running:
        result = running.run()
    got = result.decoder
    say(f"equal: {result.equal}; tokens {got.tokens} and {got.one_tokens}; {got.writes} writes, {got.bytes} bytes")
    assert result.equal, result
    assert result.decoder.backend == "ibverbs"
    assert grown("rxe0", before).get("sent_pkts", 0) > 100


def test_the_kv_demo_with_a_stand_in_for_the_model_between_two_nics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text follows from every byte of its cache, so another cache gives another text."""
    launch = demo()
    two_nics(tmp_path, monkeypatch)
    if not ROLE.exists():
        pytest.skip("needs the tests of fabric-kvcache")

    class StandIn(launch.Demo):  # type: ignore[misc, name-defined, unused-ignore]
        def _program(self, role: str) -> list[str]:
            return [sys.executable, str(ROLE), role]

    prompt = "The keeper of the lighthouse wrote into his book. " * 12
    check(StandIn, launch.Options(prompt=prompt, max_new_tokens=12, backend="ibverbs", nics=1, timeout=300))


@pytest.mark.timeout(HOURS)
def test_the_kv_demo_between_two_nics_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of a real model's cache crosses the wire between two devices. VERBS_DEMO_TOKENS: to generate."""
    launch = demo()
    from fabric_kvcache.demo.model import why_not

    if reason := why_not():
        pytest.skip(reason)
    two_nics(tmp_path, monkeypatch, ROLE_HERE)
    monkeypatch.setattr(launch, "_LOAD_TIMEOUT", HOURS / 2)
    tokens = int(os.environ.get("VERBS_DEMO_TOKENS", "6"))
    prompt, limit = "Why is the sea salt?", HOURS / 4
    options = launch.Options(prompt=prompt, max_new_tokens=tokens, backend="ibverbs", nics=1, timeout=limit)
    check(launch.Demo, options)
