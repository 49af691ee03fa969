/* A rank on a GPU as the proxy knows it: its memory, the others', what it has submitted, what is said when it ends. */
#include "gpu.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

moe_gpu *moe_gpu_new(const moe_gpu_shape *shape, const uint64_t *control, const uint64_t *data, const uint32_t *theirs,
                     const uint32_t *ours, const uint64_t *lifelines) {
    const fab_native_table *api = (const fab_native_table *)(uintptr_t)shape->api;
    if (api->version != 1 || api->struct_size < offsetof(fab_native_table, imm_free)) return NULL;
    if (!shape->ranks || shape->ranks > MOE_GPU_RANKS || !shape->depth || shape->depth > MOE_GPU_SLOTS) return NULL;
    moe_gpu *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    size_t n = shape->ranks;
    g->api = api;
    g->engine = (fab_engine *)(uintptr_t)shape->engine;
    g->c = *shape;
    g->mail = (moe_gpu_mail *)(uintptr_t)shape->mail;
    g->alive = shape->alive;
    memcpy(g->control, control, n * sizeof *control);
    memcpy(g->data, data, n * sizeof *data);
    memcpy(g->lifelines, lifelines, n * sizeof *lifelines);
    for (size_t r = 0; r < n; r++)
        for (uint32_t slot = 0; slot < shape->depth; slot++)
            memcpy(g->theirs[r][slot], theirs + (r * shape->depth + slot) * MOE_GPU_KINDS, sizeof g->theirs[r][slot]);
    for (uint32_t slot = 0; slot < shape->depth; slot++)
        memcpy(g->ours[slot], ours + (size_t)slot * MOE_GPU_KINDS, sizeof g->ours[slot]);
    if (moe_gpu_join(g)) {
        free(g);
        return NULL;
    }
    return g;
}

int moe_gpu_send(moe_gpu *g, moe_gpu_slot *s, uint64_t local, const fab_target *to, uint32_t n, int64_t imm) {
    if (s->ntransfers == s->room) { /* before the submit: what was submitted must be known */
        uint32_t room = s->room ? 2 * s->room : 16;
        uint64_t *more = realloc(s->transfers, room * sizeof *more);
        if (!more) return -ENOMEM;
        s->transfers = more;
        s->room = room;
    }
    int64_t rc = g->api->submit_many(g->engine, FAB_OP_SCATTER, local, to, n, imm, -1, g->c.transfer_ns, 0);
    if (rc < 0) return (int)rc;
    s->transfers[s->ntransfers++] = (uint64_t)rc;
    return 0;
}

/* Behind the counts of all slots, in what is sent and in what comes. */
static uint64_t notes_at(const moe_gpu *g) { return (uint64_t)g->c.depth * g->c.ranks * g->c.counts_stride; }

void moe_gpu_send_notes(moe_gpu *g) {
    const moe_gpu_shape *c = &g->c;
    for (uint64_t left = g->note_due; left; left &= left - 1) { /* one by one: one that is gone keeps it from nobody */
        uint32_t r = (uint32_t)__builtin_ctzll(left);
        fab_target to = {.remote = g->control[r],
                         .loff = notes_at(g),
                         .roff = notes_at(g) + (uint64_t)c->rank * MOE_GPU_LINE,
                         .len = MOE_GPU_LINE};
        if (moe_gpu_send(g, &g->slots[0], c->control_local, &to, 1, -1) == -EAGAIN) return; /* at the next look */
        g->note_due &= ~(UINT64_C(1) << r); /* who cannot be reached hears nothing */
    }
}

void moe_gpu_tell(moe_gpu *g, uint64_t ranks) {
    const moe_gpu_shape *c = &g->c;
    if (g->note_sent) return;
    g->note_sent = true;
    moe_gpu_head note = {.magic = MOE_GPU_MAGIC, .generation = c->generation, .rank = c->rank, .ranks = ranks};
    memcpy((uint8_t *)(uintptr_t)c->control_out + notes_at(g), &note, sizeof note);
    g->note_due = g->alive & ~(UINT64_C(1) << c->rank);
    moe_gpu_send_notes(g);
}

bool moe_gpu_owes(moe_gpu *g) {
    if (g->note_due) return true;
    for (uint32_t i = 0; i < g->c.depth; i++) {
        const moe_gpu_slot *s = &g->slots[i];
        if (s->ntransfers) return true;
        for (uint32_t k = 0; s->open && !g->note_sent && k < MOE_GPU_SENDS; k++) /* who has said so owes no step */
            if (s->due[k]) return true;
    }
    return false;
}

int moe_gpu_finish(moe_gpu *g, uint64_t patience_ns) {
    struct timespec t, pause = {0, 200000};
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t began = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, now = began;
    bool owes = true;
    while (owes && now - began <= patience_ns) {
        moe_gpu_lock();
        moe_gpu_advance(g);
        owes = moe_gpu_owes(g);
        moe_gpu_unlock();
        if (owes) nanosleep(&pause, NULL);
        clock_gettime(CLOCK_MONOTONIC, &t);
        now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    return owes;
}

void moe_gpu_note(moe_gpu *g, uint64_t ranks) {
    moe_gpu_lock();
    moe_gpu_tell(g, ranks);
    moe_gpu_unlock();
}

int32_t moe_gpu_error(moe_gpu *g, uint64_t *culprits) {
    int32_t error = atomic_load_explicit(&g->error, memory_order_acquire);
    *culprits = atomic_load_explicit(&g->culprits, memory_order_relaxed);
    return error;
}

void moe_gpu_free(moe_gpu *g) {
    moe_gpu_leave(g);
    for (uint32_t i = 0; i < g->c.depth; i++) {
        moe_gpu_slot *s = &g->slots[i];
        for (uint32_t k = 0; k < WAITS; k++)
            if (s->waits[k]) g->api->expect_release(g->engine, s->waits[k]);
        for (uint32_t k = 0; k < s->ntransfers; k++) {
            g->api->transfer_cancel(g->engine, s->transfers[k]);
            g->api->transfer_release(g->engine, s->transfers[k]);
        }
        free(s->transfers);
    }
    free(g);
}
