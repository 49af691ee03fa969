/* From a call to a request in the ring: every bound is checked here (C6), so that a bad request never reaches a NIC;
 * and nothing here waits (C8): what does not fit is -EAGAIN. */
#include "engine_internal.h"

int fab_ends_find(fab_engine *e, uint64_t local, uint64_t remote, fab_ends *out) {
    if (!e) return -ESHUTDOWN; /* the child of a fork: base.py takes its engines away */
    out->local = fab_pool_get(&e->locals, (uint32_t)local, (uint32_t)(local >> 32));
    if (!out->local || atomic_load_explicit(&out->local->closing, memory_order_acquire)) return -EBADF;
    out->remote = fab_pool_get(&e->remotes, (uint32_t)remote, (uint32_t)(remote >> 32));
    if (!out->remote) return -ESTALE;
    if (out->local->group != out->remote->group) return -EXDEV;
    if (!(out->remote->access & FAB_ACCESS_REMOTE_WRITE)) return -EACCES;
    return 0;
}

static inline bool inside(uint64_t len, uint64_t off, uint64_t count) { return off <= len && count <= len - off; }

bool fab_imm_ok(int64_t imm) { return imm < 0 || imm >> 29 == 0; }

static int fresh(fab_engine *e, fab_group *g, uint32_t op, uint64_t timeout_ns, uint64_t flag, fab_transfer **out) {
    /* counted first, then `closed` is read; close sets that and then waits for the count to fall to zero */
    uint32_t before = atomic_fetch_add_explicit(&e->inflight, 1, memory_order_seq_cst);
    int rc = atomic_load_explicit(&e->closed, memory_order_seq_cst) ? -ESHUTDOWN
             : before >= e->cfg.max_inflight                        ? -EAGAIN
                                                                    : 0;
    if (rc) {
        atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);
        return rc;
    }
    fab_transfer *t = fab_pool_alloc(&g->transfers);
    if (!t) {
        atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);
        return -EAGAIN;
    }
    atomic_store_explicit(&t->state, 0, memory_order_relaxed);
    t->err = 0;
    t->err_peer = FAB_PEER_NONE;
    t->err_nic = -1;
    t->op = op;
    t->flag = flag;
    fab_flag_hold(flag);
    t->group = g;
    t->submitted_ns = fab_time(e);
    t->posted_ns = t->bytes = 0;
    t->timeout_ns = timeout_ns ? timeout_ns : e->cfg.timeout_ns;
    /* `outstanding`, `works_left` and `at_nic` are 0 since its last owner ended: not written, because a close may look now */
    t->units = t->ended = 0;
    t->final_pending = t->cancelling = 0;
    t->nworks = 1;
    t->works = &t->one;
    t->owned = NULL;
    t->lists = NULL;
    t->timer.link.next = t->timer.link.prev = NULL;
    *out = t;
    return 0;
}

static void unmake(fab_transfer *t) {
    fab_engine *e = t->group->engine;
    fab_transfer_let_go(t);
    fab_flag_let_go(t->flag);
    atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);
    fab_transfer_free(t);
}

static void fill(fab_work *w, const fab_ends *at, uint8_t kind, uint64_t loff, uint64_t roff, uint64_t len,
                 uint32_t npages, int64_t imm) {
    w->link.next = w->link.prev = NULL;
    w->local = at->local;
    w->remote = at->remote;
    w->peer = at->remote ? at->remote->peer : NULL;
    w->loff = loff;
    w->roff = roff;
    w->len = len;
    w->sidx = w->didx = NULL;
    w->npages = npages;
    w->imm = imm < 0 ? 0 : (uint32_t)imm;
    w->has_imm = imm >= 0;
    w->kind = kind;
    if (w->local) atomic_fetch_add_explicit(&w->local->users, 1, memory_order_seq_cst); /* see launch */
    if (w->remote) atomic_fetch_add_explicit(&w->remote->users, 1, memory_order_relaxed); /* its owner holds it now */
}

