/* efa_int.h - what the files of the libfabric backend share. Include it first.
 *
 * A domain is one libfabric endpoint with its CQ and address vector ("the main endpoint"). It receives everything: first
 * contact, messages, and what peers write into our memory. What we send to a peer leaves by an endpoint of that peer's
 * own where the provider can hang with it (tcp, shm), else by the main one; decision 0006 says why.
 *
 * Everything here is done under the domain's mutex: the engine's calls come one at a time anyhow, and registrations, which
 * may come from any thread, are let in between two polls. */
#ifndef FAB_EFA_INT_H
#define FAB_EFA_INT_H

#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include "cdef_efa.h"
#include "fabric/backend.h"
#include "fabric/contact.h"
#include "fabric/domain.h"

#include <errno.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FE_OPS 1024u             /* requests in flight per peer, so that one peer's cannot crowd out another's */
#define FE_MSGS 32u              /* messages on their way per peer: what a receiver must be ready to hold */
#define FE_MAX_SEND (64u << 10)  /* bytes of one message of the engine */
#define FE_BIG 8192u             /* bytes of a datagram: below every provider's limit for messages (EFA: one MTU) */
#define FE_SMALL 704u            /* ... of those that carry control only */
#define FE_RX 128u               /* posted receives of a domain; refilled at each poll */
#define FE_RECVS 4096u           /* receives of the engine */
#define FE_CHAN 32u              /* datagrams that a provider is given at a time for one destination */
#define FE_CONTACTS 16u          /* first-contact datagrams to one destination that may wait: it resends by itself */
#define FE_DESTS 8192u           /* addresses known at a time */
#define FE_LEASES 64u            /* buckets */
#define FE_PIECE (1ull << 20) /* bytes of one write where the processor copies: no poll takes long, and caches serve */
/* Bytes in flight to one peer there. The receiver's provider may copy all that has come in one call (shm), in which nobody
 * else of its process gets on; and a core's own worker takes a poller for gone after 10 ms. */
#define FE_FLYING (8 * FE_PIECE)
#define FE_SLAB 64u
#define FE_ADDRESS 256u /* bytes of an address as text */
#define FE_WORDS 384u /* ... of what a provider says of an error */
#define FE_WIRE 1u /* version of what follows the contact */
#define FE_GRAVE_NS 1000000000ull
#define FE_VAIN 64u /* wake-ups for nothing in a row: so many are no coincidence */
/* How often a provider is looked at whose wake-ups mean nothing: after something came, and when nothing has for a while. */
#define FE_DEAF_MIN_NS 20000ull
#define FE_DEAF_NS 4000000ull
#define FE_REST_NS 6000ull /* so long short writes may gather, where a look costs their sender time */
#define FE_STREAM_NS 10000ull /* ... if the one before came so recently */
#define FE_RETRY_NS 1000000ull /* how soon to look again at what a provider had no room for */

/* ---- lists ------------------------------------------------------------------------------------ */
typedef struct fe_node {
    struct fe_node *prev, *next;
} fe_node;
#define FE_OF(node, type, member) ((type *)(void *)((char *)(node) - offsetof(type, member)))
static inline void fe_list_init(fe_node *l) { l->prev = l->next = l; }
static inline bool fe_list_empty(const fe_node *l) { return l->next == l; }
static inline void fe_list_add(fe_node *l, fe_node *n) {
    n->prev = l->prev;
    n->next = l;
    l->prev->next = n;
    l->prev = n;
}
static inline void fe_list_del(fe_node *n) {
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->prev = n->next = n;
}

/* ---- the library ------------------------------------------------------------------------------ */
typedef struct fe_lib {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    uint32_t (*version)(void);
    const char *(*strerror)(int);
    char *(*tostr)(const void *, enum fi_type);
    uint32_t api; /* what we ask for: the older of the library's and the newest that we know */
} fe_lib;
extern fe_lib fe_fi;

/* ---- signal handlers that must not change ------------------------------------------------------- */
#define FE_SIGNALS 32
typedef struct fe_signals {
    struct sigaction action[FE_SIGNALS];
    bool valid[FE_SIGNALS];
} fe_signals;
void fe_signals_keep(fe_signals *before);
void fe_signals_restore(const fe_signals *before);

int fe_info_get(const char *provider, const char *domain, const char *source, struct fi_info **out);
bool fe_hangs(const char *provider);
void fe_fail(char *err, uint32_t cap, const char *what, int rc);
int32_t fe_errno(int e);
int32_t fe_lost(int32_t status);

/* ---- what a provider holds, by its context ------------------------------------------------------ */
enum { FE_CTX_OP = 1, FE_CTX_TX = 2, FE_CTX_RX = 3 };
typedef struct fe_ctx {
    struct fi_context2 fi; /* first: the provider's pointer to it is the pointer to ours (FI_CONTEXT2) */
    uint32_t kind;
} fe_ctx;

