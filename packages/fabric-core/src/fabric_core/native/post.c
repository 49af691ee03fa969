/* Handing work to the NICs: peers take turns, each NIC has its own cursor into each work, so neither a slow peer nor a
 * full NIC holds up the others (C8). */
#include "engine_internal.h"

#define SMALL_BATCH 8u
#define LOOK_AHEAD 64u /* works of one peer looked at per NIC and turn */

typedef struct batch {
    fab_wr wr[FAB_BATCH];
    fab_work *work[FAB_BATCH];
    uint8_t slot[FAB_BATCH];
    uint32_t n, most;
} batch;

/* Units of a work go round over the NICs of its mask: which share of them is this NIC's? */
static uint32_t slot_of(const fab_work *w, uint32_t nic) {
    if (w->nnics == 1) return 0;
    uint32_t rank = (uint32_t)__builtin_popcount(w->nics & ((1u << nic) - 1));
    return (rank + w->nnics - w->nic0) % w->nnics;
}

static void take(fab_work *w, uint32_t nic, uint32_t slot, batch *b) {
    for (uint32_t u = w->next[slot]; u < w->units && b->n < b->most; u += w->nnics) {
        fab_work_unit(w, u, nic, &b->wr[b->n]);
        b->slot[b->n] = (uint8_t)slot;
        b->work[b->n++] = w;
    }
}

static void gather(const fab_peer *peer, uint32_t nic, batch *b) {
    b->n = 0;
    uint32_t looked = 0;
    for (const fab_link *link = peer->queue.next; link != &peer->queue && b->n < b->most && looked < LOOK_AHEAD;
         link = link->next, looked++) {
        fab_work *w = FAB_CONTAINER(link, fab_work, link);
        if (w->kind == FAB_WR_SEND) { /* the first that is up: a receiver has buffers at each of its NICs */
            if (nic == (uint32_t)__builtin_ctz(peer->up)) take(w, nic, 0, b);
            continue;
        }
        if (w->nics >> nic & 1) take(w, nic, slot_of(w, nic), b);
        uint32_t orphans =
            w->pinned ? 0 : w->nics & ~peer->up; /* shares whose NIC is lost: whoever has room carries them */
        for (; orphans; orphans &= orphans - 1) take(w, nic, slot_of(w, (uint32_t)__builtin_ctz(orphans)), b);
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
        w->next[b->slot[k]] += w->nnics;
        w->transfer->outstanding++;
        w->transfer->at_nic[nic]++;
        bytes += b->wr[k].len;
        hist_posted(g, w->transfer, now);
        if (++w->posted == w->units) {
            fab_list_remove(&w->link);
            w->transfer->works_left--;
        }
    }
    g->outstanding += taken;
    FAB_COUNT_LOCKED(g->stats.wrs, taken);
    FAB_COUNT_LOCKED(peer->nic[nic].ops, taken);
    FAB_COUNT_LOCKED(peer->nic[nic].bytes, bytes);
}

/* The peer's first work as one request, if it is pages and the NIC takes such. Returns how many units it took, 0: it is full;
 * negative: use post. */
static int post_pages(fab_group *g, fab_peer *peer, uint32_t nic, uint64_t now) {
    fab_work *w = FAB_CONTAINER(peer->queue.next, fab_work, link);
    if (!g->nics[nic].pages || fab_list_empty(&peer->queue) || !w->sidx || w->pieces != 1 || !(w->nics >> nic & 1))
        return -1;
    uint32_t slot = slot_of(w, nic), first = w->next[slot], step = w->nnics;
    uint32_t count = first < w->units ? (w->units - first + step - 1) / step : 0, key = nic % w->remote->nkeys;
    if (!count) return -1;
    fab_pages p = {
        .id = fab_transfer_handle(w->transfer),
        .len = w->len,
        .local_addr = w->local->base + w->loff,
        .local_stride = w->sstride,
        .local_key = w->local->local_key[nic],
        .remote_addr = w->remote->base[key] + w->roff,
        .remote_stride = w->dstride,
        .remote_key = w->remote->key[key],
        .local_numbers = w->sidx + first,
        .remote_numbers = w->didx + first,
        .count = count,
        .step = step,
        .imm = w->imm,
        .flags = w->has_imm && !w->final_imm ? FAB_WR_IMM : 0,
    };
    int taken = g->nics[nic].ops->post_pages(g->nics[nic].ctx, peer->nic[nic].id, &p);
    if (taken <= 0) return taken; /* a refusal: post does them one by one, and says which are refused */
    w->next[slot] += (uint32_t)taken * step;
    w->posted += (uint32_t)taken;
    w->transfer->outstanding += (uint32_t)taken;
    w->transfer->at_nic[nic] += (uint32_t)taken;
    hist_posted(g, w->transfer, now);
    if (w->posted == w->units) {
        fab_list_remove(&w->link);
        w->transfer->works_left--;
    }
    g->outstanding += (uint32_t)taken;
    FAB_COUNT_LOCKED(g->stats.wrs, (uint32_t)taken);
    FAB_COUNT_LOCKED(peer->nic[nic].ops, (uint32_t)taken);
    FAB_COUNT_LOCKED(peer->nic[nic].bytes, w->len * (uint32_t)taken);
    return taken;
}

static uint32_t post_peer(fab_group *g, fab_peer *peer, uint64_t now) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        if (!(peer->up >> i & 1)) continue;
        int pages = post_pages(g, peer, i, now);
        if (pages >= 0) {
            total += (uint32_t)pages;
            continue;
        }
        batch b;
        b.most = g->nics[i].batch;
        gather(peer, i, &b);
        if (!b.n) continue;
        int taken = g->nics[i].ops->post(g->nics[i].ctx, peer->nic[i].id, b.wr, b.n);
        if (taken < 0 && taken != -EAGAIN) {
            FAB_COUNT_LOCKED(peer->nic[i].errors, 1);
            fab_transfer_fail(g, b.work[0]->transfer, taken, peer->number, (int32_t)i, now);
            total++;
            continue;
        }
        /* A full NIC takes a few at a time: making many for it each time would be for nothing. */
        uint32_t next = taken == (int)b.n ? b.most * 2 : taken > 0 ? (uint32_t)taken * 2 : 0;
        g->nics[i].batch = next < SMALL_BATCH ? SMALL_BATCH : next < FAB_BATCH ? next : FAB_BATCH;
        if (taken > 0) {
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
    if (!fab_list_empty(
            &g->active)) { /* another peer is first next time, or a full NIC's few places always went to one */
        fab_link *first = g->active.next;
        fab_list_remove(first);
        fab_list_append(&g->active, first);
    }
    return total;
}
