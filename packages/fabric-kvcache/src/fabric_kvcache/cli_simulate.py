"""`fabric kv simulate`: registered by cli_kv.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded
from fabric_core.cli.options import Json

if TYPE_CHECKING:
    from rich.console import Console

    from fabric_kvcache.cache import CacheLayout
    from fabric_kvcache.simulate import KvSimulation

__all__ = ["numbers", "pair", "simulate_command"]


def numbers(text: str, what: str) -> list[int]:
    """Read "4096,32K". Raises ConfigError."""
    found = []
    for word in text.split(","):
        digits = word.strip().upper()
        factor = 1024 if digits.endswith("K") else 1
        digits = digits.removesuffix("K")
        if not digits.isdecimal() or not digits.isascii() or not 1 <= int(digits) * factor <= 1 << 20:
            raise ConfigError(f"{what} {text!r}: numbers from 1 to {1 << 20} with commas between, 4096 or 4K")
        found.append(int(digits) * factor)
    return found


def pair(source: str, to: str) -> tuple[CacheLayout, CacheLayout]:
    """Return the layouts of two names; "" for the second is the first. Raises ConfigError, also for a mismatch."""
    from fabric_kvcache.cli_kv import read_layout
    from fabric_kvcache.match import LayoutMismatch, match

    src = read_layout(source)
    dst = read_layout(to) if to else src
    try:
        match(src, dst)
    except LayoutMismatch as mismatch:
        raise ConfigError(f"{source} cannot be moved into {to}: {mismatch}") from None
    return src, dst


@guarded
def simulate_command(
    preset: Annotated[str, typer.Option(help="The model: qwen3-235b, deepseek-v3, llama3-70b; :tpN changes TP.")],
    to: Annotated[str, typer.Option(help="The decode side's layout: a preset or a JSON file. Default: the same.")] = "",
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "4K,32K,128K",
    chunk_tokens: Annotated[int, typer.Option(min=0, max=1 << 20, help="Of prefill. Default: the preset's.")] = 0,
    nic: Annotated[str, typer.Option(help="The NICs of one GPU: see `fabric sim predict --nics`.")] = "efa-p5en",
    shared: Annotated[int, typer.Option(min=1, max=1024, help="So many ranks share one GPU's NICs.")] = 1,
    posted_us: Annotated[
        float, typer.Option(min=0, help='From "layer ready" to "posted"; `fabric kv bench` measures it.')
    ] = 10.0,
    limit: Annotated[float, typer.Option(min=0, help="Percent; exit code 1 if an overhead is not below it.")] = 1.9,
    json: Json = False,
) -> None:
    """Predict what a KV transfer adds to the time to the first token, on NICs that are not here.

    Compute times are published or estimated, as the table says; transfers are the engine's under virtual time. Nothing
    is measured. Times are microseconds; TRANSFER and COMPUTE are of one layer in the last chunk. AFTERWARDS is what the
    overhead would be if nothing were sent before prefill has ended; PAPER'S is what the paper measured, its engine
    included.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude, console
    from fabric_kvcache.presets import find_preset
    from fabric_kvcache.simulate import KvSimulation, simulate

    chosen = find_preset(preset)
    data = simulate(
        chosen,
        pair(preset, to)[1],
        numbers(tokens, "--tokens"),
        nic=nic,
        chunk_tokens=chunk_tokens,
        shared=shared,
        posted_us=posted_us,
        limit_percent=limit,
    )
    problems = [
        f"{row.tokens} tokens: {row.overhead_percent:.2f} % is not below {limit:g} %"
        for row in data.rows
        if not row.overhead_percent < limit
    ]
    conclude(
        Report[KvSimulation](schema="fabric.kv.simulate/1", data=data, problems=problems),
        None if json else lambda: _show(console(), data),
    )


def _show(out: Console, data: KvSimulation) -> None:
    from fabric_core.cli.render import Column, number, show_table, size, text_lines

    text_lines(
        out,
        f"prefill  {data.preset}, {data.source}",
        f"decode   {data.destination}",
        f"nics     {data.nic}, shared by {data.shared} rank{'s' if data.shared > 1 else ''}; simulated, not measured",
        *(f"compute  {origin}" for origin in sorted({row.compute_origin for row in data.rows})),
        "",
    )
    columns = [
        Column("TOKENS", right=True),
        Column("CHUNKS", right=True),
        Column("WRITES/LAYER", right=True, drop=2),
        Column("BYTES", right=True, drop=3),
        Column("COMPUTE", right=True),
        Column("TRANSFER", right=True),
        Column("HIDDEN"),
        Column("EXPOSED", right=True),
        Column("TTFT(ms)", right=True),
        Column("OVERHEAD", right=True),
        Column("AFTERWARDS", right=True, drop=1),
        Column("PAPER'S", right=True, drop=1),
        Column("BOUND", drop=4),
    ]
    rows = [
        [
            str(row.tokens),
            str(row.chunks),
            str(row.layer_writes[-1]),
            size(row.write_bytes),
            number(row.compute_us[-1], 0),
            number(row.transfer_us[-1], 0),
            "yes" if row.hidden else "no",
            number(row.exposed_us, 0),
            number(row.ttft_ms, 0),
            f"{row.overhead_percent:.2f} %",
            f"{row.afterwards_percent:.1f} %",
            "-" if row.paper_overhead_percent is None else f"{row.paper_overhead_percent:.1f} %",
            row.bound,
        ]
        for row in data.rows
    ]
    show_table(out, columns, rows)
    text_lines(out, "", f"every overhead is below {data.limit_percent:g} %" if data.good else "TOO MUCH is exposed")
