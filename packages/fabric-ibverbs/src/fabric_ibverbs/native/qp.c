/* Queue pairs: made, connected, broken, buried.
 *
 * A queue pair with a shared receive queue may not be destroyed while its completions are under way: the driver would throw
 * them away, and with them receives that nobody posts again. So it is put into the error state, which makes it quiet
 * (C7), and lies in the grave until what it had to say came out. */
#include "verbs_int.h"

static fv_qp **bucket(fv_dom *d, uint32_t num) { return &d->qps[(num ^ num >> 12) & 4095]; }

fv_qp *fv_qp_find(fv_dom *d, uint32_t num) {
    fv_qp *q = *bucket(d, num);
    while (q && q->num != num) q = q->chain;
    return q;
}

static struct ibv_qp *create(fv_dom *d, uint32_t role) {
    struct ibv_qp_init_attr a = {
        .send_cq = role == FV_W_OUT ? d->scq : d->mcq,
        .recv_cq = role == FV_M ? d->mcq : d->rcq,
        .srq = role == FV_M ? d->msrq : d->wsrq,
        .cap = {.max_send_wr = role == FV_W_OUT ? d->cfg.depth
                               : role == FV_M   ? FV_MTX
                                                : 2,
                .max_send_sge = 1,
                .max_inline_data = role == FV_W_OUT ? d->inline_bytes : 0},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *q = fv_ibv.create_qp(d->pd, &a);
    if (!q && a.cap.max_inline_data) { /* more than this device can: then none */
        a.cap.max_inline_data = 0;
        q = fv_ibv.create_qp(d->pd, &a);
        if (q) d->inline_bytes = 0;
    }
    return q;
}

fv_qp *fv_qp_new(fv_link *l, uint32_t role) {
    fv_dom *d = l->dom;
    fv_qp *q = calloc(1, sizeof *q);
    if (!q) return NULL;
    q->qp = create(d, role);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT,
                            .pkey_index = (uint16_t)d->cfg.pkey_index,
                            .port_num = (uint8_t)d->cfg.port,
                            /* of W both ends: credits come back as writes without a byte */
                            .qp_access_flags = role == FV_M ? 0 : IBV_ACCESS_REMOTE_WRITE};
    if (!q->qp || fv_ibv.modify_qp(q->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
        if (q->qp) fv_ibv.destroy_qp(q->qp);
        free(q);
        return NULL;
    }
    q->num = q->qp->qp_num;
    q->psn = (uint32_t)fv_random() & 0xffffff;
    q->role = role;
    q->link = l;
    fv_list_init(&q->node);
    fv_list_init(&q->flying);
    q->chain = *bucket(d, q->num);
    *bucket(d, q->num) = q;
    return q;
}

/* What we tell the peer, who takes the smaller of both, as we do. Asked anew for each link: an interface's MTU may change. */
enum ibv_mtu fv_mtu(const fv_dom *d) {
    struct ibv_port_attr p;
    bool told = !fv_query_port(d->ctx, (uint8_t)d->cfg.port, &p) && p.active_mtu >= IBV_MTU_256; /* 0: it is down */
    enum ibv_mtu mtu = told ? p.active_mtu : d->port.active_mtu;
    while (d->cfg.mtu && mtu > IBV_MTU_256 && 128u << mtu > d->cfg.mtu) mtu--;
    return mtu;
}

/* To RTR and RTS. The path was used by datagrams just now, so the neighbour is known and this does not wait for it. */
int fv_qp_connect(fv_qp *q, const fv_hello *h, uint32_t qpn, uint32_t psn) {
    fv_link *l = q->link;
    fv_dom *d = l->dom;
    enum ibv_mtu mtu = l->mtu;
    if (h->mtu < IBV_MTU_256 || h->mtu > IBV_MTU_4096) return -EPROTO;
    if (h->mtu < mtu) mtu = h->mtu;
    q->mtu_shift = 7 + mtu;
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = qpn, .rq_psn = psn, .min_rnr_timer = 12};
    fv_ah_attr(d, h->gid, (uint16_t)h->lid, &a.ah_attr);
    int rc = fv_ibv.modify_qp(q->qp, &a,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (rc) return rc < 0 ? -EIO : -rc;
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                             .timeout = (uint8_t)d->cfg.timeout,
                             .retry_cnt = (uint8_t)d->cfg.retry,
                             .rnr_retry = 6, /* our credits keep its receives posted; 7 would be for ever */
                             .sq_psn = q->psn};
    rc = fv_ibv.modify_qp(q->qp, &a,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC);
    return rc ? (rc < 0 ? -EIO : -rc) : 0;
}

void fv_qp_error(fv_qp *q) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
    if (!q->error) fv_ibv.modify_qp(q->qp, &a, IBV_QP_STATE);
    q->error = true;
}

void fv_qp_bury(fv_dom *d, fv_qp *q) {
    if (!q) return;
    fv_qp_error(q);
    q->link = NULL;
    q->buried = d->now;
    fv_list_add(&d->grave, &q->node);
}

void fv_qp_destroy(fv_dom *d, fv_qp *q) {
    fv_qp **at = bucket(d, q->num); /* NOLINT(clang-analyzer-unix.Malloc): see fv_list_del */
    while (*at && *at != q) at = &(*at)->chain;
    if (*at) *at = q->chain;
    fv_list_del(&q->node);
    fv_ibv.destroy_qp(q->qp);
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
    while (!fv_list_empty(&q->flying)) fv_tx_free(d, FV_OF(q->flying.next, fv_tx, node)); /* quiet now, by force */
    free(q);
}

void fv_grave_look(fv_dom *d, bool all) {
    /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del */
    while (!fv_list_empty(&d->grave)) {
        fv_qp *q = FV_OF(d->grave.next, fv_qp, node);
        /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): see fv_list_del; in the order of their deaths */
        if (!all && d->now - q->buried < FV_GRAVE_NS) return;
        fv_qp_destroy(d, q);
    }
}
