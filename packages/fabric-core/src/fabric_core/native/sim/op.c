/* One transfer: its shape, its submission, its end. */
#include "sim.h"

#include <inttypes.h>

#define ALIGN8(x) (((x) + 7u) & ~7ull)

static uint64_t some_length(sim_world *w) {
    uint64_t dice = sim_below(&w->load, 100);
    if (dice < 5) return 0;
    if (dice < 25) return 1 + sim_below(&w->load, w->opt.payload); /* long ones and odd ones */
    return sim_spread(&w->load, 1, w->opt.payload);
}

static void permutation(sim_world *w, uint32_t *out, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = (uint32_t)sim_below(&w->load, i + 1);
        out[i] = out[k];
        out[k] = i;
    }
}

/* A target somewhere at `node`, `span` bytes of memory that belong to this transfer until nothing of it is on its way. */
static bool place(sim_world *w, sim_op *op, uint32_t node, uint64_t span) {
    sim_node *n = &w->nodes[node];
    sim_region *r = sim_region_take(n, span + 16, op->slot.index);
    if (!r) return false;
    uint64_t lead = sim_below(&w->load, 9); /* odd addresses too */
    op->place[op->nplaces++] = (sim_place){.node = node, .inc = n->inc, .region = r->slot.index, .off = r->off + lead};
    return true;
}

static uint64_t shape_paged(sim_world *w, sim_op *op) {
    uint32_t n = 1 + (uint32_t)sim_below(&w->load, w->opt.pages);
    uint64_t len = some_length(w);
    op->soff = 8 * sim_below(&w->load, 4);
    op->doff = sim_below(&w->load, 20);
    op->sstride = ALIGN8(len) + 8 * sim_below(&w->load, 3);
    op->dstride = len + sim_below(&w->load, 10);
    permutation(w, op->sidx, n);
    permutation(w, op->didx, n);
    for (uint32_t i = 0; i < n; i++)
        op->write[i] = (sim_write){
            .loff = op->soff + op->sidx[i] * op->sstride, .roff = op->doff + op->didx[i] * op->dstride, .len = len};
    op->nwrites = n;
    return op->doff + (n - 1) * op->dstride + len;
}

/* The transfer's verb, lengths and places. False: no memory for it now. */
bool sim_op_shape(sim_world *w, sim_op *op, const sim_flow *f, uint32_t sender) {
    const sim_options *o = &w->opt;
    uint64_t dice = sim_below(&w->load, 100), span;
    op->tag = sim_next(&w->load);
    op->serial = w->serial++;
    op->node = sender;
    op->inc = w->nodes[sender].inc;
    op->nplaces = op->nwrites = 0;
    op->region = SIM_NONE;
    op->pin = sim_percent(&w->load, o->pinned_percent) ? (int32_t)sim_below(&w->load, w->nodes[sender].nnics) : -1;
    bool ok = true;
    if (f->kind == SIM_FLOW_MESSAGE) {
        op->verb = FAB_OP_SEND;
        op->pin = -1;
        op->nwrites = 1;
        op->write[0] = (sim_write){.len = 32 + sim_below(&w->load, 900)};
        op->place[op->nplaces++] = (sim_place){.node = f->receiver, .inc = f->inc, .region = SIM_NONE};
        op->bytes = op->write[0].len;
        return true;
    }
    uint64_t paged = o->paged_percent, scatter = paged + o->scatter_percent, barrier = scatter + o->barrier_percent;
    op->verb = dice < paged && f->kind != SIM_FLOW_COMMON     ? FAB_OP_PAGED
               : dice < scatter                               ? FAB_OP_SCATTER
               : dice < barrier && f->kind != SIM_FLOW_SILENT ? FAB_OP_BARRIER
               : f->kind == SIM_FLOW_COMMON                   ? FAB_OP_SCATTER
                                                              : FAB_OP_WRITE;
    uint64_t source = 0;
    if (op->verb == FAB_OP_WRITE) {
        op->nwrites = 1;
        op->write[0] = (sim_write){.len = some_length(w)};
        ok = place(w, op, f->receiver, op->write[0].len);
        source = op->write[0].len;
    } else if (op->verb == FAB_OP_PAGED) {
        span = shape_paged(w, op);
        ok = place(w, op, f->receiver, span);
        for (uint32_t i = 0; i < op->nwrites; i++)
            if (source < op->write[i].loff + op->write[i].len) source = op->write[i].loff + op->write[i].len;
    } else {
        uint32_t n = 1 + (uint32_t)sim_below(&w->load, o->pages), targets = 1;
        uint32_t at[SIM_PLACES] = {f->receiver};
        if (f->kind == SIM_FLOW_COMMON) /* several receivers: whoever else lives */
            for (uint32_t i = 0; i < w->nnodes && targets < SIM_PLACES; i++)
                if (i != f->receiver && i != sender && w->nodes[i].alive) at[targets++] = i;
        if (n < targets) n = targets;
        uint64_t need[SIM_PLACES] = {0};
        for (uint32_t i = 0; i < n; i++) {
            uint64_t len = op->verb == FAB_OP_BARRIER ? 0 : some_length(w);
            uint32_t p = i % targets;
            op->write[i] = (sim_write){.loff = source, .roff = need[p], .len = len, .place = p};
            need[p] += len + sim_below(&w->load, 5);
            source += ALIGN8(len);
        }
        op->nwrites = n;
        for (uint32_t p = 0; p < targets && ok; p++) ok = place(w, op, at[p], need[p]);
    }
    if (ok) {
        sim_region *r = sim_region_take(&w->nodes[sender], source + 8, op->slot.index);
        ok = r != NULL;
        if (ok) {
            op->region = r->slot.index;
            op->src_off = r->off;
            sim_fill(w->nodes[sender].arena + r->off, op->tag, source);
        }
    }
    op->bytes = 0;
    for (uint32_t i = 0; i < op->nwrites; i++) {
        op->bytes += op->write[i].len;
        op->place[op->write[i].place].writes++;
    }
    if (!ok)
        for (uint32_t p = 0; p < op->nplaces; p++) sim_region_give(&w->nodes[op->place[p].node], op->place[p].region);
    return ok;
}

