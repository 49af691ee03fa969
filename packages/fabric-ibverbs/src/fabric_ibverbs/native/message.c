/* Messages. One is done when a posted receive has taken it (decision 0003), so the receiver answers each: TAKEN, with a
 * status. It holds what no receive is there for, at most FV_MSGS messages of a peer: more are not sent. A message that is
 * given up is withdrawn; the answer says whether that was in time. */
#include "verbs_int.h"

/* ---- sender ------------------------------------------------------------------------------------------ */

int fv_send_add(fv_link *l, const fab_wr *wr) {
    if (wr->len > FV_MAX_SEND) return -EMSGSIZE;
    if (l->nsends >= FV_SENDS) return -EAGAIN;
    fv_send *s = malloc(sizeof *s);
    if (!s) return -ENOMEM;
    *s = (fv_send){.id = wr->id, .addr = wr->local_addr, .len = wr->len};
    fv_list_init(&s->node);
    fv_list_add(&l->sends, &s->node);
    l->nsends++;
    fv_link_busy(l);
    return 0;
}

static void end(fv_link *l, fv_send *s, int32_t status) {
    fab_wc_push(&l->dom->wcq, &(fab_wc){.kind = FAB_WC_OP, .id = s->id, .status = status, .peer = l->id, .count = 1});
    if (s->state != FV_S_QUEUED) l->nsent--;
    l->nsends--;
    fv_list_del(&s->node);
    free(s);
}

/* The next piece to send. */
bool fv_send_next(fv_link *l, fv_hdr *h, const uint8_t **data, uint32_t *len) {
    if (!l->out || fv_list_empty(&l->sends)) return false;
    fv_send *s = FV_OF(l->sends.next, fv_send, node);
    if (s->state == FV_S_QUEUED) {
        if (l->nsent >= FV_MSGS) return false;
        s->state = FV_S_ACTIVE;
        s->seq = ++l->seq;
        l->nsent++;
    }
    uint64_t left = s->len - s->off;
    *len = left < FV_FRAGMENT ? (uint32_t)left : FV_FRAGMENT;
    *data = (const uint8_t *)(uintptr_t)s->addr + s->off;
    *h = (fv_hdr){.type = FV_T_MSG, .a = s->seq, .off = s->off, .total = (uint32_t)s->len};
    s->off += *len;
    if (s->off == s->len) { /* copied: its memory is not read again */
        s->state = FV_S_SENT;
        fv_list_del(&s->node);
        fv_list_add(&l->sent, &s->node);
    }
    return true;
}

static void withdraw(fv_link *l, fv_send *s) {
    if (s->withdrawn) return;
    s->withdrawn = true;
    if (s->state == FV_S_ACTIVE) { /* the rest is not sent */
        s->state = FV_S_SENT;
        fv_list_del(&s->node);
        fv_list_add(&l->sent, &s->node);
    }
    if (fv_ctl(l, &(fv_hdr){.type = FV_T_WITHDRAW, .a = s->seq})) fv_link_lose(l, -EPROTO);
}

void fv_sends_cancel(fv_link *l, uint64_t id) {
    for (fv_node *n = l->sends.next, *next; n != &l->sends; n = next) {
        next = n->next;
        fv_send *s = FV_OF(n, fv_send, node);
        if (s->id != id) continue;
        if (s->state == FV_S_QUEUED) end(l, s, -ECANCELED);
        else withdraw(l, s);
        if (l->state == FV_CUT) return;
    }
    for (fv_node *n = l->sent.next, *next; n != &l->sent; n = next) {
        next = n->next;
        fv_send *s = FV_OF(n, fv_send, node);
        if (s->id == id) withdraw(l, s);
        if (l->state == FV_CUT) return;
    }
}

void fv_sends_end(fv_link *l, int32_t status) {
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
    while (!fv_list_empty(&l->sends)) end(l, FV_OF(l->sends.next, fv_send, node), status);
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
    while (!fv_list_empty(&l->sent)) end(l, FV_OF(l->sent.next, fv_send, node), status);
}

void fv_taken(fv_link *l, const fv_hdr *h) {
    for (fv_node *n = l->sent.next; n != &l->sent; n = n->next) {
        fv_send *s = FV_OF(n, fv_send, node);
        if (s->seq != h->a) continue;
        end(l, s, h->status > 0 ? -EPROTO : h->status);
        fv_link_busy(l);
        return;
    }
}

