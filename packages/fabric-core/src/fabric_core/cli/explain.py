"""`fabric explain`: from an error's name or number to what to do."""

from __future__ import annotations

import difflib
import errno
import os
from typing import Annotated

import typer

from fabric_core import errors
from fabric_core.cli.guard import guarded
from fabric_core.cli.models import Explanation, Report
from fabric_core.cli.options import Json
from fabric_core.cli.render import console, emit_json, text_lines

__all__ = ["command", "explain"]


def _error_classes() -> dict[str, type[errors.FabricError]]:
    found: dict[str, type[errors.FabricError]] = {}
    for name in errors.__all__:
        thing = getattr(errors, name)
        if isinstance(thing, type) and issubclass(thing, errors.FabricError):
            found[name] = thing
    return found


def explain(code: str) -> Explanation:
    """Explain "ECONNRESET", "-104", "104" or "PeerLost". Raises BadParameter (usage) for anything else."""
    text = code.strip()
    number: int | None = None
    if text.lstrip("+-").isdecimal():
        number = abs(int(text))
        text = errno.errorcode.get(number, text)
    classes = {name.lower(): name for name in _error_classes()}
    if text.lower() in classes:
        return _explain_class(classes[text.lower()])
    name = text.upper()
    number = getattr(errno, name, None) if number is None else number
    known = errors.CODES.get(name)
    if known is None and number is None:
        candidates = [*errors.CODES, *classes.values()]
        near = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5) or difflib.get_close_matches(
            code, candidates, n=3, cutoff=0.5
        )
        raise typer.BadParameter(f"{code!r} is not known" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if known is None:
        if name not in errno.errorcode.values():
            raise typer.BadParameter(f"{code!r} is not an error number of this system")
        meaning = f"{os.strerror(number or 0)} (the operating system's words; fabric gives it no meaning of its own)"
        known = errors.Code(meaning, "passed on from a backend or from the system", "see the log of the process")
    raised = type(errors.transfer_error(number)).__name__ if number else "TransferError"
    return Explanation(name=name, number=number, raised_as=raised, **known._asdict())


def _explain_class(name: str) -> Explanation:
    kind = _error_classes()[name]
    bases = [base.__name__ for base in kind.__mro__[1:] if base not in (object, BaseException, Exception)]
    codes = [code for code in errors.CODES if type(errors.transfer_error(getattr(errno, code, 0))) is kind]
    return Explanation(
        name=name,
        number=None,
        raised_as=" > ".join([name, *bases]),
        meaning=(kind.__doc__ or "").strip(),
        causes="; ".join(f"{code}: {errors.CODES[code].causes}" for code in codes) or "see the message",
        cure="; ".join(f"{code}: {errors.CODES[code].cure}" for code in codes) or "the message says what to do",
    )


@guarded
def command(
    code: Annotated[str, typer.Argument(help="ECONNRESET, -104, 104, PeerLost, ...")],
    json: Json = False,
) -> None:
    """What an error name or number means, its usual causes, and what to do."""
    data = explain(code)
    if json:
        emit_json(Report[Explanation](schema="fabric.explain/1", data=data))
        return
    out = console()
    title = data.name if data.number is None else f"{data.name} ({data.number})"
    text_lines(out, title, f"  raised as  {data.raised_as}", f"  meaning    {data.meaning}")
    text_lines(out, f"  causes     {data.causes}", f"  cure       {data.cure}")
