/* fake_cuda.c - a stand-in for libcuda.so.1 where there is no GPU: streams are threads, device memory is a memfd, our two
 * kernels are done by the CPU. For the parts of the GPU path that do not depend on a GPU: batches, ends, cancellation,
 * closing, mappings that come and go. What a GPU does is tested on one (pytest -m gpu).
 *
 * FAKE_CUDA_DELAY_US: how long each command of a stream takes. FAKE_CUDA_NO_IPC: allocations have no handles, as torch's
 * expandable segments. FAKE_CUDA_FAIL_AFTER: kernels launched before the context breaks for good. FAKE_CUDA_REFUSE: the next
 * launch of a kernel is refused, as for want of memory; the context goes on. FAKE_CUDA_LATE_LISTS: see stay(). FAKE_CUDA_DEVICES: how many there are; a kernel that
 * writes to another one's memory breaks the context, as without peer access. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int R;
#define OUT __attribute__((visibility("default")))
enum { NOT_READY = 600, BROKEN = 700, INVALID = 1 };

typedef struct range {
    struct range *next;
    uint64_t at, size;
    int fd, kind; /* 1 host, 2 device */
    int device;
} range;
static __thread int current; /* device */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static range *ranges;
static _Atomic int broken, launches;

static range *find(uint64_t p) {
    for (range *r = ranges; r; r = r->next)
        if (p >= r->at && p - r->at < r->size) return r;
    return NULL;
}
static void note(uint64_t at, uint64_t size, int fd, int kind) {
    range *r = malloc(sizeof *r);
    pthread_mutex_lock(&mu);
    *r = (range){ranges, at, size, fd, kind, current};
    ranges = r;
    pthread_mutex_unlock(&mu);
}
static int drop(uint64_t at, range *out) {
    int found = 0;
    pthread_mutex_lock(&mu);
    for (range **p = &ranges; *p && !found; p = &(*p)->next)
        if ((*p)->at == at) {
            range *r = *p;
            *out = *r;
            *p = r->next;
            free(r);
            found = 1;
            break;
        }
    pthread_mutex_unlock(&mu);
    return found;
}

/* ---- streams --------------------------------------------------------------------------------- */
enum { COPY, LIST, PAGES, STAY, ADD, WRITE, WAIT };
typedef struct command {
    struct command *next;
    int kind;
    uint64_t a, b, c, d, e, word, value;
    uint32_t n, len;
    uint64_t more[10];
} command;
typedef struct stream {
    pthread_mutex_t mu;
    pthread_cond_t more;
    command *first, *last;
    int running, ended, device;
    pthread_t thread;
} stream;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pages_of(const uint32_t *numbers, uint32_t n, uint64_t src, uint64_t ss, uint64_t dst, uint64_t ds,
                     uint32_t len) {
    for (uint32_t i = 0; i < n; i++) memcpy((void *)(dst + numbers[n + i] * ds), (void *)(src + numbers[i] * ss), len);
}

static void list_of(const uint64_t *p, uint32_t n) {
    for (; n; n--, p += 3) memcpy((void *)p[0], (void *)p[1], p[2]);
}

/* What a command of fab_stay says: its words lie at these places. Only after a batch it is told of. */
static void stay_copy(const uint64_t *c, uint64_t ended) {
    if (c[10]) memcpy((void *)c[0], (void *)c[10], 8 * (uint32_t)c[8]);
    if (c[12]) list_of((const uint64_t *)c[0], (uint32_t)c[8]);
    else pages_of((const uint32_t *)c[0], (uint32_t)c[8], c[1], c[2], c[4], c[5], (uint32_t)(c[8] >> 32));
    /* where no block has a part, nobody tells */
    if ((uint32_t)c[8] && (uint32_t)c[9]) atomic_store((_Atomic uint64_t *)(ended + c[6] % 4 * 8), c[6]);
}

/* fab_stay: ring, gone, mine, other, ended, seq, epoch, idle, life. With FAKE_CUDA_LATE_LISTS a list of pieces is done after
 * what comes next, if that comes within 5 ms: as where some blocks have much to do for it, and for the next one nothing. */
