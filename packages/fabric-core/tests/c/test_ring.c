/* The submission ring (ring.h): bounded, first in first out per producer, nothing lost and nothing twice (C1, C8), what
 * the producer wrote is there (C10), and a push is never overlooked by a worker that goes away (R10). */
#include "ring.h"

#include "litmus.h"

static void free_ring(fab_ring *ring) { free(ring->cells); }

/* C8: capacity is exact, a full ring refuses and changes nothing; positions wrap many times */
static void full_is_full(void) {
    fab_ring ring;
    fab_req rq;
    CHECK(fab_ring_init(&ring, 8) == 0);
    uint64_t in = 0, out = 0;
    CHECK(!fab_ring_ready(&ring) && !fab_ring_pop(&ring, &rq), "empty at first");
    for (uint32_t round = 0; round < 1000; round++) {
        for (uint32_t filled = (uint32_t)(in - out); filled < 8; filled++) {
            CHECK(fab_ring_push(&ring, 3, -(int32_t)(in % 1000), &ring, in), "cell %u of 8", filled);
            in++;
        }
        for (int again = 0; again < 3; again++) CHECK(!fab_ring_push(&ring, 9, 9, NULL, UINT64_MAX), "a ninth of 8");
        for (uint32_t take = 1 + round % 8; take; take--) {
            CHECK(fab_ring_ready(&ring));
            CHECK(fab_ring_pop(&ring, &rq));
            CHECK(rq.kind == 3 && rq.ptr == &ring && rq.value == out && rq.arg == -(int32_t)(out % 1000),
                  "%lu came for %lu", (unsigned long)rq.value, (unsigned long)out);
            out++;
        }
    }
    while (out < in) CHECK(fab_ring_pop(&ring, &rq) && rq.value == out++);
    CHECK(!fab_ring_ready(&ring) && !fab_ring_pop(&ring, &rq));
    free_ring(&ring);
}

/* ---- many producers, one consumer, a ring so small that it is full most of the time ----------------- */

enum { PRODUCERS = 4, BATCH = 16 };
#define EACH ((uint32_t)LITMUS_ROUNDS(60000))
static fab_ring shared;
/* What a request points to: plain memory, so that ThreadSanitizer sees a hand-over without release and acquire. The
 * consumer empties it, so that a producer that reuses it too early is seen as well. */
static uint64_t parcel[PRODUCERS][BATCH];
static _Atomic uint32_t taken[PRODUCERS];

static void produce(litmus_thread *self) {
    uint32_t me = self->index;
    for (uint32_t i = 0; i < EACH; i++) {
        while (i - atomic_load_explicit(&taken[me], memory_order_acquire) >= BATCH) sched_yield();
        uint64_t *p = &parcel[me][i % BATCH];
        CHECK(*p == 0, "handed back before it was read");
        *p = (uint64_t)i + 1;
        while (!fab_ring_push(&shared, me + 1, (int32_t)i, p, (uint64_t)me << 32 | i)) sched_yield();
    }
}

static void consume(void) {
    uint32_t next[PRODUCERS] = {0};
    uint64_t until = fab_now() + LITMUS_DEADLINE_NS;
    for (uint64_t got = 0; got < (uint64_t)PRODUCERS * EACH;) {
        fab_req rq;
        if (!fab_ring_pop(&shared, &rq)) {
            CHECK(fab_now() < until, "%lu requests never came", (unsigned long)((uint64_t)PRODUCERS * EACH - got));
            sched_yield();
            continue;
        }
        uint32_t from = (uint32_t)(rq.value >> 32), i = (uint32_t)rq.value;
        CHECK(from < PRODUCERS && i == next[from], "%u came for %u of producer %u", i, next[from], from);
        CHECK(rq.kind == from + 1 && rq.arg == (int32_t)i && rq.ptr == &parcel[from][i % BATCH], "a torn request");
        uint64_t *p = rq.ptr;
        CHECK(*p == (uint64_t)i + 1, "the request is here, what it names is not");
        *p = 0;
        next[from]++;
        atomic_store_explicit(&taken[from], i + 1, memory_order_release);
        got++;
    }
    fab_req rq;
    CHECK(!fab_ring_pop(&shared, &rq), "one more than was pushed");
}

static void produce_or_consume(litmus_thread *self) {
    if (self->index == PRODUCERS) consume();
    else produce(self);
}

static void nothing_lost_nothing_twice(void) {
    CHECK(fab_ring_init(&shared, 8) == 0);
    litmus_run(PRODUCERS + 1, produce_or_consume);
    free_ring(&shared);
}

/* ---- the hand-over: store-buffering litmus -------------------------------------------------------------
 * A submitter pushes and then looks whether somebody is the worker; a worker stops being it and then looks at the ring
 * (fab_group_unlock, sleep_until_something). If both look too early, nobody ever takes the request. */

#define HANDOVERS ((uint32_t)LITMUS_ROUNDS(60000))
static litmus_barrier gate = {.threads = 2};
static FAB_ALIGNED _Atomic uint32_t worker;
static FAB_ALIGNED uint32_t saw_worker;
static FAB_ALIGNED uint32_t saw_request;

static void hand_over(litmus_thread *self) {
    for (uint32_t i = 0; i < HANDOVERS; i++) {
        if (self->index == 0) atomic_store_explicit(&worker, 1, memory_order_relaxed);
        litmus_meet(&gate);
        litmus_pause(xorshift(&self->rng) % 64);
        if (self->index == 0) {
            CHECK(fab_ring_push(&shared, 1, 0, NULL, i));
            saw_worker = atomic_load_explicit(&worker, memory_order_seq_cst);
        } else {
            atomic_store_explicit(&worker, 0, memory_order_seq_cst);
            saw_request = fab_ring_ready(&shared);
        }
        litmus_meet(&gate);
        if (self->index) continue;
        CHECK(!saw_worker || saw_request, "round %u: each left it to the other", i);
        fab_req rq;
        CHECK(fab_ring_pop(&shared, &rq) && rq.value == i);
    }
}

static void no_request_is_overlooked(void) {
    CHECK(fab_ring_init(&shared, 8) == 0);
    litmus_run(2, hand_over);
    free_ring(&shared);
}

int main(void) {
    full_is_full();
    nothing_lost_nothing_twice();
    no_request_is_overlooked();
    return 0;
}
