/* Credit for immediates. Each takes a receive of the shared queue W, which is posted again when we have seen it; until then the
 * sender may not count on it. So a peer has a window, granted when it connects: it may have as many immediates on their way
 * as we have not told it to have posted again. All windows together fit into the queue, and who would not fit is refused.
 * What was posted again is told after half a window, by a write without a byte whose immediate is the new limit.
 *
 * Windows begin small, since a thousand peers may come, and grow where they are used up while there is room. */
#include "verbs_int.h"

/* Keeps posted what is granted, and a few more. */
int fv_wsrq_fill(fv_dom *d) {
    struct ibv_recv_wr wr[FV_CHAIN], *bad;
    while (d->w_posted < d->w_granted + FV_WSPARE) {
        uint32_t n = d->w_granted + FV_WSPARE - d->w_posted;
        if (n > FV_CHAIN) n = FV_CHAIN;
        for (uint32_t i = 0; i < n; i++)
            wr[i] = (struct ibv_recv_wr){.wr_id = FV_WRID(FV_K_IMM, 0, 0), .next = i + 1 < n ? &wr[i + 1] : NULL};
        if (ibv_post_srq_recv(d->wsrq, wr, &bad)) return -EIO;
        d->w_posted += n;
    }
    return 0;
}

/* The same, some at a time. What is missing meanwhile is not missed: writers are told only of what is posted (fv_credit_return), and
 * the credits of others, which are not told, have the spare ones. */
int fv_wsrq_top_up(fv_dom *d) { return d->w_posted + FV_WTOP_UP <= d->w_granted + FV_WSPARE ? fv_wsrq_fill(d) : 0; }

/* A queue pair that breaks may take a receive with it without a word (software RDMA does, of a refused write with an
 * immediate). So the device tells when half of the spare ones are gone, which cannot happen otherwise. */
int fv_srq_watch(struct ibv_srq *srq, uint32_t spare) {
    struct ibv_srq_attr a = {.srq_limit = spare / 2};
    return fv_ibv.modify_srq(srq, &a, IBV_SRQ_LIMIT);
}

void fv_srq_low(fv_dom *d, const struct ibv_srq *srq) {
    uint32_t n = srq == d->wsrq ? FV_WSPARE / 2 : FV_MSPARE / 2;
    if (srq == d->wsrq) {
        d->w_posted -= n;
        if (fv_wsrq_fill(d)) d->broken = true;
        fv_srq_watch(d->wsrq, FV_WSPARE);
    } else {
        d->m_spare += n;
        fv_mrx_grow(d, d->mrx_posted + n);
        fv_srq_watch(d->msrq, FV_MSPARE);
    }
    fv_count(d, FV_R_LOST_RX, n);
}

static uint32_t room(const fv_dom *d) { return d->wsrq_size - FV_WSPARE - d->w_granted; }

/* For a peer that connects; 0: the queue is full. The caller adds it to w_granted. */
uint32_t fv_window_grant(fv_dom *d) {
    uint32_t n = room(d) / ((d->max_links + 1) / 2); /* of what is left: the last of max_links peers gets some, too */
    if (n > 128) n = 128;
    if (n < FV_WINDOW_MIN) n = FV_WINDOW_MIN;
    return n <= room(d) ? n : 0;
}

/* An immediate of this peer came. */
void fv_credit_in(fv_link *l) {
    l->imm_got++;
    if (l->imm_got - l->imm_told < (l->window + 1) / 2 || l->credit_due) return;
    l->credit_due = true;
    fv_link_busy(l);
}

void fv_credit_return(fv_link *l) {
    fv_dom *d = l->dom;
    if (l->credit_flying || l->state != FV_UP) return; /* once more when this one has left */
    if (l->imm_got - l->imm_told >= l->window / 2 && l->window <= FV_WINDOW_MAX / 2 && room(d) / 8 > l->window) {
        d->w_granted += l->window; /* it uses what it has: twice as much */
        l->window *= 2;
    }
    if (fv_wsrq_fill(d)) d->broken = true; /* what it is told of is posted */
    struct ibv_send_wr wr = {.wr_id = FV_WRID(FV_K_CREDIT, l->index, l->w->num),
                             .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED,
                             .imm_data = htobe32(l->imm_got + l->window)},
                       *bad;
    if (ibv_post_send(l->w->qp, &wr, &bad)) return; /* the queue pair is broken: it is replaced, or the link is lost */
    fv_count(d, FV_R_CREDITS, 1);
    l->imm_told = l->imm_got;
    l->credit_due = false;
    l->credit_flying = true;
}

/* At the sender. Old news may come after a mend: never backwards, never more than the largest window. */
void fv_credit_came(fv_link *l, uint32_t limit) {
    if ((int32_t)(limit - l->imm_limit) > 0 && limit - l->imm_sent <= FV_WINDOW_MAX) l->imm_limit = limit;
}
