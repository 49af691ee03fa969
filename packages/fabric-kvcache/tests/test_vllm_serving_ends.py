"""What ends early between two vLLM servers: clients that leave, engines that are silent, stopped or killed.

Each time: the request ends, blocks come back (prefix caches can be emptied, which vLLM refuses while one is held), and
the next request is right. Runs by `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

from vllm_engines import complete, proxy
from vllm_fleet import SHORT, Fleet, fleet, near, prompt, same, until

__all__ = ["fleet"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def body_of(content: list[int]) -> bytes:
    body = json.dumps({"model": "m", "prompt": content, "max_tokens": 50, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def right(fleet: Fleet, length: int = 500) -> None:
    """The next request is."""
    content = prompt(length)
    alone = fleet.alone(content)
    same(fleet.ask(content), alone)


def test_a_client_that_leaves_costs_nothing(fleet: Fleet) -> None:
    content = prompt(2000)
    for pause in (0.0, 0.2, 0.6):
        with socket.create_connection(("127.0.0.1", fleet.port)) as client:
            client.sendall(body_of(content))
            time.sleep(pause)  # how far it has come by then is not to matter
        fleet.prefill.forget()
        fleet.decode.forget()
    right(fleet)


def test_a_client_that_leaves_before_the_decoder_has_asked(fleet: Fleet, tmp_path: Path) -> None:
    """Its prompt is computed, and no abort reaches either engine: the proxy says that nobody will ask for it."""
    fleet.prefill.forget()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a decode engine that does not come to it
        decode = SimpleNamespace(port=silent.getsockname()[1])
        before = fleet.prefill.metric("vllm:request_success_total")
        with proxy(fleet.prefill, decode, tmp_path / "proxy.log") as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(body_of(prompt(200)))
                until(lambda: fleet.prefill.metric("vllm:request_success_total") > before, "it is not computed")
                assert not fleet.prefill.idle(), "its blocks wait"
            fleet.prefill.forget()
    right(fleet)


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
        near(answer, alone_other)
        assert not fleet.decode.idle()
    finally:
        fleet.prefill.signal(signal.SIGCONT)
    fleet.decode.forget()
    same(fleet.ask(content), alone)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_an_engine_that_is_killed_and_replaced(fleet: Fleet, name: str) -> None:
    """In the middle of a transfer."""
    content = prompt(2000)
    alone = fleet.alone(content)
    fleet.prefill.forget()
    killed, other = (fleet.decode, fleet.prefill) if name == "decode" else (fleet.prefill, fleet.decode)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(complete, fleet.port, content)
        until(lambda: fleet.prefill.metric("vllm:num_requests_running") > 0, "it does not begin")
        until(lambda: not other.idle(), "it does not begin there")
        killed.signal(signal.SIGKILL)
        status, answer = asked.result()
    assert status >= 500, answer
    other.forget()
    fleet.again(name)
    same(fleet.ask(content), alone)
