"""KV transfer inside vLLM: a connector that two options of `vllm serve` switch on. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "FabricConnector", "kv_connector_module_path": "fabric_kvcache.vllm",
                           "kv_role": "kv_producer"}'

Importing this package does not import vLLM; `FabricConnector` does. The scheduler half (scheduler.py) and the two
worker halves (sends.py, receives.py) know nothing of vLLM's classes, so that they can be tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric_kvcache.vllm.connector import FabricConnector

__all__ = ["FabricConnector", "register"]


def register() -> None:
    """Make the connector known to vLLM by its name: the entry point `vllm.general_plugins`, run in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # type: ignore[import-not-found]
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector("FabricConnector", "fabric_kvcache.vllm.connector", "FabricConnector")
    except ValueError:  # a process may run its plugins twice
        pass


def __getattr__(name: str) -> Any:
    if name == "FabricConnector":
        from fabric_kvcache.vllm.connector import FabricConnector

        return FabricConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
