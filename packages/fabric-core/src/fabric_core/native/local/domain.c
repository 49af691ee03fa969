/* domain.c - the table that the engine calls. */
#include "local_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int op_caps(void *ctx, fab_domain_caps *out) {
    (void)ctx;
    *out = (fab_domain_caps){.max_send = FL_MAX_SEND, .numa_node = UINT32_MAX};
    return 0;
}

static int op_address(void *ctx, char *buf, size_t cap) {
    fl_dom *d = ctx;
    int n = snprintf(buf, cap, "%s.%u#%llx", d->node->name, d->nic, (unsigned long long)d->node->inc);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

/* name[.nic][#incarnation] */
static int parse(const char *a, size_t len, char name[FL_NAME_MAX + 1], uint32_t *nic, uint64_t *inc) {
    size_t i = 0;
    *nic = 0;
    *inc = 0;
    for (; i < len && a[i] != '.' && a[i] != '#'; i++) {
        char c = a[i];
        if (i == FL_NAME_MAX ||
            !((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-'))
            return -EINVAL;
        name[i] = c;
    }
    if (!i) return -EINVAL;
    name[i] = 0;
    if (i < len && a[i] == '.') {
        if (++i == len || a[i] < '0' || a[i] >= '0' + (int)FAB_MAX_NICS) return -EINVAL;
        *nic = (uint32_t)(a[i++] - '0');
    }
    if (i == len) return 0;
    if (a[i++] != '#' || i == len || len - i > 16) return -EINVAL;
    for (; i < len; i++) {
        char c = a[i];
        int v = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (v < 0) return -EINVAL;
        *inc = *inc << 4 | (uint64_t)v;
    }
    return 0;
}

static fl_link *out_link(fl_dom *d) {
    fl_link *l = aligned_alloc(64, (sizeof *l + 63) / 64 * 64);
    if (!l) return NULL;
    memset(l, 0, sizeof *l);
    l->dom = d;
    l->node = d->node;
    l->fd = l->pidfd = l->peer_efd = -1;
    fl_ring_init(&l->node_ring);
    l->slots = calloc(FL_SLOTS, sizeof *l->slots);
    l->maps = calloc(FL_MAPS, sizeof *l->maps);
    l->rec[FL_MSG].owner = calloc(FL_MSG_BYTES / FL_UNIT, sizeof(fl_owner));
    l->rec[FL_BNC].owner =
        calloc(FL_BNC_BYTES / FL_UNIT, sizeof(fl_owner));   /* untouched, so unallocated, without bounce */
    if (!l->slots || !l->maps || !l->rec[FL_MSG].owner || !l->rec[FL_BNC].owner) {
        fl_link_free(l);
        return NULL;
    }
    for (uint32_t i = 0; i < FL_SLOTS; i++) l->slots[i].next = i + 1 < FL_SLOTS ? &l->slots[i + 1] : NULL;
    l->free = l->slots;
    return l;
}

static int op_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    fl_dom *d = ctx;
    char name[FL_NAME_MAX + 1];
    uint32_t nic, id = 0;
    uint64_t inc;
    int r = parse(addr, len, name, &nic, &inc);
    if (r) return r;
    if (atomic_load(&d->closed)) return -ENETDOWN;
    if (atomic_load_explicit(&d->node->links_out, memory_order_relaxed) >= d->node->max_links) { /* a count */
        fl_refused(d->node, FL_R_LINKS);
        return -EUSERS;
    }
    while (id < d->npeers && d->peers[id]) id++;
    if (id == d->npeers) {
        uint32_t more = d->npeers ? d->npeers * 2 : 16;
        fl_link **p = realloc(d->peers, more * sizeof *p);
        if (!p) return -ENOMEM;
        memset(p + d->npeers, 0, (more - d->npeers) * sizeof *p);
        d->peers = p;
        d->npeers = more;
    }
    fl_link *l = out_link(d);
    if (!l) return -ENOMEM;
    memcpy(l->peer_name, name, sizeof name);
    l->peer_nic = nic;
    l->want_inc = inc;
    l->id = id;
    d->peers[id] = l;
    *peer = id;
    atomic_fetch_add_explicit(&d->node->links_out, 1,
                              memory_order_relaxed); /* a count; the control thread takes it off */
    pthread_mutex_lock(&d->node->mu);
    l->all = d->node->links;
    d->node->links = l;
    pthread_mutex_unlock(&d->node->mu);
    fl_cmd(l, FL_CMD_MAP);       /* wakes the control thread, which finds a new link */
    return 0;
}

static fl_link *peer(fl_dom *d, uint32_t id) {
    fl_link *l = id < d->npeers ? d->peers[id] : NULL;
    return l && !l->closing ? l : NULL;
}

/* A closed peer's number and memory last until its completions were handed out. */
static void try_release(fl_link *l) {
    if (!l->closing || l->live) return;
    if (!l->broken) {
        l->broken = true;
        fl_cmd(l, FL_CMD_CLOSE);
    }     /* OUT links have no other use for `broken`: told once */
    if (l->used) return;
    l->dom->peers[l->id] = NULL;
    if (l->on_ring) fl_ring_del(&l->node_ring);
    fl_cmd(l, 0);
}

static int op_peer_close(void *ctx, uint32_t id) {
    fl_link *l = peer(ctx, id);
    if (!l) return -EINVAL;
    l->closing = true;
    fl_out_end(l, true, 0, -ECANCELED, l->dead);
    try_release(l);
    return 0;
}

static int refuse(const fab_wr *w) {
    if (w->kind == FAB_WR_SEND) return w->len > FL_MAX_SEND ? -EMSGSIZE : 0;
    if (w->kind != FAB_WR_WRITE || w->local_addr + w->len < w->local_addr || w->remote_addr + w->len < w->remote_addr)
        return -EINVAL;
    return 0;
}

static int op_post(void *ctx, uint32_t id, const fab_wr *wr, uint32_t n) {
    fl_link *l = peer(ctx, id);
    if (!l) return -EINVAL;
    /* Lost, but for what the GPU has in flight: no more is added, or that would never be over. */
    if (l->dead || (l->todo & FL_EV_DOWN)) return l->down_status;
    if (!l->up) return -ENOTCONN;
    bool first = !l->q[FL_Q_WRITE].head;
    uint32_t k = 0;
    for (; k < n && l->free; k++) {
        int r = refuse(&wr[k]);
        if (r && !k) return r;
        if (r) break;
        fl_out_queue(l, &wr[k]);
    }
    /* Small and nothing before it: done here and now, which saves a poll's turn. The rest is left to poll. */
    uint64_t budget = first ? FL_INLINE + FL_WR_COST : 0;
    if (k && !l->dom->rng) fl_out_run(l, &budget, true);
    return (int)k;
}

static int op_post_pages(void *ctx, uint32_t id, const fab_pages *pages) {
    fl_link *l = peer(ctx, id);
    return l && l->up && !l->dead && !(l->todo & FL_EV_DOWN) ? fl_out_pages(l, pages) : -EOPNOTSUPP; /* post says why */
}

static int op_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    fl_dom *d = ctx;
    if (d->recv_tail - d->recv_head == FL_RECVS) return -EAGAIN;
    d->recvs[d->recv_tail++ & (FL_RECVS - 1)] = (fl_recv){id, addr, len};
    return 0;
}

/* ---- poll ------------------------------------------------------------------------------------ */

static uint32_t peer_events(fl_dom *d, fl_link *l, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0;
    l->todo |= atomic_exchange_explicit(&l->ev, 0, memory_order_acquire); /* what the bits refer to is visible */
    if (l->todo & FL_EV_SWEEP)
        for (uint32_t i = 0; i < FL_MAPS; i++) {
            fl_map *e = &l->maps[i];
            if (atomic_load_explicit(&e->state, memory_order_acquire) != FL_MAP_READY) continue;
            if (atomic_load_explicit(&l->ph->mr[(uint32_t)e->key & (FL_MRS - 1)].gen, memory_order_relaxed) ==
                (uint32_t)(e->key >> 32))
                continue;
            if (l->fly.head) continue; /* the GPU may be in it; the next tick asks again */
            atomic_store_explicit(&e->state, FL_MAP_DROP, memory_order_release); /* no copy of ours runs now */
            fl_cmd(l, FL_CMD_MAP);
        }
    l->todo &= ~(uint32_t)FL_EV_SWEEP;
    if ((l->todo & FL_EV_UP) && n < cap) {
        l->up = true;
        l->todo &= ~(uint32_t)FL_EV_UP;
        if (!l->closing) wc[n++] = (fab_wc){.kind = FAB_WC_PEER_UP, .peer = l->id, .count = 1};
    }
    if ((l->todo & FL_EV_DOWN) && l->fly.head) { /* the GPU has not finished what it does there */
        fl_out_end(l, true, 0, l->down_status, false);
        fl_out_reap(l);
    }
    if ((l->todo & FL_EV_DOWN) && !(l->todo & FL_EV_UP) && !l->fly.head && n < cap) {
        l->todo &= ~(uint32_t)FL_EV_DOWN;
        fl_out_reap(l); /* what it had taken before it died counts */
        l->dead = true;
        fl_out_end(l, true, 0, l->down_status, true);
        fl_cmd(l, FL_CMD_CLOSE); /* no copy of ours runs any more */
        if (!l->closing)
            wc[n++] = (fab_wc){.kind = FAB_WC_PEER_DOWN, .status = l->down_status, .peer = l->id, .count = 1};
    }
    if (l->todo) d->ev_again = true;
    if (l->closing) try_release(l);
    return n;
}

static uint32_t events(fl_dom *d, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0;
    /* Acquire: bits set before it was raised are seen below; bits set later raise it again. */
    if (!d->ev_again && !atomic_load_explicit(&d->ev_pending, memory_order_relaxed)) return 0;
    atomic_exchange_explicit(&d->ev_pending, 0, memory_order_acq_rel);
    d->ev_again = false;
    int fault = d->nic == 0 ? atomic_exchange_explicit(&d->node->fault, 0, memory_order_relaxed) : 0;
    if (fault && cap) wc[n++] = (fab_wc){.kind = FAB_WC_FAULT, .status = fault, .count = 1, .peer = FAB_PEER_NONE};
    pthread_mutex_lock(&d->node->mu);
    fl_link *in = d->in_new;
    d->in_new = NULL;
    pthread_mutex_unlock(&d->node->mu);
    for (; in; in = in->in_next) fl_ring_add(&d->ins, &in->node_ring);
    for (fl_ring *r = d->ins.next; r != &d->ins; r = r->next) {
        fl_link *l = FL_LINK_OF(r);
        if (atomic_exchange_explicit(&l->ev, 0, memory_order_acquire) & FL_EV_DOWN)
            l->gone = true; /* acquire: all it published is visible */
    }
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i]) n += peer_events(d, d->peers[i], wc + n, cap - n);
    return n;
}

