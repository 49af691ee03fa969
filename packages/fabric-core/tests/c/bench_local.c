/* bench_local.c - GB/s of the local backend between two processes, beside the limits of this machine in the same run.
 * Build: gcc -O2 -std=gnu11 -I<native/include> -I<native> bench_local.c <native/local/>*.c -lpthread
 * Usage: bench_local [rounds]. Memory-bound figures move with the neighbours' load: repeat, and compare within a run only. */
#define _GNU_SOURCE
#include "local/local.h"
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#    include <immintrin.h>
#endif

#define AREA (256ull << 20)
static const fab_domain_ops *ops;
static char dir[64];
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void die(const char *what) {
    fprintf(stderr, "bench_local: %s\n", what);
    exit(1);
}

typedef struct shared {
    _Atomic uint64_t imms, ready, quit, echo, echo_base;
    fab_mr_keys map, priv;
} shared;
static shared *sh;

static void *open_node(const char *name, uint32_t path) {
    char err[256];
    fab_local_node *n;
    fab_local_cfg c = {.dir = dir, .name = name, .nics = 1, .path = path, .shuffle_seed = -1};
    if (fab_local_open(&c, &n, err, sizeof err)) die(err);
    return fab_local_domain(n, 0);
}
static char *area(int *fd) {
    *fd = memfd_create("bench", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(*fd, AREA)) die("ftruncate");
    char *p = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, *fd, 0);
    if (p == MAP_FAILED) die("mmap");
    return p;
}
static char *private_area(void) {
    char *p = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED) die("mmap");
    return p;
}
static uint32_t connect_to(void *d, const char *addr) {
    uint32_t peer;
    if (ops->peer_open(d, addr, strlen(addr), &peer)) die("peer_open");
    for (double t = now(); now() - t < 5;) {
        fab_wc wc[8];
        int n = ops->poll(d, wc, 8, 0);
        for (int i = 0; i < n; i++) {
            if (wc[i].kind == FAB_WC_PEER_UP) return peer;
            if (wc[i].kind == FAB_WC_PEER_DOWN) die("peer down");
        }
    }
    die("no connection");
    return 0;
}

static void target(uint32_t path) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    void *d = open_node("target", path);
    int fd;
    char *m = area(&fd), *p = private_area();
    if (ops->mr_reg(d, &(fab_mr){.addr = (uintptr_t)m, .len = AREA, .access = 1, .fd = fd}, &sh->map)) die("reg");
    if (ops->mr_reg(d, &(fab_mr){.addr = (uintptr_t)p, .len = AREA, .access = 1, .fd = -1}, &sh->priv)) die("reg");
    atomic_store(&sh->ready, 1);
    uint32_t back = connect_to(d, "source");
    fab_wc wc[64];
    while (!atomic_load(&sh->quit)) {
        int n = ops->poll(d, wc, 64, 0);
        for (int i = 0; i < n; i++)
            if (wc[i].kind == FAB_WC_IMM) {
                atomic_fetch_add_explicit(&sh->imms, wc[i].count, memory_order_release);
                if (wc[i].imm == 7) {
                    fab_wr w = {.kind = FAB_WR_WRITE,
                                .flags = FAB_WR_IMM,
                                .imm = 8,
                                .remote_key = atomic_load(&sh->echo),
                                .remote_addr = atomic_load(&sh->echo_base)};
                    ops->post(d, back, &w, 1);
                }
            }
    }
    ops->close(d);
    exit(0);
}

static double run(void *d, uint32_t peer, const char *src, const fab_mr_keys *lk, const fab_mr_keys *rk, uint64_t size,
                  uint32_t pages, uint64_t bytes, int scatter, double *post_s) {
    static fab_wr wr[4096];
    uint64_t places = AREA / size, at = 0, rounds = bytes / (size * pages) ? bytes / (size * pages) : 1,
             start = atomic_load(&sh->imms);
    fab_wc wc[64];
    uint64_t ended = 0, total = rounds * pages;
    double t = now();
    *post_s = 0;
    for (uint64_t r = 0; r < rounds; r++) {
        for (uint32_t i = 0; i < pages; i++, at++) {
            uint64_t o = (scatter ? (at * 2654435761u) % places : at % places) * size,
                     q = (scatter ? (at * 40503u + 7) % places : at % places) * size;
            wr[i] = (fab_wr){.id = r,
                             .len = size,
                             .local_addr = (uintptr_t)src + q,
                             .local_key = lk->local_key,
                             .remote_addr = rk->remote_base + o,
                             .remote_key = rk->remote_key,
                             .imm = 1,
                             .kind = FAB_WR_WRITE,
                             .flags = FAB_WR_IMM};
        }
        double p = now();
        for (uint32_t done = 0; done < pages;) {
            int k = ops->post(d, peer, wr + done, pages - done);
            if (k < 0) die("post");
            done += (uint32_t)k;
            int n = ops->poll(d, wc, 64, 0);
            for (int i = 0; i < n; i++) {
                if (wc[i].status) {
                    fprintf(stderr, "status %d\n", wc[i].status);
                    exit(1);
                }
                ended += wc[i].kind == FAB_WC_OP ? wc[i].count : 0;
            }
        }
        *post_s += now() - p;
    }
    while (ended < total || atomic_load_explicit(&sh->imms, memory_order_acquire) - start < total) {
        int n = ops->poll(d, wc, 64, 0);
        for (int i = 0; i < n; i++) ended += wc[i].kind == FAB_WC_OP ? wc[i].count : 0;
    }
    return (double)(total * size) / (now() - t) / 1e9;
}

