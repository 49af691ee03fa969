/* What the ranks of test_gpu.c send by: writes are copies, made when a transfer is found to have ended; the engine is full now and
 * then, and transfers end late. */
#ifndef GPU_NET_H
#define GPU_NET_H

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "gpu.h"
#include "moe_check.h"

enum { RANKS = 4, DEPTH = 2, TOKENS = 6, HELD = 2, ROW = 32, SUM = 16, STEPS = 150, CONTROL = 77, DATA = 78 };
enum { SENT = TOKENS * RANKS, MOST = RANKS * TOKENS, STRIDE = 128, COUNTED = 4 * RANKS * (1 + HELD) };
enum { IN_SUMS = MOST * ROW, IN_STRIDE = IN_SUMS + RANKS * MOE_GPU_LINE + SENT * SUM };
enum { OUT_SUMS = SENT * ROW, OUT_STRIDE = OUT_SUMS + RANKS * MOE_GPU_LINE + MOST * SUM };
enum { IMMS = 64, WAITERS = 4096, OPS = 1 << 14, CONTROL_BYTES = DEPTH * RANKS * STRIDE + RANKS * MOE_GPU_LINE };

struct fab_engine { /* of one rank */
    uint8_t control_in[CONTROL_BYTES], control_out[CONTROL_BYTES], in[DEPTH * IN_STRIDE], out[DEPTH * OUT_STRIDE];
    uint64_t arrived[IMMS], claimed[IMMS];
    struct {
        uint32_t imm, phase;
        uint64_t count;
    } waiters[WAITERS];
    uint32_t nwaiters, rank, pending[DEPTH + 1]; /* the last: transfers of each slot, and notes */
    moe_gpu_mail mail;
    moe_gpu_said said;
    uint32_t counted[DEPTH][COUNTED / 4], came[DEPTH][COUNTED / 4];
    moe_gpu *gpu;
};
static struct fab_engine ranks[RANKS];
static struct {
    pthread_mutex_t lock;
    uint64_t calls, transfers; /* the latter of the group under way */
    int64_t held;
} net = {.lock = PTHREAD_MUTEX_INITIALIZER};
static struct { /* a transfer; its bytes move when it ends */
    uint64_t local;
    int64_t imm;
    uint32_t n;
    fab_target to[RANKS];
} ops[OPS];

/* The slot that a transfer is of; DEPTH: a note. */
static uint32_t slot_of(uint64_t local, const fab_target *to) {
    return (uint32_t)(to->loff / (local == CONTROL ? RANKS * STRIDE : OUT_STRIDE));
}

static int64_t submit(fab_engine *e, uint32_t op, uint64_t local, const fab_target *to, uint32_t n, int64_t imm,
                      int32_t nic, uint64_t timeout_ns, uint64_t flag) {
    (void)nic, (void)timeout_ns;
    CHECK(op == FAB_OP_SCATTER && n && !flag && imm < IMMS);
    pthread_mutex_lock(&net.lock);
    int64_t rc = -EAGAIN;
    if (++net.calls % 5) {
        CHECK(net.transfers < OPS);
        ops[net.transfers].local = local;
        ops[net.transfers].imm = imm;
        ops[net.transfers].n = n;
        memcpy(ops[net.transfers].to, to, n * sizeof *to);
        e->pending[slot_of(local, to)]++;
        net.held++;
        rc = (int64_t)++net.transfers;
    }
    pthread_mutex_unlock(&net.lock);
    return rc;
}

static void deliver(struct fab_engine *e, uint64_t handle) {
    bool control = ops[handle - 1].local == CONTROL;
    int64_t imm = ops[handle - 1].imm;
    for (uint32_t i = 0; i < ops[handle - 1].n; i++) {
        fab_target t = ops[handle - 1].to[i];
        struct fab_engine *d = &ranks[(t.remote - 1) / 2];
        CHECK(control == (t.remote % 2 == 1) && t.len);
        CHECK(t.loff + t.len <= (control ? sizeof e->control_out : sizeof e->out));
        CHECK(t.roff + t.len <= (control ? sizeof d->control_in : sizeof d->in));
        memcpy((control ? d->control_in : d->in) + t.roff, (control ? e->control_out : e->out) + t.loff, t.len);
        if (imm >= 0) d->arrived[imm]++;
    }
    e->pending[slot_of(ops[handle - 1].local, ops[handle - 1].to)]--;
}

static int64_t expect(fab_engine *e, uint32_t imm, uint64_t count, uint64_t timeout_ns, const uint32_t *peers,
                      uint32_t n) {
    (void)timeout_ns, (void)peers, (void)n;
    pthread_mutex_lock(&net.lock);
    bool full = ++net.calls % 7 == 0;
    CHECK(e->nwaiters < WAITERS);
    int64_t handle = -EAGAIN;
    if (!full) {
        e->waiters[e->nwaiters].imm = imm;
        e->waiters[e->nwaiters].count = count;
        handle = ++e->nwaiters;
        net.held++;
    }
    pthread_mutex_unlock(&net.lock);
    return handle;
}

static int outcome(fab_engine *e, uint64_t handle, fab_outcome *out) {
    pthread_mutex_lock(&net.lock);
    uint32_t i = (uint32_t)handle - 1, imm = e->waiters[i].imm;
    if (e->waiters[i].phase == FAB_PENDING && e->arrived[imm] - e->claimed[imm] >= e->waiters[i].count) {
        e->claimed[imm] += e->waiters[i].count;
        e->waiters[i].phase = FAB_DONE;
    }
    *out = (fab_outcome){.phase = e->waiters[i].phase};
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int ended(fab_engine *e, uint64_t handle, fab_outcome *out) {
    pthread_mutex_lock(&net.lock);
    *out = (fab_outcome){.phase = ++net.calls % 3 ? FAB_DONE : FAB_PENDING, .peer = UINT32_MAX};
    if (out->phase == FAB_DONE) deliver(e, handle);
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int release(fab_engine *e, uint64_t handle) {
    (void)e, (void)handle;
    pthread_mutex_lock(&net.lock);
    net.held--;
    pthread_mutex_unlock(&net.lock);
    return 0;
}

static int cancel(fab_engine *e, uint64_t handle) { return (void)e, (void)handle, 0; }
static int progress(fab_engine *e) { return (void)e, 0; }

static const fab_native_table table = {
    .version = 1,
    .struct_size = sizeof(fab_native_table),
    .submit_many = submit,
    .expect = expect,
    .expect_outcome = outcome,
    .expect_release = release,
    .transfer_outcome = ended,
    .transfer_cancel = cancel,
    .transfer_release = release,
    .progress = progress,
};

#endif