static void stay(const uint64_t *a) {
    uint64_t seq = a[5], born = now_ns(), since = born, held[16], held_at = 0;
    for (;; seq++) {
        const _Atomic uint64_t *c = (const _Atomic uint64_t *)(a[0] + seq % 4 * 128);
        uint64_t t = 0, now[16];
        bool rung = false;
        while (!(rung = c[3] == seq + 1 && c[7] == seq + 1 && c[11] == seq + 1 && c[15] == seq + 1) &&
               (((t = now_ns()) - since < a[7] && t - born < a[8]) || held_at)) {
            if (held_at && t - held_at > 5000000) {
                stay_copy(held, a[4]);
                held_at = 0;
            }
            sched_yield();
        }
        if (!rung || c[12] == 2) break;
        for (int i = 0; i < 16; i++) now[i] = c[i];
        if (now[12] && !held_at && getenv("FAKE_CUDA_LATE_LISTS")) {
            memcpy(held, now, sizeof held);
            held_at = now_ns();
        } else {
            stay_copy(now, a[4]);
            if (held_at) stay_copy(held, a[4]);
            held_at = 0;
        }
        since = now_ns();
    }
    if (held_at) stay_copy(held, a[4]);
    atomic_store((_Atomic uint64_t *)a[1], seq);
    atomic_store((_Atomic uint64_t *)(a[1] + 8), a[6]);
}

static void reach(const stream *s, uint64_t at) {
    pthread_mutex_lock(&mu);
    const range *r = find(at);
    if (!r || (r->kind == 2 && r->device != s->device)) broken = 1;
    pthread_mutex_unlock(&mu);
}

/* Memory must be registered as a whole, or not at all. */
static bool mixed(uint64_t at, uint64_t n) {
    pthread_mutex_lock(&mu);
    bool differ = n && find(at) != find(at + n - 1);
    for (const range *r = ranges; r && !differ && n; r = r->next) differ = !find(at) && r->at > at && r->at < at + n;
    pthread_mutex_unlock(&mu);
    return differ;
}

static void run(stream *s, command *c) {
    if (c->kind == LIST) reach(s, *(uint64_t *)c->a), reach(s, *(uint64_t *)(c->a + 8));
    if (c->kind == PAGES) reach(s, c->b), reach(s, c->d);
    if (broken) return;
    const char *delay = getenv("FAKE_CUDA_DELAY_US");
    if (delay) nanosleep(&(struct timespec){0, atol(delay) * 1000}, NULL);
    switch (c->kind) {
    case COPY: memcpy((void *)c->a, (void *)c->b, c->c); break;
    case LIST:
        list_of((const uint64_t *)c->a, c->n);
        atomic_store((_Atomic uint64_t *)c->word, c->value);
        break;
    case PAGES:
        pages_of((const uint32_t *)c->a, c->n, c->b, c->c, c->d, c->e, c->len);
        atomic_store((_Atomic uint64_t *)c->word, c->value);
        break;
    case STAY: stay(c->more); break;
    case ADD: atomic_fetch_add((_Atomic uint64_t *)c->a, c->b); break;
    case WRITE: atomic_store((_Atomic uint64_t *)c->a, c->b); break;
    case WAIT:
        while ((int32_t)(atomic_load((_Atomic uint32_t *)c->a) - (uint32_t)c->b) < 0) usleep(20);
        break;
    }
}

static void *main_of(void *arg) {
    stream *s = arg;
    pthread_mutex_lock(&s->mu);
    while (!s->ended || s->first) {
        if (!s->first) {
            pthread_cond_wait(&s->more, &s->mu);
            continue;
        }
        command *c = s->first;
        pthread_mutex_unlock(&s->mu);
        if (!broken) run(s, c);
        pthread_mutex_lock(&s->mu);
        s->first = c->next;
        if (!s->first) s->last = NULL;
        free(c);
    }
    pthread_mutex_unlock(&s->mu);
    return NULL;
}

static stream *fresh(void) {
    stream *s = calloc(1, sizeof *s);
    s->device = current;
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->more, NULL);
    pthread_create(&s->thread, NULL, main_of, s);
    return s;
}
static stream *or_default(stream *s) {
    static stream *first;
    pthread_mutex_lock(&mu);
    if (!s && !first) first = fresh();
    pthread_mutex_unlock(&mu);
    return s ? s : first;
}
static R put(stream *s, command c) {
    if (broken) return BROKEN;
    s = or_default(s);
    command *n = malloc(sizeof *n);
    *n = c;
    n->next = NULL;
    pthread_mutex_lock(&s->mu);
    if (s->last) s->last->next = n;
    else s->first = n;
    s->last = n;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mu);
    return 0;
}

