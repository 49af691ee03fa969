"""DeepEP's `Buffer`, as engines call it, over this package's groups. Host tensors; torch is needed.

The calls and what they return are those of DeepEP V1: `get_dispatch_layout`, `dispatch`, `combine`,
`low_latency_dispatch`, `low_latency_combine`. What differs: how a Buffer is made; events are there and have nothing to
wait for; every call that receives waits for the other ranks, so each rank needs a thread or process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fabric_core import BadRange, Unsupported
from fabric_moe.combine import target_of
from fabric_moe.config import MoeConfig
from fabric_moe.deepep_other import OtherCalls
from fabric_moe.deepep_parts import BLOCK, Event, Handle, in_bytes, padded, to_fp8
from fabric_moe.errors import StepError

__all__ = ["Buffer", "Event", "Handle"]


class Buffer(OtherCalls):
    """One rank's buffer. Groups are opened at the first call with a shape, which all ranks make together.

    Args:
        engine, board, rank: as for `MoeGroup.open`. ranks: of the group.
        max_tokens: of one rank in `dispatch`. job: name of this buffer on the board.
    """

    # ---- throughput

    def get_dispatch_layout(
        self, topk_idx: Any, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, Any, Any, Event]:  # fmt: skip
        """Return (tokens for each rank [R], None, for each expert [E], is_token_in_rank [T, R], event)."""
        import torch

        if topk_idx.numel() and (int(topk_idx.min()) < -1 or int(topk_idx.max()) >= num_experts):
            raise BadRange(
                f"topk_idx goes from {int(topk_idx.min())} to {int(topk_idx.max())}: experts go from 0 to "
                f"{num_experts - 1}, -1 is none"
            )
        owner = self._owner(topk_idx, num_experts)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0].flatten(), minlength=num_experts).int()
        hit = torch.zeros((len(topk_idx), self.ranks + 1), dtype=torch.bool)
        hit.scatter_(1, torch.where(owner < 0, self.ranks, owner), True)
        return hit[:, : self.ranks].sum(0).int(), None, per_expert, hit[:, : self.ranks].clone(), Event()

    def dispatch(
        self, x: Any, handle: Handle | None = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Any = None, topk_weights: Any = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, list[int] | None, Handle | None, Event]:  # fmt: skip
        """Send tokens to the ranks of their experts, each once.

        Args:
            x: [T, H], or (x, scales [T, blocks]). handle: of an earlier dispatch, in place of the routing.
            num_tokens_per_expert: [E], of `get_dispatch_layout`: tells how many experts there are. The other counts are
                not needed.

        Returns (x, local ids [N, k] with -1 elsewhere, weights [N, k] with 0 there, rows of each expert rounded up to
        the alignment, handle, event); with a handle (x, None, None, None, None, event). With num_worst_tokens there are
        that many rows, and no counts.
        """
        import torch

        tokens, scales = x if isinstance(x, tuple) else (x, None)
        cached = handle is not None
        if handle is not None:
            topk_idx, topk_weights, experts = handle.ids, handle.weights, handle.experts
        else:
            if topk_idx is None or num_tokens_per_expert is None:
                raise BadRange("dispatch needs topk_idx and num_tokens_per_expert, or a handle")
            experts = len(num_tokens_per_expert)
        group = self._group(experts, topk_idx.shape[1], tokens, scales, self._max_tokens)
        step = group.dispatch_send(tokens, topk_idx, topk_weights, scales=in_bytes(scales))
        made = Handle(group, step, topk_idx, topk_weights, experts)
        view = made.take()
        rows = view.rows
        if num_worst_tokens and rows > num_worst_tokens:
            raise BadRange(f"{rows} rows arrived, num_worst_tokens is {num_worst_tokens}")
        room = num_worst_tokens or rows
        out = padded(view.tensor(), room)
        if scales is not None:
            flat = torch.from_numpy(view.scales).view(scales.dtype) if rows else scales[:0]
            out = (out, padded(flat, room))
        if handle is not None:
            handle.step, handle.view, handle.group = step, view, group
        if cached:
            return out, None, None, None, None, Event()
        local = torch.from_numpy(view.local_ids).long()
        heavy = torch.where(local >= 0, torch.from_numpy(view.weights), 0)
        counts = [-(-int(n) // expert_alignment) * expert_alignment for n in view.counts]
        weights = None if topk_weights is None else padded(heavy, room)
        return out, padded(local, room, -1), weights, [] if num_worst_tokens else counts, made, Event()

    def combine(
        self, x: Any, handle: Handle, topk_weights: Any = None, bias: Any = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Event]:  # fmt: skip
        """Return (sum of each token's rows [T, H], sum of topk_weights [T, k] or None, event). Nothing is weighted.

        bias: a tensor or two, [T, H], added to the sum.
        """
        biases = [] if bias is None else list(bias) if isinstance(bias, tuple | list) else [bias]
        first = biases[0].contiguous().clone() if biases else None
        for one in biases:  # before anything is sent: a step whose sums have nowhere to go would block the group
            target_of(handle.group, handle.step, one.contiguous())
        handle.revive()
        rows, group = handle.view.rows, handle.group
        group.combine_send(handle.view, x[:rows])
        out = group.combine_recv(handle.step, out=first, accumulate=first is not None)
        for more in biases[1:]:
            out = (out.float() + more.float()).to(out.dtype)
        summed = None if topk_weights is None else self._sum_weights(handle, topk_weights[:rows])
        return out, summed, Event()

    def _sum_weights(self, handle: Handle, weights: Any) -> Any:
        import torch

        blank = torch.zeros((len(handle.ids), handle.ids.shape[1]), dtype=torch.float32)
        side = self._group(handle.experts, handle.ids.shape[1], blank, None, self._max_tokens, out="float32")
        step = side.dispatch_send(blank, handle.ids)
        side.combine_send(side.dispatch_recv(step).compact(), weights.float())
        return side.combine_recv(step)

    # ---- low latency

    def low_latency_dispatch(
        self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Any = None, dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, Handle, Event, Callable[[], None]]:  # fmt: skip
        """Send tokens to their experts' ranks; rows are laid out by expert.

        Returns (x [E_l, R * max, H] or (fp8 x, scales [E_l, R * max, H / 128]), rows of each expert [E_l] int32,
        handle, event, hook). With `return_recv_hook` the tensors are filled when the hook is called. Rows that do not
        count are 0.
        """
        import torch

        if use_ue8m0:
            raise Unsupported("use_ue8m0: packed exponents are not made here; take float32 scales with round_scale")
        hidden, scales = x.shape[1], None
        if use_fp8:
            if hidden % BLOCK:
                raise BadRange(f"hidden={hidden}: a multiple of {BLOCK} for fp8 with scales")
            x, scales = to_fp8(x, round_scale)
        most = num_max_dispatch_tokens_per_rank
        group = self._group(num_experts, topk_idx.shape[1], x, scales, most)
        step = group.dispatch_send(x, topk_idx, scales=in_bytes(scales))
        held, room = len(group.config.experts_of(self.rank)), self.ranks * most
        out = torch.zeros((held, room, hidden), dtype=x.dtype)
        counts = torch.zeros(held, dtype=torch.int32)
        # the scales of one number of all rows lie side by side, as DeepGEMM wants them
        factors = torch.zeros((held, hidden // BLOCK, room)).transpose(1, 2) if use_fp8 else None
        handle = Handle(group, step, topk_idx, None, num_experts, room)

        def hook() -> None:
            if handle.view is not None:
                return
            view = handle.take()
            out.view(torch.uint8).copy_(torch.from_numpy(view.tokens).reshape(out.view(torch.uint8).shape))
            counts.copy_(torch.from_numpy(view.counts))
            if factors is not None:
                factors.copy_(torch.from_numpy(view.scales).view(torch.float32))
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)

        if not return_recv_hook:
            hook()
        return out if factors is None else (out, factors), counts, handle, Event(), hook

    def low_latency_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Handle, use_logfmt: bool = False,
        zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False, out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> tuple[Any, Event, Callable[[], None]]:  # fmt: skip
        """Return (weighted sum of each token's rows [T, H], event, hook). x: [E_l, R * max, H] bfloat16.

        The weights of a token travel now: the experts' ranks multiply, so that one row for each rank comes back.
        """
        import torch

        if handle.view is None:
            raise StepError("low_latency_combine: the hook of low_latency_dispatch was not called")
        if out is not None:
            target_of(handle.group, handle.step, out)  # before anything is sent
        handle.revive()
        ids, group = handle.ids, handle.group
        blank = torch.zeros((len(ids), 1), dtype=torch.float32)
        side = self._group(handle.experts, ids.shape[1], blank, None, group.config.max_tokens, out="float32")
        under_way = side.dispatch_send(blank, ids, topk_weights.float())
        target = torch.empty((len(ids), x.shape[-1]), dtype=torch.bfloat16) if out is None else out
        done: list[bool] = []

        def hook() -> None:
            if done:
                return
            done.append(True)
            handle.view.received.weights = side.dispatch_recv(under_way).weights
            side.discard(under_way)
            group.combine_send(handle.view, x)
            group.combine_recv(handle.step, out=target)
            with contextlib.suppress(StepError):  # that it was discarded, by all ranks
                side.combine_recv(under_way)

        if not return_recv_hook:
            hook()
        return target, Event(), hook

    def _owner(self, ids: Any, experts: int) -> Any:
        import torch

        bounds = MoeConfig(ranks=self.ranks, experts=experts, topk=1, hidden=1, max_tokens=1).expert_bounds
        owner = torch.searchsorted(torch.from_numpy(bounds), ids.long(), right=True) - 1
        return torch.where(ids >= 0, owner, -1)
