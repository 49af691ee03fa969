/* local_int.h - what the files of the local backend share with each other. Include it first.
 *
 * Three parties touch these structs: the engine's thread (group lock held), the node's control thread, and the peer
 * process through shared memory. Every field says whose it is.
 */
#ifndef FAB_LOCAL_INT_H
#define FAB_LOCAL_INT_H

#ifndef _GNU_SOURCE
#    define _GNU_SOURCE
#endif
#include "channel.h"
#include "cuda/cuda.h"
#include "local.h"
#include "sha256.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { FL_PATH_AUTO, FL_PATH_MAP, FL_PATH_CMA, FL_PATH_BOUNCE, FL_PATH_DIRECT };

#define FL_NAME_MAX 64
#define FL_MRS 16384u        /* registrations of a node */
#define FL_SLOTS 1024u       /* requests in flight per peer, so that one peer's cannot crowd out another's */
#define FL_MAPS 1024u        /* mapped registrations per peer */
#define FL_RECVS 4096u       /* posted receives of a NIC */
#define FL_HOLD 64u          /* completions held back by the shuffle */
#define FL_SLICE (512u << 10)     /* bytes one poll copies: some 60 us streamed, 150 us through the kernel */
#define FL_INLINE (64u << 10)     /* bytes one post copies at once */
#define FL_WR_COST 192u      /* what one request is charged beside its bytes, so that small ones are bounded too */

/* ---- shared header of a node: written by its owner, read by its peers ------------------------ */

typedef struct fl_mr_ent {
    _Atomic uint32_t gen;    /* 0: free. A key is valid while its generation stands here */
    _Atomic uint32_t flags;  /* FL_MR_*, NIC in bits 8.. */
    _Atomic uint64_t base, len;
    _Atomic uint64_t gpu;    /* FL_MR_CUDA: 1 + the device as its owner counts, for those in the same process */
} fl_mr_ent;
enum {
    FL_MR_WRITE = 1u,
    FL_MR_MAPPABLE = 2u,
    FL_MR_CUDA = 4u,
    FL_MR_PINNED = 8u /* host memory that GPUs reach */,
    FL_MR_MIXED = 16u /* host memory of which they reach a part: the driver copies none of it */
};

#define FL_SCRATCH 64u
typedef struct fl_node_hdr {
    fl_shm_head head;
    uint64_t inc;
    _Alignas(64) _Atomic uint64_t beat;
    _Atomic int tid;         /* of the control thread, which beats; the kernel knows why it does not */
    _Alignas(64) _Atomic uint64_t scratch[FL_SCRATCH];   /* where peers try process_vm_writev */
    struct {
        _Alignas(64) _Atomic uint64_t armed;
    } nic[FAB_MAX_NICS];   /* 0, or the number of this sleep */
    _Alignas(64) fl_mr_ent mr[FL_MRS];
} fl_node_hdr;

/* ---- engine side ---------------------------------------------------------------------------- */

typedef struct fl_ring {
    struct fl_ring *prev, *next;
} fl_ring;   /* intrusive list */

typedef struct fl_slot {     /* one accepted request, until its completion was handed out */
    fab_wr wr;
    uint64_t off;            /* bytes done (bounce: bytes put) */
    struct fl_link *link;
    struct fl_slot *next;
    int32_t status;
    uint32_t recs;           /* records of it that the receiver has not taken */
    uint32_t count;          /* merged completions */
    bool queued, bounced;
    uint64_t batch;          /* of the GPU copies that this one is part of */
} fl_slot;

typedef struct fl_fifo {
    fl_slot *head, *tail;
} fl_fifo;
enum { FL_Q_WRITE, FL_Q_SEND, FL_QS };

enum { FL_MAP_FREE, FL_MAP_WANTED, FL_MAP_ASKED, FL_MAP_READY, FL_MAP_FAILED, FL_MAP_DROP };
typedef struct fl_map {      /* engine owns FREE, READY, FAILED; the control thread WANTED, ASKED, DROP */
    _Atomic uint32_t state;
    int32_t err;
    uint64_t key, len;
    char *at;                /* local address of the registration's first byte */
    void *raw;               /* what to unmap */
    size_t raw_len, populated;
    bool cuda, inside;       /* GPU memory, opened by its handle; of the GPU that we use ourselves */
    bool pinned;             /* host memory that our GPU reaches */
} fl_map;

