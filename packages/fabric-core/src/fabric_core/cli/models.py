"""What `--json` prints: one object per run, `{schema, host, time, versions, data, problems}`.

The tables are rendered from the same models, so the two cannot disagree. Names carry their units: `_us`, `_gbit_s`
(decimal), `_bytes`. Keys are only ever added to a schema; anything else makes it `.../2`.
"""

from __future__ import annotations

import platform
import socket
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fabric_core._version import __version__

T = TypeVar("T", bound=BaseModel)


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).replace(microsecond=0).isoformat()


def versions() -> dict[str, str]:
    """Return what a reader of a report needs to know about the software underneath."""
    return {"fabric-core": __version__, "python": platform.python_version(), "kernel": platform.release()}


class Model(BaseModel):
    """Base of all: a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid")


class Report(Model, Generic[T]):
    """The envelope."""

    schema_: str = Field(alias="schema")
    host: str = Field(default_factory=socket.gethostname)
    time: str = Field(default_factory=now)
    versions: dict[str, str] = Field(default_factory=versions)
    data: T
    problems: list[str] = Field(default_factory=list)


# ---- devices ---------------------------------------------------------------------------------------------------------


class Device(Model):
    name: str
    backend: str
    state: str
    rate_gbit_s: float | None
    numa: int | None
    pci: str | None
    gpu: str | None  #: the nearest, with the distance: "gpu0 PIX"
    mtu_bytes: int | None
    caps: list[str]
    note: str


class Missing(Model):
    name: str
    backend: str
    reason: str
    cure: str


class Devices(Model):
    devices: list[Device]
    unavailable: list[Missing]


# ---- topo ------------------------------------------------------------------------------------------------------------


class TopoNode(Model):
    id: int
    cpus: list[int]
    memory_bytes: int | None


class TopoThing(Model):
    name: str
    kind: Literal["gpu", "nic"]
    model: str
    state: str
    rate_gbit_s: float | None
    numa: int | None
    pci: str | None
    path: list[str]
    cpus: str  #: those of its NUMA node, "0-15"


class TopoGroup(Model):
    device: str
    nics: list[str]
    distance: str
    rate_gbit_s: float | None


class Topo(Model):
    origin: str  #: this machine, or the dump's host and time
    nodes: list[TopoNode]
    things: list[TopoThing]
    matrix: dict[str, dict[str, str]]
    groups: list[TopoGroup]


# ---- plugins, env, explain, version ----------------------------------------------------------------------------------


class PluginRow(Model):
    name: str
    group: str
    package: str
    version: str
    api_version: int | None
    status: str
    reason: str
    cure: str
    traceback: str


class CheckRun(Model):
    backend: str
    exit_code: int
    summary: str  #: pytest's last line


class Plugins(Model):
    plugins: list[PluginRow]
    checks: list[CheckRun]


class Setting(Model):
    name: str
    value: str
    source: str
    allowed: str
    help: str


class Env(Model):
    settings: list[Setting]


class Explanation(Model):
    name: str
    number: int | None
    raised_as: str
    meaning: str
    causes: str
    cure: str


class Library(Model):
    name: str
    found: str  #: what was loaded, or ""
    needed_by: str


class Version(Model):
    packages: dict[str, str]
    python: str
    platform: str
    native: dict[str, str]
    libraries: list[Library]


# ---- doctor ----------------------------------------------------------------------------------------------------------


class Check(Model):
    group: str
    name: str
    status: Literal["OK", "WARN", "FAIL", "SKIP"]
    found: str
    wanted: str = ""
    cure: str = ""


class Doctor(Model):
    checks: list[Check]
    counts: dict[str, int]


# ---- ping, bench -----------------------------------------------------------------------------------------------------


class Ping(Model):
    address: str
    local_nics: list[str]
    remote_nics: list[str]
    bytes: int
    sent: int
    lost: int
    connect_us: float | None
    min_us: float | None
    p50_us: float | None
    p99_us: float | None
    max_us: float | None


class BenchRow(Model):
    op: str
    size_bytes: int  #: of one operation
    pages: int  #: of one operation; 1 for anything that is not paged
    n: int
    time_p50_us: float | None  #: see the op's docstring in bench_ops.py for what is timed
    time_p99_us: float | None
    gbit_s: float | None
    gbyte_s: float | None
    limit: str  #: which physical limit stands beside it
    limit_gbyte_s: float | None
    limit_percent: float | None
    mops: float | None
    post_p50_us: float | None
    post_p99_us: float | None
    wrong_bytes: int | None  #: None: not compared


class Bench(Model):
    machine: dict[str, str]
    backend: str
    address: str
    nics: int
    peer_nics: int
    parameters: dict[str, str]
    rows: list[BenchRow]
    verdict: str
