/* Peers: first contact, loss, and coming back (C11). A peer is reached over one path per NIC. A path that is lost (its NIC, a
 * cable, a switch) leaves its work to the others, and is tried again after a while; the peer is lost when its last path
 * is, or when a domain says that the process there is gone. The next submit then tries first contact again. */
#include "engine_internal.h"

#define FIRST_RETRY_NS 250000000ull
#define LAST_RETRY_NS 30000000000ull
#define REMEMBERED \
    512u /* with so many in the table, and half of them lost and unused, new ones take the place of old ones */

fab_peer *fab_peer_slot(fab_group *g, uint32_t slot) {
    if (slot >= atomic_load_explicit(&g->npeers, memory_order_acquire)) return NULL;
    return atomic_load_explicit(&g->peers[slot], memory_order_acquire);
}

fab_peer *fab_peer_at(fab_group *g, uint32_t number) {
    fab_peer *peer = fab_peer_slot(g, number & 0xffffu);
    return peer && atomic_load_explicit(&peer->number, memory_order_acquire) == number ? peer : NULL;
}

void fab_peer_activate(fab_group *g, fab_peer *peer) {
    if (!fab_linked(&peer->active)) fab_list_append(&g->active, &peer->active);
}

static uint32_t alive(const fab_group *g) { return atomic_load_explicit(&g->alive, memory_order_relaxed); }

static bool path_only(int32_t status) {
    return status == -ENETDOWN || status == -ETIMEDOUT || status == -EHOSTUNREACH || status == -ENETUNREACH;
}

static void close_path(fab_group *g, fab_peer *peer, uint32_t nic) {
    uint32_t bit = 1u << nic;
    if (!((peer->opening | peer->up) & bit)) return;
    peer->opening &= ~bit;
    peer->up &= ~bit;
    if (!atomic_load_explicit(&g->nics[nic].closed, memory_order_relaxed))
        g->nics[nic].ops->peer_close(g->nics[nic].ctx, peer->nic[nic].id);
}

static void publish_usable(fab_group *g, fab_peer *peer) {
    uint32_t mask = peer->up ? peer->up : alive(g);
    atomic_store_explicit(&peer->usable, mask ? mask : (1u << g->nnics) - 1, memory_order_relaxed);
}

void fab_peer_lose(fab_group *g, fab_peer *peer, int32_t status, int32_t nic, uint64_t now) {
    peer->status = status;
    peer->lost_ns = now;
    atomic_store_explicit(&peer->state, FAB_PEER_LOST, memory_order_release);
    for (uint32_t i = 0; i < g->nnics; i++) {
        if ((peer->opening | peer->up) >> i & 1) peer->nic[i].status = status;
        close_path(g, peer, i);
    }
    publish_usable(g, peer);
    if (fab_linked(&peer->active)) fab_list_remove(&peer->active);
    while (!fab_list_empty(&peer->queue)) {
        fab_work *w = FAB_CONTAINER(peer->queue.next, fab_work, link);
        fab_transfer_fail(g, w->transfer, status, peer->number, nic, now); /* takes all works of it off their queues */
    }
    fab_expect_peer_lost(g, peer);
    if (!atomic_exchange_explicit(&peer->event_queued, 1, memory_order_acq_rel))
        fab_event_push(g->engine, &peer->event, FAB_EV_PEER_LOST);
}

/* What names a NIC that has no path cannot be carried by another. */
static void fail_pinned(fab_group *g, fab_peer *peer, uint64_t now) {
    uint32_t possible = peer->up | peer->opening;
    for (fab_link *link = peer->queue.next; link != &peer->queue;) {
        fab_work *w = FAB_CONTAINER(link, fab_work, link);
        link = link->next;
        if (!w->pinned || w->nics & possible) continue;
        uint32_t nic = (uint32_t)__builtin_ctz(w->nics);
        int32_t status =
            atomic_load_explicit(&g->nics[nic].down, memory_order_relaxed) ? -ENETDOWN : peer->nic[nic].status;
        fab_transfer_fail(g, w->transfer, status ? status : -ENETDOWN, peer->number, (int32_t)nic, now);
        link = peer->queue.next; /* other works of that transfer left the queue with it */
    }
}

