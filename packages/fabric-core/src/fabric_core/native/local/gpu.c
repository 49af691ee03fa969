/* gpu.c - copies by the GPU of a NIC: one stream, batches in order, a word in host memory that says how far it has come.
 *
 * Large pieces go to the copy engines. The rest of a batch is one list that one kernel walks, because a copy engine takes
 * microseconds per piece. Nothing waits for the GPU: a batch is launched and looked for in later polls. While batches are
 * in flight, requests gather for the next one, so batches grow with the load and are small without it. */
#include "gpu_int.h"
#include "numbers.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PIECES 4096u /* of one batch */
#define NUMBERS 16384u /* pages of one batch: two numbers each */
#define BY_ENGINE (1u << 20) /* bytes of one piece, from which on the copy engine does it */
#define CHUNK 8192u /* bytes that a warp copies in one go */
#define SMALL_BATCH (4u << 20) /* bytes inside one GPU, below which more warps share them */
#define LINK_BLOCKS 32u /* as many as fill the link to the host or to another GPU */
#define BLOCKS_PER_SM 4u
#define PATIENCE_NS 200000000ull /* without progress: ask whether the GPU still works */

int fl_gpu_new(int device, uint64_t linger_ns, fl_gpu **out) {
    fl_gpu *g = calloc(1, sizeof *g);
    fc_entered e;
    if (!g) return -ENOMEM;
    g->device = device;
    g->linger_ns = linger_ns;
    int r = fc_enter(device, &e);
    if (r) {
        free(g);
        return r;
    }
    const fc_table *cu = fc_driver();
    const size_t list = sizeof(piece) * PIECES, numbers = sizeof(uint32_t) * NUMBERS * 2;
    size_t bytes = 64 + (list + numbers) * FL_GPU_BATCHES;
    r = fc_kernels_of(device, &g->k);
    if (!r)
        r = fc_errno(cu->stream_new(&g->stream, FC_STREAM_NON_BLOCKING, -1000000 /* the highest there is */),
                     "cuStreamCreateWithPriority");
    if (!r) r = fc_errno(cu->host_alloc(&g->pinned, bytes, FC_HOST_PORTABLE | FC_HOST_DEVICEMAP), "cuMemHostAlloc");
    if (!r) r = fc_errno(cu->mem_alloc(&g->left, 64), "cuMemAlloc");
    /* in our stream: the default one does not wait for it, nor it for that */
    if (!r) r = fc_errno(cu->memset32(g->left, 0, 16, g->stream), "cuMemsetD32Async");
    if (!r && linger_ns) r = fl_stay_new(g);
    if (r) {
        fl_stay_free(g);
        if (g->left) cu->mem_free(g->left);
        if (g->pinned) cu->host_free(g->pinned);
        if (g->stream) cu->stream_free(g->stream);
        fc_leave(&e);
        free(g);
        return r;
    }
    fc_leave(&e);
    g->word = g->pinned;
    atomic_init(g->word, 0);
    for (uint32_t i = 0; i < FL_GPU_BATCHES; i++) {
        char *at = (char *)g->pinned + 64 + (list + numbers) * i;
        g->lists[i] = (piece *)(void *)at;
        g->numbers[i] = (uint32_t *)(void *)(at + list);
    }
    *out = g;
    return 0;
}

int fl_gpu_status(const fl_gpu *g) { return g->status; }

/* An error of the context (somebody's kernel went out of bounds, the GPU fell off the bus) ends all work in it: nothing
 * is in flight any more, and nothing will ever be again. */
static void check(fl_gpu *g) {
    fc_entered e;
    if (fc_enter(g->device, &e)) return;
    fc_result r = fc_driver()->stream_query(g->stream);
    fc_leave(&e);
    if (r && r != FC_E_NOT_READY) g->status = fc_errno(r, "cuStreamQuery");
}

/* After an error: not every one ends what was launched before (a launch may be refused for want of memory). */
static bool quiet(fl_gpu *g) {
    fc_entered e;
    if (fc_enter(g->device, &e)) return true;
    bool at_work = fc_driver()->stream_query(g->stream) == FC_E_NOT_READY || fl_stay_at_work(g);
    fc_leave(&e);
    return !at_work;
}

uint64_t fl_gpu_done(fl_gpu *g) {
    if (g->staying) fl_stay_count(g);
    /* acquire: the GPU wrote it after the data, with a fence for the whole system */
    uint64_t done = atomic_load_explicit(g->word, memory_order_acquire);
    if (done == g->begun) return done;
    if (g->status) return quiet(g) ? g->begun : done;
    if (g->staying) fl_stay_look(g);
    uint64_t now = fl_now();
    if (done != g->seen) {
        g->seen = done;
        g->seen_at = now;
    } else if (now - g->seen_at > PATIENCE_NS) {
        g->seen_at = now;
        check(g);
    }
    return g->status && quiet(g) ? g->begun : done;
}

