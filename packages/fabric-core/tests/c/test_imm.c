/* Immediates counted by many threads at once (imm.c): a reached expectation ends, once, and never early (C1, C3); what
 * an expectation did not claim stays (C3); shards of a split add up to one (C4); an arrival of an earlier generation is
 * stray (C4). Every worker of an engine counts for itself, so arrivals do come from several threads. */
#include "engine_internal.h"

#include "litmus.h"
#include "loop_domain.h"

enum { ARRIVERS = 3, OWNER = ARRIVERS, THREADS };
static fab_engine *engine;
static loop_nic *nic;
static litmus_barrier gate = {.threads = THREADS};

static void open_engine(uint32_t slots) {
    fab_engine_cfg cfg = {.imm_slots = slots, .max_inflight = 64, .max_peers = 4, .timeout_ns = LITMUS_DEADLINE_NS};
    engine = fab_engine_new(&cfg);
    CHECK(engine);
    nic = loop_new(0, 0);
    uint64_t ops = (uint64_t)(uintptr_t)&loop_ops, ctx = (uint64_t)(uintptr_t)nic, cpus[16] = {0};
    CHECK(fab_group_open(engine, 1, &ops, &ctx, cpus, 0) == 0);
}

static void close_engine(void) {
    CHECK(fab_engine_close(engine, 1000000000ull) == 0);
    /* R9: what ended was taken off every list and used again */
    CHECK(atomic_load(&engine->expects.count) <= FAB_POOL_CHUNK, "ended expectations pile up");
    fab_engine_free(engine);
    free(nic);
}

static void arrive(uint32_t imm, uint32_t split, uint32_t count) {
    fab_imm_arrive(engine, (split - 1) << 29 | imm, count);
}

static uint32_t end_of(int64_t expectation) {
    fab_outcome out;
    CHECK(fab_expect_outcome(engine, (uint64_t)expectation, &out) == 0);
    return out.phase;
}

/* What the round is about, written by the owner before all meet. */
static uint32_t imm, writes, split;

/* ---- C1, C3, C4: the last arrival meets the expectation ----------------------------------------------------- */

static void meet_expectation(litmus_thread *self) {
    for (uint32_t round = 0; round < LITMUS_ROUNDS(4000); round++) {
        int64_t x = 0;
        if (self->index == OWNER) {
            int64_t got = fab_imm_alloc(engine);
            CHECK(got >= 0);
            imm = (uint32_t)got;
            split = 1 + round % 2 * 2; /* whole writes, or writes cut in three: one shard from each thread */
            writes = 1 + xorshift(&self->rng) % 3 * (split == 1 ? ARRIVERS : 1);
            if (split == 1) writes = (writes + ARRIVERS - 1) / ARRIVERS * ARRIVERS;
        }
        litmus_meet(&gate);
        bool hold_back = round % 4 >= 2;
        litmus_pause(xorshift(&self->rng) % 512);
        if (self->index == OWNER) {
            x = fab_expect(engine, imm, writes, 0, NULL, 0);
            CHECK(x > 0, "%ld", (long)x);
            if (round & 1) CHECK(fab_expect_notify(engine, (uint64_t)x) == 0);
        } else {
            uint32_t mine = split == 1 ? writes / ARRIVERS : writes;
            for (uint32_t i = 0; i < mine - (hold_back && self->index == 0); i++) arrive(imm, split, 1);
        }
        litmus_meet(&gate);
        if (hold_back) {
            if (self->index == OWNER) CHECK(end_of(x) == FAB_PENDING, "round %u: ended before the last arrival", round);
            litmus_meet(&gate);
            if (self->index == 0) arrive(imm, split, 1);
            litmus_meet(&gate);
        }
        if (self->index != OWNER) continue;
        CHECK(end_of(x) == FAB_DONE, "round %u: all arrived and nobody was told", round);
        if (!(round & 1)) CHECK(fab_expect_notify(engine, (uint64_t)x) == 0);
        fab_event event[4];
        int n = fab_events_wait(engine, event, 4, 0);
        CHECK(n == 1 && event[0].kind == FAB_EV_EXPECT && event[0].id == (uint64_t)x, "%d events", n);
        CHECK(fab_imm_count(engine, imm) == 0 && fab_imm_free(engine, imm) == 0, "claimed whole");
        CHECK(fab_expect_release(engine, (uint64_t)x) == 0);
    }
}

