/* Handing work to the NICs: peers take turns, each NIC has its own cursor into each work, so neither a slow peer nor a
 * full NIC holds up the others (C8). */
#include "engine_internal.h"

#define LOOK_AHEAD 64u /* works of one peer looked at per NIC and turn */

typedef struct batch {
    fab_wr wr[FAB_BATCH];
    fab_work *work[FAB_BATCH];
    uint32_t n;
} batch;

static void gather(const fab_peer *peer, uint32_t nic, batch *b) {
    b->n = 0;
    uint32_t looked = 0;
    for (const fab_link *link = peer->queue.next; link != &peer->queue && b->n < FAB_BATCH && looked < LOOK_AHEAD;
         link = link->next, looked++) {
        fab_work *w = FAB_CONTAINER(link, fab_work, link);
        /* unit u leaves by NIC (nic0 + u) % n: the units of this NIC are those congruent to its distance from nic0 */
        uint32_t n = w->nnics, slot = n == 1 ? 0 : (nic + n - w->nic0) % n;
        if (n == 1 && nic != w->nic0) continue;
        for (uint32_t u = w->next[slot]; u < w->units && b->n < FAB_BATCH; u += n) {
            fab_work_unit(w, u, nic, &b->wr[b->n]);
            b->work[b->n++] = w;
        }
    }
}

static void hist_posted(fab_group *g, fab_transfer *t, uint64_t now) {
    if (t->posted_ns) return;
    t->posted_ns = now;
    fab_hist_count(g->stats.submit_to_post, t->submitted_ns, now);
}

static void account(fab_group *g, fab_peer *peer, uint32_t nic, const batch *b, uint32_t taken, uint64_t now) {
    uint64_t bytes = 0;
    for (uint32_t k = 0; k < taken; k++) {
        fab_work *w = b->work[k];
        uint32_t slot = w->nnics == 1 ? 0 : (nic + w->nnics - w->nic0) % w->nnics;
        w->next[slot] += w->nnics;
        w->transfer->outstanding++;
        bytes += b->wr[k].len;
        hist_posted(g, w->transfer, now);
        if (++w->posted == w->units) {
            fab_list_remove(&w->link);
            w->transfer->works_left--;
        }
    }
    g->outstanding += taken;
    FAB_COUNT(g->stats.wrs, taken);
    FAB_COUNT(peer->nic[nic].ops, taken);
    FAB_COUNT(peer->nic[nic].bytes, bytes);
}

static uint32_t post_peer(fab_group *g, fab_peer *peer, uint64_t now) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        batch b;
        gather(peer, i, &b);
        if (!b.n) continue;
        if (g->nics[i].down) {
            fab_transfer_fail(g, b.work[0]->transfer, -ENETDOWN, peer->index, (int32_t)i, now);
            total++;
            continue;
        }
        int taken = g->nics[i].ops->post(g->nics[i].ctx, peer->nic[i].id, b.wr, b.n);
        if (taken < 0 && taken != -EAGAIN) {
            FAB_COUNT(peer->nic[i].errors, 1);
            fab_transfer_fail(g, b.work[0]->transfer, taken, peer->index, (int32_t)i, now);
            total++;
        } else if (taken > 0) {
            account(g, peer, i, &b, (uint32_t)taken, now);
            total += (uint32_t)taken;
        }
    }
    return total;
}

uint32_t fab_post_all(fab_group *g, uint64_t now) {
    uint32_t total = 0, turns = 0;
    for (const fab_link *link = g->active.next; link != &g->active; link = link->next) turns++;
    while (turns-- && !fab_list_empty(&g->active)) { /* one turn for each peer that has work now */
        fab_link *link = g->active.next;
        fab_peer *peer = FAB_CONTAINER(link, fab_peer, active);
        fab_list_remove(link);
        total += post_peer(g, peer, now);
        if (!fab_list_empty(&peer->queue) && !fab_linked(link) &&
            atomic_load_explicit(&peer->state, memory_order_relaxed) == FAB_PEER_READY)
            fab_list_append(&g->active, link);
    }
    return total;
}
