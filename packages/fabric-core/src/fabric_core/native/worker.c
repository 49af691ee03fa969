/* The worker. step() is its loop body and is pure: it takes the time as an argument, never sleeps and never allocates,
 * so a simulator can drive it as well as a thread.
 *
 * The group's lock is only ever tried, never waited for: whoever holds it is the worker. A thread that submits or
 * waits helps by stepping itself when nobody else does; the thread of the worker does the rest and sleeps when idle. */
#include "engine_internal.h"

#include <poll.h>
#include <stdio.h>

#define TICK_NS 10000000ull /* the longest sleep while there are deadlines, or a poller that may stop looking */
#define IDLE_NS 200000000ull /* ... and while there is nothing at all */
#define HELP_NS 100000ull          /* the longest that a poller is kept at work in one call */
#define JUST_LOOKED_NS 20000ull    /* a poller that looked so long ago is about to look again */
#define POLLER_GONE_NS 10000000ull /* a poller that has not looked for so long is gone */
#define HANDED_OVER_NS 1000000ull  /* ... the work is left to (few cores): look soon whether it does it */
#define HANDED_OVER_MOST_NS 8000000ull /* ... later, the longer it has done so */

/* ---- the loop body ------------------------------------------------------------------------------ */

static uint32_t take_requests(fab_group *g, uint64_t now) {
    uint32_t n = 0;
    fab_req rq;
    while (n < 256 && fab_ring_pop(&g->ring, &rq)) {
        n++;
        switch (rq.kind) {
        case FAB_RQ_TRANSFER: fab_transfer_begin(g, rq.ptr, now); break;
        case FAB_RQ_CANCEL: {
            fab_transfer *t = fab_transfer_get(g->engine, rq.value);
            if (t && !(atomic_load_explicit(&t->state, memory_order_acquire) & FAB_PHASE_MASK))
                fab_transfer_fail(g, t, rq.arg, FAB_PEER_NONE, -1, now);
            break;
        }
        case FAB_RQ_EXPECT: fab_expect_begin(g, rq.value, now); break;
        case FAB_RQ_RECV: fab_list_append(&g->unposted, &((fab_recv *)rq.ptr)->link); break;
        }
    }
    return n;
}

static uint32_t culprit(const fab_transfer *t, uint32_t nic, const fab_wc *wc) {
    if (t->nworks == 1) return t->works[0].peer->number;
    if (wc->peer == FAB_PEER_NONE) return FAB_PEER_NONE;
    for (uint32_t i = 0; i < t->nworks; i++) { /* first contact may have begun anew since */
        const fab_peer_nic *path = &t->works[i].peer->nic[nic];
        if (path->id == wc->peer || path->former_id == wc->peer) return t->works[i].peer->number;
    }
    return FAB_PEER_NONE;
}

static void complete(fab_group *g, uint32_t nic, const fab_wc *wc, uint64_t now) {
    switch (wc->kind) {
    case FAB_WC_OP: {
        fab_transfer *t = fab_transfer_get(g->engine, wc->id);
        if (!t || wc->count > t->at_nic[nic]) { /* a backend that completes twice must not hurt another transfer */
            FAB_COUNT(g->stats.faults, 1);
            fab_fault(g->engine, -EPROTO);
            break;
        }
        /* of one that ended well too, once the deadline has passed: it was this peer that was late */
        uint32_t peer = wc->status || t->err ? culprit(t, nic, wc) : FAB_PEER_NONE;
        int32_t status = wc->status;
        /* Nobody cancelled it: its path was cut. Why that was is the reason to tell. */
        if (status == -ECANCELED && !t->err) {
            status = peer == FAB_PEER_NONE ? 0 : fab_peer_at(g, peer)->nic[nic].status;
            if (!status || status == -ECANCELED) status = -ENETDOWN;
        }
        fab_transfer_completed(g, t, wc->count, status, peer, (int32_t)nic, now);
        break;
    }
    case FAB_WC_IMM:
        FAB_COUNT_LOCKED(g->stats.imms, wc->count);
        fab_imm_arrive(g->engine, wc->imm, wc->count);
        break;
    case FAB_WC_RECV: fab_recv_done(g, wc->id, wc->len, wc->status); break;
    case FAB_WC_PEER_UP: fab_peer_up(g, nic, wc->peer, now); break;
    case FAB_WC_PEER_DOWN: fab_peer_down(g, nic, wc->peer, wc->status, now); break;
    case FAB_WC_NIC_DOWN: fab_nic_down(g, nic, wc->status, now); break;
    case FAB_WC_NIC_UP: fab_nic_up(g, nic); break;
    default: FAB_COUNT(g->stats.faults, 1); fab_fault(g->engine, wc->status ? wc->status : -EPROTO);
    }
}

