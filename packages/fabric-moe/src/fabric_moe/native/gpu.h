/* The proxy of a rank whose tokens lie in GPU memory and travel through the engine: what its files share.
 *
 * Kernels say by words in pinned memory how far they are, and wait for words that the proxy's thread writes there. Rows and sums
 * never pass through here: they go from registered GPU memory to registered GPU memory. Counts do, in host memory of the engine;
 * kernels see them only after they were checked. */
#ifndef FABRIC_MOE_GPU_H
#define FABRIC_MOE_GPU_H

#include "cdef_moe.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "fabric/engine.h"

enum { MOE_GPU_SLOTS = 16, MOE_GPU_RANKS = 64 };
#define MOE_GPU_MAGIC 0x474D4F45u /* "GMOE" */
#define MOE_GPU_LINE 64

typedef struct moe_gpu_mail { /* pinned; words.cuh and layout.py have the same */
    /* written by kernels: which use of the slot ("epoch") has come so far */
    _Atomic uint32_t counted[MOE_GPU_SLOTS]; /* our counts lie in the pinned memory behind this */
    _Atomic uint32_t packed[MOE_GPU_SLOTS]; /* our rows lie in the memory that is sent */
    _Atomic uint32_t summed[MOE_GPU_SLOTS]; /* so do our sums */
    /* written by the proxy */
    _Atomic uint32_t rows_here[MOE_GPU_SLOTS];
    _Atomic uint32_t sums_here[MOE_GPU_SLOTS];
    _Atomic uint32_t begun[MOE_GPU_SLOTS]; /* the proxy has seen `counted` */
    _Atomic uint64_t heads[MOE_GPU_SLOTS]; /* ranks whose counts it has found since */
    _Atomic uint64_t gone; /* ranks that have left or are lost: matters to who still needs something from them */
    _Atomic uint64_t noted; /* ranks because of which somebody gave up; it may be us */
} moe_gpu_mail;

typedef struct moe_gpu_said { /* the first words of what kernels say: report.py */
    uint32_t lost, epoch;
    uint64_t culprits;
} moe_gpu_said;

typedef struct moe_gpu_head { /* in front of counts; and a note, which has `ranks` */
    uint32_t magic, generation, epoch, rank;
    uint64_t ranks;
    uint8_t rest[40];
} moe_gpu_head;
_Static_assert(sizeof(moe_gpu_head) == MOE_GPU_LINE, "a head is a cache line");

enum { WAIT_COUNTS, WAIT_ROWS, WAIT_SUMS, WAITS };

typedef struct moe_gpu_slot {
    uint32_t epoch; /* of the step under way, or of the last one */
    bool open, placed, rows_here, sums_begun;
    uint64_t due[MOE_GPU_SENDS]; /* ranks that something of a kind is yet to be sent to */
    uint64_t waits[WAITS]; /* expectations; 0: none */
    uint32_t mine[MOE_GPU_RANKS + 1]; /* where our rows for each rank begin */
    uint32_t theirs[MOE_GPU_RANKS + 1]; /* where the rows of each source begin among all that come */
    uint32_t begin[MOE_GPU_RANKS]; /* rows of other sources before our late ones, at each rank */
    uint32_t before[MOE_GPU_RANKS]; /* rows that each source sends to ranks below ours */
    uint32_t writes; /* that bring the rows of the step here */
    uint64_t *transfers;
    uint32_t ntransfers, room;
} moe_gpu_slot;

struct moe_gpu {
    const fab_native_table *api;
    fab_engine *engine;
    moe_gpu_shape c;
    moe_gpu_mail *mail;
    uint64_t alive;
    uint64_t control[MOE_GPU_RANKS], data[MOE_GPU_RANKS]; /* numbers of the others' memory */
    uint32_t theirs[MOE_GPU_RANKS][MOE_GPU_SLOTS][MOE_GPU_KINDS]; /* their immediates */
    uint32_t ours[MOE_GPU_SLOTS][MOE_GPU_KINDS];
    uint64_t lifelines[MOE_GPU_RANKS]; /* expectations that fail when a rank's engine is lost */
    uint64_t lost; /* of those, ended */
    uint64_t counts[MOE_GPU_RANKS][MOE_GPU_RANKS]; /* of the step that is placed: [source][destination] */
    bool note_sent;
    uint64_t note_due; /* ranks that it is yet to be sent to */
    _Atomic int32_t error; /* a negative errno, of what this rank could not do itself */
    _Atomic uint64_t culprits; /* with it */
    moe_gpu_slot slots[MOE_GPU_SLOTS];
    moe_gpu *next;
};

/* All of these are called with the lock of the thread. */
bool moe_gpu_advance(moe_gpu *g); /* as far as it gets; returns whether something is under way */
void moe_gpu_tell(moe_gpu *g, uint64_t ranks); /* a note to all others, once */
void moe_gpu_fail(moe_gpu *g, int error, uint64_t ranks); /* this rank takes no further step */
/* A kernel has counted: what is to be said is written, and due. */
void moe_gpu_begin(moe_gpu *g, uint32_t slot, uint32_t epoch);
void moe_gpu_peek(moe_gpu *g, uint32_t slot); /* whose counts are here, for who names the others */
void moe_gpu_place(moe_gpu *g, uint32_t slot); /* the counts of all ranks are here */
fab_target moe_gpu_target(const moe_gpu *g, uint32_t slot, uint32_t kind, uint32_t d);
void moe_gpu_send_notes(moe_gpu *g);
bool moe_gpu_owes(moe_gpu *g); /* transfers that have not ended, or something due */
int moe_gpu_send(moe_gpu *g, moe_gpu_slot *s, uint64_t local, const fab_target *to, uint32_t n, int64_t imm);

int moe_gpu_join(moe_gpu *g);
void moe_gpu_leave(moe_gpu *g);
void moe_gpu_lock(void);
void moe_gpu_unlock(void);

#endif
