"""`fabric kv bench`: registered by cli_kv.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded, say
from fabric_core.cli.options import Json
from fabric_kvcache.cli_simulate import numbers

if TYPE_CHECKING:
    from rich.console import Console

    from fabric_kvcache.bench.report import KvBench, KvBenchRow
    from fabric_kvcache.bench.run import Question

__all__ = ["bench_command"]

_TAIL_BYTES = 1 << 19  # of a layout from a file, which does not tell its vocabulary
_MAX_COMPUTE_US = 1e7  # of one layer


@guarded
def bench_command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET|FILE]...", help="What to move. Default: every preset.")
    ] = None,
    *,
    to: Annotated[str, typer.Option(help="The decode side's layout: a preset or a file. Default: the same.")] = "",
    tokens: Annotated[str, typer.Option(help="Lengths of prompts: 4096,32K.")] = "4096",
    chunk_tokens: Annotated[int, typer.Option(min=0, max=1 << 20, help="Of prefill. Default: the preset's.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Run only so many of the model's layers; 0: all.")] = 16,
    compute_us: Annotated[
        float, typer.Option(min=0, help="Compute time of a layer; 0: published or estimated, for a file 1000.")
    ] = 0.0,
    ready: Annotated[str, typer.Option(help="Who submits a layer: hook, busy, watcher, or poll.")] = "hook",
    memory: Annotated[str, typer.Option(help="engine, user or gpu; or HERE:THERE.")] = "engine",
    adjacent: Annotated[bool, typer.Option("--adjacent/--random", help="Where a request's pages lie.")] = False,
    merge: Annotated[bool, typer.Option("--merge/--no-merge", help="Join adjacent pieces to one write.")] = True,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Repeat all in turn; medians.")] = 3,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every byte.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of page tables and data.")] = 1,
    nics: Annotated[int | None, typer.Option(min=1, max=8, help="NICs of the prefill side.")] = None,
    peer_nics: Annotated[int | None, typer.Option(min=1, max=8, help="Of the decode side; --nics.")] = None,
    backend: Annotated[str, typer.Option(help="Backend to use; default FABRIC_BACKEND.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, max=500, help="Seconds for a transfer beside compute.")] = 60.0,
    json: Json = False,
) -> None:
    """Measure KV transfers between two processes of this host, with the shapes of real models.

    Every figure is the transfer of one prompt into one decode rank, by all prefill ranks that have something for it,
    which one process plays. First as fast as it goes (GB/S, CPU), then while layers compute (EXPOSED, POSTED): compute
    is a clock, and no processor is used by it. Pages lie anywhere in both pools. Exit code 1: data arrived wrong.

    --ready hook: the model's thread submits, and sleeps between layers. busy: the same, and it computes between layers,
    as a model does that runs on processors. watcher: a word is bumped, as a GPU does it, and the engine's thread
    submits. poll: a thread that polls the engine all the time does, and one on the other side waits so too: a core
    each.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude, console
    from fabric_kvcache.bench.report import KvBench
    from fabric_kvcache.bench.run import run
    from fabric_kvcache.bench.sender import Ready
    from fabric_kvcache.presets import PRESETS

    if ready not in get_args(Ready):
        raise ConfigError(f"--ready {ready!r}: must be hook, busy, watcher or poll")
    kinds = memory.split(":")
    if len(kinds) > 2 or not set(kinds) <= {"engine", "user", "gpu"}:
        raise ConfigError(f"--memory {memory!r}: must be engine, user or gpu, or two of them (here:there)")
    questions = [
        _question(model, to, count, chunk_tokens=chunk_tokens, layers=layers, compute_us=compute_us)
        for model in models or list(PRESETS)
        for count in numbers(tokens, "--tokens")
    ]
    data = run(
        questions,
        rounds=rounds,
        memory=memory,
        backend=backend,
        nics=nics,
        peer_nics=peer_nics if peer_nics is not None else nics,
        ready=cast("Ready", ready),
        merge=merge,
        adjacent=adjacent,
        verify=verify,
        seed=seed,
        timeout=timeout,
        progress=say if sys.stderr.isatty() else lambda _: None,
    )
    problems = [data.verdict] if any(row.wrong_bytes or row.surplus for row in data.rows) else []
    conclude(
        Report[KvBench](schema="fabric.kv.bench/1", data=data, problems=problems),
        None if json else lambda: _show(console(), data),
    )


