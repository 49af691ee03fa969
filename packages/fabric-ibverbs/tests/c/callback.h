/* What a callback costs by itself, without a NIC. */
#ifndef VERBS_CALLBACK_H
#define VERBS_CALLBACK_H

#include "fabric/engine.h"
#include "measure.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAUSE_S 200e-6 /* longer than a callback thread looks before it sleeps, as between two pings */

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Atomic uint32_t called;

static inline void *callback_thread(void *engine) {
    fab_event events[16];
    for (int n = 0; n >= 0; n = fab_events_wait(engine, events, 16, 1000000000))
        if (n) atomic_fetch_add_explicit(&called, 1, memory_order_release); /* the callback */
    return NULL;
}

/* From the end of an expectation to its callback in a thread that slept until then: median. An expectation of no immediates has
 * ended when it is made; asked for its callback then, the engine calls at once. The thread stays, asleep. */
static inline double callback_us(fab_engine *e, uint32_t imm, uint32_t count) {
    static pthread_t thread;
    double *took = calloc(count, sizeof *took);
    if (!thread && pthread_create(&thread, NULL, callback_thread, e)) die("callback thread", 0);
    for (uint32_t i = 0; i < count; i++) {
        int64_t x = fab_expect(e, imm, 0, 0, NULL, 0);
        if (x < 0 || fab_expect_poll(e, (uint64_t)x) != FAB_DONE) die("an expectation of nothing", (long)x);
        uint32_t before = atomic_load_explicit(&called, memory_order_acquire);
        for (double until = now() + PAUSE_S; now() < until;) {
        }
        double begin = now();
        fab_expect_notify(e, (uint64_t)x);
        while (atomic_load_explicit(&called, memory_order_acquire) == before) {
        }
        took[i] = now() - begin;
        fab_expect_release(e, (uint64_t)x);
    }
    double us = median(took, count) * 1e6;
    free(took);
    return us;
}

#endif
