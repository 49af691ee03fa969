"""`fabric moe simulate` and `fabric moe memory`: answers that need no other rank."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded
from fabric_core.cli.models import Model
from fabric_core.cli.options import Json

if TYPE_CHECKING:
    from fabric_moe.simulate import Answer, Check, Kernels

__all__ = ["memory_command", "simulate_command"]


class MoeSimulation(Model):
    """What `simulate --json` prints."""

    kernels: dict[str, Any]
    answers: list[dict[str, Any]]
    checks: list[dict[str, Any]]


class MoeMemory(Model):
    """What `memory --json` prints: bytes by use."""

    config: dict[str, Any]
    bytes: dict[str, int]


@guarded
def simulate_command(
    preset: Annotated[str, typer.Option(help="A shape: decode, prefill or small.")] = "decode",
    nic: Annotated[
        list[str] | None, typer.Option(help="NICs of a GPU, see `fabric sim predict --nics`. Repeatable.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, max=2048, help="Sizes of the group. Repeatable.")] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="What is sent: a copy for each expert, rank or node. Repeatable.")
    ] = None,
    node: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 8,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a rank; default: the preset's.")] = None,
    kernels: Annotated[str, typer.Option(help="What GPUs add: paper, asked (a goal) or h200 (measured).")] = "paper",
    first_us: Annotated[float | None, typer.Option(min=0, help="Launch of dispatch to its first bytes.")] = None,
    recv_us: Annotated[float | None, typer.Option(min=0, help="Last row to the end of dispatch.")] = None,
    combine_first_us: Annotated[float | None, typer.Option(min=0, help="Launch of combine to its first bytes.")] = None,
    combine_recv_us: Annotated[float | None, typer.Option(min=0, help="Last row to the end of combine.")] = None,
    nvlink: Annotated[float, typer.Option(min=1, help="GB/s of a GPU, one way, to others of its node.")] = 450.0,
    groups: Annotated[int, typer.Option(min=1, help="Groups of experts that the gate knows; DeepSeek-V3: 8.")] = 1,
    most_groups: Annotated[
        int | None, typer.Option(min=1, help="Groups that a token's experts come from at most; DeepSeek-V3: 4.")
    ] = None,
    hop: Annotated[float, typer.Option(min=0, help="Once per node: us of a flag's way to a GPU of the node.")] = 2.6,
    whole: Annotated[bool, typer.Option(help="Once per node: pass on when all has come, as NodeGroup does.")] = False,
    json: Json = False,
) -> None:
    """Predict dispatch and combine on a cluster: real engine, virtual time, NICs with a cost model.

    GPU kernels are inputs, not predictions.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import emit_json
    from fabric_moe.gate import Limit
    from fabric_moe.presets import preset as named
    from fabric_moe.simulate import KERNELS, simulate, table_checks

    if kernels not in KERNELS:
        raise ConfigError(f"--kernels {kernels}: there are {', '.join(KERNELS)}")
    ways = way or ["expert", "rank", "node"]
    for word in ways:
        if word not in ("expert", "rank", "node"):
            raise ConfigError(f"--way {word}: there are expert, rank and node")
    given = {
        "first": first_us,
        "dispatch_recv": recv_us,
        "combine_first": combine_first_us,
        "combine_recv": combine_recv_us,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    used = replace(KERNELS[kernels], **changes, **({"name": "given"} if changes else {}))  # type: ignore[arg-type]
    limit = None if most_groups is None and groups == 1 else Limit(groups, most_groups or groups)
    alike: dict[str, Any] = {
        "shape": preset, "kernels": used, "node": node, "tokens": tokens, "nvlink_gb_s": nvlink, "limit": limit,
        "hop_us": hop, "whole": whole,
    }  # fmt: skip
    answers = [
        simulate(n, r, way=w, **alike)  # type: ignore[arg-type]
        for n in nic or ["cx7", "efa-p5en"]
        for r in ranks or [8, 16, 32, 64, 128, 256]
        for w in ways
        if way or w != "node" or r <= max(node, named(preset).experts)  # which NodeGroup does not take
    ]
    checks = table_checks()
    if json:
        data = MoeSimulation(
            kernels=asdict(used), answers=[a.model_dump() for a in answers], checks=[c.model_dump() for c in checks]
        )
        emit_json(Report[MoeSimulation](schema="fabric.moe.simulate/1", data=data, problems=[]))
    else:
        passing = f"passing on in a node: {hop:g} us and {'all rows' if whole else 'the share of one node'}"
        _show(answers, checks, used, f"{passing} at {nvlink:g} GB/s")


def _show(answers: list[Answer], checks: list[Check], kernels: Kernels, passing: str) -> None:
    from fabric_core.cli.render import Column, console, show_table, text_lines

    def beside(value: float, published: float | None) -> str:
        return "-" if published is None else f"{published:.1f} ({100 * (value / published - 1):+.0f}%)"

    out = console()
    columns = [
        Column("NIC"), Column("RANKS", right=True), Column("ONCE PER"), Column("MEETS", right=True, drop=3),
        Column("DISPATCH us", right=True),
        Column("PAPER", right=True, drop=1), Column("LEAST", right=True, drop=2), Column("COMBINE us", right=True),
        Column("PAPER", right=True, drop=1), Column("LEAST", right=True, drop=2),
    ]  # fmt: skip
    rows = [
        [
            a.nic, str(a.ranks), a.way, f"{a.meets:.2f}", f"{a.dispatch_us:.1f}",
            beside(a.dispatch_us, a.published_dispatch_us), f"{a.least_dispatch_us:.1f}", f"{a.combine_us:.1f}",
            beside(a.combine_us, a.published_combine_us), f"{a.least_combine_us:.1f}",
        ]
        for a in answers
    ]  # fmt: skip
    show_table(out, columns, rows)
    text_lines(
        out,
        f"kernels ({kernels.name}): dispatch first bytes {kernels.first:g} us, receive {kernels.dispatch_recv:g} us; "
        f"combine first bytes {kernels.combine_first:g} us, receive {kernels.combine_recv:g} us: {kernels.source}",
        f"experts drawn: {answers[0].routing}; {passing}" if answers else "",
        "MEETS: experts, ranks or nodes that a token is sent to. "
        "LEAST: the same bytes at the NIC's nominal rate. PAPER: as published, once per expert.",
        *(
            f"{c.nic}, {c.what}: {c.predicted_us:.2f} us, the paper's Tables 8 and 9 say {c.paper_us:.2f} "
            f"({c.off_percent:+.1f}%)"
            for c in checks
        ),
    )


@guarded
def memory_command(
    preset: Annotated[str, typer.Option(help="A shape: decode, prefill or small.")] = "decode",
    ranks: Annotated[int, typer.Option(min=1, max=65535, help="Ranks of the group.")] = 64,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a rank; default: the preset's.")] = None,
    private_max: Annotated[int | None, typer.Option(min=0, help="Private rows kept for each other rank.")] = None,
    shared_rows: Annotated[int | None, typer.Option(min=1, help="Rows beyond those; default: the worst case.")] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Steps under way at a time.")] = 2,
    json: Json = False,
) -> None:
    """Say how much memory a rank registers, by use. Nothing is allocated."""
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, size
    from fabric_moe.presets import preset as named

    given = {"max_tokens": tokens, "private_max": private_max, "shared_rows": shared_rows}
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if private_max is not None:
        changes["private_tokens"] = min(32, private_max)
    config = named(preset).config(ranks, depth=depth, **changes)
    data = MoeMemory(config=asdict(config), bytes=config.memory())
    if json:
        emit_json(Report[MoeMemory](schema="fabric.moe.memory/1", data=data, problems=[]))
        return
    rows = [[name, size(count), str(count)] for name, count in data.bytes.items()]
    show_table(console(), [Column("USE"), Column("SIZE", right=True), Column("BYTES", right=True)], rows)
