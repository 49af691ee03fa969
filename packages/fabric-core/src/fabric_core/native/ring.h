/* The submission ring: many producers, one consumer (whoever holds the group's lock), bounded.
 *
 * Each cell carries a sequence number: equal to the position when free, position + 1 when filled. A full ring is the
 * caller's back-pressure (C8): push never waits. */
#ifndef FAB_RING_H
#define FAB_RING_H

#include "common.h"

typedef struct fab_req {
    _Atomic uint64_t seq;
    uint32_t kind;
    int32_t arg;
    void *ptr;
    uint64_t value;
} fab_req;

typedef struct fab_ring {
    FAB_ALIGNED _Atomic uint64_t tail; /* producers claim here */
    FAB_ALIGNED _Atomic uint64_t head; /* the consumer's own; atomic since fab_ring_ready may look without the lock */
    uint64_t mask;
    fab_req *cells;
} fab_ring;

static inline int fab_ring_init(fab_ring *ring, uint32_t capacity) {
    ring->cells = aligned_alloc(FAB_CACHELINE, sizeof(fab_req) * capacity);
    if (!ring->cells) return -ENOMEM;
    memset(ring->cells, 0, sizeof(fab_req) * capacity);
    for (uint32_t i = 0; i < capacity; i++) atomic_init(&ring->cells[i].seq, i);
    ring->mask = capacity - 1;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    return 0;
}

static inline bool fab_ring_push(fab_ring *ring, uint32_t kind, int32_t arg, void *ptr, uint64_t value) {
    uint64_t pos = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    for (;;) {
        fab_req *cell = &ring->cells[pos & ring->mask];
        /* acquire: the consumer has read the cell's last content before it freed it */
        int64_t ahead = (int64_t)(atomic_load_explicit(&cell->seq, memory_order_acquire) - pos);
        if (ahead < 0) return false;
        if (ahead > 0) {
            pos = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        } else if (atomic_compare_exchange_weak_explicit(&ring->tail, &pos, pos + 1, memory_order_relaxed,
                                                         memory_order_relaxed)) {
            cell->kind = kind;
            cell->arg = arg;
            cell->ptr = ptr;
            cell->value = value;
            /* seq_cst, not only release: the producer next tries the lock or reads `sleeping`, and that must not be
             * seen before the cell; the other side stores those and then reads the cell (fab_group_unlock, sleep). */
            atomic_store_explicit(&cell->seq, pos + 1, memory_order_seq_cst);
            return true;
        }
    }
}

/* seq_cst: see fab_ring_push */
static inline bool fab_ring_ready(fab_ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    return atomic_load_explicit(&ring->cells[head & ring->mask].seq, memory_order_seq_cst) == head + 1;
}

static inline bool fab_ring_pop(fab_ring *ring, fab_req *out) {
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    fab_req *cell = &ring->cells[head & ring->mask];
    if (atomic_load_explicit(&cell->seq, memory_order_acquire) != head + 1) return false;
    out->kind = cell->kind;
    out->arg = cell->arg;
    out->ptr = cell->ptr;
    out->value = cell->value;
    atomic_store_explicit(&cell->seq, head + ring->mask + 1, memory_order_release);
    atomic_store_explicit(&ring->head, head + 1, memory_order_relaxed);
    return true;
}

#endif