/* Puts it into the ring, and posts it at once if nobody else steps and the work is short enough for this thread. */
static int64_t launch(fab_engine *e, fab_transfer *t, uint64_t local) {
    fab_group *g = t->group;
    uint64_t handle = fab_transfer_handle(t), bytes = t->bytes, now = t->submitted_ns;
    /* The memory was counted as used after it was looked up; fab_mem_dereg marks it closing and then reads the count.
     * Looked up once more here, so one of the two sees the other. */
    fab_local *source = t->works[0].local;
    if (source && (fab_pool_get(&e->locals, (uint32_t)local, (uint32_t)(local >> 32)) != source ||
                   atomic_load_explicit(&source->closing, memory_order_seq_cst))) {
        unmake(t);
        return -EBADF;
    }
    if (!fab_ring_push(&g->ring, FAB_RQ_TRANSFER, 0, t, 0)) {
        unmake(t);
        return -EAGAIN;
    }
    FAB_COUNT(g->stats.submitted, 1);
    if (bytes <= e->cfg.inline_bytes && !e->cfg.busy && !g->shy && fab_group_try(g)) {
        fab_step_submitted(g, now);
        /* Left to do: something that did not fit, or a completion that nobody asked to be woken for. */
        bool more =
            !fab_list_empty(&g->active) || (g->outstanding && !atomic_load_explicit(&g->armed, memory_order_relaxed));
        fab_group_unlock(g);
        if (!more) return (int64_t)handle;
    }
    /* On few cores, waking the worker beside a thread that polls only takes the core from one of the two, and often from
     * this very call; the poller's next look does the work, and the worker looks within a millisecond (worker.c). */
    if (!e->cfg.hand_over || now - atomic_load_explicit(&g->last_help, memory_order_relaxed) > FAB_POLLER_NEAR_NS)
        fab_group_kick(g);
    return (int64_t)handle;
}

int64_t fab_submit_write(fab_engine *e, uint64_t local, uint64_t loff, uint64_t remote, uint64_t roff, uint64_t len,
                         int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag) {
    fab_ends at;
    int rc = fab_ends_find(e, local, remote, &at);
    if (rc) return rc;
    fab_group *g = at.local->group;
    if (!inside(at.local->len, loff, len) || !inside(at.remote->len, roff, len)) return -ERANGE;
    if (!fab_imm_ok(imm)) return -EINVAL;
    if (nic >= (int32_t)g->nnics) return -ENODEV;
    fab_transfer *t;
    if ((rc = fresh(e, g, FAB_OP_WRITE, timeout_ns, flag, &t))) return rc;
    fill(&t->one, &at, FAB_WR_WRITE, loff, roff, len, 1, imm);
    fab_work_split(&t->one, g, nic, t->slot.index, 1);
    t->bytes = len;
    return launch(e, t, local);
}

int64_t fab_submit_lists(fab_engine *e, uint64_t local, fab_lists *lists, uint64_t sstride, uint64_t soff,
                         uint64_t remote, uint64_t dstride, uint64_t doff, uint64_t page_len, int64_t imm, int32_t nic,
                         uint64_t timeout_ns, uint64_t flag) {
    fab_ends at;
    int rc = fab_ends_find(e, local, remote, &at);
    if (rc) return rc;
    fab_group *g = at.local->group;
    uint32_t npages = lists->npages;
    if (!npages || !fab_imm_ok(imm)) return -EINVAL;
    if (nic >= (int32_t)g->nnics) return -ENODEV;
    if (!fab_lists_inside(lists, &at, sstride, soff, dstride, doff, page_len)) return -ERANGE;
    fab_transfer *t;
    if ((rc = fresh(e, g, FAB_OP_PAGED, timeout_ns, flag, &t))) return rc;
    fab_lists_hold(lists);
    t->lists = lists;
    fab_work *w = &t->one;
    fill(w, &at, FAB_WR_WRITE, soff, doff, page_len, npages, imm);
    w->sidx = lists->numbers;
    w->didx = lists->numbers + npages;
    w->sstride = sstride;
    w->dstride = dstride;
    fab_work_split(w, g, nic, t->slot.index, 1);
    if ((uint64_t)npages * w->pieces > UINT32_MAX) {
        unmake(t);
        return -EINVAL;
    }
    t->bytes = page_len * npages;
    return launch(e, t, local);
}

int64_t fab_submit_paged(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                         uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                         uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag) {
    fab_lists *lists = fab_lists_new(sidx, didx, npages);
    if (!lists) return -ENOMEM;
    int64_t rc =
        fab_submit_lists(e, local, lists, sstride, soff, remote, dstride, doff, page_len, imm, nic, timeout_ns, flag);
    fab_lists_let_go(lists);
    return rc;
}

