/* The simulated NIC as the engine sees it. It refuses what a real one refuses, and reports to the checkers what a real
 * one would be killed by. */
#include "sim.h"

#include <inttypes.h>
#include <stdio.h>

static int caps(void *ctx, fab_domain_caps *out) {
    const sim_nic *nic = ctx;
    *out = (fab_domain_caps){.max_write = nic->node->world->opt.max_write, .max_send = 4096, .numa_node = UINT32_MAX};
    return 0;
}

static int address(void *ctx, char *buf, size_t cap) {
    const sim_nic *nic = ctx;
    int n = snprintf(buf, cap, "%" PRIx32 ".%" PRIx32 "#%" PRIx32, nic->node->index, nic->index, nic->node->inc);
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static int mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out) {
    sim_nic *nic = ctx;
    uint64_t off = mr->addr - (uint64_t)(uintptr_t)nic->node->arena;
    if (off > SIM_ARENA || mr->len > SIM_ARENA - off) return -EFAULT;
    for (uint32_t i = 0; i < SIM_MRS; i++) {
        sim_mr *slot = &nic->mrs[i];
        if (slot->live) continue;
        *slot = (sim_mr){.off = off, .len = mr->len, .gen = slot->gen + 1, .access = mr->access, .live = 1};
        uint64_t key = (uint64_t)nic->index << 56 | slot->gen << 8 | i; /* every NIC its own, so a mix-up shows */
        *out = (fab_mr_keys){key, key, ((uint64_t)nic->node->index + 1) << 40 | off};
        return 0;
    }
    return -ENOSPC;
}

sim_mr *sim_mr_of(sim_nic *nic, uint64_t key) {
    sim_mr *mr = &nic->mrs[key & (SIM_MRS - 1)];
    bool ours = mr->live && key >> 56 == nic->index && (key >> 8 & 0xffffffffffull) == mr->gen;
    return ours ? mr : NULL;
}

static int mr_dereg(void *ctx, uint64_t local_key) {
    sim_nic *nic = ctx;
    sim_mr *mr = sim_mr_of(nic, local_key);
    if (!mr)
        sim_fail(nic->node->world, "bounds", "node %u revokes a key that is not NIC %u's", nic->node->index,
                 nic->index);
    else mr->live = 0;
    return 0;
}

static int peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer) {
    sim_nic *nic = ctx;
    nic->node->path_down |= nic->down;
    return nic->down ? -ENETDOWN : sim_link_open(nic, addr, len, peer);
}

static int peer_close(void *ctx, uint32_t peer) {
    ((sim_nic *)ctx)->node->path_down =
        1; /* after a loss; or the engine cuts a link that does not let go of a request */
    sim_link_close(ctx, peer);
    return 0;
}

/* A post that finds its path gone fails the transfer of the first request. */
static int refuse(sim_nic *nic, const fab_wr *wr, int32_t status) {
    sim_op *op = sim_op_of(nic->node, wr->id);
    if (op) op->errors++;
    nic->node->path_down = 1;
    return status;
}

static int post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n) {
    sim_nic *nic = ctx;
    sim_world *w = nic->node->world;
    if (nic->down) return refuse(nic, wr, -ENETDOWN);
    const sim_link *link = peer < nic->nlinks ? &nic->links[peer] : NULL;
    if (!link || link->state == SIM_LINK_CONNECTING || link->state == SIM_LINK_CLOSED) {
        sim_fail(w, "credit", "node %u posts to link %u of NIC %u, which is not open", nic->node->index, peer,
                 nic->index);
        return -EPROTO;
    }
    if (link->state == SIM_LINK_DOWN && sim_percent(&w->net, w->opt.refuse_percent)) {
        w->counts.refused++;
        return refuse(nic, wr, link->status);
    }
    uint64_t room = w->opt.send_queue - nic->sq_used;
    uint32_t take = n < room ? n : (uint32_t)room;
    if (sim_percent(&w->net, w->opt.partial_post_percent)) take = (uint32_t)sim_below(&w->net, take + 1);
    nic->port.chained = 0;
    for (uint32_t i = 0; i < take; i++) {
        uint32_t write = 0;
        sim_op *op = sim_check_post(nic, link, &wr[i], &write);
        if (!op) return (int)i; /* a violation was noted */
        sim_net_post(nic, peer, &wr[i], op, write);
    }
    return (int)take;
}

static int post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len) {
    sim_nic *nic = ctx;
    if (nic->nrecvs >= nic->node->world->opt.receive_queue) return -EAGAIN;
    nic->recvs[nic->nrecvs++] = (sim_recv){id, addr, len};
    return 0;
}

static int poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns) {
    sim_nic *nic = ctx;
    (void)now_ns;
    if (nic->stalled_until <= nic->node->world->now) sim_contact_poll(nic);
    return sim_cq_poll(nic, wc, cap);
}

static int cancel(void *ctx, uint64_t id) {
    sim_nic *nic = ctx;
    const sim_node *n = nic->node;
    uint32_t index = (uint32_t)id & 0xffffffu;
    if (index < n->bound_cap && n->bound[index].handle == id && n->bound[index].op != SIM_NONE)
        sim_net_cancel(nic, sim_slab_at(&n->world->ops, n->bound[index].op));
    return 0;
}

static int wait_fd(void *ctx) {
    (void)ctx;
    return -1;
}

static int arm(void *ctx, int on) {
    const sim_nic *nic = ctx;
    return on && nic->cq_count ? 1 : 0;
}

static void close_nic(void *ctx) {
    sim_nic *nic = ctx;
    if (nic->closed) sim_fail(nic->node->world, "credit", "node %u closes NIC %u twice", nic->node->index, nic->index);
    sim_contact_stop(nic, nic->node->closing);
    sim_net_drop(nic);
    sim_cq_clear(nic);
    nic->closed = 1;
    nic->nlinks = 0;
    nic->nrecvs = 0;
}

const fab_domain_ops sim_ops = {
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