/* ---- receiver ------------------------------------------------------------------------------------------ */

static int answer(fv_link *l, uint64_t seq, int32_t status) {
    return fv_ctl(l, &(fv_hdr){.type = FV_T_TAKEN, .a = seq, .status = status});
}

/* Gives the bytes to a receive: the first that is long enough. */
static int32_t give(fv_dom *d, const uint8_t *data, uint32_t len) {
    for (uint32_t k = d->recv_head; k != d->recv_tail; k++) {
        fv_recv *r = &d->recvs[k & (FV_RECVS - 1)];
        if (r->len < len) continue;
        if (len) memcpy((void *)(uintptr_t)r->addr, data, len);
        fab_wc_push(&d->wcq,
                    &(fab_wc){.kind = FAB_WC_RECV, .id = r->id, .len = len, .count = 1, .peer = FAB_PEER_NONE});
        *r = d->recvs[d->recv_head++ & (FV_RECVS - 1)];
        return 0;
    }
    fab_wc_push(&d->wcq,
                &(fab_wc){.kind = FAB_WC_FAULT, .status = -EMSGSIZE, .len = len, .count = 1, .peer = FAB_PEER_NONE});
    return -EMSGSIZE;
}

static void forget(fv_inmsg *m) {
    fv_link *l = m->link;
    if (l->partial == m) l->partial = NULL;
    else l->nheld--;
    fv_list_del(&m->node);
    fv_list_del(&m->global);
    free(m);
}

int fv_in_message(fv_link *l, const fv_hdr *h, const uint8_t *data, uint32_t len) {
    fv_dom *d = l->dom;
    if (h->total > FV_MAX_SEND || h->off > h->total || len > h->total - h->off || (!len && h->total)) return -EPROTO;
    if (!h->off) {
        if (l->partial || l->nheld >= FV_MSGS) return -EPROTO;
        if (len == h->total && d->recv_head != d->recv_tail && fv_list_empty(&d->held)) /* straight into a receive */
            return answer(l, h->a, give(d, data, len));
        fv_inmsg *m = malloc(sizeof *m + h->total);
        if (!m) return -EPROTO;
        *m = (fv_inmsg){.link = l, .seq = h->a, .total = h->total};
        fv_list_init(&m->node);
        fv_list_init(&m->global);
        l->partial = m;
    }
    fv_inmsg *m = l->partial;
    if (!m) return h->off ? -EPROTO : 0;
    if (m->seq != h->a || m->got != h->off || m->total != h->total) return -EPROTO;
    if (len) memcpy(m->data + m->got, data, len);
    m->got += len;
    if (m->got < m->total) return 0;
    l->partial = NULL;
    l->nheld++;
    fv_list_add(&l->held, &m->node);
    fv_list_add(&d->held, &m->global);
    return 0; /* fv_match looks after it */
}

void fv_in_withdraw(fv_link *l, uint64_t seq) {
    fv_inmsg *m = l->partial && l->partial->seq == seq ? l->partial : NULL;
    for (fv_node *n = l->held.next; !m && n != &l->held; n = n->next)
        if (FV_OF(n, fv_inmsg, node)->seq == seq) m = FV_OF(n, fv_inmsg, node);
    if (!m) return; /* it was taken: that was answered */
    forget(m);
    if (answer(l, seq, -ECANCELED)) fv_link_lose(l, -EPROTO);
}

void fv_match(fv_dom *d) {
    while (!fv_list_empty(&d->held) && d->recv_head != d->recv_tail) {
        fv_inmsg *m = FV_OF(d->held.next, fv_inmsg, global);
        fv_link *l = m->link; /* NOLINT(clang-analyzer-unix.Malloc): see fv_list_del */
        uint64_t seq = m->seq;
        int32_t status = give(d, m->data, m->total);
        forget(m);
        if (answer(l, seq, status)) fv_link_lose(l, -EPROTO);
    }
}

void fv_in_free(fv_link *l) {
    if (l->partial) forget(l->partial);
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
    while (!fv_list_empty(&l->held)) forget(FV_OF(l->held.next, fv_inmsg, node));
}

int fv_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    fv_dom *d = ctx;
    if (d->recv_tail - d->recv_head == FV_RECVS) return -EAGAIN;
    d->recvs[d->recv_tail++ & (FV_RECVS - 1)] = (fv_recv){id, addr, len};
    if (!fv_list_empty(&d->held)) fv_wake(d);
    return 0;
}
