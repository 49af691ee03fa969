/* GPU memory in the local backend, on the stand-in for the driver (fake_cuda.c): two engines of one process, with threads of
 * their own, move pages and single writes between GPU, pinned and shared memory, while transfers are cancelled and
 * registrations come and go. Data are compared; every operation ends. */
#include "check.h"
#include "cuda/cuda.h"
#include "fabric/engine.h"
#include "local/local.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000ull
#define BYTES (1u << 20)
#define PAGE 4096u
#define NPAGES (BYTES / PAGE)
#define HEARTBEAT_MS 1000u /* of the backend, where nobody says another */

static char dir[64];
static uint64_t heartbeat_ns; /* 0: the backend's own */

static uint64_t fab_time_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

static uint64_t gpu_alloc(uint64_t n) {
    static int (*alloc)(uint64_t *, size_t);
    if (!alloc) {
        void *lib = dlopen(getenv("FABRIC_CUDA_LIBRARY"), RTLD_NOW);
        CHECK(lib, "%s", dlerror());
        *(void **)&alloc = dlsym(lib, "cuMemAlloc_v2");
        CHECK(alloc);
    }
    uint64_t p;
    CHECK(alloc(&p, n) == 0);
    return p;
}

typedef struct side {
    fab_engine *engine;
    char addr[2][160];
    uint32_t nnics;
    uint8_t *mem;
    fab_mr_keys keys[2];
    uint64_t local;
    bool gpu;
} side;

static side open_side(const char *name, uint32_t nnics, uint64_t linger) {
    fab_engine_cfg cfg = {.imm_slots = 64,
                          .max_inflight = 4096,
                          .max_peers = 16,
                          .spin_ns = 20000,
                          .timeout_ns = 20000 * MS,
                          .inline_bytes = 4096,
                          .shard_bytes = 32768};
    fab_local_cfg local = {.dir = dir,
                           .name = name,
                           .nics = nnics,
                           .shuffle_seed = -1,
                           .gpu = 1,
                           .gpu_linger_ns = linger,
                           .heartbeat_ns = heartbeat_ns};
    fab_local_node *node;
    char err[256];
    CHECK(fab_local_open(&local, &node, err, sizeof err) == 0, "%s", err);
    side s = {.engine = fab_engine_new(&cfg), .nnics = nnics};
    uint64_t ops[2], ctx[2], cpus[16] = {0};
    for (uint32_t i = 0; i < nnics; i++) {
        ops[i] = (uint64_t)(uintptr_t)fab_local_ops();
        ctx[i] = (uint64_t)(uintptr_t)fab_local_domain(node, i);
    }
    CHECK(fab_group_open(s.engine, nnics, ops, ctx, cpus, 1) == 0);
    for (uint32_t i = 0; i < nnics; i++) CHECK(fab_group_address(s.engine, 0, i, s.addr[i], sizeof s.addr[i]) > 0);
    return s;
}

static void give_memory(side *s, bool gpu, uint32_t access) {
    s->gpu = gpu;
    s->mem = gpu ? (uint8_t *)(uintptr_t)gpu_alloc(BYTES) : calloc(1, BYTES);
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)s->mem,
                 .len = BYTES,
                 .access = access,
                 .fd = -1,
                 .device_kind = gpu,
                 .device_id = gpu ? 0 : -1};
    int64_t h = fab_mem_reg(s->engine, 0, &mr, s->keys);
    CHECK(h > 0, "%lld", (long long)h);
    s->local = (uint64_t)h;
}

static void shut(side *s) {
    fab_engine_close(s->engine, 5000 * MS);
    fab_engine_free(s->engine);
    if (!s->gpu) free(s->mem);
}

