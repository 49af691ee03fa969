"""`fabric rl plan`, `explain`, `diff` and `simulate`: what needs no peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import BAD, guarded
from fabric_core.cli.options import Json

if TYPE_CHECKING:
    from fabric_rlweights.boxes import Ints
    from fabric_rlweights.document import Explained, PlanDocument
    from fabric_rlweights.plan import Plan

__all__ = ["add_to"]

_MOST_ROUTES = 40  #: rows that `explain` prints


def add_to(app: typer.Typer) -> None:
    """Add the commands to `fabric rl`."""
    app.command("plan")(plan_command)
    app.command("explain")(explain_command)
    app.command("diff")(diff_command)
    app.command("simulate")(simulate_command)


@guarded
def plan_command(
    trainers: Annotated[Path | None, typer.Argument(help="The trainers' tables, a JSON list.")] = None,
    engines: Annotated[Path | None, typer.Argument(help="The inference ranks' tables, a JSON list.")] = None,
    preset: Annotated[str | None, typer.Option(help="A model and its meshes instead, e.g. kimi-k2-256x128.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan here.")] = None,
    without: Annotated[str, typer.Option(help="Trainer ranks that are not to be used: 3,5.")] = "",
    piece_bytes: Annotated[int, typer.Option(min=1, help="A piece is at most so large.")] = 16 << 20,
    json: Json = False,
) -> None:
    """Work out which trainer rank writes what into which inference rank, and prove that every byte comes once.

    Exit code 2 names what nobody holds, or what two things would be written to.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
    from fabric_core.cli.render import size as shown
    from fabric_rlweights.document import PlanDocument

    document = PlanDocument.of(_made(trainers, engines, preset, without, piece_bytes))
    if output is not None:
        document.save(output)
    if json:
        emit_json(Report[PlanDocument](schema="fabric.rl.plan/1", data=document))
        return
    out = console()
    total = max(sum(document.classes.values()), 1)
    shares = ", ".join(f"{name} {100 * n / total:.1f}%" for name, n in document.classes.items())
    tensors = document.proof["tensors"]
    text_lines(
        out,
        f"{len(document.params)} parameters of {len(document.trainers)} trainers -> {tensors} tensors of "
        f"{len(document.receivers)} inference ranks",
        f"proven: each of {document.proof['elements']} elements is written once"
        + (f", but for {document.proof['left_alone']} that are left alone" if document.proof["left_alone"] else ""),
        f"{document.proof['pieces']} pieces, {shown(document.bytes)}; "
        f"{100 * document.straight_bytes / max(document.bytes, 1):.1f}% straight out of the parameters",
        f"classes by bytes: {shares}",
        "",
    )
    columns = [Column("SIDE"), *(Column(c, right=True) for c in ("RANKS", "LEAST", "MEAN", "MOST", "MOST WRITES"))]
    rows = []
    for side, ranks in (("trainers send", document.trainers), ("receivers get", document.receivers)):
        sizes = [rank.bytes for rank in ranks]
        mean = sum(sizes) // max(len(sizes), 1)
        most = max(rank.writes for rank in ranks)
        rows.append([side, str(len(ranks)), shown(min(sizes)), shown(mean), shown(max(sizes)), str(most)])
    show_table(out, columns, rows)
    notes = [f"{name} is the same memory as {other}" for name, other in document.aliases.items()]
    notes += [f"{name}: {why}" for name, why in document.reasons.items()]
    if notes:
        text_lines(out, "", *notes[:20], *([f"and {len(notes) - 20} more"] if len(notes) > 20 else []))


def _made(trainers: Path | None, engines: Path | None, preset: str | None, without: str, piece_bytes: int) -> Plan:
    from fabric_rlweights.meta import EngineTable, TrainerTable, read_tables
    from fabric_rlweights.plan import Options, make_plan
    from fabric_rlweights.presets import preset as made
    from fabric_rlweights.tables import destination, holdings

    if preset is not None:
        if trainers is not None:
            raise ConfigError("give two files, or --preset, not both")
        params, held, there = made(preset)
    else:
        if trainers is None or engines is None:
            raise ConfigError("give the trainers' and the inference ranks' tables, or --preset NAME")
        params, held = holdings(read_tables(trainers, TrainerTable))  # type: ignore[arg-type]
        there = destination(read_tables(engines, EngineTable), params)  # type: ignore[arg-type]
    try:
        lost = frozenset(int(rank) for rank in without.split(",") if rank)
    except ValueError:
        raise ConfigError(f"--without {without!r}: ranks separated by commas, e.g. 3,5") from None
    unknown = sorted(lost - set(held.rank.tolist()))
    if unknown:
        raise ConfigError(
            f"--without {without}: no trainer rank {unknown[0]} holds anything; there are {_ranks(held.rank)}"
        )
    return make_plan(params, held, there, options=Options(piece_bytes=piece_bytes), without=lost)


