/* Sequences: a word counts steps, and each submits its own transfers, once, in order, on whichever thread sees it first; what
 * was cancelled, refused or closed submits nothing any more, and everything that was submitted ends. */
#include "sequence.h"

#include "litmus.h"
#include "sides.h"

#include <unistd.h>

enum { STEPS = 64, EACH = 3, LEN = 64 };

static void add(uint64_t word, uint64_t by) {
    atomic_fetch_add_explicit((_Atomic uint64_t *)(uintptr_t)word, by, memory_order_release);
}

/* Step k: two writes of a byte each, and two pages, which change places where k % 4 is 3; of lane k % lanes. */
static fab_sequence *open_steps(side *a, side *b, int64_t imm, uint32_t lanes, uint32_t keep, uint64_t *word) {
    static fab_draft drafts[STEPS * EACH];
    static const uint32_t pages[3] = {0, 1, 0};
    memset(drafts, 0, sizeof drafts);
    for (uint32_t i = 0; i < STEPS * EACH; i++) {
        fab_draft *d = &drafts[i];
        d->local = a->local;
        d->remote = b->remote;
        d->step = i / EACH;
        d->lane = d->step % lanes;
        d->imm = imm;
        d->nic = -1;
        d->len = 1;
        d->loff = d->roff = i;
        if (i % EACH == 2) {
            d->npages = 2;
            d->sidx = pages;
            d->didx = pages + (d->step % 4 == 3);
            d->sstride = d->dstride = STEPS * EACH;
        }
    }
    fab_sequence_opened out;
    fab_sequence *s = fab_sequence_new(a->engine, drafts, STEPS * EACH, STEPS, 0, keep, &out);
    CHECK(s && !out.rc, "%d", out.rc);
    *word = out.word;
    return s;
}

static fab_sequence_state look(fab_sequence *s) {
    fab_sequence_state out;
    fab_sequence_look(s, &out);
    return out;
}

static fab_sequence_state until_ended(side *b, fab_sequence *s, uint32_t steps) {
    for (uint64_t end = fab_now() + 30000 * MS; look(s).ended < steps; sched_yield()) {
        fab_progress(b->engine);
        CHECK(fab_now() < end, "%u steps of %u ended", look(s).ended, steps);
    }
    return look(s);
}

static void open_two(side *a, side *b, uint64_t len, int thread) {
    *a = make_side(2, 3, 0, len, thread, 0);
    *b = make_side(2, 0, 0, len, thread, 0);
    join(a, b);
    for (uint64_t i = 0; i < len; i++) a->mem[i] = (uint8_t)(i * 7 + 1);
}

/* Jumps of any size, on the watcher's thread and on this one: each step once, in order, with times that do not go back. */
static void each_step_once(uint32_t lanes, uint32_t keep) {
    side a, b;
    open_two(&a, &b, 2 * STEPS * EACH, 1);
    int64_t imm = fab_imm_alloc(b.engine);
    uint64_t word, seen[STEPS], posted[STEPS], handles[EACH];
    fab_sequence *s = open_steps(&a, &b, imm, lanes, keep, &word);
    uint32_t rng = 9 + lanes, done = 0, taken = 0;
    CHECK(look(s).submitted == 0 && look(s).ended == 0 && !fab_sequence_take(s, 0, 1, handles, seen, posted));
    while (done < STEPS) {
        uint32_t jump = 1 + xorshift(&rng) % 9;
        if (done + jump > STEPS) jump = STEPS - done;
        done += jump;
        if (xorshift(&rng) % 2) add(word, jump);
        else CHECK(fab_sequence_step(s, done) >= 0);
        while (look(s).submitted < done) sched_yield();
        CHECK(look(s).submitted == done, "%u, not %u", look(s).submitted, done);
    }
    CHECK(fab_sequence_step(s, 0) == 0, "there are no more");
    fab_sequence_state end = until_ended(&b, s, STEPS);
    CHECK(!end.first.phase && !end.waits_for);
    for (uint32_t step = 0; step < STEPS; step++) {
        CHECK(fab_sequence_take(s, step, 1, handles, seen, posted) == 1);
        for (uint32_t i = 0; i < EACH; i++) {
            CHECK(!handles[i] == !keep, "released at its end, or kept");
            if (handles[i]) CHECK(fab_transfer_poll(a.engine, handles[i]) == FAB_DONE);
            if (handles[i]) CHECK(fab_transfer_release(a.engine, handles[i]) == 0);
            taken += handles[i] != 0;
        }
        CHECK(fab_sequence_take(s, step, 1, handles, seen, posted) == 1 && !handles[0], "taken once");
    }
    CHECK(taken == (keep ? STEPS * EACH : 0));
    CHECK(fab_sequence_times(s, seen, posted, 0, STEPS) == STEPS);
    for (uint32_t step = 0; step < STEPS; step++)
        CHECK(seen[step] && posted[step] >= seen[step] && (!step || posted[step] >= posted[step - 1]));
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t at = step * EACH, far = STEPS * EACH, turn = step % 4 == 3 ? far : 0;
        CHECK(b.mem[at] == a.mem[at] && b.mem[at + 1] == a.mem[at + 1], "step %u", step);
        CHECK(b.mem[at + 2] == a.mem[at + 2 + turn] && b.mem[at + 2 + far] == a.mem[at + 2 + far - turn], "step %u",
              step);
        CHECK(!b.mem[far + at] && !b.mem[far + at + 1], "nothing else");
    }
    CHECK(s->items[2].kept.lists == s->items[EACH + 2].kept.lists, "steps share their lists");
    fab_sequence_close(s);
    fab_sequence_close(s);
    CHECK(fab_sequence_step(s, 0) == -EBADF);
    fab_sequence_free(s);
    for (uint64_t end_at = fab_now() + 20000 * MS; fab_imm_count(b.engine, (uint32_t)imm) < STEPS * (EACH + 1);) {
        fab_progress(b.engine); /* the other side has yet to look */
        CHECK(fab_now() < end_at);
    }
    CHECK(fab_imm_free(b.engine, (uint32_t)imm) == STEPS * (EACH + 1), "an immediate for each write");
    CHECK(atomic_load(&a.engine->inflight) == 0);
    drop_side(&a);
    drop_side(&b);
}

