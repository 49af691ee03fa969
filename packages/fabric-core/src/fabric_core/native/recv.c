/* Receive buffers: a rotating pool (paper, section 3). A buffer is posted again when its message has been handled. */
#include "engine_internal.h"

static void forget(fab_engine *e, fab_recv *gone) {
    pthread_mutex_lock(&e->setup);
    fab_list_remove(&gone->all);
    pthread_mutex_unlock(&e->setup);
    free(gone);
}

/* Messages use the first NIC that is up. Which that is may look different from the sender's side (its first NIC may be lost,
 * or one path between the two), so every other NIC has one spare buffer of each pool. */
static int nic_for(const fab_group *g, const fab_recv *r) {
    uint32_t alive = atomic_load_explicit(&g->alive, memory_order_relaxed);
    if (r->home) return alive >> r->home & 1 ? (int)r->home : -1;
    return alive ? __builtin_ctz(alive) : -1;
}

void fab_recv_post_pending(fab_group *g) {
    uint32_t full = 0;
    for (fab_link *link = g->unposted.next, *next; link != &g->unposted; link = next) {
        next = link->next;
        fab_recv *r = FAB_CONTAINER(link, fab_recv, link);
        if (atomic_load_explicit(&r->closed, memory_order_acquire)) {
            fab_list_remove(&r->link);
            forget(g->engine, r);
            continue;
        }
        int at = nic_for(g, r);
        if (at < 0 || full >> at & 1) continue;
        const fab_nic *nic = &g->nics[at];
        /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fab_list_remove */
        if (nic->ops->post_recv(nic->ctx, (uint64_t)(uintptr_t)r, (uint64_t)(uintptr_t)r->data, r->cap)) {
            full |= 1u << at; /* tried again at the next step */
            if (full == (1u << g->nnics) - 1) return;
            continue;
        }
        r->nic = (uint32_t)at;
        fab_list_remove(&r->link);
    }
}

/* What was posted to a NIC whose domain is closed. */
void fab_recv_take_back(fab_group *g, uint32_t nic) {
    pthread_mutex_lock(&g->engine->setup);
    for (fab_link *link = g->recvs.next; link != &g->recvs; link = link->next) {
        fab_recv *r = FAB_CONTAINER(link, fab_recv, all);
        if (r->nic != nic) continue;
        r->nic = UINT32_MAX;
        fab_list_append(&g->unposted, &r->link);
    }
    pthread_mutex_unlock(&g->engine->setup);
}

void fab_recv_done(fab_group *g, uint64_t id, uint64_t len, int32_t status) {
    fab_recv *r = (fab_recv *)(uintptr_t)id;
    r->nic = UINT32_MAX;
    if (status) { /* not a message: the buffer goes back, unless the domain is closing */
        if (status != -ECANCELED) {
            fab_list_append(&g->unposted, &r->link);
            if (status == -ENETDOWN) return; /* told once, by NIC_DOWN */
            FAB_COUNT(g->stats.faults, 1);
            fab_fault(g->engine, status);
        }
        return;
    }
    r->len = len < r->cap ? len : r->cap;
    FAB_COUNT_LOCKED(g->stats.recvs, 1);
    fab_event_push(g->engine, &r->event, FAB_EV_RECV);
}

int fab_recvs_add(fab_engine *e, uint32_t group, uint32_t pool, uint64_t len, uint32_t count) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || !count || len > UINT32_MAX) return -EINVAL;
    if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
    fab_group *g = e->groups[group];
    for (uint32_t i = 0; i < count + g->nnics - 1; i++) {
        size_t size = (sizeof(fab_recv) + len + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE;
        fab_recv *r = aligned_alloc(FAB_CACHELINE, size);
        if (!r) return -ENOMEM;
        memset(r, 0, sizeof *r);
        r->pool = pool;
        r->home = i < count ? 0 : i - count + 1;
        r->nic = UINT32_MAX;
        r->cap = (uint32_t)len;
        pthread_mutex_lock(&e->setup);
        fab_list_append(&g->recvs, &r->all);
        pthread_mutex_unlock(&e->setup);
        int rc = fab_ring_submit(g, FAB_RQ_RECV, 0, r, 0);
        if (rc) return rc;
    }
    return 0;
}

int fab_recv_return(fab_engine *e, uint32_t group, uint64_t buffer) {
    if (!e || group >= e->ngroups) return -EINVAL;
    fab_recv *r = (fab_recv *)(uintptr_t)buffer;
    if (atomic_load_explicit(&r->closed, memory_order_acquire)) {
        forget(e, r);
        return 0;
    }
    if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
    int rc = fab_ring_submit(e->groups[group], FAB_RQ_RECV, 0, r, 0);
    fab_group_kick(e->groups[group]); /* a message may have waited for this buffer, and nothing else wakes the worker */
    return rc;
}

/* The buffers stay posted at the NIC until a message takes each (there is no way to take one back from every NIC), and are
 * then not posted again. Their messages still come out as events. */
int fab_recvs_close(fab_engine *e, uint32_t group, uint32_t pool) {
    if (!e || group >= e->ngroups) return -EINVAL;
    pthread_mutex_lock(&e->setup);
    fab_link *all = &e->groups[group]->recvs;
    for (fab_link *link = all->next; link != all; link = link->next) {
        fab_recv *r = FAB_CONTAINER(link, fab_recv, all);
        if (r->pool == pool) atomic_store_explicit(&r->closed, 1, memory_order_release);
    }
    pthread_mutex_unlock(&e->setup);
    return 0;
}
