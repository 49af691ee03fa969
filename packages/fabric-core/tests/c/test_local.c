/* test_local.c - the local backend: two nodes in one process, and a node in a forked child.
 * Usage: test_local [all | inproc | NAME...]. Exit 0 fine, 1 failed, 77 nothing could be tested.
 * "inproc", the default under ThreadSanitizer, leaves out the cases that fork: it cannot follow those. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include "local/local.h"
#include "local/wire.h"   /* only for the tests that play a peer with a bug, or without the secret */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char dir[80];
static const fab_domain_ops *ops;
static const char *test_name;
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#define CHECK(c, ...)                                                         \
    do {                                                                      \
        if (!(c)) {                                                           \
            fprintf(stderr, "FAIL %s, line %d: %s", test_name, __LINE__, #c); \
            fprintf(stderr, " " __VA_ARGS__);                                 \
            fputc('\n', stderr);                                              \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

/* ---- what a domain told us ------------------------------------------------------------------- */

enum { IDS = 4096, IMMS = 1024 };
typedef struct dom {
    void *d;
    fab_local_node *node;
    char addr[128];
    uint32_t ok[IDS], bad[IDS], imm[IMMS], ups, downs, faults, recvs;
    int last_bad, down_status, fault_status;
    uint64_t recv_id, recv_len, order;     /* order: out-of-order completions seen */
    uint64_t last_id;
} dom;

static int try_open(dom *x, const char *name, uint32_t nics, uint32_t path, int64_t seed, uint64_t hb_ms, char *err) {
    memset(x, 0, sizeof *x);
    fab_local_cfg c = {.dir = dir,
                       .name = name,
                       .nics = nics,
                       .path = path,
                       .shuffle_seed = seed,
                       .heartbeat_ns = hb_ms * 1000000,
                       .connect_timeout_ns = 500000000};
    int r = fab_local_open(&c, &x->node, err, 256);
    if (r) return r;
    x->d = fab_local_domain(x->node, 0);
    CHECK(ops->address(x->d, x->addr, sizeof x->addr) > 0);
    return 0;
}
static void open_path(dom *x, const char *name, uint32_t path) {
    char err[256];
    CHECK(try_open(x, name, 1, path, -1, 0, err) == 0, "%s", err);
}
static int pump(dom *x) {
    fab_wc wc[37];
    int n = ops->poll(x->d, wc, 37, 0);
    CHECK(n >= 0 && n <= 37);
    for (int i = 0; i < n; i++) {
        fab_wc *w = &wc[i];
        switch (w->kind) {
        case FAB_WC_OP:
            CHECK(w->id < IDS && w->count);
            if (w->id < x->last_id) x->order++;
            x->last_id = w->id;
            if (w->status) {
                x->bad[w->id] += w->count;
                x->last_bad = w->status;
            } else x->ok[w->id] += w->count;
            break;
        case FAB_WC_IMM:
            CHECK(w->imm < IMMS);
            x->imm[w->imm] += w->count;
            break;
        case FAB_WC_RECV:
            x->recvs++;
            x->recv_id = w->id;
            x->recv_len = w->len;
            break;
        case FAB_WC_PEER_UP: x->ups++; break;
        case FAB_WC_PEER_DOWN:
            x->downs++;
            x->down_status = w->status;
            break;
        case FAB_WC_FAULT:
            x->faults++;
            x->fault_status = w->status;
            break;
        default: CHECK(0, "kind %u", w->kind);
        }
    }
    return n;
}
#define UNTIL(cond, secs, ...)                                             \
    do {                                                                   \
        double t_ = now();                                                 \
        while (!(cond)) {                                                  \
            __VA_ARGS__;                                                   \
            CHECK(now() - t_ < (secs), "(waited %.1f s)", (double)(secs)); \
        }                                                                  \
    } while (0)

static uint32_t connect_to(dom *x, const char *addr, dom *other) {
    uint32_t p, ups = x->ups;
    CHECK(ops->peer_open(x->d, addr, strlen(addr), &p) == 0);
    UNTIL(x->ups > ups, 5, pump(x); if (other) pump(other); CHECK(!x->downs, "status %d", x->down_status));
    return p;
}
static int connect_fails(dom *x, const char *addr) {
    uint32_t p, downs = x->downs;
    CHECK(ops->peer_open(x->d, addr, strlen(addr), &p) == 0);
    UNTIL(x->downs > downs, 5, pump(x));
    int s = x->down_status;
    CHECK(ops->peer_close(x->d, p) == 0);
    return s;
}

typedef struct mem {
    char *p;
    uint64_t len;
    int fd;
    fab_mr_keys k;
} mem;
static mem make_mem(uint64_t len, int shared) {
    mem m = {.len = len, .fd = -1};
    if (shared) {
        m.fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(m.fd >= 0 && ftruncate(m.fd, (off_t)len) == 0);
        m.p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0);
    } else {
        m.p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    CHECK(m.p != MAP_FAILED);
    return m;
}
static void reg(dom *x, mem *m, uint32_t access) {
    CHECK(ops->mr_reg(x->d, &(fab_mr){.addr = (uintptr_t)m->p, .len = m->len, .access = access, .fd = m->fd}, &m->k) ==
          0);
}
static void drop_mem(mem *m) {
    munmap(m->p, m->len);
    if (m->fd >= 0) close(m->fd);
}
static void fill(char *p, uint64_t n, uint64_t seed) {
    uint64_t s = seed * 0x9e3779b97f4a7c15ull | 1;
    for (uint64_t i = 0; i < n; i++) {
        if (i % 8 == 0) {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
        }
        p[i] = (char)(s >> (i % 8 * 8));
    }
}
static uint64_t sum(const char *p, uint64_t n) {
    uint64_t h = 1469598103934665603ull;
    for (uint64_t i = 0; i < n; i++) h = (h ^ (unsigned char)p[i]) * 1099511628211ull;
    return h;
}
static fab_wr wr_of(uint64_t id, const mem *s, uint64_t so, const fab_mr_keys *k, uint64_t doff, uint64_t len,
                    int imm) {
    return (fab_wr){.id = id,
                    .len = len,
                    .local_addr = (uintptr_t)s->p + so,
                    .local_key = s->k.local_key,
                    .remote_addr = k->remote_base + doff,
                    .remote_key = k->remote_key,
                    .imm = imm < 0 ? 0 : (uint32_t)imm,
                    .kind = FAB_WR_WRITE,
                    .flags = imm < 0 ? 0 : FAB_WR_IMM};
}
static void post_all(dom *x, uint32_t peer, const fab_wr *w, uint32_t n, dom *other) {
    double t = now();
    for (uint32_t done = 0; done < n;) {
        int k = ops->post(x->d, peer, w + done, n - done);
        CHECK(k >= 0, "post: %d", k);
        done += (uint32_t)k;
        pump(x);
        if (other) pump(other);
        CHECK(now() - t < 20);
    }
}
static int count_fds(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}
static int count_maps(void) {   /* of shared memory: an allocator's own come and go */
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;
    while (fgets(line, sizeof line, f)) n += strstr(line, "memfd:") != NULL;
    fclose(f);
    return n;
}

/* ---- in one process -------------------------------------------------------------------------- */

static const uint64_t sizes[] = {0, 1, 3, 63, 64, 65, 255, 257, 4095, 4097, 32767, 65536, 65537, 262143, (1 << 20) + 3};
enum { NSIZES = sizeof sizes / sizeof sizes[0] };

static void matrix(uint32_t path, int64_t seed) {
    dom a, b;
    char err[256];
    CHECK(try_open(&a, "a", 1, path, seed, 0, err) == 0, "%s", err);
    CHECK(try_open(&b, "b", 1, path, seed, 0, err) == 0, "%s", err);
    mem s = make_mem(4 << 20, 0), t = make_mem(4 << 20, path == 1);
    reg(&a, &s, 0);
    reg(&b, &t, FAB_ACCESS_REMOTE_WRITE);
    uint32_t peer = connect_to(&a, b.addr, &b);
    CHECK(fab_local_peer_path(a.d, peer) == (int)(path ? path : 4));
    fill(s.p, s.len, 7);
    uint32_t id = 1;
    for (unsigned i = 0; i < NSIZES; i++)
        for (int shift = 0; shift < 3; shift++, id++) {
            uint64_t n = sizes[i], so = (uint64_t)shift * 13,
                     doff = 4096 * (uint64_t)shift + (shift == 2 ? 4091 : (uint64_t)shift);
            memset(t.p, 0x5a, t.len);
            fab_wr w = wr_of(id, &s, so, &t.k, doff, n, 5);
            uint32_t imm = b.imm[5];
            post_all(&a, peer, &w, 1, NULL);
            UNTIL(a.ok[id] + a.bad[id] && b.imm[5] > imm, 10, pump(&a); pump(&b));
            CHECK(a.ok[id] == 1 && !a.bad[id] && b.imm[5] == imm + 1, "size %llu: %d", (unsigned long long)n,
                  a.last_bad);
            CHECK(!memcmp(t.p + doff, s.p + so, n));
            for (uint64_t k = 0; k < doff; k++) CHECK(t.p[k] == 0x5a);
            for (uint64_t k = doff + n; k < doff + n + 300; k++) CHECK(t.p[k] == 0x5a);
        }
    /* Pages, one immediate each, in a batch. */
    static fab_wr w[2000];
    memset(t.p, 0, t.len);
    for (uint32_t i = 0; i < 2000; i++) w[i] = wr_of(1000, &s, i * 1027, &t.k, (1999 - i) * 1031, 1021, 6);
    post_all(&a, peer, w, 2000, &b);
    UNTIL(a.ok[1000] == 2000 && b.imm[6] == 2000, 20, pump(&a); pump(&b); CHECK(!a.bad[1000], "%d", a.last_bad));
    for (uint32_t i = 0; i < 2000; i++) CHECK(!memcmp(t.p + (1999 - i) * 1031, s.p + i * 1027, 1021));
    for (int i = 0; i < 500; i++) {
        pump(&a);
        pump(&b);
    }
    CHECK(a.ok[1000] == 2000 && b.imm[6] == 2000);
    ops->close(a.d);
    ops->close(b.d);
    drop_mem(&s);
    drop_mem(&t);
}
static void t_direct(void) { matrix(0, -1); }
static void t_map(void) { matrix(1, -1); }
static void t_cma(void) { matrix(2, -1); }
static void t_bounce(void) { matrix(3, -1); }
static void t_shuffle(void) {
    for (uint32_t path = 0; path < 4; path++) matrix(path, 42 + path);
    dom a, b;
    char err[256];
    CHECK(try_open(&a, "a", 1, 0, 99, 0, err) == 0 && try_open(&b, "b", 1, 0, 99, 0, err) == 0);
    mem s = make_mem(1 << 20, 0), t = make_mem(1 << 20, 0);
    reg(&a, &s, 0);
    reg(&b, &t, 1);
    uint32_t peer = connect_to(&a, b.addr, &b);
    for (uint32_t i = 1; i < 900; i++) {
        fab_wr w = wr_of(i, &s, i, &t.k, i, 100, (int)(i % 50));
        post_all(&a, peer, &w, 1, i % 3 ? NULL : &b);
    }
    for (uint32_t i = 1; i < 900; i++) UNTIL(a.ok[i], 10, pump(&a); pump(&b));
    UNTIL(({
              uint32_t n = 0;
              for (int i = 0; i < 50; i++) n += b.imm[i];
              n;
          }) == 899,
          10, pump(&b));
    CHECK(a.order > 50, "only %llu completions out of order", (unsigned long long)a.order);
    ops->close(a.d);
    ops->close(b.d);
    drop_mem(&s);
    drop_mem(&t);
}

static void t_burst(void) {
    for (uint32_t path = 0; path < 4; path++) {
        dom a, b;
        open_path(&a, "a", path);
        open_path(&b, "b", path);
        mem s = make_mem(4096, 0), t = make_mem(4096, path == 1);
        reg(&a, &s, 0);
        reg(&b, &t, 1);
        uint32_t peer = connect_to(&a, b.addr, &b), total = 40000, posted = 0;
        static fab_wr w[1000];
        for (int i = 0; i < 1000; i++) w[i] = wr_of(9, &s, 0, &t.k, 0, path == 3 ? 1 : 0, i % 7);
        double end = now() + .3;
        while (posted < total && now() < end) {     /* b does not poll: a must be held up, and lose nothing */
            int k = ops->post(a.d, peer, w, 1000);
            CHECK(k >= 0);
            posted += (uint32_t)k;
            pump(&a);
        }
        CHECK(posted >= (path == 3 ? 1024 : 8192) && posted < 40000, "%u", posted);
        CHECK(ops->arm(a.d, 1) == 0);               /* blocked: may sleep ... */
        pump(&b);
        struct pollfd p = {.fd = ops->wait_fd(a.d), .events = POLLIN};
        CHECK(poll(&p, 1, 1000) == 1);              /* ... and is woken by the receiver's progress */
        ops->arm(a.d, 0);
        uint32_t sum_imm = 0;
        UNTIL(sum_imm == posted, 20, pump(&a); pump(&b); sum_imm = 0; for (int i = 0; i < 7; i++) sum_imm += b.imm[i]);
        for (int i = 0; i < 500; i++) {
            pump(&a);
            pump(&b);
        }
        CHECK(a.ok[9] == posted && !a.bad[9], "%u of %u, %u bad", a.ok[9], posted, a.bad[9]);
        ops->close(a.d);
        ops->close(b.d);
        drop_mem(&s);
        drop_mem(&t);
    }
}

static void t_send(void) {
    dom a, b;
    open_path(&a, "a", 0);
    open_path(&b, "b", 0);
    uint32_t peer = connect_to(&a, b.addr, &b);
    static char msg[65536], buf[64][65536];
    fill(msg, sizeof msg, 3);
    mem s = make_mem(4096, 0), t = make_mem(4096, 0);
    reg(&a, &s, 0);
    reg(&b, &t, 1);
    fab_wr w = {.id = 1, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)msg, .len = 1000},
           im = wr_of(2, &s, 0, &t.k, 0, 8, 1);
    post_all(&a, peer, &w, 1, NULL);
    post_all(&a, peer, &im, 1, NULL);
    UNTIL(b.imm[1], 5, pump(&a); pump(&b));         /* the waiting message holds up no immediate */
    CHECK(!a.ok[1] && !b.recvs);
    CHECK(ops->post_recv(b.d, 77, (uintptr_t)buf[0], 65536) == 0);
    UNTIL(a.ok[1], 5, pump(&a); pump(&b));
    CHECK(b.recvs == 1 && b.recv_id == 77 && b.recv_len == 1000 && !memcmp(buf[0], msg, 1000));
    /* Too long for the receive: both sides hear of it, the receive stays. */
    CHECK(ops->post_recv(b.d, 78, (uintptr_t)buf[0], 10) == 0);
    w.id = 3;
    post_all(&a, peer, &w, 1, NULL);
    UNTIL(a.bad[3], 5, pump(&a); pump(&b));
    CHECK(a.last_bad == -EMSGSIZE && b.faults == 1 && b.fault_status == -EMSGSIZE);
    w.id = 4;
    w.len = 10;
    post_all(&a, peer, &w, 1, NULL);
    UNTIL(a.ok[4], 5, pump(&a); pump(&b));
    CHECK(b.recv_id == 78);
    w.len = 65537;
    CHECK(ops->post(a.d, peer, &w, 1) == -EMSGSIZE);
    /* More than the ring holds, the receiver slow: post takes fewer at last, everything arrives in the end. */
    uint32_t posted = 0, base = b.recvs;
    w.id = 5;
    w.len = 65536;
    for (int i = 0; i < 5000; i++) {
        int k = ops->post(a.d, peer, &w, 1);
        CHECK(k >= 0);
        posted += (uint32_t)k;
        pump(&a);
    }
    CHECK(posted >= 3 && posted < 5000);
    /* Cancel of messages that wait in the ring and in the queue. */
    w.id = 6;
    CHECK(ops->post(a.d, peer, &w, 1) == 0);
    CHECK(ops->cancel(a.d, 5) == 0);
    UNTIL(a.bad[5] == posted, 5, pump(&a));
    for (int i = 0; i < 20; i++) CHECK(ops->post_recv(b.d, 80, (uintptr_t)buf[i], 65536) == 0);
    for (uint32_t i = 0; i < 300; i++) {
        uint64_t len = i * 211 % 65536;
        w = (fab_wr){.id = 100 + i, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)msg, .len = len};
        post_all(&a, peer, &w, 1, &b);
        UNTIL(a.ok[100 + i], 5, pump(&a); pump(&b));
        CHECK(b.recvs == base + i + 1 && b.recv_len == len && !memcmp(buf[i % 20], msg, len));
        CHECK(ops->post_recv(b.d, 80, (uintptr_t)buf[i % 20], 65536) == 0);
    }
    /* Too many receives. */
    int r = 0;
    for (int i = 0; i < 5000 && !r; i++) r = ops->post_recv(b.d, 1, (uintptr_t)buf[0], 1);
    CHECK(r == -EAGAIN);
    ops->close(a.d);
    ops->close(b.d);
    drop_mem(&s);
    drop_mem(&t);
}

static int status_of(dom *a, dom *b, uint32_t peer, fab_wr w) {
    static uint32_t id = 2000;
    w.id = ++id;
    post_all(a, peer, &w, 1, b);
    UNTIL(a->ok[id] + a->bad[id], 5, pump(a); pump(b));
    for (int i = 0; i < 20; i++) {
        pump(a);
        pump(b);
    }
    CHECK(a->ok[id] + a->bad[id] == 1);
    return a->ok[id] ? 0 : a->last_bad;
}

static void t_keys(void) {
    for (uint32_t path = 0; path < 4; path++) {
        dom a, b;
        char err[256];
        open_path(&a, "a", path);
        CHECK(try_open(&b, "b", 2, path, -1, 0, err) == 0);
        mem s = make_mem(8192, 0), t = make_mem(8192, 1), ro = make_mem(4096, 1), other = make_mem(4096, 1);
        reg(&a, &s, 0);
        reg(&b, &t, 1);
        reg(&b, &ro, 0);
        void *d0 = b.d;
        b.d = fab_local_domain(b.node, 1);
        reg(&b, &other, 1);
        b.d = d0;
        uint32_t peer = connect_to(&a, b.addr, &b);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 0, 8192, 1)) == 0);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 1, 8192, 1)) == -EFAULT);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 8192, 0, 1)) == 0);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 8193, 0, 1)) == -EFAULT);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 8000, &t.k, 0, 193, 1)) == -EFAULT);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &ro.k, 0, 8, 1)) == -EACCES);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &other.k, 0, 8, 1)) == -EACCES);
        fab_mr_keys bad = t.k;
        bad.remote_key ^= 1ull << 40;
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &bad, 0, 8, 1)) == -EKEYREVOKED);
        bad.remote_key = UINT64_MAX;
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &bad, 0, 8, 1)) == -EKEYREVOKED);
        bad.remote_key = 0;
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &bad, 0, 0, 1)) == -EKEYREVOKED);
        UNTIL(b.imm[1] >= 2, 5, pump(&b));
        for (int i = 0; i < 50; i++) pump(&b);
        CHECK(b.imm[1] == 2);                                      /* a failed write raises nothing */
        CHECK(ops->mr_dereg(b.d, t.k.local_key) == 0);
        CHECK(ops->mr_dereg(b.d, t.k.local_key) == -EKEYREVOKED);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 0, 8, 1)) == -EKEYREVOKED);
        reg(&b, &t, 1); /* the same index again: the old key stays dead, the new one works */
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 0, 8, 1)) == 0);
        CHECK(ops->mr_dereg(a.d, s.k.local_key) == 0);
        CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t.k, 0, 8, 1)) == -EKEYREVOKED);
        if (path == 2) { /* memory that is gone under a living key: only that request fails */
            mem m = make_mem(3 * 4096, 0);
            reg(&b, &m, 1);
            munmap(m.p + 4096, 4096);
            reg(&a, &s, 0);
            fab_wr w[3] = {wr_of(1, &s, 0, &m.k, 0, 4096, 2), wr_of(2, &s, 0, &m.k, 4000, 200, 2),
                           wr_of(3, &s, 0, &m.k, 8192, 4096, 2)};
            post_all(&a, peer, w, 3, &b);
            UNTIL(a.ok[1] && a.bad[2] && a.ok[3], 5, pump(&a); pump(&b));
            CHECK(a.last_bad == -EFAULT && b.imm[2] <= 2);
            munmap(m.p, 4096);
            munmap(m.p + 8192, 4096);
        }
        ops->close(a.d);
        ops->close(b.d);
        ops->close(fab_local_domain(b.node, 1));
        drop_mem(&s);
        drop_mem(&t);
        drop_mem(&ro);
        drop_mem(&other);
    }
}

