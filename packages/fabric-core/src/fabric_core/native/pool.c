#include "pool.h"

int fab_pool_init(fab_pool *pool, size_t size, uint32_t max) {
    memset(pool, 0, sizeof *pool);
    pool->size = (size + FAB_CACHELINE - 1) / FAB_CACHELINE * FAB_CACHELINE;
    pool->max = max < FAB_POOL_CHUNK * FAB_POOL_CHUNKS ? max : FAB_POOL_CHUNK * FAB_POOL_CHUNKS;
    return -pthread_mutex_init(&pool->grow, NULL);
}

void fab_pool_fini(fab_pool *pool) {
    for (uint32_t i = 0; i < FAB_POOL_CHUNKS; i++) free(atomic_load_explicit(&pool->chunks[i], memory_order_relaxed));
    pthread_mutex_destroy(&pool->grow);
}

static void push_free(fab_pool *pool, fab_slot *slot) {
    uint64_t head = atomic_load_explicit(&pool->free_head, memory_order_relaxed), next;
    do {
        atomic_store_explicit(&slot->next_free, (uint32_t)head, memory_order_relaxed);
        next = ((head >> 32) + 1) << 32 | (slot->index + 1);
        /* release: whoever takes the slot sees what its last owner wrote */
    } while (!atomic_compare_exchange_weak_explicit(&pool->free_head, &head, next, memory_order_release,
                                                    memory_order_relaxed));
}

static bool grow(fab_pool *pool) {
    pthread_mutex_lock(&pool->grow);
    bool grown = true;
    if ((uint32_t)atomic_load_explicit(&pool->free_head, memory_order_relaxed) == 0) {
        uint32_t count = atomic_load_explicit(&pool->count, memory_order_relaxed);
        char *chunk = count + FAB_POOL_CHUNK <= pool->max || count == 0
                          ? aligned_alloc(FAB_CACHELINE, pool->size * FAB_POOL_CHUNK)
                          : NULL;
        if (!chunk) {
            grown = false;
        } else {
            memset(chunk, 0, pool->size * FAB_POOL_CHUNK);
            for (uint32_t i = 0; i < FAB_POOL_CHUNK; i++) ((fab_slot *)(chunk + i * pool->size))->index = count + i;
            atomic_store_explicit(&pool->chunks[count / FAB_POOL_CHUNK], chunk, memory_order_release);
            atomic_store_explicit(&pool->count, count + FAB_POOL_CHUNK, memory_order_release);
            for (uint32_t i = FAB_POOL_CHUNK; i-- > 0;) push_free(pool, (fab_slot *)(chunk + i * pool->size));
        }
    }
    pthread_mutex_unlock(&pool->grow);
    return grown;
}

void *fab_pool_alloc(fab_pool *pool) {
    for (;;) {
        uint64_t head = atomic_load_explicit(&pool->free_head, memory_order_acquire);
        while ((uint32_t)head != 0) {
            fab_slot *slot = fab_pool_at(pool, (uint32_t)head - 1);
            /* next_free may be stale when another thread takes this slot first; the tag then makes the exchange fail */
            uint64_t next = ((head >> 32) + 1) << 32 | atomic_load_explicit(&slot->next_free, memory_order_relaxed);
            if (atomic_compare_exchange_weak_explicit(&pool->free_head, &head, next, memory_order_acquire,
                                                      memory_order_acquire)) {
                uint32_t gen = atomic_load_explicit(&slot->gen, memory_order_relaxed);
                atomic_store_explicit(&slot->gen, (gen + 1) & FAB_GEN_MASK, memory_order_release);
                return slot;
            }
        }
        if (!grow(pool)) return NULL;
    }
}

void fab_pool_free(fab_pool *pool, void *object) {
    fab_slot *slot = object;
    uint32_t gen = atomic_load_explicit(&slot->gen, memory_order_relaxed);
    atomic_store_explicit(&slot->gen, (gen + 1) & FAB_GEN_MASK, memory_order_release);
    push_free(pool, slot);
}
