/* The life of a transfer: begun, posted, completed; every path to its one end goes through finish() (C1). */
#include "engine_internal.h"

void fab_transfer_free(fab_transfer *t) { fab_pool_free(&t->group->transfers, t); }

void fab_transfer_let_go(fab_transfer *t) {
    fab_engine *e = t->group->engine;
    for (uint32_t i = 0; i < t->nworks; i++) {
        fab_local *local = t->works[i].local;
        fab_remote *remote = t->works[i].remote;
        /* release: our reading of the source is over before the count falls (fab_mem_dereg) */
        if (local) atomic_fetch_sub_explicit(&local->users, 1, memory_order_release);
        if (remote && atomic_fetch_sub_explicit(&remote->users, 1, memory_order_acq_rel) == FAB_DROPPED + 1)
            fab_remote_free(e, remote);
        if (t->op == FAB_OP_SEND) fab_peer_let_go(t->works[i].peer);
    }
    free(t->owned);
    fab_lists_let_go(t->lists);
    t->owned = NULL;
    t->lists = NULL;
}

static void finish(fab_group *g, fab_transfer *t, uint64_t now) {
    fab_engine *e = g->engine;
    uint32_t phase = t->err == 0 ? FAB_DONE : t->err == -ECANCELED ? FAB_CANCELLED : FAB_FAILED;
    fab_timer_remove(g, &t->timer);
    fab_transfer_let_go(t);
    if (phase == FAB_DONE) {
        FAB_COUNT_LOCKED(g->stats.done, 1);
        FAB_COUNT_LOCKED(g->stats.bytes, t->bytes);
        fab_hist_count(g->stats.post_to_done, t->posted_ns, now);
    } else if (phase == FAB_CANCELLED) {
        FAB_COUNT_LOCKED(g->stats.cancelled, 1);
    } else {
        FAB_COUNT_LOCKED(g->stats.failed, 1);
    }
    atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);
    uint64_t flag = t->flag; /* bumped last: who sees it finds the transfer ended */
    uint32_t old = atomic_fetch_or_explicit(&t->state, phase, memory_order_acq_rel);
    if (old & FAB_NOTIFY) fab_event_push(e, &t->event, FAB_EV_TRANSFER);
    if (old & FAB_WAITED) fab_futex_wake_all(&t->state);
    if (old & FAB_RELEASED) fab_transfer_free(t);
    if (flag) fab_flag_bump(flag, phase == FAB_DONE);
}

static void drop_works(fab_transfer *t) {
    for (uint32_t i = 0; i < t->nworks; i++) {
        fab_work *w = &t->works[i];
        if (!fab_linked(&w->link)) continue;
        fab_list_remove(&w->link);
        if (fab_list_empty(&w->peer->queue) && fab_linked(&w->peer->active)) fab_list_remove(&w->peer->active);
    }
    t->works_left = 0;
    t->final_pending = 0;
}

/* NOLINTNEXTLINE(misc-no-recursion): one deep, a transfer that failed is not begun again */
static void end_if_quiet(fab_group *g, fab_transfer *t, uint64_t now) {
    if (t->outstanding || t->works_left) return; /* C7: not while a NIC may read the source */
    if (t->err || !t->final_pending) {
        finish(g, t, now);
        return;
    }
    /* the payload is everywhere: now the immediates of those works that could not carry them, one per logical write */
    t->final_pending = 0;
    for (uint32_t i = 0; i < t->nworks; i++) {
        fab_work *w = &t->works[i];
        if (!w->final_imm) continue;
        uint32_t state = atomic_load_explicit(&w->peer->state, memory_order_relaxed);
        if (state == FAB_PEER_LOST) { /* meanwhile, with nothing of ours in its queue to tell us */
            fab_transfer_fail(g, t, w->peer->status, w->peer->number, -1, now);
            return;
        }
        w->final_imm = 0;
        w->pieces = 1;
        w->units = w->npages;
        w->len = 0;
        w->sidx = w->didx = NULL;
        w->loff = 0;
        for (uint32_t s = 0; s < w->nnics; s++) w->next[s] = s;
        w->posted = 0;
        t->works_left++;
        t->units += w->units;
        fab_list_append(&w->peer->queue, &w->link);
        if (state == FAB_PEER_READY) fab_peer_activate(g, w->peer);
    }
}

