/* Writes over the verbs backend through the whole engine, in C, so that an emulated machine's slow Python does not hide the
 * engine's own cost. Two processes, started by tools/bench/verbs.py:
 *
 *     bench_verbs serve DEVICE GID       prints "ADDRESS KEY BASE IMM", reads the writer's line, then numbers of pings to answer
 *     bench_verbs write DEVICE GID       reads that line, prints its own, then takes commands from stdin:
 *         bw BYTES COUNT     COUNT writes, their bandwidth in MiB/s
 *         rate BYTES COUNT   COUNT writes by one paged submit, million per second
 *         lat BYTES COUNT    write + immediate there and back, half of it in microseconds: median
 *         call BYTES COUNT   a callback by itself, without a NIC: from the end of an expectation to the callback thread that is at
 *                            it, having slept until then, in microseconds: median
 */
#include "callback.h"
#include "cdef_verbs.h"

#define REGION (16u << 20)
#define LONG_NS 60000000000ull
#define EVER_NS 3600000000000ull /* an expectation of the server waits while other figures are taken */

typedef struct side {
    fab_engine *engine;
    char address[256];
    uint8_t *memory;
    uint64_t handle, remote;
    int64_t peer;
    fab_mr_keys keys;
    uint32_t imm, their_imm;
} side;

static uint32_t env(const char *name, uint32_t usual) {
    const char *text = getenv(name);
    return text && *text ? (uint32_t)strtoul(text, NULL, 0) : usual;
}

static void open_side(side *s, const char *device, uint32_t gid) {
    char err[512] = "";
    if (fab_verbs_load(NULL, err, sizeof err) < 0) die(err, 0);
    fab_verbs_cfg c = {.device = device,
                       .port = 1,
                       .gid_index = gid,
                       .hop_limit = 64,
                       .timeout = env("FABRIC_VERBS_TIMEOUT", 16),
                       .retry = 6,
                       .depth = env("FABRIC_VERBS_DEPTH", 128),
                       .chain = env("FABRIC_VERBS_CHAIN", 4),
                       .inline_bytes = env("FABRIC_VERBS_INLINE", 220),
                       .relaxed = 1,
                       .numa = UINT32_MAX,
                       .incarnation = (uint64_t)(now() * 1e9) | 1,
                       .heartbeat_ns = 5000000000ull,
                       .connect_ns = 20000000000ull,
                       .contact = fab_native_api()->contact_api()};
    void *domain = NULL;
    if (fab_verbs_open(&c, &domain, err, sizeof err) < 0) die(err, 0);
    fab_engine_cfg ec = {.imm_slots = 4096,
                         .max_inflight = 65536,
                         .max_peers = 16,
                         .busy = env("BENCH_BUSY", 0),
                         .hand_over = 1,
                         .spin_ns = 20000, /* as on few cores: the guest has two */
                         .timeout_ns = LONG_NS,
                         .inline_bytes = 1 << 20,
                         .shard_bytes = 1 << 20};
    s->engine = fab_engine_new(&ec);
    uint64_t ops = fab_verbs_ops(), ctx = (uint64_t)(uintptr_t)domain, cpus[16] = {0};
    int rc = fab_group_open(s->engine, 1, &ops, &ctx, cpus, 1);
    if (rc < 0) die("group", rc);
    fab_group_address(s->engine, 0, 0, s->address, sizeof s->address);
    s->memory = aligned_alloc(4096, REGION);
    memset(s->memory, 1, REGION);
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)s->memory, .len = REGION, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    int64_t handle = fab_mem_reg(s->engine, 0, &mr, &s->keys);
    if (handle < 0) die("registration", (long)handle);
    s->handle = (uint64_t)handle;
    s->imm = (uint32_t)fab_imm_alloc(s->engine);
}

static void tell(const side *s) {
    printf("%s %llu %llu %u\n", s->address, (unsigned long long)s->keys.remote_key,
           (unsigned long long)s->keys.remote_base, s->imm);
    fflush(stdout);
}

static void hear(side *s) {
    char address[256];
    unsigned long long key, base;
    if (scanf("%255s %llu %llu %u", address, &key, &base, &s->their_imm) != 4) die("no line from the other side", 0);
    const char *list[1] = {address};
    uint64_t k = key, b = base;
    s->peer = fab_peer_add(s->engine, 0, 1, list);
    int64_t remote = fab_remote_add(s->engine, 0, (uint32_t)s->peer, REGION, FAB_ACCESS_REMOTE_WRITE, 1, &k, &b);
    if (remote < 0) die("remote", (long)remote);
    s->remote = (uint64_t)remote;
}

