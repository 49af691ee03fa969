/* The engine's structures. Who may touch a field is said beside it:
 *   [lock]   only the holder of the group's lock (the worker, or a thread that helps)
 *   [atomic] anybody
 *   [init]   set before anybody else sees the object */
#ifndef FAB_ENGINE_INTERNAL_H
#define FAB_ENGINE_INTERNAL_H

#include "common.h"
#include "fabric/domain.h"
#include "fabric/engine.h"
#include "pool.h"
#include "ring.h"

#define FAB_MAX_GROUPS 16u
#define FAB_BATCH 256u          /* work requests handed to a NIC, completions taken from it, per call */
#define FAB_WHEEL 256u         /* slots of the timer wheel */
#define FAB_TICK_NS 4000000ull /* ... each this long */
#define FAB_CANCEL_GRACE_NS 1000000000ull
#define FAB_POLLER_NEAR_NS 1000000ull /* a poller that looked so recently will look again */
#define FAB_RING_SLOTS 4096u
#define FAB_HIST 48u /* power-of-two buckets of nanoseconds */

/* ---- immediates (C4): k-1 in 3 bits, generation in 5, slot in 24 ------------------------------ */
#define FAB_IMM_UNIT 840u /* lcm(1..8): a shard of a k-way split adds 840 / k */
#define FAB_IMM_GEN(imm) (((imm) >> 24) & 31u)
#define FAB_IMM_SLOT(imm) ((imm) & 0xffffffu)
#define FAB_IMM_SPLIT(imm) (((imm) >> 29) + 1u)

/* ---- state word of transfers and expectations -------------------------------------------------- */
enum {
    FAB_PHASE_MASK = 0xffu,
    FAB_NOTIFY = 1u << 8,
    FAB_WAITED = 1u << 9,
    FAB_RELEASED = 1u << 10,
    FAB_REAPED = 1u << 11
};

/* ---- events to the callback thread: an intrusive node in whatever the event is about ------------ */
typedef struct fab_event_node {
    struct fab_event_node *next;
    uint32_t kind;
} fab_event_node;

enum { FAB_TIMER_TRANSFER = 1, FAB_TIMER_EXPECT = 2 };
typedef struct fab_timer {
    fab_link link;
    uint64_t deadline;
    uint32_t kind;
} fab_timer;

typedef struct fab_group fab_group;
typedef struct fab_peer fab_peer;

/* Registered local memory. */
typedef struct fab_local {
    fab_slot slot;
    uint64_t base, len;
    uint32_t access;
    struct fab_group *group;
    uint64_t local_key[FAB_MAX_NICS];
    _Atomic uint32_t users;   /* transfers that name it [atomic] */
    _Atomic uint32_t closing; /* refuses new transfers [atomic] */
} fab_local;

/* A peer's memory, from a descriptor. */
typedef struct fab_remote {
    fab_slot slot;
    uint64_t len;
    uint32_t access, nkeys;
    struct fab_group *group;
    struct fab_peer *peer;
    uint64_t key[FAB_MAX_NICS], base[FAB_MAX_NICS];
    _Atomic uint32_t users; /* transfers that name it, and FAB_DROPPED; whoever makes it FAB_DROPPED alone frees it */
} fab_remote;
#define FAB_DROPPED 0x80000000u

/* One target of a transfer: `npages` logical writes to one peer, each cut into `pieces` for NICs and maximum sizes.
 * Unit u is piece u % pieces of page u / pieces and leaves by the NIC of rank (nic0 + u) % nnics in `nics`: so every NIC
 * walks its own units with a cursor of its own, and a full NIC does not hold up the others. */
