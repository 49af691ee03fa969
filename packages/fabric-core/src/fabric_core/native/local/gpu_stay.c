/* gpu_stay.c - a kernel that stays on the GPU and takes its commands from host memory, which saves a launch per batch
 * (some 8 us). It leaves when nothing has come for a while, and in any case after LIFE_NS, because while it is there whoever
 * synchronises the whole device waits, and kernels of other processes get the GPU in turns of milliseconds only.
 *
 * Who leaves and who rings: the kernel writes how far it got, then its launch number; we write a command, ring, and look at
 * that number, now and at each later poll. A command it did not see is carried out by the next launch. */
#include "gpu_int.h"
#include "numbers.h"

#include <stdlib.h>
#include <time.h>

#define BLOCKS 129u               /* one passes commands on, the others copy */
#define LIFE_NS 20000000ull
#define COMMAND ((size_t)128)     /* bytes from one to the next */
#define MINE ((size_t)1024)       /* GPU memory of one launch; two take turns */
#define KEPT 8u                   /* lists: more than batches in flight, so that there is always one to give up */
#define KEPT_PAGES 4096u
#define KEPT_BYTES (sizeof(uint32_t) * 2 * KEPT_PAGES)
#define FETCH_PAGES 512u /* a list of so many is fetched at once, a longer one when it comes for the second time */
#define WORDS ((size_t)256) /* of host memory behind the commands */

/* A list of pages that may come again, as those of prepared transfers do: the second time it lies in GPU memory already, where
 * it is read in a fifth of a microsecond and not in two. */
typedef struct fl_kept {
    uint32_t *host; /* the sources' numbers, then the targets' */
    uint64_t gpu;
    uint32_t n, most_local, most_remote, uses;
    bool there; /* a command that fetches it was written */
    uint64_t turn; /* when it was wanted last */
    uint64_t batch; /* the last that reads it */
} fl_kept;

typedef struct fl_stay {
    fc_stream stream;
    char *pinned; /* commands, then: how far it got, the launch that left, ends; then lists */
    _Atomic uint64_t *got, *left_by, *ended;
    uint64_t device; /* 2 * MINE bytes, then lists */
    uint64_t given, launches, turns;
    fl_kept kept[KEPT];
} fl_stay;

int fl_stay_new(fl_gpu *g) {
    const fc_table *cu = fc_driver();
    fl_stay *s = g->stay = calloc(1, sizeof *s);
    const size_t words = COMMAND * FL_GPU_BATCHES, lists = words + WORDS;
    void *p = NULL;
    if (!s) return -ENOMEM;
    int r = fc_errno(cu->stream_new(&s->stream, FC_STREAM_NON_BLOCKING, -1000000), "cuStreamCreateWithPriority");
    if (!r)
        r = fc_errno(cu->host_alloc(&p, lists + KEPT * KEPT_BYTES, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP),
                     "cuMemHostAlloc");
    if (!r) r = fc_errno(cu->mem_alloc(&s->device, 2 * MINE + KEPT * KEPT_BYTES), "cuMemAlloc");
    if (!r) r = fc_errno(cu->memset32(s->device, 0, 2 * MINE / 4, s->stream), "cuMemsetD32Async");
    s->pinned = p;
    if (r) return r; /* fl_stay_free undoes it */
    memset(p, 0, lists);
    s->got = (_Atomic uint64_t *)(void *)(s->pinned + words);
    s->left_by = s->got + 1;
    s->ended = s->got + 16; /* a line that the GPU writes at other times */
    for (uint32_t i = 0; i < KEPT; i++) {
        s->kept[i].host = (uint32_t *)(void *)(s->pinned + lists + i * KEPT_BYTES);
        s->kept[i].gpu = s->device + 2 * MINE + i * KEPT_BYTES;
    }
    return 0;
}

/* Batches of the kernel that stays may end out of their order: a small one needs only blocks that were done early with the one
 * before. Each has a word of its own. */
void fl_stay_count(fl_gpu *g) {
    uint64_t done = atomic_load_explicit(g->word, memory_order_relaxed); /* nobody else writes it now */
    /* acquire: the GPU wrote it after the data, with a fence for the whole system */
    while (done < g->begun &&
           atomic_load_explicit(&g->stay->ended[(done + 1) % FL_GPU_BATCHES], memory_order_acquire) == done + 1)
        done++;
    atomic_store_explicit(g->word, done, memory_order_relaxed);
}