/* A path came up or went down. */
static void settle(fab_group *g, fab_peer *peer, int32_t status, int32_t nic, uint64_t now) {
    uint32_t state = atomic_load_explicit(&peer->state, memory_order_relaxed);
    if (!peer->up && !peer->opening) {
        fab_peer_lose(g, peer, status, nic, now);
        return;
    }
    if (state == FAB_PEER_CONNECTING) {
        if (peer->opening) return; /* wait for all: the first transfers are cut for all of them */
        atomic_store_explicit(&peer->state, FAB_PEER_READY, memory_order_release);
    }
    publish_usable(g, peer);
    fail_pinned(g, peer, now);
    if (peer->up && !fab_list_empty(&peer->queue)) fab_peer_activate(g, peer);
}

/* Returns 0, or why this path cannot even be tried. */
static int open_path(fab_group *g, fab_peer *peer, uint32_t nic) {
    const char *addr = peer->addrs[nic % peer->naddrs];
    peer->nic[nic].former_id = peer->nic[nic].id;
    int rc = g->nics[nic].ops->peer_open(g->nics[nic].ctx, addr, strlen(addr), &peer->nic[nic].id);
    if (rc < 0) {
        peer->nic[nic].status = rc;
        return rc;
    }
    peer->opening |= 1u << nic;
    return 0;
}

void fab_peer_connect(fab_group *g, fab_peer *peer, uint64_t now) {
    atomic_store_explicit(&peer->state, FAB_PEER_CONNECTING, memory_order_release);
    peer->status = 0;
    int32_t status = -ENETDOWN, nic = -1;
    for (uint32_t i = 0; i < g->nnics; i++) {
        if (!(alive(g) >> i & 1)) continue;
        peer->nic[i].backoff = 0;
        int rc = open_path(g, peer, i);
        if (!rc) continue;
        status = rc;
        nic = (int32_t)i;
        if (!path_only(rc)) break;
    }
    if (!peer->opening || (nic >= 0 && !path_only(status))) fab_peer_lose(g, peer, status, nic, now);
}

/* Tries lost paths again, each after its pause. Called when a transfer begins, which may be one that needs a lost path. */
void fab_peer_mend(fab_group *g, fab_peer *peer, uint64_t now) {
    uint32_t lost = alive(g) & ~(peer->up | peer->opening);
    for (uint32_t i = 0; i < g->nnics; i++)
        if (lost >> i & 1 && now >= peer->nic[i].retry_at && open_path(g, peer, i))
            peer->nic[i].retry_at = now + LAST_RETRY_NS;
    fail_pinned(g, peer, now);
}

static fab_peer *find(fab_group *g, uint32_t nic, uint32_t id) {
    uint32_t n = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    for (uint32_t i = 0; i < n; i++) {
        fab_peer *peer = fab_peer_slot(g, i);
        if ((peer->opening | peer->up) >> nic & 1 && peer->nic[nic].id == id) return peer;
    }
    return NULL;
}

static void tell(fab_group *g, fab_peer_nic *path, int32_t status) {
    atomic_store_explicit(&path->told, status, memory_order_seq_cst);
    if (!atomic_exchange_explicit(&path->event_queued, 1, memory_order_acq_rel))
        fab_event_push(g->engine, &path->event, FAB_EV_PATH);
}

void fab_peer_up(fab_group *g, uint32_t nic, uint32_t id, uint64_t now) {
    fab_peer *peer = find(g, nic, id);
    uint32_t bit = 1u << nic;
    if (!peer || !(peer->opening & bit)) return;
    fab_peer_nic *path = &peer->nic[nic];
    peer->opening &= ~bit;
    peer->up |= bit;
    if (path->backoff) tell(g, path, 0);
    path->backoff = 0;
    settle(g, peer, 0, (int32_t)nic, now);
}

