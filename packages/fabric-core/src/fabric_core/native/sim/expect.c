/* One expectation: made before, during or after the arrivals; ended by them, a deadline, a cancel or a lost peer. */
#include "sim.h"

#include <inttypes.h>

static void bind(sim_node *n, const sim_expect *x) {
    uint32_t index = (uint32_t)x->handle & 0xffffffu;
    if (index >= n->xbound_cap) {
        uint32_t cap = n->xbound_cap ? n->xbound_cap : 1024;
        while (cap <= index) cap *= 2;
        n->xbound = realloc(n->xbound, cap * sizeof *n->xbound);
        if (!n->xbound) abort();
        for (uint32_t i = n->xbound_cap; i < cap; i++) n->xbound[i] = (sim_bound){0, SIM_NONE};
        n->xbound_cap = cap;
    }
    n->xbound[index] = (sim_bound){x->handle, x->slot.index};
}

static void gone(sim_world *w, sim_expect *x) {
    x->state = SIM_OP_DEAD;
    x->phase = FAB_CANCELLED;
    sim_flow *f = sim_slab_get(&w->flows, x->flow, x->flow_gen);
    if (f) f->expects_left--;
    sim_flow_ready(w, x->flow, x->flow_gen);
}

void sim_expect_make(sim_world *w, sim_expect *x) {
    sim_node *n = &w->nodes[x->node];
    if (x->state != SIM_OP_NEW) return;
    if (!n->alive || n->inc != x->inc) {
        gone(w, x);
        return;
    }
    if (sim_paused(n)) {
        sim_at(w, n->paused_until + 1 + sim_below(&w->load, 1000), SIM_EV_EXPECT, x->slot.index, x->slot.gen);
        return;
    }
    uint64_t timeout = 0;
    if (sim_permille(&w->load, w->opt.expect_deadline_permille) && !w->settling) {
        timeout = 1 + sim_spread(&w->load, w->opt.latency_ns, 100000000);
        x->short_deadline = 1;
        w->counts.faults[SIM_FAULT_XDEADLINE]++;
    }
    uint32_t peers[1], npeers = 0;
    const sim_view *v = x->with_peers ? sim_node_view(n, x->peer_node) : NULL;
    if (v) peers[npeers++] = (uint32_t)v->peer;
    x->with_peers = npeers != 0;
    x->peer_inc = v ? v->inc : 0;
    x->made = w->now;
    x->deadline = w->now + (timeout ? timeout : w->opt.timeout_ns);
    int64_t handle = fab_expect(n->engine, x->imm, x->count, timeout, npeers ? peers : NULL, npeers);
    if (handle == -EAGAIN) {
        sim_at(w, w->now + 10000, SIM_EV_EXPECT, x->slot.index, x->slot.gen);
        sim_node_after(n);
        return;
    }
    if (handle <= 0) {
        sim_fail(w, "immediates", "node %u: expecting %" PRIu64 " of immediate %x: %" PRId64, n->index, x->count,
                 x->imm, handle);
        return;
    }
    x->handle = (uint64_t)handle;
    bind(n, x);
    x->state = SIM_OP_LIVE;
    x->prev = NULL;
    x->next = n->expects;
    if (n->expects) n->expects->prev = x;
    n->expects = x;
    sim_box *box = sim_box_of(n, x->imm);
    x->after = NULL;
    if (box->last) box->last->after = x;
    else box->first = x;
    box->last = x;
    sim_check_dirty(n, x->imm);
    if (x->notify) fab_expect_notify(n->engine, x->handle);
    if (sim_permille(&w->load, w->opt.expect_cancel_permille) && !w->settling)
        sim_at(w, w->now + sim_below(&w->load, 2 * (w->opt.latency_ns + w->opt.jitter_ns)), SIM_EV_XCANCEL,
               x->slot.index, x->slot.gen);
    sim_node_after(n);
    sim_flow_ready(w, x->flow, x->flow_gen);
}

void sim_expect_cancel(sim_world *w, sim_expect *x) {
    if (x->state == SIM_OP_NEW) gone(w, x);
    if (x->state != SIM_OP_LIVE) return;
    sim_node *n = &w->nodes[x->node];
    if (sim_paused(n)) { /* once it goes on */
        sim_flow *f = sim_slab_get(&w->flows, x->flow, x->flow_gen);
        if (f && !f->waiting) sim_at(w, n->paused_until + 1, SIM_EV_FLOW, x->flow, x->flow_gen);
        if (f) f->waiting = 1;
        return;
    }
    x->cancelled = 1;
    if (fab_expect_cancel(n->engine, x->handle))
        sim_fail(w, "immediates", "node %u: an expectation cannot be cancelled", n->index);
    sim_check_dirty(n, x->imm);
    n->look_all = 1;
    sim_node_after(n);
}

void sim_expect_ended(sim_node *n, sim_expect *x, int32_t phase, int32_t err) {
    sim_world *w = n->world;
    x->state = SIM_OP_ENDED;
    x->phase = phase;
    x->err = err;
    if (phase == FAB_DONE) w->counts.fired++;
    sim_note(w, SIM_TR_FIRED, n->index, x->imm, (uint64_t)(uint32_t)phase << 32 | (uint32_t)err);
    sim_check_take_off(n, x);
    if (x->prev) x->prev->next = x->next;
    else n->expects = x->next;
    if (x->next) x->next->prev = x->prev;
    uint32_t index = (uint32_t)x->handle & 0xffffffu;
    if (n->alive) {
        if (x->events != (x->notify ? 1u : 0u))
            sim_fail(w, "terminal", "node %u: an expectation ended with %u events", n->index, x->events);
        n->xbound[index].op = SIM_NONE;
        if (fab_expect_release(n->engine, x->handle))
            sim_fail(w, "terminal", "node %u: an expectation cannot be released", n->index);
    }
    sim_flow *f = sim_slab_get(&w->flows, x->flow, x->flow_gen);
    if (!f) return;
    f->expects_left--;
    /* its payload must be there: of every transfer whose immediates have all been handed over */
    if (phase == FAB_DONE)
        for (uint32_t i = 0; i < f->nops; i++) {
            const sim_op *op = sim_slab_at(&w->ops, f->op[i]);
            if (op->has_imm && op->units_handed == (uint64_t)op->nwrites * FAB_IMM_UNIT)
                sim_check_payload(w, op, "when its expectation fired");
        }
    sim_flow_ready(w, x->flow, x->flow_gen);
}
