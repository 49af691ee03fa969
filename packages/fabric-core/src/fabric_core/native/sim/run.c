/* A run: faults and load until the transfers are through, then calm until everything has settled. */
#include "sim.h"

#include "cdef_sim.h"

#include <inttypes.h>

static void recv_back(sim_world *w, uint32_t node, uint32_t inc) {
    sim_node *n = &w->nodes[node];
    if (!n->alive || n->inc != inc || !n->nheld) return;
    uint64_t buffer = n->held[--n->nheld];
    if (fab_recv_return(n->engine, 0, buffer))
        sim_fail(w, "credit", "node %u: a receive buffer is not taken back", node);
    sim_node_after(n);
}

static void dispatch(sim_world *w, const sim_event *e) {
    sim_op *op;
    sim_expect *x;
    switch (e->kind) {
    case SIM_EV_STEP: sim_node_step(&w->nodes[e->a], e->at); break;
    case SIM_EV_TICK: sim_node_tick(&w->nodes[e->a], e->b); break;
    case SIM_EV_WR: sim_net_event(w, e->a, e->b); break;
    case SIM_EV_IMM: sim_net_imm(w, e->a, e->b); break;
    case SIM_EV_CONTACT: sim_contact_due(w, e->a, e->b); break;
    case SIM_EV_DATAGRAM: sim_datagram_event(w, e->a, e->b); break;
    case SIM_EV_SUBMIT:
        op = sim_slab_get(&w->ops, e->a, e->b);
        if (op) sim_op_submit(w, op);
        break;
    case SIM_EV_CANCEL:
        op = sim_slab_get(&w->ops, e->a, e->b);
        if (op) sim_op_cancel(w, op);
        break;
    case SIM_EV_EXPECT:
        x = sim_slab_get(&w->expects, e->a, e->b);
        if (x) sim_expect_make(w, x);
        break;
    case SIM_EV_XCANCEL:
        x = sim_slab_get(&w->expects, e->a, e->b);
        if (x && x->state == SIM_OP_LIVE) {
            w->counts.faults[SIM_FAULT_XCANCEL]++;
            sim_expect_cancel(w, x);
        }
        break;
    case SIM_EV_FLOW: sim_flow_event(w, e->a, e->b); break;
    case SIM_EV_START: sim_load_start(w); break;
    case SIM_EV_FAULT: sim_fault_event(w, e->a); break;
    case SIM_EV_HEAL: sim_heal_event(w, e->a, e->b); break;
    case SIM_EV_RECV: recv_back(w, e->a, e->b); break;
    default: abort();
    }
}

static void look_at_ready(sim_world *w) {
    while (w->nready && !w->failed) {
        sim_flow *f = sim_slab_at(&w->flows, w->ready[--w->nready]);
        if (!(f->slot.gen & 1u) || !f->ready) continue;
        f->ready = 0;
        sim_flow_look(w, f);
    }
}

static void not_settled(sim_world *w) {
    for (uint32_t i = 0; i < w->nnodes; i++) {
        const sim_node *n = &w->nodes[i];
        if (n->ops)
            sim_fail(w, "not settled", "transfer %" PRIu64 " of node %u, %u requests at NICs, submitted at %.9f s",
                     n->ops->serial, i, n->ops->at_nic, (double)n->ops->submitted / 1e9);
        if (n->expects)
            sim_fail(w, "not settled", "node %u: an expectation of %" PRIu64 " of immediate %x", i, n->expects->count,
                     n->expects->imm);
    }
    sim_fail(w, "not settled", "%u hand-overs", w->live_flows);
}

static void settle(sim_world *w) {
    w->settling = true;
    sim_faults_stop(w);
}

static void run(sim_world *w) {
    sim_event e;
    uint64_t until = UINT64_MAX;
    while (!w->failed && sim_heap_pop(&w->heap, &e)) {
        if (e.at > w->now) w->now = e.at;
        if (!w->settling && w->counts.transfers >= w->opt.transfers) {
            settle(w);
            until = w->now + w->opt.settle_ns;
        }
        dispatch(w, &e);
        look_at_ready(w);
        if (w->settling && !w->live_flows && !w->ops.used && !w->wrs.used) break;
        if (w->now > until) {
            not_settled(w);
            return;
        }
    }
    for (uint32_t i = 0; i < w->nnodes && !w->failed; i++) {
        sim_node *n = &w->nodes[i];
        if (!n->alive) continue;
        while (fab_ring_ready(&n->engine->groups[0]->ring)) {
            n->step_at = w->now;
            n->paused_until = 0;
            sim_node_step(n, w->now);
        }
        fab_group_help(n->engine->groups[0], false); /* expectations that ended are taken off the wheel */
        sim_check_node_quiet(n);
        sim_check_leaks(n);
    }
}

