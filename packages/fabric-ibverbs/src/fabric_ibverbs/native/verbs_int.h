/* verbs_int.h - what the files of the verbs backend share. Include it first.
 *
 * A domain is one port of one device. A UD queue pair carries first contact and heartbeats (fabric/contact.h). Whoever opens
 * a peer gets a *link*: two RC queue pairs here and two there, W for writes and M for messages and what links say to each
 * other. Both directions are links of their own. Two shared receive queues serve all links of a domain:
 *
 *   W   receives without memory, one for each immediate that may be on its way to us. A peer may have as many on their way as
 *       we granted it (credit.c), and all grants together never exceed what is posted: a receive queue that runs
 *       empty would stall its senders, so it never does.
 *   M   buffers of FV_MBUF bytes, with a credit of their own (chan.c).
 *
 * Completion queues are sized by the same credits, so that none can overrun.
 *
 * Everything is called under the engine's group lock; only mr.c and the threads of dest.c are not. */
#ifndef FAB_VERBS_INT_H
#define FAB_VERBS_INT_H

#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include "cdef_verbs.h"
#include "fabric/backend.h"
#include "fabric/contact.h"
#include "fabric/domain.h"

#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FV_WIRE 2u              /* version of the links: the bodies of the handshake, and what M carries */
#define FV_CHAIN 64u            /* requests that one call of the library takes at most */
#define FV_SIGNAL 16u           /* at least every so many writes a completion is asked for */
#define FV_GUARANTEED 16u       /* writes in flight that a peer may have however busy the others are */
#define FV_MBUF 4096u           /* bytes of a message buffer */
#define FV_MWINDOW 8u           /* of those that the other side may have sent before it hears from us */
#define FV_MRX \
    (FV_MWINDOW + 4u) /* buffers posted per link: credit messages are not counted, at most 4 can be on their way */
#define FV_MTX 16u              /* sends in flight per link: what waits for a credit leaves 4 for credit messages */
#define FV_MSGS 16u             /* messages per link that nobody has taken yet */
#define FV_SENDS 8192u          /* messages of the engine that wait here per link */
#define FV_MAX_SEND (64u << 10)
#define FV_RECVS 4096u          /* receives of the engine */
#define FV_WSPARE 64u           /* receives of W beyond all grants */
#define FV_WTOP_UP 16u          /* of W: so many are posted again together */
#define FV_WCREDITS 4u          /* ... and those for the credits that a peer of ours returns */
#define FV_MSPARE 16u
#define FV_WINDOW_MIN 8u
#define FV_WINDOW_MAX 1024u
#define FV_UD_RX 256u
#define FV_UD_TX 64u
#define FV_UD_BYTES 1024u       /* 40 of GRH, our prefix, a datagram of the contact */
#define FV_GRH 40u
#define FV_DESTS 4096u
#define FV_MOST_GID 255            /* verbs has 8 bits for the index in a path */
#define FV_MAKERS 16u             /* threads that make ways to ports, at most */
#define FV_DEST_PAUSE_NS 200000000u /* after a way could not be made */
#define FV_DEAD_KEYS 64u
#define FV_GRAVE_NS 100000000ull  /* how long a queue pair in error is left, so that its completions come out */
#define FV_DRAIN_NS 2000000000ull /* ... at the longest, if they do not */
#define FV_EVENTS_NS 2000000ull   /* how often asynchronous events are looked for */
#define FV_LINK_CQES (FV_MTX + FV_MRX + 1u) /* completions of a link that may be in the CQ for control at a time */

/* ---- lists ------------------------------------------------------------------------------------ */
typedef struct fv_node {
    struct fv_node *prev, *next;
} fv_node;
#define FV_OF(node, type, member) ((type *)(void *)((char *)(node) - offsetof(type, member)))
static inline void fv_list_init(fv_node *l) { l->prev = l->next = l; }
static inline bool fv_list_empty(const fv_node *l) { return l->next == l; }
static inline void fv_list_add(fv_node *l, fv_node *n) {
    n->prev = l->prev;
    n->next = l;
    l->prev->next = n;
    l->prev = n;
}
static inline void fv_list_del(fv_node *n) {
    n->prev->next = n->next; /* NOLINT: clang's analyzer does not see that this changes n's neighbours */
    n->next->prev = n->prev;
    n->prev = n->next = n;
}

