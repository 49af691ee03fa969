/* A NIC for tests: domains of one process that write into each other's memory, in a seeded random order.
 *
 * It does what a real NIC may do at its worst: executes requests in any order, holds completions back, takes only a few
 * requests at a time, loses a peer, or keeps a request until it is cancelled. Addresses are pointers. */
#ifndef FAB_TEST_LOOP_DOMAIN_H
#define FAB_TEST_LOOP_DOMAIN_H
#include "check.h"
#include "fabric/domain.h"
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define LOOP_QUEUE 64
#define LOOP_INBOX 65536
#define LOOP_RECVS 16

typedef struct loop_nic {
    uint32_t seed;
    uint64_t max_write;
    bool hold;        /* keep requests until cancelled */
    bool stubborn;    /* ... and even then, until the peer is closed */
    bool too_late;    /* ... and then it ends well: it was on the wire already */
    bool refuse_peer; /* first contact fails */
    bool full;        /* takes no requests */
    int32_t broken;   /* poll fails with this */
    pthread_mutex_t lock; /* of the inbox, which other NICs write */
    uint32_t inbox[LOOP_INBOX], ninbox;
    struct {
        fab_wr wr;
        uint32_t peer;
        bool cancelled;
    } queue[LOOP_QUEUE];
    uint32_t nqueue;
    fab_wc out[LOOP_QUEUE * 4];
    uint32_t nout;
    struct loop_nic *peers[64];
    uint32_t npeers;
    uint64_t posted, closed;
} loop_nic;

