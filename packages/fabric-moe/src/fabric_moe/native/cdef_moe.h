/* What Python calls: loops over rows of bytes and of numbers, which neither allocate nor block nor keep a pointer; and the proxy,
 * which submits. */
#ifndef FABRIC_MOE_CDEF_H
#define FABRIC_MOE_CDEF_H

#include <stddef.h>
#include <stdint.h>

/* cdef-begin */
enum { MOE_BF16 = 0, MOE_F32 = 1 };

/* dst row i = src row index[i], `bytes` long; zeros where the index is negative. */
void moe_rows(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, const int64_t *index, size_t rows,
              size_t bytes);

/* out row i = the sum over j of weights[i][j] * y[at[i][j]], rounded to `to`; at < 0 is left out. In the order of j, from
 * zero, product and sum rounded apart. weights NULL: without them. acc: room for `hidden` floats. */
void moe_weigh(const uint8_t *y, int from, size_t hidden, const int64_t *at, const float *weights, size_t rows,
               size_t k, float *acc, uint8_t *out, size_t out_stride, int to);

/* out row i = the sum over j of the row of type `from` that begins at byte at[i][j] of `base`; a negative one ends the
 * list. accumulate: then what is in out is added. */
void moe_reduce(const uint8_t *base, const int64_t *at, size_t rows, size_t fan, size_t hidden, int from, float *acc,
                uint8_t *out, int to, int accumulate);

/* The plan of a step. ids: [tokens][k], below `experts`, -1 for none; those of ranks that are not alive become -1, and their
 * number is returned; -1: an id is none. starts: [ranks + 1] where the rows for each rank begin; token, turn: of each row, at most
 * tokens times the lesser of k and ranks. */
int64_t moe_route(int32_t *ids, size_t tokens, size_t k, uint32_t experts, uint32_t ranks, const uint8_t *alive,
                  int64_t *starts, int64_t *token, int64_t *turn);

typedef struct moe_field { /* of a row: `bytes` at `at`, out of rows that are `stride` apart */
    const uint8_t *src;
    size_t stride, bytes, at;
} moe_field;

/* Row i takes row index[i] of each field, and the stamp. */
void moe_pack(uint8_t *rows, size_t row_bytes, const int64_t *index, size_t n, const moe_field *fields, size_t nfields,
              size_t stamp_at, uint32_t stamp);

/* ---- the proxy: what is sent as soon as something arrived, by whoever is there first: the rank's own thread or the one that
 * all ranks of a process share. docs/moe.md says what travels when. ---------------------------------------------- */
enum { MOE_COUNTS = 0, MOE_ROWS = 1, MOE_SUMS = 2, MOE_CREDIT = 3, MOE_KINDS = 4 }; /* kinds of immediates */
enum {
    MOE_OK = 0,
    MOE_NOT_YET = 1, /* counts, or rows, are missing */
    MOE_FULL = 2, /* the engine takes nothing more at present */
    MOE_OTHER_STEP = 3, /* counts of `rank` are of `generation` and `step` */
    MOE_BAD_COUNTS = 4, /* `rank` says that it sends `private_rows` early, `most` rows to a rank and `total` to all */
    MOE_REFUSED = 5 /* the engine said `rc` */
};

typedef struct moe_shape { /* of a rank, in one generation; bytes unless they are counts */
    uint64_t api, engine; /* fabric_core.native_api(), engine.native_handle */
    uint64_t inbound, outbound; /* addresses */
    uint64_t local; /* number of the outbound memory */
    uint64_t in_stride, in_rows, in_sums, in_credits, counts_stride, out_stride, out_rows, out_sums;
    uint64_t row_bytes, sum_bytes;
    uint64_t shared, stage_rows; /* rows: of the shared memory; of a rank in a step, and sums on their way */
    uint64_t transfer_ns, patience_ns; /* how long a transfer may take; how long a full engine is waited for */
    uint32_t ranks, rank, generation, depth, private_max, max_tokens;
} moe_shape;

typedef struct moe_trouble {
    int32_t code, rc;
    uint32_t rank, generation;
    uint64_t step, private_rows, most, total;
} moe_trouble;

typedef struct moe_sums { /* of one step */
    const int64_t *starts; /* [ranks + 1] where the rows of each source begin; `stage_rows` at most */
    const int64_t *before; /* [ranks] rows that the source sent to ranks below ours */
    uint32_t flags; /* of the heads */
} moe_sums;

typedef struct moe_rank moe_rank;

/* remotes, alive: [ranks]. theirs: [ranks][depth][MOE_KINDS] immediates of the others; credits: [depth] our own. All are
 * copied. NULL: no memory, no thread, or an engine that is too old. */
