"""Planted bugs of immediates, transfers, and of posting."""

from __future__ import annotations

from planted.table import Bug, edit

# --- immediates and expectations (imm.c) ----------------------------------------
IMMEDIATES = (
    Bug(
        "wake-up lost, threshold not read again",
        "C3",
        "imm.c",
        edit("if (threshold == UINT64_MAX || arrived(slot) < threshold) return;", "return;"),
        "an arrival between the look at the count and the new threshold tells nobody",
        "test_imm:plain",
    ),
    Bug(
        "wake-up lost, threshold stored too weakly",
        "C3",
        "imm.c",
        edit(
            "atomic_store_explicit(&slot->threshold, threshold, memory_order_seq_cst);",
            "atomic_store_explicit(&slot->threshold, threshold, memory_order_release);",
        ),
        "store buffering: the arrival and the expectation each overlook the other",
        "test_imm:plain",
    ),
    Bug(
        "early immediates not looked at",
        "C3",
        "imm.c",
        edit(
            "fab_list_append(&slot->waiting, &x->queue);\n    serve(e, slot);",
            "fab_list_append(&slot->waiting, &x->queue);",
        ),
        "an expectation of what has already arrived waits for the next arrival",
    ),
    Bug(
        "next in line not served",
        "C3",
        "imm.c",
        edit("if (slot_of(e, x->imm)) serve(e, slot);"),
        "when an expectation gives up, the one behind it does not get what is there",
        "test_imm:plain",
    ),
    Bug(
        "fires one write early",
        "C3",
        "imm.c",
        edit(
            "if (arrived(slot) < threshold) break;",
            "if (arrived(slot) + FAB_IMM_UNIT < threshold) break;",
        ),
        "off by one: the last payload may not be there",
    ),
    Bug(
        "fires twice on one count",
        "C1",
        "imm.c",
        edit("slot->consumed = threshold;\n"),
        "an expectation does not claim its count, so the next one fires on it too",
    ),
    Bug(
        "counts added without an exchange",
        "C3",
        "imm.c",
        edit(
            "if (atomic_compare_exchange_weak_explicit(&slot->word, &word, word + units, memory_order_seq_cst,\n"
            "                                                      memory_order_relaxed)) {",
            "atomic_store(&slot->word, word + units);\n            {",
        ),
        "arrivals that two workers count at one time are lost",
        "test_imm:plain",
    ),
    Bug(
        "shard counted by a wrong denominator",
        "C4",
        "imm.c",
        edit("(FAB_IMM_UNIT / FAB_IMM_SPLIT(imm))", "(FAB_IMM_UNIT / (FAB_IMM_SPLIT(imm) % 8 + 1))"),
        "the shards of a write do not add up to one",
    ),
    Bug(
        "generation of an arrival ignored",
        "C4",
        "imm.c",
        edit(
            "return TAG_OF(word) == TAG(FAB_IMM_GEN(imm)) ? slot : NULL;",
            "return word & IN_USE ? slot : NULL;",
        )
        + edit("while (TAG_OF(word) == tag) {", "while (word & IN_USE || !tag) {"),
        "a late immediate is credited to the slot's new owner",
    ),
    Bug(
        "generation not advanced",
        "C4",
        "imm.c",
        edit("((gen + 1) & 31u) << UNITS_BITS", "gen << UNITS_BITS"),
        "the next owner of a slot has the same immediate",
        "test_imm:plain",
    ),
    Bug(
        "slots used again at once",
        "C4",
        "imm.c",
        edit(
            "    slot->next_free = NO_SLOT;\n"
            "    if (table->free_last == NO_SLOT) table->free_first = FAB_IMM_SLOT(imm);\n"
            "    else table->slots[table->free_last].next_free = FAB_IMM_SLOT(imm);\n"
            "    table->free_last = FAB_IMM_SLOT(imm);",
            "    slot->next_free = table->free_first;\n"
            "    if (table->free_first == NO_SLOT) table->free_last = FAB_IMM_SLOT(imm);\n"
            "    table->free_first = FAB_IMM_SLOT(imm);",
        ),
        "last in, first out: a generation is back after 32 transfers, not after 32 times the table",
        "test_imm:plain",
    ),
    Bug(
        "freed while counting",
        "C3",
        "imm.c",
        edit(
            "} while (!atomic_compare_exchange_weak_explicit(&slot->word, &last, ((gen + 1) & 31u) << UNITS_BITS,\n"
            "                                                    memory_order_acq_rel, memory_order_relaxed));",
            "} while (0);\n    atomic_store(&slot->word, ((gen + 1) & 31u) << UNITS_BITS);",
        ),
        "what arrives between the last look and the end of the generation is neither surplus nor stray",
        "test_imm:plain",
    ),
    Bug(
        "ended expectations never reaped",
        "C1",
        "imm.c",
        edit("if (atomic_fetch_or_explicit(&x->state, FAB_REAPED, memory_order_acq_rel) & FAB_RELEASED) discard(x);"),
        "their slots are never used again: slow growth",
        "test_imm:plain",
    ),
    Bug(
        "deadline of an expectation never armed",
        "C3",
        "imm.c",
        edit("fab_timer_add(g, &x->timer, FAB_TIMER_EXPECT, now + x->timeout_ns);"),
        "a wait without an end",
    ),
    Bug(
        "peers of an expectation not watched",
        "C3",
        "imm.c",
        edit("fab_list_append(&g->watching, &x->watch);"),
        "an expectation that names its peers outlives them",
    ),
    Bug(
        "event of a late notify lost",
        "C1",
        "imm.c",
        edit("if ((old & FAB_PHASE_MASK) && !(old & FAB_NOTIFY)) fab_event_push", "if (0) fab_event_push"),
        "who asks for an event after the end never hears of it",
    ),
)