typedef struct fl_where {    /* what a request writes to */
    char *at;
    bool reach, inside;      /* our GPU's kernels reach both ends; both are in its own memory */
} fl_where;

enum { FL_EV_UP = 1u, FL_EV_DOWN = 2u, FL_EV_SWEEP = 4u };
enum { FL_CMD_CLOSE = 1u, FL_CMD_MAP = 2u };
enum {
    FL_ST_NEW,
    FL_ST_CONNECT,
    FL_ST_HELLO,             /* OUT: said hello; IN: accepted, nothing heard yet */
    FL_ST_PROOF,             /* OUT: proved itself; IN: challenged the other */
    FL_ST_UP,
    FL_ST_CLOSED
};

/* What is refused, and counted: fab_domain_ops.counters. */
enum {
    FL_R_AUTH,               /* handshakes without our secret, or with another one */
    FL_R_MALFORMED,          /* messages and cursors that make no sense */
    FL_R_VERSION,            /* another version of this protocol */
    FL_R_STALE,              /* addressed to, or answered by, another incarnation */
    FL_R_HALF_OPEN,          /* dropped before they were done, because too many were waiting */
    FL_R_LINKS,              /* more links than max_links */
    FL_R_UID,                /* another user's process */
    FL_R_REVOKED,            /* writes and mappings with a key that is not, or no longer, valid */
    FL_R_RANGE,              /* ... outside the registered range */
    FL_R_RIGHTS,             /* ... without the right to write, or by another NIC's key */
    FL_R_COUNT
};

#define FL_NONCE 32u
typedef struct fl_script {   /* what both sides of a handshake sign; [0] is the connector, [1] the acceptor */
    uint64_t inc[2], want_inc, pid_ns[2];
    uint32_t version, nic[2], flags[2];
    int32_t pid[2];
    uint32_t reserved;       /* no byte of it is padding */
    char name[2][FL_NAME_MAX + 8];
    uint8_t nonce[2][FL_NONCE];
} fl_script;

typedef struct fl_link {     /* one direction between two NICs: its socket, channel and queue */
    struct fl_dom *dom;      /* IN: NULL until the hello said which */
    struct fab_local_node *node;
    struct fl_link *all;     /* node->links, under node->mu */
    bool in;
    /* control thread */
    int fd, pidfd, st;
    uint64_t deadline, beat, beat_at;
    uint32_t populating, waited;
    bool counted;            /* in node->links_up */
    fl_script script;
    /* set by the control thread before FL_EV_UP (OUT) or before the link is handed over (IN), then constant */
    fl_shm *chan_shm, *peer_shm;
    fl_chan *ch;
    fl_node_hdr *ph;
    int peer_efd;
    pid_t pid;
    uint64_t want_inc;       /* OUT: 0 = whoever answers */
    char peer_name[FL_NAME_MAX + 1];
    uint32_t peer_nic;
    bool direct;             /* same process */
    int down_status;         /* before FL_EV_DOWN */
    /* between the two */
    _Atomic uint32_t ev, cmd;
    _Atomic bool eng_done;   /* the engine will not touch it again */
    uint64_t quiesce_seq, quiesce_fly;    /* fl_quiesce, under node->quiesce_mu and node->mu */
    /* engine */
    fl_ring node_ring;       /* OUT: in dom->active while it has work; IN: in dom->ins */
    bool on_ring, up, dead, closing, cma, broken, gone;
    uint32_t id, todo;
    uint64_t woken;
    fl_side imm;             /* immediates */
    fl_side rec[FL_RINGS];   /* messages, bounce chunks */
    fl_slot *slots, *free;
    uint32_t used, live;     /* slots not free; of them, without a completion yet */
    uint64_t qbytes;
    fl_fifo q[FL_QS];
    fl_fifo fly;             /* taken by the GPU, in the order of their batches */
    uint64_t last_batch;
    fl_map *maps;
    struct fl_link *in_next; /* dom->in_new, under node->mu */
} fl_link;

