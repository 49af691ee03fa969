"""SGLang's managers over numpy pools: what a scheduler's prefill and decode queues do with them."""

from __future__ import annotations

import socket
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
LAYERS, PAGES, PAGE, HEADS, DIM = 3, 40, 4, 4, 8  # bfloat16 numbers, held as two bytes each
AUX = 256
#: all that managers ask their server_args: whether their threads should look for a teardown from time to time
SWITCH = SimpleNamespace(enable_pd_role_switch=True)


class _Pictures:
    """Stands in for torchvision, which SGLang imports for pictures, and which has no wheel for every torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Pictures

        module.__getattr__ = anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def without_pictures() -> None:
    """Have SGLang import without torchvision."""
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():  # asked before, and remembered: transformers goes on without it
        sys.meta_path.append(_Pictures())  # type: ignore[arg-type]


class Pool:
    """One rank's KV: keys and values of each layer, or latents; [pages, PAGE, heads, DIM] of two bytes."""

    def __init__(self, salt: int, heads: int, mla: bool = False, window: bool = False) -> None:
        dice = np.random.default_rng(salt)
        width = 2 * DIM * (1 if mla else heads)
        self.kv = [dice.integers(0, 256, (PAGES, PAGE, width), np.uint8) for _ in range(LAYERS * (1 if mla else 2))]
        self.aux = dice.integers(0, 256, (8, AUX), np.uint8)
        #: keys and values of two layers with a sliding window, whose pages are numbered by themselves
        self.window = [dice.integers(0, 256, (PAGES, PAGE, width), np.uint8) for _ in range(4)] if window else []

    def args(self, rank: int, heads: int) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs, StateType  # type: ignore[import-not-found]

        found = KVArgs()
        found.engine_rank, found.gpu_id, found.ib_device = rank, 0, ""
        found.kv_data_ptrs = [int(x.ctypes.data) for x in self.kv]
        found.kv_data_lens = [x.nbytes for x in self.kv]
        found.kv_item_lens = [x.nbytes // PAGES for x in self.kv]
        found.kv_layer_ids = []
        found.kv_cache_dtype_str = "bfloat16"
        found.aux_data_ptrs, found.aux_data_lens = [int(self.aux.ctypes.data)], [self.aux.nbytes]
        found.aux_item_lens = [AUX]
        found.state_types = []
        for name in (
            "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids", "state_dim_per_tensor",
            "state_slice_outer_counts", "state_conv_shard_groups",
        ):  # fmt: skip
            setattr(found, name, [])
        if self.window:
            found.state_types = [StateType.SWA]
            found.state_data_ptrs = [[int(x.ctypes.data) for x in self.window]]
            found.state_data_lens = [[x.nbytes for x in self.window]]
            found.state_item_lens = [[x.nbytes // PAGES for x in self.window]]
            found.state_layer_ids = [[]]
        found.is_hybrid_mla_backend, found.swa_kv_cache_layout = False, None
        found.kv_head_num, found.total_kv_head_num, found.page_size = heads, HEADS, PAGE
        found.system_dp_rank, found.rust_http_port, found.pp_rank = 0, None, 0
        found.prefill_start_layer, found.prefill_end_layer, found.mla_compression_ratios = 0, LAYERS, None
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def manager(mode: str, pool: Pool, *, tp: int = 1, rank: int = 0, mla: bool = False) -> Any:
    """A manager of the class that SGLang finds under the name of its option."""
    from sglang.srt.disaggregation.utils import (  # type: ignore[import-not-found]
        DisaggregationMode,
        KVClassType,
        TransferBackend,
        get_kv_class,
    )
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    cls = get_kv_class(TransferBackend("fabric"), KVClassType.MANAGER)
    heads = HEADS // tp
    with get_parallel().override(tp_size=tp, moe_tp_size=tp, attn_tp_size=tp, attn_tp_rank=rank, tp_rank=rank):
        return cls(pool.args(rank, heads), DisaggregationMode(mode), SWITCH, mla)


def wait(call: Any, wanted: int, what: str) -> None:
    """Poll until it is so. 0 is SGLang's word for a failure."""
    end = time.monotonic() + LIMIT
    while (found := call()) != wanted:
        assert time.monotonic() < end, f"{what}: {found}, not {wanted}"
        assert found != 0 or wanted == 0, f"{what}: failed"
        time.sleep(0.001)
