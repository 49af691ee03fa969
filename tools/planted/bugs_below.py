"""Planted bugs of peers, deadlines, and of what only threads can show."""

from __future__ import annotations

from planted.table import Bug, edit

# --- peers, deadlines ----------------------------------------
PEERS = (
    Bug(
        "queue of a lost peer not failed",
        "C11",
        "peer.c",
        edit("while (!fab_list_empty(&peer->queue)) {", "while (0) {"),
        "transfers to a peer that is gone wait for their deadline",
    ),
    Bug(
        "loss ignored while nothing is in flight",
        "C11",
        "peer.c",
        edit(
            "    if (!status) status = -ECONNRESET;\n",
            "    if (!status) status = -ECONNRESET;\n    if (!g->outstanding) return;\n",
        ),
        "the dead link is used for the next transfer",
    ),
    Bug(
        "loss told once only",
        "C11",
        "events.c",
        edit("atomic_store_explicit(&p->event_queued, 0, memory_order_release);"),
        "the second loss of a peer is not told",
    ),
    Bug(
        "lost peer left in place",
        "C11",
        "peer.c",
        edit(
            "    fab_expect_peer_lost(g, peer);\n    if (!atomic_exchange",
            "    if (!atomic_exchange",
        ),
        "expectations that name a lost peer are not told",
    ),
    Bug(
        "deadline a turn late",
        "C1",
        "timer.c",
        edit(
            "fab_list_append(&g->wheel[tick % FAB_WHEEL], &timer->link);",
            "fab_list_append(&g->wheel[(tick + FAB_WHEEL - 1) % FAB_WHEEL], &timer->link);",
        ),
        "off by one slot: looked at before its time, and again a second later",
        "test_ends:plain",
    ),
    Bug(
        "deadline rounded down",
        "C1",
        "timer.c",
        edit("uint64_t tick = deadline / FAB_TICK_NS + 1;", "uint64_t tick = deadline / FAB_TICK_NS;"),
        "the same by rounding",
        "test_ends:plain",
    ),
    Bug(
        "deadline early",
        "C1",
        "timer.c",
        edit(
            "if (timer->deadline > now) { /* a later turn",
            "if (timer->deadline > now + (1ull << 32)) { /* a later turn",
        ),
        "what is meant for a later turn of the wheel fires in this one",
    ),
    Bug(
        "deadlines lost when the clock jumps",
        "C1",
        "timer.c",
        edit("g->tick = target - FAB_WHEEL; /* one turn", "g->tick = target - 1; /* one turn"),
        "the lists that a jump passed over wait for the next turn",
        "test_ends:plain",
    ),
    Bug(
        "timer of an ended transfer left",
        "C1",
        "transfer.c",
        edit("    fab_timer_remove(g, &t->timer);\n    fab_transfer_let_go(t);", "    fab_transfer_let_go(t);"),
        "a deadline fires for the slot's next owner",
    ),
)

# --- ring, pool: what only threads can show ----------------------------------------
THREADS = (
    Bug(
        "request published without a release",
        "C10",
        "ring.h",
        edit(
            "atomic_store_explicit(&cell->seq, pos + 1, memory_order_seq_cst);",
            "atomic_store_explicit(&cell->seq, pos + 1, memory_order_relaxed);",
        ),
        "the worker may see the request before its content (on Arm)",
        "test_ring:tsan",
    ),
    Bug(
        "request published without a fence",
        "C8",
        "ring.h",
        edit(
            "atomic_store_explicit(&cell->seq, pos + 1, memory_order_seq_cst);",
            "atomic_store_explicit(&cell->seq, pos + 1, memory_order_release);",
        ),
        "store buffering: a worker that goes to sleep and a submitter overlook each other",
        "test_ring:plain",
    ),
    Bug(
        "cell freed without a release",
        "C10",
        "ring.h",
        edit(
            "atomic_store_explicit(&cell->seq, head + ring->mask + 1, memory_order_release);",
            "atomic_store_explicit(&cell->seq, head + ring->mask + 1, memory_order_relaxed);",
        ),
        "a producer may overwrite what the worker still reads",
        "test_ring:tsan",
    ),
    Bug(
        "request taken without an acquire",
        "C10",
        "ring.h",
        edit(
            "if (atomic_load_explicit(&cell->seq, memory_order_acquire) != head + 1) return false;",
            "if (atomic_load_explicit(&cell->seq, memory_order_relaxed) != head + 1) return false;",
        ),
        "the worker may read the request before it was written",
        "test_ring:tsan",
    ),
    Bug(
        "full ring overwritten",
        "C8",
        "ring.h",
        edit("if (ahead < 0) return false;\n        if (ahead > 0) {", "if (ahead > 0) {"),
        "requests are lost instead of put off",
        "test_ring:plain",
    ),
    Bug(
        "cell claimed by two producers",
        "C1",
        "ring.h",
        edit(
            "} else if (atomic_compare_exchange_weak_explicit(&ring->tail, &pos, pos + 1, memory_order_relaxed,\n"
            "                                                         memory_order_relaxed)) {",
            "} else {\n            atomic_store_explicit(&ring->tail, pos + 1, memory_order_relaxed);",
        ),
        "one of two requests is lost",
        "test_ring:tsan",
    ),
    Bug(
        "free list without its tag",
        "C1",
        "pool.c",
        edit(
            "uint64_t next = ((head >> 32) + 1) << 32 | atomic_load", "uint64_t next = (head >> 32) << 32 | atomic_load"
        )
        + edit(
            "next = ((head >> 32) + 1) << 32 | (slot->index + 1);", "next = (head >> 32) << 32 | (slot->index + 1);"
        ),
        "ABA: a slot has two owners",
        "test_pool:plain",
    ),
    Bug(
        "slot given back without a release",
        "C10",
        "pool.c",
        edit(
            "atomic_compare_exchange_weak_explicit(&pool->free_head, &head, next, memory_order_release,",
            "atomic_compare_exchange_weak_explicit(&pool->free_head, &head, next, memory_order_relaxed,",
        ),
        "the next owner may see what the last one still writes",
        "test_pool:tsan",
    ),
    Bug(
        "stale handle accepted",
        "C6",
        "pool.h",
        edit(
            "if (!slot || atomic_load_explicit(&slot->gen, memory_order_acquire) != gen || !(gen & 1u)) return NULL;",
            "if (!slot || !(atomic_load_explicit(&slot->gen, memory_order_acquire) & 1u) || !(gen & 1u)) return NULL;",
        ),
        "a handle kept too long names the slot's next owner",
        "test_pool:plain",
    ),
)