static void t_self(void) {
    dom a;
    open_path(&a, "self", 0);
    mem s = make_mem(4096, 0);
    reg(&a, &s, 1);
    uint32_t peer = connect_to(&a, "self", NULL);
    fill(s.p, 100, 1);
    fab_wr w = wr_of(1, &s, 0, &s.k, 2000, 100, 3);
    post_all(&a, peer, &w, 1, NULL);
    UNTIL(a.ok[1] && a.imm[3], 5, pump(&a));
    CHECK(!memcmp(s.p, s.p + 2000, 100));
    ops->close(a.d);
    drop_mem(&s);
}

static void t_cancel(void) {
    for (uint32_t path = 0; path < 4; path++) {
        dom a, b;
        open_path(&a, "a", path);
        open_path(&b, "b", path);
        mem s = make_mem(64 << 20, 0), t = make_mem(64 << 20, path == 1);
        reg(&a, &s, 0);
        reg(&b, &t, 1);
        memset(s.p, 1, s.len);
        uint32_t peer = connect_to(&a, b.addr, &b);
        fab_wr w = wr_of(1, &s, 0, &t.k, 0, 64 << 20, 1), v = wr_of(2, &s, 0, &t.k, 0, 100, 2);
        post_all(&a, peer, &w, 1, NULL);
        UNTIL(t.p[300000], 5, pump(&a); pump(&b)); /* on its way */
        post_all(&a, peer, &v, 1, NULL);
        CHECK(ops->cancel(a.d, 1) == 0);
        UNTIL(a.bad[1], 1, pump(&a); pump(&b));
        CHECK(a.last_bad == -ECANCELED && !a.ok[1]);
        UNTIL(a.ok[2] && b.imm[2] == 1, 5, pump(&a); pump(&b));
        CHECK(!b.imm[1] && !t.p[(64 << 20) - 1]);
        /* Ended means quiet: nothing more arrives. */
        uint64_t at = 0;
        while (t.p[at]) at += 4096;
        for (int i = 0; i < 1000; i++) {
            pump(&a);
            pump(&b);
        }
        CHECK(!t.p[at]);
        /* peer_close ends what is in flight, once. */
        w.id = 3;
        post_all(&a, peer, &w, 1, NULL);
        CHECK(ops->peer_close(a.d, peer) == 0);
        UNTIL(a.bad[3] == 1, 2, pump(&a); pump(&b));
        CHECK(ops->post(a.d, peer, &w, 1) == -EINVAL);
        uint32_t again = connect_to(&a, b.addr, &b);
        CHECK(status_of(&a, &b, again, v) == 0);
        ops->close(a.d);
        ops->close(b.d);
        drop_mem(&s);
        drop_mem(&t);
    }
}

