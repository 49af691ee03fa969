"""The worker half of vLLM's weight-transfer engine `fabric`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fabric_core import ConfigError, TransferEngine
from fabric_rlweights.vllm.session import Session, UpdateFailed

__all__ = ["FabricInitInfo", "FabricUpdateInfo", "FabricWeightTransferEngine"]

log = logging.getLogger("fabric.rlweights.vllm")


@dataclass
class FabricInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a trainer says once. `params`: (name, shape, element type) of the checkpoint, all of it."""

    controller: str
    params: list[Any] = field(default_factory=list)
    first_rank: int = 0  #: where this vLLM instance's workers begin among all receivers
    backend: str | None = None


@dataclass
class FabricUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What it says for each update."""

    version: int
    timeout: float = 60.0


class FabricWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One receiver of fabric_rlweights: see session.py. The old weights stay until an update is committed."""

    init_info_cls = FabricInitInfo
    update_info_cls = FabricUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: Session | None = None

    def init_transfer_engine(self, init_info: FabricInitInfo) -> None:
        self.shutdown()
        try:
            params = {str(name): (tuple(shape), str(dtype)) for name, shape, dtype in init_info.params}
        except (TypeError, ValueError):
            params = {}
        if not params:
            raise ConfigError("init_info.params: a list of (name, shape, element type) of the checkpoint was expected")
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        engine = TransferEngine.open("cpu", init_info.backend)
        try:
            self._session = Session(engine, rank, params, init_info.controller, self._load)
        except BaseException:
            engine.close()
            raise
        log.info("receiver %d of %s: %s", rank, init_info.controller, engine.address)

    def _load(self, weights: Iterator[tuple[str, Any]]) -> None:
        """As vLLM loads a checkpoint again: layer by layer, into the tensors that are there."""
        import torch
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with torch.device(self.device), torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(weights)
                finalize_layerwise_reload(self.model, self.model_config)
            except BaseException:
                _forget_halves(self.model)
                finalize_layerwise_reload(self.model, self.model_config)
                raise
            if self.device.type == "cpu":
                _pack_tied(self.model)

    def start_weight_update(self) -> None:
        if self._session is None:
            raise UpdateFailed("init_weight_transfer_engine was not called: this worker knows no controller")

    def receive_weights(self, update_info: FabricUpdateInfo) -> None:
        self.start_weight_update()
        assert self._session is not None
        self._session.apply(int(update_info.version), float(update_info.timeout))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base class' synchronisation of an accelerator, which a processor has not."""
        import torch

        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Nothing: the weights are in the model when `update_weights` returns."""

    def shutdown(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _forget_halves(model: Any) -> None:
    """Have layers that were not loaded whole get their old tensors back when the reload is finalised.

    Left as they are they would have no memory, and the next reload would count what came for them now as its own: it
    would take a layer for complete that lacks some of its weights.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found]
        get_layerwise_info,
    )

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel, info.loaded_weights = 0, []


def _pack_tied(model: Any) -> None:
    """Have tied layers packed again: vLLM reloads one of them only, and each has packed the weights for itself."""
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not weight.numel():
            continue
        if weight.data_ptr() in seen and hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())
