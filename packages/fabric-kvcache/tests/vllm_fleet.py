"""Two vLLM servers with FabricConnector, `fabric kv proxy` before them, and what tests say about their answers.

The servers take a minute to start: all modules share them. A test that kills one puts another one in its place.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, BLOCK_BYTES, LAYERS, LIMIT, Said, Server, complete, proxy

SHORT = 5.0  # seconds: the deadline of transfers that are meant to fail
#: `hold` is so long that blocks which come back within LIMIT have not waited for it.
HOW = {"timeout": LIMIT, "hold": 10 * LIMIT, "confirm_timeout": 2.0}
STEP = 0.125  # log probability
WORDS = random.Random(10)


def prompt(length: int, chance: random.Random = WORDS) -> list[int]:
    """Text-like: some words again and again, so that the model has something to go on with."""
    words = [chance.randrange(300, 20_000) for _ in range(max(4, length // 6))]
    return [chance.choice(words) for _ in range(length)]


def planned(tokens: int, start: int = 0) -> int:
    """The bytes of KV of a prompt, of which whole blocks move."""
    return (-(-tokens // BLOCK) - start // BLOCK) * LAYERS * BLOCK_BYTES


def until(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.1)


@dataclass
class Fleet:
    model: str
    folder: Path
    prefill: Server
    decode: Server
    port: int = 0  #: of the proxy
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def start(cls, model: str, folder: Path) -> Fleet:
        prefill = Server(model, folder / "prefill.log", role="kv_producer", extra=HOW)
        decode = Server(model, folder / "decode.log", role="kv_consumer", extra=HOW)
        made = cls(model, folder, prefill, decode)
        try:
            prefill.wait()
            decode.wait()
            made.port = made._stack.enter_context(proxy(prefill, decode, folder / "proxy.log"))
        except BaseException:
            made.close()
            raise
        return made

    def again(self, name: str) -> None:
        """Start "prefill" or "decode" anew, which is dead, at the same ports."""
        old: Server = getattr(self, name)
        old.close()
        role = "kv_producer" if name == "prefill" else "kv_consumer"
        log = self.folder / f"{name}-{time.monotonic():.0f}.log"
        new = Server(self.model, log, role=role, port=old.port, card=old.card, extra=HOW)
        setattr(self, name, new)
        new.wait()

    def close(self) -> None:
        self._stack.close()
        self.prefill.close()
        self.decode.close()

    def ask(self, content: list[int], tokens: int = 16, **more: Any) -> Any:
        status, answer = complete(self.port, content, tokens, **more)
        assert status == 200, answer
        return answer

    def alone(self, content: list[int], tokens: int = 16) -> Said:
        """What the decode engine says by itself, with an empty cache, if it computes the last token alone."""
        self.decode.forget()
        said = Said.by_itself(self.decode.port, content, tokens)
        self.decode.forget()
        return said

    def params(self, transfer_id: str, **more: Any) -> dict[str, Any]:
        """Of a request to the decode engine itself."""
        return {
            "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self.prefill.card,
            "transfer_id": transfer_id, **more,
        }  # fmt: skip


def same(answer: Any, alone: Said) -> None:
    """Tokens, and log probabilities to the last bit: both have computed the same sums."""
    said = Said.of(answer)
    assert said == alone, f"they part at {said.parts(alone)}, and are {said.apart(alone)} apart before"


def near(answer: Any, other: Said) -> None:
    """An answer whose sums were made in another order: tokens part at a near tie only.

    A logit of this model is a bfloat16 from 16 to 32, whose steps are 0.125. Each of the two tokens' may be a step off.
    """
    said = Said.of(answer)
    gap = said.parts(other)
    assert gap is None or gap <= 2.02 * STEP, f"they part where one token is {gap} likelier than the other"
    assert said.apart(other) <= 4 * STEP, "rounding makes no such difference"


_made: list[Fleet] = []


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The one of this session."""
    if not _made:
        model = os.environ.get("FABRIC_VLLM_MODEL")
        if not model:
            model = str(tmp_path_factory.mktemp("model") / "smollm2")
            subprocess.run([sys.executable, str(Path(__file__).with_name("vllm_model.py")), model], check=True)
        _made.append(Fleet.start(model, tmp_path_factory.mktemp("vllm")))
        request.session.addfinalizer(_made[0].close)
    return _made[0]