static void t_fair(void) { /* one peer does not poll: the other is served */
    dom a, b, c;
    open_path(&a, "a", 0);
    open_path(&b, "b", 0);
    open_path(&c, "c", 0);
    mem s = make_mem(1 << 20, 0), t = make_mem(1 << 20, 0), u = make_mem(1 << 20, 0);
    reg(&a, &s, 0);
    reg(&b, &t, 1);
    reg(&c, &u, 1);
    uint32_t pb = connect_to(&a, b.addr, NULL), pc = connect_to(&a, c.addr, NULL);
    fab_wr w = wr_of(1, &s, 0, &t.k, 0, 0, 1),
           m = {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = 60000};
    for (int i = 0, z = 0; z < 100 && i < 100000; i++) {
        int k = ops->post(a.d, pb, &w, 1);
        z = k ? 0 : z + 1;
        pump(&a);
    }
    for (int i = 0; i < 3000; i++) ops->post(a.d, pb, &m, 1);
    for (uint32_t i = 0; i < 500; i++) {
        fab_wr v = wr_of(100 + i, &s, 0, &u.k, 0, 1 << 20, 4);
        post_all(&a, pc, &v, 1, &c);
    }
    UNTIL(c.imm[4] == 500, 20, pump(&a); pump(&c));
    ops->close(a.d);
    ops->close(b.d);
    ops->close(c.d);
    drop_mem(&s);
    drop_mem(&t);
    drop_mem(&u);
}

