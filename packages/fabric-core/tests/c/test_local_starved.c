/* test_local_starved.c - a peer that is not scheduled is not lost, one that stands still is.
 *
 * Nodes in this process. The engine's calls of epoll_wait come here, so that a control thread can be had to compute without
 * end, as one looks that waits for a processor, or to sleep. Exit 0 fine, 1 failed. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include "check.h"
#include "local/local.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define SHORT 0.05   /* seconds: a heartbeat */
#define LONG 1.2     /* the same; thirty of them are longer than LIMIT */
#define LIMIT 30.0   /* seconds: ends, or hangs */

enum { ASLEEP, RUNNING, AS_EVER };
static _Atomic int it_does = AS_EVER;
static _Atomic int threads, there, victim;
static _Thread_local int number;   /* of this control thread, from 1 on */

int epoll_wait(int epfd, struct epoll_event *events, int most, int timeout) {
    if (!number) number = atomic_fetch_add(&threads, 1) + 1;
    for (int what; number == atomic_load(&victim) && (what = atomic_load(&it_does)) != AS_EVER;) {
        atomic_store(&there, what);
        if (what == ASLEEP) usleep(1000000);
    }
    return epoll_pwait(epfd, events, most, timeout, NULL);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct side {
    fab_local_node *node;
    void *d;
    char addr[128];
    uint32_t ups, downs;
    int status;
} side;

static char dir[80];

static void open_side(side *x, const char *name, double beat) {
    char err[256];
    fab_local_cfg c = {.dir = dir, .name = name, .nics = 1, .shuffle_seed = -1, .heartbeat_ns = (uint64_t)(beat * 1e9)};
    CHECK(fab_local_open(&c, &x->node, err, sizeof err) == 0, "%s", err);
    x->d = fab_local_domain(x->node, 0);
    CHECK(fab_local_ops()->address(x->d, x->addr, sizeof x->addr) > 0);
    double end = now() + LIMIT;
    for (int want = name[0] - 'a' + 1; atomic_load(&threads) < want; usleep(100)) CHECK(now() < end, "no thread");
}

static void pump(side *x) {
    fab_wc wc[16];
    int n = fab_local_ops()->poll(x->d, wc, 16, 0);
    for (int i = 0; i < n; i++) {
        x->ups += wc[i].kind == FAB_WC_PEER_UP;
        if (wc[i].kind != FAB_WC_PEER_DOWN) continue;
        x->downs++;
        x->status = wc[i].status;
    }
}

static void meet(side *a, side *b) {
    uint32_t peer, ups = a->ups;
    CHECK(fab_local_ops()->peer_open(a->d, b->addr, strlen(b->addr), &peer) == 0);
    for (double end = now() + LIMIT; a->ups == ups;) {
        CHECK(now() < end && !a->downs, "they do not meet: %d", a->status);
        pump(a);
        pump(b);
    }
}

static void it(int what) {
    atomic_store(&it_does, what);
    for (double end = now() + LIMIT; what != AS_EVER && atomic_load(&there) != what; usleep(100))
        CHECK(now() < end, "it does not come to it");
}

static void look(side *a, double seconds) {
    for (double end = now() + seconds; now() < end; usleep(1000)) pump(a);
}

static void is_lost(side *a, const char *why) {
    for (double end = now() + LIMIT; !a->downs; usleep(1000)) {
        CHECK(now() < end, "%s", why);
        pump(a);
    }
    CHECK(a->status == -ETIMEDOUT, "%d", a->status);
    it(AS_EVER);
}

int main(void) {
    snprintf(dir, sizeof dir, "/tmp/fab-starved-%d", getpid());
    static side a, b, c, d;
    open_side(&a, "a", SHORT);
    open_side(&b, "b", SHORT);
    atomic_store(&victim, 2);
    meet(&a, &b);
    it(RUNNING);
    look(&a, 8 * SHORT);
    CHECK(!a.downs, "it waits for a processor, and was lost after two heartbeats: %d", a.status);
    it(AS_EVER);
    look(&a, 4 * SHORT);
    CHECK(!a.downs, "it has gone on: %d", a.status);
    it(RUNNING);
    is_lost(&a, "whoever never beats again is never lost");

    open_side(&c, "c", LONG);
    open_side(&d, "d", LONG);
    atomic_store(&victim, 4);
    meet(&c, &d);
    it(ASLEEP);
    is_lost(&c, "it stands still, and is taken for one that waits for a processor");

    side *every[] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; i++) fab_local_ops()->close(every[i]->d);
    char lock[128];
    snprintf(lock, sizeof lock, "%s/.lock", dir);
    unlink(lock);
    rmdir(dir);
    return 0;
}