typedef struct fl_recv {
    uint64_t id, addr, len;
} fl_recv;

typedef struct fl_dom {      /* a NIC */
    struct fab_local_node *node;
    uint32_t nic;
    int efd;
    _Atomic bool closed;
    _Atomic uint32_t ev_pending;
    fl_link *in_new;         /* under node->mu */
    _Alignas(64) _Atomic uint64_t busy;   /* odd while this NIC copies bounced bytes in */
    /* engine */
    _Alignas(64) bool ev_again, flip;
    uint64_t epoch, armed;   /* number of the last sleep; the same while asleep, else 0 */
    fl_link **peers;
    uint32_t npeers;
    fl_ring active, ins;
    fl_slot *done, *done_tail;
    fl_recv *recvs;
    uint32_t recv_head, recv_tail;
    struct iovec *liov, *riov;
    uint64_t rng;            /* 0: no shuffle */
    uint32_t nheld, stalled;
    fab_wc held[FL_HOLD];
    struct fl_gpu *gpu;      /* NULL: host memory only */
} fl_dom;

typedef struct fl_mr_priv {
    uint64_t fd_off;         /* of the fd, or in the allocation of the handle */
    int fd;
    uint32_t next_free;
    struct fl_pin *pin;      /* what made host memory reachable for the GPU */
    fc_ipc ipc;              /* FL_MR_CUDA and FL_MR_MAPPABLE */
} fl_mr_priv;

typedef struct fl_share {    /* what a peer is given of a registration */
    uint64_t off, len;
    int fd;                  /* -1 with cuda */
    bool cuda;
    fc_ipc ipc;
} fl_share;

struct fab_local_node {
    char name[FL_NAME_MAX + 1], dir[96], path[108];
    dev_t path_dev;
    ino_t path_ino;
    uint64_t inc, connect_ns, heartbeat_ns;
    uint32_t nics, path_mode;
    pid_t pid;
    int lfd, epfd, cmdfd, hdr_fd;
    fl_shm *hdr_shm;
    fl_node_hdr *hdr;
    pthread_t thread;
    bool thread_on, accept_off;
    uint64_t next_tick;      /* control thread */
    pthread_mutex_t mu;      /* links, in_new, quiesce_seq, chan pointers; never held over a system call that waits */
    pthread_mutex_t mr_mu;   /* mr, hdr->mr as writer */
    pthread_mutex_t quiesce_mu;
    fl_link *links;
    uint32_t half_open;      /* control thread: accepted, not yet up */
    uint32_t links_up;       /* control thread: IN links that were up, until they are freed */
    uint32_t max_links;
    _Atomic uint32_t links_out;
    _Atomic uint32_t refs, stop, cmd_pending;
    _Atomic uint64_t refused[FL_R_COUNT];
    _Atomic int fault;       /* for the engine to hear of, through the first NIC; 0: nothing */
    uint64_t fault_at;       /* control thread: when the last one was told */
    int gpu;                 /* CUDA device, or -1; constant */
    bool has_key;            /* constant */
    uint8_t key[FAB_SHA256_BYTES];
    fl_mr_priv *mr;
    uint32_t mr_free;
    uint32_t gen_seed;
    fl_dom dom[FAB_MAX_NICS];
};

