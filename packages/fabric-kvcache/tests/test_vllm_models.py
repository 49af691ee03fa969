"""Pairs of vLLM servers with tiny random models: sliding windows, degrees of tensor parallelism.

Their text is noise, and near ties are common: tokens must not part but at one, nothing is computed twice, and bytes
move. Runs by `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import LIMIT, Said, Server, complete, proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = ("--tensor-parallel-size", "2")
NEAR = 0.25  # log probability
HOW = {"timeout": LIMIT, "hold": LIMIT}


@pytest.mark.parametrize(
    ("kind", "left", "right", "block"),
    [
        ("qwen3", TWO, (), 32),
        ("gemma3", (), (), 32),
    ],
    ids=["TP 2 to 1", "sliding windows"],
)
def test_a_pair(tmp_path: Path, kind: str, left: tuple[str, ...], right: tuple[str, ...], block: int) -> None:
    tokenizer = os.environ.get("FABRIC_VLLM_MODEL")
    if not tokenizer:
        pytest.skip("FABRIC_VLLM_MODEL names no folder with a tokenizer: make test-vllm")
    model = tmp_path / kind
    maker = str(Path(__file__).with_name("vllm_tiny.py"))
    subprocess.run([sys.executable, maker, kind, tokenizer, str(model)], check=True)
    servers = [
        Server(str(model), tmp_path / f"{role}.log", role=role, block=block, extra=HOW, arguments=arguments)
        for role, arguments in (("kv_producer", left), ("kv_consumer", right))
    ]
    prefill, decode = servers
    words = random.Random(7)
    try:
        for server in servers:
            server.wait()
        with proxy(prefill, decode, tmp_path / "proxy.log") as port:
            equal, lengths = 0, (20, 64, 65, 300, 700)
            for length in lengths:
                prompt = [words.randrange(300, 20_000) for _ in range(length)]
                decode.forget()
                alone = Said.of(complete(decode.port, prompt, 8)[1])
                decode.forget()
                status, answer = complete(port, prompt, 8)
                assert status == 200, answer
                told = answer["kv_transfer_params"]["fabric"]
                assert told["bytes"] > 0
                assert told["computed"] == 1
                gap = Said.of(answer).parts(alone)
                assert gap is None or gap < NEAR, (length, gap)
                equal += gap is None
            assert equal > 0
    finally:
        for server in servers:
            server.close()
