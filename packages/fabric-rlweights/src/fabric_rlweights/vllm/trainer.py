"""The trainer half of vLLM's weight-transfer engine `fabric`: every rank writes its shards, and nothing is gathered."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

from fabric_core import ConfigError, TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.dtypes import name_of
from fabric_rlweights.trainer import Outcome, Trainer
from fabric_rlweights.views import device_name
from fabric_rlweights.vllm.clients import FabricHTTPClient
from fabric_rlweights.vllm.session import UpdateFailed

__all__ = ["FabricHTTPClient", "FabricTrainerInitInfo", "FabricTrainerWeightTransferEngine"]

log = logging.getLogger("fabric.rlweights.vllm")


@dataclass
class FabricTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """`rank` is keyword-only. With several trainers, torch.distributed must be initialised."""

    backend: ClassVar[str] = "fabric"

    receivers: int = 1  #: workers of all vLLM instances together
    trainers: int = 1
    timeout: float = 60.0  #: seconds of an update
    transport: str | None = None  #: fabric's backend; None: FABRIC_BACKEND, or the best that works here
    digests: bool = False  #: compare what was sent with what has come, before each commit


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
        self._info, self._module = info, module
        self._version = 0
        self._engines: list[TransferEngine] = []
        self._controller: Controller | None = None
        self._trainer: Trainer | None = None
        try:
            self._join(info, client, source)
        except BaseException:
            self.shutdown()
            raise

    def _join(self, info: FabricTrainerInitInfo, client: Any, source: Any) -> None:
        if isinstance(info.timeout, bool) or not isinstance(info.timeout, int | float) or not 0 < info.timeout <= 86400:
            raise ConfigError(f"timeout={info.timeout!r}: seconds of an update, above 0 and at most 86400 (a day)")
        address = ""
        problem: Exception | None = None
        try:
            if self.is_sender:
                address = self._control(info)
        except Exception as error:
            problem = error
        if info.trainers > 1:  # the others wait for this
            address = _everybody(address)
        if problem is not None:
            raise problem
        if not address:
            raise ConfigError("rank 0 has no controller: its own error says why")
        table, buffers = table_of(info.rank, dict(self._module.named_parameters()))
        self._places = _places(self._module)
        self._engines.append(TransferEngine.open(_device(buffers), info.transport))
        self._trainer = Trainer(self._engines[-1], table, buffers, controller=address)
        if self.is_sender:
            params = [(meta.name, list(meta.shape), name_of(meta.dtype)) for meta in source.metadata()]
            client.init_weight_transfer_engine({"controller": address, "params": params, "backend": info.transport})

    def _control(self, info: FabricTrainerInitInfo) -> str:
        engine = TransferEngine.open("cpu", info.transport)
        self._engines.append(engine)
        self._controller = Controller(engine, trainers=info.trainers, receivers=info.receivers, digests=info.digests)
        return str(engine.address)

    @classmethod
    def trainer_init(cls, init_info: FabricTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> Outcome:
        """Update every worker. Returns how it went.

        Raises UpdateFailed, naming who is to blame: it was not committed, or a worker does not serve it. ConfigError:
        parameters are not where they were. A rank that is left alone by the others ends by the update's time; when they
        have heard of it, the next update has the same number on all of them again.
        """
        assert self._trainer is not None
        self._must_lie_where_they_did()
        self._version = max(self._version, self._trainer.newest) + 1
        version, timeout = self._version, self._info.timeout
        problems: list[BaseException] = []
        waiting: threading.Thread | None = None
        if self.is_sender:
            try:
                self.client.start_weight_update()
            except Exception:
                self._tidy()  # of several instances some may have begun
                raise

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
        if not outcome.committed or outcome.culprits or problems:
            self._tidy()
            told = f"; vLLM says: {problems[0]}" if problems else ""
            what = outcome.reason or "it was written, and vLLM did not take it"
            raise UpdateFailed(f"version {version}: {what} ({', '.join(outcome.culprits)}){told}")
        if self.is_sender:
            self.client.finish_weight_update(str(version))
        return outcome

    def _must_lie_where_they_did(self) -> None:
        """Raise ConfigError for a parameter that has other memory now: what was there would be sent for ever."""
        for name, place in _places(self._module).items():
            if place != self._places.get(name):
                raise ConfigError(
                    f"{name} is not where it was when trainer_init() was called (a module of FSDP2 that is unsharded, "
                    "or a parameter that was replaced): reshard the module, or shut this down and call trainer_init() "
                    "again"
                )

    def _tidy(self) -> None:
        """End the update at workers that hold it for open: after a failure they would refuse to start the next one."""
        if self.is_sender:
            try:
                self.client.finish_weight_update()
            except Exception as error:  # those to which it was over say so
                log.info("after an update that failed: %s", error)

    def shutdown(self) -> None:
        """Leave. Idempotent."""
        if self._trainer is not None:
            self._trainer.close()
        if self._controller is not None:
            self._controller.close()
        for engine in self._engines:
            engine.close()


def _device(buffers: list[Any]) -> str:
    """Return the GPU that parameters lie on; "cpu": on none."""
    return max((device_name(buffer) for buffer in buffers), default="cpu")  # "cuda:0" is above "cpu"


def _places(module: Any) -> dict[str, tuple[int, int]]:
    """Return name -> (address, elements) of what this rank has of each parameter."""
    import torch

    found = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "placements") else parameter
            found[name] = (local.data_ptr(), local.numel())
    return found


def _everybody(address: str) -> str:
    """Return rank 0's text, on every rank."""
    import torch.distributed as dist

    box: list[Any] = [address]
    dist.broadcast_object_list(box, src=0)
    return str(box[0])