moe_rank *moe_rank_new(const moe_shape *shape, const uint64_t *remotes, const uint8_t *alive, const uint32_t *theirs,
                       const uint32_t *credits);
void moe_rank_stop(moe_rank *r); /* nothing is submitted after it */
void moe_rank_free(moe_rank *r); /* after its immediates were freed: no bell can ring any more */

/* A step begins in a slot. starts: [ranks + 1] where the rows for each rank begin; `window` of each go early. */
void moe_begin(moe_rank *r, uint32_t slot, uint64_t number, uint32_t window, const int64_t *starts);
/* Counts of all ranks to all: our head and counts are written, and sent. */
int moe_send_counts(moe_rank *r, uint32_t slot, moe_trouble *out);
int moe_arm(moe_rank *r, uint32_t slot, uint64_t expectation); /* of those counts; again if it was made anew */
/* The rows lie there: sends the early ones, and the rest if the counts are here. */
int moe_send_rows(moe_rank *r, uint32_t slot, moe_trouble *out);
void moe_attend(moe_rank *r, uint32_t slot); /* the caller waits for the counts itself: wake nobody */
/* The counts are here: sends the rest, once. MOE_OK too if another thread did. */
int moe_rest(moe_rank *r, uint32_t slot, moe_trouble *out);
/* Copies what the ranks say: counts [ranks][ranks], private [ranks]. Refuses what no rank can have. */
int moe_read(moe_rank *r, uint32_t slot, int64_t *counts, int64_t *private_rows, moe_trouble *out);
/* 1: rows of the step have not left, but will if the others go on. */
int moe_owes(moe_rank *r, uint32_t slot);
int moe_look(moe_rank *r, uint32_t slot, moe_trouble *out); /* what went wrong on the other thread */

/* moe_weigh into the places of all sources. Then heads are added, and all is sent. */
int moe_weigh_all(moe_rank *r, uint32_t slot, const moe_sums *sums, const uint8_t *y, int from, size_t hidden,
                  const int64_t *at, const float *weights, size_t k, float *acc, int to, moe_trouble *out);
int moe_send_sums(moe_rank *r, uint32_t slot, const moe_sums *sums, moe_trouble *out);
/* The heads of what came back: flags [ranks]. MOE_OTHER_STEP if one is not of this step. */
int moe_check_sums(moe_rank *r, uint32_t slot, uint8_t *flags, moe_trouble *out);

/* Transfers of a slot: releases those that ended well, and hands over up to `cap` others, for the caller to release. */
uint32_t moe_take(moe_rank *r, uint32_t slot, uint64_t *handles, uint32_t cap);

/* ---- the same for a rank on a GPU, see gpu.h: a thread looks at words that kernels write in pinned memory ------------ */
enum { MOE_GPU_COUNTS = 0, MOE_GPU_EARLY = 1, MOE_GPU_LATE = 2, MOE_GPU_SUMS = 3, MOE_GPU_SENDS = 4 };
enum { MOE_GPU_IMM_COUNTS = 0, MOE_GPU_IMM_ROWS = 1, MOE_GPU_IMM_SUMS = 2, MOE_GPU_KINDS = 3 };
typedef struct moe_gpu_shape { /* bytes unless they are counts */
    uint64_t api, engine, control_local,
        data_local; /* numbers of what is sent: counts, in host memory; rows and sums */
    uint64_t control_in, control_out, mail, said, counted, arrived; /* addresses; the last four pinned */
    uint64_t counted_stride, counts_stride, in_stride, in_sums, out_stride, out_sums, row_bytes, sum_bytes;
    uint64_t alive, transfer_ns, shared,
        sent; /* a set of ranks; ns; rows of the shared memory; rows of a rank at most */
    uint32_t ranks, rank, generation, depth, max_tokens, topk, held, private_rows;
} moe_gpu_shape;
typedef struct moe_gpu moe_gpu;
/* control, data, lifelines: [ranks]. theirs: [ranks][depth][MOE_GPU_KINDS]; ours: [depth][MOE_GPU_KINDS]. Copied. NULL: as above. */
moe_gpu *moe_gpu_new(const moe_gpu_shape *shape, const uint64_t *control, const uint64_t *data, const uint32_t *theirs,
                     const uint32_t *ours, const uint64_t *lifelines);
int moe_gpu_finish(moe_gpu *g, uint64_t patience_ns); /* what is owed to others leaves; 1: not all did */
void moe_gpu_note(moe_gpu *g,
                  uint64_t ranks); /* tells all others because of whom this rank gives up, or that it leaves */
int32_t moe_gpu_error(moe_gpu *g, uint64_t *culprits); /* a negative errno: what this rank itself cannot, or was sent */
void moe_gpu_free(moe_gpu *g); /* nothing is submitted after it; before its immediates are freed */
/* cdef-end */

#endif
