"""As much of vLLM's weight-transfer API as fabric_rlweights.vllm imports, for tests where vLLM is not installed."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["Source", "Workers", "stand_in"]


@dataclass
class _TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class _TrainerEngine:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class _HTTPClient:
    """Posts are written down, not sent; `fails` names those that raise."""

    posts: list[tuple[str, str, Any]] = []  # noqa: RUF012
    fails: set[tuple[str, str]] = set()  # noqa: RUF012

    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url.rstrip("/"), timeout

    def _post(self, path: str, json: Any = None) -> None:
        self.posts.append((self.base_url, path, json))
        if (self.base_url, path) in self.fails:
            raise RuntimeError(f"500 for {self.base_url}/{path}")

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})


@contextmanager
def stand_in() -> Iterator[SimpleNamespace]:
    """Have the modules importable; gives fabric's trainer half and its client, and vLLM's client."""
    base, clients = ModuleType("base"), ModuleType("clients")
    base.TrainerInitInfo, base.TrainerWeightTransferEngine = _TrainerInitInfo, _TrainerEngine  # type: ignore[attr-defined]
    http = type("HTTPVLLMWeightSyncClient", (_HTTPClient,), {"posts": [], "fails": set()})
    clients.HTTPVLLMWeightSyncClient = http  # type: ignore[attr-defined]
    package = "vllm.distributed.weight_transfer"
    made = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", package)}
    made |= {f"{package}.base": base, f"{package}.clients": clients}
    ours = [f"fabric_rlweights.vllm.{name}" for name in ("trainer", "clients")]
    before = {name: sys.modules.pop(name, None) for name in [*made, *ours]}
    sys.modules.update(made)
    try:
        trainer, our_clients = (importlib.import_module(name) for name in ours)
        yield SimpleNamespace(trainer=trainer, client=our_clients.FabricHTTPClient, http=http)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


class Source:
    """A weight source over a module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def metadata(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, dtype=p.dtype, shape=tuple(p.shape))
            for name, p in self.module.named_parameters()
        ]


class Workers:
    """A client that speaks to workers in this process, as vLLM's workers behave: one update is open at a time."""

    def __init__(self, join: Callable[[dict[str, Any]], list[Any]]) -> None:
        """`join`: makes the sessions of all workers, of what init was told."""
        self._join = join
        self.sessions: list[Any] = []
        self.open: list[bool] = []
        self.finished: list[str | None] = []

    def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
        self.sessions = self._join(told)
        self.open = [False] * len(self.sessions)

    def start_weight_update(self) -> None:
        if any(self.open):
            raise RuntimeError("a weight update is already active")
        self.open = [True] * len(self.sessions)

    def update_weights(self, told: dict[str, Any]) -> None:
        problems: list[BaseException] = []

        def one(number: int) -> None:
            try:
                self.sessions[number].apply(told["version"], told["timeout"])
            except Exception as error:
                self.open[number] = False
                problems.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self.sessions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.finished.append(weight_version)
        was, self.open = self.open, [False] * len(self.sessions)
        if not all(was):
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
