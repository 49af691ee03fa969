"""`fabric sim predict`: what NICs would do, by the cost model; beside the paper's figures with `--paper`."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from fabric_core.cli.guard import guarded
from fabric_core.cli.options import Json
from fabric_core.cli.render import Column, console, show_table, size, text_lines
from fabric_core.errors import ConfigError
from fabric_core.sim_predict import SHARD_BYTES, Loss, Nic, Prediction, Row, compare, lose_nic, nics, predict

__all__ = ["predict_command"]

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Op(StrEnum):
    """What is done."""

    WRITE = "write"
    PAGES = "pages"
    SCATTER = "scatter"


def _bytes(text: str) -> int:
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(word[-1:], 1)
    digits = word[:-1] if unit > 1 else word
    if not digits.isdecimal():
        raise ConfigError(f"{text}: a number of bytes is wanted, such as 4096, 64K or 1MiB")
    return int(digits) * unit


def _changes(items: list[str] | None) -> dict[str, int]:
    values: dict[str, int] = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not equals or not value.isdecimal():
            raise ConfigError(f"--set {item}: NAME=VALUE is wanted, VALUE a whole number")
        values[name] = int(value)
    return values


@guarded
def predict_command(
    nic: Annotated[str, typer.Option(help="The NICs of one GPU; `--nics` lists them.")] = "cx7",
    op: Annotated[Op, typer.Option(help="What is done.")] = Op.WRITE,
    nbytes: Annotated[str, typer.Option("--size", help="Bytes of the write, of a page, or for each target.")] = "1MiB",
    pages: Annotated[
        int | None, typer.Option(help="Pages of one transfer; 1024, or 256 in a stream.", min=1, max=65536)
    ] = None,
    peers: Annotated[int, typer.Option(help="Receivers.", min=1, max=255)] = 1,
    depth: Annotated[
        int | None, typer.Option(help="Transfers under way at a time; 1, or 4 in a stream.", min=1, max=256)
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard-bytes", help="The engine cuts a write from this size on for all NICs.")
    ] = str(SHARD_BYTES),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a number of the NIC. Repeatable."),
    ] = None,
    lose: Annotated[bool, typer.Option("--lose-nic", help="Lose one NIC of a steady stream.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's figures beside predictions.")] = False,
    table: Annotated[bool, typer.Option("--nics", help="List the NICs and their numbers.")] = False,
    json: Json = False,
) -> None:
    """Predict what an operation costs: the real engine under virtual time, over NICs with a cost model."""
    if table:
        _show_nics(nics(), json)
    elif paper:
        _show_paper(compare(), json)
    elif lose:
        found = lose_nic(
            nic, op.value, size=_bytes(nbytes), pages=pages or 256, depth=depth or 4, costs=_changes(changes)
        )
        _show_loss(found, json)
    else:
        answer = predict(
            nic,
            op.value,
            size=_bytes(nbytes),
            pages=pages or 1024,
            peers=peers,
            depth=depth or 1,
            shard_bytes=_bytes(shard),
            costs=_changes(changes),
        )
        _show(answer, json)


def _show(found: Prediction, json: bool) -> None:
    if json:
        rates = {"gbyte_per_s": found.bytes_per_s / 1e9, "gbit_per_s": found.gbit_per_s, "ops_per_s": found.ops_per_s}
        print(json_module.dumps(asdict(found) | rates, indent=2))
        return
    what = f"{found.op} of {size(found.size)}" + (f" x {found.writes}" if found.writes > 1 else "")
    busy = ", ".join(f"{name} {share:.0%}" for name, share in found.busy.items() if share >= 0.005)
    text_lines(
        console(),
        f"{found.nic}: {what}: {found.seconds * 1e6:.2f} us, {found.bytes_per_s / 1e9:.2f} GB/s "
        f"({found.gbit_per_s:.1f} Gbit/s), {found.ops_per_s:,.0f} op/s",
        f"bound by {found.bound} (at work: {busy}); {found.requests:g} requests, "
        f"posted within {found.posting_s * 1e6:.2f} us",
    )


def _show_loss(found: Loss, json: bool) -> None:
    if json:
        print(json_module.dumps(asdict(found) | {"fair": found.fair}, indent=2))
        return
    worth = f"{found.nics - 1} of {found.nics} NICs are worth {found.fair:.0%} of it"
    text_lines(
        console(),
        f"before: {found.before / 1e9:.2f} GB/s; {worth}",
        f"10 ms after the loss: {found.soon / 1e9:.2f} GB/s ({found.soon / found.before:.1%})",
        f"1 s after it: {found.later / 1e9:.2f} GB/s ({found.later / found.before:.1%})",
        f"{found.failed} transfers failed with the NIC and were submitted again",
    )


def _show_paper(rows: list[Row], json: bool) -> None:
    if json:
        print(json_module.dumps([asdict(row) | {"deviation": row.deviation} for row in rows], indent=2))
        return
    columns = [
        Column("NIC"),
        Column("WHAT"),
        Column("UNIT"),
        Column("PAPER", right=True),
        Column("PREDICTED", right=True),
        Column("OFF BY", right=True),
        Column("BOUND", drop=2),
        Column("FITTED", drop=1),
    ]
    shown = [
        [
            row.nic,
            row.what,
            row.unit,
            "saturated" if row.paper is None else f"{row.paper:.2f}",
            f"{row.predicted:.2f}",
            "-" if row.deviation is None else f"{row.deviation:+.1f}%",
            row.bound,
            row.fitted or "-",
        ]
        for row in rows
    ]
    show_table(console(), columns, shown)


def _show_nics(found: list[Nic], json: bool) -> None:
    if json:
        print(json_module.dumps([asdict(nic) for nic in found], indent=2))
        return
    names = list(found[0].costs)
    columns = [Column("NUMBER"), *(Column(nic.name, right=True) for nic in found)]
    show_table(console(), columns, [[name, *(str(nic.costs[name]) for nic in found)] for name in names])
    text_lines(console(), *(f"{nic.name}: {nic.help}" for nic in found))