typedef struct fab_work {
    fab_link link; /* in the peer's queue [lock] */
    struct fab_transfer *transfer;
    struct fab_peer *peer;
    struct fab_local *local;
    struct fab_remote *remote;
    uint64_t loff, roff, len; /* len: of one logical write */
    const uint32_t *sidx, *didx;
    uint64_t sstride, dstride;
    uint32_t npages, pieces, units, imm;
    uint8_t kind, has_imm, nic0, nnics;
    uint8_t nics; /* mask of the nnics NICs it was cut for; one that is lost leaves its units to the others */
    uint8_t pinned; /* the caller named the NIC: no other takes over */
    uint8_t final_imm; /* too many pieces for the split's denominator: immediates go after all payload is done */
    uint32_t next[FAB_MAX_NICS]; /* next unit of rotation slot s [lock] */
    uint32_t posted; /* units posted [lock] */
} fab_work;

/* Page lists, which a prepared transfer shares with those made of it: the sources' numbers, then the targets'. */
typedef struct fab_lists {
    _Atomic uint32_t users;
    uint32_t npages, most_source, most_target;
    uint32_t numbers[];
} fab_lists;

typedef struct fab_transfer {
    fab_slot slot;
    _Atomic uint32_t state; /* phase | flags [atomic] */
    int32_t err; /* [lock], published by `state` */
    uint32_t err_peer;
    int32_t err_nic;
    uint32_t op;
    fab_event_node event;
    fab_timer timer; /* [lock] */
    uint64_t flag; /* see flag.c */
    struct fab_group *group;
    uint64_t submitted_ns, posted_ns, bytes, timeout_ns;
    uint32_t outstanding, nworks, works_left; /* [lock] */
    uint32_t at_nic[FAB_MAX_NICS]; /* outstanding, by NIC [lock] */
    uint64_t units, ended; /* of all works; and those that ended well [lock] */
    uint8_t final_pending, cancelling; /* [lock] */
    fab_work one;
    fab_work *works; /* &one, or into `owned` */
    void *owned; /* works, message */
    fab_lists *lists;
} fab_transfer;

typedef struct fab_waiter {
    fab_slot slot;
    _Atomic uint32_t state;
    int32_t err;
    uint32_t err_peer;
    fab_event_node event;
    fab_timer timer; /* [lock of group 0] */
    fab_link queue; /* in its slot [slot's lock] */
    fab_link watch; /* among the group's expectations that name peers [lock of group 0] */
    struct fab_waiter *ended; /* in the engine's stack of those that group 0 must still take off its lists */
    uint32_t imm;
    uint64_t count, timeout_ns;
    uint32_t npeers;
    uint32_t *peers;
    uint64_t flag; /* [slot's lock] bumped at the end */
    fab_bell_fn bell; /* [slot's lock] called at the end */
    void *bell_arg;
    struct fab_engine *engine;
} fab_waiter;

typedef struct fab_imm_slot {
    FAB_ALIGNED _Atomic uint64_t word; /* in use: 1 bit, generation: 5 bits, units arrived: 58 bits */
    _Atomic uint64_t threshold; /* units at which the first expectation fires */
    _Atomic uint32_t lock; /* for what follows */
    uint32_t next_free;
    uint64_t consumed; /* units claimed by expectations that fired */
    fab_link waiting;
} fab_imm_slot;

typedef struct fab_imm_table {
    fab_imm_slot *slots;
    uint32_t nslots;
    _Atomic uint32_t lock; /* of the free list: first in, first out, so that a generation returns as late as possible */
    uint32_t free_first, free_last;
    _Atomic uint64_t stray; /* units that met no owner */
} fab_imm_table;

enum { FAB_PEER_NEW = 0, FAB_PEER_CONNECTING, FAB_PEER_READY, FAB_PEER_LOST };
typedef struct fab_peer_nic { /* the path over one NIC */
    uint32_t id, former_id; /* the domain's number, and the one before the path was opened anew */
    int32_t status; /* why it was lost last [lock] */
    uint64_t retry_at, backoff; /* [lock] */
    fab_event_node event;
    _Atomic uint32_t event_queued;
    _Atomic int32_t told; /* what the event says: 0, it is up */
    struct fab_peer *peer;
    _Atomic uint64_t bytes, ops, errors;
} fab_peer_nic;

