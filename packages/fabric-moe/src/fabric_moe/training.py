"""A mixture-of-experts layer with gradients, over two groups: one for tokens, one for what flows back. Needs torch.

    forward     tokens -> experts -> weighted sums
    backward    gradients of the sums -> experts (by the same routing) -> gradients of the tokens and of the weights

All ranks call `forward`, and later `backward`, of their layers in the same order; each waits for the others, so every
rank needs a thread of its own.
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
            if (forward.device, backward.device) != ("cpu", "cpu"):
                raise ConfigError("gradients flow through host memory only so far: open both groups with device='cpu'")
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

        def compute(self, view: Any, rows: Any) -> Any:
            """Run each expert over its rows of a contiguous view."""
            out = [
                expert(rows[int(view.offsets[e]) : int(view.offsets[e + 1])]) for e, expert in enumerate(self.experts)
            ]
            return torch.cat(out) if out else rows

    class _Step(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, layer: MoeLayer, ids: Any, x: Any, weights: Any, *parameters: Any) -> Any:
            group = layer.tokens
            step = group.dispatch_send(x, ids, weights)
            view = group.dispatch_recv(step).contiguous()
            with torch.enable_grad():
                rows = view.tensor().requires_grad_()
                y = layer.compute(view, rows)
            group.combine_send(view, y.detach().to(_type(group.config.out_dtype)))
            ctx.layer, ctx.ids, ctx.weights = layer, ids, weights
            ctx.rows, ctx.y, ctx.parameters = rows, y, parameters
            ctx.positions = torch.from_numpy(view.positions)
            ctx.heavy = torch.from_numpy(view.received.weights)
            return group.combine_recv(step)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            layer, hidden = ctx.layer, ctx.layer.tokens.config.hidden
            group = layer.gradients
            kind = _type(group.config.dtype)
            given = gradients[0].to(kind)
            packed = torch.cat([given, given.new_zeros((len(given), group.config.topk))], dim=1)
            step = group.dispatch_send(packed, ctx.ids, ctx.weights.detach())
            view = group.dispatch_recv(step).compact()  # the same rows in the same order as forward
            flow = view.tensor()[:, :hidden]
            y = ctx.y.detach().to(kind)
            into = torch.zeros_like(y)
            slope = flow.new_zeros((len(flow), group.config.topk))
            for j, row, at in _copies(ctx.positions):
                into[at] = ctx.heavy[row, j, None].to(kind) * flow[row]
                slope[row, j] = (y[at] * flow[row]).sum(dim=1)
            learning = [p for p in ctx.parameters if p.requires_grad]  # others are frozen
            back, *slopes = torch.autograd.grad(
                ctx.y, [ctx.rows, *learning], into.to(ctx.y.dtype), allow_unused=True, retain_graph=True
            )
            found_slopes = iter(slopes)
            of_parameters = [next(found_slopes) if p.requires_grad else None for p in ctx.parameters]
            total = torch.zeros_like(flow)
            for _, row, at in _copies(ctx.positions) if back is not None else ():
                total[row] += back[at].to(kind)
            group.combine_send(view, torch.cat([total, slope], dim=1))
            found = group.combine_recv(step)
            of_weights = found[:, hidden : hidden + ctx.weights.shape[1]].to(ctx.weights.dtype)
            return (None, None, found[:, :hidden].to(ctx.rows.dtype), of_weights, *of_parameters)

    return MoeLayer


def _copies(positions: Any) -> Iterable[tuple[int, Any, Any]]:
    """For each slot of the top-k: the received rows that have an expert here in it, and where its results lie."""
    import torch

    for j in range(positions.shape[1]):
        row = torch.nonzero(positions[:, j] >= 0).ravel()
        yield j, row, positions[row, j]


def _type(name: str) -> Any:
    import torch

    kind: Callable[..., Any] = getattr(torch, name)
    return kind
