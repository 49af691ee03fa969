/* in.c - the receiving side: what peers have published in their channels becomes completions. */
#include "local_int.h"

#include <unistd.h>

static bool has_recv(const fl_dom *d) { return d->recv_head != d->recv_tail; }

/* A channel whose cursors make no sense is closed: what it says cannot be used. The peer sees the end of the socket. */
static void broken(fl_link *l) {
    l->broken = true;
    fl_refused(l->node, FL_R_MALFORMED);
    fl_cmd(l, FL_CMD_CLOSE);
}

static uint32_t take_imms(fl_link *l, fab_wc *wc, uint32_t cap) {
    fl_side *s = &l->imm;
    uint64_t avail = fl_avail(s);
    if (avail == UINT64_MAX) {
        broken(l);
        return 0;
    }
    const volatile uint64_t *ring =
        (const volatile uint64_t *)(const void *)s->data; /* the peer's to write: read once */
    uint32_t n = 0;
    bool merge = !l->dom->rng;
    for (; avail; avail--, s->head++) {
        uint64_t entry = ring[s->head & (FL_IMMS - 1)];
        uint32_t imm = (uint32_t)entry, count = (uint32_t)(entry >> 32);
        if (!count || count > FL_IMM_RUN) {
            broken(l);
            break;
        }
        if (merge && n && wc[n - 1].imm == imm) {
            wc[n - 1].count += count; /* of all entries together below 2^32 */
            continue;
        }
        if (n == cap) break;
        wc[n++] = (fab_wc){.kind = FAB_WC_IMM, .imm = imm, .count = count, .peer = FAB_PEER_NONE};
    }
    return n;
}

static bool take_rec(fl_rec *r) {
    /* See fl_out_end: exactly one side gets it. Acquire is not needed for the payload (the tail gave that). */
    uint32_t ready = FL_REC_READY;
    return atomic_compare_exchange_strong_explicit(&r->state, &ready, FL_REC_TAKEN, memory_order_acq_rel,
                                                   memory_order_acquire);
}

static uint32_t take_chunks(fl_link *l, fab_wc *wc, uint32_t cap, uint64_t *budget) {
    fl_dom *d = l->dom;
    fl_side *s = &l->rec[FL_BNC];
    uint64_t avail = fl_avail(s), seq = atomic_load_explicit(&d->busy, memory_order_relaxed);   /* only we write it */
    uint32_t n = 0;
    if (avail == UINT64_MAX) {
        broken(l);
        return 0;
    }
    if (!avail) return 0;
    atomic_store_explicit(&d->busy, seq + 1, memory_order_seq_cst);   /* before a key is looked at: mr.c */
    while (avail && n < cap && *budget) {
        fl_rec c, *r = fl_rec_front(s, avail, &c.total, &c.len);
        if (!r) {
            broken(l);
            break;
        }
        c.addr = r->addr;
        c.key = r->key;
        c.imm = r->imm;
        c.flags = r->flags;
        if (!(c.flags & FL_REC_PAD) && take_rec(r)) {
            uint32_t flags = 0;
            int st = fl_mr_check(l->node->hdr, c.key, d->nic, c.addr, c.len, FL_MR_WRITE, &flags);
            if (!st && c.len && (flags & FL_MR_CUDA))
                st = d->gpu ? fl_gpu_copy_now(d->gpu, (void *)(uintptr_t)c.addr, (char *)r + FL_UNIT, c.len) : -ENXIO;
            else if (!st && c.len) memcpy((void *)(uintptr_t)c.addr, (char *)r + FL_UNIT, c.len);
            r->status = st;
            fl_refused_access(l->node, st);
            if (st) wc[n++] = (fab_wc){.kind = FAB_WC_FAULT, .status = st, .count = 1, .peer = FAB_PEER_NONE};
            else if (c.flags & FL_REC_IMM)
                wc[n++] = (fab_wc){.kind = FAB_WC_IMM, .imm = c.imm, .count = 1, .peer = FAB_PEER_NONE};
            *budget -= *budget < c.len + FL_WR_COST ? *budget : c.len + FL_WR_COST;
        }
        s->head += c.total;
        avail -= c.total;
    }
    atomic_store_explicit(&d->busy, seq + 2, memory_order_release);   /* after the last copy */
    return n;
}