typedef struct fe_buf { /* a datagram */
    fe_ctx ctx;
    fe_node node;
    struct fe_chan *chan; /* TX: where it flies or waits */
    struct fe_pool *pool;
    uint8_t *data;
    void *desc;
    uint64_t since; /* TX: when it began to wait */
    uint32_t len;
    bool contact; /* may be lost */
} fe_buf;

typedef struct fe_slab {
    struct fe_slab *next;
    struct fid_mr *mr;
    uint8_t *memory;
    fe_buf bufs[FE_SLAB];
} fe_slab;
typedef struct fe_pool {
    fe_node free;
    fe_slab *slabs;
    uint32_t size, kind;
} fe_pool;

typedef struct fe_chan { /* one way to one address */
    struct fid_ep *ep;
    fi_addr_t to;
    fe_node waiting, flying;
    fe_node stuck; /* in fe_dom.stuck while anything waits */
    uint32_t nflying, nwaiting;
    struct fe_peer *peer; /* NULL: of a dest */
    struct fe_dest *dest;
} fe_chan;

typedef struct fe_dest { /* an address of a main endpoint, and the way there from ours */
    fe_chan chan;
    fe_node node; /* in its bucket */
    uint32_t refs, len;
    uint64_t used;
    uint8_t name[FAB_CONTACT_ADDR];
} fe_dest;

/* ---- our memory --------------------------------------------------------------------------------- */
typedef struct fe_mr {
    struct fid_mr *fid;
    void *desc;
    uint64_t token; /* the remote key of descriptors; 0: free */
    uint64_t va, len, key, base;
    uint32_t access, gen, next_free;
    bool closing;
    uint32_t *holders; /* inbound links that hold a lease */
    uint32_t nholders, cap;
} fe_mr;

/* ---- peers that we opened ------------------------------------------------------------------------- */
enum { FE_OP_FREE, FE_OP_LEASE, FE_OP_TODO, FE_OP_FLYING, FE_OP_SENDQ, FE_OP_SENT };
typedef struct fe_op {
    fe_ctx ctx;
    fe_node node; /* on its lease, in todo or sends */
    fab_wr wr;
    struct fe_peer *peer;
    struct fe_lease *lease;
    struct fe_op *next_free;
    uint16_t state, msg;
} fe_op;

enum { FE_LEASE_ASKED, FE_LEASE_READY, FE_LEASE_REVOKED };
typedef struct fe_lease { /* the right to write into one registration of the peer: what its key is to the provider */
    struct fe_lease *next;
    uint64_t token, key, base, va, len;
    fe_node waiting; /* ops until it is READY */
    uint32_t flying, state;
} fe_lease;

enum { FE_OPENING, FE_UP, FE_DEAD };
typedef struct fe_peer {
    struct fe_dom *dom;
    fe_dest *dest;
    struct fid_ep *ep; /* its own, or NULL: the main one */
    fe_chan chan;
    uint32_t id, out, state;
    int32_t fail; /* to be lost for this reason, at the next look */
    bool closing;
    uint64_t mine, theirs; /* sessions: who does not know them cannot speak on this link */
    uint32_t their_link;
    uint64_t want_inc, since; /* of an open that has to wait */
    bool retry;
    fe_op *ops, *free;
    uint32_t used, flying;
    uint64_t bytes; /* in flight */
    fe_node todo, sends, busy;
    struct {
        fe_op *op;
        uint64_t seq;
    } msg[FE_MSGS];
    uint32_t msgs_free; /* mask */
    uint64_t seq;
    fe_lease *leases[FE_LEASES], *last;
    struct fe_peer *next_dead;
    uint64_t died;
    fe_node lost; /* datagrams that its closed endpoint may still name */
} fe_peer;

/* ---- peers that opened us ---------------------------------------------------------------------------- */
enum { FE_IN_NONE, FE_IN_PARTIAL, FE_IN_HELD, FE_IN_OVER };
typedef struct fe_inmsg {
    fe_node held;
    uint64_t seq;
    uint8_t *data;
    uint32_t total, got, state;
    uint32_t in, slot;
} fe_inmsg;
typedef struct fe_in {
    fe_dest *dest;
    uint64_t mine, theirs;
    uint64_t check; /* not 0: we stood still, and it may have given us up meanwhile; asked, not answered yet */
    uint32_t their_link;
    fe_inmsg msg[FE_MSGS];
} fe_in;

typedef struct fe_recv {
    uint64_t id, addr, len;
} fe_recv;