/* ---- the library: what it exports; the rest goes through the tables of a context ------------------ */
#define FV_LIB(X)                                                                                      \
    X(get_device_list, struct ibv_device **, (int *))                                                  \
    X(free_device_list, void, (struct ibv_device **))                                                  \
    X(get_device_name, const char *, (struct ibv_device *))                                            \
    X(open_device, struct ibv_context *, (struct ibv_device *))                                        \
    X(close_device, int, (struct ibv_context *))                                                       \
    X(query_device, int, (struct ibv_context *, struct ibv_device_attr *))                             \
    X(query_gid, int, (struct ibv_context *, uint8_t, int, union ibv_gid *))                           \
    X(query_pkey, int, (struct ibv_context *, uint8_t, int, __be16 *))                                 \
    X(alloc_pd, struct ibv_pd *, (struct ibv_context *))                                               \
    X(dealloc_pd, int, (struct ibv_pd *))                                                              \
    X(reg_mr, struct ibv_mr *, (struct ibv_pd *, void *, size_t, int))                                 \
    X(dereg_mr, int, (struct ibv_mr *))                                                                \
    X(create_comp_channel, struct ibv_comp_channel *, (struct ibv_context *))                          \
    X(destroy_comp_channel, int, (struct ibv_comp_channel *))                                          \
    X(create_cq, struct ibv_cq *, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
    X(destroy_cq, int, (struct ibv_cq *))                                                              \
    X(get_cq_event, int, (struct ibv_comp_channel *, struct ibv_cq **, void **))                       \
    X(ack_cq_events, void, (struct ibv_cq *, unsigned int))                                            \
    X(create_srq, struct ibv_srq *, (struct ibv_pd *, struct ibv_srq_init_attr *))                     \
    X(destroy_srq, int, (struct ibv_srq *))                                                            \
    X(modify_srq, int, (struct ibv_srq *, struct ibv_srq_attr *, int))                                 \
    X(create_qp, struct ibv_qp *, (struct ibv_pd *, struct ibv_qp_init_attr *))                        \
    X(modify_qp, int, (struct ibv_qp *, struct ibv_qp_attr *, int))                                    \
    X(query_qp, int, (struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *))          \
    X(destroy_qp, int, (struct ibv_qp *))                                                              \
    X(create_ah, struct ibv_ah *, (struct ibv_pd *, struct ibv_ah_attr *))                             \
    X(destroy_ah, int, (struct ibv_ah *))                                                              \
    X(get_async_event, int, (struct ibv_context *, struct ibv_async_event *))                          \
    X(ack_async_event, void, (struct ibv_async_event *))
typedef struct fv_lib {
#define X(name, result, args) result(*name) args;
    FV_LIB(X)
#undef X
    /* newer than the oldest library that will do; NULL where it lacks them */
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
    ssize_t (*query_gid_table)(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t);
    void *handle;
} fv_lib;
extern fv_lib fv_ibv;
int fv_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *out);
struct ibv_context *fv_open_device(const char *name, char *err, uint32_t cap);

/* ---- wr_id: whose completion it is. Of a bad one, only this, status, qp_num and vendor_err are defined. ----------- */
enum { FV_K_WRITE = 1, FV_K_CREDIT, FV_K_IMM, FV_K_MTX, FV_K_MRX, FV_K_UDTX, FV_K_UDRX };
#define FV_WRID(kind, index, seq) ((uint64_t)(kind) << 56 | (uint64_t)(index) << 32 | (uint32_t)(seq))
static inline uint32_t fv_kind(uint64_t id) { return (uint32_t)(id >> 56); }
static inline uint32_t fv_index(uint64_t id) { return (uint32_t)(id >> 32) & 0xffffffu; }

/* ---- where a peer is ---------------------------------------------------------------------------- */
typedef struct fv_addr { /* of a UD queue pair, as the contact knows it: equal addresses are equal bytes */
    uint8_t gid[16];
    uint32_t qpn, qkey;
    uint16_t lid, pad;
} fv_addr;

