"""DeepEP under its own name: `import deep_ep` then finds fabric's Buffer. Never installed by default.

    import fabric_moe.deep_ep

    fabric_moe.deep_ep.install(max_tokens=8192)     # before whoever imports deep_ep
    from deep_ep import Buffer

`Buffer` takes DeepEP V1's constructor: a process group, and sizes that are not needed here. Host tensors; what the
calls do is in fabric_moe.deepep. Importing this module needs neither torch nor DeepEP; `install` needs torch.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fabric_core import ConfigError, TransferEngine, Unsupported
from fabric_moe import deepep
from fabric_moe.deep_ep_meet import meet

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "uninstall"]

_NAMES = ("deep_ep", "deep_ep.utils")


class EventHandle:
    """An event of work that is over."""

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class EventOverlap(deepep.Event):
    """See `deepep.Event`. Takes what DeepEP's takes."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.extra_tensors = extra_tensors


class Config:
    """DeepEP's tuning numbers: taken, kept, and of no effect. No memory is asked for by them."""

    def __init__(
        self, num_sms: int = 20, num_max_nvl_chunked_send_tokens: int = 6, num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6, num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:  # fmt: skip
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: groups are made, and memory registered, at the first call with a shape."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """See get_nvl_buffer_size_hint."""
        return 0


class Buffer(deepep.Buffer):
    """One rank's buffer, made as DeepEP's is. Opens an engine of its own; `destroy` closes it.

    Args:
        group: torch.distributed's process group, or what has rank, world_size and all_gather_obj. All its ranks make
            the Buffer together.

    Raises Unsupported: enable_shrink, or an mpi4py communicator in place of a group.
    """

    num_sms = 20
    settings: dict[str, Any] = {}  # noqa: RUF012  # what `install` was given: of all Buffers of the process

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
    ) -> None:  # fmt: skip
        if enable_shrink:
            raise Unsupported("enable_shrink: ranks are not masked here; a lost rank is a RankLost that names it")
        if group is None or comm is not None:
            raise Unsupported("comm: an mpi4py communicator is not taken; give torch.distributed's process group")
        more = dict(self.settings)
        backend = more.pop("backend", None)
        rank, ranks, board = meet(group)
        engine = TransferEngine.open("cpu", backend)
        super().__init__(engine, board, rank, ranks, **more)
        self.group, self.low_latency_mode = group, low_latency_mode

    def destroy(self) -> None:
        """Leave all groups, and close the engine. Idempotent."""
        super().destroy()
        self._engine.close()

    # ---- DeepEP's names of arguments, which callers give by keyword

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """See `deepep.Buffer`."""
        return deepep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to clean."""

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept in `num_sms`; no effect in host memory."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:  # type: ignore[override]
        """Return a Config, which has no effect."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:  # type: ignore[override]
        """Return a Config, which has no effect."""
        return Config(Buffer.num_sms)


def install(*, max_tokens: int = 8192, backend: str | None = None, timeout: float = 10.0) -> ModuleType:
    """Have `import deep_ep` find this. Again: the same module, with other settings. Returns it.

    Args:
        max_tokens: of one rank in one `dispatch`, the same on all ranks. timeout: seconds that a call waits for others.
        backend: of the engine that each Buffer opens; None: FABRIC_BACKEND, or the best that works here.

    Raises ConfigError: DeepEP itself is installed.
    """
    import torch

    known = sys.modules.get("deep_ep")
    if known is None and importlib.util.find_spec("deep_ep") is not None:
        raise ConfigError("DeepEP is installed here as deep_ep: uninstall it, or import fabric_moe.deep_ep by its name")
    if known is not None and getattr(known, "Buffer", None) is not Buffer:
        where = getattr(known, "__file__", None)
        raise ConfigError(f"deep_ep was imported already, from {where}: call install() before that")
    Buffer.settings = {"max_tokens": max_tokens, "backend": backend, "timeout": timeout}
    if known is not None:
        return known
    names = {
        "Buffer": Buffer, "Config": Config, "EventOverlap": EventOverlap, "EventHandle": EventHandle,
        "topk_idx_t": torch.int64,
    }  # fmt: skip
    for name in _NAMES:
        module = ModuleType(name, f"fabric's {name}: see fabric_moe.deep_ep")
        module.__spec__ = ModuleSpec(name, None, is_package=name == "deep_ep")
        module.__dict__.update(names)
        sys.modules[name] = module
    found = sys.modules["deep_ep"]
    found.__path__ = []
    found.utils = sys.modules["deep_ep.utils"]  # type: ignore[attr-defined]
    return found


def uninstall() -> None:
    """Undo `install`. What was imported from it stays as it is."""
    if getattr(sys.modules.get("deep_ep"), "Buffer", None) is Buffer:
        for name in _NAMES:
            sys.modules.pop(name, None)
