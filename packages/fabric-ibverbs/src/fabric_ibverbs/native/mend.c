/* A write that the peer's NIC refuses (a revoked key) breaks the queue pair for all. But it tells exactly what happened: what was
 * posted before it is done, what came after it was not executed. So the write fails alone: W is replaced at both ends, agreed
 * over M, and the others are posted again (C4: each is executed once).
 *
 * Where no acknowledgement came at all the writer does not know what was executed. The other end does: its queue pair says
 * which packet it waits for.
 *
 * The NIC does not tell a key that is revoked from a place outside of the registration. The owner does when it is asked to mend: a
 * key that is gone never breaks a queue pair again; a wrong place says nothing about other writes with that key. */
#include "verbs_int.h"

/* [BREAKING, and everything that W held has come back] */
void fv_mend_begin(fv_link *l) {
    fv_dom *d = l->dom;
    uint32_t mtu_shift = l->w->mtu_shift;
    fv_qp_bury(d, l->w);
    l->w = fv_qp_new(l, FV_W_OUT);
    l->state = FV_MENDING;
    fv_hdr h = {.type = FV_T_MEND, .a = l->suspect, .pad = l->unsure ? FV_UNSURE : 0};
    if (l->w) {
        h.off = l->w->num;
        h.total = l->w->psn;
        l->w->mtu_shift = mtu_shift;
    }
    if (!l->w || fv_ctl(l, &h)) fv_link_lose(l, -EIO);
}

/* The PSN that the old W waits for, with FV_REFUSED if it broke by itself. The writer's end is in error, so nothing comes any
 * more: this is the last word. */
static int how_far(fv_qp *w, uint32_t *told) {
    struct ibv_qp_attr a = {0};
    struct ibv_qp_init_attr i;
    if (fv_ibv.query_qp(w->qp, &a, IBV_QP_STATE, &i)) return -EIO;
    bool refused = a.qp_state == IBV_QPS_ERR && !w->error;
    fv_qp_error(w);
    if (fv_ibv.query_qp(w->qp, &a, IBV_QP_RQ_PSN, &i)) return -EIO;
    *told = FV_PSN(a.rq_psn) | (refused ? FV_REFUSED : 0);
    return 0;
}

/* What came on the old W is counted before its successor gets the whole window: the receives that it took are posted again by
 * then. All of it is in the completion queue: it came before the refusal, and the refusal before this. */
void fv_mend_asked(fv_link *l, const fv_hdr *h) {
    fv_dom *d = l->dom;
    uint32_t told = 0;
    if (h->pad & FV_UNSURE && how_far(l->w, &told)) {
        fv_link_lose(l, -EIO);
        return;
    }
    fv_imms_drain(d);
    fv_qp_bury(d, l->w);
    l->w = fv_qp_new(l, FV_W_IN);
    if (!l->w || fv_qp_connect(l->w, &l->theirs, h->off, h->total)) {
        fv_link_lose(l, -EIO);
        return;
    }
    l->imm_got = l->imm_told = 0;
    l->credit_due = l->credit_flying = false;
    fv_hdr r = {.type = FV_T_MENDED, .off = l->w->num, .total = l->w->psn, .a = l->window, .pad = told};
    if (h->a && !fv_mr_known(d, h->a)) r.status = -EKEYREVOKED;
    if (fv_ctl(l, &r)) fv_link_lose(l, -EPROTO);
}

/* [mended, and it was unsure] What the other side told: the PSN that its queue pair waited for, and whether it had refused that.
 * Requests whose packets all came before it are done; the one that it falls into is refused, or executed anew, which places the
 * same bytes again and raises its immediate once: the last packet does that. */
static int settle(fv_link *l, uint32_t told) {
    uint32_t n = 0, all = 0, came = FV_PSN(told - l->psn);
    for (uint32_t i = 0; i < l->nredo; i++) all += fv_packets(l, &l->redo[i]);
    if (came > all || all > FV_PSN(UINT32_MAX) / 2)
        return -EPROTO; /* of what was never sent; more than numbers can tell */
    for (uint32_t i = 0; i < l->nredo; i++) {
        uint32_t p = fv_packets(l, &l->redo[i]);
        if (p <= came) {
            came -= p;
            l->stuck = false;
            fv_write_end(l, &l->redo[i], 0);
        } else if (told & FV_REFUSED) {
            told = 0;
            l->stuck = false;
            came = 0;
            fv_count(l->dom, FV_R_REVOKED, 1);
            fv_write_end(l, &l->redo[i], -EKEYREVOKED);
        } else {
            came = 0;
            l->redo[n++] = l->redo[i];
        }
    }
    l->nredo = n;
    l->unsure = false;
    return 0;
}

/* [mended] Posts again what was behind the refused write, save what has a key that is known to be revoked. All of it fits: it
 * was in ring and completion queue before, and what had an immediate was within a window not larger than this one. */
static void redo(fv_link *l) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->nredo; i++) {
        if (fv_key_dead(l, &l->redo[i])) fv_write_end(l, &l->redo[i], -EKEYREVOKED);
        else l->redo[n++] = l->redo[i];
    }
    l->nredo = 0;
    fv_ring_again(l, l->redo, n);
}

void fv_mended(fv_link *l, const fv_hdr *h) {
    if (l->state != FV_MENDING) return;
    if (l->unsure) fv_count(l->dom, FV_R_ASKED, 1);
    if (l->unsure && settle(l, h->pad)) {
        fv_link_lose(l, -EPROTO);
        return;
    }
    if (fv_qp_connect(l->w, &l->theirs, h->off, h->total)) {
        fv_link_lose(l, -EIO);
        return;
    }
    fv_count(l->dom, FV_R_MENDED, 1);
    l->state = FV_UP;
    l->psn = l->w->psn;
    l->imm_sent = 0;
    l->imm_limit = (uint32_t)h->a;
    if (l->suspect && h->status == -EKEYREVOKED) l->dead_keys[l->ndead++ % FV_DEAD_KEYS] = l->suspect;
    l->suspect = 0;
    redo(l);
}
