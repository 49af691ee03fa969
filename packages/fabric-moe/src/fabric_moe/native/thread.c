/* Who serves the ranks of a process when the engine has rung that something is here which no thread waits for: a thread that is
 * in one of our calls at that moment, on its way out; else one that all ranks share, and that sleeps otherwise. To wake a thread
 * takes longer than all of the work, and where processors are few it takes one from whoever rang, and who holds the engine's lock.
 *
 * Who serves holds the list of ranks, and never waits there: a full engine is tried again a moment later by the shared thread, and
 * so is a rank whose own thread is at work. That thread ends with the last rank. */
#include "proxy.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define AGAIN_NS 50000 /* between two tries */

static struct {
    pthread_mutex_t lock; /* of the list, and of who starts and ends the thread */
    moe_rank *ranks;
    bool running;
    _Atomic uint32_t rings, sleeping;
    _Atomic uint32_t served; /* all that rang up to here was looked at, by whoever */
    _Atomic uint32_t helpers; /* threads that look at the rings before they leave */
} proxy = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void wake(void) {
    /* the sleeper says so and then looks at the rings; we ring and then look whether it sleeps: one sees the other */
    if (atomic_load_explicit(&proxy.sleeping, memory_order_seq_cst))
        syscall(SYS_futex, &proxy.rings, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void moe_ring(void *bell) {
    moe_bell *b = bell;
    atomic_store_explicit(&b->rung, 1, memory_order_release);
    if (atomic_load_explicit(&b->attended, memory_order_relaxed)) return;
    atomic_fetch_add_explicit(&proxy.rings, 1, memory_order_seq_cst);
    /* a helper that is there now looks, before it leaves, whether all rings were served: also those from before it began, as ours
     * may be */
    if (!atomic_load_explicit(&proxy.helpers, memory_order_seq_cst)) wake();
}

/* Returns whether it must come again: the engine was full, or the rank's own thread was at it. */
static bool serve(moe_rank *r) {
    bool again = false;
    for (uint32_t slot = 0; slot < r->shape.depth; slot++) {
        moe_slot *s = &r->slots[slot];
        if (!atomic_load_explicit(&s->counts.rung, memory_order_relaxed) &&
            !atomic_load_explicit(&s->credit.rung, memory_order_relaxed))
            continue;
        if (pthread_mutex_trylock(&r->lock)) {
            again = true;
            continue;
        }
        bool counts = atomic_exchange_explicit(&s->counts.rung, 0, memory_order_acquire);
        atomic_store_explicit(&s->credit.rung, 0, memory_order_relaxed);
        fab_outcome ended;
        if (counts && !s->here && s->expects && !r->api->expect_outcome(r->engine, s->expects, &ended))
            s->here = ended.phase == FAB_DONE;
        if (moe_advance(r, slot) == MOE_FULL) {
            atomic_store_explicit(&s->counts.rung, 1, memory_order_relaxed);
            again = true;
        }
        pthread_mutex_unlock(&r->lock);
    }
    return again;
}

/* [lock of the list] */
static bool serve_all(void) {
    uint32_t rings =
        atomic_load_explicit(&proxy.rings, memory_order_seq_cst); /* whoever rang has set its bell before */
    bool again = false;
    for (moe_rank *r = proxy.ranks; r; r = r->next) again |= serve(r);
    if (!again) atomic_store_explicit(&proxy.served, rings, memory_order_seq_cst);
    return again;
}

void moe_help_begin(void) { atomic_fetch_add_explicit(&proxy.helpers, 1, memory_order_seq_cst); }

void moe_help_end(void) {
    uint32_t rings = atomic_load_explicit(&proxy.rings, memory_order_seq_cst);
    bool again = false;
    if (rings != atomic_load_explicit(&proxy.served, memory_order_seq_cst)) {
        again = pthread_mutex_trylock(&proxy.lock) != 0; /* else another one is at it, but may be past some rank */
        if (!again) {
            again = serve_all();
            pthread_mutex_unlock(&proxy.lock);
        }
    }
    atomic_fetch_sub_explicit(&proxy.helpers, 1, memory_order_seq_cst);
    if (again) atomic_fetch_add_explicit(&proxy.rings, 1, memory_order_seq_cst);
    if (again || atomic_load_explicit(&proxy.rings, memory_order_seq_cst) != rings) wake();
}

static void *thread_main(void *arg) {
    (void)arg;
    pthread_setname_np(pthread_self(), "fabric-moe");
    for (;;) {
        uint32_t rings = atomic_load_explicit(&proxy.rings, memory_order_seq_cst);
        pthread_mutex_lock(&proxy.lock);
        bool again = serve_all();
        if (!proxy.ranks) {
            proxy.running = false;
            pthread_mutex_unlock(&proxy.lock);
            return NULL;
        }
        pthread_mutex_unlock(&proxy.lock);
        if (again) {
            struct timespec pause = {0, AGAIN_NS};
            nanosleep(&pause, NULL);
            continue;
        }
        atomic_store_explicit(&proxy.sleeping, 1, memory_order_seq_cst);
        if (atomic_load_explicit(&proxy.rings, memory_order_seq_cst) == rings)
            syscall(SYS_futex, &proxy.rings, FUTEX_WAIT_PRIVATE, rings, NULL, NULL, 0);
        atomic_store_explicit(&proxy.sleeping, 0, memory_order_seq_cst);
    }
}

/* The child of a fork has no such thread, and its ranks are the parent's. */
static void before_fork(void) { pthread_mutex_lock(&proxy.lock); }

static void in_parent(void) { pthread_mutex_unlock(&proxy.lock); }

static void in_child(void) {
    proxy.ranks = NULL;
    proxy.running = false;
    atomic_store_explicit(&proxy.helpers, 0, memory_order_relaxed); /* other threads of the parent's may have been */
    atomic_store_explicit(&proxy.sleeping, 0, memory_order_relaxed);
    pthread_mutex_unlock(&proxy.lock);
}

static void heed_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

static int start(void) {
    pthread_t thread;
    pthread_once(&once, heed_forks);
    int rc = pthread_create(&thread, NULL, thread_main, NULL); /* waits for the lock */
    if (rc) return -rc;
    pthread_detach(thread);
    proxy.running = true;
    return 0;
}

int moe_thread_join(moe_rank *r) {
    pthread_mutex_lock(&proxy.lock);
    int rc = proxy.running ? 0 : start();
    if (!rc) {
        r->next = proxy.ranks;
        proxy.ranks = r;
    }
    pthread_mutex_unlock(&proxy.lock);
    return rc;
}

void moe_thread_leave(moe_rank *r) {
    pthread_mutex_lock(&proxy.lock);
    moe_rank **at = &proxy.ranks;
    while (*at && *at != r) at = &(*at)->next;
    if (*at) *at = r->next;
    bool last = !proxy.ranks;
    pthread_mutex_unlock(&proxy.lock);
    if (!last) return;
    atomic_fetch_add_explicit(&proxy.rings, 1, memory_order_seq_cst);
    wake(); /* it ends */
}
