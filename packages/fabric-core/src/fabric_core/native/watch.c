/* Watchers: words that somebody bumps (a host thread now, a GPU later); one thread per engine reads them all and only
 * publishes. Several steps may be seen as one: a callback gets a range (paper, section 3). */
#include "engine_internal.h"

#define LOOK_SLEEP_NS 50000ull /* after LOOK_SPIN_NS without a change */
#define LOOK_SPIN_NS 200000ull

static bool look(fab_engine *e, fab_watch *w) {
    if (atomic_load_explicit(&w->closed, memory_order_acquire)) return false;
    uint64_t value = atomic_load_explicit(w->word, memory_order_acquire);
    if (value == w->published) return false;
    uint64_t old = w->published;
    w->published = value;
    if (w->fn) {
        w->fn(w->fn_arg, old, value);
        return true;
    }
    /* latest before queued: the taker clears queued and then reads latest */
    atomic_store_explicit(&w->latest, value, memory_order_seq_cst);
    if (!atomic_exchange_explicit(&w->queued, 1, memory_order_seq_cst)) fab_event_push(e, &w->event, FAB_EV_WATCH);
    return true;
}

static void *watcher_main(void *arg) {
    fab_engine *e = arg;
    pthread_setname_np(pthread_self(), "fabric-watch");
    uint64_t changed = fab_now();
    while (atomic_load_explicit(&e->watcher_on, memory_order_acquire)) {
        bool any = false;
        for (fab_watch *w = atomic_load_explicit(&e->watches, memory_order_acquire); w; w = w->next)
            any = look(e, w) || any;
        uint64_t now = fab_now();
        if (any) changed = now;
        bool idle = atomic_load_explicit(&e->nwatches, memory_order_acquire) == 0;
        if (idle || now - changed > LOOK_SPIN_NS) {
            struct timespec pause = {0, (long)(idle ? 20 * LOOK_SLEEP_NS : LOOK_SLEEP_NS)};
            nanosleep(&pause, NULL);
        } else {
            fab_relax();
        }
    }
    return NULL;
}

int64_t fab_watch_add(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, uint64_t *word_out) {
    if (word % 8) return -EINVAL;
    fab_watch *w = aligned_alloc(FAB_CACHELINE, (sizeof *w + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE);
    if (!w) return -ENOMEM;
    memset(w, 0, sizeof *w);
    w->word = word ? (_Atomic uint64_t *)(uintptr_t)word : &w->own;
    w->fn = fn;
    w->fn_arg = arg;
    w->published = atomic_load_explicit(w->word, memory_order_acquire);
    atomic_store_explicit(&w->taken, w->published, memory_order_relaxed);
    atomic_store_explicit(&w->latest, w->published, memory_order_relaxed);
    *word_out = (uint64_t)(uintptr_t)w->word;
    pthread_mutex_lock(&e->setup);
    int rc = atomic_load_explicit(&e->closed, memory_order_acquire) ? -ESHUTDOWN : 0;
    fab_watch *first = atomic_load_explicit(&e->watches, memory_order_relaxed);
    w->id = first ? first->id + 1 : 1;
    w->next = first;
    if (!rc && !atomic_load_explicit(&e->watcher_on, memory_order_relaxed)) {
        atomic_store_explicit(&e->watcher_on, 1, memory_order_release);
        rc = -pthread_create(&e->watcher, NULL, watcher_main, e);
        if (rc) atomic_store_explicit(&e->watcher_on, 0, memory_order_release);
    }
    if (!rc) {
        atomic_fetch_add_explicit(&e->nwatches, 1, memory_order_acq_rel);
        atomic_store_explicit(&e->watches, w, memory_order_release);
    }
    pthread_mutex_unlock(&e->setup);
    if (rc) {
        free(w);
        return rc;
    }
    return w->id;
}

/* The node stays in the list until the engine is freed: the watcher thread walks it without a lock. */
int fab_watch_close(fab_engine *e, uint32_t id) {
    for (fab_watch *w = atomic_load_explicit(&e->watches, memory_order_acquire); w; w = w->next)
        if (w->id == id && !atomic_exchange_explicit(&w->closed, 1, memory_order_acq_rel)) {
            atomic_fetch_sub_explicit(&e->nwatches, 1, memory_order_acq_rel);
            return 0;
        }
    return -EBADF;
}
