"""The comparisons of answers that the other tests make see a wrong KV: they would otherwise prove nothing.

A decode engine with the same KV as all others, but for one bug, is asked what they are asked. Runs by `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import Said, Server, complete, proxy
from vllm_fleet import HOW, Fleet, fleet, near, prompt, same

__all__ = ["fleet"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Of vllm_plant.py. What spoils one layer of thirty may change an answer by less than rounding may.
LARGE = ("a block shifted", "two layers exchanged")
SMALL = ("a layer zeroed", "a layer's block zeroed")
LENGTHS = (95, 257, 700, 1500)


def _holds(compare: Callable[[Any, Said], None], answer: Any, other: Said) -> bool:
    try:
        compare(answer, other)
    except AssertionError:
        return False
    return True


def test_wrong_kv_is_seen_by_the_comparisons(fleet: Fleet, tmp_path: Path) -> None:
    """`same` sees each bug in each answer; `near`, which allows for rounding, the large ones in all but one at most."""
    words = random.Random(3)  # the same prompts, whatever was run before
    plant = tmp_path / "plant"
    plant.write_text("")
    decode = Server(
        fleet.model, tmp_path / "decode.log", role="kv_consumer", extra=HOW,
        connector="vllm_plant:PlantedConnector", environment={"FABRIC_TEST_PLANT": str(plant)},
    )  # fmt: skip
    try:
        decode.wait()
        with proxy(fleet.prefill, decode, tmp_path / "proxy.log") as port:
            unseen: dict[str, list[tuple[int, str]]] = {"same": [], "near": []}
            for length in LENGTHS:
                content = prompt(length, words)
                decode.forget()
                alone = Said.by_itself(decode.port, content)
                for bug in ("", *LARGE, *SMALL):
                    plant.write_text(bug)
                    decode.forget()
                    status, answer = complete(port, content)
                    assert status == 200, answer
                    if not bug:
                        same(answer, alone)
                        continue
                    said = Said.of(answer)
                    print(length, bug, "parts at", said.parts(alone), "apart", said.apart(alone))
                    for how in (same, near):
                        if _holds(how, answer, alone):
                            unseen[how.__name__].append((length, bug))
            assert not unseen["same"]
            missed = {bug: [length for length, one in unseen["near"] if one == bug] for bug in (*LARGE, *SMALL)}
            assert all(len(missed[bug]) <= 1 for bug in LARGE), missed
            assert sum(len(missed[bug]) for bug in SMALL) < len(LENGTHS) * len(SMALL), missed
    finally:
        decode.close()
