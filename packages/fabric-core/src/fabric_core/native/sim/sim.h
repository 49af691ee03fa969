/* The simulator: one world of virtual time in which real engines run over simulated NICs.
 *
 * Everything is one thread and one heap of events. Decisions come from the seed's random streams only: never from an
 * address, a clock or an order of allocation, so a run with the same seed and options is the same run.
 *
 *   world   time, events, dice, hash, the first violation        run.c, heap.c, note.c
 *   node    an engine, its memory and its NICs; an incarnation   node.c, region.c
 *   nic     what fab_domain_ops sees                             domain.c, cq.c
 *   link    first contact and loss between two NICs              link.c
 *   wr      a request on its way through the network             net.c
 *   flow    a hand-over: some transfers, some expectations       flow.c, load.c, op.c, expect.c
 *   checks  what must hold                                       check_*.c
 *   fault   what goes wrong, and when                            fault.c */
#ifndef FAB_SIM_H
#define FAB_SIM_H

#include "../engine_internal.h"
#include "cost.h"
#include "fabric/contact.h"
#include "heap.h"
#include "options.h"
#include "rand.h"
#include "slab.h"

#define SIM_NODES 6u
#define SIM_OPS 8u      /* transfers of one hand-over */
#define SIM_WRITES 32u  /* logical writes of one transfer */
#define SIM_PLACES 4u   /* receivers of one transfer */
#define SIM_COMMON 8u   /* immediates that have the same number at every node */
#define SIM_MRS 64u
#define SIM_HELD 128u
#define SIM_ARENA (16u << 20)
#define SIM_TRACE 256u
#define SIM_TICK_NS 4000000ull

typedef struct sim_world sim_world;
typedef struct sim_node sim_node;
typedef struct sim_nic sim_nic;
typedef struct sim_op sim_op;
typedef struct sim_flow sim_flow;
typedef struct sim_expect sim_expect;

/* What an event, a line of the trace and a term of the hash are about. */
enum {
    SIM_EV_STEP = 1, /* a: node */
    SIM_EV_TICK,     /* a: node, b: incarnation */
    SIM_EV_WR,       /* a: request, b: token */
    SIM_EV_IMM,      /* a: request, b: token */
    SIM_EV_CONTACT,  /* a: nic, b: incarnation: its contact wants to be called */
    SIM_EV_DATAGRAM, /* a: datagram, b: generation */
    SIM_EV_SUBMIT,   /* a: op, b: generation */
    SIM_EV_CANCEL,   /* a: op, b: generation */
    SIM_EV_EXPECT,   /* a: expectation, b: generation */
    SIM_EV_XCANCEL,  /* a: expectation, b: generation */
    SIM_EV_FLOW,     /* a: flow, b: generation */
    SIM_EV_START,    /* a hand-over begins */
    SIM_EV_FAULT,    /* a: which */
    SIM_EV_HEAL,     /* a: which, b: whom */
    SIM_EV_RECV,     /* a: node, b: incarnation: receive buffers are given back */
    /* of the trace only */
    SIM_TR_POST = 32,
    SIM_TR_LAND,
    SIM_TR_OP,
    SIM_TR_RAISED,
    SIM_TR_SUBMITTED,
    SIM_TR_ENDED,
    SIM_TR_FIRED,
    SIM_TR_MESSAGE,
    SIM_TR_PEER
};

enum {
    SIM_FAULT_STALL = 0,
    SIM_FAULT_LINK,
    SIM_FAULT_NIC,
    SIM_FAULT_CRASH,
    SIM_FAULT_CLOSE,
    SIM_FAULT_PAUSE,
    SIM_FAULT_CLOCK,
    SIM_FAULT_CANCEL,
    SIM_FAULT_DEADLINE,
    SIM_FAULT_XCANCEL,
    SIM_FAULT_XDEADLINE,
    SIM_FAULT_DEREG,
    SIM_FAULTS
};

/* ---- the network -------------------------------------------------------------------------------------- */

typedef struct sim_stages { /* when: made in one function (sim_cost), so that a cost model has one place */
    uint64_t read, land, done, imm;
} sim_stages;

enum { SIM_WR_READ = 1, SIM_WR_LAND, SIM_WR_SECOND, SIM_WR_LANDED, SIM_WR_FAILING, SIM_WR_STUCK };

