"""C2: no order is promised and none is needed. Each test here would fail if something rested on one.

With the backend `local` the kit turns on `local_shuffle` (see --fabric-seed), which reorders on purpose.
"""

from __future__ import annotations

import random

from fabric_core import ScatterDst
from fabric_core.conformance.kit import Calls, Kit, Memory, Pair, after, finish, pattern


def test_immediates_of_different_writes_each_mean_their_own_payload(wide: Pair, kit: Kit) -> None:
    """C2, C10: whichever arrives first, its own bytes are there."""
    count, length = kit.scaled(20, 64, 500), 5_003
    source, target = Memory(wide.a, count * length, pattern(1, count * length)), Memory(wide.b, count * length)
    wrong = Calls()

    def look(k: int) -> None:
        if target.get(k * length, length) != pattern(1, count * length)[k * length : (k + 1) * length]:
            wrong(k)

    imms = [wide.b.alloc_imm() for _ in range(count)]
    arrived = [wide.b.expect_imm_count(imm, 1, after(look, k)) for k, imm in enumerate(imms)]
    order = random.Random(kit.seed).sample(range(count), count)
    finish(
        wide.a.submit_single_write(length, imms[k], (source.handle, k * length), (target.desc, k * length))
        for k in order
    )
    finish(arrived)
    wide.b.close()
    assert wrong.count == 0, f"immediates before their payload: {wrong.firsts}"


def test_verbs_may_overtake_each_other(wide: Pair, kit: Kit) -> None:
    """C2: one immediate collects writes, scatters and barriers; only their number means something."""
    rounds, length = kit.scaled(10, 40, 400), 1_003
    source, target = (
        Memory(wide.a, length * rounds * 2, pattern(2, length * rounds * 2)),
        Memory(wide.b, length * rounds * 2),
    )
    imm = wide.b.alloc_imm()
    arrived = wide.b.expect_imm_count(imm, rounds * 3)
    sent = []
    for k in range(rounds):
        first, second = 2 * k * length, (2 * k + 1) * length
        sent += [
            wide.a.submit_single_write(length, imm, (source.handle, first), (target.desc, first)),
            wide.a.submit_barrier(None, None, imm, [target.desc]),
            wide.a.submit_scatter(None, None, imm, source.handle, [ScatterDst(target.desc, length, second, second)]),
        ]
    finish([*sent, arrived])
    assert target.get() == source.get()
    assert wide.b.free_imm(imm) == 0


def test_messages_need_no_order_to_be_complete(wide: Pair, kit: Kit) -> None:
    """C2: all of them come, in whatever order; they carry their number themselves."""
    count, calls = kit.scaled(30, 100, 2000), Calls()
    wide.b.submit_recvs(64, 8, calls)
    finish(wide.a.submit_send(wide.b.address, k.to_bytes(4, "little")) for k in range(count))
    calls.wait(count)
    assert sorted(int.from_bytes(message, "little") for message in calls.firsts) == list(range(count))
