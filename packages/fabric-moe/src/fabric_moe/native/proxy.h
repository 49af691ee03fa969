/* What the files of the proxy share. */
#ifndef FABRIC_MOE_PROXY_H
#define FABRIC_MOE_PROXY_H

#include "cdef_moe.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "fabric/engine.h"

#define MOE_HEAD 64
#define MOE_MAGIC 0x464D4F45u /* "FMOE" */

typedef struct moe_head { /* layout.py's HEAD_TYPE */
    uint32_t magic, generation;
    uint64_t step;
    uint32_t rank, private_rows, turn, flags;
    uint8_t rest[32];
} moe_head;
_Static_assert(sizeof(moe_head) == MOE_HEAD, "a head is a cache line");

enum { MOE_IDLE, MOE_WAITING, MOE_SENDING, MOE_SENT, MOE_FAILED }; /* of a slot: its second phase */

typedef struct moe_bell { /* what the engine rings when an expectation ends */
    _Atomic uint32_t rung;
    _Atomic uint32_t attended; /* a thread waits for the same: it need not be woken */
} moe_bell;

typedef struct moe_slot {
    moe_bell counts, credit;
    /* the rest under the rank's lock */
    uint64_t number;
    uint64_t expects;  /* the counts; the caller's to release */
    uint64_t credited; /* a credit; ours to release; 0: none is waited for */
    uint32_t state, window;
    bool packed, here; /* our rows; the counts of all ranks */
    int64_t *starts;   /* [ranks + 1] our rows for each rank */
    int64_t *begin;    /* [ranks] rows of other sources before our late ones in the rank's shared memory */
    uint64_t *turn;    /* [ranks] of the shared memory: what is due, or waited for */
    uint8_t *due;      /* [ranks] 1: to be sent now; 2: a credit is waited for */
    uint64_t *transfers;
    uint32_t ntransfers, room;
    moe_trouble trouble;
} moe_slot;

struct moe_rank {
    const fab_native_table *api;
    fab_engine *engine;
    moe_shape shape;
    pthread_mutex_t lock;
    bool stopped;
    uint64_t *remotes;
    uint8_t *alive;
    uint32_t *place; /* [ranks] how many below take part */
    uint32_t *theirs, *credits;
    fab_target *targets; /* [ranks] for a submit, under the lock */
    moe_slot *slots;
    struct moe_rank *next; /* among the ranks of the thread */
};

static inline uint32_t moe_imm(const moe_rank *r, uint32_t rank, uint32_t slot, uint32_t kind) {
    return r->theirs[((size_t)rank * r->shape.depth + slot) * MOE_KINDS + kind];
}

static inline uint64_t moe_rows_for(const moe_slot *s, uint32_t rank) {
    return (uint64_t)(s->starts[rank + 1] - s->starts[rank]);
}

/* [lock] Submits targets[0..n), which raise the same immediate; the transfer is kept in the slot. */
int moe_submit(moe_rank *r, uint32_t slot, uint32_t n, uint32_t imm, moe_trouble *out);
int moe_says(moe_trouble *out, int code, int64_t rc);

/* One write of a kind to each rank. `sums`: of that kind. Waits for room. */
int moe_send_all(moe_rank *r, uint32_t slot, uint32_t kind, const moe_sums *sums, moe_trouble *out);
void moe_sums_target(const moe_rank *r, uint32_t slot, const moe_sums *sums, uint32_t s, fab_target *to);

/* [lock] As far as it gets: MOE_FULL and MOE_NOT_YET are no end. */
int moe_advance(moe_rank *r, uint32_t slot);
/* [lock] What the ranks say, checked: `counts` [ranks][ranks] and `private_rows` [ranks], or NULL for what a sender needs. */
int moe_heads(moe_rank *r, uint32_t slot, int64_t *counts, int64_t *private_rows, moe_trouble *out);

int moe_thread_join(moe_rank *r);  /* the thread looks after this rank */
void moe_thread_leave(moe_rank *r); /* ... no longer, after the return */
void moe_ring(void *bell);          /* a fab_bell_fn */
void moe_help_begin(void);          /* this thread serves what rings from now on, and what nobody has served */
void moe_help_end(void);            /* ... until here. Without a lock of ours */

#endif