/* From the return of a cancel on, nothing of that lane is submitted; the other goes on. */
static void a_lane_is_cancelled(uint32_t under_way) {
    side a, b;
    open_two(&a, &b, 2 * STEPS * EACH, 1);
    uint64_t word, handles[EACH], seen[1], posted[1];
    fab_sequence *s = open_steps(&a, &b, -1, 2, 1, &word);
    CHECK(fab_sequence_step(s, 10) == 10);
    CHECK(fab_sequence_cancel(s, 1, under_way) == (STEPS - 10) / 2 * EACH);
    CHECK(fab_sequence_cancel(s, 1, 0) == (STEPS - 10) / 2 * EACH, "the same again");
    CHECK(fab_sequence_lane(s, 0) == 0 && fab_sequence_lane(s, 1) == -ECANCELED && fab_sequence_lane(s, 2) == -EINVAL);
    uint64_t before = atomic_load(&a.engine->groups[0]->stats.submitted);
    add(word, STEPS - 10);
    until_ended(&b, s, STEPS);
    CHECK(atomic_load(&a.engine->groups[0]->stats.submitted) - before == (STEPS - 10) / 2 * EACH);
    for (uint32_t step = 10; step < STEPS; step++) {
        CHECK(fab_sequence_take(s, step, 1, handles, seen, posted) == 1);
        for (uint32_t i = 0; i < EACH; i++) CHECK(!handles[i] == (step % 2 == 1));
        for (uint32_t i = 0; i < EACH; i++)
            if (handles[i]) fab_transfer_release(a.engine, handles[i]);
        CHECK(b.mem[step * EACH] == (step % 2 ? 0 : a.mem[step * EACH]), "step %u", step);
    }
    CHECK(fab_sequence_cancel(s, -1, 1) == (STEPS - 10) / 2 * EACH);
    fab_sequence_close(s);
    fab_sequence_free(s);
    drop_side(&a);
    drop_side(&b);
}

typedef struct bumping {
    uint64_t word;
    fab_sequence *s;
    uint32_t delay;
} bumping;

static void *bump(void *arg) {
    bumping *bm = arg;
    for (uint32_t i = 0; i < STEPS; i++) {
        if (i % 3) add(bm->word, 1);
        else if (fab_sequence_step(bm->s, 0) < 0) break;
        for (uint32_t n = 0; n < bm->delay; n++) fab_relax();
    }
    return NULL;
}

/* Cancel, close and the engine's close while steps are being submitted. Nothing comes afterwards, everything ends. */
static void ended_in_the_middle(int how) {
    for (uint32_t round = 0; round < 60; round++) {
        side a, b;
        open_two(&a, &b, 2 * STEPS * EACH, 1);
        uint64_t word;
        fab_sequence *s = open_steps(&a, &b, -1, 1, round % 2, &word);
        bumping bm = {word, s, round * 20};
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, bump, &bm) == 0);
        while (look(s).submitted < round % 7) sched_yield();
        if (how == 0) fab_sequence_cancel(s, -1, round % 4 / 2);
        if (how == 1) fab_sequence_close(s);
        if (how == 2) fab_engine_close(a.engine, 5000 * MS);
        uint64_t then = atomic_load(&a.engine->groups[0]->stats.submitted);
        pthread_join(thread, NULL);
        if (how == 0) until_ended(&b, s, STEPS);
        if (how == 2) {
            while (fab_sequence_step(s, 0));
            CHECK(until_ended(&b, s, STEPS).first.phase || then == STEPS * EACH, "a refusal is an error");
        }
        CHECK(atomic_load(&a.engine->groups[0]->stats.submitted) == then, "submitted afterwards");
        fab_sequence_close(s);
        fab_sequence_free(s);
        CHECK(fab_engine_close(a.engine, 5000 * MS) == 0);
        CHECK(atomic_load(&a.engine->inflight) == 0);
        drop_side(&a);
        drop_side(&b);
    }
}