/* The same of two threads and one arrival, tight: the arrival adds and then reads the threshold, the expectation stores the
 * threshold and then reads the count. If both look too early, nobody is ever told (store-buffering litmus). Nothing but
 * the state word orders the owner's reading of the outcome. */
static litmus_barrier pair = {.threads = 2};

static void one_arrival(litmus_thread *self) {
    uint32_t rounds = LITMUS_ROUNDS(60000);
    for (uint32_t round = 0; round < rounds; round++) {
        if (self->index == 0) imm = (uint32_t)fab_imm_alloc(engine);
        litmus_meet(&pair);
        litmus_pause(xorshift(&self->rng) % 512);
        if (self->index) {
            arrive(imm, 1, 1);
        } else {
            int64_t x = fab_expect(engine, imm, 1, 0, NULL, 0);
            CHECK(x > 0, "%ld", (long)x);
            uint64_t until = 0;
            for (uint32_t i = 0; end_of(x) == FAB_PENDING; i++) {
                if (i < 10000) continue;
                sched_yield();
                if (!until) until = fab_now() + LITMUS_LOST_NS;
                CHECK(fab_now() < until, "round %u: it arrived and nobody was told", round);
            }
            CHECK(end_of(x) == FAB_DONE && fab_expect_release(engine, (uint64_t)x) == 0);
        }
        litmus_meet(&pair);
        if (self->index == 0) CHECK(fab_imm_free(engine, imm) == 0);
    }
}

/* ---- C1, C3: a cancelled expectation leaves its count to the next in line ---------------------------------------- */

static int64_t first, second;

static void cancel_meets_arrival(litmus_thread *self) {
    for (uint32_t round = 0; round < LITMUS_ROUNDS(4000); round++) {
        if (self->index == OWNER) {
            int64_t got = fab_imm_alloc(engine);
            CHECK(got >= 0);
            imm = (uint32_t)got;
            first = fab_expect(engine, imm, 2, 0, NULL, 0);
            second = fab_expect(engine, imm, 2, 0, NULL, 0);
            CHECK(first > 0 && second > 0);
            CHECK(fab_expect_notify(engine, (uint64_t)first) == 0 && fab_expect_notify(engine, (uint64_t)second) == 0);
        }
        litmus_meet(&gate);
        litmus_pause(xorshift(&self->rng) % 256);
        if (self->index == OWNER) CHECK(fab_expect_cancel(engine, (uint64_t)first) == 0);
        else arrive(imm, 1, 1);
        litmus_meet(&gate);
        if (self->index != OWNER) continue;
        /* three arrived: whichever of the two was first in line at the end has two, one is left */
        uint32_t one = end_of(first), two = end_of(second);
        CHECK((one == FAB_CANCELLED && two == FAB_DONE) || (one == FAB_DONE && two == FAB_PENDING),
              "round %u: %u and %u", round, one, two);
        CHECK(fab_imm_free(engine, imm) == 1, "round %u: one of three is nobody's", round);
        CHECK(end_of(second) == (two == FAB_DONE ? FAB_DONE : FAB_CANCELLED));
        fab_event event[4];
        int n = fab_events_wait(engine, event, 4, 0);
        CHECK(n == 2 && event[0].id != event[1].id, "%d events for two expectations", n);
        CHECK(fab_expect_release(engine, (uint64_t)first) == 0 && fab_expect_release(engine, (uint64_t)second) == 0);
    }
}