struct fab_peer {
    _Atomic uint32_t number; /* generation << 16 | slot: a number kept too long names nobody */
    _Atomic uint32_t users; /* descriptors, messages and expectations that name it: not forgotten while there are any */
    uint32_t naddrs, group;
    uint64_t lost_ns; /* [lock] */
    char *addrs[FAB_MAX_NICS]; /* [lock], or [engine->setup] */
    _Atomic uint32_t state; /* written under [lock] */
    int32_t status; /* why it was lost [lock] */
    uint32_t opening, up; /* masks of NICs [lock] */
    _Atomic uint32_t usable; /* mask of the NICs that new transfers are cut for */
    fab_link queue; /* works not fully posted [lock] */
    fab_link active; /* among the group's peers with work [lock] */
    fab_peer_nic nic[FAB_MAX_NICS];
    fab_event_node event;
    _Atomic uint32_t event_queued;
};

typedef struct fab_recv {
    fab_link link; /* waiting to be posted [lock] */
    fab_event_node event;
    uint32_t pool, cap;
    uint32_t home; /* the NIC it is a spare of; 0: it goes to the first NIC that is up */
    uint32_t nic; /* where it is posted, UINT32_MAX: nowhere [lock] */
    uint64_t len;
    _Atomic uint32_t closed;
    fab_link all; /* among all buffers of the group [engine->setup] */
    FAB_ALIGNED char data[];
} fab_recv;

typedef struct fab_nic {
    const fab_domain_ops *ops;
    void *ctx;
    fab_domain_caps caps;
    int fd;
    uint32_t batch; /* requests to make for it at a time [lock] */
    bool pages; /* it takes pages as one request */
    _Atomic uint8_t down, closed; /* written under [lock] */
    _Atomic int32_t status; /* why it is down, 0: it is not; written under [lock] */
    fab_event_node event;
    _Atomic uint32_t event_queued;
    uint32_t group, index;
} fab_nic;

typedef struct fab_counters {
    _Atomic uint64_t submitted, done, failed, cancelled, bytes, wrs, imms, recvs, steps, helps, sleeps, kicks, faults;
    _Atomic uint64_t submit_to_post[FAB_HIST], post_to_done[FAB_HIST];
} fab_counters;

struct fab_group {
    FAB_ALIGNED _Atomic uint32_t lock; /* whoever holds it is the worker */
    FAB_ALIGNED _Atomic uint32_t sleeping;
    _Atomic uint32_t armed;
    _Atomic uint32_t idle; /* sleeping without a tick: whoever adds a deadline kicks */
    _Atomic uint64_t last_help; /* when a poller last looked */
    _Atomic uint32_t deaf; /* the worker sleeps a while without listening to the NICs: somebody else does its work */
    _Atomic uint32_t turned_away; /* pollers that found the lock taken */
    _Atomic uint32_t stop;
    FAB_ALIGNED fab_ring ring;
    struct fab_engine *engine;
    uint32_t index, nnics;
    fab_nic nics[FAB_MAX_NICS];
    _Atomic uint32_t alive; /* mask of those that are not down, written under [lock] */
    fab_pool transfers;
    fab_link active; /* peers with work [lock] */
    fab_link watching; /* expectations that name peers [lock] */
    fab_link unposted; /* receives the domain had no room for [lock] */
    fab_link wheel[FAB_WHEEL];
    uint64_t tick, stepped_ns; /* the time of the last step [lock] */
    _Atomic uint32_t ntimers;
    uint32_t outstanding;
    _Atomic uint32_t npeers;
    _Atomic(fab_peer *) *peers; /* max_peers pointers */
    fab_link recvs; /* every buffer that lives [engine->setup] */
    int efd;
    pthread_t thread;
    uint8_t has_thread;
    uint8_t shy; /* its domains are in Python: only the worker and pollers step it [init] */
    _Atomic uint32_t ready;
    _Atomic uint32_t closing;
    uint64_t cpus[16]; /* mask of CPUs to pin to, all zero: none */
    fab_counters stats;
};

