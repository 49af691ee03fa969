/* The hot path: requests of the engine become RDMA writes.
 *
 * A reliable queue pair ends its requests in order, so what a link has in flight is a ring, and a completion of one ends all
 * that came before it: only the last of a call, and every FV_SIGNAL-th, asks for one. A request that fails always has a
 * completion, whether it asked or not; then those before it went well. The ring keeps the requests themselves, because
 * those behind a refused one are posted again (mend.c). */
#include "verbs_int.h"

static int32_t errno_of(enum ibv_wc_status s) {
    switch (s) {
    case IBV_WC_REM_ACCESS_ERR: return -EKEYREVOKED;
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR: return -EFAULT;
    case IBV_WC_REM_OP_ERR: return -EREMOTEIO;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR: return -ETIMEDOUT;
    case IBV_WC_WR_FLUSH_ERR: return -ENETDOWN; /* the first bad one: nobody of ours broke this queue pair */
    default: return -EIO;
    }
}

/* No acknowledgement came. The path may be dead, and then the other queue pair and the heartbeats will say so. But the writes
 * may have been executed and their acknowledgements lost; or the first refused and that answer lost, which a queue pair
 * in error does not say again. The other side knows: it is asked, once (mend.c). */
static bool unsure(const fv_link *l, enum ibv_wc_status s) {
    return l->state == FV_UP && s == IBV_WC_RETRY_EXC_ERR && !l->stuck;
}

/* After these it is known that nothing behind the failed request was executed: see mend.c. */
static bool mendable(enum ibv_wc_status s) {
    return s == IBV_WC_REM_ACCESS_ERR || s == IBV_WC_REM_INV_REQ_ERR || s == IBV_WC_REM_OP_ERR ||
           s == IBV_WC_LOC_PROT_ERR || s == IBV_WC_LOC_LEN_ERR || s == IBV_WC_LOC_QP_OP_ERR;
}

/* NICs look at the key of a write that has bytes; one without goes through. */
bool fv_key_dead(const fv_link *l, const fab_wr *w) {
    uint32_t n = l->ndead < FV_DEAD_KEYS ? l->ndead : FV_DEAD_KEYS;
    for (uint32_t i = 0; w->len && i < n; i++)
        if (l->dead_keys[i] == w->remote_key) return true;
    return false;
}

static int refuse(const fv_link *l, const fab_wr *w) {
    const fv_dom *d = l->dom;
    if (w->kind != FAB_WR_WRITE || w->local_addr + w->len < w->local_addr || w->remote_addr + w->len < w->remote_addr)
        return -EINVAL;
    if (w->len > d->port.max_msg_sz) return -EMSGSIZE;
    return fv_key_dead(l, w) ? -EKEYREVOKED : 0;
}

/* Whether one more may be put into the send queue: its ring has room, and the completion queue, where each peer has a share
 * that the others cannot take. */
static bool room(const fv_link *l, uint32_t more) {
    const fv_dom *d = l->dom;
    uint32_t used = l->tail - l->head + more;
    if (used >= d->cfg.depth) return false;
    return used < FV_GUARANTEED || d->scq_used + more < d->scq_size - d->max_links * FV_GUARANTEED;
}

static void build(const fv_link *l, const fab_wr *w, uint32_t seq, struct ibv_send_wr *wr, struct ibv_sge *sge) {
    *sge = (struct ibv_sge){w->local_addr, (uint32_t)w->len, (uint32_t)w->local_key};
    *wr = (struct ibv_send_wr){
        .wr_id = FV_WRID(FV_K_WRITE, l->index, seq),
        .sg_list = sge,
        .num_sge = w->len ? 1 : 0,
        .opcode = w->flags & FAB_WR_IMM ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE,
        .imm_data = htobe32(w->imm),
        .wr.rdma = {w->remote_addr, (uint32_t)w->remote_key},
    };
    if (w->len && w->len <= l->dom->inline_bytes && !(w->local_key & FV_KEY_DEVICE)) wr->send_flags |= IBV_SEND_INLINE;
    if (seq % FV_SIGNAL == FV_SIGNAL - 1) wr->send_flags |= IBV_SEND_SIGNALED;
}

