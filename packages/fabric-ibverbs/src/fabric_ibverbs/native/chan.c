/* M: what a link sends beside writes. Reliable and in order, in buffers of FV_MBUF bytes.
 *
 * Each side may send FV_MWINDOW buffers that the other has not told it to have posted again. What was posted again travels
 * in each header; if there is nothing to say, in a message of its own, which needs no credit: one is due for half a window at
 * the least, so that there are never more than 4 under way, for which receives are posted too. */
#include "verbs_int.h"

/* ---- memory -------------------------------------------------------------------------------------- */

#define SLAB 64u

static fv_slab *slab(fv_dom *d, int access) {
    fv_slab *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->memory = aligned_alloc(4096, (size_t)SLAB * FV_MBUF);
    s->mr = s->memory ? fv_ibv.reg_mr(d->pd, s->memory, (size_t)SLAB * FV_MBUF, access) : NULL;
    if (!s->mr) {
        free(s->memory);
        free(s);
        return NULL;
    }
    s->next = d->slabs;
    return d->slabs = s;
}

static int grow_rx(fv_dom *d) {
    fv_rx *p = realloc(d->rxs, (d->nrxs + SLAB) * sizeof *p);
    if (!p) return -ENOMEM;
    d->rxs = p;
    fv_slab *s = slab(d, IBV_ACCESS_LOCAL_WRITE);
    if (!s) return -ENOMEM;
    for (uint32_t i = 0; i < SLAB; i++) d->rxs[d->nrxs++] = (fv_rx){s->memory + (size_t)i * FV_MBUF, s->mr->lkey};
    return 0;
}

int fv_mrx_repost(fv_dom *d, uint32_t index) {
    struct ibv_sge s = {(uintptr_t)d->rxs[index].data, FV_MBUF, d->rxs[index].lkey};
    struct ibv_recv_wr wr = {.wr_id = FV_WRID(FV_K_MRX, index, 0), .sg_list = &s, .num_sge = 1}, *bad;
    return ibv_post_srq_recv(d->msrq, &wr, &bad) ? -EIO : 0;
}

/* Posts receives until `n` are there; they are never taken away again. */
int fv_mrx_grow(fv_dom *d, uint32_t n) {
    while (d->mrx_posted < n) {
        if (d->mrx_posted == d->nrxs && grow_rx(d)) return -ENOMEM;
        if (fv_mrx_repost(d, d->mrx_posted)) return -EIO;
        d->mrx_posted++;
    }
    return 0;
}

static int grow_tx(fv_dom *d) {
    fv_slab *s = slab(d, 0);
    fv_tx **p = s ? realloc(d->txs, (d->ntxs + SLAB) * sizeof(fv_tx *)) : NULL;
    if (!p) return -ENOMEM;
    d->txs = p;
    for (uint32_t i = 0; i < SLAB; i++) {
        fv_tx *t = calloc(1, sizeof *t);
        if (!t) return i ? 0 : -ENOMEM;
        *t = (fv_tx){.data = s->memory + (size_t)i * FV_MBUF, .index = d->ntxs, .lkey = s->mr->lkey};
        d->txs[d->ntxs++] = t;
        fv_list_add(&d->tx_free, &t->node);
    }
    return 0;
}

void fv_tx_free(fv_dom *d, fv_tx *t) {
    t->gen++;
    t->qp = NULL;
    fv_list_del(&t->node);
    fv_list_add(&d->tx_free, &t->node);
}

void fv_tx_done(fv_dom *d, uint32_t index, uint32_t gen) {
    fv_tx *t = index < d->ntxs ? d->txs[index] : NULL;
    if (!t || t->gen != gen || !t->qp) {
        fv_count(d, FV_R_STRAY, 1);
        return;
    }
    fv_link *l = t->qp->link;
    if (l) {
        l->m_flying--;
        fv_link_busy(l);
    }
    fv_tx_free(d, t);
}

void fv_chan_free(fv_dom *d) {
    while (d->slabs) {
        fv_slab *s = d->slabs;
        d->slabs = s->next;
        fv_ibv.dereg_mr(s->mr);
        free(s->memory);
        free(s);
    }
    for (uint32_t i = 0; i < d->ntxs; i++) free(d->txs[i]);
    free(d->txs);
    free(d->rxs);
    d->txs = NULL;
    d->rxs = NULL;
}

/* ---- sending ---------------------------------------------------------------------------------------- */

void fv_link_busy(fv_link *l) {
    if (fv_list_empty(&l->busy)) fv_list_add(&l->dom->busy, &l->busy);
}

