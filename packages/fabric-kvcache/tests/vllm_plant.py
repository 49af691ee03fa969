"""`PlantedConnector`: FabricConnector in a decode engine whose received KV is spoilt in the way that a file names.

What compares answers must see it: test_vllm_wrong_kv.py. The file is $FABRIC_TEST_PLANT; it may change while the engine
runs. A prompt's KV is spoilt when all of it has come, before its last token is computed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fabric_kvcache.vllm.connector import FabricConnector

__all__ = ["PlantedConnector"]


class PlantedConnector(FabricConnector):  # type: ignore[misc]
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        # Each is [block, head, token, content].
        self._layers = [kv_caches[name] for name in sorted(kv_caches, key=lambda name: int(name.split(".")[2]))]
        self._blocks: dict[str, list[int]] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._blocks.update({load.request_id: load.blocks[0] for load in connector_metadata.step.loads})
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        for request_id in found.finished_recving or ():
            self._spoil(Path(os.environ["FABRIC_TEST_PLANT"]).read_text(), self._blocks.pop(request_id))
        return found

    def _spoil(self, plant: str, blocks: list[int]) -> None:
        layers = self._layers
        middle = len(layers) // 2
        if plant == "a block shifted":  # where one block should be is the next one, in all layers
            for layer in layers:
                layer[blocks[0]] = layer[blocks[1]].clone()
        elif plant == "a layer zeroed":
            layers[middle][blocks] = 0
        elif plant == "a layer's block zeroed":
            layers[middle][blocks[1]] = 0
        elif plant == "two layers exchanged":
            one, other = layers[middle][blocks].clone(), layers[middle + 1][blocks].clone()
            layers[middle][blocks], layers[middle + 1][blocks] = other, one
        else:
            assert not plant, plant