typedef struct fab_watch {
    fab_slot slot;
    struct fab_watch *next; /* [watcher thread, and engine->setup] */
    fab_event_node event;
    _Atomic uint64_t *word;
    uint64_t published; /* last value that went into an event [watcher thread] */
    _Atomic uint64_t taken; /* last value that the callback thread took */
    _Atomic uint64_t latest;
    _Atomic uint32_t queued, closed;
    int64_t id;
    fab_watch_fn fn; /* native callback, else an event */
    void *fn_arg;
    bool keen; /* [init] each change is urgent: watch.c */
    _Atomic uint64_t own; /* the word itself when nobody gave one */
} fab_watch;

struct fab_engine {
    fab_engine_cfg cfg;
    _Atomic uint32_t closed;
    uint32_t ngroups;
    fab_group *groups[FAB_MAX_GROUPS];
    pthread_mutex_t setup; /* lists and tables of what is opened; held for a few instructions, also by a worker */
    /* Shared: a domain's functions are called outside the worker (registering: a backend may wait there for a peer that
     * stands still). Alone: the domain is closed. */
    pthread_rwlock_t domains;
    fab_pool locals, remotes, expects, watchpool;
    fab_imm_table imms;
    _Atomic(fab_waiter *) ended;
    FAB_ALIGNED _Atomic uint32_t inflight;
    FAB_ALIGNED _Atomic(fab_event_node *) events; /* newest first */
    _Atomic uint32_t events_sleeping;
    fab_event_node *drained; /* oldest first, the callback thread's own */
    _Atomic uint32_t events_stop;
    fab_event_node fault;
    _Atomic uint32_t fault_queued;
    _Atomic int32_t fault_status;
    _Atomic(fab_watch *) watches;
    pthread_t watcher;
    _Atomic uint32_t watcher_on;
    _Atomic uint32_t nwatches, watch_closed;
    _Atomic uint32_t watch_round; /* odd while the watcher looks at its words, and calls */
};

/* The engine's time: the monotonic clock, or the simulator's. A branch that is always taken the same way. */
static inline uint64_t fab_time(const fab_engine *e) {
    return __builtin_expect(e->cfg.clock != NULL, 0) ? *e->cfg.clock : fab_now();
}

/* handles: generation << 32 | group << 24 | index (transfers); generation << 32 | index (the rest) */
#define FAB_HANDLE(gen, group, index) ((uint64_t)(gen) << 32 | (uint64_t)(group) << 24 | (index))

static inline fab_transfer *fab_transfer_get(fab_engine *e, uint64_t handle) {
    uint32_t group = (uint32_t)(handle >> 24) & 0xffu;
    if (!e || group >= e->ngroups) /* no engine: Python's garbage collector ended it before what it made */
        return NULL;
    return fab_pool_get(&e->groups[group]->transfers, (uint32_t)handle & 0xffffffu, (uint32_t)(handle >> 32));
}
static inline uint64_t fab_transfer_handle(const fab_transfer *t) {
    return FAB_HANDLE(fab_slot_gen(&t->slot), t->group->index, t->slot.index);
}
static inline fab_waiter *fab_expect_get(fab_engine *e, uint64_t handle) {
    return e ? fab_pool_get(&e->expects, (uint32_t)handle, (uint32_t)(handle >> 32)) : NULL;
}
static inline uint64_t fab_expect_handle(const fab_waiter *x) {
    return FAB_HANDLE(fab_slot_gen(&x->slot), 0, x->slot.index);
}