#define PUT_OFF_MAX 6 /* doublings of 50 us */

static int64_t call(sim_node *n, sim_op *op, uint64_t timeout) {
    uint64_t flag = op->use_flag ? (uint64_t)(uintptr_t)&op->flag : 0;
    int64_t imm = op->has_imm ? (int64_t)op->imm : -1;
    uint64_t memory = (uint64_t)n->memory;
    const sim_write *first = &op->write[0];
    const sim_view *v = sim_node_view(n, op->place[0].node);
    if (!v) return -ESTALE;
    uint64_t remote = (uint64_t)v->remote;
    switch (op->verb) {
    case FAB_OP_WRITE:
        return fab_submit_write(n->engine, memory, op->src_off + first->loff, remote, op->place[0].off + first->roff,
                                first->len, imm, op->pin, timeout, flag);
    case FAB_OP_PAGED:
        return fab_submit_paged(n->engine, memory, op->sidx, op->sstride, op->src_off + op->soff, remote, op->didx,
                                op->dstride, op->place[0].off + op->doff, op->nwrites, first->len, imm, op->pin,
                                timeout, flag);
    case FAB_OP_SEND: {
        char message[1024];
        sim_message_make(op, message);
        return fab_submit_send(n->engine, 0, (uint32_t)v->peer, message, first->len, timeout, flag);
    }
    default: {
        fab_target to[SIM_WRITES];
        for (uint32_t i = 0; i < op->nwrites; i++) {
            const sim_place *p = &op->place[op->write[i].place];
            v = sim_node_view(n, p->node);
            if (!v) return -ESTALE;
            to[i] = (fab_target){.remote = (uint64_t)v->remote,
                                 .loff = op->src_off + op->write[i].loff,
                                 .roff = p->off + op->write[i].roff,
                                 .len = op->write[i].len};
        }
        return fab_submit_many(n->engine, op->verb, op->verb == FAB_OP_BARRIER ? 0 : memory, to, op->nwrites, imm,
                               op->pin, timeout, flag);
    }
    }
}