/* What is refused or went wrong, and counted: fab_domain_ops.counters. */
enum {
    FE_R_MALFORMED, /* datagrams that make no sense */
    FE_R_SESSION, /* ... of a link that is over, or was never one */
    FE_R_AUTH, /* handshakes without our secret, or with another one (of the contact) */
    FE_R_REVOKED, /* leases asked for registrations that are not, or no longer, there */
    FE_R_RIGHTS, /* ... or that peers may not write */
    FE_R_CQ_ERRORS, /* operations that the provider ended with an error */
    FE_R_STRAY, /* completions of what was given up already */
    FE_R_COUNT
};

typedef struct fe_dom {
    pthread_mutex_t mu;
    _Atomic uint32_t want; /* threads with a registration that wait for the mutex: polls step aside */
    const fab_contact_api *capi;
    fab_contact *contact;
    uint64_t incarnation, connect_ns, heartbeat_ns, now, contact_due, polled;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    uint32_t max_peers, tx_limit, flying; /* flying: through the main endpoint */
    uint32_t rx_limit, nic;
    uint64_t max_write;
    uint64_t delivery; /* flags of a write without an immediate */
    bool gathers; /* see FE_REST_NS */
    bool apart; /* the provider crashes if two engines of one process talk to each other */
    bool own_ep; /* each peer has an endpoint of its own */
    bool connected; /* ... which is a connection */
    bool local_mr, virt_addr, prov_key, rx_cq_data, mr_endpoint, hmem, mr_unlocked, closed;
    char address[FE_ADDRESS];
    uint8_t name[FAB_CONTACT_ADDR];
    uint32_t name_len;
    int cq_fd, ep_fd, wake_fd, timer_fd;
    bool armed;
    bool listening; /* to the provider's descriptor */
    bool timer_set, loud; /* loud: to be hushed at the next poll */
    bool deaf; /* the provider's descriptor is readable all the time: not looked at for now */
    bool rxm, blind; /* blind: there is no wait object (shm), or fi_trywait would look at an endpoint
                       * that is closed (ofi_rxm) */
    uint64_t look_ns;
    uint32_t vain; /* wake-ups in a row that brought nothing */
    uint64_t events, seen; /* completions so far, and at the last arm */
    uint64_t imms, last_imm, rest_until; /* immediates that came, the time of the last, and when to look again */
    bool answered; /* something was posted since then */

    fab_wc_ring wcq; /* what poll hands out next */

    fe_pool small, big, rx;
    fe_node inbox; /* received, not yet looked at: never inside a callback of the contact */
    uint32_t rx_posted;
    fe_node dests[256];
    uint32_t ndests;
    fe_node stuck, busy;

    fe_peer **peers, **by_out;
    uint32_t npeers;
    fe_peer *dead;
    bool failing; /* some peer's `fail` is set */
    uint32_t retrying;

    fe_in **ins;
    fe_node held;
    fe_recv recvs[FE_RECVS];
    uint32_t recv_head, recv_tail;

    fe_mr *mrs;
    uint32_t nmrs, free_mr;
    uint8_t *scratch;
    struct fid_mr *scratch_mr;
    void *scratch_desc;

    uint64_t rng; /* strict: not 0 */
    _Atomic uint64_t refused[FE_R_COUNT];
} fe_dom;

static inline void fe_count(fe_dom *d, uint32_t what) {
    atomic_fetch_add_explicit(&d->refused[what], 1, memory_order_relaxed); /* a count */
}

/* ---- on the wire: after the contact, every datagram begins with this. Little endian, as all our machines are. ------- */
enum {
    FE_T_CONTACT = 1, /* from[from_len], then a datagram of the contact */
    /* from who opened to who was opened */
    FE_T_MSG, /* a = number of the message, slot, off, total, then bytes */
    FE_T_WITHDRAW, /* a, slot: do not take it any more; answered by TAKEN in any case */
    FE_T_ASK, /* a = token: may I write there? */
    FE_T_END, /* a = token: I have no write there any more */
    FE_T_ALIVE, /* a: answers CHECK */
    /* and back */
    FE_T_TAKEN, /* a, slot, status */
    FE_T_LEASE, /* a = token, status, then fe_grant */
    FE_T_REVOKE, /* a = token: answer END as soon as you can */
    FE_T_CHECK, /* a = random: is this link still yours? */
    FE_T_COUNT
};
#define FE_MAGIC 0x31454246u
typedef struct fe_hdr {
    uint32_t magic;
    uint8_t type, from_len;
    uint16_t slot;
    uint64_t session, a;
    uint32_t link, off, total;
    int32_t status;
} fe_hdr;
typedef struct fe_grant {
    uint64_t key, base, va, len;
} fe_grant;
typedef struct fe_hello { /* body of the contact's CONFIRM and ACCEPT */
    uint32_t version, link;
    uint64_t session;
    uint32_t msgs, max_send, nic, flags;
} fe_hello;
#define FE_FRAGMENT (FE_BIG - (uint32_t)sizeof(fe_hdr))

