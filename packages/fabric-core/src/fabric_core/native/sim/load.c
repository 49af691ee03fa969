/* The workload: hand-overs begin, a fixed number at a time. */
#include "sim.h"

static uint32_t alive_node(sim_world *w, uint32_t except) {
    uint32_t at[SIM_NODES], n = 0;
    for (uint32_t i = 0; i < w->nnodes; i++)
        if (i != except && w->nodes[i].alive) at[n++] = i;
    return n ? at[sim_below(&w->load, n)] : SIM_NONE;
}

static sim_expect *expectation(sim_world *w, sim_flow *f, uint32_t node, uint32_t imm, uint64_t count) {
    sim_expect *x = sim_slab_take(&w->expects);
    memset((char *)x + sizeof x->slot, 0, sizeof *x - sizeof x->slot);
    x->flow = f->slot.index;
    x->flow_gen = f->slot.gen;
    x->node = node;
    x->inc = w->nodes[node].inc;
    x->imm = imm;
    x->count = count;
    x->notify = sim_percent(&w->load, w->opt.notify_percent);
    x->with_peers = sim_percent(&w->load, w->opt.expect_peers_percent);
    f->expect[f->nexpects++] = x->slot.index;
    f->expects_left++;
    return x;
}

static sim_op *transfer(sim_world *w, sim_flow *f, uint32_t sender) {
    sim_op *op = sim_slab_take(&w->ops);
    memset((char *)op + sizeof op->slot, 0, offsetof(sim_op, place) - sizeof op->slot);
    op->flow = f->slot.index;
    op->flow_gen = f->slot.gen;
    if (!sim_op_shape(w, op, f, sender)) {
        sim_slab_give(&w->ops, op);
        return NULL;
    }
    op->use_flag = sim_percent(&w->load, w->opt.flag_percent);
    op->early_release = op->use_flag && sim_percent(&w->load, 30);
    op->notify = !op->early_release && sim_percent(&w->load, w->opt.notify_percent);
    f->op[f->nops++] = op->slot.index;
    f->ops_left++;
    return op;
}

static uint32_t kind_of(sim_world *w) {
    const sim_options *o = &w->opt;
    if (sim_percent(&w->load, o->send_percent)) return SIM_FLOW_MESSAGE;
    if (sim_percent(&w->load, o->silent_percent)) return SIM_FLOW_SILENT;
    if (w->nnodes > 2 && o->scatter_percent + o->barrier_percent && sim_percent(&w->load, 25)) return SIM_FLOW_COMMON;
    return SIM_FLOW_PRIVATE;
}

static void later(sim_world *w) { sim_at(w, w->now + 100000, SIM_EV_START, 0, 0); }

static uint64_t soon(sim_world *w) { return w->now + sim_below(&w->load, w->opt.think_ns); }

static void schedule(sim_world *w, sim_flow *f) {
    uint64_t late = w->opt.latency_ns + w->opt.jitter_ns + w->opt.think_ns;
    for (uint32_t i = 0; i < f->nops; i++) {
        const sim_op *op = sim_slab_at(&w->ops, f->op[i]);
        sim_at(w, i ? soon(w) : w->now, SIM_EV_SUBMIT, op->slot.index, op->slot.gen);
    }
    for (uint32_t i = 0; i < f->nexpects; i++) {
        sim_expect *x = sim_slab_at(&w->expects, f->expect[i]);
        x->peer_node = ((const sim_op *)sim_slab_at(&w->ops, f->op[0]))->node;
        bool before = !sim_percent(&w->load, w->opt.expect_late_percent);
        sim_at(w, before ? w->now : w->now + sim_below(&w->load, 3 * late), SIM_EV_EXPECT, x->slot.index, x->slot.gen);
    }
}

/* The counts of its expectations: all that comes, or less (the rest is surplus); sometimes two in a row claim it. */
static void expectations(sim_world *w, sim_flow *f) {
    uint64_t count = f->writes;
    if (sim_percent(&w->load, w->opt.surplus_percent)) count -= sim_below(&w->load, count + 1);
    if (count > 1 && sim_percent(&w->load, 20)) {
        uint64_t first = sim_below(&w->load, count + 1);
        expectation(w, f, f->receiver, (uint32_t)f->imm, first);
        count -= first;
    }
    expectation(w, f, f->receiver, (uint32_t)f->imm, count);
}

static void start(sim_world *w) {
    if (w->settling || w->live_flows >= w->opt.flows) return;
    uint32_t receiver = alive_node(w, SIM_NONE);
    if (receiver == SIM_NONE || alive_node(w, receiver) == SIM_NONE) {
        later(w);
        return;
    }
    sim_node *n = &w->nodes[receiver];
    sim_flow *f = sim_slab_take(&w->flows);
    memset((char *)f + sizeof f->slot, 0, sizeof *f - sizeof f->slot);
    f->kind = kind_of(w);
    f->receiver = receiver;
    f->inc = n->inc;
    f->imm = -1;
    if (f->kind == SIM_FLOW_PRIVATE) {
        f->imm = fab_imm_alloc(n->engine);
        if (f->imm < 0) f->kind = SIM_FLOW_SILENT; /* all are in use */
        else *sim_box_of(n, (uint32_t)f->imm) = (sim_box){.imm = (uint32_t)f->imm, .in_use = 1};
    }
    uint32_t common = f->kind == SIM_FLOW_COMMON ? (uint32_t)sim_below(&w->load, SIM_COMMON) : 0;
    uint32_t n_ops = f->kind == SIM_FLOW_PRIVATE && sim_percent(&w->load, w->opt.join_percent)
                         ? 2 + (uint32_t)sim_below(&w->load, SIM_OPS - 1)
                         : 1;
    for (uint32_t i = 0; i < n_ops; i++) {
        sim_op *op = transfer(w, f, alive_node(w, receiver));
        if (!op) continue;
        op->has_imm = f->kind == SIM_FLOW_PRIVATE || f->kind == SIM_FLOW_COMMON;
        op->imm = f->kind == SIM_FLOW_COMMON ? common : f->imm < 0 ? 0 : (uint32_t)f->imm;
        f->writes += op->nwrites;
        if (f->kind == SIM_FLOW_COMMON)
            for (uint32_t p = 0; p < op->nplaces; p++)
                expectation(w, f, op->place[p].node, common, op->place[p].writes);
    }
    w->live_flows++;
    if (f->kind == SIM_FLOW_PRIVATE && f->nops) expectations(w, f);
    if (f->nops) schedule(w, f);
    else sim_flow_ready(w, f->slot.index, f->slot.gen); /* no memory now: nothing comes of it */
}

void sim_load_start(sim_world *w) { start(w); }
