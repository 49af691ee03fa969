/* What a ping costs in instructions: two engines, and beside them two bare queue pairs, each pair driven by one thread. Meant for
 * a guest whose clock counts instructions (run_in_guest.py --icount), where every run gives the same.
 *
 *     bench_pair DEVICE PEER_DEVICE GID PINGS
 *
 * A ping is a write of 8 bytes with an immediate, and one back, each seen by polling. Printed: nanoseconds per direction (in such
 * a guest: instructions), the median, of the whole and of its parts. */
#include "bare.h"
#include "fabric/engine.h"

/* ---- engines ---------------------------------------------------------------------------------------------- */

typedef struct side {
    fab_engine *e;
    char address[256];
    uint64_t memory[512], local, remote;
    uint32_t imm;
    fab_mr_keys keys;
} side;

static void side_open(side *s, const char *device, uint32_t gid, uint64_t incarnation) {
    char err[256] = "";
    void *domain = NULL;
    fab_verbs_cfg c = {.device = device,
                       .port = 1,
                       .gid_index = gid,
                       .hop_limit = 64,
                       .timeout = 18,
                       .retry = 6,
                       .depth = 128,
                       .chain = 4,
                       .inline_bytes = 220,
                       .relaxed = 1,
                       .numa = UINT32_MAX,
                       .incarnation = incarnation,
                       .heartbeat_ns = 5000000000ull,
                       .connect_ns = 20000000000ull,
                       .contact = fab_native_api()->contact_api()};
    if (fab_verbs_open(&c, &domain, err, sizeof err) < 0) die(err, 0);
    fab_engine_cfg ec = {.imm_slots = 64,
                         .max_inflight = 4096,
                         .max_peers = 4,
                         .hand_over = 1,
                         .spin_ns = 20000, /* as on few cores: the guest has two */
                         .timeout_ns = 60000000000ull,
                         .inline_bytes = 1 << 20,
                         .shard_bytes = 1 << 20};
    s->e = fab_engine_new(&ec);
    uint64_t ops = fab_verbs_ops(), ctx = (uint64_t)(uintptr_t)domain, cpus[16] = {0};
    int rc = fab_group_open(s->e, 1, &ops, &ctx, cpus, 1);
    if (rc < 0) die("group", rc);
    fab_group_address(s->e, 0, 0, s->address, sizeof s->address);
    fab_mr mr = {.addr = (uintptr_t)s->memory, .len = sizeof s->memory, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    int64_t handle = fab_mem_reg(s->e, 0, &mr, &s->keys);
    if (handle < 0) die("registration", (long)handle);
    s->local = (uint64_t)handle;
    s->imm = (uint32_t)fab_imm_alloc(s->e);
}

static void side_meet(side *s, const side *to) {
    const char *list[1] = {to->address};
    uint64_t key = to->keys.remote_key, base = to->keys.remote_base;
    int64_t peer = fab_peer_add(s->e, 0, 1, list);
    int64_t remote =
        fab_remote_add(s->e, 0, (uint32_t)peer, sizeof to->memory, FAB_ACCESS_REMOTE_WRITE, 1, &key, &base);
    if (remote < 0) die("remote", (long)remote);
    s->remote = (uint64_t)remote;
}

static uint64_t ping(side *s, int64_t imm) {
    int64_t t = fab_submit_write(s->e, s->local, 0, s->remote, 0, 8, imm, -1, 0, 0);
    if (t < 0) die("submit", (long)t);
    return (uint64_t)t;
}

static void finish(side *s, side *other, uint64_t t) {
    int phase = FAB_PENDING;
    for (uint64_t until = fv_clock() + 60000000000ull; phase == FAB_PENDING && fv_clock() < until;) {
        phase = fab_transfer_poll(s->e, t);
        if (other) fab_progress(other->e);
    }
    if (phase != FAB_DONE) die("a write", phase);
    fab_transfer_release(s->e, t);
}

static uint64_t expect(side *s) {
    int64_t x = fab_expect(s->e, s->imm, 1, 0, NULL, 0);
    if (x < 0) die("expectation", (long)x);
    return (uint64_t)x;
}

static void arrived(side *s, uint64_t x) {
    int phase = FAB_PENDING;
    for (uint64_t until = fv_clock() + 60000000000ull; phase == FAB_PENDING && fv_clock() < until;)
        phase = fab_expect_poll(s->e, x);
    if (phase != FAB_DONE) die("an immediate", phase);
    fab_expect_release(s->e, x);
}

int main(int argc, char **argv) {
    char err[256] = "";
    static bare a, b;
    static side s, t;
    if (argc != 5) die("usage: bench_pair DEVICE PEER_DEVICE GID PINGS", argc);
    uint32_t gid = (uint32_t)atoi(argv[3]), n = (uint32_t)atoi(argv[4]);
    if (fab_verbs_load(NULL, err, sizeof err) < 0) die(err, 0);
    enum { BARE, BARE_POST, BARE_LOOK, OURS, SUBMIT, SEEN, END, EXPECT, LOOK, KINDS };
    static const char *const names[KINDS] = {"bare",
                                             "bare: post",
                                             "bare: one look, nothing there",
                                             "ours",
                                             "ours: submit",
                                             "ours: seen",
                                             "ours: end of the write, seen",
                                             "ours: expect",
                                             "ours: one look, nothing there"};
    double *v[KINDS];
    for (int k = 0; k < KINDS; k++) v[k] = calloc(n, sizeof(double));
    bare_open(&a, argv[1], (int)gid);
    bare_open(&b, argv[2], (int)gid);
    bare_connect(&a, &b.self, (uint8_t)gid);
    bare_connect(&b, &a.self, (uint8_t)gid);
    for (uint32_t i = 0; i < n; i++) {
        struct ibv_wc w[4];
        uint64_t t0 = fv_clock();
        bare_post(&a, &b.self);
        uint64_t t1 = fv_clock();
        bare_wait(&b);
        bare_post(&b, &a.self);
        bare_wait(&a);
        uint64_t t2 = fv_clock();
        while (ibv_poll_cq(a.cq, 4, w) + ibv_poll_cq(b.cq, 4, w)) {
        }
        uint64_t t3 = fv_clock();
        ibv_poll_cq(a.cq, 4, w);
        v[BARE_LOOK][i] = (double)(fv_clock() - t3);
        v[BARE][i] = (double)(t2 - t0) / 2;
        v[BARE_POST][i] = (double)(t1 - t0);
    }
    side_open(&s, argv[1], gid, 11);
    side_open(&t, argv[2], gid, 12);
    side_meet(&s, &t);
    side_meet(&t, &s);
    finish(&s, &t, ping(&s, -1));
    finish(&t, &s, ping(&t, -1));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t e0 = fv_clock();
        uint64_t x = expect(&s);
        uint64_t e1 = fv_clock();
        uint64_t y = expect(&t);
        uint64_t t0 = fv_clock();
        uint64_t there = ping(&s, t.imm);
        uint64_t t1 = fv_clock();
        arrived(&t, y);
        uint64_t t2 = fv_clock();
        uint64_t back = ping(&t, s.imm);
        arrived(&s, x);
        uint64_t t3 = fv_clock();
        finish(&s, NULL, there);
        uint64_t t4 = fv_clock();
        finish(&t, NULL, back);
        fab_progress(s.e);
        uint64_t t5 = fv_clock();
        fab_progress(s.e);
        v[LOOK][i] = (double)(fv_clock() - t5);
        v[EXPECT][i] = (double)(e1 - e0);
        v[OURS][i] = (double)(t3 - t0) / 2;
        v[SUBMIT][i] = (double)(t1 - t0);
        v[SEEN][i] = (double)(t2 - t1);
        v[END][i] = (double)(t4 - t3);
    }
    for (int k = 0; k < KINDS; k++) printf("%-30s %9.0f\n", names[k], median(v[k], n));
    printf("ratio %.3f\n", median(v[OURS], n) / median(v[BARE], n));
    return 0;
}
