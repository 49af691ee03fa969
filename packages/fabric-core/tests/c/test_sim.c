/* The simulator under each sanitizer: some hundred seeds without a violation, and the same seed twice is the same run (R12).
 * Contracts C1 to C8 and C10 are checked inside of every run; see docs/simulator.md. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fabric/domain.h"
#include "sim/cdef_sim.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#    define SEEDS 120u
#    define TRANSFERS 60u
#else
#    define SEEDS 200u
#    define TRANSFERS 150u
#endif
#define OPTIONS 256u

static uint32_t option(const char *name) {
    for (uint32_t i = 0; i < fab_sim_option_count(); i++)
        if (!strcmp(fab_sim_option_at(i)->name, name)) return i;
    CHECK(0, "no option %s", name);
    return 0;
}

static void run(uint64_t seed, uint64_t transfers, fab_sim_report *out) {
    uint64_t values[OPTIONS];
    CHECK(fab_sim_option_count() <= OPTIONS);
    fab_sim_expand(seed, values);
    values[option("transfers")] = transfers;
    CHECK(fab_sim_run(seed, values, out, NULL, 0) == 0);
    CHECK(!out->violated, "seed %" PRIu64 ": %s", seed, out->violation);
}

static void seeds(void) {
    uint64_t faults = 0, done = 0, ended = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        fab_sim_report r;
        run(seed, TRANSFERS, &r);
        CHECK(r.transfers >= TRANSFERS);
        for (uint32_t i = 0; i < 16; i++) faults += r.faults[i];
        done += r.done;
        ended += r.done + r.failed + r.cancelled;
    }
    CHECK(done > 0 && ended > done && faults > 0); /* a run without trouble would prove little */
}

/* R12: memory lies elsewhere the second time, other seeds ran in between, and nothing of that is seen. */
static void same_run(void) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fab_sim_report a, b, other;
        run(seed, TRANSFERS, &a);
        void *moved = malloc(1000 + seed * 777);
        run(seed + 1, TRANSFERS, &other);
        run(seed, TRANSFERS, &b);
        free(moved);
        CHECK(a.hash == b.hash && a.events == b.events, "seed %" PRIu64, seed);
        CHECK(a.hash != other.hash);
    }
}

static void nonsense(void) {
    uint64_t values[OPTIONS];
    fab_sim_report r;
    fab_sim_expand(1, values);
    values[option("nodes")] = 1;
    CHECK(fab_sim_run(1, values, &r, NULL, 0) < 0);
    CHECK(fab_sim_option_at(fab_sim_option_count()) == NULL);
}

int main(void) {
    seeds();
    same_run();
    nonsense();
    return 0;
}
