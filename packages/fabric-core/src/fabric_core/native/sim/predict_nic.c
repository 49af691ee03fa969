/* A NIC of the predictor: requests become completions at the times that the cost model gives them. Faults are the
 * simulator's (domain.c, net.c); here one NIC can be lost, and nothing else goes wrong. */
#include "predict.h"

#include <stdio.h>

#define MASK(nic) ((nic)->cap - 1)

static pred_entry *entry(const pred_nic *nic, uint32_t i) { return &nic->ring[(nic->first + i) & MASK(nic)]; }

void pred_push(pred_nic *nic, uint64_t at, const fab_wc *wc) {
    if (nic->count == nic->cap) {
        uint32_t cap = nic->cap ? 2 * nic->cap : 64;
        pred_entry *ring = malloc(cap * sizeof *ring);
        if (!ring) abort(); /* a prediction is bounded; a machine without memory cannot go on */
        for (uint32_t i = 0; i < nic->count; i++) ring[i] = *entry(nic, i);
        free(nic->ring);
        nic->ring = ring;
        nic->first = 0;
        nic->cap = cap;
    }
    uint32_t i = nic->count++;
    for (; i && entry(nic, i - 1)->at > at; i--) *entry(nic, i) = *entry(nic, i - 1);
    *entry(nic, i) = (pred_entry){at, *wc};
    if (at < nic->node->step_at) nic->node->step_at = at;
}

uint64_t pred_head(const pred_nic *nic) { return nic->count ? entry(nic, 0)->at : PRED_NEVER; }

/* Who sends it ends; what has not landed yet never does. */
void pred_lose(pred_nic *nic) {
    pred_world *w = nic->node->world;
    nic->down = true;
    for (uint32_t k = 1; k < w->nnodes; k++) {
        pred_nic *to = &w->nodes[k].nic[nic->index];
        while (to->count && entry(to, to->count - 1)->at > w->now) to->count--;
    }
    for (uint32_t i = 0; i < nic->count; i++) {
        pred_entry *e = entry(nic, i);
        if (e->at <= w->now || e->wc.kind != FAB_WC_OP) continue;
        e->at = w->now;
        e->wc.status = -ENETDOWN;
    }
    pred_push(nic, w->now, &(fab_wc){.kind = FAB_WC_NIC_DOWN, .status = -ENETDOWN, .peer = FAB_PEER_NONE, .count = 1});
}

/* ---- the engine's side ------------------------------------------------------------------------------------ */

static int caps(void *ctx, fab_domain_caps *out) {
    (void)ctx;
    *out = (fab_domain_caps){.max_send = 4096, .numa_node = UINT32_MAX};
    return 0;
}

static int address(void *ctx, char *buf, size_t cap) {
    const pred_nic *nic = ctx;
    int n = snprintf(buf, cap, "%u.%u", nic->node->index, nic->index);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static int mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    const pred_nic *nic = ctx;
    *out = (fab_mr_keys){nic->index + 1, nic->index + 1, mr->addr};
    return 0;
}

static int mr_dereg(void *ctx, uint64_t local_key) {
    (void)ctx, (void)local_key;
    return 0;
}

static int peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    pred_nic *nic = ctx;
    (void)len; /* the engine's strings end with a zero */
    uint64_t node = strtoull(addr, NULL, 10);
    if (node >= nic->node->world->nnodes || nic->nlinks == PRED_PEERS) return -EINVAL;
    *peer = nic->nlinks++;
    nic->links[*peer] = (uint32_t)node;
    pred_push(nic, nic->node->world->now, &(fab_wc){.kind = FAB_WC_PEER_UP, .peer = *peer, .count = 1});
    return 0;
}

static int peer_close(void *ctx, uint32_t peer) {
    (void)ctx, (void)peer;
    return 0;
}

static int post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    pred_nic *nic = ctx;
    pred_world *w = nic->node->world;
    const fab_sim_nic_model *m = &w->q.nic;
    if (nic->down) return -ENETDOWN;
    if (n > m->queue - nic->used) n = (uint32_t)(m->queue - nic->used);
    if (n && w->first_post == PRED_NEVER) w->first_post = w->now > nic->node->cpu.until ? w->now : nic->node->cpu.until;
    pred_nic *to = &w->nodes[nic->links[peer]].nic[nic->index];
    nic->port.chained = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t land = sim_cost_post(m, &nic->node->cpu, &nic->port, &to->port, w->now, wr[i].len);
        if (wr[i].flags & FAB_WR_IMM)
            pred_push(to, land, &(fab_wc){.kind = FAB_WC_IMM, .imm = wr[i].imm, .count = 1, .peer = FAB_PEER_NONE});
        pred_push(nic, land + m->latency_ns, &(fab_wc){.kind = FAB_WC_OP, .id = wr[i].id, .peer = peer, .count = 1});
    }
    nic->used += n;
    w->out->requests += n;
    if (n) w->last_post = nic->node->cpu.until;
    return (int)n;
}

static int post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    (void)ctx, (void)id, (void)addr, (void)len;
    return -EAGAIN;
}

/* What has come by now, as the worker's clock goes on while it posts and polls. */
static int poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns) {
    pred_nic *nic = ctx;
    sim_cpu *cpu = &nic->node->cpu;
    uint32_t n = 0, taken = 0;
    for (uint64_t seen = now_ns > cpu->until ? now_ns : cpu->until; taken < cap && pred_head(nic) <= seen; taken++) {
        const fab_wc *next = &entry(nic, 0)->wc;
        if (next->kind == FAB_WC_OP) nic->used--;
        bool same = n && next->kind <= FAB_WC_IMM && wc[n - 1].kind == next->kind && wc[n - 1].id == next->id &&
                    wc[n - 1].imm == next->imm && wc[n - 1].peer == next->peer && wc[n - 1].status == next->status;
        if (same) wc[n - 1].count++;
        else wc[n++] = *next;
        nic->first++;
        nic->count--;
    }
    sim_cpu_take(cpu, now_ns, taken * nic->node->world->q.nic.done_ns);
    return (int)n;
}

static int cancel(void *ctx, uint64_t id) {
    (void)ctx, (void)id;
    return 0;
}

static int wait_fd(void *ctx) {
    (void)ctx;
    return -1;
}

static int arm(void *ctx, int on) {
    const pred_nic *nic = ctx;
    return on && nic->count ? 1 : 0;
}

static void close_nic(void *ctx) {
    pred_nic *nic = ctx;
    nic->count = 0;
}

const fab_domain_ops pred_ops = {
    .abi_version = FAB_ABI_VERSION,
    .struct_size = sizeof(fab_domain_ops),
    .caps = caps,
    .address = address,
    .mr_reg = mr_reg,
    .mr_dereg = mr_dereg,
    .peer_open = peer_open,
    .peer_close = peer_close,
    .post = post,
    .post_recv = post_recv,
    .poll = poll,
    .cancel = cancel,
    .wait_fd = wait_fd,
    .arm = arm,
    .close = close_nic,
};
