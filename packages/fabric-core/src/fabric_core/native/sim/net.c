/* Requests on their way: read, landed (at once or in two parts), completed, raised; or failed, and then never landed later.
 *
 * What a NIC promises and no more: the payload is in memory before the sender's completion and before the receiver's
 * immediate; those two come in any order. A request that ends badly neither reads its source nor lands afterwards. */
#include "sim.h"

static sim_nic *sender(sim_world *w, const sim_wr *r) { return &w->nodes[r->node].nic[r->nic]; }
static sim_nic *receiver(sim_world *w, const sim_wr *r) { return &w->nodes[r->to_node].nic[r->to_nic]; }

static bool reachable(sim_world *w, const sim_wr *r) {
    const sim_nic *to = receiver(w, r);
    return to->node->alive && to->node->inc == r->to_inc && !to->down && !to->closed;
}

static void again(sim_world *w, sim_wr *r, uint64_t at) {
    r->token = ++w->token;
    sim_at(w, at, SIM_EV_WR, r->slot.index, r->token);
}

static void forget_copy(sim_wr *r) {
    free(r->copy);
    r->copy = NULL;
}

static void release(sim_world *w, sim_wr *r) {
    if (r->done_pending || r->imm_pending) return;
    sim_op *op = sim_slab_at(&w->ops, r->op);
    if (r->prev) r->prev->next = r->next;
    else op->wrs = r->next;
    if (r->next) r->next->prev = r->prev;
    op->in_net--;
    r->token = r->imm_token = 0;
    forget_copy(r);
    sim_slab_give(&w->wrs, r);
    sim_op_let_go(w, op);
}

static void raise_imm(sim_world *w, sim_wr *r) {
    sim_op *op = sim_slab_at(&w->ops, r->op);
    r->imm_pending = 0;
    if (reachable(w, r)) {
        op->in_cq++;
        sim_cq_push(receiver(w, r), &(fab_wc){.kind = FAB_WC_IMM, .imm = r->wr.imm, .count = 1, .peer = FAB_PEER_NONE},
                    op);
    } else {
        op->units_lost += FAB_IMM_UNIT / FAB_IMM_SPLIT(r->wr.imm);
    }
}

static void complete(sim_world *w, sim_wr *r) {
    sim_op *op = sim_slab_at(&w->ops, r->op);
    if (r->done_pending) {
        r->done_pending = 0;
        sim_cq_push(sender(w, r),
                    &(fab_wc){.kind = FAB_WC_OP, .id = r->wr.id, .status = r->status, .peer = r->link, .count = 1}, op);
    }
    release(w, r);
}

static void fail(sim_world *w, sim_wr *r, int32_t status, uint64_t within) {
    r->status = status;
    r->stage = SIM_WR_FAILING;
    r->imm_pending = 0;
    forget_copy(r);
    again(w, r, w->now + sim_below(&w->net, within + 1));
}

void sim_net_post(sim_nic *nic, uint32_t link, const fab_wr *wr, sim_op *op, uint32_t write) {
    sim_world *w = nic->node->world;
    const sim_link *l = &nic->links[link];
    sim_wr *r = sim_slab_take(&w->wrs);
    r->wr = *wr;
    r->op = op->slot.index;
    r->link = link;
    r->write = write;
    r->node = (uint8_t)nic->node->index;
    r->nic = (uint8_t)nic->index;
    r->inc = nic->node->inc;
    r->to_node = l->node;
    r->to_nic = l->nic;
    r->to_inc = l->inc;
    r->status = 0;
    r->copy = NULL;
    r->split = 0;
    r->done_pending = 1;
    r->imm_pending = wr->flags & FAB_WR_IMM ? 1 : 0;
    r->prev = NULL;
    r->next = op->wrs;
    if (op->wrs) op->wrs->prev = r;
    op->wrs = r;
    op->at_nic++;
    op->posted++;
    op->in_net++;
    nic->sq_used++;
    nic->node->in_vain = 0;
    w->counts.wrs++;
    sim_note(w, SIM_TR_POST, nic->node->index, (uint32_t)op->serial, wr->len << 8 | nic->index);
    if (l->state != SIM_LINK_UP) {
        fail(w, r, l->status ? l->status : -ECONNRESET, w->opt.latency_ns);
        return;
    }
    sim_stages at;
    sim_cost(w, nic, &w->nodes[l->node].nic[l->nic], wr, &at);
    r->land_at = at.land;
    r->late_done = at.done - at.land;
    r->late_imm = at.imm - at.land;
    if (wr->len > 1 && sim_percent(&w->net, w->opt.piece_percent)) r->split = 1 + sim_below(&w->net, wr->len - 1);
    r->stage = at.read < at.land ? SIM_WR_READ : SIM_WR_LAND;
    again(w, r, at.read < at.land ? at.read : at.land);
}

