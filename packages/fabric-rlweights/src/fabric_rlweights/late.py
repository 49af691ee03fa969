"""A receiver that comes late gets the current version from a peer that serves it, and nobody is stopped for that.

An update that comes meanwhile breaks it off: it serves the late one too.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from fabric_rlweights.attempt import NotCommitted
from fabric_rlweights.members import Member
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.protocol import Begin, Offer, Seed
from fabric_rlweights.updates import Updates

__all__ = ["seed_late_receivers"]

log = logging.getLogger("fabric.rlweights")
SECONDS = 60.0  #: for one of them
_GRACE = 5.0  #: of them for telling both that it failed


def seed_late_receivers(updates: Updates) -> None:
    """Serve every receiver that has another version and whose peer, with the same tensors, has the current one."""
    members = updates.members
    if not members.ready or updates.version < 0 or members.plan is None:
        return
    for late in members:
        if any(isinstance(event, Offer) for event in updates.later):
            return  # an update comes, which serves everybody
        if late.who[0] == "receiver" and not late.lost and late.version != updates.version:
            donor = _donor(updates, late)
            if donor is not None:
                _seed(updates, late, donor)


def _donor(updates: Updates, late: Member) -> Member | None:
    for member in updates.members:
        serves = member.who[0] == "receiver" and not member.lost and member.version == updates.version
        if serves and _alike(member.table, late.table):
            return member  # type: ignore[no-any-return]
    return None


def _seed(updates: Updates, late: Member, donor: Member) -> None:
    update = updates.begin(updates.version, SECONDS, seeding=True)
    update.members = [late, donor]
    plan, version, until = updates.members.plan, update.version, update.deadline - _GRACE
    assert plan is not None
    tensors = int((plan.destination.tensors.rank == late.who[1]).sum())
    begin = Begin(update.number, version, SECONDS - _GRACE, updates.digests, True, tensors, donor.addr.to_bytes())
    both = [late, donor]
    try:
        updates.channel.send(late.addr, begin)
        updates.wait(update, until, "get ready", lambda: [] if update.ready else [late], both)
        ready = update.ready[late.who[1]]
        left = max(0.0, until - time.monotonic())
        seed = Seed(update.number, late.who[1], version, left, ready.imm, ready.descs, updates.digests)
        updates.channel.send(donor.addr, seed)
        updates.wait(update, until, "send", lambda: [] if update.sent else [donor], both)
        updates.wait(update, until, "receive", lambda: [] if update.received else [late], both)
        if updates.digests:
            updates.compare(update, [late])
    except NotCommitted as error:
        log.warning("%s did not get version %d from %s: %s", late.name, version, donor.name, error)
        updates.abort(update, str(error))
        updates.members.call_lost()
        return
    update.members = [late]
    problem, _ = updates.commit(update)
    if problem:
        log.warning("%s does not serve version %d: %s", late.name, version, problem)


def _alike(one: EngineTable, other: EngineTable) -> bool:
    """Whether two ranks have the same tensors, made of the same boxes, in the same order."""

    def bare(table: EngineTable) -> Any:
        tensors = [t.model_copy(update={"address": 0}) for t in table.tensors]
        return tensors, table.entries, table.fallback

    return bool(bare(one) == bare(other))
