/* Requests of the live network: due at a time, done in the poll of the NIC that sends. */
#include "live.h"

pthread_mutex_t live_world = PTHREAD_MUTEX_INITIALIZER;
live_nic *live_all;

void live_tell(live_nic *nic, const fab_wc *wc) {
    if (nic->ncq == nic->cq_cap) {
        nic->cq_cap = nic->cq_cap ? 2 * nic->cq_cap : 256;
        nic->cq = realloc(nic->cq, nic->cq_cap * sizeof *nic->cq);
        if (!nic->cq) abort(); /* what is told may not be lost */
    }
    nic->cq[nic->ncq++] = *wc;
    if (!nic->armed) return;
    nic->armed = 0;
    uint64_t one = 1;
    ssize_t rc = write(nic->fd, &one, sizeof one);
    (void)rc; /* full: it is readable already */
}

void live_end(live_nic *nic, uint32_t i, int32_t status) {
    fab_wc wc = {
        .kind = FAB_WC_OP, .id = nic->sending[i].wr.id, .status = status, .peer = nic->sending[i].link, .count = 1};
    nic->links[wc.peer].sending--;
    nic->sending[i] = nic->sending[--nic->nsending];
    live_tell(nic, &wc);
}

void live_link_fail(live_nic *nic, uint32_t link, int32_t status) {
    for (uint32_t i = nic->nsending; i-- > 0;)
        if (nic->sending[i].link == link) live_end(nic, i, status);
}

void live_link_lost(live_nic *nic, uint32_t link, int32_t status) {
    live_link *l = &nic->links[link];
    l->to = NULL;
    l->status = status;
    live_link_fail(nic, link, status);
    live_tell(nic, &(fab_wc){.kind = FAB_WC_PEER_DOWN, .peer = link, .status = status, .count = 1});
}

/* False: full. */
bool live_send(live_nic *nic, uint32_t link, const fab_wr *wr) {
    if (nic->links[link].sending >= LIVE_SEND_QUEUE) return false;
    if (nic->nsending == nic->sending_cap) {
        uint32_t more = nic->sending_cap ? 2 * nic->sending_cap : LIVE_SEND_QUEUE;
        live_wr *grown = realloc(nic->sending, more * sizeof *grown);
        if (!grown) return false;
        nic->sending = grown;
        nic->sending_cap = more;
    }
    nic->links[link].sending++;
    const fab_sim_nic_model *m = nic->model;
    uint64_t now = fab_now(), due = now;
    if (m->gbps) {
        uint64_t wire = wr->len * 8000 / (m->gbps * m->payload_permille), takes = wire > m->nic_ns ? wire : m->nic_ns;
        if (nic->free_at < now) nic->free_at = now;
        nic->free_at += takes;
        due = nic->free_at + m->latency_ns;
        due += sim_below(&nic->rand, m->latency_ns / 4 + 1); /* reorders */
    } else if (sim_percent(&nic->rand, 10)) {
        due += sim_below(&nic->rand, 20000);
    }
    nic->sending[nic->nsending++] = (live_wr){*wr, link, due};
    return true;
}

static int32_t deliver_write(live_nic *to, const fab_wr *wr) {
    uint32_t index = (uint32_t)wr->remote_key & 0xffffffu;
    const live_mr *mr = index < to->nmrs ? &to->mrs[index] : NULL;
    if (!mr || !mr->live || mr->gen != wr->remote_key >> 24) return -EKEYREVOKED;
    uint64_t off = wr->remote_addr - mr->addr;
    if (!(mr->access & FAB_ACCESS_REMOTE_WRITE)) return -EACCES;
    if (off > mr->len || wr->len > mr->len - off) return -EFAULT;
    if (wr->len) memcpy((void *)(uintptr_t)wr->remote_addr, (const void *)(uintptr_t)wr->local_addr, wr->len);
    if (wr->flags & FAB_WR_IMM)
        live_tell(to, &(fab_wc){.kind = FAB_WC_IMM, .imm = wr->imm, .peer = FAB_PEER_NONE, .count = 1});
    return 0;
}

/* -EAGAIN: no receive is there. */
static int32_t deliver_message(live_nic *to, const fab_wr *wr) {
    if (!to->nrecvs) return -EAGAIN;
    live_recv recv = to->recvs[0];
    if (wr->len > recv.len) return -EMSGSIZE;
    memmove(to->recvs, to->recvs + 1, --to->nrecvs * sizeof *to->recvs);
    if (wr->len) memcpy((void *)(uintptr_t)recv.addr, (const void *)(uintptr_t)wr->local_addr, wr->len);
    live_tell(to, &(fab_wc){.kind = FAB_WC_RECV, .id = recv.id, .len = wr->len, .peer = FAB_PEER_NONE, .count = 1});
    return 0;
}

/* Everything that is due, in no order. */
void live_advance(live_nic *nic, uint64_t now) {
    for (uint32_t tries = nic->nsending; tries-- > 0 && nic->nsending;) {
        uint32_t i = (uint32_t)sim_below(&nic->rand, nic->nsending);
        live_wr *w = &nic->sending[i];
        if (w->due > now) continue;
        live_nic *to = nic->links[w->link].to;
        int32_t status = w->wr.kind == FAB_WR_SEND ? deliver_message(to, &w->wr) : deliver_write(to, &w->wr);
        if (status == -EAGAIN) w->due = now + LIVE_RETRY_NS;
        else live_end(nic, i, status);
    }
}

int live_take(live_nic *nic, fab_wc *wc, uint32_t cap) {
    uint32_t n = 0;
    while (n < cap && nic->ncq) {
        uint32_t i = (uint32_t)sim_below(&nic->rand, nic->ncq);
        wc[n++] = nic->cq[i];
        nic->cq[i] = nic->cq[--nic->ncq];
    }
    return (int)n;
}
