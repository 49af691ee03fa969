"""The KV demo between two NICs: a prefiller on one, a decoder on the other, and the text of one process alone.

In the emulated machine importing torch and transformers takes minutes, so this has a run of its own:
`make test-verbs VERBS_ARGS=demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from verbs_rig import grown, hardware, need

pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_kv_demo_between_two_nics_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page crosses the wire between two devices; keys, values, logits and text are equal to the last bit."""
    need(2)
    kvcache = pytest.importorskip("fabric_kvcache.demo.launch", reason="needs fabric-kvcache")
    from fabric_kvcache.demo.model import why_not

    if reason := why_not():
        pytest.skip(reason)
    # Each role has its NIC: what the demo calls as its Python is this.
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *demo.prefiller*) nic=rxe0;; *) nic=rxe1;; esac\n'
        f'FABRIC_VERBS_NICS=$nic exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FABRIC_HEARTBEAT", "20")  # both compute on two slow processors
    before = hardware("rxe0")
    options = kvcache.Options(prompt="Why is the sea salt?", max_new_tokens=6, backend="ibverbs", nics=1, timeout=600)
    with kvcache.Demo(options, lambda _text: None, print) as demo:
        result = demo.run()
    print(result)
    assert result.equal, result
    assert result.decoder.backend == "ibverbs"
    assert grown("rxe0", before).get("sent_pkts", 0) > 100
