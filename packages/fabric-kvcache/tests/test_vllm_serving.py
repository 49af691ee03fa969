"""Two vLLM servers with FabricConnector and `fabric kv proxy`, serving a real small model on the CPU.

The oracle is the decode engine by itself, before it has received anything. That alone would not show a prompt that was
silently computed again, so the bytes that moved and the tokens that were computed are checked too. Runs by
`make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import BLOCK, Said, complete
from vllm_fleet import WORDS, Fleet, fleet, near, planned, prompt, same, until

__all__ = ["fleet"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_EDGES = [2, 10, 31, 32, 33, 64, 95, 200, 256, 257, 511, 777, 1024, 1025, 1500, 2000]


@pytest.mark.parametrize(
    "lengths",
    [_EDGES[:12], _EDGES[12:], *([WORDS.randrange(10, 2001) for _ in range(6)] for _ in range(6))],
    ids=["short", "long", *"123456"],
)
def test_tokens_bytes_and_nothing_computed_twice(fleet: Fleet, lengths: list[int]) -> None:
    for length in lengths:
        content = prompt(length)
        alone = fleet.alone(content)
        answer = fleet.ask(content)
        told = answer["kv_transfer_params"]["fabric"]
        assert told["bytes"] == planned(length), length
        assert told["computed"] == 1, "more was computed than the last token"
        same(answer, alone)


@pytest.mark.parametrize("length", [95, 1500])
def test_what_an_engine_says_that_computes_all_in_chunks(fleet: Fleet, length: int) -> None:
    """The last token is in the last chunk then, so the last bits differ."""
    content = prompt(length)
    fleet.decode.forget()
    status, answer = complete(fleet.decode.port, content)
    assert status == 200, answer
    fleet.decode.forget()
    near(fleet.ask(content), Said.of(answer))


def test_many_prompts_at_once(fleet: Fleet) -> None:
    """They are decoded together, so the last bits differ."""
    prompts = [prompt(WORDS.randrange(10, 1200)) for _ in range(12)]
    alone = [fleet.alone(one) for one in prompts]
    fleet.prefill.forget()
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(fleet.ask, prompts))
    assert [answer["kv_transfer_params"]["fabric"]["bytes"] for answer in answers] == [
        planned(len(one)) for one in prompts
    ]
    for answer, said in zip(answers, alone, strict=True):
        near(answer, said)


def test_only_what_the_decoder_lacks_moves(fleet: Fleet) -> None:
    first = prompt(600)
    longer = first + prompt(150)
    alone = fleet.alone(longer)
    fleet.ask(first)
    answer = fleet.ask(longer)
    # The first prompt's last block is cached if the tokens that were generated have filled it.
    assert answer["kv_transfer_params"]["fabric"]["bytes"] == planned(len(longer), start=len(first) // BLOCK * BLOCK)
    near(answer, alone)  # in other chunks


def test_one_after_the_other_as_toy_proxies_do(fleet: Fleet) -> None:
    content = prompt(300)
    alone = fleet.alone(content)
    status, first = complete(fleet.prefill.port, content, 1, kv_transfer_params={"do_remote_decode": True})
    assert status == 200
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"]
    status, answer = complete(fleet.decode.port, content, kv_transfer_params=params)
    assert status == 200
    assert answer["kv_transfer_params"]["fabric"]["bytes"] == planned(len(content))
    same(answer, alone)
    fleet.prefill.forget()


def test_metrics(fleet: Fleet) -> None:
    before = fleet.decode.metric("vllm:fabric_kv_received_bytes_sum")
    fleet.ask(prompt(100))
    until(
        lambda: fleet.decode.metric("vllm:fabric_kv_received_bytes_sum") - before == planned(100),
        "the bytes are not counted",
    )