/* ---- C4: freed and taken again while arrivals of the old owner are under way ------------------------------------------- */

static void late_arrivals_are_stray(litmus_thread *self) {
    for (uint32_t round = 0; round < LITMUS_ROUNDS(4000); round++) {
        uint64_t stray = 0;
        int64_t kept = 0, next = -1;
        if (self->index == OWNER) {
            int64_t got = fab_imm_alloc(engine);
            CHECK(got >= 0);
            imm = (uint32_t)got;
            stray = atomic_load(&engine->imms.stray);
        }
        litmus_meet(&gate);
        litmus_pause(xorshift(&self->rng) % 256);
        if (self->index == OWNER) {
            kept = fab_imm_free(engine, imm);
            next = fab_imm_alloc(engine); /* the table has one slot: the same one, a generation later */
            CHECK(kept >= 0 && next >= 0 && next != (int64_t)imm);
        } else {
            for (int i = 0; i < 4; i++) arrive(imm, 1, 1);
        }
        litmus_meet(&gate);
        if (self->index != OWNER) continue;
        stray = (atomic_load(&engine->imms.stray) - stray) / FAB_IMM_UNIT;
        CHECK(kept + (int64_t)stray == 4 * ARRIVERS, "round %u: %ld kept, %lu stray", round, (long)kept,
              (unsigned long)stray);
        CHECK(fab_imm_count(engine, (uint32_t)next) == 0, "round %u: credited to the next owner", round);
        CHECK(fab_imm_free(engine, (uint32_t)next) == 0);
    }
}

/* ... and of two threads, tight: what arrives is kept or stray, whatever the moment */
static void freed_meanwhile(litmus_thread *self) {
    for (uint32_t round = 0; round < LITMUS_ROUNDS(60000); round++) {
        uint64_t stray = 0;
        int64_t kept = 0;
        if (self->index == 0) {
            imm = (uint32_t)fab_imm_alloc(engine);
            stray = atomic_load(&engine->imms.stray);
        }
        litmus_meet(&pair);
        litmus_pause(xorshift(&self->rng) % 64);
        if (self->index == 0) kept = fab_imm_free(engine, imm);
        else
            for (uint32_t i = 0; i < 8; i++) arrive(imm, 1, 1);
        litmus_meet(&pair);
        if (self->index) continue;
        stray = (atomic_load(&engine->imms.stray) - stray) / FAB_IMM_UNIT;
        CHECK(kept + (int64_t)stray == 8, "round %u: %ld kept, %lu stray", round, (long)kept, (unsigned long)stray);
    }
}

/* ---- single thread: the arithmetic and the limits ------------------------------------------------------------------------ */

/* C4: the shards of a k-way split count one, for every k, in any grouping; a part is not a whole */
static void shards_add_up(void) {
    open_engine(4);
    int64_t got = fab_imm_alloc(engine);
    uint32_t id = (uint32_t)got;
    for (uint32_t k = 1; k <= 8; k++) {
        for (uint32_t part = 1; part < k; part++) {
            arrive(id, k, 1);
            CHECK(fab_imm_count(engine, id) == (int64_t)k - 1, "%u of %u shards", part, k);
        }
        arrive(id, k, 1);
        CHECK(fab_imm_count(engine, id) == (int64_t)k);
    }
    arrive(id, 8, 24); /* merged completions */
    arrive(id, 1, 1000000);
    CHECK(fab_imm_count(engine, id) == 8 + 3 + 1000000);
    CHECK(fab_imm_free(engine, id) == 8 + 3 + 1000000);
    close_engine();
}

