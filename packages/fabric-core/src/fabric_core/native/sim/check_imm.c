/* Checker "immediates": a ledger beside the engine's. It counts what the NICs handed over, serves the expectations in
 * their order by the contract's words, and compares after every step: a reached expectation has fired (no lost wake-up),
 * no other has (never early), what nobody claimed is surplus, what meets no owner is stray (C3, C4). */
#include "sim.h"

#include <inttypes.h>

sim_box *sim_box_of(sim_node *n, uint32_t imm) { return &n->boxes[imm & 0xffffffu]; }

void sim_check_dirty(sim_node *n, uint32_t imm) {
    sim_box *box = sim_box_of(n, imm);
    if (box->dirty) return;
    box->dirty = 1;
    n->dirty_boxes[n->ndirty_boxes++] = imm & 0xffffffu;
}

void sim_check_handed(sim_node *n, uint32_t imm, uint32_t count, sim_op *op) {
    sim_world *w = n->world;
    uint64_t units = (uint64_t)count * (FAB_IMM_UNIT / ((imm >> 29) + 1));
    op->units_handed += units;
    w->counts.imms += count;
    sim_box *box = sim_box_of(n, imm);
    if (box->in_use && box->imm == (imm & 0x1fffffffu)) {
        box->units += units;
        sim_check_dirty(n, imm);
    } else {
        n->strays += units;
        w->counts.strays += units;
    }
}

void sim_check_take_off(sim_node *n, sim_expect *x) {
    sim_box *box = sim_box_of(n, x->imm);
    sim_expect *before = NULL, *at = box->first;
    while (at && at != x) {
        before = at;
        at = at->after;
    }
    if (!at) return;
    if (before) before->after = x->after;
    else box->first = x->after;
    if (box->last == x) box->last = before;
}

/* How it ended must have a reason: 0 if it has. */
static int wrong_end(const sim_world *w, const sim_node *n, const sim_expect *x, const fab_outcome *out) {
    if (out->phase == FAB_CANCELLED) return x->cancelled || n->closing ? 0 : 1;
    if (out->phase != FAB_FAILED) return 1;
    if (out->err == -ETIME) return w->now >= x->deadline ? 0 : 1;
    /* its peer was lost: told so in this call, where it may be on its way back already, or without a path */
    return x->with_peers && n->path_down && (n->lost_told || !sim_any_path(n, x->peer_node, x->peer_inc)) ? 0 : 1;
}

/* Everything that its own end, or the count, has taken out of the queue. */
static void serve(sim_node *n, sim_box *box) {
    sim_world *w = n->world;
    while (box->first && !w->failed) {
        sim_expect *x = box->first;
        fab_outcome out;
        bool reached = box->units >= box->consumed + x->count * FAB_IMM_UNIT;
        if (fab_expect_outcome(n->engine, x->handle, &out)) {
            sim_fail(w, "terminal", "node %u: an expectation is not known to its engine", n->index);
            return;
        }
        if (out.phase == FAB_PENDING) {
            if (reached)
                sim_fail(w, "immediates",
                         "node %u: %" PRIu64 "/840 of immediate %x are there, an expectation of %" PRIu64
                         " has not fired",
                         n->index, box->units - box->consumed, box->imm, x->count);
            return;
        }
        if (out.phase == FAB_DONE) {
            if (!reached) {
                sim_fail(w, "immediates",
                         "node %u: an expectation of %" PRIu64 " fired, %" PRIu64 "/840 of immediate %x are there",
                         n->index, x->count, box->units - box->consumed, box->imm);
                return;
            }
            box->consumed += x->count * FAB_IMM_UNIT;
        } else if (wrong_end(w, n, x, &out)) {
            sim_fail(w, "terminal", "node %u: an expectation ended as %u with %d, for which there was no reason",
                     n->index, out.phase, out.err);
            return;
        } else if (reached && !x->cancelled && !n->closing && out.err != -ETIME && !x->with_peers) {
            sim_fail(w, "immediates", "node %u: an expectation that was reached ended with %d", n->index, out.err);
            return;
        }
        sim_expect_ended(n, x, (int32_t)out.phase, out.err); /* takes it off the queue */
    }
}

static void serve_dirty(sim_node *n) {
    while (n->ndirty_boxes && !n->world->failed) {
        sim_box *box = &n->boxes[n->dirty_boxes[--n->ndirty_boxes]];
        box->dirty = 0;
        serve(n, box);
    }
}

void sim_check_boxes(sim_node *n) {
    sim_world *w = n->world;
    serve_dirty(n);
    uint64_t strays = atomic_load_explicit(&n->engine->imms.stray, memory_order_relaxed);
    if (strays != n->strays)
        sim_fail(w, "immediates", "node %u: %" PRIu64 "/840 stray counts are told, %" PRIu64 " came", n->index, strays,
                 n->strays);
}

/* Deadlines and lost peers end expectations anywhere in a queue; the next in line may be reached by that. */
void sim_check_expects(sim_node *n) {
    sim_world *w = n->world;
    fab_outcome out;
    for (sim_expect *x = n->expects; x && !w->failed;) {
        if (fab_expect_outcome(n->engine, x->handle, &out)) {
            sim_fail(w, "terminal", "node %u: an expectation is not known to its engine", n->index);
            return;
        }
        if (out.phase != FAB_FAILED && out.phase != FAB_CANCELLED) {
            x = x->next;
            continue;
        }
        if (wrong_end(w, n, x, &out)) {
            sim_fail(w, "terminal", "node %u: an expectation ended as %u with %d, for which there was no reason",
                     n->index, out.phase, out.err);
            return;
        }
        uint32_t imm = x->imm;
        sim_expect_ended(n, x, (int32_t)out.phase, out.err);
        sim_check_dirty(n, imm);
        x = n->expects;
    }
    serve_dirty(n);
    for (const sim_expect *x = n->expects; x && !w->failed; x = x->next)
        if (fab_expect_outcome(n->engine, x->handle, &out) || out.phase != FAB_PENDING)
            sim_fail(w, "immediates", "node %u: an expectation of %" PRIu64 " of immediate %x fired out of its turn",
                     n->index, x->count, x->imm);
}

void sim_check_freed(sim_node *n, uint32_t imm, int64_t surplus) {
    sim_world *w = n->world;
    sim_box *box = sim_box_of(n, imm);
    uint64_t expected = (box->units - box->consumed) / FAB_IMM_UNIT;
    if (surplus < 0 || (uint64_t)surplus != expected)
        sim_fail(w, "immediates", "node %u: immediate %x was freed with a surplus of %" PRId64 ", it is %" PRIu64,
                 n->index, imm, surplus, expected);
    if (box->first) sim_fail(w, "terminal", "node %u: immediate %x was freed under an expectation", n->index, imm);
    box->in_use = 0;
}
