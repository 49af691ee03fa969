/* A hand-over from its beginning to its end: some transfers of some senders, and the expectations of the receivers. */
#include "sim.h"

void sim_flow_ready(sim_world *w, uint32_t flow, uint32_t gen) {
    sim_flow *f = sim_slab_get(&w->flows, flow, gen);
    if (!f || f->ready) return;
    f->ready = 1;
    if (w->nready == w->ready_cap) {
        w->ready_cap = w->ready_cap ? 2 * w->ready_cap : 256;
        w->ready = realloc(w->ready, w->ready_cap * sizeof *w->ready);
        if (!w->ready) abort();
    }
    w->ready[w->nready++] = flow;
}

static void finish(sim_world *w, sim_flow *f) {
    sim_node *n = &w->nodes[f->receiver];
    if (f->imm >= 0 && n->alive && n->inc == f->inc) {
        int64_t surplus = fab_imm_free(n->engine, (uint32_t)f->imm);
        sim_check_freed(n, (uint32_t)f->imm, surplus);
    }
    for (uint32_t i = 0; i < f->nexpects; i++) sim_slab_give(&w->expects, sim_slab_at(&w->expects, f->expect[i]));
    for (uint32_t i = 0; i < f->nops; i++) {
        sim_op *op = sim_slab_at(&w->ops, f->op[i]);
        op->detached = 1;
        sim_op_let_go(w, op);
    }
    sim_slab_give(&w->flows, f);
    w->live_flows--;
    sim_at(w, w->now + sim_below(&w->load, w->opt.think_ns), SIM_EV_START, 0, 0);
}

void sim_flow_look(sim_world *w, sim_flow *f) {
    if (f->ops_left) return;
    if (!f->expects_left) {
        finish(w, f);
        return;
    }
    bool quiet = true, well = true;
    for (uint32_t i = 0; i < f->nops; i++) {
        const sim_op *op = sim_slab_at(&w->ops, f->op[i]);
        quiet = quiet && !op->in_net && !op->in_cq && !op->at_nic;
        well = well && op->state == SIM_OP_ENDED && op->phase == FAB_DONE;
    }
    /* A transfer went wrong: what it should have raised does not come, or comes after nobody waits any more. */
    if (!quiet && (well || (!f->giving_up && sim_percent(&w->load, 50)))) return;
    f->giving_up = 1;
    for (uint32_t i = 0; i < f->nexpects; i++) {
        sim_expect *x = sim_slab_at(&w->expects, f->expect[i]);
        const sim_node *peer = &w->nodes[x->peer_node];
        bool will_fail = x->with_peers && (!peer->alive || peer->inc != x->peer_inc); /* its owner need not cancel it */
        if (x->state == SIM_OP_LIVE && !will_fail) sim_expect_cancel(w, x);
    }
}

void sim_flow_event(sim_world *w, uint32_t flow, uint32_t gen) {
    sim_flow *f = sim_slab_get(&w->flows, flow, gen);
    if (!f) return;
    f->waiting = 0;
    sim_flow_look(w, f);
}
