"""SGLang's four disaggregation classes. What is sent, to whom and when is SGLang's; how it is sent is fabric's.

SGLang's Mooncake classes ask a transfer engine for no more than: register, write blocks, name yourself. So these derive
from them, as SGLang's own Ascend backend does, and bring another engine: cut heads, MLA, state, aborts with an answer,
heartbeats and role switches come along. Mooncake itself is not needed.
"""

from __future__ import annotations

from sglang.srt.disaggregation.mooncake.conn import (  # type: ignore[import-not-found]
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)

from fabric_core import TransferEngine
from fabric_kvcache.patience import patient
from fabric_kvcache.sglang.sessions import Sessions

if not hasattr(MooncakeKVManager, "init_engine"):  # else it would look for Mooncake's engine, and not take ours
    raise ImportError("MooncakeKVManager has no init_engine(), in which another transfer engine could be brought")

__all__ = ["FabricKVBootstrapServer", "FabricKVManager", "FabricKVReceiver", "FabricKVSender"]


class FabricKVManager(MooncakeKVManager):  # type: ignore[misc]
    """Owns an engine: on the rank's GPU where there is one, else on host memory. FABRIC_BACKEND chooses how."""

    def init_engine(self) -> None:
        import torch

        device = f"cuda:{self.kv_args.gpu_id}" if torch.cuda.is_available() else "cpu"
        host = set(self.kv_args.aux_data_ptrs)  # SGLang keeps the auxiliary data of a request in host memory
        self.engine = Sessions(
            TransferEngine.open(device, settings=patient()), device_of=lambda ptr: "cpu" if ptr in host else device
        )  # fmt: skip

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.engine.close()


class FabricKVSender(MooncakeKVSender):  # type: ignore[misc]
    """One request's prefill side."""


class FabricKVReceiver(MooncakeKVReceiver):  # type: ignore[misc]
    """One request's decode side."""


class FabricKVBootstrapServer(MooncakeKVBootstrapServer):  # type: ignore[misc]
    """Where decode ranks ask for prefill ranks."""
