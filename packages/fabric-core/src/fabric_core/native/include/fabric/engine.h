/* fabric/engine.h - the engine as C sees it: for the Python layer, and for native callers (a MoE proxy).
 *
 * Other packages do not link against this: they take the table of fab_native_api() from fabric_core.native_api().
 * Every function returns 0 or a positive result, or a negative errno. Memory of an engine stays valid until
 * fab_engine_free, so a handle kept too long is an error and never a crash. */
#ifndef FABRIC_ENGINE_H
#define FABRIC_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "fabric/domain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef-begin: what follows is read by cffi too, so it holds no preprocessor lines */
typedef struct fab_engine fab_engine;

enum { FAB_PENDING = 0, FAB_DONE = 1, FAB_FAILED = 2, FAB_CANCELLED = 3 };
enum { FAB_OP_WRITE = 1, FAB_OP_PAGED = 2, FAB_OP_SCATTER = 3, FAB_OP_BARRIER = 4, FAB_OP_SEND = 5 };
enum {
    FAB_EV_TRANSFER = 1,  /* id: handle */
    FAB_EV_EXPECT = 2,    /* id: handle */
    FAB_EV_RECV = 3,      /* id: pool, a: address of the bytes, b: their number, c: to give back */
    FAB_EV_WATCH = 4,     /* id: watcher, a: old, b: new */
    FAB_EV_PEER_LOST = 5, /* id: group << 32 | peer */
    FAB_EV_FAULT = 6,     /* status: a backend refused something that came in */
    FAB_EV_NIC = 7 /* id: group << 32 | NIC, a: peer or UINT32_MAX, status: that NIC, or its path to that peer, is
                           * lost while others go on; 0: it is back */
};

typedef struct fab_engine_cfg {
    uint32_t imm_slots;
    uint32_t max_inflight;
    uint32_t max_peers;
    uint32_t busy; /* 1: workers never sleep */
    uint32_t hand_over; /* 1: few cores: a worker leaves the work to a thread that polls */
    uint64_t spin_ns; /* how long an idle worker or waiter spins before it sleeps */
    uint64_t timeout_ns; /* of transfers and expectations that name none */
    uint64_t inline_bytes; /* a submit up to this size is posted by the submitting thread */
    uint64_t shard_bytes; /* a single write from this size on is spread over all NICs */
    const uint64_t *clock; /* virtual time for groups without a thread (the simulator), which stands still during a
                             * call: blocking calls then take a timeout of 0. NULL: the monotonic clock */
} fab_engine_cfg;

typedef struct fab_event {
    uint32_t kind;
    int32_t status;
    uint64_t id, a, b, c;
} fab_event;

typedef struct fab_outcome {
    uint32_t phase;
    int32_t err; /* negative errno */
    uint32_t peer; /* or UINT32_MAX */
    int32_t nic; /* or -1 */
    uint32_t op;
    uint32_t pad;
    uint64_t units, ended; /* a transfer that did not end well: writes it was cut into, and those that had ended well */
} fab_outcome;

typedef struct fab_target { /* one target of a scatter or barrier */
    uint64_t remote, loff, roff, len;
} fab_target;

typedef struct fab_stats {
    uint64_t submitted, done, failed, cancelled, bytes, wrs, imms, imm_stray, recvs, steps, helps, sleeps, kicks,
        faults, inflight;
    uint64_t submit_to_post[48], post_to_done[48]; /* power-of-two buckets of nanoseconds */
} fab_stats;

typedef struct fab_peer_stats {
    uint32_t state, nnics;
    int32_t status;
    uint32_t up; /* mask of NICs with a path to it */
    uint64_t bytes[8], ops[8], errors[8];
} fab_peer_stats;

/* ---- life -------------------------------------------------------------------------------------- */
fab_engine *fab_engine_new(const fab_engine_cfg *cfg);
/* Opens a DomainGroup over nnics domains; `cpus` is a mask to pin its worker to (all zero: none); thread 0: no worker
 * thread, the caller steps; 1: a worker; 2: a worker, and threads that submit or wait leave the stepping to it (domains in
 * Python: a signal's exception must not come up inside one of their methods). Takes the domains over: they are closed with the engine. Returns the group's number. */
int fab_group_open(fab_engine *e, uint32_t nnics, const uint64_t *ops, const uint64_t *ctx, const uint64_t *cpus,
                   int thread);
