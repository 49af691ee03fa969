/* Completions that wait to be handed out: a ring that grows, since one event may end many. */
#include "verbs_int.h"

void fv_wc_push(fv_dom *d, const fab_wc *wc) {
    uint32_t n = d->wc_tail - d->wc_head;
    if (n) { /* neighbours that say the same count together */
        fab_wc *last = &d->wcq[(d->wc_tail - 1) & (d->wc_cap - 1)];
        bool same = last->kind == wc->kind && last->status == 0 && wc->status == 0;
        if (same &&
            ((wc->kind == FAB_WC_OP && last->id == wc->id) || (wc->kind == FAB_WC_IMM && last->imm == wc->imm))) {
            last->count += wc->count;
            return;
        }
    }
    if (n == d->wc_cap) {
        uint32_t cap = d->wc_cap ? d->wc_cap * 2 : 1024;
        fab_wc *q = malloc(cap * sizeof *q);
        if (!q) abort(); /* an end that is lost is worse (C1) */
        for (uint32_t i = 0; i < n; i++) q[i] = d->wcq[(d->wc_head + i) & (d->wc_cap - 1)];
        free(d->wcq);
        d->wcq = q;
        d->wc_head = 0;
        d->wc_tail = n;
        d->wc_cap = cap;
    }
    d->wcq[d->wc_tail++ & (d->wc_cap - 1)] = *wc;
}

uint32_t fv_wc_take(fv_dom *d, fab_wc *out, uint32_t cap) {
    uint32_t n = 0;
    while (n < cap && d->wc_head != d->wc_tail) out[n++] = d->wcq[d->wc_head++ & (d->wc_cap - 1)];
    return n;
}
