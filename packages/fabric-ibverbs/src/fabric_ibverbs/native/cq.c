/* The completion queues, and the loop body of a domain. Whatever a completion says is read after an acquire: the library
 * fences for the device, this is for the rest of us (C10). */
#include "verbs_int.h"

#define BATCH 32
#define MOST (8 * BATCH) /* completions of a queue that one look takes, about */
#define OTHERS_EVERY 4u /* looks, of which one is at the queue for control too */

static void write_cq(fv_dom *d, const struct ibv_wc *w) {
    if (w->status == IBV_WC_SUCCESS) fv_write_done(d, w->wr_id);
    else fv_write_failed(d, w->wr_id, w->status, w->vendor_err);
}

static void imm_cq(fv_dom *d, const struct ibv_wc *w) {
    d->w_posted--;
    if (w->status != IBV_WC_SUCCESS) return; /* a receive that a dying queue pair had taken */
    fv_qp *q = fv_qp_find(d, w->qp_num);
    if (!q || !(w->wc_flags & IBV_WC_WITH_IMM)) {
        fv_count(d, FV_R_STRAY, 1);
        return;
    }
    uint32_t imm = be32toh(w->imm_data);
    fv_link *l = q->link && q->link->w == q ? q->link : NULL;
    if (q->role == FV_W_OUT) {
        if (l) fv_credit_came(l, imm);
        return;
    }
    fab_wc_push(&d->wcq, &(fab_wc){.kind = FAB_WC_IMM, .imm = imm, .count = 1, .peer = FAB_PEER_NONE});
    if (!l || l->state == FV_CUT) return;
    fv_credit_in(l);
    d->capi->heard_in(d->contact, l->id, d->now);
}

static void m_received(fv_dom *d, const struct ibv_wc *w) {
    uint32_t index = fv_index(w->wr_id);
    if (index >= d->nrxs) return;
    fv_qp *q = w->status == IBV_WC_SUCCESS ? fv_qp_find(d, w->qp_num) : NULL;
    fv_link *l = q ? q->link : NULL;
    if (l && l->m == q && l->state != FV_CUT) fv_chan_in(l, d->rxs[index].data, w->byte_len);
    if (fv_mrx_repost(d, index)) d->broken = true; /* one receive less than what peers were told */
}

/* An error of M, or of a credit: the path is lost. */
static void control_failed(fv_dom *d, const struct ibv_wc *w) {
    if (w->status == IBV_WC_WR_FLUSH_ERR) return; /* whoever broke it has seen to the rest */
    fv_count(d, FV_R_CQ_ERRORS, 1);
    fv_qp *q = fv_qp_find(d, w->qp_num);
    if (q && q->link) fv_link_lose(q->link, -ETIMEDOUT);
}

static void credit_left(fv_dom *d, const struct ibv_wc *w) {
    uint32_t index = fv_index(w->wr_id);
    fv_link *l = index < d->links_cap ? d->links[index] : NULL;
    if (!l || l->out || !l->w || l->w->num != (uint32_t)w->wr_id) return; /* of a queue pair that was replaced */
    l->credit_flying = false;
    if (w->status != IBV_WC_SUCCESS) return;
    if (l->credit_due) fv_link_busy(l);
}

static void control_cq(fv_dom *d, const struct ibv_wc *w) {
    uint32_t index = fv_index(w->wr_id), kind = fv_kind(w->wr_id);
    if (w->status != IBV_WC_SUCCESS && (kind == FV_K_MTX || kind == FV_K_CREDIT)) control_failed(d, w);
    switch (kind) {
    case FV_K_MTX: fv_tx_done(d, index, (uint32_t)w->wr_id); break;
    case FV_K_MRX: m_received(d, w); break;
    case FV_K_CREDIT: credit_left(d, w); break;
    case FV_K_UDTX: fv_ud_sent(d, index, w->status == IBV_WC_SUCCESS); break;
    case FV_K_UDRX:
        fv_ud_received(d, index, w->byte_len, w->src_qp, w->status == IBV_WC_SUCCESS);
        d->contact_due = 0;
        break;
    default: fv_count(d, FV_R_STRAY, 1);
    }
}