int fv_ctl(fv_link *l, const fv_hdr *h) {
    uint32_t cap = sizeof l->ctl / sizeof *l->ctl;
    if (l->ctl_tail - l->ctl_head == cap) return -EPROTO; /* more than a peer that keeps to the rules can ask for */
    l->ctl[l->ctl_tail++ & (cap - 1)] = *h;
    fv_link_busy(l);
    return 0;
}

static int post(fv_link *l, fv_hdr *h, const uint8_t *data, uint32_t len) {
    fv_dom *d = l->dom;
    if (fv_list_empty(&d->tx_free) && grow_tx(d)) return -ENOMEM;
    fv_tx *t = FV_OF(d->tx_free.next, fv_tx, node);
    h->returned = l->m_got;
    memcpy(t->data, h, sizeof *h);
    if (len) memcpy(t->data + sizeof *h, data, len);
    struct ibv_sge s = {(uintptr_t)t->data, (uint32_t)sizeof *h + len, t->lkey};
    struct ibv_send_wr wr = {.wr_id = FV_WRID(FV_K_MTX, t->index, t->gen),
                             .sg_list = &s,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED},
                       *bad;
    if (ibv_post_send(l->m->qp, &wr, &bad)) return -EIO;
    l->m_told = l->m_got;
    l->m_flying++;
    t->qp = l->m;
    fv_list_del(&t->node);
    fv_list_add(&l->m->flying, &t->node);
    return 0;
}

/* Sends what can be sent. */
void fv_chan_work(fv_link *l) {
    const uint32_t cap = sizeof l->ctl / sizeof *l->ctl;
    int rc = 0;
    fv_list_del(&l->busy);
    if (l->state == FV_OPENING || l->state == FV_CUT) return;
    if (l->credit_due && !l->out) fv_credit_return(l);
    while (!rc && l->m_flying < FV_MTX - 4 && (int32_t)(l->m_limit - l->m_sent) > 0) {
        const uint8_t *data = NULL;
        uint32_t len = 0;
        fv_hdr h;
        if (l->ctl_head != l->ctl_tail) h = l->ctl[l->ctl_head++ & (cap - 1)];
        else if (!fv_send_next(l, &h, &data, &len)) break;
        rc = post(l, &h, data, len);
        l->m_sent++;
    }
    if (!rc && l->m_got - l->m_told >= FV_MWINDOW / 2) {
        if (l->m_flying < FV_MTX) rc = post(l, &(fv_hdr){.type = FV_T_CREDIT}, NULL, 0);
    }
    if (rc) fv_link_lose(l, rc == -ENOMEM ? -ENOMEM : -EIO);
}

/* ---- receiving --------------------------------------------------------------------------------------- */

static int take(fv_link *l, const fv_hdr *h, const uint8_t *data, uint32_t len) {
    switch (h->type) {
    case FV_T_CREDIT: return 0;
    case FV_T_MSG: return l->out ? -EPROTO : fv_in_message(l, h, data, len);
    case FV_T_WITHDRAW:
        if (l->out) return -EPROTO;
        fv_in_withdraw(l, h->a);
        return 0;
    case FV_T_TAKEN:
        if (!l->out) return -EPROTO;
        fv_taken(l, h);
        return 0;
    case FV_T_MEND:
        if (l->out) return -EPROTO;
        fv_mend_asked(l, h);
        return 0;
    case FV_T_MENDED:
        if (!l->out) return -EPROTO;
        fv_mended(l, h);
        return 0;
    default: return -EPROTO;
    }
}

/* A buffer that came on this link; it is posted again when this returns. */
void fv_chan_in(fv_link *l, const uint8_t *data, uint32_t len) {
    fv_hdr h;
    int rc = -EPROTO;
    if (len >= sizeof h) {
        memcpy(&h, data, sizeof h);
        uint32_t limit = h.returned + FV_MWINDOW;
        if (h.returned - (l->m_limit - FV_MWINDOW) > FV_MWINDOW)
            limit = l->m_limit; /* backwards, or what was never sent */
        if (h.type != FV_T_CREDIT) l->m_got++;
        if (l->out) l->dom->capi->heard(l->dom->contact, l->contact, l->dom->now);
        else l->dom->capi->heard_in(l->dom->contact, l->id, l->dom->now);
        if (limit != l->m_limit) {
            l->m_limit = limit;
            fv_link_busy(l);
        }
        rc = take(l, &h, data + sizeof h, len - (uint32_t)sizeof h);
    }
    if (l->m_got - l->m_told >= FV_MWINDOW / 2) fv_link_busy(l);
    if (rc == -EPROTO) {
        fv_count(l->dom, FV_R_MALFORMED, 1);
        fv_link_lose(l, -EPROTO);
    }
}
