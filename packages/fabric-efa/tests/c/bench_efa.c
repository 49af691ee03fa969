/* bench_efa - the engine over this backend, driven from C exactly as tools/bench/fi_plain.c drives the bare provider, so that
 * the two differ by nothing but the engine. tools/bench/efa.py builds and runs both.
 *
 *     bench_efa LIBRARY PROVIDER NODE SIZE COUNT WINDOW ROUNDS
 *     bench_efa LIBRARY PROVIDER NODE post BATCH     our part of posting a write, so many in a call: nanoseconds, 100 times
 *
 * Two processes. The first writes COUNT times SIZE bytes, each with an immediate, at most WINDOW at a time (0: all of them as
 * the pages of one paged write), into places one after the other; the clock runs from the first submit until the second
 * process has counted all COUNT and said so over a socket. Prints one line of seconds per round. Exit code 4: after the
 * first round the data there were not what was sent. */
#include "efa_int.h"
#include "fabric/engine.h"

#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SPAN (64ul << 20)
#define LONG_NS 100000000000ull
#define FILL 0x5a
#define MOST_PAGES 65536u
#define POSTS 512u /* of one batch: fewer than a peer's operations, so that none is refused */

typedef struct hello {
    char address[256];
    uint64_t key, base;
    uint32_t imm;
} hello;

typedef struct side {
    fab_engine *engine;
    void *domain;
    uint8_t *memory;
    uint64_t handle, remote;
    hello mine, theirs;
} side;

static int peer_fd;

static void die(const char *what, long rc) {
    fprintf(stderr, "bench_efa: %s: %ld\n", what, rc);
    exit(3);
}

static double now(void) { return 1e-9 * (double)fe_clock(); }

static void say(const void *p, size_t n) {
    if (write(peer_fd, p, n) != (ssize_t)n) _exit(9);
}
static void hear(void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t r = read(peer_fd, (char *)p + at, n - at);
        if (r <= 0) _exit(9);
        at += (size_t)r;
    }
}

static void open_side(side *s, char **argv, int number, int worker) {
    char err[512] = "";
    if (fab_efa_load(argv[1], err, sizeof err) < 0) die(err, 0);
    fab_efa_cfg c = {.provider = argv[2],
                     .source = *argv[3] ? argv[3] : NULL,
                     .contact = fab_native_api()->contact_api(),
                     .incarnation = fe_random() | 1,
                     .heartbeat_ns = 5000000000ull,
                     .connect_ns = 20000000000ull,
                     .strict_seed = -1,
                     .max_peers = 16};
    if (fab_efa_open(&c, &s->domain, err, sizeof err) < 0) die(err, 0);
    /* as fabric_core sets them on few cores */
    fab_engine_cfg ec = {.imm_slots = 4096,
                         .max_inflight = 65536,
                         .max_peers = 16,
                         .hand_over = 1,
                         .spin_ns = 20000,
                         .timeout_ns = LONG_NS,
                         .inline_bytes = 65536,
                         .shard_bytes = 32768};
    s->engine = fab_engine_new(&ec);
    uint64_t ops = fab_efa_ops(), ctx = (uint64_t)(uintptr_t)s->domain, cpus[16] = {0};
    int rc = fab_group_open(s->engine, 1, &ops, &ctx, cpus, worker);
    if (rc < 0) die("group", rc);
    s->memory = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(s->memory, number ? 0 : FILL, SPAN);
    fab_mr mr = {.addr = (uint64_t)(uintptr_t)s->memory, .len = SPAN, .access = FAB_ACCESS_REMOTE_WRITE, .fd = -1};
    fab_mr_keys keys;
    int64_t handle = fab_mem_reg(s->engine, 0, &mr, &keys);
    if (handle < 0) die("registration", (long)handle);
    s->handle = (uint64_t)handle;
    s->mine = (hello){.key = keys.remote_key, .base = keys.remote_base, .imm = (uint32_t)fab_imm_alloc(s->engine)};
    fab_group_address(s->engine, 0, 0, s->mine.address, sizeof s->mine.address);
    say(&s->mine, sizeof s->mine);
    hear(&s->theirs, sizeof s->theirs);
    const char *list[1] = {s->theirs.address};
    int64_t peer = fab_peer_add(s->engine, 0, 1, list);
    int64_t remote =
        fab_remote_add(s->engine, 0, (uint32_t)peer, SPAN, FAB_ACCESS_REMOTE_WRITE, 1, &s->theirs.key, &s->theirs.base);
    if (peer < 0 || remote < 0) die("peer", (long)(peer < 0 ? peer : remote));
    s->remote = (uint64_t)remote;
}