/* The payload is there. */
static void landed(sim_world *w, sim_wr *r, sim_op *op) {
    sim_note(w, SIM_TR_LAND, r->to_node, (uint32_t)op->serial, r->wr.len << 8 | r->to_nic);
    forget_copy(r);
    if (r->imm_pending) {
        op->units_landed += FAB_IMM_UNIT / FAB_IMM_SPLIT(r->wr.imm);
        if (r->late_imm) {
            r->imm_token = ++w->token;
            sim_at(w, w->now + r->late_imm, SIM_EV_IMM, r->slot.index, r->imm_token);
        } else {
            raise_imm(w, r);
        }
    }
    r->stage = SIM_WR_LANDED;
    if (r->late_done && r->done_pending) again(w, r, w->now + r->late_done);
    else complete(w, r);
}

static void land_message(sim_world *w, sim_wr *r, sim_op *op, sim_nic *to) {
    if (!to->nrecvs) { /* receiver not ready: tried again until a deadline or a cancel ends it */
        again(w, r, w->now + 1 + w->opt.receive_retry_ns / 2 + sim_below(&w->net, w->opt.receive_retry_ns));
        return;
    }
    sim_recv recv = to->recvs[0];
    memmove(to->recvs, to->recvs + 1, --to->nrecvs * sizeof *to->recvs);
    bool fits = r->wr.len <= recv.len;
    const void *from = r->copy ? r->copy : (const void *)(uintptr_t)r->wr.local_addr;
    if (fits && r->wr.len) memcpy((void *)(uintptr_t)recv.addr, from, r->wr.len);
    sim_cq_push(to,
                &(fab_wc){.kind = FAB_WC_RECV,
                          .id = recv.id,
                          .len = fits ? r->wr.len : 0,
                          .status = fits ? 0 : -EMSGSIZE,
                          .peer = FAB_PEER_NONE,
                          .count = 1},
                op);
    op->in_cq++;
    if (fits) landed(w, r, op);
    else fail(w, r, -EMSGSIZE, w->opt.latency_ns);
}

static void land(sim_world *w, sim_wr *r) {
    sim_op *op = sim_slab_at(&w->ops, r->op);
    sim_nic *to = receiver(w, r);
    if (!reachable(w, r)) { /* nobody answers: it ends when the sender's NIC gives the link up */
        if (r->done_pending) r->stage = SIM_WR_STUCK;
        r->imm_pending = 0;
        if (!r->done_pending) release(w, r);
        return;
    }
    if (to->stalled_until > w->now) {
        again(w, r, to->stalled_until + sim_below(&w->net, 1000));
        return;
    }
    if (r->wr.kind == FAB_WR_SEND) {
        land_message(w, r, op, to);
        return;
    }
    if (!sim_mr_of(to, r->wr.remote_key)) {
        fail(w, r, -EKEYREVOKED, w->opt.latency_ns);
        return;
    }
    uint64_t from = r->stage == SIM_WR_SECOND ? r->split : 0;
    uint64_t until = r->stage == SIM_WR_LAND && r->split ? r->split : r->wr.len;
    if (until > from) {
        if (!sim_check_land(w, r, op, to, from, until - from)) return;
        const char *source = r->copy ? r->copy : (const char *)(uintptr_t)r->wr.local_addr;
        uint64_t off = r->wr.remote_addr & 0xffffffffffull;
        memcpy(to->node->arena + off + from, source + from, until - from);
    }
    if (until < r->wr.len) {
        r->stage = SIM_WR_SECOND;
        again(w, r, w->now + 1 + sim_below(&w->net, w->opt.jitter_ns));
        return;
    }
    op->write[r->write].landed += r->wr.len;
    landed(w, r, op);
}