/* ---- functions, by file ------------------------------------------------------------------------------- */
/* words.c */
void fe_words_keep(const char *nic, const char *peer, int32_t status, const char *text);
/* buf.c */
void fe_pool_init(fe_pool *p, uint32_t size, uint32_t kind);
void fe_pool_free(fe_pool *p);
fe_buf *fe_buf_get(fe_dom *d, fe_pool *p);
void fe_buf_put(fe_buf *b);
void fe_rx_fill(fe_dom *d);
/* chan.c */
void fe_chan_init(fe_chan *c, struct fid_ep *ep, fi_addr_t to);
void fe_chan_send(fe_dom *d, fe_chan *c, fe_buf *b);
void fe_chan_flush(fe_dom *d);
void fe_chan_flown(fe_dom *d, fe_buf *b);
void fe_chan_drop(fe_dom *d, fe_chan *c, fe_node *lost);
fe_dest *fe_dest_get(fe_dom *d, const void *name, uint32_t len);
void fe_dest_free_all(fe_dom *d);
int fe_tell(fe_dom *d, fe_chan *c, const fe_hdr *h, const void *more, uint32_t len);
/* link.c */
int fe_contact_start(fe_dom *d, const fab_efa_cfg *cfg);
int fe_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer);
int fe_peer_close(void *ctx, uint32_t id);
void fe_peer_lose(fe_peer *p, int32_t status);
void fe_peers_look(fe_dom *d);
void fe_peers_free(fe_dom *d);
/* ep.c */
int fe_ep_open(fe_dom *d, struct fid_ep **out);
/* post.c */
int fe_post(void *ctx, uint32_t id, const fab_wr *wr, uint32_t n);
int fe_cancel(void *ctx, uint64_t id);
void fe_op_end(fe_op *op, int32_t status);
void fe_op_flown(fe_op *op, int32_t status);
void fe_peer_work(fe_peer *p);
void fe_peer_busy(fe_peer *p);
/* lease.c */
fe_lease *fe_lease_get(fe_peer *p, uint64_t token);
void fe_lease_settle(fe_peer *p, fe_lease *l);
void fe_lease_granted(fe_peer *p, const fe_hdr *h, const fe_grant *g);
void fe_lease_revoked(fe_peer *p, uint64_t token);
void fe_leases_free(fe_peer *p);
/* message.c */
void fe_sends_start(fe_peer *p);
void fe_withdraw(fe_op *op);
void fe_taken(fe_peer *p, const fe_hdr *h);
void fe_in_message(fe_dom *d, uint32_t number, const fe_hdr *h, const uint8_t *data, uint32_t len);
void fe_in_withdraw(fe_dom *d, uint32_t number, const fe_hdr *h);
void fe_in_free(fe_dom *d, uint32_t number);
void fe_in_suspect(fe_dom *d);
void fe_in_alive(fe_dom *d, uint32_t number, const fe_hdr *h);
void fe_match(fe_dom *d);
int fe_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len);
/* in.c */
void fe_inbox_run(fe_dom *d);
/* cq.c */
void fe_cq_drain(fe_dom *d);
void fe_progress(fe_dom *d, uint64_t now);
/* mr.c */
int fe_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out);
int fe_mr_dereg(void *ctx, uint64_t local_key);
int fe_mr_raw(fe_dom *d, void *at, uint64_t len, uint64_t access, struct fid_mr **out);
void fe_mr_asked(fe_dom *d, uint32_t in, const fe_hdr *h);
void fe_mr_ended(fe_dom *d, uint32_t in, uint64_t token);
void fe_mr_forget_in(fe_dom *d, uint32_t in);
void fe_mr_free_all(fe_dom *d);
void *fe_mr_desc_of(fe_dom *d, uint64_t local_key);
/* address.c */
int fe_address_text(const fe_dom *d, const uint8_t *name, uint32_t len, uint64_t inc, char *buf, size_t cap);
int fe_address_parse(const fe_dom *d, const char *text, size_t len, uint8_t *name, uint32_t *name_len, uint64_t *inc);
/* Keep words that say why `fe_address_parse` did not take this address. */
void fe_address_explain(const fe_dom *d, const char *text, size_t len, int rc);
int fe_address_apart(const fe_dom *d, const char *text, size_t text_len, const uint8_t *name, uint32_t name_len);
/* domain.c */
uint64_t fe_clock(void);
uint64_t fe_random(void);
void fe_lock_politely(fe_dom *d);
void fe_wake(fe_dom *d);

#endif