fl_kept *fl_stay_keep(fl_gpu *g, const uint32_t *local, const uint32_t *remote, uint32_t n) {
    fl_stay *s = g->stay;
    const size_t half = sizeof(uint32_t) * n;
    uint64_t done = atomic_load_explicit(g->word, memory_order_relaxed);
    fl_kept *oldest = NULL;
    if (n > KEPT_PAGES) return NULL;
    for (fl_kept *k = s->kept; k < s->kept + KEPT; k++) {
        if (k->n == n && !memcmp(k->host, local, half) && !memcmp(k->host + n, remote, half)) {
            k->turn = ++s->turns;
            return k;
        }
        if (k->batch <= done && (!oldest || k->turn < oldest->turn)) oldest = k;
    }
    if (!oldest) return NULL;
    oldest->n = n;
    oldest->most_local = fab_take_numbers(oldest->host, local, n, 1);
    oldest->most_remote = fab_take_numbers(oldest->host + n, remote, n, 1);
    oldest->uses = 0;
    oldest->there = false;
    oldest->turn = ++s->turns;
    return oldest;
}

void fl_stay_most(const fl_kept *k, uint32_t *local, uint32_t *remote) {
    *local = k->most_local;
    *remote = k->most_remote;
}

void fl_stay_list(fl_kept *k, fl_command *c) {
    k->batch = c->value;
    c->numbers = (uint64_t)(uintptr_t)k->host;
    if (!k->there && k->uses++ == 0 && k->n > FETCH_PAGES) return; /* who knows whether it comes again */
    if (!k->there) c->fetch = c->numbers;
    c->numbers = k->gpu;
    k->there = true;
}

static bool there(const fl_stay *s) {
    /* acquire: how far it got is visible with the number of the launch that left */
    return s->launches && atomic_load_explicit(s->left_by, memory_order_acquire) != s->launches;
}

static int launch(fl_gpu *g, fl_stay *s) {
    fc_entered e;
    int r = fc_enter(g->device, &e);
    if (r) return r;
    uint64_t ring = (uint64_t)(uintptr_t)s->pinned, gone = (uint64_t)(uintptr_t)s->got;
    uint64_t epoch = s->launches + 1, mine = s->device + (epoch & 1) * MINE, other = s->device + (~epoch & 1) * MINE;
    uint64_t ended = (uint64_t)(uintptr_t)s->ended, from = atomic_load_explicit(s->got, memory_order_relaxed);
    uint64_t idle = g->linger_ns, life = LIFE_NS;
    void *arguments[] = {&ring, &gone, &mine, &other, &ended, &from, &epoch, &idle, &life};
    r = fc_errno(fc_driver()->launch(g->k.stay, BLOCKS, 1, 1, FL_GPU_THREADS, 1, 1, 0, s->stream, arguments, NULL),
                 "cuLaunchKernel");
    fc_leave(&e);
    if (!r) s->launches = epoch;
    return r;
}

/* Four sectors of three words, each with the command's number behind them: the GPU reads all in one go, and knows by the
 * numbers what it has read. */
static void write_command(fl_stay *s, const fl_command *c) {
    _Atomic uint64_t *to = (_Atomic uint64_t *)(void *)(s->pinned + s->given % FL_GPU_BATCHES * COMMAND);
    const uint64_t words[12] = {c->numbers,
                                c->src,
                                c->sstride,
                                c->dst,
                                c->dstride,
                                c->value,
                                (uint64_t)c->len << 32 | c->n,
                                (uint64_t)c->chunk << 32 | c->per,
                                c->fetch,
                                c->kind,
                                0,
                                0};
    for (uint32_t i = 0; i < 12; i++) atomic_store_explicit(&to[i / 3 * 4 + i % 3], words[i], memory_order_relaxed);
    /* release: the words of a sector, and the list, first. The last one seq_cst: and before we look whether it left */
    for (uint32_t i = 0; i < 3; i++) atomic_store_explicit(&to[i * 4 + 3], s->given + 1, memory_order_release);
    atomic_store_explicit(&to[15], s->given + 1, memory_order_seq_cst);
}

int fl_stay_command(fl_gpu *g, const fl_command *c) {
    fl_stay *s = g->stay;
    write_command(s, c);
    s->given++;
    return there(s) ? 0 : launch(g, s);
}

bool fl_stay_at_work(fl_gpu *g) { return g->stay && fc_driver()->stream_query(g->stay->stream) == FC_E_NOT_READY; }

void fl_stay_look(fl_gpu *g) {
    fl_stay *s = g->stay;
    if (g->status || there(s) || atomic_load_explicit(s->got, memory_order_relaxed) >= s->given) return;
    g->status = launch(g, s);
}

void fl_stay_free(fl_gpu *g) {
    fl_stay *s = g->stay;
    const fc_table *cu = fc_driver();
    if (!s) return;
    uint64_t until = fl_now() + FL_GPU_CLOSE_NS;
    if (there(s)) write_command(s, &(fl_command){.kind = FL_KIND_LEAVE});
    /* until it has ended, not only said so: it still counts in memory that is given back here */
    while (s->launches && !g->status && fl_stay_at_work(g) && fl_now() < until)
        nanosleep(&(struct timespec){0, 20000}, NULL);
    if (s->stream) cu->stream_free(s->stream);
    if (s->pinned) cu->host_free(s->pinned);
    if (s->device) cu->mem_free(s->device);
    free(s);
    g->stay = NULL;
}