enum { FV_DEST_NEW, FV_DEST_ASKED, FV_DEST_READY, FV_DEST_FAILED };
typedef struct fv_dest { /* the way to a port: making it may wait for the neighbour's answer, so threads do that */
    fv_node node;  /* in its bucket */
    fv_node queue; /* for the threads */
    uint8_t gid[16];
    uint16_t lid;
    uint32_t state, refs; /* refs: links, and datagrams in flight */
    uint32_t flying;      /* ... of these the datagrams */
    bool stale;           /* made with an address that was taken from us since: made anew before it is used */
    struct ibv_ah *ah;
    uint64_t failed;      /* when */
    uint64_t used;
    fv_addr wait_to;      /* a datagram that waits: the last one, which counts (the contact resends) */
    uint32_t wait_len;
    uint8_t wait[FV_UD_BYTES];
} fv_dest;

/* ---- queue pairs ---------------------------------------------------------------------------------- */
enum { FV_W_OUT, FV_W_IN, FV_M };
typedef struct fv_link fv_link;
typedef struct fv_qp {
    struct ibv_qp *qp;
    fv_link *link; /* NULL: buried */
    fv_node node;  /* in dom.grave */
    fv_node flying; /* M: its sends */
    struct fv_qp *chain; /* in the table of numbers */
    uint32_t num, psn, role, mtu_shift; /* mtu_shift: a packet carries 1 << this bytes */
    uint64_t buried;
    bool error;
} fv_qp;

typedef struct fv_tx { /* a buffer of an M send */
    fv_node node; /* free, or in qp.flying */
    uint8_t *data;
    uint32_t index, lkey, gen;
    fv_qp *qp;
} fv_tx;

typedef struct fv_slab {
    struct fv_slab *next;
    struct ibv_mr *mr;
    uint8_t *memory;
} fv_slab;

typedef struct fv_rx { /* a buffer of M's shared receive queue */
    uint8_t *data;
    uint32_t lkey;
} fv_rx;

/* ---- what M carries ---------------------------------------------------------------------------------- */
enum {
    FV_T_MSG = 1,  /* a: number; off, total; bytes. In order, each starts at off 0 */
    FV_T_WITHDRAW, /* a: do not take it any more */
    FV_T_TAKEN,    /* a; status */
    FV_T_CREDIT,   /* returned, nothing else; not counted itself */
    FV_T_MEND,     /* off: number of a new W, total: its PSN; a: the key that was refused, or 0; pad: FV_UNSURE */
    FV_T_MENDED, /* the same of the other side's; a: grant; status: -EKEYREVOKED if there is no such key; pad, if the
                    * other was unsure: the PSN that the old W waited for, with FV_REFUSED if it had refused that */
    FV_T_COUNT
};
#define FV_UNSURE 1u
#define FV_REFUSED (1u << 31)
#define FV_PSN(n) ((n) & 0xffffffu)
typedef struct fv_hdr { /* little endian, as all our machines are */
    uint32_t type, returned;
    uint64_t a;
    uint32_t off, total;
    int32_t status;
    uint32_t pad;
} fv_hdr;
#define FV_FRAGMENT (FV_MBUF - (uint32_t)sizeof(fv_hdr))

typedef struct fv_hello { /* body of CONFIRM and ACCEPT */
    uint32_t version, flags;
    uint8_t gid[16];
    uint32_t w_qpn, w_psn, m_qpn, m_psn;
    uint32_t window, m_window, msgs, mtu; /* window: granted immediates; mtu: enum ibv_mtu */
    uint32_t lid, pad;
} fv_hello;

/* ---- messages ------------------------------------------------------------------------------------------ */
typedef struct fv_send {
    fv_node node;
    uint64_t id, addr, len, seq;
    uint32_t state, off;
    bool withdrawn;
} fv_send;
enum { FV_S_QUEUED, FV_S_ACTIVE, FV_S_SENT };

typedef struct fv_inmsg {
    fv_node node; /* in link.held */
    fv_node global; /* in dom.held, in the order of arrival */
    fv_link *link;
    uint64_t seq;
    uint32_t total, got;
    uint8_t data[];
} fv_inmsg;

