/* NICs of our own that are lost and come back. What was not yet posted to a lost NIC leaves by the others (post.c); what it
 * held ends as the domain says, naming the NIC: whether it arrived is not known, so it is never sent twice (C4). */
#include "engine_internal.h"

static void tell(fab_group *g, fab_nic *nic) {
    if (!atomic_exchange_explicit(&nic->event_queued, 1, memory_order_acq_rel))
        fab_event_push(g->engine, &nic->event, FAB_EV_NIC);
}

void fab_nic_down(fab_group *g, uint32_t index, int32_t status, uint64_t now) {
    fab_nic *nic = &g->nics[index];
    if (atomic_load_explicit(&nic->down, memory_order_relaxed)) return;
    atomic_store_explicit(&nic->status, status ? status : -ENETDOWN, memory_order_seq_cst);
    atomic_store_explicit(&nic->down, 1, memory_order_relaxed);
    atomic_fetch_and_explicit(&g->alive, ~(1u << index), memory_order_relaxed);
    tell(g, nic);
    uint32_t n = atomic_load_explicit(&g->npeers, memory_order_acquire);
    for (uint32_t i = 0; i < n; i++) {
        fab_peer *peer = fab_peer_slot(g, i);
        if ((peer->opening | peer->up) >> index & 1) fab_peer_down(g, index, peer->nic[index].id, -ENETDOWN, now);
    }
}

void fab_nic_up(fab_group *g, uint32_t index) {
    fab_nic *nic = &g->nics[index];
    if (atomic_load_explicit(&nic->closed, memory_order_relaxed) ||
        !atomic_exchange_explicit(&nic->down, 0, memory_order_relaxed))
        return;
    atomic_fetch_or_explicit(&g->alive, 1u << index, memory_order_relaxed);
    atomic_store_explicit(&nic->status, 0, memory_order_seq_cst);
    tell(g, nic);
    uint32_t n = atomic_load_explicit(&g->npeers, memory_order_acquire);
    for (uint32_t i = 0; i < n; i++) {
        fab_peer_nic *path = &fab_peer_slot(g, i)->nic[index];
        path->retry_at = path->backoff = 0;
    }
}

/* The domain cannot be driven any more. close() is what makes it let go of memory (C7); then what it held can end. */
void fab_nic_broken(fab_group *g, uint32_t index, int32_t status, uint64_t now) {
    fab_nic *nic = &g->nics[index];
    pthread_rwlock_wrlock(&g->engine->domains);
    atomic_store_explicit(&nic->closed, 1, memory_order_relaxed);
    nic->ops->close(nic->ctx);
    pthread_rwlock_unlock(&g->engine->domains);
    fab_nic_down(g, index, status, now);
    uint32_t count = atomic_load_explicit(&g->transfers.count, memory_order_acquire);
    for (uint32_t i = 0; i < count; i++) {
        fab_transfer *t = fab_pool_at(&g->transfers, i);
        if (!(fab_slot_gen(&t->slot) & 1u) || atomic_load_explicit(&t->state, memory_order_acquire) & FAB_PHASE_MASK ||
            !t->at_nic[index])
            continue;
        uint32_t peer = t->nworks == 1 ? t->works[0].peer->number : FAB_PEER_NONE;
        fab_transfer_completed(g, t, t->at_nic[index], -ENETDOWN, peer, (int32_t)index, now);
    }
    fab_recv_take_back(g, index);
}
