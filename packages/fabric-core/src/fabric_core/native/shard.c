/* How a logical write becomes pieces for NICs: exact for every length and number of NICs (C5), one count (C4). */
#include "engine_internal.h"

#define MANY_TARGETS \
    4u /* times as long a write is cut (128 KiB): where the simulator sees no difference, docs/simulator.md */

/* A part of `len` cut into `pieces`: piece i is [len*i/pieces, len*(i+1)/pieces), computed without overflow, so that
 * every byte is in exactly one piece. Cut points are moved down to cache lines where pieces are large enough. */
static uint64_t cut(uint64_t len, uint32_t pieces, uint32_t i) {
    if (i >= pieces) return len;
    uint64_t whole = len / pieces, rest = len % pieces;
    uint64_t at = whole * i + (rest * i) / pieces;
    return whole >= 2 * FAB_CACHELINE ? at / FAB_CACHELINE * FAB_CACHELINE : at;
}

/* Decides pieces, NICs and the form of the immediate. `pin` < 0: any NIC. `targets`: works of the transfer. */
void fab_work_split(fab_work *w, const fab_group *g, int32_t pin, uint32_t rotate, uint32_t targets) {
    uint64_t max = 0; /* the smallest limit of the NICs that may carry it */
    for (uint32_t i = 0; i < g->nnics; i++) {
        uint64_t limit = g->nics[i].caps.max_write; /* of all of them: one may take over from another */
        if ((pin < 0 || (uint32_t)pin == i) && limit && (!max || limit < max)) max = limit;
    }
    uint64_t pieces = 1;
    w->pinned = pin >= 0;
    w->nnics = 1;
    w->nic0 = 0;
    w->nics = (uint8_t)(1u << (pin < 0 ? 0 : pin)); /* messages use the first NIC that is up (paper, section 3) */
    if (pin < 0 && w->kind == FAB_WR_WRITE) {
        w->nics = (uint8_t)atomic_load_explicit(&w->peer->usable, memory_order_relaxed);
        w->nnics = (uint8_t)__builtin_popcount(w->nics);
        w->nic0 = (uint8_t)(rotate % w->nnics);
        /* A single large write goes over all NICs; pages go round robin whole, and so do targets, of which there are
         * enough for all NICs, up to a length at which more requests cost less than NICs that wait for the last one. */
        uint64_t least = g->engine->cfg.shard_bytes * (targets < w->nnics ? 1 : MANY_TARGETS);
        if (w->npages == 1 && w->len >= least) pieces = w->nnics;
    }
    if (max && w->kind == FAB_WR_WRITE) {
        uint64_t least = w->len / max + (w->len % max != 0);
        /* cut() rounds down to cache lines, which can lengthen the next piece by almost one line */
        if (least > 1) least = w->len / (max > 2 * FAB_CACHELINE ? max - FAB_CACHELINE : max) + 1;
        if (least > pieces) pieces = least;
    }
    w->pieces = (uint32_t)pieces;
    w->units = w->npages * w->pieces;
    w->final_imm = w->has_imm && pieces > 8;
    for (uint32_t s = 0; s < w->nnics; s++) w->next[s] = s;
    w->posted = 0;
}

/* Fills the work request of one unit as it leaves by `nic`. Fields that are equal for all units of a work (the
 * template, paper section 3.5) were computed when the work was made. */
void fab_work_unit(const fab_work *w, uint32_t unit, uint32_t nic, fab_wr *wr) {
    uint32_t page = w->pieces == 1 ? unit : unit / w->pieces, piece = w->pieces == 1 ? 0 : unit % w->pieces;
    uint64_t from = w->pieces == 1 ? 0 : cut(w->len, w->pieces, piece);
    uint64_t to = w->pieces == 1 ? w->len : cut(w->len, w->pieces, piece + 1);
    uint64_t l = w->loff + (w->sidx ? w->sidx[page] * w->sstride : 0) + from;
    uint64_t r = w->roff + (w->didx ? w->didx[page] * w->dstride : 0) + from;
    wr->id = fab_transfer_handle(w->transfer);
    wr->len = to - from;
    wr->kind = w->kind;
    wr->flags = w->has_imm && !w->final_imm ? FAB_WR_IMM : 0;
    wr->imm = (w->pieces - 1) << 29 | w->imm;
    if (w->kind == FAB_WR_SEND) {
        wr->local_addr = w->loff;
        wr->local_key = wr->remote_addr = wr->remote_key = 0;
        return;
    }
    uint32_t key = nic % w->remote->nkeys; /* our NIC i talks to the peer's NIC i modulo its number */
    wr->local_addr = w->local ? w->local->base + l : 0;
    wr->local_key = w->local ? w->local->local_key[nic] : 0;
    wr->remote_addr = w->remote->base[key] + r;
    wr->remote_key = w->remote->key[key];
}