/* C4: an identity returns only after 32 generations of its slot; no arrival of the 31 before is credited */
static void generations_wrap_late(void) {
    open_engine(1);
    uint32_t seen[32];
    for (uint32_t i = 0; i < 64; i++) {
        int64_t got = fab_imm_alloc(engine);
        CHECK(got >= 0 && fab_imm_alloc(engine) == -ENOSPC, "a table of one");
        if (i < 32) seen[i] = (uint32_t)got;
        else CHECK((uint32_t)got == seen[i % 32]);
        for (uint32_t k = 0; k < i && i < 32; k++) {
            CHECK(seen[k] != (uint32_t)got, "generation %u again", i);
            arrive(seen[k], 1, 1);
        }
        CHECK(fab_imm_count(engine, (uint32_t)got) == 0);
        CHECK(fab_imm_free(engine, (uint32_t)got) == 0);
        CHECK(fab_imm_free(engine, (uint32_t)got) == -EINVAL, "freed twice");
        arrive((uint32_t)got, 1, 1); /* to nobody */
    }
    CHECK(atomic_load(&engine->imms.stray) == (31 * 32 / 2 + 64) * FAB_IMM_UNIT);
    arrive(0xffffff, 1, 1); /* a slot that does not exist */
    CHECK(atomic_load(&engine->imms.stray) == (31 * 32 / 2 + 65) * FAB_IMM_UNIT);
    close_engine();
    open_engine(4); /* and every other slot has its turn before one comes again */
    for (uint32_t i = 0; i < 16; i++) {
        int64_t got = fab_imm_alloc(engine);
        CHECK(FAB_IMM_SLOT((uint32_t)got) == i % 4 && FAB_IMM_GEN((uint32_t)got) == i / 4);
        CHECK(fab_imm_free(engine, (uint32_t)got) == 0);
    }
    close_engine();
}

/* C3: first come first served, early arrivals count, an expectation of nothing is met at once, the rest is surplus */
static void served_in_order(void) {
    open_engine(2);
    uint32_t id = (uint32_t)fab_imm_alloc(engine);
    int64_t none = fab_expect(engine, id, 0, 0, NULL, 0);
    CHECK(end_of(none) == FAB_DONE);
    arrive(id, 1, 3);
    int64_t x[4];
    for (uint32_t i = 0; i < 4; i++) x[i] = fab_expect(engine, id, i + 1, 0, NULL, 0); /* 1, 3, 6, 10 */
    static const uint32_t reached[] = {1, 3, 6, 10};
    for (uint32_t total = 3; total <= 10; total++) {
        for (uint32_t i = 0; i < 4; i++)
            CHECK(end_of(x[i]) == (reached[i] <= total ? FAB_DONE : FAB_PENDING), "%u arrived, expectation %u", total,
                  i);
        arrive(id, 1, 1);
    }
    CHECK(fab_imm_free(engine, id) == 1);
    CHECK(fab_expect(engine, id, 1, 0, NULL, 0) == -EINVAL, "freed");
    /* whoever gives up lets the next in line have what is there, at once */
    id = (uint32_t)fab_imm_alloc(engine);
    arrive(id, 1, 3);
    int64_t large = fab_expect(engine, id, 4, 0, NULL, 0), small = fab_expect(engine, id, 2, 0, NULL, 0);
    CHECK(end_of(large) == FAB_PENDING && end_of(small) == FAB_PENDING);
    CHECK(fab_expect_cancel(engine, (uint64_t)large) == 0);
    CHECK(end_of(large) == FAB_CANCELLED && end_of(small) == FAB_DONE);
    CHECK(fab_expect_cancel(engine, (uint64_t)small) == 0 && end_of(small) == FAB_DONE, "over is over");
    CHECK(fab_imm_free(engine, id) == 1);
    close_engine();
}

int main(void) {
    shards_add_up();
    generations_wrap_late();
    served_in_order();
    open_engine(64);
    litmus_run(2, one_arrival);
    litmus_run(2, freed_meanwhile);
    litmus_run(THREADS, meet_expectation);
    litmus_run(THREADS, cancel_meets_arrival);
    close_engine();
    open_engine(1);
    litmus_run(THREADS, late_arrivals_are_stray);
    close_engine();
    return 0;
}