int64_t fab_submit_many(fab_engine *e, uint32_t op, uint64_t local, const fab_target *targets, uint32_t n, int64_t imm,
                        int32_t nic, uint64_t timeout_ns, uint64_t flag) {
    if (!e) return -ESHUTDOWN;
    if (!n || !fab_imm_ok(imm)) return -EINVAL;
    fab_group *g = NULL;
    fab_local *source = NULL;
    if (op == FAB_OP_SCATTER) {
        source = fab_pool_get(&e->locals, (uint32_t)local, (uint32_t)(local >> 32));
        if (!source || atomic_load_explicit(&source->closing, memory_order_acquire)) return -EBADF;
        g = source->group;
    }
    for (uint32_t i = 0; i < n; i++) {
        const fab_target *to = &targets[i];
        fab_remote *r = fab_pool_get(&e->remotes, (uint32_t)to->remote, (uint32_t)(to->remote >> 32));
        if (!r) return -ESTALE;
        if (!g) g = r->group;
        if (r->group != g) return -EXDEV;
        if (!(r->access & FAB_ACCESS_REMOTE_WRITE)) return -EACCES;
        if (!inside(r->len, to->roff, to->len) || (source && !inside(source->len, to->loff, to->len))) return -ERANGE;
        if (!source && to->len) return -EINVAL;
    }
    if (nic >= (int32_t)g->nnics) return -ENODEV;
    fab_transfer *t;
    int rc = fresh(e, g, op, timeout_ns, flag, &t);
    if (rc) return rc;
    fab_work *works =
        aligned_alloc(FAB_CACHELINE, (sizeof *works * n + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE);
    if (!works) {
        t->nworks = 0;
        unmake(t);
        return -ENOMEM;
    }
    t->owned = t->works = works;
    t->nworks = n;
    for (uint32_t i = 0; i < n; i++) {
        const fab_target *to = &targets[i];
        fab_ends at = {source, fab_pool_at(&e->remotes, (uint32_t)to->remote)};
        fill(&works[i], &at, FAB_WR_WRITE, to->loff, to->roff, to->len, 1, imm);
        fab_work_split(&works[i], g, nic, t->slot.index + i, n);
        t->bytes += to->len;
    }
    return launch(e, t, local);
}

int64_t fab_submit_send(fab_engine *e, uint32_t group, uint32_t peer, const void *msg, uint64_t len,
                        uint64_t timeout_ns, uint64_t flag) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups) return -EINVAL;
    fab_group *g = e->groups[group];
    if (len > g->nics[0].caps.max_send) return -ERANGE;
    fab_peer *p = fab_peer_hold(g, peer); /* until the transfer lets go of it */
    if (!p) return -ESRCH;
    fab_transfer *t;
    int rc = fresh(e, g, FAB_OP_SEND, timeout_ns, flag, &t);
    if (rc) {
        fab_peer_let_go(p);
        return rc;
    }
    fab_ends none = {NULL, NULL};
    fill(&t->one, &none, FAB_WR_SEND, 0, 0, len, 1, -1);
    t->one.peer = p;
    t->owned = malloc(len ? len : 1); /* copied: the caller may reuse its buffer at once */
    if (!t->owned) {
        unmake(t);
        return -ENOMEM;
    }
    memcpy(t->owned, msg, len);
    t->one.loff = (uint64_t)(uintptr_t)t->owned;
    fab_work_split(&t->one, g, -1, 0, 1);
    t->bytes = len;
    return launch(e, t, 0);
}

/* Until a submit that got -EAGAIN may succeed. Blocks, so Python calls it without the GIL. */
int fab_wait_room(fab_engine *e, uint64_t timeout_ns) {
    if (!e) return -ESHUTDOWN;
    uint64_t until = fab_now() + timeout_ns;
    for (uint32_t turn = 0;; turn++) {
        uint32_t did = 0;
        for (uint32_t i = 0; i < e->ngroups; i++) did += fab_group_help(e->groups[i], false);
        if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
        bool room = atomic_load_explicit(&e->inflight, memory_order_relaxed) < e->cfg.max_inflight;
        if (room && (did || turn)) return 0;
        if (fab_now() > until) return -ETIMEDOUT;
        if (!did) {
            struct timespec pause = {0, 20000};
            nanosleep(&pause, NULL);
        }
    }
}