static uint32_t hand_out(fl_dom *d, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0;
    while (d->done && n < cap) {
        fl_slot *s = d->done;
        fl_link *l = s->link;
        d->done = s->next;
        if (!d->done) d->done_tail = NULL;
        wc[n++] = (fab_wc){.kind = FAB_WC_OP, .id = s->wr.id, .status = s->status, .peer = l->id, .count = s->count};
        fl_slot_release(s);
        if (l->closing) try_release(l);
    }
    return n;
}

static uint32_t work(fl_dom *d, fab_wc *wc, uint32_t cap) {
    uint64_t out = FL_SLICE, in = FL_SLICE;
    uint32_t n = 0, turns = 0;
    fl_ring *end =
        d->active.prev; /* every active link once; the first goes to the back, so that each comes first in turn */
    for (bool last = d->active.next == &d->active; !last && out; turns++) {
        fl_ring *r = d->active.next;
        fl_link *l = FL_LINK_OF(r);
        last = r == end;
        fl_ring_del(r);
        fl_ring_add(&d->active, r);
        fl_out_reap(l);
        if (l->on_ring) fl_out_run(l, &out, false);
        if (l->closing) try_release(l);
    }
    d->flip = !d->flip; /* neither own completions nor arrivals can starve the other, even if cap is 1 */
    if (d->flip) n = hand_out(d, wc, cap);
    n += fl_in_run(d, wc + n, cap - n, &in);
    if (!d->flip) n += hand_out(d, wc + n, cap - n);
    return n;
}