/* Ends everything that is in flight (each operation ends exactly once), closes the domains. Idempotent. */
int fab_engine_close(fab_engine *e, uint64_t timeout_ns);
void fab_engine_free(fab_engine *e);
int fab_group_caps(fab_engine *e, uint32_t group, uint32_t nic, fab_domain_caps *out);
int fab_group_address(fab_engine *e, uint32_t group, uint32_t nic, char *buf, size_t cap);

/* ---- memory and peers ----------------------------------------------------------------------------- */
int64_t fab_mem_reg(fab_engine *e, uint32_t group, const fab_mr *mr, fab_mr_keys *keys);
int fab_mem_dereg(fab_engine *e, uint64_t handle, uint64_t timeout_ns);
int64_t fab_peer_add(fab_engine *e, uint32_t group, uint32_t n, const char *const *addrs);
int64_t fab_remote_add(fab_engine *e, uint32_t group, uint32_t peer, uint64_t len, uint32_t access, uint32_t nkeys,
                       const uint64_t *keys, const uint64_t *bases);
int fab_remote_drop(fab_engine *e, uint64_t handle);

/* ---- transfers: a positive handle, or a negative errno:
 *   -EAGAIN full, wait with fab_wait_room   -ERANGE outside the memory   -EBADF stale local handle
 *   -ESTALE stale remote handle   -EACCES no right to write there   -EINVAL bad immediate or shape
 *   -ENODEV no such NIC   -ESHUTDOWN closed   -EXDEV handle and descriptor belong to different groups ------- */
int64_t fab_submit_write(fab_engine *e, uint64_t local, uint64_t loff, uint64_t remote, uint64_t roff, uint64_t len,
                         int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag);
int64_t fab_submit_paged(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                         uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                         uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag);
int64_t fab_submit_many(fab_engine *e, uint32_t op, uint64_t local, const fab_target *targets, uint32_t n, int64_t imm,
                        int32_t nic, uint64_t timeout_ns, uint64_t flag);
int64_t fab_submit_send(fab_engine *e, uint32_t group, uint32_t peer, const void *msg, uint64_t len,
                        uint64_t timeout_ns, uint64_t flag);
int fab_wait_room(fab_engine *e, uint64_t timeout_ns); /* until a submit may succeed; blocks */
int fab_transfer_poll(fab_engine *e, uint64_t handle); /* phase; helps */
int fab_transfer_wait(fab_engine *e, uint64_t handle, uint64_t timeout_ns); /* phase, FAB_PENDING on time-out; blocks */
int fab_transfer_outcome(fab_engine *e, uint64_t handle, fab_outcome *out);
int fab_transfer_notify(fab_engine *e, uint64_t handle); /* an event when it ends, also if it has */
int fab_transfer_cancel(fab_engine *e, uint64_t handle);
int fab_transfer_release(fab_engine *e, uint64_t handle);

/* ---- immediates ------------------------------------------------------------------------------------ */
int64_t fab_imm_alloc(fab_engine *e);
int64_t fab_imm_free(fab_engine *e, uint32_t imm); /* whole writes that nobody claimed */
int64_t fab_imm_count(fab_engine *e, uint32_t imm); /* whole writes not yet claimed; helps */
int64_t fab_expect(fab_engine *e, uint32_t imm, uint64_t count, uint64_t timeout_ns, const uint32_t *peers,
                   uint32_t npeers);
int fab_expect_poll(fab_engine *e, uint64_t handle);
int fab_expect_wait(fab_engine *e, uint64_t handle, uint64_t timeout_ns);
int fab_expect_outcome(fab_engine *e, uint64_t handle, fab_outcome *out);
int fab_expect_notify(fab_engine *e, uint64_t handle);
int fab_expect_cancel(fab_engine *e, uint64_t handle);
int fab_expect_flag(fab_engine *e, uint64_t handle, uint64_t flag);
/* Has fn(arg) called once when it ends, by whatever thread ends it, under a lock: fn may set a word or wake a thread, and calls
 * nothing of the engine. None comes after fab_imm_free of its immediate. */
typedef void (*fab_bell_fn)(void *arg);
int fab_expect_bell(fab_engine *e, uint64_t handle, fab_bell_fn fn, void *arg);
int fab_expect_release(fab_engine *e, uint64_t handle);

