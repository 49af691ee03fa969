"""A vLLM server whose weights a trainer replaces: ten updates there and back, equal to servers that started with them.

Runs by `make test-vllm`. Equal means equal tokens and equal log probabilities, to the last bit that HTTP shows.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)
if not any(one.value.startswith("fabric_rlweights") for one in entry_points(group="vllm.general_plugins")):
    pytest.skip("fabric-rlweights is not installed as a plug-in of vLLM: make test-vllm", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "fabric-kvcache" / "tests"))

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource  # type: ignore[import-not-found]
from vllm_engines import Server, complete

from fabric_rlweights.vllm.session import UpdateFailed
from fabric_rlweights.vllm.trainer import (
    FabricHTTPClient,
    FabricTrainerInitInfo,
    FabricTrainerWeightTransferEngine,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_BESIDE = Path(__file__).parents[2] / "fabric-kvcache" / "tests"
CONFIG = ("--weight-transfer-config", '{"backend": "fabric"}')
PROMPTS = [list(range(400, 400 + length)) for length in (5, 40, 200)]


def said(server: Server) -> list[Any]:
    """Tokens and log probabilities of some prompts."""
    found = []
    for prompt in PROMPTS:
        status, answer = complete(server.port, prompt, 8, logprobs=1)
        assert status == 200, answer
        choice = answer["choices"][0]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two checkpoints of one model."""
    folder = tmp_path_factory.mktemp("weights")
    first = os.environ.get("FABRIC_VLLM_MODEL")
    if not first:
        first = str(folder / "a")
        subprocess.run([sys.executable, str(_BESIDE / "vllm_model.py"), first], check=True)
    subprocess.run(["cp", "-r", first, str(folder / "b")], check=True)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.mul_(1 + 0.05 * noise)
    model.save_pretrained(folder / "b")
    return first, str(folder / "b")


@pytest.fixture(scope="module")
def server(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(folders[0], tmp_path_factory.mktemp("log") / "server.log", arguments=CONFIG)
    try:
        one.wait()
        yield one
    finally:
        one.close()


def test_ten_updates_are_those_of_cold_starts(server: Server, folders: tuple[str, str], tmp_path: Path) -> None:
    cold = Server(folders[1], tmp_path / "cold.log")
    try:
        cold.wait()
        wanted = [said(server), said(cold)]
    finally:
        cold.close()
    assert wanted[0] != wanted[1], "the checkpoints say the same: nothing would be shown"
    states = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in folders]
    module = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    client = FabricHTTPClient(f"http://127.0.0.1:{server.port}")
    trainer = FabricTrainerWeightTransferEngine.trainer_init(
        FabricTrainerInitInfo(rank=0, timeout=60.0), client=client, source=ModuleSource(module)
    )
    try:
        for version in range(1, 11):
            module.load_state_dict(states[version % 2])
            outcome = trainer.send_weights()
            assert outcome.committed
            assert said(server) == wanted[version % 2], f"version {version}"
        # An update that is broken off leaves the last version.
        module.load_state_dict(states[1])
        trainer._info.timeout = 0.001
        with pytest.raises(UpdateFailed):
            trainer.send_weights()
        assert said(server) == wanted[0]
        trainer._info.timeout = 60.0
        trainer.send_weights()
        assert said(server) == wanted[1]
    finally:
        trainer.shutdown()