static uint64_t know(side *from, side *to) {
    const char *addrs[2] = {to->addr[0], to->addr[1]};
    uint64_t key[2], base[2];
    for (uint32_t i = 0; i < to->nnics; i++) {
        key[i] = to->keys[i].remote_key;
        base[i] = to->keys[i].remote_base;
    }
    int64_t peer = fab_peer_add(from->engine, 0, to->nnics, addrs);
    CHECK(peer >= 0);
    int64_t r = fab_remote_add(from->engine, 0, (uint32_t)peer, BYTES, FAB_ACCESS_REMOTE_WRITE, to->nnics, key, base);
    CHECK(r > 0);
    return (uint64_t)r;
}

static uint32_t end(side *s, int64_t handle) {
    CHECK(handle > 0, "%lld", (long long)handle);
    int phase = fab_transfer_wait(s->engine, (uint64_t)handle, 20000 * MS);
    CHECK(phase > 0, "a transfer has not ended");
    fab_transfer_release(s->engine, (uint64_t)handle);
    return (uint32_t)phase;
}

static void moves(bool src_gpu, bool dst_gpu, uint32_t nnics, uint64_t linger) {
    side a = open_side("a", nnics, linger), b = open_side("b", nnics, 0);
    give_memory(&a, src_gpu, 0);
    give_memory(&b, dst_gpu, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    uint32_t seed = 7, sidx[NPAGES], didx[NPAGES];
    for (uint32_t i = 0; i < BYTES; i++) a.mem[i] = (uint8_t)xorshift(&seed);
    int64_t imm = fab_imm_alloc(b.engine);
    for (uint32_t round = 0; round < 12; round++) {
        for (uint32_t i = 0; i < NPAGES; i++) sidx[i] = didx[i] = i;
        for (uint32_t i = NPAGES - 1; i; i--) {
            uint32_t k = xorshift(&seed) % (i + 1), t = didx[i];
            didx[i] = didx[k];
            didx[k] = t;
        }
        uint32_t n = round % 3 ? NPAGES : 1 + xorshift(&seed) % NPAGES, page = round & 1 ? PAGE : PAGE - 24;
        int64_t x = fab_expect(b.engine, (uint32_t)imm, n + 1, 20000 * MS, NULL, 0);
        int64_t p =
            fab_submit_paged(a.engine, a.local, sidx, PAGE, 8, remote, didx, PAGE, 8, n, page - 8, imm, -1, 0, 0);
        int64_t one = fab_submit_write(a.engine, a.local, 3, remote, 3, 5, imm, -1, 0, 0);
        CHECK(end(&a, p) == FAB_DONE && end(&a, one) == FAB_DONE);
        CHECK(fab_expect_wait(b.engine, (uint64_t)x, 20000 * MS) == FAB_DONE);
        fab_expect_release(b.engine, (uint64_t)x);
        CHECK(fab_imm_count(b.engine, (uint32_t)imm) == 0);
        for (uint32_t i = 0; i < n; i++)
            CHECK(!memcmp(b.mem + (uint64_t)didx[i] * PAGE + 8, a.mem + (uint64_t)i * PAGE + 8, page - 8), "page %u",
                  i);
        CHECK(!memcmp(b.mem + 3, a.mem + 3, 5));
        CHECK(end(&a, fab_submit_write(a.engine, a.local, 0, remote, 0, BYTES, -1, -1, 0, 0)) == FAB_DONE);
        CHECK(!memcmp(b.mem, a.mem, BYTES), "a large write");
    }
    CHECK(fab_mem_dereg(a.engine, a.local, 1000 * MS) == 0);
    shut(&a);
    shut(&b);
}

/* Cancelled, revoked and closed under a slow GPU: everything ends, and nothing moves afterwards. */
static void ends(int how) {
    setenv("FAKE_CUDA_DELAY_US", "3000", 1);
    side a = open_side("a", 1, how & 1 ? 500000 : 0), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    memset(a.mem, 1, BYTES);
    int64_t handles[64];
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t idx[2] = {i, 63 - i};
        handles[i] = fab_submit_paged(a.engine, a.local, idx, PAGE, 0, remote, idx, PAGE, 0, 2, PAGE, -1, -1, 0, 0);
        CHECK(handles[i] > 0);
    }
    if (how / 2 == 0)
        for (uint32_t i = 0; i < 64; i += 2) fab_transfer_cancel(a.engine, (uint64_t)handles[i]);
    if (how / 2 == 1) CHECK(fab_mem_dereg(b.engine, b.local, 5000 * MS) == 0);
    if (how / 2 == 2) fab_engine_close(a.engine, 5000 * MS);
    uint8_t before[BYTES];
    if (how / 2) memcpy(before, b.mem, BYTES);
    for (uint32_t i = 0; i < 64; i++) end(&a, handles[i]);
    if (how / 2) CHECK(!memcmp(before, b.mem, BYTES), "something moved afterwards");
    shut(&a);
    shut(&b);
    unsetenv("FAKE_CUDA_DELAY_US");
}

