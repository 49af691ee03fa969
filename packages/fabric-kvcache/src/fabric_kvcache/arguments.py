"""What callers pass in, checked before anything is kept: whole numbers, names and seconds."""

from __future__ import annotations

import math
import operator
from typing import Any

from fabric_core import BadRange

__all__ = ["LONGEST_SLEEP", "MAX_NAME", "name", "number", "seconds"]

LONGEST_SLEEP = 3600.0  #: seconds: what a thread waits at once; the system's own limit is near 2**32 ms
MAX_NAME = 128  #: characters


def number(what: str, value: Any, least: int, most: int) -> int:
    """Return a whole number (also numpy's) as an int. Raises BadRange: it is none, or not from `least` to `most`."""
    try:
        found = int(operator.index(value))
    except TypeError:
        raise BadRange(f"{what}={value!r}: must be a whole number from {least} to {most}") from None
    if not least <= found <= most:
        raise BadRange(f"{what}={found}: must be from {least} to {most}")
    return found


def name(what: str, value: Any, *, least: int = 1) -> str:
    """Return a name that can travel. Raises BadRange."""
    if not isinstance(value, str) or not least <= len(value) <= MAX_NAME:
        raise BadRange(f"{what}={value!r}: must be a text of {least} to {MAX_NAME} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRange(f"{what}={value!r}: holds characters that UTF-8 does not have (surrogates)") from None
    return value


def seconds(what: str, value: Any) -> float:
    """Return a time to wait; it may be infinite, and below 0 it is over already. Raises BadRange for what is none."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found) or isinstance(value, str):
        raise BadRange(f"{what}={value!r}: must be a number of seconds")
    return found
