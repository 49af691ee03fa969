"""`fabric rl`: found by the `fabric` command through the entry point `fabric.commands`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import BAD, guarded, say
from fabric_core.cli.options import Json
from fabric_rlweights.cli_plan import add_to

if TYPE_CHECKING:
    from fabric_rlweights.bench import Watermarks

__all__ = ["rl_app"]

rl_app = typer.Typer(
    help="Weight transfer from trainers to inference ranks.", no_args_is_help=True, rich_markup_mode=None
)


@rl_app.callback()
def rl() -> None:
    """Weight transfer from trainers to inference ranks."""


add_to(rl_app)


@rl_app.command("bench")
@guarded
def bench_command(
    size: Annotated[str, typer.Option(help="Bytes of the model: 64MiB, 2GiB.")] = "256MiB",
    trainers: Annotated[int | None, typer.Option(min=1, max=64, help="Trainer processes: 4.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, max=64, help="Of them, tensor parallel: 2; the rest is FSDP.")
    ] = None,
    receivers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Inference processes, one tensor-parallel engine: 2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Each way is measured so often.")] = 3,
    baselines: Annotated[bool, typer.Option(help="Measure gather-and-broadcast ways beside it, and the limit.")] = True,
    under: Annotated[
        str | None,
        typer.Option(help="Instead: the time under each of these watermarks, 1MiB,16MiB, with fp32 cast to bf16."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Instead: one trainer and one inference rank with their weights there: cuda:0.")
    ] = None,
    offloaded: Annotated[
        bool, typer.Option(help="With --device: the trainer's parameters lie in host memory.")
    ] = False,
    fp8: Annotated[bool, typer.Option(help="With --device: matrices become fp8, with scales of blocks.")] = False,
    double_buffer: Annotated[bool, typer.Option(help="With --device: written beside what is served.")] = False,
    json: Json = False,
) -> None:
    """Update a real job on this host: FSDP2 x TP trainers, passive inference ranks; beside what frameworks do.

    The limit is what as many processes copy by memcpy, all at once, plain or with streaming stores, whichever is
    faster; with --device what one process copies there. Every way must leave the same bytes at the inference ranks:
    exit code 1 if not. Needs torch.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
    from fabric_core.cli.render import size as shown
    from fabric_rlweights.bench import RlBench, bench, watermarks
    from fabric_rlweights.job.launch import Setup, tidy_when_terminated
    from fabric_rlweights.job.model import Model, engine_table

    tidy_when_terminated()
    usual = (4, 2, 2) if device is None else (1, 1, 1)
    trainers, tp, receivers = (n or m for n, m in zip((trainers, tp, receivers), usual, strict=True))
    if device is None and (offloaded or fp8 or double_buffer):
        raise ConfigError("--offloaded, --fp8 and --double-buffer need --device")
    if trainers % tp:
        raise ConfigError(f"--trainers {trainers} is no multiple of --tp {tp}")
    model = Model.of_bytes(bytes_of(size))
    engine_table(model, 0, receivers)  # an error that names the numbers comes before any process is started
    setup = Setup(model, trainers=trainers, receivers=receivers, tp=tp, baselines=baselines)
    if under is not None:
        plain = Setup(
            model, trainers=trainers, receivers=receivers, tp=1, dtype="float32", trainer="fabric_rlweights.job.plain"
        )
        _under(watermarks(plain, [bytes_of(part) for part in under.split(",")], rounds, say), json)
        return
    if device is not None:
        from fabric_rlweights.bench_device import bench_device, setup_for

        setup = replace(setup, offloaded=offloaded, fp8=fp8, double_buffer=double_buffer)
        data = bench_device(setup_for(setup, device), rounds, say)
    else:
        data = bench(setup, rounds, baselines, say)
    problems = [f"{way.name} left other bytes than fabric" for way in data.ways if way.equal is False]
    if json:
        emit_json(Report[RlBench](schema="fabric.rl.bench/1", data=data, problems=problems))
    else:
        out = console()
        ranks = f"{data.trainers} trainers (FSDP2 x TP {data.tp}) -> {data.receivers} inference ranks"
        if device is not None:
            ranks = f"a trainer{' (offloaded)' if offloaded else ''} -> an inference rank on {device}"
        text_lines(
            out,
            f"{shown(data.model_bytes)} of weights, {ranks}, {shown(data.bytes)} to write in {data.pieces} pieces; "
            f"{100 * data.straight:.1f}% straight out of the parameters",
            "",
        )
        columns = [Column("WAY"), *(Column(c, right=True) for c in ("MEDIAN s", "BEST s", "GB/S", "EQUAL"))]
        rows = [
            [way.name, f"{way.median_s:.3f}", f"{min(way.seconds):.3f}", f"{way.gbyte_s:.2f}", _yes(way.equal)]
            for way in data.ways
        ]
        show_table(out, columns, rows)
        if data.of_limit is not None:
            limits = ", ".join(f"{kind} {rate:.2f}" for kind, rate in data.limits_gbyte_s.items())
            ours = data.ways[0].median_s
            over = [f"{way.median_s / ours:.1f} x faster than {way.name}" for way in data.ways[1:]]
            text_lines(out, "", f"{data.of_limit:.2f} of the copy limit ({limits} GB/s); " + ", ".join(over))
    if problems:
        raise typer.Exit(BAD)


def _under(data: Watermarks, json: bool) -> None:
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import Column, console, emit_json, show_table, size, text_lines
    from fabric_rlweights.bench import Watermarks

    if json:
        emit_json(Report[Watermarks](schema="fabric.rl.watermarks/1", data=data))
        return
    out = console()
    text_lines(
        out, f"{data.trainers} trainers -> {data.receivers} inference ranks, {size(data.bytes)} after the cast", ""
    )
    columns = [Column(title, right=True) for title in ("WATERMARK", "PEAK", "SECONDS", "GB/S")]
    rows = [
        [size(run.limit_bytes), size(run.peak_bytes), f"{run.seconds:.3f}", f"{data.bytes / run.seconds / 1e9:.2f}"]
        for run in data.runs
    ]
    show_table(out, columns, rows)


def _yes(equal: bool | None) -> str:
    return "-" if equal is None else "yes" if equal else "NO"


def bytes_of(text: str) -> int:
    """Read "2GiB", "64MiB", "1000". Raises ConfigError."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1, "": 1}
    parts = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text.strip())
    if parts is None or parts[2] not in units:
        raise ConfigError(f"{text!r} is no size; write 64MiB, 2GiB or a number of bytes")
    return int(float(parts[1]) * units[parts[2]])