typedef struct sim_wr { /* a request between post and its last effect */
    sim_slot slot;
    fab_wr wr;
    uint32_t op, link, token, imm_token, write;
    uint8_t node, nic, stage, done_pending, imm_pending;
    uint32_t inc, to_node, to_nic, to_inc; /* the sender's incarnation; the receiver */
    int32_t status;
    uint64_t land_at, late_done, late_imm, split;
    void *copy; /* of the source, when it was read early */
    struct sim_wr *prev, *next; /* of the same transfer */
} sim_wr;

enum { SIM_LINK_CONNECTING = 1, SIM_LINK_UP, SIM_LINK_DOWN, SIM_LINK_CLOSED };

typedef struct sim_link {
    uint32_t node, nic, inc; /* the other end */
    uint32_t state;
    int32_t status;
    uint32_t out; /* the contact's number of it; SIM_NONE: closed there */
    uint8_t told; /* the engine knows of its last change */
} sim_link;

typedef struct sim_datagram {
    sim_slot slot;
    uint32_t from, to, len; /* numbers of NICs, bytes */
    uint8_t bytes[FAB_CONTACT_MAX];
} sim_datagram;

typedef struct sim_cqe {
    fab_wc wc;
    uint32_t op; /* of OP and IMM */
} sim_cqe;

typedef struct sim_mr {
    uint64_t off, len, gen;
    uint32_t access, live;
} sim_mr;

typedef struct sim_recv {
    uint64_t id, addr, len;
} sim_recv;

struct sim_nic {
    sim_node *node;
    uint32_t index;
    uint8_t down, down_told, closed;
    uint64_t stalled_until;
    uint32_t sq_used;
    sim_cqe *cq;
    uint32_t cq_count, cq_cap;
    sim_link *links;
    uint32_t nlinks, links_cap, links_seen;
    fab_contact *contact;
    uint64_t contact_at; /* when it wants to be called; 0: not yet known */
    uint32_t contacts;   /* made so far */
    uint32_t *inbox, ninbox, inbox_cap; /* datagrams that came */
    sim_mr mrs[SIM_MRS];
    sim_recv *recvs;
    uint32_t nrecvs;
    sim_port port; /* of its cost model */
};

/* ---- nodes -------------------------------------------------------------------------------------------- */

typedef struct sim_region { /* a piece of a node's memory, lent to one transfer */
    sim_slot slot;
    uint64_t off, size;
    uint32_t owner, next; /* op; the next free one of its class */
    uint32_t cls;
} sim_region;

typedef struct sim_box { /* what should be in an immediate's counter */
    uint32_t imm;
    uint8_t in_use, dirty;
    uint64_t units, consumed; /* handed to the engine; claimed by expectations that fired */
    sim_expect *first, *last; /* in the order they were made */
} sim_box;

typedef struct sim_view { /* what a node knows of another */
    uint32_t inc;
    int64_t peer, remote;
    uint64_t mr_gen;
} sim_view;

typedef struct sim_bound {
    uint64_t handle;
    uint32_t op;
} sim_bound;

struct sim_node {
    sim_world *world;
    uint32_t index, inc, nnics;
    uint8_t alive, closing;
    fab_engine *engine;
    sim_nic nic[FAB_MAX_NICS];
    uint64_t step_at, paused_until, awake_since, tick;
    uint64_t down_since; /* of the last incarnation's end */
    char *arena;
    sim_slab regions;
    uint32_t free_regions[64]; /* by class */
    uint64_t arena_used;
    int64_t memory, old_memory; /* handle of the registration, and of the one that goes (0: none) */
    fab_mr_keys keys[FAB_MAX_NICS];
    uint64_t mr_gen; /* counts registrations */
    sim_view view[SIM_NODES];
    sim_box *boxes; /* by slot */
    uint32_t *dirty_boxes, ndirty_boxes;
    uint64_t strays; /* units that met no owner, as we count them */
    sim_bound *bound; /* by index in the engine's pool */
    uint32_t bound_cap;
    sim_op *submitting; /* its handle is not known yet */
    uint32_t nops;
    sim_op *ops, *dirty_ops; /* live ones; those of which something ended */
    uint64_t ended; /* transfers whose end was seen */
    sim_expect *expects;
    sim_bound *xbound; /* as `bound`, of expectations */
    uint32_t xbound_cap;
    uint64_t held[SIM_HELD]; /* receive buffers not yet given back */
    uint32_t nheld;
    uint64_t messages, messages_seen; /* told by NIC 0; come out as events */
    uint8_t peer_lost, look_all, in_vain;
    uint8_t path_down; /* a path, or a NIC, was lost or refused since this incarnation began: a reason for failures */
    uint8_t lost_told, paths_changed; /* in this call: FAB_EV_PEER_LOST came out; a link or a NIC was told to be lost */
    struct {
        uint32_t node, inc;
    } gone[8]; /* in this call: told to be gone */
    uint32_t ngone;
    sim_cpu cpu; /* its worker's, in the cost model */
};