static uint32_t poll_nics(fab_group *g, uint64_t now) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < g->nnics; i++) {
        if (atomic_load_explicit(&g->nics[i].closed, memory_order_relaxed)) continue;
        fab_wc wc[FAB_BATCH];
        int n = g->nics[i].ops->poll(g->nics[i].ctx, wc, FAB_BATCH, now);
        if (n < 0) {
            fab_nic_broken(g, i, n, now);
            total++;
            continue;
        }
        for (int k = 0; k < n; k++) complete(g, i, &wc[k], now);
        total += (uint32_t)n;
    }
    return total;
}

static uint32_t post(fab_group *g, uint64_t now) {
    uint32_t did = take_requests(g, now);
    if (!fab_list_empty(&g->active)) did += fab_post_all(g, now);
    if (!fab_list_empty(&g->unposted)) fab_recv_post_pending(g);
    return did;
}

uint32_t fab_step(fab_group *g, uint64_t now) {
    g->stepped_ns = now;
    uint32_t did = post(g, now); /* new requests leave before anything is polled */
    did += poll_nics(g, now);
    if (now / FAB_TICK_NS != g->tick) did += fab_timers_run(g, now);
    if (g->index == 0) fab_expect_reap(g);
    return did;
}

/* Somebody polls, who has just looked and will again: a look of the submitter's would find next to nothing, and costs a
 * system call where the NIC is a socket. */
uint32_t fab_step_submitted(fab_group *g, uint64_t now) {
    if (now < g->stepped_ns) now = g->stepped_ns; /* of before it had the lock: time never runs backwards in a domain */
    bool looked = now - atomic_load_explicit(&g->last_help, memory_order_relaxed) < JUST_LOOKED_NS;
    if (!looked) return fab_step(g, now);
    g->stepped_ns = now;
    return post(g, now);
}

/* ---- who steps -------------------------------------------------------------------------------------- */

bool fab_group_try(fab_group *g) {
    if (atomic_load_explicit(&g->lock, memory_order_relaxed)) return false;
    uint32_t free = 0;
    /* acquire: sees what the last worker did. seq_cst: ordered after the caller's push to the ring, see unlock */
    return atomic_compare_exchange_strong_explicit(&g->lock, &free, 1, memory_order_seq_cst, memory_order_relaxed);
}

void fab_group_unlock(fab_group *g) {
    for (;;) {
        atomic_store_explicit(&g->lock, 0, memory_order_seq_cst);
        /* A submitter pushes and then tries the lock; we free the lock and then look at the ring. Both orders are
         * sequentially consistent, so a request pushed while we held the lock is seen by one of the two. */
        if (!fab_ring_ready(&g->ring) || !fab_group_try(g)) break;
        FAB_COUNT_LOCKED(g->stats.steps, 1);
        fab_step(g, fab_time(g->engine));
    }
    if (atomic_load_explicit(&g->idle, memory_order_seq_cst) && atomic_load_explicit(&g->ntimers, memory_order_seq_cst))
        fab_group_kick(g); /* it sleeps without a tick, and there is a deadline now */
}

void fab_group_kick(fab_group *g) {
    if (!atomic_load_explicit(&g->sleeping, memory_order_seq_cst)) return;
    if (!atomic_exchange_explicit(&g->sleeping, 0, memory_order_seq_cst)) return; /* somebody else did */
    FAB_COUNT(g->stats.kicks, 1);
    uint64_t one = 1;
    ssize_t rc = write(g->efd, &one, sizeof one);
    (void)rc; /* the counter is at its maximum only if the worker is about to wake anyhow */
}

static bool closed(const fab_group *g, uint32_t nic) {
    return atomic_load_explicit(&g->nics[nic].closed, memory_order_relaxed);
}

static void disarm(fab_group *g) {
    for (uint32_t i = 0; i < g->nnics; i++)
        if (!closed(g, i)) g->nics[i].ops->arm(g->nics[i].ctx, 0);
    atomic_store_explicit(&g->armed, 0, memory_order_relaxed);
}