static void latency(void *d, uint32_t peer, const fab_mr_keys *lk, const fab_mr_keys *rk) {
    enum { N = 20000 };
    static double us[N];
    fab_wc wc[8];
    for (int i = 0; i < N; i++) {
        fab_wr w = {.len = 64,
                    .local_addr = lk->remote_base,
                    .local_key = lk->local_key,
                    .remote_addr = rk->remote_base,
                    .remote_key = rk->remote_key,
                    .imm = 7,
                    .kind = FAB_WR_WRITE,
                    .flags = FAB_WR_IMM};
        double t = now();
        ops->post(d, peer, &w, 1);
        for (int got = 0; !got;) {
            if (now() - t > 5) die("no echo");
            int n = ops->poll(d, wc, 8, 0);
            for (int k = 0; k < n; k++) got |= wc[k].kind == FAB_WC_IMM;
        }
        us[i] = (now() - t) * 5e5;
    }
    int cmp(const void *a, const void *b) {
        double x = *(const double *)a, y = *(const double *)b;
        return (x > y) - (x < y);
    }
    qsort(us, N, sizeof us[0], cmp);
    printf("64 B write + immediate, both poll, half a round trip: p50 %.2f us, p99 %.2f us\n", us[N / 2],
           us[N * 99 / 100]);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static double stream_limit(char *dst, const char *src, uint64_t size) {
    double t = now();
    uint64_t bytes = 0;
    for (uint64_t at = 0; bytes < (512ull << 20); at = at + 2 * size <= AREA ? at + size : 0, bytes += size)
        for (uint64_t i = 0; i < size; i += 64)
            _mm512_stream_si512((void *)(dst + at + i), _mm512_loadu_si512(src + at + i));
    _mm_sfence();
    return (double)bytes / (now() - t) / 1e9;
}
#endif
static double memcpy_limit(char *dst, const char *src, uint64_t size) {
    double t = now();
    uint64_t bytes = 0;
    for (uint64_t at = 0; bytes < (512ull << 20); at = at + 2 * size <= AREA ? at + size : 0, bytes += size)
        memcpy(dst + at, src + at, size);
    return (double)bytes / (now() - t) / 1e9;
}
static double cma_limit(pid_t pid, uint64_t dst, const char *src, uint64_t size) {
    double t = now();
    uint64_t bytes = 0;
    for (uint64_t at = 0; bytes < (256ull << 20); at = at + 2 * size <= AREA ? at + size : 0, bytes += size) {
        struct iovec a = {(void *)(uintptr_t)(src + at), size}, b = {(void *)(uintptr_t)(dst + at), size};
        if (process_vm_writev(pid, &a, 1, &b, 1, 0) <= 0) return 0;
    }
    return (double)bytes / (now() - t) / 1e9;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 3;
    snprintf(dir, sizeof dir, "/tmp/fab-bench-%d", getpid());
    sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ops = fab_local_ops();
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("copy: %s\n", fab_local_copy_kind());
    for (int r = 0; r < rounds; r++)
        for (uint32_t path = 1; path <= 3; path++) {
            memset(sh, 0, sizeof *sh);
            pid_t pid = fork();
            if (!pid) target(path);
            void *d = open_node("source", path);
            while (!atomic_load(&sh->ready)) usleep(1000);
            char *src = private_area();
            memset(src, 1, AREA);
            fab_mr_keys lk, *rk = path == 1 ? &sh->map : &sh->priv;
            if (ops->mr_reg(d, &(fab_mr){.addr = (uintptr_t)src, .len = AREA, .access = 1, .fd = -1}, &lk)) die("reg");
            atomic_store(&sh->echo, lk.remote_key);
            atomic_store(&sh->echo_base, lk.remote_base);
            uint32_t peer = connect_to(d, "target");
            static const struct {
                uint64_t size;
                uint32_t pages;
                int scatter;
            } t[] = {{64, 1, 0},       {4096, 1, 0},    {65536, 1, 0},   {1 << 20, 1, 0}, {16 << 20, 1, 0},
                     {64 << 20, 1, 0}, {1024, 4096, 1}, {4096, 4096, 1}, {32768, 1024, 1}};
            double post;
            run(d, peer, src, &lk, rk, 1 << 20, 1, 16 << 20, 0, &post);
            int fd;
            char *dst = area(&fd);
            for (unsigned i = 0; i < sizeof t / sizeof t[0]; i++) {
                uint64_t bytes = t[i].size < 1024 ? 16 << 20 : t[i].pages > 1 ? 512 << 20 : 1024 << 20;
                if (t[i].size == 4096 && t[i].pages == 1) bytes = 256 << 20;
                double g = run(d, peer, src, &lk, rk, t[i].size, t[i].pages, bytes, t[i].scatter, &post);
                printf("%-6s %8llu B x %4u: %7.3f GB/s",
                       path == 1   ? "map"
                       : path == 2 ? "cma"
                                   : "bounce",
                       (unsigned long long)t[i].size, t[i].pages, g);
                if (path == 1 && t[i].size >= 1024) printf("  (memcpy %.2f", memcpy_limit(dst, src, t[i].size));
#if defined(__x86_64__)
                if (path == 1 && t[i].size >= 1024 && __builtin_cpu_supports("avx512f"))
                    printf(", streaming %.2f", stream_limit(dst, src, t[i].size));
#endif
                if (path == 2 && t[i].size >= 1024)
                    printf("  (process_vm_writev %.2f", cma_limit(pid, sh->priv.remote_base, src, t[i].size));
                printf("%s\n", path < 3 && t[i].size >= 1024 ? " )" : "");
            }
            if (path == 1) latency(d, peer, &lk, rk);
            atomic_store(&sh->quit, 1);
            waitpid(pid, NULL, 0);
            munmap(dst, AREA);
            close(fd);
            munmap(src, AREA);
            ops->close(d);
        }
    rmdir(dir);
    return 0;
}