void fl_gpu_free(fl_gpu *g) {
    fc_entered e;
    if (!g) return;
    uint64_t until = fl_now() + FL_GPU_CLOSE_NS;
    while (fl_gpu_done(g) != g->begun && fl_now() < until) nanosleep(&(struct timespec){0, 20000}, NULL);
    if (!fc_enter(g->device, &e)) {
        fl_stay_free(g);
        fc_driver()->stream_free(g->stream); /* once its work is done; does not wait */
        fc_driver()->host_free(g->pinned);
        fc_driver()->mem_free(g->left);
        fc_leave(&e);
    }
    free(g);
}

/* Whether one more batch may begin, by the kernel that stays or by a launch. Batches end in their order, so the two ways are
 * not mixed in flight. */
static bool room(fl_gpu *g, bool stay) {
    uint64_t flying = g->begun - fl_gpu_done(g);
    if (flying >= FL_GPU_BATCHES || (flying && stay != g->staying)) return false;
    g->staying = stay;
    return true;
}

static bool open_batch(fl_gpu *g, bool stay) {
    if (g->open) return stay == g->staying;
    if (!room(g, stay)) return false;
    int r = stay ? 0 : fc_enter(g->device, &g->entered);
    if (r) {
        g->status = r;
        return false;
    }
    g->open = g->inside = true;
    g->npieces = g->longest = 0;
    g->bytes = 0;
    if (g->begun == g->seen) g->seen_at = fl_now(); /* patience counts from when there is something to wait for */
    return true;
}

bool fl_gpu_take(fl_gpu *g, fl_slot *s, const fl_where *to) {
    bool engine = s->wr.len >= BY_ENGINE || !to->reach;
    if (!open_batch(g, g->linger_ns && !engine) || g->npieces == PIECES) return false;
    if (engine) {
        int r = fc_errno(fc_driver()->copy_async((uint64_t)(uintptr_t)to->at, s->wr.local_addr, s->wr.len, g->stream),
                         "cuMemcpyAsync");
        if (r) s->status = r;
    } else {
        g->lists[g->begun % FL_GPU_BATCHES][g->npieces++] =
            (piece){(uint64_t)(uintptr_t)to->at, s->wr.local_addr, s->wr.len};
        if (s->wr.len > g->longest) g->longest = (uint32_t)s->wr.len;
        g->bytes += s->wr.len;
        g->inside &= to->inside;
    }
    s->batch = g->begun + 1;
    return true;
}

/* So many blocks that each warp has a chunk, and no more than fill the way. */
static uint32_t blocks_for(const fl_gpu *g, uint64_t chunks, bool inside) {
    uint64_t blocks = (chunks + FL_GPU_THREADS / 32 - 1) / (FL_GPU_THREADS / 32),
             most = inside ? g->k.sms * BLOCKS_PER_SM : LINK_BLOCKS;
    return (uint32_t)(blocks < most ? blocks : most);
}

static uint32_t chunk_for(uint64_t bytes, bool inside) { return !inside || bytes > SMALL_BATCH ? CHUNK : CHUNK / 4; }

/* A batch is on its way: `r` of its launch. */
static void begun(fl_gpu *g, fl_link *l, int r) {
    g->begun++;
    if (r) g->status = r; /* fl_gpu_done counts it as ended, after those before it: its requests end with this status */
    l->last_batch = g->begun;
    atomic_store_explicit(&l->ch->fly_begun, g->begun, memory_order_release); /* before `busy` is even: mr.c */
    /* Nobody wakes a NIC that sleeps when its GPU is done: whoever gave it this must wake it now. */
    if (l->dom->armed) {
        ssize_t w = write(l->dom->efd, &(uint64_t){1}, 8);
        (void)w;
    }
}

static int run_list(fl_gpu *g, uint64_t word, uint64_t value) {
    uint32_t n = g->npieces, chunk = chunk_for(g->bytes, g->inside), per = (g->longest + chunk - 1) / chunk;
    uint64_t list = (uint64_t)(uintptr_t)g->lists[g->begun % FL_GPU_BATCHES];
    if (g->staying)
        return fl_stay_command(
            g,
            &(fl_command){.numbers = list, .value = value, .n = n, .per = per, .chunk = chunk, .kind = FL_KIND_LIST});
    void *arguments[] = {&list, &n, &per, &chunk, &g->left, &word, &value};
    return fc_errno(fc_driver()->launch(g->k.copy, blocks_for(g, (uint64_t)n * per, g->inside), 1, 1, FL_GPU_THREADS, 1,
                                        1, 0, g->stream, arguments, NULL),
                    "cuLaunchKernel");
}

