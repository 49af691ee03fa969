"""Chaos: processes that write, page, scatter, send and wait, while they are killed, stopped, restarted and closed.

    python tools/chaos --seconds 60
    python tools/chaos --minutes 30 --seed 7 --out chaos.json

Every operation must end once, in time, naming its culprit; what an expectation announces must be there and right; no
write may land in memory that was taken back; a loss is named within two heartbeats; who comes back is reached again;
nothing grows and nothing is left. Exit status 1: something of this broke; the line to run it again is printed. The seed
decides what happens when, not how the machine schedules it.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from chaos import report
from chaos.child import Child
from chaos.flat import Flat
from chaos.judge import Judge, Trouble
from chaos.plan import Event, Options, WorkerOptions, events
from chaos.planted import PLANTS
from fabric_core import ConfigError
from fabric_core.faults import Plan

__all__ = ["Supervisor", "main"]

_OPEN_WITHIN = 30.0
_DRAIN = 12.0
_WARM = 4.0  # seconds of load before anything is done to anybody, and after the last thing was


@dataclass
class Slot:
    """A name of the run, whoever bears it now."""

    number: int
    inc: int = 0
    child: Child | None = None
    card: dict[str, Any] | None = None  # of the open engine
    trouble: Trouble | None = None
    until: float = 0.0  # of the trouble
    opened_by: float = 0.0
    ended: bool = False


class Supervisor:
    """Starts them, hurts them, listens."""

    def __init__(self, options: Options, directory: str) -> None:
        self.options = options
        self.directory = directory
        self.judge = Judge(options)
        self.flat = Flat()
        self.slots = [Slot(number) for number in range(options.processes)]
        self.selector = selectors.DefaultSelector()
        self.finals: list[dict[str, Any]] = []
        self.done: dict[str, int] = {"kill": 0, "stop": 0, "reopen": 0}
        self.stop_asked = False

    # ---- processes

    def start(self, slot: Slot) -> None:
        o = self.options
        slot.inc += 1
        options = WorkerOptions(
            number=slot.number, incarnation=slot.inc, seed=o.seed, processes=o.processes, nics=o.nics,
            heartbeat=o.heartbeat, connect_timeout=o.connect_timeout, slack=o.slack, rate=o.rate,
            name=f"chaos-{slot.number}", directory=self.directory, parent=os.getpid(), faults=o.faults,
            plant=PLANTS[slot.number][0] if o.plant and slot.number in PLANTS else "",
        )  # fmt: skip
        slot.child = Child(options)
        slot.opened_by = time.monotonic() + _OPEN_WITHIN
        self.selector.register(slot.child.out, selectors.EVENT_READ, slot)
        for other in self.slots:
            if other is not slot and other.card is not None:
                slot.child.order("peer", card=other.card)

    def end(self, slot: Slot) -> int:
        """Its process is gone, or about to be."""
        child, slot.child = slot.child, None
        assert child is not None
        self.selector.unregister(child.out)
        status = child.reap()
        self._gone(slot)
        try:
            for line in child.lines():
                self._take(slot, line)
        except EOFError:
            pass
        if status not in (0, -signal.SIGKILL):
            self.judge.break_(f"a process ended with status {status}", slot.number, time.monotonic(), child.log())
        child.close()
        return status

    def _gone(self, slot: Slot) -> None:
        if slot.card is not None:
            self._tell_all(slot, "gone", id=slot.number, inc=slot.card["inc"])
            slot.card = None

    def _tell_all(self, but: Slot, do: str, **fields: Any) -> None:
        for other in self.slots:
            if other is not but and other.child is not None:
                other.child.order(do, **fields)

    def _living(self, but: Slot) -> list[Slot]:
        return [s for s in self.slots if s is not but and s.card is not None and s.trouble is None]

    # ---- events

    def _begin(self, event: Event, now: float) -> bool:
        slot = self.slots[event.victim]
        if slot.trouble is not None or slot.card is None or slot.child is None:
            return False
        if sum(s.trouble is not None for s in self.slots) >= 3:
            return False
        living = [s.number for s in self._living(slot)]
        inc = slot.card["inc"]
        slot.trouble = self.judge.begin(slot.number, event.kind, now)
        slot.until = now + event.lasts
        self.done[event.kind] += 1
        if event.kind == "kill":
            slot.child.signal(signal.SIGKILL)
            self.judge.must_lose(slot.number, inc, "kill", now, living)
            self.end(slot)
        elif event.kind == "stop":
            slot.child.signal(signal.SIGSTOP)
            if event.lasts > 2 * self.options.heartbeat + self.options.slack:
                self.judge.must_lose(slot.number, inc, "stop", now, living)
        else:
            slot.until = float("inf")  # until it says that it is open
            slot.opened_by = now + _OPEN_WITHIN
            slot.inc += 1
            slot.child.order("reopen", inc=slot.inc)
            self.judge.must_lose(slot.number, inc, "reopen", now, living)
        return True

    def _heal(self, now: float) -> None:
        for slot in self.slots:
            if slot.trouble is None or now < slot.until:
                continue
            if slot.child is None:
                self.start(slot)
                slot.until = float("inf")
            elif slot.trouble.kind == "stop":
                slot.child.signal(signal.SIGCONT)
                self._recovered(slot, now)

    def _recovered(self, slot: Slot, now: float) -> None:
        assert slot.card is not None
        if slot.trouble is not None:
            slot.trouble.until = now
            slot.trouble = None
            slot.until = 0.0
        others = [(s.number, s.card["inc"]) for s in self._living(slot) if s.card is not None]
        self.judge.must_meet(slot.number, slot.card["inc"], others, now)

    # ---- listening

    def _listen(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            slot: Slot = key.data
            child = slot.child
            if child is None:
                continue
            try:
                for line in child.lines():
                    self._take(slot, line)
            except EOFError:
                status = self.end(slot)
                if not slot.ended:
                    detail = f"status {status}: {child.log() if not child.out.closed else ''}"
                    self.judge.break_("a process ended by itself", slot.number, time.monotonic(), detail)
        now = time.monotonic()
        for slot in self.slots:
            if slot.child is not None:
                slot.child.flush()
                if slot.card is None and not self.stop_asked and now > slot.opened_by:
                    slot.opened_by = float("inf")
                    self.judge.break_("an engine was not open in time", slot.number, now, slot.child.log())
        self.judge.look(now)

    def _take(self, slot: Slot, line: dict[str, Any]) -> None:
        judge, event = self.judge, line["e"]
        if event == "open":
            slot.card = line["card"]
            judge.incs[slot.card["addr"]] = (slot.number, slot.card["inc"])
            self._tell_all(slot, "peer", card=slot.card)
            self._recovered(slot, time.monotonic())
        elif event == "closed":
            if line["took"] > 5:
                judge.break_("close() took too long", slot.number, line["t"], f"{line['took']:.2f} s")
            self._gone(slot)
        elif event == "lost":
            if not self.stop_asked:
                judge.on_lost(slot.number, line)
        elif event == "status":
            judge.on_status(slot.number, line)
            self.flat.add(slot.number, slot.inc, line)
        elif event == "suspect":
            judge.on_suspect(slot.number, line)
        elif event == "break":
            judge.break_(line["what"], slot.number, line["t"], line["detail"])
        elif event == "final":
            slot.ended = True
            self.finals.append({"who": slot.number, **line})

    def _wait(self, true: Any, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not true():
            now = time.monotonic()
            if now > end:
                return False
            self._heal(now)
            self._listen(0.05)
        return True

    # ---- the run

    def run(self) -> None:
        """Warm up, chaos, calm down, close the books."""
        for slot in self.slots:
            slot.trouble = self.judge.begin(slot.number, "start", time.monotonic())
            slot.until = float("inf")
            self.start(slot)
        if not self._wait(lambda: all(s.card or s.child is None for s in self.slots), _OPEN_WITHIN):
            self.judge.break_("not all processes opened their engine", None, time.monotonic())
        if not all(s.card for s in self.slots):
            return
        self._wait(lambda: not self.judge.duties, 20)
        self._pass(_WARM + 5)  # five seconds for the rest of the start to be out of the latencies' way
        self.flat.mark("begin")
        begin = time.monotonic()
        chaos = max(1.0, self.options.seconds - 2 * _WARM - 5)
        for event in events(self.options):
            if event.at > chaos or (len(self.judge.breaks) > 20 and not self.options.plant):
                break
            self._pass(begin + event.at - time.monotonic())
            self._begin(event, time.monotonic())
        self._pass(begin + chaos - time.monotonic())
        healed = self._wait(lambda: all(s.trouble is None and s.card is not None for s in self.slots), 45)
        if not healed:
            self.judge.break_("not everybody came back", None, time.monotonic(), str([s.trouble for s in self.slots]))
        self._wait(lambda: not self.judge.duties, 30)
        self._pass(_WARM)
        self.flat.mark("end")
        self._close()

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._heal(now)
            self._listen(min(0.05, end - now))
            if not self.options.quiet:
                report.live(self.options, self.judge, self.done, self.slots)

    def _wait_all_ended(self) -> bool:
        return self._wait(lambda: all(s.child is None for s in self.slots), _DRAIN + 15)

    def _close(self) -> None:
        self.stop_asked = True
        self.judge.duties.clear()
        for slot in self.slots:
            if slot.child is not None:
                slot.child.order("drain", within=_DRAIN)
        # a process that has drained goes: the others' operations to it have ended, theirs to others may not have
        if not self._wait_all_ended():
            stuck = [(s.number, s.child.log()) for s in self.slots if s.child is not None]
            self.judge.break_("processes did not end", None, time.monotonic(), str(stuck))
        self.flat.judge(self.judge)
        left = [name for name in os.listdir(self.directory) if name != ".lock"]
        if left:
            self.judge.break_("sockets were left", None, time.monotonic(), ", ".join(sorted(left)))

    def kill_all(self) -> None:
        """Whatever happened, no child stays."""
        for slot in self.slots:
            if slot.child is not None:
                child, slot.child = slot.child, None
                child.signal(signal.SIGKILL)
                child.reap()
                child.close()


def _options(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python tools/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Options()
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=d.seconds)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--processes", type=int, default=d.processes)
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--nics", type=int, default=d.nics)
    parser.add_argument("--heartbeat", type=float, default=d.heartbeat, help="seconds (default: %(default)s)")
    parser.add_argument("--slack", type=float, default=d.slack, help="seconds that this machine may be late")
    parser.add_argument("--rate", type=float, default=d.rate, help="rounds a second that each process begins")
    parser.add_argument("--longest-stop", type=float, default=d.longest_stop, help="seconds of a SIGSTOP at most")
    parser.add_argument("--faults", default="", help="a plan of fabric_core.faults for every engine")
    parser.add_argument("--out", default="", help="file for the result as JSON")
    parser.add_argument("--plant", action="store_true", help="bugs on purpose, to see that each is noticed")
    parser.add_argument("--quiet", action="store_true", help="no live line")
    args = vars(parser.parse_args(arguments))
    minutes = args.pop("minutes")
    if minutes is not None:
        args["seconds"] = minutes * 60
    options = Options(**args)
    if options.processes < 3:
        parser.error("--processes: 3 or more, or nobody is left to look")
    if not 1 <= options.nics <= 8:
        parser.error("--nics: 1 to 8")
    least_of = {"seconds": 2 * _WARM + 6, "heartbeat": 0.05, "slack": 0.0, "rate": 0.1, "longest_stop": 0.1}
    for name, least in least_of.items():
        value = getattr(options, name)
        if not least <= value <= 1e6:
            parser.error(f"--{name.replace('_', '-')} {value:g}: {least:g} to 1e6")
    try:
        Plan.parse(options.faults)
    except ConfigError as error:
        parser.error(f"--faults: {error}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run; print; 0 if nothing broke."""
    options = _options(arguments)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same way out as Ctrl-C
    with tempfile.TemporaryDirectory(prefix="fabric-chaos-") as directory:
        os.chmod(directory, 0o700)
        supervisor = Supervisor(options, directory)
        try:
            supervisor.run()
        except KeyboardInterrupt:
            supervisor.judge.break_("interrupted", None, time.monotonic())
        finally:
            supervisor.kill_all()
    left = _children()
    if left:
        supervisor.judge.break_("children were left", None, time.monotonic(), str(left))
    return report.final(options, supervisor.judge, supervisor.flat, supervisor.done, supervisor.finals, begin)


def _children() -> list[int]:
    """Processes whose parent we are, the unreaped ones too."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
        if parent == os.getpid():
            found.append(int(pid))
    return found
