/* What a rank's own thread calls: the counts and the early rows of a step, and the rest if it is there before the proxy. */
#include "proxy.h"

#include <errno.h>
#include <string.h>
#include <time.h>

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A full engine: does some of its work, and says whether it is worth trying again. Called without the lock. */
static bool made_room(const moe_rank *r, uint64_t began) {
    if (r->api->progress(r->engine) <= 0) {
        struct timespec pause = {0, 20000};
        nanosleep(&pause, NULL);
    }
    return now_ns() - began < r->shape.patience_ns;
}

void moe_begin(moe_rank *r, uint32_t slot, uint64_t number, uint32_t window, const int64_t *starts) {
    pthread_mutex_lock(&r->lock);
    moe_slot *s = &r->slots[slot];
    s->number = number;
    s->window = window;
    memcpy(s->starts, starts, (r->shape.ranks + 1) * sizeof *starts);
    memset(s->due, 0, r->shape.ranks);
    s->packed = s->here = false;
    s->expects = 0;
    s->state = MOE_WAITING;
    memset(&s->trouble, 0, sizeof s->trouble);
    atomic_store_explicit(&s->counts.attended, 0, memory_order_relaxed);
    atomic_store_explicit(&s->counts.rung, 0, memory_order_relaxed);
    pthread_mutex_unlock(&r->lock);
}

static void target(const moe_rank *r, uint32_t slot, uint32_t kind, const moe_sums *sums, uint32_t d, fab_target *to) {
    const moe_shape *c = &r->shape;
    const moe_slot *s = &r->slots[slot];
    uint64_t in = slot * c->in_stride, out = slot * c->out_stride;
    to->remote = r->remotes[d];
    if (kind == MOE_COUNTS) {
        to->loff = out;
        to->roff = in + c->rank * c->counts_stride;
        to->len = c->counts_stride;
    } else if (kind == MOE_SUMS) {
        moe_sums_target(r, slot, sums, d, to);
    } else {
        uint64_t rows = moe_rows_for(s, d);
        to->loff = out + c->out_rows + (uint64_t)s->starts[d] * c->row_bytes;
        to->roff = in + c->in_rows + (uint64_t)c->rank * c->private_max * c->row_bytes;
        to->len = (rows < s->window ? rows : s->window) * c->row_bytes;
    }
}

/* In as few scatters as the ranks' immediates allow. What was submitted before an error stays submitted. */
int moe_send_all(moe_rank *r, uint32_t slot, uint32_t kind, const moe_sums *sums, moe_trouble *out) {
    uint32_t ranks = r->shape.ranks;
    uint64_t began = now_ns();
    for (uint32_t d = 0; d < ranks; d++) {
        uint32_t imm = moe_imm(r, d, slot, kind), first = d;
        while (first && !(r->alive[first - 1] && moe_imm(r, first - 1, slot, kind) == imm)) first--;
        if (!r->alive[d] || first) continue; /* it went with one before */
        int rc = MOE_FULL;
        while (rc == MOE_FULL) {
            uint32_t n = 0;
            moe_help_begin();
            pthread_mutex_lock(&r->lock); /* the proxy uses the same list of targets */
            for (uint32_t k = d; k < ranks; k++) {
                if (!r->alive[k] || moe_imm(r, k, slot, kind) != imm) continue;
                target(r, slot, kind, sums, k, &r->targets[n]);
                n += r->targets[n].len > 0;
            }
            rc = n ? moe_submit(r, slot, n, imm, out) : MOE_OK;
            pthread_mutex_unlock(&r->lock);
            moe_help_end();
            if (rc == MOE_FULL && !made_room(r, began)) return moe_says(out, MOE_REFUSED, -EAGAIN);
        }
        if (rc) return rc;
    }
    return MOE_OK;
}

int moe_send_counts(moe_rank *r, uint32_t slot, moe_trouble *out) {
    const moe_shape *c = &r->shape;
    const moe_slot *s = &r->slots[slot];
    uint8_t *at = (uint8_t *)(uintptr_t)c->outbound + slot * c->out_stride;
    moe_head head = {.magic = MOE_MAGIC, .generation = c->generation, .step = s->number, .rank = c->rank};
    head.private_rows = s->window;
    memcpy(at, &head, sizeof head);
    uint32_t *counts = (uint32_t *)(void *)(at + MOE_HEAD);
    for (uint32_t d = 0; d < c->ranks; d++) counts[d] = (uint32_t)moe_rows_for(s, d);
    return moe_send_all(r, slot, MOE_COUNTS, NULL, out);
}

int moe_arm(moe_rank *r, uint32_t slot, uint64_t expectation) {
    moe_slot *s = &r->slots[slot];
    pthread_mutex_lock(&r->lock);
    s->expects = expectation;
    pthread_mutex_unlock(&r->lock);
    return r->api->expect_bell(r->engine, expectation, moe_ring, &s->counts);
}

/* [lock] Whether the counts of all ranks are here. Not polled: whoever waits for them steps the engine. */
static void hear_counts(moe_rank *r, uint32_t slot) {
    moe_slot *s = &r->slots[slot];
    fab_outcome ended;
    if (!s->here && s->expects && !r->api->expect_outcome(r->engine, s->expects, &ended))
        s->here = ended.phase == FAB_DONE;
}

int moe_send_rows(moe_rank *r, uint32_t slot, moe_trouble *out) {
    int rc = moe_send_all(r, slot, MOE_ROWS, NULL, out);
    moe_help_begin();
    pthread_mutex_lock(&r->lock);
    moe_slot *s = &r->slots[slot];
    s->packed = !rc;
    hear_counts(r, slot);
    int more = rc ? MOE_OK : moe_advance(r, slot);
    pthread_mutex_unlock(&r->lock);
    if (more == MOE_FULL) moe_ring(&s->counts); /* to be tried again */
    moe_help_end();
    return rc; /* of the rest: the receiving half raises it */
}

void moe_attend(moe_rank *r, uint32_t slot) {
    atomic_store_explicit(&r->slots[slot].counts.attended, 1, memory_order_relaxed);
}

int moe_rest(moe_rank *r, uint32_t slot, moe_trouble *out) {
    moe_slot *s = &r->slots[slot];
    uint64_t began = now_ns();
    for (;;) {
        moe_help_begin();
        pthread_mutex_lock(&r->lock);
        s->here = true; /* the caller has waited for them */
        int rc = moe_advance(r, slot);
        *out = s->trouble;
        pthread_mutex_unlock(&r->lock);
        moe_help_end();
        if (rc == MOE_NOT_YET) return moe_says(out, rc, 0);
        if (rc != MOE_FULL) return rc;
        if (!made_room(r, began)) return moe_says(out, MOE_REFUSED, -EAGAIN);
    }
}

int moe_read(moe_rank *r, uint32_t slot, int64_t *counts, int64_t *private_rows, moe_trouble *out) {
    pthread_mutex_lock(&r->lock);
    int rc = moe_heads(r, slot, counts, private_rows, out);
    pthread_mutex_unlock(&r->lock);
    return rc;
}

int moe_look(moe_rank *r, uint32_t slot, moe_trouble *out) {
    pthread_mutex_lock(&r->lock);
    const moe_slot *s = &r->slots[slot];
    *out = s->trouble;
    int rc = s->state == MOE_FAILED ? s->trouble.code : MOE_OK;
    pthread_mutex_unlock(&r->lock);
    return rc;
}