static void receive(side *s, uint64_t size, long count, long rounds) {
    uint64_t used = size * (uint64_t)count < SPAN ? size * (uint64_t)count : SPAN / size * size;
    for (long r = 0; r < rounds; r++) {
        int64_t x = fab_expect(s->engine, s->mine.imm, (uint64_t)count, LONG_NS, NULL, 0);
        int phase;
        if (x < 0) die("expect", (long)x);
        while ((phase = fab_expect_poll(s->engine, (uint64_t)x)) == FAB_PENDING) {
        }
        if (phase != FAB_DONE) die("an expectation", phase);
        fab_expect_release(s->engine, (uint64_t)x);
        say("x", 1);
        if (r) continue;
        for (uint64_t i = 0; i < used; i++)
            if (s->memory[i] != FILL) _exit(4);
        memset(s->memory, 0, SPAN);
        say("v", 1);
    }
    char end;
    double until = now() + 5;
    while (recv(peer_fd, &end, 1, MSG_DONTWAIT) < 0 && now() < until) fab_progress(s->engine);
}

static void finish(side *s, int64_t t) {
    int phase;
    while ((phase = fab_transfer_poll(s->engine, (uint64_t)t)) == FAB_PENDING) {
    }
    if (phase != FAB_DONE) die("a write", phase);
    fab_transfer_release(s->engine, (uint64_t)t);
}

static double send_round(side *s, uint64_t size, long count, long window, bool first) {
    static int64_t flying[65536];
    static uint32_t index[MOST_PAGES];
    uint64_t places = SPAN / size;
    double begin = now();
    if (!window) {
        for (long k = 0; k < count; k++) index[k] = (uint32_t)((uint64_t)k % places);
        int64_t t = fab_submit_paged(s->engine, s->handle, index, size, 0, s->remote, index, size, 0, (uint32_t)count,
                                     size, s->theirs.imm, -1, LONG_NS, 0);
        if (t < 0) die("submit", (long)t);
        finish(s, t);
    }
    for (long k = 0; window && k < count + window; k++) {
        if (k >= window) finish(s, flying[(k - window) & 65535]);
        if (k >= count) continue;
        uint64_t at = (uint64_t)k % places * size;
        int64_t t = fab_submit_write(s->engine, s->handle, at, s->remote, at, size, s->theirs.imm, -1, LONG_NS, 0);
        if (t < 0) die("submit", (long)t);
        flying[k & 65535] = t;
    }
    char seen;
    ssize_t n;
    while ((n = recv(peer_fd, &seen, 1, MSG_DONTWAIT)) < 0) fab_progress(s->engine);
    double took = now() - begin;
    if (first) n = read(peer_fd, &seen, 1); /* it compares the data */
    if (n != 1) exit(4); /* and found them wrong, or broke */
    return took;
}

/* ---- our part of a post ---------------------------------------------------------------------------- */

static void *posted[POSTS];
static uint32_t nposted;

static ssize_t write_nothing(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags) {
    (void)ep, (void)flags;
    posted[nposted++] = msg->context;
    return 0;
}