static int64_t write_one(side *s, uint64_t bytes, int64_t imm) {
    int64_t t;
    while ((t = fab_submit_write(s->engine, s->handle, 0, s->remote, 0, bytes, imm, -1, LONG_NS, 0)) == -11)
        fab_progress(s->engine);
    if (t < 0) die("submit", (long)t);
    return t;
}

/* Polls, as perftest does. */
static void finish(side *s, int64_t t) {
    fab_outcome o;
    double until = now() + LONG_NS * 1e-9;
    int phase;
    while ((phase = fab_transfer_poll(s->engine, (uint64_t)t)) == FAB_PENDING)
        if (now() > until) die("a write does not end", 0);
    if (phase != FAB_DONE) {
        fab_transfer_outcome(s->engine, (uint64_t)t, &o);
        die("a write", o.err);
    }
    fab_transfer_release(s->engine, (uint64_t)t);
}

static int64_t expect_one(side *s) {
    int64_t x = fab_expect(s->engine, s->imm, 1, EVER_NS, NULL, 0);
    if (x < 0) die("an expectation", (long)x);
    return x;
}

static void arrived(side *s, int64_t x) {
    int phase;
    while ((phase = fab_expect_poll(s->engine, (uint64_t)x)) == FAB_PENDING) {
    }
    if (phase != FAB_DONE) die("an immediate", phase);
    fab_expect_release(s->engine, (uint64_t)x);
}

static void bandwidth(side *s, uint64_t bytes, uint32_t count) {
    static int64_t t[1 << 16];
    if (count > 1u << 16) count = 1u << 16;
    double begin = now();
    for (uint32_t i = 0; i < count; i++) t[i] = write_one(s, bytes, -1);
    for (uint32_t i = 0; i < count; i++) finish(s, t[i]);
    printf("%.3f\n", (double)bytes * count / (now() - begin) / 1048576);
}

static void rate(side *s, uint64_t bytes, uint32_t count) {
    uint32_t *zero = calloc(count, sizeof *zero);
    double begin = now();
    int64_t t =
        fab_submit_paged(s->engine, s->handle, zero, 0, 0, s->remote, zero, 0, 0, count, bytes, -1, -1, LONG_NS, 0);
    if (t < 0) die("paged submit", (long)t);
    finish(s, t);
    printf("%.6f\n", count / (now() - begin) / 1e6);
    free(zero);
}

static void latency(side *s, uint64_t bytes, uint32_t count) {
    double *took = calloc(count, sizeof *took);
    for (uint32_t i = 0; i < count; i++) {
        int64_t x = expect_one(s); /* ahead of time, as programs do */
        double begin = now();
        int64_t t = write_one(s, bytes, s->their_imm);
        arrived(s, x);
        took[i] = now() - begin;
        finish(s, t);
    }
    printf("%.3f\n", median(took, count) / 2 * 1e6);
    free(took);
}

int main(int argc, char **argv) {
    side s = {0};
    if (argc != 4) die("usage: bench_verbs serve|write DEVICE GID", argc);
    open_side(&s, argv[2], (uint32_t)strtoul(argv[3], NULL, 0));
    if (strcmp(argv[1], "serve") == 0) {
        tell(&s);
        hear(&s);
        unsigned count;
        int64_t x = expect_one(&s), t;
        while (scanf("%u", &count) == 1)
            for (unsigned i = 0; i < count; i++) {
                arrived(&s, x);
                t = write_one(&s, 8, s.their_imm);
                x = expect_one(&s);
                finish(&s, t);
            }
        return 0;
    }
    hear(&s);
    tell(&s);
    finish(&s, write_one(&s, 8, -1)); /* first contact is not measured */
    char verb[16];
    unsigned long long bytes;
    unsigned count;
    while (scanf("%15s %llu %u", verb, &bytes, &count) == 3) {
        if (strcmp(verb, "bw") == 0) bandwidth(&s, bytes, count);
        else if (strcmp(verb, "rate") == 0) rate(&s, bytes, count);
        else if (strcmp(verb, "call") == 0) printf("%.3f\n", callback_us(s.engine, s.imm, count));
        else latency(&s, bytes, count);
        fflush(stdout);
    }
    fab_engine_close(s.engine, 1000000000ull);
    return 0;
}
