"""Which requests a prefill engine and a decode engine can share, and what the prefill engine is sent of them."""

from __future__ import annotations

from typing import Any

import msgspec

from fabric_kvcache.vllm.proxy_http import Request

__all__ = ["error_of", "prefill_body", "splittable"]

_SPLIT = frozenset({"/v1/completions", "/v1/chat/completions"})
_ONE_TOKEN = frozenset({"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"})


def splittable(request: Request) -> dict[str, Any] | None:
    """Return the body of a request that one prefill can serve; None for any other."""
    if request.method != "POST" or request.target.partition("?")[0] not in _SPLIT:
        return None
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the engine says what is wrong with it
    if not isinstance(body, dict) or body.get("kv_transfer_params"):
        return None
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    one = all(body.get(key) in (None, 1) for key in ("n", "best_of")) and not body.get("use_beam_search")
    return body if one and not several and not body.get("echo") and not body.get("prompt_logprobs") else None


def prefill_body(body: dict[str, Any], transfer_id: str, drop_key: str) -> dict[str, Any]:
    """Return the body for the prefill engine: the same prompt, one token, and the words of params.py."""
    kept = {key: value for key, value in body.items() if key not in _ONE_TOKEN}
    params = {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id, "drop_key": drop_key,
    }  # fmt: skip
    limits = {"max_tokens": 1, **({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})}
    return {**kept, **limits, "stream": False, "kv_transfer_params": params}


def error_of(said: bytes) -> dict[str, Any] | None:
    """Return an engine's error as clients of OpenAI's interface know it; None: it said something else."""
    try:
        found = msgspec.json.decode(said)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "error" in found else None
