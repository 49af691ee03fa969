/* Bare queue pairs, for comparison: the calls that such a program has to make, and no others. */
#ifndef VERBS_BARE_H
#define VERBS_BARE_H

#include "measure.h"
#include "verbs_int.h"

#include <stdio.h>

typedef struct bare_where { /* what the other end must know */
    union ibv_gid gid;
    uint32_t qpn, rkey;
    uint64_t at;
} bare_where;

typedef struct bare {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    bare_where self;
    uint64_t memory[8];
} bare;

static inline void bare_recv(bare *b) {
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    if (ibv_post_recv(b->qp, &wr, &bad)) die("post_recv", errno);
}

static inline void bare_open(bare *b, const char *device, int gid) {
    char err[256] = "";
    b->ctx = fv_open_device(device, err, sizeof err);
    if (!b->ctx) die(err, errno);
    b->pd = fv_ibv.alloc_pd(b->ctx);
    b->cq = fv_ibv.create_cq(b->ctx, 256, NULL, NULL, 0);
    b->mr = b->pd ? fv_ibv.reg_mr(b->pd, b->memory, sizeof b->memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
                  : NULL;
    if (!b->cq || !b->mr || fv_ibv.query_gid(b->ctx, 1, gid, &b->self.gid)) die("a bare end", errno);
    struct ibv_qp_init_attr a = {
        .send_cq = b->cq,
        .recv_cq = b->cq,
        .cap = {.max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64},
        .qp_type = IBV_QPT_RC};
    b->qp = fv_ibv.create_qp(b->pd, &a);
    struct ibv_qp_attr q = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    if (!b->qp || fv_ibv.modify_qp(b->qp, &q, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        die("a bare queue pair", errno);
    for (int i = 0; i < 32; i++) bare_recv(b);
    b->self.qpn = b->qp->qp_num;
    b->self.rkey = b->mr->rkey;
    b->self.at = (uintptr_t)b->memory;
}

static inline void bare_connect(bare *b, const bare_where *to, uint8_t gid) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = to->qpn,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = to->gid, .sgid_index = gid, .hop_limit = 64}}};
    int rc = fv_ibv.modify_qp(b->qp, &a,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 6, .rnr_retry = 6};
    if (!rc)
        rc = fv_ibv.modify_qp(b->qp, &a,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                  IBV_QP_MAX_QP_RD_ATOMIC);
    if (rc) die("a bare connection", rc);
}

static inline void bare_post(bare *b, const bare_where *to) {
    struct ibv_sge s = {(uintptr_t)b->memory, 8, b->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &s,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
                             .wr.rdma = {to->at, to->rkey}},
                       *bad;
    if (ibv_post_send(b->qp, &wr, &bad)) die("post_send", errno);
}

/* Polls until an immediate came; its receive is posted again. */
static inline void bare_wait(bare *b) {
    struct ibv_wc w[4];
    int came = 0;
    for (uint64_t until = fv_clock() + 10000000000ull; !came;) {
        for (int i = 0, n = ibv_poll_cq(b->cq, 4, w); i < n; i++) {
            if (w[i].status) die("a completion", w[i].status);
            if (w[i].opcode != IBV_WC_RECV_RDMA_WITH_IMM) continue;
            came++;
            bare_recv(b);
        }
        if (!came && fv_clock() > until) die("an immediate does not come", 0);
    }
}

#endif
