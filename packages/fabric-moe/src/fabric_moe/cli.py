"""`fabric moe`: found by the `fabric` command through the entry point `fabric.commands`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded
from fabric_core.cli.options import Json
from fabric_moe.cli_simulate import memory_command, simulate_command

if TYPE_CHECKING:
    from fabric_moe.bench import MoeBench

__all__ = ["moe_app"]

moe_app = typer.Typer(help="Expert dispatch and combine.", no_args_is_help=True, rich_markup_mode=None)


@moe_app.callback()
def moe() -> None:
    """Expert dispatch and combine."""


@moe_app.command("bench")
@guarded
def bench_command(
    preset: Annotated[str, typer.Option(help="A shape: decode, prefill or small.")] = "small",
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Ranks, each a process of this host.")] = 2,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a rank; default: the preset's.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Elements of a token.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of all ranks together.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    private: Annotated[
        list[int] | None, typer.Option(min=0, help="Rows that are sent before the counts are known. Repeatable.")
    ] = None,
    shared_rows: Annotated[int | None, typer.Option(min=1, help="Rows of memory beyond those.")] = None,
    steps: Annotated[int, typer.Option("-n", "--steps", min=1, max=1_000_000, help="Measured steps.")] = 200,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 20,
    backend: Annotated[str, typer.Option(help="NIC backend, see `fabric plugins`.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of tokens and routing.")] = 0,
    groups: Annotated[int, typer.Option(min=1, help="Groups of experts that the gate knows; DeepSeek-V3: 8.")] = 1,
    most_groups: Annotated[
        int | None, typer.Option(min=1, help="Groups that a token's experts come from at most; DeepSeek-V3: 4.")
    ] = None,
    in_c: Annotated[
        bool, typer.Option("--proxy/--no-proxy", help="Send from C, or from Python as where that was not built.")
    ] = True,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 600.0,
    json: Json = False,
) -> None:
    """Measure dispatch and combine between processes of this host, and compare results with the reference.

    Times are those of the slowest rank in each step. Exit code 1 if a token was wrong. Needs torch.
    """
    from dataclasses import asdict
    from importlib.util import find_spec

    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude
    from fabric_moe.bench import MoeBench, run
    from fabric_moe.gate import Limit
    from fabric_moe.presets import preset as named

    if find_spec("torch") is None:
        raise ConfigError("fabric moe bench compares with a reference in torch: pip install torch")
    given = {"max_tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk, "shared_rows": shared_rows}
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if hidden is not None:
        changes["scale_bytes"] = -(-hidden // 128) * 4 if named(preset).scale_bytes else 0
    shapes = [
        named(preset).config(
            ranks, **changes, timeout=60.0, **({} if p is None else {"private_tokens": p, "private_max": p})
        )
        for p in (private or [None])  # type: ignore[list-item]
    ]
    gate = Limit(groups, most_groups or groups)
    data = MoeBench(
        preset=preset, backend=backend, cpus=_cpus(), groups=gate.groups, most_groups=gate.most,
        config=asdict(shapes[0]), runs=[],
    )  # fmt: skip
    for shape in shapes:
        data.runs.append(
            run(shape, steps=steps, warmup=warmup, backend=backend, seed=seed, limit=limit, gate=gate, in_c=in_c)
        )
    wrong = sum(one.wrong for one in data.runs)
    problems = [f"{wrong} tokens differ from the reference"] if wrong else []
    conclude(
        Report[MoeBench](schema="fabric.moe.bench/1", data=data, problems=problems),
        None if json else lambda: _show_bench(data),
    )


def _cpus() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _show_bench(data: MoeBench) -> None:
    from fabric_core.cli.render import Column, console, show_table, size, text_lines

    out = console()
    columns = [
        Column("RANKS", right=True), Column("PRIVATE", right=True), Column("PHASE"), Column("p50 us", right=True),
        Column("p90", right=True, drop=1), Column("p99", right=True), Column("p99.9", right=True, drop=2),
        Column("LIMIT us", right=True), Column("COMPARED", right=True, drop=3), Column("WRONG", right=True),
    ]  # fmt: skip
    rows = []
    for one in data.runs:
        bounds = {"dispatch": one.bound_dispatch_us, "combine": one.bound_combine_us}
        for phase in one.phases:
            figures = [f"{value:.0f}" for value in (phase.p50_us, phase.p90_us, phase.p99_us, phase.p999_us)]
            bound = f"{bounds[phase.name]:.0f}" if phase.name in bounds else "-"
            rows.append(
                [
                    str(one.ranks),
                    str(one.private_tokens),
                    phase.name,
                    *figures,
                    bound,
                    str(one.compared),
                    str(one.wrong),
                ]
            )
    show_table(out, columns, rows)
    for one in data.runs:
        text_lines(
            out,
            f"{one.ranks} ranks, private {one.private_tokens}: a rank sends {size(one.dispatch_bytes)} in dispatch ("
            f"tokens and scales {size(one.dispatch_least_bytes)}, a copy for each expert {size(one.copies_bytes)}) and "
            f"{size(one.combine_bytes)} in combine; {one.late_rows:.1f} rows wait for the counts; "
            f"memory {size(one.memory_bytes)}",
        )
    if data.most_groups < data.groups:
        text_lines(out, f"a token's experts are of {data.most_groups} of {data.groups} groups")
    if not all(one.in_c for one in data.runs):
        text_lines(out, "Python sends, not the proxy")
    text_lines(
        out,
        f"limit: those bytes of all ranks, copied once by {data.cpus} CPUs at {data.runs[0].copy_gb_s:.1f} GB/s each",
    )


moe_app.command("simulate")(simulate_command)
moe_app.command("memory")(memory_command)
