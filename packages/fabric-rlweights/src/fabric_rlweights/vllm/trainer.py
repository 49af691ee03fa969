"""The trainer half of vLLM's weight-transfer engine `fabric`: every rank writes its shards, and nothing is gathered."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # type: ignore[import-not-found]

from fabric_core import ConfigError, TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.dtypes import name_of
from fabric_rlweights.trainer import Outcome, Trainer
from fabric_rlweights.vllm.session import UpdateFailed

__all__ = ["FabricHTTPClient", "FabricTrainerInitInfo", "FabricTrainerWeightTransferEngine"]


@dataclass
class FabricTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """`rank` is keyword-only. With several trainers, torch.distributed must be initialised."""

    backend: ClassVar[str] = "fabric"

    receivers: int = 1  #: workers of all vLLM instances together
    trainers: int = 1
    timeout: float = 60.0  #: seconds of an update
    transport: str | None = None  #: fabric's backend; None: FABRIC_BACKEND, or the best that works here
    digests: bool = False  #: compare what was sent with what has come, before each commit


class FabricHTTPClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's HTTP client, which also empties the prefix cache after an update: its KV is of the old weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update(weight_version)
        self._post("reset_prefix_cache")


class FabricTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """One trainer rank. Rank 0 has the controller, and speaks to vLLM."""

    init_info_cls = FabricTrainerInitInfo

    def __init__(self, info: FabricTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        module = getattr(source, "module", None) or getattr(source, "_module", None)
        if module is None:
            raise ConfigError(
                "the backend fabric writes out of the parameters where they are: give it a ModuleSource, or a source "
                "with an attribute `module`"
            )
        self._info = info
        self._version = 0
        self._engines = [TransferEngine.open("cpu", info.transport)]
        self._controller: Controller | None = None
        address = ""
        if self.is_sender:
            self._engines.append(TransferEngine.open("cpu", info.transport))
            self._controller = Controller(
                self._engines[1], trainers=info.trainers, receivers=info.receivers, digests=info.digests
            )
            address = str(self._engines[1].address)
        if info.trainers > 1:
            address = _everybody(address)
        table, buffers = table_of(info.rank, dict(module.named_parameters()))
        self._trainer = Trainer(self._engines[0], table, buffers, controller=address)
        if self.is_sender:
            params = [(meta.name, list(meta.shape), name_of(meta.dtype)) for meta in source.metadata()]
            client.init_weight_transfer_engine({"controller": address, "params": params, "backend": info.transport})

    @classmethod
    def trainer_init(cls, init_info: FabricTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> Outcome:
        """Update every worker. Returns how it went. Raises UpdateFailed, naming who is to blame: not committed."""
        self._version += 1
        version, timeout = self._version, self._info.timeout
        problems: list[BaseException] = []
        waiting: threading.Thread | None = None
        if self.is_sender:
            self.client.start_weight_update()

            def receive() -> None:
                try:
                    self.client.update_weights({"version": version, "timeout": timeout})
                except Exception as error:
                    problems.append(error)

            waiting = threading.Thread(target=receive, name="fabric-rl-update", daemon=True)
            waiting.start()
        outcome = self._trainer.push(version, timeout=timeout)
        if waiting is not None:
            waiting.join()
        if not outcome.committed or problems:
            told = f"; vLLM says: {problems[0]}" if problems else ""
            raise UpdateFailed(f"version {version}: {outcome.reason} ({', '.join(outcome.culprits)}){told}")
        if self.is_sender:
            self.client.finish_weight_update(str(version))
        return outcome

    def shutdown(self) -> None:
        self._trainer.close()
        if self._controller is not None:
            self._controller.close()
        for engine in self._engines:
            engine.close()


def _everybody(address: str) -> str:
    """Return rank 0's text, on every rank."""
    import torch.distributed as dist

    box: list[Any] = [address]
    dist.broadcast_object_list(box, src=0)
    return str(box[0])