static void bind(sim_node *n, sim_op *op) {
    uint32_t index = (uint32_t)op->handle & 0xffffffu;
    if (index >= n->bound_cap) {
        uint32_t cap = n->bound_cap ? n->bound_cap : 1024;
        while (cap <= index) cap *= 2;
        n->bound = realloc(n->bound, cap * sizeof *n->bound);
        if (!n->bound) abort();
        for (uint32_t i = n->bound_cap; i < cap; i++) n->bound[i] = (sim_bound){0, SIM_NONE};
        n->bound_cap = cap;
    }
    n->bound[index] = (sim_bound){op->handle, op->slot.index};
}

/* A request names a transfer: known, or the one that is being submitted right now. */
sim_op *sim_op_of(sim_node *n, uint64_t id) {
    uint32_t index = (uint32_t)id & 0xffffffu;
    if (index < n->bound_cap && n->bound[index].handle == id && n->bound[index].op != SIM_NONE)
        return sim_slab_at(&n->world->ops, n->bound[index].op);
    sim_op *op = n->submitting;
    if (!op || op->handle) return NULL;
    op->handle = id;
    bind(n, op);
    return op;
}

void sim_op_submit(sim_world *w, sim_op *op) {
    sim_node *n = &w->nodes[op->node];
    if (op->state != SIM_OP_NEW) return;
    bool gone = !n->alive || n->inc != op->inc;
    for (uint32_t p = 0; p < op->nplaces; p++) /* the memory that it was to write went with its owner */
        gone = gone || w->nodes[op->place[p].node].inc != op->place[p].inc;
    if (gone) {
        sim_op_dead(op, w);
        return;
    }
    if (sim_paused(n)) {
        sim_at(w, n->paused_until + 1 + sim_below(&w->load, 1000), SIM_EV_SUBMIT, op->slot.index, op->slot.gen);
        return;
    }
    if (sim_permille(&w->load, w->opt.dereg_permille) && !w->settling) sim_node_renew(n);
    uint64_t timeout = 0;
    if (sim_permille(&w->load, w->opt.deadline_permille) && !w->settling) {
        timeout = 1 + sim_spread(&w->load, w->opt.latency_ns, 100000000);
        op->short_deadline = 1;
        w->counts.faults[SIM_FAULT_DEADLINE]++;
    }
    op->handle = 0;
    op->flag = 0;
    op->deadline = w->now + (timeout ? timeout : w->opt.timeout_ns);
    n->submitting = op;
    int64_t handle = call(n, op, timeout);
    n->submitting = NULL;
    if (handle == -EAGAIN || handle == -ESTALE) { /* back-pressure: later again */
        sim_at(w, w->now + 1000 + sim_below(&w->load, UINT64_C(50000) << op->put_off), SIM_EV_SUBMIT, op->slot.index,
               op->slot.gen);
        if (op->put_off < PUT_OFF_MAX) op->put_off++;
        sim_node_after(n);
        return;
    }
    if (handle <= 0 || (op->handle && op->handle != (uint64_t)handle)) {
        sim_fail(w, "bounds", "node %u: submit of transfer %" PRIu64 " returned %" PRId64, n->index, op->serial,
                 handle);
        return;
    }
    op->handle = (uint64_t)handle;
    bind(n, op);
    op->state = SIM_OP_LIVE;
    op->submitted = w->now;
    op->prev = NULL;
    op->next = n->ops;
    if (n->ops) n->ops->prev = op;
    n->ops = op;
    n->nops++;
    w->counts.transfers++;
    w->counts.writes += op->nwrites;
    w->counts.bytes += op->bytes;
    sim_note(w, SIM_TR_SUBMITTED, n->index, (uint32_t)op->serial, op->bytes << 8 | op->verb);
    if (op->notify) fab_transfer_notify(n->engine, op->handle);
    if (op->early_release) fab_transfer_release(n->engine, op->handle);
    if (!op->early_release && sim_permille(&w->load, w->opt.cancel_permille) && !w->settling)
        sim_at(w, w->now + sim_below(&w->load, 2 * (w->opt.latency_ns + w->opt.jitter_ns)), SIM_EV_CANCEL,
               op->slot.index, op->slot.gen);
    sim_op_dirty(n, op);
    sim_node_after(n);
}