static uint32_t take_msgs(fl_link *l, fab_wc *wc, uint32_t cap) {
    fl_dom *d = l->dom;
    fl_side *s = &l->rec[FL_MSG];
    uint64_t avail = fl_avail(s);
    uint32_t n = 0;
    if (avail == UINT64_MAX) {
        broken(l);
        return 0;
    }
    while (avail && n < cap) {
        uint32_t total, len;
        fl_rec *r = fl_rec_front(s, avail, &total, &len);
        if (!r) {
            broken(l);
            break;
        }
        if (!(r->flags & FL_REC_PAD)) {
            if (!has_recv(d) && atomic_load_explicit(&r->state, memory_order_relaxed) != FL_REC_WITHDRAWN)
                break;   /* waits for a receive */
            if (take_rec(r)) {
                /* the first posted buffer that is long enough: a short one must not stop what fits into another */
                fl_recv *b = &d->recvs[d->recv_head & (FL_RECVS - 1)];
                uint32_t k = d->recv_head;
                while (k != d->recv_tail && d->recvs[k & (FL_RECVS - 1)].len < len) k++;
                if (k != d->recv_tail) {
                    fl_recv fits = d->recvs[k & (FL_RECVS - 1)];
                    d->recvs[k & (FL_RECVS - 1)] = *b;
                    *b = fits;
                }
                if (len > b->len) {
                    r->status = -EMSGSIZE;
                    wc[n++] = (fab_wc){
                        .kind = FAB_WC_FAULT, .status = -EMSGSIZE, .len = len, .count = 1, .peer = FAB_PEER_NONE};
                } else {
                    if (len) memcpy((void *)(uintptr_t)b->addr, (char *)r + FL_UNIT, len);
                    r->status = 0;
                    wc[n++] = (fab_wc){.kind = FAB_WC_RECV, .id = b->id, .len = len, .count = 1, .peer = FAB_PEER_NONE};
                    d->recv_head++;
                }
            }
        }
        s->head += total;
        avail -= total;
    }
    return n;
}

/* Gives room and answers back: release makes our reads of the entries, and the answers, come first; seq_cst for the sleep
 * protocol (channel.h). */
static bool give_back(fl_side *s) {
    if (atomic_load_explicit(s->head_p, memory_order_relaxed) == s->head) return false;   /* only we write it */
    atomic_store_explicit(s->head_p, s->head, memory_order_seq_cst);
    return true;
}

static uint32_t run_link(fl_link *l, fab_wc *wc, uint32_t cap, uint64_t *budget) {
    uint32_t n = 0;
    if (!l->broken) n = take_imms(l, wc, cap);
    if (!l->broken) n += take_chunks(l, wc + n, cap - n, budget);
    if (!l->broken) n += take_msgs(l, wc + n, cap - n);
    bool moved = give_back(&l->imm);
    moved |= give_back(&l->rec[FL_BNC]);
    moved |= give_back(&l->rec[FL_MSG]);
    if (moved) {
        uint64_t w = atomic_load_explicit(&l->ch->want,
                                          memory_order_seq_cst); /* sleep protocol; its sleep's number: wake it once */
        if (w && w != l->woken) {
            l->woken = w;
            ssize_t r = write(l->peer_efd, &(uint64_t){1}, 8);
            (void)r;
        }
    }
    return n;
}

bool fl_in_ready(fl_link *l) {
    if (fl_avail(&l->imm) || fl_avail(&l->rec[FL_BNC]) || l->gone) return true;
    fl_side *s = &l->rec[FL_MSG];
    uint64_t avail = fl_avail(s);
    if (!avail) return false;
    uint32_t total, len;
    fl_rec *r = avail == UINT64_MAX ? NULL : fl_rec_front(s, avail, &total, &len);
    return !r || (r->flags & FL_REC_PAD) || has_recv(l->dom) ||
           atomic_load_explicit(&r->state, memory_order_relaxed) == FL_REC_WITHDRAWN;
}

uint32_t fl_in_run(fl_dom *d, fab_wc *wc, uint32_t cap, uint64_t *budget) {
    uint32_t n = 0;
    fl_ring *first = d->ins.next;
    for (fl_ring *r = first, *next; r != &d->ins && n < cap; r = next) {
        next = r->next;
        fl_link *l = FL_LINK_OF(r);
        n += run_link(l, wc + n, cap - n, budget);
        /* A dead peer: what it published counts, then the channel goes. (Messages nobody posted a receive for do not: their
         * senders were not told that they arrived.) */
        bool drained = !fl_avail(&l->imm) && !fl_avail(&l->rec[FL_BNC]) && (n < cap || !fl_avail(&l->rec[FL_MSG]));
        if (l->broken || (l->gone && drained)) {
            fl_ring_del(r);
            fl_cmd(l, 0);
        }
    }
    if (n == cap && d->ins.next != &d->ins &&
        d->ins.next->next != &d->ins) { /* somebody was cut off: another goes first next time */
        fl_ring *f = d->ins.next;
        fl_ring_del(f);
        fl_ring_add(&d->ins, f);
    }
    return n;
}
