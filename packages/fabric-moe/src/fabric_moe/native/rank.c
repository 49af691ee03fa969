/* A rank of a group, as the proxy knows it: its memory, where the others' lies, and what it has submitted. */
#include "proxy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void *copied(const void *from, size_t bytes) {
    void *made = malloc(bytes ? bytes : 1);
    if (made) memcpy(made, from, bytes);
    return made;
}

static void drop(moe_rank *r) {
    for (uint32_t i = 0; r->slots && i < r->shape.depth; i++) {
        moe_slot *s = &r->slots[i];
        free(s->starts);
        free(s->begin);
        free(s->turn);
        free(s->due);
        free(s->transfers);
    }
    pthread_mutex_destroy(&r->lock);
    free(r->slots);
    free(r->remotes);
    free(r->alive);
    free(r->place);
    free(r->theirs);
    free(r->credits);
    free(r->targets);
    free(r);
}

static bool sized(moe_slot *s, size_t ranks) {
    s->starts = calloc(ranks + 1, sizeof *s->starts);
    s->begin = calloc(ranks, sizeof *s->begin);
    s->turn = calloc(ranks, sizeof *s->turn);
    s->due = calloc(ranks, sizeof *s->due);
    return s->starts && s->begin && s->turn && s->due;
}

moe_rank *moe_rank_new(const moe_shape *shape, const uint64_t *remotes, const uint8_t *alive, const uint32_t *theirs,
                       const uint32_t *credits) {
    const fab_native_table *api = (const fab_native_table *)(uintptr_t)shape->api;
    if (api->version != 1 || api->struct_size < offsetof(fab_native_table, expect_bell) + sizeof api->expect_bell)
        return NULL;
    if (!shape->ranks || !shape->depth) return NULL;
    moe_rank *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    size_t n = shape->ranks;
    r->api = api;
    r->engine = (fab_engine *)(uintptr_t)shape->engine;
    r->shape = *shape;
    pthread_mutex_init(&r->lock, NULL);
    r->remotes = copied(remotes, n * sizeof *remotes);
    r->alive = copied(alive, n);
    r->theirs = copied(theirs, n * shape->depth * MOE_KINDS * sizeof *theirs);
    r->credits = copied(credits, shape->depth * sizeof *credits);
    r->targets = calloc(n, sizeof *r->targets);
    r->place = calloc(n, sizeof *r->place);
    r->slots = calloc(shape->depth, sizeof *r->slots);
    bool well = r->remotes && r->alive && r->theirs && r->credits && r->targets && r->place && r->slots;
    for (uint32_t i = 1; well && i < shape->ranks; i++) r->place[i] = r->place[i - 1] + (r->alive[i - 1] != 0);
    for (uint32_t i = 0; well && i < shape->depth; i++) well = sized(&r->slots[i], n);
    if (!well || moe_thread_join(r)) {
        drop(r);
        return NULL;
    }
    return r;
}

void moe_rank_stop(moe_rank *r) {
    moe_thread_leave(r);
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_mutex_unlock(&r->lock);
}

void moe_rank_free(moe_rank *r) {
    moe_rank_stop(r);
    for (uint32_t i = 0; i < r->shape.depth; i++) {
        moe_slot *s = &r->slots[i];
        if (s->credited) r->api->expect_release(r->engine, s->credited);
        for (uint32_t k = 0; k < s->ntransfers; k++) r->api->transfer_release(r->engine, s->transfers[k]);
    }
    drop(r);
}

int moe_says(moe_trouble *out, int code, int64_t rc) {
    memset(out, 0, sizeof *out);
    out->code = code;
    out->rc = (int32_t)rc;
    return code;
}

int moe_submit(moe_rank *r, uint32_t slot, uint32_t n, uint32_t imm, moe_trouble *out) {
    moe_slot *s = &r->slots[slot];
    if (r->stopped) return moe_says(out, MOE_REFUSED, -ESHUTDOWN);
    if (s->ntransfers == s->room) { /* before the submit: what was submitted must be known */
        uint32_t room = s->room ? 2 * s->room : 16;
        uint64_t *more = realloc(s->transfers, room * sizeof *more);
        if (!more) return moe_says(out, MOE_REFUSED, -ENOMEM);
        s->transfers = more;
        s->room = room;
    }
    int64_t rc =
        r->api->submit_many(r->engine, FAB_OP_SCATTER, r->shape.local, r->targets, n, imm, -1, r->shape.transfer_ns, 0);
    if (rc == -EAGAIN) return moe_says(out, MOE_FULL, rc);
    if (rc < 0) return moe_says(out, MOE_REFUSED, rc);
    s->transfers[s->ntransfers++] = (uint64_t)rc;
    return MOE_OK;
}

uint32_t moe_take(moe_rank *r, uint32_t slot, uint64_t *handles, uint32_t cap) {
    uint32_t taken = 0, kept = 0;
    pthread_mutex_lock(&r->lock);
    moe_slot *s = &r->slots[slot];
    for (uint32_t i = 0; i < s->ntransfers; i++) {
        fab_outcome out;
        uint64_t handle = s->transfers[i];
        if (!r->api->transfer_outcome(r->engine, handle, &out) && out.phase == FAB_DONE)
            r->api->transfer_release(r->engine, handle);
        else if (taken < cap) handles[taken++] = handle;
        else s->transfers[kept++] = handle;
    }
    s->ntransfers = kept;
    pthread_mutex_unlock(&r->lock);
    return taken;
}
