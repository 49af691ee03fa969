/* The UD queue pair. Each datagram begins with our prefix, which names its sender: a completion tells the number of the queue
 * pair it came from, but not the key that an answer needs. The contact's MAC covers both addresses. */
#include "verbs_int.h"

#define MAGIC 0x31424656u

typedef struct prefix {
    uint32_t magic, len;
    fv_addr from;
} prefix;

static uint8_t *rx_at(const fv_dom *d, uint32_t i) { return d->ud_memory + (size_t)i * FV_UD_BYTES; }
static uint8_t *tx_at(const fv_dom *d, uint32_t i) { return rx_at(d, FV_UD_RX + i); }

static int post_rx(fv_dom *d, uint32_t i) {
    struct ibv_sge s = {(uintptr_t)rx_at(d, i), FV_UD_BYTES, d->ud_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = FV_WRID(FV_K_UDRX, i, 0), .sg_list = &s, .num_sge = 1}, *bad;
    int rc = ibv_post_recv(d->ud, &wr, &bad);
    if (!rc) d->ud_posted++;
    return rc;
}

static int to_rts(fv_dom *d) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT,
                            .pkey_index = (uint16_t)d->cfg.pkey_index,
                            .port_num = (uint8_t)d->cfg.port,
                            .qkey = d->self.qkey};
    int rc = fv_ibv.modify_qp(d->ud, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    a.qp_state = IBV_QPS_RTR;
    if (!rc) rc = fv_ibv.modify_qp(d->ud, &a, IBV_QP_STATE);
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = (uint32_t)fv_random() & 0xffffff;
    if (!rc) rc = fv_ibv.modify_qp(d->ud, &a, IBV_QP_STATE | IBV_QP_SQ_PSN);
    return rc;
}

int fv_ud_open(fv_dom *d) {
    size_t bytes = (size_t)(FV_UD_RX + FV_UD_TX) * FV_UD_BYTES;
    d->ud_memory = aligned_alloc(4096, bytes);
    if (!d->ud_memory) return -ENOMEM;
    d->ud_mr = fv_ibv.reg_mr(d->pd, d->ud_memory, bytes, IBV_ACCESS_LOCAL_WRITE);
    if (!d->ud_mr) return errno ? -errno : -ENOMEM;
    struct ibv_qp_init_attr a = {
        .send_cq = d->mcq,
        .recv_cq = d->mcq,
        .cap = {.max_send_wr = FV_UD_TX, .max_recv_wr = FV_UD_RX, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_UD};
    d->ud = fv_ibv.create_qp(d->pd, &a);
    if (!d->ud) return errno ? -errno : -EIO;
    memcpy(d->self.gid, d->gid.raw, 16);
    d->self.lid = d->ethernet ? 0 : d->port.lid;
    d->self.qpn = d->ud->qp_num;
    d->self.qkey = (uint32_t)fv_random() & 0x7fffffff; /* the highest bit is for privileged ones */
    int rc = to_rts(d);
    for (uint32_t i = 0; !rc && i < FV_UD_RX; i++) rc = post_rx(d, i);
    for (uint32_t i = 0; i < FV_UD_TX; i++) d->ud_free[d->ud_nfree++] = i;
    return -rc;
}

void fv_ud_close(fv_dom *d) {
    if (d->ud) fv_ibv.destroy_qp(d->ud);
    d->ud = NULL;
    if (d->ud_mr) fv_ibv.dereg_mr(d->ud_mr);
    d->ud_mr = NULL;
    free(d->ud_memory);
    d->ud_memory = NULL;
}

/* A send that fails breaks the queue pair: one with an address of ours that is gone does, before the event that says so is
 * seen. Its number is in our address, so it is not replaced: all that it holds comes back first, then it starts again. */
void fv_ud_broke(fv_dom *d) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
    if (d->ud_bad || d->closed) return;
    d->ud_bad = true;
    fv_count(d, FV_R_CQ_ERRORS, 1);
    if (fv_ibv.modify_qp(d->ud, &a, IBV_QP_STATE)) d->broken = true;
}

/* [ud_bad] */
void fv_ud_restart(fv_dom *d) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
    if (d->down || d->ud_posted || d->ud_nfree < FV_UD_TX) return;
    int rc = fv_ibv.modify_qp(d->ud, &a, IBV_QP_STATE);
    if (!rc) rc = to_rts(d);
    for (uint32_t i = 0; !rc && i < FV_UD_RX; i++) rc = post_rx(d, i);
    if (rc) d->broken = true;
    d->ud_bad = false;
}