typedef struct side {
    dom *x;
    uint32_t peer;
    mem *s;
    fab_mr_keys *k;
    uint32_t total;
    _Atomic int *go;
} side;
static void *talk(void *arg) { /* both directions at once, sleeping when there is nothing to do */
    side *h = arg;
    static _Thread_local char buf[8][512];
    for (int i = 0; i < 8; i++) CHECK(ops->post_recv(h->x->d, (uint64_t)i, (uintptr_t)buf[i], 512) == 0);
    uint32_t posted = 0, sends = 0, got = 0, slept = 0;
    double t = now();
    while (posted < h->total || sends < h->total / 10 || h->x->ok[1] < h->total || h->x->ok[2] < h->total / 10 ||
           h->x->imm[1] < h->total || h->x->recvs < h->total / 10 || atomic_load(h->go) != 2) {
        fab_wr w[16];
        uint32_t n = posted + 16 <= h->total ? 16 : h->total - posted;
        for (uint32_t i = 0; i < n; i++) w[i] = wr_of(1, h->s, i * 64, h->k, i * 64, 64, 1);
        int k = n ? ops->post(h->x->d, h->peer, w, n) : 0;
        CHECK(k >= 0);
        posted += (uint32_t)k;
        if (sends < h->total / 10) {
            fab_wr m = {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)h->s->p, .len = 100};
            k = ops->post(h->x->d, h->peer, &m, 1);
            CHECK(k >= 0);
            sends += (uint32_t)k;
        }
        k = pump(h->x);
        for (; got < h->x->recvs; got++) CHECK(ops->post_recv(h->x->d, 1, (uintptr_t)buf[0], 512) == 0);
        if (h->x->imm[1] >= h->total && h->x->recvs >= h->total / 10 && h->x->ok[1] >= h->total &&
            h->x->ok[2] >= h->total / 10 && n == 0 && got) {
            atomic_fetch_add(h->go, 1);
            break;
        }
        if (!k && ops->arm(h->x->d, 1) == 0) {
            struct pollfd p = {.fd = ops->wait_fd(h->x->d), .events = POLLIN};
            CHECK(poll(&p, 1, posted < h->total ? 1 : 3000) >= 0);
            if (posted >= h->total)
                CHECK(p.revents, "slept 3 s: a wake-up was lost (%u imms, %u recvs, %u ok, %u ok)", h->x->imm[1],
                      h->x->recvs, h->x->ok[1], h->x->ok[2]);
            slept++;
            ops->arm(h->x->d, 0);
        }
        CHECK(now() - t < 60);
    }
    return (void *)(uintptr_t)slept;
}
static void t_threads(void) {
    for (uint32_t path = 0; path < 4; path++) {
        static dom a, b;
        open_path(&a, "a", path);
        open_path(&b, "b", path);
        mem s = make_mem(4096, path == 1), t = make_mem(4096, path == 1), s2 = make_mem(4096, 0),
            t2 = make_mem(4096, 0);
        reg(&a, &s, 1);
        reg(&b, &t, 1);
        reg(&a, &s2, 0);
        reg(&b, &t2, 0);
        _Atomic int go = 0;
        side x = {&a, connect_to(&a, b.addr, &b), &s2, &t.k, 20000, &go},
             y = {&b, connect_to(&b, a.addr, &a), &t2, &s.k, 20000, &go};
        pthread_t p, q;
        pthread_create(&p, NULL, talk, &x);
        pthread_create(&q, NULL, talk, &y);
        pthread_join(p, NULL);
        pthread_join(q, NULL);
        ops->close(a.d);
        ops->close(b.d);
        drop_mem(&s);
        drop_mem(&t);
        drop_mem(&s2);
        drop_mem(&t2);
    }
}

/* Deregistration waits for the slice that is being written: after it the memory may be freed. */
static void *writer(void *arg) {
    side *h = arg;
    uint32_t n = 0;
    for (double t = now(); !h->x->bad[1];) {
        CHECK(now() - t < 20);
        fab_wr w = wr_of(1, h->s, 0, h->k, 0, 1 << 20, -1);
        CHECK(ops->post(h->x->d, h->peer, &w, 1) >= 0);
        while (h->x->ok[1] + h->x->bad[1] == n) pump(h->x);
        n = h->x->ok[1] + h->x->bad[1];
    }
    return NULL;
}
static void t_dereg(void) {
    for (int round = 0; round < 20; round++) {
        static dom a, b;
        open_path(&a, "a", 0);
        open_path(&b, "b", 0);
        mem s = make_mem(1 << 20, 0), t = make_mem(1 << 20, 0);
        memset(s.p, 7, s.len);
        reg(&a, &s, 0);
        reg(&b, &t, 1);
        side x = {&a, connect_to(&a, b.addr, &b), &s, &t.k, 0, NULL};
        pthread_t p;
        pthread_create(&p, NULL, writer, &x);
        usleep(2000 + round * 37);
        CHECK(ops->mr_dereg(b.d, t.k.local_key) == 0);
        CHECK(mprotect(t.p, t.len, PROT_NONE) == 0); /* a late write would be a crash */
        pthread_join(p, NULL);
        CHECK(a.bad[1] && a.last_bad == -EKEYREVOKED);
        ops->close(a.d);
        ops->close(b.d);
        drop_mem(&s);
        drop_mem(&t);
    }
}

