"""Pairs of vLLM servers with tiny random models: caches of other kinds, and sides that differ.

Their text is noise, and near ties are common. What must be right is that nothing is computed twice, that bytes move,
and that the decode engine goes on as it does by itself; tokens must not part but at a near tie. Runs by
`make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import LIMIT, Said, Server, complete, proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = ("--tensor-parallel-size", "2")
EXACT = ("--dtype", "float32")
NEAR = 0.25  # log probability, of bfloat16


@dataclass(frozen=True)
class Pair:
    """What the two sides are started with."""

    kind: str
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    blocks: tuple[int, int] = (32, 32)
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False  #: both compute the same sums
    near: float = NEAR  #: tokens may part where two are nearer than that, in log probability

    def start(self, model: Path, folder: Path) -> list[Server]:
        how = {"timeout": LIMIT, "hold": LIMIT, **self.options}
        sides = zip(("kv_producer", "kv_consumer"), self.blocks, (self.left, self.right), strict=True)
        return [
            Server(str(model), folder / f"{role}.log", role=role, block=block, extra=how, arguments=arguments)
            for role, block, arguments in sides
        ]


PAIRS = {
    "TP 2 to 1": Pair("qwen3", left=TWO),
    "TP 1 to 2": Pair("qwen3", right=TWO),
    "blocks of 32 to 64": Pair("qwen3", blocks=(32, 64), options={"pieces": "tokens"}, exact=True),
    "sliding windows": Pair("gemma3"),
    # A prompt's latent attention is computed in another way than a token's, and experts are chosen by what comes of it.
    "latent vectors": Pair("deepseek", left=EXACT, right=EXACT, blocks=(16, 16), near=0.01),
}


def _hears(port: int, prompt: list[int]) -> None:
    """What a model says depends on a part of the prompt that is long past: else right answers would prove nothing."""
    other = [token + 1 for token in prompt[:30]] + prompt[30:]
    apart = Said.by_itself(port, prompt, 1).apart(Said.by_itself(port, other, 1))
    assert apart > 4 * NEAR, f"it is deaf: {apart}"


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_pair(tmp_path: Path, name: str) -> None:
    pair = PAIRS[name]
    tokenizer = os.environ.get("FABRIC_VLLM_MODEL")
    if not tokenizer:
        pytest.skip("FABRIC_VLLM_MODEL names no folder with a tokenizer: make test-vllm")
    model = tmp_path / pair.kind
    maker = str(Path(__file__).with_name("vllm_tiny.py"))
    subprocess.run([sys.executable, maker, pair.kind, tokenizer, str(model)], check=True)
    words = random.Random(7)
    servers = pair.start(model, tmp_path)
    prefill, decode = servers
    try:
        for server in servers:
            server.wait()
        with proxy(prefill, decode, tmp_path / "proxy.log") as port:
            _hears(decode.port, [words.randrange(300, 20_000) for _ in range(100)])
            equal = 0
            for length in (20, 64, 65, 300, 700):
                prompt = [words.randrange(300, 20_000) for _ in range(length)]
                decode.forget()
                alone = Said.by_itself(decode.port, prompt, 8)
                decode.forget()
                status, answer = complete(port, prompt, 8)
                assert status == 200, answer
                told = answer["kv_transfer_params"]["fabric"]
                assert told["bytes"] > 0
                assert told["computed"] == 1
                said = Said.of(answer)
                gap = said.parts(alone)
                print(length, told, "equal" if said == alone else f"parts at {gap}, apart {said.apart(alone):.4f}")
                assert gap is None or gap < pair.near, (length, gap)
                assert said.apart(alone) < 4 * pair.near, "rounding makes no such difference"
                if pair.exact:
                    assert said == alone, length
                equal += gap is None
            assert equal > 0
    finally:
        for server in servers:
            server.close()
