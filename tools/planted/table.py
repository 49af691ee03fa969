"""What a planted bug is: one small edit of one file of the engine, and the test that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


class OutOfDate(RuntimeError):
    """The engine changed under the table: an old text does not occur exactly once any more."""


@dataclass(frozen=True)
class Bug:
    """One bug. `hunter` is `sim`, or `NAME:FLAVOUR` for tests/c/NAME.c built plain, with asan, or with tsan."""

    name: str
    contract: str
    file: str
    edits: tuple[tuple[str, str], ...]
    breaks: str
    hunter: str = "sim"


def edit(old: str, new: str = "") -> tuple[tuple[str, str], ...]:
    """Return one edit."""
    return ((old, new),)
