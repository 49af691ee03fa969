"""Options that several commands share, in the form that typer reads."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Json", "Verbose"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything that is known.")]