/* A word that is added to starts a prepared transfer; a flag on it, and one on an expectation, tell of the end. */
static void prepared(void) {
    side a = open_side("a", 1, 500000), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b), word = fab_cuda_word_new(0), flag = fab_flag_new_on(0),
             arrived = fab_flag_new_on(0);
    CHECK(word && flag && arrived);
    int64_t imm = fab_imm_alloc(b.engine);
    uint32_t idx[NPAGES];
    for (uint32_t i = 0; i < NPAGES; i++) idx[i] = i;
    int rc = 1;
    CHECK(!fab_prepare_paged(a.engine, a.local, idx, PAGE, 1, remote, idx, PAGE, 0, NPAGES, PAGE, imm, -1, 0, flag | 1,
                             word, &rc));
    CHECK(rc == -ERANGE, "%d", rc);
    CHECK(!fab_prepare_paged(a.engine, a.local, idx, PAGE, 0, remote, idx, PAGE, 0, 0, PAGE, imm, -1, 0, flag | 1, word,
                             &rc));
    CHECK(rc == -EINVAL, "no pages: %d", rc);
    fab_prepared *p = fab_prepare_paged(a.engine, a.local, idx, PAGE, 0, remote, idx, PAGE, 0, NPAGES, PAGE, imm, -1, 0,
                                        flag | 1, word, &rc);
    CHECK(p && !rc);
    for (uint32_t n = 1; n <= 200; n++) {
        memset(a.mem, (int)n, BYTES);
        int64_t x = fab_expect(b.engine, (uint32_t)imm, NPAGES, 20000 * MS, NULL, 0);
        CHECK(x > 0 && fab_expect_flag(b.engine, (uint64_t)x, arrived | 1) == 0);
        CHECK(fab_cuda_stream_add(0, 0, word, 1) == 0);
        CHECK(fab_expect_wait(b.engine, (uint64_t)x, 20000 * MS) == FAB_DONE);
        fab_expect_release(b.engine, (uint64_t)x);
        CHECK(b.mem[0] == (uint8_t)n && b.mem[BYTES - 1] == (uint8_t)n);
        while (__atomic_load_n((uint64_t *)(uintptr_t)arrived, __ATOMIC_ACQUIRE) != n) usleep(10);
        while (__atomic_load_n((uint64_t *)(uintptr_t)flag, __ATOMIC_ACQUIRE) != n) usleep(10);
    }
    int32_t refused;
    CHECK(fab_prepared_count(p, &refused) == 200 && !refused);
    fab_prepared_close(p);
    fab_flag_drop(flag);
    fab_flag_drop(arrived);
    fab_cuda_word_free(word);
    shut(&a);
    shut(&b);
}