/* ---- the workload -------------------------------------------------------------------------------------- */

typedef struct sim_place {
    uint32_t node, inc, region, writes;
    uint64_t off; /* in the receiver's memory */
} sim_place;

typedef struct sim_write { /* one logical write: what must land exactly once */
    uint64_t loff, roff, len; /* in the source, in the place, bytes */
    uint64_t landed;
    uint32_t place;
} sim_write;

enum { SIM_OP_NEW = 0, SIM_OP_LIVE, SIM_OP_ENDED, SIM_OP_DEAD };

struct sim_op {
    sim_slot slot;
    uint64_t serial, tag, handle, bytes, deadline, submitted, cancelled_at;
    uint32_t flow, flow_gen, node, inc, state, verb;
    int32_t phase, err, pin;
    uint32_t err_peer; /* whom the outcome names */
    uint32_t nplaces, nwrites, region; /* the source */
    uint64_t src_off;
    uint64_t flag; /* bumped by the engine */
    uint8_t has_imm, notify, use_flag, early_release, released, cancelled, dirty, detached, short_deadline;
    uint8_t put_off; /* how often the engine was full: it is asked again later and later */
    uint32_t events, messages;
    uint32_t imm;
    uint64_t soff, sstride, doff, dstride; /* of a paged one */
    uint32_t sidx[SIM_WRITES], didx[SIM_WRITES];
    uint32_t at_nic; /* requests that a NIC took and whose end it has not told */
    uint32_t in_net; /* requests that may still do something */
    uint32_t in_cq; /* immediates that the receiver has not taken */
    uint64_t units_landed, units_handed, units_lost;
    uint64_t errors, posted, wrs_seen;
    uint32_t starved; /* ticks */
    sim_wr *wrs;
    sim_op *prev, *next, *next_dirty;
    sim_place place[SIM_PLACES];
    sim_write write[SIM_WRITES];
};

struct sim_expect {
    sim_slot slot;
    uint32_t flow, flow_gen, node, inc, imm;
    uint64_t count, handle, deadline;
    uint32_t state; /* as of ops */
    int32_t phase, err;
    uint8_t notify, cancelled, with_peers, short_deadline;
    uint32_t events, peer_node, peer_inc;
    uint64_t made;
    sim_expect *prev, *next; /* of the node */
    sim_expect *after; /* in its box */
};

enum { SIM_FLOW_PRIVATE = 1, SIM_FLOW_COMMON, SIM_FLOW_SILENT, SIM_FLOW_MESSAGE };

struct sim_flow {
    sim_slot slot;
    uint32_t kind, receiver, inc, nops, nexpects, ops_left, expects_left;
    uint32_t op[SIM_OPS], expect[SIM_PLACES];
    int64_t imm; /* of the receiver's own, or -1 */
    uint64_t writes; /* logical writes that raise it */
    uint8_t ready, giving_up, waiting;
};

/* ---- the world ---------------------------------------------------------------------------------------- */

typedef struct sim_line {
    uint64_t at, b;
    uint32_t kind, node, a;
} sim_line;

typedef struct sim_counts {
    uint64_t transfers, writes, bytes, events, imms, strays, wrs, steps, done, failed, cancelled, fired, messages,
        lost_peers, refused;
    uint64_t faults[SIM_FAULTS];
} sim_counts;

