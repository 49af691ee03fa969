/* A node's memory in pieces of a power of two, and what is written in them: words made from the transfer's tag and their
 * place, so that a byte from another transfer, or from another place of the same one, is seen. */
#include "sim.h"

#define LEAST 6u /* bits of the smallest piece */

void sim_regions_reset(sim_node *n) {
    sim_slab_fini(&n->regions);
    sim_slab_init(&n->regions, sizeof(sim_region));
    for (uint32_t i = 0; i < 64; i++) n->free_regions[i] = SIM_NONE;
    memset(n->arena, 0xee, n->arena_used); /* what the last incarnation left is nobody's any more */
    n->arena_used = 0;
}

sim_region *sim_region_take(sim_node *n, uint64_t size, uint32_t owner) {
    uint32_t cls = size <= 1u << LEAST ? LEAST : 64u - (uint32_t)__builtin_clzll(size - 1);
    sim_region *r;
    if (n->free_regions[cls] != SIM_NONE) {
        r = sim_slab_at(&n->regions, n->free_regions[cls]);
        n->free_regions[cls] = r->next;
    } else {
        if (n->arena_used + (1ull << cls) > SIM_ARENA) return NULL;
        r = sim_slab_take(&n->regions);
        r->off = n->arena_used;
        r->size = 1ull << cls;
        r->cls = cls;
        n->arena_used += r->size;
    }
    r->owner = owner;
    return r;
}

void sim_region_give(sim_node *n, uint32_t index) {
    sim_region *r = sim_slab_at(&n->regions, index);
    r->owner = SIM_NONE;
    r->next = n->free_regions[r->cls];
    n->free_regions[r->cls] = index;
}

static inline uint64_t word(uint64_t tag, uint64_t i) { return (tag ^ i) + i * 0x9e3779b97f4a7c15ull; }

void sim_fill(char *at, uint64_t tag, uint64_t len) {
    uint64_t i = 0;
    for (; i < len / 8; i++) {
        uint64_t x = word(tag, i);
        memcpy(at + 8 * i, &x, 8);
    }
    uint64_t x = word(tag, i);
    memcpy(at + 8 * i, &x, len % 8);
}

uint64_t sim_verify(const char *at, uint64_t tag, uint64_t pos, uint64_t len) {
    uint64_t i = 0;
    if (pos % 8 == 0)
        for (; i + 8 <= len; i += 8) {
            uint64_t x = word(tag, (pos + i) / 8), y;
            memcpy(&y, at + i, 8);
            if (x != y) return i;
        }
    for (; i < len; i++) {
        uint64_t x = word(tag, (pos + i) / 8);
        if ((unsigned char)at[i] != (x >> 8 * ((pos + i) % 8) & 0xff)) return i;
    }
    return UINT64_MAX;
}
