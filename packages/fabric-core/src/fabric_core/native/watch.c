/* Watchers: words that somebody bumps (a host thread now, a GPU later); one thread per engine reads them all and only
 * publishes. Several steps may be seen as one: a callback gets a range (paper, section 3). A watch with a function of C has that
 * called instead, on this thread; a keen one (a sequence's) is looked for without a pause while its changes are near.
 *
 * Nodes live in a pool and are never unmapped. The watcher thread alone takes closed ones off its list, under the set-up
 * lock; it sleeps when there is nothing to watch, and looks less often the longer nothing changes. */
#include "engine_internal.h"

#define SPIN_NS 200000ull    /* after a change: the next one may be near */
#define NEAR_NS 20000000ull  /* ... so long: look every LOOK_NS */
#define LOOK_NS 50000ull
#define FAR_NS 1000000000ull
#define FAR_LOOK_NS 1000000ull
#define IDLE_LOOK_NS 2000000ull /* ... after a second without a change */

/* Queues the event that says how far a watch has come. */
void fab_watch_tell(fab_engine *e, fab_watch *w, uint64_t value) {
    /* latest before queued: the taker clears queued and then reads latest */
    atomic_store_explicit(&w->latest, value, memory_order_seq_cst);
    if (!atomic_exchange_explicit(&w->queued, 1, memory_order_seq_cst)) fab_event_push(e, &w->event, FAB_EV_WATCH);
}

static bool look(fab_engine *e, fab_watch *w) {
    uint64_t value = atomic_load_explicit(w->word, memory_order_acquire);
    if (value == w->published) return false;
    uint64_t old = w->published;
    w->published = value;
    if (w->fn) w->fn(w->fn_arg, old, value);
    else fab_watch_tell(e, w, value);
    return true;
}

/* Closed nodes whose event is not on its way. */
static void sweep(fab_engine *e) {
    pthread_mutex_lock(&e->setup);
    fab_watch *kept = NULL, *next;
    for (fab_watch *w = atomic_load_explicit(&e->watches, memory_order_relaxed); w; w = next) {
        next = w->next;
        if (atomic_load_explicit(&w->closed, memory_order_acquire) &&
            !atomic_load_explicit(&w->queued, memory_order_acquire)) {
            fab_pool_free(&e->watchpool, w);
        } else {
            if (atomic_load_explicit(&w->closed, memory_order_relaxed)) /* its event is on its way: come again */
                atomic_store_explicit(&e->watch_closed, 1, memory_order_relaxed);
            w->next = kept;
            kept = w;
        }
    }
    atomic_store_explicit(&e->watches, kept, memory_order_release);
    pthread_mutex_unlock(&e->setup);
}

static void pause_for(uint64_t ns) {
    struct timespec t = {0, (long)ns};
    nanosleep(&t, NULL);
}

enum { CHANGED = 1, KEEN = 2, KEEN_CHANGED = 4 }; /* what a round has seen */

static unsigned look_at_all(fab_engine *e) {
    unsigned seen = 0;
    atomic_fetch_add_explicit(&e->watch_round, 1, memory_order_seq_cst); /* before `closed` is read: fab_watch_settle */
    for (fab_watch *w = atomic_load_explicit(&e->watches, memory_order_acquire); w; w = w->next) {
        if (atomic_load_explicit(&w->closed, memory_order_seq_cst)) continue;
        if (w->keen) seen |= KEEN;
        if (look(e, w)) seen |= w->keen ? CHANGED | KEEN_CHANGED : CHANGED;
    }
    atomic_fetch_add_explicit(&e->watch_round, 1, memory_order_release);
    return seen;
}

static void *watcher_main(void *arg) {
    fab_engine *e = arg;
    pthread_setname_np(pthread_self(), "fabric-watch");
    uint64_t changed = fab_now(), keen = 0;
    while (atomic_load_explicit(&e->watcher_on, memory_order_acquire)) {
        if (atomic_exchange_explicit(&e->watch_closed, 0, memory_order_acq_rel)) sweep(e);
        uint32_t open = atomic_load_explicit(&e->nwatches, memory_order_acquire);
        if (!open) { /* woken by the next watcher, or by close */
            fab_futex_wait(&e->nwatches, 0, 1000000000ull);
            changed = fab_now();
            continue;
        }
        unsigned seen = look_at_all(e);
        uint64_t now = fab_now(), quiet = now - changed;
        if (seen & KEEN_CHANGED) keen = now;
        /* Where there are processors for it: the layers of a model come milliseconds apart, and each is urgent. */
        bool near = seen & KEEN && keen && now - keen < NEAR_NS && !e->cfg.hand_over;
        if (seen & CHANGED) changed = now;
        else if (near || quiet < SPIN_NS || e->cfg.busy) fab_relax();
        else pause_for(quiet < NEAR_NS ? LOOK_NS : quiet < FAR_NS ? FAR_LOOK_NS : IDLE_LOOK_NS);
    }
    look_at_all(e); /* what came before the close is answered: a stream may wait for that */
    return NULL;
}

