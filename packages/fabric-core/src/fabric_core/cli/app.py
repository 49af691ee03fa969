"""Puts the `fabric` app together, loading only what the command line asks for.

A command that is not being run is a stub: a name and a line of help. That holds for core's own commands and for the
sub-apps that other packages bring (entry points `fabric.commands`). A broken sub-app breaks only itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import typer

from fabric_core._version import __version__
from fabric_core.cli.guard import CANNOT, GOOD, fail, guarded, say, silence
from fabric_core.registry import COMMANDS as COMMAND_GROUP
from fabric_core.registry import Plugin, discover, load_command

__all__ = ["COMMANDS", "build", "main"]

#: name -> (module below fabric_core.cli, one line of help). The module's `command` is the typer function.
COMMANDS: dict[str, tuple[str, str]] = {
    "version": ("version", "Versions of all packages, how the engine was built, and which vendor libraries are there"),
    "plugins": ("plugins", "Backends and commands that are installed, and why some are not used"),
    "devices": ("devices", "NICs that can be used, and those that cannot, with the reason"),
    "topo": ("topo", "How GPUs, NICs and NUMA nodes hang together"),
    "doctor": ("doctor", "Check this machine for what usually goes wrong"),
    "env": ("env", "All settings: value, source and meaning"),
    "explain": ("explain", "What an error name or number means, its usual causes, and what to do"),
    "ping": ("ping", "Can these two processes talk, and how fast? Without an address: answer"),
    "bench": ("bench", "Measure writes, pages, immediates and messages between two processes"),
}

_PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True}


def build(argv: Sequence[str] | None = None) -> typer.Typer:
    """Make the app for one command line. None: load every command (for documentation)."""
    app = typer.Typer(
        name="fabric",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(help="Point-to-point RDMA transfers for LLM systems.")
    def root(
        version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print it."),
    ) -> None:
        pass

    wanted = None if argv is None else next((word for word in argv if not word.startswith("-")), "")
    for name, (module, summary) in COMMANDS.items():
        if wanted in (None, name):
            function: Callable[..., None] = importlib.import_module(f"fabric_core.cli.{module}").command
            settings = {"ignore_unknown_options": True} if name == "explain" else None  # for "-104"
            app.command(name=name, help=function.__doc__ or summary, context_settings=settings)(function)
        else:
            app.command(name=name, help=summary)(_stub)
    if wanted not in COMMANDS:
        _add_plugins(app, wanted)
    return app


def _print_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit(GOOD)


def _stub() -> None:
    """Stands for a command that is only listed."""
    raise AssertionError("a stub was run")


def _add_plugins(app: typer.Typer, wanted: str | None) -> None:
    for plugin in sorted(discover(COMMAND_GROUP, load=False), key=lambda plugin: plugin.name):
        if plugin.status == "duplicate" or plugin.name in COMMANDS:
            continue
        summary = f"{plugin.summary or 'A command'} (from {plugin.package})"
        if wanted not in (None, plugin.name):
            app.command(name=plugin.name, help=summary)(_stub)
            continue
        loaded = load_command(plugin.name) or plugin
        sub_app = loaded._object
        if loaded.status == "ok" and isinstance(sub_app, typer.Typer):
            app.add_typer(sub_app, name=plugin.name)
        else:
            app.command(name=plugin.name, help=summary, context_settings=_PASS_ALL)(_broken(loaded))


def _broken(plugin: Plugin) -> Callable[[], None]:
    @guarded
    def command() -> None:
        reason = plugin.reason or "its entry point is no typer app"
        say(f"error: `fabric {plugin.name}` of {plugin.package} {plugin.version} is not usable: {reason}")
        say(plugin.cure or f"see `fabric plugins -v`, or uninstall {plugin.package}")
        raise typer.Exit(CANNOT)

    return command


def main(argv: Sequence[str] | None = None) -> None:
    """Run `fabric`; ends the process with the exit code (see `guard.py`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        build(words)(args=words, prog_name="fabric")
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(fail(error))
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            silence()
