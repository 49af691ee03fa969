/* Messages. A message is done when a posted receive has taken it (decision 0003), so the receiver answers each: TAKEN, with
 * a status. It holds what no receive is there for, at most FE_MSGS messages of a peer: more are not sent. Long ones go in
 * fragments, in any order. A message that is given up is withdrawn; the answer says whether that was in time. */
#include "efa_int.h"

/* ---- sender -------------------------------------------------------------------------------------- */

static fe_hdr header(const fe_peer *p, const fe_op *op, uint8_t type) {
    return (fe_hdr){.magic = FE_MAGIC,
                    .type = type,
                    .slot = op->msg,
                    .session = p->theirs,
                    .link = p->their_link,
                    .a = p->msg[op->msg].seq};
}

static void start(fe_peer *p, fe_op *op) {
    uint32_t slot = (uint32_t)__builtin_ctz(p->msgs_free), total = (uint32_t)op->wr.len, off = 0;
    p->msgs_free &= ~(1u << slot);
    p->msg[slot].op = op;
    p->msg[slot].seq = ++p->seq;
    op->msg = (uint16_t)slot;
    fe_list_del(&op->node);
    op->state = FE_OP_SENT;
    fe_hdr h = header(p, op, FE_T_MSG);
    h.total = total;
    do {
        uint32_t len = total - off < FE_FRAGMENT ? total - off : FE_FRAGMENT;
        h.off = off;
        if (fe_tell(p->dom, &p->chan, &h, (const char *)(uintptr_t)op->wr.local_addr + off, len)) {
            p->fail = -ENOMEM; /* part of it may be gone already */
            p->dom->failing = true;
            return;
        }
        off += len;
    } while (off < total);
}

void fe_sends_start(fe_peer *p) {
    while (p->msgs_free && !fe_list_empty(&p->sends) && !p->fail) start(p, FE_OF(p->sends.next, fe_op, node));
}

void fe_withdraw(fe_op *op) {
    fe_peer *p = op->peer;
    fe_hdr h = header(p, op, FE_T_WITHDRAW);
    if (p->state == FE_UP) fe_tell(p->dom, &p->chan, &h, NULL, 0);
}

void fe_taken(fe_peer *p, const fe_hdr *h) {
    if (h->slot >= FE_MSGS || !p->msg[h->slot].op || p->msg[h->slot].seq != h->a) return;
    fe_op *op = p->msg[h->slot].op;
    p->msg[h->slot].op = NULL;
    p->msgs_free |= 1u << h->slot;
    fe_op_end(op, h->status > 0 ? -EPROTO : h->status);
    if (!fe_list_empty(&p->sends)) fe_peer_busy(p);
}

/* ---- receiver ------------------------------------------------------------------------------------ */

static void answer(fe_dom *d, uint32_t number, uint32_t slot, int32_t status) {
    fe_in *in = d->ins[number];
    fe_hdr h = {.magic = FE_MAGIC,
                .type = FE_T_TAKEN,
                .slot = (uint16_t)slot,
                .session = in->theirs,
                .link = in->their_link,
                .a = in->msg[slot].seq,
                .status = status};
    fe_tell(d, &in->dest->chan, &h, NULL, 0);
}

static void over(fe_inmsg *m) {
    if (m->state == FE_IN_HELD) fe_list_del(&m->held);
    free(m->data);
    m->data = NULL;
    m->state = FE_IN_OVER;
}

/* Gives the bytes to a receive: the first that is long enough. */
static int32_t give(fe_dom *d, const uint8_t *data, uint32_t len) {
    for (uint32_t k = d->recv_head; k != d->recv_tail; k++) {
        fe_recv *r = &d->recvs[k & (FE_RECVS - 1)];
        if (r->len < len) continue;
        if (len) memcpy((void *)(uintptr_t)r->addr, data, len);
        fab_wc_push(&d->wcq,
                    &(fab_wc){.kind = FAB_WC_RECV, .id = r->id, .len = len, .count = 1, .peer = FAB_PEER_NONE});
        *r = d->recvs[d->recv_head++ & (FE_RECVS - 1)];
        return 0;
    }
    fab_wc_push(&d->wcq,
                &(fab_wc){.kind = FAB_WC_FAULT, .status = -EMSGSIZE, .len = len, .count = 1, .peer = FAB_PEER_NONE});
    return -EMSGSIZE;
}