/* node.c */
void fl_cmd(fl_link *l, uint32_t bits);            /* engine -> control thread */
void fl_raise(fl_link *l, uint32_t bits);          /* control thread -> engine */
void fl_node_unref(struct fab_local_node *n);
void fl_refused(struct fab_local_node *n, int what);                 /* counts; any thread */
void fl_refused_access(struct fab_local_node *n, int status);        /* the same for what fl_mr_check said */
void fl_refused_peer(struct fab_local_node *n, int status);          /* a handshake; control thread */
void fl_link_lost(fl_link *l, int status);
void fl_link_free(fl_link *l);
uint64_t fl_now(void);
/* hand.c */
void fl_start(fl_link *l, uint64_t now);
void fl_incoming(fl_link *l);
void fl_ask_maps(fl_link *l);
bool fl_populate(fl_link *l);
void fl_stale_maps(fl_link *l);
/* sock.c */
int fl_check_dir(const char *dir, char *err, size_t cap);
int fl_claim(struct fab_local_node *n, char *err, size_t cap);
/* mr.c */
int fl_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out);
int fl_mr_dereg(void *ctx, uint64_t local_key);
void fl_mr_revoke_nic(fl_dom *d);
int fl_mr_share(struct fab_local_node *n, uint32_t nic, uint64_t key, fl_share *out);
int fl_mr_check(fl_node_hdr *h, uint64_t key, uint32_t nic, uint64_t addr, uint64_t len, uint32_t need,
                uint32_t *flags);
/* copy.c */
void fl_copy(void *dst, const void *src, size_t n, bool stream);
void fl_copy_fence(void);
/* out.c, in.c */
void fl_out_run(fl_link *l, uint64_t *budget, bool whole);
void fl_out_reap(fl_link *l);
bool fl_out_ready(fl_link *l);
void fl_out_end(fl_link *l, bool all, uint64_t id, int status, bool force);
void fl_out_queue(fl_link *l, const fab_wr *wr);
int fl_out_pages(fl_link *l, const fab_pages *p);         /* as post_pages */
void fl_slot_release(fl_slot *s);
uint32_t fl_in_run(fl_dom *d, fab_wc *wc, uint32_t cap, uint64_t *budget);
bool fl_in_ready(fl_link *l);
/* gpu.c: copies by the GPU of this NIC. Engine side, but for the two of maps. */
int fl_gpu_new(int device, uint64_t linger_ns, struct fl_gpu **out);
void fl_gpu_free(struct fl_gpu *g);                       /* waits for what is in flight, in bounded time */
int fl_gpu_status(const struct fl_gpu *g);                /* 0, or why nothing can be copied any more */
bool fl_gpu_take(struct fl_gpu *g, fl_slot *s, const fl_where *to);      /* false: no room now */
void fl_gpu_launch(struct fl_gpu *g, fl_link *l);
uint32_t fl_gpu_numbers(struct fl_gpu *g, const fab_pages *p, uint32_t *most_local,
                        uint32_t *most_remote);   /* how many; 0: no room */
void fl_gpu_pages(struct fl_gpu *g, fl_link *l, const fab_pages *p, uint32_t n, const fl_where *to);
uint64_t fl_gpu_done(struct fl_gpu *g);                   /* all batches up to this one have ended */
int fl_gpu_copy_now(struct fl_gpu *g, void *dst, const void *src, size_t n);
/* gpu_mem.c: what the GPU reaches. Any thread. */
struct fl_pin *fl_pin(int device, uint64_t addr, uint64_t len);          /* NULL: cannot be pinned by us */
void fl_unpin(int device, struct fl_pin *pin);
bool fl_pins_meet(uint64_t addr, uint64_t len);           /* a pin of ours lies in its pages */
bool fl_gpu_export(int device, uint64_t addr, uint64_t len, fc_ipc *out, uint64_t *off);
int fl_gpu_map(int device, fl_map *m, const fc_ipc *ipc, uint64_t off, uint64_t len);
void fl_map_pin(int device, fl_map *m);
void fl_map_undo(int device, fl_map *m);

static inline uint64_t fl_rand(uint64_t *s) {      /* xorshift64*; only for the shuffle */
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * 0x2545f4914f6cdd1dull;
}
static inline void fl_ring_init(fl_ring *r) { r->prev = r->next = r; }
static inline void fl_ring_add(fl_ring *head, fl_ring *n) {
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}
static inline void fl_ring_del(fl_ring *n) {
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->prev = n->next = n;
}
#define FL_LINK_OF(r) ((fl_link *)((char *)(r) - offsetof(fl_link, node_ring)))

#endif