static uint32_t drain(fv_dom *d, struct ibv_cq *cq, void (*one)(fv_dom *, const struct ibv_wc *), uint32_t cap) {
    struct ibv_wc w[BATCH];
    uint32_t total = 0;
    int n = BATCH;
    while (n == BATCH && fab_wc_ready(&d->wcq) < cap && total < MOST) {
        n = ibv_poll_cq(cq, BATCH, w);
        if (n < 0) {
            d->broken = true;
            break;
        }
        atomic_thread_fence(memory_order_acquire);
        for (int i = 0; i < n; i++) one(d, &w[i]);
        total += (uint32_t)n;
    }
    return total;
}

/* What somebody who opened a link to us says on it. */
static bool said_on_link(fv_dom *d, const struct ibv_wc *w) {
    if (w->status != IBV_WC_SUCCESS || fv_kind(w->wr_id) != FV_K_MRX) return false;
    const fv_qp *q = fv_qp_find(d, w->qp_num);
    return q && q->link && !q->link->out;
}

/* Messages of those who opened links come last. A process that stood still finds there, in the order in which they came, a
 * message and the farewell of its sender, who has given it up since and was told that the message is lost: so the farewell is
 * heard first, and the message goes with its link (C11). */
static uint32_t drain_control(fv_dom *d) {
    struct ibv_wc w[MOST];
    uint32_t n = 0, last = 0;
    for (int got = BATCH; got == BATCH && n < MOST; n += (uint32_t)got) {
        got = ibv_poll_cq(d->mcq, BATCH, w + n);
        if (got < 0) {
            d->broken = true;
            break;
        }
    }
    if (!n) return 0;
    atomic_thread_fence(memory_order_acquire);
    for (uint32_t i = 0; i < n; i++) {
        if (said_on_link(d, &w[i])) w[last++] = w[i];
        else control_cq(d, &w[i]);
    }
    for (uint32_t i = 0; i < last; i++) control_cq(d, &w[i]);
    return n;
}

/* Every immediate that is there. */
void fv_imms_drain(fv_dom *d) {
    while (drain(d, d->rcq, imm_cq, UINT32_MAX) && !d->broken) {
    }
    if (fv_wsrq_fill(d)) d->broken = true;
}

/* All that is there: for who goes to sleep, or closes. */
uint32_t fv_cqs_drain(fv_dom *d, uint32_t cap) {
    uint32_t n = drain(d, d->rcq, imm_cq, cap);
    if (fv_wsrq_fill(d)) d->broken = true;
    n += drain(d, d->scq, write_cq, cap);
    return n + drain_control(d);
}

/* One look of many, which costs as little as it can. An immediate is handed out at once, without a look at anything else: the next
 * one is complete. The queue for writes is empty while none is on its way (scq_used). That for control has its turn every
 * few looks, and first thing after a sleep; nobody sleeps before all three were found empty (op_arm). Returns whether the rest
 * of fv_progress can wait. */
static bool look(fv_dom *d, uint32_t cap) {
    uint32_t n = drain(d, d->rcq, imm_cq, cap);
    if (n && fv_wsrq_top_up(d)) d->broken = true;
    bool enough = n && !d->hurried;
    d->hurried = enough;
    if (enough) return true;
    if (d->scq_used) drain(d, d->scq, write_cq, cap);
    if (++d->looks % OTHERS_EVERY == 0) drain_control(d);
    return false;
}

static void work(fv_dom *d) {
    fv_node now;
    fv_list_init(&now);
    while (!fv_list_empty(&d->busy)) {
        fv_node *n = d->busy.next;
        fv_list_del(n);
        fv_list_add(&now, n);
    }
    while (!fv_list_empty(&now)) fv_chan_work(FV_OF(now.next, fv_link, busy));
}

void fv_progress(fv_dom *d, uint64_t now, uint32_t cap) {
    d->now = now;
    if (look(d, cap)) return;
    fv_dests_look(d);
    if (d->ud_bad) fv_ud_restart(d);
    if (now >= d->contact_due) d->contact_due = d->capi->run(d->contact, now);
    if (!fv_list_empty(&d->held) && d->recv_head != d->recv_tail) fv_match(d);
    if (!fv_list_empty(&d->busy)) work(d);
    if (d->ncut) fv_links_look(d);
    if (!fv_list_empty(&d->grave)) fv_grave_look(d, false);
    if (now >= d->events_due) {
        d->events_due = now + FV_EVENTS_NS;
        fv_events(d);
    }
}

/* After a sleep: whatever ended it, the next look finds it. */
void fv_woken(fv_dom *d) {
    d->looks = OTHERS_EVERY - 1;
    d->hurried = true;
    d->events_due = 0;
}
