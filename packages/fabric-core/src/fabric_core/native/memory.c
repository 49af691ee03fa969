/* Registered memory of ours (locals) and of peers (remotes, from descriptors). Set-up, never on the hot path. */
#include "engine_internal.h"

#include <sys/mman.h>

/* [domains] with the first n NICs */
static void deregister(fab_group *g, const fab_local *local, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (!atomic_load_explicit(&g->nics[i].closed, memory_order_relaxed))
            g->nics[i].ops->mr_dereg(g->nics[i].ctx, local->local_key[i]);
}

int64_t fab_mem_reg(fab_engine *e, uint32_t group, const fab_mr *mr, fab_mr_keys *keys) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || mr->addr + mr->len < mr->addr) return -EINVAL;
    if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
    fab_group *g = e->groups[group];
    fab_local *local = fab_pool_alloc(&e->locals);
    if (!local) return -ENOSPC;
    atomic_store_explicit(&local->closing, 0,
                          memory_order_relaxed); /* `users` is never reset: see launch in submit.c */
    local->base = mr->addr;
    local->len = mr->len;
    local->access = mr->access;
    local->group = g;
    pthread_rwlock_rdlock(&e->domains); /* against close */
    int rc = atomic_load_explicit(&e->closed, memory_order_acquire) ? -ESHUTDOWN : 0;
    for (uint32_t i = 0; i < g->nnics && !rc; i++) {
        keys[i] = (fab_mr_keys){0, 0, 0};
        local->local_key[i] = 0;
        if (atomic_load_explicit(&g->nics[i].closed, memory_order_relaxed)) continue; /* broken: nobody gets there */
        rc = g->nics[i].ops->mr_reg(g->nics[i].ctx, mr, &keys[i]);
        if (rc >= 0) {
            local->local_key[i] = keys[i].local_key;
            rc = 0;
        } else {
            deregister(g, local, i);
            break;
        }
    }
    pthread_rwlock_unlock(&e->domains);
    if (rc) {
        fab_pool_free(&e->locals, local);
        return rc;
    }
    return (int64_t)FAB_HANDLE(fab_slot_gen(&local->slot), 0, local->slot.index);
}

/* A range that somebody gave as numbers: a copy from or to a hole in it would end the process. */
int fab_range_mapped(uint64_t addr, uint64_t len) {
    enum { PAGES = 4096 };
    unsigned char in_core[PAGES];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = addr + len;
    for (uint64_t at = addr / page * page; at < end; at += page * PAGES) {
        uint64_t most = (end - at + page - 1) / page;
        if (mincore((void *)(uintptr_t)at, (most < PAGES ? most : PAGES) * page, in_core))
            return 0; /* ENOMEM: a hole */
    }
    return 1;
}

static fab_local *local_get(fab_engine *e, uint64_t handle) {
    return fab_pool_get(&e->locals, (uint32_t)handle, (uint32_t)(handle >> 32));
}

/* New transfers are refused from now on; those in flight are waited for. -EBUSY: they did not end in time, and the
 * memory stays registered (C7: it must not be given back while a NIC reads it). */
int fab_mem_dereg(fab_engine *e, uint64_t handle, uint64_t timeout_ns) {
    fab_local *local = e ? local_get(e, handle) : NULL;
    if (!local) return -EBADF;
    fab_group *g = local->group;
    if (atomic_exchange_explicit(&local->closing, 1, memory_order_seq_cst)) return -EBADF;
    uint64_t until = fab_time(e) + timeout_ns;
    while (atomic_load_explicit(&local->users, memory_order_seq_cst)) {
        if (!fab_group_help(g, false)) sched_yield();
        if (fab_time(e) >= until && atomic_load_explicit(&local->users, memory_order_seq_cst)) {
            atomic_store_explicit(&local->closing, 0, memory_order_seq_cst);
            return -EBUSY;
        }
    }
    pthread_rwlock_rdlock(&e->domains);
    if (!atomic_load_explicit(&e->closed, memory_order_acquire)) deregister(g, local, g->nnics);
    pthread_rwlock_unlock(&e->domains);
    fab_pool_free(&e->locals, local);
    return 0;
}

int64_t fab_remote_add(fab_engine *e, uint32_t group, uint32_t peer, uint64_t len, uint32_t access, uint32_t nkeys,
                       const uint64_t *keys, const uint64_t *bases) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || !nkeys || nkeys > FAB_MAX_NICS) return -EINVAL;
    fab_peer *p = fab_peer_hold(e->groups[group], peer);
    if (!p) return -ESRCH;
    fab_remote *remote = fab_pool_alloc(&e->remotes);
    if (!remote) {
        fab_peer_let_go(p);
        return -ENOSPC;
    }
    atomic_store_explicit(&remote->users, 0, memory_order_relaxed);
    remote->len = len;
    remote->access = access;
    remote->nkeys = nkeys;
    remote->group = e->groups[group];
    remote->peer = p;
    memcpy(remote->key, keys, sizeof *keys * nkeys);
    memcpy(remote->base, bases, sizeof *bases * nkeys);
    return (int64_t)FAB_HANDLE(fab_slot_gen(&remote->slot), 0, remote->slot.index);
}

void fab_remote_free(fab_engine *e, fab_remote *remote) {
    fab_peer_let_go(remote->peer);
    fab_pool_free(&e->remotes, remote);
}

int fab_remote_drop(fab_engine *e, uint64_t handle) {
    fab_remote *remote = e ? fab_pool_get(&e->remotes, (uint32_t)handle, (uint32_t)(handle >> 32)) : NULL;
    if (!remote) return -EBADF;
    if (atomic_fetch_or_explicit(&remote->users, FAB_DROPPED, memory_order_acq_rel) == 0) fab_remote_free(e, remote);
    return 0;
}