void sim_op_cancel(sim_world *w, sim_op *op) {
    if (op->state != SIM_OP_LIVE) return;
    sim_node *n = &w->nodes[op->node];
    if (sim_paused(n)) return;
    op->cancelled = 1;
    op->cancelled_at = w->now;
    w->counts.faults[SIM_FAULT_CANCEL]++;
    int rc = fab_transfer_cancel(n->engine, op->handle);
    if (rc) sim_fail(w, "terminal", "node %u: cancelling transfer %" PRIu64 ": %d", n->index, op->serial, rc);
    sim_op_dirty(n, op);
    sim_node_after(n);
}

static void unlink_op(sim_node *n, sim_op *op) {
    if (op->prev) op->prev->next = op->next;
    else n->ops = op->next;
    if (op->next) op->next->prev = op->prev;
    n->nops--;
}

static void let_handle_go(sim_node *n, sim_op *op) {
    if (op->released || !op->handle || !n->alive || n->inc != op->inc) return;
    op->released = 1;
    uint32_t index = (uint32_t)op->handle & 0xffffffu;
    if (n->bound[index].handle == op->handle) n->bound[index].op = SIM_NONE;
    if (!op->early_release && fab_transfer_release(n->engine, op->handle))
        sim_fail(n->world, "terminal", "node %u: transfer %" PRIu64 " cannot be released", n->index, op->serial);
}

static void source_back(sim_node *n, sim_op *op) {
    if (op->region != SIM_NONE && n->inc == op->inc) sim_region_give(n, op->region);
    op->region = SIM_NONE;
}

void sim_op_ended(sim_node *n, sim_op *op, int32_t phase, int32_t err) {
    sim_world *w = n->world;
    op->state = SIM_OP_ENDED;
    op->phase = phase;
    op->err = err;
    n->ended++;
    if (phase == FAB_DONE) w->counts.done++;
    else if (phase == FAB_CANCELLED) w->counts.cancelled++;
    else w->counts.failed++;
    sim_note(w, SIM_TR_ENDED, n->index, (uint32_t)op->serial, (uint64_t)(uint32_t)phase << 32 | (uint32_t)err);
    unlink_op(n, op);
    sim_check_op_end(n, op);
    source_back(n, op); /* and soon somebody else's */
    if (sim_percent(&w->load, 70)) let_handle_go(n, op);
    sim_flow *f = sim_slab_get(&w->flows, op->flow, op->flow_gen);
    if (f) f->ops_left--;
    sim_flow_ready(w, op->flow, op->flow_gen);
    sim_op_let_go(w, op);
}

/* Its node died, or it was never submitted. */
void sim_op_dead(sim_op *op, sim_world *w) {
    if (op->state == SIM_OP_LIVE) unlink_op(&w->nodes[op->node], op);
    else source_back(&w->nodes[op->node], op);
    op->state = SIM_OP_DEAD;
    sim_flow *f = sim_slab_get(&w->flows, op->flow, op->flow_gen);
    if (f) f->ops_left--;
    sim_flow_ready(w, op->flow, op->flow_gen);
    sim_op_let_go(w, op);
}

/* Once nothing of it is left in the network, its targets may be used again. */
void sim_op_let_go(sim_world *w, sim_op *op) {
    if (op->state < SIM_OP_ENDED || op->at_nic || op->in_net || op->in_cq) return;
    if (!op->detached) {
        sim_flow_ready(w, op->flow, op->flow_gen);
        return;
    }
    let_handle_go(&w->nodes[op->node], op);
    sim_check_flag(w, op);
    for (uint32_t p = 0; p < op->nplaces; p++) {
        sim_node *to = &w->nodes[op->place[p].node];
        if (op->place[p].region != SIM_NONE && to->inc == op->place[p].inc) sim_region_give(to, op->place[p].region);
    }
    if (op->state == SIM_OP_ENDED && op->phase == FAB_DONE && op->has_imm && !op->units_lost &&
        op->units_handed != (uint64_t)op->nwrites * FAB_IMM_UNIT)
        sim_fail(w, "immediates",
                 "transfer %" PRIu64 " of node %u is done, %" PRIu64 "/840 were handed over for %u writes", op->serial,
                 op->node, op->units_handed, op->nwrites);
    sim_slab_give(&w->ops, op);
}
