"""What a cluster would do: the real engine under virtual time, over NICs that cost time and carry no bytes.

`predict` answers one question, `compare` asks those that the paper's tables answer and puts the two side by side,
`lose_nic` measures what is left when one NIC of several is lost. The work is done in C (`native/sim/predict.c`); the
constants are in `native/sim/cost.c`, and docs/simulator.md says where they come from. The same question always has the
same answer, to the nanosecond.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_core.errors import ConfigError

__all__ = ["COSTS", "SHARD_BYTES", "Loss", "Nic", "Prediction", "Row", "compare", "lose_nic", "nics", "predict"]

#: The numbers of a NIC that may be changed. Times are nanoseconds, `gbps` is nominal and for one NIC,
#: `payload_permille` is what is left of it for payload, `chain` is requests for each doorbell, `queue` requests that a
#: NIC holds.
COSTS = (
    "nics",
    "gbps",
    "payload_permille",
    "latency_ns",
    "post_ns",
    "doorbell_ns",
    "chain",
    "nic_ns",
    "done_ns",
    "enqueue_ns",
    "prepare_ns",
    "queue",
)

#: The engine's own setting: a write, or a target of a scatter, from this size on is cut for all NICs.
SHARD_BYTES = 32768

_OPS = {"write": 1, "pages": 2, "scatter": 3}
_BOUND = 0.9  #: a resource at work for so much of the time is what bounds


@dataclass(frozen=True, slots=True)
class Nic:
    """A preset: what one GPU's NICs cost."""

    name: str
    help: str
    costs: dict[str, int]  #: by the names in COSTS


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came of a question. Rates are in the steady state: warm-up is left out."""

    nic: str
    op: str
    size: int  #: bytes of a write, a page or a target
    writes: int  #: logical writes of a transfer
    seconds: float  #: from one transfer's end to the next one's; with depth 1, from submit to done
    posting_s: float  #: depth 1: from a transfer's first request to its last one, at the sender's processor
    requests: float  #: requests to NICs for each transfer
    bound: str  #: "sender", "receiver" (their processors), "wire", "nic", or "latency": nothing is busy all the time
    busy: dict[str, float]  #: share of the time that each of them was at work

    @property
    def bytes_per_s(self) -> float:
        """Payload delivered in a second."""
        return self.size * self.writes / self.seconds

    @property
    def ops_per_s(self) -> float:
        """Logical writes in a second."""
        return self.writes / self.seconds

    @property
    def gbit_per_s(self) -> float:
        """Payload, in units of 10^9 bits a second."""
        return self.bytes_per_s * 8 / 1e9


@dataclass(frozen=True, slots=True)
class Loss:
    """A steady stream, of which one NIC is lost. Rates are bytes per second, of transfers that were done."""

    nics: int
    before: float
    soon: float  #: from 10 ms after the loss, for 100 ms
    later: float  #: from 1 s after it, for 100 ms
    failed: int  #: transfers of which the lost NIC held a part; they were submitted again

    @property
    def fair(self) -> float:
        """The share that the other NICs are worth: (N - 1) / N."""
        return (self.nics - 1) / self.nics


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of the paper beside the prediction."""

    nic: str
    what: str
    unit: str
    paper: float | None  #: None: the paper says in words that it is saturated
    predicted: float
    fitted: str  #: the constant that this row gave, or "" for a row that is predicted
    bound: str

    @property
    def deviation(self) -> float | None:
        """(predicted - paper) / paper, in percent."""
        return None if self.paper is None else 100 * (self.predicted - self.paper) / self.paper


def nics() -> list[Nic]:
    """Return the presets; the first one, "none", costs nothing."""
    from fabric_core.native_lib import ffi, lib, text

    found: list[Nic] = []
    while (model := lib.fab_sim_nic_at(len(found))) != ffi.NULL:
        found.append(Nic(text(model.name), text(model.help), {name: int(getattr(model, name)) for name in COSTS}))
    return found


