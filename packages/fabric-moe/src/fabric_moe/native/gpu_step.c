/* One look at the words of a rank on a GPU, and at what has come: what they make possible is sent, and kernels are let go on. */
#include "gpu.h"

#include <errno.h>
#include <string.h>

/* This rank cannot go on, or must not: its kernels end, and the others are told because of whom. */
void moe_gpu_fail(moe_gpu *g, int error, uint64_t ranks) {
    if (!atomic_load_explicit(&g->error, memory_order_relaxed)) {
        atomic_store_explicit(&g->culprits, ranks, memory_order_relaxed);
        atomic_store_explicit(&g->error, error, memory_order_release);
    }
    atomic_fetch_or_explicit(&g->mail->noted, ranks, memory_order_release);
    moe_gpu_tell(g, ranks);
}

static const uint32_t imm_kind[MOE_GPU_SENDS] = {MOE_GPU_IMM_COUNTS, MOE_GPU_IMM_ROWS, MOE_GPU_IMM_ROWS,
                                                 MOE_GPU_IMM_SUMS};

/* All that is due of a kind, in as few scatters as the others' immediates allow. A full engine is tried again at the next look. */
static void send_due(moe_gpu *g, uint32_t slot, uint32_t kind) {
    moe_gpu_slot *s = &g->slots[slot];
    fab_target to[MOE_GPU_RANKS];
    while (s->due[kind]) {
        uint32_t first = (uint32_t)__builtin_ctzll(s->due[kind]), n = 0;
        uint32_t imm = g->theirs[first][slot][imm_kind[kind]];
        uint64_t some = 0;
        for (uint32_t d = first; d < g->c.ranks; d++) {
            if (!(s->due[kind] >> d & 1) || g->theirs[d][slot][imm_kind[kind]] != imm) continue;
            to[n++] = moe_gpu_target(g, slot, kind, d);
            some |= UINT64_C(1) << d;
        }
        int rc = moe_gpu_send(g, s, kind == MOE_GPU_COUNTS ? g->c.control_local : g->c.data_local, to, n, imm);
        if (rc == -EAGAIN) return;
        s->due[kind] &= ~some;
        if (rc) moe_gpu_fail(g, rc, UINT64_C(1) << g->c.rank);
    }
}

static void expect(moe_gpu *g, uint32_t slot, uint32_t which, uint32_t imm, uint32_t count) {
    moe_gpu_slot *s = &g->slots[slot];
    if (s->waits[which]) return;
    int64_t rc = g->api->expect(g->engine, g->ours[slot][imm], count, UINT64_C(1) << 60, NULL, 0);
    if (rc > 0) s->waits[which] = (uint64_t)rc;
    else if (rc != -EAGAIN) moe_gpu_fail(g, (int)rc, UINT64_C(1) << g->c.rank);
}

/* Whether what is waited for has come. The expectation is kept until the slot begins anew. */
static bool come(moe_gpu *g, const moe_gpu_slot *s, uint32_t which) {
    fab_outcome ended;
    if (!s->waits[which] || g->api->expect_outcome(g->engine, s->waits[which], &ended)) return false;
    if (ended.phase == FAB_FAILED || ended.phase == FAB_CANCELLED) /* only a close of the engine does that */
        moe_gpu_fail(g, -ESHUTDOWN, UINT64_C(1) << g->c.rank);
    return ended.phase == FAB_DONE;
}

/* Forgets transfers that have ended; what failed for no peer's sake is our own trouble. */
static void settle(moe_gpu *g, moe_gpu_slot *s) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->ntransfers; i++) {
        fab_outcome out;
        bool known = !g->api->transfer_outcome(g->engine, s->transfers[i], &out);
        if (known && out.phase == FAB_PENDING) {
            s->transfers[kept++] = s->transfers[i];
            continue;
        }
        g->api->transfer_release(g->engine, s->transfers[i]);
        if (known && out.phase == FAB_FAILED && out.peer == UINT32_MAX)
            moe_gpu_fail(g, out.err, UINT64_C(1) << g->c.rank);
    }
    s->ntransfers = kept;
}

