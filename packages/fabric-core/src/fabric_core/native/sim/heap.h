/* What happens next: events by time; equal times in an order drawn from the seed. */
#ifndef FAB_SIM_HEAP_H
#define FAB_SIM_HEAP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct sim_event {
    uint64_t at;
    uint32_t tie, kind;
    uint32_t a, b; /* what the kind says: mostly the number of an object, and its generation */
} sim_event;

typedef struct sim_heap {
    sim_event *events;
    uint32_t count, cap;
} sim_heap;

void sim_heap_push(sim_heap *h, sim_event event);
bool sim_heap_pop(sim_heap *h, sim_event *out);
void sim_heap_fini(sim_heap *h);

#endif