static void t_names(void) {
    dom a, b;
    char err[256];
    open_path(&a, "a", 0);
    CHECK(try_open(&b, "a", 1, 0, -1, 0, err) == -EADDRINUSE && strstr(err, "in use"), "%s", err);
    static const char *bad[] = {"", "x/y", "..", "a b",
                                "0123456789012345678901234567890123456789012345678901234567890123456789"};
    for (unsigned i = 0; i < 5; i++) CHECK(try_open(&b, bad[i], 1, 0, -1, 0, err) == -EINVAL);
    CHECK(try_open(&b, "z", 9, 0, -1, 0, err) == -EINVAL && try_open(&b, "z", 0, 0, -1, 0, err) == -EINVAL);
    static const char *addr[] = {"",     ".0",  "a.8", "a.",      "a.00", "a#", "a#xyz", "a.0#", "a#12345678901234567",
                                 "a.0 ", "a,b", "/a",  "a.0#1.2", "#1"};
    uint32_t p;
    for (unsigned i = 0; i < sizeof addr / sizeof addr[0]; i++)
        CHECK(ops->peer_open(a.d, addr[i], strlen(addr[i]), &p) == -EINVAL, "%s", addr[i]);
    CHECK(connect_fails(&a, "nobody") == -ECONNREFUSED);
    CHECK(connect_fails(&a, "a.1") == -ECONNREFUSED);
    CHECK(connect_fails(&a, "a.0#1") == -ESTALE);
    CHECK(ops->address(a.d, err, 4) == -ENOSPC);
    CHECK(ops->post(a.d, 12345, NULL, 0) == -EINVAL && ops->peer_close(a.d, 12345) == -EINVAL);
    ops->close(a.d);
    char keep[80], path[128];
    strcpy(keep, dir);
    snprintf(dir, sizeof dir, "%.60s.open", keep);
    mkdir(dir, 0755);
    chmod(dir, 0755);
    CHECK(try_open(&b, "b", 1, 0, -1, 0, err) == -EACCES && strstr(err, "open to others"));
    rmdir(dir);
    CHECK(symlink(keep, dir) == 0 && try_open(&b, "b", 1, 0, -1, 0, err) == -ENOTDIR);
    unlink(dir);
    strcpy(dir, keep);
    snprintf(path, sizeof path, "%s/a.sock", dir);
    CHECK(access(path, F_OK) != 0);
}

static void t_cycles(void) {
    dom a, b;
    open_path(&a, "a", 0);
    mem s = make_mem(4096, 1);
    reg(&a, &s, 1);
    int fds = 0, maps = 0;
    for (int i = 0; i < 300; i++) {
        open_path(&b, "b", i % 4);
        mem t = make_mem(4096, 1);
        reg(&b, &t, 1);
        uint32_t peer = connect_to(&a, b.addr, &b);
        connect_to(&b, a.addr, &a);
        fab_wr w = wr_of(1, &s, 0, &t.k, 0, 100, 1);
        post_all(&a, peer, &w, 1, &b);
        UNTIL(b.imm[1], 5, pump(&a); pump(&b));
        if (i & 1) CHECK(ops->peer_close(a.d, peer) == 0);
        ops->close(b.d);
        if (!(i & 1)) {
            UNTIL(a.downs, 5, pump(&a));
            CHECK(a.down_status == -ECONNRESET && ops->peer_close(a.d, peer) == 0);
            a.downs = 0;
        }
        for (int k = 0; k < 5; k++) pump(&a);
        drop_mem(&t);
        if (i == 20) {
            usleep(20000);
            pump(&a);
            usleep(300000);
            fds = count_fds();
            maps = count_maps();
        }
    }
    for (int k = 0; k < 10; k++) {
        usleep(30000);
        pump(&a);
    }
    CHECK(count_fds() <= fds, "%d descriptors, then %d", fds, count_fds());
    CHECK(count_maps() <= maps, "%d mappings, then %d", maps, count_maps());
    ops->close(a.d);
    drop_mem(&s);
}

static void t_unmap(void) { /* what the peer deregistered does not stay mapped here */
    dom a, b;
    char err[256];
    CHECK(try_open(&a, "a", 1, 1, -1, 100, err) == 0 && try_open(&b, "b", 1, 1, -1, 100, err) == 0);
    mem s = make_mem(4096, 0);
    reg(&a, &s, 0);
    uint32_t peer = connect_to(&a, b.addr, &b);
    int maps = count_maps();
    for (int round = 0; round < 3; round++) {
        mem t[40];
        for (uint32_t i = 0; i < 40; i++) {
            t[i] = make_mem(8192, 1);
            reg(&b, &t[i], 1);
            CHECK(status_of(&a, &b, peer, wr_of(0, &s, 0, &t[i].k, 0, 100, 1)) == 0);
        }
        CHECK(count_maps() >= maps + 80);
        for (int i = 0; i < 40; i++) {
            CHECK(ops->mr_dereg(b.d, t[i].k.local_key) == 0);
            drop_mem(&t[i]);
        }
        UNTIL(count_maps() <= maps, 3, pump(&a); pump(&b); usleep(2000));
    }
    ops->close(a.d);
    ops->close(b.d);
    drop_mem(&s);
}

static void t_nics(void) { /* each NIC of one to each of the other, in both directions */
    dom a, b, *x[2] = {&a, &b};
    char err[256];
    CHECK(try_open(&a, "a", 3, 0, -1, 0, err) == 0 && try_open(&b, "b", 3, 0, -1, 0, err) == 0);
    mem m[2][3];
    for (int i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 3; k++) {
            x[i]->d = fab_local_domain(x[i]->node, k);
            m[i][k] = make_mem(4096, 0);
            m[i][k].p[0] = (char)(1 + 3 * i + (int)k);
            reg(x[i], &m[i][k], 1);
        }
    for (int i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 3; k++)
            for (uint32_t to = 0; to < 3; to++) {
                char addr[40];
                snprintf(addr, sizeof addr, "%s.%u", i ? "a" : "b", to);
                x[i]->d = fab_local_domain(x[i]->node, k);
                x[!i]->d = fab_local_domain(x[!i]->node, to);
                uint32_t peer = connect_to(x[i], addr, x[!i]), imms = x[!i]->imm[k];
                CHECK(status_of(x[i], x[!i], peer, wr_of(0, &m[i][k], 0, &m[!i][to].k, 100 + k, 1, (int)k)) == 0);
                UNTIL(x[!i]->imm[k] == imms + 1, 5, pump(x[!i]));
                CHECK(m[!i][to].p[100 + k] == m[i][k].p[0]);
            }
    for (int i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 3; k++) {
            ops->close(fab_local_domain(x[i]->node, k));
            drop_mem(&m[i][k]);
        }
}