typedef struct fv_recv {
    uint64_t id, addr, len;
} fv_recv;

/* ---- links ------------------------------------------------------------------------------------------------ */
enum { FV_OPENING, FV_UP, FV_BREAKING, FV_MENDING, FV_CUT };
struct fv_link {
    struct fv_dom *dom;
    fv_dest *dest;
    fv_addr addr;
    bool out, closing;
    uint32_t id; /* out: the engine's peer; in: the contact's number */
    uint32_t contact; /* out: the contact's number */
    uint32_t index; /* in dom.links */
    uint32_t state;
    int32_t status; /* CUT: why */
    uint64_t since; /* CUT: when */
    fv_qp *w, *m;
    fv_hello theirs;
    enum ibv_mtu mtu; /* ours, as theirs.mtu is theirs */
    fv_node busy; /* in dom.busy while there is something to send */
    /* out, W: requests in flight, by sequence number; see post.c */
    fab_wr *ring;
    uint32_t head, tail, nredo;
    fab_wr *redo; /* MENDING: requests that the broken queue pair did not execute, or, if unsure, may have executed */
    uint32_t psn; /* of the request at head, or if unsure of the first to redo */
    bool unsure; /* BREAKING, MENDING: acknowledgements ran out; the other side is asked what it executed */
    bool stuck; /* so it was the last time, and nothing has ended well since */
    uint32_t imm_sent, imm_limit;
    uint64_t suspect; /* BREAKING, MENDING: the key of the refused write */
    uint64_t dead_keys[FV_DEAD_KEYS];
    uint32_t ndead;
    /* in, W: immediates that came, what of it the peer knows, how many it may have on their way */
    uint32_t imm_got, imm_told, window;
    bool credit_due, credit_flying;
    /* M */
    uint32_t m_sent, m_limit, m_got, m_told, m_flying;
    fv_hdr ctl[64];
    uint32_t ctl_head, ctl_tail;
    /* out: messages */
    fv_node sends, sent; /* waiting (the first may be half sent); sent and not taken */
    uint32_t nsends, nsent;
    uint64_t seq;
    /* in: messages */
    fv_inmsg *partial;
    fv_node held;
    uint32_t nheld;
};

enum { /* counted: fab_domain_ops.counters */
       FV_R_MALFORMED, /* datagrams and messages that make no sense */
       FV_R_AUTH, /* handshakes without our secret, or with another one */
       FV_R_REVOKED, /* writes of ours that the peer's NIC refused */
       FV_R_CQ_ERRORS, /* completions with an error, flushes aside */
       FV_R_STRAY, /* completions of what is gone */
       FV_R_MENDED, /* queue pairs replaced after a refused write, or one whose answer got lost */
       FV_R_ASKED, /* ... of these: how often the other side was asked what it had executed */
       FV_R_EVENTS, /* asynchronous events */
       FV_R_FULL, /* peers refused because the queues could not serve more */
       FV_R_CREDITS, /* credits returned to writers */
       FV_R_STALLS, /* writes that waited for a credit */
       FV_R_LOST_RX, /* receives that a queue pair took with it when it broke, and that were replaced */
       FV_R_COUNT
};

typedef struct fv_reg {
    struct ibv_mr *mr; /* NULL: free */
    uint64_t remote_key;
} fv_reg;

typedef struct fv_mrs { /* registrations by index: any thread */
    pthread_mutex_t mu;
    fv_reg *at;
    uint32_t n, cap, nfree, free_hint;
} fv_mrs;