/* What was submitted goes on after its prepared transfer was closed: here both wait for the first contact. */
static void closed_before_it_is_posted(void) {
    for (uint32_t round = 0; round < 5; round++) {
        side a = open_side("a", 1, 0), b = open_side("b", 1, 0);
        give_memory(&a, true, 0);
        give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
        uint64_t remote = know(&a, &b), word = fab_cuda_word_new(0), flag = fab_flag_new_on(0);
        uint32_t idx[NPAGES];
        for (uint32_t i = 0; i < NPAGES; i++) idx[i] = NPAGES - 1 - i;
        memset(a.mem, 7, BYTES);
        int rc;
        int32_t refused;
        fab_prepared *p = fab_prepare_paged(a.engine, a.local, idx, PAGE, 0, remote, idx, PAGE, 0, NPAGES, PAGE, -1, -1,
                                            0, flag | 1, word, &rc);
        CHECK(p, "%d", rc);
        __atomic_fetch_add((uint64_t *)(uintptr_t)word, 1, __ATOMIC_RELEASE);
        while (!fab_prepared_count(p, &refused)) sched_yield();
        fab_prepared_close(p);
        while (!__atomic_load_n((uint64_t *)(uintptr_t)flag, __ATOMIC_ACQUIRE)) usleep(10);
        CHECK(*(uint64_t *)(uintptr_t)flag == 1 && b.mem[0] == 7 && b.mem[BYTES - 1] == 7);
        fab_flag_drop(flag);
        fab_cuda_word_free(word);
        shut(&a);
        shut(&b);
    }
}

/* A GPU that adds to a word that was given back harms neither the words that are handed out next nor their list. */
static void late_additions(void) {
    enum { WORDS = 1200 }; /* more than one allocation holds */
    static uint64_t words[WORDS];
    for (int i = 0; i < 8; i++) words[i] = fab_cuda_word_new(0);
    for (int i = 0; i < 8; i++) fab_cuda_word_free(words[i]);
    for (int i = 0; i < 8; i++) CHECK(fab_cuda_stream_add(0, 0, words[i], 1) == 0);
    CHECK(fab_cuda_stream_write(0, 0, words[7], 5) == 0);
    uint64_t last = fab_cuda_word_new(0); /* not one of those: see below */
    for (int i = 0; i < 8; i++) CHECK(last != words[i], "a word is used again at once");
    CHECK(fab_cuda_stream_write(0, 0, last, 1) == 0);
    while (!__atomic_load_n((uint64_t *)(uintptr_t)last, __ATOMIC_ACQUIRE)) usleep(10);
    for (int i = 0; i < WORDS; i++) {
        words[i] = fab_cuda_word_new(0);
        CHECK(words[i] && words[i] % FAB_CUDA_WORD == 0, "word %d: %#llx", i, (unsigned long long)words[i]);
        CHECK(*(uint64_t *)(uintptr_t)words[i] == 0);
        *(uint64_t *)(uintptr_t)words[i] = (uint64_t)i + 1;
    }
    for (int i = 0; i < WORDS; i++) CHECK(*(uint64_t *)(uintptr_t)words[i] == (uint64_t)i + 1, "word %d is shared", i);
    for (int i = 0; i < WORDS; i++) fab_cuda_word_free(words[i]);
    fab_cuda_word_free(last);
}

/* A stream waits for as many ends as it was told, also when some were bad. */
static void waits_for_ends(void) {
    uint64_t flag = fab_flag_new_on(0), seen = fab_cuda_word_new(0);
    uint64_t *f = (uint64_t *)(uintptr_t)flag, *s = (uint64_t *)(uintptr_t)seen;
    CHECK(fab_cuda_stream_wait(0, 0, flag, 2) == 0 && fab_cuda_stream_write(0, 0, seen, 1) == 0);
    __atomic_store_n(f, (1ull << 32) + 1, __ATOMIC_RELEASE); /* one ended, badly */
    for (int i = 0; i < 3000; i++) {
        CHECK(!__atomic_load_n(s, __ATOMIC_ACQUIRE), "it went on with one of two");
        usleep(10);
    }
    __atomic_store_n(f, (1ull << 32) + 2, __ATOMIC_RELEASE);
    while (!__atomic_load_n(s, __ATOMIC_ACQUIRE)) usleep(10);
    fab_flag_drop(flag);
    fab_cuda_word_free(seen);
}