def _costs(nic: str, changes: Mapping[str, int] | None) -> dict[str, int]:
    presets = {preset.name: preset for preset in nics()}
    if nic not in presets:
        raise ConfigError(f"no NIC is called {nic!r}; there are {', '.join(presets)}")
    costs = dict(presets[nic].costs)
    for name, value in (changes or {}).items():
        if name not in costs:
            raise ConfigError(f"a NIC has no {name!r}; it has {', '.join(COSTS)}")
        if not 0 <= value < 1 << 64:
            raise ConfigError(f"{name}: {value} is no number of 64 bits without a sign")
        costs[name] = value
    if nic == "none" and not changes:
        raise ConfigError("the NIC 'none' costs nothing: there is nothing to predict")
    return costs


def _ask(costs: Mapping[str, int], op: str, **rest: Any) -> Any:
    from fabric_core.native_lib import ffi, lib

    if op not in _OPS:
        raise ConfigError(f"no operation is called {op!r}; there are {', '.join(_OPS)}")
    question = ffi.new("fab_sim_question *", {"nic": dict(costs), "op": _OPS[op], **rest})
    answer = ffi.new("fab_sim_answer *")
    rc = lib.fab_sim_predict(question, answer)
    if rc == -errno.EINVAL:
        raise ConfigError(f"these numbers make no sense together: {dict(costs)}, {op}, {rest}")
    if rc == -errno.ETIMEDOUT:
        raise RuntimeError("a transfer did not end (C1): a defect of the engine or of the model")
    if rc < 0:
        raise ConfigError(f"the engine refuses this: {os.strerror(-rc)}")
    return answer


def predict(
    nic: str,
    op: str = "write",
    *,
    size: int,
    pages: int = 1024,
    peers: int = 1,
    depth: int = 1,
    count: int = 32,
    shard_bytes: int = SHARD_BYTES,
    costs: Mapping[str, int] | None = None,
) -> Prediction:
    """Predict `op` over a NIC.

    `op` is "write" (one of `size` bytes, to the peers in turn), "pages" (`pages` of `size` bytes in a transfer) or
    "scatter" (`size` bytes to each of `peers`). `depth` transfers are under way at a time, `count` of them are
    measured. `costs` changes numbers of the NIC (see COSTS), `shard_bytes` is the engine's. Raises ConfigError for a
    name or a number that makes no sense.
    """
    table = _costs(nic, costs)
    depth = max(depth, 0)
    answer = _ask(
        table,
        op,
        peers=peers,
        depth=depth,
        size=size,
        pages=pages if op == "pages" else 1,
        warm=depth + 4,
        count=count,
        shard_bytes=shard_bytes,
    )
    if answer.arrived != answer.writes:  # C4, for any sharding
        raise RuntimeError(f"{answer.writes} writes were done, {answer.arrived} immediates were counted")
    span = answer.all.last_ns - answer.all.first_ns
    if span <= 0:
        raise ConfigError("with these numbers it takes no time at all: there is nothing to predict")
    busy = {
        "sender": answer.sender_ns / span,
        "receiver": answer.receiver_ns / span,
        "wire": answer.wire_ns / span,
        "nic": answer.nic_ns / span,
    }
    most = max(busy, key=lambda name: busy[name])
    return Prediction(
        nic=nic,
        op=op,
        size=size,
        writes=answer.writes // answer.done,
        seconds=span / 1e9 / (answer.all.ops - 1),
        posting_s=answer.posting_ns / 1e9,
        requests=answer.requests / answer.done,
        bound=most if busy[most] >= _BOUND else "latency",
        busy=busy,
    )