def _question(model: str, to: str, tokens: int, *, chunk_tokens: int, layers: int, compute_us: float) -> Question:
    from fabric_kvcache.bench.run import Question
    from fabric_kvcache.bench.work import cut_layers
    from fabric_kvcache.cli_simulate import pair
    from fabric_kvcache.presets import PRESETS, find_preset

    if not 0 <= compute_us <= _MAX_COMPUTE_US:  # typer's bounds let nan pass
        raise ConfigError(f"--compute-us {compute_us:g}: microseconds of a layer, from 0 to {_MAX_COMPUTE_US:g}")
    src, dst = pair(model, to)
    preset = find_preset(model) if model.partition(":")[0] in PRESETS else None
    # The chunks of a file without a preset are those of any preset: only their times are the model's.
    shape = preset or next(iter(PRESETS.values()))
    chunks = shape.chunks(tokens, chunk_tokens)
    if compute_us or preset is None:
        times, origin = [compute_us or 1000.0] * len(chunks), "given" if compute_us else "made up: 1000 us"
    else:
        times, origin = preset.compute_us(tokens, chunk_tokens), preset.origin(tokens, chunk_tokens)
    return Question(
        name=model if preset else Path(model).name,
        src=cut_layers(src, layers),
        dst=cut_layers(dst, layers),
        tokens=tokens,
        chunks=chunks,
        chunk_tokens=chunk_tokens or shape.chunk_tokens,
        compute_us=times,
        compute_origin=origin,
        model_layers=src.total_layers,
        tail_bytes=preset.tail_bytes if preset else _TAIL_BYTES,
    )


def _show(out: Console, data: KvBench) -> None:
    from fabric_core.cli.render import Column, show_table, text_lines

    text_lines(out, *(f"{key:<10} {value}" for key, value in data.machine.items()))
    text_lines(out, f"{'backend':<10} {data.backend}, {data.nics} NICs here, {data.peer_nics} there")
    text_lines(out, f"{'run':<10} " + ", ".join(f"{key} {value}" for key, value in data.parameters.items()))
    origins = sorted({f"{row.name}: {row.compute_origin}" for row in data.rows})
    text_lines(out, f"{'compute':<10} " + "; ".join(origins), "")
    columns = [
        Column("NAME"),
        Column("TOKENS", right=True),
        Column("CHUNKS", right=True, drop=6),
        Column("LAYERS", right=True),
        Column("RANKS", right=True, drop=7),
        Column("WRITES", right=True),
        Column("OF", right=True, drop=5),
        Column("PLAN(us)", right=True, drop=4),
        Column("GB/S", right=True),
        Column("LIMIT", right=True, drop=3),
        Column("%LIMIT", right=True),
        Column("CPU/WRITE(us)", right=True, drop=2),
        Column("POSTED(us)", right=True),
        Column("p99", right=True, drop=1),
        Column("COMPUTE(us)", right=True),
        Column("EXPOSED(us)", right=True),
        Column("%", right=True),
        Column("%MODEL", right=True),
        Column("WRONG", right=True),
    ]
    show_table(out, columns, [_row(row) for row in data.rows])
    text_lines(
        out,
        "",
        "POSTED: from a layer that is ready to the return of its last submit. EXPOSED: from the last layer that is",
        "ready until the receiver has seen everything, the tail too; % of the compute of the layers that were run,",
        "%MODEL of all the model's. CPU: both processes, copying included. COMPUTE: of a layer in the last chunk.",
        data.verdict,
    )


def _row(row: KvBenchRow) -> list[str]:
    from fabric_core.cli.render import number, size

    return [
        row.name,
        str(row.tokens),
        str(row.chunks),
        f"{row.layers}/{row.model_layers}",
        str(row.source_ranks),
        str(row.writes),
        size(row.write_bytes),
        number(row.plan_us, 0),
        number(row.gbyte_s),
        "-" if row.limit_gbyte_s is None else f"{row.limit} {row.limit_gbyte_s:.2f}",
        number(row.limit_percent, 0),
        number(row.sender_cpu_us_per_write + row.receiver_cpu_us_per_write),
        number(row.posted_p50_us),
        number(row.posted_p99_us),
        number(row.compute_us[-1], 0),
        number(row.exposed_us, 0),
        number(row.overhead_percent),
        number(row.overhead_model_percent),
        "-" if row.wrong_bytes is None else str(row.wrong_bytes),
    ]
