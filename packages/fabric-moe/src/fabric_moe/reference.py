"""What dispatch and combine compute, in plain torch and in one process: the oracle of tests and of `fabric moe bench`.

It shares no code with the rest of the package, and uses torch's own conversions between types. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["owner_of", "reference"]


def owner_of(expert: int, experts: int, ranks: int) -> int:
    """Return the rank that holds an expert: blocks in order, the first ones larger by one if it does not divide."""
    each, more = divmod(experts, ranks)
    wide = more * (each + 1)
    return expert // (each + 1) if expert < wide else more + (expert - wide) // each


def reference(
    x: Sequence[Any],
    ids: Sequence[Any],
    weights: Sequence[Any],
    expert: Callable[[int, Any], Any],
    *,
    ranks: int,
    experts: int,
    hidden: int,
    out_dtype: str,
    wire_dtype: str,
    added: Sequence[Any] | None = None,
    masked: Sequence[int] = (),
    weighted: bool = True,
) -> list[Any]:
    """Return what every rank gets from combine: a tensor [T, hidden] for each.

    Args:
        x, ids, weights: of each rank, tensors [T, ...], [T, k], [T, k].
        expert: (number, tokens [n, ...]) -> results [n, hidden]; must treat each row alone.
        added: of each rank, what is in the output already and is added to.

    For each token and each rank of its experts, in the order of the ranks: weight times result is added in float32 (or
    float64 if that is the type of the sums), in the order of the token's experts; the sum is rounded to `wire_dtype`.
    These are added in float32, then `added`, and rounded to `out_dtype`.
    """
    import torch

    kind = torch.float64 if wire_dtype == "float64" else torch.float32
    wire, last = getattr(torch, wire_dtype), getattr(torch, out_dtype)
    results = []
    for r, tokens in enumerate(x):
        rows = []
        for t in range(len(ids[r])):
            by_rank: dict[int, list[int]] = {}
            for j, e in enumerate(ids[r][t].tolist()):
                if e >= 0 and owner_of(e, experts, ranks) not in masked:
                    by_rank.setdefault(owner_of(e, experts, ranks), []).append(j)
            total: Any = None
            for d in sorted(by_rank):
                part: Any = None
                for j in by_rank[d]:
                    y = expert(int(ids[r][t, j]), tokens[t : t + 1])[0].to(kind)
                    term = y * weights[r][t, j].to(kind) if weighted else y
                    part = torch.zeros_like(term) + term if part is None else part + term
                sent = part.to(wire).to(kind)
                total = torch.zeros_like(sent) + sent if total is None else total + sent
            rows.append(total)
        done = [torch.zeros(hidden, dtype=kind) if row is None else row for row in rows]
        summed = torch.stack(done) if done else torch.zeros((0, hidden), dtype=kind)
        if added is not None:
            summed = summed + added[r].to(kind)
        results.append(summed.to(last))
    return results
