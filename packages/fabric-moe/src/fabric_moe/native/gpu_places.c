/* Where the rows and sums of a step lie, on all ranks: it follows from the counts of all, and these are checked before. */
#include "gpu.h"

#include <errno.h>
#include <string.h>

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint32_t rows_for(const moe_gpu_slot *s, uint32_t d) { return s->mine[d + 1] - s->mine[d]; }

static uint8_t *out_block(const moe_gpu *g, uint32_t slot, uint32_t d) {
    return (uint8_t *)(uintptr_t)g->c.control_out + ((uint64_t)slot * g->c.ranks + d) * g->c.counts_stride;
}

static const uint8_t *in_block(const moe_gpu *g, uint32_t slot, uint32_t q) {
    return (const uint8_t *)(uintptr_t)g->c.control_in + ((uint64_t)slot * g->c.ranks + q) * g->c.counts_stride;
}

/* What is sent to d of a kind: from where, to where, how much. */
fab_target moe_gpu_target(const moe_gpu *g, uint32_t slot, uint32_t kind, uint32_t d) {
    const moe_gpu_shape *c = &g->c;
    const moe_gpu_slot *s = &g->slots[slot];
    uint64_t out = slot * c->out_stride, in = slot * c->in_stride, me = c->rank;
    uint32_t n = rows_for(s, d), early = least(n, c->private_rows);
    fab_target to = {.remote = kind == MOE_GPU_COUNTS ? g->control[d] : g->data[d]};
    if (kind == MOE_GPU_COUNTS) {
        to.loff = ((uint64_t)slot * c->ranks + d) * c->counts_stride;
        to.roff = ((uint64_t)slot * c->ranks + me) * c->counts_stride;
        to.len = c->counts_stride;
    } else if (kind == MOE_GPU_EARLY) {
        to.loff = out + s->mine[d] * c->row_bytes;
        to.roff = in + me * c->private_rows * c->row_bytes;
        to.len = early * c->row_bytes;
    } else if (kind == MOE_GPU_LATE) {
        to.loff = out + (s->mine[d] + early) * c->row_bytes;
        to.roff = in + ((uint64_t)c->ranks * c->private_rows + s->begin[d]) * c->row_bytes;
        to.len = (n - early) * c->row_bytes;
    } else { /* sums of d's own rows: a head and they, from where they lie by source to where they lie by destination */
        to.loff = out + c->out_sums + (uint64_t)d * MOE_GPU_LINE + s->theirs[d] * c->sum_bytes;
        to.roff = in + c->in_sums + me * MOE_GPU_LINE + s->before[d] * c->sum_bytes;
        to.len = MOE_GPU_LINE + (s->theirs[d + 1] - s->theirs[d]) * c->sum_bytes;
    }
    return to;
}

/* The kernel has counted: pinned counts[ranks], then experts[ranks][held], all of this slot. */
void moe_gpu_begin(moe_gpu *g, uint32_t slot, uint32_t epoch) {
    const moe_gpu_shape *c = &g->c;
    moe_gpu_slot *s = &g->slots[slot];
    const uint32_t *counts = (const uint32_t *)(uintptr_t)(c->counted + slot * c->counted_stride);
    uint64_t everyone = 0;
    for (uint32_t k = 0; k < WAITS; k++) {
        if (s->waits[k]) g->api->expect_release(g->engine, s->waits[k]);
        s->waits[k] = 0;
    }
    memset(s->due, 0, sizeof s->due);
    s->epoch = epoch;
    s->open = true;
    s->placed = s->rows_here = s->sums_begun = false;
    s->mine[0] = 0;
    for (uint32_t d = 0; d < c->ranks; d++) s->mine[d + 1] = s->mine[d] + counts[d];
    for (uint32_t d = 0; d < c->ranks; d++) {
        if (!(g->alive >> d & 1)) continue;
        moe_gpu_head head = {.magic = MOE_GPU_MAGIC, .generation = c->generation, .epoch = epoch, .rank = c->rank};
        uint8_t *at = out_block(g, slot, d);
        memcpy(at, &head, sizeof head);
        memcpy(at + MOE_GPU_LINE, counts, c->ranks * sizeof *counts);
        memcpy(at + MOE_GPU_LINE + c->ranks * sizeof *counts, counts + c->ranks + (size_t)d * c->held,
               c->held * sizeof *counts);
        everyone |= UINT64_C(1) << d;
        if (counts[d]) s->due[MOE_GPU_EARLY] |= (uint64_t)(c->private_rows > 0) << d;
    }
    s->due[MOE_GPU_COUNTS] = everyone;
    atomic_store_explicit(&g->mail->heads[slot], 0, memory_order_relaxed);
    atomic_store_explicit(&g->mail->begun[slot], epoch, memory_order_release);
}