OUT R cuStreamCreateWithPriority(stream **out, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *out = fresh();
    return 0;
}
OUT R cuStreamDestroy_v2(stream *s) {
    pthread_mutex_lock(&s->mu);
    s->ended = 1;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->mu);
    pthread_join(s->thread, NULL);
    free(s);
    return 0;
}
OUT R cuStreamQuery(stream *s) {
    if (broken) return BROKEN;
    s = or_default(s);
    pthread_mutex_lock(&s->mu);
    int busy = s->first != NULL;
    pthread_mutex_unlock(&s->mu);
    return busy ? NOT_READY : 0;
}
OUT R cuMemcpyAsync(uint64_t d, uint64_t s, size_t n, stream *st) {
    if (mixed(d, n) || mixed(s, n)) return INVALID;
    return put(st, (command){.kind = COPY, .a = d, .b = s, .c = n});
}
OUT R cuMemcpy(uint64_t d, uint64_t s, size_t n) {
    memcpy((void *)d, (void *)s, n);
    return 0;
}
OUT R cuStreamSynchronize(void *s) { return (void)s, 0; } /* of cuMemcpy, which is done at once */
OUT R cuCtxSetCurrent(void *c) { return current = (int)(uintptr_t)c - 1, 0; }
OUT R cuCtxSynchronize(void) { return 0; }
OUT R cuStreamWriteValue64_v2(stream *s, uint64_t at, uint64_t v, unsigned f) {
    (void)f;
    return put(s, (command){.kind = WRITE, .a = at, .b = v});
}
OUT R cuStreamWaitValue32_v2(stream *s, uint64_t at, uint32_t v, unsigned f) {
    (void)f;
    return put(s, (command){.kind = WAIT, .a = at, .b = v});
}
OUT R cuLaunchKernel(char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     unsigned sh, stream *s, void **a, void **x) {
    (void)sh, (void)x;
    if (!gx || !gy || !gz || !bx || !by || !bz) return INVALID;
    if (getenv("FAKE_CUDA_REFUSE")) return 2;
    const char *most = getenv("FAKE_CUDA_FAIL_AFTER");
    if (most && ++launches > atoi(most)) broken = 1;
    if (!strcmp(name, "fab_bump"))
        return put(s, (command){.kind = ADD, .a = *(uint64_t *)a[0], .b = *(uint64_t *)a[1]});
    if (!strcmp(name, "fab_copy_pages"))
        return put(s, (command){.kind = PAGES,
                                .a = *(uint64_t *)a[0],
                                .n = *(uint32_t *)a[1],
                                .b = *(uint64_t *)a[2],
                                .c = *(uint64_t *)a[3],
                                .d = *(uint64_t *)a[4],
                                .e = *(uint64_t *)a[5],
                                .len = *(uint32_t *)a[6],
                                .word = *(uint64_t *)a[10],
                                .value = *(uint64_t *)a[11]});
    if (!strcmp(name, "fab_stay")) {
        command c = {.kind = STAY};
        for (int i = 0; i < 9; i++) c.more[i] = *(uint64_t *)a[i];
        return put(s, c);
    }
    return put(s, (command){.kind = LIST,
                            .a = *(uint64_t *)a[0],
                            .n = *(uint32_t *)a[1],
                            .word = *(uint64_t *)a[5],
                            .value = *(uint64_t *)a[6]});
}

/* ---- devices, contexts, modules ------------------------------------------------------------------ */
OUT R cuInit(unsigned f) { return (int)f; }
OUT R cuDriverGetVersion(int *v) { return *v = 13000, 0; }
OUT R cuDeviceGetCount(int *n) { return *n = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 1, 0; }
OUT R cuDeviceGet(int *d, int i) { return *d = i, 0; }
OUT R cuDeviceGetName(char *s, int n, int d) { return (void)d, snprintf(s, (size_t)n, "Fake GPU"), 0; }
OUT R cuDeviceGetPCIBusId(char *s, int n, int d) { return (void)d, snprintf(s, (size_t)n, "0000:99:00.0"), 0; }
OUT R cuDeviceTotalMem_v2(size_t *n, int d) { return (void)d, *n = 1ul << 33, 0; }
OUT R cuDeviceGetAttribute(int *v, int a, int d) {
    return (void)d, *v = a == 16 ? 4 : a == 75 ? 9 : a == 122 ? !getenv("FAKE_CUDA_NO_WORDS") : 0, 0;
}
OUT R cuDeviceGetUuid(uint8_t *u, int d) { return (void)d, memset(u, 7, 16), 0; }
OUT R cuDevicePrimaryCtxRetain(void **c, int d) { return *c = (void *)(uintptr_t)(d + 1), 0; }
static __thread int before[16], depth; /* of contexts */
OUT R cuCtxPushCurrent_v2(void *c) { return before[depth++ % 16] = current, current = (int)(uintptr_t)c - 1, 0; }
OUT R cuCtxPopCurrent_v2(void **c) { return *c = (void *)(uintptr_t)(current + 1), current = before[--depth % 16], 0; }
OUT R cuThreadExchangeStreamCaptureMode(int *m) { return (void)m, 0; }
OUT R cuModuleLoadData(void **m, const void *text) {
    return *m = (void *)1, strstr(text, ".entry fab_copy") ? 0 : INVALID;
}
OUT R cuModuleGetFunction(void **f, void *m, const char *name) { return (void)m, *f = strdup(name), 0; }
OUT R cuGetErrorName(R r, const char **s) { return *s = r == BROKEN ? "FAKE_BROKEN" : "FAKE", 0; }
OUT R cuGetErrorString(R r, const char **s) { return *s = r == BROKEN ? "the context is broken" : "an error", 0; }

