/* An engine that fits on a page, behind the functions that the proxy calls: writes are copies, done in the submit; immediates are
 * counted; now and then it is full. All of it under one lock, as an engine's bells are rung under one. */
#ifndef SMALL_ENGINE_H
#define SMALL_ENGINE_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric/engine.h"
#include "moe_check.h"

enum { MOST_RANKS = 8, IMMS = 4096, WAITERS = 1 << 16 };

struct fab_engine {
    uint8_t *in, *out;
    uint64_t in_len, out_len, arrived[IMMS], claimed[IMMS];
    uint64_t refuse_in; /* submits until one is refused with `refusal`; 0: never */
    int refusal;
};
static struct fab_engine engines[MOST_RANKS]; /* the number of a remote is that of its engine */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool apart; /* each rank has immediates of its own, from 100 times its number on */
    uint64_t submits, full_every; /* every so many submits the engine is full */
    uint64_t held; /* transfers and expectations that nobody has released */
    uint32_t nwaiters;
    struct waiter {
        fab_engine *e;
        uint32_t imm;
        uint64_t count;
        uint32_t phase;
        fab_bell_fn bell;
        void *arg;
    } waiters[WAITERS];
} net = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void end(struct waiter *w, uint32_t phase) {
    w->phase = phase;
    if (w->bell) w->bell(w->arg);
}

static void serve_all(void) {
    for (uint32_t i = 0; i < net.nwaiters; i++) {
        struct waiter *w = &net.waiters[i];
        if (w->phase != FAB_PENDING || w->e->arrived[w->imm] - w->e->claimed[w->imm] < w->count) continue;
        w->e->claimed[w->imm] += w->count;
        end(w, FAB_DONE);
    }
    pthread_cond_broadcast(&net.changed);
}

static int64_t small_submit_many(fab_engine *e, uint32_t op, uint64_t local, const fab_target *to, uint32_t n,
                                 int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag) {
    (void)nic, (void)timeout_ns;
    CHECK(op == FAB_OP_SCATTER && local == 77 && n && !flag && imm >= 0 && imm < IMMS);
    pthread_mutex_lock(&net.lock);
    net.submits++;
    int64_t rc = net.full_every && net.submits % net.full_every == 0 ? -EAGAIN : 1;
    if (e->refuse_in && --e->refuse_in == 0) rc = e->refusal;
    for (uint32_t i = 0; rc > 0 && i < n; i++) {
        struct fab_engine *d = &engines[to[i].remote];
        CHECK(!net.apart || (uint32_t)imm / 100 == to[i].remote); /* another's number counts for nobody */
        CHECK(to[i].loff + to[i].len <= e->out_len && to[i].roff + to[i].len <= d->in_len);
        memcpy(d->in + to[i].roff, e->out + to[i].loff, to[i].len);
        d->arrived[imm]++;
    }
    net.held += rc > 0;
    serve_all();
    pthread_mutex_unlock(&net.lock);
    return rc;
}

static int64_t small_expect(fab_engine *e, uint32_t imm, uint64_t count, uint64_t timeout_ns, const uint32_t *peers,
                            uint32_t npeers) {
    (void)timeout_ns, (void)peers, (void)npeers;
    pthread_mutex_lock(&net.lock);
    CHECK(net.nwaiters < WAITERS);
    net.waiters[net.nwaiters++] = (struct waiter){.e = e, .imm = imm, .count = count};
    net.held++;
    int64_t handle = net.nwaiters;
    serve_all();
    pthread_mutex_unlock(&net.lock);
    return handle;
}

static int small_bell(fab_engine *e, uint64_t handle, fab_bell_fn fn, void *arg) {
    (void)e;
    pthread_mutex_lock(&net.lock);
    struct waiter *w = &net.waiters[handle - 1];
    w->bell = fn;
    w->arg = arg;
    if (w->phase != FAB_PENDING) fn(arg);
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int small_expect_outcome(fab_engine *e, uint64_t handle, fab_outcome *out) {
    (void)e;
    pthread_mutex_lock(&net.lock);
    *out = (fab_outcome){.phase = net.waiters[handle - 1].phase};
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int small_transfer_outcome(fab_engine *e, uint64_t handle, fab_outcome *out) {
    (void)e, (void)handle;
    *out = (fab_outcome){.phase = FAB_DONE};
    return 0;
}

static int small_release(fab_engine *e, uint64_t handle) {
    (void)e, (void)handle;
    pthread_mutex_lock(&net.lock);
    net.held--;
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int small_progress(fab_engine *e) { return (void)e, 0; }

/* Blocks until an expectation has ended well, and releases it. */
static void small_wait(uint64_t handle) {
    pthread_mutex_lock(&net.lock);
    while (net.waiters[handle - 1].phase == FAB_PENDING) pthread_cond_wait(&net.changed, &net.lock);
    CHECK(net.waiters[handle - 1].phase == FAB_DONE);
    net.held--;
    pthread_mutex_unlock(&net.lock);
}

/* As fab_imm_free of all: whoever still waits is told, and no bell rings afterwards. */
static void small_free_imms(fab_engine *e) {
    pthread_mutex_lock(&net.lock);
    for (uint32_t i = 0; i < net.nwaiters; i++)
        if (net.waiters[i].e == e && net.waiters[i].phase == FAB_PENDING) end(&net.waiters[i], FAB_CANCELLED);
    pthread_mutex_unlock(&net.lock);
}

static const fab_native_table small_table = {
    .version = 1,
    .struct_size = sizeof(fab_native_table),
    .submit_many = small_submit_many,
    .expect = small_expect,
    .expect_bell = small_bell,
    .expect_outcome = small_expect_outcome,
    .expect_release = small_release,
    .transfer_outcome = small_transfer_outcome,
    .transfer_release = small_release,
    .progress = small_progress,
};

#endif
