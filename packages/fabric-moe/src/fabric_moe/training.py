"""A mixture-of-experts layer with gradients, over two groups: one for tokens, one for what flows back. Needs torch.

    forward     tokens -> experts -> weighted sums
    backward    gradients of the sums -> experts (by the same routing) -> gradients of the tokens and of the weights

All ranks call `forward`, and later `backward`, of their layers in the same order. Each waits for the others, so every
rank needs a thread of its own. On GPUs `forward` waits once, for the number of rows that came, and `backward` never:
it is queued on the stream of its `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fabric_core import ConfigError
from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import FLOATS
from fabric_moe.group import MoeGroup

__all__ = ["backward_config", "moe_layer"]


def backward_config(config: MoeConfig) -> MoeConfig:
    """Return the shape of the group that carries gradients: a token's, and behind it those of its weights."""
    kind = "float64" if config.wire == "float64" else "float32"
    return replace(
        config, hidden=config.hidden + config.topk, dtype=kind, out_dtype=kind, wire_dtype=None, scale_bytes=0
    )


def moe_layer(forward: MoeGroup, backward: MoeGroup, experts: Iterable[Any]) -> Any:
    """Return an nn.Module: the experts of this rank behind dispatch and combine.

    Its `forward(x, topk_ids, topk_weights)` gives [T, hidden]. experts: modules [n, hidden] -> [n, hidden], this rank's
    in order. backward: the group for gradients, see backward_config. Raises ConfigError if they do not fit.
    """
    return _layer_type()(forward, backward, experts)


@functools.cache
def _layer_type() -> Any:
    """Make the classes that need torch, which is not imported before somebody trains."""
    import torch

    class MoeLayer(torch.nn.Module):  # type: ignore[misc]
        """The experts of this rank behind dispatch and combine. `forward(x, topk_ids, topk_weights)` -> [T, hidden]."""

        def __init__(self, forward: MoeGroup, backward: MoeGroup, experts: Iterable[torch.nn.Module]) -> None:
            """See moe_layer."""
            super().__init__()
            if forward.device != backward.device:
                raise ConfigError(
                    f"tokens are on {forward.device}, their gradients on {backward.device}: open both groups for one "
                    "device"
                )
            if forward.config.dtype not in FLOATS:
                raise ConfigError(
                    f"dtype={forward.config.dtype!r} has no gradients: tokens of {', '.join(FLOATS)} are trained with"
                )
            wanted = backward_config(forward.config)
            if backward.config != wanted or backward.rank != forward.rank:
                raise ConfigError(f"the group for gradients must be made with backward_config(): {wanted}")
            self.tokens, self.gradients = forward, backward
            self.experts = torch.nn.ModuleList(experts)
            held = len(forward.config.experts_of(forward.rank))
            if len(self.experts) != held:
                raise ConfigError(f"rank {forward.rank} holds {held} experts, {len(self.experts)} modules were given")

        def forward(self, x: Any, topk_ids: Any, topk_weights: Any) -> Any:
            """x: [T, hidden] of the group's type; topk_ids, topk_weights: [T, topk]. Gradients: all but the ids'."""
            return _Step.apply(self, topk_ids, x, topk_weights, *self.experts.parameters())

        def compute(self, rows: Any, counts: list[int]) -> Any:
            """Run each expert over its rows."""
            parts = torch.split(rows, counts) if counts else ()
            out = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            return torch.cat(out) if out else rows

    class _Step(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, layer: MoeLayer, ids: Any, x: Any, weights: Any, *parameters: Any) -> Any:
            group = layer.tokens
            step = group.dispatch_send(x, ids, weights)
            view = group.dispatch_recv(step).compact()
            copies = _Copies(group, view)
            with torch.enable_grad():
                rows = view.tensor()[copies.row].requires_grad_()
                y = layer.compute(rows, copies.counts)
            made = y.detach().to(_type(group.config.out_dtype)).to(copies.weights.dtype)
            sums = copies.sums(copies.weights[copies.row, copies.slot, None] * made)
            group.combine_send(view, copies.all_rows(sums))
            ctx.layer, ctx.ids, ctx.weights = layer, ids, weights
            ctx.rows, ctx.y, ctx.parameters, ctx.copies = rows, y, parameters, copies
            return group.combine_recv(step)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            layer, hidden, copies = ctx.layer, ctx.layer.tokens.config.hidden, ctx.copies
            group = layer.gradients
            kind = _type(group.config.dtype)
            given = gradients[0].to(kind)
            packed = torch.cat([given, given.new_zeros((len(given), group.config.topk))], dim=1)
            step = group.dispatch_send(packed, ctx.ids, ctx.weights.detach())
            view = group.dispatch_recv(step).compact()  # the same rows in the same order as forward
            flow = view.tensor()[: copies.rows, :hidden]
            of_copies = flow[copies.row]
            into = copies.weights[copies.row, copies.slot, None].to(kind) * of_copies
            slope = flow.new_zeros((copies.rows, group.config.topk))
            slope[copies.row, copies.slot] = (ctx.y.detach().to(kind) * of_copies).sum(dim=1)
            learning = [p for p in ctx.parameters if p.requires_grad]  # others are frozen
            back, *slopes = torch.autograd.grad(
                ctx.y, [ctx.rows, *learning], into.to(ctx.y.dtype), allow_unused=True, retain_graph=True
            )
            found_slopes = iter(slopes)
            of_parameters = [next(found_slopes) if p.requires_grad else None for p in ctx.parameters]
            total = torch.zeros_like(flow) if back is None else copies.sums(back.to(kind))
            group.combine_send(view, copies.all_rows(torch.cat([total, slope], dim=1)))
            found = group.combine_recv(step)
            of_weights = found[:, hidden : hidden + ctx.weights.shape[1]].to(ctx.weights.dtype)
            return (None, None, found[:, :hidden].to(ctx.rows.dtype), of_weights, *of_parameters)

    return MoeLayer


