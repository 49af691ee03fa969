"""Plants each bug of the table, hunts it, and says what found it: `python tools/planted --help`.

Exit status: 0 if every bug was found and nothing in the engine as it is, 1 if not, 2 if the table is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planted.bugs import BUGS
from planted.hunters import Find, hunt, hunt_nothing
from planted.table import Bug, OutOfDate
from planted.workshop import NATIVE, ROOT, BuildFailed, Workshop, edited


def chosen(words: list[str], exact: bool) -> list[Bug]:
    """Return the bugs whose name, file or hunter contains one of the words (or is one); all, if there are none."""
    if not words:
        return list(BUGS)
    if exact:
        return [bug for bug in BUGS if bug.name in words]
    return [b for b in BUGS if any(w in b.name or w == b.file or w == b.hunter.split(":")[0] for w in words)]


def stale() -> list[str]:
    """Return what is out of date in the table."""
    complaints = []
    for bug in BUGS:
        try:
            edited(bug, (NATIVE / bug.file).read_text())
        except (OutOfDate, FileNotFoundError) as error:
            complaints.append(str(error))
    return complaints


def line(name: str, contract: str, find: Find) -> str:
    """Return a row of the report."""
    outcome = ("found" if find.found else "MISSED") if contract else ("FALSE ALARM" if find.found else "quiet")
    unit = "seed" if find.by.startswith("sim") else "run"
    return (
        f"{outcome:11} {contract:4} {name:45.45} {find.by:22.22} "
        f"{unit} {find.after:<5} {find.seconds:7.1f} s  {find.words[:100]}"
    )


def markdown(name: str, contract: str, find: Find) -> str:
    """Return the row of docs/reliability.md."""
    bug = next(bug for bug in BUGS if bug.name == name)
    after = f"seed {find.after}" if find.by.startswith("sim") else f"run {find.after}"
    return f"| {name} | {contract} | {bug.breaks} | {find.by if find.found else 'MISSED'} | {after} |"


def main(argv: list[str] | None = None) -> int:
    """Run the hunts. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools/planted", description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only bugs whose name contains it, or of this file or hunter"
    )
    parser.add_argument("--exact", action="store_true", help="each WORD is a whole name")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    parser.add_argument("--check", action="store_true", help="only look whether the table fits the engine")
    parser.add_argument("--seeds", type=int, default=1000, help="simulated seeds for each bug (default 1000)")
    parser.add_argument("--jobs", type=int, default=2, help="bugs hunted at a time (default 2)")
    parser.add_argument("--no-clean", action="store_true", help="do not look for false alarms in the engine as it is")
    parser.add_argument("--markdown", action="store_true", help="print the finds as docs/reliability.md has them")
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args(argv)
    bugs = chosen(options.words, options.exact)
    if options.list:
        for bug in bugs:
            print(f"{bug.contract:4} {bug.file:11} {bug.hunter:18} {bug.name}: {bug.breaks}")
        return 0
    if complaints := stale():
        print("\n".join(complaints), file=sys.stderr)
        return 2
    if options.check or not bugs:
        print(f"{len(BUGS)} bugs, each old text occurs once" if bugs else "no such bug")
        return 0 if bugs else 2

    shop = Workshop(ROOT / "build" / "planted")
    start = time.monotonic()
    bad, rows = 0, []
    with ThreadPoolExecutor(options.jobs) as pool:
        hunts: list[tuple[str, str, Future[Find]]] = []
        if not options.no_clean:
            for hunter in sorted({bug.hunter for bug in bugs}):
                # One after the other, before anything else: they compile what all others share.
                done: Future[Find] = Future()
                done.set_result(hunt_nothing(shop, hunter, options.seeds))
                hunts.append(("the engine as it is", "", done))
                print(line("the engine as it is", "", done.result()), flush=True)
        hunts += [(bug.name, bug.contract, pool.submit(hunt, shop, bug, options.seeds)) for bug in bugs]
        for name, contract, future in hunts:
            try:
                find = future.result()
            except BuildFailed as error:
                print(f"{name}: {error}", file=sys.stderr)
                bad += 1
                continue
            rows.append({"name": name, "contract": contract, **asdict(find)})
            bad += find.found != bool(contract)
            if contract:
                print((markdown if options.markdown else line)(name, contract, find), flush=True)
    found = sum(1 for row in rows if row["contract"] and row["found"])
    seconds = time.monotonic() - start
    print(f"{found} of {len(bugs)} planted bugs found, {sum(1 for r in rows if not r['contract'] and r['found'])} "
          f"false alarms, {seconds:.0f} s")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"seeds": options.seeds, "seconds": seconds, "rows": rows}, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
