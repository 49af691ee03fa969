/* Receive buffers: a rotating pool (paper, section 3). A buffer is posted again when its message has been handled. */
#include "engine_internal.h"

static void forget(fab_engine *e, fab_recv *gone) {
    pthread_mutex_lock(&e->setup);
    fab_list_remove(&gone->all);
    pthread_mutex_unlock(&e->setup);
    free(gone);
}

void fab_recv_post_pending(fab_group *g) {
    fab_nic *nic = &g->nics[0]; /* messages use the first NIC */
    while (!fab_list_empty(&g->unposted)) {
        fab_recv *r = FAB_CONTAINER(g->unposted.next, fab_recv, link);
        if (atomic_load_explicit(&r->closed, memory_order_acquire)) {
            fab_list_remove(&r->link);
            forget(g->engine, r);
            continue;
        }
        if (nic->down || nic->closed) return;
        int rc = nic->ops->post_recv(nic->ctx, (uint64_t)(uintptr_t)r, (uint64_t)(uintptr_t)r->data, r->cap);
        if (rc) return; /* full: tried again at the next step */
        fab_list_remove(&r->link);
    }
}

void fab_recv_done(fab_group *g, uint64_t id, uint64_t len, int32_t status) {
    fab_recv *r = (fab_recv *)(uintptr_t)id;
    if (status) { /* not a message: the buffer goes back, unless the domain is closing */
        if (status != -ECANCELED) {
            fab_list_append(&g->unposted, &r->link);
            FAB_COUNT(g->stats.faults, 1);
            fab_fault(g->engine, status);
        }
        return;
    }
    r->len = len < r->cap ? len : r->cap;
    FAB_COUNT(g->stats.recvs, 1);
    fab_event_push(g->engine, &r->event, FAB_EV_RECV);
}

int fab_recvs_add(fab_engine *e, uint32_t group, uint32_t pool, uint64_t len, uint32_t count) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || !count || len > UINT32_MAX) return -EINVAL;
    if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
    fab_group *g = e->groups[group];
    for (uint32_t i = 0; i < count; i++) {
        size_t size = (sizeof(fab_recv) + len + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE;
        fab_recv *r = aligned_alloc(FAB_CACHELINE, size);
        if (!r) return -ENOMEM;
        memset(r, 0, sizeof *r);
        r->pool = pool;
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