struct sim_world {
    uint64_t now, seed, hash;
    sim_options opt;
    sim_rand net, load, faults;
    sim_heap heap;
    bool failed, settling;
    char violation[512];
    sim_node nodes[SIM_NODES];
    uint32_t nnodes;
    sim_slab wrs, ops, flows, expects, datagrams;
    uint32_t *ready; /* flows to look at */
    uint32_t nready, ready_cap, live_flows;
    uint32_t token;
    uint64_t serial;
    uint64_t cut_until[SIM_NODES][FAB_MAX_NICS][SIM_NODES][FAB_MAX_NICS];
    sim_counts counts;
    sim_line trace[SIM_TRACE];
    uint64_t lines;
};

/* note.c */
void sim_fail(sim_world *w, const char *checker, const char *format, ...) __attribute__((format(printf, 3, 4)));
size_t sim_trace_text(const sim_world *w, char *out, size_t cap);

static inline void sim_note(sim_world *w, uint32_t kind, uint32_t node, uint32_t a, uint64_t b) {
    uint64_t h = w->hash ^ (w->now * 0x9e3779b97f4a7c15ull);
    h = (h ^ ((uint64_t)kind << 56 | (uint64_t)node << 48 | a)) * 0xff51afd7ed558ccdull;
    h = ((h >> 32) ^ h ^ b) * 0xc4ceb9fe1a85ec53ull;
    w->hash = h ^ h >> 29;
    w->trace[w->lines++ % SIM_TRACE] = (sim_line){.at = w->now, .kind = kind, .node = node, .a = a, .b = b};
    w->counts.events++;
}

/* Two events at one time come in an order that the network's dice decide. */
static inline void sim_at(sim_world *w, uint64_t at, uint32_t kind, uint32_t a, uint32_t b) {
    sim_heap_push(&w->heap, (sim_event){.at = at, .tie = (uint32_t)sim_next(&w->net), .kind = kind, .a = a, .b = b});
}

/* options.c */
void sim_options_of(uint64_t seed, sim_options *out);

/* cq.c */
void sim_cq_push(sim_nic *nic, const fab_wc *wc, sim_op *op);
void sim_cq_forget_link(sim_nic *nic, uint32_t link);
void sim_cq_clear(sim_nic *nic);
int sim_cq_poll(sim_nic *nic, fab_wc *wc, uint32_t cap);

/* domain.c */
extern const fab_domain_ops sim_ops;
sim_mr *sim_mr_of(sim_nic *nic, uint64_t key); /* NULL: no such key now */

/* net.c, cost.c */
void sim_cost(sim_world *w, sim_nic *from, sim_nic *to, const fab_wr *wr, sim_stages *out);
void sim_cost_polled(sim_nic *nic, uint32_t completions);
void sim_net_post(sim_nic *nic, uint32_t link, const fab_wr *wr, sim_op *op, uint32_t write);
void sim_net_event(sim_world *w, uint32_t index, uint32_t token);
void sim_net_imm(sim_world *w, uint32_t index, uint32_t token);
void sim_net_cancel(sim_nic *nic, sim_op *op);
void sim_net_cut(sim_nic *nic, uint32_t link, int32_t status); /* link: or SIM_NONE for all of the NIC's */
void sim_net_drop(sim_nic *nic); /* its owner is gone: no completions any more */

/* link.c */
int sim_link_open(sim_nic *nic, const char *addr, size_t len, uint32_t *peer);
void sim_link_close(sim_nic *nic, uint32_t link);
void sim_link_down(sim_nic *nic, uint32_t link, int32_t status);
void sim_link_forget(sim_nic *nic, uint32_t link); /* at the contact: no word of it any more */

/* contact.c */
void sim_contact_start(sim_nic *nic);
void sim_contact_stop(sim_nic *nic, bool farewell);
void sim_contact_poll(sim_nic *nic);
void sim_contact_due(sim_world *w, uint32_t number, uint32_t inc);
void sim_datagram_event(sim_world *w, uint32_t index, uint32_t gen);
static inline uint32_t sim_nic_number(const sim_nic *nic) { return nic->node->index * FAB_MAX_NICS + nic->index; }
static inline sim_nic *sim_nic_at(sim_world *w, uint32_t number) {
    return &w->nodes[number / FAB_MAX_NICS].nic[number % FAB_MAX_NICS];
}

