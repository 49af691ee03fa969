/* fabric/backend.h - what backends in C have in common: completions that wait to be handed out, and the way to
 * fabric/contact.h. Each includes it once per file that needs it; there is nothing to link. */
#ifndef FABRIC_BACKEND_H
#define FABRIC_BACKEND_H
#include "fabric/domain.h"
#include "fabric/engine.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

/* A ring that grows, since one event may end many requests. All zero: empty. */
typedef struct fab_wc_ring {
    fab_wc *wc;
    uint32_t head, tail, cap;
} fab_wc_ring;

static inline uint32_t fab_wc_ready(const fab_wc_ring *r) { return r->tail - r->head; }

static inline void fab_wc_push(fab_wc_ring *r, const fab_wc *wc) {
    uint32_t n = fab_wc_ready(r);
    if (n) { /* neighbours that say the same count together */
        fab_wc *last = &r->wc[(r->tail - 1) & (r->cap - 1)];
        bool same = last->kind == wc->kind && last->status == 0 && wc->status == 0;
        if (same &&
            ((wc->kind == FAB_WC_OP && last->id == wc->id) || (wc->kind == FAB_WC_IMM && last->imm == wc->imm))) {
            last->count += wc->count;
            return;
        }
    }
    if (n == r->cap) {
        uint32_t cap = r->cap ? r->cap * 2 : 1024;
        fab_wc *grown = (fab_wc *)malloc(cap * sizeof *grown);
        if (!grown) abort(); /* an end that is lost is worse (C1) */
        for (uint32_t i = 0; i < n; i++) grown[i] = r->wc[(r->head + i) & (r->cap - 1)];
        free(r->wc);
        *r = (fab_wc_ring){.wc = grown, .tail = n, .cap = cap};
    }
    r->wc[r->tail++ & (r->cap - 1)] = *wc;
}

static inline uint32_t fab_wc_take(fab_wc_ring *r, fab_wc *out, uint32_t cap) {
    uint32_t n = 0;
    while (n < cap && r->head != r->tail) out[n++] = r->wc[r->head++ & (r->cap - 1)];
    return n;
}

/* The functions of fabric/contact.h, from the address of the engine's table (fabric_core.native_api()); NULL: an engine
 * that has none. */
static inline const void *fab_contact_of(uintptr_t table) {
    const fab_native_table *t = (const fab_native_table *)table;
    size_t end = offsetof(fab_native_table, contact_api) + sizeof t->contact_api;
    return t && t->version == 1 && t->struct_size >= end && t->contact_api ? t->contact_api() : NULL;
}

#endif