# --- the life of a transfer (transfer.c, worker.c, wait.c) ----------------------------------------
TRANSFERS = (
    Bug(
        "ends under the NIC's hands",
        "C7",
        "transfer.c",
        edit(
            "if (t->outstanding || t->works_left) return; /* C7",
            "if (!t->err && (t->outstanding || t->works_left)) return; /* C7",
        ),
        "a failed or cancelled transfer gives its source back while a NIC still reads it",
    ),
    Bug(
        "works of a failed transfer stay queued",
        "C1",
        "transfer.c",
        edit(
            "    drop_works(t);\n    if (t->outstanding && !t->cancelling)", "    if (t->outstanding && !t->cancelling)"
        ),
        "what was not posted of a failed transfer is posted afterwards, or never ends",
    ),
    Bug(
        "NICs not told to cancel",
        "C1",
        "transfer.c",
        edit("if (t->at_nic[i]) g->nics[i].ops->cancel(g->nics[i].ctx, handle);", "(void)handle;"),
        "a cancelled transfer ends only when its link is cut",
        "test_engine:plain",
    ),
    Bug(
        "cancel ignored",
        "C1",
        "worker.c",
        edit("fab_transfer_fail(g, t, rq.arg, FAB_PEER_NONE, -1, now);", "(void)now;"),
        "a cancelled transfer goes on until its deadline",
    ),
    Bug(
        "final immediates before the payload",
        "C10",
        "transfer.c",
        edit(
            "if (t->outstanding || t->works_left) return; /* C7",
            "if (t->works_left || (t->outstanding && (t->err || !t->final_pending))) return; /* C7",
        ),
        "the immediate of a write with many pieces is sent when they are posted, not when they have landed",
    ),
    Bug(
        "deadline of a transfer never armed",
        "C1",
        "transfer.c",
        edit("fab_timer_add(g, &t->timer, FAB_TIMER_TRANSFER, now + t->timeout_ns);"),
        "a wait without an end",
    ),
    Bug(
        "merged completions count as one",
        "C1",
        "transfer.c",
        edit("    t->outstanding -= count;\n", "    count = 1;\n    t->outstanding -= count;\n"),
        "a transfer waits for completions that have come",
    ),
    Bug(
        "inflight not counted down",
        "C8",
        "transfer.c",
        edit("atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);\n    uint64_t flag", "uint64_t flag"),
        "an engine fills up with transfers that have ended, and refuses new ones",
    ),
    Bug(
        "first reason overwritten",
        "C1",
        "transfer.c",
        edit("    if (!t->err) {\n        t->err = err;", "    {\n        t->err = err;"),
        "the outcome names a consequence, not the cause",
        "test_ends:plain",
    ),
    Bug(
        "event pushed twice",
        "C1",
        "wait.c",
        edit("if (phase(old) && !(old & FAB_NOTIFY)) fab_event_push", "if (!(old & FAB_NOTIFY)) fab_event_push"),
        "an event that was asked for before the end comes at once, and again at the end",
    ),
    Bug(
        "event pushed unasked",
        "C1",
        "transfer.c",
        edit("if (old & FAB_NOTIFY) fab_event_push(e, &t->event", "fab_event_push(e, &t->event"),
        "a released transfer's slot is queued as an event while its next owner uses it",
    ),
    Bug(
        "event of a transfer lost",
        "C1",
        "transfer.c",
        edit("    if (old & FAB_NOTIFY) fab_event_push(e, &t->event, FAB_EV_TRANSFER);\n"),
        "a callback is never called",
    ),
    Bug(
        "flag bumped before the end",
        "C10",
        "transfer.c",
        edit(
            "    uint64_t flag = t->flag; /* bumped last",
            "    if (t->flag) fab_flag_bump(t->flag, phase == FAB_DONE);\n    uint64_t flag = 0; /* bumped last",
        ),
        "who polls the flag finds the transfer still pending",
        "test_ends:plain",
    ),
    Bug(
        "flag says well of a failure",
        "C1",
        "transfer.c",
        edit("fab_flag_bump(flag, phase == FAB_DONE);", "fab_flag_bump(flag, true);"),
        "whoever looks only at the flag takes a failed transfer for done",
    ),
    Bug(
        "released slot not given back",
        "C1",
        "transfer.c",
        edit("if (old & FAB_RELEASED) fab_transfer_free(t);"),
        "a transfer released before its end leaks its slot",
    ),
    Bug(
        "status of a completion ignored",
        "C1",
        "worker.c",
        edit(
            "fab_transfer_completed(g, t, wc->count, status, peer, (int32_t)nic, now);",
            "fab_transfer_completed(g, t, wc->count, 0, peer, (int32_t)nic, now);",
        ),
        "a flushed or failed request counts as done",
    ),
    Bug(
        "memory revoked under a transfer",
        "C7",
        "memory.c",
        edit("while (atomic_load_explicit(&local->users, memory_order_seq_cst)) {", "while (0) {"),
        "a registration ends while a NIC reads from it",
    ),
)

