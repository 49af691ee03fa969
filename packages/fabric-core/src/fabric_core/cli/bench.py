"""`fabric bench`: the command line. `bench_run.py` runs it, `bench_ops.py` measures, `bench_peer.py` answers."""

from __future__ import annotations

import csv
import sys
from typing import Annotated

import typer
from rich.console import Console

from fabric_core.cli import ping_meet
from fabric_core.cli.guard import BAD, USAGE, guarded, say
from fabric_core.cli.models import Bench, BenchRow, Report
from fabric_core.cli.options import Json
from fabric_core.cli.ping_backend import On, Port, Provider, choose, find
from fabric_core.cli.render import Column, console, emit_json, number, show_table, size, text_lines
from fabric_core.errors import ConfigError

__all__ = ["command", "parse_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_ASK_SECONDS = 5.0  #: ... a host for an address

#: Without an operation on the command line: a look at everything. (op, sizes, pages)
_TOUR: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("imm", (64,), 1),
    ("submit", (64,), 1),
    ("sendrecv", (64, 4096), 1),
    ("write", (4096, 65536, 1 << 20, 16 << 20, 64 << 20), 1),
    ("paged", (4096 * 1024,), 4096),
    ("paged", (1024 * 32768,), 1024),
)

#: First and last size of a sweep where -b and -e are not given.
_SWEEP = {
    "write": (4096, 64 << 20),
    "paged": (1024, 256 << 10),
    "imm": (64, 64),
    "sendrecv": (64, 16384),
    "submit": (64, 64),
}


def parse_size(text: str) -> int:
    """Read "64", "4K", "1M", "2G" (binary units). Raises BadParameter."""
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = word[-1:] if word[-1:] in "KMG" else ""
    digits = word.removesuffix(unit).strip()
    if not digits.isdecimal() or int(digits) * _UNITS[unit] < 1:
        raise typer.BadParameter(f"{text!r} is no size; write 64, 4K, 1M")
    return int(digits) * _UNITS[unit]


def _sizes(op: str, begin: str, end: str, *, factor: int, page_len: str, pages: int) -> list[int]:
    first, last = _SWEEP[op]
    if begin:
        first = parse_size(begin)
        last = first if not end else last
    if end:
        last = parse_size(end)
    if page_len:
        first = last = parse_size(page_len)
    if first > last:
        raise typer.BadParameter(f"a sweep from {first} down to {last} bytes", param_hint="-b, -e")
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return [length * pages for length in found] if op == "paged" else found


