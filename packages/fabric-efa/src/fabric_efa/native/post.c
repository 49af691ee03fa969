/* The hot path: requests of the engine become fi_writemsg. What all requests of a batch have in common is filled in once
 * (paper, section 3.5); a doorbell is rung for the last of a batch only (FI_MORE). */
#include "efa_int.h"

static fe_peer *peer_of(fe_dom *d, uint32_t id) {
    fe_peer *p = id < d->npeers ? d->peers[id] : NULL;
    return p && !p->closing ? p : NULL;
}

void fe_peer_busy(fe_peer *p) {
    if (fe_list_empty(&p->busy)) fe_list_add(&p->dom->busy, &p->busy);
}

/* Whether the provider may be given a write of `len` bytes, after `first` if that is not NULL. */
static bool room(const fe_peer *p, const fab_wr *first, uint64_t len) {
    const fe_dom *d = p->dom;
    if ((p->ep ? p->flying : d->flying) + (first ? 1 : 0) >= d->tx_limit) return false;
    uint64_t bytes = p->bytes + (first ? first->len : 0);
    return !d->gathers || !bytes || bytes + len <= FE_FLYING;
}

static fe_op *op_new(fe_peer *p, const fab_wr *wr) {
    fe_op *op = p->free;
    p->free = op->next_free;
    fe_list_init(&op->node);
    op->wr = *wr;
    op->lease = NULL;
    p->used++;
    return op;
}

static void op_free(fe_op *op) {
    fe_peer *p = op->peer;
    op->state = FE_OP_FREE;
    op->next_free = p->free;
    p->free = op;
    p->used--;
}

void fe_op_end(fe_op *op, int32_t status) {
    fe_peer *p = op->peer;
    fab_wc_push(&p->dom->wcq,
                &(fab_wc){.kind = FAB_WC_OP, .id = op->wr.id, .status = status, .peer = p->id, .count = 1});
    if (op->state != FE_OP_FLYING) fe_list_del(&op->node);
    op_free(op);
}

/* The provider has let go of it. */
void fe_op_flown(fe_op *op, int32_t status) {
    fe_peer *p = op->peer;
    fe_dom *d = p->dom;
    if (op->state != FE_OP_FLYING) { /* of an endpoint that is closed: it was ended then */
        fe_count(d, FE_R_STRAY);
        return;
    }
    fe_lease *l = op->lease;
    p->flying--;
    p->bytes -= op->wr.len;
    if (!p->ep) d->flying--;
    l->flying--;
    if (p->closing && status) status = -ECANCELED;
    fe_op_end(op, status);
    if (l->state == FE_LEASE_REVOKED && !l->flying) fe_lease_settle(p, l);
}

typedef struct template { /* of the requests of one batch */
    struct iovec iov;
    struct fi_rma_iov remote;
    struct fi_msg_rma msg;
    void *desc;
    uint64_t local_key;
    struct fid_ep *ep;
}
template;

static void template_init(template *t, fe_peer *p) {
    fe_dom *d = p->dom;
    t->ep = p->ep ? p->ep : d->ep;
    t->local_key = 0;
    t->desc = d->scratch_desc;
    t->msg = (struct fi_msg_rma){.msg_iov = &t->iov,
                                 .desc = &t->desc,
                                 .iov_count = 1,
                                 .addr = p->chan.to,
                                 .rma_iov = &t->remote,
                                 .rma_iov_count = 1}; /* always one, with a valid address and key: EFA reads it */
}

static bool inside(const fe_lease *l, const fab_wr *w) {
    return w->remote_addr >= l->va && w->len <= l->len && w->remote_addr - l->va <= l->len - w->len;
}

static ssize_t write_one(fe_dom *d, template *t, fe_op *op, bool more) {
    const fab_wr *w = &op->wr;
    fe_lease *l = op->lease;
    if (!inside(l, w)) return -EFAULT;
    if (w->local_key != t->local_key) {
        t->local_key = w->local_key;
        t->desc = w->local_key ? fe_mr_desc_of(d, w->local_key) : d->scratch_desc;
    }
    if (d->local_mr && !t->desc) return -EINVAL;
    t->iov.iov_base = w->local_addr ? (void *)(uintptr_t)w->local_addr : d->scratch;
    t->iov.iov_len = w->len;
    t->remote = (struct fi_rma_iov){.addr = w->remote_addr - l->va + l->base, .len = w->len, .key = l->key};
    t->msg.context = &op->ctx;
    t->msg.data = w->imm;
    /* A silent write is done when its bytes are there: whoever is told next may rely on it, and comes another way. */
    uint64_t delivery = w->len ? d->delivery : 0; /* of no bytes: shm 1.17 never says that they were delivered */
    uint64_t flags = FI_COMPLETION | (w->flags & FAB_WR_IMM ? FI_REMOTE_CQ_DATA : delivery) | (more ? FI_MORE : 0);
    ssize_t rc = fi_writemsg(t->ep, &t->msg, flags);
    if (rc) return rc;
    fe_peer *p = op->peer;
    op->state = FE_OP_FLYING;
    p->flying++;
    p->bytes += w->len;
    if (!p->ep) d->flying++;
    l->flying++;
    return 0;
}

static int refuse(const fe_dom *d, const fab_wr *w) {
    if (w->kind == FAB_WR_SEND) return w->len > FE_MAX_SEND ? -EMSGSIZE : 0;
    if (w->kind != FAB_WR_WRITE || w->local_addr + w->len < w->local_addr || w->remote_addr + w->len < w->remote_addr)
        return -EINVAL;
    return d->max_write && w->len > d->max_write ? -EMSGSIZE : 0;
}

