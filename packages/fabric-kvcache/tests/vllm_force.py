"""A logits processor for vLLM: the first token of an answer is the one that the request names (`vllm_xargs.force`).

So an engine can be had to compute the last token of a text by itself, after the KV of all others is there, as a decode
engine does with a prompt that it was sent: the same sums, and the same bits. Named at start by `--logits-processors`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor  # type: ignore[import-not-found]

__all__ = ["Force"]


class Force(AdapterLogitsProcessor):  # type: ignore[misc]
    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Nothing: tests say what they mean."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        token = (params.extra_args or {}).get("force")
        return None if token is None else _One(int(token))


class _One:
    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, output: list[int], logits: Any) -> Any:
        if not output:
            logits.fill_(float("-inf"))
            logits[self._token] = 0.0
        return logits