def lose_nic(
    nic: str = "efa-p5",
    op: str = "write",
    *,
    size: int = 16 << 20,
    pages: int = 256,
    depth: int = 4,
    costs: Mapping[str, int] | None = None,
) -> Loss:
    """Lose the sender's last NIC 10 ms into a steady stream; measure before, from 10 ms and from 1 s after it.

    Raises ConfigError for numbers that make no sense, and for a NIC that is the only one.
    """
    table = _costs(nic, costs)
    if table["nics"] < 2:
        raise ConfigError(f"{nic} is one NIC: nothing is left when it is lost")
    ms = 1_000_000
    spans = [(2 * ms, 10 * ms), (20 * ms, 120 * ms), (1010 * ms, 1110 * ms)]
    answer = _ask(
        table,
        op,
        peers=1,
        depth=depth,
        size=size,
        pages=pages if op == "pages" else 1,
        count=2,
        shard_bytes=SHARD_BYTES,
        lost_nic=table["nics"] - 1,
        lose_ns=10 * ms,
        until_ns=spans[-1][1],
        **{"from": [span[0] for span in spans], "to": [span[1] for span in spans]},
    )
    each = size * (pages if op == "pages" else 1)

    def rate(span: Any) -> float:
        return each * (span.ops - 1) * 1e9 / (span.last_ns - span.first_ns) if span.ops > 1 else 0.0

    before, soon, later = (rate(answer.span[i]) for i in range(3))
    return Loss(nics=table["nics"], before=before, soon=soon, later=later, failed=int(answer.failed))


# ---- the paper's figures --------------------------------------------------------------------------------------------

_SINGLE = 256 << 10
_MEGA = 1 << 20
_SATURATED = 16 << 20
_TOKEN = 7168  #: below the size from which on the engine cuts a target for all NICs: one request for each peer

#: nic, what, unit, the paper's figure, the constant it gave: Figure 8 and Table 2, Tables 8 and 9 of arXiv 2510.27656.
_PAPER: tuple[tuple[str, str, str, float | None, str], ...] = (
    ("efa-p5en", "write 256 KiB", "Gbit/s", 54.0, "latency_ns"),
    ("efa-p5en", "write 1 MiB", "Gbit/s", 145.0, ""),
    ("efa-p5en", "write 16 MiB", "Gbit/s", None, ""),
    ("efa-p5en", "pages 16 KiB", "Gbit/s", 274.0, ""),
    ("efa-p5en", "pages 1 KiB", "M op/s", 2.11, "done_ns"),
    ("efa-p5en", "scatter to 63 posted", "us", 27.89, "post_ns"),
    ("efa-p5en", "scatter to 7 posted", "us", 3.08, ""),
    ("cx7", "write 256 KiB", "Gbit/s", 116.0, "latency_ns"),
    ("cx7", "write 1 MiB", "Gbit/s", 245.0, ""),
    ("cx7", "write 16 MiB", "Gbit/s", None, ""),
    ("cx7", "pages 16 KiB", "Gbit/s", 367.0, "payload_permille"),
    ("cx7", "pages 1 KiB", "M op/s", 11.10, "post_ns"),
    ("cx7", "scatter to 63 posted", "us", 8.50, "doorbell_ns"),
    ("cx7", "scatter to 7 posted", "us", 0.84, ""),
)


def _row(nic: str, what: str, unit: str) -> tuple[float, str]:
    if what.startswith("write"):
        size = {"write 256 KiB": _SINGLE, "write 1 MiB": _MEGA, "write 16 MiB": _SATURATED}[what]
        found = predict(nic, "write", size=size)
        return found.gbit_per_s, found.bound
    if what.startswith("pages"):
        found = predict(nic, "pages", size=(16 if "16" in what else 1) << 10, pages=4096, depth=4)
        return (found.gbit_per_s if unit == "Gbit/s" else found.ops_per_s / 1e6), found.bound
    found = predict(nic, "scatter", size=_TOKEN, peers=63 if "63" in what else 7)
    return found.posting_s * 1e6, "sender"


def compare() -> list[Row]:
    """Return every figure that the paper has for these operations, with the prediction beside it."""
    rows = []
    for nic, what, unit, paper, fitted in _PAPER:
        value, bound = _row(nic, what, unit)
        rows.append(Row(nic, what, unit, paper, value, fitted, bound))
    return rows