/* [lock] */
static bool arm(fab_group *g) {
    bool quiet = true;
    for (uint32_t i = 0; i < g->nnics; i++)
        if (!closed(g, i) && g->nics[i].ops->arm(g->nics[i].ctx, 1) > 0) quiet = false;
    atomic_store_explicit(&g->armed, 1, memory_order_relaxed);
    if (!quiet) disarm(g);
    return quiet;
}

bool fab_group_arm(fab_group *g) {
    if (g->shy) return true; /* its worker does */
    if (!fab_group_try(g)) return false;
    bool quiet = arm(g);
    fab_group_unlock(g);
    return quiet;
}

/* A poller's wake-ups are its own looks: peers need not wake the worker for it. The worker, which looks every tick,
 * asks for wake-ups again once the poller is gone. */
uint32_t fab_group_help(fab_group *g, bool polling) {
    if (g->shy && !polling) {
        fab_group_kick(g);
        return 0;
    }
    if (!fab_group_try(g)) {
        if (polling) FAB_COUNT(g->turned_away, 1);
        return 0;
    }
    uint64_t now = fab_time(g->engine);
    if (polling) {
        atomic_store_explicit(&g->last_help, now, memory_order_relaxed);
        if (atomic_load_explicit(&g->armed, memory_order_relaxed)) {
            disarm(g);
            if (atomic_load_explicit(&g->idle, memory_order_relaxed))
                fab_group_kick(g); /* it must look every tick now */
        }
    }
    FAB_COUNT_LOCKED(g->stats.helps, 1);
    uint32_t did = polling ? fab_step(g, now) : fab_step_submitted(g, now);
    /* More to post: go on for a while, which is cheaper than being called again. Not for long: the GIL may be held. */
    while (did && !fab_list_empty(&g->active) && fab_time(g->engine) - now < HELP_NS)
        if (!fab_step(g, fab_time(g->engine))) break;
    if (polling && g->engine->cfg.hand_over) /* a step may copy for milliseconds: the poller is still there */
        atomic_store_explicit(&g->last_help, fab_time(g->engine), memory_order_relaxed);
    fab_group_unlock(g);
    return did;
}

int fab_ring_submit(fab_group *g, uint32_t kind, int32_t arg, void *ptr, uint64_t value) {
    uint64_t until = fab_time(g->engine) + g->engine->cfg.timeout_ns;
    while (!fab_ring_push(&g->ring, kind, arg, ptr, value)) {
        if (!fab_group_help(g, false)) sched_yield();
        if (fab_time(g->engine) > until) return -EAGAIN;
    }
    fab_group_help(g, false);
    return 0;
}

/* ---- the thread --------------------------------------------------------------------------------------- */

static void drain(int fd) {
    uint64_t n;
    ssize_t rc = read(fd, &n, sizeof n);
    (void)rc; /* EAGAIN: nobody kicked */
}

/* Returns whether there may be something: not if only a tick has passed. */
static bool sleep_until_something(fab_group *g, uint64_t handed_over_ns) {
    uint64_t now = fab_now();
    bool woken = true, handed_over = handed_over_ns;
    bool poller = handed_over || now - atomic_load_explicit(&g->last_help, memory_order_relaxed) < POLLER_GONE_NS;
    if (!poller && !fab_group_arm(g)) return true;
    /* announce, then look once more: a submitter pushes, and then reads `sleeping` */
    atomic_store_explicit(&g->sleeping, 1, memory_order_seq_cst);
    if (!fab_ring_ready(&g->ring) && !atomic_load_explicit(&g->stop, memory_order_seq_cst)) {
        struct pollfd fds[FAB_MAX_NICS + 1] = {{.fd = g->efd, .events = POLLIN}};
        nfds_t n = 1;
        for (uint32_t i = 0; i < g->nnics; i++)
            if (g->nics[i].fd >= 0 && !closed(g, i) && !handed_over) { /* what a NIC says is the poller's to see */
                bool known = false; /* domains may share one descriptor */
                for (nfds_t k = 1; k < n; k++) known = known || fds[k].fd == g->nics[i].fd;
                if (!known) fds[n++] = (struct pollfd){.fd = g->nics[i].fd, .events = POLLIN};
            }
        /* Announced, then the deadlines are looked at; who adds one does it the other way round (fab_group_unlock). */
        atomic_store_explicit(&g->idle, !poller, memory_order_seq_cst);
        bool idle = !poller && !atomic_load_explicit(&g->ntimers, memory_order_seq_cst);
        if (!idle) atomic_store_explicit(&g->idle, 0, memory_order_relaxed);
        struct timespec tick = {0, (long)(handed_over                          ? handed_over_ns
                                          : poller && g->engine->cfg.hand_over ? HANDED_OVER_NS
                                          : idle                               ? IDLE_NS
                                                                               : TICK_NS)};
        FAB_COUNT(g->stats.sleeps, 1);
        atomic_store_explicit(&g->deaf, handed_over, memory_order_relaxed);
        woken = ppoll(fds, n, &tick, NULL) != 0;
        atomic_store_explicit(&g->deaf, 0, memory_order_relaxed);
        if (fds[0].revents) drain(g->efd);
    }
    atomic_store_explicit(&g->idle, 0, memory_order_relaxed);
    atomic_store_explicit(&g->sleeping, 0, memory_order_seq_cst);
    return woken;
}

