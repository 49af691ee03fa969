"""`fabric sim`: run seeds of the deterministic simulator, replay one, make a failing one small."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from typing import Annotated

import typer

from fabric_core.cli.guard import BAD, guarded, say
from fabric_core.cli.options import Json
from fabric_core.cli.render import Column, console, show_table, text_lines
from fabric_core.cli.sim_predict import predict_command
from fabric_core.errors import ConfigError
from fabric_core.sim import Child, Result, expand, options, run_many

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Run the real engine in a deterministic, seeded network.")
app.command("predict")(predict_command)

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Use this value of an option instead of the seed's. Repeatable."),
]
_LAST_SEED = (1 << 64) - 1
Seed = Annotated[int, typer.Argument(help="The seed.", min=0, max=_LAST_SEED)]

_LINE_SECONDS = 1.0


def _parse(changes: list[str] | None) -> dict[str, int]:
    values: dict[str, int] = {}
    for item in changes or []:
        name, equals, value = item.partition("=")
        if not equals or not value.isdecimal():
            raise ConfigError(f"--set {item}: NAME=VALUE is wanted, VALUE a whole number")
        values[name] = int(value)
    expand(0, values)  # unknown names are told before anything runs
    return values


def _command(verb: str, seed: int, changes: dict[str, int]) -> str:
    return " ".join([f"fabric sim {verb} {seed}", *(f"--set {name}={value}" for name, value in changes.items())])


def _tell(result: Result, changes: dict[str, int]) -> None:
    print(f"seed {result.seed}: {result.violation}")
    calm = {option.name: option.calm for option in options()}
    shown = [f"{n}={v}" for n, v in expand(result.seed, changes).items() if v != calm[n]]
    print(f"  options: {' '.join(shown)}")
    print(f"  replay:  {_command('replay', result.seed, changes)}")


@app.command("run")
@guarded
def run_command(
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="The first seed.", min=0, max=_LAST_SEED)] = 1,
    transfers: Annotated[int, typer.Option(help="Transfers of each seed; 0: as the option says.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Processes at a time; 0: one per CPU.", min=0)] = 0,
    changes: Changes = None,
    json: Json = False,
) -> None:
    """Run seeds; exit code 1 and how to replay it when one violates a contract."""
    values = _parse(changes)
    if first + seeds - 1 > _LAST_SEED:
        raise ConfigError(f"--first {first} --seeds {seeds}: seeds end at {_LAST_SEED}")
    if transfers:
        values["transfers"] = transfers
    jobs = min(jobs or len(os.sched_getaffinity(0)), seeds)
    begin = told = time.monotonic()
    totals: dict[str, int] = {}
    faults: dict[str, int] = {}
    bad: list[Result] = []
    count = 0
    for result in run_many(range(first, first + seeds), values, jobs):
        count += 1
        for into, what in ((totals, result.counts), (faults, result.faults)):
            for name, value in what.items():
                into[name] = into.get(name, 0) + value
        if result.violation:
            bad.append(result)
            if not json:
                _tell(result, values)
        now = time.monotonic()
        if now - told >= _LINE_SECONDS and sys.stderr.isatty():
            told = now
            say(f"{count} of {seeds} seeds, {totals.get('transfers', 0):,} transfers, {len(bad)} violations")
    seconds = time.monotonic() - begin
    if json:
        data = {
            "seeds": count,
            "seconds": round(seconds, 3),
            "totals": totals,
            "faults": faults,
            "violations": [
                {"seed": r.seed, "violation": r.violation, "replay": _command("replay", r.seed, values)} for r in bad
            ],
        }
        print(json_module.dumps(data, indent=2))
    else:
        _summary(count, seconds, totals, faults, len(bad), jobs)
    if bad:
        raise typer.Exit(BAD)


def _summary(count: int, seconds: float, totals: dict[str, int], faults: dict[str, int], bad: int, jobs: int) -> None:
    transfers = totals.get("transfers", 0)
    rate = transfers / seconds if seconds else 0.0
    text_lines(
        console(),
        f"{count} seeds, {transfers:,} transfers ({totals.get('done', 0):,} done, {totals.get('failed', 0):,} failed, "
        f"{totals.get('cancelled', 0):,} cancelled), {totals.get('writes', 0):,} logical writes, "
        f"{totals.get('bytes', 0):,} bytes",
        f"{totals.get('fired', 0):,} expectations fired, {totals.get('imms', 0):,} immediates, "
        f"{totals.get('messages', 0):,} messages, {totals.get('events', 0):,} events, "
        f"{totals.get('virtual_ns', 0) / 1e9 - count:.1f} virtual seconds",
        "faults: " + (", ".join(f"{value:,} {name}" for name, value in faults.items()) or "none"),
        f"{seconds:.1f} s, {rate:,.0f} transfers/s in {jobs} processes; {bad} violations",
    )


@app.command()
@guarded
def replay(
    seed: Seed,
    times: Annotated[int, typer.Option(help="How often; all must give the same hash.", min=1)] = 2,
    changes: Changes = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print the last events.")] = False,
) -> None:
    """Run one seed again and compare the hashes of its events; exit code 1 if they differ or a contract is violated."""
    values = _parse(changes)
    child = Child()
    try:
        results = child.run(seed, values, trace=trace, times=times)
    finally:
        child.close()
    if trace and results[0].trace:
        print(results[0].trace, end="")
    hashes = {result.hash for result in results}
    for result in [result for result in results if result.violation][:1]:
        _tell(result, values)
    if len(results) < times or not results[-1].hash:  # it crashed or hung: there is no hash to compare
        print(f"seed {seed}: run {len(results)} of {times} did not end")
        raise typer.Exit(BAD)
    same = len(hashes) == 1
    shown = " ".join(f"{value:016x}" for value in sorted(hashes))
    print(f"seed {seed}: {len(results)} runs, {'one hash' if same else 'DIFFERENT hashes'}: {shown}")
    if not same or results[0].violation:
        raise typer.Exit(BAD)


@app.command()
@guarded
def minimise(seed: Seed, changes: Changes = None) -> None:
    """Bring options of a failing seed towards their calm values while it still fails; print the smallest command."""
    values = _parse(changes)
    child = Child()
    try:
        found = child.run(seed, values)[0]
        if not found.violation:
            print(f"seed {seed} violates nothing with these options")
            return
        checker = found.violation.partition(":")[0]

        def still(candidate: dict[str, int]) -> bool:
            try:
                return child.run(seed, candidate)[0].violation.partition(":")[0] == checker
            except ConfigError:
                return False

        small = _shrink(seed, values, still)
        found = child.run(seed, small)[0]
    finally:
        child.close()
    seeded = expand(seed)
    small = {name: value for name, value in small.items() if name in values or value != seeded[name]}
    _tell(found, small)


def _shrink(seed: int, values: dict[str, int], still) -> dict[str, int]:  # type: ignore[no-untyped-def]
    best = dict(values)
    table = options()
    changed = True
    while changed:
        changed = False
        for option in table:
            now = expand(seed, best)[option.name]
            # transfers have no calm value: as few as possible
            goals = [option.calm, (option.calm + now) // 2] if option.name != "transfers" else [now // 8, now // 2]
            for goal in goals:
                if goal == now or (option.name == "transfers" and goal < 1):
                    continue
                candidate = best | {option.name: goal}
                if still(candidate):
                    best = candidate
                    changed = True
                    say(f"{option.name}: {now} -> {goal}")
                    break
    return best


@app.command("options")
@guarded
def options_command(
    seed: Annotated[
        int | None, typer.Argument(help="Also show what this seed makes of them.", min=0, max=_LAST_SEED)
    ] = None,
    changes: Changes = None,
) -> None:
    """The table of options; with a seed, the values that it is expanded into."""
    values = expand(seed, _parse(changes)) if seed is not None else None
    columns = [Column("NAME"), Column("CALM", right=True)]
    if values is not None:
        columns.append(Column("VALUE", right=True))
    columns += [Column("FROM", right=True, drop=1), Column("TO", right=True, drop=1), Column("WHAT", text=True)]
    rows = []
    for option in options():
        value = [] if values is None else [str(values[option.name])]
        rows.append([option.name, str(option.calm), *value, str(option.lo), str(option.hi), option.help])
    show_table(console(), columns, rows)