static int64_t add(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, bool keen, fab_watch **out,
                   uint64_t *word_out) {
    if (!e) return -ESHUTDOWN;
    if (word % 8) return -EINVAL;
    pthread_mutex_lock(&e->setup);
    int rc = atomic_load_explicit(&e->closed, memory_order_acquire) ? -ESHUTDOWN : 0;
    fab_watch *w = rc ? NULL : fab_pool_alloc(&e->watchpool);
    if (!rc && !w) rc = -ENOSPC;
    if (!rc && !atomic_load_explicit(&e->watcher_on, memory_order_relaxed)) {
        atomic_store_explicit(&e->watcher_on, 1, memory_order_release);
        rc = -pthread_create(&e->watcher, NULL, watcher_main, e);
        if (rc) {
            atomic_store_explicit(&e->watcher_on, 0, memory_order_release);
            fab_pool_free(&e->watchpool, w);
        }
    }
    int64_t id = rc;
    if (!rc) {
        atomic_store_explicit(&w->own, 0, memory_order_relaxed);
        atomic_store_explicit(&w->queued, 0, memory_order_relaxed);
        atomic_store_explicit(&w->closed, 0, memory_order_relaxed);
        w->word = word ? (_Atomic uint64_t *)(uintptr_t)word : &w->own;
        w->fn = fn;
        w->fn_arg = arg;
        w->keen = keen;
        w->published = atomic_load_explicit(w->word, memory_order_acquire);
        atomic_store_explicit(&w->taken, w->published, memory_order_relaxed);
        atomic_store_explicit(&w->latest, w->published, memory_order_relaxed);
        *word_out = (uint64_t)(uintptr_t)w->word;
        w->next = atomic_load_explicit(&e->watches, memory_order_relaxed);
        id = w->id = (int64_t)FAB_HANDLE(fab_slot_gen(&w->slot), 0, w->slot.index);
        if (out) *out = w; /* before its function can be called */
        atomic_store_explicit(&e->watches, w, memory_order_release); /* the thread sees it whole */
        if (atomic_fetch_add_explicit(&e->nwatches, 1, memory_order_acq_rel) == 0) fab_futex_wake_all(&e->nwatches);
    }
    pthread_mutex_unlock(&e->setup);
    return id;
}

int64_t fab_watch_add(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, uint64_t *word_out) {
    return add(e, word, fn, arg, false, NULL, word_out);
}

int64_t fab_watch_open(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, fab_watch **out, uint64_t *word_out) {
    return add(e, word, fn, arg, true, out, word_out);
}

int fab_watch_close(fab_engine *e, uint64_t id) {
    fab_watch *w = e ? fab_pool_get(&e->watchpool, (uint32_t)id, (uint32_t)(id >> 32)) : NULL;
    if (!w || atomic_exchange_explicit(&w->closed, 1, memory_order_seq_cst)) return -EBADF; /* fab_watch_settle */
    atomic_fetch_sub_explicit(&e->nwatches, 1, memory_order_acq_rel);
    atomic_store_explicit(&e->watch_closed, 1, memory_order_release);
    return 0;
}

/* After a close: until the watcher's thread can no longer be in that watch's function. */
void fab_watch_settle(fab_engine *e) {
    /* seq_cst: `closed` was set before; either the round is seen here, or the round sees `closed` */
    uint32_t round = atomic_load_explicit(&e->watch_round, memory_order_seq_cst);
    if (pthread_equal(pthread_self(), e->watcher)) return;
    /* Not by `watcher_on`: a thread that was told to end may be in the function still. It ends each round that it begins. */
    while ((round & 1) && atomic_load_explicit(&e->watch_round, memory_order_acquire) == round) sched_yield();
}

/* At close: no callback comes after this, and the thread is gone. */
void fab_watch_stop(fab_engine *e) {
    if (!atomic_exchange_explicit(&e->watcher_on, 0, memory_order_acq_rel)) return;
    atomic_fetch_add_explicit(&e->nwatches, 1, memory_order_acq_rel); /* it cannot fall asleep on a zero any more */
    fab_futex_wake_all(&e->nwatches);
    pthread_join(e->watcher, NULL);
}