void fab_peer_down(fab_group *g, uint32_t nic, uint32_t id, int32_t status, uint64_t now) {
    fab_peer *peer = find(g, nic, id);
    if (!peer) return;
    if (!status) status = -ECONNRESET;
    fab_peer_nic *path = &peer->nic[nic];
    bool was_up = peer->up >> nic & 1;
    path->status = status;
    close_path(g, peer, nic);
    if (!path_only(status)) {
        fab_peer_lose(g, peer, status, (int32_t)nic, now);
        return;
    }
    path->backoff = !path->backoff                      ? FIRST_RETRY_NS
                    : path->backoff < LAST_RETRY_NS / 2 ? path->backoff * 2
                                                        : LAST_RETRY_NS;
    path->retry_at = now + path->backoff;
    if (was_up && alive(g) >> nic & 1 && (peer->up || peer->opening)) tell(g, path, status);
    settle(g, peer, status, (int32_t)nic, now);
}

/* ---- the table of peers ------------------------------------------------------------------------------- */

fab_peer *fab_peer_hold(fab_group *g, uint32_t number) {
    fab_peer *peer = fab_peer_at(g, number);
    if (!peer) return NULL;
    /* counted, then the number is looked at again; who forgets a peer changes the number and then looks at the count */
    atomic_fetch_add_explicit(&peer->users, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&peer->number, memory_order_seq_cst) == number) return peer;
    fab_peer_let_go(peer);
    return NULL;
}

void fab_peer_let_go(fab_peer *peer) { atomic_fetch_sub_explicit(&peer->users, 1, memory_order_release); }

/* [setup] */
static int64_t look_up(fab_group *g, uint32_t n, const char *const *addrs) {
    uint32_t count = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++) {
        fab_peer *peer = fab_peer_slot(g, i);
        bool same = peer->naddrs == n;
        for (uint32_t k = 0; same && k < n; k++) same = strcmp(peer->addrs[k], addrs[k]) == 0;
        if (same) return atomic_load_explicit(&peer->number, memory_order_relaxed);
    }
    return -ENOENT;
}

/* [setup, and lock if somebody may know it] */
static int name_it(fab_peer *peer, uint32_t n, const char *const *addrs) {
    char *copy[FAB_MAX_NICS] = {0};
    for (uint32_t k = 0; k < n; k++)
        if (!(copy[k] = strdup(addrs[k]))) {
            while (k-- > 0) free(copy[k]);
            return -ENOMEM;
        }
    for (uint32_t k = 0; k < peer->naddrs; k++) free(peer->addrs[k]);
    memcpy(peer->addrs, copy, sizeof copy);
    peer->naddrs = n;
    return 0;
}

/* [setup] */
static int64_t append(fab_group *g, uint32_t n, const char *const *addrs) {
    uint32_t slot = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    fab_peer *peer = calloc(1, sizeof *peer);
    if (!peer || name_it(peer, n, addrs)) {
        free(peer);
        return -ENOMEM;
    }
    atomic_init(&peer->number, slot);
    peer->group = g->index;
    for (uint32_t k = 0; k < g->nnics; k++) {
        peer->nic[k].peer = peer;
        peer->nic[k].id = peer->nic[k].former_id = FAB_PEER_NONE;
    }
    fab_list_init(&peer->queue);
    publish_usable(g, peer);
    atomic_store_explicit(&g->peers[slot], peer, memory_order_release);
    atomic_store_explicit(&g->npeers, slot + 1, memory_order_release);
    return slot;
}

static bool forgettable(const fab_group *g, fab_peer *peer) {
    if (atomic_load_explicit(&peer->state, memory_order_relaxed) != FAB_PEER_LOST ||
        atomic_load_explicit(&peer->users, memory_order_seq_cst) ||
        atomic_load_explicit(&peer->event_queued, memory_order_acquire))
        return false;
    for (uint32_t k = 0; k < g->nnics; k++)
        if (atomic_load_explicit(&peer->nic[k].event_queued, memory_order_acquire)) return false;
    return true;
}