static int loop_caps(void *ctx, fab_domain_caps *out) {
    *out = (fab_domain_caps){.max_write = ((loop_nic *)ctx)->max_write, .max_send = 4096, .numa_node = UINT32_MAX};
    return 0;
}
static int loop_address(void *ctx, char *buf, size_t cap) { return snprintf(buf, cap, "%p", ctx); }
static int loop_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    (void)ctx;
    *out = (fab_mr_keys){.local_key = 7, .remote_key = 9, .remote_base = mr->addr};
    return 0;
}
static int loop_mr_dereg(void *ctx, uint64_t key) {
    (void)ctx;
    CHECK(key == 7);
    return 0;
}
static int loop_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    loop_nic *nic = ctx;
    void *other = NULL;
    CHECK(len && sscanf(addr, "%p", &other) == 1);
    CHECK(nic->npeers < 64);
    nic->peers[nic->npeers] = other;
    *peer = nic->npeers++;
    nic->out[nic->nout++] = nic->refuse_peer
                                ? (fab_wc){.kind = FAB_WC_PEER_DOWN, .peer = *peer, .status = -ECONNREFUSED}
                                : (fab_wc){.kind = FAB_WC_PEER_UP, .peer = *peer};
    return 0;
}
static int loop_peer_close(void *ctx, uint32_t peer) {
    loop_nic *nic = ctx;
    for (uint32_t i = 0; i < nic->nqueue;)
        if (nic->queue[i].peer == peer) {
            nic->out[nic->nout++] =
                (fab_wc){.kind = FAB_WC_OP, .id = nic->queue[i].wr.id, .status = -ECANCELED, .count = 1, .peer = peer};
            nic->queue[i] = nic->queue[--nic->nqueue];
        } else {
            i++;
        }
    return 0;
}
static int loop_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    loop_nic *nic = ctx;
    uint32_t room = nic->full ? 0 : LOOP_QUEUE - nic->nqueue, take = n < room ? n : room;
    if (take > 3 && nic->seed) take = 1 + xorshift(&nic->seed) % take; /* a prefix of any length */
    for (uint32_t i = 0; i < take; i++) {
        CHECK(wr[i].kind == FAB_WR_WRITE && wr[i].remote_key == 9);
        CHECK(!nic->max_write || wr[i].len <= nic->max_write, "%lu bytes", (unsigned long)wr[i].len);
        nic->queue[nic->nqueue].wr = wr[i];
        nic->queue[nic->nqueue].cancelled = false;
        nic->queue[nic->nqueue++].peer = peer;
    }
    nic->posted += take;
    return (int)take;
}
static int loop_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    (void)ctx, (void)id, (void)addr, (void)len;
    return -EAGAIN;
}
static void loop_execute(loop_nic *nic, uint32_t i) {
    fab_wr wr = nic->queue[i].wr;
    loop_nic *to = nic->peers[nic->queue[i].peer];
    int32_t status = nic->queue[i].cancelled && !nic->too_late ? -ECANCELED : 0;
    if (!status) {
        if (wr.len) memcpy((void *)(uintptr_t)wr.remote_addr, (void *)(uintptr_t)wr.local_addr, wr.len);
        if (wr.flags & FAB_WR_IMM) {
            pthread_mutex_lock(&to->lock);
            CHECK(to->ninbox < LOOP_INBOX);
            to->inbox[to->ninbox++] = wr.imm;
            pthread_mutex_unlock(&to->lock);
        }
    }
    nic->out[nic->nout++] =
        (fab_wc){.kind = FAB_WC_OP, .id = wr.id, .status = status, .count = 1, .peer = nic->queue[i].peer};
    nic->queue[i] = nic->queue[--nic->nqueue];
}
static int loop_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now) {
    (void)now;
    loop_nic *nic = ctx;
    if (nic->broken) return nic->broken;
    for (uint32_t k = 0; k < 8 && nic->nqueue && nic->nout < LOOP_QUEUE; k++) {
        uint32_t i = nic->seed ? xorshift(&nic->seed) % nic->nqueue : 0;
        if (nic->hold && (!nic->queue[i].cancelled || nic->stubborn)) break;
        loop_execute(nic, i);
    }
    uint32_t n = 0;
    while (n < cap && nic->nout) {
        uint32_t i = nic->seed ? xorshift(&nic->seed) % nic->nout : 0;
        wc[n++] = nic->out[i];
        nic->out[i] = nic->out[--nic->nout];
    }
    pthread_mutex_lock(&nic->lock);
    while (n < cap && nic->ninbox) {
        uint32_t i = nic->seed ? xorshift(&nic->seed) % nic->ninbox : 0;
        wc[n++] = (fab_wc){.kind = FAB_WC_IMM, .imm = nic->inbox[i], .count = 1};
        nic->inbox[i] = nic->inbox[--nic->ninbox];
    }
    pthread_mutex_unlock(&nic->lock);
    return (int)n;
}
static int loop_cancel(void *ctx, uint64_t id) {
    loop_nic *nic = ctx;
    for (uint32_t i = 0; i < nic->nqueue; i++)
        if (nic->queue[i].wr.id == id) nic->queue[i].cancelled = true;
    return 0;
}
static int loop_wait_fd(void *ctx) {
    (void)ctx;
    return -1;
}
static int loop_arm(void *ctx, int on) {
    loop_nic *nic = ctx;
    pthread_mutex_lock(&nic->lock);
    int busy = on && (nic->ninbox || nic->nout || (nic->nqueue && !nic->hold));
    pthread_mutex_unlock(&nic->lock);
    return busy;
}
/* Ends what is queued for a peer (UINT32_MAX: for all) with `status`, then reports `kind`. */
static inline void loop_event(loop_nic *nic, uint32_t peer, uint32_t kind, int32_t status) {
    for (uint32_t i = 0; i < nic->nqueue;) {
        if (peer != UINT32_MAX && nic->queue[i].peer != peer) {
            i++;
            continue;
        }
        nic->out[nic->nout++] = (fab_wc){
            .kind = FAB_WC_OP, .id = nic->queue[i].wr.id, .status = status, .count = 1, .peer = nic->queue[i].peer};
        nic->queue[i] = nic->queue[--nic->nqueue];
    }
    nic->out[nic->nout++] = (fab_wc){.kind = kind, .peer = peer, .status = status};
}
static void loop_close(void *ctx) { ((loop_nic *)ctx)->closed++; }

static const fab_domain_ops loop_ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = loop_caps,
    .address = loop_address,
    .mr_reg = loop_mr_reg,
    .mr_dereg = loop_mr_dereg,
    .peer_open = loop_peer_open,
    .peer_close = loop_peer_close,
    .post = loop_post,
    .post_recv = loop_post_recv,
    .poll = loop_poll,
    .cancel = loop_cancel,
    .wait_fd = loop_wait_fd,
    .arm = loop_arm,
    .close = loop_close,
};

static loop_nic *loop_new(uint32_t seed, uint64_t max_write) {
    loop_nic *nic = calloc(1, sizeof *nic);
    CHECK(nic);
    nic->seed = seed;
    nic->max_write = max_write;
    pthread_mutex_init(&nic->lock, NULL);
    return nic;
}
#endif
