/* gpu_int.h - a NIC's GPU, as gpu.c and gpu_stay.c share it. */
#ifndef FAB_LOCAL_GPU_INT_H
#define FAB_LOCAL_GPU_INT_H

#include "local_int.h"

#define FL_GPU_BATCHES 4u        /* in flight; also the length of the ring in kernels.cu */
#define FL_GPU_THREADS 256u
#define FL_GPU_CLOSE_NS 5000000000ull

typedef struct piece {
    uint64_t dst, src, len;
} piece;

typedef struct fl_command {      /* for the kernel that stays */
    uint64_t numbers, src, sstride, dst, dstride, value;
    uint32_t n, len, per, chunk;
    uint64_t fetch; /* where `numbers`, in GPU memory, is to be fetched from; 0: it is there, or read where it is */
    uint64_t kind; /* FL_KIND_* */
} fl_command;
enum { FL_KIND_PAGES, FL_KIND_LIST /* `numbers` is a list of pieces */, FL_KIND_LEAVE };

typedef struct fl_gpu {
    int device, status;
    fc_stream stream;
    fc_kernels k;
    piece *lists[FL_GPU_BATCHES]; /* in host memory: a batch is used up before its list is written again */
    uint32_t *numbers[FL_GPU_BATCHES]; /* the same for pages */
    _Atomic uint64_t *word; /* the GPU writes: number of the last batch that has ended */
    void *pinned;
    uint64_t left; /* in GPU memory: blocks of the running kernel that have ended */
    uint64_t begun, seen, seen_at;
    uint64_t bytes; /* of the open batch: in its list */
    uint32_t npieces, longest;
    bool open, inside; /* a batch is being put together; all its pieces stay within this GPU */
    fc_entered entered;
    bool staying; /* what is in flight was given to the kernel that stays */
    uint64_t linger_ns; /* 0: no kernel stays */
    struct fl_stay *stay;
    struct fl_kept *kept; /* the list of the pages that come next; NULL: it is in `numbers` */
} fl_gpu;

/* gpu_stay.c. With the context entered: new, free. */
int fl_stay_new(fl_gpu *g);
void fl_stay_free(fl_gpu *g);
int fl_stay_command(fl_gpu *g, const fl_command *c);
void fl_stay_count(fl_gpu *g); /* brings `word` up to date: batches count in their order */
/* Remembers a list of `n` pages. NULL: too long, or all places are in use. */
struct fl_kept *fl_stay_keep(fl_gpu *g, const uint32_t *local, const uint32_t *remote, uint32_t n);
void fl_stay_most(const struct fl_kept *k, uint32_t *local, uint32_t *remote);
void fl_stay_list(struct fl_kept *k, fl_command *c); /* where the kernel finds it */
bool fl_stay_at_work(fl_gpu *g); /* asks the driver; with the context entered */
void fl_stay_look(fl_gpu *g); /* launches it again if it left before the last command */

#endif