static int raw_connect(const char *name) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%.79s/%.20s.sock", dir, name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    struct timeval tv = {.tv_sec = 1};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv);
    return fd;
}
static void raw_send(int fd, const void *p, size_t n, const int *fds, int nfds) {
    union {
        struct cmsghdr align;
        char b[CMSG_SPACE(16 * sizeof(int))];
    } c;
    memset(&c, 0, sizeof c);
    struct iovec v = {(void *)(uintptr_t)p, n};
    struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1};
    if (nfds) {
        h.msg_control = c.b;
        h.msg_controllen = CMSG_SPACE((size_t)nfds * sizeof(int));
        struct cmsghdr *k = CMSG_FIRSTHDR(&h);
        *k = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN((size_t)nfds * sizeof(int))};
        memcpy(CMSG_DATA(k), fds, (size_t)nfds * sizeof(int));
    }
    if (sendmsg(fd, &h, MSG_NOSIGNAL) < 0)
        CHECK(errno == EPIPE || errno == ECONNRESET || errno == EAGAIN, "%s", strerror(errno));
}
static void t_garbage(void) {
    dom a, b;
    open_path(&a, "a", 0);
    open_path(&b, "b", 0);
    uint32_t peer = connect_to(&b, a.addr, &a);
    int fds = count_fds();
    uint64_t seed = 12345;
    static unsigned char m[70000];
    int pp[2];
    CHECK(pipe2(pp, O_CLOEXEC) == 0);
    for (int i = 0; i < 3000; i++) {
        int fd = raw_connect("a");
        for (int k = 0; k < 1 + i % 3; k++) {
            fill((char *)m, 512, seed++);
            if (i % 4) { /* a good head, so that the body is looked at too */
                memcpy(m, (uint32_t[]){0x6c6f6366u}, 4);
                memcpy(m + 4, (uint16_t[]){(uint16_t)(i % 7 ? FL_VERSION : 1), (uint16_t)(1 + i % 8)}, 4);
                memcpy(m + 8, (uint32_t[]){sizeof(fl_wire)}, 4);
                if (i % 3) {
                    memset(m + 24, 0, 16);   /* whoever answers, NIC 0 to NIC 0 */
                    memcpy(m + offsetof(fl_wire, from_name), "garbage", 8);
                }
            }
            size_t n = i % 5 == 0 ? seed % 200 : i % 50 == 7 ? 60000 : sizeof(fl_wire);
            int f[] = {pp[1], 0, pp[0], 2, pp[0], pp[1]};
            raw_send(fd, m, n, f, i % 7);
        }
        if (i % 11 == 0) usleep(100);
        close(fd);
    }
    int idle[200];
    for (int i = 0; i < 200; i++) idle[i] = raw_connect("a"); /* say nothing */
    usleep(100000);
    fab_wr w = {.id = 1, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)m, .len = 10};
    CHECK(ops->post_recv(a.d, 1, (uintptr_t)m + 1000, 100) == 0);
    post_all(&b, peer, &w, 1, &a);
    UNTIL(b.ok[1], 5, pump(&a); pump(&b));
    CHECK(fab_local_malformed(a.node) > 500, "%llu", (unsigned long long)fab_local_malformed(a.node));
    usleep(700000); /* the connect time-out ends those who said nothing */
    connect_to(&b, "a", &a);
    for (int i = 0; i < 200; i++) close(idle[i]);
    close(pp[0]);
    close(pp[1]);
    usleep(50000);
    CHECK(count_fds() <= fds + 8, "%d descriptors, then %d", fds, count_fds());
    ops->close(a.d);
    ops->close(b.d);
}

static void t_scribble(
    void) { /* nonsense in the shared rings, from either side: no crash, no hang, other peers go on */
    dom a, b, c;
    open_path(&a, "a", 3);
    open_path(&b, "b", 3);
    open_path(&c, "c", 3);
    mem s = make_mem(4096, 0), t = make_mem(4096, 0), u = make_mem(4096, 0);
    reg(&a, &s, 0);
    reg(&b, &t, 1);
    reg(&c, &u, 0);
    static char buf[65536];
    uint32_t good = connect_to(&c, b.addr, &b);
    uint64_t r = 88172645463325252ull;
    for (int i = 0; i < 400; i++) {
        for (int k = 0; k < 4; k++) ops->post_recv(b.d, 0, (uintptr_t)buf, sizeof buf);
        uint32_t peer = connect_to(&a, b.addr, &b);
        fl_chan *ch = ((fl_dom *)a.d)->peers[peer]->ch;
        fab_wr w[3] = {wr_of(1, &s, 0, &t.k, 0, 700, 1),
                       {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = 900},
                       wr_of(3, &s, 0, &t.k, 0, 0, 2)};
        for (int k = 0; k < 20; k++) {
            int n = ops->post(a.d, peer, w, 3);
            if (n < 0) break;
            _Atomic uint64_t *word[] = {&ch->imm_tail,    &ch->rec_tail[0], &ch->rec_tail[1], &ch->imm_head,
                                        &ch->rec_head[0], &ch->rec_head[1], &ch->want};
            uint64_t v = fl_rand(&r), small = fl_rand(&r) % 5000;
            switch (i % 4) {
            case 0: *word[v % 7] = v >> 3; break;
            case 1: *word[v % 7] += v & 1 ? small : -small; break;
            case 2: *word[v % 7] += 64 * (small % 40); break;
            default: ((uint32_t *)(void *)(v & 1 ? ch->msg : ch->bnc))[v % 600] = (uint32_t)(v & 2 ? v >> 9 : small);
            }
            fab_wc wc[64];
            CHECK(ops->poll(a.d, wc, 64, 0) >= 0 && ops->poll(b.d, wc, 64, 0) >= 0);
            CHECK(ops->arm(a.d, 1) >= 0 && ops->arm(b.d, 1) >= 0);
            ops->arm(a.d, 0);
            ops->arm(b.d, 0);
        }
        ops->peer_close(a.d, peer);
        fab_wc wc[64];
        for (int k = 0; k < 20; k++) {
            ops->poll(a.d, wc, 64, 0);
            ops->poll(b.d, wc, 64, 0);
        }
        uint32_t imm = b.imm[7];
        fab_wr ok = wr_of(1, &u, 0, &t.k, 0, 700, 7);
        post_all(&c, good, &ok, 1, NULL);
        for (double end = now() + 5; b.imm[7] == imm;) {
            int n = ops->poll(b.d, wc, 64, 0);
            for (int k = 0; k < n; k++) b.imm[7] += wc[k].kind == FAB_WC_IMM && wc[k].imm == 7;
            CHECK(now() < end);
        }
    }
    ops->close(a.d);
    ops->close(b.d);
    ops->close(c.d);
    drop_mem(&s);
    drop_mem(&t);
    drop_mem(&u);
}

/* ---- with a child ---------------------------------------------------------------------------- */

