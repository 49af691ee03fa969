/* gpu_stay.c - a kernel that stays on the GPU and takes its commands from host memory, which saves a launch per batch
 * (some 8 us). It leaves when nothing has come for a while, and in any case after LIFE_NS, because while it is there whoever
 * synchronises the whole device waits, and kernels of other processes get the GPU in turns of milliseconds only.
 *
 * Who leaves and who rings: the kernel writes how far it got, then its launch number; we write a command, ring, and look at
 * that number, now and at each later poll. A command it did not see is carried out by the next launch. */
#include "gpu_int.h"

#include <stdlib.h>
#include <time.h>

#define BLOCKS 128u
#define LIFE_NS 20000000ull
#define COMMAND ((size_t)128)             /* bytes from one to the next */
#define MINE ((size_t)1024)               /* GPU memory of one launch; two take turns */

typedef struct fl_stay {
    fc_stream stream;
    char *pinned;                /* commands, then: how far it got, the launch that left */
    _Atomic uint64_t *got, *left_by;
    uint64_t device;             /* 2 * MINE bytes */
    uint64_t given, launches;
} fl_stay;

int fl_stay_new(fl_gpu *g) {
    const fc_table *cu = fc_driver();
    fl_stay *s = g->stay = calloc(1, sizeof *s);
    void *p = NULL;
    if (!s) return -ENOMEM;
    int r = fc_errno(cu->stream_new(&s->stream, FC_STREAM_NON_BLOCKING, -1000000), "cuStreamCreateWithPriority");
    if (!r)
        r = fc_errno(cu->host_alloc(&p, COMMAND * FL_GPU_BATCHES + 256, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP),
                     "cuMemHostAlloc");
    if (!r) r = fc_errno(cu->mem_alloc(&s->device, 2 * MINE), "cuMemAlloc");
    if (!r) r = fc_errno(cu->memset32(s->device, 0, 2 * MINE / 4, s->stream), "cuMemsetD32Async");
    s->pinned = p;
    if (r) return r; /* fl_stay_free undoes it */
    memset(p, 0, COMMAND * FL_GPU_BATCHES + 256);
    s->got = (_Atomic uint64_t *)(void *)(s->pinned + COMMAND * FL_GPU_BATCHES);
    s->left_by = s->got + 1;
    return 0;
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
    uint64_t word = (uint64_t)(uintptr_t)g->word, from = atomic_load_explicit(s->got, memory_order_relaxed);
    uint64_t idle = g->linger_ns, life = LIFE_NS;
    void *arguments[] = {&ring, &gone, &mine, &other, &word, &from, &epoch, &idle, &life};
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
                                0,
                                c->kind,
                                0,
                                0};
    for (uint32_t i = 0; i < 12; i++) atomic_store_explicit(&to[i / 3 * 4 + i % 3], words[i], memory_order_relaxed);
    /* release: the words of a sector first. seq_cst: and before we look whether it left */
    for (uint32_t i = 0; i < 4; i++) atomic_store_explicit(&to[i * 4 + 3], s->given + 1, memory_order_seq_cst);
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
    while (there(s) && !g->status && fl_now() < until) nanosleep(&(struct timespec){0, 20000}, NULL);
    if (s->stream) cu->stream_free(s->stream);
    if (s->pinned) cu->host_free(s->pinned);
    if (s->device) cu->mem_free(s->device);
    free(s);
    g->stay = NULL;
}
