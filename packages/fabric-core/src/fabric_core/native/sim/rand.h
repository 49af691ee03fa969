/* Random numbers of a run: independent streams, so that a change of the workload does not move the network's dice.
 * splitmix64: one addition and a mix for each number, and any seed is as good as another. */
#ifndef FAB_SIM_RAND_H
#define FAB_SIM_RAND_H

#include <stdbool.h>
#include <stdint.h>

typedef struct sim_rand {
    uint64_t state;
} sim_rand;

static inline uint64_t sim_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline sim_rand sim_rand_of(uint64_t seed, uint64_t stream) {
    return (sim_rand){sim_mix(seed + 0x9e3779b97f4a7c15ull) ^ sim_mix(stream * 0xd1342543de82ef95ull + 1)};
}

static inline uint64_t sim_next(sim_rand *r) { return sim_mix(r->state += 0x9e3779b97f4a7c15ull); }

/* [0, n); 0 for n = 0 */
static inline uint64_t sim_below(sim_rand *r, uint64_t n) {
    return (uint64_t)((unsigned __int128)sim_next(r) * n >> 64);
}

static inline bool sim_permille(sim_rand *r, uint64_t chance) { return chance && sim_below(r, 1000) < chance; }
static inline bool sim_percent(sim_rand *r, uint64_t chance) { return chance && sim_below(r, 100) < chance; }

/* [lo, hi], every order of magnitude as likely as the others */
static inline uint64_t sim_spread(sim_rand *r, uint64_t lo, uint64_t hi) {
    if (hi <= lo) return lo;
    uint64_t range = hi - lo + 1;
    uint32_t bits = 64u - (uint32_t)__builtin_clzll(range);
    uint64_t limit = bits > 1 ? 1ull << (1 + sim_below(r, bits)) : 2;
    return lo + sim_below(r, limit < range ? limit : range);
}

#endif