typedef struct shared {
    fab_mr_keys k, parent;
    _Atomic uint64_t ready, quit, imms, recvs, sum_len, sum_off, sum, drain;
    char addr[128];
} shared;
static shared *sh;
static pid_t child_start(const char *name, uint32_t path, uint64_t len, int mappable, uint64_t hb) {
    memset(sh, 0, sizeof *sh);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid) {
        UNTIL(atomic_load(&sh->ready), 60, usleep(500));
        return pid;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    static dom x;
    static char buf[16][65536];
    char err[256];
    CHECK(try_open(&x, name, 1, path, -1, hb, err) == 0, "%s", err);
    mem m = make_mem(len, mappable);
    reg(&x, &m, 1);
    sh->k = m.k;
    strcpy(sh->addr, x.addr);
    for (int i = 0; i < 16; i++) ops->post_recv(x.d, (uint64_t)i, (uintptr_t)buf[i], 65536);
    atomic_store(&sh->ready, 1);
    uint32_t recvs = 0;
    while (!atomic_load(&sh->quit)) {
        if (!pump(&x)) usleep(20);
        for (; recvs < x.recvs; recvs++) ops->post_recv(x.d, 1, (uintptr_t)buf[recvs % 16], 65536);
        uint64_t t = 0;
        for (int i = 0; i < IMMS; i++) t += x.imm[i];
        atomic_store(&sh->imms, t);
        atomic_store(&sh->recvs, x.recvs);
        if (atomic_load(&sh->sum_len)) {
            atomic_store(&sh->sum, sum(m.p + atomic_load(&sh->sum_off), atomic_load(&sh->sum_len)));
            atomic_store(&sh->sum_len, 0);
        }
    }
    ops->close(x.d);
    _exit(0);
}
static uint64_t child_sum(uint64_t off, uint64_t len) {
    atomic_store(&sh->sum_off, off);
    atomic_store(&sh->sum_len, len);
    UNTIL(!atomic_load(&sh->sum_len), 20, usleep(100));
    return atomic_load(&sh->sum);
}
static void child_end(pid_t pid, int want) {
    int st;
    CHECK(waitpid(pid, &st, 0) == pid);
    if (want == 0) CHECK(WIFEXITED(st) && WEXITSTATUS(st) == 0, "status %x", (unsigned)st);
}

static void t_fork(void) {
    static const struct {
        uint32_t path;
        int mappable;
        int show;
    } kinds[] = {{0, 1, 2}, {0, 0, 2}, {1, 1, 1}, {2, 0, 2}, {3, 0, 3}};
    for (unsigned c = 0; c < 5; c++) {
        pid_t pid = child_start("child", kinds[c].path, 65 << 20, kinds[c].mappable, 0);
        dom a;
        open_path(&a, "a", kinds[c].path);
        mem s = make_mem(65 << 20, 0);
        fill(s.p, s.len, c);
        reg(&a, &s, 0);
        uint32_t peer = connect_to(&a, sh->addr, NULL), id = 0;
        CHECK(fab_local_peer_path(a.d, peer) == kinds[c].show);
        for (unsigned i = 0; i <= NSIZES; i++) {
            uint64_t n = i < NSIZES ? sizes[i] : 64 << 20, so = i * 7, doff = 4093 + i;
            uint64_t imms = atomic_load(&sh->imms);
            fab_wr w = wr_of(++id, &s, so, &sh->k, doff, n, 5);
            post_all(&a, peer, &w, 1, NULL);
            UNTIL(a.ok[id] && atomic_load(&sh->imms) == imms + 1, 20, pump(&a); CHECK(!a.bad[id], "%d", a.last_bad));
            if (n)
                CHECK(child_sum(doff, n) == sum(s.p + so, n), "path %u, %llu bytes", kinds[c].path,
                      (unsigned long long)n);
        }
        static fab_wr w[4096];
        uint64_t imms = atomic_load(&sh->imms);
        for (uint32_t i = 0; i < 4096; i++)
            w[i] = wr_of(1000, &s, i * 1024, &sh->k, (4095 - i) * 1024, 1024, (int)(i % 100));
        post_all(&a, peer, w, 4096, NULL);
        UNTIL(a.ok[1000] == 4096 && atomic_load(&sh->imms) == imms + 4096, 20, pump(&a));
        for (uint32_t i = 0; i < 4096; i += 97) CHECK(child_sum((4095 - i) * 1024, 1024) == sum(s.p + i * 1024, 1024));
        for (uint32_t i = 0; i < 100; i++) {
            fab_wr m = {.id = 2000 + i, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = i * 655};
            post_all(&a, peer, &m, 1, NULL);
        }
        UNTIL(a.ok[2099] && atomic_load(&sh->recvs) == 100, 10, pump(&a));
        atomic_store(&sh->quit, 1);
        child_end(pid, 0);
        UNTIL(a.downs, 2, pump(&a));
        CHECK(a.down_status == -ECONNRESET);
        ops->close(a.d);
        drop_mem(&s);
    }
}

