"""vLLM's own DeepEP classes find fabric under the name deep_ep. `make test-engines` runs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.model_executor.layers.fused_moe.modular_kernel", reason="make test-engines runs it")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # type: ignore[import-not-found]  # noqa: E402
from deep_ep_group import LIMIT, Group, a_group  # noqa: E402
from vllm_moe_rank import BatchedExperts, Layer, RowExperts, held, run  # noqa: E402

from fabric_moe.deep_ep import install, uninstall  # noqa: E402


@pytest.fixture
def deep_ep() -> Iterator[ModuleType]:
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed here")
    yield install(max_tokens=32, timeout=LIMIT)
    uninstall()


def throughput(deep_ep: ModuleType, group: Group, layer: Layer) -> tuple[Any, Any]:
    """As vLLM's DeepEPHTAll2AllManager and maybe_make_prepare_finalize make them."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import (  # type: ignore[import-not-found]
        DeepEPHTPrepareAndFinalize,
    )

    buffer = deep_ep.Buffer(
        group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
        explicitly_destroy=True,
    )  # fmt: skip
    pair = DeepEPHTPrepareAndFinalize(buffer, 2, 2, held(group.rank).start)
    return pair, RowExperts(layer, group.rank, True)


def low_latency(deep_ep: ModuleType, group: Group, layer: Layer) -> tuple[Any, Any]:
    """As vLLM's DeepEPLLAll2AllManager and maybe_make_prepare_finalize make them."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import (  # type: ignore[import-not-found]
        DeepEPLLPrepareAndFinalize,
    )

    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=9, hidden=layer.hidden, num_ranks=2, num_experts=5
    )
    buffer = deep_ep.Buffer(
        group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=3,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True, enable_shrink=False,
    )  # fmt: skip
    experts = BatchedExperts(layer, group.rank, False, max_num_tokens=9, num_dispatchers=2)
    return DeepEPLLPrepareAndFinalize(buffer, 9, 2), experts


@pytest.mark.parametrize("make", [throughput, low_latency])
def test_vllms_own_classes_over_fabric(deep_ep: ModuleType, make: Any) -> None:
    layer = Layer(2048, torch.bfloat16)  # one of the sizes that vLLM's low-latency class takes

    def work(group: Group) -> int:
        pair, experts = make(deep_ep, group, layer)
        kernel = mk.FusedMoEKernel(pair, experts)
        for step in range(3):
            x, ids, weights = layer.tokens(2 * step + group.rank, 4 + 3 * group.rank)
            found = run(kernel, layer, group.rank, x, ids, weights)
            assert found.dtype == torch.bfloat16
            assert torch.allclose(found.float(), layer.dense(x, ids, weights), rtol=0.03, atol=0.03)
        pair.buffer.destroy()
        return int(experts.rows)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, a_group(2), timeout=LIMIT))
