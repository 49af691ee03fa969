/* A NIC's completion queue: a bag, since completions have no order (C2). Only the first `completion_queue` entries are
 * within reach; the others wait outside, as they do when a real queue is full. */
#include "sim.h"

void sim_cq_push(sim_nic *nic, const fab_wc *wc, sim_op *op) {
    if (nic->closed) abort();
    if (nic->cq_count == nic->cq_cap) {
        nic->cq_cap = nic->cq_cap ? 2 * nic->cq_cap : 256;
        nic->cq = realloc(nic->cq, nic->cq_cap * sizeof *nic->cq);
        if (!nic->cq) abort();
    }
    nic->cq[nic->cq_count++] = (sim_cqe){*wc, op ? op->slot.index : SIM_NONE};
    sim_node_wake(nic->node);
}

static void take_out(sim_nic *nic, uint32_t i) { nic->cq[i] = nic->cq[--nic->cq_count]; }

static void lost(sim_world *w, const sim_cqe *e) {
    if (e->op == SIM_NONE) return;
    sim_op *op = sim_slab_at(&w->ops, e->op);
    if (e->wc.kind == FAB_WC_OP) {
        op->at_nic--;
    } else {
        op->in_cq--;
        if (e->wc.kind == FAB_WC_IMM) op->units_lost += FAB_IMM_UNIT / FAB_IMM_SPLIT(e->wc.imm);
    }
    sim_op_let_go(w, op);
}

void sim_cq_clear(sim_nic *nic) {
    while (nic->cq_count) {
        sim_cqe e = nic->cq[--nic->cq_count];
        lost(nic->node->world, &e);
    }
}

void sim_cq_forget_link(sim_nic *nic, uint32_t link) {
    for (uint32_t i = 0; i < nic->cq_count;) {
        const fab_wc *wc = &nic->cq[i].wc;
        if ((wc->kind == FAB_WC_PEER_UP || wc->kind == FAB_WC_PEER_DOWN) && wc->peer == link) take_out(nic, i);
        else i++;
    }
}

/* What the engine now knows of its links. */
static void path_told(sim_nic *nic, const fab_wc *wc) {
    sim_node *n = nic->node;
    if (wc->kind == FAB_WC_NIC_DOWN) nic->down_told = 1;
    if (wc->kind == FAB_WC_NIC_DOWN || wc->kind == FAB_WC_PEER_DOWN) n->paths_changed = 1;
    if (wc->kind != FAB_WC_PEER_DOWN && wc->kind != FAB_WC_PEER_UP) return;
    sim_link *l = &nic->links[wc->peer];
    if (wc->kind == FAB_WC_PEER_DOWN || l->state == SIM_LINK_UP) l->told = 1; /* an UP may be followed by its DOWN */
    bool path_only = wc->status == -ETIMEDOUT || wc->status == -ENETDOWN || wc->status == -EHOSTUNREACH;
    if (wc->kind == FAB_WC_PEER_DOWN && !path_only && n->ngone < 8) {
        n->gone[n->ngone].node = l->node;
        n->gone[n->ngone++].inc = l->inc;
    }
}

static void handed(sim_nic *nic, const sim_cqe *e) {
    sim_node *n = nic->node;
    sim_world *w = n->world;
    sim_op *op = e->op == SIM_NONE ? NULL : sim_slab_at(&w->ops, e->op);
    if (!op && (e->wc.kind == FAB_WC_OP || e->wc.kind == FAB_WC_IMM)) abort(); /* they are some transfer's */
    switch (e->wc.kind) {
    case FAB_WC_OP:
        nic->sq_used--;
        op->at_nic--;
        if (e->wc.status) op->errors++;
        sim_note(w, SIM_TR_OP, n->index, (uint32_t)op->serial, (uint64_t)(uint32_t)e->wc.status);
        sim_op_dirty(n, op);
        break;
    case FAB_WC_IMM:
        op->in_cq--;
        sim_note(w, SIM_TR_RAISED, n->index, e->wc.imm, op->serial);
        sim_check_handed(n, e->wc.imm, 1, op);
        sim_op_let_go(w, op);
        break;
    case FAB_WC_RECV:
        if (!op) break; /* a receive that a lost NIC gave back */
        op->in_cq--;
        if (!e->wc.status) n->messages++;
        sim_note(w, SIM_TR_MESSAGE, n->index, (uint32_t)e->wc.len, (uint64_t)(uint32_t)e->wc.status);
        sim_op_let_go(w, op);
        break;
    default:
        n->path_down |= e->wc.kind == FAB_WC_PEER_DOWN || e->wc.kind == FAB_WC_NIC_DOWN;
        path_told(nic, &e->wc);
        sim_note(w, SIM_TR_PEER, n->index, e->wc.kind << 16 | e->wc.peer, (uint64_t)(uint32_t)e->wc.status);
    }
}

/* What may be told together: ends of one transfer, arrivals of one immediate. */
static bool alike(const sim_cqe *a, const fab_wc *b) {
    if (a->wc.kind != b->kind || a->wc.status != b->status) return false;
    return b->kind == FAB_WC_OP ? a->wc.id == b->id && a->wc.peer == b->peer
                                : b->kind == FAB_WC_IMM && a->wc.imm == b->imm;
}

int sim_cq_poll(sim_nic *nic, fab_wc *wc, uint32_t cap) {
    sim_world *w = nic->node->world;
    const sim_options *o = &w->opt;
    if (!nic->cq_count || nic->stalled_until > w->now) return 0;
    uint64_t most = 1 + sim_below(&w->net, o->poll_batch);
    if (most < cap) cap = (uint32_t)most;
    uint32_t n = 0;
    while (n < cap && nic->cq_count) {
        uint32_t visible = nic->cq_count < o->completion_queue ? nic->cq_count : (uint32_t)o->completion_queue;
        uint32_t i = visible > 1 ? (uint32_t)sim_below(&w->net, visible) : 0;
        sim_cqe e = nic->cq[i];
        take_out(nic, i);
        handed(nic, &e);
        wc[n] = e.wc;
        bool merge = nic->cq_count && e.wc.kind <= FAB_WC_IMM && sim_percent(&w->net, o->merge_percent);
        for (uint32_t k = 0; merge && k < nic->cq_count && k < 16;) {
            if (!alike(&nic->cq[k], &wc[n])) {
                k++;
                continue;
            }
            sim_cqe other = nic->cq[k];
            take_out(nic, k);
            handed(nic, &other);
            wc[n].count++;
        }
        n++;
    }
    sim_cost_polled(nic, n);
    if (nic->cq_count) sim_node_wake(nic->node);
    return (int)n;
}
