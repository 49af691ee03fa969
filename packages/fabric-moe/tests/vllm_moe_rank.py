"""Experts in plain torch as vLLM's kernels see them, and one rank of a layer that vLLM's own kernel class runs."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # type: ignore[import-not-found]
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # type: ignore[import-not-found]
from vllm.model_executor.layers.fused_moe.config import (  # type: ignore[import-not-found]
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # type: ignore[import-not-found]
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

RANKS, EXPERTS, TOPK, INNER = 2, 5, 3, 8  # five experts: rank 0 holds one more


def config_of(rank: int, hidden: int, kind: Any) -> Any:
    """vLLM's description of the layer on one rank."""
    parallel = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=RANKS, dp_rank=rank, ep_size=RANKS, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    return FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=TOPK, hidden_dim=hidden, intermediate_size=INNER,
        num_local_experts=len(held(rank)), num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=kind,
    )  # fmt: skip


def held(rank: int) -> range:
    """The experts of a rank, as vLLM places them: the first ranks hold one more."""
    return range(0, 3) if rank == 0 else range(3, 5)


def map_of(rank: int) -> Any:
    """vLLM's expert_map: number of an expert here, -1 elsewhere."""
    return torch.tensor([e - held(rank).start if e in held(rank) else -1 for e in range(EXPERTS)], dtype=torch.int32)


class Layer:
    """The same weights everywhere; what a layer without ranks makes of tokens."""

    def __init__(self, hidden: int, kind: Any) -> None:
        dice = torch.Generator().manual_seed(hidden)
        self.hidden, self.kind = hidden, kind
        self.w1 = (torch.randn((EXPERTS, INNER, hidden), generator=dice) / hidden**0.5).to(kind)
        self.w2 = (torch.randn((EXPERTS, hidden, INNER), generator=dice) / INNER**0.5).to(kind)

    def expert(self, e: int, x: Any) -> Any:
        return torch.relu(x.float() @ self.w1[e].float().T) @ self.w2[e].float().T

    def dense(self, x: Any, ids: Any, weights: Any, on_input: bool = False) -> Any:
        """[T, hidden] float32."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for t in range(len(x)):
            for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                out[t] += self.expert(e, x[t] * w).float() if on_input else w * self.expert(e, x[t])
        return out

    def tokens(self, salt: int, count: int, topk: int = TOPK) -> tuple[Any, Any, Any]:
        dice = torch.Generator().manual_seed(salt)
        x = torch.randn((count, self.hidden), generator=dice).to(self.kind)
        ids = torch.rand((count, EXPERTS), generator=dice).topk(topk, dim=1).indices
        return x, ids, torch.rand((count, topk), generator=dice)


class _Plain(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Answers vLLM's questions; `garbage` is what kernels leave where an expert is not here."""

    garbage = float("nan")

    def __init__(self, layer: Layer, rank: int, reduces: bool, **more: Any) -> None:
        quant = FusedMoEQuantConfig.make()
        super().__init__(config_of(rank, layer.hidden, layer.kind), quant, **more)
        self.layer, self.rank, self.reduces = layer, rank, reduces
        self.rows = 0

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP() if self.reduces else TopKWeightAndReduceDelegate()


class RowExperts(_Plain):
    """Standard format: [M, hidden] and ids of all experts."""

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
        return (0,), (0,), (M, K) if self.reduces else (M, topk, K)

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *rest: Any,
        expert_map: Any, expert_tokens_meta: Any, apply_router_weight_on_input: bool, **more: Any,
    ) -> None:  # fmt: skip
        self.rows += len(hidden_states)
        counted = [0] * len(held(self.rank))
        output.fill_(0 if self.reduces else self.garbage)
        for m, row in enumerate(topk_ids.tolist()):
            for j, e in enumerate(row):
                if (here := int(expert_map[e])) < 0:
                    continue
                counted[here] += 1
                y = self.layer.expert(e, hidden_states[m]).to(output.dtype)
                if self.reduces:
                    output[m] += y if apply_router_weight_on_input else y * topk_weights[m, j].to(y.dtype)
                else:
                    output[m, j] = y
        assert expert_tokens_meta.expert_num_tokens.tolist() == counted


class BatchedExperts(_Plain):
    """[experts here, capacity, hidden], of which the first rows of each expert count."""

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
        return (0,), (0,), (len(held(self.rank)), M, K)

    def apply(self, output: Any, hidden_states: Any, *rest: Any, expert_tokens_meta: Any, **more: Any) -> None:
        output.fill_(self.garbage)
        for here, count in enumerate(expert_tokens_meta.expert_num_tokens.tolist()):
            self.rows += count
            rows = hidden_states[here, :count]
            output[here, :count] = self.layer.expert(held(self.rank).start + here, rows).to(output.dtype)


def run(kernel: Any, layer: Layer, rank: int, x: Any, ids: Any, weights: Any, on_input: bool = False) -> Any:
    """One call of vLLM's kernel on one rank."""
    ours = slice(held(rank).start, held(rank).stop)
    return kernel.apply(
        x, layer.w1[ours], layer.w2[ours], weights, ids, activation=MoEActivation.SILU, global_num_experts=EXPERTS,
        expert_map=map_of(rank), apply_router_weight_on_input=on_input,
    )  # fmt: skip
