"""Planted bugs of what is told: ends and losses without a reason, messages that nobody hears of."""

from __future__ import annotations

from planted.table import Bug, edit

REASONS = (
    Bug(
        "good request taken for a failed one",
        "C1",
        "transfer.c",
        edit(
            "if (!status) t->ended += count;",
            "if (!status) t->ended += count;\n    if (!status && fab_slot_gen(&t->slot) % 61 == 3) status = -EIO;",
        ),
        "a transfer fails although nothing happened to it",
    ),
    Bug(
        "message dropped on the way to the program",
        "C1",
        "recv.c",
        edit(
            "    FAB_COUNT_LOCKED(g->stats.recvs, 1);\n",
            "    FAB_COUNT_LOCKED(g->stats.recvs, 1);\n    static unsigned lost;\n"
            "    if (++lost % 16 == 0) {\n        fab_list_append(&g->unposted, &r->link);\n        return;\n    }\n",
        ),
        "a received message is put back as if its buffer were empty",
    ),
    Bug(
        "message done and never posted",
        "C1",
        "transfer.c",
        edit(
            "    uint32_t gen = fab_slot_gen(&t->slot);\n    for (uint32_t i = 0, n",
            "    uint32_t gen = fab_slot_gen(&t->slot);\n    if (t->op == FAB_OP_SEND && gen % 61 == 3) {\n"
            "        drop_works(t);\n        end_if_quiet(g, t, now);\n        return;\n    }\n"
            "    for (uint32_t i = 0, n",
        ),
        "a send ends well, and no NIC has seen it",
    ),
    Bug(
        "living peer told as lost",
        "C11",
        "transfer.c",
        edit(
            "if (!status) t->ended += count;",
            "if (!status) t->ended += count;\n    fab_peer *pp = fab_peer_at(g, peer);\n"
            "    if (pp && fab_slot_gen(&t->slot) % 61 == 3 && !atomic_exchange(&pp->event_queued, 1))\n"
            "        fab_event_push(g->engine, &pp->event, FAB_EV_PEER_LOST);",
        ),
        "on_peer_lost hears of a peer with whom all is well",
    ),
    Bug(
        "expectation fails with one path",
        "C11",
        "peer.c",
        edit(
            "    publish_usable(g, peer);\n    fail_pinned(g, peer, now);\n    if (peer->up",
            "    if (status) fab_expect_peer_lost(g, peer);\n    publish_usable(g, peer);\n"
            "    fail_pinned(g, peer, now);\n    if (peer->up",
        ),
        "an expectation that names a peer fails although the peer is reached over another path",
    ),
    Bug(
        "all that waits fails with one path",
        "C11",
        "peer.c",
        edit("if (!w->pinned || w->nics & possible) continue;", "if (w->pinned && w->nics & possible) continue;"),
        "what waits for a peer fails with a lost path instead of leaving by the others",
    ),
    Bug(
        "another peer named",
        "C11",
        "transfer.c",
        edit(
            "        t->err_peer = peer;\n        t->err_nic = nic;\n    }\n    if (peer ==",
            "        t->err_peer = peer ? 0 : 1;\n        t->err_nic = nic;\n    }\n    if (peer ==",
        ),
        "the error of a transfer names a peer that it had nothing to do with",
    ),
)
