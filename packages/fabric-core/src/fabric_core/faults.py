"""Faults on purpose, around any backend: for tests of whatever stands above it.

    TransferEngine.open(faults="reorder,delay=2ms,drop=0.01,fail=0.001:EIO,kill_nic=1@5000,seed=7")
    FABRIC_FAULTS='refuse=0.05:1ms,partial=0.3' python my_test.py
    faults.control(engine).kill_nic(1)

A plan is words separated by commas. Shares are of 1, times have a unit (ns, us, ms, s).

    reorder            completions, immediates and messages come out in random order
    delay=TIME         ... and up to so much later
    drop=SHARE         the request is carried out, its completion stays away until it is cancelled: a NIC that hangs
    fail=SHARE[:E]     the request is not carried out and ends with this errno (EIO unless said)
    fail_late=SHARE    it is carried out, and ends with that errno all the same
    refuse=SHARE:TIME  a post finds the queue full, and so do those that follow for a while
    partial=SHARE      a post takes a part of what it is given
    rnr=SHARE          a receive buffer is not taken at once
    cut=SHARE:TIME     a post finds its link down, which comes back after that time
    kill_nic=N@WHEN    NIC N goes down after WHEN: so many requests (a number), or a time
    revive=TIME        ... and comes back after that time
    seed=N             where all that is random comes from: the same calls meet the same faults

Every promise of `fabric/domain.h` still holds: each request ends once, and not while a NIC may touch its memory.
The receiving half of a NIC never fails: what a peer was told has arrived is told here too. The work is done in C
(`native/fault/`). `fabric doctor` warns while FABRIC_FAULTS is set.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fabric_core.errors import BackendError, ConfigError, EngineClosed

if TYPE_CHECKING:
    from fabric_core.base import EngineBase
    from fabric_core.domain import NativeDomain

__all__ = ["Control", "Plan", "control", "wrap"]

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(ns|us|ms|s)")
_LONGEST = 1e6  # seconds
_SHARES = ("drop", "fail", "fail_late", "refuse", "partial", "rnr", "cut")
_COUNTS = (
    "taken", "ended", "dropped", "failed", "failed_late", "refused", "partial", "rnr", "cuts", "kills", "revives",
    "open", "held", "down",
)  # fmt: skip


def _time(text: str, word: str) -> float:
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(f"faults: {word!r}: {text!r} is no time: write 500us, 2ms or 1.5s")
    return seconds


def _time_text(seconds: float) -> str:
    for unit in ("s", "ms", "us", "ns"):
        amount = seconds / _UNITS[unit]
        if amount >= 1 and _time(text := f"{amount:.12g}{unit}", "") == seconds:
            return text
    return f"{seconds!r}s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong, and how often. Times in seconds, shares from 0 to 1. See the module's text."""

    reorder: bool = False
    delay: float = 0.0
    drop: float = 0.0
    fail: float = 0.0
    fail_late: float = 0.0
    fail_code: str = "EIO"
    refuse: float = 0.0
    refuse_for: float = 1e-3
    partial: float = 0.0
    rnr: float = 0.0
    cut: float = 0.0
    cut_for: float = 1e-3
    kill_nic: int | None = None
    kill_ops: int = 0  #: the NIC goes down after so many requests; 0: see kill_after
    kill_after: float = 0.0
    revive: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _SHARES:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"faults: {name}={value!r}: a share is a number from 0 to 1")
        for name in ("delay", "refuse_for", "cut_for", "kill_after", "revive"):
            if not 0 <= getattr(self, name) <= _LONGEST:
                raise ConfigError(f"faults: {name}={getattr(self, name)!r}: seconds, 0 to {_LONGEST:g}")
        if self.fail_code not in errno.errorcode.values():
            raise ConfigError(f"faults: {self.fail_code!r} is no errno: write EIO, EAGAIN, ...")
        if self.kill_nic is not None and not (0 <= self.kill_nic < 8 and (self.kill_ops > 0 or self.kill_after > 0)):
            raise ConfigError("faults: kill_nic=N@WHEN: a NIC from 0 to 7, and after how many requests or what time")
        if not 0 <= self.seed < 1 << 64 or not 0 <= self.kill_ops < 1 << 63:
            raise ConfigError("faults: seed=N and numbers of requests are integers of 64 bits, 0 or more")

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan; `str()` writes it again. Raises ConfigError naming the word that makes no sense."""
        found: dict[str, Any] = {}
        for word in (part.strip() for part in text.split(",") if part.strip()):
            name, equals, value = word.partition("=")
            if name in found or (name == "kill_nic" and "kill_ops" in found):
                raise ConfigError(f"faults: {name!r} is given twice")
            if (name == "reorder") == bool(equals):
                raise ConfigError(f"faults: {word!r}: write NAME=VALUE, and reorder alone")
            found |= _read(name, value, word)
        return cls(**found)

    def __str__(self) -> str:
        words = ["reorder"] if self.reorder else []
        if self.delay:
            words.append(f"delay={_time_text(self.delay)}")
        for name in _SHARES:
            share = getattr(self, name)
            if not share:
                continue
            extra = ""
            if name == "fail" or (name == "fail_late" and not self.fail and self.fail_code != "EIO"):
                extra = f":{self.fail_code}"
            elif name in ("refuse", "cut"):
                extra = f":{_time_text(getattr(self, name + '_for'))}"
            words.append(f"{name}={share!r}{extra}")
        if self.kill_nic is not None:
            when = str(self.kill_ops) if self.kill_ops else _time_text(self.kill_after)
            words.append(f"kill_nic={self.kill_nic}@{when}")
        if self.revive:
            words.append(f"revive={_time_text(self.revive)}")
        if self.seed:
            words.append(f"seed={self.seed}")
        return ",".join(words)

    @property
    def harmless(self) -> bool:
        """Whether every operation still ends well under it: only order, time and room change."""
        return not (self.drop or self.fail or self.fail_late or self.cut or self.kill_nic is not None)


def _read(name: str, value: str, word: str) -> dict[str, Any]:
    """Return the fields that one word gives."""
    try:
        if name == "reorder":
            return {"reorder": True}
        if name in ("delay", "revive"):
            return {name: _time(value, word)}
        if name == "seed":
            return {"seed": int(value)}
        if name == "kill_nic":
            nic, _, when = value.partition("@")
            return {
                "kill_nic": int(nic),
                **({"kill_ops": int(when)} if when.isdigit() else {"kill_after": _time(when, word)}),
            }
        if name in _SHARES:
            share, _, more = value.partition(":")
            given: dict[str, Any] = {name: float(share)}
            if more and name in ("fail", "fail_late"):
                given["fail_code"] = more
            elif more and name in ("refuse", "cut"):
                given[name + "_for"] = _time(more, word)
            elif more:
                raise ConfigError(f"faults: {word!r}: {name} takes a share and nothing else")
            return given
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"faults: {word!r}: {value!r} is no value of {name}") from None
    known = ", ".join(
        field.name
        for field in fields(Plan)
        if field.name in (*_SHARES, "reorder", "delay", "kill_nic", "revive", "seed")
    )
    raise ConfigError(f"faults: there is no {name!r}; there are {known}")


def wrap(domains: Sequence[NativeDomain], plan: Plan, group: int = 0) -> list[NativeDomain]:
    """Put a decorator around each domain of a group, which owns it from now on. Raises BackendError: no memory."""
    from fabric_core.domain import NativeDomain
    from fabric_core.native_lib import ffi, lib

    made: list[NativeDomain] = []
    for nic, domain in enumerate(domains):
        killed = plan.kill_nic == nic
        c_plan = ffi.new(
            "fab_fault_plan *",
            {
                "seed": (plan.seed * 128 + group * 8 + nic) % (1 << 64),
                "reorder": int(plan.reorder),
                **{f"{name}_ppm": round(getattr(plan, name) * 1e6) for name in _SHARES},
                "fail_status": -getattr(errno, plan.fail_code),
                **{
                    f"{short}_ns": round(seconds * 1e9)
                    for short, seconds in (
                        ("delay", plan.delay),
                        ("refuse", plan.refuse_for),
                        ("cut", plan.cut_for),
                        ("kill", plan.kill_after if killed else 0.0),
                        ("revive", plan.revive),
                    )
                },
                "kill_ops": plan.kill_ops if killed else 0,
            },
        )
        inner = ffi.cast("const fab_domain_ops *", domain.ops)
        pointer = lib.fab_fault_wrap(inner, ffi.cast("void *", domain.ctx), c_plan)
        if pointer == ffi.NULL:
            for one in (*made, *domains[nic:]):
                ffi.cast("const fab_domain_ops *", one.ops).close(ffi.cast("void *", one.ctx))
            raise BackendError("no memory or no file descriptors for the faults around a domain")
        lib.fab_fault_hold(pointer)
        switch = ffi.gc(pointer, lib.fab_fault_release)
        ops = int(ffi.cast("uintptr_t", lib.fab_fault_ops()))
        made.append(NativeDomain(ops, int(ffi.cast("uintptr_t", pointer)), (domain, switch)))
    return made


class Control:
    """The switch of an engine that was opened with `faults=` (an empty plan, "seed=1", does nothing by itself).

    Each takes effect at the NIC's next poll, for which it is woken. `group` numbers the engine's devices.
    """

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        if not engine._faults:
            raise ConfigError("this engine has no faults: open it with faults='seed=1', or set FABRIC_FAULTS")

    def _switch(self, nic: int, group: int) -> Any:
        if self._engine.closed:
            raise EngineClosed(f"{self._engine.address} is closed")
        switches = self._engine._faults[group]
        if not 0 <= nic < len(switches):
            raise ConfigError(f"there is no NIC {nic!r}: the group has {len(switches)}")
        return switches[nic]

    def kill_nic(self, nic: int, group: int = 0) -> None:
        """The NIC goes down: what it holds ends badly, nothing more can be posted."""
        from fabric_core.native_lib import lib

        lib.fab_fault_kill(self._switch(nic, group))

    def revive_nic(self, nic: int, group: int = 0) -> None:
        """It comes back."""
        from fabric_core.native_lib import lib

        lib.fab_fault_revive(self._switch(nic, group))

    def cut(self, peer: str, nic: int, seconds: float = _LONGEST, group: int = 0) -> None:
        """The link of one NIC to a peer goes down. `peer`: its NIC's address or a part of it; "": all peers.

        Raises ConfigError: too many cuts at once.
        """
        from fabric_core.native_lib import lib

        if not 0 < seconds <= _LONGEST or len(os.fsencode(peer)) > 255:
            raise ConfigError(f"cut({peer!r}, seconds={seconds!r}): an address, and seconds above 0")
        rc = lib.fab_fault_cut(self._switch(nic, group), peer.encode(), round(seconds * 1e9))
        if rc < 0:
            raise ConfigError(f"cut({peer!r}): {os.strerror(-rc)}: 16 at a time")

    def mend(self, nic: int, group: int = 0) -> None:
        """All its cut links can be opened again."""
        from fabric_core.native_lib import lib

        lib.fab_fault_mend(self._switch(nic, group))

    def counts(self, nic: int, group: int = 0) -> dict[str, int]:
        """How often what happened: requests taken and ended, dropped, failed, ... ; also after the engine's close."""
        from fabric_core.native_lib import ffi, lib

        out = ffi.new("fab_fault_counts *")
        lib.fab_fault_counts_get(self._engine._faults[group][nic], out)
        return {name: int(getattr(out, name)) for name in _COUNTS}


def control(engine: EngineBase) -> Control:
    """Return the switch of an engine. Raises ConfigError if it was opened without `faults`."""
    return Control(engine)