static void t_kill(void) {
    for (uint32_t path = 1; path <= 3; path++)
        for (int sleepy = 0; sleepy < 2; sleepy++) {
            pid_t pid = child_start("child", path, 64 << 20, path == 1, 0);
            dom a;
            open_path(&a, "a", path);
            mem s = make_mem(64 << 20, 0);
            reg(&a, &s, 0);
            uint32_t peer = connect_to(&a, sh->addr, NULL), posted = 0;
            for (int i = 0; i < 40; i++) {
                fab_wr w = wr_of(1, &s, 0, &sh->k, 0, 64 << 20, 1),
                       m = {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = 60000};
                CHECK(ops->post(a.d, peer, &w, 1) == 1);
                CHECK(ops->post(a.d, peer, &m, 1) == 1);
                posted++;
                pump(&a);
            }
            kill(pid, SIGKILL);
            /* The clock starts when the kernel is done with the process: taking down its memory comes first, and on a busy
             * machine that alone can last 100 ms. */
            double t = 0, t0 = now();
            while (!a.downs) {
                siginfo_t si = {0};
                if (!t && waitid(P_PID, (id_t)pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 && si.si_pid == pid)
                    t = now();
                if (sleepy) { /* the descriptor tells */
                    struct pollfd p = {.fd = ops->wait_fd(a.d), .events = POLLIN};
                    if (ops->arm(a.d, 1) == 0) CHECK(poll(&p, 1, 2000) == 1);
                    ops->arm(a.d, 0);
                }
                pump(&a);
                CHECK(now() - t0 < 3);
            }
            if (!t) t = now();
            CHECK(now() - t < .1, "%.0f ms", (now() - t) * 1e3);
            UNTIL(a.ok[1] + a.bad[1] == posted && a.ok[2] + a.bad[2] == posted, 1, pump(&a));
            CHECK(a.down_status == -ECONNRESET && a.bad[1] && a.last_bad == -ECONNRESET);
            fab_wr w = wr_of(3, &s, 0, &sh->k, 0, 1, 1);
            CHECK(ops->post(a.d, peer, &w, 1) == -ECONNRESET);
            for (int i = 0; i < 100; i++) pump(&a);
            CHECK(a.ok[1] + a.bad[1] == posted && a.ok[2] + a.bad[2] == posted && a.downs == 1);
            child_end(pid, -1);
            /* Again under the same name: the old incarnation is gone for good, the new one is found. */
            char old[128];
            strcpy(old, sh->addr);
            CHECK(connect_fails(&a, old) == -ECONNREFUSED);
            pid = child_start("child", path, 1 << 20, path == 1, 0);
            CHECK(connect_fails(&a, old) == -ESTALE);
            CHECK(ops->peer_close(a.d, peer) == 0);
            a.downs = 0;
            peer = connect_to(&a, "child", NULL);
            w = wr_of(4, &s, 0, &sh->k, 0, 1000, 1);
            post_all(&a, peer, &w, 1, NULL);
            UNTIL(a.ok[4], 5, pump(&a));
            atomic_store(&sh->quit, 1);
            child_end(pid, 0);
            ops->close(a.d);
            drop_mem(&s);
        }
}

static void t_stop(void) {
    pid_t pid = child_start("child", 0, 1 << 20, 1, 100);
    dom a;
    char err[256];
    CHECK(try_open(&a, "a", 1, 0, -1, 100, err) == 0);
    mem s = make_mem(1 << 20, 0);
    reg(&a, &s, 0);
    uint32_t peer = connect_to(&a, sh->addr, NULL);
    for (double t = now(); now() - t < .5;) {
        pump(&a);
        usleep(1000);
    }
    CHECK(!a.downs);
    kill(pid, SIGSTOP);
    fab_wr m = {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = 100};
    post_all(&a, peer, &m, 1, NULL);
    double t = now();
    UNTIL(a.downs, 2, pump(&a); usleep(100));
    CHECK(a.down_status == -ETIMEDOUT && now() - t < .6, "%d after %.2f s", a.down_status, now() - t);
    UNTIL(a.bad[2] == 1, 1, pump(&a));
    t = now();
    CHECK(connect_fails(&a, "child") == -ETIMEDOUT && now() - t < 1);
    uint64_t recvs = atomic_load(&sh->recvs);
    kill(pid, SIGCONT);
    usleep(50000);
    CHECK(atomic_load(&sh->recvs) == recvs); /* the message that ended badly does not arrive later */
    a.downs = 0;
    peer = connect_to(&a, "child", NULL);
    atomic_store(&sh->quit, 1);
    child_end(pid, 0);
    ops->close(a.d);
    drop_mem(&s);
}

static void t_die_cycles(void) {
    dom a;
    open_path(&a, "a", 0);
    int fds = 0, maps = 0;
    for (int i = 0; i < 60; i++) {
        memset(sh, 0, sizeof *sh);
        /* The child is made by a process without threads of its own: connects to us, writes, dies without a word. */
        pid_t pid = child_start("child", 0, 4096, 1, 0);
        uint32_t peer = connect_to(&a, sh->addr, NULL);
        kill(pid, SIGKILL);
        UNTIL(a.downs, 2, pump(&a));
        CHECK(ops->peer_close(a.d, peer) == 0);
        a.downs = 0;
        child_end(pid, -1);
        if (i == 10) {
            usleep(20000);
            fds = count_fds();
            maps = count_maps();
        }
    }
    usleep(50000);
    CHECK(count_fds() <= fds && count_maps() <= maps, "%d/%d descriptors, %d/%d mappings", fds, count_fds(), maps,
          count_maps());
    ops->close(a.d);
}

static void t_inbound_death(void) { /* what a peer published before it died is delivered; the rest of it goes */
    dom a;
    open_path(&a, "a", 0);
    mem t = make_mem(1 << 20, 1);
    reg(&a, &t, 1);
    int fds = 0;
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (!pid) {
            static dom x;
            char name[20];
            snprintf(name, sizeof name, "w%d", i);
            open_path(&x, name, (uint32_t)(i % 4));
            mem s = make_mem(4096, 0);
            reg(&x, &s, 0);
            uint32_t p = connect_to(&x, "a", NULL);
            fab_wr w[100], m = {.id = 2, .kind = FAB_WR_SEND, .local_addr = (uintptr_t)s.p, .len = 100};
            for (int k = 0; k < 100; k++) w[k] = wr_of(1, &s, 0, &t.k, 0, 8, 9);
            for (int done = 0; done < 100;) {
                int k = ops->post(x.d, p, w + done, (uint32_t)(100 - done));
                CHECK(k >= 0);
                done += k;
                pump(&x);
            }
            ops->post(x.d, p, &m, 1);
            double end = now() + .02;
            while (i % 4 != 3 && x.ok[1] < 100 && now() < end + 5) pump(&x);
            for (; now() < end;) pump(&x);
            kill(getpid(), SIGKILL);
        }
        child_end(pid, -1);
        uint32_t want = a.imm[9];
        (void)want;
        UNTIL(a.imm[9] == 100u * (uint32_t)(i + 1), 3, pump(&a));
        for (int k = 0; k < 10; k++) {
            usleep(2000);
            pump(&a);
        }
        if (i == 4) fds = count_fds();
    }
    usleep(50000);
    CHECK(count_fds() <= fds, "%d, then %d", fds, count_fds());
    CHECK(!a.recvs);
    ops->close(a.d);
    drop_mem(&t);
}

/* process_vm_writev forbidden (as in some containers): found out at connect, or only later. */
static void forbid_cma(void) {
    struct sock_filter f[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                              BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
                              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog p = {sizeof f / sizeof f[0], f};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p) == 0);
}
static void t_forbidden(void) {
    for (int mode = 0; mode < 4; mode++) {
        int late = mode & 1, mappable = mode >> 1;
        pid_t child = child_start("child", 0, 8 << 20, mappable, 0), pid = fork();
        if (!pid) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (!late) forbid_cma();
            dom a;
            open_path(&a, "a", 0);
            mem s = make_mem(8 << 20, 0);
            fill(s.p, s.len, 5);
            reg(&a, &s, 0);
            uint32_t peer = connect_to(&a, sh->addr, NULL);
            CHECK(fab_local_peer_path(a.d, peer) == (late ? 2 : 3));
            fab_wr w = wr_of(1, &s, 1, &sh->k, 3, (8 << 20) - 3, 5);
            post_all(&a, peer, &w, 1, NULL);
            if (late) forbid_cma();
            UNTIL(a.ok[1] && atomic_load(&sh->imms) == 1, 10, pump(&a); CHECK(!a.bad[1], "%d", a.last_bad));
            CHECK(child_sum(3, (8 << 20) - 3) == sum(s.p + 1, (8 << 20) - 3));
            ops->close(a.d);
            _exit(0);
        }
        child_end(pid, 0);
        atomic_store(&sh->quit, 1);
        child_end(child, 0);
    }
}

/* ---- ------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    void (*fn)(void);
    int inproc;
} tests[] = {
    {"direct", t_direct, 1},
    {"map", t_map, 1},
    {"cma", t_cma, 1},
    {"bounce", t_bounce, 1},
    {"shuffle", t_shuffle, 1},
    {"burst", t_burst, 1},
    {"send", t_send, 1},
    {"keys", t_keys, 1},
    {"self", t_self, 1},
    {"cancel", t_cancel, 1},
    {"fair", t_fair, 1},
    {"threads", t_threads, 1},
    {"dereg", t_dereg, 1},
    {"names", t_names, 1},
    {"cycles", t_cycles, 1},
    {"unmap", t_unmap, 1},
    {"nics", t_nics, 1},
    {"garbage", t_garbage, 1},
    {"scribble", t_scribble, 1},
    {"fork", t_fork, 0},
    {"kill", t_kill, 0},
    {"stop", t_stop, 0},
    {"die_cycles", t_die_cycles, 0},
    {"inbound_death", t_inbound_death, 0},
    {"forbidden", t_forbidden, 0},
};

int main(int argc, char **argv) {
    snprintf(dir, sizeof dir, "/tmp/fab-test-%d", getpid());
    ops = fab_local_ops();
    sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    int ran = 0;
    for (unsigned i = 0; i < sizeof tests / sizeof tests[0]; i++) {
#ifdef __SANITIZE_THREAD__
        int want = argc < 2 && tests[i].inproc;
#else
        int want = argc < 2;
#endif
        for (int k = 1; k < argc; k++)
            want |= !strcmp(argv[k], "all") || !strcmp(argv[k], tests[i].name) ||
                    (!strcmp(argv[k], "inproc") && tests[i].inproc);
        if (!want) continue;
        test_name = tests[i].name;
        double t = now();
        tests[i].fn();
        printf("ok %-14s %6.2f s\n", test_name, now() - t);
        ran++;
    }
    char lock[128];
    snprintf(lock, sizeof lock, "%s/.lock", dir);
    unlink(lock);
    rmdir(dir);
    return ran ? 0 : 77;
}
