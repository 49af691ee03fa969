/* Peers: first contact, loss, and coming back (C11). A peer is lost as a whole: when one NIC's link to it goes down,
 * all its operations end with that reason; the next submit tries first contact again. */
#include "engine_internal.h"

fab_peer *fab_peer_at(fab_group *g, uint32_t index) {
    if (index >= atomic_load_explicit(&g->npeers, memory_order_acquire)) return NULL;
    return atomic_load_explicit(&g->peers[index], memory_order_acquire);
}

void fab_peer_activate(fab_group *g, fab_peer *peer) {
    if (!fab_linked(&peer->active)) fab_list_append(&g->active, &peer->active);
}

static void close_links(fab_group *g, fab_peer *peer) {
    for (uint32_t i = 0; i < g->nnics; i++) {
        if (peer->nic[i].open && !g->nics[i].closed) g->nics[i].ops->peer_close(g->nics[i].ctx, peer->nic[i].id);
        peer->nic[i].open = peer->nic[i].up = 0;
    }
}

void fab_peer_lose(fab_group *g, fab_peer *peer, int32_t status, int32_t nic, uint64_t now) {
    peer->status = status;
    atomic_store_explicit(&peer->state, FAB_PEER_LOST, memory_order_release);
    close_links(g, peer);
    if (fab_linked(&peer->active)) fab_list_remove(&peer->active);
    while (!fab_list_empty(&peer->queue)) {
        fab_work *w = FAB_CONTAINER(peer->queue.next, fab_work, link);
        fab_transfer_fail(g, w->transfer, status, peer->index, nic, now); /* takes all works of it off their queues */
    }
    fab_expect_peer_lost(g, peer);
    if (!atomic_exchange_explicit(&peer->event_queued, 1, memory_order_acq_rel))
        fab_event_push(g->engine, &peer->event, FAB_EV_PEER_LOST);
}

void fab_peer_connect(fab_group *g, fab_peer *peer, uint64_t now) {
    atomic_store_explicit(&peer->state, FAB_PEER_CONNECTING, memory_order_release);
    bool any = false;
    peer->status = 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        const char *addr = peer->addrs[i % peer->naddrs];
        uint32_t id = 0;
        if (g->nics[i].down) continue;
        int rc = g->nics[i].ops->peer_open(g->nics[i].ctx, addr, strlen(addr), &id);
        if (rc < 0) {
            fab_peer_lose(g, peer, rc, (int32_t)i, now);
            return;
        }
        peer->nic[i].id = id;
        peer->nic[i].open = 1;
        peer->nic[i].up = 0;
        any = true;
    }
    if (!any) fab_peer_lose(g, peer, -ENETDOWN, -1, now);
}

static fab_peer *find(fab_group *g, uint32_t nic, uint32_t id) {
    uint32_t n = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    for (uint32_t i = 0; i < n; i++) {
        fab_peer *peer = fab_peer_at(g, i);
        if (peer->nic[nic].open && peer->nic[nic].id == id) return peer;
    }
    return NULL;
}

void fab_peer_up(fab_group *g, uint32_t nic, uint32_t id) {
    fab_peer *peer = find(g, nic, id);
    if (!peer) return;
    peer->nic[nic].up = 1;
    for (uint32_t i = 0; i < g->nnics; i++)
        if (!g->nics[i].down && !peer->nic[i].up) return;
    atomic_store_explicit(&peer->state, FAB_PEER_READY, memory_order_release);
    if (!fab_list_empty(&peer->queue)) fab_peer_activate(g, peer);
}

void fab_peer_down(fab_group *g, uint32_t nic, uint32_t id, int32_t status, uint64_t now) {
    fab_peer *peer = find(g, nic, id);
    if (peer) fab_peer_lose(g, peer, status ? status : -ECONNRESET, (int32_t)nic, now);
}

int64_t fab_peer_add(fab_engine *e, uint32_t group, uint32_t n, const char *const *addrs) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || !n || n > FAB_MAX_NICS) return -EINVAL;
    fab_group *g = e->groups[group];
    pthread_mutex_lock(&e->setup);
    uint32_t count = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    int64_t index = -ENOSPC;
    for (uint32_t i = 0; i < count && index < 0; i++) {
        fab_peer *peer = fab_peer_at(g, i);
        bool same = peer->naddrs == n;
        for (uint32_t k = 0; same && k < n; k++) same = strcmp(peer->addrs[k], addrs[k]) == 0;
        if (same) index = i;
    }
    if (index < 0 && count < e->cfg.max_peers) {
        fab_peer *peer = calloc(1, sizeof *peer);
        bool ok = peer != NULL;
        for (uint32_t k = 0; ok && k < n; k++) ok = (peer->addrs[k] = strdup(addrs[k])) != NULL;
        if (!ok) {
            for (uint32_t k = 0; peer && k < n; k++) free(peer->addrs[k]);
            free(peer);
            index = -ENOMEM;
        } else {
            peer->index = count;
            peer->naddrs = n;
            peer->group = group;
            fab_list_init(&peer->queue);
            atomic_store_explicit(&g->peers[count], peer, memory_order_release);
            atomic_store_explicit(&g->npeers, count + 1, memory_order_release);
            index = count;
        }
    }
    pthread_mutex_unlock(&e->setup);
    return index;
}

int fab_engine_peer_stats(fab_engine *e, uint32_t group, uint32_t index, fab_peer_stats *out) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups) return -EINVAL;
    fab_group *g = e->groups[group];
    fab_peer *peer = fab_peer_at(g, index);
    if (!peer) return -EINVAL;
    memset(out, 0, sizeof *out);
    out->state = atomic_load_explicit(&peer->state, memory_order_acquire);
    out->nnics = g->nnics;
    out->status = out->state == FAB_PEER_LOST ? peer->status : 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        out->bytes[i] = atomic_load_explicit(&peer->nic[i].bytes, memory_order_relaxed);
        out->ops[i] = atomic_load_explicit(&peer->nic[i].ops, memory_order_relaxed);
        out->errors[i] = atomic_load_explicit(&peer->nic[i].errors, memory_order_relaxed);
    }
    return 0;
}