/* ---- messages ---------------------------------------------------------------------------------------- */
int fab_recvs_add(fab_engine *e, uint32_t group, uint32_t pool, uint64_t len, uint32_t count);
int fab_recv_return(fab_engine *e, uint32_t group, uint64_t buffer); /* event's c: post it again */
int fab_recvs_close(fab_engine *e, uint32_t group, uint32_t pool);

/* ---- watchers ---------------------------------------------------------------------------------------- */
typedef void (*fab_watch_fn)(void *arg, uint64_t old_value, uint64_t new_value);
int64_t fab_watch_add(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, uint64_t *word_out);
int fab_watch_close(fab_engine *e, uint64_t id);
void fab_watch_settle(fab_engine *e); /* after it: until the watcher's thread cannot be in its function any more */
int fab_range_mapped(uint64_t addr, uint64_t len); /* 1: all of it is mapped here; 0: not */

/* ---- flags: words that operations bump (low half: ended, high half: ended badly). Those made here outlive the operations
 * that name them as address | 1; a plain address is a word of the caller's own. -------------------------------- */
uint64_t fab_flag_new(void);
uint64_t fab_flag_new_on(int32_t device); /* a word that GPUs reach too; 0: there is none */
void fab_flag_drop(uint64_t flag);

/* ---- prepared transfers: what is submitted whenever somebody, mostly a GPU, adds to a word -------------------
 * The arguments are those of the submits. Every addition submits once (several at a time: as often), bumping `flag` at each
 * end. Returns NULL with *rc, what the submit would have returned. */
typedef struct fab_prepared fab_prepared;
fab_prepared *fab_prepare_write(fab_engine *e, uint64_t local, uint64_t loff, uint64_t remote, uint64_t roff,
                                uint64_t len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc);
fab_prepared *fab_prepare_paged(fab_engine *e, uint64_t local, const uint32_t *sidx, uint64_t sstride, uint64_t soff,
                                uint64_t remote, const uint32_t *didx, uint64_t dstride, uint64_t doff, uint32_t npages,
                                uint64_t page_len, int64_t imm, int32_t nic, uint64_t timeout_ns, uint64_t flag,
                                uint64_t word, int *rc);
uint64_t fab_prepared_count(const fab_prepared *p, int32_t *refused); /* submitted so far; the last refusal, or 0 */
void fab_prepared_close(fab_prepared *p); /* waits until it is not being submitted */

/* ---- sequences: a word counts steps, from 0; step k submits the k-th list of transfers ------------------------ */
typedef struct fab_draft { /* one write (npages 0), or pages: what a submit takes */
    uint64_t local, loff, sstride, remote, roff, dstride, len;
    uint64_t timeout_ns, until_ns; /* until_ns: a time of the monotonic clock that it ends by, instead of timeout_ns */
    uint64_t flag;
    int64_t imm;
    int32_t nic;
    uint32_t npages;
    const uint32_t *sidx, *didx; /* copied */
    uint32_t step, lane; /* of a sequence: lanes (below 65536) are cancelled, and fail, each by itself */
} fab_draft;
typedef struct fab_sequence_opened {
    uint64_t word, watch;
    uint32_t item; /* the draft that is wrong, if one is */
    int32_t rc;
} fab_sequence_opened;
typedef struct fab_sequence_state {
    uint32_t submitted; /* steps; those of ended lanes are passed over */
    uint32_t ended; /* steps, from the first, whose transfers have all ended */
    uint64_t waits_for; /* a transfer that has not ended, or 0 */
    uint64_t first_handle; /* of what went wrong first; 0: a submit was refused */
    fab_outcome first; /* phase 0: nothing */
} fab_sequence_state;
typedef struct fab_sequence fab_sequence;
/* `drafts` in the order of their steps. `word`: 0, or one that holds 0. `keep`: transfers are to be taken, and each change is
 * told as a FAB_EV_WATCH; else they are released at their ends. NULL with out->rc. */
fab_sequence *fab_sequence_new(fab_engine *e, const fab_draft *drafts, uint32_t n, uint32_t nsteps, uint64_t word,
                               uint32_t keep, fab_sequence_opened *out);
int64_t fab_sequence_step(fab_sequence *s,
                          uint64_t value); /* sets the word, or adds 1 (value 0); submits in this thread */
/* After it nothing of the lane (negative: of all) is submitted any more. Returns how many transfers never will be.
 * under_way: those that were submitted are cancelled too. */
uint32_t fab_sequence_cancel(fab_sequence *s, int64_t lane, uint32_t under_way);
/* Steps from `step` on that were submitted, `most` at a time, and their times; `handles` has room for all of theirs. A handle
 * of 0 was not submitted, or was taken before. */