static bool advance_slot(moe_gpu *g, uint32_t slot) {
    moe_gpu_slot *s = &g->slots[slot];
    moe_gpu_mail *mail = g->mail;
    settle(g, s);
    if (atomic_load_explicit(&mail->noted, memory_order_relaxed)) return s->ntransfers > 0;
    if (!s->open) {
        uint32_t word = atomic_load_explicit(&mail->counted[slot], memory_order_acquire);
        if (word == s->epoch) return s->ntransfers > 0;
        moe_gpu_begin(g, slot, word);
    }
    bool packed = atomic_load_explicit(&mail->packed[slot], memory_order_acquire) == s->epoch;
    send_due(g, slot, MOE_GPU_COUNTS);
    if (packed) send_due(g, slot, MOE_GPU_EARLY);
    expect(g, slot, WAIT_COUNTS, MOE_GPU_IMM_COUNTS, (uint32_t)__builtin_popcountll(g->alive));
    expect(g, slot, WAIT_SUMS, MOE_GPU_IMM_SUMS, (uint32_t)__builtin_popcountll(g->alive));
    if (!s->placed && come(g, s, WAIT_COUNTS)) moe_gpu_place(g, slot);
    if (!s->placed) {
        moe_gpu_peek(g, slot);
        return true;
    }
    if (packed) send_due(g, slot, MOE_GPU_LATE);
    if (s->writes) expect(g, slot, WAIT_ROWS, MOE_GPU_IMM_ROWS, s->writes);
    if (come(g, s, WAIT_ROWS)) s->rows_here = true;
    if (!s->rows_here) return true;
    atomic_store_explicit(&mail->rows_here[slot], s->epoch, memory_order_release);
    if (!s->sums_begun && atomic_load_explicit(&mail->summed[slot], memory_order_acquire) == s->epoch) {
        s->sums_begun = true;
        s->due[MOE_GPU_SUMS] = g->alive;
    }
    if (!s->sums_begun) return true;
    send_due(g, slot, MOE_GPU_SUMS);
    /* our own writes too: the next use of the slot changes what they read */
    if (s->due[MOE_GPU_SUMS] || s->ntransfers || !come(g, s, WAIT_SUMS)) return true;
    s->open = false;
    atomic_store_explicit(&mail->sums_here[slot], s->epoch, memory_order_release);
    return true;
}

/* Who has left, who has given up. */
static void listen(moe_gpu *g) {
    const moe_gpu_shape *c = &g->c;
    const uint8_t *notes = (const uint8_t *)(uintptr_t)c->control_in + (uint64_t)c->depth * c->ranks * c->counts_stride;
    for (uint32_t r = 0; r < c->ranks; r++) {
        uint64_t bit = UINT64_C(1) << r;
        if (r == c->rank || !(g->alive & bit)) continue;
        fab_outcome ended;
        if (!(g->lost & bit) && g->lifelines[r] && !g->api->expect_outcome(g->engine, g->lifelines[r], &ended) &&
            ended.phase == FAB_FAILED) {
            g->lost |= bit;
            atomic_fetch_or_explicit(&g->mail->gone, bit, memory_order_release);
        }
        const volatile moe_gpu_head *note = (const volatile void *)(notes + (size_t)r * MOE_GPU_LINE);
        if (note->magic != MOE_GPU_MAGIC || note->generation != c->generation) continue;
        uint64_t ranks = note->ranks & g->alive;
        if (ranks == bit) atomic_fetch_or_explicit(&g->mail->gone, bit, memory_order_release);
        else if (ranks) atomic_fetch_or_explicit(&g->mail->noted, ranks, memory_order_release);
    }
}

bool moe_gpu_advance(moe_gpu *g) {
    bool busy = false;
    for (uint32_t slot = 0; slot < g->c.depth; slot++) busy |= advance_slot(g, slot);
    const moe_gpu_said *said = (const void *)(uintptr_t)g->c.said;
    if (__atomic_load_n(&said->lost, __ATOMIC_ACQUIRE)) moe_gpu_tell(g, said->culprits);
    if (g->note_due) {
        moe_gpu_send_notes(g);
        busy = true;
    }
    if (busy) {
        listen(g);
        g->api->progress(g->engine);
    }
    return busy;
}
