/* channel.c - the shared rings of one channel; the protocol and its orderings are in channel.h. */
#include "local_int.h"

void fl_chan_views(fl_chan *ch, fl_side *imm, fl_side rec[FL_RINGS]) {
    *imm = (fl_side){.tail_p = &ch->imm_tail, .head_p = &ch->imm_head, .data = (uint8_t *)ch->imm, .size = FL_IMMS};
    static const uint64_t bytes[FL_RINGS] = {FL_MSG_BYTES, FL_BNC_BYTES};
    uint8_t *data[FL_RINGS] = {ch->msg, ch->bnc};
    for (int i = 0; i < FL_RINGS; i++) {
        fl_owner *keep = rec[i].owner;
        rec[i] = (fl_side){
            .tail_p = &ch->rec_tail[i], .head_p = &ch->rec_head[i], .data = data[i], .size = bytes[i], .owner = keep};
    }
}

void fl_imm_put(fl_side *s, uint32_t imm, uint32_t count, bool merge) {
    uint64_t *ring = (uint64_t *)(void *)s->data;
    /* relaxed: only we write it */
    if (merge && s->tail != atomic_load_explicit(s->tail_p, memory_order_relaxed)) {
        uint64_t *last = &ring[(s->tail - 1) & (FL_IMMS - 1)], run = (*last >> 32) + count;
        if ((uint32_t)*last == imm && run <= FL_IMM_RUN) {
            *last = run << 32 | imm;
            return;
        }
    }
    ring[s->tail++ & (FL_IMMS - 1)] = (uint64_t)count << 32 | imm;
}

void fl_imm_publish(fl_side *s) {
    /* Publishes the entries, and with them every payload byte copied before (C10): all earlier plain stores come first
     * in a release, streaming stores were fenced by the caller. seq_cst: see channel.h. */
    atomic_store_explicit(s->tail_p, s->tail, memory_order_seq_cst);
}

static uint32_t units(uint32_t len) { return FL_UNIT + (len + FL_UNIT - 1) / FL_UNIT * FL_UNIT; }

static uint64_t space_needed(const fl_side *s, uint32_t len) {
    uint64_t at = s->tail & (s->size - 1), total = units(len);
    return at + total > s->size ? s->size - at + total
                                : total;   /* a record is contiguous: the rest of the ring is padding */
}

bool fl_rec_fits(fl_side *s, uint32_t len) { return s->size - (s->tail - s->reap) >= space_needed(s, len); }

fl_rec *fl_rec_reserve(fl_side *s, uint32_t len) {
    if (!fl_rec_fits(s, len)) return NULL;
    uint64_t at = s->tail & (s->size - 1);
    uint32_t total = units(len);
    if (at + total > s->size) {
        fl_rec *pad = (fl_rec *)(void *)(s->data + at);
        pad->total = (uint32_t)(s->size - at);
        pad->len = 0;
        pad->flags = FL_REC_PAD;
        s->owner[at / FL_UNIT] = (fl_owner){NULL, pad->total};
        s->tail += pad->total;   /* published together with the record that follows */
        at = 0;
    }
    fl_rec *r = (fl_rec *)(void *)(s->data + at);
    r->total = total;
    r->len = len;
    r->flags = 0;
    r->status = 0;
    atomic_store_explicit(&r->state, FL_REC_READY, memory_order_relaxed);   /* published by the tail */
    return r;
}

void fl_rec_publish(fl_side *s, uint32_t len, struct fl_slot *owner) {
    uint64_t at = s->tail & (s->size - 1);
    uint32_t total = units(len);
    s->owner[at / FL_UNIT] = (fl_owner){owner, total};
    s->tail += total;
    atomic_store_explicit(s->tail_p, s->tail, memory_order_seq_cst);   /* as in fl_imm_publish */
}

fl_rec *fl_rec_front(fl_side *s, uint64_t avail, uint32_t *total, uint32_t *len) {
    uint64_t at = s->head & (s->size - 1);
    if (avail < FL_UNIT || at % FL_UNIT) return NULL;
    fl_rec *r = (fl_rec *)(void *)(s->data + at);
    *total = *(volatile uint32_t *)&r->total;
    *len = *(volatile uint32_t *)&r->len;
    bool ok = *total >= FL_UNIT && *total % FL_UNIT == 0 && *total <= avail && at + *total <= s->size &&
              *len <= *total - FL_UNIT;
    return ok ? r : NULL;
}
