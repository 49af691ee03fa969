"""`fabric env`: every setting."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

from fabric_core.cli.guard import guarded
from fabric_core.cli.models import Env, Report, Setting
from fabric_core.cli.options import Json
from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
from fabric_core.config import OTHER_VARIABLES, PREFIX, Settings, allowed, is_secret, unknown_variables
from fabric_core.registry import BACKENDS, discover

__all__ = ["command", "declared_variables", "gather"]


HIDDEN = "(set, not shown)"


def declared_variables() -> dict[str, str]:
    """Return the variables that backends read themselves -> help; a backend that misdeclares them is passed over."""
    found: dict[str, str] = {}
    for plugin in discover(BACKENDS):
        variables = getattr(plugin._object, "variables", None)
        if plugin.status == "ok" and isinstance(variables, dict):
            found.update({str(name): str(text) for name, text in variables.items()})
    return found


def _text(value: Any) -> str:
    """The value as one would type it into a shell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(value)


def gather(pattern: str = "") -> Env:
    """Collect settings and other variables whose name or help contains `pattern`. Raises ConfigError."""
    settings = Settings.load()
    sources = settings.sources()
    rows = [
        Setting(
            name=PREFIX + name.upper(),
            value=_text(getattr(settings, name)) if not is_secret(name) else HIDDEN * (settings.secret is not None),
            source=sources[name],
            allowed=allowed(name),
            help=info.description or "",
        )
        for name, info in Settings.model_fields.items()
    ]
    for name, help_text in {**OTHER_VARIABLES, **declared_variables()}.items():
        value = os.environ.get(name, "")
        source = "env" if value else "default"
        rows.append(Setting(name=name, value=value, source=source, allowed="text", help=help_text))
    wanted = pattern.lower()
    return Env(settings=[row for row in rows if wanted in f"{row.name} {row.help}".lower()])


@guarded
def command(
    grep: Annotated[str, typer.Option("--grep", "-g", help="Only those with this text in name or help.")] = "",
    export: Annotated[bool, typer.Option("--export", help="Print lines that a shell can read back.")] = False,
    json: Json = False,
) -> None:
    """All settings: value, source (default, file, env) and meaning."""
    data = gather(grep)
    strange = [
        f"{name} is set, but nothing reads it" + (f"; did you mean {near}?" if near else "")
        for name, near in unknown_variables(os.environ, declared_variables()).items()
    ]
    if json:
        emit_json(Report[Env](schema="fabric.env/1", data=data, problems=strange))
        return
    if export:
        for row in data.settings:
            mark = "" if row.source in ("env", "file") and row.value != HIDDEN else "# "
            print(f"# {row.help}\n{mark}export {row.name}={shlex.quote(row.value)}")
        return
    out = console()
    columns = [
        Column("NAME"),
        Column("VALUE"),
        Column("SOURCE"),
        Column("ALLOWED", drop=1, text=True),
        Column("HELP", text=True),
    ]
    show_table(out, columns, [[row.name, row.value or "-", row.source, row.allowed, row.help] for row in data.settings])
    if not data.settings:
        text_lines(out, f"no setting contains {grep!r}; `fabric env` prints all")
    for line in strange:
        text_lines(out, line)