/* The shuffle: requests and completions wait a while (at most 8 polls in a row without any), and go on in random order. */
static uint32_t shuffled(fl_dom *d, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0, r = (uint32_t)(fl_rand(&d->rng) >> 33);
    if ((r & 3) && ++d->stalled < 8) return 0;
    d->stalled = 0;
    d->nheld += work(d, d->held + d->nheld, FL_HOLD - d->nheld);
    for (uint32_t want = d->nheld ? 1 + (r >> 2) % d->nheld : 0; n < cap && n < want; n++) {
        uint32_t i = (uint32_t)(fl_rand(&d->rng) >> 33) % d->nheld;
        wc[n] = d->held[i];
        d->held[i] = d->held[--d->nheld];
    }
    return n;
}

static int op_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns) {
    fl_dom *d = ctx;
    (void)now_ns;
    uint32_t n = events(d, wc, cap);
    n += d->rng ? shuffled(d, wc + n, cap - n) : work(d, wc + n, cap - n);
    return (int)n;
}

static int op_cancel(void *ctx, uint64_t id) {
    fl_dom *d = ctx;
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i] && d->peers[i]->live) fl_out_end(d->peers[i], false, id, -ECANCELED, false);
    return 0;
}

/* ---- sleep ----------------------------------------------------------------------------------- */