# --- posting, sharding ----------------------------------------
POSTING = (
    Bug(
        "partial post accounted as full",
        "C1",
        "post.c",
        edit("account(g, peer, i, &b, (uint32_t)taken, now);", "account(g, peer, i, &b, b.n, now);"),
        "requests that the NIC did not take are never posted, and waited for",
    ),
    Bug(
        "cursor skips units",
        "C5",
        "post.c",
        edit("u += w->nnics) {", "u += w->nnics + (b->n == 3)) {"),
        "a NIC leaves out a unit and posts another one twice",
    ),
    Bug(
        "shares of a lost NIC counted for another",
        "C5",
        "post.c",
        edit("w->next[b->slot[k]] += w->nnics;", "w->next[slot_of(w, nic)] += w->nnics;"),
        "a NIC that took over posts the lost one's units again and leaves out its own",
    ),
    Bug(
        "work of a lost NIC left lying",
        "C11",
        "post.c",
        edit("w->pinned ? 0 : w->nics & ~peer->up;", "0;"),
        "units that were cut for a lost NIC are carried by nobody",
    ),
    Bug(
        "peer forgotten after a partial post",
        "C8",
        "post.c",
        edit("            fab_list_append(&g->active, link);\n", "            continue;\n"),
        "what did not fit at once waits until something else wakes the peer",
    ),
    Bug(
        "one place for all shards",
        "C5",
        "shard.c",
        edit(
            "uint64_t r = w->roff + (w->didx ? w->didx[page] * w->dstride : 0) + from;",
            "uint64_t r = w->roff + (w->didx ? w->didx[page] * w->dstride : 0);",
        ),
        "every piece is written to the beginning",
    ),
    Bug(
        "tail bytes dropped",
        "C5",
        "shard.c",
        edit("if (i >= pieces) return len;", "if (i >= pieces) return len / pieces * pieces;"),
        "what does not divide evenly is not sent (the paper's own code does this)",
    ),
    Bug(
        "piece longer than the NIC takes",
        "C6",
        "shard.c",
        edit("max > 2 * FAB_CACHELINE ? max - FAB_CACHELINE : max", "max"),
        "cut points rounded to cache lines make a piece too long",
    ),
    Bug(
        "another NIC's remote key",
        "C6",
        "shard.c",
        edit("uint32_t key = nic % w->remote->nkeys;", "uint32_t key = (nic + unit) % w->remote->nkeys;"),
        "requests carry the key of another NIC of the peer (the paper's own code does this)",
    ),
    Bug(
        "wrong denominator on the wire",
        "C4",
        "shard.c",
        edit("wr->imm = (w->pieces - 1) << 29 | w->imm;", "wr->imm = (w->pieces / 2) << 29 | w->imm;"),
        "shards say that there are fewer of them than there are",
    ),
    Bug(
        "nine pieces in a denominator of eight",
        "C4",
        "shard.c",
        edit("w->final_imm = w->has_imm && pieces > 8;", "w->final_imm = w->has_imm && pieces > 9;"),
        "the immediate of a write in nine pieces overflows its field",
    ),
    Bug(
        "pin ignored",
        "C6",
        "shard.c",
        edit("if (pin < 0 && w->kind == FAB_WR_WRITE) {", "if (w->kind == FAB_WR_WRITE) {"),
        "a write leaves by other NICs than the one that was asked for",
    ),
    Bug(
        "bounds that overflow",
        "C6",
        "submit.c",
        edit("return off <= len && count <= len - off;", "return off + count <= len;"),
        "an offset near 2^64 passes the check",
        "test_engine:plain",
    ),
    Bug(
        "receive buffer lost when the NIC is full",
        "C8",
        "recv.c",
        edit(
            "full |= 1u << at; /* tried again",
            "fab_list_remove(&r->link);\n            full |= 1u << at; /* tried again",
        ),
        "the pool shrinks, and senders are put off for ever",
    ),
)