/* of any thread; and of who holds the group's lock, alone in writing them: without a locked instruction */
#define FAB_COUNT_LOCKED(counter, n)                                                                \
    atomic_store_explicit(&(counter), atomic_load_explicit(&(counter), memory_order_relaxed) + (n), \
                          memory_order_relaxed)
#define FAB_COUNT(counter, n) atomic_fetch_add_explicit(&(counter), (n), memory_order_relaxed)

/* requests in the ring */
enum { FAB_RQ_TRANSFER = 1, FAB_RQ_CANCEL, FAB_RQ_EXPECT, FAB_RQ_RECV };

enum { FAB_EV_PATH = 100 }; /* a FAB_EV_NIC whose node is a path's */

/* events.c */
void fab_event_push(fab_engine *e, fab_event_node *node, uint32_t kind);
void fab_fault(fab_engine *e, int32_t status);

/* imm.c */
int fab_imm_init(fab_imm_table *table, uint32_t nslots);
void fab_imm_fini(fab_imm_table *table);
void fab_imm_arrive(fab_engine *e, uint32_t imm, uint32_t count);
void fab_expect_expire(fab_engine *e, fab_waiter *x);
void fab_expect_reap(fab_group *g);
void fab_imm_sweep(fab_engine *e);
void fab_expect_peer_lost(fab_group *g, fab_peer *peer);
void fab_expect_begin(fab_group *g, uint64_t handle, uint64_t now);

/* memory.c */
void fab_remote_free(fab_engine *e, fab_remote *remote);

/* flag.c */
/* The memory of a transfer, looked up and checked (submit.c): 0, or what the submits return. */
typedef struct fab_ends {
    fab_local *local;
    fab_remote *remote;
} fab_ends;
int fab_ends_find(fab_engine *e, uint64_t local, uint64_t remote, fab_ends *out);
bool fab_imm_ok(int64_t imm);
int64_t fab_submit_lists(fab_engine *e, uint64_t local, fab_lists *lists, uint64_t sstride, uint64_t soff,
                         uint64_t remote, uint64_t dstride, uint64_t doff, uint64_t page_len, int64_t imm, int32_t nic,
                         uint64_t timeout_ns, uint64_t flag);

/* lists.c */
fab_lists *fab_lists_new(const uint32_t *source, const uint32_t *target, uint32_t npages); /* NULL: no memory */
void fab_lists_hold(fab_lists *l);
void fab_lists_let_go(fab_lists *l);
/* Whether all pages lie inside: number * stride + offset + page, without overflow. */
bool fab_lists_inside(const fab_lists *l, const fab_ends *at, uint64_t sstride, uint64_t soff, uint64_t dstride,
                      uint64_t doff, uint64_t page);

void fab_flag_hold(uint64_t flag);
void fab_flag_let_go(uint64_t flag);
void fab_flag_bump(uint64_t flag, bool well);

/* draft.c */
typedef struct fab_kept { /* a draft that was looked at, with page lists and a flag of its own */
    fab_draft draft;
    fab_lists *lists; /* NULL: one write */
} fab_kept;
/* `like`: lists that it shares if they are the same, or NULL. 0, or what the submit would return. */
int fab_draft_keep(fab_engine *e, const fab_draft *draft, fab_lists *like, fab_kept *out);
int64_t fab_kept_submit(fab_engine *e, const fab_kept *k); /* waits a little for a full engine */
void fab_kept_let_go(fab_kept *k); /* idempotent */
void fab_help_along(fab_engine *e); /* a step of every group, without saying that this thread polls */

/* watch.c */
void fab_watch_stop(fab_engine *e);
/* A keen watch: `fn` is called on the watcher's thread, and says by fab_watch_tell what the callback thread is to hear. */
int64_t fab_watch_open(fab_engine *e, uint64_t word, fab_watch_fn fn, void *arg, fab_watch **out, uint64_t *word_out);
void fab_watch_tell(fab_engine *e, fab_watch *w, uint64_t value);