/* A full engine is waited for a little; then the lane ends with the reason, and the steps are counted on. */
static void a_full_engine_ends_it(void) {
    side a, b;
    open_two(&a, &b, 2 * STEPS * EACH, 1);
    for (uint32_t i = 0; i < a.nnics; i++) a.nic[i]->hold = true;
    a.engine->cfg.max_inflight = 8;
    uint64_t word;
    fab_sequence *s = open_steps(&a, &b, -1, 1, 0, &word);
    CHECK(fab_sequence_step(s, 4) == 4);
    fab_sequence_state st = look(s);
    CHECK(st.submitted == 4 && st.first.err == -EAGAIN && !st.first_handle && fab_sequence_lane(s, 0) == -EAGAIN);
    CHECK(atomic_load(&a.engine->inflight) == 8 && !st.ended && st.waits_for == s->items[0].handle);
    CHECK(fab_sequence_cancel(s, -1, 1) == STEPS * EACH - 8);
    st = until_ended(&b, s, 4);
    CHECK(st.first.err == -EAGAIN, "the first counts: %d", st.first.err);
    add(word, 60);
    until_ended(&b, s, STEPS);
    CHECK(atomic_load(&a.engine->groups[0]->stats.submitted) == 8);
    fab_sequence_close(s);
    fab_sequence_free(s);
    drop_side(&a);
    drop_side(&b);
}

static void hold_to_a_deadline(void) {
    side a, b;
    open_two(&a, &b, 64, 1);
    fab_draft d[2] = {
        {.local = a.local, .remote = b.remote, .len = 8, .imm = -1, .nic = -1, .until_ns = fab_now() + 3600000 * MS},
        {.local = a.local, .remote = b.remote, .len = 8, .imm = -1, .nic = -1, .until_ns = 1, .step = 1}};
    fab_sequence_opened out;
    fab_sequence *s = fab_sequence_new(a.engine, d, 2, 2, 0, 1, &out);
    CHECK(s);
    CHECK(fab_sequence_step(s, 0) == 1 && !look(s).first.phase);
    CHECK(fab_sequence_step(s, 0) == 1 && look(s).first.err == -ETIME && look(s).first.phase == FAB_FAILED);
    until_ended(&b, s, 2);
    uint64_t kept = s->items[0].handle;
    CHECK(fab_transfer_poll(a.engine, kept) == FAB_DONE);
    fab_sequence_close(s);
    fab_sequence_free(s);
    CHECK(fab_transfer_poll(a.engine, kept) == -EBADF, "nobody took it: released");
    d[1].step = 0; /* what cannot be is told at once, and which it was */
    d[1].roff = 60;
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 0, 0, &out) && out.rc == -ERANGE && out.item == 1);
    d[1].roff = 0;
    d[0].step = 1;
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 0, 0, &out) && out.rc == -EINVAL && out.item == 1, "out of order");
    d[1].step = 2;
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 0, 0, &out) && out.rc == -EINVAL && out.item == 1, "no such step");
    d[1].step = 1;
    d[1].lane = 65536;
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 0, 0, &out) && out.rc == -EINVAL && out.item == 1, "no such lane");
    d[1].lane = 0;
    CHECK(!fab_sequence_new(a.engine, d, 2, 0, 0, 0, &out) && out.rc == -EINVAL, "no steps");
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 4, 0, &out) && out.rc == -EINVAL, "a word that is not aligned");
    d[1].local = 12345;
    CHECK(!fab_sequence_new(a.engine, d, 2, 2, 0, 0, &out) && out.rc == -EBADF && out.item == 1);
    drop_side(&a);
    drop_side(&b);
}

int main(void) {
    (void)run_until;
    each_step_once(1, 0);
    each_step_once(3, 1);
    a_lane_is_cancelled(0);
    a_lane_is_cancelled(1);
    for (int how = 0; how < 3; how++) ended_in_the_middle(how);
    a_full_engine_ends_it();
    hold_to_a_deadline();
    return 0;
}