/* Pages without bytes raise their immediates, and the GPU works afterwards. */
static void empty_pages(uint64_t linger) {
    side a = open_side("a", 1, linger), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    uint32_t idx[4] = {0, 1, 2, 255};
    int64_t imm = fab_imm_alloc(b.engine);
    memset(a.mem, 9, BYTES);
    for (int round = 0; round < 3; round++) {
        int64_t x = fab_expect(b.engine, (uint32_t)imm, 8, 20000 * MS, NULL, 0);
        for (uint64_t len = 0; len <= PAGE; len += PAGE)
            CHECK(end(&a, fab_submit_paged(a.engine, a.local, idx, PAGE, 0, remote, idx, PAGE, 0, 4, len, imm, -1, 0,
                                           0)) == FAB_DONE,
                  "%llu bytes a page", (unsigned long long)len);
        CHECK(fab_expect_wait(b.engine, (uint64_t)x, 20000 * MS) == FAB_DONE);
        fab_expect_release(b.engine, (uint64_t)x);
    }
    CHECK(b.mem[0] == 9 && b.mem[BYTES - 1] == 9 && b.mem[5 * PAGE] == 0);
    shut(&a);
    shut(&b);
}

/* A launch that is refused ends with an error; what is in flight before it goes on being in flight. */
static void a_refused_launch(uint64_t linger) {
    setenv("FAKE_CUDA_DELAY_US", "100000", 1);
    side a = open_side("a", 1, linger), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    uint32_t one[1] = {0};
    memset(a.mem, 1, BYTES);
    end(&a, fab_submit_paged(a.engine, a.local, one, PAGE, 0, remote, one, PAGE, 0, 1, PAGE, -1, -1, 0, 0));
    memset(a.mem, 2, BYTES);
    fab_stats before, now;
    fab_engine_stats(a.engine, 0, &before);
    int64_t first = fab_submit_paged(a.engine, a.local, one, PAGE, 0, remote, one, PAGE, 0, 1, PAGE, -1, -1, 0, 0);
    do fab_engine_stats(a.engine, 0, &now);
    while (now.wrs == before.wrs);
    setenv("FAKE_CUDA_REFUSE", "1", 1);
    int64_t second = fab_submit_write(a.engine, a.local, 0, remote, 2 * PAGE, BYTES - 2 * PAGE - 1, -1, -1, 0, 0);
    CHECK(end(&a, second) == FAB_FAILED);
    end(&a, first);
    CHECK(b.mem[0] == 2, "it ended while it was in flight");
    unsetenv("FAKE_CUDA_REFUSE");
    shut(&a);
    shut(&b);
    unsetenv("FAKE_CUDA_DELAY_US");
}

/* Closing at once waits for what the GPU has in flight, and for no time-out. */
static void closes_in_flight(void) {
    setenv("FAKE_CUDA_DELAY_US", "200000", 1);
    side a = open_side("a", 1, 0), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    end(&a, fab_submit_write(a.engine, a.local, 0, remote, 0, PAGE, -1, -1, 0, 0));
    int64_t h = fab_submit_write(a.engine, a.local, 0, remote, 0, PAGE, -1, -1, 0, 0);
    fab_stats now;
    do fab_engine_stats(a.engine, 0, &now);
    while (now.wrs < 2);
    uint64_t from = fab_time_ms();
    fab_engine_close(a.engine, 0);
    CHECK(fab_time_ms() - from < HEARTBEAT_MS, "%llu ms", (unsigned long long)(fab_time_ms() - from));
    end(&a, h);
    shut(&a);
    shut(&b);
    unsetenv("FAKE_CUDA_DELAY_US");
}