void fl_gpu_launch(fl_gpu *g, fl_link *l) {
    if (!g->open) return;
    uint64_t word = (uint64_t)(uintptr_t)g->word, value = g->begun + 1, one = 1;
    void *arguments[] = {&word, &one};
    int r;
    if (g->npieces) /* after the copies of the batch in the stream: it tells of all of them */
        r = run_list(g, word, value);
    else if (g->k.stream_words)
        r = fc_errno(fc_driver()->write_value(g->stream, word, value, 0), "cuStreamWriteValue64");
    else
        r = fc_errno(fc_driver()->launch(g->k.bump, 1, 1, 1, 1, 1, 1, 0, g->stream, arguments, NULL), "cuLaunchKernel");
    if (!g->staying) fc_leave(&g->entered);
    g->open = false;
    begun(g, l, r);
}

uint32_t fl_gpu_numbers(fl_gpu *g, const fab_pages *p, uint32_t *most_local, uint32_t *most_remote) {
    if (g->open || !room(g, g->linger_ns != 0)) return 0;
    uint32_t n = p->count < NUMBERS ? p->count : NUMBERS, *to = g->numbers[g->begun % FL_GPU_BATCHES];
    g->kept = g->staying && p->step == 1 ? fl_stay_keep(g, p->local_numbers, p->remote_numbers, n) : NULL;
    if (g->kept) {
        fl_stay_most(g->kept, most_local, most_remote);
        return n;
    }
    *most_local = fab_take_numbers(to, p->local_numbers, n, p->step);
    *most_remote = fab_take_numbers(to + n, p->remote_numbers, n, p->step);
    return n;
}

void fl_gpu_pages(fl_gpu *g, fl_link *l, const fab_pages *p, uint32_t n, const fl_where *to) {
    fc_entered e;
    uint32_t len = (uint32_t)p->len, chunk = chunk_for(p->len * n, to->inside), per = (len + chunk - 1) / chunk;
    uint64_t numbers = (uint64_t)(uintptr_t)g->numbers[g->begun % FL_GPU_BATCHES], src = p->local_addr,
             sstride = p->local_stride;
    uint64_t dst = (uint64_t)(uintptr_t)to->at, dstride = p->remote_stride, word = (uint64_t)(uintptr_t)g->word;
    uint64_t value = g->begun + 1;
    void *arguments[] = {&numbers, &n, &src, &sstride, &dst, &dstride, &len, &per, &chunk, &g->left, &word, &value};
    if (g->begun == g->seen) g->seen_at = fl_now();
    if (g->staying) {
        fl_command c = {numbers, src, sstride, dst, dstride, value, n, len, per, chunk, 0, FL_KIND_PAGES};
        if (g->kept) fl_stay_list(g->kept, &c);
        begun(g, l, fl_stay_command(g, &c));
        return;
    }
    int r = fc_enter(g->device, &e);
    if (!r) {
        r = fc_errno(fc_driver()->launch(g->k.pages, blocks_for(g, (uint64_t)n * per, to->inside), 1, 1, FL_GPU_THREADS,
                                         1, 1, 0, g->stream, arguments, NULL),
                     "cuLaunchKernel");
        fc_leave(&e);
    }
    begun(g, l, r);
}

/* For pieces that go through a ring: at once, on our stream, so that it waits for nobody else's work. */
int fl_gpu_copy_now(fl_gpu *g, void *dst, const void *src, size_t n) {
    fc_entered e;
    if (g->status) return g->status;
    int r = fc_enter(g->device, &e);
    if (r) return r;
    const fc_table *cu = fc_driver();
    r = fc_errno(cu->copy_async((uint64_t)(uintptr_t)dst, (uint64_t)(uintptr_t)src, n, g->stream), "cuMemcpyAsync");
    uint64_t until = fl_now() + 2000000000u;
    fc_result q = 0;
    while (!r && (q = cu->stream_query(g->stream)) == FC_E_NOT_READY)
        if (fl_now() > until)
            q = FC_E_NOT_READY, r = g->status = -ETIMEDOUT; /* it may still write: nothing more by this GPU */
    if (!r && q) r = g->status = fc_errno(q, "cuStreamQuery");
    fc_leave(&e);
    return r;
}