typedef struct fv_dom {
    fab_verbs_cfg cfg;
    const fab_contact_api *capi;
    fab_contact *contact;
    uint64_t now, contact_due, events_due;
    struct ibv_context *ctx;
    struct ibv_device_attr attr;
    struct ibv_port_attr port;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *scq, *rcq, *mcq; /* writes; immediates; everything else */
    struct ibv_srq *wsrq, *msrq;
    union ibv_gid gid;
    uint32_t gid_kind;
    fv_addr self;
    char address[192];
    bool ethernet, down, broken, closed;
    uint32_t scq_size, wsrq_size, inline_bytes;
    uint32_t max_links, most_links; /* each way; both ways together */

    struct ibv_qp *ud;
    uint8_t *ud_memory;
    struct ibv_mr *ud_mr;
    uint32_t ud_free[FV_UD_TX], ud_nfree;
    fv_dest *ud_dest[FV_UD_TX];
    uint32_t ud_posted; /* receives */
    bool ud_bad;        /* it broke: it starts again once all that it held has come back */

    int ep_fd, wake_fd, timer_fd;
    bool armed;
    bool hurried; /* the last look found immediates, and left the rest to the next */
    uint32_t looks;

    fab_wc_ring wcq; /* what poll hands out next */

    fv_node dests[256];
    uint32_t ndests;
    pthread_mutex_t dest_mu; /* for what follows, save dests_done */
    pthread_cond_t dest_cond;
    pthread_t makers[FV_MAKERS];
    uint32_t nmakers, nidle, ndest_jobs;
    fv_node dest_queue, dest_again, dest_done; /* not tried yet; failed before; made, or not */
    bool dest_stop;
    _Atomic uint32_t dests_done;

    fv_qp *qps[4096]; /* by number */
    fv_node grave;
    uint32_t nlinks, links_cap, scq_used, w_granted, w_posted, mrx_posted, m_spare;
    fv_link **links; /* by index: what a completion names */
    fv_link **peers; /* by the engine's number */
    fv_link **by_out, **by_in; /* by the contact's numbers */
    uint32_t npeers, ncut;
    fv_node busy;

    fv_tx **txs;
    uint32_t ntxs;
    fv_node tx_free;
    fv_slab *slabs;
    fv_rx *rxs;
    uint32_t nrxs;

    fv_node held;
    fv_recv recvs[FV_RECVS];
    uint32_t recv_head, recv_tail;

    fv_mrs mrs;
    _Atomic uint64_t counts[FV_R_COUNT];
} fv_dom;

static inline void fv_count(fv_dom *d, uint32_t what, uint64_t n) {
    atomic_fetch_add_explicit(&d->counts[what], n, memory_order_relaxed); /* a count */
}