static bool ready(const fe_dom *d) { return d->recv_head != d->recv_tail && fe_list_empty(&d->held); }

void fe_in_message(fe_dom *d, uint32_t number, const fe_hdr *h, const uint8_t *data, uint32_t len) {
    fe_in *in = d->ins[number];
    if (h->slot >= FE_MSGS || h->total > FE_MAX_SEND || h->off > h->total || len > h->total - h->off ||
        (len == 0 && h->total)) {
        fe_count(d, FE_R_MALFORMED);
        return;
    }
    fe_inmsg *m = &in->msg[h->slot];
    if (h->a < m->seq || (h->a == m->seq && (m->state != FE_IN_PARTIAL || m->total != h->total)))
        return; /* withdrawn */
    if (h->a > m->seq) {
        over(m);
        m->seq = h->a;
        m->total = h->total;
        m->got = 0;
        if (len == h->total && ready(d) && !in->check) { /* the usual case: straight into a receive */
            answer(d, number, h->slot, give(d, data, len));
            return;
        }
        m->data = calloc(1, h->total ? h->total : 1); /* zeroed: fragments of a liar may leave holes */
        if (!m->data) {
            answer(d, number, h->slot, -ENOMEM);
            return;
        }
        m->state = FE_IN_PARTIAL;
    }
    if (len) memcpy(m->data + h->off, data, len);
    m->got += len;
    if (m->got < m->total) return;
    m->state = FE_IN_HELD;
    m->in = number;
    m->slot = h->slot;
    fe_list_add(&d->held, &m->held);
}

void fe_match(fe_dom *d) {
    for (fe_node *n = d->held.next, *next; n != &d->held && d->recv_head != d->recv_tail; n = next) {
        next = n->next;
        fe_inmsg *m = FE_OF(n, fe_inmsg, held);
        if (d->ins[m->in]->check) continue;
        answer(d, m->in, m->slot, give(d, m->data, m->total));
        over(m);
    }
}

/* This process stood still for longer than peers wait. One that has given us up ended its messages, and none of those may be
 * delivered now; but its goodbye may lie behind them. So each peer is asked first whether the link still stands. */
void fe_in_suspect(fe_dom *d) {
    for (uint32_t i = 0; i < d->max_peers; i++) {
        fe_in *in = d->ins[i];
        if (!in) continue;
        in->check = fe_random() | 1;
        fe_hdr h = {
            .magic = FE_MAGIC, .type = FE_T_CHECK, .session = in->theirs, .link = in->their_link, .a = in->check};
        fe_tell(d, &in->dest->chan, &h, NULL, 0);
    }
}

void fe_in_alive(fe_dom *d, uint32_t number, const fe_hdr *h) {
    if (d->ins[number]->check == h->a) d->ins[number]->check = 0;
}

void fe_in_withdraw(fe_dom *d, uint32_t number, const fe_hdr *h) {
    if (h->slot >= FE_MSGS) {
        fe_count(d, FE_R_MALFORMED);
        return;
    }
    fe_inmsg *m = &d->ins[number]->msg[h->slot];
    if (h->a < m->seq || (h->a == m->seq && m->state == FE_IN_OVER)) return; /* taken: that was answered */
    over(m);
    m->seq = h->a; /* what of it comes later is not taken */
    answer(d, number, h->slot, -ECANCELED);
}

void fe_in_free(fe_dom *d, uint32_t number) {
    fe_in *in = d->ins[number];
    if (!in) return;
    for (uint32_t i = 0; i < FE_MSGS; i++) over(&in->msg[i]);
    fe_mr_forget_in(d, number);
    in->dest->refs--;
    free(in);
    d->ins[number] = NULL;
}

int fe_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    fe_dom *d = ctx;
    fe_lock_politely(d);
    int rc = d->recv_tail - d->recv_head == FE_RECVS ? -EAGAIN : 0;
    if (!rc) d->recvs[d->recv_tail++ & (FE_RECVS - 1)] = (fe_recv){id, addr, len};
    if (!rc && !fe_list_empty(&d->held)) fe_wake(d);
    pthread_mutex_unlock(&d->mu);
    return rc;
}
