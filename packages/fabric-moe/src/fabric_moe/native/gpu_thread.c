/* The thread that looks at the words of all GPU ranks of a process. No kernel can ring a bell, and a graph that is replayed calls
 * nothing on the host: so it looks again and again, without a pause when a step has just begun or ended, every 20 us while steps are
 * under way or were a moment ago, then every 0.2 ms, and after two seconds of rest every millisecond. It ends with the last rank. */
#include "gpu.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>

static struct {
    pthread_mutex_t lock;
    moe_gpu *ranks;
    bool running;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t once = PTHREAD_ONCE_INIT;

#define EAGER_NS 300000u
#define WARM_NS 20000000u
#define COLD_NS 2000000000u
enum { SHORT_NS = 20000, LONG_NS = 200000, LONGEST_NS = 1000000 };

void moe_gpu_lock(void) { pthread_mutex_lock(&all.lock); }
void moe_gpu_unlock(void) { pthread_mutex_unlock(&all.lock); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *thread_main(void *arg) {
    (void)arg;
    pthread_setname_np(pthread_self(), "fabric-moe-gpu");
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* else 50 us are added to each pause */
    uint64_t since = now_ns(); /* when a step was last seen under way, or to begin or end */
    bool was_busy = false;
    for (;;) {
        bool busy = false;
        moe_gpu_lock();
        for (moe_gpu *g = all.ranks; g; g = g->next) busy |= moe_gpu_advance(g);
        if (!all.ranks) {
            all.running = false;
            moe_gpu_unlock();
            return NULL;
        }
        moe_gpu_unlock();
        uint64_t now = now_ns();
        if (busy != was_busy) since = now;
        was_busy = busy;
        if (busy && now - since < EAGER_NS) continue;
        long rest = now - since < COLD_NS ? LONG_NS : LONGEST_NS;
        struct timespec pause = {0, busy || now - since < WARM_NS ? SHORT_NS : rest};
        nanosleep(&pause, NULL);
    }
}

/* The child of a fork has no such thread, and its ranks are the parent's. */
static void before_fork(void) { moe_gpu_lock(); }
static void in_parent(void) { moe_gpu_unlock(); }
static void in_child(void) {
    all.ranks = NULL;
    all.running = false;
    moe_gpu_unlock();
}
static void heed_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

int moe_gpu_join(moe_gpu *g) {
    pthread_t thread;
    pthread_once(&once, heed_forks);
    moe_gpu_lock();
    int rc = all.running ? 0 : pthread_create(&thread, NULL, thread_main, NULL); /* which waits for the lock */
    if (!rc) {
        if (!all.running) pthread_detach(thread);
        all.running = true;
        g->next = all.ranks;
        all.ranks = g;
    }
    moe_gpu_unlock();
    return -rc;
}

void moe_gpu_leave(moe_gpu *g) {
    moe_gpu_lock();
    moe_gpu **at = &all.ranks;
    while (*at && *at != g) at = &(*at)->next;
    if (*at) *at = g->next;
    moe_gpu_unlock();
}
