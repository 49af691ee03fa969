"""`fabric kv`: found by the `fabric` command through the entry point `fabric.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError, ProtocolError
from fabric_core.cli.guard import guarded
from fabric_core.cli.options import Json
from fabric_kvcache.cli_bench import bench_command
from fabric_kvcache.cli_proxy import proxy_command
from fabric_kvcache.cli_simulate import simulate_command

if TYPE_CHECKING:
    from rich.console import Console

    from fabric_kvcache.cache import CacheLayout
    from fabric_kvcache.explain import KvExplain

__all__ = ["kv_app", "read_layout"]

kv_app = typer.Typer(help="KV caches between prefill and decode.", no_args_is_help=True, rich_markup_mode=None)


@kv_app.callback()
def kv() -> None:
    """KV caches between prefill and decode."""


kv_app.command("bench")(bench_command)
kv_app.command("simulate")(simulate_command)
kv_app.command("proxy")(proxy_command)


@kv_app.command("explain")
@guarded
def explain_command(
    source: Annotated[str, typer.Argument(help="The prefill side's layout: a JSON file, or a preset.")],
    destination: Annotated[str, typer.Argument(help="The decode side's.")],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Length of the prompt that is counted.")] = 4096,
    seed: Annotated[int, typer.Option(help="Which replicas send, where several could.")] = 0,
    json: Json = False,
) -> None:
    """Say whether one KV cache can be moved into another, and how many writes and bytes that takes.

    Exit code 1 if it cannot. The format of the files is in the README of fabric-kvcache. Presets are qwen3-235b,
    deepseek-v3 and llama3-70b; qwen3-235b:tp8 is one with another TP degree, ./NAME a file that is called like one.
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude, console
    from fabric_kvcache.explain import KvExplain, explain

    data = explain(read_layout(source), read_layout(destination), tokens=tokens, seed=seed)
    problems = [data.reason] if data.reason else []
    conclude(
        Report[KvExplain](schema="fabric.kv.explain/1", data=data, problems=problems),
        None if json else lambda: _show(console(), data),
    )


def read_layout(text: str) -> CacheLayout:
    """Return the layout of a preset, or of a file. Raises ConfigError, ProtocolError."""
    from fabric_kvcache.cache import MAX_JSON, CacheLayout
    from fabric_kvcache.presets import PRESETS, find_preset

    if text.partition(":")[0] in PRESETS:
        return find_preset(text).layout
    path = Path(text)
    try:
        with path.open("rb") as file:
            return CacheLayout.from_json(file.read(MAX_JSON + 1))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it is no preset either ({', '.join(PRESETS)})") from None
    except ProtocolError as error:
        raise ProtocolError(f"{path}: {error}") from None


def _show(out: Console, data: KvExplain) -> None:
    from fabric_core.cli.render import Column, show_table, size, text_lines

    if not data.works:
        text_lines(out, f"does not work: {data.reason}")
        return
    text_lines(
        out,
        f"works: a prompt of {data.tokens} tokens takes {data.writes} writes with {data.bytes} bytes "
        f"({size(data.bytes)}), all ranks together",
        f"per token: {data.writes_per_token:.4g} writes, {data.bytes_per_token:.0f} bytes",
        f"if its pages are adjacent on both sides: {data.writes_adjacent} writes",
        _ranks(data),
        "",
    )
    columns = [
        Column("LAYERS"),
        Column("KIND"),
        Column("WRITES/PAGE", right=True),
        Column("BYTES/PAGE", right=True),
        Column("LONGEST", right=True),
        Column("WRITES", right=True),
        Column("ADJACENT", right=True),
        Column("BYTES", right=True),
    ]
    rows = [
        [
            group.layers,
            group.kind,
            f"{group.writes_per_page:.4g}",
            f"{group.bytes_per_page:.0f}",
            size(group.longest_bytes),
            str(group.writes),
            str(group.writes_adjacent),
            size(group.bytes),
        ]
        for group in data.groups
    ]
    show_table(out, columns, rows)
    for group in data.groups:
        text_lines(
            out,
            "",
            f"layers {group.layers}",
            f"  source       {group.source} ({group.source_axes})",
            f"  destination  {group.destination} ({group.destination_axes})",
        )


def _ranks(data: KvExplain) -> str:
    least, most = data.sources_least, data.sources_most
    count = str(most) if least == most else f"{least} to {most}"
    return (
        f"a destination rank is written by {count} source rank{'' if count == '1' else 's'}; "
        f"the busiest source rank sends {data.busiest_source:.2f} x the mean"
    )