void moe_gpu_peek(moe_gpu *g, uint32_t slot) {
    const moe_gpu_shape *c = &g->c;
    for (uint32_t q = 0; q < c->ranks; q++) {
        if (q == c->rank) continue; /* so that never all seem to be here before the numbers are */
        const volatile moe_gpu_head *head = (const volatile void *)in_block(g, slot, q);
        if (head->magic == MOE_GPU_MAGIC && head->generation == c->generation && head->epoch == g->slots[slot].epoch)
            atomic_fetch_or_explicit(&g->mail->heads[slot], UINT64_C(1) << q, memory_order_relaxed);
    }
}

/* Reads what a source says, once, and checks it; the kernel's copy of its numbers is made. */
static int read_source(moe_gpu *g, uint32_t slot, uint32_t q) {
    const moe_gpu_shape *c = &g->c;
    const moe_gpu_slot *s = &g->slots[slot];
    const uint8_t *at = in_block(g, slot, q);
    uint32_t *arrived = (uint32_t *)(uintptr_t)(c->arrived + slot * c->counted_stride);
    uint32_t row[MOE_GPU_RANKS], *experts = arrived + c->ranks + (size_t)q * c->held;
    moe_gpu_head head;
    memcpy(&head, at, sizeof head);
    if (head.magic != MOE_GPU_MAGIC || head.generation != c->generation || head.epoch != s->epoch || head.rank != q)
        return -EPROTO;
    memcpy(row, at + MOE_GPU_LINE, c->ranks * sizeof *row);
    memcpy(experts, at + MOE_GPU_LINE + c->ranks * sizeof *row, c->held * sizeof *row);
    uint64_t copies = 0, sent = 0;
    for (uint32_t d = 0; d < c->ranks; d++) {
        if (row[d] > c->max_tokens || (q == c->rank && row[d] != rows_for(s, d))) return -EBADMSG;
        g->counts[q][d] = row[d];
        sent += row[d];
    }
    for (uint32_t e = 0; e < c->held; e++) copies += experts[e];
    if (sent > c->sent || copies > (uint64_t)row[c->rank] * c->topk) return -EBADMSG;
    arrived[q] = row[c->rank];
    return 0;
}

/* The counts of all ranks are here: where everything lies follows from them, on all ranks alike. */
void moe_gpu_place(moe_gpu *g, uint32_t slot) {
    const moe_gpu_shape *c = &g->c;
    moe_gpu_slot *s = &g->slots[slot];
    uint32_t *arrived = (uint32_t *)(uintptr_t)(c->arrived + slot * c->counted_stride);
    uint32_t writes = 0;
    for (uint32_t q = 0; q < c->ranks; q++) {
        memset(g->counts[q], 0, sizeof g->counts[q]);
        arrived[q] = 0;
        int rc = g->alive >> q & 1 ? read_source(g, slot, q) : 0;
        if (rc) {
            moe_gpu_fail(g, rc, UINT64_C(1) << q);
            return;
        }
    }
    s->theirs[0] = 0;
    for (uint32_t q = 0; q < c->ranks; q++) {
        uint64_t n = g->counts[q][c->rank];
        s->theirs[q + 1] = s->theirs[q] + (uint32_t)n;
        writes += n > 0 && c->private_rows ? 1 : 0;
        writes += n > c->private_rows ? 1 : 0;
        s->before[q] = 0;
        for (uint32_t d = 0; d < c->rank; d++) s->before[q] += (uint32_t)g->counts[q][d];
    }
    for (uint32_t d = 0; d < c->ranks; d++) {
        uint64_t all = 0;
        for (uint32_t q = 0; q < c->ranks; q++) {
            if (q == c->rank) s->begin[d] = (uint32_t)all;
            all += g->counts[q][d] > c->private_rows ? g->counts[q][d] - c->private_rows : 0;
        }
        if (all > c->shared) { /* every rank finds the same; nobody has written beyond its own rows */
            moe_gpu_fail(g, -EOVERFLOW, UINT64_C(1) << d);
            return;
        }
        if (rows_for(s, d) > c->private_rows) s->due[MOE_GPU_LATE] |= UINT64_C(1) << d;
    }
    atomic_store_explicit(&g->mail->heads[slot], UINT64_MAX, memory_order_release); /* the numbers lie in `arrived` */
    s->placed = true;
    s->writes = writes;
    s->rows_here = !writes;
}