/* ---- memory --------------------------------------------------------------------------------------- */
typedef struct handle {
    int pid, fd;
    uint64_t size;
    uint8_t rest[48];
} handle;

static R map(int fd, size_t n, int kind, uint64_t *out) {
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return 2;
    note((uintptr_t)p, n, fd, kind);
    *out = (uintptr_t)p;
    return 0;
}
OUT R cuMemAlloc_v2(uint64_t *out, size_t n) {
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    return fd < 0 || ftruncate(fd, (off_t)n) ? 2 : map(fd, n, 2, out);
}
OUT R cuMemFree_v2(uint64_t p) {
    range r;
    if (!drop(p, &r)) return INVALID;
    munmap((void *)p, r.size);
    return close(r.fd);
}
OUT R cuMemsetD32Async(uint64_t p, unsigned v, size_t n, stream *s) {
    (void)s;
    for (size_t i = 0; i < n; i++) ((unsigned *)p)[i] = v;
    return 0;
}
OUT R cuPointerGetAttribute(void *out, int what, uint64_t p) {
    pthread_mutex_lock(&mu);
    range *r = find(p);
    int kind = r ? r->kind : 0, device = r ? r->device : 0;
    pthread_mutex_unlock(&mu);
    if (!kind) return INVALID;
    *(int *)out = what == 2 ? kind : device;
    return 0;
}
OUT R cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t p) {
    pthread_mutex_lock(&mu);
    range *r = find(p);
    if (r) *base = r->at, *size = r->size;
    pthread_mutex_unlock(&mu);
    return r ? 0 : INVALID;
}
OUT R cuIpcGetMemHandle(handle *h, uint64_t p) {
    pthread_mutex_lock(&mu);
    range *r = find(p);
    if (r) *h = (handle){.pid = getpid(), .fd = r->fd, .size = r->size};
    pthread_mutex_unlock(&mu);
    return !r || getenv("FAKE_CUDA_NO_IPC") ? INVALID : 0;
}
OUT R cuIpcOpenMemHandle_v2(uint64_t *out, handle h, unsigned f) {
    char path[64];
    (void)f;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? INVALID : map(fd, h.size, 2, out);
}
OUT R cuIpcCloseMemHandle(uint64_t p) { return cuMemFree_v2(p); }
OUT R cuMemHostAlloc(void **out, size_t n, unsigned f) {
    (void)f;
    n = (n + 4095) / 4096 * 4096;
    *out = aligned_alloc(4096, n);
    madvise(*out, n, MADV_DONTFORK); /* as the driver's */
    note((uintptr_t)*out, n, -1, 1);
    return 0;
}
OUT R cuMemFreeHost(void *p) {
    range r;
    if (!drop((uintptr_t)p, &r)) return INVALID;
    madvise(p, r.size, MADV_DOFORK);
    free(p);
    return 0;
}
OUT R cuMemHostRegister_v2(void *p, size_t n, unsigned f) {
    (void)f;
    pthread_mutex_lock(&mu);
    int known = find((uintptr_t)p) || find((uintptr_t)p + n - 1);
    pthread_mutex_unlock(&mu);
    if (known) return 712;
    note((uintptr_t)p, n, -1, 1);
    return 0;
}
OUT R cuMemHostUnregister(void *p) {
    range r;
    return drop((uintptr_t)p, &r) ? 0 : INVALID;
}
