/* Runs simulated seeds FIRST .. FIRST + COUNT - 1 and stops at the first violation: exit 1, with the seed and the checker's
 * words. Each seed has a budget of processor time, so that an engine that spins for ever is found as well (SIGVTALRM);
 * the seed at work is told before it begins, for whoever sees this program die.
 *
 * usage: hunt FIRST COUNT [OPTION=VALUE]... */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "fabric/domain.h"

#include "sim/cdef_sim.h"

#define SEED_SECONDS 10

static void override(uint64_t *values, const char *text) {
    const char *equal = strchr(text, '=');
    for (uint32_t i = 0; equal && i < fab_sim_option_count(); i++) {
        const char *name = fab_sim_option_at(i)->name;
        if (strlen(name) == (size_t)(equal - text) && !strncmp(name, text, strlen(name))) {
            values[i] = strtoull(equal + 1, NULL, 10);
            return;
        }
    }
    fprintf(stderr, "no such option: %s\n", text);
    exit(2);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    uint64_t first = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10), transfers = 0;
    uint64_t *values = calloc(fab_sim_option_count(), sizeof *values);
    if (!values) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (uint64_t seed = first; seed < first + count; seed++) {
        static fab_sim_report report;
        const struct itimerval budget = {.it_value = {.tv_sec = SEED_SECONDS}};
        if (setitimer(ITIMER_VIRTUAL, &budget, NULL)) return 2;
        printf("seed %" PRIu64 "\n", seed);
        fab_sim_expand(seed, values);
        for (int i = 3; i < argc; i++) override(values, argv[i]);
        int rc = fab_sim_run(seed, values, &report, NULL, 0);
        if (rc) {
            fprintf(stderr, "seed %" PRIu64 ": options that make no sense (%d)\n", seed, rc);
            return 2;
        }
        transfers += report.transfers;
        if (report.violated) {
            printf("violation %s\n", report.violation);
            return 1;
        }
    }
    printf("transfers %" PRIu64 "\n", transfers);
    free(values);
    return 0;
}
