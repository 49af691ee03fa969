"""Where instances of prefill and decode make themselves known: a fixed list, or a torch store that is there already.

    directory = StoreDirectory(torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False))
    registration = directory.register("prefill-3", "prefiller", [str(engine.address)], lease=3.0)
    registration.change(role="decoder")     # at run time; others see it at their next look
    registration.close()

A registration is a record that its owner changes again and again, four times in a lease, from a thread of its own.
Whoever reads decides by its own clock: a record that did not change for three quarters of a lease is of a dead owner
(registry.py). So clocks need not agree, and a killed process is gone within its lease for everybody who looks often.

No service of our own: any torch `Store` will do, and so will anything else with its methods add, check, compare_set,
delete_key, get and set.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fabric_core import BackendError, ConfigError, FabricError, StaleHandle
from fabric_kvcache.member import BEATS, Directory, Member, Role, State, StaticDirectory

__all__ = ["BEATS", "Directory", "Displaced", "Member", "Registration", "Role", "StaticDirectory", "StoreDirectory"]

log = logging.getLogger("fabric.kvcache")

_MAX_RECORD = 1 << 16
_MAX_LOAD = 1 << 40  # of Member.load
_FREE = "-"  # a slot that is nobody's; not "", which a store takes for "no such key"


class Displaced(FabricError):
    """Another process has registered under this name since: this one is not known any more."""


class StoreDirectory:
    """Records in a torch store. `limit`: records at a time, dead ones that nobody has swept yet included."""

    def __init__(self, store: Any, *, prefix: str = "fabric-kv", limit: int = 4096) -> None:
        self._store = store
        self._prefix = prefix
        self._limit = limit
        self.malformed = 0  #: records that were none; somebody else uses the same keys

    def read(self) -> list[Member]:
        return [member for _key, _raw, member in self._records() if member is not None]

    def forget(self, member: Member) -> None:
        for key, raw, found in self._records():
            if found == member:
                self._swap(key, raw, _FREE)

    def register(
        self,
        name: str,
        role: Role,
        addresses: Sequence[str],
        *,
        lease: float = 3.0,
        layout: str = "",
        load: Callable[[], int] = lambda: 0,
    ) -> Registration:
        """Make an instance known, until `close` or until its process ends. A name that is taken changes hands.

        `lease`: seconds after which others take it for dead, if it is. `load`: asked at each beat of the heart; while
        it raises, the last one that it gave stands, and `Registration.problem` is the error.
        Raises ConfigError; BackendError if the store cannot be reached.
        """
        if not 0.01 <= lease <= 86_400:
            raise ConfigError(f"lease={lease!r}: seconds, from 0.01 to a day")
        try:
            member = Member(
                name=name, role=role, addresses=tuple(addresses), layout=layout, beat=0,
                incarnation=secrets.token_hex(8), lease_ms=round(1000 * lease),
            )  # fmt: skip
            _check(member)
        except (FabricError, TypeError, msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise ConfigError(f"{name!r}, {role!r}, {list(addresses)!r}: {error}") from None
        return Registration(self, member, load)

    # ---- the store: slots, each with one record, that are numbered from 0

    def _claim(self, member: Member, *, again: bool = False) -> tuple[str, str]:
        """Write a record into the slot that has its name, a free one or a new one; return (key, value).

        `again`: it had one, and lost it; it takes none from another process. Raises Displaced then.
        """
        raw = _encode(member)
        for _ in range(100):
            records = self._records()
            mine = [(key, old) for key, old, found in records if found is not None and found.name == member.name]
            if again and mine:
                raise Displaced(f"{member.name} was registered again by another process")
            free = [(key, old) for key, old, found in records if found is None and old == _FREE]
            for key, old in [*mine, *free][:1]:
                if self._swap(key, old, raw):
                    for other, value in mine[1:]:  # two that came at the same time
                        self._swap(other, value, _FREE)
                    return key, raw
            if not mine and not free:
                if len(records) >= self._limit:
                    raise BackendError(
                        f"the directory {self._prefix!r} is full: {self._limit} records, and no Registry that reads "
                        "it has swept dead ones; raise limit="
                    )
                number = self._call("add", self._slots, 1) - 1
                if self._swap(f"{self._prefix}/{number}", "", raw):
                    return f"{self._prefix}/{number}", raw
        raise BackendError(f"{member.name} cannot register: others change every slot first")

    @property
    def _slots(self) -> str:
        return f"{self._prefix}/slots"

    def _records(self) -> list[tuple[str, str, Member | None]]:
        """Return (key, value, record or None) of every slot."""
        count = min(self._call("add", self._slots, 0), 1 << 20)
        found: list[tuple[str, str, Member | None]] = []
        for number in range(count):
            key = f"{self._prefix}/{number}"
            if not self._call("check", [key]):
                continue  # counted, and not written yet
            raw = bytes(self._call("get", key)).decode(errors="replace")
            found.append((key, raw, None if raw == _FREE else self._decode(raw)))
        return found

    def _decode(self, raw: str) -> Member | None:
        try:
            if len(raw) > _MAX_RECORD:
                raise ValueError(f"{len(raw)} bytes")
            return _decoder.decode(raw)
        except (msgspec.MsgspecError, FabricError, ValueError) as error:
            self.malformed += 1
            log.warning("a record in %r is none: %s", self._prefix, error)
            return None

    def _swap(self, key: str, old: str, new: str) -> bool:
        return bytes(self._call("compare_set", key, old, new)) == new.encode()

    def _call(self, verb: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, verb)(*arguments)
        except (RuntimeError, OSError, ValueError) as error:  # torch's are RuntimeErrors
            raise BackendError(f"the store does not answer ({verb}): {str(error).splitlines()[0]}") from error


class Registration:
    """A record that lives. Its owner may change it; close it when the instance ends. A context manager."""

    def __init__(self, directory: StoreDirectory, member: Member, load: Callable[[], int]) -> None:
        self._directory = directory
        self._load = load
        self._lock = threading.Lock()  # guards the three below
        self._member = member
        self._key, self._raw = directory._claim(member)
        self.problem: FabricError | None = None  #: the last beat's; None: all is well
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._beat, name=f"fabric-kv-lease-{member.name}", daemon=True)
        self._thread.start()

    @property
    def member(self) -> Member:
        with self._lock:
            return self._member

    def change(self, *, role: Role | None = None, state: State | None = None) -> None:
        """Change the role, or begin to drain.

        Raises ConfigError for one that there is not, StaleHandle after `close`, Displaced, and BackendError if the
        store cannot be reached.
        """
        with self._lock:
            if self._closed:
                raise StaleHandle(f"the registration of {self._member.name} is closed: register it again")
            member = self._member
            changed = msgspec.structs.replace(
                member, role=member.role if role is None else role, state=member.state if state is None else state
            )
            try:
                _check(changed)
            except (TypeError, msgspec.MsgspecError) as error:
                raise ConfigError(f"role={role!r}, state={state!r}: {error}") from None
            self._write(changed)

    def _write(self, member: Member) -> None:
        """Write the next beat, with the lock held."""
        member = msgspec.structs.replace(member, beat=member.beat + 1)
        raw = _encode(member)
        if not self._directory._swap(self._key, self._raw, raw):
            current = bytes(self._directory._call("get", self._key)).decode(errors="replace")
            found = None if current == _FREE else self._directory._decode(current)
            if found is not None and found.name == member.name and found.incarnation != member.incarnation:
                raise Displaced(f"{member.name} was registered again, by {', '.join(found.addresses)[:200]}")
            self._key, raw = self._directory._claim(member, again=True)  # swept while this process stood still
        self._member, self._raw = member, raw

    def _beat(self) -> None:
        while not self._stop.wait(self._member.lease_ms / 1000 / BEATS):
            load, problem = self._ask_load()
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._write(msgspec.structs.replace(self._member, load=load))
            except Displaced as error:
                self.problem = error
                log.error("%s; it is not known any more", error)
                return
            except Exception as error:  # the store's: the heart goes on
                problem = error if isinstance(error, FabricError) else FabricError(repr(error))
            if problem is not None and self.problem is None:
                log.warning("%s: %s", self._member.name, problem)
            self.problem = problem

    def _ask_load(self) -> tuple[int, FabricError | None]:
        """Return the user's figure; the last one that was given, and why, if there is none. It costs no beat."""
        try:
            load = int(self._load())
        except Exception as error:
            return self._member.load, FabricError(f"load() has failed, {self._member.load} stands: {error!r}")
        return min(max(0, load), _MAX_LOAD), None

    def close(self, timeout: float = 5.0) -> None:
        """Be known no more. Idempotent. A store that cannot be reached is no error: the lease runs out."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        with self._lock:
            self._closed = True
            if self._raw != _FREE and not isinstance(self.problem, Displaced):
                try:
                    self._directory._swap(self._key, self._raw, _FREE)
                except BackendError as error:
                    log.warning("%s: %s", self._member.name, error)
                self._raw = _FREE

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Member)


def _encode(member: Member) -> str:
    return _encoder.encode(member).decode()


def _check(member: Member) -> None:
    """Raise if others could not read this record: the bounds of its fields are looked at while decoding."""
    _decoder.decode(_encode(member))
