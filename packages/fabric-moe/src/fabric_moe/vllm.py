"""vLLM's prepare/finalize pair over this package's groups: tokens go to their experts' ranks and come back as sums.

    FabricPrepareAndFinalize            rows as they came, each once, with the ids of its experts here
    FabricBatchedPrepareAndFinalize     [experts, capacity] rows

Classes for `FusedMoEKernel(prepare_finalize, experts)` of vLLM 0.32; vLLM itself has no option yet that would choose
them (docs/engines.md). Importing this module imports vLLM. Host tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # type: ignore[import-not-found]
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # type: ignore[import-not-found]
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id  # type: ignore[import-not-found]

from fabric_core import BadRange, ConfigError, TransferEngine, Unsupported
from fabric_moe.deepep_parts import Groups, in_bytes
from fabric_moe.errors import StepError
from fabric_moe.group import MoeGroup
from fabric_moe.meet import Board
from fabric_moe.vllm_quant import quantised, quantised_rows, scales_that_came

if TYPE_CHECKING:
    import torch

__all__ = ["FabricBatchedPrepareAndFinalize", "FabricPrepareAndFinalize"]


@dataclass(slots=True)
class _Step:
    """A micro-batch between prepare and finalize."""

    group: MoeGroup
    step: Any
    scales: Any  #: of the tokens that were sent, or None
    view: Any = None


class _Fabric(mk.FusedMoEPrepareAndFinalizeModular, Groups):  # type: ignore[misc]
    """What both have in common. Groups are opened at the first call with a shape, by all ranks together.

    Args:
        engine, board, rank, ranks: as for `MoeGroup.open`; rank r holds the experts that vLLM's linear placement
            gives it.
        max_tokens: of one rank in one call. job: name on the board. timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self, engine: TransferEngine, board: Board, rank: int, ranks: int, *, max_tokens: int, job: str = "vllm",
        timeout: float = 10.0,
    ) -> None:  # fmt: skip
        mk.FusedMoEPrepareAndFinalizeModular.__init__(self)
        Groups.__init__(self, engine, board, rank, ranks, max_tokens=max_tokens, job=job, timeout=timeout)
        self._under_way: dict[int, _Step] = {}  # by micro-batch

    def num_dispatchers(self) -> int:
        return self.ranks

    def output_is_reduced(self) -> bool:
        return True

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def supports_async(self) -> bool:
        return True

    # ---- there

    def prepare_async(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Any]]:  # fmt: skip
        """Send; the hook waits for the others, the receiver gives the rows. See vLLM's base class."""
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise Unsupported(f"apply_router_weight_on_input with top-{topk_ids.shape[1]}: top-1 only")
            a1 = a1 * topk_weights.to(a1.dtype)
        early = quant_config.is_block_quantized and not defer_input_quant
        x, scales = quantised(a1, quant_config, sent=True) if early else (a1, None)
        kind = str(a1.dtype).removeprefix("torch.")
        group = self._group(num_experts, topk_ids.shape[1], x, scales, self._max_tokens, out=kind)
        self._must_be_linear(group, expert_map)
        weights = topk_weights.new_ones(topk_weights.shape) if apply_router_weight_on_input else topk_weights
        step = group.dispatch_send(x, topk_ids.long(), weights.float(), scales=in_bytes(scales))
        under_way = self._under_way[dbo_current_ubatch_id()] = _Step(group, step, scales)
        received: list[Any] = []

        def hook() -> None:
            if not received:
                received.append(group.dispatch_recv(step))

        def receiver() -> Any:
            hook()
            rows, more, meta, ids, kept = self._rows(under_way, received[0], num_experts)
            if not early and not defer_input_quant and rows.numel():
                rows, more = quantised_rows(rows, quant_config)
            return rows, more, meta, ids, kept

        return hook, receiver

    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Any:  # fmt: skip
        """`prepare_async`, and wait."""
        return self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )[1]()  # fmt: skip

    def _rows(self, under_way: _Step, received: Any, num_experts: int) -> Any:
        raise NotImplementedError

    def _must_be_linear(self, group: MoeGroup, expert_map: Any) -> None:
        if expert_map is None:
            return
        ours = group.config.experts_of(self.rank)
        held = (expert_map >= 0).nonzero().flatten().tolist()
        if held != list(ours):
            raise ConfigError(
                f"rank {self.rank} holds experts {held[:4]}... by vLLM's map, {ours} here: use the linear placement "
                "without redundant experts"
            )

    # ---- and back

    def finalize_async(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:  # fmt: skip
        """Send the results; the hook waits for the sums, which are in `output` then. See vLLM's base class."""
        under_way = self._under_way.pop(dbo_current_ubatch_id(), None)
        if under_way is None or under_way.view is None:
            raise StepError("finalize without a prepare whose receiver was called")
        self._return(
            under_way, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        done: list[bool] = []

        def hook() -> None:
            if not done:
                done.append(True)
                # vLLM makes `output` in the layout of its input, which may be a transposed one
                sums = output if output.is_contiguous() else output.new_empty(output.shape)
                under_way.group.combine_recv(under_way.step, out=sums)
                if sums is not output:
                    output.copy_(sums)

        return hook, hook

    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> None:  # fmt: skip
        """`finalize_async`, and wait."""
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )[1]()

    def _return(self, under_way: _Step, y: Any, topk_weights: Any, topk_ids: Any, on_input: bool, reduce: Any) -> None:
        raise NotImplementedError


class FabricPrepareAndFinalize(_Fabric):
    """Experts see each token that came once, [M', hidden], with top-k ids of which some are not here."""

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def _rows(self, under_way: _Step, received: Any, num_experts: int) -> Any:
        import torch

        view = under_way.view = received.compact()
        local = torch.from_numpy(view.local_ids).long()
        ours = under_way.group.config.experts_of(self.rank)
        # vLLM's kernels want ids that exist: an expert of another rank, which expert_map makes -1 of
        elsewhere = num_experts - 1 if ours.start == 0 else 0
        ids = torch.where(local >= 0, local + ours.start, elsewhere)
        weights = torch.where(local >= 0, torch.from_numpy(view.weights), 0.0).float()
        return view.tensor(), scales_that_came(view, under_way.scales), _counts(view), ids, weights

    def _return(self, under_way: _Step, y: Any, topk_weights: Any, topk_ids: Any, on_input: bool, reduce: Any) -> None:
        import torch

        view = under_way.view
        if view.rows and isinstance(reduce, TopKWeightAndReduceDelegate):
            # What kernels leave in the places of experts that are not here may be anything, NaN too.
            here = torch.from_numpy(view.local_ids >= 0)[..., None]
            y = torch.where(here, y.reshape(view.rows, here.shape[1], -1).float(), 0.0)
            y = (y if on_input else y * topk_weights[..., None].float()).sum(1)
        elif view.rows:
            y = reduce.apply(
                output=None, fused_expert_output=y, topk_weights=topk_weights, topk_ids=topk_ids,
                apply_router_weight_on_input=on_input,
            )  # fmt: skip
        under_way.group.combine_send(view, y.reshape(view.rows, y.shape[-1]), weighted=False)


class FabricBatchedPrepareAndFinalize(_Fabric):
    """Experts see [experts here, ranks x max_tokens, hidden] and how many rows of each count.

    The ranks of the experts apply the router's weights, so that one row for each rank comes back.
    """

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self._max_tokens

    def _rows(self, under_way: _Step, received: Any, num_experts: int) -> Any:
        view = under_way.view = received.masked(self.ranks * self._max_tokens)
        return view.tensor(), scales_that_came(view, under_way.scales), _counts(view), None, None

    def _return(self, under_way: _Step, y: Any, topk_weights: Any, topk_ids: Any, on_input: bool, reduce: Any) -> None:
        if not isinstance(reduce, TopKWeightAndReduceDelegate):
            raise Unsupported(f"{type(reduce).__name__}: batched experts leave weights and sums to finalize (Delegate)")
        if tuple(y.shape[:2]) != under_way.view.shape:
            raise BadRange(f"results of shape {tuple(y.shape)}: {under_way.view.shape} rows were given out")
        under_way.group.combine_send(under_way.view, y, weighted=True)


def _counts(view: Any) -> Any:
    import torch

    counts = torch.from_numpy(view.counts).int()
    return mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=counts)