/* How many of these may be posted now; sets *why if the first may not. */
static uint32_t admit(fv_link *l, const fab_wr *wr, uint32_t n, int *why) {
    uint32_t k = 0, imms = 0;
    for (; k < n && wr[k].kind == FAB_WR_WRITE && room(l, k); k++) {
        if (wr[k].flags & FAB_WR_IMM) {
            if ((int32_t)(l->imm_limit - l->imm_sent - imms) <= 0) {
                fv_count(l->dom, FV_R_STALLS, 1);
                break;
            }
            imms++;
        }
        int rc = refuse(l, &wr[k]);
        if (!rc) continue;
        if (!k) *why = rc;
        break;
    }
    return k;
}

/* Posts these, for which there is room. Returns how many the queue pair has taken: fewer only if that cost the link. */
static uint32_t put(fv_link *l, const fab_wr *wr, uint32_t n) {
    fv_dom *d = l->dom;
    struct ibv_send_wr s[FV_CHAIN], *bad = NULL;
    struct ibv_sge sge[FV_CHAIN];
    for (uint32_t done = 0; done < n;) {
        uint32_t m = n - done < d->cfg.chain ? n - done : d->cfg.chain;
        for (uint32_t i = 0; i < m; i++) {
            build(l, &wr[done + i], l->tail + i, &s[i], &sge[i]);
            if (i) s[i - 1].next = &s[i];
            l->ring[(l->tail + i) & (d->cfg.depth - 1)] = wr[done + i];
            if (wr[done + i].flags & FAB_WR_IMM) l->imm_sent++;
        }
        if (done + m == n) s[m - 1].send_flags |= IBV_SEND_SIGNALED;
        l->tail += m;
        d->scq_used += m;
        if (ibv_post_send(l->w->qp, s, &bad)) { /* a defect somewhere: what the queue has of it is cut, C1 holds */
            uint32_t refused = bad ? m - (uint32_t)(bad - s) : 0; /* a driver may not say: then it may have all of it */
            l->tail -= refused;
            d->scq_used -= refused;
            fv_link_lose(l, -EIO);
            return done + m - refused;
        }
        done += m;
    }
    return n;
}

/* Posts a prefix of these and returns how many; a negative errno refuses the first. */
int fv_ring_post(fv_link *l, const fab_wr *wr, uint32_t n) {
    int why = 0;
    n = admit(l, wr, n, &why);
    return n ? (int)put(l, wr, n) : why;
}

/* Posts all of these once more, after a mend. The completion queue has room for them, for they are still counted in scq_used: by
 * a share of their own (room) they must not be measured again, or peers that are busy would leave some of them out. */
void fv_ring_again(fv_link *l, const fab_wr *wr, uint32_t n) {
    fv_dom *d = l->dom;
    d->scq_used -= n;
    uint32_t done = n ? put(l, wr, n) : 0;
    d->scq_used += n - done;
    for (uint32_t i = done; i < n; i++)
        fv_write_end(l, &wr[i], l->status); /* the link is lost, and they with it (C1) */
}

int fv_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    fv_dom *d = ctx;
    fv_link *l = peer < d->npeers ? d->peers[peer] : NULL;
    if (!l || l->closing) return -EINVAL;
    if (l->state == FV_CUT) return -ECONNRESET;
    if (l->state == FV_OPENING) return -ENOTCONN;
    uint32_t k = 0;
    int rc = 0;
    while (k < n && l->state != FV_CUT) {
        if (wr[k].kind == FAB_WR_SEND) {
            rc = fv_send_add(l, &wr[k]);
            if (rc) break;
            k++;
            continue;
        }
        if (l->state != FV_UP || l->nredo) break;
        rc = fv_ring_post(l, wr + k, n - k);
        if (rc <= 0) break;
        k += (uint32_t)rc;
        if (k < n && wr[k].kind == FAB_WR_WRITE) break; /* no room for it now */
    }
    if (l->state != FV_CUT && !fv_list_empty(&l->busy)) fv_chan_work(l);
    return k ? (int)k : rc == -EAGAIN ? 0 : rc;
}

/* ---- completions ------------------------------------------------------------------------------------- */

