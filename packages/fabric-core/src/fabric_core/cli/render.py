"""Tables for people: optional columns give way on a narrow terminal, and colour never stands alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_core.cli.guard import BAD
from fabric_core.cli.models import Report

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Column", "conclude", "console", "emit_json", "number", "rate", "show_table", "size", "text_lines"]

_STYLES = {
    "ok": "green",
    "up": "green",
    "warn": "yellow",
    "filtered": "yellow",
    "duplicate": "yellow",
    "skip": "dim",
    "fail": "bold red",
    "failed": "bold red",
    "incompatible": "bold red",
    "down": "red",
}

#: Output that goes into a file or a pipe is not cut to a terminal's width.
_UNLIMITED = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `drop`: 0 stays; the higher, the earlier it is left out when the terminal is narrow."""

    title: str
    right: bool = False
    drop: int = 0
    text: bool = False  #: free text, which may continue on the next line inside its cell
    status: bool = False  #: coloured by its word


def console(stream: TextIO | None = None) -> Console:
    """Return a console for stdout as it is now (tests replace it). NO_COLOR and COLUMNS are honoured by rich."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else _UNLIMITED
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def show_table(target: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows (strings, in the columns' order); numbers to the right, no borders."""
    widths = [max([cell_len(column.title), *(cell_len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    kept = list(range(len(columns)))

    def needed() -> int:
        return sum(min(widths[i], 30) if columns[i].text else widths[i] for i in kept) + 2 * (len(kept) - 1)

    while needed() > target.width and any(columns[i].drop for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].drop))
    kept = [i for i in kept if columns[i].drop == 0 or any(row[i] not in {"", "-"} for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for i in kept:
        column = columns[i]
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.text,
            overflow="fold" if column.text else "ignore",
            min_width=None if column.text else widths[i],
        )
    for row in rows:
        table.add_row(*(_cell(columns[i], row[i]) for i in kept))
    with target.capture() as capture:
        target.print(table)
    lines = capture.get().splitlines()
    target.file.write("".join(f"{line.rstrip()}\n" for line in lines))  # rich fills the last column with blanks


def _cell(column: Column, value: str) -> Text:
    return Text(value, style=_STYLES.get(value.lower(), "") if column.status else "")


def text_lines(target: Console, *lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        target.print(Text(line), soft_wrap=True)


def emit_json(report: Report[Any]) -> None:
    """Print the one JSON object."""
    print(report.model_dump_json(by_alias=True, indent=2))


def conclude(report: Report[Any], show: Callable[[], None] | None) -> None:
    """Print a report as `show` does, or as JSON without it; exit code BAD if it names problems."""
    if show is None:
        emit_json(report)
    else:
        show()
    if report.problems:
        raise typer.Exit(BAD)


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure with a fixed number of digits; "-" for one that is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """Format Gbit/s: "400", "2.5", "-"."""
    return "-" if value is None else f"{value:g}"


def size(count: int) -> str:
    """Format bytes: "64 B", "4 KiB", "1.5 MiB"."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            value = count / step
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{count} B"
