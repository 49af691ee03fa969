/* From a seed to a value for every option, and back to text through Python. */
#include "sim.h"

#include "cdef_sim.h"

static const fab_sim_option table[] = {
#define X(name, calm, lo, hi, off, help) {#name, help, calm, lo, hi, off},
    SIM_OPTIONS(X)
#undef X
};
#define COUNT (sizeof table / sizeof *table)

_Static_assert(sizeof(sim_options) == COUNT * sizeof(uint64_t), "options are numbers of 64 bits, in the table's order");

uint32_t fab_sim_option_count(void) { return COUNT; }

const fab_sim_option *fab_sim_option_at(uint32_t index) { return index < COUNT ? &table[index] : NULL; }

/* Combinations that would only make a run slow, or not fit into a node's memory, are brought down. */
static void moderate(sim_options *o) {
    while (o->pages > 1 && o->pages * o->payload > 400000) o->pages /= 2;
    uint64_t requests = 32 + 16 * o->send_queue; /* of one transfer */
    uint64_t most = requests / o->pages ? requests / o->pages : 1;
    if (most > 48) most = 48;
    if (o->max_write && o->payload / o->max_write >= most) o->max_write = o->payload / most + 1;
    if (o->flows * o->payload * o->pages > 8000000) o->flows = 1 + 8000000 / (o->payload * o->pages);
}

void fab_sim_expand(uint64_t seed, uint64_t *values) {
    for (uint32_t i = 0; i < COUNT; i++) {
        sim_rand r = sim_rand_of(seed, 1000 + i); /* a stream for each: a new option moves no other */
        const fab_sim_option *o = &table[i];
        values[i] = sim_percent(&r, o->calm_percent) ? o->calm : sim_spread(&r, o->lo, o->hi);
    }
    moderate((sim_options *)values);
}

void sim_options_of(uint64_t seed, sim_options *out) { fab_sim_expand(seed, (uint64_t *)out); }
