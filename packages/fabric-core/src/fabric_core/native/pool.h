/* Slots with a generation: what a handle names.
 *
 * A handle is generation << 32 | index, so a handle kept too long is recognised instead of naming the slot's next
 * owner. Slots live in chunks that never move; taking and giving back is lock-free (a stack whose head carries a tag
 * against ABA), only growth takes a mutex. */
#ifndef FAB_POOL_H
#define FAB_POOL_H

#include "common.h"

#define FAB_POOL_CHUNK 1024u
#define FAB_POOL_CHUNKS 1024u
#define FAB_GEN_MASK 0x7fffffffu /* handles stay positive as a signed 64-bit number */

typedef struct fab_slot {
    _Atomic uint32_t gen; /* odd while in use: a freed slot matches no handle */
    uint32_t index;
    _Atomic uint32_t next_free;
    uint32_t reserved;
} fab_slot;

typedef struct fab_pool {
    FAB_ALIGNED _Atomic uint64_t free_head; /* tag << 32 | index + 1 */
    FAB_ALIGNED _Atomic uint32_t count;     /* slots that exist */
    uint32_t max;
    size_t size; /* bytes of one object, whose first member is a fab_slot */
    pthread_mutex_t grow;
    _Atomic(char *) chunks[FAB_POOL_CHUNKS];
} fab_pool;

int fab_pool_init(fab_pool *pool, size_t size, uint32_t max);
void fab_pool_fini(fab_pool *pool);
void *fab_pool_alloc(fab_pool *pool); /* NULL: `max` are in use */
void fab_pool_free(fab_pool *pool, void *object);

static inline void *fab_pool_at(fab_pool *pool, uint32_t index) {
    if (index >= atomic_load_explicit(&pool->count, memory_order_acquire)) return NULL;
    char *chunk = atomic_load_explicit(&pool->chunks[index / FAB_POOL_CHUNK], memory_order_acquire);
    return chunk + (size_t)(index % FAB_POOL_CHUNK) * pool->size;
}

/* The object of a handle, NULL when it was freed since. */
static inline void *fab_pool_get(fab_pool *pool, uint32_t index, uint32_t gen) {
    fab_slot *slot = fab_pool_at(pool, index);
    if (!slot || atomic_load_explicit(&slot->gen, memory_order_acquire) != gen || !(gen & 1u)) return NULL;
    return slot;
}

static inline uint32_t fab_slot_gen(const fab_slot *slot) {
    return atomic_load_explicit(&((fab_slot *)slot)->gen, memory_order_relaxed);
}

#endif