static fv_link *link_of(fv_dom *d, uint64_t wr_id) {
    uint32_t index = fv_index(wr_id);
    fv_link *l = index < d->links_cap ? d->links[index] : NULL;
    if (l && l->out && (uint32_t)wr_id - l->head < l->tail - l->head) return l;
    fv_count(d, FV_R_STRAY, 1);
    return NULL;
}

void fv_write_end(fv_link *l, const fab_wr *w, int32_t status) {
    l->dom->scq_used--;
    if (status && l->closing) status = -ECANCELED;
    fab_wc_push(&l->dom->wcq, &(fab_wc){.kind = FAB_WC_OP, .id = w->id, .status = status, .peer = l->id, .count = 1});
}

static fab_wr *at(fv_link *l, uint32_t seq) { return &l->ring[seq & (l->dom->cfg.depth - 1)]; }

uint32_t fv_packets(const fv_link *l, const fab_wr *w) {
    return w->len ? (uint32_t)((w->len - 1) >> l->w->mtu_shift) + 1 : 1;
}

/* The oldest ended well. */
static void well(fv_link *l) {
    const fab_wr *w = at(l, l->head++);
    l->psn += fv_packets(l, w);
    l->stuck = false;
    fv_write_end(l, w, 0);
}

/* No sign of life for the contact: the peer's NIC answers for a process that stands still. */
void fv_write_done(fv_dom *d, uint64_t wr_id) {
    fv_link *l = link_of(d, wr_id);
    if (!l) return;
    for (uint32_t stop = (uint32_t)wr_id + 1; l->head != stop;) well(l);
}

void fv_write_failed(fv_dom *d, uint64_t wr_id, enum ibv_wc_status status, uint32_t vendor) {
    (void)vendor;
    fv_link *l = link_of(d, wr_id);
    if (!l) return;
    while (l->head != (uint32_t)wr_id) well(l);
    const fab_wr *w = at(l, l->head++);
    if (status != IBV_WC_WR_FLUSH_ERR) fv_count(d, FV_R_CQ_ERRORS, 1);
    if (l->state == FV_BREAKING && status == IBV_WC_WR_FLUSH_ERR) {
        l->redo[l->nredo++] = *w;
    } else if (l->state == FV_CUT) {
        fv_write_end(l, w, l->status);
    } else if (l->state == FV_UP && mendable(status)) {
        fv_write_end(l, w, errno_of(status));
        l->suspect = status == IBV_WC_REM_ACCESS_ERR ? w->remote_key : 0;
        if (l->suspect) fv_count(d, FV_R_REVOKED, 1);
        l->w->error = true;
        l->state = FV_BREAKING;
    } else if (unsure(l, status)) {
        l->redo[l->nredo++] = *w;
        l->suspect = 0;
        l->w->error = l->unsure = l->stuck = true;
        l->state = FV_BREAKING;
    } else {
        int32_t why = errno_of(status);
        fv_write_end(l, w, why);
        fv_link_lose(l, why);
    }
    if (l->state == FV_BREAKING && l->head == l->tail) fv_mend_begin(l);
}

/* Everything that is left, with the queue pair destroyed (C7). */
void fv_ring_end(fv_link *l, int32_t status) {
    for (; l->head != l->tail; l->head++) fv_write_end(l, at(l, l->head), status);
}

/* Writes that a NIC holds end as they would, or when the link is cut. */
int fv_cancel(void *ctx, uint64_t id) {
    fv_dom *d = ctx;
    for (uint32_t i = 0; i < d->npeers; i++) {
        fv_link *l = d->peers[i];
        if (!l || l->state == FV_CUT) continue;
        if (l->nsends) fv_sends_cancel(l, id);
        if (l->unsure) continue; /* it may have been executed: that is told soon, or the link is cut */
        uint32_t k = 0;
        for (uint32_t r = 0; r < l->nredo; r++) {
            if (l->redo[r].id == id) fv_write_end(l, &l->redo[r], -ECANCELED);
            else l->redo[k++] = l->redo[r];
        }
        l->nredo = k;
    }
    if (fab_wc_ready(&d->wcq)) fv_wake(d);
    return 0;
}
