"""Two vLLM servers with FabricConnector and `fabric kv proxy`, serving a real small model on the CPU.

The oracle is the decode engine by itself, before it has received anything: greedy tokens must be equal. That alone
would not show a prompt that was silently computed again, so the bytes that moved and the tokens that were computed are
checked too. Runs by `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import BLOCK, BLOCK_BYTES, LAYERS, LIMIT, Said, Server, complete, proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHORT = 5.0  # seconds: the deadline of transfers that are meant to fail
HOW = {"timeout": LIMIT, "hold": LIMIT, "confirm_timeout": 2.0}
_WORDS = random.Random(10)


def prompt(length: int) -> list[int]:
    """Text-like: some words again and again, so that the model has something to go on with."""
    words = [_WORDS.randrange(300, 20_000) for _ in range(max(4, length // 6))]
    return [_WORDS.choice(words) for _ in range(length)]


def planned(tokens: int, start: int = 0) -> int:
    """The bytes of KV of a prompt, of which whole blocks move."""
    return (-(-tokens // BLOCK) - start // BLOCK) * LAYERS * BLOCK_BYTES


@dataclass
class Fleet:
    model: str
    folder: Path
    prefill: Server
    decode: Server
    port: int  #: of the proxy

    def ask(self, content: list[int], tokens: int = 16, **more: Any) -> Any:
        status, answer = complete(self.port, content, tokens, **more)
        assert status == 200, answer
        return answer

    def alone(self, content: list[int], tokens: int = 16) -> Said:
        """What the decode engine says by itself, with nothing cached before and after."""
        self.decode.forget()
        status, answer = complete(self.decode.port, content, tokens)
        assert status == 200, answer
        self.decode.forget()
        return Said.of(answer)

    def params(self, transfer_id: str, **more: Any) -> dict[str, Any]:
        """Of a request to the decode engine itself."""
        return {
            "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self.prefill.card,
            "transfer_id": transfer_id, **more,
        }  # fmt: skip


NEAR = 0.15  #: log probabilities of bfloat16 sums in another order differ by less


def same(one: Any, other: Said) -> bool:
    """Whether an answer has the tokens of another one; it must not part from it but at a near tie.

    The last token of a prompt is computed by itself here, and in a chunk there, so the last bits differ.
    """
    gap = Said.of(one).parts(other)
    assert gap is None or gap < NEAR, f"the answers part where one token is {gap} likelier than the other"
    return gap is None


def until(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("FABRIC_VLLM_MODEL")
    if given:
        return given
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    subprocess.run([sys.executable, str(Path(__file__).with_name("vllm_model.py")), str(folder)], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def fleet(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm")
    prefill = Server(model, folder / "prefill.log", role="kv_producer", extra=HOW)
    decode = Server(model, folder / "decode.log", role="kv_consumer", extra=HOW)
    try:
        prefill.wait()
        decode.wait()
        with proxy(prefill, decode, folder / "proxy.log") as port:
            yield Fleet(model, folder, prefill, decode, port)
    finally:
        prefill.close()
        decode.close()


_EDGES = [10, 31, 32, 33, 64, 95, 200, 256, 257, 511, 777, 1024, 1500, 2000]


@pytest.mark.parametrize(
    "lengths",
    [_EDGES[:11], _EDGES[11:], *([_WORDS.randrange(10, 2001) for _ in range(6)] for _ in range(6))],
    ids=["short", "long", *"123456"],
)
def test_tokens_bytes_and_nothing_computed_twice(fleet: Fleet, lengths: list[int]) -> None:
    equal = 0
    for length in lengths:
        content = prompt(length)
        alone = fleet.alone(content)
        answer = fleet.ask(content)
        told = answer["kv_transfer_params"]["fabric"]
        assert told["bytes"] == planned(length), length
        assert told["computed"] == 1, "more was computed than the last token"
        equal += same(answer, alone)
    print(f"{equal} of {len(lengths)} prompts: all 16 tokens equal; the others part at near ties")
    assert equal >= len(lengths) / 2


@pytest.mark.parametrize("length", [33, 257, 1025])
def test_to_the_last_bit(fleet: Fleet, length: int) -> None:
    """Against the decode engine that has all but the last token in its prefix cache: it computes the same sums."""
    content = prompt(length)
    fleet.alone(content)
    complete(fleet.decode.port, content)
    warm = Said.of(complete(fleet.decode.port, content)[1])
    fleet.decode.forget()
    answer = fleet.ask(content)
    assert answer["kv_transfer_params"]["fabric"]["bytes"] == planned(length)
    assert Said.of(answer) == warm


def test_many_prompts_at_once(fleet: Fleet) -> None:
    prompts = [prompt(_WORDS.randrange(10, 1200)) for _ in range(12)]
    alone = [fleet.alone(one) for one in prompts]
    fleet.prefill.forget()
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(fleet.ask, prompts))
    assert [answer["kv_transfer_params"]["fabric"]["bytes"] for answer in answers] == [
        planned(len(one)) for one in prompts
    ]
    assert sum(map(same, answers, alone)) >= 9


def test_only_what_the_decoder_lacks_moves(fleet: Fleet) -> None:
    first = prompt(600)
    longer = first + prompt(150)
    alone = fleet.alone(longer)
    fleet.ask(first)
    answer = fleet.ask(longer)
    # The first prompt's last block is cached if the tokens that were generated have filled it.
    assert answer["kv_transfer_params"]["fabric"]["bytes"] == planned(len(longer), start=len(first) // BLOCK * BLOCK)
    same(answer, alone)


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


def test_a_client_that_leaves_costs_nothing(fleet: Fleet) -> None:
    content = prompt(2000)
    body = json.dumps({"model": "m", "prompt": content, "max_tokens": 50, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for pause in (0.0, 0.2, 0.6):
        with socket.create_connection(("127.0.0.1", fleet.port)) as client:
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            time.sleep(pause)  # how far it has come by then is not to matter
        fleet.prefill.forget()
        fleet.decode.forget()
    after = prompt(500)
    alone = fleet.alone(after)
    same(fleet.ask(after), alone)


def test_a_prefill_that_is_never_asked_for_ends_at_its_deadline(fleet: Fleet) -> None:
    content = prompt(400)
    alone = fleet.alone(content)
    status, answer = complete(fleet.decode.port, content, kv_transfer_params=fleet.params("nobody", timeout=SHORT))
    assert status == 500, answer
    fleet.decode.forget()
    same(fleet.ask(content), alone)


def test_a_silent_prefiller_ends_at_the_deadline(fleet: Fleet) -> None:
    content, other = prompt(1500), prompt(300)
    alone, alone_other = fleet.alone(content), fleet.alone(other)
    fleet.ask(other)  # it knows the prefiller
    fleet.decode.forget()
    fleet.prefill.signal(signal.SIGSTOP)
    try:
        status, answer = complete(fleet.decode.port, content, kv_transfer_params=fleet.params("silent", timeout=SHORT))
        assert status == 500, answer
        # The blocks are not given to anybody while the prefiller may still write, and others are served meanwhile.
        status, answer = complete(fleet.decode.port, other)
        assert status == 200, answer
        same(answer, alone_other)
        assert not fleet.decode.idle()
    finally:
        fleet.prefill.signal(signal.SIGCONT)
    fleet.decode.forget()
    same(fleet.ask(content), alone)


def test_a_prefiller_that_is_killed_and_replaced(fleet: Fleet) -> None:
    """Last: the fleet has another prefiller afterwards."""
    content = prompt(2000)
    alone = fleet.alone(content)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(complete, fleet.port, content)
        until(lambda: fleet.prefill.metric("vllm:num_requests_running") > 0, "it does not begin")
        fleet.prefill.signal(signal.SIGKILL)
        status, answer = asked.result()
    assert status >= 500, answer
    fleet.decode.forget()
    assert fleet.alone(content).tokens == alone.tokens
    fleet.prefill.process.wait()
    fleet.prefill = Server(
        fleet.model, fleet.folder / "prefill2.log", role="kv_producer", port=fleet.prefill.port,
        card=fleet.prefill.card, extra=HOW,
    )  # fmt: skip
    try:
        fleet.prefill.wait()
        same(fleet.ask(content), alone)
    finally:
        fleet.prefill.close()