void sim_net_event(sim_world *w, uint32_t index, uint32_t token) {
    sim_wr *r = sim_slab_at(&w->wrs, index);
    if (r->token != token) return; /* it was cancelled or put off */
    const sim_nic *nic = sender(w, r);
    if (nic->stalled_until > w->now && r->stage != SIM_WR_FAILING && r->done_pending) {
        again(w, r, nic->stalled_until + sim_below(&w->net, 1000));
        return;
    }
    switch (r->stage) {
    case SIM_WR_READ:
        r->copy = malloc(r->wr.len ? r->wr.len : 1);
        if (!r->copy) abort();
        if (r->wr.len) memcpy(r->copy, (const void *)(uintptr_t)r->wr.local_addr, r->wr.len);
        r->stage = SIM_WR_LAND;
        again(w, r, r->land_at > w->now ? r->land_at : w->now);
        break;
    case SIM_WR_LAND:
    case SIM_WR_SECOND: land(w, r); break;
    case SIM_WR_LANDED:
    case SIM_WR_FAILING: complete(w, r); break;
    default: break;
    }
}

void sim_net_imm(sim_world *w, uint32_t index, uint32_t token) {
    sim_wr *r = sim_slab_at(&w->wrs, index);
    if (r->imm_token != token || !r->imm_pending) return;
    r->imm_token = 0;
    raise_imm(w, r);
    release(w, r);
}

static bool before_landing(const sim_wr *r) { return r->stage != SIM_WR_LANDED && r->stage != SIM_WR_FAILING; }

void sim_net_cancel(sim_nic *nic, sim_op *op) {
    sim_world *w = nic->node->world;
    for (sim_wr *r = op->wrs; r; r = r->next) {
        if (r->nic != nic->index || r->inc != nic->node->inc || !r->done_pending || !before_landing(r)) continue;
        if (r->stage == SIM_WR_STUCK || sim_percent(&w->net, 75)) fail(w, r, -ECANCELED, 2 * w->opt.latency_ns);
        else if (r->stage != SIM_WR_SECOND) again(w, r, w->now + sim_below(&w->net, w->opt.latency_ns)); /* too late */
    }
}

/* Landed, and the acknowledgement is lost: an error at the sender, and the immediate comes now or never. */
static void fail_landed(sim_world *w, sim_wr *r, int32_t status) {
    if (sim_percent(&w->net, 50)) return; /* the completion was already on its way */
    if (r->imm_pending) {
        if (sim_percent(&w->net, 50)) {
            raise_imm(w, r);
        } else {
            sim_op *op = sim_slab_at(&w->ops, r->op);
            op->units_lost += FAB_IMM_UNIT / FAB_IMM_SPLIT(r->wr.imm);
            r->imm_pending = 0;
        }
    }
    r->status = status;
    r->stage = SIM_WR_FAILING;
}

void sim_net_cut(sim_nic *nic, uint32_t link, int32_t status) {
    sim_world *w = nic->node->world;
    for (uint32_t i = 0; i < w->wrs.count; i++) {
        sim_wr *r = sim_slab_at(&w->wrs, i);
        if (!(r->slot.gen & 1u) || r->node != nic->node->index || r->nic != nic->index || r->inc != nic->node->inc ||
            (link != SIM_NONE && r->link != link) || !r->done_pending)
            continue;
        if (before_landing(r)) fail(w, r, status, 2 * w->opt.latency_ns);
        else if (r->stage == SIM_WR_LANDED) fail_landed(w, r, status);
    }
}

void sim_net_drop(sim_nic *nic) {
    sim_world *w = nic->node->world;
    bool crash = !nic->node->closing;
    for (uint32_t i = 0; i < w->wrs.count; i++) {
        sim_wr *r = sim_slab_at(&w->wrs, i);
        if (!(r->slot.gen & 1u) || r->node != nic->node->index || r->nic != nic->index || r->inc != nic->node->inc)
            continue;
        sim_op *op = sim_slab_at(&w->ops, r->op);
        if (r->done_pending) op->at_nic--;
        r->done_pending = 0;
        /* what left the source may still arrive, unless it has met nobody */
        bool on_the_wire = crash && r->copy && before_landing(r) && r->stage != SIM_WR_STUCK;
        if (on_the_wire) continue;
        if (r->stage != SIM_WR_LANDED) r->imm_pending = 0;
        release(w, r);
    }
    nic->sq_used = 0;
}