/* timer.c */
void fab_timers_init(fab_group *g, uint64_t now);
void fab_timer_add(fab_group *g, fab_timer *timer, uint32_t kind, uint64_t deadline);
void fab_timer_remove(fab_group *g, fab_timer *timer);
uint32_t fab_timers_run(fab_group *g, uint64_t now);

/* transfer.c: all [lock] except release */
void fab_transfer_begin(fab_group *g, fab_transfer *t, uint64_t now);
void fab_transfer_fail(fab_group *g, fab_transfer *t, int32_t err, uint32_t peer, int32_t nic, uint64_t now);
void fab_transfer_completed(fab_group *g, fab_transfer *t, uint32_t count, int32_t status, uint32_t peer, int32_t nic,
                            uint64_t now);
void fab_transfer_expire(fab_group *g, fab_transfer *t, uint64_t now);
void fab_transfer_free(fab_transfer *t);
void fab_transfer_let_go(fab_transfer *t); /* of the memory it names */

/* shard.c */
void fab_work_split(fab_work *w, const fab_group *g, int32_t pin, uint32_t rotate, uint32_t targets);
void fab_work_unit(const fab_work *w, uint32_t unit, uint32_t nic, fab_wr *wr);

/* post.c, peer.c [lock] */
uint32_t fab_post_all(fab_group *g, uint64_t now);
void fab_peer_connect(fab_group *g, fab_peer *peer, uint64_t now);
void fab_peer_lose(fab_group *g, fab_peer *peer, int32_t status, int32_t nic, uint64_t now);
void fab_peer_up(fab_group *g, uint32_t nic, uint32_t id, uint64_t now);
void fab_peer_down(fab_group *g, uint32_t nic, uint32_t id, int32_t status, uint64_t now);
void fab_peer_activate(fab_group *g, fab_peer *peer);
void fab_peer_mend(fab_group *g, fab_peer *peer, uint64_t now);
fab_peer *fab_peer_at(fab_group *g, uint32_t number); /* NULL: forgotten */
fab_peer *fab_peer_slot(fab_group *g, uint32_t slot);
fab_peer *fab_peer_hold(fab_group *g, uint32_t number); /* the same, and keeps it from being forgotten */
void fab_peer_let_go(fab_peer *peer);

/* stats.c: counts a duration in a histogram of power-of-two buckets */
void fab_hist_count(_Atomic uint64_t *hist, uint64_t from, uint64_t to);

/* nic.c [lock] */
void fab_nic_down(fab_group *g, uint32_t index, int32_t status, uint64_t now);
void fab_nic_broken(fab_group *g, uint32_t index, int32_t status, uint64_t now);
void fab_nic_up(fab_group *g, uint32_t index);

/* recv.c [lock] */
void fab_recv_post_pending(fab_group *g);
void fab_recv_take_back(fab_group *g, uint32_t nic);
void fab_recv_done(fab_group *g, uint64_t id, uint64_t len, int32_t status);

/* worker.c */
uint32_t fab_step(fab_group *g, uint64_t now); /* [lock] the loop body */
uint32_t fab_step_submitted(fab_group *g, uint64_t now); /* [lock] after a submit: without a poll if somebody polls */
bool fab_group_try(fab_group *g); /* take the lock, or return false at once */
void fab_group_unlock(fab_group *g); /* and look once more for what came meanwhile */
uint64_t fab_left_to_poller(const fab_group *g, uint64_t *since, uint64_t now); /* ns to sleep; 0: nobody polls */
uint32_t fab_group_help(fab_group *g, bool polling); /* step once if nobody else does */
bool fab_group_arm(fab_group *g); /* false: something happened, do not sleep */
void fab_group_kick(fab_group *g); /* wake the worker if it sleeps */
void *fab_worker_main(void *arg); /* a group */
int fab_ring_submit(fab_group *g, uint32_t kind, int32_t arg, void *ptr, uint64_t value);

#endif