/* Whether the next request will surely be given to the provider too: a doorbell may only be left out then. */
static bool goes_too(const fe_peer *p, const fab_wr *w, const fab_wr *next, const fe_lease *l) {
    return next->kind == FAB_WR_WRITE && !refuse(p->dom, next) && l && inside(l, next) &&
           next->remote_key == l->token && l->state == FE_LEASE_READY && p->free && room(p, w, next->len);
}

/* Takes one. 0: taken; -EAGAIN: not now; else why it is refused. */
static int take(fe_peer *p, const fab_wr *w, const fab_wr *next, template *t) {
    fe_dom *d = p->dom;
    int rc = refuse(d, w);
    if (rc) return rc;
    if (w->kind == FAB_WR_SEND) {
        fe_op *op = op_new(p, w);
        op->state = FE_OP_SENDQ;
        fe_list_add(&p->sends, &op->node);
        fe_peer_busy(p);
        return 0;
    }
    fe_lease *l = fe_lease_get(p, w->remote_key);
    if (!l) return -ENOMEM;
    if (l->state == FE_LEASE_REVOKED) return -EKEYREVOKED;
    if (l->state == FE_LEASE_READY && !d->rng && (!fe_list_empty(&p->todo) || !room(p, NULL, w->len))) return -EAGAIN;
    fe_op *op = op_new(p, w);
    op->lease = l;
    if (l->state == FE_LEASE_ASKED || d->rng) { /* strict: posted later, in another order (C2) */
        op->state = l->state == FE_LEASE_ASKED ? FE_OP_LEASE : FE_OP_TODO;
        fe_list_add(op->state == FE_OP_LEASE ? &l->waiting : &p->todo, &op->node);
        fe_peer_busy(p);
        return 0;
    }
    ssize_t posted = write_one(d, t, op, next && goes_too(p, w, next, l));
    if (!posted) return 0;
    if (posted == -FI_EAGAIN) { /* taken, and tried again at each poll */
        op->state = FE_OP_TODO;
        fe_list_add(&p->todo, &op->node);
        fe_peer_busy(p);
        return 0;
    }
    op_free(op);
    return posted == -EFAULT || posted == -EINVAL ? (int)posted : fe_errno((int)posted);
}

int fe_post(void *ctx, uint32_t id, const fab_wr *wr, uint32_t n) {
    fe_dom *d = ctx;
    fe_lock_politely(d);
    fe_peer *p = peer_of(d, id);
    int rc = !p ? -EINVAL : p->state == FE_DEAD || p->fail ? -ECONNRESET : p->state != FE_UP ? -ENOTCONN : 0;
    uint32_t k = 0;
    if (!rc) {
        d->answered = true;
        template t;
        template_init(&t, p);
        for (; k < n && p->free; k++) {
            rc = take(p, &wr[k], k + 1 < n ? &wr[k + 1] : NULL, &t);
            if (rc) break;
        }
        fe_sends_start(p);
    }
    pthread_mutex_unlock(&d->mu);
    return k ? (int)k : rc == -EAGAIN ? 0 : rc;
}

static uint64_t draw(fe_dom *d) {
    d->rng ^= d->rng << 13;
    d->rng ^= d->rng >> 7;
    return d->rng ^= d->rng << 17;
}

static fe_op *next_todo(fe_peer *p) {
    fe_node *n = p->todo.next;
    fe_dom *d = p->dom;
    if (d->rng)
        for (uint64_t skip = draw(d) >> 60; skip && n->next != &p->todo; skip--) n = n->next;
    return FE_OF(n, fe_op, node);
}

/* What was taken and could not be posted at once. */
void fe_peer_work(fe_peer *p) {
    fe_dom *d = p->dom;
    template t;
    template_init(&t, p);
    while (p->state == FE_UP && !p->fail && !fe_list_empty(&p->todo)) {
        fe_op *op = next_todo(p);
        if (!room(p, NULL, op->wr.len)) break;
        fe_list_del(&op->node);
        ssize_t rc = write_one(d, &t, op, false);
        if (rc == -FI_EAGAIN) {
            fe_list_add(p->todo.next, &op->node);
            break;
        }
        if (rc) fe_op_end(op, rc == -EFAULT || rc == -EINVAL ? (int32_t)rc : fe_errno((int)rc));
    }
    if (p->state == FE_UP) fe_sends_start(p);
    if (fe_list_empty(&p->todo) && (fe_list_empty(&p->sends) || !p->msgs_free)) fe_list_del(&p->busy);
}

/* Writes that the provider holds cannot be taken back: they end as they would, or when the link is cut. */
int fe_cancel(void *ctx, uint64_t id) {
    fe_dom *d = ctx;
    fe_lock_politely(d);
    for (uint32_t i = 0; i < d->npeers; i++) {
        fe_peer *p = d->peers[i];
        for (uint32_t k = 0; p && p->used && k < FE_OPS; k++) {
            fe_op *op = &p->ops[k];
            if (op->state == FE_OP_FREE || op->wr.id != id) continue;
            if (op->state == FE_OP_SENT) fe_withdraw(op);
            else if (op->state != FE_OP_FLYING) fe_op_end(op, -ECANCELED);
        }
    }
    if (fab_wc_ready(&d->wcq)) fe_wake(d);
    pthread_mutex_unlock(&d->mu);
    return 0;
}