/* Deregistering waits for a copy that takes longer than a peer may be silent. */
static void a_slow_copy(void) {
    setenv("FAKE_CUDA_DELAY_US", "900000", 1);
    heartbeat_ns = 200 * MS;
    side a = open_side("a", 1, 0), b = open_side("b", 1, 0);
    give_memory(&a, true, 0);
    give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
    uint64_t remote = know(&a, &b);
    end(&a, fab_submit_write(a.engine, a.local, 0, remote, 0, PAGE, -1, -1, 0, 0));
    memset(a.mem, 3, BYTES);
    int64_t h = fab_submit_write(a.engine, a.local, 0, remote, 0, PAGE, -1, -1, 0, 0);
    fab_stats now;
    do fab_engine_stats(a.engine, 0, &now);
    while (now.wrs < 2);
    CHECK(fab_mem_dereg(b.engine, b.local, 5000 * MS) == 0);
    uint8_t then = b.mem[0];
    uint32_t phase = end(&a, h);
    CHECK(b.mem[0] == then, "it was written to after it was deregistered");
    CHECK(phase == FAB_FAILED || then == 3);
    shut(&a);
    shut(&b);
    heartbeat_ns = 0;
    unsetenv("FAKE_CUDA_DELAY_US");
}

typedef struct firing {
    fab_engine *engine;
    uint64_t word;
} firing;

static void *close_it(void *arg) {
    fab_engine_close(((firing *)arg)->engine, 5000 * MS);
    return NULL;
}

/* Every addition is answered, also those that come while the prepared transfer or its engine is closed; and whoever closes it
 * waits until the watcher's thread is out of it. */
static void closed_while_firing(bool engine_too) {
    for (uint32_t round = 0; round < 20; round++) {
        side a = open_side("a", 1, 0), b = open_side("b", 1, 0);
        give_memory(&a, true, 0);
        give_memory(&b, true, FAB_ACCESS_REMOTE_WRITE);
        uint64_t remote = know(&a, &b), word = fab_cuda_word_new(0), flag = fab_flag_new_on(0);
        uint32_t steps = round % 2 ? 200000 : 3;
        int rc;
        int32_t refused;
        fab_prepared *p = fab_prepare_write(a.engine, a.local, 0, remote, 0, 8, -1, -1, 0, flag | 1, word, &rc);
        CHECK(p, "%d", rc);
        usleep(round % 4 ? 0 : 30000); /* the watcher looks seldom, or all the time */
        __atomic_fetch_add((uint64_t *)(uintptr_t)word, steps, __ATOMIC_RELEASE);
        if (round % 2)
            while (!fab_prepared_count(p, &refused)) usleep(1);
        firing f = {a.engine, word};
        pthread_t closer;
        if (engine_too) CHECK(pthread_create(&closer, NULL, close_it, &f) == 0);
        if (engine_too && round % 2 == 0) pthread_join(closer, NULL);
        fab_prepared_close(p);
        if (engine_too && round % 2) pthread_join(closer, NULL);
        if (!engine_too) fab_engine_close(a.engine, 5000 * MS);
        uint64_t ended = __atomic_load_n((uint64_t *)(uintptr_t)flag, __ATOMIC_ACQUIRE) & UINT32_MAX;
        CHECK(ended == steps, "%llu of %u additions were answered", (unsigned long long)ended, steps);
        fab_flag_drop(flag);
        fab_cuda_word_free(word);
        shut(&a);
        shut(&b);
    }
}

int main(void) {
    if (!getenv("FABRIC_CUDA_LIBRARY")) {
        fprintf(stderr, "FABRIC_CUDA_LIBRARY names no stand-in for the driver\n");
        return 77;
    }
    snprintf(dir, sizeof dir, "/tmp/fabric-gpu-%d", getpid());
    CHECK(mkdir(dir, 0700) == 0);
    for (int kinds = 1; kinds < 4; kinds++) {
        moves(kinds & 1, kinds & 2, 1, 0);
        moves(kinds & 1, kinds & 2, 2, 0);
        moves(kinds & 1, kinds & 2, 1, 200000);
    }
    for (int how = 0; how < 6; how++) ends(how);
    prepared();
    closed_before_it_is_posted();
    late_additions();
    waits_for_ends();
    empty_pages(0);
    empty_pages(500000);
    a_refused_launch(0);
    closes_in_flight();
    a_slow_copy();
    closed_while_firing(false);
    closed_while_firing(true);
    rmdir(dir);
    return 0;
}
