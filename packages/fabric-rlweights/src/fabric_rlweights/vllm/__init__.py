"""Weight updates inside vLLM: the weight-transfer engine `fabric`, both halves. See docs/vllm.md.

    vllm serve MODEL --weight-transfer-config '{"backend": "fabric"}'

The entry point `vllm.general_plugins` calls `register` in every process of vLLM; a trainer calls it itself. Importing
this package does not import vLLM.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make the engine known to vLLM's two factories, as `fabric`."""
    from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "FabricWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "FabricTrainerWeightTransferEngine"),
    ):
        try:
            factory.register_engine("fabric", f"fabric_rlweights.vllm.{module}", name)
        except ValueError:  # a process may run its plugins twice
            pass
