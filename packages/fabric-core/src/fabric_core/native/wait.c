/* Looking at and waiting for transfers and expectations. A waiter helps: it steps the group itself while that brings
 * anything, spins a while, and only then sleeps on the state word, after asking the NICs for wake-ups. */
#include "engine_internal.h"

#define STALE_NS 100000ull /* a poller that has not stepped for so long does, whatever it looks at */

static int phase(uint32_t state) { return (int)(state & FAB_PHASE_MASK); }

static void help_all(fab_engine *e, bool polling) {
    for (uint32_t i = 0; i < e->ngroups; i++) fab_group_help(e->groups[i], polling);
}

/* A waiter that goes to sleep may be who polled a moment ago, or held the lock, and whom the worker has left the work to (few
 * cores): it has it back at once, not a millisecond later. Another thread that polls says so again with its next look. */
static void stop_polling(fab_group *g) {
    if (!g->engine->cfg.hand_over) return;
    if (atomic_load_explicit(&g->last_help, memory_order_relaxed))
        atomic_store_explicit(&g->last_help, 0, memory_order_relaxed);
    if (atomic_load_explicit(&g->deaf, memory_order_relaxed)) fab_group_kick(g);
}

static int wait_state(fab_engine *e, _Atomic uint32_t *state, uint64_t timeout_ns) {
    uint64_t start = fab_now(), until = start + timeout_ns, spin_until = start + e->cfg.spin_ns;
    if (until < start) until = UINT64_MAX;
    for (;;) {
        uint32_t seen = atomic_load_explicit(state, memory_order_acquire), did = 0;
        if (phase(seen)) return phase(seen);
        for (uint32_t i = 0; i < e->ngroups; i++) did += fab_group_help(e->groups[i], false);
        uint64_t now = fab_now();
        if (now >= until) return phase(atomic_load_explicit(state, memory_order_acquire));
        if (did) {
            spin_until = now + e->cfg.spin_ns;
            continue;
        }
        if (now < spin_until) {
            fab_relax();
            continue;
        }
        /* Sleep: say that somebody waits, ask for wake-ups, and look again (the ender sets the phase and then reads
         * the flag, in one exchange). Somebody else holding a group's lock steps it and will look for us. */
        seen = atomic_fetch_or_explicit(state, FAB_WAITED, memory_order_seq_cst) | FAB_WAITED;
        if (phase(seen)) return phase(seen);
        bool quiet = true;
        for (uint32_t i = 0; i < e->ngroups; i++) {
            stop_polling(e->groups[i]);
            quiet = fab_group_arm(e->groups[i]) && quiet;
        }
        /* not quiet: something happened, or somebody else is at work and will wake us if it concerns us */
        uint64_t left = until - now, most = quiet ? 50000000ull : 500000ull;
        fab_futex_wait(state, seen, left < most ? left : most);
        spin_until = fab_now(); /* woken: no second spin */
    }
}

/* A program that finds everything done polls all the same: it must count as a poller, and now and then do its part. */
static void keep_polling(fab_group *g) {
    if (!g->engine->cfg.hand_over) return;
    if (fab_time(g->engine) - atomic_load_explicit(&g->last_help, memory_order_relaxed) > STALE_NS)
        fab_group_help(g, true);
}

int fab_transfer_poll(fab_engine *e, uint64_t handle) {
    fab_transfer *t = fab_transfer_get(e, handle);
    if (!t) return -EBADF;
    int now = phase(atomic_load_explicit(&t->state, memory_order_acquire));
    if (now) {
        keep_polling(t->group);
        return now;
    }
    fab_group_help(t->group, true);
    return phase(atomic_load_explicit(&t->state, memory_order_acquire));
}

int fab_transfer_wait(fab_engine *e, uint64_t handle, uint64_t timeout_ns) {
    fab_transfer *t = fab_transfer_get(e, handle);
    return t ? wait_state(e, &t->state, timeout_ns) : -EBADF;
}

int fab_expect_poll(fab_engine *e, uint64_t handle) {
    fab_waiter *x = fab_expect_get(e, handle);
    if (!x) return -EBADF;
    int now = phase(atomic_load_explicit(&x->state, memory_order_acquire));
    if (now) return now;
    help_all(e, true);
    return phase(atomic_load_explicit(&x->state, memory_order_acquire));
}

int fab_expect_wait(fab_engine *e, uint64_t handle, uint64_t timeout_ns) {
    fab_waiter *x = fab_expect_get(e, handle);
    return x ? wait_state(e, &x->state, timeout_ns) : -EBADF;
}

int fab_progress(fab_engine *e) {
    uint32_t did = 0;
    for (uint32_t i = 0; e && i < e->ngroups; i++) did += fab_group_help(e->groups[i], true);
    return (int)did;
}

int fab_transfer_outcome(fab_engine *e, uint64_t handle, fab_outcome *out) {
    fab_transfer *t = fab_transfer_get(e, handle);
    if (!t) return -EBADF;
    out->phase = (uint32_t)phase(atomic_load_explicit(&t->state, memory_order_acquire));
    out->err = out->phase ? t->err : 0;
    out->peer = out->phase ? t->err_peer : FAB_PEER_NONE;
    out->nic = out->phase ? t->err_nic : -1;
    out->op = t->op;
    out->ended = out->phase ? t->ended : 0;
    out->units = out->phase ? t->units : 0;
    return 0;
}

int fab_transfer_notify(fab_engine *e, uint64_t handle) {
    fab_transfer *t = fab_transfer_get(e, handle);
    if (!t) return -EBADF;
    uint32_t old = atomic_fetch_or_explicit(&t->state, FAB_NOTIFY, memory_order_acq_rel);
    if (phase(old) && !(old & FAB_NOTIFY)) fab_event_push(e, &t->event, FAB_EV_TRANSFER);
    return 0;
}

int fab_transfer_cancel(fab_engine *e, uint64_t handle) {
    fab_transfer *t = fab_transfer_get(e, handle);
    if (!t) return -EBADF;
    if (phase(atomic_load_explicit(&t->state, memory_order_acquire))) return 0;
    int rc = fab_ring_submit(t->group, FAB_RQ_CANCEL, -ECANCELED, NULL, handle);
    if (!rc) fab_group_kick(t->group);
    return rc;
}

int fab_transfer_release(fab_engine *e, uint64_t handle) {
    fab_transfer *t = fab_transfer_get(e, handle);
    if (!t) return -EBADF;
    if (phase(atomic_fetch_or_explicit(&t->state, FAB_RELEASED, memory_order_acq_rel))) fab_transfer_free(t);
    return 0;
}
