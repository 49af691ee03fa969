/* Checker "terminal": every transfer ends exactly once, for a reason that was there, and quietly (C1, C7). Checker
 * "payload": done means that every byte is where it belongs (C5, C10). Checker "credit": queues empty at the end. */
#include "sim.h"

#include <inttypes.h>

void sim_check_payload(sim_world *w, const sim_op *op, const char *when) {
    if (op->verb == FAB_OP_SEND) return;
    for (uint32_t i = 0; i < op->nwrites; i++) {
        const sim_write *wr = &op->write[i];
        const sim_place *p = &op->place[wr->place];
        const sim_node *to = &w->nodes[p->node];
        if (!to->alive || to->inc != p->inc) continue;
        if (wr->landed != wr->len) {
            sim_fail(w, "payload",
                     "transfer %" PRIu64 " of node %u: %" PRIu64 " bytes landed of the %" PRIu64 " of write %u, %s",
                     op->serial, op->node, wr->landed, wr->len, i, when);
            return;
        }
        uint64_t at = sim_verify(to->arena + p->off + wr->roff, op->tag, wr->loff, wr->len);
        if (at != UINT64_MAX) {
            sim_fail(w, "payload",
                     "transfer %" PRIu64 " of node %u: byte %" PRIu64 " of %" PRIu64 " is wrong in write %u, %s",
                     op->serial, op->node, at, wr->len, i, when);
            return;
        }
    }
}

void sim_check_flag(sim_world *w, const sim_op *op) {
    if (!op->use_flag || op->state != SIM_OP_ENDED) return;
    uint64_t expected = op->phase == FAB_DONE ? 1 : (UINT64_C(1) << 32) + 1;
    if (op->flag != expected)
        sim_fail(w, "terminal", "transfer %" PRIu64 " of node %u: its flag is %" PRIx64 " and should be %" PRIx64,
                 op->serial, op->node, op->flag, expected);
}

static bool reason_is_good(const sim_world *w, const sim_node *n, const sim_op *op) {
    switch (op->phase) {
    case FAB_DONE: return op->err == 0;
    case FAB_CANCELLED: return op->err == -ECANCELED && (op->cancelled || n->closing);
    default: break;
    }
    if (op->early_release) return true; /* the reason is not known */
    if (op->err == -ETIME) return w->now >= op->deadline;
    if (op->err >= 0 || op->err == -ECANCELED) return false;
    if (op->errors || op->err == -EKEYREVOKED) return true; /* a request of it failed; its memory was revoked */
    if (!n->path_down) return false;
    /* A path went that it was on, or one of several targets. What had not left yet could have left by any other path. */
    return op->posted || op->nplaces != 1 || op->pin >= 0 || n->lost_told ||
           !sim_sure_path(n, op->place[0].node, op->place[0].inc);
}

/* Who is named is one of its targets, and somebody is. */
static bool culprit_is_good(const sim_node *n, const sim_op *op) {
    if (op->phase != FAB_FAILED || op->early_release || op->err == -EKEYREVOKED) return true;
    for (uint32_t i = 0; i < op->nplaces; i++) {
        const sim_view *v = &n->view[op->place[i].node];
        /* once the target was restarted, its former number is not known here any more */
        if (v->inc != op->place[i].inc || v->peer == op->err_peer) return true;
    }
    return false;
}

void sim_check_op_end(sim_node *n, sim_op *op) {
    sim_world *w = n->world;
    if (op->at_nic)
        sim_fail(w, "ownership",
                 "transfer %" PRIu64 " of node %u ended (%d, %d), and NICs still hold %u requests of it", op->serial,
                 n->index, op->phase, op->err, op->at_nic);
    if (op->notify && op->events != 1)
        sim_fail(w, "terminal", "transfer %" PRIu64 " of node %u ended with %u events", op->serial, n->index,
                 op->events);
    if (!reason_is_good(w, n, op))
        sim_fail(w, "terminal", "transfer %" PRIu64 " of node %u ended as %d with %d, for which there was no reason",
                 op->serial, n->index, op->phase, op->err);
    if (!culprit_is_good(n, op))
        sim_fail(w, "terminal", "transfer %" PRIu64 " of node %u ended with %d and names peer %d, none of its targets",
                 op->serial, n->index, op->err, (int)op->err_peer);
    sim_check_flag(w, op);
    if (op->phase != FAB_DONE) return;
    if (op->verb == FAB_OP_SEND && op->posted != 1)
        sim_fail(w, "terminal", "message %" PRIu64 " of node %u is done, and was posted %" PRIu64 " times", op->serial,
                 n->index, (uint64_t)op->posted);
    if (op->errors)
        sim_fail(w, "terminal", "transfer %" PRIu64 " of node %u is done, and %" PRIu64 " requests of it failed",
                 op->serial, n->index, op->errors);
    uint64_t units = op->has_imm ? (uint64_t)op->nwrites * FAB_IMM_UNIT : 0;
    if (op->verb != FAB_OP_SEND && op->units_landed != units)
        sim_fail(w, "immediates", "transfer %" PRIu64 " of node %u is done with %" PRIu64 "/840 counts for %u writes",
                 op->serial, n->index, op->units_landed, op->has_imm ? op->nwrites : 0);
    sim_check_payload(w, op, "when it was done");
}

static uint32_t in_use(fab_pool *pool) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < atomic_load_explicit(&pool->count, memory_order_relaxed); i++)
        n += fab_slot_gen(fab_pool_at(pool, i)) & 1u;
    return n;
}

