/* Opening and closing: engine, groups, and the order in which things end. */
#include "engine_internal.h"

#include <poll.h>
#include <sys/eventfd.h>

fab_engine *fab_engine_new(const fab_engine_cfg *cfg) {
    fab_engine *e = aligned_alloc(FAB_CACHELINE, (sizeof *e + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE);
    if (!e) return NULL;
    memset(e, 0, sizeof *e);
    e->cfg = *cfg;
    pthread_mutex_init(&e->setup, NULL);
    pthread_rwlock_init(&e->domains, NULL);
    if (fab_pool_init(&e->locals, sizeof(fab_local), 1u << 20) ||
        fab_pool_init(&e->remotes, sizeof(fab_remote), 1u << 20) ||
        fab_pool_init(&e->expects, sizeof(fab_waiter), 1u << 20) ||
        fab_pool_init(&e->watchpool, sizeof(fab_watch), 1u << 20) || fab_imm_init(&e->imms, cfg->imm_slots)) {
        free(e);
        return NULL;
    }
    return e;
}

/* What the group touches on its hot path; run by the worker after it is pinned. */
int fab_group_setup(fab_group *g) {
    if (fab_ring_init(&g->ring, FAB_RING_SLOTS)) return -ENOMEM;
    if (fab_pool_init(&g->transfers, sizeof(fab_transfer), 1u << 20)) return -ENOMEM;
    g->peers = calloc(g->engine->cfg.max_peers, sizeof *g->peers);
    if (!g->peers) return -ENOMEM;
    fab_timers_init(g, fab_time(g->engine));
    return 0;
}

int fab_group_open(fab_engine *e, uint32_t nnics, const uint64_t *ops, const uint64_t *ctx, const uint64_t *cpus,
                   int thread) {
    if (!nnics || nnics > FAB_MAX_NICS || e->ngroups >= FAB_MAX_GROUPS) return -EINVAL;
    for (uint32_t i = 0; i < nnics; i++) {
        const fab_domain_ops *table = (const fab_domain_ops *)(uintptr_t)ops[i];
        if (!table || table->abi_version != FAB_ABI_VERSION || table->struct_size < FAB_DOMAIN_OPS_MIN) return -EPROTO;
    }
    fab_group *g = aligned_alloc(FAB_CACHELINE, (sizeof *g + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE);
    if (!g) return -ENOMEM;
    memset(g, 0, sizeof *g);
    g->engine = e;
    g->index = e->ngroups;
    g->nnics = nnics;
    g->efd = -1;
    atomic_init(&g->alive, (1u << nnics) - 1);
    fab_list_init(&g->active);
    fab_list_init(&g->watching);
    fab_list_init(&g->unposted);
    fab_list_init(&g->recvs);
    g->shy = thread == 2;
    memcpy(g->cpus, cpus, sizeof g->cpus);
    int rc = 0;
    for (uint32_t i = 0; i < nnics; i++) {
        fab_nic *nic = &g->nics[i];
        nic->group = g->index;
        nic->index = i;
        nic->batch = FAB_BATCH;
        nic->ops = (const fab_domain_ops *)(uintptr_t)ops[i];
        nic->ctx = (void *)(uintptr_t)ctx[i];
        nic->pages = nic->ops->struct_size >= sizeof(fab_domain_ops) && nic->ops->post_pages;
        if (!rc) rc = nic->ops->caps(nic->ctx, &nic->caps);
        nic->fd = rc ? -1 : nic->ops->wait_fd(nic->ctx);
    }
    g->efd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!rc && g->efd < 0) rc = -errno;
    if (!rc && !thread) rc = fab_group_setup(g);
    if (!rc && thread) {
        rc = -pthread_create(&g->thread, NULL, fab_worker_main, g);
        if (!rc) {
            uint32_t ready;
            while (!(ready = atomic_load_explicit(&g->ready, memory_order_acquire)))
                fab_futex_wait(&g->ready, 0, 100000000ull);
            if (ready == 2) {
                pthread_join(g->thread, NULL);
                rc = -ENOMEM;
            } else {
                g->has_thread = 1;
            }
        }
    }
    if (rc) { /* the domains stay the caller's */
        if (g->efd >= 0) close(g->efd);
        free(g->ring.cells);
        free(g->peers);
        free(g);
        return rc;
    }
    e->groups[g->index] = g;
    e->ngroups++;
    return (int)g->index;
}

int fab_group_caps(fab_engine *e, uint32_t group, uint32_t nic, fab_domain_caps *out) {
    if (group >= e->ngroups || nic >= e->groups[group]->nnics) return -EINVAL;
    *out = e->groups[group]->nics[nic].caps;
    return 0;
}

int fab_group_address(fab_engine *e, uint32_t group, uint32_t nic, char *buf, size_t cap) {
    if (group >= e->ngroups || nic >= e->groups[group]->nnics) return -EINVAL;
    fab_nic *n = &e->groups[group]->nics[nic];
    return atomic_load_explicit(&n->closed, memory_order_acquire) ? -ENETDOWN : n->ops->address(n->ctx, buf, cap);
}

/* ---- closing ---------------------------------------------------------------------------------------- */

static void lock_group(fab_group *g) {
    while (!fab_group_try(g)) sched_yield();
}

/* [lock] every transfer that is not over; those with nothing at a NIC end here and now */
static void cancel_all(fab_group *g, uint64_t now) {
    uint32_t count = atomic_load_explicit(&g->transfers.count, memory_order_acquire);
    for (uint32_t i = 0; i < count; i++) {
        fab_transfer *t = fab_pool_at(&g->transfers, i);
        if (!(fab_slot_gen(&t->slot) & 1u) || atomic_load_explicit(&t->state, memory_order_acquire) & FAB_PHASE_MASK)
            continue;
        if (t->outstanding || t->works_left) fab_transfer_fail(g, t, -ECANCELED, FAB_PEER_NONE, -1, now);
    }
}

static void stop_worker(fab_group *g) {
    if (!g->has_thread) return;
    atomic_store_explicit(&g->stop, 1, memory_order_seq_cst);
    uint64_t one = 1;
    ssize_t rc = write(g->efd, &one, sizeof one);
    (void)rc;
    pthread_join(g->thread, NULL);
    g->has_thread = 0;
}

static bool quiet(const fab_engine *e) {
    return atomic_load_explicit(&((fab_engine *)e)->inflight, memory_order_acquire) == 0;
}

int fab_engine_close(fab_engine *e, uint64_t timeout_ns) {
    if (atomic_exchange_explicit(&e->closed, 1, memory_order_seq_cst)) return 0;
    fab_imm_sweep(e);
    uint64_t until = fab_time(e) + timeout_ns;
    for (uint32_t i = 0; i < e->ngroups; i++) stop_worker(e->groups[i]);
    /* Requests that were on their way are taken, everything is cancelled, and the NICs get time to let go. */
    for (bool first = true; !quiet(e) && (first || fab_time(e) < until); first = false) {
        for (uint32_t i = 0; i < e->ngroups; i++) {
            fab_group *g = e->groups[i];
            lock_group(g);
            uint64_t now = fab_time(e);
            fab_step(g, now);
            cancel_all(g, now);
            fab_group_unlock(g);
        }
        if (!quiet(e)) sched_yield();
    }
    bool clean = quiet(e);
    for (uint32_t i = 0; i < e->ngroups; i++) {
        fab_group *g = e->groups[i];
        lock_group(g); /* kept: nobody steps a closed group */
        while (fab_ring_ready(&g->ring)) fab_step(g, fab_time(e));
        cancel_all(g, fab_time(e));
        pthread_rwlock_wrlock(&e->domains);
        for (uint32_t k = 0; k < g->nnics; k++) {
            fab_nic *nic = &g->nics[k];
            atomic_store_explicit(&nic->down, 1, memory_order_relaxed);
            if (!atomic_exchange_explicit(&nic->closed, 1, memory_order_relaxed))
                nic->ops->close(nic->ctx); /* after this no NIC touches memory */
        }
        pthread_rwlock_unlock(&e->domains);
        uint32_t count = atomic_load_explicit(&g->transfers.count, memory_order_acquire);
        for (uint32_t n = 0; n < count; n++) { /* what a NIC would not let go of is quiet now, by force */
            fab_transfer *t = fab_pool_at(&g->transfers, n);
            for (uint32_t k = 0; k < g->nnics; k++)
                if (fab_slot_gen(&t->slot) & 1u &&
                    !(atomic_load_explicit(&t->state, memory_order_acquire) & FAB_PHASE_MASK) && t->at_nic[k])
                    fab_transfer_completed(g, t, t->at_nic[k], -ECANCELED, FAB_PEER_NONE, (int32_t)k, fab_time(e));
        }
        if (g->index == 0) fab_expect_reap(g);
    }
    fab_watch_stop(e);
    return clean ? 0 : -ETIMEDOUT;
}

void fab_engine_free(fab_engine *e) {
    if (!e) return;
    fab_engine_close(e, 1000000000ull);
    for (uint32_t i = 0; i < e->ngroups; i++) {
        fab_group *g = e->groups[i];
        uint32_t npeers = atomic_load_explicit(&g->npeers, memory_order_acquire);
        for (uint32_t k = 0; k < npeers; k++) {
            fab_peer *peer = fab_peer_slot(g, k);
            for (uint32_t a = 0; a < peer->naddrs; a++) free(peer->addrs[a]);
            free(peer);
        }
        while (!fab_list_empty(&g->recvs)) {
            fab_recv *r = FAB_CONTAINER(g->recvs.next, fab_recv, all);
            fab_list_remove(&r->all);
            free(r);
        }
        close(g->efd);
        free(g->peers);
        free(g->ring.cells);
        fab_pool_fini(&g->transfers);
        free(g);
    }
    uint32_t expects = atomic_load_explicit(&e->expects.count, memory_order_acquire);
    for (uint32_t i = 0; i < expects; i++) {
        fab_waiter *x = fab_pool_at(&e->expects, i);
        if (fab_slot_gen(&x->slot) & 1u) free(x->peers);
    }
    fab_imm_fini(&e->imms);
    fab_pool_fini(&e->locals);
    fab_pool_fini(&e->remotes);
    fab_pool_fini(&e->expects);
    fab_pool_fini(&e->watchpool);
    pthread_mutex_destroy(&e->setup);
    pthread_rwlock_destroy(&e->domains);
    free(e);
}
