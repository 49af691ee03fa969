/* A heap with four children per node: half the levels of a binary one, and siblings share cache lines. */
#include "heap.h"

#include <stdlib.h>

static inline bool before(const sim_event *a, const sim_event *b) {
    return a->at < b->at || (a->at == b->at && a->tie < b->tie);
}

void sim_heap_push(sim_heap *h, sim_event event) {
    if (h->count == h->cap) {
        h->cap = h->cap ? 2 * h->cap : 1024;
        h->events = realloc(h->events, h->cap * sizeof *h->events);
        if (!h->events) abort();
    }
    uint32_t i = h->count++;
    while (i) {
        uint32_t parent = (i - 1) / 4;
        if (!before(&event, &h->events[parent])) break;
        h->events[i] = h->events[parent];
        i = parent;
    }
    h->events[i] = event;
}

bool sim_heap_pop(sim_heap *h, sim_event *out) {
    if (!h->count) return false;
    *out = h->events[0];
    sim_event last = h->events[--h->count];
    uint32_t i = 0;
    for (;;) {
        uint32_t first = 4 * i + 1, least = first;
        if (first >= h->count) break;
        for (uint32_t k = first + 1; k < first + 4 && k < h->count; k++)
            if (before(&h->events[k], &h->events[least])) least = k;
        if (!before(&h->events[least], &last)) break;
        h->events[i] = h->events[least];
        i = least;
    }
    if (h->count) h->events[i] = last;
    return true;
}

void sim_heap_fini(sim_heap *h) { free(h->events); }
