"""What a run is made of: its options, and the events that the seed expands into."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "Options", "WorkerOptions", "events"]

Kind = Literal["kill", "stop", "reopen"]


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. Times in seconds."""

    seconds: float = 60.0
    processes: int = 8
    seed: int = 1
    nics: int = 2
    heartbeat: float = 1.0
    slack: float = 3.0  #: how late anything may be noticed on this machine, beyond what is promised
    rate: float = 20.0  #: rounds a second that each process begins
    longest_stop: float = 10.0
    faults: str = ""  #: a plan of fabric_core.faults for every engine; empty: none
    out: str = ""
    quiet: bool = False
    plant: bool = False  #: bugs on purpose, one per process: the run must see each

    @property
    def connect_timeout(self) -> float:
        return 2 * self.heartbeat

    def arguments(self) -> str:
        """Return the command line that asks for the same run again, without what is the default anyhow."""
        words = [f"--seconds {self.seconds:g} --seed {self.seed} --processes {self.processes}"]
        for name in ("nics", "heartbeat", "slack", "rate", "longest_stop", "faults"):
            value, usual = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != usual:
                words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
        return " ".join([*words, "--plant"] if self.plant else words)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What one process is told at its start."""

    number: int
    incarnation: int
    seed: int
    processes: int
    nics: int
    heartbeat: float
    connect_timeout: float
    slack: float
    rate: float
    name: str
    directory: str
    parent: int
    faults: str = ""
    plant: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerOptions:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to process `victim`, `at` seconds after the chaos begins."""

    at: float
    kind: Kind
    victim: int
    lasts: float  #: of a stop; of a kill: until the restart


def events(options: Options) -> Iterator[Event]:
    """The schedule: the same for the same seed. Process 0 is never ended, so that its memory tells of the whole run."""
    rng = random.Random(f"chaos {options.seed}")
    at = 0.0
    while True:
        at += rng.uniform(0.3, 3.0)
        kind: Kind = rng.choices(("kill", "stop", "reopen"), (4, 5, 3))[0]
        victim = rng.randrange(options.processes) if kind == "stop" else rng.randrange(1, options.processes)
        longest = options.longest_stop if kind == "stop" else 3.0
        lasts = 0.05 * (longest / 0.05) ** rng.random()  # as often short as long
        yield Event(round(at, 3), kind, victim, round(lasts, 3))