static ssize_t read_nothing(struct fid_cq *cq, void *buf, size_t count) {
    (void)cq;
    struct fi_cq_data_entry *e = buf;
    size_t n = 0;
    while (n < count && nposted) e[n++] = (struct fi_cq_data_entry){.op_context = posted[--nposted]};
    return n ? (ssize_t)n : -FI_EAGAIN;
}

/* The provider's two calls are replaced by ones that do nothing: what is left is ours. This engine has no worker, so nobody
 * else calls its domain meanwhile. */
static void post_alone(side *s, uint32_t batch) {
    fe_dom *d = s->domain;
    finish(s, fab_submit_write(s->engine, s->handle, 0, s->remote, 0, 64, s->theirs.imm, -1, LONG_NS, 0));
    fe_peer *p = d->peers[0];
    static struct fi_ops_rma rma;
    static struct fi_ops_cq cq;
    static fab_wr wr[POSTS];
    static fab_wc wc[POSTS];
    rma = *p->ep->rma;
    rma.writemsg = write_nothing;
    cq = *d->cq->ops;
    cq.read = read_nothing;
    struct fi_ops_rma *their_rma = p->ep->rma;
    struct fi_ops_cq *their_cq = d->cq->ops;
    p->ep->rma = &rma;
    d->cq->ops = &cq;
    d->tx_limit = POSTS + 1;
    for (uint32_t i = 0; i < POSTS; i++)
        wr[i] = (fab_wr){.id = i,
                         .len = 1024,
                         .local_addr = (uint64_t)(uintptr_t)s->memory + 1024ull * i,
                         .local_key = 1ull << 32 | 1, /* the first registration of this domain */
                         .remote_addr = s->theirs.base + 1024ull * i,
                         .remote_key = s->theirs.key,
                         .imm = 7,
                         .kind = FAB_WR_WRITE,
                         .flags = FAB_WR_IMM};
    for (int round = 0; round < 100; round++) {
        double begin = now();
        for (uint32_t k = 0; k < POSTS; k += batch)
            if (fe_post(d, p->id, wr + k, batch) != (int)batch) die("a post", k);
        double took = now() - begin;
        while (nposted) fe_cq_drain(d);
        while (fab_wc_take(&d->wcq, wc, POSTS)) {
        }
        printf("%.1f\n", took / POSTS * 1e9);
    }
    p->ep->rma = their_rma;
    d->cq->ops = their_cq;
}

int main(int argc, char **argv) {
    bool post = argc == 6 && strcmp(argv[4], "post") == 0;
    if (argc != 8 && !post) {
        fprintf(stderr, "usage: bench_efa LIBRARY PROVIDER NODE SIZE COUNT WINDOW ROUNDS | ... post BATCH\n");
        return 2;
    }
    uint64_t size = post ? 64 : strtoull(argv[4], NULL, 10);
    long count = post ? 1 : strtol(argv[5], NULL, 10), window = post ? 1 : strtol(argv[6], NULL, 10),
         rounds = post ? 1 : strtol(argv[7], NULL, 10);
    uint32_t batch = post ? (uint32_t)strtol(argv[5], NULL, 10) : 1;
    int fds[2];
    if (!batch || POSTS % batch || !size || size > SPAN || count < 1 || count > MOST_PAGES || window < 0 ||
        window > 65536 || socketpair(AF_UNIX, SOCK_STREAM, 0, fds))
        return 2;
    alarm(110);
    pid_t parent = getpid();
    int number = fork() == 0;
    if (number) prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (number && getppid() != parent) return 9;
    peer_fd = fds[number];
    close(fds[!number]);
    static side s;
    open_side(&s, argv, number, !post || number);
    if (number) {
        receive(&s, size, count, rounds);
        _exit(0);
    }
    if (post) post_alone(&s, batch);
    else
        for (long r = 0; r < rounds; r++) printf("%.9f\n", send_round(&s, size, count, window, r == 0));
    fflush(stdout);
    say("e", 1);
    _exit(0);
}