/* ---- functions, by file --------------------------------------------------------------------------------- */
/* address.c */
int fv_address_text(const fv_addr *a, uint64_t incarnation, char *buf, size_t cap);
int fv_address_parse(const char *text, size_t len, fv_addr *out, uint64_t *incarnation);
uint64_t fv_clock(void);
uint64_t fv_random(void);
/* gid.c */
int fv_gid_open(fv_dom *d);
bool fv_gid_there(fv_dom *d);
/* dest.c */
int fv_dests_start(fv_dom *d);
void fv_dests_stop(fv_dom *d);
fv_dest *fv_dest_get(fv_dom *d, const fv_addr *a);
void fv_dest_ask(fv_dom *d, fv_dest *t);
void fv_dests_look(fv_dom *d);
void fv_dests_thin(fv_dom *d, bool all);
void fv_dests_stale(fv_dom *d);
void fv_ah_attr(const fv_dom *d, const uint8_t gid[16], uint16_t lid, struct ibv_ah_attr *out);
/* datagram.c */
int fv_ud_open(fv_dom *d);
void fv_ud_close(fv_dom *d);
void fv_ud_send(fv_dom *d, const fv_addr *to, const void *msg, uint32_t len);
void fv_ud_put(fv_dom *d, fv_dest *t);
void fv_ud_received(fv_dom *d, uint32_t index, uint32_t bytes, uint32_t src_qp, bool ok);
void fv_ud_sent(fv_dom *d, uint32_t index, bool ok);
void fv_ud_broke(fv_dom *d);
void fv_ud_restart(fv_dom *d);
/* qp.c */
fv_qp *fv_qp_new(fv_link *l, uint32_t role);
enum ibv_mtu fv_mtu(const fv_dom *d);
int fv_qp_connect(fv_qp *q, const fv_hello *h, uint32_t qpn, uint32_t psn);
void fv_qp_error(fv_qp *q);
void fv_qp_bury(fv_dom *d, fv_qp *q);
void fv_qp_destroy(fv_dom *d, fv_qp *q);
void fv_grave_look(fv_dom *d, bool all);
fv_qp *fv_qp_find(fv_dom *d, uint32_t num);
/* chan.c */
int fv_mrx_grow(fv_dom *d, uint32_t n);
int fv_mrx_repost(fv_dom *d, uint32_t index);
void fv_tx_free(fv_dom *d, fv_tx *t);
void fv_tx_done(fv_dom *d, uint32_t index, uint32_t gen);
int fv_ctl(fv_link *l, const fv_hdr *h);
void fv_link_busy(fv_link *l);
void fv_chan_work(fv_link *l);
void fv_chan_in(fv_link *l, const uint8_t *data, uint32_t len);
void fv_chan_free(fv_dom *d);
/* message.c */
bool fv_send_next(fv_link *l, fv_hdr *h, const uint8_t **data, uint32_t *len);
int fv_send_add(fv_link *l, const fab_wr *wr);
void fv_sends_end(fv_link *l, int32_t status);
void fv_sends_cancel(fv_link *l, uint64_t id);
void fv_taken(fv_link *l, const fv_hdr *h);
int fv_in_message(fv_link *l, const fv_hdr *h, const uint8_t *data, uint32_t len);
void fv_in_withdraw(fv_link *l, uint64_t seq);
void fv_in_free(fv_link *l);
void fv_match(fv_dom *d);
int fv_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len);
/* credit.c */
int fv_wsrq_fill(fv_dom *d);
int fv_wsrq_top_up(fv_dom *d);
int fv_srq_watch(struct ibv_srq *srq, uint32_t spare);
void fv_srq_low(fv_dom *d, const struct ibv_srq *srq);
uint32_t fv_window_grant(fv_dom *d);
void fv_credit_in(fv_link *l);
void fv_credit_return(fv_link *l);
void fv_credit_came(fv_link *l, uint32_t limit);
/* link.c */
int fv_contact_start(fv_dom *d);
int fv_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer);
int fv_peer_close(void *ctx, uint32_t id);
void fv_link_lose(fv_link *l, int32_t status);
void fv_links_look(fv_dom *d);
void fv_links_lose(fv_dom *d, int32_t status);
void fv_links_free(fv_dom *d);
/* post.c */
int fv_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n);
int fv_cancel(void *ctx, uint64_t id);
void fv_write_done(fv_dom *d, uint64_t wr_id);
void fv_write_failed(fv_dom *d, uint64_t wr_id, enum ibv_wc_status status, uint32_t vendor);
void fv_ring_end(fv_link *l, int32_t status);
int fv_ring_post(fv_link *l, const fab_wr *wr, uint32_t n);
void fv_ring_again(fv_link *l, const fab_wr *wr, uint32_t n);
void fv_write_end(fv_link *l, const fab_wr *w, int32_t status);
uint32_t fv_packets(const fv_link *l, const fab_wr *w);
bool fv_key_dead(const fv_link *l, const fab_wr *w);
/* mend.c */
void fv_mend_begin(fv_link *l);
void fv_mend_asked(fv_link *l, const fv_hdr *h);
void fv_mended(fv_link *l, const fv_hdr *h);
/* cq.c */
uint32_t fv_cqs_drain(fv_dom *d, uint32_t cap);
void fv_imms_drain(fv_dom *d);
void fv_progress(fv_dom *d, uint64_t now, uint32_t cap);
void fv_woken(fv_dom *d);
/* event.c */
void fv_events(fv_dom *d);
/* mr.c */
int fv_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out);
int fv_mr_dereg(void *ctx, uint64_t local_key);
bool fv_mr_known(fv_dom *d, uint64_t remote_key);
void fv_mrs_free(fv_dom *d);
#define FV_KEY_DEVICE (1ull << 63) /* in a local key: memory that the CPU cannot read, never inline */
/* gpu.c */
struct ibv_mr *fv_reg_gpu(fv_dom *d, const fab_mr *mr, int access);
/* domain.c */
void fv_wake(fv_dom *d);
int fv_sleep_setup(fv_dom *d);
void fv_domain_free(fv_dom *d);

#endif
