/* The completion queue, and the loop body of a domain. */
#include "efa_int.h"

#include <stdio.h>

#define BATCH 64

static void imm(fe_dom *d, uint64_t data) {
    d->imms++;
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_IMM, .imm = (uint32_t)data, .count = 1, .peer = FAB_PEER_NONE});
}

/* A receive that the provider gave back: with a datagram, or consumed by an immediate (FI_RX_CQ_DATA). */
static void received(fe_dom *d, fe_buf *b, uint64_t len, uint64_t flags) {
    d->rx_posted--;
    if (flags & FI_REMOTE_CQ_DATA || len < sizeof(fe_hdr) || len > FE_BIG) {
        if (!(flags & FI_REMOTE_CQ_DATA)) fe_count(d, FE_R_MALFORMED);
        fe_buf_put(b);
        return;
    }
    b->len = (uint32_t)len;
    fe_list_add(&d->inbox, &b->node);
}

static void one(fe_dom *d, const struct fi_cq_data_entry *e) {
    if (e->flags & FI_REMOTE_CQ_DATA) imm(d, e->data); /* no other of our operations carries data */
    fe_ctx *ctx = e->op_context;
    if (!ctx || (e->flags & FI_REMOTE_CQ_DATA && !d->rx_cq_data)) return;
    switch (ctx->kind) {
    case FE_CTX_OP: fe_op_flown((fe_op *)ctx, 0); break;
    case FE_CTX_TX: fe_chan_flown(d, (fe_buf *)ctx); break;
    case FE_CTX_RX: received(d, (fe_buf *)ctx, e->len, e->flags); break;
    default: break;
    }
}

static void peer_failed(fe_dom *d, fe_peer *p, int32_t status) {
    if (!p || p->fail || p->state == FE_DEAD) return;
    p->fail = status;
    d->failing = true;
}

static void keep_words(fe_dom *d, const struct fi_cq_err_entry *e, const fe_peer *p, int32_t status) {
    char peer[FE_ADDRESS] = "", words[128] = "", text[FE_WORDS];
    const char *said = fi_cq_strerror(d->cq, e->prov_errno, e->err_data, words, sizeof words);
    if (p) (void)fe_address_text(d, p->dest->name, p->dest->len, p->want_inc, peer, sizeof peer);
    snprintf(text, sizeof text, "%s (%d); the provider %s: %s (%d)", fe_fi.strerror(e->err), e->err,
             d->info->fabric_attr->prov_name, said ? said : words, e->prov_errno);
    fe_words_keep(d->address, peer, status, text);
}

/* Nobody is at this address any more: who is open to it need not wait for the contact to find out. */
static void dest_failed(fe_dom *d, const fe_dest *t) {
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i] && d->peers[i]->dest == t && d->peers[i]->state == FE_UP)
            peer_failed(d, d->peers[i], -ECONNRESET);
}

/* Returns what the request ends with. Where a peer's endpoint is a connection (tcp), an error is the end of it, by whatever
 * number the provider calls that; what it held besides comes back as canceled. Elsewhere operations fail alone, and the
 * contact finds out whether the peer is there. */
static int32_t op_failed(fe_dom *d, fe_peer *p, int32_t status) {
    if (p->state == FE_DEAD) return p->fail; /* we closed its endpoint: for that reason */
    bool alone = status == -EKEYREVOKED || status == -EFAULT || status == -EACCES || status == -EMSGSIZE;
    if (!p->ep || !d->connected || alone) return status;
    peer_failed(d, p, fe_lost(status));
    return p->fail;
}

static void error(fe_dom *d) {
    struct fi_cq_err_entry e = {0};
    if (fi_cq_readerr(d->cq, &e, 0) != 1) return;
    fe_ctx *ctx = e.op_context;
    int32_t status = fe_errno(e.err);
    bool told = e.err != FI_ECANCELED; /* else we asked for it */
    if (told) fe_count(d, FE_R_CQ_ERRORS);
    if (!ctx) return;
    switch (ctx->kind) {
    case FE_CTX_OP: {
        fe_op *op = (fe_op *)ctx;
        if (op->state == FE_OP_FLYING) status = op_failed(d, op->peer, status);
        if (told) keep_words(d, &e, op->peer, status);
        fe_op_flown(op, status);
        break;
    }
    case FE_CTX_TX: {
        fe_buf *b = (fe_buf *)ctx;
        fe_chan *c = b->chan;
        fe_peer *p = c ? c->peer : NULL;
        if (told) keep_words(d, &e, p, fe_lost(status));
        fe_chan_flown(d, b);
        if (p && (status != -ECANCELED || d->connected)) peer_failed(d, p, fe_lost(status));
        if (!p && c && c->dest && status == -ECONNREFUSED) dest_failed(d, c->dest);
        break;
    }
    case FE_CTX_RX:
        d->rx_posted--;
        fe_buf_put((fe_buf *)ctx);
        break;
    default: break;
    }
}

void fe_cq_drain(fe_dom *d) {
    struct fi_cq_data_entry e[BATCH];
    for (int turn = 0; turn < 16; turn++) {
        ssize_t n = fi_cq_read(d->cq, e, BATCH);
        if (n == -FI_EAVAIL) {
            d->events++;
            error(d);
            continue;
        }
        if (n <= 0) return; /* -FI_EAGAIN; anything else is told by the operations that do not end */
        d->events += (uint64_t)n;
        for (ssize_t i = 0; i < n; i++) one(d, &e[i]);
        if (n < BATCH) return;
    }
}

/* Where the processor moves the data, looking takes the very lock (shm) or socket that the sender needs. So while short
 * writes come one after the other, they are left to gather for a moment: both sides then move more. Not if we write in
 * between: then somebody may wait for each. */
static void look(fe_dom *d) {
    if (d->now < d->rest_until) return;
    uint64_t before = d->imms;
    fe_cq_drain(d);
    if (d->imms == before) return;
    bool stream = d->now - d->last_imm < FE_STREAM_NS && d->imms - before < BATCH && !d->answered;
    if (d->gathers && stream) d->rest_until = d->now + FE_REST_NS;
    d->last_imm = d->now;
    d->answered = false;
}

void fe_progress(fe_dom *d, uint64_t now) {
    d->now = now;
    if (d->polled && now > d->polled + d->heartbeat_ns) fe_in_suspect(d);
    d->polled = now;
    look(d);
    bool came = !fe_list_empty(&d->inbox);
    if (came) fe_inbox_run(d);
    if (came || now >= d->contact_due) d->contact_due = d->capi->run(d->contact, now);
    if (d->failing || d->retrying || d->dead) fe_peers_look(d);
    for (fe_node *n = d->busy.next, *next; n != &d->busy; n = next) {
        next = n->next;
        fe_peer_work(FE_OF(n, fe_peer, busy));
    }
    if (!fe_list_empty(&d->held) && d->recv_head != d->recv_tail) fe_match(d);
    if (!fe_list_empty(&d->stuck)) fe_chan_flush(d);
    if (d->rx_posted < d->rx_limit) fe_rx_fill(d);
}
