/* Checker "bounds": what reaches a NIC is exactly what was asked for: inside the memory, with that NIC's keys, to that
 * peer, with that immediate (C4, C5, C6). Checker "ownership": what lands, lands in memory that still is the transfer's
 * (C7). */
#include "sim.h"

#include <inttypes.h>

#define BAD(...) return sim_fail(w, "bounds", __VA_ARGS__), NULL

/* Which logical write a piece belongs to; SIM_NONE: none of them. */
static uint32_t write_of(const sim_op *op, const sim_link *link, uint64_t source, uint64_t target, uint64_t len) {
    for (uint32_t i = 0; i < op->nwrites; i++) {
        const sim_write *wr = &op->write[i];
        const sim_place *p = &op->place[wr->place];
        if (p->node != link->node || p->inc != link->inc || target - p->off < wr->roff) continue;
        uint64_t at = target - p->off - wr->roff;
        if (at > wr->len || len > wr->len - at) continue;
        if (!len || source - op->src_off == wr->loff + at) return i;
    }
    return SIM_NONE;
}

/* The immediates of a write with too many pieces for the denominator go last, empty, to the beginning of its target. */
static uint32_t final_of(const sim_op *op, const sim_link *link) {
    for (uint32_t i = 0; i < op->nwrites; i++) {
        const sim_place *p = &op->place[op->write[i].place];
        if (p->node == link->node && p->inc == link->inc) return i;
    }
    return SIM_NONE;
}

sim_op *sim_check_post(sim_nic *nic, const sim_link *link, const fab_wr *wr, uint32_t *write) {
    sim_node *n = nic->node;
    sim_world *w = n->world;
    sim_op *op = sim_op_of(n, wr->id);
    if (!op) BAD("node %u posts a request of a transfer that nobody knows", n->index);
    if (op->state == SIM_OP_ENDED)
        BAD("node %u posts a request of transfer %" PRIu64 ", which has ended", n->index, op->serial);
    if (op->pin >= 0 && (uint32_t)op->pin != nic->index)
        BAD("node %u posts to NIC %u what was pinned to NIC %d", n->index, nic->index, op->pin);
    if (wr->kind == FAB_WR_SEND) {
        if (op->verb != FAB_OP_SEND || wr->len != op->bytes)
            BAD("node %u posts a message of %" PRIu64 " bytes to NIC %u", n->index, wr->len, nic->index);
        return op;
    }
    if (w->opt.max_write && wr->len > w->opt.max_write)
        BAD("node %u posts %" PRIu64 " bytes, NIC %u takes %" PRIu64, n->index, wr->len, nic->index, w->opt.max_write);
    uint64_t source = wr->local_addr - (uint64_t)(uintptr_t)n->arena;
    if (wr->len && (source > SIM_ARENA || wr->len > SIM_ARENA - source || !sim_mr_of(nic, wr->local_key)))
        BAD("node %u, NIC %u: %" PRIu64 " bytes outside of its registered memory", n->index, nic->index, wr->len);
    if (wr->remote_addr >> 40 != link->node + 1u)
        BAD("node %u, NIC %u: an address of node %" PRIu64 " on a link to node %u", n->index, nic->index,
            (wr->remote_addr >> 40) - 1, link->node);
    if (wr->remote_key >> 56 != link->nic)
        BAD("node %u, NIC %u: a key of NIC %u of node %u on a link to its NIC %u", n->index, nic->index,
            (uint32_t)(wr->remote_key >> 56), link->node, link->nic);
    *write = write_of(op, link, source, wr->remote_addr & 0xffffffffffull, wr->len);
    if (*write == SIM_NONE && !wr->len && wr->flags & FAB_WR_IMM) *write = final_of(op, link);
    if (*write == SIM_NONE)
        BAD("node %u, NIC %u: a piece of %" PRIu64 " bytes that is no part of transfer %" PRIu64, n->index, nic->index,
            wr->len, op->serial);
    if (wr->flags & FAB_WR_IMM && (!op->has_imm || (wr->imm & 0x1fffffffu) != op->imm))
        BAD("node %u, NIC %u: immediate %x, asked for was %x", n->index, nic->index, wr->imm,
            op->has_imm ? op->imm : 0);
    return op;
}

bool sim_check_land(sim_world *w, sim_wr *r, sim_op *op, sim_nic *to, uint64_t from, uint64_t len) {
    const sim_place *p = &op->place[op->write[r->write].place];
    uint64_t off = (r->wr.remote_addr & 0xffffffffffull) + from;
    const sim_region *region = sim_slab_at(&to->node->regions, p->region);
    if (region->owner != op->slot.index || off < region->off || off + len > region->off + region->size) {
        sim_fail(w, "ownership",
                 "node %u: %" PRIu64 " bytes of transfer %" PRIu64 " land in memory that was given back",
                 to->node->index, len, op->serial);
        return false;
    }
    if (op->state == SIM_OP_ENDED) {
        sim_fail(w, "ownership", "node %u: transfer %" PRIu64 " has ended, and %" PRIu64 " bytes of it land", op->node,
                 op->serial, len);
        return false;
    }
    return true;
}