void fab_transfer_begin(fab_group *g, fab_transfer *t, uint64_t now) {
    t->works_left = t->nworks;
    for (uint32_t i = 0; i < t->nworks; i++) {
        fab_work *w = &t->works[i];
        w->transfer = t;
        t->units += w->units;
        if (w->final_imm) t->final_pending = 1;
        fab_list_append(&w->peer->queue, &w->link);
        uint32_t state = atomic_load_explicit(&w->peer->state, memory_order_relaxed);
        if (state == FAB_PEER_READY) fab_peer_activate(g, w->peer);
    }
    fab_timer_add(g, &t->timer, FAB_TIMER_TRANSFER, now + t->timeout_ns);
    uint32_t gen = fab_slot_gen(&t->slot);
    for (uint32_t i = 0, n = t->nworks; i < n; i++) {
        fab_peer *peer = t->works[i].peer;
        uint32_t state = atomic_load_explicit(&peer->state, memory_order_relaxed);
        uint32_t alive = atomic_load_explicit(&g->alive, memory_order_relaxed);
        if (state == FAB_PEER_NEW || state == FAB_PEER_LOST) fab_peer_connect(g, peer, now);
        else if (state == FAB_PEER_READY && (alive & ~peer->up || t->works[i].pinned)) fab_peer_mend(g, peer, now);
        else continue;
        /* refused at once: the transfer has failed, and its slot may belong to somebody else by now */
        if (fab_slot_gen(&t->slot) != gen || t->err) return;
    }
    if (t->nworks == 0) end_if_quiet(g, t, now);
}

/* NOLINTNEXTLINE(misc-no-recursion): see end_if_quiet */
void fab_transfer_fail(fab_group *g, fab_transfer *t, int32_t err, uint32_t peer, int32_t nic, uint64_t now) {
    if (!t->err) {
        t->err = err;
        t->err_peer = peer;
        t->err_nic = nic;
    }
    if (peer == FAB_PEER_NONE && t->err_peer == FAB_PEER_NONE) /* a deadline: name a peer that has not taken all */
        for (uint32_t i = 0; i < t->nworks; i++)
            if (fab_linked(&t->works[i].link) || t->nworks == 1) {
                t->err_peer = t->works[i].peer->number;
                break;
            }
    drop_works(t);
    if (t->outstanding && !t->cancelling) {
        t->cancelling = 1;
        uint64_t handle = fab_transfer_handle(t);
        for (uint32_t i = 0; i < g->nnics; i++)
            if (t->at_nic[i]) g->nics[i].ops->cancel(g->nics[i].ctx, handle);
    }
    if (t->outstanding && !fab_linked(&t->timer.link))
        fab_timer_add(g, &t->timer, FAB_TIMER_TRANSFER, now + FAB_CANCEL_GRACE_NS);
    end_if_quiet(g, t, now);
}

void fab_transfer_completed(fab_group *g, fab_transfer *t, uint32_t count, int32_t status, uint32_t peer, int32_t nic,
                            uint64_t now) {
    t->outstanding -= count;
    t->at_nic[nic] -= count;
    g->outstanding -= count;
    if (!status) t->ended += count;
    if (t->err == -ETIME && t->err_peer == FAB_PEER_NONE) { /* of several targets, this one was not done in time */
        t->err_peer = peer;
        t->err_nic = nic;
    }
    if (status && status != -ECANCELED) fab_transfer_fail(g, t, status, peer, nic, now);
    else if (status && !t->err) fab_transfer_fail(g, t, status, peer, nic, now);
    else end_if_quiet(g, t, now);
}

/* The deadline. The second time round the NIC has not let go of a cancelled transfer within the grace: its links to the
 * peers are cut, which ends what they carry. */
void fab_transfer_expire(fab_group *g, fab_transfer *t, uint64_t now) {
    uint32_t gen = fab_slot_gen(&t->slot);
    if (!t->cancelling) {
        fab_transfer_fail(g, t, -ETIME, FAB_PEER_NONE, -1, now);
        return;
    }
    fab_timer_add(g, &t->timer, FAB_TIMER_TRANSFER, now + FAB_CANCEL_GRACE_NS);
    for (uint32_t i = 0, n = t->nworks; i < n; i++) {
        /* cutting a link may end the transfer, and its list of works with it */
        if (fab_slot_gen(&t->slot) != gen || atomic_load_explicit(&t->state, memory_order_relaxed) & FAB_PHASE_MASK)
            return;
        if (atomic_load_explicit(&t->works[i].peer->state, memory_order_relaxed) != FAB_PEER_LOST)
            fab_peer_lose(g, t->works[i].peer, -ETIMEDOUT, -1, now);
    }
}