def _ranks(rank: Ints) -> str:
    found = sorted(set(rank.tolist()))
    return ", ".join(str(r) for r in found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


@guarded
def explain_command(
    name: Annotated[str, typer.Argument(help="A parameter of the trainers, or a tensor of the inference side.")],
    plan: Annotated[Path | None, typer.Option(help="A saved plan.")] = None,
    preset: Annotated[str | None, typer.Option(help="Or a model and its meshes.")] = None,
    json: Json = False,
) -> None:
    """Say where one parameter goes, box by box: from which rank, to which, how, and what it is fused with."""
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
    from fabric_core.cli.render import size as shown
    from fabric_rlweights.document import Explained

    data = _document(plan, preset).explain(name)
    if json:
        emit_json(Report[Explained](schema="fabric.rl.explain/1", data=data))
        return
    out = console()
    text_lines(out, _headline(data, shown(data.bytes)), *data.why_not_direct)
    if data.fused_with:
        text_lines(out, f"fused with {', '.join(data.fused_with[:8])}{' ...' if len(data.fused_with) > 8 else ''}")
    text_lines(out, "")
    titles = ("TRAINER", "OF", "RECEIVER", "TENSOR", "START", "SIZE", "HOW", "CLASS", "STRAIGHT", "WRITES")
    columns = [Column(title, right=title in ("TRAINER", "OF", "RECEIVER", "WRITES")) for title in titles]
    rows = [
        [
            str(r.trainer), str(r.replicas), str(r.receiver), r.tensor, _tuple(r.start), _tuple(r.size), r.how,
            r.layout, "yes" if r.straight else "no", str(r.writes),
        ]
        for r in data.routes[:_MOST_ROUTES]
    ]  # fmt: skip
    show_table(out, columns, rows)
    if len(data.routes) > _MOST_ROUTES:
        text_lines(out, f"and {len(data.routes) - _MOST_ROUTES} more; --json has all")


def _headline(data: Explained, nbytes: str) -> str:
    what = f"{data.kind} {data.name}"
    if data.shape is not None:
        what += f", {data.dtype} {_tuple(data.shape)}"
    return f"{what}: {len(data.routes)} pieces, {nbytes} in an update"


def _tuple(values: tuple[int, ...]) -> str:
    return "x".join(str(value) for value in values) or "-"


def _document(plan: Path | None, preset: str | None) -> PlanDocument:
    from fabric_rlweights.document import PlanDocument

    if (plan is None) == (preset is None):
        raise ConfigError("give --plan FILE (made by `fabric rl plan -o FILE`) or --preset NAME")
    return PlanDocument.read(plan) if plan is not None else PlanDocument.of(_made(None, None, preset, "", 16 << 20))


@guarded
def diff_command(
    before: Annotated[Path, typer.Argument(help="A saved plan.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    json: Json = False,
) -> None:
    """Say what is routed otherwise in another plan. Exit code 1 if anything is."""
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
    from fabric_core.cli.render import size as shown
    from fabric_rlweights.document import Changes, PlanDocument

    changes = PlanDocument.read(before).diff(PlanDocument.read(after))
    if json:
        emit_json(Report[Changes](schema="fabric.rl.diff/1", data=Changes(params=changes)))
    elif not changes:
        text_lines(console(), "the same routes")
    else:
        columns = [Column("PARAMETER"), *(Column(c, right=True) for c in ("BEFORE", "AFTER", "MOVED"))]
        rows = [[c.param, str(c.before), str(c.after), shown(c.moved_bytes)] for c in changes]
        show_table(console(), columns, rows)
    if changes:
        raise typer.Exit(BAD)


@guarded
def simulate_command(
    preset: Annotated[str, typer.Option(help="A model and its meshes.")] = "kimi-k2-256x128",
    nic: Annotated[str, typer.Option(help="NICs of a GPU, see `fabric sim predict --nics`.")] = "cx7",
    json: Json = False,
) -> None:
    """Predict an update of a large model: the real plan, the core's model of NICs, the paper's preparation costs."""
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import console, emit_json, text_lines
    from fabric_core.cli.render import size as shown
    from fabric_rlweights.simulate import Simulated, simulate

    data = simulate(preset, nic=nic)
    if json:
        emit_json(Report[Simulated](schema="fabric.rl.simulate/1", data=data))
        return
    paper = f" (the paper measured {1e3 * data.paper_total_s:.0f} ms)" if data.paper_total_s else ""
    text_lines(
        console(),
        f"{data.preset} over {data.nic}: {data.total_s * 1e3:.0f} ms{paper}",
        f"  preparing    {data.prepare_s * 1e3:8.1f} ms  at the busiest trainer",
        f"  submitting   {data.submit_s * 1e3:8.1f} ms  at the same",
        f"  magnitudes   {data.exchange_s * 1e3:8.1f} ms",
        f"  wire         {data.wire_exposed_s * 1e3:8.1f} ms  not hidden",
        f"  control      {data.control_s * 1e3:8.1f} ms",
        f"  waiting      {data.waiting_s * 1e3:8.1f} ms  mean of the trainers, for the slowest",
        f"wire floor {data.floor_s * 1e3:.1f} ms, of which this is {100 * data.of_floor:.0f}%: the busiest inference "
        f"rank gets {shown(data.busiest_receiver_bytes)}, the busiest trainer sends {shown(data.busiest_sender_bytes)} "
        f"({data.busiest_sender_bytes / data.mean_sender_bytes:.2f} x the mean)",
        f"{data.params} parameters, {data.pieces} pieces, {data.writes} writes, {shown(data.wire_bytes)}; planned and "
        f"proven in {data.plan_s:.1f} s ({data.plan_cpu_s:.1f} s of CPU); at most {shown(data.backlog_bytes)} of "
        "results wait for a NIC",
    )