/* Sends what waits at this dest. */
void fv_ud_put(fv_dom *d, fv_dest *t) {
    if (!d->ud_nfree || d->down || d->ud_bad) return; /* lost: the contact resends */
    uint32_t i = d->ud_free[--d->ud_nfree];
    memcpy(tx_at(d, i), t->wait, t->wait_len);
    struct ibv_sge s = {(uintptr_t)tx_at(d, i), t->wait_len, d->ud_mr->lkey};
    struct ibv_send_wr wr = {.wr_id = FV_WRID(FV_K_UDTX, i, 0),
                             .sg_list = &s,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.ud = {t->ah, t->wait_to.qpn, t->wait_to.qkey}},
                       *bad;
    if (ibv_post_send(d->ud, &wr, &bad)) {
        d->ud_free[d->ud_nfree++] = i;
        return;
    }
    d->ud_dest[i] = t;
    t->refs++;
    t->flying++;
}

static void send_bytes(fv_dom *d, const fv_addr *to, const prefix *p, const void *msg, uint32_t len) {
    fv_dest *t = d->down ? NULL : fv_dest_get(d, to);
    uint32_t head = p ? (uint32_t)sizeof *p : 0;
    if (!t || len > FV_UD_BYTES - FV_GRH - head) return; /* lost: the contact resends */
    if (p) memcpy(t->wait, p, sizeof *p);
    memcpy(t->wait + head, msg, len);
    t->wait_len = head + len;
    t->wait_to = *to;
    if (t->state == FV_DEST_NEW || t->state == FV_DEST_FAILED) fv_dest_ask(d, t);
    if (t->state != FV_DEST_READY || t->stale) return; /* it leaves when the way is known */
    fv_ud_put(d, t);
    t->wait_len = 0;
}

void fv_ud_send(fv_dom *d, const fv_addr *to, const void *msg, uint32_t len) {
    prefix p = {MAGIC, len, d->self};
    send_bytes(d, to, &p, msg, len);
}

void fv_ud_sent(fv_dom *d, uint32_t i, bool ok) {
    if (!ok) fv_ud_broke(d);
    if (i >= FV_UD_TX || !d->ud_dest[i]) return;
    d->ud_dest[i]->refs--;
    d->ud_dest[i]->flying--;
    d->ud_dest[i] = NULL;
    d->ud_free[d->ud_nfree++] = i;
}

void fv_ud_received(fv_dom *d, uint32_t i, uint32_t bytes, uint32_t src_qp, bool ok) {
    if (i >= FV_UD_RX) return;
    d->ud_posted--;
    if (!ok) fv_ud_broke(d);
    const uint8_t *at = rx_at(d, i) + FV_GRH;
    prefix p;
    int rc = -EBADMSG;
    if (ok && bytes >= FV_GRH + sizeof p && bytes <= FV_UD_BYTES) {
        memcpy(&p, at, sizeof p);
        p.from.pad = 0;
        if (p.magic == MAGIC && p.len <= bytes - FV_GRH - sizeof p && p.from.qpn == src_qp)
            rc = d->capi->datagram(d->contact, &p.from, sizeof p.from, at + sizeof p, p.len, d->now);
    }
    if (ok && (rc == -EBADMSG || rc == -EPROTO)) fv_count(d, FV_R_MALFORMED, 1);
    if (rc == -EACCES) fv_count(d, FV_R_AUTH, 1);
    if (rc == -ENOSPC) fv_count(d, FV_R_FULL, 1); /* by the contact's table or by link_new */
    if (!d->closed && !d->ud_bad) post_rx(d, i);
}

int fab_verbs_inject(void *domain, const char *addr, const uint8_t *bytes, uint32_t len) {
    fv_dom *d = domain;
    fv_addr to;
    uint64_t inc;
    int rc = fv_address_parse(addr, strlen(addr), &to, &inc);
    if (rc || !len || len > FV_UD_BYTES - FV_GRH) return rc ? rc : -EMSGSIZE;
    d->now = fv_clock();
    send_bytes(d, &to, NULL, bytes, len);
    const fv_dest *t = fv_dest_get(d, &to);
    for (uint64_t until = d->now + 1000000000u; t && (t->wait_len || t->refs) && d->now < until;)
        fv_progress(d, fv_clock(), 0);
    return t && t->state == FV_DEST_READY && !t->refs ? 0 : -ETIMEDOUT;
}