static void pin(const fab_group *g) {
    cpu_set_t set;
    CPU_ZERO(&set);
    int any = 0;
    for (uint32_t i = 0; i < 1024; i++)
        if (g->cpus[i / 64] >> (i % 64) & 1) {
            CPU_SET(i, &set);
            any = 1;
        }
    if (any) pthread_setaffinity_np(pthread_self(), sizeof set, &set); /* a wish: a cpuset may forbid it */
}

/* On few cores, how long to leave the work to a thread that polls: it looked a moment ago, or is just at it. Its worker
 * would only take the lock from it, and then the core, while it spins for the lock. Returns 0 if nobody polls. The longer
 * somebody has (`since`: from when on), the later the worker looks again: to wake it costs the poller its core. */
uint64_t fab_left_to_poller(const fab_group *g, uint64_t *since, uint64_t now) {
    if (!g->engine->cfg.hand_over) return 0;
    uint64_t last = atomic_load_explicit(&g->last_help, memory_order_relaxed), age = now > last ? now - last : 0;
    if (age >= HANDED_OVER_NS && !(age < POLLER_GONE_NS && atomic_load_explicit(&g->lock, memory_order_relaxed))) {
        *since = 0;
        return 0;
    }
    if (!*since) *since = now;
    uint64_t nap = (now - *since) / 8;
    return nap < HANDED_OVER_NS ? HANDED_OVER_NS : nap < HANDED_OVER_MOST_NS ? nap : HANDED_OVER_MOST_NS;
}

int fab_group_setup(fab_group *g);

void *fab_worker_main(void *arg) {
    fab_group *g = arg;
    fab_engine *e = g->engine;
    char name[16];
    snprintf(name, sizeof name, "fabric-w%u", g->index);
    pthread_setname_np(pthread_self(), name);
    pin(g);
    /* after pinning, so that first touch puts the group's memory on its NUMA node (paper, section 3) */
    int rc = fab_group_setup(g);
    atomic_store_explicit(&g->ready, rc ? 2 : 1, memory_order_release);
    fab_futex_wake_all(&g->ready);
    if (rc) return NULL;
    uint64_t idle_since = fab_now();
    uint32_t turned_away = 0;
    uint64_t polled_since = 0;
    while (!atomic_load_explicit(&g->stop, memory_order_acquire)) {
        uint64_t now = fab_now();
        uint32_t did = 0;
        uint64_t nap = fab_left_to_poller(g, &polled_since, now);
        if (nap) {
            sleep_until_something(g, nap);
            idle_since = fab_now();
            continue;
        }
        /* Somebody polls and found the lock taken. On few cores its thread and ours are one too many: it is at work anyhow,
         * so it does the rest. */
        uint32_t turned = atomic_load_explicit(&g->turned_away, memory_order_relaxed);
        if (e->cfg.hand_over && turned != turned_away) {
            sleep_until_something(g, HANDED_OVER_NS);
            turned_away = atomic_load_explicit(&g->turned_away, memory_order_relaxed);
            idle_since = now;
        }
        if (fab_group_try(g)) {
            FAB_COUNT_LOCKED(g->stats.steps, 1);
            did = fab_step(g, now);
            fab_group_unlock(g);
        } else if (e->cfg.hand_over) { /* on few cores whoever holds the lock may be waiting for this very core */
            sleep_until_something(g, HANDED_OVER_NS);
            idle_since = fab_now();
            continue;
        }
        if (did) {
            idle_since = now;
            continue;
        }
        if (e->cfg.busy || now - idle_since < e->cfg.spin_ns) {
            fab_relax();
            continue;
        }
        /* After a mere tick it looks once and does not spin: that would be the most of what an idle engine costs. */
        idle_since = sleep_until_something(g, 0) ? fab_now() : 0;
    }
    return NULL;
}
