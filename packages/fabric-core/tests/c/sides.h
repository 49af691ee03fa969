/* Two engines over loop_domain.h that know each other's memory. */
#ifndef FAB_TEST_SIDES_H
#define FAB_TEST_SIDES_H
#include "fabric/engine.h"
#include "loop_domain.h"

#define MS 1000000ull

static const uint64_t *sides_clock; /* NULL: the real one */

typedef struct side {
    fab_engine *engine;
    loop_nic *nic[8];
    uint32_t nnics;
    uint8_t *mem;
    uint64_t len, local, remote; /* remote: of this side's memory, as the other side knows it */
    uint32_t peer;
} side;

static side make_side(uint32_t nnics, uint32_t seed, uint64_t max_write, uint64_t len, int thread, uint64_t spin) {
    fab_engine_cfg cfg = {.imm_slots = 64,
                          .max_inflight = 4096,
                          .max_peers = 16,
                          .spin_ns = spin,
                          .timeout_ns = 20000 * MS,
                          .inline_bytes = 4096,
                          .shard_bytes = 64,
                          .clock = sides_clock};
    side s = {.nnics = nnics, .len = len};
    s.engine = fab_engine_new(&cfg);
    CHECK(s.engine);
    uint64_t ops[8], ctx[8], cpus[16] = {0};
    for (uint32_t i = 0; i < nnics; i++) {
        s.nic[i] = loop_new(seed ? seed + i : 0, max_write);
        ops[i] = (uint64_t)(uintptr_t)&loop_ops;
        ctx[i] = (uint64_t)(uintptr_t)s.nic[i];
    }
    CHECK(fab_group_open(s.engine, nnics, ops, ctx, cpus, thread) == 0);
    s.mem = calloc(1, len);
    return s;
}

static void join(side *from, side *to) {
    fab_mr_keys keys[8];
    fab_mr mine = {.addr = (uint64_t)(uintptr_t)from->mem, .len = from->len, .fd = -1};
    from->local = (uint64_t)fab_mem_reg(from->engine, 0, &mine, keys);
    char text[8][32];
    const char *addrs[8];
    uint64_t key[8], base[8];
    for (uint32_t i = 0; i < to->nnics; i++) {
        snprintf(text[i], sizeof text[i], "%p", (void *)to->nic[i]);
        addrs[i] = text[i];
        key[i] = 9;
        base[i] = (uint64_t)(uintptr_t)to->mem;
    }
    int64_t peer = fab_peer_add(from->engine, 0, to->nnics, addrs);
    CHECK(peer >= 0);
    from->peer = (uint32_t)peer;
    to->remote =
        (uint64_t)fab_remote_add(from->engine, 0, from->peer, to->len, FAB_ACCESS_REMOTE_WRITE, to->nnics, key, base);
}

static void drop_side(side *s) {
    fab_engine_close(s->engine, 1000 * MS);
    fab_engine_free(s->engine);
    for (uint32_t i = 0; i < s->nnics; i++) {
        CHECK(s->nic[i]->closed == 1, "a domain is closed exactly once");
        free(s->nic[i]);
    }
    free(s->mem);
}

static void run_until(side *a, side *b, uint64_t handle) {
    for (uint32_t i = 0; fab_transfer_poll(a->engine, handle) == FAB_PENDING; i++) {
        if (b) fab_progress(b->engine);
        CHECK(i < 50000000u, "hangs");
    }
}

#endif