static int op_wait_fd(void *ctx) { return ((fl_dom *)ctx)->efd; }

static void set_armed(fl_dom *d, uint64_t a) {
    d->armed = a;
    /* Sleep protocol (channel.h): stored seq_cst before any cursor is read below. */
    atomic_store_explicit(&d->node->hdr->nic[d->nic].armed, a, memory_order_seq_cst);
    for (fl_ring *r = d->active.next; r != &d->active; r = r->next)
        if (FL_LINK_OF(r)->up) atomic_store_explicit(&FL_LINK_OF(r)->ch->want, a, memory_order_seq_cst);
}

static int op_arm(void *ctx, int on) {
    fl_dom *d = ctx;
    uint64_t drained;
    if (!on) {
        if (d->armed) set_armed(d, 0);
        return 0;
    }
    if (read(d->efd, &drained, 8) < 0) drained = 0; /* of an earlier sleep; what it told is found by the looks below */
    set_armed(d, ++d->epoch);
    bool ready = d->done || d->nheld || d->ev_again || atomic_load_explicit(&d->ev_pending, memory_order_seq_cst);
    for (fl_ring *r = d->ins.next; r != &d->ins && !ready; r = r->next) ready = fl_in_ready(FL_LINK_OF(r));
    for (fl_ring *r = d->active.next; r != &d->active && !ready; r = r->next) ready = fl_out_ready(FL_LINK_OF(r));
    if (ready) set_armed(d, 0);
    return ready;
}

static void op_close(void *ctx) {
    fl_dom *d = ctx;
    struct fab_local_node *n = d->node;
    if (n->pid != getpid()) return; /* a forked child: see fl_node_unref */
    fl_gpu_free(d->gpu); /* waits for what it does; first, because it reads and writes what is unpinned next */
    d->gpu = NULL;
    fl_mr_revoke_nic(d); /* from here on no peer writes our memory; and we write none, as no poll runs */
    pthread_mutex_lock(&n->mu);
    fl_link *in = d->in_new;
    d->in_new = NULL;
    pthread_mutex_unlock(&n->mu);
    for (; in; in = in->in_next) fl_ring_add(&d->ins, &in->node_ring);
    while (d->ins.next != &d->ins) {
        fl_link *l = FL_LINK_OF(d->ins.next);
        fl_ring_del(&l->node_ring);
        fl_cmd(l, FL_CMD_CLOSE);
        fl_cmd(l, 0);
    }
    for (uint32_t i = 0; i < d->npeers; i++)
        if (d->peers[i]) {
            fl_link *l = d->peers[i];
            d->peers[i] = NULL;
            if (l->up)
                fl_out_end(l, true, 0, -ECANCELED,
                           false); /* withdraws messages and chunks: nothing arrives after the close */
            fl_cmd(l, FL_CMD_CLOSE);
            fl_cmd(l, 0);
        }
    fl_node_unref(n);
}

/* Refusals are the node's, told by its first NIC alone. */
static int op_counters(void *ctx, fab_counter *out, uint32_t cap) {
    static const char *const names[FL_R_COUNT] = {"auth",  "malformed", "version", "stale", "half_open",
                                                  "links", "uid",       "revoked", "range", "rights"};
    const fl_dom *d = ctx;
    uint32_t n = 0;
    for (; d->nic == 0 && n < FL_R_COUNT && n < cap; n++) {
        memset(out[n].name, 0, sizeof out[n].name);
        snprintf(out[n].name, sizeof out[n].name, "%s", names[n]);
        out[n].value = atomic_load_explicit(&d->node->refused[n], memory_order_relaxed); /* counts */
    }
    return (int)n;
}

static const fab_domain_ops ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = op_caps,
    .address = op_address,
    .mr_reg = fl_mr_reg,
    .mr_dereg = fl_mr_dereg,
    .peer_open = op_peer_open,
    .peer_close = op_peer_close,
    .post = op_post,
    .post_recv = op_post_recv,
    .poll = op_poll,
    .cancel = op_cancel,
    .wait_fd = op_wait_fd,
    .arm = op_arm,
    .close = op_close,
    .counters = op_counters,
    .post_pages = op_post_pages,
};
const fab_domain_ops *fab_local_ops(void) { return &ops; }

int fab_local_peer_path(void *ctx, uint32_t id) {
    fl_dom *d = ctx;
    fl_link *l = peer(d, id);
    if (!l || !l->up) return 0;
    if (l->direct) return FL_PATH_DIRECT;
    if (d->node->path_mode) return (int)d->node->path_mode;
    return l->cma ? FL_PATH_CMA : FL_PATH_BOUNCE;
}