static void report(const sim_world *w, fab_sim_report *out) {
    const sim_counts *c = &w->counts;
    memset(out, 0, sizeof *out);
    out->seed = w->seed;
    out->hash = w->hash;
    out->transfers = c->transfers;
    out->done = c->done;
    out->failed = c->failed;
    out->cancelled = c->cancelled;
    out->fired = c->fired;
    out->messages = c->messages;
    out->writes = c->writes;
    out->bytes = c->bytes;
    out->requests = c->wrs;
    out->imms = c->imms;
    out->strays = c->strays;
    out->events = c->events;
    out->steps = c->steps;
    out->lost_peers = c->lost_peers;
    out->virtual_ns = w->now;
    memcpy(out->faults, c->faults, sizeof c->faults);
    out->violated = w->failed;
    memcpy(out->violation, w->violation, sizeof w->violation);
}

static bool sound(const sim_options *o) {
    return o->nodes >= 2 && o->nodes <= SIM_NODES && o->nics >= 1 && o->nics <= FAB_MAX_NICS && o->nics_odd >= 1 &&
           o->nics_odd <= FAB_MAX_NICS && o->flows >= 1 && o->flows <= 65536 && o->send_queue >= 1 &&
           o->send_queue <= 65536 && o->completion_queue >= 1 && o->poll_batch >= 1 && o->receive_queue >= 1 &&
           o->receive_queue <= 60 && o->payload >= 1 && o->payload <= 1000000 && o->pages >= 1 &&
           o->pages <= SIM_WRITES && o->imm_slots > SIM_COMMON && o->imm_slots <= 1u << 20 && o->max_inflight >= 1 &&
           o->max_inflight <= 1u << 20 && fab_sim_nic_at((uint32_t)o->nic_model);
}

int fab_sim_run(uint64_t seed, const uint64_t *values, fab_sim_report *out, char *trace, size_t trace_cap) {
    sim_world *w = calloc(1, sizeof *w);
    if (!w) return -ENOMEM;
    memcpy(&w->opt, values, sizeof w->opt);
    if (!sound(&w->opt)) {
        free(w);
        return -EINVAL;
    }
    w->seed = seed;
    w->hash = seed;
    w->now = 1000000000;
    w->net = sim_rand_of(seed, 1);
    w->load = sim_rand_of(seed, 2);
    w->faults = sim_rand_of(seed, 3);
    w->nnodes = (uint32_t)w->opt.nodes;
    sim_slab_init(&w->wrs, sizeof(sim_wr));
    sim_slab_init(&w->ops, sizeof(sim_op));
    sim_slab_init(&w->flows, sizeof(sim_flow));
    sim_slab_init(&w->expects, sizeof(sim_expect));
    sim_slab_init(&w->datagrams, sizeof(sim_datagram));
    for (uint32_t i = 0; i < w->nnodes; i++) {
        sim_node *n = &w->nodes[i];
        n->world = w;
        n->index = i;
        n->nnics = (uint32_t)(i % 2 ? w->opt.nics_odd : w->opt.nics);
        sim_node_start(n);
    }
    for (uint64_t i = 0; i < w->opt.flows; i++)
        sim_at(w, w->now + sim_below(&w->load, w->opt.think_ns), SIM_EV_START, 0, 0);
    sim_faults_start(w);
    run(w);
    report(w, out);
    if (trace) sim_trace_text(w, trace, trace_cap);
    for (uint32_t i = 0; i < w->nnodes; i++) sim_node_fini(&w->nodes[i]);
    for (uint32_t i = 0; i < w->wrs.count; i++) free(((sim_wr *)sim_slab_at(&w->wrs, i))->copy);
    sim_slab_fini(&w->wrs);
    sim_slab_fini(&w->ops);
    sim_slab_fini(&w->flows);
    sim_slab_fini(&w->expects);
    sim_slab_fini(&w->datagrams);
    sim_heap_fini(&w->heap);
    free(w->ready);
    free(w);
    return 0;
}
