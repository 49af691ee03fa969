/* Objects with a number: chunks that never move, a free list, and a generation that tells a late event from a valid one.
 * The lowest free number is not sought, but the order of numbers depends on nothing but the calls: runs repeat. */
#ifndef FAB_SIM_SLAB_H
#define FAB_SIM_SLAB_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SIM_CHUNK 256u
#define SIM_CHUNKS 4096u
#define SIM_NONE UINT32_MAX

typedef struct sim_slot {
    uint32_t index, gen; /* gen is odd while in use */
    uint32_t next_free;
} sim_slot;

typedef struct sim_slab {
    size_t size; /* of one object, whose first member is a sim_slot */
    uint32_t count, used, first_free;
    char *chunks[SIM_CHUNKS];
} sim_slab;

static inline void sim_slab_init(sim_slab *s, size_t size) {
    memset(s, 0, sizeof *s);
    s->size = (size + 63) / 64 * 64;
    s->first_free = SIM_NONE;
}

static inline void sim_slab_fini(sim_slab *s) {
    for (uint32_t i = 0; i < SIM_CHUNKS && s->chunks[i]; i++) free(s->chunks[i]);
}

static inline void *sim_slab_at(const sim_slab *s, uint32_t index) {
    return s->chunks[index / SIM_CHUNK] + (size_t)(index % SIM_CHUNK) * s->size;
}

/* What follows the slot is as its last owner left it; zero the first time. */
static inline void *sim_slab_take(sim_slab *s) {
    if (s->first_free == SIM_NONE) {
        char *chunk = s->count / SIM_CHUNK < SIM_CHUNKS ? aligned_alloc(64, SIM_CHUNK * s->size) : NULL;
        if (!chunk) abort(); /* a run is bounded; a machine without memory cannot go on */
        memset(chunk, 0, SIM_CHUNK * s->size);
        s->chunks[s->count / SIM_CHUNK] = chunk;
        for (uint32_t i = SIM_CHUNK; i-- > 0;) {
            sim_slot *slot = (sim_slot *)(chunk + i * s->size);
            slot->index = s->count + i;
            slot->next_free = s->first_free;
            s->first_free = slot->index;
        }
        s->count += SIM_CHUNK;
    }
    sim_slot *slot = sim_slab_at(s, s->first_free);
    s->first_free = slot->next_free;
    slot->gen++;
    s->used++;
    return slot;
}

static inline void sim_slab_give(sim_slab *s, void *object) {
    sim_slot *slot = object;
    slot->gen++;
    slot->next_free = s->first_free;
    s->first_free = slot->index;
    s->used--;
}

/* The object if it is still the one of that generation. */
static inline void *sim_slab_get(const sim_slab *s, uint32_t index, uint32_t gen) {
    if (index >= s->count) return NULL;
    sim_slot *slot = sim_slab_at(s, index);
    return slot->gen == gen && gen & 1u ? slot : NULL;
}

#endif