/* node.c */
void sim_node_start(sim_node *n);
void sim_node_end(sim_node *n, bool crash);
void sim_node_step(sim_node *n, uint64_t at);
void sim_node_after(sim_node *n); /* after every call into its engine */
void sim_node_wake(sim_node *n);
void sim_node_tick(sim_node *n, uint32_t inc);
sim_view *sim_node_view(sim_node *n, uint32_t other);
void sim_node_fini(sim_node *n);
void sim_node_register(sim_node *n);
void sim_node_renew(sim_node *n); /* its memory, under new keys */
void sim_node_revoke(sim_node *n);
static inline bool sim_paused(const sim_node *n) { return n->paused_until > n->world->now; }

/* region.c */
sim_region *sim_region_take(sim_node *n, uint64_t size, uint32_t owner);
void sim_region_give(sim_node *n, uint32_t index);
void sim_regions_reset(sim_node *n);
/* what a source holds, and whether a target holds it */
void sim_fill(char *at, uint64_t tag, uint64_t len);
uint64_t sim_verify(const char *at, uint64_t tag, uint64_t pos, uint64_t len); /* UINT64_MAX: all right, or where */

/* load.c, op.c, expect.c, flow.c */
void sim_load_start(sim_world *w);
void sim_flow_ready(sim_world *w, uint32_t flow, uint32_t gen);
void sim_flow_look(sim_world *w, sim_flow *f);
void sim_flow_event(sim_world *w, uint32_t flow, uint32_t gen);
bool sim_op_shape(sim_world *w, sim_op *op, const sim_flow *f, uint32_t sender);
void sim_op_submit(sim_world *w, sim_op *op);
sim_op *sim_op_of(sim_node *n, uint64_t id);
void sim_op_cancel(sim_world *w, sim_op *op);
void sim_op_ended(sim_node *n, sim_op *op, int32_t phase, int32_t err);
void sim_op_dead(sim_op *op, sim_world *w);
void sim_op_let_go(sim_world *w, sim_op *op);
void sim_op_dirty(sim_node *n, sim_op *op);
void sim_expect_make(sim_world *w, sim_expect *x);
void sim_expect_cancel(sim_world *w, sim_expect *x);
void sim_expect_ended(sim_node *n, sim_expect *x, int32_t phase, int32_t err);

/* check_*.c */
sim_op *sim_check_post(sim_nic *nic, const sim_link *link, const fab_wr *wr, uint32_t *write);
bool sim_check_land(sim_world *w, sim_wr *r, sim_op *op, sim_nic *to, uint64_t from, uint64_t len);
void sim_check_op_end(sim_node *n, sim_op *op);
void sim_check_payload(sim_world *w, const sim_op *op, const char *when);
void sim_check_flag(sim_world *w, const sim_op *op);
void sim_check_handed(sim_node *n, uint32_t imm, uint32_t count, sim_op *op);
void sim_check_take_off(sim_node *n, sim_expect *x);
void sim_check_dirty(sim_node *n, uint32_t imm);
void sim_check_boxes(sim_node *n);
void sim_check_expects(sim_node *n);
void sim_check_late(sim_node *n);
void sim_check_peers(sim_node *n);
bool sim_sure_path(const sim_node *n, uint32_t node, uint32_t inc);
bool sim_any_path(const sim_node *n, uint32_t node, uint32_t inc); /* to that incarnation of it */
void sim_check_starved(sim_node *n);
void sim_check_lost(sim_world *w); /* whoever is dead is known to be, in time (R5) */
void sim_check_freed(sim_node *n, uint32_t imm, int64_t surplus);
void sim_check_node_quiet(sim_node *n);
void sim_check_leaks(sim_node *n);
sim_box *sim_box_of(sim_node *n, uint32_t imm);
void sim_check_message(sim_node *n, const fab_event *ev);
void sim_message_make(const sim_op *op, char *out);

/* fault.c */
void sim_faults_start(sim_world *w);
void sim_fault_event(sim_world *w, uint32_t which);
void sim_heal_event(sim_world *w, uint32_t which, uint32_t whom);
void sim_faults_stop(sim_world *w);

#endif
