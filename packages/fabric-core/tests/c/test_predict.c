/* The predictor: the real engine over NICs that cost time. Every write is counted once (C4) for any number of NICs, the
 * same question has the same answer, and a lost NIC leaves its work to the others (R8). */
#include "fabric/engine.h"

#include "check.h"
#include "sim/cdef_sim.h"

#include <errno.h>
#include <string.h>

static const fab_sim_nic_model *model(const char *name) {
    for (uint32_t i = 0; fab_sim_nic_at(i); i++)
        if (!strcmp(fab_sim_nic_at(i)->name, name)) return fab_sim_nic_at(i);
    return NULL;
}

static fab_sim_question question(const char *nic, uint32_t op, uint64_t size) {
    return (fab_sim_question){.nic = *model(nic),
                              .op = op,
                              .peers = op == FAB_OP_SCATTER ? 20 : 1,
                              .depth = 3,
                              .size = size,
                              .pages = op == FAB_OP_PAGED ? 300 : 1,
                              .shard_bytes = 32768,
                              .warm = 4,
                              .count = 20};
}

static void every_write_is_counted_once(void) {
    static const char *nics[] = {"efa-p5", "efa-p5en", "cx7"};
    static const uint64_t sizes[] = {0, 1, 32767, 32769, 1 << 20};
    for (uint32_t n = 0; n < 3; n++)
        for (uint32_t op = FAB_OP_WRITE; op <= FAB_OP_SCATTER; op++)
            for (uint32_t s = 0; s < 5; s++) {
                fab_sim_question q = question(nics[n], op, sizes[s]);
                fab_sim_answer a, b;
                CHECK(fab_sim_predict(&q, &a) == 0);
                CHECK(a.done == 24 && !a.failed);
                CHECK(a.writes == 24 * (op == FAB_OP_PAGED ? 300u : op == FAB_OP_SCATTER ? 20u : 1u));
                CHECK(a.arrived == a.writes);
                CHECK(a.all.ops == 20 && a.all.last_ns > a.all.first_ns);
                CHECK(fab_sim_predict(&q, &b) == 0);
                CHECK(!memcmp(&a, &b, sizeof a));
            }
}

static void a_lost_nic_leaves_its_work_to_the_others(void) {
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t op = i ? FAB_OP_PAGED : FAB_OP_WRITE;
        fab_sim_question q = question("efa-p5", op, i ? 65536 : 16 << 20);
        if (i == 2) q.nic.queue = 32; /* most pages are not yet posted when their NIC is lost */
        q.lost_nic = 3;
        q.lose_ns = 10000000;
        q.until_ns = 60000000;
        q.from[0] = 2000000, q.to[0] = 10000000;
        q.from[1] = 20000000, q.to[1] = 60000000;
        fab_sim_answer a;
        CHECK(fab_sim_predict(&q, &a) == 0);
        CHECK(a.failed >= 1 && a.failed <= q.depth);
        double rate[2];
        for (uint32_t k = 0; k < 2; k++)
            rate[k] = (double)(a.span[k].ops - 1) / (double)(a.span[k].last_ns - a.span[k].first_ns);
        CHECK(rate[1] >= 0.9 * 3 / 4 * rate[0]);
        CHECK(rate[1] <= 1.1 * 3 / 4 * rate[0]); /* and it is lost: three are not worth four */
    }
}

static void nonsense_is_refused(void) {
    fab_sim_answer a;
    fab_sim_question q = question("none", FAB_OP_WRITE, 1);
    CHECK(fab_sim_predict(&q, &a) == -EINVAL); /* no time would pass */
    q = question("cx7", FAB_OP_SEND, 1);
    CHECK(fab_sim_predict(&q, &a) == -EINVAL);
    q = question("cx7", FAB_OP_WRITE, 1);
    q.nic.nics = 9;
    CHECK(fab_sim_predict(&q, &a) == -EINVAL);
    q = question("cx7", FAB_OP_WRITE, UINT64_MAX);
    CHECK(fab_sim_predict(&q, &a) == -EINVAL);
}

int main(void) {
    every_write_is_counted_once();
    a_lost_nic_leaves_its_work_to_the_others();
    nonsense_is_refused();
    return 0;
}
