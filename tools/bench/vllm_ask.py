"""What a client sees of an OpenAI server that streams, and what vLLM's metrics say. Part of vllm_ttft.py."""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass
from typing import Any

PATIENCE = 120.0  # seconds: for any one request


@dataclass(frozen=True)
class Answer:
    """`ttft`: seconds from the request's first byte to the first chunk that has a token."""

    ttft: float
    tokens: list[int]
    likely: list[dict[int, float]]  #: for each token the likeliest ones: token -> log probability

    def parts(self, other: Answer) -> float | None:
        """Return how much likelier each finds its own token, in log probability, where they part; None: nowhere."""
        for mine, yours, here, there in zip(self.tokens, other.tokens, self.likely, other.likely, strict=True):
            if mine != yours:
                return max(here[mine] - here.get(yours, -99.0), there[yours] - there.get(mine, -99.0))
        return None


def make_prompt(seed: str, length: int) -> list[int]:
    """Token ids that no other seed begins with. Some come again and again, so that a model has what to go on with."""
    chance = random.Random(seed)
    words = [chance.randrange(300, 20_000) for _ in range(max(4, length // 6))]
    return [chance.choice(words) for _ in range(length)]


def ask(port: int, prompt: list[int], count: int) -> Answer:
    """Have `count` tokens made, greedily. Raises RuntimeError with what the server says instead."""
    body = json.dumps({
        "model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 5,
    })  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    lines: list[tuple[float, bytes]] = []
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():  # read later what it says: the clock is running
            lines.append((time.perf_counter(), line))
    finally:
        connection.close()
    text = b"".join(line for _, line in lines)
    if answer.status != 200 or b"data: [DONE]" not in text:
        raise RuntimeError(f"status {answer.status}: {text[-1000:].decode(errors='replace')}")
    first, tokens, likely = 0.0, list[int](), list[dict[int, float]]()
    for when, line in lines:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            found = choice.get("token_ids") or ()
            if found:
                first = first or when
                tokens += found
                likely += [_numbers(top) for top in choice["logprobs"]["top_logprobs"]]
    if len(tokens) != count:
        raise RuntimeError(f"{len(tokens)} tokens came of {count}: {text[-1000:].decode(errors='replace')}")
    return Answer(first - began, tokens, likely)


def _numbers(top: dict[str, float]) -> dict[int, float]:
    return {int(token.removeprefix("token_id:")): value for token, value in top.items()}


def call(port: int, path: str, method: str = "GET", timeout: float = PATIENCE) -> tuple[int, str]:
    """Return (status, text). Raises OSError, http.client.HTTPException: nobody is there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Metrics:
    """vLLM's metrics as they are now; `since` another one, counters and sums tell what happened in between."""

    def __init__(self, port: int) -> None:
        self._values: dict[str, float] = {}
        for line in call(port, "/metrics")[1].splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self._values[name] = float(value)

    def since(self, before: Metrics, name: str, label: str = "") -> float:
        """Return the growth of all series of that name which have `label` in their labels."""
        return sum(
            value - before._values.get(key, 0.0)
            for key, value in self._values.items()
            if key.partition("{")[0] == name and label in key
        )


def first_token(port: int, before: Metrics) -> tuple[Metrics, float]:
    """Return metrics that count the one request since `before`, and its engine's own seconds to its first token."""
    end = time.monotonic() + PATIENCE
    while True:
        now = Metrics(port)
        if (count := now.since(before, "vllm:time_to_first_token_seconds_count")) == 1:
            return now, now.since(before, "vllm:time_to_first_token_seconds_sum")
        if count > 1 or time.monotonic() > end:
            raise RuntimeError(f"the engine at port {port} counts {count:.0f} requests, 1 was made")
        time.sleep(0.02)


def said(value: Any) -> str:
    """Milliseconds for a table."""
    return f"{1000 * value:,.1f}" if abs(value) < 1 else f"{1000 * value:,.0f}"