@guarded
def command(
    op: Annotated[str, typer.Argument(metavar="[write|paged|imm|sendrecv|submit]", help="Without: a tour.")] = "",
    *,
    begin: Annotated[str, typer.Option("-b", help="First size (of a page for paged): 64, 4K, 1M.")] = "",
    end: Annotated[str, typer.Option("-e", help="Last size.")] = "",
    factor: Annotated[int, typer.Option("-f", min=2, max=1024, help="Factor between sizes.")] = 4,
    n: Annotated[int, typer.Option("-n", min=0, max=10_000_000, help="Operations of a figure; 0: by size.")] = 0,
    window: Annotated[int, typer.Option("-w", min=1, max=4096, help="Operations in flight.")] = 16,
    nics: Annotated[int | None, typer.Option("--nics", min=1, max=8, help="NICs on this side.")] = None,
    peer_nics: Annotated[int | None, typer.Option("--peer-nics", min=1, max=8, help="On the other; --nics.")] = None,
    memory: Annotated[str, typer.Option("--memory", help="engine, user or gpu; or HERE:THERE.")] = "engine",
    pages: Annotated[int, typer.Option("--pages", min=1, max=65536, help="Pages of one paged write.")] = 64,
    page_len: Annotated[str, typer.Option("--page-len", help="Length of a page: instead of a sweep.")] = "",
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare the data.")] = True,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Repeat all in turn; medians.")] = 1,
    serve: Annotated[str, typer.Option("--serve", metavar="NAME", help="Only answer, under this name.")] = "",
    connect: Annotated[
        str, typer.Option("--connect", metavar="HOST|ADDR", help="Measure with a peer that serves.")
    ] = "",
    backend: Annotated[str, typer.Option("--backend", help="Backend to use; default FABRIC_BACKEND.")] = "",
    provider: Provider = "",
    on: On = "",
    port: Port = ping_meet.PORT,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    json: Json = False,
) -> None:
    """Measure writes, pages, immediates and messages between two processes.

    The second process is started for you; for two terminals: `fabric bench --serve NAME` in one, `fabric bench write
    --connect ADDR` in the other; for two machines: `fabric bench --backend efa --on eth0 --serve NAME`, and `fabric
    bench write --connect HOST`. `--memory` is where the data are: shareable host memory, ordinary host memory, or a
    GPU (cuda:0); `gpu:engine` sends from the GPU into host memory. Times are microseconds, Gbit/s are decimal. %LIMIT
    compares with what this machine's memory allows, measured between the figures. Exit code 1: data arrived wrong.
    """
    from fabric_core.cli import bench_run
    from fabric_core.cli.bench_ops import OPS

    if serve and connect:
        raise ConfigError(f"--serve {serve} --connect {connect}: answer, or measure; give one of them")
    if serve:
        from fabric_core.cli.ping import answer

        answer(serve, nics, choose(backend, provider, on), port)
        return
    if op and op not in OPS:
        raise typer.BadParameter(f"{op!r}: must be one of {', '.join(OPS)}", param_hint="operation")
    kinds = memory.split(":")
    if len(kinds) > 2 or not set(kinds) <= {"engine", "user", "gpu"}:
        raise typer.BadParameter(
            f"{memory!r}: must be engine, user or gpu, or two of them (here:there)", param_hint="--memory"
        )
    if "gpu" in kinds and op == "imm":
        raise typer.BadParameter("imm compares marks in host memory: use engine or user", param_hint="--memory")
    if json and as_csv:
        say("error: --json and --csv exclude each other")
        raise typer.Exit(USAGE)
    todo = (
        [(op, _sizes(op, begin, end, factor=factor, page_len=page_len, pages=pages), pages)]
        if op
        else [(a, list(b), c) for a, b, c in _TOUR if "gpu" not in kinds or a != "imm"]
    )
    backend = choose(backend, provider, on)
    jobs = [
        bench_run.Job(name, length, count if name == "paged" else 1, n, window, verify)
        for name, sizes, count in todo
        for length in sizes
    ]
    data = bench_run.run(
        jobs,
        rounds=rounds,
        memory=memory,
        backend=backend,
        nics=nics,
        peer_nics=peer_nics if peer_nics is not None else nics,
        connect=str(find(connect, backend, port, _ASK_SECONDS)) if connect else "",
        progress=say if sys.stderr.isatty() else lambda _: None,
    )
    wrong = sum(row.wrong_bytes or 0 for row in data.rows)
    if json:
        problems = [
            f"{row.op} {row.size_bytes}: {row.wrong_bytes} bytes are wrong" for row in data.rows if row.wrong_bytes
        ]
        emit_json(Report[Bench](schema="fabric.bench/1", data=data, problems=problems))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(BenchRow.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in data.rows)
    else:
        _show(data, console())
    if wrong:
        raise typer.Exit(BAD)


def _show(data: Bench, out: Console) -> None:
    text_lines(out, *(f"{key:<10} {value}" for key, value in data.machine.items()))
    text_lines(out, f"{'backend':<10} {data.backend}, {data.nics} NICs here, {data.peer_nics} there ({data.address})")
    text_lines(out, f"{'run':<10} " + ", ".join(f"{key} {value}" for key, value in data.parameters.items()), "")
    columns = [
        Column("OP"),
        Column("SIZE", right=True),
        Column("PAGES", right=True, drop=4),
        Column("N", right=True, drop=3),
        Column("TIME(us)", right=True),
        Column("p99", right=True),
        Column("GBIT/S", right=True),
        Column("GB/S", right=True, drop=2),
        Column("%LIMIT", right=True),
        Column("LIMIT(GB/s)", right=True, drop=5),
        Column("MOPS", right=True, drop=1),
        Column("POST(us)", right=True),
        Column("p99", right=True, drop=6),
        Column("WRONG", right=True),
    ]
    show_table(out, columns, [_row(row) for row in data.rows])
    text_lines(out, "", data.verdict)


def _row(row: BenchRow) -> list[str]:
    limit = "-" if row.limit_gbyte_s is None else f"{row.limit} {row.limit_gbyte_s:.2f}"
    return [
        row.op,
        size(row.size_bytes),
        str(row.pages) if row.pages > 1 else "-",
        str(row.n),
        number(row.time_p50_us),
        number(row.time_p99_us),
        number(row.gbit_s),
        number(row.gbyte_s),
        number(row.limit_percent, 0),
        limit,
        number(row.mops, 3),
        number(row.post_p50_us),
        number(row.post_p99_us),
        "-" if row.wrong_bytes is None else str(row.wrong_bytes),
    ]