/* At the end of a run everything was released: what is still taken has leaked (R9, R11). */
void sim_check_leaks(sim_node *n) {
    sim_world *w = n->world;
    fab_engine *e = n->engine;
    fab_group *g = e->groups[0];
    if (in_use(&g->transfers) || in_use(&e->expects))
        sim_fail(w, "credit", "node %u: %u transfers and %u expectations were released and are still taken", n->index,
                 in_use(&g->transfers), in_use(&e->expects));
    for (uint32_t i = 0; i < atomic_load_explicit(&e->locals.count, memory_order_relaxed); i++) {
        const fab_local *local = fab_pool_at(&e->locals, i);
        uint32_t users = atomic_load_explicit(&((fab_local *)local)->users, memory_order_relaxed);
        if (fab_slot_gen(&local->slot) & 1u && users)
            sim_fail(w, "credit", "node %u: a registration is said to have %u users, it has none", n->index, users);
    }
    uint32_t all = 0, unposted = 0, posted = 0;
    for (const fab_link *link = g->recvs.next; link != &g->recvs; link = link->next) all++;
    for (const fab_link *link = g->unposted.next; link != &g->unposted; link = link->next) unposted++;
    for (uint32_t i = 0; i < n->nnics; i++) {
        posted += n->nic[i].nrecvs;
        for (uint32_t k = 0; k < n->nic[i].cq_count; k++) posted += n->nic[i].cq[k].wc.kind == FAB_WC_RECV;
    }
    if (all != unposted + posted + n->nheld)
        sim_fail(w, "credit", "node %u: of %u receive buffers %u are posted, %u wait, %u are held", n->index, all,
                 posted, unposted, n->nheld);
}

/* Nothing in flight, and the engine knows it. */
void sim_check_node_quiet(sim_node *n) {
    sim_world *w = n->world;
    const fab_engine *e = n->engine;
    const fab_group *g = e->groups[0];
    uint32_t inflight = atomic_load_explicit(&((fab_engine *)e)->inflight, memory_order_relaxed);
    if (inflight != n->nops || g->outstanding)
        sim_fail(w, "credit", "node %u: %u transfers and %u requests are said to be in flight, none is", n->index,
                 inflight, g->outstanding);
    uint32_t timers = atomic_load_explicit(&((fab_group *)g)->ntimers, memory_order_relaxed);
    if (timers && !n->closing)
        sim_fail(w, "credit", "node %u: %u deadlines are left with nothing to end", n->index, timers);
    for (uint32_t i = 0; i < n->nnics && !n->closing; i++)
        if (n->nic[i].sq_used)
            sim_fail(w, "credit", "node %u: NIC %u holds %u requests of nobody", n->index, i, n->nic[i].sq_used);
}

/* Checker "late": a deadline and a cancel are obeyed within the wheel's tick, or within the grace that a NIC is given to
 * let go; looked at each tick, whether the engine had something to do or not (R3). */
void sim_check_late(sim_node *n) {
    sim_world *w = n->world;
    sim_check_lost(w);
    uint64_t slack = 4 * SIM_TICK_NS + 4 * w->opt.step_ns + w->opt.stall_ns, grace = 2 * FAB_CANCEL_GRACE_NS;
    for (const sim_op *op = n->ops; op; op = op->next) {
        uint64_t due = op->cancelled && op->cancelled_at < op->deadline ? op->cancelled_at : op->deadline;
        if (due < n->awake_since) due = n->awake_since;
        if (w->now > due + slack + (op->at_nic ? grace : 0))
            sim_fail(w, "late",
                     "node %u: transfer %" PRIu64 " should have ended by %.9f s; NICs hold %u requests of it", n->index,
                     op->serial, (double)due / 1e9, op->at_nic);
    }
    for (const sim_expect *x = n->expects; x; x = x->next) {
        uint64_t due = x->deadline < n->awake_since ? n->awake_since : x->deadline;
        if (w->now > due + slack)
            sim_fail(w, "late",
                     "node %u: an expectation should have ended by %.9f s; it next steps at %.9f s, awake since %.9f s",
                     n->index, (double)due / 1e9, (double)n->step_at / 1e9, (double)n->awake_since / 1e9);
    }
}

/* ---- messages ------------------------------------------------------------------------------------------------ */

#define HEAD 24u

void sim_message_make(const sim_op *op, char *out) {
    uint64_t head[3] = {op->serial, op->tag, op->bytes};
    memcpy(out, head, HEAD);
    sim_fill(out + HEAD, op->tag, op->bytes - HEAD);
}

void sim_check_message(sim_node *n, const fab_event *ev) {
    sim_world *w = n->world;
    uint64_t head[3];
    const char *bytes = (const char *)(uintptr_t)ev->a;
    n->messages_seen++;
    w->counts.messages++;
    if (ev->b >= HEAD) memcpy(head, bytes, HEAD);
    if (ev->b < HEAD || head[2] != ev->b || sim_verify(bytes + HEAD, head[1], 0, ev->b - HEAD) != UINT64_MAX) {
        sim_fail(w, "payload", "node %u: a message of %" PRIu64 " bytes is wrong", n->index, ev->b);
        return;
    }
    if (n->messages_seen > n->messages) sim_fail(w, "terminal", "node %u: a message came twice", n->index);
    n->held[n->nheld++] = ev->c;
    sim_at(w, w->now + sim_below(&w->load, w->opt.think_ns), SIM_EV_RECV, n->index, n->inc);
}