/* [lock, setup] Gives the slot of the peer that was lost first to a new one, if `keep` others stay remembered. */
static int64_t replace(fab_group *g, uint32_t n, const char *const *addrs, uint32_t keep) {
    uint32_t count = atomic_load_explicit(&g->npeers, memory_order_relaxed), lost = 0;
    fab_peer *oldest = NULL;
    for (uint32_t i = 0; i < count; i++) {
        fab_peer *peer = fab_peer_slot(g, i);
        if (!forgettable(g, peer)) continue;
        lost++;
        if (!oldest || peer->lost_ns < oldest->lost_ns) oldest = peer;
    }
    if (!oldest || lost <= keep) return -ENOSPC;
    uint32_t old = atomic_load_explicit(&oldest->number, memory_order_relaxed), number = (old + 0x10000u) & INT32_MAX;
    atomic_store_explicit(&oldest->number, number, memory_order_seq_cst);
    int rc = forgettable(g, oldest) ? name_it(oldest, n, addrs) : -ENOSPC; /* see fab_peer_hold */
    if (rc) {
        atomic_store_explicit(&oldest->number, old, memory_order_seq_cst);
        return rc;
    }
    oldest->status = 0;
    for (uint32_t k = 0; k < g->nnics; k++) {
        fab_peer_nic *path = &oldest->nic[k];
        path->status = 0;
        path->id = path->former_id = FAB_PEER_NONE;
        path->retry_at = path->backoff = 0;
        atomic_store_explicit(&path->bytes, 0, memory_order_relaxed);
        atomic_store_explicit(&path->ops, 0, memory_order_relaxed);
        atomic_store_explicit(&path->errors, 0, memory_order_relaxed);
    }
    atomic_store_explicit(&oldest->state, FAB_PEER_NEW, memory_order_release);
    publish_usable(g, oldest);
    return number;
}

int64_t fab_peer_add(fab_engine *e, uint32_t group, uint32_t n, const char *const *addrs) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups || !n || n > FAB_MAX_NICS) return -EINVAL;
    fab_group *g = e->groups[group];
    pthread_mutex_lock(&e->setup);
    int64_t number = look_up(g, n, addrs);
    uint32_t count = atomic_load_explicit(&g->npeers, memory_order_relaxed);
    if (number == -ENOENT && count < REMEMBERED && count < e->cfg.max_peers) number = append(g, n, addrs);
    pthread_mutex_unlock(&e->setup);
    if (number != -ENOENT) return number;

    /* Many are known: is there one to forget? That needs the worker's lock, which comes before `setup`. */
    while (!fab_group_try(g)) {
        if (atomic_load_explicit(&e->closed, memory_order_acquire)) return -ESHUTDOWN;
        sched_yield();
    }
    pthread_mutex_lock(&e->setup);
    number = look_up(g, n, addrs);
    bool full = atomic_load_explicit(&g->npeers, memory_order_relaxed) >= e->cfg.max_peers;
    if (number == -ENOENT) number = replace(g, n, addrs, full ? 0 : REMEMBERED / 2);
    if (number == -ENOSPC && !full) number = append(g, n, addrs);
    pthread_mutex_unlock(&e->setup);
    fab_group_unlock(g);
    return number;
}

int fab_engine_peer_stats(fab_engine *e, uint32_t group, uint32_t number, fab_peer_stats *out) {
    if (!e) return -ESHUTDOWN;
    if (group >= e->ngroups) return -EINVAL;
    fab_group *g = e->groups[group];
    fab_peer *peer = fab_peer_at(g, number);
    if (!peer) return -EINVAL;
    memset(out, 0, sizeof *out);
    out->state = atomic_load_explicit(&peer->state, memory_order_acquire);
    out->nnics = g->nnics;
    out->status = out->state == FAB_PEER_LOST ? peer->status : 0;
    out->up = out->state == FAB_PEER_READY ? atomic_load_explicit(&peer->usable, memory_order_relaxed) : 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        out->bytes[i] = atomic_load_explicit(&peer->nic[i].bytes, memory_order_relaxed);
        out->ops[i] = atomic_load_explicit(&peer->nic[i].ops, memory_order_relaxed);
        out->errors[i] = atomic_load_explicit(&peer->nic[i].errors, memory_order_relaxed);
    }
    return 0;
}