uint32_t fab_sequence_take(fab_sequence *s, uint32_t step, uint32_t most, uint64_t *handles, uint64_t *seen,
                           uint64_t *posted);
void fab_sequence_look(fab_sequence *s, fab_sequence_state *out);
int32_t fab_sequence_lane(const fab_sequence *s, uint32_t lane); /* 0, or why nothing of it is submitted any more */
/* When each step was seen, and when its last submit had returned: of the monotonic clock. */
uint32_t fab_sequence_times(const fab_sequence *s, uint64_t *seen, uint64_t *posted, uint32_t from, uint32_t cap);
int fab_sequence_close(fab_sequence *s); /* 1: it was open */
void fab_sequence_free(fab_sequence *s); /* after the close */

/* ---- limits of this machine, bytes per second, negative: not to be had -------------------------------------- */
double fab_limit_stream(uint64_t bytes, uint64_t span,
                        double seconds); /* copies of `bytes` each, walking `span` bytes */
double fab_limit_cma(uint64_t bytes, uint64_t span, double seconds); /* the same by process_vm_writev */
const char *fab_build_info(void);

/* ---- the rest ------------------------------------------------------------------------------------------ */
int fab_events_wait(fab_engine *e, fab_event *out, uint32_t cap,
                    uint64_t timeout_ns); /* blocks; -ESHUTDOWN at the end */
void fab_events_stop(fab_engine *e);
int fab_progress(fab_engine *e);
int fab_engine_stats(fab_engine *e, uint32_t group, fab_stats *out);
/* What a NIC has refused, by kind: how many entries, 0 for a backend that does not count. */
int fab_nic_counters(fab_engine *e, uint32_t group, uint32_t nic, fab_counter *out, uint32_t cap);
int fab_engine_peer_stats(fab_engine *e, uint32_t group, uint32_t number, fab_peer_stats *out);

typedef struct fab_native_table {
    uint32_t version, struct_size;
    int64_t (*submit_write)(fab_engine *, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, int64_t, int32_t, uint64_t,
                            uint64_t);
    int64_t (*submit_paged)(fab_engine *, uint64_t, const uint32_t *, uint64_t, uint64_t, uint64_t, const uint32_t *,
                            uint64_t, uint64_t, uint32_t, uint64_t, int64_t, int32_t, uint64_t, uint64_t);
    int64_t (*submit_many)(fab_engine *, uint32_t, uint64_t, const fab_target *, uint32_t, int64_t, int32_t, uint64_t,
                           uint64_t);
    int64_t (*submit_send)(fab_engine *, uint32_t, uint32_t, const void *, uint64_t, uint64_t, uint64_t);
    int (*transfer_poll)(fab_engine *, uint64_t);
    int (*transfer_wait)(fab_engine *, uint64_t, uint64_t);
    int (*transfer_cancel)(fab_engine *, uint64_t);
    int (*transfer_release)(fab_engine *, uint64_t);
    int64_t (*imm_count)(fab_engine *, uint32_t);
    int64_t (*expect)(fab_engine *, uint32_t, uint64_t, uint64_t, const uint32_t *, uint32_t);
    int (*expect_poll)(fab_engine *, uint64_t);
    int (*expect_wait)(fab_engine *, uint64_t, uint64_t);
    int (*expect_release)(fab_engine *, uint64_t);
    int64_t (*watch_add)(fab_engine *, uint64_t, fab_watch_fn, void *, uint64_t *);
    int (*progress)(fab_engine *);
    int (*transfer_outcome)(fab_engine *, uint64_t, fab_outcome *);
    int (*expect_outcome)(fab_engine *, uint64_t, fab_outcome *);
    int (*expect_cancel)(fab_engine *, uint64_t);
    int64_t (*imm_alloc)(fab_engine *);
    int64_t (*imm_free)(fab_engine *, uint32_t);
    int (*watch_close)(fab_engine *, uint64_t);
    const void *(*contact_api)(void); /* a const fab_contact_api: first contact for backends, see fabric/contact.h */
    int (*expect_bell)(fab_engine *, uint64_t, fab_bell_fn, void *);
} fab_native_table; /* version 1: fields are only appended; the structs above belong to the version */
const fab_native_table *fab_native_api(void);
/* cdef-end */

#ifdef __cplusplus
}
#endif
#endif