class _Copies:
    """Which expert here computes which received row: a copy of a row for each, by expert, then by row, then by slot.

    On a GPU the sizes are asked for once, which waits for the tokens; nothing after it waits.
    """

    def __init__(self, group: MoeGroup, view: Any) -> None:
        """view: compact. Raises RankLost if the tokens did not come."""
        import torch

        self._room = view.rows
        if group.device == "cpu":
            self.rows, self.counts = view.rows, view.counts.tolist()
            ids, weights = torch.from_numpy(view.local_ids), torch.from_numpy(view.weights)
        else:
            self.rows, *self.counts = torch.cat([view.source_rows[-1:], view.counts]).tolist()
            group.check()  # before what was read is believed
            ids, weights = view.local_ids[: self.rows], view.weights[: self.rows]
        self.weights = weights  #: [rows, k]
        flat = ids.reshape(-1).long()
        order = torch.argsort(torch.where(flat < 0, len(self.counts), flat), stable=True)[: sum(self.counts)]
        topk = int(ids.shape[1])
        self.row, self.slot = order // topk, order % topk  #: [copies]
        self._here = ids >= 0
        self._at = torch.zeros_like(flat)
        self._at[order] = torch.arange(len(order), device=order.device)
        self._at = self._at.reshape(ids.shape)

    def sums(self, made: Any) -> Any:
        """Add what each row's copies gave, in the order of its top-k: [copies, width] -> [rows, width]."""
        total = made.new_zeros((self.rows, made.shape[1]))
        if not len(made):
            return total
        for j in range(self._here.shape[1]):
            total += made[self._at[:, j]].where(self._here[:, j, None], 0)
        return total

    def all_rows(self, made: Any) -> Any:
        """Return rows as many as the view has, which on a GPU are those that may come."""
        if len(made) == self._room:
            return made
        whole = made.new_empty((self._room, made.shape[1]))
        whole[: len(made)] = made
        return whole


def _type(name: str) -> Any:
    import torch

    kind: Callable[..., Any] = getattr(torch, name)
    return kind
